"""Which checkpoint of several tiers is the newest, and how it compares with that of a pool.

The checkpoints of several tiers and of a pool are ordered by (claim, incarnation, step), all three as the checkpoint
itself says. So a pool that continued from an old checkpoint, on a machine that was replaced, is older than what its
successor has sent, even if its step is larger. On a tie the pool is taken, because nothing must be fetched then.

A reader of a single tier takes the checkpoints in the order of the claims below which they lie, and then of their
steps. (A checkpoint lies below a newer claim than the one that it names if ``lightck copy`` has sent it, or if it is
the one from which a training went on: the drain sends that at the end, if the tier lacks it.)

A checkpoint of a group has one manifest for each rank. All ranks of one checkpoint have one incarnation, because they
have agreed on it; parts that differ in it belong to different histories, and are never put together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightck.errors import CorruptPoolError, NoCheckpointError, UnsupportedError
from lightck.pool.format.structures import DamagedError, Superblock
from lightck.restore.usable import STALE_REASON
from lightck.tiers.claiming import claim_of, forked_error, read_claim, refuse_other_runs
from lightck.tiers.decisions import Listing, complete, manifests_of
from lightck.tiers.fetching import stale_after
from lightck.tiers.names import Claim, ManifestName, TierCheckpoint, Writer
from lightck.tiers.store import Store
from lightck.tiers.tier_manifest import SentObject, TierManifest, read_manifest


class Order(NamedTuple):
    """The place of a checkpoint among those of its run: the larger one is newer."""

    claim: Claim
    incarnation: int
    step: int

    @classmethod
    def of(cls, claim: str, incarnation: int, step: int) -> Order:
        """``claim``: what the checkpoint says; a text that is no claim counts as none, which is older than any."""
        return cls(claim_of(claim) or Claim(0, ""), incarnation, step)


class Rejected(NamedTuple):
    """A checkpoint of a tier that cannot be used."""

    checkpoint: TierCheckpoint
    reason: str

    @property
    def step(self) -> int:
        return self.checkpoint.step

    def __str__(self) -> str:
        return f"step {self.step} (claim {self.checkpoint.claim}): {self.reason}"


class Candidate(NamedTuple):
    """A complete checkpoint of a tier whose manifests could be read."""

    store: Store
    checkpoint: TierCheckpoint
    names: tuple[ManifestName, ...]
    """The manifest of each rank; one for a single process."""
    manifests: tuple[TierManifest, ...]
    listing: Listing

    @property
    def order(self) -> Order:
        first = self.manifests[0]
        return Order.of(first.claim, first.incarnation, self.checkpoint.step)

    @property
    def world_size(self) -> int:
        return len(self.names)

    @property
    def objects(self) -> list[SentObject]:
        """The objects of all ranks."""
        return [each for manifest in self.manifests for each in manifest.objects]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(each.nbytes for each in self.manifests)

    def __str__(self) -> str:
        return f"step {self.checkpoint.step} of the tier {str(self.store)!r} (claim {self.checkpoint.claim})"

    def of_single_process(self) -> TierManifest:
        """Return the manifest of a single process. Raises ``UnsupportedError`` if several ranks have sent the
        checkpoint."""
        if self.world_size > 1:
            raise UnsupportedError(
                f"The tier {str(self.store)!r} holds the checkpoints of a group of {self.world_size} ranks, and this "
                f"is a single process. Nothing was changed. Fetch one into a directory (lightck copy {self.store} "
                "DIRECTORY), and attach to that directory with resume=True."
            )
        return self.manifests[0]

    def refuse_stale(self) -> None:
        """Raise ``DamagedError`` if a newer checkpoint in the tier, sent from the same pool, says that this one is
        stale."""
        for newer in sorted(each for each in complete(self.listing) if each > self.checkpoint):
            for name in manifests_of(self.listing, newer):
                own = self.manifests[name.writer.rank] if name.writer.rank < self.world_size else None
                if own is not None and _makes_stale(self.store, name, own):
                    raise DamagedError(STALE_REASON)


def _makes_stale(store: Store, newer: ManifestName, own: TierManifest) -> bool:
    try:
        other = read_manifest(store, newer)
        if Superblock.unpack(other.superblock).uuid != Superblock.unpack(own.superblock).uuid:
            return False
        after = stale_after(store, other)
    except (DamagedError, CorruptPoolError):
        return False  # it cannot be read, so it says nothing
    return after is not None and after < own.record.payload_generation < other.record.payload_generation


def candidates_of(store: Store, listing: Listing, step: int | None, rejected: list[Rejected]) -> Iterator[Candidate]:
    """Yield the complete checkpoints of a tier, newest first, or those of ``step``. What cannot be read is added to
    ``rejected``. Raises ``TierError``."""
    for checkpoint in sorted(complete(listing), reverse=True):
        if step is None or checkpoint.step == step:
            yield from _of_one_step(store, listing, checkpoint, rejected)


def _of_one_step(
    store: Store, listing: Listing, checkpoint: TierCheckpoint, rejected: list[Rejected]
) -> Iterator[Candidate]:
    """Yield what was sent of one step, newest first: a step can be committed more than once
    (``session.close(done=True)``), and what a drain has sent before it was killed is sent again. Of a group, the newest
    part of each rank is taken."""
    of_ranks = []
    for each in manifests_of(listing, checkpoint):
        found, reasons = _of_one_rank(store, listing, each.writer, checkpoint.step)
        rejected += [Rejected(checkpoint, reason) for reason in reasons]
        of_ranks.append(found)
    if len(of_ranks) == 1:
        for name, manifest in of_ranks[0]:
            yield Candidate(store, checkpoint, (name,), (manifest,), listing)
        return
    if any(not found for found in of_ranks):
        return  # the reason was added
    names, manifests = zip(*(found[0] for found in of_ranks), strict=True)
    if len({(each.incarnation, each.claim) for each in manifests}) > 1:
        rejected.append(Rejected(checkpoint, "its ranks have sent parts of different histories"))
        return
    yield Candidate(store, checkpoint, names, manifests, listing)


def _of_one_rank(
    store: Store, listing: Listing, writer: Writer, step: int
) -> tuple[list[tuple[ManifestName, TierManifest]], list[str]]:
    """Return what a rank has sent of one step, newest first, and why others of its manifests cannot be read."""
    found, reasons = [], []
    for name in sorted(listing.manifests):
        if name.writer == writer and name.step == step:
            try:
                found.append((name, read_manifest(store, name)))
            except DamagedError as err:
                of_rank = "" if writer.world_size == 1 else f"of rank {writer.rank}: "
                reasons.append(f"{of_rank}{err}")
    # Two that were sent in one second may have one time. The one whose metrics were logged was sent later.
    newest_first = sorted(
        found,
        key=lambda one: (one[1].record.payload_generation, listing.manifests[one[0]], len(one[1].metrics)),
        reverse=True,
    )
    return newest_first, reasons


def newest_of_all(
    stores: Sequence[Store], rejected: list[Rejected], pool_to_compare: tuple[str, Order | None] | None = None
) -> Iterator[Candidate]:
    """Yield the complete checkpoints of several tiers of a run, newest first. ``pool_to_compare``: how errors name the
    pool that belongs to these tiers, and the order of its newest checkpoint (None: it holds none). Without it, nothing
    checks whether two places hold two continuations of the run. Raises as ``candidates_of`` does, and
    ``TierClaimedError`` if two runs lie in one tier, or if two of the compared places hold two continuations of the
    run."""
    heads: list[tuple[Candidate, Iterator[Candidate]]] = []
    for store in stores:
        listing = store.listing()
        refuse_other_runs(store, listing)
        _advance(_by_order(candidates_of(store, listing, None, rejected)), heads)
    if pool_to_compare is not None:
        _refuse_forked([head for head, _ in heads], *pool_to_compare)
    while heads:
        newest = max(heads, key=lambda head: head[0].order)
        heads.remove(newest)
        yield newest[0]
        _advance(newest[1], heads)


def _refuse_forked(newest: Sequence[Candidate], pool: str, in_pool: Order | None) -> None:
    """Raise ``TierClaimedError`` if the newest checkpoints of the tiers, and that of the pool, name two different
    claims with the same number. A training makes a claim with a larger number than each claim before it, so neither of
    these two continues the other."""
    found = [] if in_pool is None else [(pool, in_pool.claim)]
    found += [(f"the tier {str(each.store)!r}", each.order.claim) for each in newest]
    of_numbers: dict[int, tuple[str, Claim]] = {}
    for place, claim in found:
        if not claim.number:
            continue
        other, other_claim = of_numbers.setdefault(claim.number, (place, claim))
        if other_claim != claim:
            raise forked_error(other, other_claim, place, claim)


def _by_order(found: Iterator[Candidate]) -> Iterator[Candidate]:
    """Yield the checkpoints of one tier by their ``order``, newest first. ``found`` yields them by the claim below
    which they lie, so those that name another claim may come too early. They wait for their turn here."""
    waiting: list[Candidate] = []
    for each in found:
        if each.order.claim != each.checkpoint.claim:
            waiting.append(each)
            continue
        newer = [one for one in waiting if one.order > each.order]
        waiting = [one for one in waiting if one not in newer]
        yield from sorted(newer, key=lambda one: one.order, reverse=True)
        yield each
    yield from sorted(waiting, key=lambda one: one.order, reverse=True)


def _advance(found: Iterator[Candidate], heads: list[tuple[Candidate, Iterator[Candidate]]]) -> None:
    head = next(found, None)
    if head is not None:
        heads.append((head, found))


def run_of(store: Store, listing: Listing) -> str | None:
    """Return the id of the run in a tier; None if nothing lies in it. Raises ``TierError``."""
    return None if not listing.claims else read_claim(store, max(listing.claims)).run


def no_checkpoint_error(store: Store, listing: Listing, step: int | None) -> NoCheckpointError:
    """Return the error for a tier that does not hold what was asked for."""
    found = complete(listing)
    if not found:
        return NoCheckpointError(
            f"The tier {str(store)!r} holds no complete checkpoint. A checkpoint is complete when it was sent whole. "
            "Recover from the pool, or from another tier."
        )
    held = sorted({each.step for each in found})
    steps = ", ".join(map(str, held[-20:])) + (f" and {len(held) - 20} older ones" if len(held) > 20 else "")
    return NoCheckpointError(
        f"The tier {str(store)!r} does not hold step {step}. It holds {steps}. Ask for one of these steps, or for "
        "none, to get the newest."
    )


def none_intact_error(store: Store, rejected: Sequence[Rejected]) -> CorruptPoolError:
    """Return the error for a tier in which no checkpoint is intact."""
    return CorruptPoolError(
        f"No checkpoint of the tier {str(store)!r} that was looked at is intact. "
        + "; ".join(map(str, rejected))
        + ". Nothing was written. Look for the checkpoint in another tier, or in the pool.",
        tuple(map(str, rejected)),
    )
