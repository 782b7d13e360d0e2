"""The kill campaigns in small, on both kinds of pools; and that each finds a bug that is planted for it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from crash import campaigns
from crash.campaign import Order, Tally

from lightck.pipeline.current_pool import CurrentPool
from lightck.pool.reader import StoredCheckpoint
from lightck.pool.slots import Slot, Slots
from lightck.pool.storage.file import FileBackend, FileContainer
from lightck.pool.storage.lock import PoolLock
from lightck.pool.writer import PoolWriter
from lightck.restore.contents import MemorySource
from lightck.restore.resume import Resumed
from lightck.session.commits import Commits

pytestmark = pytest.mark.long


def play(name: str, folder: Path, backend: str = "file", trials: range | None = None) -> Tally:
    campaign = campaigns.named(name)
    return campaign.run(Order(1, trials or range(campaign.small), backend, str(folder)))


def found(name: str, folder: Path, trials: Iterable[int]) -> list[str]:
    """What the first of these trials that finds something found."""
    for trial in trials:
        findings = play(name, folder, trials=range(trial, trial + 1)).findings
        if findings:
            return [finding.reason for finding in findings]
    return []


@pytest.fixture(params=["file", "pmdk"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "pmdk":
        request.getfixturevalue("pmdk")
    return str(request.param)


# -- what holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kills"), [("kill-writer", 15), ("kill-training", 6), ("gradient-kills", 6)])
def test_nothing_that_was_acknowledged_is_lost_to_a_kill(folder, backend, name, kills):
    tally = play(name, folder, backend)
    assert not tally.findings
    assert tally.counts["kills"] >= kills


def test_a_kill_and_another_fault_leave_an_exact_checkpoint(folder, backend):
    tally = play("kill-twice", folder, backend)
    assert not tally.findings
    for pair in (
        "in a recovery after a kill",
        "in an adoption after a kill",
        "about a move to a new file",
        "while the pool was made",
    ):
        assert tally.counts[f"kills {pair}"], pair
    assert tally.counts["flips after a kill"]
    assert tally.counts["the file could not grow: refused, the version before is exact"]


def test_a_kill_and_another_fault_leave_a_pool_of_gradient_records_exact(folder):
    tally = play("gradient-kill-twice", folder)
    assert not tally.findings
    for what in (
        "kills in a recovery after a kill",
        "kills in an adoption after a kill",
        "kills in a move, before publish",
        "kills while the pool was made",
        "no room for a new pool: refused, nothing is left",
        "the file could not grow: refused, the version before is exact",
    ):
        assert tally.counts[what], what


def test_so_they_do_in_a_move_of_a_pmdk_pool(folder, pmdk):
    tally = play("gradient-kill-twice", folder, "pmdk", range(2, 3))
    assert not tally.findings
    assert tally.counts["kills about a move to a new file"]


def test_a_pool_of_gradient_records_that_others_touch_is_never_written_by_two(folder):
    tally = play("gradient-two-processes", folder)
    assert not tally.findings
    for what in ("refused by name", "a dead holder's pool was taken over", "truncated in use: the training was warned"):
        assert tally.counts[what], what


def test_a_pool_that_others_touch_is_never_written_by_two_and_never_the_end_of_the_process(folder, backend):
    tally = play("two-processes", folder, backend)
    assert not tally.findings
    for what in (
        "refused by name",
        "truncated in use: the training was warned",
        "deleted in use: the training was warned",
    ):
        assert tally.counts[what], what


# -- what is found ---------------------------------------------------------------------------------------------------


def test_a_slot_that_is_reused_too_early_is_found(folder, monkeypatch):
    def choose(self: Slots, held: frozenset[int]) -> Slot | None:
        return self.slots[self.protected or 0]

    monkeypatch.setattr(Slots, "choose", choose)
    (reason,) = found("kill-writer", folder, range(4))
    assert "has to be there" in reason or "were possible" in reason or "No checkpoint" in reason


def test_a_flush_that_waits_for_nothing_is_found(folder, slow_memory, monkeypatch):
    monkeypatch.setattr(Commits, "_finish", lambda self, timeout, deadline: None)
    (reason,) = found("kill-writer", folder, range(6))
    assert "has to be there" in reason or "were possible" in reason


def test_a_resume_that_skips_the_random_states_is_found(folder, monkeypatch):
    monkeypatch.setattr(Resumed, "set_rng", lambda self: None)
    (reason,) = found("kill-training", folder, (1, 4))
    assert "the loss of update" in reason


@pytest.mark.parametrize("campaign", ["kill-twice", "gradient-kill-twice"])
def test_a_new_file_that_is_published_before_its_first_checkpoint_is_found(campaign, folder, monkeypatch):
    new_writer, publish = CurrentPool._new_writer, FileContainer.publish

    def publishing(self: CurrentPool, *arguments: Any, **options: Any) -> PoolWriter:
        writer = new_writer(self, *arguments, **options)
        writer.reader.container.publish()
        return writer

    monkeypatch.setattr(CurrentPool, "_new_writer", publishing)
    monkeypatch.setattr(FileContainer, "publish", lambda self: publish(self) if self.lock_fd is not None else None)
    (reason,) = found(campaign, folder, range(2, 142, 7))
    assert "has to be there" in reason


def test_a_new_file_that_no_attach_removes_is_found(folder, monkeypatch):
    monkeypatch.setattr(FileBackend, "remove_stale", lambda self, path: None)
    (reason,) = found("kill-twice", folder, range(2, 142, 7))  # which of them is killed in time, the clock decides
    assert "still there" in reason


def test_a_reader_that_believes_what_it_reads_is_found(folder, monkeypatch):
    import ctypes

    def read_into(self: StoredCheckpoint, name: str, address: int) -> None:
        number = self._index[name]
        at = self.reader.superblock.slots[self.record.slot][0] + self._record_entries[number].offset
        data = self.reader.read(at, self._record_entries[number].nbytes)
        if address:
            ctypes.memmove(address, data, len(data))

    monkeypatch.setattr(StoredCheckpoint, "read_into", read_into)
    monkeypatch.setattr(StoredCheckpoint, "read_many", MemorySource.read_many)  # one by one
    (reason,) = found("kill-twice", folder, range(4, 142, 7))
    assert "invented bytes" in reason


def test_a_lock_that_keeps_nobody_out_is_found(folder, monkeypatch):
    monkeypatch.setattr(PoolLock, "_lock", lambda self: (0, self._fd))
    assert found("two-processes", folder, (0, 5))
