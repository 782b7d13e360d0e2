"""The thread that makes updates of the replica (``strategy/replica.py``), and the groups of copies that it completes.

The thread runs Python, so it has the priority of the training: a thread of idle priority could hold Python's lock while
the training waits for it. It uses one intra-op thread, and changes this number for no other thread.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from lightck.state.unit_replicas import UnitReplica
from lightck.stats import Meter


class ReplicaGroup:
    """Some units, whose copies become complete together (a ``LateMemory``)."""

    def __init__(self, replicas: Sequence[UnitReplica]) -> None:
        self.replicas = replicas
        self._lock, self._complete = threading.Lock(), threading.Event()
        self._complete.set()
        self._n_left = 0
        """How many units have updates that are not made yet."""
        self._starts: list[Callable[[], object]] = []

    def begin(self, n_units: int) -> None:
        """``n_units`` units of the group get an update now, and ``unit_updated`` will be called for each."""
        with self._lock:
            self._n_left += n_units
            if self._n_left:
                self._complete.clear()

    def unit_updated(self) -> None:
        """The update of one unit was made. Any thread may call this."""
        with self._lock:
            self._n_left -= 1
            if not self._n_left:
                starts, self._starts = self._starts, []
                try:
                    for start in starts:
                        start()
                finally:
                    self._complete.set()

    def start_when_complete(self, start: Callable[[], object]) -> None:
        with self._lock:
            if self._n_left:
                self._starts.append(start)
            else:
                start()

    def wait_complete(self) -> None:
        self._complete.wait()


@dataclass(slots=True)
class _Task:
    works: list[Callable[[], None]]
    done: threading.Event = field(default_factory=threading.Event)


class ReplicaWorker:
    """The thread of one session. It begins with its first work."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._last: _Task | None = None
        self._tasks: SimpleQueue[_Task | None] | None = None
        self._thread: threading.Thread | None = None

    def submit(self, works: list[Callable[[], None]]) -> None:
        """Call these one after the other on the thread. None of them may raise."""
        if self._tasks is None:
            self._tasks = self._begin()
        self._last = _Task(works)
        self._tasks.put(self._last)

    def _begin(self) -> SimpleQueue[_Task | None]:
        tasks: SimpleQueue[_Task | None] = SimpleQueue()
        has_begun, n_threads = threading.Event(), torch.get_num_threads()
        self._thread = threading.Thread(
            target=_run, args=(tasks, has_begun, self._meter), name="lightck-replica", daemon=True
        )
        self._thread.start()
        has_begun.wait()
        torch.set_num_threads(n_threads)  # the new thread has set the number for threads that begin later
        weakref.finalize(self, tasks.put, None).atexit = False
        return tasks

    def wait_idle(self) -> None:
        """Wait until all works have returned."""
        if self._last is not None:
            self._last.done.wait()
            self._last = None

    def end(self) -> None:
        """Wait until all works have returned, and end the thread."""
        self.wait_idle()
        if self._tasks is not None and self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._tasks = self._thread = None


def _run(tasks: SimpleQueue[_Task | None], has_begun: threading.Event, meter: Meter) -> None:
    torch.set_num_threads(1)
    has_begun.set()
    while (task := tasks.get()) is not None:
        cpu = time.thread_time()
        for work in task.works:
            work()
        task.works = []
        # Otherwise this thread would keep gradients alive until the next update.
        work = None  # type: ignore[assignment]
        meter.replica_cpu_seconds += time.thread_time() - cpu
        task.done.set()
        del task
