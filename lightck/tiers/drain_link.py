"""The tiers of a session: what the training does for its drain.

    claim      after the verdict on the pool, and before its checkpoint is adopted: one claim in all tiers
    start      the drain (``drain_process.py``), when the session is ready
    offer      a checkpoint that is due by its step: it is held and reported to the drain, until the drain holds it
    read       what the drain has done, at each commit; start it again if it was killed
    finish     at close: wait until the newest checkpoint lies in every tier

A tier whose time has come needs nothing of this: the drain takes the newest checkpoint by itself. So it does after the
training was killed.

Invariant: the training waits for the drain only at ``finish``. At most one checkpoint is held for the drain (its own
hold, beyond that, is one that the training may break: ``pool/slot_locks.py``).
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence

from lightck.errors import TierError
from lightck.pool.listener import CommitListener
from lightck.pool.writer import PoolWriter
from lightck.stats import Meter, TierStats
from lightck.tiers.claiming import GoesOnFrom, claim_tiers, release
from lightck.tiers.decisions import GRACE_SECONDS, complete
from lightck.tiers.drain_messages import DrainSettings, DrainState, Parent, TierSettings
from lightck.tiers.drain_start import DrainHandle
from lightck.tiers.folder import FolderStore
from lightck.tiers.names import Claim, TierCheckpoint
from lightck.tiers.pin import Hold, Holds
from lightck.tiers.tier import Tier

log = logging.getLogger("lightck")
FAILING_SECONDS_MAX = 600.0
"""How long a tier may fail before an error is raised, and how long ``finish`` waits without any progress."""
_RESTART_PAUSE_SECONDS, _N_RESTARTS_MAX = 5.0, 5


class DrainLink(CommitListener):
    """The tiers of one session. All methods are called on the training thread."""

    def __init__(self, tiers: Sequence[Tier], pool: str, meter: Meter, holds: Holds) -> None:
        self._tiers, self._pool, self._meter, self._holds = tiers, pool, meter, holds
        self._pid = os.getpid()
        self.stores = [FolderStore(each.path) for each in tiers]
        self._settings: DrainSettings | None = None
        self._handle: DrainHandle | None = None
        self._started_at, self._n_restarts = 0.0, 0
        self._last_due = [0] * len(tiers)
        """For each tier the step of the last checkpoint that was due by its step, or lies in the tier."""
        self._is_empty = [True] * len(tiers)
        """Whether the tier holds no checkpoint: then the first one is sent at once."""
        self._offer: tuple[Hold, list[int]] | None = None
        """The checkpoint that is held for the drain, and the numbers of the tiers for which it is due."""
        self._is_offered = False
        """Whether it was reported to the drain."""
        self._metrics: dict[int, dict[str, float]] = {}
        """Step -> what the user logged, of steps that are not committed yet."""
        self._newest = 0
        self._n_missed = 0
        self._warned: set[int] = set()
        """The tiers whose failure was reported."""
        self._raised: set[int] = set()
        self._states: list[TierStats] = [TierStats(each.path) for each in tiers]
        self._show()

    @property
    def n_spare_slots(self) -> int:
        return n_spare_slots(self._tiers)

    @property
    def keeps_best(self) -> bool:
        """Whether checkpoints stay because of a metric."""
        return any(each.keep_best is not None for each in self._tiers)

    # -- at attach

    def claim(self, run: str, goes_on_from: GoesOnFrom | None, generation: int = 0) -> Claim:
        """Claim all tiers for the run. ``goes_on_from``: None for a new run; else the checkpoint, with its
        ``generation`` in the pool. Raises ``TierError``."""
        for store in self.stores:
            store.refuse_other_folder()
        claim = claim_tiers(self.stores, run, release(), goes_on_from)
        parent, there = None, None
        if goes_on_from is not None:
            named = "" if goes_on_from.claim is None else str(goes_on_from.claim)
            parent = Parent(named, goes_on_from.step, generation)
            there = None if goes_on_from.claim is None else TierCheckpoint(goes_on_from.claim, goes_on_from.step)
        settings = []
        for number, (tier, store) in enumerate(zip(self._tiers, self.stores, strict=True)):
            whole = complete(store.listing())
            self._is_empty[number] = not whole
            step = 0 if goes_on_from is None else goes_on_from.step
            self._last_due[number] = max((each.step for each in whole if each.step <= step), default=0)
            settings.append(_settings_of(tier, has_parent=there in whole))
        self._settings = DrainSettings(self._pool, str(claim), release(), parent, tuple(settings), grace=GRACE_SECONDS)
        return claim

    def start(self) -> None:
        """Start the drain. Raises ``TierError``."""
        assert self._settings is not None, "the tiers are claimed"
        self._handle, self._started_at = DrainHandle(self._settings), time.monotonic()

    # -- at each commit

    def committed(self, writer: PoolWriter, step: int) -> None:
        self._newest = step
        self.read()
        due = self._due_at(step)
        if due and self._handle is not None:
            self._offer_checkpoint(writer, step, due)

    def _due_at(self, step: int) -> list[int]:
        """Return the numbers of the tiers for which the checkpoint of a step is due."""
        due = []
        logged = self._metrics.get(step, {})
        for number, tier in enumerate(self._tiers):
            every, last = tier.every_steps, self._last_due[number]
            is_due = self._is_empty[number] or (every is not None and step // every > last // every)
            is_due |= tier.keep_every is not None and step % tier.keep_every == 0
            is_due |= tier.keep_best is not None and tier.keep_best[0] in logged
            if is_due:
                due.append(number)
        return due

    def _offer_checkpoint(self, writer: PoolWriter, step: int, due: list[int]) -> None:
        """Hold the newest checkpoint, and tell the drain; if it is busy, only if certain tiers need this checkpoint.
        (Otherwise one that is committed when the drain is ready will do.)"""
        assert self._handle is not None, "started"
        is_ready = not self._handle.state.is_busy and self._offer is None
        certain = [number for number in due if self._is_certain(number, step)]
        if not is_ready:
            if not certain:
                return
            if self._offer is not None:
                self._count_missed(step, certain)
                return
            due = certain
        slot = writer.slots.protected
        assert slot is not None, "a checkpoint was committed"
        self._offer, self._is_offered = (self._holds.take_slot(writer, slot), due), False
        for number in due:
            self._last_due[number], self._is_empty[number] = step, False
        self._tell()

    def _is_certain(self, number: int, step: int) -> bool:
        tier = self._tiers[number]
        if tier.keep_every is not None and step % tier.keep_every == 0:
            return True
        return tier.keep_best is not None and tier.keep_best[0] in self._metrics.get(step, {})

    def _count_missed(self, step: int, numbers: list[int]) -> None:
        self._n_missed += 1
        roots = " and ".join(repr(self._tiers[number].path) for number in numbers)
        log.warning(
            "lightck: the checkpoint of step %d is not sent to the tier %s, because two before it are not sent yet. "
            "keep_every or keep_best asked for it. Ask for fewer checkpoints, or for a faster folder",
            step,
            roots,
        )

    def _tell(self) -> None:
        """Tell the drain of the checkpoint that is held for it, if it is ready."""
        if self._offer is None or self._is_offered or self._handle is None or self._handle.state.is_busy:
            return
        hold, due = self._offer
        metrics = self._metrics.pop(hold.step, None)
        if metrics:
            self._handle.send({"metrics": metrics, "step": hold.step})
        self._is_offered = self._handle.send({"offer": hold.record.payload_generation, "tiers": due})

    def log(self, step: int, metrics: Mapping[str, float], writer: PoolWriter | None) -> None:
        """Remember what the user logged at a step. ``writer``: if its checkpoint is the newest committed one; else it
        is not committed yet, and None."""
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        self._metrics.setdefault(step, {}).update(finite)
        for old in sorted(self._metrics)[:-100]:
            del self._metrics[old]
        if self._handle is not None:
            self._handle.send({"metrics": self._metrics[step], "step": step})
        if writer is not None:
            self.committed(writer, step)

    # -- what the drain says

    def read(self) -> None:
        """Read what the drain has done."""
        handle = self._handle
        if handle is None or os.getpid() != self._pid:
            return
        if not handle.receive():
            self._drain_has_ended(handle)
            return
        self._use(handle.state)
        self._tell()

    def _use(self, state: DrainState) -> None:
        if self._offer is not None and self._is_offered:
            hold, _ = self._offer
            if state.answered == hold.record.payload_generation:
                self._holds.release(hold)
                self._offer = None
        for number, each in enumerate(state.tiers):
            if each.error is not None and number not in self._warned:
                self._warned.add(number)
                log.warning("lightck: %s Training goes on, and the next attempt follows", each.error)
            elif each.error is None and number in self._warned:
                self._warned.discard(number)
                self._raised.discard(number)
                log.warning("lightck: checkpoints are sent to the tier %r again", self._tiers[number].path)
        self._states = [
            TierStats(
                tier.path,
                each.step,
                each.checkpoints,
                each.sent_nbytes,
                each.seconds,
                each.sent_at,
                each.error,
                each.failing_since,
            )
            for tier, each in zip(self._tiers, state.tiers, strict=False)
        ] or self._states
        self._show()

    def _show(self) -> None:
        self._meter.tiers = tuple(self._states)

    def _drain_has_ended(self, handle: DrainHandle) -> None:
        """Start a drain again that was killed."""
        if not handle.has_ended(1.0):
            return
        self._use(handle.state)
        if time.monotonic() - self._started_at < _RESTART_PAUSE_SECONDS * self._n_restarts:
            return
        handle.let_go()
        self._handle = None
        self._is_offered = False
        if self._n_restarts >= _N_RESTARTS_MAX:
            log.warning(
                "lightck: the process that sends checkpoints to the tiers has ended %d times (%s). No more checkpoints "
                "are sent. The pool is not affected. Run `lightck copy POOL TIER --every 5min` beside the training",
                self._n_restarts + 1,
                handle.state.fatal or "it was killed",
            )
            self._release_offer()
            return
        self._n_restarts += 1
        log.warning(
            "lightck: the process that sends checkpoints to the tiers has ended (%s), and is started again",
            handle.state.fatal or "it was killed",
        )
        try:
            self.start()
        except TierError as err:
            log.warning("lightck: %s", err)
            self._release_offer()

    def _release_offer(self) -> None:
        if self._offer is not None:
            self._holds.release(self._offer[0])
            self._offer = None

    # -- errors

    def raise_failure(self) -> None:
        """Raise ``TierError``, once for each tier, if a tier has taken nothing for ten minutes."""
        now = time.time()
        for number, each in enumerate(self._states):
            since = each.failing_since
            if since is not None and now - since > FAILING_SECONDS_MAX and number not in self._raised:
                self._raised.add(number)
                raise self._error(each)

    def failure_at_close(self) -> TierError | None:
        """Return an error if a tier lacks the newest checkpoint after ``finish``; else None."""
        for each in self._states:
            if each.error is not None:
                return self._error(each)
        if self._handle is None and self._settings is not None and self._n_restarts >= _N_RESTARTS_MAX:
            return TierError(
                "No process sends checkpoints to the tiers, because it has ended again and again. The pool and its "
                f"checkpoints are intact. Send the newest one by hand: lightck copy {self._pool} {self._tiers[0].path}."
            )
        return None

    def _error(self, stats: TierStats) -> TierError:
        newest = "no checkpoint of this session" if stats.step is None else f"step {stats.step}"
        text = str(stats.error).rstrip(".")
        return TierError(
            f"The tier {stats.root!r} holds {newest}, and step {self._newest} could not be sent: {text}. The pool and "
            "its checkpoints are intact. Look at the folder; then go on, and the newest checkpoint is sent again; or "
            f"send it by hand when the training has ended: lightck copy {self._pool} {stats.root}."
        )

    # -- at the end

    def finish(self) -> None:
        """Wait until the newest checkpoint lies in every tier, or cannot be sent. The session has committed it."""
        if self._handle is None or os.getpid() != self._pid:
            return
        self.read()
        handle = self._handle
        if handle is None:
            return
        self._release_offer()
        handle.send({"close": True})
        seen, seen_at = "", time.monotonic()
        while not handle.state.is_done:
            handle.wait(0.5)
            if not handle.receive():
                break
            if (now := repr(handle.state.tiers)) != seen:
                seen, seen_at = now, time.monotonic()
            elif time.monotonic() - seen_at > FAILING_SECONDS_MAX:
                break
        self._use(handle.state)

    def closed(self) -> None:
        """End the connection: a drain that is not done goes on alone."""
        if self._handle is not None and os.getpid() == self._pid:
            self._handle.let_go()
        self._handle = None


def n_spare_slots(tiers: Sequence[Tier]) -> int:
    """Return how many slots a pool needs more because of its tiers: one that the drain holds, and one for a checkpoint
    that must be sent and waits until the drain is ready."""
    if not any(each.spare_slot for each in tiers):
        return 0
    return 2 if any(each.needs_certain_steps for each in tiers) else 1


def _settings_of(tier: Tier, *, has_parent: bool) -> TierSettings:
    return TierSettings(
        tier.path, tier.every_seconds, tier.keep_last, tier.keep_every, tier.keep_best, has_parent=has_parent
    )
