"""Emulated memories: chosen by name, never by default, and said wherever a speed or a medium is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from toys import BIG, adam, everything, is_step, net, pool_with, train

import lightck
from lightck.pool.storage import emulation
from lightck.pool.storage.emulation import PROFILES, Profile
from lightck.profiler.events import read

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def none_afterwards() -> Iterator[None]:
    yield
    emulation.use(None)


@pytest.mark.parametrize("name", PROFILES)
def test_a_training_on_an_emulated_memory_is_the_same_and_says_so(pool, folder, name):
    emulation.use(name)
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        with session.trace(folder / "run.json"):
            train(model, optimizer, 3)
        assert f"emulated {name}" in str(session.durability)
        assert any("emulat" in reported for reported in session.durability.evidence)
        assert (session.durability.emulated, session.stats().emulated) == (name, name)
    assert f"emulated {name}" in str(read(folder / "run.json").about["medium"])
    checkpoint = lightck.recover(pool)
    assert is_step(checkpoint, everything(model, optimizer))
    assert not session.durability.power, "the promise stays that of the medium"


def test_nothing_is_emulated_unless_asked_for(pool):
    assert emulation.active_profile() is None or os.environ.get(emulation.VARIABLE)
    emulation.use(None)
    with lightck.attach(net(), pool) as session:
        assert "emulated" not in str(session.durability)
        assert session.stats().emulated is None


def test_copies_and_recovery_take_what_the_bandwidth_asks_for(pool):
    """At least: a machine may be slower for other reasons."""
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    payload = 2 * sum(p.nbytes for p in model.parameters())
    slow = Profile("slow", 40_000_000, 80_000_000, 0, 256, "made up")
    emulation.use(slow)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        start = time.perf_counter()
        session.flush()
        assert time.perf_counter() - start >= 0.98 * payload / slow.write
        start = time.perf_counter()
        lightck.recover(pool)
        assert time.perf_counter() - start >= 0.98 * payload / slow.read


def test_an_unknown_memory_is_refused():
    with pytest.raises(ValueError, match="optane-1, optane-6, cxl-ssd, dram"):
        emulation.use("core-memory")


@pytest.mark.parametrize(("name", "status"), [("optane-1", 0), ("core-memory", 2)])
def test_the_variable_chooses_and_the_tools_say_so(pool, name, status):
    pool_with(pool)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), emulation.VARIABLE: name}
    done = subprocess.run(
        [sys.executable, "-m", "lightck", "inspect", str(pool)],
        env=environment,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == status, done.stderr
    assert ("emulated optane-1" in done.stdout) == (status == 0)
    assert ("LIGHTCK_EMULATE" in done.stderr) == (status == 2)
    assert "Traceback" not in done.stderr
