"""From a closed checkpoint to its commit: whether it is saved, who waits for it, and which errors are raised.

``CommitParticipants`` connects pins, exports, tiers and the nonfinite check to the pipeline.

Invariant: an error in the background is kept, raised at the next step, and again at ``close``; no error loses a
committed checkpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import ParamSpec

from lightck.errors import BackgroundError, FlushTimeoutError, SessionError, UnsupportedError
from lightck.events import ClosingEvent, SessionLock
from lightck.following.comparison import Recorder
from lightck.hooks.boundary import Boundary
from lightck.interrupts import retry_interrupted
from lightck.pipeline.nonfinite import NonfiniteCheck
from lightck.pipeline.pipeline import Pipeline
from lightck.session.capture import Capture
from lightck.session.cross_check import CrossCheck
from lightck.session.interval import Cadence
from lightck.stats import Meter
from lightck.tiers.drains import Drains
from lightck.tiers.keep import Exports
from lightck.tiers.pin import Hold, Holds

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class CommitParticipants:
    """What takes part in the commits of one session's pipeline: pins, exports, tiers, and the nonfinite check."""

    holds: Holds = field(default_factory=Holds)
    keeper: Exports | None = None
    tiers: Drains | None = None
    nonfinite_check: NonfiniteCheck | None = None

    def register_with(self, pipeline: Pipeline) -> None:
        """Add the participants to the pipeline's commit listeners and commit decisions. To be called before the pool is
        created or opened."""
        pipeline.decisions.add(self.holds)
        if self.nonfinite_check is not None:
            pipeline.decisions.add(self.nonfinite_check)
        pipeline.events.add(self.holds)
        if self.keeper is not None:
            pipeline.pool.add_spare_slot()
            pipeline.events.add(self.keeper)
        if self.tiers is not None:
            for _ in range(self.tiers.n_spare_slots):
                pipeline.pool.add_spare_slot()
            pipeline.events.add(self.tiers)
            pipeline.decisions.add(self.tiers.reports)

    def pin(self, pipeline: Pipeline) -> Hold:
        """Hold the newest committed checkpoint, and return the hold. At least two slots (in a group of ranks: three;
        with peer copies: four) must remain that are neither pinned nor reserved for exports and tiers; otherwise a
        relayout gives the pool more slots. Raises ``SessionError`` if nothing is committed yet, or if the pool cannot
        have enough slots, and ``UnsupportedError`` for a pool with gradient records."""
        pipeline.finish()
        writer = pipeline.pool.writer
        if writer is None or pipeline.committed is None:
            raise SessionError("No checkpoint can be pinned, because none is committed yet. Pin after the first step.")
        writer.refuse_lost_pool()
        if not writer.has_whole_checkpoints:
            raise UnsupportedError(
                "A checkpoint cannot be pinned in a pool with gradient records, because it needs the records of other "
                "steps too. Use strategy=lightck.FullState() to pin checkpoints."
            )
        needed = self.holds.slots_for_a_pin(pipeline.pool.spare_slots)
        hold = self.holds.take(writer, is_pin=True)
        try:
            pipeline.ensure_slots(needed)
        except BaseException:
            self.holds.release(hold)
            raise
        return hold


class Commits:
    """Saves and commits the closed checkpoints of one session. A checkpoint is *saved* when its state is read and its
    copies begin; it commits later. ``saved_step``: the step of the last saved checkpoint (the step at which the session
    began, until one is saved). ``failure``: the ``BackgroundError`` to raise at every later step."""

    def __init__(
        self,
        capture: Capture,
        pipeline: Pipeline,
        boundary: Boundary,
        cadence: Cadence,
        recorder: Recorder,
        meter: Meter,
        session_lock: SessionLock,
        participants: CommitParticipants,
        done_at: int | None,
    ) -> None:
        """``done_at``: the step at which the training was declared finished, if the restored checkpoint says so; else
        None."""
        self.pipeline, self.cadence, self.participants = pipeline, cadence, participants
        self._capture, self._boundary, self._recorder = capture, boundary, recorder
        self._meter, self._session_lock = meter, session_lock
        self.cross_check: CrossCheck | None = None
        """Set if the ranks of a host divide what they write."""
        self.failure: BaseException | None = None
        self.paused = 0
        """How many nested ``paused()`` blocks the loop is in."""
        self.saved_step = boundary.step
        self._is_done_saved = False  # whether the last saved checkpoint says that the training is finished
        self._done_at = done_at
        self.saves_every_step = False
        """Whether each step is saved, whatever the interval is, because the training is about to stop."""
        self.n_saved_by_flush = 0
        """Checkpoints that ``flush()``, ``pin()`` or ``close()`` saved."""
        self._decision: tuple[int | None, bool] = None, False
        """The last decision: a step (None: no decision yet), and whether the checkpoint of that step is due."""

    @property
    def is_done(self) -> bool:
        """Whether the training was declared finished at this step (``close(done=True)``)."""
        return self._done_at == self._boundary.step

    @property
    def has_nothing_to_commit(self) -> bool:
        """Whether every saved checkpoint is committed, no gradient record is being stored, and a forward would close no
        checkpoint now."""
        is_committed = not self.saved_step or self.pipeline.newest_committed() == self.saved_step
        is_all_stored = is_committed and not self.pipeline.stores_record
        return is_all_stored and not self._boundary.closes_at(ClosingEvent.FORWARD)

    # -- a checkpoint closes -----------------------------------------------------------------------------

    def updated(self, step: int) -> bool:
        """Decide right after an update whether the checkpoint of ``step`` will be saved when it closes, and return the
        decision. (A flush saves it in any case.) ``step``: the number of updates so far. If the checkpoint will be
        saved, what the next forward changes must be read before that forward. So the decision cannot wait for the
        boundary."""
        self._decision = step, self._is_due(step)
        return self._decision[1]

    def will_be_saved(self, step: int) -> bool:
        """Whether the checkpoint of ``step`` is due. If ``updated`` has decided for this step, its decision counts."""
        decided_step, is_due = self._decision
        return is_due if decided_step == step else self._is_due(step)

    def _is_due(self, step: int) -> bool:
        return self.saves_every_step or self.cadence.is_due(step, self.saved_step)

    def closed(self, event: ClosingEvent, step: int) -> None:
        """Save the checkpoint that ``event`` has closed, if it is due or ``event`` is ``FLUSH``."""
        is_saved = event is ClosingEvent.FLUSH or self.will_be_saved(step)
        meter, stores_updates = self._meter, self._capture.update_of is not None
        meter.count_step(is_saved or stores_updates)
        # Of the slowdown only ``unsaved_slowdown_seconds`` is counted, which each step has. The cadence itself measures
        # how much longer a step takes while a checkpoint is written.
        self.cadence.boundary_passed(
            time.perf_counter(), meter.stall_seconds + meter.unsaved_slowdown_seconds, is_saved
        )
        self._capture.mid_batch.boundary(event, step, is_saved)
        if is_saved:
            self._save(event, step)
        else:
            if stores_updates:
                self._record(step)
            self._recorder.closed_unsaved()

    def _record(self, step: int) -> None:
        """For a step that is not saved: begin to store what its update consumed. The next checkpoint needs it."""
        updated = self._capture.take_updated_frozen()
        self.run(self.pipeline.check_left_out_tensors, updated)
        closed_step = self._capture.close_update(step, self._boundary.iteration)
        self.run(self.pipeline.begin_record, closed_step)

    def _save(self, event: ClosingEvent, step: int) -> None:
        """Read the present state as the checkpoint of ``step``, and begin its copies."""
        began = time.perf_counter()
        self.saved_step, self._is_done_saved = step, self._capture.is_done
        self.n_saved_by_flush += event is ClosingEvent.FLUSH
        # Checked before the state is read, because what the check finds changes ``copied_at_boundary`` and
        # ``stale_after``.
        if self.cross_check is not None:
            self.cross_check.compare()
        updated = self._capture.take_updated_frozen()
        self.run(self.pipeline.check_left_out_tensors, updated)
        closed_step = self._capture.close(
            event,
            step,
            self._boundary.iteration,
            explicit=self._boundary.explicit,
            copied_at_boundary=self.pipeline.guard.copied_at_boundary,
            stale_after=lambda: self.pipeline.guard.stale_after,
            read_rows=None if self.cross_check is None else self.cross_check.read,
        )
        self._meter.state_was_read(step, began)
        self._recorder.closing()
        self.run(self.pipeline.begin_checkpoint, closed_step)
        self._recorder.closed(event)

    # -- what the user waits for -------------------------------------------------------------------------

    def commit_saved(self, timeout: float | None, deadline: float | None) -> None:
        """Commit the checkpoints that are saved."""
        self.run(self._finish, timeout, deadline)

    def commit(self, timeout: float | None, deadline: float | None, *, also_step_0: bool = True) -> None:
        """Commit the checkpoint of the current step. If it was dropped, or was not saved when it closed (``interval``),
        save the present state as the checkpoint of this step. ``timeout``: seconds, for the message. ``deadline``: see
        ``deadline_after``. ``also_step_0``: save even if no update was made yet. Raises ``FlushTimeoutError`` at the
        deadline."""
        self.commit_saved(timeout, deadline)
        step = self._boundary.step
        if self.pipeline.committed != step and not self.paused and (step or also_step_0):
            self._save(ClosingEvent.FLUSH, step)
            self.run(self._finish, timeout, deadline)

    def commit_done(self) -> None:
        """Commit a checkpoint that says that the training is finished. If the saved checkpoint of this step does not
        say so, save the step once more."""
        if self.is_done:
            return
        if not self._is_done_saved and not self.paused:
            self._save(ClosingEvent.FLUSH, self._boundary.step)
            self.run(self._finish, None, None)
        if self.pipeline.committed == self._boundary.step:
            self._done_at = self._boundary.step

    def _finish(self, timeout: float | None, deadline: float | None) -> None:
        """Wait until every checkpoint has committed or failed. Raises ``FlushTimeoutError`` at the deadline."""
        if not self.pipeline.finish(deadline):
            raise FlushTimeoutError(
                f"Step {self._boundary.step} was not durable within {timeout} seconds. The copies of its checkpoint go "
                "on in the background. Pass a larger timeout=, or check the speed of the pool's medium."
            )

    # -- what failed -------------------------------------------------------------------------------------

    def run(self, work: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call ``work`` with the arguments. If it raises a ``BackgroundError``, keep the error, to raise it again at
        every later step and at close. If a signal interrupts a wait in ``work``, call ``work`` again after the signal's
        handler, unless the handler closed the session."""
        try:
            retry_interrupted(self._call_if_open, work, *args, **kwargs)  # type: ignore[arg-type]
        except BackgroundError as err:
            self.failure = err
            raise

    def _call_if_open(self, work: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        if self._session_lock.is_open:
            work(*args, **kwargs)

    def raise_failure(self) -> None:
        """Raise the ``BackgroundError`` that ``run`` has kept, if any."""
        if self.failure is not None:
            raise self.failure

    def raise_keep_failure(self) -> None:
        """Raise an error of ``keep=``, if there is one. Called before an update, where a loop can catch the error and
        call ``step()`` again. (An error in ``next()`` would end the ``for`` loop.)"""
        if self.participants.keeper is not None:
            self.participants.keeper.raise_failure(at_close=not self._session_lock.is_open)

    def raise_tier_failure(self) -> None:
        """Raise the error of a tier that has taken nothing for long, or that lacks the newest checkpoint at close."""
        tiers = self.participants.tiers
        if tiers is None:
            return
        if self._session_lock.is_open:
            tiers.raise_failure()
        elif (failure := tiers.failure_at_close()) is not None:
            raise failure


def deadline_after(timeout: object) -> float | None:
    """Convert a timeout in seconds to a deadline on the monotonic clock. Return None (no limit) for None and infinity.
    Raises ``TypeError`` if the timeout is no number, and ``ValueError`` for NaN."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        kind = type(timeout).__name__
        raise TypeError(f"timeout={timeout!r} is a {kind}. Pass a number of seconds, or None to wait for ever.")
    seconds = float(timeout)
    if math.isnan(seconds):
        raise ValueError(f"timeout={timeout!r} is not a number. Pass a number of seconds, or None to wait for ever.")
    return None if seconds == math.inf else time.monotonic() + seconds
