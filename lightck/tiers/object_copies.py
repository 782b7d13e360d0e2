"""Whether an object of a tier is damaged, and where else its bytes lie: in another tier, or in a pool.

Whatever a copy gives counts only if its SHA-256 is the object's name. Nothing here imports torch: the drain uses it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain

from lightck.errors import TierError
from lightck.pool.format.structures import DamagedError, Superblock
from lightck.pool.reader import PoolReader
from lightck.tiers.codecs import decoded, encoded
from lightck.tiers.names import ManifestName, ObjectName
from lightck.tiers.store import Store
from lightck.tiers.tier_manifest import SentObject, TierManifest, read_manifest

_GONE = "it is gone, or no file"


def damage_of(store: Store, sent: SentObject, *, reads: bool) -> str | None:
    """Return what is wrong with an object; None if nothing is. ``reads``: read its bytes, and compare their SHA-256
    with its name; else only its length is asked for. Raises ``TierError``."""
    if store.knows_sizes or not reads:
        nbytes = store.nbytes_of(str(sent.name))
        damage = _GONE if nbytes is None else _length_damage(nbytes, sent)
        if damage is not None or not reads:
            return damage
    try:
        data = store.get(str(sent.name), sent.nbytes)
    except FileNotFoundError:
        return _GONE
    except (DamagedError, TierError) as err:
        return damage_from(err)
    if len(data) == sent.nbytes and hashlib.sha256(data).hexdigest() != sent.name.content:
        return "its bytes do not match its name, which is their SHA-256"
    return _length_damage(len(data), sent)


def damage_from(err: DamagedError | TierError) -> str:
    """Return what is wrong with a file, from the error of a read. Raises this error if the tier could not be reached,
    which says nothing of the file."""
    if isinstance(err, TierError):
        if err.errno is None:
            raise err
        return f"it cannot be read: {err}"
    return str(err)


def _length_damage(nbytes: int, sent: SentObject) -> str | None:
    return None if nbytes == sent.nbytes else f"it has {nbytes} bytes, not {sent.nbytes}"


def content_of(store: Store, sent: SentObject) -> bytes | memoryview:
    """Return the bytes that an object was made from. Raises ``DamagedError`` and ``TierError``."""
    try:
        data = store.get(str(sent.name), sent.nbytes)
    except FileNotFoundError:
        raise DamagedError(f"its object {sent.name.content[:16]}... is gone") from None
    if len(data) != sent.nbytes:
        raise DamagedError(f"its object {sent.name.content[:16]}... has {len(data)} bytes, not {sent.nbytes}")
    # The bytes of tensors verify by the pool's checksums, which is ten times as fast.
    if not sent.key and hashlib.sha256(data).hexdigest() != sent.name.content:
        raise DamagedError(
            f"the bytes of its object {sent.name.content[:16]}... do not match its name, which is their SHA-256"
        )
    if sent.coding is None:
        return data
    try:
        return decoded(data, sent.coding)
    except DamagedError as err:
        raise DamagedError(f"its object {sent.name.content[:16]}... cannot be decompressed: {err}") from err


class Copies:
    """Where the bytes of damaged objects of a tier may come from."""

    def __init__(self, tiers: Sequence[Store], pools: Sequence[PoolReader]) -> None:
        self._tiers, self._pools = tiers, pools
        self._recompressed_differently: set[ObjectName] = set()
        """The objects whose content is there, but becomes other bytes when it is compressed here."""
        self._held: dict[tuple[str, int], bool] = {}
        """(path of a pool, generation) -> whether the pool holds that checkpoint, as far as it was looked at."""

    def bytes_of(self, sent: SentObject, named_by: Sequence[TierManifest]) -> bytes | None:
        """Return the bytes of an object that these manifests name; None if they are nowhere. Raises ``TierError``."""
        data = self._same_object(sent)
        if data is not None:
            return data
        for content in chain(self._contents_in_pools(sent, named_by), self._contents_in_tiers(sent)):
            data = bytes(content) if sent.coding is None else encoded(content, sent.coding)
            if data is not None and _is_content(data, sent):
                return data
        return None

    def why_not(self, sent: SentObject) -> str:
        """Return why there are no bytes of an object."""
        if sent.name not in self._recompressed_differently or sent.coding is None:
            return "no copy of it is there"
        return (
            f"its content is there, but {sent.coding.codec} on this machine compresses it to other bytes than when it "
            "was sent, and an object is named by the SHA-256 of its bytes. Repair with the release of the "
            "library that was used then, or from a tier that holds the same object; or send the checkpoint again"
        )

    @cached_property
    def _copies(self) -> dict[str, list[tuple[Store, ObjectName]]]:
        """For each content the objects of other tiers that have it, as their names say."""
        found: dict[str, list[tuple[Store, ObjectName]]] = {}
        for store in self._tiers:
            for name in sorted(store.listing().objects):
                found.setdefault(name.content, []).append((store, name))
        return found

    def _same_object(self, sent: SentObject) -> bytes | None:
        for store, name in self._copies.get(sent.name.content, ()):
            try:
                data = store.get(str(name), sent.nbytes)
            except (DamagedError, FileNotFoundError):
                continue
            if _is_content(data, sent):
                return data
        return None

    def _contents_in_pools(self, sent: SentObject, named_by: Iterable[TierManifest]) -> Iterator[bytes]:
        """Yield the bytes of each pool at the places where one of these checkpoints lay. (The SHA-256 shows whether
        they are still those of the checkpoint.)"""
        for manifest in named_by:
            superblock = Superblock.unpack(manifest.superblock)
            for reader in self._pools:
                if reader.superblock == superblock:
                    data = _read(reader, manifest, manifest.objects.index(sent))
                    if len(data) == sent.content_nbytes:
                        yield data
                        # The caller comes back only if this content did not become the object.
                        if sent.coding is not None and self._holds(reader, manifest):
                            self._recompressed_differently.add(sent.name)

    @cached_property
    def _by_key(self) -> dict[str, list[tuple[Store, SentObject]]]:
        """The objects of tensors in other tiers. Those with the same key were made from the same bytes."""
        found: dict[str, list[tuple[Store, SentObject]]] = {}
        for store in self._tiers:
            for name in sorted(store.listing().manifests):
                with suppress(DamagedError):
                    for each in read_manifest(store, name).objects:
                        if each.key:
                            found.setdefault(each.key, []).append((store, each))
        return found

    def _contents_in_tiers(self, sent: SentObject) -> Iterator[bytes | memoryview]:
        """Yield the content of the objects of other tiers that have the same key, and are compressed in another way."""
        for store, other in self._by_key.get(sent.key, ()):
            is_other_form = (other.coding, other.name.content) != (sent.coding, sent.name.content)
            if is_other_form and other.content_nbytes == sent.content_nbytes:
                if damage_of(store, other, reads=True) is not None:
                    continue
                with suppress(DamagedError):
                    yield content_of(store, other)
                    # It goes on here only if this content did not become the object.
                    self._recompressed_differently.add(sent.name)

    def _holds(self, reader: PoolReader, manifest: TierManifest) -> bool:
        """Whether a pool still holds a checkpoint, intact. It is read once."""
        generation = manifest.record.payload_generation
        if (reader.path, generation) not in self._held:
            try:
                reader.checkpoint(manifest.record).verify()
                self._held[reader.path, generation] = True
            except DamagedError:
                self._held[reader.path, generation] = False
        return self._held[reader.path, generation]


def _read(reader: PoolReader, manifest: TierManifest, number: int) -> bytes:
    if number == manifest.table:
        return reader.table
    runs = sorted((run for run in manifest.runs if run.object == number), key=lambda run: run.begin)
    return b"".join(reader.read(run.offset, run.nbytes) for run in runs)


def _is_content(data: bytes, sent: SentObject) -> bool:
    return len(data) == sent.nbytes and hashlib.sha256(data).hexdigest() == sent.name.content


def is_named(store: Store, named_by: Iterable[tuple[ManifestName, TierManifest]]) -> bool:
    """Whether one of the manifests that named an object is still there."""
    for name, manifest in named_by:
        try:
            if read_manifest(store, name) == manifest:
                return True
        except DamagedError:
            continue
    return False
