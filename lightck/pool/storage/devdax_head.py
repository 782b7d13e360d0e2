"""The head of a device-dax device: a small record, stored twice, that says where on the device the pool is.

A device has no file names and no rename: a new pool is made beside the present one, and then the record, written last,
makes it the device's pool. Invariant: at any instant the newest valid copy of the record names a complete pool, or
none. docs/format.md, "On a device-dax device", documents these bytes. This module only encodes and decodes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lightck.pool.format.structures import MIB, PAGE, align_up, crc64

MAGIC = b"LCKDAX\x00\x01"
RECORD_NBYTES = 64
RECORD_OFFSETS = (0, PAGE)
SEQUENCE_MAX = 1 << 63
HEAD_NBYTES = 2 * MIB
"""Bytes at the start of a device that hold no pool; on a device without a record they are checked for foreign data."""

_RECORD = struct.Struct("<8sQQQQ16s")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Record:
    """The pool has ``nbytes`` bytes from ``start`` on; 0 bytes means no pool. Of two valid
    copies, the one with the higher ``sequence`` is used."""

    sequence: int
    start: int
    nbytes: int
    device_nbytes: int

    def pack(self) -> bytes:
        body = _RECORD.pack(MAGIC, self.sequence, self.start, self.nbytes, self.device_nbytes, bytes(16))
        return body + _U64.pack(crc64(body))

    @classmethod
    def unpack(cls, data: bytes) -> Record | None:
        """Parse a record; None if it fails its check."""
        if len(data) < RECORD_NBYTES or data[:8] != MAGIC or crc64(data[:56]) != _U64.unpack(data[56:64])[0]:
            return None
        _, sequence, start, nbytes, device_nbytes, _ = _RECORD.unpack(data[:56])
        return cls(sequence, start, nbytes, device_nbytes) if sequence < SEQUENCE_MAX else None


@dataclass(frozen=True, slots=True)
class Head:
    """The content of a device's head."""

    copies: tuple[Record | None, ...]
    is_signed: bool
    """A copy has lightck's signature, whether it passes its check or not."""
    is_blank: bool
    """The head is zero, except perhaps for a record that a crash interrupted before its first bytes were stored."""

    @property
    def record(self) -> Record | None:
        return newest(self.copies)

    @property
    def pool(self) -> Record | None:
        """The record, if it names a pool; else None."""
        return self.record if self.record is not None and self.record.nbytes else None

    @property
    def is_damaged(self) -> bool:
        """Whether a copy has lightck's signature, but none passes its check."""
        return self.is_signed and self.record is None

    @property
    def is_foreign(self) -> bool:
        return not self.is_signed and not self.is_blank


def newest(copies: Iterable[Record | None]) -> Record | None:
    """Return the copy with the highest sequence number."""
    return max((copy for copy in copies if copy is not None), key=lambda r: r.sequence, default=None)


def examine(read: Callable[[int, int], bytes]) -> Head:
    """Parse the head through ``read(offset, nbytes)``."""
    data = read(0, HEAD_NBYTES)
    raw = [data[at : at + RECORD_NBYTES] for at in RECORD_OFFSETS]
    first, second = RECORD_OFFSETS
    others = (data[first + RECORD_NBYTES : second], data[second + RECORD_NBYTES :])
    is_blank = all(each[:8] == bytes(8) for each in raw) and not any(part.strip(b"\0") for part in others)
    return Head(tuple(map(Record.unpack, raw)), any(each[:8] == MAGIC for each in raw), is_blank)


def unit(align: int) -> int:
    """Return the unit of which pool offsets and extent lengths are multiples, so that each pool can be mapped alone."""
    return align_up(HEAD_NBYTES, align)


def place(nbytes: int, device_nbytes: int, align: int, there: Record | None) -> int | None:
    """Return the offset for a pool of this size beside the present one (``there``), or None if there is no room.

    Pools go to one end of the device or to the other, so that the free space stays in one piece."""
    step = unit(align)
    room, end = align_up(nbytes, step), device_nbytes // step * step
    if there is None:
        return step if step + room <= end else None
    if step + room <= there.start:
        return step
    return end - room if there.start + align_up(there.nbytes, step) + room <= end else None
