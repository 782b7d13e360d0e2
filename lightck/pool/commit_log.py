"""The commit log: which commit records are valid, in which order recovery tries them, and where the next one goes.

These are pure functions over the records of the log, so the writer, the reader and the checker share one set of rules.

Invariants: Records are ordered by (incarnation, generation), never by step or clock. The newest record of a checkpoint
is not overwritten while a slot holds the checkpoint's bytes. (In a pool with gradient records, only the records that
``next_position_in_gradient_pool`` needs stay.) A record is dead if its generation lies between the generations of an
adopted checkpoint and of the adoption record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightck.pool.format.structures import COMMIT_RECORD_NBYTES, KIND_ADOPTION, CommitRecord, DamagedError, Superblock


@dataclass(frozen=True, slots=True)
class CommitLog:
    """The commit records at one moment."""

    records: Mapping[int, CommitRecord]
    """Position in the log (from 0) -> the valid record at that position."""
    damaged: tuple[int, ...]
    """Positions whose bytes fail the check of a commit record."""

    @property
    def is_empty(self) -> bool:
        """Whether the log has neither a valid nor a damaged record. This is so if no checkpoint was ever committed,
        and also if all records were erased (``PoolReader.generations_of_erased_records``)."""
        return not self.records and not self.damaged

    @property
    def generation(self) -> int:
        """The highest generation in the valid records; 0 if there are none."""
        return max((record.generation for record in self.records.values()), default=0)

    @property
    def highest_number(self) -> int:
        """The largest number among all generations, incarnations and steps in the valid records; 0 if there are
        none."""
        steps = (record.step for record in self.records.values())
        return max(self.generation, self.incarnation, *steps, 0)

    @property
    def incarnation(self) -> int:
        """The highest incarnation in the valid records; 0 if there are none."""
        return max((record.incarnation for record in self.records.values()), default=0)


def read_commit_log(sb: Superblock, read: Callable[[int, int], bytes]) -> CommitLog:
    """Read all commit records of a pool through ``read(offset, nbytes)``. A record of a slot that the pool does not
    have is left out."""
    records: dict[int, CommitRecord] = {}
    damaged: list[int] = []
    for position in range(sb.ring_lines):
        try:
            record = CommitRecord.unpack(read(sb.commit_record_offset(position), COMMIT_RECORD_NBYTES), sb.uuid)
        except DamagedError:
            damaged.append(position)
            continue
        if record is not None and record.slot < len(sb.slots):
            records[position] = record
    return CommitLog(records, tuple(damaged))


def is_dead(record: CommitRecord, commit_log: CommitLog) -> bool:
    """Whether a later adoption went back to a checkpoint that is older than the checkpoint of this record. Recovery
    does not resume from the checkpoint of a dead record, unless its step is requested (``candidates``)."""
    return any(
        other.kind == KIND_ADOPTION and other.payload_generation < record.generation < other.generation
        for other in commit_log.records.values()
    )


def candidates(commit_log: CommitLog, step: int | None = None) -> list[CommitRecord]:
    """Return the records that recovery tries, newest first. If several records name the same checkpoint (its first
    record, and the records of its adoptions), only the newest of them is returned.

    ``step``: return only records of this step, including dead ones. None: return records of all steps, without dead
    ones."""
    if step is None:
        records = [record for record in commit_log.records.values() if not is_dead(record, commit_log)]
    else:
        records = [record for record in commit_log.records.values() if record.step == step]
    seen: set[tuple[int, int]] = set()
    ordered = []
    for record in sorted(records, key=lambda record: (record.incarnation, record.generation), reverse=True):
        if (record.slot, record.payload_generation) not in seen:
            seen.add((record.slot, record.payload_generation))
            ordered.append(record)
    return ordered


def next_position(commit_log: CommitLog, contents: Mapping[int, int | None], ring_lines: int, after: int) -> int:
    """Return the position for the next record: the first position after ``after``, in the order of the ring, whose
    record is not needed.

    For each slot, the newest record of the checkpoint in the slot is needed. ``contents``: slot -> generation of the
    checkpoint in it. If this generation is unknown (None), the newest record of the slot is needed.
    """
    needed: dict[int, tuple[int, int]] = {}  # slot -> (generation, position) of the record that is needed
    for position, record in commit_log.records.items():
        content = contents.get(record.slot)
        if content is not None and content != record.payload_generation:
            continue
        if record.generation >= needed.get(record.slot, (0, 0))[0]:
            needed[record.slot] = (record.generation, position)
    protected = {position for _, position in needed.values()}
    for distance in range(1, ring_lines + 1):
        position = (after + distance) % ring_lines
        if position not in protected:
            return position
    raise AssertionError("a commit log has at least twice as many positions as the pool has slots")
