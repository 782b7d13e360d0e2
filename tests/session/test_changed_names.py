"""Modules that get other names, or new buffers, in mid-training: a checkpoint that closes at the next ``step`` holds
buffers as they were after its update under their present names, and so does one that stores gradients. And buffers that
a loop with several optimizers writes at its top."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from toys import crashed, same

import lightck

CHANGED_AT = 3


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.b = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


def wrap(model: Blocks) -> None:
    model.a = nn.Sequential(model.a, nn.Tanh())


def swap(model: Blocks) -> None:
    model.a, model.b = model.b, model.a


def exchange(model: Blocks) -> None:
    """The parameters themselves, and not their modules."""
    one, other = model.a[0], model.b[0]
    one.weight, other.weight = other.weight, one.weight


def cut(model: Blocks) -> None:
    prune.l1_unstructured(model.a[0], "weight", 0.25)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def parametrized(model: Blocks) -> None:
    parametrize.register_parametrization(model.b[0], "weight", Doubled())


def new_buffer(model: Blocks) -> None:
    model.register_buffer("late", torch.full((3,), 7.0))


Change = Callable[[Blocks], None]


def adams(model: Blocks, *, several: bool) -> list[torch.optim.Optimizer]:
    if several:
        return [torch.optim.Adam(one.parameters(), 0.01) for one in (model.a, model.b)]
    return [torch.optim.Adam(model.parameters(), 0.01)]


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.clone() for name, one in model.state_dict().items()}


def trained(
    pool: Path, change: Change, steps: int, *, several: bool, calls_root: bool, **options: Any
) -> tuple[dict[int, dict[str, torch.Tensor]], list[int]]:
    """Train, and change the model after step ``CHANGED_AT``. Returns the state after each step, and the steps of which
    a kill in the step after them leaves other bytes."""
    model, wrong = Blocks(), []
    optimizers = adams(model, several=several)
    states: dict[int, dict[str, torch.Tensor]] = {}
    with lightck.attach(model, pool, optimizer=optimizers, **options) as session:
        while session.step < steps:
            x = torch.randn(8, 8)
            for each in optimizers:
                each.zero_grad()
            (model(x) if calls_root else model.b(torch.tanh(model.a(x)))).square().mean().backward()
            for number, each in enumerate(optimizers):
                each.step()
                if number == 0 and states:
                    found = lightck.recover(crashed(pool))
                    if not same(dict(found.model), states[found.step]):
                        wrong.append(found.step)
            step = max(states, default=0) + 1
            if step == CHANGED_AT:
                change(model)
            states[step] = state_of(model)
    return states, wrong


PLACES = pytest.mark.parametrize(
    ("several", "calls_root"), [(True, True), (True, False), (False, False), (False, True)]
)


@PLACES
@pytest.mark.parametrize("change", [wrap, swap, cut, parametrized, new_buffer])
def test_a_checkpoint_holds_the_buffers_under_their_present_names(pool, change, several, calls_root):
    states, wrong = trained(pool, change, 7, several=several, calls_root=calls_root)
    assert wrong == []
    found = lightck.recover(pool)
    assert (found.step, same(dict(found.model), states[7])) == (7, True)


@pytest.mark.parametrize("strategy", [lightck.Gradients(base_every=4), lightck.Replica()])
@pytest.mark.parametrize("change", [wrap, swap, cut, parametrized, exchange])
def test_gradients_are_recorded_under_the_present_names(pool, change, strategy):
    states, wrong = trained(pool, change, 9, several=False, calls_root=True, strategy=strategy)
    assert wrong == []
    found = lightck.recover(pool)
    assert (found.step, same(dict(found.model), states[9])) == (9, True)


@pytest.mark.parametrize("strategy", [lightck.FullState(), lightck.Gradients(base_every=4), lightck.Replica()])
@pytest.mark.parametrize("change", [swap, exchange])
def test_the_state_of_an_optimizer_follows_parameters_to_their_new_places(pool, change, strategy):
    """A resume, with the exchange made before attach, goes on like a training that was not interrupted."""

    def run(path: Path, steps: range, *, restarts: bool = False) -> Blocks:
        model = Blocks()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        if restarts:
            change(model)
        with lightck.attach(model, path, optimizer=optimizer, resume=restarts, strategy=strategy):
            for step in steps:
                optimizer.zero_grad()
                model(torch.randn(8, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
                optimizer.step()
                if step == CHANGED_AT and not restarts:
                    change(model)
        return model

    whole = run(pool.with_name("whole.pool"), range(1, 13))
    run(pool, range(1, 8))
    resumed = run(pool, range(8, 13), restarts=True)
    assert same(state_of(resumed), state_of(whole))


# -- the top of a loop -------------------------------------------------------------------------------------------------


class Counts(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros((), dtype=torch.int64))


def counted(pool: Path, steps: int, *, at_top: bool) -> Counts:
    model = Counts()
    optimizers = adams(model, several=True)
    session = lightck.attach(model, pool, optimizer=optimizers, resume=True)
    while session.step < steps:
        if at_top:
            model.n.add_(1)
        for each in optimizers:
            each.zero_grad()
        model(torch.randn(8, 8)).square().mean().backward()
        for each in optimizers:
            each.step()
        if not at_top:
            model.n.add_(1)
    session.abandon()
    return model


def test_a_buffer_that_the_top_of_a_loop_with_several_optimizers_writes_is_named(pool, caplog):
    counted(pool, 4, at_top=True)
    assert "the loop changed n before the model's training forward, in each of its first two iterations" in caplog.text
    caplog.clear()
    counted(pool, 6, at_top=True)
    assert "n changed between the restore and the model's training forward" in caplog.text


def test_a_buffer_that_the_end_of_such_a_loop_writes_is_saved_and_not_named(pool, caplog):
    counted(pool, 4, at_top=False)
    found = lightck.recover(pool)
    assert int(found.model["n"]) == found.step == 3
    assert int(counted(pool, 6, at_top=False).n) == 6
    assert "changed n" not in caplog.text
    assert "n changed" not in caplog.text
