"""``Session.on_commit``: calls functions of the user after commits, on the training thread.

    commit is reported -> CommittedSteps.committed: a pair (callback, step) for each callback
                          (``CommitListener``: inside the pipeline, where nothing may raise or call the session)
    update_begins      -> CommitCallbacks.deliver: the calls; what one raises is raised by ``optimizer.step()``
    flush, end_step    -> the same, at the end of the call
    close              -> CommitCallbacks.deliver_all, before the pool is released

Invariants: a session without callbacks listens to no event. Each pair leads to one call at most: it is taken out before
its callback is called. The pipeline refers to no callback, because the finalizer of the session refers to the pipeline,
and a callback may refer to the session.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable

from torch.utils.hooks import RemovableHandle

from lightck.events import StepEvents, StepListener
from lightck.pool.listener import CommitEvents, CommitListener
from lightck.pool.writer import PoolWriter
from lightck.stats import Meter

log = logging.getLogger("lightck")
Callback = Callable[[int], object]


class CommittedSteps(CommitListener):
    """The committed steps that no callback has received yet."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        """The ids of the callbacks, in the order in which they were added."""
        self.outstanding: deque[tuple[int, int]] = deque()
        """(id of a callback, step), in the order of the calls."""
        self.last: int | None = None
        """The last committed step: a step that is saved twice, as by ``close(done=True)``, is reported once."""

    def committed(self, writer: PoolWriter, step: int) -> None:
        if step != self.last:
            self.last = step
            self.outstanding.extend((one, step) for one in self.ids)


class CommitCallbacks(StepListener):
    """The callbacks of one session. All methods are called under the session's lock."""

    def __init__(self, step_events: StepEvents, commits: CommitEvents, meter: Meter) -> None:
        self._step_events, self._commits, self._meter = step_events, commits, meter
        self._callbacks: OrderedDict[int, Callback] = OrderedDict()
        self._steps = CommittedSteps()
        self._listens = self.is_delivering = False
        """``is_delivering``: whether a callback is running."""

    def add(self, callback: Callback, committed: int | None) -> RemovableHandle:
        """Call ``callback`` after each commit from now on, until the returned handle is removed. ``committed``: the
        newest step whose commit was reported."""
        handle = RemovableHandle(self._callbacks)
        self._callbacks[handle.id] = callback
        self._steps.ids.append(handle.id)
        if not self._listens:
            self._listens, self._steps.last = True, committed
            self._step_events.add(self)
            self._commits.add(self._steps)
        return handle

    def update_begins(self) -> None:
        # Inside a stall (``end_step`` of a loop without optimizers) signals are deferred, and ``end_step`` delivers.
        if self._meter.stall_in_progress is None:
            self.deliver()

    def deliver(self) -> None:
        """Make the outstanding calls, unless one of them is running. What a callback raises is raised here, and the
        calls after it are made the next time."""
        steps = self._steps
        if self.is_delivering or not self._listens:
            return
        self.is_delivering = True
        try:
            while steps.outstanding:
                self._call(*steps.outstanding.popleft())
        finally:
            self.is_delivering = False
        if len(steps.ids) != len(self._callbacks):
            self._forget_removed()

    def deliver_all(self) -> Exception | None:
        """Make the outstanding calls, all of them, and return the first error. Later ones are logged."""
        first: Exception | None = None
        while self._steps.outstanding and not self.is_delivering:
            try:
                self.deliver()
            except Exception as err:
                if first is not None:
                    log.error("lightck: another callback of on_commit() raised at close()", exc_info=err)
                first = first or err
        return first

    def _call(self, key: int, step: int) -> None:
        callback = self._callbacks.get(key)
        if callback is not None:  # not removed since
            with self._meter.work_of_loop():
                callback(step)

    def _forget_removed(self) -> None:
        steps = self._steps
        steps.ids = [one for one in steps.ids if one in self._callbacks]
        if not steps.ids:
            self._listens = False
            self._step_events.remove(self)
            self._commits.remove(steps)
