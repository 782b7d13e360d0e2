"""The thread that waits for devices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue

from lightck.errors import LightckError
from lightck.pipeline.staging.groups import Group
from lightck.pool.engine import COPIED, Job
from lightck.state.device_transfers import Arrival, DeviceTransfer
from lightck.stats import Meter

_LOOK_SECONDS = 0.1


@dataclass(slots=True)
class _Task:
    groups: list[Group]
    marks: dict[DeviceTransfer, Arrival]
    jobs: list[Job]
    over: threading.Event = field(default_factory=threading.Event)


class Pump:
    """Brings groups to their jobs, in the order in which they were taken."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._last: _Task | None = None
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()  # a finalizer may put while this thread does
        self._thread = threading.Thread(target=self._run, name="lightck-staging", daemon=True)
        self._thread.start()

    def take(self, groups: list[Group], marks: dict[DeviceTransfer, Arrival]) -> None:
        task = _Task(groups, marks, [group.job for group in groups])
        self._last = task
        self._tasks.put(task)

    @property
    def is_here(self) -> bool:
        """Whether this is the thread."""
        return threading.current_thread() is self._thread

    def settle(self, pause: Callable[[], None] | None = None) -> None:
        """Wait, and help with the copies, until nothing that was taken is under way. What failed is for whoever waits
        for its version. ``pause`` is called now and then, and may raise."""
        if self._last is None:
            return
        for job in self._last.jobs:
            with suppress(LightckError):
                job.wait(COPIED, pause=pause)
        while not self._last.over.wait(_LOOK_SECONDS):
            if pause is not None:
                pause()
        self._last = None

    def end(self) -> None:
        """What was taken is brought to its end first."""
        self.settle()
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            cpu = time.thread_time()
            groups, marks = task.groups, task.marks
            for group in groups:
                try:
                    group.tensors[0].transfer.bind_thread()
                    group.bring(marks)
                except BaseException as err:
                    group.drain()
                    group.job.give_up(err)
            task.groups = []
            del groups, group  # tensors are not kept until the next version
            task.over.set()
            del task
            self._meter.staging_cpu_seconds += time.thread_time() - cpu
