"""What a pool holds, version by version: one look that ``inspect``, ``verify`` and ``diff`` share.

A look at a pool in use may find a slot that is being written anew. A version that vanished while we looked is left out,
and where none is left the look is repeated, as recovery does.
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
"""How often a pool is looked at again whose versions are overwritten meanwhile."""


@dataclass(frozen=True, slots=True)
class Held:
    """One version whose bytes are still in their slot.

    state: ``committed``: recovery may give it. ``dead``: the training went back behind it, and only asking for its step
    gives it. ``rejected``: something of it is damaged, and recovery passes it over. ``reason`` says what.
    """

    record: CommitRecord
    state: str
    reason: str | None
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
def reading(path: str) -> Iterator[PoolReader]:
    """The pool at a path, opened for reading only."""
    reader = open_pool(readable_path(path))
    try:
        yield reader
    finally:
        reader.close()


def held(reader: PoolReader, step: int | None = None) -> tuple[Held, ...]:
    """All versions held, as recovery would try them, then the dead ones. With ``step`` only those of that step.

    Raises:
        NoCheckpointError: none of them has this step.
    """
    for _ in range(ATTEMPTS):
        commit_log = reader.commit_log()
        found = tuple(_look(reader, commit_log))
        if any(each.stored for each in found) or reader.commit_log() == commit_log:
            return found if step is None else _of_step(reader, found, step)
    raise overwritten(reader)


def overwritten(reader: PoolReader) -> PoolLockedError:
    return PoolLockedError(
        f"The pool {reader.path!r} is in use, and its versions were overwritten faster than they could be read, "
        f"{ATTEMPTS} times. Nothing is wrong with it. Try again, or end the training first."
    )


def _of_step(reader: PoolReader, found: tuple[Held, ...], step: int) -> tuple[Held, ...]:
    chosen = tuple(each for each in found if each.step == step)
    if chosen:
        return chosen
    steps = ", ".join(str(s) for s in sorted({each.step for each in found})) or "no version yet"
    raise NoCheckpointError(
        f"The pool {reader.path!r} does not hold step {step}. It holds {steps}: a pool keeps the newest few, and older "
        "ones were overwritten. Ask for one of these, or leave --step out."
    )


def _look(reader: PoolReader, commit_log: CommitLog) -> Iterator[Held]:
    live = candidates(commit_log)
    known = {(record.slot, record.payload_generation) for record in live}
    dead = []
    for record in sorted(
        commit_log.records.values(), key=lambda record: (record.incarnation, record.generation), reverse=True
    ):
        if (record.slot, record.payload_generation) not in known:
            known.add((record.slot, record.payload_generation))
            dead.append(record)
    newest = newest_generations(commit_log)
    for records, state in ((live, COMMITTED), (dead, DEAD)):
        for record in records:
            is_superseded = record.payload_generation < newest[record.slot]
            if is_superseded and reader.slot_generation(record.slot) != record.payload_generation:
                continue  # a newer version was committed over it, whatever became of the slot's header since
            each = _examined(reader, record, state)
            if each is not None:
                yield each


def _examined(reader: PoolReader, record: CommitRecord, state: str) -> Held | None:
    """The version of a line; None where its slot belongs to another version, now or by the end of the look."""
    from lightck.restore.recover import parse  # torch

    if not still_there(reader, record):
        return None
    try:
        stored = reader.checkpoint(record)
        return Held(record, state, None, stored, parse(stored)) if stored.is_intact() else None
    except DamagedError as error:
        return Held(record, REJECTED, str(error), None, None) if still_there(reader, record) else None


def still_there(reader: PoolReader, record: CommitRecord) -> bool:
    """Whether the slot still holds the bytes that this line names, or its header proves nothing."""
    return not reader.is_reused(record)


def newest(checkpoints: tuple[Held, ...], step: int | None) -> Held | None:
    """The one that recovery tries first. A dead one only where its step was asked for."""
    readable = (each for each in checkpoints if each.stored is not None)
    return next((each for each in readable if step is not None or each.state == COMMITTED), None)


def unfinished(reader: PoolReader) -> list[tuple[int, int]]:
    """(slot, generation) of versions that were begun and not committed: under way, given up, or cut off by a kill."""
    newest = newest_generations(reader.commit_log())
    headers = [(slot, reader.slot_generation(slot)) for slot in range(len(reader.superblock.slots))]
    return [(slot, gen) for slot, gen in headers if gen is not None and gen > newest.get(slot, 0)]


def newest_generations(commit_log: CommitLog) -> dict[int, int]:
    """slot -> generation of the newest version of which a line says that it was committed there."""
    found: dict[int, int] = {}
    for record in commit_log.records.values():
        found[record.slot] = max(found.get(record.slot, 0), record.payload_generation)
    return found
