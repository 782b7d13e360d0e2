"""What the bytes of a pool are: which structure, which tensor of which version. For those who damage a copy on purpose.

Everything that a reader may look at is a ``Part``; what lies between parts, no reader looks at. It writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightck.pool.format.structures import (
    LINE_NBYTES,
    NEXT_NBYTES,
    NEXT_OFFSET,
    SUPERBLOCK_NBYTES,
    SUPERBLOCK_OFFSETS,
    CommitLine,
    DamagedError,
)
from lightck.pool.reader import PoolReader, Version
from lightck.pool.ring import is_dead

SUPERBLOCK, TABLE, LINE, HEADER, MANIFEST, TENSOR = "superblock", "table", "line", "header", "manifest", "payload"
NEXT = "next"
KINDS = (SUPERBLOCK, TABLE, LINE, HEADER, NEXT, MANIFEST, TENSOR)


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
    return *_structures(reader), *(part for version in versions_of(reader) for part in _version(version))


def versions_of(reader: PoolReader) -> list[Version]:
    """Every version whose manifest checks: those that recovery would try, newest first, then the dead ones."""
    ring = reader.ring()
    found: dict[tuple[int, int], Version] = {}
    for line in sorted(
        ring.lines.values(), key=lambda ln: (not is_dead(ln, ring), ln.incarnation, ln.generation), reverse=True
    ):
        try:
            found.setdefault((line.slot, line.payload_generation), reader.version(line))
        except DamagedError:
            continue
    return list(found.values())


def _structures(reader: PoolReader) -> Iterator[Part]:
    sb = reader.superblock
    for name, offset in zip("AB", SUPERBLOCK_OFFSETS, strict=True):
        yield Part(SUPERBLOCK, f"superblock {name}", offset, SUPERBLOCK_NBYTES)
    for name, offset in zip("AB", sb.table_offsets, strict=True):
        yield Part(TABLE, f"layout table {name}", offset, sb.table_nbytes)
    lines = reader.ring().lines
    for position in range(sb.ring_lines):
        yield _line(position, sb.line_offset(position), lines.get(position))
    for slot, (offset, _) in enumerate(sb.slots):
        generation = reader.slot_generation(slot)
        words = f"header of slot {slot}" + (f" (generation {generation})" if generation is not None else "")
        yield Part(HEADER, words, offset, LINE_NBYTES, generation, slot=slot)
        if sb.has_next:
            yield Part(NEXT, f"record of what followed, slot {slot}", offset + NEXT_OFFSET, NEXT_NBYTES, slot=slot)


def _line(position: int, offset: int, line: CommitLine | None) -> Part:
    if line is None:
        return Part(LINE, f"commit line {position} (none was completed there)", offset, LINE_NBYTES)
    words = f"commit line {position} (step {line.step}, generation {line.generation})"
    return Part(LINE, words, offset, LINE_NBYTES, line.payload_generation, line.step, line.slot)


def _version(version: Version) -> Iterator[Part]:
    sb, line = version.reader.superblock, version.line
    base = sb.slots[line.slot][0]
    whose = line.payload_generation, version.step, line.slot
    at = base + sb.manifest_offset + line.manifest_index * sb.manifest_nbytes
    yield Part(MANIFEST, f"manifest of step {version.step} (slot {line.slot})", at, line.manifest_nbytes, *whose)
    for name, entry in version.entries.items():
        if entry.nbytes:
            words = f"tensor {name!r} of step {version.step} (slot {line.slot})"
            yield Part(TENSOR, words, base + entry.offset, entry.nbytes, *whose, tensor=name)
