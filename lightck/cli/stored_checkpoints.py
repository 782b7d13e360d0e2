"""The checkpoints of a pool, as ``inspect``, ``verify`` and ``diff`` list them.

In a pool in use, a training may overwrite a slot while the slot is read. A checkpoint that was overwritten is left out
of the list. If no checkpoint is left, the pool is read again, as recovery does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightck.cli.open_tier import is_tier, open_tier
from lightck.cli.output import progress_bar
from lightck.errors import NoCheckpointError, PoolLockedError, UnsupportedError
from lightck.pool.commit_log import CommitLog, candidates
from lightck.pool.format.structures import CommitRecord, DamagedError
from lightck.pool.reader import PoolReader, RejectedCheckpoint, StoredCheckpoint, open_pool
from lightck.pool.storage.backends import readable_path

if TYPE_CHECKING:
    from lightck.pool.overwritten import Places
    from lightck.restore.contents import Contents
    from lightck.restore.replayed import ReplayedCheckpoint

COMMITTED, REJECTED, DEAD, RECORDED = "committed", "rejected", "dead", "recorded"
ATTEMPTS = 20
"""If a training overwrites all checkpoints of a pool while they are read, the pool is read at most this number of
times."""


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint that a commit record, or the chain of a newer checkpoint, names and that was not overwritten.

    state: ``committed``: recovery can return the checkpoint. ``dead``: the training was later resumed from an older
    step, and recovery returns the checkpoint only if its step is requested. ``rejected``: the checkpoint is damaged,
    and recovery skips it. ``recorded``: it has no intact commit record (overwritten or damaged), and the chain of a
    newer checkpoint names it; recovery can return its step.
    """

    record: CommitRecord
    state: str
    reason: str | None
    """Why the checkpoint is rejected; None if it is not rejected. ``stored`` and ``contents`` of a rejected checkpoint
    are None."""
    stored: StoredCheckpoint | ReplayedCheckpoint | None
    contents: Contents | None
    """Its entries are those that the manifest names. (In a pool with gradient records, a replay of updates may create
    optimizer state that is not among them.)"""

    @property
    def step(self) -> int:
        return self.record.step

    @property
    def generation(self) -> int:
        return self.record.payload_generation

    @property
    def nbytes(self) -> int | None:
        return None if self.contents is None else sum(entry.nbytes for entry in self.contents.entries.values())

    @property
    def is_recovered_by_default(self) -> bool:
        """Whether recovery returns the checkpoint without being asked for its step."""
        return self.stored is not None and self.state in (COMMITTED, RECORDED)


@contextmanager
def open_reader(path: str, step: int | None = None) -> Iterator[PoolReader]:
    """Open the pool at ``path`` for reading only, until the end of the block. Of a tier, fetch the newest checkpoint
    that is whole, or that of ``step``, to memory."""
    reader = _fetched(path, step) if is_tier(path) else open_pool(readable_path(path), gradients=True)
    try:
        yield reader
    finally:
        reader.close()


def _fetched(path: str, step: int | None) -> PoolReader:
    from lightck.tiers.claiming import refuse_other_runs
    from lightck.tiers.reading import newest_in_memory

    store = open_tier(path)
    listing = store.listing()
    refuse_other_runs(store, listing)
    readers = newest_in_memory(store, listing, step, [], progress_bar)
    if len(readers) > 1:
        for each in readers:
            each.close()
        raise UnsupportedError(
            f"The tier {path!r} holds the checkpoints of a group of {len(readers)} ranks, and this command reads one "
            f"pool. Fetch a checkpoint into a directory: lightck copy {path} DIRECTORY, and name that."
        )
    return readers[0]


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
        f"The pool {reader.path!r} is in use, and in each of {ATTEMPTS} attempts its checkpoints were overwritten "
        "while they were read. The pool is not damaged. Try again, or stop the training first."
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
    live = candidates(commit_log)
    known = {(record.slot, record.payload_generation) for record in live}
    dead = []
    for record in sorted(
        commit_log.records.values(), key=lambda record: (record.incarnation, record.generation), reverse=True
    ):
        if (record.slot, record.payload_generation) not in known:
            known.add((record.slot, record.payload_generation))
            dead.append(record)
    if reader.superblock.has_gradients:
        yield from _with_gradients(reader, live, dead)
    else:
        yield from _of_records(reader, commit_log, live, dead)


def _of_records(
    reader: PoolReader, commit_log: CommitLog, live: list[CommitRecord], dead: list[CommitRecord]
) -> Iterator[FoundCheckpoint]:
    from lightck.restore.usable import StaleCheckpoints  # imports torch

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


def _with_gradients(
    reader: PoolReader, live: Sequence[CommitRecord], dead: Sequence[CommitRecord]
) -> Iterator[FoundCheckpoint]:
    """Yield the checkpoints of a pool with gradient records. A checkpoint is left out if anything that it needs was
    overwritten."""
    from lightck.pool.overwritten import Places
    from lightck.restore.usable import StaleCheckpoints, parse_state  # imports torch

    listed = list(_listed_with_gradients(reader, live, dead))
    stored = [one for _, _, one in listed if not isinstance(one, RejectedCheckpoint)]
    stale = StaleCheckpoints.of_pool(reader, stored)
    places = Places(reader, [one.gradient_checkpoint for one in stored])
    for record, state, one in listed:
        if not is_in_slot(reader, record) or stale.includes(record.payload_generation):
            continue
        if isinstance(one, RejectedCheckpoint):
            yield FoundCheckpoint(record, REJECTED, one.reason, None, None)
        elif not places.is_overwritten(one.gradient_checkpoint):
            try:
                contents = replace(parse_state(one), entries=one.listed_entries)
            except DamagedError as error:
                yield FoundCheckpoint(record, REJECTED, str(error), None, None)
            else:
                yield FoundCheckpoint(record, state, None, one, contents)


def _listed_with_gradients(
    reader: PoolReader, live: Sequence[CommitRecord], dead: Sequence[CommitRecord]
) -> Iterator[tuple[CommitRecord, str, ReplayedCheckpoint | RejectedCheckpoint]]:
    """Yield the record, the state and the checkpoint of each committed checkpoint, and of each that only a chain
    names."""
    from lightck.restore.optimizers_at_hand import OptimizersAtHand  # imports torch
    from lightck.restore.replayed import replayed_checkpoint, replayed_checkpoints

    optimizers = OptimizersAtHand()
    found = list(replayed_checkpoints(reader, optimizers))
    # A training may have committed checkpoints since ``live`` was read.
    committed = {record.generation: record for record in (*live, *candidates(reader.commit_log()))}
    for one in found:
        if isinstance(one, RejectedCheckpoint):
            if one.generation in committed:  # otherwise only a chain names it, and recovery does not need it
                yield committed[one.generation], COMMITTED, one
        else:
            is_committed = committed.get(one.record.generation) == one.record
            yield one.record, COMMITTED if is_committed else RECORDED, one
    for record in dead:
        try:
            yield record, DEAD, replayed_checkpoint(reader, record, optimizers)
        except DamagedError as error:
            yield record, DEAD, RejectedCheckpoint(record.step, record.generation, str(error))


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
    """Whether the slot may still hold the bytes that the commit record names. False only if the slot's header names a
    newer checkpoint; a damaged header does not show that the slot was reused."""
    return not reader.has_lost_slot(record)


def is_overwritten(checkpoint: FoundCheckpoint) -> bool:
    """Whether a newer checkpoint has overwritten a readable one since it was found."""
    stored = checkpoint.stored
    assert stored is not None
    if not is_in_slot(stored.reader, checkpoint.record):
        return True
    if isinstance(stored, StoredCheckpoint):
        return False
    return places_of(stored.reader).is_overwritten(stored.gradient_checkpoint)


def places_of(reader: PoolReader) -> Places:
    """Return what lies in the homes of a pool with gradient records at this moment."""
    from lightck.pool.gradient_reader import checkpoint_of, committed
    from lightck.pool.overwritten import Places

    found = []
    for entry in committed(reader):
        with suppress(DamagedError):
            found.append(checkpoint_of(reader, entry))
    return Places(reader, found)


def first_usable(checkpoints: tuple[FoundCheckpoint, ...], step: int | None) -> FoundCheckpoint | None:
    """Return the first readable checkpoint in the order of recovery, or None if there is none. If ``step`` is None,
    dead checkpoints are skipped."""
    readable = (each for each in checkpoints if each.stored is not None)
    return next((each for each in readable if step is not None or each.is_recovered_by_default), None)


def unfinished(reader: PoolReader, found: Sequence[FoundCheckpoint]) -> list[tuple[int, int]]:
    """Return (slot, generation) of each uncommitted checkpoint that is not among ``found``. It is being written now, or
    it was given up, or its process was killed."""
    newest = newest_generations(reader.commit_log())
    for each in found:
        newest[each.record.slot] = max(newest.get(each.record.slot, 0), each.generation)
    if reader.superblock.has_gradients:  # the commit records of older gradient records may be gone
        newest = dict.fromkeys(range(len(reader.superblock.slots)), max(newest.values(), default=0))
    headers = [(slot, reader.slot_generation(slot)) for slot in range(len(reader.superblock.slots))]
    return [(slot, gen) for slot, gen in headers if gen is not None and gen > newest.get(slot, 0)]


def newest_generations(commit_log: CommitLog) -> dict[int, int]:
    """Return slot -> generation of the newest checkpoint in this slot that a commit record names."""
    found: dict[int, int] = {}
    for record in commit_log.records.values():
        found[record.slot] = max(found.get(record.slot, 0), record.payload_generation)
    return found
