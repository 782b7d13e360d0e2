"""Gradients are copied when their class allows it, released part by part, and compared with what was consumed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from captured import BLOCK, Captured, Copies, gradient_from
from hypothesis import given, note, seed, settings
from hypothesis import strategies as st
from torch import nn
from toys import forward, net, same

from lightck.events import SessionLock, StepEvents, StepListener
from lightck.hooks import gradient_checksums, own_hooks
from lightck.hooks.captured_update import CopyResult, Deadline, GradientClass, HeldGradient
from lightck.hooks.consumed import ConsumedGradients
from lightck.hooks.gradient_checksums import WHOLE_COPIES, GradientChecksums
from lightck.hooks.gradient_classes import GradientHistories, shares_memory
from lightck.hooks.hooks import Hooks
from lightck.state.blocks import checksums
from lightck.stats import Meter

OWNED, VIEW, RECYCLED, WRITTEN, UNOBSERVED = (
    GradientClass.OWNED,
    GradientClass.VIEW,
    GradientClass.RECYCLED,
    GradientClass.WRITTEN_BY_STEP,
    GradientClass.UNOBSERVED,
)


@pytest.fixture
def one() -> Iterator[tuple[nn.Parameter, torch.optim.Optimizer, Captured]]:
    """A training of one parameter, whose gradients the test sets. It has no forward pass."""
    weight = nn.Parameter(torch.zeros(64))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    training = Captured(nn.ParameterList([weight]), optimizer)
    yield weight, optimizer, training
    training.close()


def step(one: Any, gradient: torch.Tensor | None) -> HeldGradient | None:
    """Make an update with this gradient, and return what was captured."""
    weight, optimizer, training = one
    weight.grad = gradient
    optimizer.step()
    return training.copies.updates[-1].optimizer_steps[0].gradients["0"]


def kinds_of(one: Any, gradients: Sequence[torch.Tensor | None]) -> list[GradientClass | None]:
    found = [step(one, gradient) for gradient in gradients]
    return [None if gradient is None else gradient.kind for gradient in found]


# -- classes ---------------------------------------------------------------------------------------------------------


def test_deadlines():
    assert {kind: kind.deadline for kind in GradientClass} == {
        UNOBSERVED: Deadline.NOW,
        OWNED: Deadline.GATE,
        GradientClass.INDEXED: Deadline.GATE,
        VIEW: Deadline.BACKWARD,
        RECYCLED: Deadline.NOW,
        WRITTEN: Deadline.NOW,
    }


def test_new_tensors_are_owned_also_where_gradients_are_absent(one):
    gradients = [torch.ones(64), torch.ones(64), None, torch.ones(64)]
    assert kinds_of(one, gradients) == [UNOBSERVED, OWNED, None, OWNED]


def test_memory_that_torch_gives_again_is_owned():
    """The address of a released gradient is often that of the next one, and says nothing."""
    classes, param = GradientHistories(), nn.Parameter(torch.zeros(64))
    kinds, addresses, same_address = [], set(), False
    for _ in range(100):
        gradient = torch.ones(64)
        kinds.append(classes.observe(param, gradient, gradient, is_written=False, has_forward=True).kind)
        same_address |= gradient.data_ptr() in addresses
        addresses.add(gradient.data_ptr())
        del gradient
    assert same_address
    assert kinds == [UNOBSERVED] + [OWNED] * 99


def test_the_same_tensor_is_recycled_from_then_on(one):
    kept = torch.ones(64)
    assert kinds_of(one, [torch.ones(64), kept, kept, torch.ones(64)]) == [UNOBSERVED, OWNED, RECYCLED, RECYCLED]


@pytest.mark.parametrize(
    "other",
    [
        lambda kept: kept[:64],
        lambda kept: kept.view(2, 64)[1],
        lambda kept: torch.from_numpy(np.asarray(kept)[:64]),
    ],
    ids=["slice", "view", "numpy"],
)
def test_memory_of_others_is_not_owned(one, other):
    """Without a forward pass between, nothing says when the memory is written again."""
    kept = torch.ones(128)
    assert kinds_of(one, [other(kept), other(kept)]) == [UNOBSERVED, RECYCLED]
    one[2].capture.forward_ended()
    assert step(one, other(kept)).kind is VIEW


def test_a_view_of_the_whole_memory_is_not_owned():
    kept = torch.ones(64)
    assert not shares_memory(kept)
    assert shares_memory(kept.view(8, 8))
    assert shares_memory(torch.from_numpy(np.ones(64)))
    assert shares_memory(torch.ones(1).expand(64))
    part = torch.empty(0).set_(torch.ones(128).untyped_storage(), 0, (64,))
    assert shares_memory(part)
    sparse = torch.sparse_coo_tensor(torch.zeros(1, 3, dtype=torch.int64), torch.ones(3, 4), (5, 4))
    assert not shares_memory(sparse)
    values = torch.ones(3, 4)
    assert shares_memory(torch.sparse_coo_tensor(torch.zeros(1, 3, dtype=torch.int64), values, (5, 4)))


def test_a_view_must_be_copied_when_the_forward_has_ended(one):
    _, _, training = one
    kept = torch.ones(128)
    step(one, kept[:64])
    training.capture.forward_ended()
    gradient = step(one, kept[64:])
    assert (gradient.kind, gradient.result) == (VIEW, CopyResult.HELD)
    training.capture.forward_ended()
    assert gradient.result is CopyResult.VALIDATED
    assert training.copies.are_due == [["0"], ["0"]]


def test_a_view_that_is_copied_too_late_is_released_without_a_copy(one):
    _, _, training = one
    kept = torch.ones(128)
    step(one, kept[:64])
    training.capture.forward_ended()
    gradient = step(one, kept[64:])
    training.copies.copies_when_due = False
    training.capture.forward_ended()
    assert (gradient.result, gradient.tensors) == (CopyResult.NOT_COPIED, ())
    assert not training.copies.updates[-1].is_complete


def test_a_parameter_with_the_id_of_another_begins_anew(one):
    weight, optimizer, training = one
    step(one, torch.ones(64))
    other = nn.Parameter(torch.zeros(64))
    histories = training.capture._histories._histories
    histories[id(other)] = histories[id(weight)]  # as if its id were used again
    optimizer.param_groups[0]["params"] = [other]
    optimizer.state.clear()
    training.model[0] = other
    other.grad = torch.ones(64)
    optimizer.step()
    (gradient,) = training.copies.updates[-1].gradients()
    assert gradient.kind is UNOBSERVED


class WritesItself(torch.optim.SGD):
    """An optimizer that is not in the table, and clears gradients through ``.data``."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.data.zero_()
        return result


def test_the_first_step_shows_an_optimizer_that_writes_gradients():
    model = net()
    optimizer = WritesItself(model.parameters(), lr=0.1)
    training = Captured(model, optimizer)
    for number in range(3):
        optimizer.zero_grad()
        forward(model, number).backward()
        optimizer.step()
    training.finish()
    training.close()
    kinds = [{one.kind for one in update.gradients()} for update in training.copies.updates]
    assert kinds == [{UNOBSERVED}, {WRITTEN}, {WRITTEN}]
    assert training.elsewhere_differs(training.from_late)


# -- what was overwritten --------------------------------------------------------------------------------------------


def overwritten(one: Any, n_before: int, write: Any) -> HeldGradient:
    """Make ``n_before`` good updates, and one whose gradient is written before its copy."""
    for _ in range(n_before):
        step(one, torch.rand(64))
        one[2].gate()
    gradient = step(one, torch.rand(64))
    assert gradient.kind is OWNED
    write(one[0].grad)
    one[2].gate()
    return gradient


@pytest.mark.parametrize("n_before", [1, WHOLE_COPIES])
@pytest.mark.parametrize(
    "write",
    [lambda g: g.data.mul_(2), lambda g: g.numpy()[-1:].fill(3), lambda g: g.zero_()],
    ids=["data", "one element", "zero"],
)
def test_a_gradient_that_is_written_before_its_copy_is_reported(one, n_before, write):
    _, _, training = one
    gradient = overwritten(one, n_before, write)
    assert (gradient.result, gradient.tensors) == (CopyResult.OVERWRITTEN, ())
    assert [name for name, _ in training.copies.overwrites] == ["0"]
    assert not training.copies.updates[-1].is_complete
    assert gradient not in training.copies.of
    assert step(one, torch.rand(64)).kind is RECYCLED  # from now on copied at once
    training.gate()
    assert training.copies.updates[-1].is_complete


def test_an_unannounced_write_is_found_in_turn(monkeypatch):
    """After the first records some blocks are compared, other ones each time."""
    monkeypatch.setattr(gradient_checksums, "TURN_NBYTES", BLOCK)
    weight = nn.Parameter(torch.zeros(4 * BLOCK // 4))
    training = Captured(nn.ParameterList([weight]), optimizer := torch.optim.SGD([weight], lr=0.1))
    one = weight, optimizer, training
    for _ in range(1 + WHOLE_COPIES):
        step(one, torch.rand(weight.shape))
        training.gate()
    results = []
    for _ in range(4):
        gradient = step(one, torch.rand(weight.shape))
        weight.grad.numpy()[BLOCK // 4] += 1  # in the second of four blocks
        training.gate()
        results.append(gradient.result)
    training.close()
    assert results.count(CopyResult.OVERWRITTEN) == 1


def test_gradients_are_compared_whole_until_some_were_copied(one):
    """Updates without copies prove nothing."""
    _, _, training = one
    training.copies.copies_when_due = False
    for _ in range(2 * WHOLE_COPIES):
        training.capture.give_up([step(one, torch.rand(64))])
    gradient = step(one, torch.rand(64))
    one[0].grad.numpy()[-1] = 3
    training.gate()
    assert gradient.result is CopyResult.OVERWRITTEN


def test_an_announced_write_is_found_at_once():
    """After the first records too, and whichever block has its turn."""
    weight = nn.Parameter(torch.zeros(8 * BLOCK // 4))
    training = Captured(nn.ParameterList([weight]), optimizer := torch.optim.SGD([weight], lr=0.1))
    one = weight, optimizer, training
    for _ in range(1 + WHOLE_COPIES):
        step(one, torch.rand(weight.shape))
        training.gate()
    gradient = step(one, torch.rand(weight.shape))
    weight.grad[-1] += 1
    training.gate()
    training.close()
    assert gradient.result is CopyResult.OVERWRITTEN


@pytest.mark.parametrize(("n_blocks", "n_updates"), [(1, 150), (2, 90), (7, 25), (1000, 1)])
def test_all_gradients_have_their_turn(monkeypatch, n_blocks, n_updates):
    monkeypatch.setattr(gradient_checksums, "TURN_NBYTES", n_blocks * BLOCK)
    gradients = [HeldGradient(str(i), OWNED, (torch.rand(40 + i),)) for i in range(30)]
    checks, seen = GradientChecksums(BLOCK), set()
    for _ in range(n_updates):
        n_read = 0
        for gradient, blocks in zip(gradients, checks.read(0, gradients, [False] * 30), strict=True):
            of_copy = [checksums(gradient.tensors[0], BLOCK)]
            assert all(one.matches(of_copy) for one in blocks)
            seen |= {(gradient.name, one.first_block + i) for one in blocks for i in range(len(one.checksums))}
            n_read += sum(len(one.checksums) for one in blocks)
        assert n_read <= 2 * n_blocks + 1
    assert seen == {(one.name, i) for one in gradients for i in range(-(-one.tensors[0].nbytes // BLOCK))}
    assert checks.is_partial == (n_blocks < 1000)


def test_what_is_read_in_turn_is_bounded():
    large = [HeldGradient(str(i), OWNED, (torch.zeros(1 << 21),)) for i in range(6)]
    checks = GradientChecksums(1 << 20)
    for _ in range(12):
        n_blocks = [len(one.checksums) for found in checks.read(0, large, [False] * 6) for one in found]
        assert n_blocks == [8, 8]
    assert checks.is_partial


# -- memory ----------------------------------------------------------------------------------------------------------


class Untouched(Copies):
    """Copies nothing by itself."""

    def copies_due_now(self, gradients: Sequence[HeldGradient]) -> None:
        self.are_due.append([gradient.name for gradient in gradients])


def test_gradients_are_released_part_by_part_and_never_more_than_one_set_is_held():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    events = StepEvents(SessionLock())
    hooks = Hooks(events, model, [optimizer], Meter())
    hooks.report_gradients()
    copies = Untouched()
    names = [[name for name, _ in model.named_parameters()]]
    capture = copies.capture = ConsumedGradients(copies, lambda _: names, block=BLOCK)

    class Counts(StepListener):
        def after_step(self, index: int) -> None:
            events.step_ended(len(copies.updates) + 1)

    events.add(Counts())
    events.add(capture)
    one_set = sum(p.nbytes for p in model.parameters())
    for number in range(4):
        optimizer.zero_grad()
        forward(model, number).backward()
        live = [weakref.ref(p.grad) for p in model.parameters()]
        optimizer.step()
        held = list(copies.updates[-1].gradients())
        if number == 0:
            assert not capture.held_nbytes  # no copy of an unobserved gradient is needed, if the checkpoint is full
            assert {gradient.result for gradient in held} == {CopyResult.NOT_COPIED}
        elif number < 3:
            assert capture.held_nbytes == one_set
            optimizer.zero_grad()
            for i, gradient in enumerate(held):
                assert live[i]() is not None
                expected = capture.held_nbytes - gradient.tensors[0].nbytes
                if number == 1:
                    copies.copy([gradient])
                else:
                    capture.give_up([gradient])
                assert capture.held_nbytes == expected
                assert live[i]() is None, "its memory is free as soon as its copy is validated"
    assert capture.held_nbytes == one_set
    last = list(copies.updates[-1].gradients())
    optimizer.step()  # the gate passed, and nobody copied: they are due, and then released
    assert {gradient.result for gradient in last} == {CopyResult.NOT_COPIED}
    assert capture.held_nbytes <= one_set
    own_hooks.remove(hooks.handles)


def test_a_copy_that_is_reported_twice_counts_once(one):
    _, _, training = one
    step(one, torch.ones(64))
    gradient = step(one, torch.ones(64))
    crcs = [checksums(torch.ones(64), BLOCK)]
    assert training.capture.copied(gradient, crcs)
    assert training.capture.copied(gradient, [crcs[0] * 0])
    assert gradient.result is CopyResult.VALIDATED


# -- property --------------------------------------------------------------------------------------------------------

ZERO = st.sampled_from(["none", "none late", "in place", "in place late", "not at all"])
EDIT = st.sampled_from(["nothing", "clip", "data", "replace", "absent", "view"])
AFTER = st.sampled_from(["nothing", "nothing", "copy", "scale", "scale data"])


@seed(20261126)
@settings(max_examples=60, deadline=None, database=None)
@given(
    loop=st.lists(st.tuples(ZERO, EDIT, AFTER), min_size=2, max_size=7),
    kind=st.sampled_from(["sgd", "nesterov foreach", "fused", "closure"]),
)
def test_what_is_validated_is_what_the_update_consumed(loop, kind):
    """Whatever a loop does with its gradients: a copy that counts as right is right, and runs again exactly. (Only the
    first records find an unannounced write at once, so the loop makes it only there.)"""
    note(f"seed 20261126, {kind}, {loop}")
    model = net()
    options = {"nesterov": True, "foreach": True} if kind == "nesterov foreach" else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **options)
    if kind == "fused":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    training = Captured(model, optimizer)
    try:
        for number, (zero, edit, after) in enumerate(loop):
            iteration(training, number, zero, edit, is_closure=kind == "closure")
            if after == "copy":
                training.copies.end()
            elif after != "nothing":
                for p in model.parameters():
                    if p.grad is not None:
                        is_announced = after == "scale" or number > WHOLE_COPIES
                        (p.grad if is_announced else p.grad.data).mul_(2)
        training.gate()
    finally:
        training.close()
    for number, update in enumerate(training.copies.updates):
        for gradient in update.gradients():
            assert gradient.result is not CopyResult.HELD
            if gradient.result is CopyResult.VALIDATED:
                copy, exact = training.copies.of[gradient], training.exact[gradient]
                assert same(gradient_from(gradient, copy), gradient_from(gradient, exact)), gradient
        assert not update.is_complete or training.is_exact(number)


def iteration(training: Captured, number: int, zero: str, edit: str, *, is_closure: bool) -> None:
    model, (optimizer,) = training.model, training.optimizers

    def compute() -> torch.Tensor:
        if zero in ("none", "in place"):
            optimizer.zero_grad(set_to_none=zero == "none")
        loss = forward(model, number)
        if zero in ("none late", "in place late"):
            optimizer.zero_grad(set_to_none=zero == "none late")
        loss.backward()
        edit_gradients(model, edit)
        return loss

    if is_closure:
        optimizer.step(compute)
    else:
        compute()
        optimizer.step()


def edit_gradients(model: nn.Module, edit: str) -> None:
    weight = model[0].weight
    if edit == "clip":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    elif edit == "data":
        weight.grad.data.add_(1)
    elif edit == "replace":
        weight.grad = weight.grad * 2
    elif edit == "absent":
        weight.grad = None
    elif edit == "view":
        weight.grad = torch.cat([weight.grad, weight.grad])[: len(weight)]
