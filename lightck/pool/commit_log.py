"""The commit ring: which lines are live, in which order recovery tries them, and where the next one goes.

Pure functions over the lines of a ring, so that the writer, the reader and the checker share one set of rules.
Invariants: order is (incarnation, generation), never step or clock; the newest line of each slot's present content
is overwritten only after that slot is; a line between an adopted version and its adoption is dead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightck.pool.format.structures import COMMIT_RECORD_NBYTES, KIND_ADOPTION, CommitRecord, DamagedError, Superblock


@dataclass(frozen=True, slots=True)
class CommitLog:
    """The lines of a ring at one moment: position -> line; ``damaged`` are positions whose check fails."""

    records: Mapping[int, CommitRecord]
    damaged: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """No line was ever completed here: the pool holds no checkpoint and never held one."""
        return not self.records and not self.damaged

    @property
    def generation(self) -> int:
        return max((record.generation for record in self.records.values()), default=0)

    @property
    def highest_number(self) -> int:
        """Of all numbers that go on from here."""
        steps = (record.step for record in self.records.values())
        return max(self.generation, self.incarnation, *steps, 0)

    @property
    def incarnation(self) -> int:
        return max((record.incarnation for record in self.records.values()), default=0)


def read_commit_log(sb: Superblock, read: Callable[[int, int], bytes]) -> CommitLog:
    """All lines, through ``read(offset, nbytes)``."""
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
    """Whether the timeline of this line was left: an adoption went back to a version before it."""
    return any(
        other.kind == KIND_ADOPTION and other.payload_generation < record.generation < other.generation
        for other in commit_log.records.values()
    )


def candidates(commit_log: CommitLog, step: int | None = None) -> list[CommitRecord]:
    """Lines to try, newest first; each payload once. With ``step`` only that one, dead lines included."""
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
    """The position for the next line: the first one after ``after`` that no slot's content still needs.

    ``contents`` maps slot -> generation of its present bytes (None: unknown, then all its lines count).
    """
    needed: dict[int, tuple[int, int]] = {}
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
    raise AssertionError("a ring has at least twice as many lines as slots")
