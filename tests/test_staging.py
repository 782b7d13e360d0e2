"""Tensors on a device: sent by host memory while the computation goes on, and exact all the same.

The device is one made of CPU tensors (``slow_lanes.py``): copies arrive late, and nothing else is simulated. That CUDA
does what a lane asks of it is for ``tests/gpu``.
"""

from __future__ import annotations

import gc
import mmap
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import slow_lanes
import torch
from slow_lanes import SlowLane
from torch import nn
from toys import BIG, adam, batch, everything, is_step, killed_child, net, train

import lightck
from lightck import staging
from lightck.errors import BackgroundError, StateChangedError
from lightck.pool.lock import holder_of

SEED = 20261121


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> SlowLane:
    """All tensors are on one device."""
    monkeypatch.delenv("LIGHTCK_CHECK", raising=False)  # then they are copied at the boundary
    print("seed", SEED)
    slow = SlowLane(SEED)
    slow_lanes.install(monkeypatch, lambda tensor: slow)
    return slow


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many groups as there can be, of the smallest tensors too."""
    monkeypatch.setattr(staging, "GROUP_NBYTES_MIN", 1024)


class Normed(nn.Module):
    """Buffers that every forward changes, a tied weight, and a parameter that nothing trains."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(4, BIG), nn.BatchNorm1d(BIG), nn.Linear(BIG, 4)
        self.back = nn.Linear(4, BIG, bias=False)
        self.back.weight = self.one.weight
        self.frozen = nn.Parameter(torch.arange(float(BIG)), requires_grad=False)
        self.register_buffer("history", torch.zeros(BIG))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.one(x) + self.frozen)
        self.history += x.detach().mean(0)
        return self.back(self.two(x))


def normed() -> Normed:
    torch.manual_seed(0)
    return Normed()


@pytest.mark.parametrize("model", [net, lambda: net(BIG), normed], ids=["small", "big", "buffers"])
@pytest.mark.parametrize("slots", [2, 3])
def test_every_step_is_exact(pool, lane, small_groups, model, slots):
    model = model()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, slots=slots) as session:
        for number in range(8):
            train(model, optimizer, 1, start=number)
            seen = everything(model, optimizer)
            session.flush()
            assert is_step(lightck.recover(pool), seen)
    assert lane.sent > 8


@pytest.mark.parametrize("model", [lambda: net(BIG), normed], ids=["big", "buffers"])
@pytest.mark.parametrize("slots", [2, 3, 4])
def test_a_kill_at_any_time_leaves_a_step_that_was(folder, lane, small_groups, model, slots):
    states = states_of(model, 40)
    chosen = random.Random(SEED + slots)
    for number in range(4):
        pool, seen = folder / f"{number}.pool", mmap.mmap(-1, 8)
        killed_child(partial(dies, pool, model(), slots, chosen.uniform(0, 0.3), seen))
        found = lightck.recover(pool)
        assert seen[0] <= found.step
        assert is_step(found, states[found.step])


def states_of(model: Callable[[], nn.Module], steps: int) -> list[dict[str, Any]]:
    """What a training without lightck holds after each step."""
    trained = model()
    optimizer = adam(trained)
    states: list[dict[str, Any]] = [{}]
    for number in range(steps):
        train(trained, optimizer, 1, start=number)
        states.append(everything(trained, optimizer))
    return states


def dies(pool: Path, model: nn.Module, slots: int, seconds: float, seen: mmap.mmap) -> None:
    """Trains for 40 steps, or until it is killed so long after the first commit. ``seen``: the newest known step."""
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, slots=slots)
    killer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    for number in range(40):
        train(model, optimizer, 1, start=number)
        seen[0] = session.committed or 0
        if seen[0] and not killer.is_alive():
            killer.start()
    signal.pause()


def test_the_training_is_not_changed(pool, lane):
    plain, saved = normed(), normed()
    with lightck.attach(saved, pool, optimizer=(optimizer := adam(saved))):
        train(saved, optimizer, 6)
    train(plain, other := adam(plain), 6)
    assert is_step(lightck.recover(pool), everything(plain, other))


def test_host_memory_is_filled_again_only_when_it_was_copied(pool, lane, small_groups, slow_memory, monkeypatch):
    """The engine is slower than the device; and the same without the wait is found."""
    exact = _steps_that_are_exact(pool, lane)
    assert exact == 4

    def never(segment: staging._Segment) -> None:
        segment.arrivals = []

    monkeypatch.setattr(staging, "_free", never)
    assert _steps_that_are_exact(pool.with_name("broken.pool"), lane) < 4


def _steps_that_are_exact(pool, lane) -> int:
    model = net(BIG)
    optimizer = adam(model)
    exact = 0
    with lightck.attach(model, pool, optimizer=optimizer, slots=3) as session:
        for number in range(4):
            train(model, optimizer, 1, start=number)
            seen = everything(model, optimizer)
            try:
                session.flush()
            except StateChangedError:  # the audit saw it first
                continue
            exact += is_step(lightck.recover(pool), seen)
    return exact


def test_what_is_written_while_it_is_under_way_drops_the_version(pool, monkeypatch):
    monkeypatch.delenv("LIGHTCK_CHECK", raising=False)
    slow = SlowLane(SEED, seconds=0.2)
    slow_lanes.install(monkeypatch, lambda tensor: slow)
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 2)
        seen = everything(model, optimizer)
        session.flush()
        train(model, optimizer, 1, start=2)
        session.end_step()
        with torch.no_grad():
            model[0].weight.mul_(1.5)
        train(model, optimizer, 1, start=3)  # the gate sees it
        assert session.stats().skipped == 1
        assert is_step(lightck.recover(pool), seen)
        session.end_step()
        seen = everything(model, optimizer)
        session.flush()
        assert is_step(lightck.recover(pool), seen)
        with torch.no_grad():
            model[0].weight.mul_(1.5)  # now it is sent in order
        train(model, optimizer, 1, start=4)
        assert session.stats().skipped == 1
        assert is_step(lightck.recover(pool), seen)


def begun(pool: Path, steps: int, model: nn.Module) -> tuple[Any, Any, dict[str, Any]]:
    """A session whose newest step is committed, the optimizer, and what that step holds."""
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer)
    train(model, optimizer, steps)
    seen = everything(model, optimizer)
    session.flush()
    return session, optimizer, seen


def grow(model: nn.Module, optimizer: Any) -> None:
    """More tensors than the pool has room for."""
    model.more = nn.Linear(4, 40 * BIG)
    optimizer.add_param_group({"params": model.more.parameters()})


def train_grown(model: Any, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    (model.more(batch(number)).square().mean() + model[:3](batch(number)).square().sum()).backward()
    optimizer.step()


def test_a_device_that_fails_is_told_and_older_versions_stay(pool, lane):
    model = net(BIG)
    session, optimizer, seen = begun(pool, 3, model)
    train(model, optimizer, 1, start=3)
    lane.fails_beside = RuntimeError("lost")
    session.end_step()
    with pytest.raises(BackgroundError, match=r"did not come from their device \(RuntimeError: lost\)") as caught:
        session.flush()
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert is_step(lightck.recover(pool), seen)
    with pytest.raises(BackgroundError):
        session.close()
    assert lightck.recover(pool).step == 3


def test_a_device_that_fails_at_the_boundary_is_told(pool, lane):
    model = normed()
    session, optimizer, seen = begun(pool, 2, model)
    lane.fails = RuntimeError("lost")
    train(model, optimizer, 1, start=2)
    with pytest.raises(BackgroundError, match=r"did not leave their device \(lost\)"):
        session.end_step()
    with pytest.raises(BackgroundError):
        session.close()
    assert is_step(lightck.recover(pool), seen)


def test_tensors_that_need_a_new_layout(pool, lane):
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 2)
        grow(model, optimizer)
        for number in range(2, 5):
            train_grown(model, optimizer, number)
            seen = everything(model, optimizer)
            session.flush()
            assert is_step(lightck.recover(pool), seen)


def test_some_tensors_on_a_device_and_others_not(pool, monkeypatch):
    monkeypatch.delenv("LIGHTCK_CHECK", raising=False)
    slow, other = SlowLane(SEED), SlowLane(SEED + 1)
    model = normed()
    optimizer = adam(model)
    of = {id(model.one.weight): slow, id(model.two.weight): other, id(model.norm.running_mean): other}
    slow_lanes.install(monkeypatch, lambda tensor: of.get(id(tensor)))
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(4):
            train(model, optimizer, 1, start=number)
            seen = everything(model, optimizer)
            session.flush()
            assert is_step(lightck.recover(pool), seen)
    assert slow.sent
    assert other.sent


def test_memory_that_cannot_be_pinned(pool, lane, monkeypatch, caplog):
    def refused(nbytes: int) -> torch.Tensor:
        raise RuntimeError("no more")

    monkeypatch.setattr(lane, "memory", refused)
    model = net(BIG)
    optimizer = adam(model)
    with caplog.at_level("INFO"), lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 3)
    assert is_step(lightck.recover(pool), everything(model, optimizer))
    assert "cannot be pinned (no more)" in caplog.text


def test_under_check_nothing_is_sent(pool, lane, monkeypatch):
    monkeypatch.setenv("LIGHTCK_CHECK", "1")
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 3)
    assert is_step(lightck.recover(pool), everything(model, optimizer))
    assert lane.sent == 0


def test_versions_one_after_the_other_without_an_update_between_them_and_the_next(pool, lane, small_groups):
    """Boundaries without a gate: the memory for what is sent in order is waited for."""
    model = normed()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, slots=4) as session:
        for number in range(6):
            train(model, optimizer, 1, start=number)
            session.end_step()
        seen = everything(model, optimizer)
    assert is_step(lightck.recover(pool), seen)


@pytest.mark.parametrize("change", ["swapped and back", "half"])
def test_memory_that_is_exchanged_is_read_as_it_was(pool, lane, change):
    """What is sent is the memory of the boundary, not what the tensor has by then."""
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(8):
            train(model, optimizer, 1, start=number)
            seen = everything(model, optimizer)
            session.end_step()
            held = {p: p.data for p in model.parameters()}
            for p in held:
                p.data = torch.zeros_like(p.data) if change != "half" else p.data.half()
            time.sleep(0.02)
            for p, data in held.items():
                p.data = data
            session.flush()
            assert is_step(lightck.recover(pool), seen)
        assert session.stats().skipped == 0


def test_a_device_that_fails_while_the_pool_is_laid_out_anew(pool, lane, small_groups):
    """Some groups arrive, one does not: nothing of the version is under way when its new file is given up."""
    model = net(BIG)
    session, optimizer, seen = begun(pool, 2, model)
    grow(model, optimizer)
    train_grown(model, optimizer, 2)
    lane.fails_once = RuntimeError("lost")
    with pytest.raises(BackgroundError, match=r"RuntimeError: lost"):
        session.flush()
    time.sleep(0.1)  # the groups that follow it arrive
    with pytest.raises(BackgroundError):
        session.close()
    assert is_step(lightck.recover(pool), seen)


def test_a_session_that_is_collected_on_the_thread_that_waits_for_devices(pool, lane):
    model = net(BIG)
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer)
    train(model, optimizer, 2)
    seen = everything(model, optimizer)
    collected = threading.Event()

    def collect() -> None:
        assert threading.current_thread().name == "lightck-staging"
        gc.collect()
        collected.set()

    lane.before_send = collect
    session.end_step()
    model.itself = [model]  # a cycle, so that only a collector finds them
    del session, model, optimizer
    assert collected.wait(30)
    lane.before_send = None
    gc.collect()
    deadline = time.monotonic() + 30
    while holder_of(str(pool)) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert is_step(lightck.recover(pool), seen)
    lightck.attach(other := net(BIG), pool, optimizer=adam(other), overwrite=True).close()


@pytest.mark.parametrize("mode", [lambda: torch.device("meta"), torch.inference_mode], ids=["device", "inference"])
def test_a_version_that_is_closed_where_other_tensors_are_made(pool, lane, mode):
    """Under another default device, or inside an evaluation."""
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(3):
            train(model, optimizer, 1, start=number)
            seen = everything(model, optimizer)
            with mode():
                session.flush()
            assert is_step(lightck.recover(pool), seen)
