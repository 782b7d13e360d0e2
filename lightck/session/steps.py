"""What a session does at each step event. ``Steps`` receives each event after all other listeners, so it acts on what
they have done. (``StepEvents.add`` puts each new listener before the present ones, and ``Steps`` is added first.)

``Boundary`` decides which event closes a checkpoint, ``Capture`` reads the state, and ``Commits`` saves the state. The
checkpoint of step *t* is "the state from which step *t + 1* starts".
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from lightck.dataloader.fetched_ahead import FetchedAheadCheck
from lightck.dataloader.positions import Positions
from lightck.errors import BackgroundError
from lightck.events import ClosingEvent, ReducedBucket, SessionLock, StepEvents, StepListener
from lightck.following.comparison import Comparison, Continuation, Recorder
from lightck.following.ddp import warn_unsaved_by_ddp
from lightck.following.loop_counter import LoopCounterCheck
from lightck.following.update_parts import UpdateParts
from lightck.hooks.boundary import BY_HAND, Boundary
from lightck.hooks.consumed import never_indexed
from lightck.hooks.early_gate import EarlyGate
from lightck.hooks.hooks import Hooks
from lightck.hooks.layers import PartialUpdate
from lightck.hooks.layerwise import layerwise_of
from lightck.pipeline.gradient_pools import GradientPools, updated_nbytes
from lightck.pipeline.guard import Validator, weak_validator
from lightck.pipeline.pipeline import Pipeline
from lightck.pool.gradient_writer import GradientWriter
from lightck.restore.resume import Resumed
from lightck.session.base_check import BaseCheck
from lightck.session.base_every import BaseEveryTuner, CopyCosts
from lightck.session.capture import Capture
from lightck.session.commits import CommitParticipants, Commits, deadline_after
from lightck.session.compression import Compression
from lightck.session.discover import (
    Found,
    check_late_optimizer,
    count_updating,
    drives,
    live_optimizers,
    param_positions,
)
from lightck.session.first_step import FirstStep
from lightck.session.flush_moment import FlushMoment
from lightck.session.interval import Cadence
from lightck.session.late_schedulers import LateSchedulers
from lightck.session.loop_top import LoopTopCheck
from lightck.session.replica_updates import ReplicaUpdates
from lightck.session.saved_watch import SavedWatch
from lightck.session.update_records import UpdateRecords
from lightck.sessions import OpenSession, is_followed
from lightck.state.optimizer_wrappers import ScalerWatch
from lightck.stats import Meter
from lightck.strategy.replica import Replica

if TYPE_CHECKING:
    from lightck.session.stop_request import StopRequest

log = logging.getLogger("lightck")


class Steps(StepListener):
    """The main step listener of one session, and the owner of its parts: capture, pipeline, commits, hooks, checks. Its
    attributes are for ``session/`` only."""

    session: OpenSession
    """The user's object. The hooks of the model keep this listener alive, and this attribute keeps the session
    alive."""

    def __init__(
        self,
        model: nn.Module,
        found: Found,
        capture: Capture,
        pipeline: Pipeline,
        meter: Meter,
        participants: CommitParticipants,
        *,
        cadence: Cadence,
        resumed: Resumed | None,
        first_step: FirstStep,
        strict_data: bool,
    ) -> None:
        self._model = weakref.ref(model)
        self.capture, self.pipeline, self.meter, self.resumed = capture, pipeline, meter, resumed
        self.session_lock = SessionLock()
        self._first_step: FirstStep | None = first_step
        self._late_schedulers: LateSchedulers | None = None
        done_at = None
        if resumed is not None:
            capture.positions = Positions(capture.loaders, resumed.loaders)
            capture.persistent.had_started_at_checkpoint = resumed.persistent_started
            done_at = resumed.step if resumed.done else None
        start = () if resumed is None else (resumed.step, resumed.iteration, resumed.explicit)
        self.boundary = Boundary(count_updating(found.optimizers), *start)
        self.continuation = _continuation_of(found, capture, pipeline, resumed, strict_data, self.boundary)
        recorder = self.continuation.recorder
        self.commits = Commits(
            capture, pipeline, self.boundary, cadence, recorder, meter, self.session_lock, participants, done_at
        )
        self.watch = SavedWatch(capture, self.boundary, self._follow_live)
        self.loop_top: LoopTopCheck | None = LoopTopCheck(
            capture, None if resumed is None else (resumed.event, resumed.step)
        )
        self._optimizers_were_passed = found.optimizers_were_passed
        self.fetched_ahead = FetchedAheadCheck(may_keep_batch=found.has_custom_object)
        self.flush_moment = FlushMoment(capture, is_fresh_start=resumed is None)
        self.step_thread: int | None = None
        """Id of the thread on which the optimizer steps; None before its first step."""
        self._reported_step = self.boundary.step
        """The step that the listeners received last (``step_ended``)."""
        self._is_before_first_forward = True
        """Whether the next training forward is the first one of the session."""
        self._may_log_no_forward = True
        """True until the model's forward hook fires, or a log line says that it does not fire."""
        self._scalers = ScalerWatch(capture.objects)
        self.partial_update = PartialUpdate()
        self.events = StepEvents(self.session_lock)
        self.events.add(self)
        self.hooks = Hooks(self.events, model, found.optimizers, meter)
        self.update_records: UpdateRecords | None = None
        self._validate_records: Validator | None = None
        self.replica: ReplicaUpdates | None = None
        self._compression: Compression | None = None
        self.stop_request: StopRequest | None = None
        """Set by ``lightck.preemption``."""

    def record_updates(
        self, compression: Compression | None = None, *, mtbf: float | None = None, is_in_group: bool = False
    ) -> None:
        """Store in each checkpoint what its update consumed. ``compression``: compresses the gradients before that.
        ``is_in_group``: this process is a rank, whose DDP communication hook compresses. ``mtbf``: lower ``base_every``
        to what this mean time between failures asks for; None: leave it as it is."""
        guard = self.pipeline.guard
        index = never_indexed if compression is None else compression.index
        self.update_records = records = UpdateRecords(
            self.capture, guard.copied_at_boundary, reads_all=guard.reads_all, index=index
        )
        if not is_in_group:
            records.distrusted = self._strike_later
        if guard.reads_all:
            records.base_check = BaseCheck(self.capture, lambda: self.pipeline.pool.writer)
        self.hooks.report_gradients()
        self.events.add(records)
        self.events.add(records.consumed_gradients)
        self._compression = compression
        if compression is not None:
            capture = self.capture
            for listener in compression.in_group(capture) if is_in_group else compression.in_one_process(capture):
                self.events.add(listener)  # it receives each event before those above
            if is_in_group:
                self.hooks.handles.append(compression.register_hook(self.model, capture))
        self.capture.update_of, self.capture.base_every = records.record_of, lambda: self.base_every
        if mtbf is not None:
            self.events.add(self._tuner(mtbf, records))
        self._validate_records = weak_validator(records.validate)
        self.pipeline.validators.append(self._validate_records)

    def record_no_updates(self) -> None:
        """Undo ``record_updates()``. Call while no checkpoint is in flight, and while torch runs no pre-step hook."""
        records = self.update_records
        assert records is not None, "record_updates has set it"
        assert self._validate_records is not None, "record_updates has set it"
        self.events.remove(records)
        self.events.remove(records.consumed_gradients)
        self.hooks.report_no_gradients()
        self.pipeline.validators.remove(self._validate_records)
        self.capture.update_of = self.capture.base_every = self.update_records = None
        records.forget()

    def _strike_later(self, after: int | None) -> bool:
        """As ``UpdateRecords.distrusted``."""
        writer = self.pipeline.pool.writer
        if not isinstance(writer, GradientWriter):
            return False
        return self.pipeline.guard.distrust(writer.trusted_generation if after is None else after, writer)

    def keep_replica(self, strategy: Replica | None) -> None:
        """If the strategy is ``Replica``, take parameters and optimizer state from copies that make the updates too."""
        if strategy is None:
            return

        def stop() -> None:
            for listener in (replica, replica.consumed_gradients):
                self.events.remove(listener)
            replica.consumed_gradients.forget()

        self.replica = replica = ReplicaUpdates(
            self.capture,
            self.meter,
            own_optimizers=strategy.own_optimizers,
            reads_all=self.pipeline.guard.reads_all,
            stop=stop,
        )
        self.hooks.report_gradients()
        self.events.add(replica)
        self.events.add(replica.consumed_gradients)
        self.capture.stand_ins = replica
        self.pipeline.validators.append(weak_validator(replica.validate))

    def _tuner(self, mtbf: float, records: UpdateRecords) -> BaseEveryTuner:
        kind, pool, engine = self.pipeline.pool.kind, self.pipeline.pool, self.pipeline.engine
        assert isinstance(kind, GradientPools)
        return BaseEveryTuner(
            mtbf,
            costs=lambda: CopyCosts(
                engine.cpu_seconds + self.meter.wait_seconds, self.meter.bytes_written, records.update_seconds
            ),
            changed_nbytes=lambda: 0 if pool.writer is None else updated_nbytes(pool.writer.entries)[0],
            base_every=lambda: self.base_every,
            lower=kind.limit_base_every,
        )

    # -- properties --------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module | None:
        """The model, or None after it was collected."""
        return self._model()

    @property
    def base_every(self) -> int | None:
        """n, if each unit is written to a home once in n steps (``Gradients``), from the next checkpoint on; None if n
        is not known yet, or with another strategy."""
        kind = self.pipeline.pool.kind
        return kind.base_every_of(self.pipeline.pool.writer) if isinstance(kind, GradientPools) else None

    @property
    def updates(self) -> int:
        """Updates so far: the value of ``Session.step``. Internal code reads ``updates``, because a read of
        ``Session.step`` is recorded as a sign that the loop takes its position from the session."""
        return self.boundary.step

    def follows_optimizer(self, optimizer: object) -> bool:
        """Whether the session follows this optimizer."""
        return self.hooks.follows(optimizer)

    def forget(self) -> None:
        """Drop all references to the user's objects after the session has ended."""
        self.capture.forget()
        self.hooks.forget()
        if self.update_records is not None:
            self.update_records.forget()
        if self.replica is not None:
            self.replica.forget()
        if self._compression is not None:
            self._compression.forget()
        self.continuation.forget()
        self._first_step = self._late_schedulers = self.loop_top = self.commits.cross_check = None

    # -- an update ---------------------------------------------------------------------------------------

    def before_step(self, index: int, bypasses_wrapper: bool, has_gradients: bool, in_backward: bool = False) -> None:
        """``in_backward``: whether the caller is ``layers_begin``, inside the backward pass, before the first layer of
        a layer-wise update."""
        self.capture.devices.refuse_graph_capture("An optimizer's step")
        with self.meter.stall("before the update"):
            self.commits.raise_failure()
            if not in_backward:
                self.commits.raise_keep_failure()
                self.commits.raise_tier_failure()
                self.partial_update.raise_deferred()
                self.step_thread = threading.get_ident()
            if bypasses_wrapper:
                self.capture.stepped_outside_wrapper(index)
            self._check_first_step()
            self._check_loop_top(ClosingEvent.PRE_STEP)
            if self.boundary.closes_at(ClosingEvent.PRE_STEP):
                self.handle(ClosingEvent.PRE_STEP)
                self._log_no_forward()
            if not self.commits.paused:
                self.watch.before_step(index)
                self.continuation.before_update(index if has_gradients else None)
            self.capture.note_gradients(index)

    def gate(self) -> None:
        if self.commits.failure is None and self.pipeline.is_idle:
            return
        with self.meter.stall("gate"):
            self.commits.raise_failure()
            self.commits.run(self.pipeline.gate)

    def add_early_gate(self) -> None:
        """For a rank of a group: pass the gate earlier, in the backward pass, before the last gradients are sent."""
        model = self.model
        if model is not None:
            gate = EarlyGate(model, lambda: not self.pipeline.is_idle, self._early_gate)
            self.hooks.handles += gate.handles

    def _early_gate(self) -> None:
        """Pass the gate in the backward pass. An error of a checkpoint is not raised here, but at the next step."""
        if self.commits.failure is None and not self.pipeline.is_idle and self.session_lock.is_live:
            with self.meter.stall("early gate"), suppress(BackgroundError):
                self.commits.run(self.pipeline.gate)

    def after_step(self, index: int) -> None:
        with self.meter.stall("after the update"):
            self.boundary.updated(index)
            self.watch.updated()
            self.flush_moment.updated()
            self.fetched_ahead.updated()
            if self.loop_top is not None:
                self.loop_top.updated(self.boundary)
            self._scalers.stepped()
            self.partial_update.end(index)
            # Again, because the gradients that a closure computes inside the step did not exist before the step.
            self.capture.note_gradients(index)
            self._read_provisionally()
            self.capture.positions.updated()
        self._report_step_ended()

    def _report_step_ended(self) -> None:
        """Report an update to the listeners once, when the update is counted. With several optimizers, some updates are
        not counted until a checkpoint closes."""
        if self.boundary.step != self._reported_step:
            self._reported_step = self.boundary.step
            self.events.step_ended(self._reported_step)

    def after_step_hooks(self) -> None:
        with self.meter.stall("after the update"):
            self._read_provisionally()  # again, because the user's own hooks belong to the update

    def _read_provisionally(self) -> None:
        """If the checkpoint of this update is due, read what may change before the event that closes it. Nothing is
        read in a loop that calls ``end_step()``, because this call closes the checkpoint before anything changes."""
        is_due = self.commits.updated(self.boundary.step)
        self.capture.after_update(is_needed=is_due and not self.boundary.explicit)

    def skipped_step(self, index: int) -> None:
        self.meter.skipped += 1
        self.partial_update.end(index)

    def updated_by_hand(self) -> None:
        """Handle an update of a loop in which no optimizer is followed. No hook precedes the next update, so the gate
        before that update is passed here."""
        self.step_thread = threading.get_ident()
        self._check_first_step()
        self.continuation.before_update(None)
        self.boundary.updated(BY_HAND)
        self.flush_moment.updated()
        self.fetched_ahead.updated()
        self.capture.positions.updated()
        self.capture.devices.add_update_streams()
        self.handle(ClosingEvent.END_STEP)
        self.commits.run(self.pipeline.gate)
        self.events.update_begins()  # no hook shows where the next update begins, so it counts as begun from here on

    # -- a layer-wise update -----------------------------------------------------------------------------

    def layers_begin(self, index: int) -> None:
        self.partial_update.call_and_defer_error(lambda: self.before_step(index, False, False, in_backward=True))
        while not self.partial_update.call_and_defer_error(self.gate):
            pass  # the gate dropped a checkpoint, and raised. More may be in flight, so pass the gate again
        # If no boundary came after the last update, its eager copies belong to no checkpoint.
        self.commits.run(self.pipeline.eager.drop)
        self.partial_update.begin(index)

    def layer_updated(self, name: str, begin: int, tensors: Sequence[torch.Tensor]) -> None:
        step = self.boundary.step + 1
        # With several optimizers, another one might still write these tensors in this step.
        has_final_values = self.boundary.n_optimizers == 1
        if (
            has_final_values
            and not self.commits.paused
            and self.commits.cadence.will_be_due(step, self.commits.saved_step)
        ):
            with self.meter.stall("layer updated"):
                self.commits.run(self.pipeline.copy_eagerly, tensors)

    def buckets_reduced(self, buckets: Sequence[ReducedBucket]) -> None:
        if buckets:
            end = max(bucket.end for bucket in buckets)
            self.meter.collective_seconds += 1e-9 * (end - min(bucket.begin for bucket in buckets))
            self.meter.collective_bytes_copied += self.pipeline.eager.nbytes_stored

    def layers_abandoned(self, index: int) -> None:
        self.partial_update.end(index)

    # -- a forward ---------------------------------------------------------------------------------------

    def before_forward(self, inputs: tuple[object, ...]) -> None:
        if self.commits.paused or self.capture.devices.is_in_graph_capture(lambda: self.commits.has_nothing_to_commit):
            return
        self._may_log_no_forward = False
        with self.meter.stall("forward begins"):
            self.watch.training_forward()
            self.flush_moment.forward()
            self.fetched_ahead.forward()
            self._check_loop_top(ClosingEvent.FORWARD)
            if self.commits.failure is None:
                # The argument is PRE_STEP, because with several optimizers the next pre-step hook closes the
                # checkpoint, and not this forward.
                will_close = self.boundary.closes_at(ClosingEvent.PRE_STEP) and self.commits.will_be_saved(
                    self.boundary.step
                )
                if will_close and self.boundary.n_optimizers > 1:
                    self.capture.before_forward_of_next_step()
                self.continuation.recorder.forward(inputs, will_close)
                if not self.pipeline.is_idle:
                    self.commits.run(self.pipeline.forward_begins)
                self.handle(ClosingEvent.FORWARD)
            if self.resumed is not None:
                self.resumed.forward_begins(self.capture.numbers)
            if self._is_before_first_forward:
                self._is_before_first_forward = False
                warn_unsaved_by_ddp(self.model, is_resumed=self.resumed is not None)
            self.continuation.forward(inputs)

    def _log_no_forward(self) -> None:
        """Log once that the forward hook does not fire. Called at an update whose pre-step hook closed a checkpoint."""
        if self._may_log_no_forward and not self.boundary.explicit:
            self._may_log_no_forward = False
            log.info(
                "lightck: the model's forward hook does not fire (the model was compiled before attach, or the loop "
                "calls only its submodules). So a step closes only when optimizer.step() is called for the next "
                "update, and that call waits for the copy; and what the loop writes to buffers after optimizer.step() "
                "is not in the step's checkpoint. To avoid both, iterate over session.loader(loader), or call "
                "session.end_step() at the end of each iteration"
            )

    def forward_ended(self) -> None:
        if self.pipeline.is_idle or self.commits.failure is not None:
            return
        with self.meter.stall("forward ended"):
            # Checkpoints whose copies are done need not wait for the gate: they are released here.
            self.commits.run(self.pipeline.poll)

    # -- optimizers made after attach --------------------------------------------------------------------

    def unknown_optimizer(self, optimizer: Optimizer) -> None:
        model = self.model
        if model is None:
            return
        if not drives(optimizer, param_positions(model)):
            if not is_followed(optimizer):
                self.watch.step_elsewhere(optimizer)
            return
        if self._optimizers_were_passed and not self.capture.optimizers:  # optimizer=[]: the loop updates by hand
            self.watch.step_by_hand(optimizer)
            return
        new = check_late_optimizer(optimizer, self.capture.optimizers, self.capture.model.names_by_id())
        if not new:
            return
        self.capture.add_optimizers(new)
        self.boundary.n_optimizers += count_updating(new)
        self.hooks.add(new)

    def _follow_live(self) -> bool:
        """Follow live optimizers that were made after attach and have not stepped yet, unless ``optimizer=`` was
        passed. Returns whether there is such an optimizer, followed or not."""
        model = self.model
        found = () if model is None else live_optimizers(model)
        for optimizer in () if self._optimizers_were_passed else found:
            self.unknown_optimizer(optimizer)
        return bool(found)

    # -- what may close a checkpoint ---------------------------------------------------------------------

    def handle(self, event: ClosingEvent) -> None:
        """Handle an event that may be a boundary: close the checkpoint if this event closes one, and save it if it is
        due."""
        if self.commits.paused:
            return
        self.capture.devices.join_updates()
        if not self.boundary.closes_at(event):
            is_skip = event is not ClosingEvent.FLUSH and self._scalers.skipped()
            self.boundary.closed_nothing(event, is_skip)
            return
        if event is ClosingEvent.FORWARD and self.capture.mid_batch.holds_batch(self.boundary.step):
            return  # the loop still has the batch of the last update, so this forward may be for logging only
        self.partial_update.refuse_boundary()
        step = self.boundary.close(event)
        self._scalers.skipped()  # so that the next call reports only what comes after this boundary
        self._report_step_ended()
        self.commits.closed(event, step)

    def commit_current(self, timeout: float | None, *, also_step_0: bool = True) -> None:
        """Close the checkpoint of the current step, and commit it. Inside ``optimizer.step()``, commit only the
        checkpoints that were saved before. Raises ``FlushTimeoutError`` after ``timeout`` seconds (None: never).
        ``also_step_0``: commit even if no update was made yet."""
        deadline = deadline_after(timeout)
        if self.hooks.is_in_step:
            self.commits.commit_saved(timeout, deadline)
            self.flush_moment.refused(self.boundary.step, self.pipeline.committed)
            return
        change = self.flush_moment.change_since_update(self.step_thread)
        n_before = self.commits.n_saved_by_flush
        self.handle(ClosingEvent.FLUSH)
        self.commits.commit(timeout, deadline, also_step_0=also_step_0)
        if self.commits.n_saved_by_flush != n_before:
            self.flush_moment.saved(self.boundary.step, change)

    def _check_loop_top(self, event: ClosingEvent) -> None:
        """Check, before a checkpoint may close, what the loop changed at its top."""
        if (
            self.loop_top is not None
            and not self.commits.paused
            and not self.loop_top.check_before(event, self.boundary)
        ):
            self.loop_top = None

    def _check_first_step(self) -> None:
        """Run the checks of the first update, and those of each later one that look for what was made too late."""
        if self._first_step is not None:
            self._late_schedulers = self._first_step.check(self.capture)
            self._first_step = None
        elif self._late_schedulers is not None and self._late_schedulers.check():
            self._late_schedulers = None


def _continuation_of(
    found: Found,
    capture: Capture,
    pipeline: Pipeline,
    resumed: Resumed | None,
    strict_data: bool,
    boundary: Boundary,
) -> Continuation:
    """Make the object that records how the training continues after each checkpoint, and that compares the continuation
    after a resume."""
    parts = UpdateParts(capture.optimizers, lambda optimizer: layerwise_of(optimizer) is not None)
    comparison, step = None, 0
    if resumed is not None:
        step = resumed.step
    # After a restore that is not exact, random states or tensors are others, so nothing is compared.
    if resumed is not None and not resumed.not_exact:
        comparison = Comparison(
            step, resumed.recorded, is_strict=strict_data, same_bits=resumed.same_conditions, parts=parts
        )
    loop_counter = LoopCounterCheck(step, lambda: boundary.step, capture.loaders, may_keep_count=bool(found.passed))
    return Continuation(Recorder(pipeline.store_next_batch, parts), comparison, loop_counter)
