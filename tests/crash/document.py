"""A pool as a document: its structures as bytes that can be changed, and sealed again so that every check passes.

A ``Base`` is read once from a good pool; a ``Document`` is one edition of it. What was changed is written as *patches*
(offset in the pool, bytes), the rest of the file stays. What is sealed again gets past the checksums, so that a reader
has nothing left but its own checks. Meant for the fuzzer; it writes no pool.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from crash.messages import Node, parse
from lightck._native import lib
from lightck.pool.format import layout
from lightck.pool.format.layout import Entry
from lightck.pool.format.structures import (
    COMMIT_RECORD_NBYTES,
    MANIFEST_HEADER_NBYTES,
    SUPERBLOCK_NBYTES,
    SUPERBLOCK_OFFSETS,
    TENSOR_RECORD_NBYTES,
    DamagedError,
    Superblock,
    crc64,
    layout_hash,
    manifest_hash,
    uuid_words,
)
from lightck.pool.reader import PoolReader, StoredCheckpoint

Patch = tuple[int, bytes]
"""Offset in the pool, and what is put there."""
_U64, _U32 = struct.Struct("<Q"), struct.Struct("<I")
_RECORD = struct.Struct("<QQQII")
_TABLE_NBYTES_AT, _TABLE_HASH_AT = 96, 104
_CHECKED_MAX = 1 << 16
"""Bytes of a tensor for which checksums are made anew."""


@dataclass(frozen=True, slots=True)
class BaseCheckpoint:
    """A committed checkpoint: the places and the contents of its parts."""

    position: int
    slot: int
    manifest_at: int
    generation: int
    header: bytes
    records: bytes
    crcs: bytes
    extras: bytes
    state: bytes
    state_tree: Node
    origin: bytes


class Base:
    """The structures of a good pool, newest checkpoint first."""

    def __init__(self, reader: PoolReader) -> None:
        sb = reader.superblock
        self.sb: Superblock = sb
        self.nbytes = sb.nbytes
        self.superblock = reader.read(0, SUPERBLOCK_NBYTES)
        self.table = reader.table
        self.table_tree = parse(reader.table)
        self.entries = reader.entries
        self.records = [reader.read(sb.commit_record_offset(i), COMMIT_RECORD_NBYTES) for i in range(sb.ring_lines)]
        self.headers = [reader.read(off, COMMIT_RECORD_NBYTES) for off, _ in sb.slots]
        self.payload = [reader.read(off, _CHECKED_MAX + sb.payload_offset) for off, _ in sb.slots]
        positions = {record.generation: at for at, record in reader.commit_log().records.items()}
        found = [v for v in reader.checkpoints() if isinstance(v, StoredCheckpoint)]
        self.checkpoints = [_base_checkpoint(reader, v, positions[v.record.generation]) for v in found]


def _base_checkpoint(reader: PoolReader, v: StoredCheckpoint, position: int) -> BaseCheckpoint:
    sb = reader.superblock
    at = sb.slots[v.record.slot][0] + sb.manifest_offset + v.record.manifest_index * sb.manifest_nbytes
    raw = reader.read(at, v.record.manifest_nbytes)
    records = raw[MANIFEST_HEADER_NBYTES : MANIFEST_HEADER_NBYTES + v.header.n_records * TENSOR_RECORD_NBYTES]
    crcs = raw[v.header.crcs_offset : v.header.crcs_offset + 4 * v.header.crcs_count]
    extras = raw[v.header.extras_offset : v.header.extras_offset + v.header.extras_nbytes]
    return BaseCheckpoint(
        position,
        v.record.slot,
        at,
        v.record.payload_generation,
        raw[:MANIFEST_HEADER_NBYTES],
        records,
        crcs,
        extras,
        bytes(v.state),
        parse(bytes(v.state)),
        v.header.origin,
    )


@dataclass(slots=True)
class Manifest:
    """One checkpoint's manifest in this edition. ``over``: put over the header when all else is in place."""

    base: BaseCheckpoint
    records: bytes
    crcs: bytes
    extras: bytes
    state: bytes
    header: bytearray
    over: list[Patch] = field(default_factory=list)
    is_changed: bool = False

    def pack(self) -> bytes:
        crcs_at = MANIFEST_HEADER_NBYTES + len(self.records)
        extras_at = crcs_at + len(self.crcs)
        _U32.pack_into(self.header, 72, len(self.records) // TENSOR_RECORD_NBYTES)
        struct.pack_into(
            "<6I",
            self.header,
            96,
            crcs_at,
            len(self.crcs) // 4,
            extras_at,
            len(self.extras),
            extras_at + len(self.extras),
            len(self.state),
        )
        for at, data in self.over:
            self.header[at : at + len(data)] = data
        return bytes(self.header) + self.records + self.crcs + self.extras + self.state


class Document:
    """One edition of a base. ``tail`` are patches that go on top, unsealed."""

    def __init__(self, base: Base) -> None:
        self.base = base
        self.superblock = bytearray(base.superblock)
        self.copies: tuple[int, ...] = SUPERBLOCK_OFFSETS
        self.table = base.table
        self.records: dict[int, bytearray] = {}
        self.headers: dict[int, bytearray] = {}
        self.manifests = [
            Manifest(v, v.records, v.crcs, v.extras, v.state, bytearray(v.header)) for v in base.checkpoints
        ]
        self.tail: list[Patch] = []
        self.is_sealed = True

    def record(self, position: int) -> bytearray:
        """The commit record at this position, to be changed."""
        return self.records.setdefault(position, bytearray(self.base.records[position]))

    def slot_header(self, slot: int) -> bytearray:
        return self.headers.setdefault(slot, bytearray(self.base.headers[slot]))

    def follow_table(self) -> None:
        """Make superblock and manifests count on the table as it is now, as far as it can be read."""
        digest = layout_hash(self.table)
        _U64.pack_into(self.superblock, _TABLE_NBYTES_AT, len(self.table))
        self.superblock[_TABLE_HASH_AT : _TABLE_HASH_AT + 16] = digest
        sb = self.base.sb
        try:
            entries = layout.decode(self.table, low=sb.payload_offset, high=sb.reserve_offset)
        except DamagedError:
            return
        for manifest in self.manifests:
            manifest.header[40:56] = digest
            _U32.pack_into(manifest.header, 76, len(entries))
            self._follow(manifest, entries)

    def follow_extras(self, manifest: Manifest) -> None:
        """Make the records of a manifest count on its extras as they are now, as far as they can be read."""
        self._follow(manifest, self.base.entries)

    def _follow(self, manifest: Manifest, entries: tuple[Entry, ...]) -> None:
        sb = self.base.sb
        manifest.is_changed = True
        try:
            extras = layout.decode_extras(manifest.extras, low=sb.reserve_offset, high=sb.slot_nbytes)
        except DamagedError:
            return
        self.follow_entries(manifest, (*entries, *extras))

    def follow_entries(self, manifest: Manifest, entries: tuple[Entry, ...]) -> None:
        """Records and checksums for these entries, over the bytes that lie there."""
        manifest.is_changed = True
        base, sb = manifest.base, self.base.sb
        payload = self.base.payload[base.slot]
        records: list[bytes] = []
        crcs: list[int] = []
        for number, entry in enumerate(entries):
            records.append(_RECORD.pack(base.generation, base.generation, entry.offset, len(crcs), 0))
            if entry.nbytes > _CHECKED_MAX:
                continue
            for index, at in enumerate(range(0, entry.nbytes, sb.block)):
                data = payload[entry.offset + at : entry.offset + min(entry.nbytes, at + sb.block)]
                crcs.append(crc32c(data) ^ lib.lck_block_seed(*uuid_words(base.origin), number, base.generation, index))
        manifest.records, manifest.crcs = b"".join(records), struct.pack(f"<{len(crcs)}I", *crcs)

    def patches(self) -> list[Patch]:
        """What has to be written over the base."""
        sb, found = self.base.sb, []
        if self.table != self.base.table:
            found += [(at, self.table) for at in sb.table_offsets]
        for manifest in self.manifests:
            if manifest.is_changed:
                raw = manifest.pack()
                found.append((manifest.base.manifest_at, raw[: sb.manifest_nbytes]))
                if self.is_sealed:
                    record = self.record(manifest.base.position)
                    _U64.pack_into(record, 32, manifest_hash(sb.uuid, raw))
                    _U32.pack_into(record, 40, len(raw))
        found += [(sb.commit_record_offset(at), self._sealed(record)) for at, record in self.records.items()]
        found += [(sb.slots[slot][0], self._sealed(header)) for slot, header in self.headers.items()]
        if self.superblock != self.base.superblock:
            body = bytes(self.superblock[:-8])
            check = _U64.pack(crc64(body)) if self.is_sealed else bytes(self.superblock[-8:])
            found += [(at, body + check) for at in self.copies]
        return found + self.tail

    def _sealed(self, record: bytearray) -> bytes:
        if not self.is_sealed:
            return bytes(record)
        return bytes(record[:56]) + _U64.pack(crc64(self.base.sb.uuid + bytes(record[:56])))


def crc32c(data: bytes) -> int:
    from lightck._native import ffi, lib

    return int(lib.lck_crc32c(ffi.from_buffer(data), len(data)))
