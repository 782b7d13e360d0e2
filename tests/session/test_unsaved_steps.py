"""Steps that save nothing: they read no state, their cost is counted, and the checkpoints between them are exact."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from toys import adam, everything, is_step, net, train

import lightck
from lightck.session.interval import Adaptive
from lightck.state import rng


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each capture of the random states."""
    capture, calls = rng.capture, []
    monkeypatch.setattr(rng, "capture", lambda: (calls.append(1), capture())[1])
    return calls


def test_a_step_that_saves_nothing_reads_no_random_state(pool, captures):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, interval=10) as session:
        train(model, optimizer, 10)
        before = len(captures)
        train(model, optimizer, 8, start=10)  # the first forward closes step 10, which is due
        at_10 = len(captures) - before
        train(model, optimizer, 1, start=18)
        assert (session.step, len(captures) - before) == (19, at_10)
        train(model, optimizer, 1, start=19)
        assert len(captures) - before > at_10, "step 20 is due: its states are read right after the update"


def test_where_end_step_closes_the_states_are_read_once(pool, captures):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for step in range(3):
            train(model, optimizer, 1, start=step)
            session.end_step()
        before = len(captures)
        train(model, optimizer, 1, start=3)
        assert len(captures) == before
        session.end_step()
        assert len(captures) == before + 1


@pytest.mark.parametrize("interval", [2, 3])
def test_the_checkpoints_that_are_due_hold_the_state_right_after_their_update(pool, interval):
    """The forward that closes them comes after draws of the loop and changes buffers."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seen: dict[int, Any] = {}
    session = lightck.attach(model, pool, optimizer=optimizer, interval=interval)
    for step in range(1, 8):
        torch.randn(3)  # at the loop's top
        model(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen[step] = everything(model, optimizer), torch.get_rng_state().clone()
    session.abandon()
    found = lightck.recover(pool)
    assert found.step == max(step for step in seen if step % interval == 0 and step < 7)
    state, random = seen[found.step]
    assert is_step(found, state)
    assert torch.equal(found.rng.torch, random)


def test_the_statistics_count_every_hook_and_torch_s_call_of_it(pool):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, interval=100) as session:
        train(model, optimizer, 2)
        session._steps.hooks.seconds_per_hook = 100.0
        before = session.stats().stall_seconds
        train(model, optimizer, 3, start=2)
        hooks = 6  # before and after the forward; before and after step(), those of this optimizer and those of all
        assert session.stats().stall_seconds - before == pytest.approx(3 * hooks * 100, rel=0.01)
        session._steps.hooks.seconds_per_hook = 0.0


def run(pace: Adaptive, steps: int, own: float, fixed: float) -> tuple[float, float]:
    """Returns the time of the last half of these steps, and lightck's time in it."""
    now = stalled = 0.0
    half = (0.0, 0.0)
    saved = 0
    for step in range(1, steps + 1):
        is_saved = pace.is_due(step, saved)
        saved = step if is_saved else saved
        pace.boundary_passed(now, stalled, is_saved)
        stalled += fixed + 0.01 * is_saved
        now += own + fixed + 0.01 * is_saved
        if step == steps // 2:
            half = now, stalled
    return now - half[0], stalled - half[1]


@pytest.mark.parametrize("fixed", [0.0, 0.0001, 0.0002])
def test_what_the_hooks_take_counts_against_the_budget(caplog, fixed):
    """A checkpoint takes 10 ms, a step 10 ms."""
    pace = Adaptive(lightck.Auto(0.03))
    took, stalled = run(pace, 6000, own=0.01, fixed=fixed)
    assert 0.025 < stalled / took <= 0.0301
    assert not caplog.records
    assert pace.interval == math.ceil(0.01 / (0.03 - fixed / (0.01 + fixed)) / 0.01)


@pytest.mark.parametrize(("fixed", "is_above"), [(0.0001, True), (0.000025, True), (0.00002, False)])
def test_a_fixed_cost_above_the_budget_is_reported_once(caplog, fixed, is_above):
    with caplog.at_level(logging.WARNING, "lightck"):
        run(Adaptive(lightck.Auto(0.03)), 3000, own=0.001, fixed=fixed)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == is_above
    if is_above:
        (share, time), budget = {0.0001: (("9.1 %", "100 us"), "0.19"), 0.000025: (("2.4 %", "25 us"), "0.05")}[fixed]
        assert f"cost {share} of each step ({time})" in said[0]
        assert f"interval=lightck.Auto(budget={budget})" in said[0]
