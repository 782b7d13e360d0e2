"""A session: one training, one pool, and the events that carry a version from the loop to its commit.

The hooks report events; ``Boundary`` says which of them closes a version; ``Capture`` reads the state; ``Pipeline``
writes it. Invariant: whatever goes wrong in the background reaches the training loop at its next step and again at
``close``; nothing here loses a committed version, and nothing runs in a forked child.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from lightck.dataloader.batch import Read
from lightck.dataloader.loader import SessionLoader
from lightck.dataloader.passes import Pass
from lightck.dataloader.positions import Positions
from lightck.dataloader.replay import wants_skip
from lightck.dataloader.wrapped import name_of
from lightck.errors import BackgroundError, FlushTimeoutError, NothingSavedError, SessionError
from lightck.events import Event
from lightck.following.following import Comparison, Counted, Follows, Recorder
from lightck.following.update import UpdateParts
from lightck.hooks.boundary import BY_HAND, Boundary
from lightck.hooks.forward import ForwardSeen
from lightck.hooks.half import HalfUpdated
from lightck.hooks.hooks import Hooks
from lightck.interrupts import resumed
from lightck.pipeline.pipeline import Pipeline
from lightck.pool.storage.durability import Durability
from lightck.pool.storage.lock import PoolLock
from lightck.profiler.recording import Recording, Traces
from lightck.restore.resume import Resumed
from lightck.session.discover import Found, drives, late, live_optimizers
from lightck.session.ending import end
from lightck.session.first_step import FirstStep
from lightck.session.interval import Cadence
from lightck.session.patience import deadline_in
from lightck.session.saved import SavedWatch
from lightck.session.snapshot import Capture
from lightck.session.top import LoopTop
from lightck.sessions import Proxy, abandon_at_exit, in_turn, is_followed
from lightck.state.nest import ScalerWatch, places
from lightck.state.rng import RngState
from lightck.stats import Meter, Stats
from lightck.tiers.pin import Hold, Pin

log = logging.getLogger("lightck")


class Session:
    """Made by :func:`lightck.attach`; a context manager. Leaving it normally commits the current step."""

    def __init__(self, model: nn.Module, found: Found, capture: Capture, pipeline: Pipeline, lock: PoolLock,
                 meter: Meter, *, cadence: Cadence, resumed: Resumed | None,
                 first_step: FirstStep, strict_data: bool) -> None:  # fmt: skip
        self.found: Mapping[str, str] = dict(found.found)
        """What attach found by itself: name -> class."""
        self._model = weakref.ref(model)
        self._capture = capture
        self._pipeline = pipeline
        self._meter = meter
        self._cadence = cadence
        self._resumed = resumed
        self._first_step: FirstStep | None = first_step
        if resumed is not None:
            capture.positions = Positions(capture.loaders, resumed.loaders)
            capture.persistent.had_started = resumed.persistent_started
        self._is_done_saved = False  # in the last version
        self._done_at = resumed.step if resumed is not None and resumed.done else None
        parts = UpdateParts(capture.optimizers)
        comparison = None if resumed is None else Comparison(
            resumed.step, resumed.recorded, is_strict=strict_data, same_bits=resumed.same_conditions,
            parts=parts)  # fmt: skip
        counted = Counted(0 if resumed is None else resumed.step, capture.loaders,
                          by_itself=bool(found.state.keys() - found.found.keys()))  # fmt: skip
        self._follows = Follows(Recorder(pipeline.store_next, parts), comparison, counted)
        start = () if resumed is None else (resumed.step, resumed.iteration, resumed.explicit)
        self._boundary = Boundary(found.updating, *start)
        self._saved_step = self._boundary.step
        self._watch = SavedWatch(capture, self._boundary, self._follow_live)
        self._top: LoopTop | None = LoopTop(capture, None if resumed is None else (resumed.event, resumed.step))
        self._declines_optimizers = found.declined
        self._failure: BaseException | None = None
        self._is_open = True
        self.turn = threading.RLock()  # of the thread that is inside: a watchdog may flush or close meanwhile
        self._paused = 0
        self._steps_on: int | None = None  # thread
        self._pid = os.getpid()
        self._forward = ForwardSeen()
        self._scalers = ScalerWatch(capture.objects)
        self._half_updated = HalfUpdated()
        self._hooks = Hooks(Proxy(self), model, found.optimizers)
        self._traces = Traces(self._hooks, pipeline.engine, meter)
        self._finalizer = weakref.finalize(self, end, pipeline, lock, self._hooks.handles)
        self._finalizer.atexit = False
        abandon_at_exit(self)

    # -- what a user reads -------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Updates made, skipped ones not counted. With several optimizers: rounds in which each stepped."""
        self._follows.counted.is_asked = True
        return self._boundary.step

    @property
    def iteration(self) -> int:
        """Boundaries passed: iterations of the loop, skipped updates included."""
        self._follows.counted.is_asked = True
        return self._boundary.iteration

    @property
    def path(self) -> str:
        """The pool's path."""
        return self._pipeline.path

    @property
    def done(self) -> bool:
        """Whether the training has come to its end: ``close(done=True)`` was said at this step, in any run."""
        return self._done_at == self._boundary.step

    @property
    def committed(self) -> int | None:
        """Newest step that is durable in the pool, or None. What background work failed at is not raised here."""
        if self._is_open and not self.is_forked:
            return self._pipeline.newest_committed()
        return self._pipeline.committed

    @property
    def durability(self) -> Durability:
        """What the committed versions survive, with the evidence."""
        return self._pipeline.durability

    @property
    def paused_reason(self) -> str | None:
        """Why nothing is committed now (``pause_on_nonfinite``), or None."""
        return self._pipeline.finite.reason if self._pipeline.finite is not None else None

    def stats(self) -> Stats:
        """The session's counters as of now."""
        return self._meter.snapshot(
            engine_cpu_seconds=self._pipeline.engine.cpu_seconds,
            committed=self.committed,
            interval=self._cadence.interval,
            emulated=self.durability.emulated,
        )

    def loader(self, loader: Any, *, name: str | None = None, anew: bool = False,
               replay: str = "fetch") -> SessionLoader:  # fmt: skip
        """Wrap a training loader so that each ``next()`` is a boundary and a resume continues at its position.

        Call it once for each, before the loop, and in the same order in every run, or give each loader a ``name``.

        Args:
            loader: a DataLoader, a loader with ``state_dict`` and ``load_state_dict``, or any other iterable.
            name: under which its position is saved, and found again; by default its number.
            anew: begin its pass at the beginning, where the checkpoint lies in the middle of one.
            replay: how a resume in mid-pass passes over what was given before: ``"fetch"`` fetches and drops it;
                ``"skip"`` fetches the last batch only, which is right where a dataset has no state of its own and draws
                nothing in workers.

        Raises:
            DriftError: the checkpoint lies in mid-pass, and the loader was built otherwise.
            CorruptPoolError: the saved position is damaged.
            SessionError: the session is closed, the name is taken, or it has none and comes after a pass of another;
                or ``replay="skip"`` for another loader than a DataLoader over a map-style dataset.
        """
        self._check_usable()
        skips = wants_skip(loader, replay)
        key = name_of(loader, name, self._capture.loaders)
        positions = self._capture.positions
        restored = positions.of(key, anew)
        wrapped = SessionLoader(loader, Proxy(self), key, restored, not positions.any_live, anew,
                                self._capture.objects, skips)  # fmt: skip
        self._capture.loaders.append(wrapped)
        positions.wrapped(wrapped)
        return wrapped

    # -- what a user calls -------------------------------------------------------------------------------

    @in_turn
    def end_step(self) -> None:
        """Close the version here: the last statement of the loop. From the first call on, only this, ``flush`` and
        ``close`` are boundaries. Where no optimizer is followed it counts as the update."""
        self._check_usable()
        with self._meter.stall("end_step"):
            self._raise_failure()
            self._half_updated.refuse_boundary()
            if self._paused or not self._watch.end_step():
                self._event(Event.END_STEP)
            else:
                self._updated_by_hand()

    @in_turn
    def flush(self, timeout: float | None = None) -> int | None:
        """Commit the current step too, and return it. ``FlushTimeoutError`` after ``timeout`` seconds (inf: never)."""
        self._check_usable()
        if self._paused:
            raise SessionError("flush() inside paused(): the weights are not the training's now. Leave paused() first.")
        self._half_updated.refuse_boundary()
        with self._meter.stall("flush"):
            self._raise_failure()
            self._commit_current(timeout)
        return self._pipeline.committed

    @in_turn
    def pin(self) -> Pin:
        """Commit the current step, as ``flush`` does, and hold its version in the pool until the pin is released.

        ``recover(path, step=pin.step)`` gives it, now and after a crash. The first pin may move the pool to a larger
        file. With ``pause_on_nonfinite`` the last good version is held.
        """
        self.flush()
        with self._meter.stall("pin"):
            pinned: list[Hold] = []
            self._guard(lambda: pinned.append(self._pipeline.pin()))
        self._check_usable()
        return Pin(pinned[0], self._pipeline.holds.release)

    @in_turn
    def close(self, *, done: bool = False) -> None:
        """Commit the current step, end the threads, release the pool. A second call does nothing.

        ``done``: keep in the pool that the training has come to its end: ``session.done`` says so after the next
        attach. Raises the error of background work that failed, after everything was released, or
        ``NothingSavedError``.
        """
        if not self._is_open:
            return
        problem = None
        try:
            if self._half_updated:
                log.warning("lightck: closed between backward() and step(): what was not committed before is not saved")
            elif not self.is_forked and self._failure is None:
                self._follows.ended()
                with self._meter.stall("close"):
                    self._capture.is_done = done or self.done
                    self._commit_current(None, also_step_0=False)
                    if done and not self.done:
                        self._commit_done()
                    problem = self._watch.problem()
        finally:
            self._release()
        self._raise_failure()
        self._raise_keep_failure()
        self._traces.close()
        if problem is not None:
            raise NothingSavedError(problem)

    def trace(self, path: str | os.PathLike[str], *, steps: int | None = 20, overwrite: bool = False) -> Recording:
        """Record what the next ``steps`` steps do (None: until it is closed), for Perfetto and ``lightck trace``.

        Ends by itself; as a context manager or by its ``close`` earlier. A failure of it never stops the training.
        """
        self._check_usable()
        about = {"medium": str(self.durability), "interval": self._cadence.interval}
        return self._traces.start(path, steps, overwrite, self._model(), about)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For weights that are swapped and swapped back (EMA for evaluation): no boundary and no copy meanwhile."""
        self._check_usable()
        with self.turn, self._meter.stall("paused"):
            self._guard(self._pipeline.copies_done)
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def __enter__(self) -> Session:
        self._check_usable()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()

    # -- events (from the hooks and loaders) -------------------------------------------------------------

    def before_step(self, index: int, by_hand: bool, in_backward: bool = False, has_gradients: bool = True) -> None:
        """Before the gate. ``by_hand``: outside the ``step`` of a wrapper; ``in_backward``: before a first layer;
        ``has_gradients``: no closure makes them inside the step."""
        self._capture.devices.refuse_capture("An optimizer's step")
        with self._meter.stall("before the update"):
            self._raise_failure()
            if not in_backward:
                self._raise_keep_failure()
                self._half_updated.raise_deferred()
                self._steps_on = threading.get_ident()
            if by_hand:
                self._capture.stepped_by_hand(index)
            self._check_first_step()
            self._reaches(Event.PRE_STEP)
            if self._boundary.is_due(Event.PRE_STEP):
                self._event(Event.PRE_STEP)
                self._forward.tell_missing(self._boundary.explicit)
            if not self._paused:
                self._watch.before_step(index)
                self._follows.before_update(index if has_gradients and not in_backward else None)
            self._capture.before_update(index)

    def gate(self) -> None:
        """Nothing may be updated before this returns."""
        with self._meter.stall("gate"):
            self._raise_failure()
            self._guard(self._pipeline.gate)

    def after_step(self, index: int) -> None:
        """Post-step hook of a step that changed something."""
        with self._meter.stall("after the update"):
            self._boundary.updated(index)
            self._watch.updated()
            if self._top is not None:
                self._top.updated(self._boundary)
            self._scalers.stepped()
            self._half_updated.end(index)
            self._capture.before_update(index)  # again: a closure makes its gradients inside the step
            self._capture.after_update()
            self._capture.positions.updated()

    def after_step_hooks(self) -> None:
        """The user's own post-step hooks ran: what is read provisionally comes after them."""
        with self._meter.stall("after the update"):
            self._capture.after_update()

    def skipped_step(self, index: int) -> None:
        """A fused optimizer under GradScaler found inf: nothing changed, no version."""
        self._meter.skipped += 1
        self._half_updated.end(index)

    def layers_begin(self, index: int) -> None:
        """The first layer of an update is about to be updated, inside the backward pass."""
        self._half_updated.defer(lambda: self.before_step(index, by_hand=False, in_backward=True))
        while not self._half_updated.defer(self.gate):
            pass  # a version was given up; there may be others
        self._guard(self._pipeline.early.drop)  # what an update without a boundary began is of no version
        self._half_updated.begin(index)

    def layers_forgotten(self, index: int) -> None:
        """The backward pass failed, and no ``step()`` will end its update."""
        self._half_updated.end(index)

    def layer_updated(self, name: str, begin: int, tensors: Sequence[torch.Tensor]) -> None:
        """These are what they will be after the step. With several optimizers another may write them still."""
        step, is_last = self._boundary.step + 1, self._boundary.optimizers == 1
        if is_last and not self._paused and self._cadence.foresees(step, self._saved_step):
            with self._meter.stall("layer updated"):
                self._guard(lambda: self._pipeline.copy_early(tensors))

    def forward_begins(self, inputs: tuple[Any, ...]) -> None:
        """Training forward of the root."""
        if self._paused or self._capture.devices.is_captured(self._is_idle):
            return
        self._forward.fires = True
        with self._meter.stall("forward begins"):
            self._watch.training_forward()
            self._reaches(Event.FORWARD)
            if self._failure is None:
                self._follows.recorder.forward(inputs, self._boundary.is_due(Event.PRE_STEP))
                self._guard(self._pipeline.forward_begins)
                self._event(Event.FORWARD)
            if self._resumed is not None:
                self._resumed.forward_begins(self._capture.numbers)
            self._follows.forward(inputs)

    def forward_ended(self) -> None:
        """End of a training forward: copies that are done need not wait for the gate."""
        with self._meter.stall("forward ended"):
            if self._failure is None:
                self._guard(self._pipeline.poll)

    def unknown_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer steps that was not there at attach."""
        model = self._model()
        if model is None:
            return
        if not drives(optimizer, {id(p): i for i, p in enumerate(model.parameters())}):
            if not is_followed(optimizer):
                self._watch.step_elsewhere(optimizer)
            return
        new = late(optimizer, {id(p) for view in self._capture.optimizers for _, p in view.params})
        self._capture.add_optimizers(new)
        self._boundary.optimizers += sum(place.steps for place in places(new))
        self._hooks.add(new)

    def follows(self, optimizer: Any) -> bool:
        """Whether its steps are updates of this session."""
        return self._hooks.follow(optimizer)

    def _follow_live(self) -> bool:
        """Follow what was made after attach and has not stepped yet. Whether there is any, followed or declined."""
        model = self._model()
        found = () if model is None else live_optimizers({id(p): i for i, p in enumerate(model.parameters())})
        for optimizer in () if self._declines_optimizers else found:
            self.unknown_optimizer(optimizer)
        return bool(found)

    def loader_next(self, loader: SessionLoader) -> None:
        """``next()`` on a session loader, before anything is fetched."""
        model = self._model()
        self._capture.within.fetches(loader, model is not None and not model.training)
        self._capture.positions.fetches(loader)
        if self._paused:
            return
        if self._steps_on not in (None, threading.get_ident()):
            raise SessionError(
                f"loader {loader.name!r}: next() was called on another thread than optimizer.step(). It is where a "
                "version closes, and the training would change it meanwhile. Iterate in the training loop; let the "
                "DataLoader fetch ahead: num_workers=, prefetch_factor=."
            )
        if loader.in_eval and not loader.is_training:
            return  # an evaluation: the version stays open until the training goes on
        with self._meter.stall("next"):
            self._raise_failure()
            if self._top is not None:
                self._top.fetches(loader)
            self._event(Event.NEXT)
            self._guard(self._pipeline.poll)

    def loader_gave(self, loader: SessionLoader, of: Pass, batch: object, checksum: int | None, read: Read) -> None:
        """A session loader gave a batch."""
        if self._paused or (loader.in_eval and not loader.is_training):
            return
        self._follows.gave(loader.name, of, batch, checksum, read)

    def loader_pass_ended(self, loader: SessionLoader) -> None:
        """A pass ended: an evaluation with swapped weights may follow, so the copies end first."""
        self._capture.positions.pass_ended(loader)
        if loader.is_training and not (loader.in_eval or self._paused):
            self._follows.pass_ended()
        if self._failure is None:
            with self._meter.stall("pass ended"):
                self._guard(self._pipeline.copies_done)

    def take_restored_rng(self, loader: SessionLoader, pass_: Pass) -> RngState | None:
        if self._resumed is None or self.updates > self._resumed.step:
            return None  # the training went on from it without a loader
        state = self._resumed.take_rng(loader, pass_)
        for other in self._capture.loaders if state is not None and self._resumed.closed_by_next else ():
            other.put_back()
        return state

    @property
    def updates(self) -> int:
        return self._boundary.step

    # -- inside ------------------------------------------------------------------------------------------

    @property
    def is_forked(self) -> bool:
        return os.getpid() != self._pid

    def _reaches(self, event: Event) -> None:
        """A point at which a version may close, and before it closes: what the loop moves before it."""
        if self._top is not None and not self._paused and not self._top.reaches(event, self._boundary):
            self._top = None

    def _event(self, event: Event) -> None:
        if self._paused:
            return
        self._capture.devices.join_updates()
        if not self._boundary.is_due(event):
            is_skip = event is not Event.FLUSH and self._scalers.skipped()
            self._boundary.passed_without_update(event, is_skip)
            return
        if event is Event.FORWARD and self._capture.within.holds_batch(self._boundary.step):
            return  # it may only be looked at
        self._half_updated.refuse_boundary()
        step = self._boundary.close(event)
        self._scalers.skipped()
        is_saved = event is Event.FLUSH or self._cadence.is_due(step, self._saved_step)
        self._cadence.passed(time.perf_counter(), self._meter.stall_seconds, is_saved)
        self._capture.within.boundary(event, step, is_saved)
        if is_saved:
            self._close_version(event, step)
        else:
            self._follows.recorder.closed_unsaved()

    def _updated_by_hand(self) -> None:
        """An update of a loop in which no optimizer is followed. No hook comes before the next one, so the gate is
        here."""
        self._steps_on = threading.get_ident()
        self._check_first_step()
        self._follows.before_update(None)
        self._boundary.updated(BY_HAND)
        self._capture.positions.updated()
        self._capture.devices.note_updates()
        self._event(Event.END_STEP)
        self._guard(self._pipeline.gate)

    def _close_version(self, event: Event, step: int) -> None:
        began = time.perf_counter()
        self._saved_step, self._is_done_saved = step, self._capture.is_done
        self._guard(self._pipeline.audit)
        never, stale_after = self._pipeline.resting.never, self._pipeline.stale.after
        closing = self._capture.close(event, step, self._boundary.iteration, explicit=self._boundary.explicit,
                                      never_rest=never, stale_after=stale_after)  # fmt: skip
        if self._meter.observer is not None:
            self._meter.observer.stalled(f"state of step {step}", began, time.perf_counter(), is_state=True)
        self._follows.recorder.closes()
        self._guard(lambda: self._pipeline.close_version(closing))
        self._follows.recorder.closed(event)

    def _is_idle(self) -> bool:
        """No version is due or under way."""
        is_saved = not self._saved_step or self._pipeline.newest_committed() == self._saved_step
        return is_saved and not self._boundary.is_due(Event.FORWARD)

    def _commit_current(self, timeout: float | None, *, also_step_0: bool = True) -> None:
        """Close the version here, and bring it to its commit. Where the version of this step was closed before and not
        saved (``interval``) or given up, the state as it is now is saved as this step."""
        deadline = deadline_in(timeout)
        self._event(Event.FLUSH)
        self._guard(lambda: self._finish(timeout, deadline))
        step = self._boundary.step
        if self._pipeline.committed != step and not self._paused and (step or also_step_0):
            self._close_version(Event.FLUSH, step)
            self._guard(lambda: self._finish(timeout, deadline))

    def _commit_done(self) -> None:
        """With the fact that it is the last one; once more where this step was committed without it."""
        if not self._is_done_saved and not self._paused:
            self._close_version(Event.FLUSH, self._boundary.step)
            self._guard(lambda: self._finish(None, None))
        if self._pipeline.committed == self._boundary.step:
            self._done_at = self._boundary.step

    def _finish(self, timeout: float | None, deadline: float | None) -> None:
        if not self._pipeline.finish(deadline):
            raise FlushTimeoutError(
                f"Step {self._boundary.step} was not durable within {timeout} seconds. Its copies go on in the "
                "background. Wait longer, or look at the speed of the pool's medium."
            )

    def _guard(self, work: Any) -> None:
        """Run; remember a failure of the background for every later step and for close. A wait in it is left for a
        signal, whose handler may close the session."""
        try:
            resumed(lambda: work() if self._is_open else None)
        except BackgroundError as err:
            self._failure = err
            raise

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _raise_keep_failure(self) -> None:
        """Before an update, where a loop can catch it and call ``step()`` again: in ``next()`` it would end it."""
        if self._pipeline.keeper is not None:
            self._pipeline.keeper.raise_failure(at_close=not self._is_open)

    def _check_first_step(self) -> None:
        if self._first_step is not None:
            self._first_step.check(self._capture)
            self._first_step = None

    def _check_usable(self) -> None:
        if not self._is_open:
            raise SessionError("This session is closed. Its pool is released. Attach again to go on.")
        if self.is_forked:
            raise SessionError("This session belongs to the parent process. A forked child cannot use it.")

    @in_turn
    def abandon(self) -> None:
        """Finish the closed versions, drop the open one: after an exception, or at exit."""
        if self._is_open:
            self._release()

    def _release(self) -> None:
        self._traces.end()
        self._is_open = False
        self._finalizer()
        self._capture.forget()
        self._hooks.forget()
        self._follows.forget()
        self._first_step = self._top = None

    @property
    def is_open(self) -> bool:
        return self._is_open
