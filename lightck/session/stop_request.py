"""A request to stop after the present step, and what ``Session.should_stop`` does with it (``preemption.py``).

    take           in a signal's handler: records signal and deadline; without a group each step is saved from now on
    should_stop    between two steps: commits the present one, and waits until the tiers have it
    committed      the first step that has ended since the signal is sent at once, also if nobody reads ``should_stop``
    watch          on a thread: what is to be said or done at half the grace, and at its end

Invariant: ``should_stop`` turns True only where the newest checkpoint is the state from which the next step starts.
"""

from __future__ import annotations

import logging
import queue
import signal
import threading
import time
import weakref
from collections.abc import Callable

from lightck.errors import FlushTimeoutError
from lightck.pool.listener import CommitListener
from lightck.pool.writer import PoolWriter
from lightck.ranks.agreed_end import EndAgreement
from lightck.session.steps import Steps

log = logging.getLogger("lightck")
_PAUSE_SECONDS = 0.002
"""Between two looks whether the ranks have agreed."""
_WITHDRAWAL_SECONDS = 5.0
"""How long after the deadline a rank waits, at most, to learn whether the other ranks go on too."""


class StopRequest(CommitListener):
    """Whether the training is to stop, since when, and what is done about it."""

    def __init__(
        self,
        steps: Steps,
        grace: float,
        ended: Callable[[StopRequest], None],
        agree: Callable[[Callable[[int], None]], EndAgreement] | None = None,
    ) -> None:
        """``grace``: seconds from the signal to the deadline. ``ended``: called by ``close``, and if the session is
        collected. ``agree``: in a group, begins to agree with the other ranks."""
        self._steps = weakref.ref(steps)
        self.grace, self._ended = grace, ended
        self._is_closed = False
        self.signal: signal.Signals | None = None
        self.deadline: float | None = None
        """On the monotonic clock. None: no signal has come."""
        self._step_at_signal = 0
        self._committed_since: int | None = None
        """The first committed step that has ended since the signal."""
        self._was_read = self._is_finishing = self._is_ready = False
        """Whether the loop has read ``should_stop`` since the signal, whether this read or ``close`` waits for commit
        and sending now, and whether ``should_stop`` is True."""
        self._news: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """Wakes the watcher: True for a signal. (``put`` may be called in a signal's handler.)"""
        self._agreement = None if agree is None else agree(self._other_rank_was_asked)
        self._is_withdrawal_reported = False
        steps.stop_request = self
        steps.pipeline.events.add(self)
        weakref.finalize(steps, self._session_is_gone).atexit = False
        threading.Thread(target=self._watch, name="lightck-preemption", daemon=True).start()

    @property
    def name(self) -> str:
        """The name of the signal."""
        return "no signal" if self.signal is None else self.signal.name

    def close(self) -> None:
        """Serve the session no more. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._ended(self)
        self._news.put(False)
        if self._agreement is not None:
            self._agreement.close()
        steps = self._steps()
        if steps is not None:
            steps.commits.saves_every_step = False
            steps.pipeline.events.remove(self)
            steps.stop_request = None

    def _session_is_gone(self) -> None:
        """The session was collected without ``close``."""
        self._ended(self)
        self._news.put(False)

    def close_begins(self) -> Callable[[], float | None]:
        """The session is being closed, and waits for its tiers. Returns what says until when it may."""
        self._is_finishing = True
        return lambda: self.deadline

    # -- the signal

    def take(self, number: int) -> bool:
        """Note a signal. Returns False if it is to act as without lightck. Called in a signal's handler, so it waits
        for nothing and logs nothing."""
        steps = self._steps()
        if steps is not None and self.deadline is not None:
            return time.monotonic() < self.deadline
        if steps is None or not steps.session_lock.is_live:
            return False
        self._note(number, steps)
        if self._agreement is not None:
            self._agreement.request(number)
        return True

    def _note(self, number: int, steps: Steps) -> None:
        self.signal, self._step_at_signal = signal.Signals(number), steps.boundary.step
        # (In a group all ranks save the same steps: the one at which they stop, and those of ``interval``.)
        steps.commits.saves_every_step = self._agreement is None
        self.deadline = time.monotonic() + self.grace
        self._news.put(True)

    def _other_rank_was_asked(self, number: int) -> None:
        """Called on the helper thread of the agreement."""
        steps = self._steps()
        if self.deadline is None and steps is not None:
            self._note(number, steps)

    # -- the loop

    def should_stop(self) -> bool:
        """As ``Session.should_stop``."""
        steps = self._steps()
        if self._is_ready or steps is None:
            return self._is_ready
        if self._agreement is None:
            if self.deadline is None:
                return False  # the usual case: no lock is taken
            return self._should_stop_here(steps, self.deadline)
        if not self._is_end_of_all(self._agreement):
            return False
        assert self.deadline is not None, "the ranks have agreed because of a signal"
        if not self._should_stop_here(steps, self.deadline):
            self._agreement.postpone()  # all ranks do the same here, because they run the same loop
        return self._is_ready

    def _is_end_of_all(self, agreement: EndAgreement) -> bool:
        """Whether all ranks end at this reading. Waits until that is decided. At the deadline this rank gives up for
        all ranks; it goes on by itself if the store does not answer then."""
        while (may_continue := agreement.pass_point()) is None:
            late = -1.0 if self.deadline is None else time.monotonic() - self.deadline
            if late >= 0:
                agreement.withdraw()
            if late >= _WITHDRAWAL_SECONDS:
                self._report_withdrawn(agreement)
                return False
            time.sleep(_PAUSE_SECONDS)
        if agreement.is_withdrawn:
            self._report_withdrawn(agreement)
        return not may_continue

    def _report_withdrawn(self, agreement: EndAgreement) -> None:
        if not self._is_withdrawal_reported:
            self._is_withdrawal_reported = True
            missing = ", ".join(map(str, agreement.missing))
            log.warning(
                "lightck: %s came, and %s did not answer within %g s. So the ranks have not agreed where to stop, and "
                "%s. Call lightck.preemption on all ranks, and read session.should_stop on all of them. Each finished "
                "step is in the pools",
                self.name,
                f"ranks {missing}" if missing else "one of the ranks",
                self.grace,
                "all of them go on"
                if agreement.is_withdrawn
                else "this one goes on (the store of the group does not answer)",
            )

    def _should_stop_here(self, steps: Steps, deadline: float) -> bool:
        """Commit the present step and send it, if this is between two steps; then it is time to stop."""
        self._was_read = True
        with steps.session_lock:
            if not self._is_ready and steps.session_lock.is_live and _is_between_steps(steps):
                self._is_finishing = True
                try:
                    self._finish(steps, deadline)
                finally:
                    self._is_finishing = False
                self._is_ready = True
                self._news.put(False)
        return self._is_ready

    def _finish(self, steps: Steps, deadline: float) -> None:
        """Commit the present step, and wait until the tiers have it, until the deadline at most."""
        step, missing = steps.boundary.step, []
        with steps.meter.stall("preemption"):
            steps.commits.raise_failure()
            try:
                steps.commit_current(max(0.0, deadline - time.monotonic()), also_step_0=False)
            except FlushTimeoutError:
                missing.append(f"the pool lacks step {step}, whose copies go on")
        committed, begun_at = steps.pipeline.committed, 0 if steps.resumed is None else steps.resumed.step
        tiers = steps.commits.participants.tiers
        if tiers is not None and committed is not None and committed > begun_at:
            missing += [f"the tier {root!r} lacks step {committed}" for root in tiers.send_newest(committed, deadline)]
        if committed != step and step > begun_at and not missing:
            check = steps.commits.participants.nonfinite_check
            reason = None if check is None else check.paused_reason
            missing.append(f"the pool lacks step {step} ({reason or 'its checkpoint was dropped'})")
        if missing:
            log.warning(
                "lightck: %s came, and after %.0f of %g s %s. %s. session.should_stop is True now",
                self.name,
                self.grace - max(0.0, deadline - time.monotonic()),
                self.grace,
                ", and ".join(missing),
                _holdings(steps),
            )
            return
        if step <= begun_at:
            log.warning(
                "lightck: %s came before the first update of this process: there is nothing new to save. "
                "session.should_stop is True now",
                self.name,
            )
            return
        where = "the pool" if tiers is None else f"the pool, and in {tiers.names()}"
        log.warning("lightck: %s came, and step %d is in %s: session.should_stop is True now", self.name, step, where)

    def committed(self, writer: PoolWriter, step: int) -> None:
        if self.deadline is None or self._committed_since is not None or step <= self._step_at_signal:
            return
        self._committed_since = step
        self._ask_for_newest()

    def _ask_for_newest(self) -> None:
        steps = self._steps()
        tiers = None if steps is None else steps.commits.participants.tiers
        if tiers is not None:
            tiers.ask_for_newest()

    # -- the watcher

    def _watch(self) -> None:
        """Wait for a signal, and then for the end of the loop."""
        if not self._news.get() or self.deadline is None:
            return
        log.warning(
            "lightck: %s came. The present step goes on to its end, and is saved. Then session.should_stop turns True. "
            "%g s are left",
            self.name,
            self.grace,
        )
        for at, act in ((self.deadline - self.grace / 2, self._half), (self.deadline, self._expired)):
            try:
                self._news.get(timeout=max(0.0, at - time.monotonic()))
            except queue.Empty:
                act()
            else:
                return  # should_stop is True, or the session is closed

    def _half(self) -> None:
        """Half the grace is over."""
        if self._is_finishing:
            return
        if self._committed_since is None:
            self._ask_for_newest()  # the checkpoint of the present step may come too late
        elif not self._was_read:
            log.warning(
                "lightck: %s came, a step has ended since then, and the loop has not read session.should_stop, so it "
                "goes on. Write at the end of its body: if session.should_stop: break",
                self.name,
            )

    def _expired(self) -> None:
        """The grace is over. (What waits in ``should_stop`` or ``close`` says by itself what is missing.)"""
        steps = self._steps()
        if steps is None or self._is_finishing or not steps.session_lock.is_live:
            return
        if self._committed_since is None:
            fact = f"no step has ended and was committed since {self.name} came"
        elif self._was_read:
            fact = "the loop has read session.should_stop in the middle of a step only"
        else:
            fact = "the loop has not read session.should_stop"
        log.warning(
            "lightck: the grace of %g s is over, and %s. %s. Another signal acts as without lightck",
            self.grace,
            fact,
            _holdings(steps),
        )


def _is_between_steps(steps: Steps) -> bool:
    """Whether the newest checkpoint is, or would be if it were saved now, the state from which the next step starts."""
    if steps.commits.paused or steps.hooks.is_in_step or steps.partial_update or steps.boundary.is_in_round:
        return False
    is_saved = steps.commits.saved_step == steps.boundary.step
    return is_saved or steps.flush_moment.change_since_update(steps.step_thread) is None


def _holdings(steps: Steps) -> str:
    """Say which checkpoint lies where."""
    step = steps.pipeline.newest_committed()
    pool = f"The pool {steps.pipeline.path!r} holds {'no checkpoint yet' if step is None else f'step {step}'}"
    tiers = steps.commits.participants.tiers
    return pool if tiers is None else f"{pool}, {tiers.holdings()}"
