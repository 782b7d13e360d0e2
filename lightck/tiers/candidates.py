"""Which checkpoint of several tiers is the newest, and how it compares with that of a pool.

Checkpoints of one run are ordered by (claim, incarnation, step), all three as the checkpoint itself says. So a pool
that went on from an old checkpoint, on a machine that was replaced, is older than what its successor has sent, even if
its step is larger. On a tie the pool is taken, because nothing must be fetched then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lightck.errors import CorruptPoolError, NoCheckpointError, UnsupportedError
from lightck.pool.format.structures import DamagedError, Superblock
from lightck.restore.usable import STALE_REASON
from lightck.tiers.claiming import claim_of, read_claim, refuse_other_runs
from lightck.tiers.decisions import Listing, complete, manifests_of
from lightck.tiers.fetching import stale_after
from lightck.tiers.names import Claim, ManifestName, TierCheckpoint
from lightck.tiers.store import Store
from lightck.tiers.tier_manifest import TierManifest, read_manifest


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
    """A complete checkpoint of a tier whose manifest could be read."""

    store: Store
    checkpoint: TierCheckpoint
    manifest: TierManifest
    listing: Listing

    @property
    def order(self) -> Order:
        return Order.of(self.manifest.claim, self.manifest.incarnation, self.checkpoint.step)

    def __str__(self) -> str:
        return f"step {self.checkpoint.step} of the tier {str(self.store)!r} (claim {self.checkpoint.claim})"

    def refuse_stale(self) -> None:
        """Raise ``DamagedError`` if a newer checkpoint of the same pool in the tier says that this one is stale."""
        for newer in sorted(each for each in complete(self.listing) if each > self.checkpoint):
            try:
                other = read_manifest(self.store, manifests_of(self.listing, newer)[0])
                if Superblock.unpack(other.superblock).uuid != Superblock.unpack(self.manifest.superblock).uuid:
                    continue
                after = stale_after(self.store, other)
            except (DamagedError, CorruptPoolError):
                continue  # it cannot be read, so it says nothing
            generation = self.manifest.record.payload_generation
            if after is not None and after < generation < other.record.payload_generation:
                raise DamagedError(STALE_REASON)


def candidates_of(store: Store, listing: Listing, step: int | None, rejected: list[Rejected]) -> Iterator[Candidate]:
    """Yield the complete checkpoints of a tier, newest first, or those of ``step``. What cannot be read is added to
    ``rejected``. Raises ``TierError``, and ``UnsupportedError`` for the checkpoints of a group of ranks."""
    for checkpoint in sorted(complete(listing), reverse=True):
        if step is None or checkpoint.step == step:
            yield from _of_one_step(store, listing, checkpoint, rejected)


def _of_one_step(
    store: Store, listing: Listing, checkpoint: TierCheckpoint, rejected: list[Rejected]
) -> Iterator[Candidate]:
    """Yield what was sent of one step, newest first: a step can be committed more than once
    (``session.close(done=True)``), and what a drain has sent before it was killed is sent again."""
    _refuse_ranks(manifests_of(listing, checkpoint), store)
    found: list[Candidate] = []
    for name in sorted(each for each in listing.manifests if each.checkpoint == checkpoint):
        try:
            found.append(Candidate(store, checkpoint, read_manifest(store, name), listing))
        except DamagedError as err:
            rejected.append(Rejected(checkpoint, str(err)))
    yield from sorted(found, key=lambda each: each.manifest.record.payload_generation, reverse=True)


def newest_of_all(stores: Sequence[Store], rejected: list[Rejected]) -> Iterator[Candidate]:
    """Yield the complete checkpoints of several tiers of a run, newest first. Raises as ``candidates_of`` does, and
    ``TierClaimedError`` if two runs lie in one tier."""
    heads: list[tuple[Candidate, Iterator[Candidate]]] = []
    for store in stores:
        listing = store.listing()
        refuse_other_runs(store, listing)
        _advance(candidates_of(store, listing, None, rejected), heads)
    while heads:
        newest = max(heads, key=lambda head: head[0].order)
        heads.remove(newest)
        yield newest[0]
        _advance(newest[1], heads)


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
    steps = ", ".join(str(each) for each in sorted({each.step for each in found})[-20:])
    return NoCheckpointError(
        f"The tier {str(store)!r} does not hold step {step}. It holds {steps}. Ask for one of these steps, or for "
        "none, to get the newest."
    )


def none_whole_error(store: Store, rejected: Sequence[Rejected]) -> CorruptPoolError:
    """Return the error for a tier in which no checkpoint is whole."""
    return CorruptPoolError(
        f"No checkpoint of the tier {str(store)!r} is whole. "
        + "; ".join(map(str, rejected))
        + ". Nothing was written. Look for the checkpoint in another tier, or in the pool.",
        tuple(map(str, rejected)),
    )


def _refuse_ranks(manifests: list[ManifestName], store: Store) -> None:
    if len(manifests) != 1:
        raise UnsupportedError(
            f"The tier {str(store)!r} holds the checkpoints of a group of {len(manifests)} ranks, and this lightck "
            "reads those of a single process only. Install a newer lightck."
        )
