"""What a session does at each event of a training: the last of its step listeners, and the one that acts.

``Boundary`` says which event closes a version; ``Capture`` reads the state; ``Commits`` has it saved. Each version is
"the state from which step *t + 1* starts".
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from lightck.dataloader.positions import Positions
from lightck.events import Event, StepEvents, StepListener, Turn
from lightck.following.comparison import Comparison, Counted, Follows, Recorder
from lightck.following.update_parts import UpdateParts
from lightck.hooks.boundary import BY_HAND, Boundary
from lightck.hooks.hooks import Hooks
from lightck.hooks.layers import PartialUpdate
from lightck.pipeline.pipeline import Pipeline
from lightck.restore.resume import Resumed
from lightck.session.capture import Capture
from lightck.session.commits import Beside, Commits, deadline_in
from lightck.session.discover import Found, drives, late, live_optimizers, positions, updating
from lightck.session.first_step import FirstStep
from lightck.session.interval import Cadence
from lightck.session.loop_top import LoopTop
from lightck.session.saved_watch import SavedWatch
from lightck.sessions import OpenSession, is_followed
from lightck.state.optimizer_wrappers import ScalerWatch
from lightck.stats import Meter

log = logging.getLogger("lightck")


class Steps(StepListener):
    """Of one session. Its parts are open to the rest of the room, and to nobody else."""

    session: OpenSession
    """What the user holds: kept alive here, as this is by the hooks of the model."""

    def __init__(
        self,
        model: nn.Module,
        found: Found,
        capture: Capture,
        pipeline: Pipeline,
        meter: Meter,
        beside: Beside,
        *,
        cadence: Cadence,
        resumed: Resumed | None,
        first_step: FirstStep,
        strict_data: bool,
    ) -> None:
        self._model = weakref.ref(model)
        self.capture, self.pipeline, self.meter, self.resumed = capture, pipeline, meter, resumed
        self.turn = Turn()
        self._first_step: FirstStep | None = first_step
        done_at = None
        if resumed is not None:
            capture.positions = Positions(capture.loaders, resumed.loaders)
            capture.persistent.had_started = resumed.persistent_started
            done_at = resumed.step if resumed.done else None
        start = () if resumed is None else (resumed.step, resumed.iteration, resumed.explicit)
        self.boundary = Boundary(updating(found.optimizers), *start)
        self.follows = _follows(found, capture, pipeline, resumed, strict_data)
        recorder = self.follows.recorder
        self.commits = Commits(capture, pipeline, self.boundary, cadence, recorder, meter, self.turn, beside, done_at)
        self.watch = SavedWatch(capture, self.boundary, self._follow_live)
        self.top: LoopTop | None = LoopTop(capture, None if resumed is None else (resumed.event, resumed.step))
        self._declines_optimizers = found.declined
        self.steps_on: int | None = None
        """The thread that steps."""
        self._reported_step = self.boundary.step
        self._is_forward_known = False
        """The model's forward hook fires, or it was said that it does not."""
        self._scalers = ScalerWatch(capture.objects)
        self.partial_update = PartialUpdate()
        self.events = StepEvents(self.turn)
        self.events.add(self)
        self.hooks = Hooks(self.events, model, found.optimizers)

    # -- what is asked of it -----------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module | None:
        """None where it is gone."""
        return self._model()

    @property
    def updates(self) -> int:
        """Updates made. Unlike ``Session.step`` this is not what a loop asks, so it is not noted that one did."""
        return self.boundary.step

    def follows_optimizer(self, optimizer: object) -> bool:
        """Whether its steps are updates of this session."""
        return self.hooks.follow(optimizer)

    def forget(self) -> None:
        """After the end: nothing of the user's is kept alive."""
        self.capture.forget()
        self.hooks.forget()
        self.follows.forget()
        self._first_step = self.top = None

    # -- an update ---------------------------------------------------------------------------------------

    def before_step(self, index: int, by_hand: bool, has_gradients: bool, in_backward: bool = False) -> None:
        """``in_backward``: before the first layer of a layer-wise update."""
        self.capture.devices.refuse_capture("An optimizer's step")
        with self.meter.stall("before the update"):
            self.commits.raise_failure()
            if not in_backward:
                self.commits.raise_keep_failure()
                self.partial_update.raise_deferred()
                self.steps_on = threading.get_ident()
            if by_hand:
                self.capture.stepped_by_hand(index)
            self._check_first_step()
            self._reaches(Event.PRE_STEP)
            if self.boundary.is_due(Event.PRE_STEP):
                self.event(Event.PRE_STEP)
                self._tell_no_forward()
            if not self.commits.paused:
                self.watch.before_step(index)
                self.follows.before_update(index if has_gradients else None)
            self.capture.before_update(index)

    def gate(self) -> None:
        with self.meter.stall("gate"):
            self.commits.raise_failure()
            self.commits.guard(self.pipeline.gate)

    def after_step(self, index: int) -> None:
        with self.meter.stall("after the update"):
            self.boundary.updated(index)
            self.watch.updated()
            if self.top is not None:
                self.top.updated(self.boundary)
            self._scalers.stepped()
            self.partial_update.end(index)
            self.capture.before_update(index)  # again: a closure makes its gradients inside the step
            self.capture.after_update()
            self.capture.positions.updated()
        self._tell_step_ended()

    def _tell_step_ended(self) -> None:
        """Once for each update, where it is counted: with several optimizers that may be where a version closes."""
        if self.boundary.step != self._reported_step:
            self._reported_step = self.boundary.step
            self.events.step_ended(self._reported_step)

    def after_step_hooks(self) -> None:
        with self.meter.stall("after the update"):
            self.capture.after_update()  # what is read provisionally comes after the user's own hooks

    def skipped_step(self, index: int) -> None:
        self.meter.skipped += 1
        self.partial_update.end(index)

    def updated_by_hand(self) -> None:
        """An update of a loop in which no optimizer is followed. No hook comes before the next one, so the gate is
        here."""
        self.steps_on = threading.get_ident()
        self._check_first_step()
        self.follows.before_update(None)
        self.boundary.updated(BY_HAND)
        self.capture.positions.updated()
        self.capture.devices.note_updates()
        self.event(Event.END_STEP)
        self.commits.guard(self.pipeline.gate)
        self.events.update_begins()

    # -- a layer-wise update -----------------------------------------------------------------------------

    def layers_begin(self, index: int) -> None:
        self.partial_update.defer(lambda: self.before_step(index, False, False, in_backward=True))
        while not self.partial_update.defer(self.gate):
            pass  # a version was given up; there may be others
        self.commits.guard(self.pipeline.eager.drop)  # what an update without a boundary began is of no version
        self.partial_update.begin(index)

    def layer_updated(self, name: str, begin: int, tensors: Sequence[torch.Tensor]) -> None:
        step, is_last = self.boundary.step + 1, self.boundary.optimizers == 1  # another may write them still
        if is_last and not self.commits.paused and self.commits.cadence.foresees(step, self.commits.saved_step):
            with self.meter.stall("layer updated"):
                self.commits.guard(lambda: self.pipeline.copy_eagerly(tensors))

    def layers_forgotten(self, index: int) -> None:
        self.partial_update.end(index)

    # -- a forward ---------------------------------------------------------------------------------------

    def before_forward(self, inputs: tuple[object, ...]) -> None:
        if self.commits.paused or self.capture.devices.is_captured(lambda: self.commits.is_idle):
            return
        self._is_forward_known = True
        with self.meter.stall("forward begins"):
            self.watch.training_forward()
            self._reaches(Event.FORWARD)
            if self.commits.failure is None:
                self.follows.recorder.forward(inputs, self.boundary.is_due(Event.PRE_STEP))
                self.commits.guard(self.pipeline.forward_begins)
                self.event(Event.FORWARD)
            if self.resumed is not None:
                self.resumed.forward_begins(self.capture.numbers)
            self.follows.forward(inputs)

    def _tell_no_forward(self) -> None:
        """At an update that had to close the last version itself."""
        if not (self._is_forward_known or self.boundary.explicit):
            self._is_forward_known = True
            log.info(
                "lightck: the model's forward hook does not fire (compiled before attach, or never called "
                "itself): versions close at the optimizer's step, and their copies are waited for there. "
                "session.loader() or session.end_step() closes them earlier"
            )

    def forward_ended(self) -> None:
        with self.meter.stall("forward ended"):
            if self.commits.failure is None:
                self.commits.guard(self.pipeline.poll)  # copies that are done need not wait for the gate

    # -- optimizers made after attach --------------------------------------------------------------------

    def unknown_optimizer(self, optimizer: Optimizer) -> None:
        model = self.model
        if model is None:
            return
        if not drives(optimizer, positions(model)):
            if not is_followed(optimizer):
                self.watch.step_elsewhere(optimizer)
            return
        new = late(optimizer, {id(p) for view in self.capture.optimizers for _, p in view.params})
        self.capture.add_optimizers(new)
        self.boundary.optimizers += updating(new)
        self.hooks.add(new)

    def _follow_live(self) -> bool:
        """Follow what was made after attach and has not stepped yet. Whether there is any, followed or declined."""
        model = self.model
        found = () if model is None else live_optimizers(model)
        for optimizer in () if self._declines_optimizers else found:
            self.unknown_optimizer(optimizer)
        return bool(found)

    # -- what may close a version ------------------------------------------------------------------------

    def event(self, event: Event) -> None:
        """Close the version where this event does."""
        if self.commits.paused:
            return
        self.capture.devices.join_updates()
        if not self.boundary.is_due(event):
            is_skip = event is not Event.FLUSH and self._scalers.skipped()
            self.boundary.passed_without_update(event, is_skip)
            return
        if event is Event.FORWARD and self.capture.mid_batch.holds_batch(self.boundary.step):
            return  # it may only be looked at
        self.partial_update.refuse_boundary()
        step = self.boundary.close(event)
        self._scalers.skipped()
        self.commits.closed(event, step)
        self._tell_step_ended()

    def commit_current(self, timeout: float | None, *, also_step_0: bool = True) -> None:
        """Close the version here, and bring it to its commit."""
        deadline = deadline_in(timeout)
        self.event(Event.FLUSH)
        self.commits.commit(timeout, deadline, also_step_0=also_step_0)

    def _reaches(self, event: Event) -> None:
        """A point at which a version may close, and before it closes: what the loop moves before it."""
        if self.top is not None and not self.commits.paused and not self.top.reaches(event, self.boundary):
            self.top = None

    def _check_first_step(self) -> None:
        if self._first_step is not None:
            self._first_step.check(self.capture)
            self._first_step = None


def _follows(found: Found, capture: Capture, pipeline: Pipeline, resumed: Resumed | None, strict_data: bool) -> Follows:
    """What follows the versions that are saved, and after a resume whether it is what followed before."""
    parts = UpdateParts(capture.optimizers)
    comparison, step = None, 0
    if resumed is not None:
        step, is_same = resumed.step, resumed.same_conditions
        comparison = Comparison(step, resumed.recorded, is_strict=strict_data, same_bits=is_same, parts=parts)
    counted = Counted(step, capture.loaders, by_itself=bool(found.state.keys() - found.found.keys()))
    return Follows(Recorder(pipeline.store_next_batch, parts), comparison, counted)
