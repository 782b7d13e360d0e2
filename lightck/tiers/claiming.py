"""Claim a tier: from then on only this process, or the drains of its training, write below the claim. (When these
drains have ended, ``lightck drain`` may do so too.)

    list; put a claim with the next number and a random tag; list: is it the highest? Else wait for a random time, and
    try again

The file of a claim says which run claimed the tier, and the *path*: for each older claim, the checkpoint from which the
run went on. A tier holds one run.
"""

from __future__ import annotations

import json
import random
import secrets
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightck.errors import TierClaimedError, TierError, capitalized
from lightck.pool.format.structures import NUMBER_MAX, DamagedError
from lightck.tiers.decisions import Listing, complete, highest_claim, is_superseded, next_claim
from lightck.tiers.names import Claim, TierCheckpoint, claim_name, parse
from lightck.tiers.store import Store

FORMAT, VERSION = "lightck tier claim", 1
_NBYTES_MAX, _PATH_MAX = 1 << 20, 10_000
_TRIES, _PAUSE_SECONDS_MAX = 20, 2.0


@dataclass(frozen=True)
class ClaimFile:
    """What the file of a claim says."""

    written_by: str
    """Release of lightck."""
    run: str
    """32 hexadecimal digits that all claims of one run have in common."""
    path: tuple[TierCheckpoint, ...] = ()

    def packed(self) -> bytes:
        path = [[str(each.claim), each.step] for each in self.path]
        body = {"format": FORMAT, "version": VERSION, "written_by": self.written_by, "run": self.run, "path": path}
        return json.dumps(body, separators=(",", ":")).encode()


def lightck_release() -> str:
    """Return the release of lightck. (It is read from ``sys.modules``, because no room imports the root package.)"""
    return str(sys.modules[__name__.partition(".")[0]].__version__)


def claim_of(text: str) -> Claim | None:
    """Return the claim with this name; None if the text is no name of a claim."""
    found = parse(f"{text}/claim.json")
    return found if isinstance(found, Claim) else None


class ResumePoint(NamedTuple):
    """The checkpoint from which a training goes on."""

    step: int
    claim: Claim | None = None
    """The claim that the checkpoint names; None: it names none, or the claim is not known."""


NEWEST = ResumePoint(NUMBER_MAX)
"""The training continues from the newest checkpoint in the tier."""


def claim_tier(store: Store, run: str, written_by: str) -> Claim:
    """Claim a tier for a run, which continues from the newest checkpoint in it. Raises ``TierError``, also if the tier
    holds another run."""
    return claim_tiers([store], run, written_by, NEWEST)


def claim_tiers(stores: Sequence[Store], run: str, written_by: str, resume_point: ResumePoint | None) -> Claim:
    """Make one claim in several tiers, so that the claims of a run are ordered over all of them. ``resume_point``: None
    for a new run. Raises ``TierError``, also if a tier holds another run."""
    made: list[Claim] = []
    for _ in range(_TRIES):
        listings = [store.listing() for store in stores]
        for store, listing in zip(stores, listings, strict=True):
            if _run_of_highest_claim(store, listing) not in (run, None):
                _withdraw(stores, made)
                raise _other_run(store)
        claim = _next_claim(stores, listings, resume_point)
        for store, path in zip(stores, _paths(stores, listings, resume_point), strict=True):
            store.put(claim_name(claim), ClaimFile(written_by, run, path).packed())
        made.append(claim)
        after = [store.listing() for store in stores]
        if not any(is_superseded(listing, claim) for listing in after):
            for store, before, now in zip(stores, listings, after, strict=True):
                if _holds_other_run(store, now.claims - before.claims - {claim}, run):
                    _withdraw(stores, made)
                    raise _other_run(store)
            return claim
        time.sleep(random.uniform(0, _PAUSE_SECONDS_MAX))
    names = " and ".join(repr(str(store)) for store in stores)
    raise TierClaimedError(
        f"The tier {names} could not be claimed: in each of {_TRIES} attempts another process claimed it at the "
        "same time. Let one training write to a tier, and give the others folders of their own."
    )


def _next_claim(stores: Sequence[Store], listings: Sequence[Listing], resume_point: ResumePoint | None) -> Claim:
    """Return a claim that is higher than all in these tiers, and than the last one of the training."""
    tag = secrets.token_hex(4)
    claim = max(next_claim(listing, tag) for listing in listings)
    if resume_point is not None and resume_point.claim is not None:
        claim = max(claim, Claim(resume_point.claim.number + 1, tag))
    if parse(claim_name(claim)) is None:  # it has too many digits
        names = " and ".join(repr(str(store)) for store in stores)
        raise TierError(
            f"The tier {names} cannot be claimed again: one of its folders NUMBER-TAG has the largest number that "
            "there can be. lightck never reaches this number, so another program has made that folder. Remove it (and "
            "nothing else)."
        )
    return claim


def _run_of_highest_claim(store: Store, listing: Listing) -> str | None:
    """Return the run of the highest claim whose file is there; None if there is none. (Another process may have
    withdrawn a claim since the listing.)"""
    for claim in sorted(listing.claims, reverse=True):
        found = claim_if_there(store, claim)
        if found is not None:
            return found.run
    return None


def _holds_other_run(store: Store, claims: Iterable[Claim], run: str) -> bool:
    """Whether one of these claims is there, and is of another run."""
    found = (claim_if_there(store, each) for each in claims)
    return any(each is not None and each.run != run for each in found)


def _withdraw(stores: Sequence[Store], claims: Iterable[Claim]) -> None:
    """Delete claims of this process, because the tier belongs to another run: nobody reads a tier that holds the claims
    of two runs. Nothing lies below these claims."""
    for claim in claims:
        for store in stores:
            store.delete(claim_name(claim))


def _other_run(store: Store) -> TierClaimedError:
    return TierClaimedError(
        f"The tier {str(store)!r} belongs to another run, and a recovery refuses a tier that holds two runs. "
        "Nothing was written. Choose another folder for this run."
    )


def refuse_other_runs(store: Store, listing: Listing) -> None:
    """Raise ``TierClaimedError`` if claims of two runs lie in a tier."""
    found = (claim_if_there(store, each) for each in listing.claims)  # ``lightck gc`` may have removed one since
    runs = {each.run for each in found if each is not None}
    if len(runs) > 1:
        raise TierClaimedError(
            f"The tier {str(store)!r} holds the claims of {len(runs)} runs, and lightck does not guess which one you "
            "want. Nothing was written. Move the folders of the others out of it: NUMBER-TAG/claim.json names the run."
        )


def _paths(
    stores: Sequence[Store], listings: Sequence[Listing], resume_point: ResumePoint | None
) -> list[tuple[TierCheckpoint, ...]]:
    """Return the path of a new claim for each tier."""
    if resume_point is None:
        return [() for _ in stores]
    if resume_point.claim is None:
        return [
            _path_to_newest(store, listing, resume_point.step) for store, listing in zip(stores, listings, strict=True)
        ]
    parent = TierCheckpoint(resume_point.claim, resume_point.step)
    with_claim = [store for store, listing in zip(stores, listings, strict=True) if parent.claim in listing.claims]
    return [_path_to(with_claim[0], parent) if with_claim else (parent,)] * len(stores)


def _path_to_newest(store: Store, listing: Listing, step_max: int) -> tuple[TierCheckpoint, ...]:
    """Return the path that ends with the newest complete checkpoint of a tier, among those with a step of at most
    ``step_max``. If there is none, or its claim is gone, return the path of the highest claim; () if there is no
    claim."""
    newest = max((each for each in complete(listing) if each.step <= step_max), default=None)
    highest = highest_claim(listing)
    if newest is not None and newest.claim in listing.claims:
        return _path_to(store, newest)
    return () if highest is None else read_claim(store, highest).path


def _path_to(store: Store, parent: TierCheckpoint) -> tuple[TierCheckpoint, ...]:
    older = (each for each in read_claim(store, parent.claim).path if each.claim != parent.claim)
    return tuple(sorted({*older, parent}))[-_PATH_MAX:]


def read_claim(store: Store, claim: Claim) -> ClaimFile:
    """Read and check the file of a claim. Raises ``TierError``."""
    found = claim_if_there(store, claim)
    if found is None:
        raise _unreadable(store, claim, "it is gone")
    return found


def claim_if_there(store: Store, claim: Claim) -> ClaimFile | None:
    """As ``read_claim``, but a claim that is gone gives None."""
    try:
        return _parse(store.get(claim_name(claim), _NBYTES_MAX))
    except FileNotFoundError:
        return None
    except DamagedError as err:
        raise _unreadable(store, claim, str(err)) from err


def refuse_other_training(store: Store, in_pool: Claim, in_tier: Claim, pool: str) -> None:
    """Raise ``TierClaimedError`` if neither of two trainings has replaced the other: the one that saved the newest
    checkpoint of a pool, and the one that sent a checkpoint of a tier. ``in_pool``, ``in_tier``: the claims that the
    two checkpoints name. There are two cases. Either both trainings began anew. (Mostly they
    have two run ids, which is refused earlier. But they share one if the second claimed the tier before the first had
    sent anything: ``run_of_new_training``.) Or the training of the pool neither claimed this tier nor is on the path of
    ``in_tier``: then the numbers of the two claims do not say which is newer. Nothing is raised if the file of
    ``in_tier`` is gone, or if a path was cut, because then this cannot be known."""
    if _is_other_branch(store, in_pool, in_tier):
        raise forked_error(pool, in_pool, f"the tier {str(store)!r}", in_tier)
    histories = []
    for claim in (in_pool, in_tier):
        content = claim_if_there(store, claim) if claim.number else None
        if content is None or len(content.path) >= _PATH_MAX:
            return
        histories.append({claim, *(each.claim for each in content.path)})
    if histories[0].isdisjoint(histories[1]):
        raise TierClaimedError(
            f"The tier {str(store)!r} and {pool} hold two trainings that both began anew (claims {in_tier} and "
            f"{in_pool}): two jobs have used one tier, or one job has begun anew twice. Nothing was changed. A tier "
            "holds one run: to continue from the pool, pass another folder in tiers=; to continue from the tier, "
            "pass a pool path at which nothing lies yet."
        )


def _is_other_branch(store: Store, in_pool: Claim, in_tier: Claim) -> bool:
    """Whether the claim ``in_pool`` was made in other tiers only, and ``in_tier`` does not come after it."""
    if not in_pool.number or in_pool in store.listing().claims:
        return False
    content = claim_if_there(store, in_tier)
    return content is not None and len(content.path) < _PATH_MAX and all(e.claim != in_pool for e in content.path)


def forked_error(one: str, claim: Claim, other: str, other_claim: Claim) -> TierClaimedError:
    """Return the error for two places that hold two continuations of one run. ``one``, ``other``: the places."""
    return TierClaimedError(
        f"{capitalized(one)} (claim {claim}) and {other} (claim {other_claim}) hold two continuations of one run, and "
        "none of them continues the other: each was made while the other place was not used. Nothing was changed. "
        "lightck does not guess which one you want. To continue from the pool, leave the tier with the other "
        "continuation out of tiers=, or pass a new folder in its place. To continue from a tier, do the same with the "
        "other tiers, and pass a pool path at which nothing lies yet."
    )


def _unreadable(store: Store, claim: Claim, reason: str) -> TierError:
    return TierError(
        f"The claim {claim} in the tier {str(store)!r} cannot be read: {reason}. Without it lightck cannot say whether "
        f"the tier holds this run. Nothing was written. Look at the medium, move the folder {claim} out of the tier, "
        "or choose another folder for this run."
    )


def _parse(data: bytes) -> ClaimFile:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as err:
        raise DamagedError("it is not JSON") from err
    if not isinstance(body, dict) or (body.get("format"), body.get("version")) != (FORMAT, VERSION):
        raise DamagedError("it has a format that this release of lightck does not read")
    written_by, run, path = body.get("written_by"), body.get("run"), body.get("path")
    if type(written_by) is not str or type(run) is not str or not isinstance(path, list) or len(path) > _PATH_MAX:
        raise DamagedError("its fields are not those of a claim")
    return ClaimFile(written_by, run, tuple(_checkpoints(path)))


def _checkpoints(path: list[Any]) -> Iterable[TierCheckpoint]:
    for each in path:
        if not isinstance(each, list) or len(each) != 2 or type(each[0]) is not str or type(each[1]) is not int:
            raise DamagedError('its field "path" is not a list of [claim, step]')
        claim = claim_of(each[0])
        if claim is None:
            raise DamagedError('its field "path" is not a list of [claim, step]')
        yield TierCheckpoint(claim, each[1])
