"""Remove from a tier what no checkpoint needs (``lightck gc``).

    list        read the clock of the store, then list, so that nothing looks older than it is
    manifests   of checkpoints that not all ranks have sent; then list again, until none is left
    read        every manifest that is left; if one cannot be read, the objects of its writer stay
    objects     that no manifest names
    the rest    temporary files of killed processes; claims of which nothing is left

What may go is decided in ``decisions.py``; what is younger than the grace stays, by the clock of the store. No complete
checkpoint is removed here: the drain of the training removes those that its ``Tier`` does not keep.

Invariant: an object is removed only after each manifest that named it. So a collector that is killed at any request has
removed nothing that a checkpoint needs, and the next one removes the rest.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lightck.pool.format.structures import DamagedError
from lightck.restore.compact import Progress
from lightck.tiers.claiming import claim_if_there, claim_of, refuse_other_runs
from lightck.tiers.decisions import (
    GRACE_SECONDS,
    Listing,
    complete,
    highest_claim,
    manifests_to_collect,
    may_collect,
    objects_to_collect,
    on_path,
)
from lightck.tiers.names import Claim, ManifestName, ObjectName, Writer, claim_name
from lightck.tiers.store import HasFolders, Store, TemporaryFile
from lightck.tiers.tier_manifest import TierManifest, read_manifest

MANIFEST, OBJECT, CLAIM, TEMPORARY = "manifest", "object", "claim", "temporary file"


class Removed(NamedTuple):
    """A file that was removed."""

    kind: str
    name: str
    """Below the root of the tier."""
    nbytes: int | None
    """None: the store does not say."""


class Left(NamedTuple):
    """Files that stay because they may still be needed: ``reason`` says why."""

    kind: str
    names: tuple[str, ...]
    nbytes: int | None
    reason: str


@dataclass
class Collected:
    removed: list[Removed] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)


def collect(
    store: Store,
    *,
    is_stopped: bool = False,
    is_dry_run: bool = False,
    grace: float = GRACE_SECONDS,
    progress: Progress = lambda *_: nullcontext(lambda _: None),
) -> Collected:
    """Remove what no checkpoint of a tier needs. ``is_stopped``: the user says that nothing writes to the tier; else
    what lies below the newest claims is left to their drain. ``is_dry_run``: only say what would be removed. Raises
    ``TierError``, also if the tier holds two runs."""
    work = _Collection(store, is_stopped, is_dry_run, grace, progress)
    listing = work.listing()
    refuse_other_runs(store, listing)
    while manifests := manifests_to_collect(listing, is_stopped=is_stopped, grace=grace):
        work.remove(MANIFEST, list(map(str, manifests)))
        work.gone.update(manifests)
        listing = work.listing()
    contents, unreadable = _read(store, listing)
    named = _named(listing, contents, unreadable)
    objects = objects_to_collect(listing, named, is_stopped=is_stopped, grace=grace)
    work.remove(OBJECT, list(map(str, objects)))
    work.gone.update(objects)
    work.report_left_objects(listing, named, unreadable)
    work.report_left_manifests(listing)
    has_temporary = work.collect_temporary(listing.now)
    work.collect_claims(work.without_gone(listing), contents, has_temporary)
    return work.result


@dataclass
class _Collection:
    """One run of the collector."""

    store: Store
    is_stopped: bool
    is_dry_run: bool
    grace: float
    progress: Progress
    gone: set[ManifestName | ObjectName] = field(default_factory=set)
    """What was removed. A late listing may still show it; its name is never used again."""
    result: Collected = field(default_factory=Collected)

    def listing(self) -> Listing:
        now = self.store.now()  # before the listing: so nothing looks older than it is
        return self.without_gone(replace(self.store.listing(), now=now))

    def without_gone(self, listing: Listing) -> Listing:
        return replace(
            listing,
            manifests={each: time for each, time in listing.manifests.items() if each not in self.gone},
            objects={each: time for each, time in listing.objects.items() if each not in self.gone},
        )

    def remove(self, kind: str, names: Sequence[str]) -> None:
        """Remove files that ``names.py`` names, in this order."""
        sizes = [self._nbytes_of(name) for name in names]
        with self.progress(f"removing {kind}s", sum(each or 0 for each in sizes)) as advance:
            for name, nbytes in zip(names, sizes, strict=True):
                if not self.is_dry_run:
                    self.store.delete(name)
                self.result.removed.append(Removed(kind, name, nbytes))
                advance(nbytes or 0)

    def report_left(self, kind: str, names: Sequence[str], reason: str) -> None:
        if names:
            sizes = [self._nbytes_of(name) for name in names]
            nbytes = None if None in sizes else sum(each or 0 for each in sizes)
            self.result.left.append(Left(kind, tuple(names), nbytes, reason))

    def _nbytes_of(self, name: str) -> int | None:
        return self.store.nbytes_of(name) if self.store.knows_sizes else None

    def report_left_objects(
        self, listing: Listing, named: Mapping[Writer, set[ObjectName]], unreadable: Mapping[Writer, str]
    ) -> None:
        """Say which objects stay that no manifest names, and why; and all objects of each writer that has an unreadable
        manifest."""
        found: dict[str, list[str]] = defaultdict(list)
        for each in objects_to_collect(listing, named, is_stopped=True, grace=-math.inf):
            if each not in self.gone:
                found[self._reason(listing, each.writer.claim, listing.objects[each])].append(str(each))
        for each in sorted(listing.objects):
            if each.writer in unreadable:
                found[f"{unreadable[each.writer]}, and may name them"].append(str(each))
        for reason, names in found.items():
            self.report_left(OBJECT, names, reason)

    def report_left_manifests(self, listing: Listing) -> None:
        """Say which manifests of incomplete checkpoints stay, and why."""
        whole, found = complete(listing), defaultdict(list)
        for each in sorted(listing.manifests):
            if each.checkpoint not in whole:
                reason = self._reason(listing, each.writer.claim, listing.manifests[each])
                found[f"not all ranks have sent the checkpoint; {reason}"].append(str(each))
        for reason, names in found.items():
            self.report_left(MANIFEST, names, reason)

    def _reason(self, listing: Listing, claim: Claim, time: float) -> str:
        if listing.now - time < self.grace:
            return self._young_reason
        return f"the process that made claim {claim} may still use them (if no such process runs, pass --stopped)"

    @property
    def _young_reason(self) -> str:
        return f"written within the last {self.grace / 60:.0f} minutes, so perhaps of a checkpoint that is being sent"

    def collect_temporary(self, now: float) -> set[Claim]:
        """Remove the temporary files of killed processes. Returns the claims below which others stay."""
        if not isinstance(self.store, HasFolders):
            return set()
        found = self.store.temporary_files()
        young = [each for each in found if now - each.time < self.grace]
        for each in found:
            if each not in young:
                if not self.is_dry_run:
                    self.store.delete_temporary(each.name)
                self.result.removed.append(Removed(TEMPORARY, each.name, each.nbytes))
        if young:
            names, nbytes = tuple(each.name for each in young), sum(each.nbytes for each in young)
            self.result.left.append(Left(TEMPORARY, names, nbytes, self._young_reason))
        return set(_claims_of(young))

    def collect_claims(
        self, listing: Listing, contents: Mapping[ManifestName, TierManifest], in_use: set[Claim]
    ) -> None:
        """Remove the claims of which nothing is left, and their folders. The highest one stays: the next claim is
        higher than it. ``in_use``: claims below which something is being written."""
        used = {each.writer.claim for each in listing.manifests} | {each.writer.claim for each in listing.objects}
        used |= in_use
        for claim in sorted(listing.claims - used - {highest_claim(listing)}):
            if not may_collect(listing, claim, is_stopped=self.is_stopped, grace=self.grace):
                continue
            if _may_be_resumed_from(self.store, listing, claim, contents):
                reason = "a resume from a pool may need it, because it lists the checkpoints that came before"
                self.report_left(CLAIM, [claim_name(claim)], reason)
                continue
            self.remove(CLAIM, [claim_name(claim)])
            if isinstance(self.store, HasFolders) and not self.is_dry_run:
                self.store.delete_folders(claim)
        if isinstance(self.store, HasFolders) and not self.is_dry_run:
            # A collector that was killed after it had removed the file leaves the folder of a claim. So does a process
            # that has withdrawn its claim.
            for claim, time in self.store.empty_claims():
                if listing.now - time >= self.grace:
                    self.store.delete_folders(claim)


def _read(store: Store, listing: Listing) -> tuple[dict[ManifestName, TierManifest], dict[Writer, str]]:
    """Return every manifest that can be read, and for each writer one reason why one of its manifests cannot be."""
    contents: dict[ManifestName, TierManifest] = {}
    unreadable: dict[Writer, str] = {}
    for name in sorted(listing.manifests):
        try:
            contents[name] = read_manifest(store, name)
        except DamagedError as err:
            unreadable[name.writer] = f"the manifest {name} cannot be read ({err})"
    return contents, unreadable


def _named(
    listing: Listing, contents: Mapping[ManifestName, TierManifest], unreadable: Mapping[Writer, str]
) -> dict[Writer, set[ObjectName]]:
    """Return for each writer the objects that its manifests name. A writer is left out if one of its manifests cannot
    be read."""
    named: dict[Writer, set[ObjectName]] = {each.writer: set() for each in listing.objects}
    for name, manifest in contents.items():
        named.setdefault(name.writer, set()).update(each.name for each in manifest.objects)
    return {writer: names for writer, names in named.items() if writer not in unreadable}


def _may_be_resumed_from(
    store: Store, listing: Listing, claim: Claim, contents: Mapping[ManifestName, TierManifest]
) -> bool:
    """Whether a training may continue from a pool whose newest checkpoint names ``claim``. Such a training reads in the
    file of the claim which checkpoints of this tier came before. There is no such training if a checkpoint of the tier
    names a higher claim, because that checkpoint is newer than the pool. (A checkpoint that ``lightck copy`` has sent
    lies below another claim than the one that it names.)"""
    if any((claim_of(each.claim) or Claim(0, "")) > claim for each in contents.values()):
        return False
    found = claim_if_there(store, claim)
    return found is not None and bool(on_path(complete(listing), claim, found.path))


def _claims_of(files: Sequence[TemporaryFile]) -> Iterator[Claim]:
    for each in files:
        claim = claim_of(each.name.split("/")[0])
        if claim is not None:
            yield claim
