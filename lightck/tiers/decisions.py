"""What is decided about a tier from a listing of it: which checkpoints are complete, which claim counts, what may go.

The store needs no atomic create, no lock and no compare-and-swap. What makes a tier safe instead:

- *One writer.* Each prefix (claim, rank) has one writer, the drain of that rank, and no name is written twice with
  other bytes. Two trainings that claim at the same time get two names, and the larger one counts.
- *A manifest is written after the objects that it names, and is deleted before them.* So a checkpoint whose manifests
  are all there is whole. Nothing outside a prefix needs an object in it.
- *Only the highest claim deletes.* Its drains delete below their own prefixes; that of rank 0 deletes below older
  claims too: below those that are older than the claim of a complete checkpoint whose grace is over.
- *A reader has time.* A checkpoint goes only when a newer complete one is older than the grace, by the times of the
  store. A reader that began with it has had at least the grace to read it.
- *Listings may be late*, by less than the grace. Whether a manifest is there is known by reading it. So a drain uses an
  object again only if a manifest that it has read names the object.

A drain may sleep between a listing and what it does next, for any time (a *zombie*). It wakes below a claim that is no
longer the highest. There it can put a manifest whose objects are gone, or delete what its own newer checkpoint has
replaced. No reader misses either one: the newest checkpoint is under the higher claim, or the zombie keeps it.

The functions are pure. ``tests/tiers/test_tier_model.py`` runs them through every interleaving of small groups.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass

from lightck.tiers.names import Claim, ManifestName, ObjectName, TierCheckpoint, Writer, parse

GRACE_SECONDS = 3600.0
"""How long a checkpoint that was replaced can still be read."""


@dataclass(frozen=True)
class Listing:
    """What lies in a tier, as one listing says it. Times are in seconds, by the clock of the store."""

    claims: frozenset[Claim]
    manifests: Mapping[ManifestName, float]
    """Each with the time at which it was written."""
    objects: Mapping[ObjectName, float]
    now: float
    """The time of the listing."""

    @classmethod
    def of(cls, names: Iterable[tuple[str, float]], now: float) -> Listing:
        """Return the listing of ``names``: each name below the root, with the time at which it was written."""
        claims = set()
        manifests: dict[ManifestName, float] = {}
        objects: dict[ObjectName, float] = {}
        for name, time in names:
            match parse(name):
                case Claim() as claim:
                    claims.add(claim)
                case ManifestName() as manifest:
                    manifests[manifest] = time
                case ObjectName() as each:
                    objects[each] = time
        return cls(frozenset(claims), manifests, objects, now)


@dataclass(frozen=True)
class KeepBest:
    """Which checkpoints stay because of a metric that the training has logged."""

    metric: str
    n: int
    mode: str
    """``"min"`` or ``"max"``: which values are best."""


@dataclass(frozen=True)
class Retention:
    """Which checkpoints of a run stay in a tier. The newest one stays in any case."""

    _: KW_ONLY
    keep_last: int | None = None
    """How many of the newest stay; None: all."""
    keep_every: int | None = None
    """Checkpoints whose step is a multiple of this number stay."""
    keep_best: KeepBest | None = None


# -- claims


def highest_claim(listing: Listing) -> Claim | None:
    return max(listing.claims, default=None)


def next_claim(listing: Listing, tag: str) -> Claim:
    """Return the claim that a training puts next. It has claimed the tier if the claim is the highest one in a listing
    that begins after the put; else it tries again, with another tag."""
    highest = highest_claim(listing)
    return Claim(1 if highest is None else highest.number + 1, tag)


def is_superseded(listing: Listing, claim: Claim) -> bool:
    """Return whether a higher claim exists. A drain that learns this deletes nothing more, finishes at most the
    checkpoint that it has begun, and ends."""
    return any(each > claim for each in listing.claims)


# -- checkpoints


def complete(listing: Listing) -> frozenset[TierCheckpoint]:
    """Return the checkpoints of which the manifests of all ranks are there."""
    return frozenset(_written(listing))


def newest_complete(listing: Listing) -> TierCheckpoint | None:
    return max(_written(listing), default=None)


def manifests_of(listing: Listing, checkpoint: TierCheckpoint) -> list[ManifestName]:
    """Return the manifests of a complete checkpoint, one for each rank, ordered by rank. (A rank has two if its drain
    was killed right after it had sent one, and sent the checkpoint again. Both are whole.)"""
    world_size = min(w for w, ranks in _ranks_of(listing)[checkpoint].items() if len(ranks) == w)
    found = {each.writer.rank: each for each in sorted(listing.manifests) if each.checkpoint == checkpoint}
    return [found[rank] for rank in range(world_size)]


def newest_replacement(listing: Listing, grace: float) -> TierCheckpoint | None:
    """Return the newest complete checkpoint that has been complete for at least ``grace`` seconds. Only what is older
    than this one may go."""
    return max((c for c, time in _written(listing).items() if listing.now - time >= grace), default=None)


def _ranks_of(listing: Listing) -> Mapping[TierCheckpoint, Mapping[int, set[int]]]:
    """Return for each checkpoint, and each number of ranks in its manifests' names, the ranks that are there."""
    found: dict[TierCheckpoint, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for manifest in listing.manifests:
        found[manifest.checkpoint][manifest.writer.world_size].add(manifest.writer.rank)
    return found


def _written(listing: Listing) -> dict[TierCheckpoint, float]:
    """Return for each complete checkpoint the time at which its last manifest was written."""
    is_complete = {
        checkpoint
        for checkpoint, worlds in _ranks_of(listing).items()
        if any(len(ranks) == world_size for world_size, ranks in worlds.items())
    }
    times: dict[TierCheckpoint, float] = {}
    for manifest, time in listing.manifests.items():
        if manifest.checkpoint in is_complete:
            times[manifest.checkpoint] = max(time, times.get(manifest.checkpoint, time))
    return times


# -- retention


def on_path(
    checkpoints: Iterable[TierCheckpoint], claim: Claim, path: Collection[TierCheckpoint]
) -> set[TierCheckpoint]:
    """Return the checkpoints that the training of ``claim`` has come through. ``path``: for each older claim on it, the
    checkpoint from which the training went on, which need not be in this tier. A training writes the path into its
    claim."""
    ends = {each.claim: each.step for each in path}
    return {each for each in checkpoints if each.claim == claim or each.step <= ends.get(each.claim, -1)}


def kept(
    listing: Listing,
    retention: Retention,
    claim: Claim,
    path: Collection[TierCheckpoint] = (),
    metrics: Mapping[TierCheckpoint, Mapping[str, float]] | None = None,
) -> frozenset[TierCheckpoint]:
    """Return the complete checkpoints that stay. ``claim``: the highest one. ``path``: as in ``on_path``. ``metrics``:
    for each checkpoint what its manifest says that the training logged; a checkpoint without the metric is not one of
    the best, and neither is one whose metric is not a number."""
    checkpoints = complete(listing)
    newest = max(checkpoints, default=None)
    if newest is None:
        return frozenset()
    run = sorted(on_path(checkpoints, claim, path))
    stays = {newest}
    if retention.keep_last is None:
        stays.update(run)
    else:
        stays.update(run[-retention.keep_last :])
    if retention.keep_every is not None:
        stays.update(each for each in run if each.step % retention.keep_every == 0)
    if retention.keep_best is not None:
        stays.update(_best(run, retention.keep_best, metrics or {}))
    return frozenset(stays)


def _best(
    run: Iterable[TierCheckpoint], best: KeepBest, metrics: Mapping[TierCheckpoint, Mapping[str, float]]
) -> list[TierCheckpoint]:
    """Return the ``best.n`` best checkpoints. Of two with the same value the newer one is better."""
    sign = 1 if best.mode == "max" else -1
    values = {each: metrics.get(each, {}).get(best.metric, math.nan) for each in run}
    ranked = sorted((sign * value, each) for each, value in values.items() if not math.isnan(value))
    return [each for _, each in ranked[-best.n :]]


# -- what a drain sends and deletes


def reusable(named: Mapping[Writer, Collection[ObjectName]], writer: Writer) -> dict[str, ObjectName]:
    """Return for each content the object that the next checkpoint of ``writer`` can name again. ``named``: the objects
    that the manifests of each writer name. What other writers have is no use: they delete it when they like."""
    return {each.content: each for each in sorted(named.get(writer, ()))}


def manifests_to_delete(
    listing: Listing, stays: Collection[TierCheckpoint], writer: Writer, grace: float = GRACE_SECONDS
) -> list[ManifestName]:
    """Return the manifests that the drain of ``writer`` deletes, in this order. ``stays``: what ``kept`` returned; only
    rank 0 needs it, because the other ranks delete what rank 0 has deleted."""
    replacement = newest_replacement(listing, grace)
    if replacement is None or is_superseded(listing, writer.claim):
        return []
    found = [each for each in listing.manifests if each.checkpoint < replacement and each.checkpoint not in stays]
    if writer.rank != 0:
        found = [each for each in found if each.writer == writer and not _has_first_rank(listing, each)]
    else:
        found = [each for each in found if each.writer == writer or each.writer.claim < replacement.claim]
    return sorted(found, key=lambda each: (each.checkpoint, each.writer))


def objects_to_delete(
    listing: Listing,
    named: Mapping[Writer, Collection[ObjectName]],
    writer: Writer,
    began: float,
    grace: float = GRACE_SECONDS,
) -> list[ObjectName]:
    """Return the objects that the drain of ``writer`` deletes, while it sends no checkpoint. ``named``: the objects
    that the manifests of each writer name; it has an entry for a writer only if all of the writer's manifests in the
    listing were read, and it includes what the drain itself has written, which a listing need not show yet. ``began``:
    the time of the store when the drain began. Before the grace has passed, a listing need not show what an earlier
    drain of the same writer wrote last. (It shows all that lies below the claims that were superseded earlier.)"""
    if is_superseded(listing, writer.claim):
        return []
    shows_own = listing.now - began >= grace
    replacement = newest_replacement(listing, grace) if writer.rank == 0 else None
    return sorted(
        each
        for each in listing.objects
        if (
            (shows_own and each.writer == writer) or (replacement is not None and each.writer.claim < replacement.claim)
        )
        and each.writer in named
        and each not in named[each.writer]
    )


def _has_first_rank(listing: Listing, manifest: ManifestName) -> bool:
    first = manifest.writer._replace(rank=0)
    return any(each.writer == first and each.step == manifest.step for each in listing.manifests)


# -- what ``lightck gc`` deletes


def may_collect(listing: Listing, claim: Claim, *, is_stopped: bool, grace: float = GRACE_SECONDS) -> bool:
    """Return whether ``lightck gc`` may delete below a claim: below one that is older than the newest replacement, or,
    if the user says that no training runs (``is_stopped``), below any. (Elsewhere an object that no manifest names may
    be one that the next manifest names.)"""
    replacement = newest_replacement(listing, grace)
    return is_stopped or (replacement is not None and claim < replacement.claim)


def manifests_to_collect(listing: Listing, *, is_stopped: bool, grace: float = GRACE_SECONDS) -> list[ManifestName]:
    """Return the manifests of incomplete checkpoints that ``lightck gc`` deletes: those older than the grace, because
    a listing need not show younger ones of other ranks. It deletes no complete checkpoint."""
    whole = complete(listing)
    return sorted(
        each
        for each, time in listing.manifests.items()
        if each.checkpoint not in whole
        and listing.now - time >= grace
        and may_collect(listing, each.writer.claim, is_stopped=is_stopped, grace=grace)
    )


def objects_to_collect(
    listing: Listing,
    named: Mapping[Writer, Collection[ObjectName]],
    *,
    is_stopped: bool,
    grace: float = GRACE_SECONDS,
) -> list[ObjectName]:
    """Return the objects that ``lightck gc`` deletes: those older than the grace. ``named``: as in
    ``objects_to_delete``, of a listing in which no manifest is left to collect."""
    return sorted(
        each
        for each, time in listing.objects.items()
        if listing.now - time >= grace
        and each.writer in named
        and each not in named[each.writer]
        and may_collect(listing, each.writer.claim, is_stopped=is_stopped, grace=grace)
    )
