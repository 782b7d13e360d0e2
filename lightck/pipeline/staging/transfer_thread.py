"""The thread that sends groups from devices and waits for their arrival."""

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
from lightck.state.device_transfers import DeviceTransfer, StreamPoint
from lightck.stats import Meter

_POLL_SECONDS = 0.1
"""Seconds from one call of ``pause`` in ``wait_idle`` to the next."""


@dataclass(slots=True)
class _Task:
    """The groups of one checkpoint. ``marks``: for each device, the end of its work at the boundary. ``jobs``: the job
    of each group. ``done``: set when each group has arrived or failed."""

    groups: list[Group]
    marks: dict[DeviceTransfer, StreamPoint]
    jobs: list[Job]
    done: threading.Event = field(default_factory=threading.Event)


class TransferThread:
    """Sends groups and starts their jobs, in the order in which they were submitted."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._last: _Task | None = None
        """The task that was submitted last; None if all transfers are known to have ended."""
        # A SimpleQueue's put is reentrant: a finalizer may end the thread in the middle of another put.
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="lightck-staging", daemon=True)
        self._thread.start()

    def submit(self, groups: list[Group], marks: dict[DeviceTransfer, StreamPoint]) -> None:
        """Pass the groups of one checkpoint to the thread."""
        task = _Task(groups, marks, [group.job for group in groups])
        self._last = task
        self._tasks.put(task)

    @property
    def is_transfer_thread(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

    def wait_idle(self, pause: Callable[[], None] | None = None) -> None:
        """Wait until no transfer is under way, and help to copy meanwhile. The error of a failed transfer is not raised
        here: the pipeline raises it when it waits for the checkpoint. ``pause`` is called repeatedly during the
        wait, and ends it if it raises."""
        if self._last is None:
            return
        for job in self._last.jobs:
            with suppress(LightckError):
                job.wait(COPIED, pause=pause)
        while not self._last.done.wait(_POLL_SECONDS):
            if pause is not None:
                pause()
        self._last = None

    def end(self) -> None:
        """Finish all transfers and end the thread."""
        self.wait_idle()
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            cpu = time.thread_time()
            groups, marks = task.groups, task.marks
            for group in groups:
                try:
                    group.part.devices[0][0].bind_thread()
                    group.send_and_start(marks)
                except BaseException as err:
                    group.wait_for_transfers()
                    group.job.fail(err)
            task.groups = []
            del groups, group  # otherwise this thread would keep tensors alive until the next checkpoint
            task.done.set()
            del task
            self._meter.staging_cpu_seconds += time.thread_time() - cpu
