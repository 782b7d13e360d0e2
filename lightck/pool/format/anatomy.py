"""What each byte of a pool belongs to: a structure, or a tensor of a checkpoint. For tools that damage a copy of a pool
on purpose.

Every run of bytes that a reader can use is a ``Part``. (In a pool with gradient records, an older checkpoint that the
chain of the newest one does not name has no parts.) This module only reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from lightck.pool import gradient_reader
from lightck.pool.commit_log import is_dead
from lightck.pool.format.structures import (
    COMMIT_RECORD_NBYTES,
    NEXT_NBYTES,
    NEXT_OFFSET,
    SLOT_HEADER_NBYTES,
    SUPERBLOCK_NBYTES,
    SUPERBLOCK_OFFSETS,
    CommitRecord,
    DamagedError,
)
from lightck.pool.gradient_reader import GradientCheckpoint
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
"""Kinds of parts, as ``lightck inject`` names them: a "line" is a commit record, as in docs/format.md."""


@dataclass(frozen=True, slots=True)
class Part:
    """A run of bytes with one purpose. ``offset`` counts from the start of the pool.

    ``generation``, ``step``, ``slot`` and ``tensor`` are None if they do not apply. ``generation`` is the generation of
    the checkpoint that the part belongs to."""

    kind: str
    """One of ``KINDS``."""
    words: str
    """What the part is, for messages: "manifest of step 7 (slot 1)"."""
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
    """Return all parts of a pool: structures first, then the checkpoints in the order of ``checkpoints_of``. In a pool
    with gradient records, the part of a base has the generation and step of the newest checkpoint. The part of an older
    base has the generation with which it was written, and the newest step whose state it is. Each part of a gradient
    record has the generation and step of the record."""
    if reader.superblock.has_gradients:
        return *_structures(reader), *_gradient_parts(reader)
    return *_structures(reader), *(part for checkpoint in checkpoints_of(reader) for part in _checkpoint(checkpoint))


def checkpoints_of(reader: PoolReader) -> list[StoredCheckpoint]:
    """Return every checkpoint with a valid manifest: first the checkpoints that recovery would try, newest first, then
    those whose commit records are dead (``is_dead``), newest first."""
    commit_log = reader.commit_log()
    found: dict[tuple[int, int], StoredCheckpoint] = {}
    for record in sorted(
        commit_log.records.values(),
        key=lambda record: (not is_dead(record, commit_log), record.incarnation, record.generation),
        reverse=True,
    ):
        try:
            found.setdefault((record.slot, record.payload_generation), reader.checkpoint(record))
        except DamagedError:
            continue
    return list(found.values())


def _gradient_parts(reader: PoolReader) -> Iterator[Part]:
    """Yield the bases of the newest readable checkpoint, and its record and those that its chain names."""
    for entry in gradient_reader.committed(reader):
        with suppress(DamagedError):
            newest = gradient_reader.checkpoint_of(reader, entry)
            break
    else:
        return
    yield from _gradient_record_parts(newest)
    of_newest = newest.header.generation, newest.step
    for bases, kind in ((newest.bases(), "base"), (newest.older_bases(), "older base")):
        for base in bases:
            if base.entry.nbytes:
                words = f"{kind} of step {base.step} of tensor {base.entry.name!r}"
                fields = of_newest if kind == "base" else (base.generation, base.step)
                yield Part(TENSOR, words, base.offset, base.entry.nbytes, *fields, tensor=base.entry.name)
    for entry in reversed(newest.part.chain):
        with suppress(DamagedError):
            yield from _gradient_record_parts(gradient_reader.checkpoint_of(reader, entry))


def _gradient_record_parts(record: GradientCheckpoint) -> Iterator[Part]:
    entry, step = record.chain_entry, record.step
    fields = entry.generation, step, entry.slot
    at = record.reader.superblock.manifest_at(entry.slot, entry.manifest_index)
    yield Part(MANIFEST, f"manifest of step {step} (slot {entry.slot})", at, entry.manifest_nbytes, *fields)
    for name, one in record.in_record.items():
        if one.entry.nbytes:
            words = f"{name!r} in the gradient record of step {step} (slot {entry.slot})"
            yield Part(TENSOR, words, one.offset, one.entry.nbytes, *fields, tensor=name)


def _structures(reader: PoolReader) -> Iterator[Part]:
    sb = reader.superblock
    for name, offset in zip("AB", SUPERBLOCK_OFFSETS, strict=True):
        yield Part(SUPERBLOCK, f"superblock {name}", offset, SUPERBLOCK_NBYTES)
    for name, offset in zip("AB", sb.table_offsets, strict=True):
        yield Part(TABLE, f"layout table {name}", offset, sb.table_nbytes)
    records = reader.commit_log().records
    for position in range(sb.ring_lines):
        yield _commit_record_part(position, sb.commit_record_offset(position), records.get(position))
    for slot, (offset, _) in enumerate(sb.slots):
        generation = reader.slot_generation(slot)
        words = f"header of slot {slot}" + (f" (generation {generation})" if generation is not None else "")
        yield Part(HEADER, words, offset, SLOT_HEADER_NBYTES, generation, slot=slot)
        if sb.has_next_batch:
            yield Part(NEXT, f"next-batch record of slot {slot}", offset + NEXT_OFFSET, NEXT_NBYTES, slot=slot)


def _commit_record_part(position: int, offset: int, record: CommitRecord | None) -> Part:
    if record is None:
        return Part(
            COMMIT_RECORD, f"commit record {position} (never completed, or damaged)", offset, COMMIT_RECORD_NBYTES
        )
    words = f"commit record {position} (step {record.step}, generation {record.generation})"
    return Part(COMMIT_RECORD, words, offset, COMMIT_RECORD_NBYTES, record.payload_generation, record.step, record.slot)


def _checkpoint(checkpoint: StoredCheckpoint) -> Iterator[Part]:
    sb, record = checkpoint.reader.superblock, checkpoint.record
    slot_offset = sb.slots[record.slot][0]
    fields = record.payload_generation, checkpoint.step, record.slot
    at = slot_offset + sb.manifest_offset + record.manifest_index * sb.manifest_nbytes
    yield Part(
        MANIFEST, f"manifest of step {checkpoint.step} (slot {record.slot})", at, record.manifest_nbytes, *fields
    )
    for name, entry in checkpoint.entries.items():
        if entry.nbytes:
            words = f"tensor {name!r} of step {checkpoint.step} (slot {record.slot})"
            yield Part(TENSOR, words, slot_offset + entry.offset, entry.nbytes, *fields, tensor=name)
