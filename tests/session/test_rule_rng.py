"""Rule 8: from which random numbers a resumed training goes on.

Each test kills a training in its middle (by copying the pool's file), resumes it in a model that was built otherwise,
with other random states, and asks that the rest be bit for bit what the unkilled run did.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from toys import crashed, everything, same

import lightck

STEPS = 6


class Noisy(nn.Module):
    """Draws in its forward, from all three global generators."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * (1 + random.random()) + float(np.random.rand())


def fresh(seed: int) -> tuple[Noisy, torch.optim.Optimizer]:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model = Noisy()
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def learn(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


def by_hand(model: nn.Module, optimizer: Any, session: Any) -> Iterator[int]:
    """Batches are drawn in the loop; the checkpoint is closed by the forward."""
    for _ in range(session.step, STEPS):
        learn(model, optimizer, torch.randn(3, 4))
        yield session.step


def with_end_step(model: nn.Module, optimizer: Any, session: Any) -> Iterator[int]:
    for _ in range(session.step, STEPS):
        learn(model, optimizer, torch.randn(3, 4))
        torch.rand(random.randrange(5) + 1)  # the loop's own draws after the update
        session.end_step()
        yield session.step


def with_flush(model: nn.Module, optimizer: Any, session: Any) -> Iterator[int]:
    for _ in range(session.step, STEPS):
        learn(model, optimizer, torch.randn(3, 4))
        torch.rand(random.randrange(5) + 1)
        session.flush()
        yield session.step


def with_parts(model: nn.Module, optimizer: Any, session: Any) -> Iterator[int]:
    """The root's forward never fires: the pre-step hook closes."""
    for _ in range(session.step, STEPS):
        optimizer.zero_grad()
        model.body(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
        yield session.step


def with_loader(model: nn.Module, optimizer: Any, session: Any) -> Iterator[int]:
    data = TensorDataset(torch.arange(20.0).reshape(5, 4))
    loader = session.loader(DataLoader(data, batch_size=2, shuffle=True))
    for _ in range(loader.epoch, 2):
        for _, (x,) in enumerate(loader, loader.start):
            learn(model, optimizer, x)
            yield session.step


def kill_and_resume(pool: Path, run: Any, kill: int, disturb: Any = None) -> tuple[Any, Any, int]:
    """The whole run, and one that was killed when it had made ``kill`` updates and continues from its pool."""
    model, optimizer = fresh(0)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for step in run(model, optimizer, session):
            if step == kill:
                image = crashed(pool)
    whole = everything(model, optimizer)
    model, optimizer = fresh(99)
    with lightck.attach(model, image, optimizer=optimizer, resume=True) as session:
        start = session.step
        if disturb is not None:
            disturb(session)
        for _ in run(model, optimizer, session):
            pass
    return whole, everything(model, optimizer), start


@pytest.mark.parametrize("run", [by_hand, with_end_step, with_flush, with_parts, with_loader])
@pytest.mark.parametrize("kill", [2, 4, 5])
def test_resumed_run_ends_bit_identical(pool, run, kill):
    whole, resumed, start = kill_and_resume(pool, run, kill)
    assert start in (kill - 1, kill)
    assert same(resumed, whole)


def draw(session: Any) -> None:
    """What a DataLoader's iter(), or anything else between attach and the loop, draws."""
    torch.rand(7)
    random.random()
    np.random.rand()


def fixed_batches(model: nn.Module, optimizer: Any, session: Any) -> Iterator[int]:
    for number in range(session.step, STEPS):
        learn(model, optimizer, torch.full((3, 4), float(number)))
        yield session.step


def test_forward_state_is_set_before_the_first_training_forward(pool):
    """The checkpoint was closed by a forward: draws between attach and that forward do not count."""
    whole, resumed, _ = kill_and_resume(pool, fixed_batches, 3, disturb=draw)
    assert same(resumed, whole)


def test_forward_state_is_not_set_by_an_evaluation_and_set_only_once(pool):
    def evaluate(session: Any) -> None:
        model = session._steps.model
        model.eval()
        model(torch.zeros(1, 4))
        model.train()
        with torch.no_grad():
            model(torch.zeros(1, 4))

    whole, resumed, _ = kill_and_resume(pool, fixed_batches, 3, disturb=evaluate)
    assert same(resumed, whole)


def test_state_is_set_once_more_at_the_first_next_of_a_session_loader(pool):
    whole, resumed, _ = kill_and_resume(pool, with_loader, 2, disturb=draw)
    assert same(resumed, whole)


def test_state_is_set_at_attach(pool):
    model, optimizer = fresh(0)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        learn(model, optimizer, torch.randn(3, 4))
        session.end_step()
        expected = (torch.rand(3), random.random(), np.random.rand(3))
    model, optimizer = fresh(99)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True):
        assert same((torch.rand(3), random.random()), expected[:2])
        assert (np.random.rand(3) == expected[2]).all()


def test_post_step_state_is_set_at_attach_where_a_forward_closed_the_checkpoint(pool):
    """The loop draws the next batch again, from where it stood after the update."""
    model, optimizer = fresh(0)
    session = lightck.attach(model, pool, optimizer=optimizer)
    learn(model, optimizer, torch.randn(3, 4))
    x = torch.randn(3, 4)
    model(x)
    session.flush()
    image = crashed(pool)
    session.close()
    model, optimizer = fresh(99)
    with lightck.attach(model, image, optimizer=optimizer, resume=True):
        assert same(torch.randn(3, 4), x)


def test_checkpoint_rng_sets_the_states_by_hand(pool):
    model, optimizer = fresh(0)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        learn(model, optimizer, torch.randn(3, 4))
        session.flush()
        expected = torch.rand(5)
    torch.manual_seed(5)
    lightck.recover(pool).rng.restore()
    assert same(torch.rand(5), expected)


def test_attach_and_recover_draw_nothing(pool):
    model, optimizer = fresh(0)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        session.flush()
        lightck.recover(pool)
    assert same((torch.get_rng_state(), random.getstate()), before[:2])
    assert np.random.get_state()[1].tolist() == before[2]


def test_resume_says_that_a_plain_loader_is_not_exact_in_mid_epoch(pool, caplog):
    caplog.set_level("INFO")
    model, optimizer = fresh(0)
    session = lightck.attach(model, pool, optimizer=optimizer)
    learn(model, optimizer, torch.randn(3, 4))
    model(torch.randn(3, 4))
    session.flush()
    session.close()
    with lightck.attach(model, pool, optimizer=optimizer, resume=True):
        assert "it holds no position in the data" in caplog.text
