"""Large units of a pool with gradient records are replayed in slices: bit for bit, and with less of each gradient in
memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gradient_trainings import Trained, TrainedPool
from torch import nn
from toys import everything, is_step, poke, same

import lightck
from lightck.errors import PoolIOError
from lightck.pool.format.gradients import SENTINEL_PAGE
from lightck.restore import gradient_state
from lightck.state import unit_update
from lightck.state.unit_update import SLICE_NUMEL

STEPS = 8
SHAPE = (601, 997)
BLOCK = 4 * SLICE_NUMEL
"""As in a pool that a session makes."""
N_SLICES = 3
assert SHAPE[0] * SHAPE[1] / SLICE_NUMEL > N_SLICES - 1


class Wide(nn.Module):
    """One large weight, in an order of memory, and a small one."""

    def __init__(self, order: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        weight = torch.randn(*SHAPE) if order == "rows" else torch.randn(*SHAPE[::-1]).t()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(torch.zeros(SHAPE[0]))

    def forward(self, x: torch.Tensor, is_awake: bool = True) -> torch.Tensor:
        return (x @ self.weight.t() if is_awake else 0.0) + self.bias


def batch(number: int) -> torch.Tensor:
    return torch.randn(2, SHAPE[1], generator=torch.Generator().manual_seed(number))


MAKERS = {
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.05, foreach=False),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=0.05, foreach=True, amsgrad=True),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.05, weight_decay=0.1),
    "asgd": lambda ps: torch.optim.ASGD(ps, lr=0.05),
    "rprop foreach": lambda ps: torch.optim.Rprop(ps, lr=0.05, foreach=True),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True, foreach=False),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=0.05, fused=True, amsgrad=True),
    "adagrad fused": lambda ps: torch.optim.Adagrad(ps, lr=0.05, fused=True),
    "momentum fused": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, fused=True, nesterov=True),
    "momentum foreach": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.1, foreach=True),
}


@pytest.fixture
def train() -> Iterator[Any]:
    opened: list[Trained] = []

    def make(how: str, order: str = "rows", asleep: tuple[int, ...] = ()) -> Trained:
        model = Wide(order)
        found = Trained(model, MAKERS[how](model.parameters()))
        opened.append(found)
        for number in range(STEPS):
            found.update(batch(number), number not in asleep)
        return found

    yield make
    for one in opened:
        one.close()


@pytest.fixture
def read_whole(monkeypatch) -> list[str]:
    """The names of the tensors that are read whole from gradient records."""
    names: list[str] = []
    original = gradient_state._tensor_in_record

    def counted(record: Any, name: str) -> torch.Tensor:
        names.append(name)
        return original(record, name)

    monkeypatch.setattr(gradient_state, "_tensor_in_record", counted)
    return names


def assert_recovers(path: Any, found: Trained, how: str, order: str = "rows", step: int = STEPS) -> None:
    seen = found.steps[step - 1].everything
    model = Wide(order)
    optimizer = MAKERS[how](model.parameters())
    checkpoint = lightck.recover(path, model, optimizer)
    assert checkpoint.step == step
    assert same(everything(model, optimizer), seen)
    assert is_step(lightck.recover(path), seen), "without an optimizer at hand"


@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("how", MAKERS)
def test_large_unit_has_the_bits_of_the_training(pool, train, read_whole, how, order):
    found = train(how, order)
    made = TrainedPool(found, block=BLOCK)
    assert made.base_step("weight", STEPS) < STEPS, "it is replayed"
    assert_recovers(made.write(pool), found, how, order)
    # The elements of a gradient lie in the pool row by row. A gradient in another order of memory is read whole.
    assert ("gradient/weight" in read_whole) == (order == "columns")


@pytest.mark.parametrize("block", [768, 40 << 10, 3 << 18])
def test_slices_hold_whole_blocks_and_pages(pool, train, read_whole, block):
    found = train("nadam")
    assert_recovers(TrainedPool(found, block=block).write(pool), found, "nadam")
    assert "gradient/weight" not in read_whole


def test_steps_without_a_gradient(pool, train, read_whole):
    found = train("adam", asleep=(STEPS - 2,))
    assert_recovers(TrainedPool(found, block=BLOCK).write(pool), found, "adam")
    assert "gradient/weight" not in read_whole


@pytest.mark.parametrize("block", range(N_SLICES))
def test_damage_in_any_slice_of_a_gradient_is_found(pool, train, block):
    found = train("adam")
    made = TrainedPool(found, block=BLOCK)
    path = made.write(pool)
    at = made.in_record("gradient/weight", STEPS) + block * 4 * SLICE_NUMEL
    poke(path, at, bytes([made.data[at] ^ 0x10]))
    assert_recovers(path, found, "adam", step=STEPS - 1)
    (rejected,) = lightck.recover(path).rejected
    expected = f"the gradient record of step {STEPS} cannot be used: block {block} of 'gradient/weight'"
    assert expected in rejected.reason


def test_write_that_nobody_noticed_is_found_by_the_page_of_its_slice(pool, train):
    model = Wide("rows")
    found = Trained(model, optimizer := MAKERS["adam"](model.parameters()))
    try:
        for number in range(STEPS):
            if number == STEPS - 1:
                optimizer.state[model.weight]["exp_avg"].data.mul_(1.5)
            found.update(batch(number))
        made = TrainedPool(found, block=BLOCK)
        assert made.base_step("weight", STEPS) < STEPS
        checkpoint = lightck.recover(made.write(pool))
    finally:
        found.close()
    assert checkpoint.step == STEPS - 1
    assert "'weight' differs from the training after the update of step 8: page 8 of" in checkpoint.rejected[0].reason


def test_each_page_is_compared_with_the_slice_that_holds_it():
    parameter = torch.empty(3 * SLICE_NUMEL - 5)
    parts = [slice(i * SLICE_NUMEL, min((i + 1) * SLICE_NUMEL, parameter.numel())) for i in range(3)]
    for page in range(-(-parameter.nbytes // SENTINEL_PAGE)):
        holding = [part for part in parts if gradient_state._is_in(part, parameter, parameter, page)]
        assert len(holding) == 1
        assert holding[0].start * 4 <= page * SENTINEL_PAGE
        assert min((page + 1) * SENTINEL_PAGE, parameter.nbytes) <= holding[0].stop * 4
    counter = torch.zeros(())
    assert [gradient_state._is_in(part, counter, parameter, 0) for part in parts] == [True, False, False]


@pytest.mark.parametrize("order", ["rows", "columns"], ids=["in slices", "whole"])
def test_lack_of_memory_is_no_damage(pool, train, monkeypatch, order):
    """The newest checkpoint is not skipped, and the next try finds it."""
    found = train("adam", order)
    path = TrainedPool(found, block=BLOCK).write(pool)
    original, calls = unit_update._Step.make, itertools.count()

    def without_memory_once(*args: Any) -> None:
        if next(calls) == 1:
            torch.empty(1 << 50)  # torch's own error
        original(*args)

    monkeypatch.setattr(unit_update._Step, "make", without_memory_once)
    with pytest.raises(PoolIOError, match=r"cannot be replayed: Cannot allocate memory\. Free memory"):
        lightck.recover(path)
    assert_recovers(path, found, "adam", order)
