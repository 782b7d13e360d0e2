"""The claim of a session in all of its tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightck.errors import TierClaimedError
from lightck.tiers.claiming import ResumePoint, claim_tiers, lightck_release, read_claim
from lightck.tiers.decisions import Listing, complete
from lightck.tiers.names import TierCheckpoint
from lightck.tiers.store import Store


class Claimed(NamedTuple):
    """A claim that was made in all tiers, and what they held then. Of the lists, each item is of one tier."""

    claim: str
    newest: Sequence[int | None]
    """The step of the newest complete checkpoint whose step is at most the one from which the training continues; None:
    there is none."""
    is_empty: Sequence[bool]
    """Whether there is no checkpoint at all."""
    has_parent: Sequence[bool]
    """Whether the checkpoint from which the training goes on is there."""
    ages: Sequence[float | None]
    """How many seconds before the claim the newest complete checkpoint of all was written; None: there is none."""

    def of_tiers(self, numbers: Sequence[int]) -> Claimed:
        """Return what it says of some of the tiers."""
        return Claimed(
            self.claim,
            [self.newest[number] for number in numbers],
            [self.is_empty[number] for number in numbers],
            [self.has_parent[number] for number in numbers],
            [self.ages[number] for number in numbers],
        )


def run_of_new_training(stores: Sequence[Store], run: str) -> str:
    """Return the id of the run that begins now: ``run``, or that of a claim in the tiers below which nothing was sent.
    (The training that made this claim was killed before its first checkpoint.) Raises ``TierClaimedError`` if a tier
    holds checkpoints."""
    found = {run}
    for store in stores:
        listing = store.listing()
        if complete(listing):
            raise TierClaimedError(
                f"The tier {str(store)!r} holds checkpoints, and this training begins anew. Nothing was changed. "
                "Pass attach(..., resume=True) to continue from the newest of them; or choose another folder, because "
                "a tier holds one run."
            )
        if listing.claims:
            found.add(read_claim(store, max(listing.claims)).run)
    return max(found - {run}, default=run)


def claim_for_session(stores: Sequence[Store], run: str, resume_point: ResumePoint | None) -> Claimed:
    """Claim all tiers for the run. ``resume_point``: None for a new run. Raises ``TierError``."""
    for store in stores:
        store.refuse_foreign_contents()
    claim = claim_tiers(stores, run, lightck_release(), resume_point)
    parent, step = None, 0
    if resume_point is not None:
        parent = None if resume_point.claim is None else TierCheckpoint(resume_point.claim, resume_point.step)
        step = resume_point.step
    listings = [store.listing() for store in stores]
    whole = [complete(each) for each in listings]
    return Claimed(
        str(claim),
        [max((each.step for each in found if each.step <= step), default=None) for found in whole],
        [not found for found in whole],
        [parent in found for found in whole],
        [_newest_age(each) for each in listings],
    )


def _newest_age(listing: Listing) -> float | None:
    """Return how many seconds ago the newest complete checkpoint was written; None: there is none. The result is
    negative if a clock was set back."""
    newest = max(complete(listing), default=None)
    times = [time for manifest, time in listing.manifests.items() if manifest.checkpoint == newest]
    return listing.now - max(times) if times else None
