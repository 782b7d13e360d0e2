"""Make a pool from a checkpoint of a tier.

    create    a file of the pool's size under a temporary name, allocated in full
    fill      superblock and layout table; then each object is fetched (several at once where the store gains by it),
              decompressed if it was compressed, and its bytes are written to their places
    verify    each block against the checksums of the pool that the checkpoint is from; only then the commit record
    publish   the file gets the path of the pool. Nothing lies there, or the old pool that it replaces

Invariants: a file under the new name is complete. A checkpoint that lacks an object, or in which a byte differs, gives
no pool.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace

from lightck.errors import ExportExistsError
from lightck.pool.format.structures import (
    SUPERBLOCK_OFFSETS,
    DamagedError,
    ManifestHeader,
    Superblock,
    layout_hash,
)
from lightck.pool.reader import PoolReader
from lightck.pool.storage import extents
from lightck.pool.storage.backend import Backend, Container
from lightck.pool.storage.failures import as_io_error, undo_on_error
from lightck.pool.storage.file import FileBackend
from lightck.pool.storage.lock import PoolLock
from lightck.pool.storage.memory import MemoryBackend
from lightck.tiers.codecs import refuse_missing_libraries
from lightck.tiers.object_copies import content_of
from lightck.tiers.parallel_calls import in_order
from lightck.tiers.store import Store
from lightck.tiers.tier_manifest import TierManifest


def refuse_existing_pool(path: str) -> None:
    """Raise ``ExportExistsError`` if something lies at the path of the new pool."""
    if os.path.lexists(path):
        raise ExportExistsError(
            f"{path!r} exists, and copy replaces nothing. Name a file that does not exist, or remove this one if "
            "nobody needs it."
        )


def stale_after(store: Store, manifest: TierManifest) -> int | None:
    """Return what a checkpoint says of older ones of its pool: those whose generation is larger than this number are
    stale, because lightck noticed a write too late; None: it says nothing. Raises ``DamagedError``,
    ``CorruptPoolError`` and ``TierError``."""
    from lightck.restore.contents import unpack_dict  # loads torch, which the drain does without

    superblock, record = Superblock.unpack(manifest.superblock), manifest.record
    at = superblock.manifest_at(record.slot, record.manifest_index)
    for run in manifest.runs:
        if run.offset <= at and at + record.manifest_nbytes <= run.offset + run.nbytes:
            begin = run.begin + at - run.offset
            data = bytes(_get(store, manifest, run.object)[begin : begin + record.manifest_nbytes])
            header = ManifestHeader.unpack(data)
            state = unpack_dict(data[header.state_offset : header.state_offset + header.state_nbytes])
            found = state.get("stale_after")
            return found if type(found) is int else None
    raise DamagedError("it does not hold the manifest of its pool")


def fetch(
    store: Store,
    manifest: TierManifest,
    path: str,
    advance: Callable[[int], None] = lambda _: None,
    *,
    is_locked: bool = False,
    backend: Backend | None = None,
) -> None:
    """Make the pool ``path`` from a checkpoint. Nothing lies at ``path``, unless the caller holds the lock of that pool
    (``is_locked``): then the new pool replaces the old one when it is whole. ``advance`` is called with the number of
    bytes of each object. ``backend``: makes the pool; None: it is a plain file. Raises ``DamagedError`` if the
    checkpoint is not whole, ``PoolError`` if the pool cannot be made there, and ``TierError``."""
    with ExitStack() as stack:
        if not is_locked:
            stack.callback(PoolLock(path).release)
        container = stack.enter_context(filled_pool(store, manifest, path, advance, backend))
        if not is_locked:
            refuse_existing_pool(path)
        container.publish()


@contextmanager
def filled_pool(
    store: Store,
    manifest: TierManifest,
    path: str,
    advance: Callable[[int], None] = lambda _: None,
    backend: Backend | None = None,
) -> Iterator[Container]:
    """Make a pool from a checkpoint in a temporary file beside ``path``, whose lock the caller holds. ``publish`` of
    the container that is yielded gives the file its name; without it, nothing is left at the end of the block.
    ``backend``, and what is raised: as for ``fetch``."""
    refuse_missing_libraries(manifest.codecs)  # a missing library is no damage of this checkpoint
    superblock, table = _read_metadata(store, manifest)
    container = (backend or FileBackend()).create(path, superblock.nbytes)
    with closing(container):
        _fill_pool(store, manifest, superblock, table, container, path, advance)
        yield container


def fetched_to_memory(
    store: Store, manifest: TierManifest, advance: Callable[[int], None] = lambda _: None
) -> PoolReader:
    """Make a pool in anonymous memory from a checkpoint of a tier, and return its reader. The pool takes as much memory
    as the checkpoint is large. ``advance``, and what is raised: as for ``fetch``."""
    refuse_missing_libraries(manifest.codecs)
    superblock, table = _read_metadata(store, manifest)
    container = MemoryBackend().create(str(store), superblock.nbytes)
    with undo_on_error(container.close):
        _fill_pool(store, manifest, superblock, table, container, str(store), advance)
        return PoolReader(container, str(store))


def metadata_to_memory(store: Store, manifest: TierManifest) -> PoolReader:
    """As ``fetched_to_memory``, but without the bytes of tensors, which are not fetched: what the checkpoint holds can
    be listed, and its tensors do not verify."""
    superblock, table = _read_metadata(store, manifest)
    container = MemoryBackend().create(str(store), superblock.nbytes)
    with undo_on_error(container.close):
        _write_metadata(manifest, superblock, table, container, str(store))
        runs = tuple(run for run in manifest.runs if not manifest.objects[run.object].key)
        _fill(store, replace(manifest, runs=runs), container, str(store), lambda _: None)
        _commit(manifest, superblock, container, str(store), verifies=False)
        return PoolReader(container, str(store))


def _read_metadata(store: Store, manifest: TierManifest) -> tuple[Superblock, bytes]:
    """Return the superblock and the layout table of the pool. Raises ``DamagedError`` and ``TierError``."""
    superblock = Superblock.unpack(manifest.superblock)
    table = bytes(_get(store, manifest, manifest.table))
    if layout_hash(table) != superblock.table_hash:
        raise DamagedError("its layout table does not match its superblock")
    return superblock, table


def _fill_pool(
    store: Store,
    manifest: TierManifest,
    superblock: Superblock,
    table: bytes,
    container: Container,
    path: str,
    advance: Callable[[int], None],
) -> None:
    """Write everything that a pool needs into a new container, and verify it. ``path``: names the pool in errors."""
    _write_metadata(manifest, superblock, table, container, path)
    _fill(store, manifest, container, path, advance)
    _commit(manifest, superblock, container, path)


def _write_metadata(
    manifest: TierManifest, superblock: Superblock, table: bytes, container: Container, path: str
) -> None:
    with as_io_error(f"The pool {path!r} cannot be written"):
        for offset in SUPERBLOCK_OFFSETS:
            _write(container, manifest.superblock, offset)
        for offset in superblock.table_offsets:
            _write(container, table, offset)


def _fill(
    store: Store, manifest: TierManifest, container: Container, path: str, advance: Callable[[int], None]
) -> None:
    runs: dict[int, list[tuple[int, int, int]]] = {}
    for run in manifest.runs:
        runs.setdefault(run.object, []).append((run.offset, run.nbytes, run.begin))
    numbers = sorted(runs)
    objects = in_order(lambda number: _get(store, manifest, number), numbers, store.n_parallel)
    with closing(objects):
        for number, found in zip(numbers, objects, strict=True):
            data = memoryview(found)
            with as_io_error(f"The pool {path!r} cannot be written"):
                for offset, nbytes, begin in runs[number]:
                    _write(container, data[begin : begin + nbytes], offset)
            advance(len(data))


def _get(store: Store, manifest: TierManifest, number: int) -> bytes | memoryview:
    return content_of(store, manifest.objects[number])


def _commit(
    manifest: TierManifest, superblock: Superblock, container: Container, path: str, *, verifies: bool = True
) -> None:
    """Verify what was written (``verifies``: the bytes of tensors too), and write the commit record."""
    with as_io_error(f"The pool {path!r} cannot be written"):
        os.fsync(container.fd)
    reader = PoolReader(container, path)
    stored = reader.checkpoint(manifest.record)
    if stored.header.incarnation != manifest.incarnation:
        raise DamagedError(
            "its manifest in the tier and its manifest in the pool name different starts of the training (incarnations)"
        )
    if verifies:
        stored.verify()
    with as_io_error(f"The pool {path!r} cannot be written"):
        _write(container, manifest.record.pack(superblock.uuid), superblock.commit_record_offset(0))


def _write(container: Container, data: bytes | memoryview, offset: int) -> None:
    """Write bytes of the new pool with ``pwrite``. (Nobody has its file mapped yet, except libpmemobj if it has made
    the file.)"""
    view = memoryview(data)
    for at, nbytes in extents.runs(container.extents, offset, len(view)):
        end = at + nbytes
        while at < end:
            n = os.pwrite(container.fd, view[: end - at], at)
            view, at = view[n:], at + n
