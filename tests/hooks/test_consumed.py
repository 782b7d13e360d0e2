"""What the update consumed: each loop runs again from captured gradients and options, with the same bits.

Each test also shows that capture anywhere else gives other bits.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from captured import Captured, gradient_from
from ranked import run_ranks, values
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from toys import forward, net

import lightck
from lightck.errors import UnsupportedError
from lightck.hooks.captured_update import CopyResult, GradientClass
from lightck.state.consumed_update import Implementation

STEPS = 6
_open: list[Captured] = []


def captured(model: nn.Module, *optimizers: torch.optim.Optimizer, module: nn.Module | None = None) -> Captured:
    training = Captured(model, *optimizers, module=module)
    _open.append(training)
    return training


@pytest.fixture(autouse=True)
def _no_hooks_are_left() -> Iterator[None]:
    yield
    while _open:
        _open.pop().close()


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, **options)


def momentum(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **options)


def iterate(
    training: Captured,
    *,
    edit: Callable[[int], None] = lambda number: None,
    after: Callable[[int], None] = lambda number: None,
    set_to_none: bool = True,
) -> None:
    """``edit``: changes gradients between the backward pass and the step. ``after``: runs after the step."""
    (optimizer,) = training.optimizers
    for number in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        forward(training.model, number).backward()
        training.take_after_backward()
        edit(number)
        optimizer.step()
        after(number)


def kinds(training: Captured, number: int) -> set[GradientClass]:
    return {gradient.kind for gradient in training.copies.updates[number].gradients()}


# -- loops, each wrong if captured elsewhere -------------------------------------------------------------------------


def test_a_plain_loop_copies_in_the_background():
    model = net()
    training = captured(model, adamw(model))
    iterate(training)
    training.finish()
    assert kinds(training, 0) == {GradientClass.UNOBSERVED}
    assert all(kinds(training, number) == {GradientClass.OWNED} for number in range(1, STEPS))
    assert training.copies.are_due == [["0.weight", "0.bias", "2.weight", "2.bias"]]  # the first ones only


@pytest.mark.parametrize(
    "clip",
    [
        lambda p: torch.nn.utils.clip_grad_norm_(p, 0.1),
        lambda p: torch.nn.utils.clip_grad_norm_(p, 0.1, foreach=True),
        lambda p: torch.nn.utils.clip_grad_value_(p, 0.01),
    ],
    ids=["norm", "norm foreach", "value"],
)
def test_clipped_gradients(clip):
    model = net()
    training = captured(model, momentum(model))
    iterate(training, edit=lambda _: clip(model.parameters()))
    training.finish()
    assert training.backward_differs()


@pytest.mark.parametrize("clips", [False, True], ids=["step unscales", "unscale_ and clip"])
@pytest.mark.parametrize("fused", [False, True], ids=["for-loop", "fused"])
def test_scaled_gradients_with_skipped_steps(clips, fused):
    model = net()
    optimizer = adamw(model, fused=fused)
    training = captured(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = forward(model, number) * (float("inf") if number in (1, 4) else 1.0)
        scaler.scale(loss).backward()
        if number not in (1, 4):
            training.take_after_backward()
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    training.finish()
    assert len(training.copies.updates) == STEPS - 2
    assert not training.copies.steps_discarded  # nothing was taken, and copied, in vain
    steps = [update.optimizer_steps[0] for update in training.copies.updates]
    if fused and not clips:
        assert [float(step.grad_scale) for step in steps] == [8.0, 4.0, 4.0, 4.0]
        assert {gradient.kind for step in steps for gradient in step.present_gradients()} == {
            GradientClass.WRITTEN_BY_STEP
        }
        assert training.elsewhere_differs(training.from_late)
    else:
        assert all(step.grad_scale is None for step in steps)
        assert training.backward_differs()


def test_accumulated_gradients():
    model = net()
    optimizer = adamw(model)
    training = captured(model, optimizer)
    for number in range(STEPS):
        optimizer.zero_grad()
        forward(model, 2 * number).backward()
        training.take_after_backward()  # a hook of the first backward pass sees a part
        forward(model, 2 * number + 1).backward()
        optimizer.step()
    training.finish()
    assert kinds(training, STEPS - 1) == {GradientClass.OWNED}
    assert training.backward_differs()


@pytest.mark.parametrize("is_tensor", [False, True], ids=["number", "tensor"])
def test_options_are_those_before_the_scheduler(is_tensor):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.05) if is_tensor else 0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    training = captured(model, optimizer)
    iterate(training, after=lambda _: scheduler.step())
    training.finish()
    groups = [update.optimizer_steps[0].groups[0] for update in training.copies.updates]
    rates = [float(group.options["lr"]) for group in groups]
    assert rates == pytest.approx([0.05 * 0.5**number for number in range(STEPS)])
    for before, after in itertools.pairwise(groups):
        before.options["lr"] = after.options["lr"]  # as a capture at the boundary would have it
    assert training.elsewhere_differs(training.from_copies)


def test_options_that_can_be_changed_in_place_are_copied():
    model = net()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.05)
    optimizer.param_groups[0]["own"] = {"list": [1, torch.ones(1)]}
    training = captured(model, optimizer)
    iterate(training)
    optimizer.param_groups[0]["own"]["list"][1].zero_()
    optimizer.param_groups[0]["own"]["list"].append(2)
    options = training.copies.updates[0].optimizer_steps[0].groups[0].options
    assert options["own"] == {"list": [1, torch.ones(1)]}
    assert options["param_names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert "params" not in options


def test_an_absent_gradient_is_not_zero():
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = net(seed=1), net(seed=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) + self.second(x) if x[0, 0] > 0 else self.first(x)

    model = Sometimes()
    training = captured(model, momentum(model))
    iterate(training)
    training.finish()
    absent = [
        number
        for number, update in enumerate(training.copies.updates)
        if update.optimizer_steps[0].gradients["second.0.weight"] is None
    ]
    assert 0 < len(absent) < STEPS
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def as_zeros(step: Any, name: str) -> torch.Tensor:
        found = training.from_copies(step, name)
        return torch.zeros(shapes[name]) if found is None else found

    assert training.elsewhere_differs(as_zeros)


class Words(nn.Module):
    def __init__(self, rows: int = 5) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.words, self.out = nn.Embedding(rows, 8, sparse=True), nn.Linear(8, 1)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(numbers)).square()


def words(number: int) -> torch.Tensor:
    return torch.randint(5, (40,), generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("refills", [False, True], ids=["new batches", "one buffer"])
def test_sparse_gradients_as_they_are(refills):
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = captured(model, optimizer)
    buffer = torch.empty(40, dtype=torch.int64)
    for number in range(STEPS):
        inputs = buffer.copy_(words(number)) if refills else words(number)  # the indices are a view of the batch
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
    training.finish()
    gradient = training.copies.updates[3].optimizer_steps[0].gradients["words.weight"]
    assert (gradient.sparse_shape, gradient.is_coalesced, gradient.kind) == ((5, 8), False, GradientClass.OWNED)

    def coalesced(step: Any, name: str) -> torch.Tensor | None:
        found = training.from_copies(step, name)
        return found if found is None or not found.is_sparse else found.coalesce()

    assert training.elsewhere_differs(coalesced)


def test_coalesced_and_empty_sparse_gradients():
    model = Words()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    training = captured(model, optimizer)
    for number in range(STEPS):
        optimizer.zero_grad()
        model(words(number)[: 0 if number == 2 else 40]).sum().backward()
        model.words.weight.grad = model.words.weight.grad.coalesce()
        optimizer.step()
    training.finish()
    gradients = [update.optimizer_steps[0].gradients["words.weight"] for update in training.copies.updates]
    assert all(gradient.is_coalesced for gradient in gradients)
    assert training.copies.of[gradients[2]][1].shape == (0, 8)


def test_a_layout_that_cannot_be_recorded_is_refused():
    weight = nn.Parameter(torch.eye(3).to_sparse_csr())
    model = nn.ParameterList([weight])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = captured(model, optimizer)
    training.events.remove(training)  # it would copy the model
    weight.grad = torch.eye(3).to_sparse_csr()
    with pytest.raises(UnsupportedError, match=r"gradient of '0' has the layout torch.sparse_csr"):
        optimizer.step()


def test_gradients_that_a_closure_computes():
    model = net()
    optimizer = momentum(model)
    training = captured(model, optimizer)
    before_step: list[dict[str, torch.Tensor]] = []
    for number in range(STEPS):

        def closure(number: int = number) -> torch.Tensor:
            optimizer.zero_grad()
            loss = forward(model, number)
            loss.backward()
            return loss

        before_step.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step(closure)
    training.finish()
    training.after_backward = before_step
    assert training.backward_differs()


def test_a_hook_that_is_registered_late_edits_gradients():
    model = net()
    optimizer = momentum(model)
    training = captured(model, optimizer)
    seen_by_first_hook: list[dict[str, torch.Tensor]] = []

    def halve(*_: object) -> None:
        seen_by_first_hook.append({n: p.grad.clone() for n, p in model.named_parameters()})
        for p in model.parameters():
            p.grad = p.grad / 2

    def add_noise(*_: object) -> None:
        for p in model.parameters():
            p.grad.data.add_(0.125)  # moves no version counter

    for number in range(STEPS):
        if number == 1:
            optimizer.register_step_pre_hook(halve)
        if number == 3:
            optimizer.register_step_pre_hook(add_noise)
        optimizer.zero_grad()
        forward(model, number).backward()
        optimizer.step()
    training.finish()
    training.after_backward = [{}, *seen_by_first_hook]
    assert not training.is_exact(1, training.of_backward(1))
    assert not training.is_exact(STEPS - 1, training.of_backward(STEPS - 1))


def test_a_step_that_writes_gradients():
    model = net()
    training = captured(model, momentum(model, nesterov=True, foreach=True))
    iterate(training)
    training.finish()
    assert kinds(training, STEPS - 1) == {GradientClass.WRITTEN_BY_STEP}
    assert training.elsewhere_differs(training.from_late)


@pytest.mark.parametrize("options", [{"weight_decay": 0.1}, {"maximize": True}], ids=["decay", "maximize"])
def test_nesterov_foreach_that_writes_no_gradients(options):
    model = net()
    training = captured(model, momentum(model, nesterov=True, foreach=True, **options))
    iterate(training)
    training.finish()
    assert kinds(training, STEPS - 1) == {GradientClass.OWNED}
    assert not training.elsewhere_differs(training.from_late)


def test_gradients_that_are_zeroed_in_place(caplog):
    model = net()
    training = captured(model, adamw(model))
    iterate(training, set_to_none=False)
    training.finish()
    assert all(kinds(training, number) == {GradientClass.RECYCLED} for number in range(1, STEPS))
    assert training.elsewhere_differs(training.from_late)
    (line,) = caplog.messages
    assert "Call zero_grad() after each step, without set_to_none=False" in line


@pytest.mark.parametrize("writes_local", [False, True], ids=["DTensor", "local tensor"])
def test_a_write_to_a_dtensor_gradient_is_found(tmp_path, writes_local):
    """A write to a DTensor moves its version counter, and not that of its local tensor."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = torch.ones(64, 4)  # of several blocks, of which one is read in turn
        model = nn.ParameterList([nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])) for _ in range(3)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        training = captured(model, optimizer)
        for number in range(STEPS):
            for p in model:
                p.grad = distribute_tensor(whole * number, mesh, [Shard(0)])
            optimizer.step()
        for p in model:
            (p.grad.to_local() if writes_local else p.grad).mul_(2)
        training.gate()
        found = [{gradient.result for gradient in update.gradients()} for update in training.copies.updates]
        assert found == [{CopyResult.VALIDATED}] * (STEPS - 1) + [{CopyResult.OVERWRITTEN}]
    finally:
        dist.destroy_process_group()


def test_tied_weights_have_one_gradient():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.first, self.second, self.inputs = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(self.inputs(x)).tanh())

    model = Tied()
    training = captured(model, adamw(model))
    iterate(training, edit=lambda _: model.second.weight.grad.mul_(0.5))
    training.finish()
    assert training.backward_differs()
    (step,) = training.copies.updates[2].optimizer_steps
    assert "first.weight" in step.gradients
    assert "second.weight" not in step.gradients
    assert len(list(step.present_gradients())) == len(list(model.parameters()))


def two_optimizers(shares: bool) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = net()
    first, second = model[0], model[2]
    of_second = [*second.parameters(), first.bias] if shares else list(second.parameters())
    optimizers = [
        torch.optim.AdamW(first.parameters(), lr=0.05),
        torch.optim.SGD(of_second, lr=0.05, momentum=0.9),
    ]
    return model, optimizers


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_optimizers_in_the_order_of_their_steps(order):
    model, optimizers = two_optimizers(shares=True)
    training = captured(model, *optimizers)
    for number in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        forward(model, number).backward()
        for index in order:
            optimizers[index].step()
            model[0].bias.grad = model[0].bias.grad * 2  # the other optimizer consumes another gradient
    training.finish()
    assert [step.optimizer for step in training.copies.updates[2].optimizer_steps] == list(order)
    reverse = [copy.copy(update) for update in training.copies.updates]
    for update in reverse:
        object.__setattr__(update, "optimizer_steps", update.optimizer_steps[::-1])
    training.copies.updates = reverse
    assert training.elsewhere_differs(training.from_copies)


def test_an_optimizer_that_steps_twice_in_an_update():
    model, optimizers = two_optimizers(shares=False)
    training = captured(model, *optimizers)
    for number in range(STEPS):
        for part in (0, 0, 1):
            model.zero_grad()
            forward(model, number + part).backward()
            optimizers[part].step()
    training.finish()
    assert [step.optimizer for step in training.copies.updates[2].optimizer_steps] == [0, 0, 1]


class Halved(torch.optim.SGD):
    """A subclass whose ``step`` edits gradients before it calls the ``step`` of its base class."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad * 0.5
        return super().step(closure)


def test_of_nested_steps_the_outermost_counts():
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # from now on SGD.step has hooks of its own
    model = net()
    optimizer = Halved(model.parameters(), lr=0.05, momentum=0.9)
    training = captured(model, optimizer)
    inner: list[dict[str, torch.Tensor]] = []
    optimizer.register_step_pre_hook(lambda *_: inner.append({n: p.grad.clone() for n, p in model.named_parameters()}))
    iterate(training)
    training.finish()
    assert len(inner) == 2 * STEPS
    assert len(training.copies.updates) == STEPS
    training.after_backward = inner[1::2]
    assert training.backward_differs()


class Wrapper(torch.optim.Optimizer):
    """Holds another optimizer, edits the gradients and lets it step, as SAM or Lookahead do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)
        return self.inner.step(closure)


def test_of_a_wrapper_and_the_optimizer_inside_the_wrapper_counts():
    model = net()
    inner = momentum(model)
    wrapper = Wrapper(inner)
    training = captured(model, wrapper, inner)
    for number in range(3):
        wrapper.zero_grad()
        forward(model, number).backward()
        whole = model[0].weight.grad.clone()
        wrapper.step()
        (step,) = training.copies.updates[-1].optimizer_steps
        assert (step.optimizer, step.class_name) == (0, "Wrapper")
        assert torch.equal(training.exact[step.gradients["0.weight"]][0], whole)


def test_an_optimizer_that_is_followed_later():
    model, (first, second) = two_optimizers(shares=False)
    training = captured(model, first)
    training.hooks.report_gradients()  # once more changes nothing
    training.optimizers = first, second
    training.boundary.n_optimizers = 2
    training.hooks.add([second])
    for number in range(STEPS):
        model.zero_grad()
        forward(model, number).backward()
        first.step()
        second.step()
    training.finish()
    assert [len(update.optimizer_steps) for update in training.copies.updates] == [2] * STEPS


def test_nothing_is_held_after_the_end():
    model = net()
    training = captured(model, adamw(model))
    iterate(training)
    gradients = list(training.copies.updates[-1].gradients())
    assert training.capture.held_nbytes
    training.capture.forget()
    assert not training.capture.held_nbytes
    assert {one.result for one in gradients} == {CopyResult.NOT_COPIED}


# -- buckets of DistributedDataParallel ------------------------------------------------------------------------------


def _with_buckets(
    rank: int, bias: bool, zeroes_late: bool = False, accumulates: bool = False
) -> tuple[list[set[GradientClass]], bool]:
    torch.set_num_threads(1)
    module = net(bias=bias) if bias else nn.Sequential(nn.Linear(4, 2, bias=False))
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    optimizer = momentum(module)
    training = Captured(model, optimizer, module=module)
    for number in range(STEPS):
        if not zeroes_late:
            optimizer.zero_grad()
        if accumulates:
            with model.no_sync():
                forward(model, 50 + 2 * number + rank).backward()
        loss = forward(model, 2 * number + rank)
        if zeroes_late:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    forward(model, 100 + rank).backward()  # writes into the buckets
    training.finish()
    return [kinds(training, number) for number in range(STEPS)], training.elsewhere_differs(training.from_late)


@pytest.mark.parametrize(
    ("bias", "accumulates"),
    [(True, False), (False, False), (True, True)],
    ids=["one bucket", "a bucket of one parameter", "accumulation"],
)
def test_views_of_buckets_are_copied_before_the_next_backward(bias, accumulates):
    for found, late_differs in values(run_ranks(2, lambda rank: _with_buckets(rank, bias, accumulates=accumulates))):
        assert found[0] == {GradientClass.UNOBSERVED}
        assert found[1:] == [{GradientClass.VIEW}] * (STEPS - 1)
        assert late_differs


def test_views_of_buckets_that_are_not_none_before_the_backward_are_copied_at_once():
    for found, late_differs in values(run_ranks(2, lambda rank: _with_buckets(rank, True, zeroes_late=True))):
        assert found[-1] == {GradientClass.RECYCLED}
        assert late_differs


# -- steps that are no update, or not known --------------------------------------------------------------------------


def test_a_closure_that_is_called_again_makes_the_update_incomplete():
    class Twice(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            with torch.enable_grad():
                closure()
            return super().step(closure)

    model = net()
    optimizer = Twice(model.parameters(), lr=0.05)
    training = captured(model, optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = forward(model, len(training.exact))
        loss.backward()
        return loss

    optimizer.step(closure)
    (update,) = training.copies.updates
    assert not update.is_complete
    assert "more than once" in update.reasons[0]


def test_a_closure_that_is_not_called_makes_the_update_incomplete():
    class Never(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step()

    model = net()
    optimizer = Never(model.parameters(), lr=0.05)
    training = captured(model, optimizer)
    forward(model).backward()
    optimizer.step(lambda: None)
    (update,) = training.copies.updates
    assert "did not call its closure" in update.reasons[0]
    assert not update.is_complete


def test_a_step_that_raised_belongs_to_no_update():
    class Fails(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise ValueError("of the test")
            return super().step(closure)

    model = net()
    optimizer = Fails(model.parameters(), lr=0.05)
    training = captured(model, optimizer)
    forward(model).backward()
    optimizer.step()
    optimizer.fails = True
    with pytest.raises(ValueError, match="of the test"):
        optimizer.step()
    optimizer.fails = False
    training.before.pop()
    optimizer.zero_grad()
    forward(model, 1).backward()
    optimizer.step()
    assert [step.class_name for step in training.copies.steps_discarded] == ["Fails"]
    training.finish()
    assert [len(update.optimizer_steps) for update in training.copies.updates] == [1, 1]


def test_a_step_that_creates_state_is_no_update():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = net()
    optimizer = adamw(model)
    training = captured(model, optimizer)
    get_optimizer_state_dict(model, optimizer)
    assert not training.copies.updates
    assert not training.capture.held_nbytes
    iterate(training)
    training.finish()


def test_parameters_that_are_added_and_frozen_while_training_goes_on():
    model = net()
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.05)
    training = captured(model, optimizer)

    def change(number: int) -> None:
        if number == 1:
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.01})
        if number == 3:
            model[0].weight.requires_grad_(False)

    iterate(training, after=change)
    training.finish(is_replayed=False)  # no update leads to the state of a parameter that was added
    seen = [sorted(one.name for one in update.gradients()) for update in training.copies.updates]
    everything, frozen = ["0.bias", "0.weight", "2.bias", "2.weight"], ["0.bias", "2.bias", "2.weight"]
    assert seen == [everything[:2], everything[:2], everything, everything, frozen, frozen]
    kind = training.copies.updates[2].optimizer_steps[0].gradients["2.weight"].kind
    assert kind is GradientClass.UNOBSERVED


# -- implementation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "implementation"),
    [({}, "for-loop"), ({"foreach": True}, "foreach"), ({"fused": True}, "fused")],
)
def test_the_implementation_of_each_group(options, implementation):
    model = net()
    optimizer = torch.optim.AdamW(
        [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), **options}], lr=0.05
    )
    if options.get("fused"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    training = captured(model, optimizer)
    iterate(training)
    training.finish()
    assert training.copies.updates[0].optimizer_steps[0].groups[-1].implementation is Implementation(implementation)


# -- in a session ----------------------------------------------------------------------------------------------------


def test_a_session_reports_gradients_to_its_listeners(tmp_path):
    model = net()
    optimizer = adamw(model)
    with lightck.attach(model, tmp_path / "pool", optimizer=optimizer) as session:
        training = Captured(model, optimizer, hooks=session._steps.hooks, events=session._steps.events)
        iterate(training)
        training.finish()
        assert [update.step for update in training.copies.updates] == list(range(1, STEPS + 1))


def test_the_number_of_threads_is_that_of_the_update():
    model, optimizers = two_optimizers(shares=False)
    training = captured(model, *optimizers)
    before = torch.get_num_threads()
    try:
        for threads in ((1, 1), (2, 2), (1, 2)):
            model.zero_grad()
            forward(model).backward()
            for optimizer, number in zip(optimizers, threads, strict=True):
                torch.set_num_threads(number)
                optimizer.step()
    finally:
        torch.set_num_threads(before)
    training.gate()
    assert [update.threads for update in training.copies.updates[:2]] == [1, 2]
    assert [update.is_complete for update in training.copies.updates] == [True, True, False]
    assert "threads" in training.copies.updates[2].reasons[0]


def test_what_is_validated_is_exact():
    """The copies equal what the update consumed, also with inputs that are views, strided or conjugated."""
    torch.manual_seed(8)
    params = [nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))]
    model = nn.ParameterList(params)
    optimizer = torch.optim.SGD(params, lr=0.1)
    training = captured(model, optimizer)
    for _ in range(STEPS):
        params[0].grad = torch.randn(4, 6).t()
        params[1].grad = torch.randn(6, 4, dtype=torch.complex64).conj()
        optimizer.step()
    training.gate()
    for update in training.copies.updates:
        for gradient in update.gradients():
            assert gradient.result is CopyResult.VALIDATED
            expected = gradient_from(gradient, training.exact[gradient])
            assert torch.equal(gradient_from(gradient, training.copies.of[gradient]), expected.resolve_conj())
            assert gradient.strides == ((1, 6) if gradient.name == "0" else (4, 1))
