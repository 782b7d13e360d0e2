"""Parameters that share their memory, with ``strategy=Gradients``: the update of one changes the other, so their units
lie whole in each checkpoint, and every checkpoint is that of its step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import crashed, everything, is_step

import lightck
from lightck.errors import DriftError, UnsupportedError

Tie = Callable[[nn.Sequential], None]


def model_of(tie: Tie | None, width: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8), nn.Linear(8, 8))
    if tie is not None:
        tie(model)
    return model


def by_data(model: nn.Sequential) -> None:
    model[4].weight.data = model[0].weight.data


def by_second_parameter(model: nn.Sequential) -> None:
    model[4].weight = nn.Parameter(model[0].weight)


def by_buffer(model: nn.Sequential) -> None:
    model[0].register_buffer("reference", model[4].weight.data)


def by_name(model: nn.Sequential) -> None:
    model[4].weight = model[0].weight


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.01)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
    model(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(
    pool: Path,
    model: nn.Sequential,
    optimizer: torch.optim.Optimizer,
    steps: range,
    tie_at: dict[int, Tie],
    **options: Any,
) -> list[int]:
    """Train, and compare the newest checkpoint of a kill after each step. Returns the steps that differ."""
    wrong = []
    with lightck.attach(
        model, pool, optimizer=optimizer, strategy=lightck.Gradients(base_every=4), **options
    ) as session:
        for number in steps:
            if number in tie_at:
                tie_at[number](model)
            update(model, optimizer, number)
            session.flush()
            found = lightck.recover(crashed(pool))
            if found.step != number or not is_step(found, everything(model, optimizer)) or not found.exact:
                wrong.append(number)
    return wrong


def by_frozen_first(model: nn.Sequential) -> None:
    """What owns the memory is a parameter that no optimizer has."""
    model[0].weight.requires_grad_(False)
    model[4].weight.data = model[0].weight.data


def check_each_step_and_a_resume(pool, tie, make):
    model = model_of(tie)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    assert trained(pool, model, optimizer, range(1, 10), {}) == []
    resumed = model_of(tie)
    other = make([p for p in resumed.parameters() if p.requires_grad])
    assert trained(pool, resumed, other, range(10, 16), {}, resume=True) == []
    for number in range(10, 16):
        update(model, optimizer, number)
    assert str(everything(resumed, other)) == str(everything(model, optimizer))


@pytest.mark.parametrize("make", [adamw, momentum])
@pytest.mark.parametrize("tie", [by_data, by_second_parameter, by_buffer, by_name, by_frozen_first])
def test_parameters_that_share_memory_are_recovered_and_resumed(pool, tie, make):
    check_each_step_and_a_resume(pool, tie, make)


def untie(model: nn.Sequential) -> None:
    model[4].weight.data = model[4].weight.data.clone()


@pytest.mark.parametrize("tie", [by_data, by_buffer])
def test_parameters_that_begin_and_end_to_share_memory_in_mid_training(pool, tie):
    model = model_of(None)
    optimizer = adamw(model.parameters())
    assert trained(pool, model, optimizer, range(1, 20), {7: tie, 13: untie}) == []


def test_a_resume_without_the_sharing_is_drift(pool):
    model = model_of(by_data)
    assert trained(pool, model, adamw(model.parameters()), range(1, 7), {}) == []
    resumed = model_of(None)
    with pytest.raises(DriftError, match=r"4\.weight was tied to model/0\.weight when it was saved"):
        trained(pool, resumed, adamw(resumed.parameters()), range(7, 16), {}, resume=True)


def test_a_good_pool_is_not_replaced_if_everything_shares_memory(pool):
    def make() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        model[1].weight.data = model[0].weight.data
        return model, adamw(model.parameters())

    model, optimizer = make()
    with lightck.attach(model, pool, optimizer=optimizer):
        update(model, optimizer, 1)
    before = pool.read_bytes()
    model, optimizer = make()
    with pytest.raises(UnsupportedError, match=r"share their memory .*Use strategy=FullState"):
        lightck.attach(model, pool, optimizer=optimizer, strategy=lightck.Gradients(base_every=4), resume=True)
    assert pool.read_bytes() == before


# -- memory that is shared in part -------------------------------------------------------------------------------------


def flat_views(model: nn.Sequential, names: tuple[str, ...]) -> nn.Parameter:
    """Make the parameters of these names views of one flat parameter."""
    parameters = [model.get_parameter(name) for name in names]
    flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in parameters]))
    flat.grad = torch.zeros_like(flat)
    start = 0
    for p in parameters:
        p.data = flat.data[start : start + p.numel()].view_as(p)
        p.grad = flat.grad[start : start + p.numel()].view_as(p)
        start += p.numel()
    return flat


class FlatPart:
    """A model of which the first layers are views of one flat parameter, in the model or outside it."""

    def __init__(self, is_registered: bool) -> None:
        self.model, names = model_of(None), ("0.weight", "0.bias", "4.weight")
        self.flat = flat_views(self.model, names)
        rest = [p for name, p in self.model.named_parameters() if name not in names]
        if is_registered:
            self.model.register_parameter("flat", self.flat)
        self.optimizer = adamw([self.flat, *rest])

    def everything(self) -> Any:
        return everything(self.model, self.optimizer), self.flat.detach().clone()

    def update(self, number: int) -> None:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        output = x
        for layer in range(5):
            output = self.model[layer](output)
        output.pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


def flat_trained(training: FlatPart, pool: Path, steps: range, **options: Any) -> list[int]:
    wrong = []
    with lightck.attach(training.model, pool, optimizer=training.optimizer, **options) as session:
        for number in steps:
            training.update(number)
            session.flush()
            found = lightck.recover(crashed(pool))
            state = training.model.state_dict()
            if found.step != number or not all(torch.equal(found.model[name], state[name]) for name in state):
                wrong.append(number)
    return wrong


COMPRESSED = lightck.TopK(0.5)


@pytest.mark.parametrize("compress", [None, COMPRESSED], ids=["dense", "compressed"])
@pytest.mark.parametrize("is_registered", [True, False], ids=["registered", "outside"])
def test_views_of_a_flat_parameter_are_recovered_and_resumed(pool, is_registered, compress):
    strategy = lightck.Gradients(base_every=4, compress=compress)
    training = FlatPart(is_registered)
    assert flat_trained(training, pool, range(1, 10), strategy=strategy) == []
    resumed = FlatPart(is_registered)
    assert flat_trained(resumed, pool, range(10, 16), strategy=strategy, resume=True) == []
    if compress is None:  # else the training without a session consumes other gradients
        for number in range(10, 16):
            training.update(number)
        assert str(resumed.everything()) == str(training.everything())


def test_a_training_whose_parameters_are_all_views_of_a_flat_one_is_refused(pool):
    model = model_of(None)
    flat = flat_views(model, tuple(name for name, _ in model.named_parameters()))
    with pytest.raises(UnsupportedError, match=r"share their memory with each other or with other .*FullState"):
        lightck.attach(model, pool, optimizer=momentum([flat]), strategy=lightck.Gradients(base_every=4))


def by_overlap(model: nn.Sequential) -> None:
    """Two trained parameters with half of their memory in common."""
    both = torch.cat([model[0].weight.detach(), model[4].weight.detach()[4:]])
    model[0].weight.data, model[4].weight.data = both[:8], both[4:]


def by_transposition(model: nn.Sequential) -> None:
    model[4].weight.data = model[0].weight.data.t()


def by_frozen_whole(model: nn.Sequential) -> None:
    """A parameter that no optimizer has, with the memory of trained ones."""
    whole = nn.Parameter(torch.cat([model[0].weight.detach(), model[4].weight.detach()]), requires_grad=False)
    model.get_submodule("2").register_parameter("whole", whole)
    model[0].weight.data, model[4].weight.data = whole.data[:8], whole.data[8:]


def by_part_in_buffer(model: nn.Sequential) -> None:
    model[0].register_buffer("part", model[4].weight.data[2:5])


def by_columns(model: nn.Sequential) -> None:
    """Trained parameters that lie between each other, and share nothing."""
    both = torch.cat([model[0].weight.detach(), model[4].weight.detach()], 1)
    model[0].weight.data, model[4].weight.data = both[:, :8], both[:, 8:]


OVERLAPS = [by_overlap, by_transposition, by_frozen_whole, by_part_in_buffer, by_columns]


@pytest.mark.parametrize("tie", OVERLAPS)
def test_parameters_that_overlap_are_recovered_and_resumed(pool, tie):
    check_each_step_and_a_resume(pool, tie, adamw)


@pytest.mark.parametrize("tie", [by_overlap, by_transposition, by_part_in_buffer, by_columns])
def test_parameters_that_begin_and_end_to_overlap_in_mid_training(pool, tie):
    model = model_of(None)
    optimizer = adamw(model.parameters())
    assert trained(pool, model, optimizer, range(1, 20), {7: tie, 13: untie}) == []


def test_columns_of_one_matrix_share_nothing_and_stay_with_gradients(pool):
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    both = torch.randn(8, 16)
    model[0].weight.data, model[1].weight.data = both[:, :8], both[:, 8:]
    assert trained(pool, model, adamw(model.parameters()), range(1, 8), {}) == []
