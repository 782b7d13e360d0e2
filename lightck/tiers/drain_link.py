"""One drain of a session, as the training sees it: what the training does for this drain and its tiers.

    use claim  one claim in all tiers, which was made after the pool was checked, and before its checkpoint is adopted
    start      the drain (``drain_process.py``), when the session is ready
    offer      a checkpoint that is due by its step: it is held and reported to the drain, until the drain holds it
    read       what the drain has done, at each commit; start it again if it was killed
    finish     at close: wait until the newest checkpoint lies in every tier

A tier whose ``every`` is a time needs no offer: the drain takes the newest checkpoint by itself. It does so too after
the training was killed. In a group of ranks only the checkpoints on which all have agreed are offered
(``group_schedule.py``), and rank 0 makes the claim for all.

Invariants: only in ``finish`` and ``send_newest`` does the training wait until something is sent. Until a drain has
begun, it waits for 2 s at most. The drain and what waits for it need no more slots than ``Drains.n_spare_slots``: until
the drain holds a checkpoint, the training holds it, and may break that hold (``pool/slot_locks.py``).
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lightck.errors import TierClaimedError, TierError
from lightck.pool.writer import PoolWriter
from lightck.stats import Meter, TierStats
from lightck.tiers.claiming import ResumePoint, lightck_release
from lightck.tiers.codecs import refuse_missing_libraries
from lightck.tiers.decisions import GRACE_SECONDS
from lightck.tiers.drain_messages import DrainSettings, DrainState, Parent, TierSettings
from lightck.tiers.drain_reports import DrainReports, added, not_sent_error
from lightck.tiers.drain_role import DrainRole
from lightck.tiers.drain_start import DrainHandle
from lightck.tiers.due_steps import DueSteps
from lightck.tiers.group_schedule import GroupSchedule
from lightck.tiers.logged_metrics import LoggedMetrics
from lightck.tiers.offer import Offer
from lightck.tiers.open_store import open_store
from lightck.tiers.pin import Hold, Holds
from lightck.tiers.session_claim import Claimed
from lightck.tiers.tier import Tier

log = logging.getLogger("lightck")
FAILING_SECONDS_MAX = 600.0
"""How long a tier may fail before an error is raised, and how long ``finish`` waits without any progress."""
_SILENT_SECONDS = 10.0
"""When ``finish`` has waited so long, it says why."""
_ENDING_SECONDS = 0.05
"""How long the training waits for the end of a drain whose connection has ended."""
_RESTART_PAUSE_SECONDS, _N_RESTARTS_MAX = 5.0, 5
_ASKING_PAUSE_SECONDS = 1.0
"""How long a session that must stop waits before it asks again for the newest checkpoint."""
_CLOSING_SECONDS_MIN = 1.0
"""How long ``finish`` waits at least, although its deadline is over."""


class DrainLink:
    """The tiers of one drain. All methods but ``is_ready`` and ``ask_for_newest`` are called on the training thread."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        pool: str,
        meter: Meter,
        holds: Holds,
        role: DrainRole,
        show: Callable[[Sequence[TierStats]], None],
    ) -> None:
        """``meter``: counts what is read again of the pool. ``role``: what this drain must know of the others of the
        session. ``show``: called with the figures of the tiers whenever they have changed."""
        self._tiers, self._pool, self._holds, self._role, self._show_stats = tiers, pool, holds, role, show
        self._pid = os.getpid()
        refuse_missing_libraries(each.compress for each in tiers)  # fail now, not much later in the drain
        self.stores = [open_store(each.path, each.options) for each in tiers]
        self._settings: DrainSettings | None = None
        self._handle: DrainHandle | None = None
        self._started_at, self._n_restarts, self._has_given_up = 0.0, 0, False
        self._due, self._has_asked_for_first = DueSteps(tiers, self._role.feeds), False
        self._stale_up_to, self._is_stale_reported = 0, True
        """``_stale_up_to``: checkpoints of this step and of earlier ones may hold old bytes, because some were struck;
        0: none was. ``_is_stale_reported``: whether the drain has heard of that."""
        self._schedule: GroupSchedule | None = None
        """What the ranks of a group send; None in a single process, and until the group has begun."""
        self._stop_agreeing: Callable[[], None] = lambda: None
        self._planned: Offer | None = None
        """In a group: the checkpoint that is held until it is known whether all ranks send it."""
        self._offer: Offer | None = None
        """The checkpoint that the drain is to send next."""
        self._is_offered = False
        """Whether it was reported to the drain."""
        self._waiting: Offer | None = None
        """The one after it."""
        self._last_offered: tuple[int, Mapping[str, float] | None] | None = None
        """Generation and metrics of the last checkpoint that was to be sent."""
        self._metrics = LoggedMetrics(tiers)
        self.reports = DrainReports(meter, lambda: self.read(may_start=False))
        self._newest = 0
        self._warned: set[int] = set()
        """The tiers whose failure was reported."""
        self._n_failures = [0] * len(tiers)
        self._raised: set[int] = set()
        self._is_superseded = [False] * len(tiers)
        self._n_waiting_in_folder = [0] * len(tiers)
        self._is_miss_reported = False
        self._states: list[TierStats] = [TierStats(each.path) for each in tiers]
        self._before = list(self._states)
        """What earlier drains of this session have done."""
        self._written_at: list[float | None] = [None] * len(tiers)
        """For each tier: when the checkpoint was written that was its newest one when the tier was claimed."""
        self._must_finish = self._is_finished = self._is_left_alone = False
        """``_is_finished``: whether a drain has said after ``close`` that it is done; ``_is_left_alone``: whether
        ``close`` has not waited for that, because the grace period of a signal was over."""
        self._signal_grace: float | None = None
        """See ``expect_signals``."""
        self._show()

    @property
    def keeps_best(self) -> bool:
        """Whether checkpoints stay because of a metric."""
        return bool(self._metrics.wanted)

    # -- at attach

    def use_claim(
        self,
        claimed: Claimed,
        resume_point: ResumePoint | None,
        generation: int,
        rank: int,
        pools_of_ranks: Sequence[str],
    ) -> None:
        """Send checkpoints below this claim, which this process has made, or rank 0 of its group. ``generation``: of
        the checkpoint from which the training goes on, in the pool. ``pools_of_ranks``: the path of each rank's pool;
        empty texts if they do not lie in one directory."""
        parent = None
        if resume_point is not None:
            named = "" if resume_point.claim is None else str(resume_point.claim)
            parent = Parent(named, resume_point.step, generation)
        self._due.begin(claimed.newest, claimed.is_empty)
        self._states = [TierStats(tier.path, step) for tier, step in zip(self._tiers, claimed.newest, strict=True)]
        self._show()
        self._written_at = [None if age is None else time.time() - age for age in claimed.ages]
        self._settings = DrainSettings(
            self._pool,
            claimed.claim,
            lightck_release(),
            parent,
            tuple(
                TierSettings.of(tier, has_parent=is_there)
                for tier, is_there in zip(self._tiers, claimed.has_parent, strict=True)
            ),
            GRACE_SECONDS,
            rank,
            len(pools_of_ranks),
            tuple(each for each in pools_of_ranks if each),
            self._role.number,
            tuple(TierSettings.of(each, has_parent=False) for each in self._role.other_tiers),
            self._role.fed_from,
        )

    def agree(self, schedule: GroupSchedule, stop: Callable[[], None]) -> None:
        """Send the checkpoints on which the ranks of the group agree. ``stop``: ends the agreements."""
        self._schedule, self._stop_agreeing = schedule, stop

    @property
    def newest_steps(self) -> list[int | None]:
        """For each tier the step of its newest checkpoint; None if it holds none."""
        return [each.step for each in self._states]

    @property
    def newest_ages(self) -> list[float | None]:
        """For each tier how many seconds ago it got its newest checkpoint; None if it holds none."""
        times = [each.sent_at or before for each, before in zip(self._states, self._written_at, strict=True)]
        return [None if each is None else time.time() - each for each in times]

    def n_sent(self, number: int) -> int:
        """How many checkpoints a tier has got."""
        return self._states[number].checkpoints

    def takes_nothing(self, number: int) -> bool:
        """Whether a tier fails, belongs to somebody else now, or has no drain any more."""
        is_failing = self._states[number].failing_since is not None
        return is_failing or self._is_superseded[number] or self._has_given_up

    def is_ready(self) -> bool:
        """Whether the drain could take a checkpoint now. Called on any thread."""
        handle = self._handle
        return handle is not None and not handle.state.is_busy and self._offer is None and self._planned is None

    def start(self) -> None:
        """Start the drain. Raises ``TierError``."""
        assert self._settings is not None, "the tiers are claimed"
        self._before, self._has_asked_for_first = list(self._states), False
        self.reports.drain_begins()
        found = zip(self._settings.tiers, self.newest_steps, self.newest_ages, strict=True)
        tiers = tuple(replace(tier, newest_step=step, newest_age=age) for tier, step, age in found)
        self._handle = DrainHandle(replace(self._settings, tiers=tiers))
        self._started_at = time.monotonic()
        for step, metrics in self._metrics.of_steps.items():
            self._handle.send({"metrics": metrics, "step": step})
        if self._signal_grace is not None:
            self._handle.send({"signal_grace": self._signal_grace})
        self._is_stale_reported = not self._stale_up_to
        self._report_stale()
        if any(each.needs_specific_steps for each in self._tiers) and not self._role.is_fed:
            self._handle.wait_until_ready()

    # -- at each commit

    def committed(self, writer: PoolWriter, step: int) -> None:
        self._newest = step
        self.read()
        self.reports.tell(writer)
        if self._handle is None or self._settings is None:
            return
        if self._settings.world_size > 1:
            self._follow_schedule(writer, step)
        elif due := self._due.at(step, self._metrics.at(step) or {}):
            self._offer_checkpoint(writer, step, due)

    def follow(self, step: int) -> None:
        """Note a commit. This drain is fed from a folder, so it is offered nothing."""
        self._newest = step
        self.read()

    def look(self) -> None:
        """Let the drain look now what has come into its folder."""
        if self._handle is not None:
            self._handle.send({"look": True})

    def struck(self) -> None:
        """Checkpoints were struck: the newest one and older ones may hold old bytes."""
        self._stale_up_to, self._is_stale_reported = self._newest, False
        self._report_stale()

    def _report_stale(self) -> None:
        if not self._is_stale_reported and self._handle is not None:
            self._is_stale_reported = self._handle.send({"stale_up_to": self._stale_up_to})

    def _follow_schedule(self, writer: PoolWriter, step: int) -> None:
        """Hold the checkpoint if the ranks have planned to send this step; offer it when all do."""
        schedule = self._schedule
        if schedule is None:
            return
        if missed := [number for number in range(len(self._tiers)) if schedule.is_missed(number, step)]:
            self._warn_of_missed_of_group(step, missed)
        plan = schedule.reached(step)
        if plan is not None:
            slot = writer.slots.protected
            assert slot is not None, "the newest committed slot is protected"
            generation = writer.slots.slots[slot].generation
            assert generation is not None, "its content is known"
            hold = self._hold(writer, slot)
            self._planned = Offer(step, generation, list(plan.items), hold)
        if self._planned is not None and (is_agreed := schedule.take_verdict()) is not None:
            if is_agreed:
                self._offer, self._is_offered, self._planned = self._planned, False, None
                self._tell()
            else:
                self._drop_planned()
        schedule.propose_if_due(step)

    def _drop_planned(self) -> None:
        if self._planned is not None and self._planned.hold is not None:
            self._holds.release(self._planned.hold)
        self._planned = None

    def _warn_of_missed_of_group(self, step: int, numbers: list[int]) -> None:
        if not self._is_miss_reported:
            self._is_miss_reported = True
            roots = " and ".join(repr(self._tiers[number].path) for number in numbers)
            log.warning(
                "lightck: the checkpoint of step %d, for which keep_every asked, is not sent to the tier %s: the ranks "
                "had not agreed on it before they reached it, because one of them was still sending another, or "
                "because the steps follow each other too fast. This is reported once. Ask for fewer checkpoints",
                step,
                roots,
            )

    def _offer_checkpoint(self, writer: PoolWriter, step: int, due: list[int]) -> None:
        """Hold the newest checkpoint, and tell the drain. While the drain is busy, this is done only if a tier needs
        exactly this checkpoint: any other tier can be sent a later one, when the drain is ready."""
        assert self._handle is not None, "started"
        slot = writer.slots.protected
        assert slot is not None, "the newest committed slot is protected"
        generation, metrics = writer.slots.slots[slot].generation, self._metrics.at(step)
        assert generation is not None, "its content is known"
        if (generation, metrics) == self._last_offered:
            return
        if self._handle.state.is_busy or self._offer is not None:
            self._ask_for_first(due)
            due = [number for number in due if self._due.needs_step(number, step, metrics or {})]
            # The drain is busy with one. One more can wait: in ``_waiting``, or as an offer that is not reported yet.
            if due and (self._waiting is not None or (self._offer is not None and not self._is_offered)):
                self._warn_of_missed(step, due)
                return
            if not due:
                return
        offer = Offer(step, generation, due, self._hold(writer, slot))
        self._last_offered = generation, metrics
        if self._offer is None:
            self._offer, self._is_offered = offer, False
        else:
            self._waiting = offer
        for number in due:
            self._due.taken(number, step)
        self._tell()
        self._show()

    def _ask_for_first(self, due: list[int]) -> None:
        """Let the drain take the first checkpoint of a tier by itself when it can: the next commit may be far away."""
        first = [number for number in due if self._due.is_empty[number]]
        if first and not self._has_asked_for_first and self._handle is not None:
            self._has_asked_for_first = self._handle.send({"first": first})

    def _hold(self, writer: PoolWriter, slot: int) -> Hold | None:
        """Hold a checkpoint for the drain, if the pool has a slot for that."""
        return self._holds.take_slot(writer, slot) if self._role.may_hold() else None

    @property
    def n_holds(self) -> int:
        """How many checkpoints are held until the drain holds them."""
        return sum(each is not None and each.hold is not None for each in (self._offer, self._waiting, self._planned))

    def _warn_of_missed(self, step: int, numbers: list[int]) -> None:
        tiers = [each for number in numbers for each in (self._tiers[number], *self._role.feeds.get(number, ()))]
        roots = " and ".join(repr(each.path) for each in tiers)
        log.warning(
            "lightck: the checkpoint of step %d, for which keep_every or keep_best asked, is not sent to the tier %s: "
            "one is being sent, and one waits. If this comes again, ask for fewer checkpoints, or use a faster folder",
            step,
            roots,
        )

    def _tell(self) -> None:
        """Tell the drain of the checkpoint that is held for it, if it is ready."""
        if self._offer is None or self._is_offered or self._handle is None or self._handle.state.is_busy:
            return
        offer = self._offer
        message: dict[str, object] = {"offer": offer.generation, "tiers": offer.tiers}
        if (metrics := self._metrics.at(offer.step)) is not None:
            message |= {"metrics": metrics, "step": offer.step}
        self._is_offered = self._handle.send(message)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Remember what the user logged at a step. Afterwards the caller commits the checkpoint of the step, or, if it
        is committed already, calls ``committed`` again."""
        known = self._metrics.add(step, metrics)
        if self._handle is not None:
            self._handle.send({"metrics": known, "step": step})

    # -- before this process is ended

    def expect_signals(self, grace: float) -> None:
        """Let the drain survive signals for so many seconds after the first one."""
        self._signal_grace = grace
        if self._handle is not None:
            self._handle.send({"signal_grace": grace})

    def ask_for_newest(self) -> None:
        """Let the drain send the newest checkpoint now. Any thread may call this."""
        handle = self._handle
        if handle is not None:
            handle.send({"newest": True})

    def send_newest(self, step: int, deadline: float) -> list[str]:
        """Let the drain send the newest checkpoint, which is that of ``step``, and wait until each tier holds it, until
        ``deadline`` on the monotonic clock at most. Returns the tiers that lack it."""
        self.ask_for_newest()  # at once: a busy drain may be kept back by a rate, which ends now
        asked_at = time.monotonic()
        while time.monotonic() < deadline and not self._has_given_up:
            if self._handle is None:
                self.read()  # it starts the drain again
            elif self._handle.receive():
                self._use(self._handle.state)
            else:
                self._restart_if_ended(self._handle, at_once=True)
            lacking = [number for number, each in enumerate(self._states) if (each.step or 0) < step]
            if all(self._is_superseded[number] for number in lacking):
                break
            handle, now = self._handle, time.monotonic()
            if handle is None:
                time.sleep(_ENDING_SECONDS)
                continue
            if not handle.state.is_busy and now - asked_at > _ASKING_PAUSE_SECONDS:  # again after a failure
                self.ask_for_newest()
                asked_at = now
            handle.wait(max(0.0, min(0.2, deadline - now)))
        self.read(may_start=False)  # if the deadline was over from the beginning, nothing was read
        return [each.root for each in self._states if (each.step or 0) < step]

    def holdings(self) -> str:
        """Say which step each tier holds."""
        held = [(each.root, "no checkpoint" if each.step is None else f"step {each.step}") for each in self._states]
        return ", ".join(f"the tier {root!r} {what}" for root, what in held)

    # -- what the drain says

    def read(self, *, may_start: bool = True) -> None:
        """Read what the drain has done. ``may_start``: start it again if it has ended, which may take a moment."""
        if os.getpid() != self._pid:
            return
        handle = self._handle
        known = None if handle is None else handle.state
        if handle is None:
            has_waited = time.monotonic() - self._started_at >= _RESTART_PAUSE_SECONDS * self._n_restarts
            if may_start and self._n_restarts and has_waited:
                self._start_again("it could not be started")
        elif not handle.receive():
            if may_start:
                self._restart_if_ended(handle)
        else:
            if handle.state is not known:  # mostly nothing has arrived
                self._use(handle.state)
            self._tell()
            self._report_stale()

    def _use(self, state: DrainState) -> None:
        if self._offer is not None and self._is_offered and state.answered == self._offer.generation:
            self._release_offer()
        self.reports.use(state)
        for number, each in enumerate(state.tiers):
            if each.error is not None and number not in self._warned:
                self._warned.add(number)
                self._n_failures[number] += 1
                follows = "" if each.is_superseded else " Training goes on, and the next attempt follows"
                log.warning("lightck: %s%s", each.error, follows)
            elif each.error is None and each.checkpoints and number in self._warned:
                self._warned.discard(number)
                self._raised.discard(number)
                log.warning("lightck: nothing fails now: checkpoints are sent to the tier %r", self._tiers[number].path)
            if self._due.is_empty[number] and each.checkpoints and each.step is not None:  # the drain took it by itself
                self._due.taken(number, each.step)
        if state.tiers:
            self._states = [added(before, each) for before, each in zip(self._before, state.tiers, strict=True)]
            self._is_superseded = [each.is_superseded for each in state.tiers]
            self._n_waiting_in_folder = [each.waiting for each in state.tiers]
        self._show()

    def _show(self) -> None:
        offers = [each for each in (self._offer, self._waiting) if each is not None]
        self._show_stats(
            [
                replace(
                    each,
                    failures=self._n_failures[number],
                    waiting=self._n_waiting_in_folder[number] + sum(number in one.tiers for one in offers),
                )
                for number, each in enumerate(self._states)
            ]
        )

    def _restart_if_ended(self, handle: DrainHandle, *, at_once: bool = False) -> None:
        """Start a drain again that was killed. ``at_once``: do not wait if it has not lived long."""
        if all(self._is_superseded):
            return  # there is nothing left for it to do
        if not handle.has_ended(_ENDING_SECONDS):
            return  # asked again at the next commit
        self._use(handle.state)
        if time.monotonic() - self._started_at < _RESTART_PAUSE_SECONDS * self._n_restarts and not at_once:
            return
        handle.let_go()
        self._handle = None
        self._is_offered = False
        self._start_again(handle.end_reason)

    def _start_again(self, reason: str) -> None:
        """Start a drain in place of one that has ended."""
        if self._n_restarts >= _N_RESTARTS_MAX:
            if not self._has_given_up:
                self._has_given_up = True
                log.warning(
                    "lightck: the process that sends checkpoints to the tiers has ended %d times (%s). No more "
                    "checkpoints are sent. The pool is not affected. Start the training again with resume=True; or, in "
                    "a single process, run `lightck copy POOL TIER --every 5min` beside the training",
                    self._n_restarts + 1,
                    reason,
                )
                self._release_offers()
            return
        self._n_restarts += 1
        self._started_at = time.monotonic()
        log.warning(
            "lightck: the process that sends checkpoints to the tiers has ended (%s), and is started again", reason
        )
        try:
            self.start()
        except TierError as err:
            log.warning("lightck: %s", err)
            self._release_offers()

    def _release_offer(self) -> None:
        """Let go of the first checkpoint that is held for the drain."""
        if self._offer is not None and self._offer.hold is not None:
            self._holds.release(self._offer.hold)
        self._offer, self._waiting, self._is_offered = self._waiting, None, False

    def _release_offers(self) -> None:
        self._release_offer()
        self._release_offer()
        self._show()

    # -- errors

    def raise_failure(self) -> None:
        """Raise ``TierError``, once for each tier, if a tier has taken nothing for ten minutes."""
        now = time.time()
        for number, each in enumerate(self._states):
            since = each.failing_since
            if since is not None and now - since > FAILING_SECONDS_MAX and number not in self._raised:
                self._raised.add(number)
                raise self._error(number)

    def failure_at_close(self) -> TierError | None:
        """Return an error if a tier lacks the newest checkpoint after ``finish``; else None."""
        for number, each in enumerate(self._states):
            if self._is_superseded[number]:
                return TierClaimedError(f"{each.error} The pool {self._pool!r} holds what this session has saved.")
            if each.failing_since is not None and not self._is_left_alone:
                return self._error(number)
        if self._must_finish and not self._is_finished and not self._is_left_alone:
            return TierError(
                "The process that sends checkpoints to the tiers has ended, or has not answered, before the newest one "
                f"was sent. The pool is intact. Send it by hand: {self._tiers[0].drain_command(self._pool)}."
            )
        return None

    def _error(self, number: int) -> TierError:
        return not_sent_error(self._tiers[number], self._states[number], self._newest, self._pool)

    # -- at the end

    def finish(self, deadline: Callable[[], float | None] | None = None) -> None:
        """Wait until the newest checkpoint lies in every tier, or cannot be sent. The session has committed it.
        ``deadline``: returns the monotonic time from which the drain goes on alone, or None while that is not known."""
        if os.getpid() != self._pid:
            return
        self._must_finish = True
        self._end_agreements()
        self._metrics.warn_of_missing()
        seen, seen_at = "", time.monotonic()
        warn_at, is_closing, persists = seen_at + _SILENT_SECONDS, False, False
        earliest_end = seen_at + _CLOSING_SECONDS_MIN
        while self._handle is not None and time.monotonic() - seen_at < FAILING_SECONDS_MAX:
            handle = self._handle
            is_alive = handle.receive()
            self._use(handle.state)
            self._is_finished = handle.state.is_done
            if self._is_finished:
                break
            if not is_alive and all(self._is_superseded):
                break
            if not is_alive:
                self._restart_if_ended(handle, at_once=True)
                is_closing = persists = False
                continue
            self._tell()
            until = None if deadline is None else deadline()
            if until is not None and not persists:
                persists = handle.send({"persists": True})
            if self._offer is None and not is_closing:
                is_closing = handle.send({"close": True})
            if until is not None and time.monotonic() >= max(until, earliest_end):
                self._leave_alone()
                break
            handle.wait(0.2)
            if time.monotonic() > warn_at:
                warn_at = math.inf
                log.warning("lightck: close() waits until the newest checkpoint is in the tiers. Ctrl-C ends the wait")
            if (now := repr(handle.state)) != seen:
                seen, seen_at = now, time.monotonic()
        self._release_offers()

    def _leave_alone(self) -> None:
        self._is_left_alone = True
        log.warning(
            "lightck: close() waits no longer, because the grace of the signal is over: step %d is in the pool %r, %s. "
            "The process that sends it goes on, as long as the system lets it",
            self._newest,
            self._pool,
            self.holdings(),
        )

    def closed(self) -> None:
        """End the connection: a drain that is not done goes on alone."""
        if os.getpid() == self._pid:
            self._end_agreements()
            if self._handle is not None:
                self._handle.let_go()
        self._handle = None

    def _end_agreements(self) -> None:
        if self._schedule is not None:
            self._schedule.close()
            self._stop_agreeing()
        self._schedule = None
        self._drop_planned()
