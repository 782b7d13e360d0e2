"""Step events: torch's hooks report what a training does to any number of listeners.

    torch's hook -> hooks/hooks.py -> StepEvents -> each StepListener, in order

The session's own listener (``session/steps.py``) comes last, because it acts: it may wait, close a checkpoint, or
raise. Listeners that only observe (a trace) come before it, the newest first. Each event is one method, with the same
name here and in each listener.

A layer-wise update changes tensors before ``step()`` is called, so the session passes its gate in ``layers_begin``. The
other listeners receive ``gate`` at ``step()``, as in any other update.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim.optimizer import Optimizer

T = TypeVar("T")
_process = object()
"""Another object in each forked child: faster to compare at each event than the process's number."""


def _forked() -> None:
    global _process
    _process = object()


os.register_at_fork(after_in_child=_forked)


class Event(Enum):
    """The events that can close a checkpoint."""

    NEXT = "next"
    """``next()`` on a session loader."""
    END_STEP = "end_step"
    """The user's ``end_step()``."""
    FORWARD = "forward"
    """The root module's next training forward."""
    FLUSH = "flush"
    """The user's ``flush()`` or ``close()``."""
    PRE_STEP = "pre_step"
    """The pre-step hook of the next update: the last resort."""


class StepListener:
    """Receives step events. The methods here do nothing: a listener overrides those that it needs.

    ``index`` is the number of a followed optimizer; a wrapper and the optimizer inside it share one number.
    """

    def before_forward(self, inputs: tuple[object, ...]) -> None:
        """A training forward of the root module is called. ``inputs``: the arguments of torch's forward pre-hook."""

    def forward_begins(self) -> None:
        """Every listener has returned from ``before_forward``; the forward runs now."""

    def forward_ended(self) -> None:
        """The forward returned."""

    def before_step(self, index: int, bypasses_wrapper: bool, has_gradients: bool) -> None:
        """An optimizer's ``step`` is called. ``bypasses_wrapper``: whether a wrapper contains this optimizer, and
        something other than the wrapper's ``step`` called it. ``has_gradients``: the gradients exist already, because
        no closure computes them inside ``step``."""

    def gate(self) -> None:
        """An update is about to change tensors. It begins after this method has returned."""

    def update_begins(self) -> None:
        """Every listener has returned from ``gate``; the update begins."""

    def after_step(self, index: int) -> None:
        """An optimizer's ``step`` made an update and returned."""

    def after_step_hooks(self) -> None:
        """The user's own post-step hooks have run too."""

    def skipped_step(self, index: int) -> None:
        """A fused optimizer under GradScaler found an infinity: its ``step`` changed nothing."""

    def step_ended(self, step: int) -> None:
        """The session counted an update. ``step``: updates so far. With several optimizers an update is counted when
        each of them has stepped."""

    def unknown_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer that the session does not follow is about to step."""

    def layers_begin(self, index: int) -> None:
        """The first layer of an update is about to be updated, inside the backward pass."""

    def layer_updated(self, name: str, begin: int, tensors: Sequence[Tensor]) -> None:
        """A layer was updated: ``tensors`` have their final values of this step. ``begin``: start of the layer's
        update, in nanoseconds of CLOCK_MONOTONIC."""

    def layers_forgotten(self, index: int) -> None:
        """The backward pass failed, so no ``step()`` will complete this update."""


class SessionLock:
    """Lets one thread at a time into a session, while it is open and in the process that made it.

    A context manager; a thread may enter it again. Another thread, such as a watchdog, may flush or close while the
    training runs. A forked child never takes the lock: the thread that held it does not exist there.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process = _process
        self.is_open = True

    @property
    def of_live_session(self) -> threading.RLock:
        """The bare lock, for a caller that has just checked ``is_live``: entering it does not check this again."""
        return self._lock

    @property
    def is_forked(self) -> bool:
        """Whether this process is a child of the one that made the session."""
        return self._process is not _process

    @property
    def is_live(self) -> bool:
        """Whether the session is open, and this is the process that made it."""
        return self.is_open and self._process is _process

    def run_if_open(self, work: Callable[[], T]) -> T | None:
        """Call ``work`` under the lock and return its result. If the session is not live, do nothing and return
        None."""
        if not self.is_live:
            return None
        with self:
            return work() if self.is_open else None  # another thread may have closed it meanwhile

    def __enter__(self) -> SessionLock:
        if not self.is_forked:
            self._lock.acquire()
        return self

    def __exit__(self, *exception: object) -> None:
        if not self.is_forked:
            self._lock.release()


class StepEvents(StepListener):
    """Passes each event to its listeners, under the session's lock, while the session is live.

    The hooks of a model refer to this object, and it refers to the session: the session lives as long as the model,
    even if nobody keeps what ``attach`` returned.
    """

    def __init__(self, session_lock: SessionLock) -> None:
        self._session_lock = session_lock
        self._listeners: tuple[StepListener, ...] = ()
        self._receivers: dict[str, tuple[Callable[..., None], ...]] = {}
        """Event -> the methods of the listeners that do something at it."""
        self._find_receivers()

    @property
    def listeners(self) -> tuple[StepListener, ...]:
        """The listeners, in the order in which they receive an event."""
        return self._listeners

    def add(self, listener: StepListener) -> None:
        """Add a listener before the present ones."""
        self._listeners = (listener, *self._listeners)
        self._find_receivers()

    def remove(self, listener: StepListener) -> None:
        """Remove a listener. It receives the event that is being passed on now, and none after that."""
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
        if not receivers or not lock.is_live:
            return
        with lock.of_live_session:
            if lock.is_open:  # another thread may have closed it meanwhile
                for receive in receivers:
                    receive(*arguments)

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

    def layers_forgotten(self, index: int) -> None:
        self._emit("layers_forgotten", index)
