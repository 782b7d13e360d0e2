"""Step events: what a training does, told by torch's hooks to any number of listeners.

    torch's hook -> hooks/hooks.py -> StepEvents -> each StepListener, in order

A session's own listener (``session/steps.py``) stands last, since it acts: it may wait, close a version, or raise.
Those that only look on (a trace) stand before it, the newest first. An event has one method, here and in each listener,
so a search for its name finds who hears it. (A layer-wise update is let through by the session alone, in
``Steps.layers_begin``: others hear ``gate`` at ``step()``.)
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


class Event(Enum):
    """What can close a version, in the order in which a loop meets them."""

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
    """Hears what happens in a training. Each method here does nothing: a listener has those that it needs.

    ``index`` is the position of an optimizer among those that are followed; a wrapper and what it wraps have one.
    """

    def before_forward(self, inputs: tuple[object, ...]) -> None:
        """A training forward of the root module is called. ``inputs``: its arguments, as torch's hook has them."""

    def forward_begins(self) -> None:
        """Every listener heard ``before_forward``, and the forward runs now."""

    def forward_ended(self) -> None:
        """It returned."""

    def before_step(self, index: int, by_hand: bool, has_gradients: bool) -> None:
        """An optimizer's ``step`` is called. ``by_hand``: outside the ``step`` of a wrapper around it;
        ``has_gradients``: no closure makes them inside the step."""

    def gate(self) -> None:
        """Nothing may be updated before this returns."""

    def update_begins(self) -> None:
        """Every listener's gate is passed."""

    def after_step(self, index: int) -> None:
        """An optimizer's ``step`` changed something, and returned."""

    def after_step_hooks(self) -> None:
        """The user's own post-step hooks ran as well."""

    def skipped_step(self, index: int) -> None:
        """A fused optimizer under GradScaler found inf: its ``step`` changed nothing."""

    def step_ended(self, step: int) -> None:
        """The session counted an update. ``step``: updates made. With several optimizers: when each stepped."""

    def unknown_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer steps that is not followed."""

    def layers_begin(self, index: int) -> None:
        """The first layer of an update is about to be updated, inside the backward pass."""

    def layer_updated(self, name: str, begin: int, tensors: Sequence[Tensor]) -> None:
        """These are what they will be after the step. ``begin``: of the layer's update, in ns of CLOCK_MONOTONIC."""

    def layers_forgotten(self, index: int) -> None:
        """The backward pass failed, and no ``step()`` will end its update."""


class Turn:
    """Who may be inside a session: one thread at a time, while it is open, in the process that made it.

    A context manager. A watchdog may flush or close while the training runs; in a forked child nobody else is there,
    and the lock may be held by a thread that does not exist.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self.is_open = True

    @property
    def is_forked(self) -> bool:
        """Whether this process is a child of the one that made the session."""
        return os.getpid() != self._pid

    @property
    def is_live(self) -> bool:
        """Whether the session may do anything: it is open, and this is its own process."""
        return self.is_open and not self.is_forked

    def take(self, work: Callable[[], T]) -> T | None:
        """What ``work`` gives, done in turn while the session is live; else it is not done, and this is None."""
        if not self.is_live:
            return None
        with self:
            return work() if self.is_open else None  # another thread may have closed it meanwhile

    def __enter__(self) -> Turn:
        if not self.is_forked:
            self._lock.acquire()
        return self

    def __exit__(self, *exception: object) -> None:
        if not self.is_forked:
            self._lock.release()


class StepEvents(StepListener):
    """Passes each event on to its listeners, while the session is live, and in its turn.

    The hooks of a model hold this, and so the session: it lives as long as the model, also where nobody keeps what
    ``attach`` returned.
    """

    def __init__(self, turn: Turn) -> None:
        self._turn = turn
        self._listeners: tuple[StepListener, ...] = ()

    @property
    def listeners(self) -> tuple[StepListener, ...]:
        """In the order in which they hear of an event."""
        return self._listeners

    def add(self, listener: StepListener) -> None:
        """It hears everything from now on, before those that are there."""
        self._listeners = (listener, *self._listeners)

    def remove(self, listener: StepListener) -> None:
        """It hears nothing any more; where it is told of an event just now, that is the last one."""
        self._listeners = tuple(one for one in self._listeners if one is not listener)

    def _tell(self, event: Callable[[StepListener], None]) -> None:
        turn = self._turn
        if not turn.is_live:
            return
        with turn:
            if turn.is_open:  # another thread may have closed it meanwhile
                for listener in self._listeners:
                    event(listener)

    def before_forward(self, inputs: tuple[object, ...]) -> None:
        self._tell(lambda one: one.before_forward(inputs))

    def forward_begins(self) -> None:
        self._tell(lambda one: one.forward_begins())

    def forward_ended(self) -> None:
        self._tell(lambda one: one.forward_ended())

    def before_step(self, index: int, by_hand: bool, has_gradients: bool) -> None:
        self._tell(lambda one: one.before_step(index, by_hand, has_gradients))

    def gate(self) -> None:
        """Then the update may begin, which is told too."""
        self._tell(lambda one: one.gate())
        self.update_begins()

    def update_begins(self) -> None:
        self._tell(lambda one: one.update_begins())

    def after_step(self, index: int) -> None:
        self._tell(lambda one: one.after_step(index))

    def after_step_hooks(self) -> None:
        self._tell(lambda one: one.after_step_hooks())

    def skipped_step(self, index: int) -> None:
        self._tell(lambda one: one.skipped_step(index))

    def step_ended(self, step: int) -> None:
        self._tell(lambda one: one.step_ended(step))

    def unknown_optimizer(self, optimizer: Optimizer) -> None:
        self._tell(lambda one: one.unknown_optimizer(optimizer))

    def layers_begin(self, index: int) -> None:
        self._tell(lambda one: one.layers_begin(index))

    def layer_updated(self, name: str, begin: int, tensors: Sequence[Tensor]) -> None:
        self._tell(lambda one: one.layer_updated(name, begin, tensors))

    def layers_forgotten(self, index: int) -> None:
        self._tell(lambda one: one.layers_forgotten(index))
