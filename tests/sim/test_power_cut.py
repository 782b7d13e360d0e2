"""The power is cut at every point of small trainings; and bugs that were planted are found that way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import bugs
import pytest
import toys
from workloads import WORKLOADS, pinned, plain, record

from lightck._native import check, lib
from lightck.pool import backends
from lightck.pool.format import MIB
from lightck.pool.pmdk import PmdkBackend
from lightck.pool.reader import open_pool
from lightck.pool.slots import Slot, Slots
from lightck.testing.oracle import Outcome, Recovered, Refused, recovery
from lightck.testing.persistence import BlockDevice, Model, PersistentMemory
from lightck.testing.recording import Recording
from lightck.testing.simulator import Effort, Simulator, Transform

PM, DISK = PersistentMemory(), BlockDevice()
FIRST = Effort(payload_units=4, shuffles=2, again_every=1 << 30, violations_max=1)
"""Enough to find one violation."""


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_crash_image_recovers_what_was_promised(name: str, folder: Path) -> None:
    workload = WORKLOADS[name]
    recording = record(workload, folder / "run.pool")
    simulator = Simulator(recording, str(folder), goes_on=workload.goes_on)
    for model, goes_on_every in ((PM, 1000), (DISK, 300)):
        simulator.effort = Effort(goes_on_every=goes_on_every)
        report = simulator.check(model)
        print(report)
        assert not report.violations, str(report)
        assert report.images > 100


@pytest.mark.parametrize("name", ["two slots", "adoption"])
def test_the_same_in_the_arenas_of_a_pmdk_pool(
    name: str, folder: Path, pmdk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTCK_BACKEND", "pmdk")
    monkeypatch.setitem(backends.BACKENDS, "pmdk", PmdkBackend(arena_nbytes=2 * MIB))
    workload = WORKLOADS[name]
    recording = record(workload, folder / "run.pool")
    assert all(len(tape.places) > 1 for tape in recording)
    for model in (PM, DISK):
        simulator = Simulator(recording, str(folder), goes_on=workload.goes_on, effort=Effort(goes_on_every=1000))
        report = simulator.check(model)
        assert not report.violations, str(report)
        assert report.images > 100


def recovery_with_pin(recording: Recording) -> Callable[[str], Outcome]:
    """The newest version; refused where the file was made for the pin of step 2 and does not hold it."""
    (pin,) = {known for tape in recording for known in tape.expected.values() if known.step == 2}

    def recover(path: str) -> Outcome:
        with closing(open_pool(path)) as pool:
            is_made_for_it = len(pool.superblock.slots) == 3
        held = recovery(path, step=2) if is_made_for_it else None
        if held is not None and (not isinstance(held, Recovered) or held.digest != pin.digest):
            return Refused("PinLost", str(held), True)
        return recovery(path)

    return recover


def test_pinned_version_is_in_every_image(folder: Path) -> None:
    recording = record(pinned(release=False), folder / "run.pool")
    simulator = Simulator(recording, str(folder), recover=recovery_with_pin(recording))
    for model in (PM, DISK):
        report = simulator.check(model)
        assert not report.violations, str(report)
        assert report.images > 100


def test_pin_that_is_not_heeded_is_found(folder: Path) -> None:
    def unheeded(slots: Slots) -> Slot | None:
        free = [s for s in slots.slots if s.index != slots.protected and not s.is_bad and not s.in_flight]
        return min(free, key=slots._rank, default=None)

    with patch.object(Slots, "choose", unheeded):
        recording = record(pinned(release=False), folder / "run.pool")
    simulator = Simulator(recording, str(folder), recover=recovery_with_pin(recording), effort=FIRST)
    for model in (PM, DISK):
        assert "PinLost" in str(simulator.check(model))


@pytest.mark.parametrize("isa", ["portable", "sse2"])
def test_kernels_that_do_not_stream_or_stream_less_keep_the_promise(isa: str, folder: Path) -> None:
    check(lib.lck_isa_set(isa.encode()), "isa_set")
    try:
        recording = record(WORKLOADS["background"], folder / "run.pool")
    finally:
        check(lib.lck_isa_set(b"auto"), "isa_set")
    report = Simulator(recording, str(folder)).check(PM)
    assert not report.violations, str(report)


# -- planted bugs ----------------------------------------------------------------------------------------------------

PLANTED: list[tuple[Transform, str, Model]] = [
    (bugs.no_fence_before_the_line, "two slots", PM),
    (bugs.no_fence_before_the_line, "two slots", DISK),
    (bugs.no_flush_of_the_manifest, "two slots", PM),
    (bugs.line_never_waited_for, "two slots", PM),
    (bugs.no_sync_after_the_line, "two slots", DISK),
    (bugs.line_in_one_piece, "two slots", PM),
    (bugs.line_in_one_piece, "two slots", DISK),
    (bugs.no_header, "two slots", PM),
    (bugs.header_not_fenced, "two slots", PM),
    (bugs.header_written_once, "two slots", PM),  # on a disk no image is wrong: an older header proves nothing
    (bugs.payload_not_fenced, "background", PM),
    (bugs.payload_after_the_line, "two slots", PM),
    (bugs.payload_after_the_line, "two slots", DISK),
    (bugs.adoption_not_durable, "going back", PM),
    (bugs.adoption_not_durable, "going back", DISK),
    (bugs.published_before_durable, "two slots", PM),
    (bugs.published_before_durable, "two slots", DISK),
    (bugs.tables_not_flushed, "two slots", PM),
    (bugs.acknowledged_at_once, "two slots", PM),
    (bugs.acknowledged_at_once, "two slots", DISK),
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Recording]:
    known: dict[str, Recording] = {}

    def get(name: str) -> Recording:
        if name not in known:
            known[name] = record(WORKLOADS[name], tmp_path_factory.mktemp("recorded") / "run.pool")
        return known[name]

    return get


@pytest.mark.parametrize(("bug", "workload", "model"), PLANTED,
                         ids=[f"{b.__name__}-{m.name.split()[0]}" for b, _, m in PLANTED])  # fmt: skip
def test_a_planted_bug_is_found(
    bug: Transform, workload: str, model: Model, recorded: Callable[[str], Recording], folder: Path
) -> None:
    report = Simulator(recorded(workload), str(folder), effort=FIRST).check(model, bug)
    assert report.violations, str(report)


def test_a_reused_slot_is_found(folder: Path) -> None:
    def protected_too(slots: Slots) -> Slot | None:
        free = [s for s in slots.slots if not s.is_bad and not s.in_flight]
        return free[0] if free else None

    with patch.object(Slots, "choose", protected_too):
        recording = record(plain(2, 2), folder / "run.pool")
    simulator = Simulator(recording, str(folder), effort=FIRST)
    assert simulator.check(PM).violations
    assert simulator.check(DISK).violations


@pytest.fixture
def simulator(recorded: Callable[[str], Recording], folder: Path) -> Iterator[Simulator]:
    return Simulator(recorded("late"), str(folder), effort=Effort(again_every=1, violations_max=1))


def test_a_recovery_that_returns_other_values_is_found(simulator: Simulator) -> None:
    right = simulator.recover

    def wrong(path: str) -> Outcome:
        outcome = right(path)
        return Recovered(outcome.generation, outcome.step, b"other") if isinstance(outcome, Recovered) else outcome

    simulator.recover = wrong
    assert "other values" in str(simulator.check(PM))


def test_a_recovery_that_writes_is_found(simulator: Simulator) -> None:
    right = simulator.recover

    def writes(path: str) -> Outcome:
        outcome = right(path)
        toys.poke(path, 4096, b"\0")
        return outcome

    simulator.recover = writes
    assert "wrote to the file" in str(simulator.check(PM))


def test_a_recovery_that_is_never_the_same_is_found(simulator: Simulator) -> None:
    right, calls = simulator.recover, []

    def fickle(path: str) -> Outcome:
        outcome = right(path)
        calls.append(path)
        if len(calls) % 2 or not isinstance(outcome, Recovered):
            return outcome
        return Recovered(outcome.generation, outcome.step, b"other")

    simulator.recover = fickle
    assert "something else" in str(simulator.check(PM))
