"""The tiers of a group of ranks: one claim for all, and checkpoints on which all agree.

Rank 0 makes the claim, and each rank writes below it with its own drain. All ranks must see the same folder; a rank
that does not see the claim refuses to go on.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import msgpack

from lightck.errors import TierError
from lightck.pool.format.structures import CommitRecord
from lightck.ranks.agreed_step import Proposal, StepAgreement
from lightck.ranks.meet import Meeting
from lightck.restore.contents import Contents
from lightck.session.capture import Capture
from lightck.session.group import Group
from lightck.tiers.claiming import ResumePoint, claim_of, read_claim
from lightck.tiers.drains import Drains
from lightck.tiers.group_schedule import GroupSchedule
from lightck.tiers.session_claim import Claimed, claim_for_session, run_of_new_training
from lightck.tiers.store import Store
from lightck.tiers.tier import Tier

_RUN_ID = re.compile(r"[0-9a-f]{32}")
_SEEN_SECONDS_MAX, _PAUSE_SECONDS = 10.0, 0.2
"""A network file system may show a new file to another host only after some seconds."""


class TiersOfGroup:
    """The tiers of one session of a group, on this rank."""

    def __init__(self, drains: Drains, tiers: Sequence[Tier], group: Group, meeting: Meeting) -> None:
        self._drains, self._tiers, self._group, self._meeting = drains, tiers, group, meeting

    def run_of_new_training(self, run_id: bytes) -> bytes:
        """Return the id of a training that begins now (``tiers/session_claim.py``). All ranks call this. Raises
        ``TierError``."""
        own = run_of_new_training(self._drains.stores, run_id.hex()) if self._group.rank == 0 else ""
        if self._group.rank == 0 and not _RUN_ID.fullmatch(own):
            raise TierError(
                f"A claim in the tier {str(self._drains.stores[0])!r} names a run whose id has another form than "
                "those of lightck. Nothing was changed. Choose another folder."
            )
        return bytes.fromhex(self._meeting.exchange("runs of the tiers", own.encode())[0].decode())

    def claim(
        self, capture: Capture, run_id: bytes, pool: str, contents: Contents | None, record: CommitRecord | None
    ) -> None:
        """Claim the tiers for all ranks. All ranks call this. ``pool``: the path of this rank's pool, if the pools of
        all ranks lie in one directory; else empty. ``contents``, ``record``: of this rank's part of the checkpoint from
        which the training goes on; None for a new training. Raises ``TierError``."""
        resume_point = None if contents is None else ResumePoint(contents.step, claim_of(contents.claim))
        claimed = claim_for_session(self._drains.stores, run_id.hex(), resume_point) if self._group.rank == 0 else None
        own = msgpack.packb([claimed, pool])
        found = [msgpack.unpackb(one) for one in self._meeting.exchange("claim of the tiers", own)]
        claimed = Claimed(*found[0][0])
        for store in self._drains.stores:
            self._wait_for_claim(store, claimed)
        generation = 0 if record is None else record.payload_generation
        self._drains.use_claim(claimed, resume_point, generation, self._group.rank, [one for _, one in found])
        capture.claim = claimed.claim

    def _wait_for_claim(self, store: Store, claimed: Claimed) -> None:
        claim = claim_of(claimed.claim)
        assert claim is not None, "rank 0 has made it"
        until = time.monotonic() + _SEEN_SECONDS_MAX
        while True:
            try:
                read_claim(store, claim)
                return
            except TierError:
                if time.monotonic() > until:
                    break
            time.sleep(_PAUSE_SECONDS)
        raise TierError(
            f"Rank 0 has claimed the tier {str(store)!r}, and rank {self._group.rank} does not see the claim "
            f"{claimed.claim} there. All ranks write to one tier. Name a folder that all hosts share."
        )

    def begin(self, interval: int) -> None:
        """From now on, agree with the other ranks on what is sent. ``interval``: updates from one saved checkpoint to
        the next. A group of one rank agrees with nobody."""
        if self._group.world_size == 1:
            return

        def propose(proposal: Proposal) -> None:
            agreement.propose(proposal)

        is_first = self._group.rank == 0
        drains, may_propose = self._drains, propose if is_first else None
        schedule = GroupSchedule(
            self._tiers, interval, drains.newest_steps, drains.newest_ages, drains.is_ready, may_propose
        )
        agreement = StepAgreement(
            self._group.connect(), self._meeting.key, self._group.rank, self._group.world_size, schedule
        )
        drains.agree(schedule, agreement.close)
