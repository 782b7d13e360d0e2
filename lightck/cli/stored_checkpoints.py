"""The checkpoints of a pool, as ``inspect``, ``verify`` and ``diff`` list them.

In a pool in use, a training may overwrite a slot while the slot is read. A checkpoint that was overwritten is left out
of the list. If no checkpoint is left, the pool is read again, as recovery does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightck.errors import NoCheckpointError, PoolLockedError
from lightck.pool.commit_log import CommitLog, candidates
from lightck.pool.format.structures import CommitRecord, DamagedError
from lightck.pool.reader import PoolReader, StoredCheckpoint, open_pool
from lightck.pool.storage.backends import readable_path

if TYPE_CHECKING:
    from lightck.restore.contents import Contents

COMMITTED, REJECTED, DEAD = "committed", "rejected", "dead"
ATTEMPTS = 20
"""If a training overwrites all checkpoints of a pool while they are read, the pool is read at most this number of
times."""


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint that a commit record names and that was not overwritten.

    state: ``committed``: recovery can return the checkpoint. ``dead``: the training was later resumed from an older
    step, and recovery returns the checkpoint only if its step is requested. ``rejected``: the checkpoint is damaged,
    and recovery skips it.
    """

    record: CommitRecord
    state: str
    reason: str | None
    """Why the checkpoint is rejected; None if it is not rejected. ``stored`` and ``contents`` of a rejected checkpoint
    are None."""
    stored: StoredCheckpoint | None
    contents: Contents | None

    @property
    def step(self) -> int:
        return self.record.step

    @property
    def generation(self) -> int:
        return self.record.payload_generation

    @property
    def nbytes(self) -> int | None:
        return None if self.stored is None else sum(entry.nbytes for entry in self.stored.entries.values())


@contextmanager
def open_reader(path: str) -> Iterator[PoolReader]:
    """Open the pool at ``path`` for reading only, until the end of the block."""
    reader = open_pool(readable_path(path))
    try:
        yield reader
    finally:
        reader.close()


def find_checkpoints(reader: PoolReader, step: int | None = None) -> tuple[FoundCheckpoint, ...]:
    """Return the checkpoints of a pool, in the order in which recovery tries them, followed by the dead ones.

    Args:
        reader: the open pool.
        step: return only the checkpoints of this step.

    Raises:
        NoCheckpointError: no checkpoint has this step.
        PoolLockedError: a training overwrote all checkpoints while they were read, ``ATTEMPTS`` times.
    """
    for _ in range(ATTEMPTS):
        commit_log = reader.commit_log()
        found = tuple(_not_overwritten(reader, commit_log))
        if any(each.stored for each in found) or reader.commit_log() == commit_log:
            return found if step is None else _of_step(reader, found, step)
    raise overwritten_error(reader)


def overwritten_error(reader: PoolReader) -> PoolLockedError:
    return PoolLockedError(
        f"The pool {reader.path!r} is in use, and its checkpoints were overwritten faster than they could be read, "
        f"{ATTEMPTS} times. The pool is not damaged. Try again, or stop the training first."
    )


def _of_step(reader: PoolReader, found: tuple[FoundCheckpoint, ...], step: int) -> tuple[FoundCheckpoint, ...]:
    chosen = tuple(each for each in found if each.step == step)
    if chosen:
        return chosen
    if not found:
        raise NoCheckpointError(f"The pool {reader.path!r} does not hold step {step}: it holds no checkpoint yet.")
    steps = ", ".join(str(s) for s in sorted({each.step for each in found}))
    raise NoCheckpointError(
        f"The pool {reader.path!r} does not hold step {step}. It holds {steps}: a pool keeps the newest few "
        "checkpoints, and older ones were overwritten. Ask for a step that the pool holds, or omit --step."
    )


def _not_overwritten(reader: PoolReader, commit_log: CommitLog) -> Iterator[FoundCheckpoint]:
    from lightck.restore.usable import StaleCheckpoints  # imports torch

    live = candidates(commit_log)
    known = {(record.slot, record.payload_generation) for record in live}
    dead = []
    for record in sorted(
        commit_log.records.values(), key=lambda record: (record.incarnation, record.generation), reverse=True
    ):
        if (record.slot, record.payload_generation) not in known:
            known.add((record.slot, record.payload_generation))
            dead.append(record)
    newest, stale = newest_generations(commit_log), StaleCheckpoints.of_pool(reader)
    for records, state in ((live, COMMITTED), (dead, DEAD)):
        for record in records:
            is_superseded = record.payload_generation < newest[record.slot]
            if is_superseded and reader.slot_generation(record.slot) != record.payload_generation:
                # A newer record names the slot, and the slot's header names another checkpoint or is damaged. So the
                # checkpoint of ``record`` counts as overwritten.
                continue
            checkpoint = _parsed(reader, record, state)
            if checkpoint is not None and not stale.includes(checkpoint.generation):  # a stale one counts as struck
                yield checkpoint


def _parsed(reader: PoolReader, record: CommitRecord, state: str) -> FoundCheckpoint | None:
    """Return the checkpoint of a commit record; None if its slot held another checkpoint before or after the read."""
    from lightck.restore.usable import parse  # imports torch

    if not is_in_slot(reader, record):
        return None
    try:
        stored = reader.checkpoint(record)
        return FoundCheckpoint(record, state, None, stored, parse(stored)) if stored.owns_slot() else None
    except DamagedError as error:
        return FoundCheckpoint(record, REJECTED, str(error), None, None) if is_in_slot(reader, record) else None


def is_in_slot(reader: PoolReader, record: CommitRecord) -> bool:
    """Whether the slot still holds the bytes that the commit record names. True if the slot's header is damaged: only a
    header that names a newer checkpoint shows that the slot was reused."""
    return not reader.has_lost_slot(record)


def first_usable(checkpoints: tuple[FoundCheckpoint, ...], step: int | None) -> FoundCheckpoint | None:
    """Return the first readable checkpoint in the order of recovery, or None if there is none. If ``step`` is None,
    dead checkpoints are passed over."""
    readable = (each for each in checkpoints if each.stored is not None)
    return next((each for each in readable if step is not None or each.state == COMMITTED), None)


def unfinished(reader: PoolReader) -> list[tuple[int, int]]:
    """Return (slot, generation) of each uncommitted checkpoint. It is being written now, or it was given up, or its
    process was killed."""
    newest = newest_generations(reader.commit_log())
    headers = [(slot, reader.slot_generation(slot)) for slot in range(len(reader.superblock.slots))]
    return [(slot, gen) for slot, gen in headers if gen is not None and gen > newest.get(slot, 0)]


def newest_generations(commit_log: CommitLog) -> dict[int, int]:
    """Return slot -> generation of the newest checkpoint in this slot that a commit record names."""
    found: dict[int, int] = {}
    for record in commit_log.records.values():
        found[record.slot] = max(found.get(record.slot, 0), record.payload_generation)
    return found
