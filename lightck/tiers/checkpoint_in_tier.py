"""Read a checkpoint of a tier as if it lay in its pool, piece by piece, so that it can be sent to another tier.

Everything but the bytes of tensors is put into anonymous memory (``fetching.py``). A piece of tensors is fetched when
it is read, verified by the checksums of the pool as any read is, and freed before the next one.

Failure case: an object is damaged, cannot be read, or was removed, which happens an hour after a newer checkpoint has
replaced this one. While tensors are read, each of these raises ``DamagedError``, and not ``TierError``: the tier to
which the checkpoint is sent has not failed.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from lightck.errors import TierError
from lightck.pool.format.structures import DamagedError
from lightck.pool.reader import StoredCheckpoint
from lightck.pool.storage import holes
from lightck.tiers.fetching import metadata_to_memory
from lightck.tiers.object_copies import content_of
from lightck.tiers.store import Store
from lightck.tiers.tier_manifest import Run, TierManifest


class FolderUnreachableError(DamagedError):
    """The tier in which the checkpoint lies cannot be reached at the moment. This is no ``TierError``, because the tier
    to which the checkpoint is sent has not failed. Internal."""


@contextmanager
def checkpoint_in_tier(store: Store, manifest: TierManifest) -> Iterator[StoredCheckpoint]:
    """Yield a checkpoint that lies whole in a tier. It takes memory for the metadata, for the objects that one read
    needs (mostly one, of at most 32 MiB), and for one object that is being fetched and decompressed. To enter the block
    raises ``DamagedError``, ``PoolIOError`` and ``TierError``; a read in the block raises ``DamagedError`` and
    ``PoolIOError``."""
    with closing(metadata_to_memory(store, manifest)) as reader:
        reader.partial = _Pieces(store, manifest, reader.container.fd)
        yield reader.checkpoint(manifest.record)


class _Pieces:
    """A ``BlockSource``: before each read, it fetches into memory the objects that the read needs, and frees the
    others."""

    def __init__(self, store: Store, manifest: TierManifest, fd: int) -> None:
        self._store, self._manifest, self._fd = store, manifest, fd
        self._runs = sorted(run for run in manifest.runs if manifest.objects[run.object].key)
        self._offsets = [run.offset for run in self._runs]
        self._runs_of: defaultdict[int, list[Run]] = defaultdict(list)
        for run in self._runs:
            self._runs_of[run.object].append(run)
        self._there: set[int] = set()
        """The numbers of the objects whose bytes are in memory."""

    def require(self, stored: StoredCheckpoint, places: Sequence[tuple[str, int, int, int]]) -> None:
        runs = (self._runs_covering(stored, name, first, nbytes) for name, first, nbytes, _ in places)
        needed = {run.object for each in runs for run in each}
        for number in self._there - needed:
            self._free(number)
        for number in sorted(needed - self._there):
            self._fetch(number)
        self._there = needed

    def _runs_covering(self, stored: StoredCheckpoint, name: str, first_block: int, nbytes: int) -> list[Run]:
        """Return the runs in which these blocks lie. (Runs do not overlap.)"""
        begin, end = stored.range_of(name, first_block, nbytes)
        at = max(0, bisect_right(self._offsets, begin) - 1)
        return [run for run in self._runs[at : bisect_left(self._offsets, end)] if begin < run.offset + run.nbytes]

    def _fetch(self, number: int) -> None:
        try:
            data = memoryview(content_of(self._store, self._manifest.objects[number]))
        except TierError as err:
            raise FolderUnreachableError(str(err)) from err
        for run in self._runs_of[number]:
            piece = data[run.begin : run.begin + run.nbytes]
            if os.pwrite(self._fd, piece, run.offset) != run.nbytes:
                raise DamagedError(f"its object {number} is shorter than its manifest says")

    def _free(self, number: int) -> None:
        """Free the pages of an object that hold nothing else. (A page that is shared with another object would take
        bytes of that object with it, and they would not verify any more.)"""
        for run in self._runs_of[number]:
            begin = -(-run.offset // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (run.offset + run.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if begin < end:
                holes.punch(self._fd, begin, end - begin)
