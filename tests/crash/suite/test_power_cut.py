"""The power is cut at every point of small trainings, and nothing that was promised is lost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import pytest
from crash.cuts import Limits
from crash.oracle import Outcome, Recovered, Refused, recovery
from crash.persistence import MODELS, BlockDevice, PersistentMemory
from crash.recorded import record
from crash.recording import Recording
from crash.simulator import Effort, Simulator
from crash.verdict import disagreement
from sampling import every_second
from workloads import WORKLOADS, pinned

from lightck._native import check, lib
from lightck.pool.format.structures import MIB
from lightck.pool.reader import open_pool
from lightck.pool.slots import Slot, Slots
from lightck.pool.storage import backends
from lightck.pool.storage.pmdk import PmdkBackend

pytestmark = pytest.mark.long

PM, DISK = PersistentMemory(), BlockDevice()
SMALL = Limits(budget=512, metadata=8, payload=4, contents=4, prefixes=2, masks=4)
CLOSELY = Effort(SMALL, again_every=100, verify_every=100, goes_on_every=1500)
FIRST = Effort(SMALL, again_every=1 << 30, violations_max=1)
"""Enough to find one violation."""


def check_all(name: str, folder: Path) -> None:
    """Every model; trainings continue from some images, and from one at least."""
    workload = WORKLOADS[name]
    recording = record(workload, folder / "run.pool")
    simulator = Simulator(recording, str(folder), goes_on=workload.goes_on, verify=disagreement, effort=CLOSELY)
    reports = [simulator.check(model) for model in MODELS]
    for report in reports:
        print(report)
        assert not report.violations, str(report)
        assert report.images > 50
        assert report.distinct > 0
    assert simulator.judged < CLOSELY.goes_on_every or any(report.went_on for report in reports)
    assert any(report.verified for report in reports)


@pytest.mark.parametrize("name", every_second(WORKLOADS))
def test_every_crash_image_recovers_what_was_promised(name: str, folder: Path) -> None:
    check_all(name, folder)


@pytest.mark.parametrize("name", ["two slots", "adoption", "relayout"])
def test_the_same_in_the_arenas_of_a_pmdk_pool(
    name: str, folder: Path, pmdk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTCK_BACKEND", "pmdk")
    monkeypatch.setitem(backends.BACKENDS, "pmdk", PmdkBackend(arena_nbytes=2 * MIB))
    recording = record(WORKLOADS[name], folder / "first.pool")
    assert all(len(tape.places) > 1 for tape in recording)
    check_all(name, folder)


def recovery_with_pin(recording: Recording) -> Callable[[str], Outcome]:
    """Recover the newest checkpoint; refuse it where the file was made for the pin of step 2 and does not hold it."""
    (pin,) = {known for tape in recording for known in tape.expected.values() if known.step == 2}

    def recover(path: str) -> Outcome:
        with closing(open_pool(path)) as pool:
            is_made_for_it = len(pool.superblock.slots) == 3
        held = recovery(path, step=2) if is_made_for_it else None
        if held is not None and (not isinstance(held, Recovered) or held.digest != pin.digest):
            return Refused("PinLost", str(held), True)
        return recovery(path)

    return recover


def test_pinned_checkpoint_is_in_every_image(folder: Path) -> None:
    recording = record(pinned(release=False), folder / "run.pool")
    simulator = Simulator(recording, str(folder), recover=recovery_with_pin(recording), effort=CLOSELY)
    for model in MODELS:
        report = simulator.check(model)
        assert not report.violations, str(report)
        assert report.images > 100


def test_pin_that_is_not_heeded_is_found(folder: Path) -> None:
    def unheeded(slots: Slots, held: frozenset[int]) -> Slot | None:
        free = [s for s in slots.slots if s.index != slots.protected and not s.is_bad and not s.in_flight]
        return min(free, key=slots._sort_key, default=None)

    with patch.object(Slots, "choose", unheeded):
        recording = record(pinned(release=False), folder / "run.pool")
    simulator = Simulator(recording, str(folder), recover=recovery_with_pin(recording), effort=FIRST)
    for model in (PM, DISK):
        assert "PinLost" in str(simulator.check(model))


@pytest.mark.parametrize("isa", every_second(["portable", "sse2"]))
def test_kernels_that_do_not_stream_or_stream_less_keep_the_promise(isa: str, folder: Path) -> None:
    check(lib.lck_isa_set(isa.encode()), "isa_set")
    try:
        recording = record(WORKLOADS["background"], folder / "run.pool")
    finally:
        check(lib.lck_isa_set(b"auto"), "isa_set")
    simulator = Simulator(recording, str(folder), effort=CLOSELY)
    for model in MODELS:
        report = simulator.check(model)
        assert not report.violations, str(report)
