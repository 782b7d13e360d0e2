"""Write to a tier below one claim: send checkpoints, and remove from the tier what is no longer needed.

    send     objects that a manifest of this writer names are not sent again, and not read if their tensors have not
             changed
    retain   list; delete manifests, then objects, as ``decisions.py`` says, until there is nothing to delete

Invariants: those of ``decisions.py``. Nobody else writes below this prefix. The objects that its own manifests name are
never deleted as unnamed, whether or not a listing shows these manifests.

Failure cases: another process claims the tier (``TierClaimedError``: nothing more is written); the tier was emptied
(``TierError``: nothing is written without the claim); objects were removed by somebody else (they are sent again).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace

from lightck.errors import TierClaimedError, TierError
from lightck.pool.format.structures import DamagedError
from lightck.pool.reader import StoredCheckpoint
from lightck.tiers.claiming import claim_if_there, read_claim
from lightck.tiers.codecs import refuse_missing_libraries
from lightck.tiers.decisions import (
    GRACE_SECONDS,
    Listing,
    Retention,
    is_superseded,
    kept,
    manifests_to_delete,
    objects_to_delete,
)
from lightck.tiers.names import Claim, ManifestName, ObjectName, TierCheckpoint, Writer
from lightck.tiers.sending import KnownObjects, SentCheckpoint, send
from lightck.tiers.store import Store
from lightck.tiers.tier_manifest import TierManifest, read_manifest


class TierWriter:
    """What one process writes to one tier, below one claim."""

    def __init__(
        self,
        store: Store,
        writer: Writer,
        written_by: str,
        retention: Retention | None = None,
        grace: float = GRACE_SECONDS,
        pace: Callable[[int], object] = lambda _: None,
        codec: str | None = None,
    ) -> None:
        """``written_by``: this release of lightck. ``retention``: which checkpoints stay; None: all. ``grace``: how
        many seconds a checkpoint that was replaced stays readable. ``pace``: called with the number of bytes before
        each put, and may wait. ``codec``: how objects are compressed (``codecs.py``); None: not at all. Raises
        ``TierError``, also if the library for that is missing."""
        refuse_missing_libraries([codec])
        self.writer, self._pace, self._codec = writer, pace, codec
        self._store, self._written_by, self._retention, self._grace = store, written_by, retention, grace
        self._began = store.now()
        """The time of the store when this writer began."""
        self._earlier = KnownObjects()
        self._listed: set[ObjectName] = set()
        """The objects in the newest listing; before the first listing, those that an own manifest names."""
        self._objects_by_manifest: dict[ManifestName, frozenset[ObjectName]] = {}
        """For each manifest that was read or written, the objects that it names."""
        self._metrics: dict[TierCheckpoint, Mapping[str, float]] = {}
        self.hashes: dict[ManifestName, bytes] = {}
        """SHA-256 of each manifest that this object has written, and not removed."""

    def use_own(self) -> None:
        """Read what an earlier process has written below the same prefix, so that it is not sent again. Raises
        ``TierError``."""
        for name in _oldest_first(self._store.listing()):
            manifest = self._read(name) if name.writer == self.writer else None
            if manifest is not None:
                self._earlier.add(manifest)
                self._remember(name, manifest)
                self._listed |= self._objects_by_manifest[name]

    def sent(self) -> dict[int, Mapping[str, float]]:
        """Return the steps of the checkpoints below the own prefix that this object has read or written, each with its
        metrics."""
        return {
            each.step: self._metrics[each.checkpoint]
            for each in self._objects_by_manifest
            if each.writer == self.writer
        }

    def use_parent(self, parent: ManifestName, generation: int) -> None:
        """Read the manifest of the checkpoint from which the training went on, so that its objects are copied inside
        the store. ``generation``: of that checkpoint in the pool; a manifest of another one is not used. Raises
        ``TierError``."""
        manifest = self._read(parent)
        if manifest is not None and manifest.record.payload_generation == generation:
            self._earlier.add(manifest)

    def _read(self, name: ManifestName) -> TierManifest | None:
        """Return a manifest; None if it is damaged, and nothing of it can be used."""
        try:
            return read_manifest(self._store, name)
        except DamagedError:
            return None

    def send(
        self,
        stored: StoredCheckpoint,
        metrics: Mapping[str, float] | None = None,
        advance: Callable[[int], None] = lambda _: None,
    ) -> SentCheckpoint:
        """Send a checkpoint, which the caller holds. Raises ``DamagedError`` if it is damaged or was overwritten,
        ``PoolIOError``, and ``TierError``."""
        listing = self._store.listing()
        self._check(listing)
        self._forget_what_is_gone(listing)
        sent = send(
            stored,
            self._store,
            self.writer,
            secrets.token_hex(4),
            self._earlier,
            written_by=self._written_by,
            metrics=metrics,
            advance=advance,
            codec=self._codec,
            pace=self._pace,
        )
        self._earlier.add(sent.manifest)
        self._remember(sent.name, sent.manifest)
        if self._store.lists_at_once:
            self._listed |= self._objects_by_manifest[sent.name]
        self.hashes[sent.name] = sent.manifest_hash
        return sent

    def refuse_superseded(self) -> None:
        """Raise ``TierClaimedError`` if a higher claim exists, or if the own claim is gone and others exist. Raise
        ``TierError`` if no claim exists any more."""
        self._check(self._store.listing())

    def _check(self, listing: Listing) -> None:
        claim = self.writer.claim
        if is_superseded(listing, claim):
            raise _superseded(self._store, claim)
        if claim not in listing.claims and claim_if_there(self._store, claim) is None:  # a listing may be late
            raise _superseded(self._store, claim) if listing.claims else _emptied(self._store, claim)

    def _forget_what_is_gone(self, listing: Listing) -> None:
        """Forget the objects that were in the tier before, and that this listing lacks: they are sent again. Somebody
        has removed them, or the store has, by a rule for old objects. (An object was there before if an earlier listing
        showed it, if an own manifest named it at the start, or if it was put into a store whose listings are never
        late.)"""
        listed = set(listing.objects)
        self._earlier.forget(self._listed - listed)
        self._listed = listed

    def retain(self) -> int:
        """Delete what is no longer needed, and return how many files were deleted. Raises ``TierError``."""
        if self._retention is None:
            return 0
        path = read_claim(self._store, self.writer.claim).path
        n_deleted = 0
        while True:
            now = self._store.now()  # before the listing: so nothing looks older than it is
            listing = replace(self._store.listing(), now=now)
            stays = kept(listing, self._retention, self.writer.claim, path, self._metrics_of(listing))
            manifests = manifests_to_delete(listing, stays, self.writer, self._grace)
            for manifest in manifests:
                self._store.delete(str(manifest))
                self._objects_by_manifest.pop(manifest, None)
                self.hashes.pop(manifest, None)
            n_deleted += len(manifests)
            if not manifests:
                break
        named = self._named(listing)
        objects = objects_to_delete(listing, named, self.writer, self._began, self._grace)
        self._earlier.forget(set(objects))  # first: if a deletion fails, earlier ones have succeeded
        for each in objects:
            self._store.delete(str(each))
        return n_deleted + len(objects)

    def _metrics_of(self, listing: Listing) -> Mapping[TierCheckpoint, Mapping[str, float]]:
        """Return the metrics of each checkpoint, if any are asked for."""
        if self._retention is not None and self._retention.keep_best is not None:
            for manifest in _oldest_first(listing):
                if manifest not in self._objects_by_manifest:
                    try:
                        self._objects_of(manifest)
                    except DamagedError:
                        continue
        return self._metrics

    def _named(self, listing: Listing) -> dict[Writer, set[ObjectName]]:
        """Return what the manifests of each writer name. A writer is left out if one of its manifests cannot be
        read."""
        named: dict[Writer, set[ObjectName]] = {each.writer: set() for each in listing.objects}
        unreadable = set()
        for manifest in {*listing.manifests, *self._objects_by_manifest}:
            try:
                named.setdefault(manifest.writer, set()).update(self._objects_of(manifest))
            except DamagedError:
                unreadable.add(manifest.writer)
        return {writer: names for writer, names in named.items() if writer not in unreadable}

    def _objects_of(self, name: ManifestName) -> frozenset[ObjectName]:
        if name not in self._objects_by_manifest:
            self._remember(name, read_manifest(self._store, name))
        return self._objects_by_manifest[name]

    def _remember(self, name: ManifestName, manifest: TierManifest) -> None:
        self._objects_by_manifest[name] = frozenset(each.name for each in manifest.objects)
        # A step is sent again if its metrics are logged after it was sent. So it can have several manifests.
        self._metrics[name.checkpoint] = {**self._metrics.get(name.checkpoint, {}), **manifest.metrics}


def _oldest_first(listing: Listing) -> list[ManifestName]:
    return sorted(listing.manifests, key=lambda each: (listing.manifests[each], each))


def _superseded(store: Store, claim: Claim) -> TierClaimedError:
    return TierClaimedError(
        f"Another process has claimed the tier {str(store)!r}, after this one had (claim {claim}). Nothing more is "
        "written by this process, and what it has written stays. Let one process write to a tier."
    )


def _emptied(store: Store, claim: Claim) -> TierError:
    return TierError(
        f"The tier {str(store)!r} does not hold the claim of this training any more ({claim}): it was emptied or "
        "replaced, or it is not mounted. Nothing is written there. Sending goes on when it is back. If it stays empty, "
        "start the training again with resume=True, which claims the tier again."
    )
