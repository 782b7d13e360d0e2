"""The campaigns of faults, small: the library passes, and a library with a bug planted in it does not."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import planted_faults
import pytest
from crash.campaign import Order, Tally
from crash.campaigns import exits, full, gradient_full, syscalls, truncations
from crash.campaigns.syscalls import Fault
from crash.campaigns.truncations import Damage
from crash.interpose import EVER, SHORT
from crash.stage import Stage

pytestmark = pytest.mark.long

EIO = errno.EIO


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage(interposed=True, path=str(Path(__file__).parent)) as stage:
        yield stage


@pytest.fixture(params=["file", "pmdk"])
def backend(request) -> str:
    if request.param == "pmdk":
        request.getfixturevalue("pmdk")
    return str(request.param)


def played(
    campaign: ModuleType, stage: Stage, folder: Path, trials: range, backend: str = "file", plant: str | None = None
) -> Tally:
    assert plant is None or hasattr(planted_faults, plant)  # else the stage's process fails, and that is a finding too
    stage.plant = None if plant is None else f"planted_faults:{plant}"
    try:
        tally: Tally = campaign.run(Order(11, trials, backend, str(folder)), stage)
    finally:
        stage.plant = None
    assert "exit code 99" not in findings(tally), "the plant replaces something that does not exist"
    return tally


def findings(tally: Tally) -> str:
    return "\n".join(map(str, tally.findings))


def test_no_failed_system_call_does_harm(stage, folder, backend):
    tally = played(syscalls, stage, folder, range(8), backend)
    assert not tally.findings, findings(tally)
    # Some of the eight faults are for a call that is not made: how many calls there are, threads decide.
    assert tally.counts["calls that failed"] >= 4


BUGS = {
    "short_reads_are_believed": (Fault("memory", "pread", 150, SHORT, EVER), "less than it was asked for"),
    "a_refused_attach_keeps_its_lock": (Fault("memory", "posix_fallocate", 1, EIO, 1), "PoolLockedError"),
    "a_failed_sync_is_good": (Fault("disk", "fdatasync", 5, EIO, EVER), "step"),
    "a_failure_is_reported_once": (Fault("disk", "fdatasync", 5, EIO, EVER), "raised by the step and not by close"),
}


@pytest.mark.parametrize("plant", BUGS)
def test_a_planted_bug_is_found_by_a_failed_system_call(stage, folder, monkeypatch, plant):
    fault, said = BUGS[plant]
    monkeypatch.setattr(syscalls, "_faults", lambda *_: [fault])
    sound = played(syscalls, stage, folder, range(1))
    assert not sound.findings, findings(sound)
    tally = played(syscalls, stage, folder, range(1), plant=plant)
    assert tally.findings
    assert said in findings(tally)


def test_no_cut_or_foreign_file_is_believed(stage, folder, backend):
    tally = played(truncations, stage, folder, range(20, 32), backend)
    assert not tally.findings, findings(tally)


@pytest.mark.parametrize("plant", ["size_is_not_compared", "a_cut_file_is_foreign"])
def test_a_planted_bug_is_found_by_a_cut_file(stage, folder, monkeypatch, plant):
    monkeypatch.setattr(truncations, "_damages", lambda path: [Damage("cut", os.path.getsize(path) - 1, "the end")])
    sound = played(truncations, stage, folder, range(1))
    assert not sound.findings, findings(sound)
    assert played(truncations, stage, folder, range(1), plant=plant).findings


def test_limits_of_the_system_are_reported(stage, folder):
    tally = played(full, stage, folder, range(9))
    assert not tally.findings, findings(tally)
    assert tally.counts["reported"] >= 5


def test_limits_of_the_system_are_reported_with_gradient_records(stage, folder):
    tally = played(gradient_full, stage, folder, range(9))
    assert not tally.findings, findings(tally)
    assert tally.counts["reported"] >= 5


def test_a_planted_bug_is_found_by_a_full_file_system(stage, folder):
    found = findings(played(full, stage, folder, range(3), plant="nothing_is_allocated"))
    assert "space ran out in mid-training" in found


def test_a_training_may_end_in_any_way(stage, folder):
    tally = played(exits, stage, folder, range(9))
    assert not tally.findings, findings(tally)


@pytest.mark.parametrize(("plant", "first"), [("an_interrupt_ends_the_session", 0), ("nothing_is_finished_at_exit", 4)])
def test_a_planted_bug_is_found_by_an_end(stage, folder, plant, first):
    assert played(exits, stage, folder, range(first, first + 1), plant=plant).findings
