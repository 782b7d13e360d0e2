"""The session object of a user: its properties, its calls, and its end.

At the end the closed checkpoints are committed, the threads end, and the pool's lock is released last.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch.utils.hooks import RemovableHandle

from lightck.dataloader.identity import name_of
from lightck.dataloader.loader import SessionLoader
from lightck.dataloader.replay import wants_skip
from lightck.errors import NothingSavedError, SessionError
from lightck.events import ClosingEvent
from lightck.hooks.own_hooks import Handle, remove, silence
from lightck.interrupts import deferred, retry_interrupted
from lightck.pipeline.pipeline import Pipeline
from lightck.pool.storage.durability import Durability
from lightck.pool.storage.lock import PoolLock
from lightck.profiler.recording import Recording, Traces
from lightck.restore.resume import Recovered
from lightck.session.commit_callbacks import CommitCallbacks
from lightck.session.group import Membership
from lightck.session.loaders import LoaderEvents
from lightck.session.steps import Steps
from lightck.sessions import followed_trainings
from lightck.stats import Stats
from lightck.tiers.pin import Hold, Pin
from lightck.tiers.tier import checked_metrics

log = logging.getLogger("lightck")
P = ParamSpec("P")
T = TypeVar("T")


def _exclusive(method: Callable[Concatenate[Session, P], T]) -> Callable[Concatenate[Session, P], T]:
    """Hold the session's lock during a method."""

    @wraps(method)
    def called(self: Session, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._steps.session_lock:
            return method(self, *args, **kwargs)

    return called


class Session:
    """One training that is saved, made by :func:`lightck.attach`. As a context manager it commits the current step at
    the end of its block, unless the block raises an exception.

    An error of background work is raised in the training loop at the next step, and again at ``close``.
    """

    def __init__(
        self, steps: Steps, lock: PoolLock, found: Mapping[str, str], membership: Membership | None = None
    ) -> None:
        """Called by ``attach`` only. ``membership``: the session's place in its group (None: no group)."""
        self.found: Mapping[str, str] = dict(found)
        """What attach found by itself: name -> class name."""
        self._steps, self._pipeline, self._membership = steps, steps.pipeline, membership
        self._recovered = None if steps.resumed is None else steps.resumed.recovered
        self._loader_events = LoaderEvents(steps)
        self._traces = Traces(steps.events, steps.pipeline.events, steps.pipeline.engine, steps.meter)
        self._commit_callbacks = CommitCallbacks(steps.events, steps.pipeline.events, steps.meter)
        self._finalizer = weakref.finalize(self, _end, steps.pipeline, lock, steps.hooks.handles)
        self._finalizer.atexit = False
        steps.session = self
        followed_trainings.add(steps)

    # -- what a user reads -------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Updates since the beginning of the training, earlier runs included and skipped updates left out. With several
        optimizers: rounds in which each optimizer has stepped."""
        self._steps.continuation.loop_counter.step_read()
        return self._steps.boundary.step

    @property
    def iteration(self) -> int:
        """Iterations of the loop since the beginning of the training, earlier runs included: one for each boundary, and
        one for each iteration whose update a GradScaler skipped, or that ``end_step()`` ended without an update."""
        self._steps.continuation.loop_counter.step_read()
        return self._steps.boundary.iteration

    @property
    def path(self) -> str:
        """The pool's path."""
        return self._pipeline.path

    @property
    def done(self) -> bool:
        """Whether the training is finished: ``close(done=True)`` was called at this step, in this run or an earlier
        one."""
        return self._steps.commits.is_done

    @property
    def should_stop(self) -> bool:
        """Whether the loop is to end now, because a signal has come (:func:`lightck.preemption`); False without one.

        Read it between two steps, on the thread of the loop: ``if session.should_stop: break``. After a signal it
        commits the present step, as ``flush`` does, and waits until every tier has it, but not beyond the grace. Then
        it is True, and stays so. Where the present step is not finished, it is False, and so it is in ``paused()``.
        """
        request = self._steps.stop_request
        return request is not None and request.should_stop()

    @property
    def committed(self) -> int | None:
        """Newest step that is durable in the pool, or None. Errors of background work are not raised here."""
        if self._steps.session_lock.is_live:
            return self._pipeline.newest_committed()
        return self._pipeline.committed

    @property
    def rank(self) -> int:
        """The rank of this process in the group whose ranks were attached together; 0 without a group."""
        return 0 if self._membership is None else self._membership.rank

    @property
    def world(self) -> int:
        """The number of ranks that were attached together; 1 without a group."""
        return 1 if self._membership is None else self._membership.world_size

    @property
    def common(self) -> int | None:
        """The newest step that this rank knows to be committed by all ranks, or None. This rank reads the other pools
        only when it begins a checkpoint, so a newer step may be common already. Without a group: ``committed``."""
        if self._membership is None:
            return self.committed
        known = self._membership.commit_rule.knowledge.common
        return None if known is None else known.step

    @property
    def copied(self) -> int | None:
        """The newest step that this rank knows to be in the peer copies of all ranks (``replicas=2``), or None. If a
        host is lost, the training continues from this step or a later one."""
        known = None if self._membership is None else self._membership.commit_rule.knowledge.copied
        return None if known is None else known.step

    @property
    def recovered(self) -> Recovered | None:
        """The checkpoint from which this session goes on, and whether it was restored exactly; None for a new
        training."""
        return self._recovered

    @property
    def durability(self) -> Durability:
        """Which failures the committed checkpoints survive, with the evidence."""
        return self._pipeline.durability

    @property
    def paused_reason(self) -> str | None:
        """The reason why nothing is committed at present (``pause_on_nonfinite``), or None. In a group of ranks the
        reason may lie in another rank, and is known here as soon as this rank has given a checkpoint up for it."""
        nonfinite_check = self._steps.commits.participants.nonfinite_check
        return None if nonfinite_check is None else nonfinite_check.paused_reason

    def stats(self) -> Stats:
        """The present values of the session's counters; after ``close`` the last ones. Any thread may call it, at any
        time: it waits for nothing."""
        self._steps.session_lock.run_if_free(self._read_tiers)
        return self._steps.meter.snapshot(
            engine_cpu_seconds=self._pipeline.engine.cpu_seconds,
            committed=self.committed,
            step=self._steps.updates,
            in_flight=self._pipeline.n_uncommitted,
            interval=self._steps.commits.cadence.interval,
            rank_wait_seconds=0.0 if self._membership is None else self._membership.commit_rule.wait_seconds,
            base_every=self._steps.base_every,
            emulated=self.durability.emulated,
        )

    def loader(
        self, loader: Any, *, name: str | None = None, anew: bool = False, replay: str = "fetch"
    ) -> SessionLoader:
        """Wrap a training loader so that each ``next()`` is a boundary and a resume continues at its position.

        Call it once per loader, before the loop, and in the same order in every run, or give each loader a ``name``.

        Args:
            loader: a DataLoader, a loader with ``state_dict`` and ``load_state_dict``, or any other iterable.
            name: the name under which the loader's position is saved and restored; by default the number of the call.
            anew: start a new pass even if the checkpoint is in the middle of a pass.
            replay: how a resume in mid-pass skips the batches before its position: ``"fetch"`` fetches and drops them;
                ``"skip"`` fetches only the last of these, which is exact if the dataset has no state of its own and
                draws no random numbers in workers.

        Raises:
            DriftError: the checkpoint is in mid-pass, and the loader was built with other arguments.
            CorruptPoolError: the saved position is damaged.
            SessionError: the session is closed; the name is taken; the loader has no name and another one has begun a
                pass; or ``replay="skip"`` is passed for anything but a DataLoader over a map-style dataset.
        """
        self._check_usable()
        skips = wants_skip(loader, replay)
        key = name_of(loader, name, self._steps.capture.loaders)
        positions = self._steps.capture.positions
        restored = positions.restored_for(key, anew)
        wrapped = SessionLoader(
            loader,
            self._loader_events,
            key,
            restored,
            not positions.any_in_pass,
            anew,
            self._steps.capture.objects,
            skips,
        )
        self._steps.capture.loaders.append(wrapped)
        positions.loader_wrapped(wrapped)
        if positions.drops_pass or wrapped.has_drifted:
            self._steps.continuation.compare_nothing()
        return wrapped

    # -- what a user calls -------------------------------------------------------------------------------

    @_exclusive
    def end_step(self) -> None:
        """Close the checkpoint of this step: call it as the last statement of the loop.

        From the first call on, only ``end_step``, ``flush`` and ``close`` are boundaries. If no optimizer is followed,
        each call counts as an update."""
        self._check_usable()
        with self._steps.meter.stall("end_step"):
            self._steps.commits.raise_failure()
            self._steps.partial_update.refuse_boundary()
            if self._steps.commits.paused or not self._steps.watch.end_step():
                self._steps.handle(ClosingEvent.END_STEP)
            else:
                self._steps.updated_by_hand()
        self._deliver_commits()

    @_exclusive
    def flush(self, timeout: float | None = None) -> int | None:
        """Commit the current step, and return the newest committed step.

        If ``pause_on_nonfinite`` refused the current step, or if the call is inside ``optimizer.step()``, the newest
        committed step is an older one, or None. Raises ``FlushTimeoutError`` after ``timeout`` seconds (None or
        infinity: never)."""
        self._check_usable()
        if self._steps.commits.paused:
            raise SessionError(
                "flush() was called inside paused(), where the weights may be swapped. Leave paused() first."
            )
        self._steps.partial_update.refuse_boundary()
        with self._steps.meter.stall("flush"):
            self._steps.commits.raise_failure()
            self._steps.commit_current(timeout)
        self._deliver_commits()
        return self._pipeline.committed

    @_exclusive
    def log(self, /, **metrics: float) -> None:
        """Say how good the model is at the current step: ``session.log(val_loss=0.31)``.

        The numbers go to the tiers with the checkpoint of this step. With a tier that has ``keep_best=``, the step is
        committed, as ``flush`` does, and its checkpoint is sent. Without tiers nothing happens. Numbers that are not
        finite are left out. In ``paused()`` the step is not committed here, but at its boundary.
        """
        self._check_usable()
        numbers = checked_metrics(metrics)
        tiers = self._steps.commits.participants.tiers
        if tiers is None:
            return
        step = self.step
        tiers.log(step, numbers)
        if tiers.keeps_best and not self._steps.commits.paused:
            self.flush()
        if self._pipeline.committed == step and self._pipeline.pool.writer is not None:
            tiers.committed(self._pipeline.pool.writer, step)

    @_exclusive
    def on_commit(self, callback: Callable[[int], object]) -> RemovableHandle:
        """Call ``callback(step)`` after each commit from now on: ``session.on_commit(lambda step: print(step))``.

        Each committed step comes once, in order. Its checkpoint survives then what ``session.durability`` says, in the
        pool of this rank (``session.common`` says what all ranks have). The call is made on the training thread: in
        ``optimizer.step()``, before the next update begins, or at the end of ``flush``, ``log``, ``pin``, ``end_step``
        and ``close``. What the callback raises is raised there; the checkpoint stays as it is, and calls that are still
        to be made follow at the next such moment. The time of a callback does not count as lightck's. It may call the
        session, but must not wait for another thread that does. A session that ends with an exception calls nothing
        more.

        Args:
            callback: a function of one int. Several are called in the order in which they were added.

        Returns:
            torch's handle: ``handle.remove()`` ends the calls.

        Raises:
            TypeError: ``callback`` cannot be called.
            SessionError: the session is closed.
        """
        self._check_usable()
        if not callable(callback):
            kind = type(callback).__name__
            raise TypeError(f"on_commit() takes a function that is called with the step, and got: {kind}.")
        return self._commit_callbacks.add(callback, self._pipeline.committed)

    @_exclusive
    def pin(self) -> Pin:
        """Commit the current step, as ``flush`` does, and hold its checkpoint in the pool until the pin is released.

        ``recover(path, step=pin.step)`` returns the checkpoint, now and after a crash. The first pin may move the pool
        to a larger file. With ``pause_on_nonfinite`` the last checkpoint with finite values is held. In a group every
        rank calls it, at the same step; what only some ranks hold is not kept for ``recover``. So a rank of a group
        raises ``SessionError`` if the current step is not committed because a rank pauses.
        """
        self.flush()
        self._refuse_pin_while_paused()
        participants = self._steps.commits.participants
        with self._steps.meter.stall("pin"):
            pinned: list[Hold] = []
            self._steps.commits.run(lambda: pinned.append(participants.pin(self._pipeline)))
        self._check_usable()
        return Pin(pinned[0], participants.holds.release)

    def _refuse_pin_while_paused(self) -> None:
        if self._membership is not None and self.paused_reason is not None and self.committed != self.step:
            raise SessionError(
                f"Step {self.step} cannot be pinned, because it is not committed: {self.paused_reason}. The ranks of a "
                "group pin one step together. Pin when session.paused_reason is None on all ranks."
            )

    @_exclusive
    def close(self, *, done: bool = False, drop_current: bool = False) -> None:
        """Commit the current step, end the threads, and release the pool. A second call does nothing.

        ``done``: record in the pool that the training is finished: ``session.done`` is True after the next attach.
        ``drop_current``: do not save the current step. The newest checkpoint that was saved before is committed, and
        the next start continues from it. Pass ``drop_current=True`` if the end of the loop has changed state that the
        checkpoint of this step must not hold.
        After everything is released, an error of background work, of a callback of ``on_commit``, of ``keep=`` or of a
        tier is raised, or ``NothingSavedError``.
        """
        if done and drop_current:
            raise ValueError("done=True saves the current step, and drop_current=True drops it. Pass one of the two.")
        if not self.is_open:
            return
        problem = raised = None
        try:
            if self._steps.partial_update:
                log.warning(
                    "lightck: the session was closed between backward() and step(): the unfinished step is not saved"
                )
            elif not self._steps.session_lock.is_forked and self._steps.commits.failure is None:
                self._steps.continuation.session_ends()
                self._steps.watch.session_ends()
                with self._steps.meter.stall("close"):
                    self._commit_at_close(done, drop_current)
                    problem = None if drop_current else self._steps.watch.problem()
                raised = self._commit_callbacks.deliver_all()
                if self._steps.commits.participants.tiers is not None:
                    request = self._steps.stop_request
                    self._steps.commits.participants.tiers.finish(None if request is None else request.close_begins())
        finally:
            self._release()
        self._steps.commits.raise_failure()
        if raised is not None:
            raise raised
        self._steps.commits.raise_keep_failure()
        self._steps.commits.raise_tier_failure()
        self._traces.close()
        if problem is not None:
            raise NothingSavedError(problem)

    def _commit_at_close(self, done: bool, drop_current: bool) -> None:
        if drop_current:
            self._steps.commits.commit_saved(None, None)
            return
        self._steps.capture.is_done = done or self.done
        self._steps.commit_current(None, also_step_0=False)
        if done:
            self._steps.commits.commit_done()

    def trace(self, path: str | os.PathLike[str], *, steps: int | None = 20, overwrite: bool = False) -> Recording:
        """Record the next ``steps`` steps (None: until the recording is closed), for Perfetto and ``lightck trace``.

        The recording ends by itself after these steps. It ends earlier when its ``close`` is called, or at the end of
        its ``with`` block. An error of the recording never stops the training.
        """
        self._check_usable()
        about = {"medium": str(self.durability), "interval": self._steps.commits.cadence.interval}
        return self._traces.start(path, steps, overwrite, self._steps.model, about)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block in which weights may be swapped and swapped back (EMA for evaluation). In the block there is no
        boundary, and no copy runs."""
        self._check_usable()
        with self._steps.session_lock, self._steps.meter.stall("paused"):
            self._steps.commits.run(self._pipeline.wait_for_copies)
        self._steps.commits.paused += 1
        try:
            yield
        finally:
            self._steps.commits.paused -= 1

    def __enter__(self) -> Session:
        self._check_usable()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    @_exclusive
    def abandon(self) -> None:
        """End the session after an exception, or at exit: commit the closed checkpoints, and drop the open one."""
        if self.is_open:
            self._release()

    @property
    def is_open(self) -> bool:
        """Whether neither ``close`` nor ``abandon`` was called."""
        return self._steps.session_lock.is_open

    def __repr__(self) -> str:
        state = "" if self.is_open else ", closed"
        return (
            f"<lightck.Session step {self._steps.updates}, committed {self.committed}, pool {self.path!r} "
            f"({self.durability}){state}>"
        )

    # -- inside ------------------------------------------------------------------------------------------

    def _expect_end_step(self) -> None:
        """Let only ``end_step``, ``flush`` and ``close`` be boundaries, before the first call too: for an integration
        that calls ``end_step`` after each step."""
        self._steps.boundary.explicit = True

    def _check_usable(self) -> None:
        if not self.is_open:
            raise SessionError("This session is closed, and its pool is released. Attach again to go on.")
        if self._steps.session_lock.is_forked:
            raise SessionError("This session belongs to the parent process. A forked child cannot use it.")

    def _deliver_commits(self) -> None:
        """Call the callbacks of ``on_commit``, unless another thread than the training's has called the session."""
        if self._steps.step_thread in (None, threading.get_ident()):
            self._commit_callbacks.deliver()

    def _read_tiers(self) -> None:
        tiers = self._steps.commits.participants.tiers
        if tiers is not None:
            tiers.read(may_start=self._steps.step_thread in (None, threading.get_ident()))

    def _release(self) -> None:
        self._traces.end()
        self._steps.session_lock.is_open = False
        # A callback of ``on_commit`` may end the session inside ``optimizer.step()``, where no hook can be removed.
        if self._commit_callbacks.is_delivering and self._steps.hooks.is_in_step:
            silence(self._steps.hooks.handles)
        self._finalizer()
        if self._steps.stop_request is not None:
            self._steps.stop_request.close()
        self._steps.forget()


def _end(pipeline: Pipeline, lock: PoolLock, handles: list[Handle]) -> None:
    """End a session once, called from ``close`` or from the garbage collector. The collector may run on a thread of the
    pipeline. In that case a new thread does the work, because the work includes a wait for that thread to end."""
    if pipeline.on_background_thread:
        threading.Thread(target=_end_here, args=(pipeline, lock, handles), name="lightck-end").start()
    else:
        _end_here(pipeline, lock, handles)


def _end_here(pipeline: Pipeline, lock: PoolLock, handles: list[Handle]) -> None:
    """End a session on this thread. A signal handler that raises (Ctrl-C) may end only the wait for copies. The
    pipeline is closed in any case, because nothing may write to the pool after the pool's lock is released."""
    remove(handles)
    with deferred(), ExitStack() as last:
        last.callback(lock.release)
        last.callback(pipeline.close)
        if not pipeline.engine.is_forked:
            retry_interrupted(pipeline.finish_quietly)
