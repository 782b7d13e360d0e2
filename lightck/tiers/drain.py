"""Send the newest checkpoint of a pool to a tier again and again, and remove from the tier what need not stay.

    claim    the tier, when the first checkpoint of an incarnation is sent
    send     the newest checkpoint, unless it was sent already. Objects that a manifest of this claim names are not sent
             again, and not read if their tensors have not changed
    retain   list; delete manifests, then objects, as ``decisions.py`` says, until there is nothing to delete

Invariants: those of ``decisions.py``, of which this is the one writer below its claim. What it has written itself
counts as named, whether or not a listing shows it.

Failure cases: the pool is not there yet, holds no checkpoint, or was replaced (it is opened anew each time); a
checkpoint is overwritten while it is read (a newer one is sent); another process claims the tier
(``TierClaimedError``: nothing more is written).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from lightck.errors import TierClaimedError, UnsupportedError
from lightck.pool.commit_log import candidates
from lightck.pool.format.structures import DamagedError
from lightck.pool.reader import PoolReader, RejectedCheckpoint, StoredCheckpoint, open_pool
from lightck.pool.storage.backends import readable_path
from lightck.restore.compact import Progress
from lightck.restore.contents import Contents, Saved
from lightck.restore.recover import take_newest
from lightck.tiers.claiming import claim_tier, read_claim
from lightck.tiers.decisions import (
    GRACE_SECONDS,
    Listing,
    Retention,
    is_superseded,
    kept,
    manifests_to_delete,
    objects_to_delete,
)
from lightck.tiers.fetching import read_manifest
from lightck.tiers.names import Claim, ManifestName, ObjectName, Writer
from lightck.tiers.sending import Sent, Store, send


@dataclass(frozen=True, slots=True)
class Copied:
    """What was written. path: of the pool, or of the tier. nbytes: of the checkpoint. sent_nbytes: of what was written
    for it. rejected: newer checkpoints that were skipped, each with the reason."""

    step: int
    path: str
    nbytes: int
    sent_nbytes: int
    rejected: tuple[str, ...]


class Drain:
    """Sends checkpoints of one pool to one tier, under one claim."""

    def __init__(
        self,
        pool: str | os.PathLike[str],
        store: Store,
        written_by: str,
        retention: Retention | None = None,
        grace: float = GRACE_SECONDS,
    ) -> None:
        """``written_by``: this release of lightck. ``retention``: which checkpoints stay; None: all. ``grace``: how
        many seconds a checkpoint that was replaced stays readable."""
        self._pool, self._store, self._written_by = readable_path(pool), store, written_by
        self._retention, self._grace = retention, grace
        self._writer: Writer | None = None
        self._began = 0.0
        """The time of the store at the claim."""
        self._incarnation = 0
        """Of the checkpoints below the claim."""
        self._earlier = Sent()
        self._contents: dict[ManifestName, frozenset[ObjectName]] = {}
        """The objects that a manifest names, of each that was read or written."""
        self._last: tuple[bytes, int] | None = None
        """Uuid of the pool and generation of the last checkpoint that was sent."""

    def send(self, step: int | None = None, progress: Progress | None = None) -> Copied | None:
        """Send the newest checkpoint, or that of ``step``. Returns None if the newest one was sent before. Raises
        ``PoolError``, ``TierError``, and ``UnsupportedError`` if the pool is that of a rank, or has gradient
        records."""
        with closing(open_pool(self._pool, gradients=True)) as reader:
            _refuse_gradients(reader)
            if step is None and self._is_sent(reader):
                return None

            def take(stored: Saved, contents: Contents, rejected: list[RejectedCheckpoint]) -> Copied:
                assert isinstance(stored, StoredCheckpoint), "the pool has no gradient records"
                return self._send(stored, contents, rejected, progress)

            return take_newest(reader, step, take)

    def _is_sent(self, reader: PoolReader) -> bool:
        records = candidates(reader.commit_log())
        newest = records[0].payload_generation if records else None
        return newest is not None and self._last == (reader.superblock.uuid, newest)

    def _send(
        self,
        stored: StoredCheckpoint,
        contents: Contents,
        rejected: list[RejectedCheckpoint],
        progress: Progress | None,
    ) -> Copied:
        if self._writer is not None and is_superseded(self._store.listing(), self._writer.claim):
            raise _superseded(self._store, self._writer.claim)
        if self._writer is None or self._incarnation != stored.header.incarnation:
            self._claim(contents.run_id or stored.uuid.hex(), stored.header.incarnation)
        nbytes = sum(entry.nbytes for entry in stored.entries.values())
        nonce, by = secrets.token_hex(4), self._written_by
        assert self._writer is not None, "the tier is claimed"
        with progress(f"step {stored.step}", nbytes) if progress else _no_progress() as advance:
            sent = send(stored, self._store, self._writer, nonce, self._earlier, written_by=by, advance=advance)
        self._earlier.add(sent.manifest)
        self._contents[sent.name] = frozenset(each.name for each in sent.manifest.objects)
        self._last = stored.uuid, stored.record.payload_generation
        return Copied(stored.step, str(self._store), nbytes, sent.nbytes, tuple(map(str, rejected)))

    def _claim(self, run: str, incarnation: int) -> None:
        """Claim the tier, again if the training was restarted: it may have gone back to an older step, and below one
        claim the largest step is the newest."""
        claim = claim_tier(self._store, run, self._written_by)
        self._writer, self._began = Writer(claim, 0, 1), self._store.now()
        self._incarnation, self._earlier = incarnation, Sent()

    def retain(self) -> int:
        """Delete what need not stay, and return how many files were deleted. Raises ``TierError``."""
        if self._writer is None or self._retention is None:
            return 0
        path = read_claim(self._store, self._writer.claim).path
        n_deleted = 0
        while True:
            now = self._store.now()  # before the listing: so nothing looks older than it is
            listing = replace(self._store.listing(), now=now)
            stays = kept(listing, self._retention, self._writer.claim, path)
            manifests = manifests_to_delete(listing, stays, self._writer, self._grace)
            for manifest in manifests:
                self._store.delete(str(manifest))
                self._contents.pop(manifest, None)
            n_deleted += len(manifests)
            if not manifests:
                break
        named = self._named(listing)
        objects = objects_to_delete(listing, named, self._writer, self._began, self._grace)
        for each in objects:
            self._store.delete(str(each))
        self._earlier.forget(set(objects))
        return n_deleted + len(objects)

    def _named(self, listing: Listing) -> dict[Writer, set[ObjectName]]:
        """Return what the manifests of each writer name. A writer is left out if one of its manifests cannot be
        read."""
        named: dict[Writer, set[ObjectName]] = {each.writer: set() for each in listing.objects}
        unreadable = set()
        for manifest in {*listing.manifests, *self._contents}:
            try:
                named.setdefault(manifest.writer, set()).update(self._objects_of(manifest))
            except DamagedError:
                unreadable.add(manifest.writer)
        return {writer: names for writer, names in named.items() if writer not in unreadable}

    def _objects_of(self, manifest: ManifestName) -> frozenset[ObjectName]:
        found = self._contents.get(manifest)
        if found is None:
            read = read_manifest(self._store, manifest)
            found = self._contents[manifest] = frozenset(each.name for each in read.objects)
        return found


@contextmanager
def _no_progress() -> Iterator[Callable[[int], None]]:
    yield lambda _: None


def _superseded(store: Store, claim: Claim) -> TierClaimedError:
    return TierClaimedError(
        f"Another process has claimed the tier {str(store)!r}, after this one had (claim {claim}). Nothing more is "
        "written by this process, and what it has written stays. Let one process write to a tier."
    )


def _refuse_gradients(reader: PoolReader) -> None:
    if reader.superblock.has_gradients:
        raise UnsupportedError(
            f"The pool {reader.path!r} has gradient records, and lightck copy sends no such pool to a tier yet. Write "
            f"a pool without them first: lightck compact {reader.path} NEW."
        )
