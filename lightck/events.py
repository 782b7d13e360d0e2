"""Step events: torch's hooks call a method for each event of a training, and each listener receives the call.

    torch's hook -> hooks/hooks.py -> StepEvents -> each StepListener, in order

The session's own listener (``session/steps.py``) receives each event last, because it acts: it may wait, close a
checkpoint, or raise. Listeners that only observe (a trace) receive the event before the session's listener, the newest
listener first. Each event is one method, with the same name in ``StepEvents`` and in ``StepListener``.

A layer-wise update changes tensors before ``step()`` is called. So the session's listener does the work of its gate at
the event ``layers_begin``. The event ``gate`` still comes at ``step()``, for all other listeners.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.optimizer import Optimizer

log = logging.getLogger("lightck")
T = TypeVar("T")
_process = object()
"""Identifies this process: a forked child has another object. It is compared at each event, which takes less time than
``os.getpid()``."""


def _forked() -> None:
    global _process
    _process = object()


os.register_at_fork(after_in_child=_forked)


class ClosingEvent(Enum):
    """What can close a step: a step event, a ``next()`` on a session loader, or a call of the user. The value is saved
    in the checkpoint."""

    NEXT = "next"
    """``next()`` on a session loader."""
    END_STEP = "end_step"
    """The user's ``end_step()``."""
    FORWARD = "forward"
    """The root module's next training forward."""
    FLUSH = "flush"
    """The user's ``flush()`` or ``close()``."""
    PRE_STEP = "pre_step"
    """The pre-step hook of the next update, if nothing else has closed the step before."""
    SAVE = "save"
    """No event closed a step: the checkpoint was saved without a session, from tensors that were handed over
    (``saving/``)."""


class ReducedBucket(NamedTuple):
    """A bucket of gradients that the ranks have reduced. begin, end: of the reduction, in nanoseconds of
    CLOCK_MONOTONIC. nbytes: of its gradients."""

    begin: int
    end: int
    nbytes: int


class StepListener:
    """Receives step events. The methods of this class do nothing; a listener overrides the methods that it needs.

    ``index`` is the number of a followed optimizer, counted from 0; a wrapper and the optimizer inside it have the same
    number.
    """

    def before_forward(self, inputs: tuple[object, ...]) -> None:
        """A training forward of the root module is called. ``inputs``: the arguments that torch's forward pre-hook
        receives after the module."""

    def forward_begins(self) -> None:
        """Every listener has returned from ``before_forward``; the forward runs now."""

    def forward_ended(self) -> None:
        """The training forward of the root module returned."""

    def before_step(self, index: int, bypasses_wrapper: bool, has_gradients: bool) -> None:
        """The ``step`` of a followed optimizer is called. ``bypasses_wrapper``: whether a wrapper contains this
        optimizer and the caller is not the wrapper's ``step``. ``has_gradients``: whether the gradients exist already;
        False if a closure computes them inside ``step``."""

    def gate(self) -> None:
        """An update is about to change tensors. The update begins after every listener has returned from ``gate``.
        (A layer-wise update has changed the layers already; see the module's docstring.)"""

    def update_begins(self) -> None:
        """Every listener has returned from ``gate``; the update begins."""

    def gradients_final(self, index: int, optimizer: Optimizer) -> None:
        """The gradients and options that the ``step`` of ``optimizer`` will consume are final: all other pre-step hooks
        have returned, and the closure, if there is one, has returned for the first time. Reported only after
        ``Hooks.report_gradients``, and again if ``step`` calls its closure again."""

    def after_step(self, index: int) -> None:
        """The ``step`` of a followed optimizer made an update and returned."""

    def after_step_hooks(self) -> None:
        """All post-step hooks of the optimizer have returned, also the user's."""

    def skipped_step(self, index: int) -> None:
        """A fused optimizer under GradScaler found an infinity: its ``step`` changed nothing."""

    def step_ended(self, step: int) -> None:
        """The session counted an update. ``step``: the number of updates so far, this one included. With several
        optimizers an update is counted when each of them has stepped."""

    def unknown_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer that the session does not follow is about to step."""

    def layers_begin(self, index: int) -> None:
        """The first layer of an update is about to be updated, inside the backward pass."""

    def layer_updated(self, name: str, begin: int, tensors: Sequence[Tensor]) -> None:
        """A layer was updated: ``tensors`` have their final values of this step. ``begin``: start of the layer's
        update, in nanoseconds of CLOCK_MONOTONIC."""

    def buckets_reduced(self, buckets: Sequence[ReducedBucket]) -> None:
        """All buckets of a backward pass of DistributedDataParallel were reduced. If the update is layer-wise, the
        layers are updated too. ``buckets``: in the order in which their reductions began."""

    def layers_abandoned(self, index: int) -> None:
        """The backward pass raised after some layers were updated. No ``step()`` will complete this update."""


class SessionLock:
    """The reentrant lock of a session, and whether the session is live: open, and in the process that created it.

    Used as a context manager. The training thread is not the only user: another thread, such as a watchdog, may call
    ``flush`` or ``close``. A forked child never acquires the lock, because the thread that held it at the fork does not
    exist in the child and could never release it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process = _process
        self.is_open = True

    @property
    def unchecked_lock(self) -> threading.RLock:
        """The bare lock, without the check for a forked child. For a caller that has just checked ``is_live``."""
        return self._lock

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the process that created the session."""
        return self._process is not _process

    @property
    def is_live(self) -> bool:
        """Whether the session is open and this process created it."""
        return self.is_open and self._process is _process

    def run_if_open(self, work: Callable[[], T]) -> T | None:
        """Call ``work`` under the lock and return its result. If the session is not live, do nothing and return
        None."""
        if not self.is_live:
            return None
        with self:
            return work() if self.is_open else None  # another thread may have closed the session before

    def run_if_free(self, work: Callable[[], object]) -> None:
        """Call ``work`` under the lock, if the session is live and no other thread is inside it. Never waits."""
        if self.is_live and self._lock.acquire(blocking=False):
            try:
                if self.is_open:
                    work()
            finally:
                self._lock.release()

    def __enter__(self) -> SessionLock:
        if not self.is_forked:
            self._lock.acquire()
        return self

    def __exit__(self, *exception: object) -> None:
        if not self.is_forked:
            self._lock.release()


class StepEvents(StepListener):
    """Passes each event to its listeners, under the session's lock, while the session is live.

    The hooks of a model refer to this object, and this object refers to the session. So the session exists as long as
    the model, even if no variable of the script refers to the session.
    """

    def __init__(self, session_lock: SessionLock) -> None:
        self._session_lock = session_lock
        self._has_warned_in_child = False
        self._listeners: tuple[StepListener, ...] = ()
        self._receivers: dict[str, tuple[Callable[..., None], ...]] = {}
        """Name of an event -> the methods of this name of the listeners that override it."""
        self._find_receivers()

    @property
    def listeners(self) -> tuple[StepListener, ...]:
        """The listeners, in the order in which they receive an event."""
        return self._listeners

    def add(self, listener: StepListener) -> None:
        """Add a listener, which will receive each event before the present listeners."""
        self._listeners = (listener, *self._listeners)
        self._find_receivers()

    def remove(self, listener: StepListener) -> None:
        """Remove a listener. If an event is being passed on now, the listener still receives it, and no later event."""
        self._listeners = tuple(one for one in self._listeners if one is not listener)
        self._find_receivers()

    def _find_receivers(self) -> None:
        self._receivers = {
            name: tuple(getattr(one, name) for one in self._listeners if getattr(type(one), name) is not inherited)
            for name, inherited in vars(StepListener).items()
            if not name.startswith("_")
        }

    def _emit(self, event: str, *arguments: object) -> None:
        receivers, lock = self._receivers[event], self._session_lock
        if not receivers:
            return
        if not lock.is_live:
            if event == "before_step" and lock.is_open:
                self._warn_in_child()
            return
        with lock.unchecked_lock:
            if lock.is_open:  # another thread may have closed the session before this one got the lock
                for receive in receivers:
                    receive(*arguments)

    def _warn_in_child(self) -> None:
        """Warn once that this process, a forked child, trains the session's model, and that nothing is saved here."""
        if not self._has_warned_in_child:
            self._has_warned_in_child = True
            log.warning(
                "lightck: the model of a session is trained in a process that was forked after attach(). These updates "
                "are not saved, because the session belongs to the parent process. Fork before attach(), or spawn the "
                "process; and call attach() in the process that trains"
            )

    def before_forward(self, inputs: tuple[object, ...]) -> None:
        self._emit("before_forward", inputs)

    def forward_begins(self) -> None:
        self._emit("forward_begins")

    def forward_ended(self) -> None:
        self._emit("forward_ended")

    def before_step(self, index: int, bypasses_wrapper: bool, has_gradients: bool) -> None:
        self._emit("before_step", index, bypasses_wrapper, has_gradients)

    def gate(self) -> None:
        """Pass on ``gate``, then ``update_begins``."""
        self._emit("gate")
        self.update_begins()

    def update_begins(self) -> None:
        self._emit("update_begins")

    def gradients_final(self, index: int, optimizer: Optimizer) -> None:
        self._emit("gradients_final", index, optimizer)

    def after_step(self, index: int) -> None:
        self._emit("after_step", index)

    def after_step_hooks(self) -> None:
        self._emit("after_step_hooks")

    def skipped_step(self, index: int) -> None:
        self._emit("skipped_step", index)

    def step_ended(self, step: int) -> None:
        self._emit("step_ended", step)

    def unknown_optimizer(self, optimizer: Optimizer) -> None:
        self._emit("unknown_optimizer", optimizer)

    def layers_begin(self, index: int) -> None:
        self._emit("layers_begin", index)

    def layer_updated(self, name: str, begin: int, tensors: Sequence[Tensor]) -> None:
        self._emit("layer_updated", name, begin, tensors)

    def buckets_reduced(self, buckets: Sequence[ReducedBucket]) -> None:
        self._emit("buckets_reduced", buckets)

    def layers_abandoned(self, index: int) -> None:
        self._emit("layers_abandoned", index)
