"""What the bytes of a pool are: which structure, which tensor of which version. For those who damage a copy on purpose.

Everything that a reader may look at is a ``Part``; what lies between parts, no reader looks at. It writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightck.pool.commit_log import is_dead
from lightck.pool.format.structures import (
    COMMIT_RECORD_NBYTES,
    NEXT_NBYTES,
    NEXT_OFFSET,
    SUPERBLOCK_NBYTES,
    SUPERBLOCK_OFFSETS,
    CommitRecord,
    DamagedError,
)
from lightck.pool.reader import PoolReader, StoredCheckpoint

SUPERBLOCK, TABLE, COMMIT_RECORD, HEADER, MANIFEST, TENSOR = (
    "superblock",
    "table",
    "line",
    "header",
    "manifest",
    "payload",
)
NEXT = "next"
KINDS = (SUPERBLOCK, TABLE, COMMIT_RECORD, HEADER, NEXT, MANIFEST, TENSOR)


@dataclass(frozen=True, slots=True)
class Part:
    """A run of bytes with one purpose; ``offset`` counts from the start of the pool.

    ``generation`` is that of the payload of the version that it belongs to, where it belongs to one."""

    kind: str
    words: str
    offset: int
    nbytes: int
    generation: int | None = None
    step: int | None = None
    slot: int | None = None
    tensor: str | None = None

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


def parts_of(reader: PoolReader) -> tuple[Part, ...]:
    """All parts of a pool, in groups: structures first, then the versions from the newest on."""
    return *_structures(reader), *(part for checkpoint in checkpoints_of(reader) for part in _checkpoint(checkpoint))


def checkpoints_of(reader: PoolReader) -> list[StoredCheckpoint]:
    """Every version whose manifest checks: those that recovery would try, newest first, then the dead ones."""
    commit_log = reader.commit_log()
    found: dict[tuple[int, int], StoredCheckpoint] = {}
    for record in sorted(
        commit_log.records.values(),
        key=lambda ln: (not is_dead(ln, commit_log), ln.incarnation, ln.generation),
        reverse=True,
    ):
        try:
            found.setdefault((record.slot, record.payload_generation), reader.checkpoint(record))
        except DamagedError:
            continue
    return list(found.values())


def _structures(reader: PoolReader) -> Iterator[Part]:
    sb = reader.superblock
    for name, offset in zip("AB", SUPERBLOCK_OFFSETS, strict=True):
        yield Part(SUPERBLOCK, f"superblock {name}", offset, SUPERBLOCK_NBYTES)
    for name, offset in zip("AB", sb.table_offsets, strict=True):
        yield Part(TABLE, f"layout table {name}", offset, sb.table_nbytes)
    records = reader.commit_log().records
    for position in range(sb.ring_lines):
        yield _record(position, sb.commit_record_offset(position), records.get(position))
    for slot, (offset, _) in enumerate(sb.slots):
        generation = reader.slot_generation(slot)
        words = f"header of slot {slot}" + (f" (generation {generation})" if generation is not None else "")
        yield Part(HEADER, words, offset, COMMIT_RECORD_NBYTES, generation, slot=slot)
        if sb.has_next_batch:
            yield Part(NEXT, f"record of what followed, slot {slot}", offset + NEXT_OFFSET, NEXT_NBYTES, slot=slot)


def _record(position: int, offset: int, record: CommitRecord | None) -> Part:
    if record is None:
        return Part(COMMIT_RECORD, f"commit line {position} (none was completed there)", offset, COMMIT_RECORD_NBYTES)
    words = f"commit line {position} (step {record.step}, generation {record.generation})"
    return Part(COMMIT_RECORD, words, offset, COMMIT_RECORD_NBYTES, record.payload_generation, record.step, record.slot)


def _checkpoint(checkpoint: StoredCheckpoint) -> Iterator[Part]:
    sb, record = checkpoint.reader.superblock, checkpoint.record
    base = sb.slots[record.slot][0]
    whose = record.payload_generation, checkpoint.step, record.slot
    at = base + sb.manifest_offset + record.manifest_index * sb.manifest_nbytes
    yield Part(MANIFEST, f"manifest of step {checkpoint.step} (slot {record.slot})", at, record.manifest_nbytes, *whose)
    for name, entry in checkpoint.entries.items():
        if entry.nbytes:
            words = f"tensor {name!r} of step {checkpoint.step} (slot {record.slot})"
            yield Part(TENSOR, words, base + entry.offset, entry.nbytes, *whose, tensor=name)
