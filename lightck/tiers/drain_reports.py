"""What a drain reports of what it has read again, and what the training does about it.

    warn      of each text once
    count     in ``Stats``: what this drain has read again, and those that were killed before it
    use       the slot of a damaged checkpoint next (``PoolWriter.reuse_damaged``)

The writer learns of damaged slots before a slot is chosen, and after each commit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from lightck.errors import TierError
from lightck.pool.writer import PoolWriter
from lightck.ranks.directory import directory_of_group
from lightck.stats import Meter, TierStats
from lightck.tiers.drain_messages import DrainState, Reread, TierState
from lightck.tiers.tier import Tier

log = logging.getLogger("lightck")
_NONE: frozenset[int] = frozenset()


class DrainReports:
    """The reports of one drain, and of those that were killed before it. All methods are called on the training thread.
    This class is a ``CommitDecision`` (``pipeline/decision.py``) for one reason: ``held`` is called before a slot is
    chosen. It refuses no commit, and holds no slot."""

    def __init__(self, meter: Meter, read: Callable[[], None]) -> None:
        """``read``: reads the messages of the drain that have arrived since the last call."""
        self._meter, self._read = meter, read
        self._before = Reread()
        self._n_seen = 0
        self._said: set[str] = set()
        self._damaged: set[tuple[str, int, int]] = set()
        """What the writer must hear: (uuid of the pool, slot, generation)."""
        self._passed_on: set[tuple[str, int, int]] = set()
        """What the writer has heard."""

    def drain_begins(self) -> None:
        """Another drain has been started, which counts from 0."""
        meter = self._meter
        self._before = Reread(meter.pool_rounds, meter.pool_bytes_reread, meter.pool_damaged)
        self._n_seen = 0

    def use(self, state: DrainState) -> None:
        """Warn of what is new in the state of the drain."""
        n_new = state.n_reports - self._n_seen
        self._n_seen = state.n_reports
        for text in state.reports[-n_new:] if n_new > 0 else ():
            if text not in self._said:
                self._said.add(text)
                log.warning("lightck: %s", text)
        if n_new > len(state.reports):
            log.warning(
                "lightck: %d more reports of damage in the tiers are left out. `lightck verify --deep TIER` names all",
                n_new - len(state.reports),
            )
        self._damaged |= {(uuid, slot, generation) for uuid, slot, generation in state.damaged_slots} - self._passed_on
        before, pool, meter = self._before, state.pool, self._meter
        meter.pool_rounds = before.rounds + pool.rounds
        meter.pool_bytes_reread = before.nbytes + pool.nbytes
        meter.pool_damaged = before.damaged + pool.damaged

    def tell(self, writer: PoolWriter) -> None:
        """Let the writer use the slots of damaged checkpoints next."""
        uuid = writer.superblock.uuid.hex() if self._damaged else ""
        for found in [each for each in self._damaged if each[0] == uuid]:
            self._damaged.discard(found)
            self._passed_on.add(found)
            writer.reuse_damaged(found[1], found[2])

    def may_commit(self, closed_step: object) -> bool:
        return True

    def held(self, writer: PoolWriter) -> frozenset[int]:
        self._read()
        self.tell(writer)
        return _NONE


def added(before: TierStats, state: TierState) -> TierStats:
    """Return what drains have done for a tier, the present one included."""
    reread = state.reread
    return TierStats(
        before.root,
        max(before.step or 0, state.step or 0) or None,
        before.checkpoints + state.checkpoints,
        before.bytes_sent + state.sent_nbytes,
        state.seconds or before.seconds,
        state.sent_at or before.sent_at,
        state.error,
        state.failing_since,
        rounds=before.rounds + reread.rounds,
        bytes_reread=before.bytes_reread + reread.nbytes,
        damaged=before.damaged + reread.damaged,
        mended=before.mended + reread.mended,
    )


def not_sent_error(tier: Tier, stats: TierStats, step: int, pool: str) -> TierError:
    """Return the error for a tier that could not be sent the checkpoint of a step."""
    newest = "no checkpoint yet" if stats.step is None else f"step {stats.step}"
    reason = str(stats.error).partition(". ")[0].rstrip(".")
    or_copy = "" if directory_of_group(pool) else f"; or to an empty place: lightck copy {pool} NEW"
    return TierError(
        f"Step {step} could not be sent. {reason}. Sent last: {newest}; the pool and its checkpoints are intact. "
        "Look at the folder or store (that it is there, its owner, the space); then go on, and the newest checkpoint "
        f"is sent again; or send it by hand when the training has ended: {tier.drain_command(pool)}{or_copy}."
    )
