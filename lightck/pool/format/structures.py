"""The bytes of a pool, format version 1: superblock, commit record, slot header, next-batch record, manifest header.

docs/format.md documents these structures; change that page and this module in the same commit. Superblock, commit
record and manifest header are immutable classes with ``pack`` and ``unpack``. Functions pack and unpack the slot header
and the next-batch record. All bytes that are unpacked are untrusted. If a check fails, ``unpack`` raises
``DamagedError``, and a reader tries the next copy. ``unpack_slot_header`` and ``unpack_next_batch`` return None
instead. If the file is no pool, or a pool of another format, ``Superblock.unpack`` raises ``NotAPoolError`` or
``FormatError``, which reach the user. This module reads no file and allocates nothing large. Checksums come from the
native library: CRC-64/XZ for metadata, seeded CRC-32C for blocks of payload.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

from lightck._native import ffi, lib
from lightck.errors import FormatError, NotAPoolError

MAGIC = b"LIGHTCK\x01"
ENDIAN_TAG = 0x01020304
MAJOR, MINOR = 1, 0
COMPAT_NEXT = 1
"""Feature flag of ``Superblock.compat``: slots may have a next-batch record."""
INCOMPAT_GROUP = 1
"""Feature flag of ``Superblock.incompat``: the pool is that of a rank (docs/format.md, "Pools of a rank")."""
INCOMPAT_SHARES = 2
"""Feature flag of ``Superblock.incompat``: of some tensors the pool holds only the rows that its rank writes."""
INCOMPAT_GRADIENTS = 4
"""Feature flag of ``Superblock.incompat``: slots hold gradient records, and bases lie in homes (docs/format.md, "Pools
with gradient records")."""
RO_COMPAT_KNOWN, INCOMPAT_KNOWN = 0, INCOMPAT_GROUP | INCOMPAT_SHARES | INCOMPAT_GRADIENTS
"""The feature flags that this lightck knows. ``RO_COMPAT``: flags that only a writer must know. ``INCOMPAT``: flags
that readers and writers must know."""

KIB, MIB = 1 << 10, 1 << 20
SUPERBLOCK_NBYTES = 4 * KIB
SUPERBLOCK_OFFSETS = (0, SUPERBLOCK_NBYTES)
RING_OFFSET, RING_LINES, RING_STRIDE = 8 * KIB, 16, 256
"""The commit log of a new pool: offset, number of commit records, bytes from one record to the next."""
RING_LINES_MAX = 64
TABLE_OFFSET = 16 * KIB
SLOT_ALIGN = 2 * MIB
PAGE = 4 * KIB
EXTENT_ALIGN, LARGE_EXTENT_ALIGN, LARGE_EXTENT = 256, 4 * KIB, MIB
"""Extents start at multiples of ``EXTENT_ALIGN``; those of at least ``LARGE_EXTENT`` bytes at
``LARGE_EXTENT_ALIGN``."""
BLOCK_MAX = MIB
"""Maximum bytes per block checksum, and the value in a new pool."""
SLOTS_MAX = 8
RECORD_SLOTS_MAX = 255
"""Maximum number of slots of a pool with gradient records: a commit record names its slot in 8 bits."""
GRADIENT_RING_LINES_MIN = 8
"""Minimum number of commit records in a pool with gradient records. It does not grow with the number of slots: only the
newest checkpoints need a commit record. Older gradient records are found through the chain of a newer checkpoint."""
TABLE_NBYTES_MAX = 256 * MIB

COMMIT_RECORD_NBYTES = SLOT_HEADER_NBYTES = 64
KIND_CHECKPOINT, KIND_ADOPTION = 1, 2
SLOT_MAGIC = b"LCKSLOT1"
SLOT_STRUCK = 1
MANIFEST_MAGIC = b"LCKMANI1"
MANIFEST_HEADER_NBYTES = 128
TENSOR_RECORD_NBYTES = 32
NEXT_BATCH_MAGIC = b"LCKNEXT1"
NEXT_OFFSET, NEXT_NBYTES = 2 * KIB, 2 * KIB
REGION_SLOT, REGION_HOME = 1, 2
U32_MAX = (1 << 32) - 1
NUMBER_MAX = 1 << 63
"""Generations, incarnations, steps and iterations are below this. A structure with a larger number is damaged."""
POOL_NBYTES_MIN = TABLE_OFFSET + 2 * PAGE


class DamagedError(Exception):
    """A structure fails its check. Internal: a reader uses another copy or checkpoint, or raises a ``LightckError``."""


def align_up(value: int, to: int) -> int:
    """Return the smallest multiple of ``to`` that is at least ``value``."""
    return -(-value // to) * to


def crc64(data: bytes | bytearray | memoryview, crc: int = 0) -> int:
    """Return the CRC-64/XZ of ``data``. ``crc``: the value for the bytes before ``data``."""
    return lib.lck_crc64(crc, ffi.from_buffer(data), len(data))


def uuid_words(uuid: bytes) -> tuple[int, int]:
    """Return the two little-endian words of a uuid, (low, high), that seed the block checksums."""
    return int.from_bytes(uuid[:8], "little"), int.from_bytes(uuid[8:], "little")


def layout_hash(table: bytes) -> bytes:
    """Return the 16-byte hash that identifies a layout table."""
    return blake2b(table, digest_size=16).digest()


_SUPER = struct.Struct("<8sIHHQQQ16sQQIIQQQ16sQQQQQII")
_REGION = struct.Struct("<IIQQQ")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Superblock:
    """What is fixed when a pool is created: its identity, size and geometry. Offsets are bytes from the start of the
    pool, except ``manifest_offset``, ``payload_offset`` and ``reserve_offset``: these count from the start of a slot.
    Fields are in the order of the bytes; ``slots`` and ``homes`` come last."""

    compat: int = 0
    ro_compat: int = 0
    incompat: int = 0
    uuid: bytes
    nbytes: int
    ring_offset: int = RING_OFFSET
    ring_lines: int = RING_LINES
    ring_stride: int = RING_STRIDE
    table_offsets: tuple[int, int]
    table_nbytes: int
    table_hash: bytes
    block: int
    manifest_offset: int
    manifest_nbytes: int
    payload_offset: int
    reserve_offset: int
    """Where the reserve of a slot begins: the space for extra entries, which are added after the pool was created."""
    slots: tuple[tuple[int, int], ...]
    """(offset, nbytes) of each slot."""
    homes: tuple[tuple[int, int], ...] = ()
    """(offset, nbytes) of the two regions for homes in a pool with gradient records; each holds one home of every unit.
    In such a pool the slots lie one after the other."""

    def pack(self) -> bytes:
        head = _SUPER.pack(
            MAGIC,
            ENDIAN_TAG,
            MAJOR,
            MINOR,
            self.compat,
            self.ro_compat,
            self.incompat,
            self.uuid,
            self.nbytes,
            self.ring_offset,
            self.ring_lines,
            self.ring_stride,
            *self.table_offsets,
            self.table_nbytes,
            self.table_hash,
            self.block,
            self.manifest_offset,
            self.manifest_nbytes,
            self.payload_offset,
            self.reserve_offset,
            len(self.homes) + 1 if self.has_gradients else len(self.slots),
            0,
        )
        body = (head + self._packed_regions()).ljust(SUPERBLOCK_NBYTES - 8, b"\0")
        return body + _U64.pack(crc64(body))

    def _packed_regions(self) -> bytes:
        if not self.has_gradients:
            return b"".join(_REGION.pack(REGION_SLOT, i, off, n, 0) for i, (off, n) in enumerate(self.slots))
        homes = b"".join(_REGION.pack(REGION_HOME, i, off, n, 0) for i, (off, n) in enumerate(self.homes))
        return _REGION.pack(REGION_SLOT, 0, *self.slots[0], len(self.slots)) + homes

    @classmethod
    def unpack(cls, data: bytes) -> Superblock:
        """Parse one copy of the superblock. Raises ``NotAPoolError`` (no magic bytes), ``FormatError`` (newer format or
        other byte order) or ``DamagedError`` (a check fails)."""
        if len(data) < SUPERBLOCK_NBYTES or data[: len(MAGIC)] != MAGIC:
            raise NotAPoolError("it does not begin with lightck's magic bytes")
        body, (check,) = data[:-8], _U64.unpack(data[-8:])
        if crc64(body) != check:
            raise DamagedError("its checksum does not match")
        return cls._from_checked(body)

    @classmethod
    def _from_checked(cls, body: bytes) -> Superblock:
        _, endian, major, minor, compat, ro_compat, incompat, *fixed, n_regions, _ = _SUPER.unpack_from(body)
        if endian != ENDIAN_TAG:
            raise FormatError(
                "the pool was written on a machine with another byte order. Read the pool on such a machine."
            )
        if major != MAJOR or incompat & ~INCOMPAT_KNOWN:
            raise FormatError(
                f"the pool has format {major}.{minor} (features {incompat:#x}), and this lightck reads format {MAJOR} "
                f"(features {INCOMPAT_KNOWN:#x}). The pool was written by a newer lightck. Update lightck to read "
                "the pool."
            )
        if incompat & INCOMPAT_SHARES and not incompat & INCOMPAT_GROUP:
            raise DamagedError("it says that the pool has shares of tensors, and not that it is the pool of a rank")
        if n_regions > (len(body) - _SUPER.size) // _REGION.size:
            raise DamagedError("it lists more regions than fit into it")
        regions = [_REGION.unpack_from(body, _SUPER.size + i * _REGION.size) for i in range(n_regions)]
        homes: list[tuple[int, int]] = []
        if incompat & INCOMPAT_GRADIENTS:
            slots, homes = _slots_and_homes(regions)
        else:
            slots = []
            for kind, index, off, length, _ in regions:
                if kind == REGION_SLOT and index == len(slots):
                    slots.append((off, length))
        uuid, nbytes, ring_offset, ring_lines, ring_stride, table_a, table_b, *rest = fixed
        table_nbytes, table_hash, block, manifest_offset, manifest_nbytes, payload_offset, reserve_offset = rest
        sb = cls(
            compat=compat,
            ro_compat=ro_compat,
            incompat=incompat,
            uuid=uuid,
            nbytes=nbytes,
            ring_offset=ring_offset,
            ring_lines=ring_lines,
            ring_stride=ring_stride,
            table_offsets=(table_a, table_b),
            table_nbytes=table_nbytes,
            table_hash=table_hash,
            block=block,
            manifest_offset=manifest_offset,
            manifest_nbytes=manifest_nbytes,
            payload_offset=payload_offset,
            reserve_offset=reserve_offset,
            slots=tuple(slots),
            homes=tuple(homes),
        )
        sb._check_geometry()
        return sb

    def _check_geometry(self) -> None:
        """Check all that later code relies on, so that no offset in a hostile file leads outside of the file. Raises
        ``DamagedError``."""
        slot_nbytes = {n for _, n in self.slots}
        first = min((off for off, _ in (*self.slots, *self.homes)), default=0)
        slots_max = RECORD_SLOTS_MAX if self.has_gradients else SLOTS_MAX
        lines_min = GRADIENT_RING_LINES_MIN if self.has_gradients else 2 * len(self.slots)
        ok = (
            self.nbytes < NUMBER_MAX
            and 2 <= len(self.slots) <= slots_max
            and len(slot_nbytes) == 1
            and self._homes_fit()
            and all(off % PAGE == 0 and off + n <= self.nbytes for off, n in self.slots)
            and all(a + n <= b for (a, n), (b, _) in zip(self.slots, self.slots[1:], strict=False))
            and self.ring_stride >= COMMIT_RECORD_NBYTES
            and self.ring_stride % 8 == 0
            and self.ring_offset % 8 == 0
            and lines_min <= self.ring_lines <= RING_LINES_MAX
            and self.ring_offset + self.ring_lines * self.ring_stride <= first
            and self.table_nbytes <= TABLE_NBYTES_MAX
            and all(off + self.table_nbytes <= first for off in self.table_offsets)
            and 256 <= self.block <= BLOCK_MAX
            and self.block % 256 == 0
            and self.manifest_offset >= SLOT_HEADER_NBYTES
            and self.manifest_offset % 64 == self.manifest_nbytes % 64 == 0
            and self.manifest_offset + 2 * self.manifest_nbytes <= self.payload_offset
            and self.payload_offset <= self.reserve_offset <= self.slots[0][1]
        )
        if not ok:
            raise DamagedError("its offsets and sizes do not go together")

    def _homes_fit(self) -> bool:
        """Whether the homes, if there are any, lie in the pool beside each other and beside the slots."""
        if not self.homes:
            return not self.has_gradients
        (a, n), (b, m) = self.homes
        (low, _), (high, length) = self.slots[0], self.slots[-1]
        runs = sorted([(a, a + n), (b, b + m), (low, high + length)])
        return (
            n == m > 0
            and a % PAGE == b % PAGE == 0
            and runs[-1][1] <= self.nbytes
            and all(one[1] <= two[0] for one, two in pairwise(runs))
        )

    @property
    def has_gradients(self) -> bool:
        """Whether the slots hold gradient records, and the bases lie in homes."""
        return bool(self.incompat & INCOMPAT_GRADIENTS)

    @property
    def home_nbytes(self) -> int:
        """Length of each of the two regions for homes; 0 if there are none."""
        return self.homes[0][1] if self.homes else 0

    @property
    def has_next_batch(self) -> bool:
        """Whether the pool's slots have a place for a next-batch record, which no manifest overlaps."""
        return bool(self.compat & COMPAT_NEXT) and self.manifest_offset >= NEXT_OFFSET + NEXT_NBYTES

    @property
    def has_group(self) -> bool:
        """Whether the pool is that of a rank: its layout table has a group, and its entries may have pieces."""
        return bool(self.incompat & INCOMPAT_GROUP)

    @property
    def has_shares(self) -> bool:
        """Whether entries can have a share."""
        return bool(self.incompat & INCOMPAT_SHARES)

    @property
    def slot_nbytes(self) -> int:
        """Length of each slot."""
        return self.slots[0][1]

    @property
    def manifest_nbytes_max(self) -> int:
        """Maximum length of a manifest. A commit record stores the length in 32 bits."""
        return min(self.manifest_nbytes, U32_MAX)

    def manifest_at(self, slot: int, index: int) -> int:
        """Return the offset of a slot's manifest in the pool. ``index`` (0 or 1): which of the slot's two manifests."""
        return self.slots[slot][0] + self.manifest_offset + index * self.manifest_nbytes

    def commit_record_offset(self, position: int) -> int:
        """Return the offset of a commit record in the pool. ``position``: its position in the commit log, from 0."""
        return self.ring_offset + position * self.ring_stride


def _slots_and_homes(
    regions: list[tuple[int, int, int, int, int]],
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the slots and the homes that the regions of a pool with gradient records describe: one region for all
    slots, one for each home. Raises ``DamagedError``."""
    kinds = [(kind, index) for kind, index, *_ in regions]
    if kinds != [(REGION_SLOT, 0), (REGION_HOME, 0), (REGION_HOME, 1)] or regions[1][4] or regions[2][4]:
        raise DamagedError("its regions are not those of a pool with gradient records")
    _, _, offset, nbytes, count = regions[0]
    if count > RECORD_SLOTS_MAX:
        raise DamagedError("it has more slots than a pool may have")
    return [(offset + i * nbytes, nbytes) for i in range(count)], [region[2:4] for region in regions[1:]]


_COMMIT_RECORD = struct.Struct("<QQQQQIBBBBQ")


class CommitRecord(NamedTuple):
    """One record of the commit log, which says that a checkpoint is complete. ``payload_generation`` is the generation
    of the checkpoint's bytes; only in an adoption record does it differ from ``generation``. Fields are in the order of
    the bytes."""

    generation: int
    incarnation: int
    step: int
    payload_generation: int
    manifest_hash: int
    manifest_nbytes: int
    kind: int
    slot: int
    manifest_index: int

    def pack(self, uuid: bytes) -> bytes:
        body = _COMMIT_RECORD.pack(*self, 0, 0)
        return body + _U64.pack(crc64(uuid + body))

    @classmethod
    def unpack(cls, data: bytes, uuid: bytes) -> CommitRecord | None:
        """Parse one record. Returns None if the generation (the first 8 bytes) is 0 and cannot be reconstructed from
        the other bytes. Raises ``DamagedError`` if a check fails."""
        if len(data) < COMMIT_RECORD_NBYTES:
            raise DamagedError("the commit record is cut short")
        body, (check,) = data[:56], _U64.unpack(data[56:64])
        if body[:8] == bytes(8):
            # The first 8 bytes are stored last. If they are zeros, a crash came before that store, or a bit error
            # erased them. A record of kind CHECKPOINT is reconstructed: ``payload_generation`` repeats its generation,
            # and its checkpoint was durable before the record was stored. An adoption record cannot be reconstructed:
            # its two generations differ, so the checksum does not match.
            body = body[24:32] + body[8:]
            if body[:8] == bytes(8) or crc64(uuid + body) != check:
                return None
        if crc64(uuid + body) != check:
            raise DamagedError("the commit record does not match its checksum")
        record = cls._make(_COMMIT_RECORD.unpack(body)[:-2])
        if record.kind not in (KIND_CHECKPOINT, KIND_ADOPTION) or record.manifest_index > 1:
            raise DamagedError("the commit record is of an unknown kind")
        if max(record.generation, record.incarnation, record.step, record.payload_generation) >= NUMBER_MAX:
            raise DamagedError("the commit record has impossible numbers")
        return record


_HEADER = struct.Struct("<Q8sII32s")


def pack_slot_header(generation: int, slot: int, uuid: bytes, *, struck: bool = False) -> bytes:
    """Pack a slot header of 64 bytes. ``struck``: whether the header strikes the checkpoint in the slot."""
    body = _HEADER.pack(generation, SLOT_MAGIC, slot, SLOT_STRUCK if struck else 0, bytes(32))
    return body + _U64.pack(crc64(uuid + body))


def unpack_slot_header(data: bytes, slot: int, uuid: bytes) -> int | None:
    """Return the generation that a slot header names; None if the header was never written or is damaged."""
    if len(data) < SLOT_HEADER_NBYTES:
        return None
    body, (check,) = data[:56], _U64.unpack(data[56:64])
    if crc64(uuid + body) != check:
        return None
    generation, magic, index, _, _ = _HEADER.unpack(body)
    return generation if magic == SLOT_MAGIC and index == slot and generation < NUMBER_MAX else None


def is_struck_header(data: bytes) -> bool:
    """Whether a slot header says that the checkpoint in the slot was struck. This function does not check the header;
    ``unpack_slot_header`` does."""
    return bool(_HEADER.unpack_from(data)[3] == SLOT_STRUCK)


_NEXT_BATCH = struct.Struct("<8sQII")
_NEXT_ENTRY = struct.Struct("<8sII")
NEXT_ENTRIES_MAX = (NEXT_NBYTES - _NEXT_BATCH.size - _U64.size) // _NEXT_ENTRY.size


class NextBatch(NamedTuple):
    """One entry of a next-batch record: the checksum of something that followed a checkpoint, such as a loader's first
    batch or the arguments of the model's first forward."""

    key: bytes
    """``next_batch_key`` of a name (docs/format.md, "Next-batch record")."""
    kind: int
    """What the checksum covers: docs/format.md, "Next-batch record"."""
    checksum: int


@lru_cache(maxsize=256)
def next_batch_key(name: str) -> bytes:
    """Return the 8-byte hash of a name, for example of a loader. The empty name stands for the model's forward."""
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8, person=b"lck-next").digest()


def pack_next_batch(generation: int, entries: Sequence[NextBatch], uuid: bytes) -> bytes:
    """Pack the next-batch record of a checkpoint. Entries after the first ``NEXT_ENTRIES_MAX`` are left out."""
    entries = entries[:NEXT_ENTRIES_MAX]
    head = _NEXT_BATCH.pack(NEXT_BATCH_MAGIC, generation, len(entries), 0)
    body = head + b"".join([_NEXT_ENTRY.pack(*entry) for entry in entries])
    return body + _U64.pack(crc64(uuid + body))


def unpack_next_batch(data: bytes, generation: int, uuid: bytes) -> tuple[NextBatch, ...] | None:
    """Parse the next-batch record of a generation. Returns None if the record was never written, is truncated or
    damaged, or belongs to another generation."""
    if len(data) < _NEXT_BATCH.size:
        return None
    magic, named, count, _ = _NEXT_BATCH.unpack_from(data)
    end = _NEXT_BATCH.size + count * _NEXT_ENTRY.size
    if magic != NEXT_BATCH_MAGIC or named != generation or count > NEXT_ENTRIES_MAX or len(data) < end + _U64.size:
        return None
    if crc64(uuid + data[:end]) != _U64.unpack_from(data, end)[0]:
        return None
    return tuple(NextBatch(*_NEXT_ENTRY.unpack_from(data, at)) for at in range(_NEXT_BATCH.size, end, _NEXT_ENTRY.size))


_MANIFEST = struct.Struct("<8sQQQQ16s16sIIQQIIIIIIII")
_N_BEFORE_RECORDS = 8
"""The packed header has two more fields than ``ManifestHeader``, after its first 8 fields: the offset of the tensor
records, and the length of one record. These two are the same in every manifest."""


class ManifestHeader(NamedTuple):
    """The first 128 bytes of a manifest: the checkpoint's identity and the offsets of the manifest's parts, from the
    start of the manifest. Fields are in the order of the bytes."""

    generation: int
    incarnation: int
    step: int
    iteration: int
    """Iterations of the training loop so far, also those without an update (``Session.iteration``)."""
    table_hash: bytes
    origin: bytes
    """The uuid that seeds the block checksums: the pool's, except in a checkpoint that was copied from another pool."""
    n_records: int
    n_table_entries: int
    """Number of the records that belong to entries of the layout table. The other records belong to extra entries."""
    crcs_offset: int
    crcs_count: int
    extras_offset: int
    extras_nbytes: int
    state_offset: int
    state_nbytes: int
    slot: int

    def pack(self) -> bytes:
        head, tail = self[:_N_BEFORE_RECORDS], self[_N_BEFORE_RECORDS:]
        packed = _MANIFEST.pack(MANIFEST_MAGIC, *head, MANIFEST_HEADER_NBYTES, TENSOR_RECORD_NBYTES, *tail, 0)
        return packed.ljust(MANIFEST_HEADER_NBYTES, b"\0")

    @classmethod
    def unpack(cls, manifest: bytes, nbytes: int | None = None) -> ManifestHeader:
        """Parse the header, and check that all parts lie in the manifest. ``nbytes``: the manifest's length, if
        ``manifest`` holds only the header; None: ``manifest`` is complete. Raises ``DamagedError``."""
        if len(manifest) < MANIFEST_HEADER_NBYTES or manifest[:8] != MANIFEST_MAGIC:
            raise DamagedError("its manifest does not begin with its magic bytes")
        values = _MANIFEST.unpack_from(manifest)[1:-1]
        head, (records_offset, record_nbytes, *tail) = values[:_N_BEFORE_RECORDS], values[_N_BEFORE_RECORDS:]
        found = cls._make((*head, *tail))
        parts = (
            (records_offset, found.n_records * record_nbytes),
            (found.crcs_offset, 4 * found.crcs_count),
            (found.extras_offset, found.extras_nbytes),
            (found.state_offset, found.state_nbytes),
        )
        nbytes = len(manifest) if nbytes is None else nbytes
        if any(off + n > nbytes for off, n in parts) or found.n_table_entries > found.n_records:
            raise DamagedError("parts of its manifest lie outside of it")
        if (records_offset, record_nbytes) != (MANIFEST_HEADER_NBYTES, TENSOR_RECORD_NBYTES) or found.crcs_offset % 4:
            raise DamagedError("the parts of its manifest have the wrong place or size")
        if max(found.generation, found.incarnation, found.step, found.iteration) >= NUMBER_MAX:
            raise DamagedError("its manifest has impossible numbers")
        return found


def manifest_hash(uuid: bytes, manifest: bytes) -> int:
    """Return the hash of a manifest that its commit record contains."""
    return crc64(uuid + manifest)
