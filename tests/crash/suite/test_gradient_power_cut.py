"""The power is cut at every point of small trainings that ``Gradients`` saves: what is recovered was promised."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from crash.cuts import Limits
from crash.gradient_lives import Drawn
from crash.gradient_workloads import GRADIENT_WORKLOADS, with_momentum
from crash.oracle import Refused, recovery
from crash.persistence import MODELS, BlockDevice, Model, PersistentMemory
from crash.recorded import Workload, record
from crash.simulator import Effort, Simulator
from crash.verdict import disagreement
from sampling import every_second

import lightck
from lightck.pool.format.structures import MIB
from lightck.pool.storage import backends
from lightck.pool.storage.pmdk import PmdkBackend
from lightck.strategy.gradients import Gradients

PM, DISK = PersistentMemory(), BlockDevice()
FEW = Effort(
    Limits(budget=8, metadata=2, payload=2, contents=2, prefixes=1, masks=1), goes_on_every=200, verify_every=100
)
MORE = Effort(
    Limits(budget=32, metadata=8, payload=4, contents=4, prefixes=2, masks=4), goes_on_every=400, verify_every=100
)
QUICK = ("two turns", "sleeping", "given up", "adoption", "interval of two", "interval, flushed")


def check(workload: Workload, folder: Path, models: tuple[Model, ...], effort: Effort) -> None:
    """Cut the power under these models; trainings continue from one image at least.

    A recording has as many images as its threads made events, about: each effort goes on more often than its
    workload with the fewest images needs.
    """
    recording = record(workload, folder / "run.pool")
    simulator = Simulator(recording, str(folder), goes_on=workload.goes_on, verify=disagreement, effort=effort)
    reports = [simulator.check(model) for model in models]
    for report in reports:
        print(report)
        assert not report.violations, str(report)
        assert report.images > 50
        assert report.distinct > 0
    assert any(report.went_on for report in reports)
    assert any(report.verified for report in reports)


@pytest.mark.parametrize("name", QUICK)
def test_some_crash_images_recover_what_was_promised(name: str, folder: Path) -> None:
    check(GRADIENT_WORKLOADS[name], folder, (PM,), FEW)


@pytest.mark.long
@pytest.mark.parametrize("name", every_second(GRADIENT_WORKLOADS))
def test_more_crash_images_recover_what_was_promised(name: str, folder: Path) -> None:
    """All models for some trainings. (``python -m crash gradient-power-cut`` tries more.)"""
    check(GRADIENT_WORKLOADS[name], folder, MODELS if name in QUICK[:4] else (PM, DISK), MORE)


@pytest.mark.long
@pytest.mark.parametrize("name", ["three turns", "adoption"])
def test_the_same_in_the_arenas_of_a_pmdk_pool(
    name: str, folder: Path, pmdk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTCK_BACKEND", "pmdk")
    monkeypatch.setitem(backends.BACKENDS, "pmdk", PmdkBackend(arena_nbytes=2 * MIB))
    recording = record(GRADIENT_WORKLOADS[name], folder / "first.pool")
    assert all(len(tape.places) > 1 for tape in recording)
    check(GRADIENT_WORKLOADS[name], folder, (PM,), MORE)


@pytest.mark.long
@pytest.mark.parametrize("seed", [2, 3])
def test_whatever_a_loop_does_between_updates_no_promise_is_broken(seed: int, folder: Path) -> None:
    check(Drawn(seed).workload(), folder, (PM,), FEW)


def test_a_pool_that_holds_no_checkpoint_yet_is_an_error_by_name(folder: Path) -> None:
    """As a kill leaves it before the first commit: nothing is in its commit log."""
    path = folder / "run.pool"
    model, optimizer = with_momentum()
    with lightck.attach(model, path, optimizer=optimizer, strategy=Gradients(2)):
        shutil.copy(path, folder / "killed.pool")
    outcome = recovery(str(folder / "killed.pool"))
    assert isinstance(outcome, Refused)
    assert outcome.error == "NoCheckpointError"


def test_a_training_begins_in_a_pool_that_holds_no_checkpoint_yet(folder: Path) -> None:
    path = folder / "run.pool"
    model, optimizer = with_momentum()
    with lightck.attach(model, path, optimizer=optimizer, strategy=Gradients(2)):
        shutil.copy(path, folder / "killed.pool")
    model, optimizer = with_momentum()
    with lightck.attach(
        model, folder / "killed.pool", optimizer=optimizer, strategy=Gradients(2), resume=True
    ) as session:
        assert session.step == 0
