"""Send one checkpoint of a pool to a tier.

    hold      the training overwrites other slots meanwhile (``pool/slot_locks.py``)
    read      pieces of at most 32 MiB, each of tensors that are likely to change together; each block is verified
    compress  each piece, if the tier is to be compressed and the piece gets smaller
    name      by SHA-256; a piece that an earlier manifest of this writer names is not sent again, and not even read if
              its tensors and generations are the same
    put       the objects, at a rate if one is asked for, several at once where the store gains by it, while the next
              piece is read and hashed; last the manifest, if all of them are stored and the slot still belongs to the
              checkpoint

Invariant: a manifest is written only if every object that it names is stored, and the bytes verified.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from lightck.errors import TierError
from lightck.pool.format.layout import ITEM_NBYTES, blocks_of
from lightck.pool.format.saved_by import saved_by
from lightck.pool.format.structures import (
    NEXT_NBYTES,
    NEXT_OFFSET,
    SUPERBLOCK_NBYTES,
    SUPERBLOCK_OFFSETS,
    DamagedError,
    unpack_next_batch,
)
from lightck.pool.reader import StoredCheckpoint
from lightck.tiers.codecs import Coding, coding_of, encoded
from lightck.tiers.names import ManifestName, ObjectName, Writer
from lightck.tiers.parallel_calls import Buffer, NamedBytes, Puts, puts_to
from lightck.tiers.store import Store
from lightck.tiers.tier_manifest import MANIFEST_NBYTES_MAX, OBJECT_NBYTES_MAX, Run, SentObject, TierManifest, joined

_FROZEN_NBYTES_MIN = 64 << 10
"""Smaller tensors without optimizer state may be buffers, which change at each step."""


class Part(NamedTuple):
    """Some blocks of a tensor."""

    name: str
    number: int
    """The number of the tensor's record."""
    first: int
    """Number of the first block."""
    nbytes: int
    generation: int


class _Hashed(NamedTuple):
    """The bytes of an object."""

    data: bytes | memoryview
    coding: Coding | None
    """How they were made."""
    content: str
    """Their SHA-256."""


@dataclass
class KnownObjects:
    """The objects of earlier checkpoints that the next one need not send again, by key and by SHA-256."""

    by_key: dict[str, SentObject] = field(default_factory=dict)
    by_content: dict[str, SentObject] = field(default_factory=dict)

    def add(self, manifest: TierManifest) -> None:
        """Remember the objects of a manifest that was read, or written."""
        for each in manifest.objects:
            self.by_content[each.name.content] = each
            if each.key:
                self.by_key[each.key] = each

    def forget(self, names: Collection[ObjectName]) -> None:
        """Forget objects that were deleted."""
        self.by_key = {key: each for key, each in self.by_key.items() if each.name not in names}
        self.by_content = {content: each for content, each in self.by_content.items() if each.name not in names}


@dataclass
class _Outgoing:
    """The objects and runs of a checkpoint that is being sent."""

    store: Store
    writer: Writer
    nonce: str
    earlier: KnownObjects
    codec: str | None
    objects: list[SentObject] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    nbytes: int = 0
    """Bytes that were put."""
    put_names: list[ObjectName] = field(default_factory=list)
    new: dict[str, SentObject] = field(default_factory=dict)
    """Content -> an object that was put for this checkpoint. A second one with these bytes is not put."""
    pace: Callable[[int], object] = lambda _: None
    """Called with the number of bytes before each put; it may wait."""
    is_manifest_begun: bool = False
    """Whether the put of the manifest has begun. The manifest may be stored then, so its objects stay."""

    def withdraw(self) -> None:
        """Remove what was put, because the checkpoint was not sent whole; end if the store fails: each of thousands of
        objects might wait for a store that is not there. (``retain`` or ``lightck gc`` removes later what no manifest
        names.)"""
        with suppress(TierError):
            for name in [] if self.is_manifest_begun else self.put_names:
                self.store.delete(str(name))

    def add(self, data: bytes) -> int:
        """Store an object, unless one with these bytes is known. Returns its number in the manifest."""
        number, is_new = self.add_hashed(_hashed(data))
        if is_new:
            self.store.put(str(self.objects[number].name), data)
        return number

    def add_hashed(self, hashed: _Hashed, key: str = "") -> tuple[int, bool]:
        """Add an object to the manifest. Returns its number there, and whether its bytes are to be put, because no
        object with them is known."""
        content, nbytes = hashed.content, len(hashed.data)
        known = self.new.get(content) or self._own(self.earlier.by_content.get(content))
        is_new = known is None or known.nbytes != nbytes
        if known is None or is_new:
            name = ObjectName(self.writer, content, self.nonce)
            self.put_names.append(name)
            self.pace(nbytes)
            self.nbytes += nbytes
            known = self.new[content] = SentObject(name, nbytes, key)
        return self.append(known._replace(key=key, coding=hashed.coding)), is_new

    def known(self, key: str) -> SentObject | None:
        """Return the object with this key below the own prefix, if one is known."""
        return self._own(self.earlier.by_key.get(key))

    def _own(self, known: SentObject | None) -> SentObject | None:
        """Return a known object below the own prefix. An object of the checkpoint from which the training went on lies
        below another prefix, whose writer may delete it: so it is copied inside the store. Returns None if that
        fails."""
        if known is None or known.name.writer == self.writer:
            return known
        name = ObjectName(self.writer, known.name.content, self.nonce)
        if name not in self.put_names:
            if not self.store.link(str(known.name), str(name)):
                return None
            self.put_names.append(name)
        return known._replace(name=name)

    def append(self, known: SentObject) -> int:
        self.objects.append(known)
        return len(self.objects) - 1


@dataclass(frozen=True)
class SentCheckpoint:
    name: ManifestName
    manifest: TierManifest
    manifest_hash: bytes
    """SHA-256 of the manifest as it was put."""
    nbytes: int
    """Bytes that were put; the others lay in the tier."""


def send(
    stored: StoredCheckpoint,
    store: Store,
    writer: Writer,
    nonce: str,
    earlier: KnownObjects,
    *,
    written_by: str,
    metrics: Mapping[str, float] | None = None,
    advance: Callable[[int], None] = lambda _: None,
    pace: Callable[[int], object] = lambda _: None,
    codec: str | None = None,
) -> SentCheckpoint:
    """Send a checkpoint, which the caller holds. ``nonce``: eight hexadecimal digits that were never used for this
    writer. ``earlier``: the objects of its manifests; a piece that one of them holds is not sent again, however it is
    compressed there. ``advance`` is called with the number of bytes of each piece of the tensors, and ``pace``, before
    each put, with the number of bytes of the put. ``codec``: how other pieces are compressed (``codecs.py``); None: not
    at all. Raises ``DamagedError`` if the checkpoint is damaged or was overwritten, ``PoolIOError``, and
    ``TierError``."""
    out = _Outgoing(store, writer, nonce, earlier, codec, pace=pace)
    try:
        return _send(stored, out, written_by, metrics or {}, advance)
    except BaseException:  # also Ctrl-C: nobody else knows the names
        out.withdraw()
        raise


def _send(
    stored: StoredCheckpoint,
    out: _Outgoing,
    written_by: str,
    metrics: Mapping[str, float],
    advance: Callable[[int], None],
) -> SentCheckpoint:
    _send_tensors(stored, out, advance)
    _send_metadata(stored, out)
    table = out.add(stored.reader.table)
    manifest = TierManifest(
        written_by,
        saved_by(stored.state).claim,
        stored.header.incarnation,
        _superblock(stored),
        stored.record,
        table,
        tuple(out.objects),
        joined(sorted(out.runs)),
        dict(metrics),
    )
    data = manifest.packed()
    if len(data) > MANIFEST_NBYTES_MAX:
        raise DamagedError(f"its manifest for a tier would have more than {MANIFEST_NBYTES_MAX} bytes")
    out.pace(len(data))
    if not stored.owns_slot():
        raise DamagedError("its slot was reused while it was read")
    name = ManifestName(out.writer, stored.step, out.nonce)
    out.is_manifest_begun = True
    out.store.put(str(name), data)
    return SentCheckpoint(name, manifest, hashlib.sha256(data).digest(), out.nbytes + len(data))


def _superblock(stored: StoredCheckpoint) -> bytes:
    """Return a copy of the pool's superblock that verifies."""
    for offset in SUPERBLOCK_OFFSETS:
        data = stored.reader.read(offset, SUPERBLOCK_NBYTES)
        if data == stored.reader.superblock.pack():
            return data
    raise DamagedError("the superblock of its pool cannot be read")


def _send_metadata(stored: StoredCheckpoint, out: _Outgoing) -> None:
    """Send the slot's header and the pool's manifest as one object, and the next-batch record as another one, if the
    training has stored it already. (It stores this record later, so the bytes of one object with all three would depend
    on when they were sent.)"""
    sb, record = stored.reader.superblock, stored.record
    header_at = sb.slots[record.slot][0]
    places = [(header_at, NEXT_OFFSET)]
    places.append((sb.manifest_at(record.slot, record.manifest_index), record.manifest_nbytes))
    data = b"".join(stored.reader.read(offset, nbytes) for offset, nbytes in places)
    if len(data) != sum(nbytes for _, nbytes in places):
        raise DamagedError("its manifest cannot be read")
    number, begin = out.add(data), 0
    for offset, nbytes in places:
        out.runs.append(Run(offset, nbytes, number, begin))
        begin += nbytes
    following = stored.reader.read(header_at + NEXT_OFFSET, NEXT_NBYTES) if sb.has_next_batch else b""
    if unpack_next_batch(following, record.payload_generation, sb.uuid) is not None:
        out.runs.append(Run(header_at + NEXT_OFFSET, NEXT_NBYTES, out.add(following), 0))


def _send_tensors(stored: StoredCheckpoint, out: _Outgoing, advance: Callable[[int], None]) -> None:
    with puts_to(out.store, min(OBJECT_NBYTES_MAX, _nbytes_of(stored))) as puts:
        _send_pieces(stored, out, puts, advance)


def _send_pieces(stored: StoredCheckpoint, out: _Outgoing, puts: Puts, advance: Callable[[int], None]) -> None:
    for parts in _pieces(stored):
        key = _key(stored, parts)
        known = out.known(key)
        if known is None:
            buffer = puts.buffer()
            data = buffer.data[: _read(stored, parts, buffer)]
            coding = None if out.codec is None else coding_of(out.codec, _elements(stored, parts))
            puts.prepare(buffer, partial(_hashed, data, coding), partial(_add_piece, stored, out, parts, key))
        else:
            _add_runs(stored, out, parts, out.append(known))
        advance(sum(part.nbytes for part in parts))


def _read(stored: StoredCheckpoint, parts: Sequence[Part], buffer: Buffer) -> int:
    """Read the parts of a piece, one behind the other. Returns how many bytes they have."""
    assert sum(part.nbytes for part in parts) <= buffer.nbytes, "a block is smaller than an object"
    address, places = buffer.ctypes.data, []
    for part in parts:
        places.append((part.name, part.first, part.nbytes, address))
        address += part.nbytes
    stored.read_blocks(places)
    return int(address - buffer.ctypes.data)


def _add_piece(
    stored: StoredCheckpoint, out: _Outgoing, parts: Sequence[Part], key: str, hashed: _Hashed
) -> NamedBytes | None:
    """Add a piece to the manifest. Returns what is to be put; None if it is known."""
    number, is_new = out.add_hashed(hashed, key)
    _add_runs(stored, out, parts, number)
    return NamedBytes(str(out.objects[number].name), memoryview(hashed.data)) if is_new else None


def _add_runs(stored: StoredCheckpoint, out: _Outgoing, parts: Sequence[Part], number: int) -> None:
    """Say in the manifest where the parts of an object lie in the pool."""
    begin = 0
    for part in parts:
        offset, _ = stored.range_of(part.name, part.first, part.nbytes)
        out.runs.append(Run(offset, part.nbytes, number, begin))
        begin += part.nbytes


def _hashed(data: bytes | memoryview, coding: Coding | None = None) -> _Hashed:
    """Return the bytes of an object, compressed if that makes them smaller, with their SHA-256."""
    smaller = None if coding is None else encoded(data, coding)
    if smaller is not None:
        return _Hashed(smaller, coding, hashlib.sha256(smaller).hexdigest())
    return _Hashed(data, None, hashlib.sha256(data).hexdigest())


def _elements(stored: StoredCheckpoint, parts: Sequence[Part]) -> Iterator[tuple[int, int]]:
    """Yield for each part how many bytes an element has, and how many the part has. A complex number is two
    elements."""
    for part in parts:
        dtype = stored.entries[part.name].dtype
        yield ITEM_NBYTES[dtype] // (2 if dtype.startswith("complex") else 1), part.nbytes


def _nbytes_of(stored: StoredCheckpoint) -> int:
    return sum(entry.nbytes for entry in stored.entries.values())


def _pieces(stored: StoredCheckpoint) -> Iterator[list[Part]]:
    """Yield the parts of tensors that become one object each, in the order of the pool."""
    numbers = {entry.name: number for number, entry in enumerate((*stored.reader.entries, *stored.extras))}
    generations = stored.records["generation"].tolist()
    for names in _groups(stored, numbers, generations):
        piece: list[Part] = []
        space = OBJECT_NBYTES_MAX
        for name in names:
            for part in _blocks(stored, name, numbers[name], generations[numbers[name]]):
                if part.nbytes > space and piece:
                    yield piece
                    piece, space = [], OBJECT_NBYTES_MAX
                piece.append(part)
                space -= part.nbytes
        yield piece


def _groups(stored: StoredCheckpoint, numbers: Mapping[str, int], generations: Sequence[int]) -> list[list[str]]:
    """Return the names of the tensors, with those together that are likely to change together: large tensors that no
    optimizer state belongs to (frozen ones), those that were written for this checkpoint, and those that were not. An
    object is sent again if one byte of it differs, so a wrong guess costs time, and nothing else."""
    # Optimizer state is named optimizer/PARAMETER/KEY, and its parameter model/PARAMETER.
    trained = {f"model/{name.split('/', 1)[-1].rpartition('/')[0]}" for name in stored.entries if "optimizer" in name}
    frozen: list[str] = []
    written: list[str] = []
    unchanged: list[str] = []
    for name, entry in sorted(stored.entries.items(), key=lambda each: each[1].offset):
        if not entry.nbytes:
            continue
        if name.startswith("model/") and name not in trained and entry.nbytes >= _FROZEN_NBYTES_MIN:
            frozen.append(name)
        else:
            (written if generations[numbers[name]] == stored.header.generation else unchanged).append(name)
    return [each for each in (frozen, written, unchanged) if each]


def _blocks(stored: StoredCheckpoint, name: str, number: int, generation: int) -> Iterator[Part]:
    """Yield a tensor in parts, none of them larger than an object."""
    nbytes, block = stored.entries[name].nbytes, stored.block_nbytes
    most = max(1, OBJECT_NBYTES_MAX // block)
    for first in range(0, blocks_of(nbytes, block), most):
        yield Part(name, number, first, min(most * block, nbytes - first * block), generation)


def _key(stored: StoredCheckpoint, parts: Sequence[Part]) -> str:
    """Return the key of a piece: it identifies the bytes, and is known before they are read. The key is a hash of the
    origin and the block size, and of the record number, the blocks and the generation of each part. Two blocks that
    agree in these have the same bytes."""
    text = repr((stored.header.origin, stored.block_nbytes, [part[1:] for part in parts]))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
