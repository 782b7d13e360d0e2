"""The native engine and medium as Python objects: threads that copy, the mapping that they copy into, and jobs.

The classes turn status codes into errors. They own native handles, which an explicit ``close`` frees. A wait consists
of native calls of at most ``_SLICE_MS`` without the GIL. Python handles signals (Ctrl-C) between the calls.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from lightck._native import NativeError, errno_of, ffi, lib, reason
from lightck._native import check as _check
from lightck.errors import BackgroundError
from lightck.pool.storage import emulation
from lightck.pool.storage.extents import Extents, as_c_array
from lightck.pool.storage.failures import io_error

if TYPE_CHECKING:
    from lightck._native import CData

log = logging.getLogger("lightck")
T = TypeVar("T")
COPIED, ENDED = 2, 3
"""What ``Job.wait`` waits for. ``COPIED``: all bytes are copied. ``ENDED``: the job is committed, failed or dropped."""
JOBS_MAX = lib.LCK_JOBS_MAX
"""Maximum number of jobs of an engine. A job counts until ``Job.forget``, even when it has ended."""
THREADS_DEFAULT = 2
"""Default number of copy threads on a machine with more than four processors. With four or fewer it is one."""
THREADS_WITH_DEVICES_MAX = 8
"""The largest default number of copy threads of a training on devices (see ``threads_with_devices``)."""
THREADS_FOR_DIRECT_WRITES = 16
"""Default number of copy threads if blocks are written past the page cache. Such a thread sleeps until the disk has its
block. Then it waits for a free processor, because it has idle priority. With so many threads, one free moment of a
processor is enough to start many writes, and the disk always has some to do. No default is larger than this."""
_SLICE_MS = 100
"""Maximum milliseconds of one native call that waits."""
_ZEROS_NBYTES = 1 << 20
"""Bytes per native call of ``Medium.zero``."""


def check(status: int, what: str) -> None:
    """Raise ``BackgroundError`` unless ``status`` is ``LCK_OK``. ``what``: what the native call did, for the
    message."""
    try:
        _check(status, what)
    except NativeError as err:
        raise BackgroundError(
            f"The pool could not be written: {err}. The checkpoints committed before are intact. Check the pool's "
            "medium (space, health), then start again with resume=True.",
            err.errno,
        ) from err


class Medium:
    """A writable mapping of a pool on its medium (``lck_medium``). Every store goes through the choke point in C
    (native/src/medium.c).

    Each method that writes raises ``BackgroundError`` if the native library fails."""

    trace_from_start = False
    """Tests set this to record all stores of every medium that is mapped afterwards."""

    def __init__(self, fd: int, extents: Extents, kind: int) -> None:
        """Map these extents of the file. ``kind``: ``MEDIUM_...`` of ``durability``. Raises ``PoolIOError``."""
        out = ffi.new("lck_medium **")
        emulation.active_profile()  # raises ImportError if LIGHTCK_EMULATE is invalid
        status = lib.lck_medium_open(fd, as_c_array(extents), len(extents), kind, out)
        if status != lib.LCK_OK:
            raise io_error("The pool cannot be mapped into memory", errno_of(status), reason(status))
        self.handle: CData | None = out[0]
        self.nbytes = lib.lck_medium_size(self.handle)
        self.address = lib.lck_medium_address(self.handle)
        if Medium.trace_from_start:
            check(lib.lck_trace_start(self.handle), "starting a trace")

    def store(self, offset: int, data: bytes) -> None:
        """Store bytes through the caches, and write the cache lines back. The next ``sync`` makes the bytes durable."""
        check(lib.lck_m_store(self.handle, offset, data, len(data)), "storing")
        check(lib.lck_m_flush(self.handle, offset, len(data)), "flushing")

    def zero(self, offset: int, nbytes: int) -> None:
        """Store zeros past the caches. The next ``sync`` makes them durable."""
        zeros = ffi.new("char[]", min(nbytes, _ZEROS_NBYTES))
        for at in range(offset, offset + nbytes, _ZEROS_NBYTES):
            n = min(_ZEROS_NBYTES, offset + nbytes - at)
            check(lib.lck_m_copy(self.handle, at, zeros, n, ffi.NULL), "writing zeros")

    def sync(self) -> None:
        """Make all earlier stores of this thread durable."""
        check(lib.lck_m_sync(self.handle), "making the pool durable")

    def fence(self) -> None:
        """Order all earlier stores of this thread before its later ones, and before a commit record that another thread
        stores afterwards."""
        check(lib.lck_m_fence(self.handle), "ordering stores")

    def store_commit_record(self, offset: int, record: bytes) -> None:
        """Store a commit record of 64 bytes, the first eight bytes last. The record is durable on return."""
        check(lib.lck_m_commit_record(self.handle, offset, record), "writing a commit record")

    def close(self) -> None:
        """Unmap. No job of an engine may be running on this medium. A second call does nothing."""
        if self.handle is not None:
            lib.lck_medium_close(self.handle)
            self.handle = None


class JobInfo(NamedTuple):
    """The progress of a job."""

    state: int
    """``LCK_JOB_...``"""
    nbytes: int
    """Bytes of payload and manifest stored so far."""
    nbytes_helped: int
    """How many of ``nbytes`` were stored by threads that waited for the job."""


def threads_with_devices(n_devices: int) -> int:
    """Return the number of copy threads for a training on one of the ``n_devices`` devices of this machine.

    Such a training leaves most processors idle, and a device delivers bytes faster than two threads can take them: one
    thread takes 7 to 10 GB/s, a device sends 50 GB/s and more. Half of the processors are left to the training, and
    each device may have a training of its own."""
    processors = len(os.sched_getaffinity(0))
    return max(_default_threads(), min(THREADS_WITH_DEVICES_MAX, processors // (2 * max(1, n_devices))))


def _default_threads() -> int:
    return 1 if (os.cpu_count() or 1) <= 4 else THREADS_DEFAULT


def find_openmp(library: str) -> bool:
    """Find the GNU OpenMP that ``library`` (a file name) uses, for ``Engine.set_passive_waiting``. Returns False if the
    library uses no GNU OpenMP, or one without OpenMP 5.0.

    The library must be loaded already. The first GNU OpenMP that is found is used for the whole process: after that,
    every call returns True."""
    return lib.lck_openmp_find(library.encode()) == lib.LCK_OK


class Engine:
    """Copy threads at idle priority, shared by all pools of a session."""

    def __init__(self, threads: int | None = None) -> None:
        """``threads``: number of copy threads; None: see ``THREADS_DEFAULT``. Raises ``PoolIOError``."""
        out = ffi.new("lck_engine **")
        n = threads or _default_threads()
        self.threads = n
        self._processors: frozenset[int] = frozenset()
        """Argument of the last ``run_on`` that succeeded."""
        status = lib.lck_engine_open(n, out)
        if status != lib.LCK_OK:
            raise io_error("The threads that copy checkpoints cannot be started", errno_of(status), reason(status))
        self.handle: CData | None = out[0]
        self._pid = os.getpid()
        self._handle_lock = threading.RLock()
        """Held during each ``query``, so that ``close`` waits for it. Reentrant, because a signal handler may call
        ``query`` on the thread that holds the lock."""
        self._cpu_seconds = 0.0
        """Value of ``cpu_seconds`` when ``close`` was called; 0 before."""

    def run_on(self, processors: frozenset[int]) -> None:
        """Bind the copy threads to these processors; an empty set means the processors of the calling thread.

        If the system refuses, this logs a warning, and the threads keep their affinity: only speed is lost."""
        if processors == self._processors:
            return
        numbers = sorted(processors or os.sched_getaffinity(0))
        status = lib.lck_engine_run_on(self.handle, numbers, len(numbers))
        if status != lib.LCK_OK:
            log.warning(
                "lightck: the copy threads could not be bound to the processors next to the pool's memory, so copies "
                "may be slower: %s",
                reason(status),
            )
            return
        self._processors = processors
        log.info(
            "lightck: copies run on %d processors%s", len(numbers), " next to the pool's memory" if processors else ""
        )

    def set_passive_waiting(self, on: bool) -> bool:
        """Switch passive waiting on or off. While it is on and a checkpoint is being copied, OpenMP's waiting threads
        sleep soon instead of spinning.

        Returns False if passive waiting is impossible, because ``find_openmp`` found no GNU OpenMP, or because no
        further thread can be started."""
        return lib.lck_engine_passive(self.handle, on) == lib.LCK_OK

    def populate(self, medium: Medium) -> None:
        """Let idle copy threads touch every page of the mapping, so that later copies cause no page faults. Returns at
        once. Raises ``BackgroundError``."""
        check(lib.lck_engine_populate(self.handle, medium.handle), "populating the pool")

    def quiesce(self, medium: Medium) -> bool:
        """Stop populating this mapping, wait until no copy thread accesses it, and return True. Returns True as well if
        the engine or the mapping is closed. If a job on the mapping has not ended, returns False at once."""
        if self.handle is None or medium.handle is None:
            return True
        return lib.lck_engine_quiesce(self.handle, medium.handle) != lib.LCK_ESTATE

    @property
    def cpu_seconds(self) -> float:
        """CPU time of all threads of the engine so far, in seconds, also after ``close``."""
        return self.query(lambda handle: lib.lck_engine_cpu_ns(handle) * 1e-9, self._cpu_seconds)

    def query(self, call: Callable[[CData], T], if_closed: T) -> T:
        """Return ``call(handle)``, or ``if_closed`` if the engine is closed or this process is a forked child
        (``is_forked``). Any thread can call this method at any time."""
        if self.is_forked:  # another thread of the parent may have held the lock at the fork
            return if_closed
        with self._handle_lock:
            return if_closed if self.handle is None else call(self.handle)

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the process that owns the copy threads."""
        return os.getpid() != self._pid

    def close(self) -> None:
        """Commit the released jobs, drop the other jobs, and join the threads. In a forked child, which has no copy
        threads, only forget the handle."""
        if self.is_forked:
            self.handle = None
            return
        with self._handle_lock:
            self._cpu_seconds = self.cpu_seconds
            handle, self.handle = self.handle, None
        if handle is not None:
            lib.lck_engine_close(handle)


class Job:
    """The copies and the commit of one checkpoint.

    ``memory``: an object that keeps the memory of the sources alive; the job refers to it until ``forget``. ``parts``:
    jobs that were submitted earlier for the same checkpoint and copy some of its tensors (eager copies, device
    transfers). This job commits only after all of them have ended.
    """

    def __init__(self, engine: Engine, ticket: int, memory: object, parts: Sequence[Job] = ()) -> None:
        self._engine = engine
        self._ticket = ticket
        """The engine's number of this job."""
        self._memory: object = memory
        self.parts = tuple(parts)
        self.is_released = False
        self._why: BaseException | None = None
        """The reason that ``fail`` got."""
        self._info_struct = ffi.new("lck_job_info *")

    def start(self) -> bool:
        """Start the copies of a job that was submitted before its sources were complete (``LCK_HELD``). Call this
        method when they are complete. Returns False if the job was dropped or forgotten. Raises ``BackgroundError``."""
        status = lib.lck_job_start(self._engine.handle, self._ticket, lib.LCK_OK)
        if status in (lib.LCK_EDROPPED, lib.LCK_ESTATE):  # LCK_ESTATE: the job was forgotten
            return False
        check(status, "starting the copies of a checkpoint")
        return True

    def fail(self, why: BaseException) -> None:
        """Fail a job that waits for ``start``, because its sources will never be complete. ``wait`` and ``commit`` then
        raise ``BackgroundError`` with ``why`` as the reason."""
        self._why = why
        lib.lck_job_start(self._engine.handle, self._ticket, lib.LCK_ESTATE)

    @property
    def needs_sources(self) -> bool:
        """Whether a copy of this job may still read its source. False if the job was forgotten."""
        out = ffi.new("lck_job_info *")
        status = lib.lck_job_info_get(self._engine.handle, self._ticket, out)
        return status == lib.LCK_OK and out.state < lib.LCK_JOB_COPIED

    def release(self) -> None:
        """Allow the commit of this job and of its parts. Call it only after ``wait(COPIED)`` returned True. A second
        call does nothing."""
        if not self.is_released:
            for part in self.parts:
                part.release()
            self.is_released = True
            check(lib.lck_job_release(self._engine.handle, self._ticket), "releasing a checkpoint")

    def commit(self) -> None:
        """Release the job, and commit the checkpoint on this thread. Call it only if ``wait(COPIED)`` has returned True
        and all earlier jobs of the engine have ended. Raises ``BackgroundError`` if the job failed."""
        self.is_released = True
        for part in self.parts:
            part.release()
        status = lib.lck_job_commit(self._engine.handle, self._ticket, _SLICE_MS)
        if status == lib.LCK_ETIMEDOUT:
            self.wait(ENDED)
        else:
            self._raise_if_failed(status)

    def drop(self) -> None:
        """Cancel the checkpoint: skip copies that have not begun, and wait for running ones. Allowed only before
        ``release``."""
        for part in self.parts:
            if not part.is_released:
                part.drop()
        check(lib.lck_job_drop(self._engine.handle, self._ticket), "dropping a checkpoint")

    def abandon(self) -> None:
        """End the job in any state: cancel it if it is not released, else wait until it has committed or failed. Then
        free the entries of the job and of its parts in the engine's job table."""
        engine = self._engine.handle
        for job in (*self.parts, self):
            if not job.is_released:
                lib.lck_job_drop(engine, job._ticket)
        for job in (*self.parts, self):
            while job.is_released and lib.lck_job_wait(engine, job._ticket, ENDED, _SLICE_MS) == lib.LCK_ETIMEDOUT:
                continue
        self.forget()

    def wait(self, until: int, timeout: float | None = None, *, pause: Callable[[], None] | None = None) -> bool:
        """Wait until all bytes are copied (``COPIED``) or the job has ended (``ENDED``), and copy on this thread
        meanwhile.

        Returns True when the job has reached ``until``, and False if ``timeout`` seconds pass before. ``pause`` is
        called after every ``_SLICE_MS`` of waiting. An exception that ``pause`` raises ends the wait and leaves the job
        unchanged. Raises ``BackgroundError`` if the job failed or was dropped.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for part in self.parts:
            if not part.wait(COPIED, None if deadline is None else deadline - time.monotonic(), pause=pause):
                return False
        while True:
            left = _SLICE_MS if deadline is None else min(_SLICE_MS, round((deadline - time.monotonic()) * 1000))
            status = lib.lck_job_wait(self._engine.handle, self._ticket, until, max(left, 0))
            if status == lib.LCK_ETIMEDOUT:
                if deadline is not None and time.monotonic() >= deadline:
                    return False
                if pause is not None:
                    pause()
                continue
            self._raise_if_failed(status)
            return True

    def info(self) -> JobInfo:
        """Return the progress of this job and its parts together."""
        out = self._info_struct
        check(lib.lck_job_info_get(self._engine.handle, self._ticket, out), "reading the state of a checkpoint")
        own = JobInfo(out.state, out.nbytes, out.nbytes_helped)
        return own if not self.parts else _combined(own, [part.info() for part in self.parts])

    @property
    def has_ended(self) -> bool:
        """Whether the job has committed, has failed or was dropped."""
        return self.info().state >= lib.LCK_JOB_COMMITTED

    @property
    def has_failed(self) -> bool:
        return self.info().state == lib.LCK_JOB_FAILED

    @property
    def has_committed(self) -> bool:
        """Whether the commit record is durable. False if the job was forgotten."""
        out = ffi.new("lck_job_info *")
        status = self._engine.query(lambda handle: lib.lck_job_info_get(handle, self._ticket, out), lib.LCK_ESTATE)
        return status == lib.LCK_OK and out.state == lib.LCK_JOB_COMMITTED

    def forget(self) -> None:
        """Free the entries that this job, which has ended, and its parts have in the engine's job table. Drop the
        reference to ``memory``."""
        for part in self.parts:
            part.forget()
        lib.lck_job_forget(self._engine.handle, self._ticket)
        self._memory = None

    def _raise_if_failed(self, status: int) -> None:
        """Raise ``BackgroundError`` with the job's failure, unless ``status`` is ``LCK_OK``."""
        if status == lib.LCK_OK:
            return
        out = ffi.new("lck_job_info *")
        lib.lck_job_info_get(self._engine.handle, self._ticket, out)
        code = out.error
        why, to_check = reason(status), "the earlier messages"
        if code:
            why, to_check = os.strerror(code), "the pool's medium (space, health)"
        if self._why is not None:
            why = f"its tensors could not be read from their device ({type(self._why).__name__}: {self._why})"
            to_check = "the device (its log, its memory)"
        raise BackgroundError(
            f"A checkpoint could not be written: {why}. The checkpoints committed before are intact; this one was "
            f"never committed. Check {to_check}, then start again with resume=True.",
            code or None,
        ) from self._why


def _combined(own: JobInfo, parts: Sequence[JobInfo]) -> JobInfo:
    """Return the progress of a checkpoint whose committing job (``own``) has parts. The checkpoint is copied when all
    of its jobs are copied, and failed as soon as a part has failed or was dropped."""
    state = own.state
    if state <= lib.LCK_JOB_COPIED and any(part.state > lib.LCK_JOB_COMMITTED for part in parts):
        state = lib.LCK_JOB_FAILED
    elif state == lib.LCK_JOB_COPIED and any(part.state < lib.LCK_JOB_COPIED for part in parts):
        state = lib.LCK_JOB_COPYING
    return JobInfo(
        state, own.nbytes + sum(p.nbytes for p in parts), own.nbytes_helped + sum(p.nbytes_helped for p in parts)
    )
