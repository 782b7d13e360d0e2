"""The head of a device-dax device: a small record, stored twice, that says where on the device the pool is.

A device has no file names and no rename. So a new pool is made beside the present one, and the record that is written
afterwards makes the new pool the device's pool. Invariant: at any instant the newest valid copy of the record names a
complete pool, or no pool. docs/format.md, "On a device-dax device", documents these bytes. This module only encodes and
decodes.
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
"""Sequence numbers are below this."""
HEAD_NBYTES = 2 * MIB
"""Bytes at the start of a device that hold no pool. On a device without a record they are checked for foreign data."""

_RECORD = struct.Struct("<8sQQQQ16s")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Record:
    """One copy of the record. The pool has ``nbytes`` bytes from offset ``start`` of the device on; if ``nbytes`` is 0,
    there is no pool. If both copies are valid, the copy with the higher ``sequence`` is used."""

    sequence: int
    start: int
    nbytes: int
    device_nbytes: int
    """Size of the device when the record was written."""

    def pack(self) -> bytes:
        body = _RECORD.pack(MAGIC, self.sequence, self.start, self.nbytes, self.device_nbytes, bytes(16))
        return body + _U64.pack(crc64(body))

    @classmethod
    def unpack(cls, data: bytes) -> Record | None:
        """Parse a record. Returns None if the record fails its check."""
        if len(data) < RECORD_NBYTES or data[:8] != MAGIC or crc64(data[:56]) != _U64.unpack(data[56:64])[0]:
            return None
        _, sequence, start, nbytes, device_nbytes, _ = _RECORD.unpack(data[:56])
        return cls(sequence, start, nbytes, device_nbytes) if sequence < SEQUENCE_MAX else None


@dataclass(frozen=True, slots=True)
class Head:
    """The content of a device's head."""

    copies: tuple[Record | None, ...]
    """The two copies of the record; None for a copy that fails its check."""
    is_signed: bool
    """Whether one of the copies has lightck's signature, even if it fails its check."""
    is_blank: bool
    """Whether the head is all zeros. A record whose first 8 bytes are zeros counts as zeros, because a crash
    interrupted the store of the record."""

    @property
    def record(self) -> Record | None:
        """The newest valid copy; None if no copy is valid."""
        return newest(self.copies)

    @property
    def pool(self) -> Record | None:
        """The record, if it names a pool; else None."""
        return self.record if self.record is not None and self.record.nbytes else None

    @property
    def is_damaged(self) -> bool:
        """Whether no copy passes its check, although one of the two has lightck's signature."""
        return self.is_signed and self.record is None

    @property
    def is_foreign(self) -> bool:
        """Whether the head holds data of another program."""
        return not self.is_signed and not self.is_blank


def newest(copies: Iterable[Record | None]) -> Record | None:
    """Return the copy with the highest sequence number; None if all are None."""
    return max((copy for copy in copies if copy is not None), key=lambda r: r.sequence, default=None)


def examine(read: Callable[[int, int], bytes]) -> Head:
    """Parse the head through ``read(offset, nbytes)``."""
    data = read(0, HEAD_NBYTES)
    raw = [data[at : at + RECORD_NBYTES] for at in RECORD_OFFSETS]
    first, second = RECORD_OFFSETS
    others = (data[first + RECORD_NBYTES : second], data[second + RECORD_NBYTES :])
    is_blank = all(each[:8] == bytes(8) for each in raw) and not any(part.strip(b"\0") for part in others)
    return Head(tuple(map(Record.unpack, raw)), any(each[:8] == MAGIC for each in raw), is_blank)


def granularity(align: int) -> int:
    """Return a number of bytes: offsets and extent lengths of pools are multiples of it, so that each pool can be
    mapped alone. ``align``: the alignment of the device's mappings."""
    return align_up(HEAD_NBYTES, align)


def offset_of_new_pool(nbytes: int, device_nbytes: int, align: int, present: Record | None) -> int | None:
    """Return the offset for a pool of ``nbytes`` beside the present pool (``present``); None if there is no room.

    Each pool lies at one end of the device, so that the free space stays in one piece."""
    step = granularity(align)
    room, end = align_up(nbytes, step), device_nbytes // step * step
    if present is None:
        return step if step + room <= end else None
    if step + room <= present.start:
        return step
    return end - room if present.start + align_up(present.nbytes, step) + room <= end else None
