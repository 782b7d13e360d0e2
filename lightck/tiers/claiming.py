"""Claim a tier: from then on this process, and no other, writes below the claim.

    list; put a claim with the next number and a random tag; list: is it the highest? Else wait for a random time, and
    try again

The file of a claim says which run claimed the tier, and the *path*: for each older claim, the checkpoint from which the
run went on. A tier holds one run.
"""

from __future__ import annotations

import json
import random
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lightck.errors import TierClaimedError, TierError
from lightck.pool.format.structures import DamagedError
from lightck.tiers.decisions import Listing, highest_claim, is_superseded, newest_complete, next_claim
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


def claim_tier(store: Store, run: str, written_by: str) -> Claim:
    """Claim a tier for a run, which goes on from the newest checkpoint in it. Raises ``TierError``, also if the tier
    holds another run."""
    for _ in range(_TRIES):
        listing = store.listing()
        path = _path(store, listing, run)
        claim = next_claim(listing, secrets.token_hex(4))
        if parse(claim_name(claim)) is None:  # it has too many digits
            raise TierError(
                f"The tier {str(store)!r} cannot be claimed again: it holds the claim with the largest number that "
                "there can be. lightck never counts so far, so another program has made it. Remove that folder."
            )
        store.put(claim_name(claim), ClaimFile(written_by, run, path).packed())
        after = store.listing()
        if not is_superseded(after, claim):
            _refuse_run_beside(store, claim, run, after.claims - listing.claims - {claim})
            return claim
        time.sleep(random.uniform(0, _PAUSE_SECONDS_MAX))
    raise TierClaimedError(
        f"The tier {str(store)!r} could not be claimed: in each of {_TRIES} attempts another process claimed it at the "
        "same time. Let one training write to a tier, and give the others folders of their own."
    )


def _refuse_run_beside(store: Store, claim: Claim, run: str, others: Iterable[Claim]) -> None:
    """Withdraw the claim, and raise ``TierClaimedError``, if another run has claimed the tier at the same time."""
    if any(read_claim(store, each).run != run for each in others):
        store.delete(claim_name(claim))
        raise _other_run(store)


def _other_run(store: Store) -> TierClaimedError:
    return TierClaimedError(
        f"The tier {str(store)!r} holds checkpoints of another run, and recovery would take the newest of all. "
        "Nothing was written. Choose another folder for this run."
    )


def refuse_other_runs(store: Store, listing: Listing) -> None:
    """Raise ``TierClaimedError`` if claims of two runs lie in a tier."""
    runs = {read_claim(store, each).run for each in listing.claims}
    if len(runs) > 1:
        raise TierClaimedError(
            f"The tier {str(store)!r} holds the claims of {len(runs)} runs, and lightck does not guess which one you "
            "want. Nothing was written. Move the folders of the others out of it: NUMBER-TAG/claim.json names the run."
        )


def _path(store: Store, listing: Listing, run: str) -> tuple[TierCheckpoint, ...]:
    highest = highest_claim(listing)
    if highest is None:
        return ()
    file = read_claim(store, highest)
    if file.run != run:
        raise _other_run(store)
    newest = newest_complete(listing)
    older = (each for each in file.path if newest is None or each.claim != newest.claim)
    return tuple(sorted({*older, *([newest] if newest else [])}))[-_PATH_MAX:]


def read_claim(store: Store, claim: Claim) -> ClaimFile:
    """Read and check the file of a claim. Raises ``TierError``."""
    try:
        return _parse(store.get(claim_name(claim), _NBYTES_MAX))
    except FileNotFoundError:
        reason = "it is gone"
    except DamagedError as err:
        reason = str(err)
    raise TierError(
        f"The claim {claim} in the tier {str(store)!r} cannot be read: {reason}. Without it lightck cannot say whether "
        "the tier holds this run. Nothing was written. Look at the medium, move that folder out of the tier, or choose "
        "another folder for this run."
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
            raise DamagedError("its path is not one of checkpoints")
        claim = parse(f"{each[0]}/claim.json")
        if not isinstance(claim, Claim):
            raise DamagedError("its path is not one of checkpoints")
        yield TierCheckpoint(claim, each[1])
