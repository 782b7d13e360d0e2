"""A copy of a pool that has all of its metadata, and only those blocks of its payload that somebody needs.

The file has the length of the pool, and holes where blocks are missing. ``PartialCopy`` knows which blocks are there.
A hole is never taken for data: to read a missing block raises ``BlocksMissingError``, and the block is recorded as
wanted. (Whoever opens the file without a ``PartialCopy`` finds zeros there, which do not match the checksums.)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from lightck.pool.format.structures import (
    COMMIT_RECORD_NBYTES,
    MANIFEST_HEADER_NBYTES,
    SUPERBLOCK_NBYTES,
    SUPERBLOCK_OFFSETS,
    DamagedError,
)

if TYPE_CHECKING:
    from lightck.pool.reader import PoolReader, StoredCheckpoint


class BlocksMissingError(Exception):
    """A partial copy does not have these blocks. That says nothing about the pool of which it is a copy."""


class ByteRanges:
    """A set of bytes, stored as (begin, end) pairs that are sorted and do not touch each other."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        for begin, end in ranges:
            self.add(begin, end)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._begins, self._ends, strict=True)

    @property
    def nbytes(self) -> int:
        return sum(self._ends) - sum(self._begins)

    def add(self, begin: int, end: int) -> None:
        if begin >= end:
            return
        first, last = bisect_left(self._ends, begin), bisect_right(self._begins, end)
        if first < last:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
        self._begins[first:last], self._ends[first:last] = [begin], [end]

    def gaps(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return those bytes from ``begin`` to ``end`` that are not in the set."""
        found = []
        at = bisect_right(self._ends, begin)
        while begin < end and at < len(self._begins) and self._begins[at] < end:
            if begin < self._begins[at]:
                found.append((begin, self._begins[at]))
            begin = self._ends[at]
            at += 1
        return [*found, (begin, end)] if begin < end else found

    def touches(self, begin: int, end: int) -> bool:
        """Whether any of these bytes is in the set."""
        return begin < end and self.gaps(begin, end) != [(begin, end)]


class Blocks(NamedTuple):
    """Blocks of one tensor: arguments of ``StoredCheckpoint.read_blocks``."""

    stored: StoredCheckpoint
    name: str
    first: int
    nbytes: int


class BlockSource(Protocol):
    """What a reader asks before it reads payload that its file may lack."""

    def require(self, stored: StoredCheckpoint, places: Sequence[tuple[str, int, int, int]]) -> None:
        """Bring these blocks (see ``StoredCheckpoint.read_blocks``) into the file, or raise an error."""
        ...


class PartialCopy:
    """Which payload a partial copy has, and which blocks are wanted."""

    def __init__(self) -> None:
        self._present = ByteRanges()
        self._damaged = ByteRanges()
        """Blocks that are there, and do not match their checksums in any pool that was asked."""
        self._wanted: list[Blocks] = []
        self._attempts: dict[int, int] = {}
        """Offset of a block in the pool -> how often a damaged one was received."""

    def want(self, stored: StoredCheckpoint, places: Iterable[tuple[str, int, int]]) -> bool:
        """Record which of these blocks (name, first block, number of bytes) are missing. Returns whether any is."""
        missing = [
            Blocks(stored, name, first + (low - begin) // stored.block_nbytes, high - low)
            for name, first, nbytes in places
            for begin, end in [stored.range_of(name, first, nbytes)]
            for low, high in self._present.gaps(begin, end)
        ]
        self._wanted += missing
        return bool(missing)

    def require(self, stored: StoredCheckpoint, places: Sequence[tuple[str, int, int, int]]) -> None:
        """Raise ``BlocksMissingError`` if a block of these (see ``StoredCheckpoint.read_blocks``) is missing."""
        if self.want(stored, [(name, first, nbytes) for name, first, nbytes, _ in places]):
            _, name, first, _ = self._wanted[-1]
            raise BlocksMissingError(f"block {first} of {name!r} is not in the partial copy {stored.path!r}")

    def take_wanted(self) -> list[tuple[Blocks, int]]:
        """Return what was recorded since the last call, with the number of attempts that received damaged bytes."""
        wanted, self._wanted = list(dict.fromkeys(self._wanted)), []
        return [(one, max(self._attempts.get(begin, 0) for begin, _ in _each_block(one))) for one in wanted]

    def received(self, blocks: Blocks, attempts_max: int) -> None:
        """Verify blocks that have been written to the file. A damaged one counts as missing, and is
        fetched again. After ``attempts_max`` attempts it counts as present and damaged."""
        begin, end = blocks.stored.range_of(*blocks[1:])
        if _is_intact(blocks):
            self._present.add(begin, end)
            return
        for number, (low, high) in enumerate(_each_block(blocks), blocks.first):
            if not _is_intact(Blocks(blocks.stored, blocks.name, number, high - low)):
                self._attempts[low] = self._attempts.get(low, 0) + 1
                if self._attempts[low] < attempts_max:
                    continue
                self._damaged.add(low, high)
            self._present.add(low, high)

    def damage_in(self, stored: StoredCheckpoint, places: Iterable[tuple[str, int, int]]) -> DamagedError | None:
        """Return the error for the first of these blocks that are known to be damaged; None if there are none."""
        for name, first, nbytes in places:
            if self._damaged.touches(*stored.range_of(name, first, nbytes)):
                return DamagedError(f"a block of {name!r} does not match its checksum, in any pool that has it")
        return None


def _is_intact(blocks: Blocks) -> bool:
    try:
        blocks.stored.verify_blocks(*blocks[1:])
    except DamagedError:
        return False
    return True


def _each_block(blocks: Blocks) -> Iterator[tuple[int, int]]:
    begin, end = blocks.stored.range_of(*blocks[1:])
    for low in range(begin, end, blocks.stored.block_nbytes):
        yield low, min(low + blocks.stored.block_nbytes, end)


def metadata_of(reader: PoolReader) -> list[tuple[int, int]]:
    """Return the ranges of a pool (begin, end) without which its checkpoints cannot be found: superblocks, tables and
    commit log; the head of each slot, and the headers of its two manifests, which show whether commit records were
    erased; and the manifests of the checkpoints that the commit log names."""
    sb = reader.superblock
    found = ByteRanges((at, at + SUPERBLOCK_NBYTES) for at in SUPERBLOCK_OFFSETS)
    for at in sb.table_offsets:
        found.add(at, at + sb.table_nbytes)
    for number in range(sb.ring_lines):
        found.add(sb.commit_record_offset(number), sb.commit_record_offset(number) + COMMIT_RECORD_NBYTES)
    for slot, (at, _) in enumerate(sb.slots):
        found.add(at, at + sb.manifest_offset)
        for index in (0, 1):
            found.add(sb.manifest_at(slot, index), sb.manifest_at(slot, index) + MANIFEST_HEADER_NBYTES)
    for record in reader.commit_log().records.values():
        if record.slot < len(sb.slots) and record.manifest_nbytes <= sb.manifest_nbytes:
            at = sb.manifest_at(record.slot, record.manifest_index)
            found.add(at, at + record.manifest_nbytes)
    return list(found)
