"""What an update consumed comes back from its value and its tensors as it was; a malformed value raises an error of the
tree."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from captured import Captured
from hostile_updates import hostile
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from toys import forward, net, same

from lightck.errors import CorruptPoolError, LightckError, StateValueError
from lightck.hooks.captured_update import CapturedUpdate
from lightck.state import values
from lightck.state.consumed_update import ConsumedUpdate, Implementation, SparseGradient
from lightck.state.indexed_gradient import indexed
from lightck.state.update_record import (
    UpdatePacker,
    consumed_update,
    gradient_tensors,
    unrecordable_reason,
    update_value,
)

_open: list[Captured] = []


@pytest.fixture(autouse=True)
def _no_hooks_are_left() -> Iterator[None]:
    yield
    while _open:
        _open.pop().close()


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 3, sparse=True)
        self.out = nn.Linear(3, 2)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, number: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(number)).sum()


def trained(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 2, inputs: Any = None) -> Captured:
    training = Captured(model, *optimizers)
    _open.append(training)
    for number in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = forward(model, number) if inputs is None else model(inputs(number))
        loss.sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * 0.5
    training.gate()
    return training


def words() -> Captured:
    torch.manual_seed(0)
    model = Words()
    optimizers = (
        torch.optim.SGD(model.table.parameters(), 0.1),
        torch.optim.AdamW(
            [*model.out.parameters(), model.unused], lr=0.1, betas=(torch.tensor(0.8), torch.tensor(0.9))
        ),
    )
    return trained(model, *optimizers, inputs=lambda number: torch.tensor([1, number, 1]))


def stored(training: Captured, update: CapturedUpdate) -> dict[str, torch.Tensor]:
    return {
        name: training.copies.of[gradient][number].contiguous() for name, gradient, number in gradient_tensors(update)
    }


def parts(gradient: SparseGradient) -> tuple[Any, ...]:
    return gradient.indices, gradient.values, gradient.size, gradient.is_coalesced


def assert_same(one: ConsumedUpdate, other: ConsumedUpdate) -> None:
    assert (one.step, one.threads, len(one.optimizer_steps)) == (other.step, other.threads, len(other.optimizer_steps))
    for a, b in zip(one.optimizer_steps, other.optimizer_steps, strict=True):
        assert (a.optimizer, a.class_name) == (b.optimizer, b.class_name)
        assert [(g.parameters, g.implementation, dict(g.other_implementations)) for g in a.groups] == [
            (g.parameters, g.implementation, dict(g.other_implementations)) for g in b.groups
        ]
        assert same([dict(g.options) for g in a.groups], [dict(g.options) for g in b.groups])
        assert list(a.gradients) == list(b.gradients)
        assert same([a.grad_scale, a.found_inf], [b.grad_scale, b.found_inf])
        for name in a.gradients:
            x, y = a.gradients[name], b.gradients[name]
            if isinstance(x, SparseGradient):
                assert isinstance(y, SparseGradient)
                assert same(
                    (x.indices, x.values, x.size, x.is_coalesced), (y.indices, y.values, y.size, y.is_coalesced)
                )
            elif x is None or y is None:
                assert x is y
            else:
                assert same(x, y)
                assert x.stride() == y.stride()


def read_back(training: Captured, update: CapturedUpdate, value: object) -> ConsumedUpdate:
    packed = values.pack({"update": value}, path="")
    return consumed_update(values.unpack(packed)["update"], stored(training, update).__getitem__)


# -- there and back --------------------------------------------------------------------------------------------------


def test_sparse_and_absent_gradients_and_tensor_options_come_back():
    training = words()
    for update in training.copies.updates:
        found = read_back(training, update, update_value(update))
        assert_same(found, update.consumed(training.copies.of.__getitem__))
    first = found.optimizer_steps[0].gradients["table.weight"]
    assert isinstance(first, SparseGradient)
    assert not first.is_coalesced
    assert found.optimizer_steps[1].gradients["unused"] is None


def test_gradients_keep_their_strides():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 1)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    training = trained(model, optimizer, inputs=lambda number: torch.ones(2, 3, 4, 4))
    update = training.copies.updates[-1]
    found = read_back(training, update, update_value(update))
    assert_same(found, update.consumed(training.copies.of.__getitem__))
    gradient = found.optimizer_steps[0].gradients["0.weight"]
    assert isinstance(gradient, torch.Tensor)
    assert not gradient.is_contiguous()


def test_learning_rate_that_is_a_tensor_keeps_requires_grad():
    model = net()
    training = trained(model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1)))
    update = training.copies.updates[0]
    (step,) = update.optimizer_steps
    lr = torch.tensor(0.1, requires_grad=True)
    changed = replace(
        update, optimizer_steps=(replace(step, groups=tuple(replace(g, options={"lr": lr}) for g in step.groups)),)
    )
    option = read_back(training, changed, update_value(changed)).optimizer_steps[0].groups[0].options["lr"]
    assert isinstance(option, torch.Tensor)
    assert option.requires_grad


def test_packer_gives_the_same_values_as_one_call_each():
    training, packer = words(), UpdatePacker()
    for update in training.copies.updates:
        assert values.pack(packer.value(update), path="") == values.pack(update_value(update), path="")
    first, second = (packer.value(update) for update in training.copies.updates)
    assert first["steps"][0]["names"] is second["steps"][0]["names"]
    assert first["steps"][0]["options"] != second["steps"][0]["options"]


def test_gradient_is_read_only_when_it_is_asked_for():
    model = net()
    training = trained(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    update, reads = training.copies.updates[0], []

    def read(name: str) -> torch.Tensor:
        reads.append(name)
        return stored(training, update)[name]

    found = consumed_update(update_value(update), read)
    assert len(found.optimizer_steps[0].gradients) == 4
    assert "0.weight" in found.optimizer_steps[0].gradients
    assert {"0.weight"} & found.optimizer_steps[0].gradients.keys()
    assert reads == []
    assert found.optimizer_steps[0].gradients["0.bias"] is not None
    assert reads == ["gradient/0.bias"]


# -- what cannot be stored -------------------------------------------------------------------------------------------


def test_update_that_can_be_stored_has_no_reason():
    assert [unrecordable_reason(update) for update in words().copies.updates] == ["", ""]


def test_parameter_that_is_updated_twice_is_a_reason():
    model = net()
    both = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for _ in range(2)]
    training = trained(model, *both)
    assert "'0.weight' was updated twice" in unrecordable_reason(training.copies.updates[0])


def test_reasons_of_the_capture_come_first():
    update = words().copies.updates[0]
    assert unrecordable_reason(replace(update, reasons=("A sentence.",))) == "A sentence."


def test_gradient_with_gaps_in_its_memory_is_a_reason():
    parameter = nn.Parameter(torch.ones(3))
    model = nn.Module()
    model.register_parameter("p", parameter)
    optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.9)
    training = Captured(model, optimizer)
    _open.append(training)
    parameter.grad = torch.ones(3, 2)[:, 0]
    optimizer.step()
    assert "has gaps or overlaps in its memory (strides [2])" in unrecordable_reason(training.copies.updates[0])


def test_two_gradients_under_one_name_are_a_reason():
    torch.manual_seed(0)
    model = nn.Module()
    model.register_module("a", nn.Embedding(3, 2, sparse=True))
    model.register_parameter("a.weight/values".replace(".", "_"), nn.Parameter(torch.ones(1)))
    training = Captured(model, optimizer := torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    _open.append(training)
    (model.a(torch.tensor([1])).sum() + dict(model.named_parameters())["a_weight/values"].sum()).backward()
    optimizer.step()
    update = training.copies.updates[0]
    assert unrecordable_reason(update) == ""
    for gradient in update.gradients():
        gradient.name = gradient.name.replace("a_weight", "a.weight")
    assert "stored under one name" in unrecordable_reason(update)


def test_nested_tensor_option_with_requires_grad_is_a_reason():
    update = words().copies.updates[0]
    step = update.optimizer_steps[1]
    beta = torch.tensor(0.8, requires_grad=True)
    groups = tuple(replace(group, options={**group.options, "betas": (beta, 0.9)}) for group in step.groups)
    changed = replace(update, optimizer_steps=(replace(step, groups=groups),))
    assert "The option 'betas' of AdamW" in unrecordable_reason(changed)


def test_option_that_cannot_be_stored_is_named():
    update = words().copies.updates[0]
    step = update.optimizer_steps[1]
    groups = tuple(replace(group, options={"hook": print}) for group in step.groups)
    with pytest.raises(StateValueError, match=r"param_groups of AdamW/0/options/hook"):
        update_value(replace(update, optimizer_steps=(replace(step, groups=groups),)))


# -- hostile values --------------------------------------------------------------------------------------------------


@functools.cache
def plain() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The value and the tensors of an update."""
    training = words()
    update = training.copies.updates[0]
    return update_value(update), stored(training, update)


def use(update: ConsumedUpdate) -> None:
    for step in update.optimizer_steps:
        for name in step.gradients:
            assert step.gradients[name] is None or True
        for group in step.groups:
            assert isinstance(group.implementation, Implementation)


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_malformed_value_raises_an_error_of_the_tree(data):
    value, tensors = plain()
    try:
        use(consumed_update(hostile(copy.deepcopy(value), data), tensors.__getitem__))
    except LightckError:
        return


@functools.cache
def compressed() -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, tuple[int, ...]]]:
    """The value, the tensors and the shapes of an update with a gradient in its indexed form."""
    model = net(4)
    training = Captured(model, optimizer := torch.optim.SGD(model.parameters(), 0.1), index=lambda g: indexed(g, 9))
    _open.append(training)
    forward(model, 0).backward()
    model[0].weight.grad[1:] = 0
    optimizer.step()
    training.gate()
    update = training.copies.updates[0]
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return update_value(update), stored(training, update), shapes


def test_gradient_in_its_indexed_form_comes_back():
    value, tensors, shapes = compressed()
    (step,) = consumed_update(value, tensors.__getitem__, shapes.get).optimizer_steps
    model = net(4)
    forward(model, 0).backward()
    model[0].weight.grad[1:] = 0
    for name, p in model.named_parameters():
        assert same(step.gradients[name], p.grad)
    assert value["version"] == 2
    assert tensors["gradient/0.weight/indices"].tolist() == [0, 1, 2, 3, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("shape", [None, (16,), (4, 5), (2**20, 2**20)], ids=str)
def test_gradient_in_its_indexed_form_of_another_shape_is_refused_before_it_is_made(shape):
    value, tensors, shapes = compressed()
    found = consumed_update(value, tensors.__getitem__, {**shapes, "0.weight": shape}.get)
    with pytest.raises(CorruptPoolError, match=r"shape and strides of the gradient of '0.weight' do not fit"):
        use(found)


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_malformed_value_with_indexed_gradients_raises_an_error_of_the_tree(data):
    value, tensors, shapes = compressed()
    try:
        use(consumed_update(hostile(copy.deepcopy(value), data), tensors.__getitem__, shapes.get))
    except LightckError:
        return


@given(shape=st.lists(st.integers(0, 3), max_size=3), dtype=st.sampled_from([torch.int64, torch.float32, torch.bool]))
@settings(max_examples=100, deadline=None)
def test_tensors_that_do_not_fit_raise_an_error_of_the_tree(shape, dtype):
    value, _ = plain()
    try:
        use(consumed_update(value, lambda name: torch.zeros(shape, dtype=dtype)))
    except LightckError:
        return
    raise AssertionError("the parts of the sparse gradient cannot have one shape and dtype")


def test_value_of_a_later_release_is_named():
    value, tensors = plain()
    with pytest.raises(CorruptPoolError, match="saved in format 3, and this lightck reads 1 and 2"):
        consumed_update({**value, "version": 3}, tensors.__getitem__)
