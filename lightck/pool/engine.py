"""The native engine and medium as Python objects: threads that copy, the mapping they copy into, and jobs.

The classes hold native handles with an explicit ``close`` and turn status codes into errors. All waits run in short
slices without the GIL, so that signals (Ctrl-C) are handled while the training thread waits.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from lightck._native import NativeError, errno_of, ffi, lib, reason
from lightck._native import check as _check
from lightck.errors import BackgroundError
from lightck.pool.storage import emulation
from lightck.pool.storage.extents import Extents, native
from lightck.pool.storage.failures import io_error

if TYPE_CHECKING:
    from lightck._native import CData

log = logging.getLogger("lightck")
T = TypeVar("T")
COPIED, ENDED = 2, 3
"""What ``Job.wait`` waits for: all bytes are copied; the job is committed, failed or dropped."""
JOBS_MAX = 32
"""Jobs that an engine has room for, including those that ended and were not freed by ``Job.forget``."""
THREADS_MAX = 2
_SLICE_MS = 100
_ZEROS = 1 << 20


def check(status: int, what: str) -> None:
    """Raise ``BackgroundError`` unless a native call succeeded; ``what`` says what it did."""
    try:
        _check(status, what)
    except NativeError as err:
        raise BackgroundError(
            f"The pool could not be written: {err}. The checkpoints committed before are intact. Check the pool's "
            "medium (space, health), then start again with resume=True.",
            err.errno,
        ) from err


class Medium:
    """A writable mapping of a pool; every store goes through its choke point in C (native/src/medium.c)."""

    trace_from_start = False
    """Set by tests: record all stores of every medium from the moment it is mapped."""

    def __init__(self, fd: int, extents: Extents, tier: int) -> None:
        out = ffi.new("lck_medium **")
        emulation.active_profile()  # an invalid LIGHTCK_EMULATE fails here
        status = lib.lck_medium_open(fd, native(extents), len(extents), tier, out)
        if status != lib.LCK_OK:
            raise io_error("The pool cannot be mapped into memory", errno_of(status), reason(status))
        self.handle: CData | None = out[0]
        self.nbytes = lib.lck_medium_size(self.handle)
        self.address = lib.lck_medium_address(self.handle)
        if Medium.trace_from_start:
            check(lib.lck_trace_start(self.handle), "starting a trace")

    def store(self, offset: int, data: bytes) -> None:
        """Store bytes through the caches and write the cache lines back; the next ``sync`` makes them durable."""
        check(lib.lck_m_store(self.handle, offset, data, len(data)), "storing")
        check(lib.lck_m_flush(self.handle, offset, len(data)), "flushing")

    def zero(self, offset: int, nbytes: int) -> None:
        """Store zeros, bypassing the caches; the next ``sync`` makes them durable."""
        zeros = ffi.new("char[]", min(nbytes, _ZEROS))
        for at in range(offset, offset + nbytes, _ZEROS):
            n = min(_ZEROS, offset + nbytes - at)
            check(lib.lck_m_copy(self.handle, at, zeros, n, ffi.NULL), "writing zeros")

    def sync(self) -> None:
        check(lib.lck_m_sync(self.handle), "making the pool durable")

    def store_commit_record(self, offset: int, record: bytes) -> None:
        """Store a commit record, its first eight bytes last; it is durable on return."""
        check(lib.lck_m_commit_record(self.handle, offset, record), "writing a commit record")

    def close(self) -> None:
        if self.handle is not None:
            lib.lck_medium_close(self.handle)
            self.handle = None


@dataclass(frozen=True, slots=True)
class JobInfo:
    """What the engine says about a job. ``nbytes_helped``: how many of the bytes a waiting thread copied."""

    state: int
    nbytes: int
    nbytes_helped: int


def find_openmp(library: str) -> bool:
    """Find the GNU OpenMP that this library uses, for ``Engine.set_passive_waiting``. Returns False if it uses none.

    The library must be loaded already. The first GNU OpenMP that is found serves the whole process."""
    return lib.lck_openmp_find(library.encode()) == lib.LCK_OK


class Engine:
    """Copy threads at idle priority, shared by all pools of a session."""

    def __init__(self, threads: int | None = None) -> None:
        out = ffi.new("lck_engine **")
        n = threads or (1 if (os.cpu_count() or 1) <= 4 else THREADS_MAX)
        self.threads = n
        self._processors: frozenset[int] = frozenset()
        status = lib.lck_engine_open(n, out)
        if status != lib.LCK_OK:
            raise io_error("The threads that copy checkpoints cannot be started", errno_of(status), reason(status))
        self.handle: CData | None = out[0]
        self._pid = os.getpid()
        self._handle_lock = threading.RLock()
        """Guards the handle against a concurrent ``close``; reentrant, because a signal handler may query too."""
        self._cpu_seconds = 0.0
        """CPU time of the copy threads at ``close``."""

    def run_on(self, processors: frozenset[int]) -> None:
        """Bind the copy threads to these processors; an empty set means those of the calling thread.

        If the system refuses, the threads keep their affinity, a warning is logged, and only speed is lost."""
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
        """Make OpenMP's waiting threads sleep soon instead of spinning while a checkpoint is copied, or stop doing so.

        Returns False if this is impossible: ``find_openmp`` found no GNU OpenMP, or no further thread can be
        started."""
        return lib.lck_engine_passive(self.handle, on) == lib.LCK_OK

    def populate(self, medium: Medium) -> None:
        check(lib.lck_engine_populate(self.handle, medium.handle), "populating the pool")

    def quiesce(self, medium: Medium) -> bool:
        """Stop populating this mapping, and wait until no thread touches it. Returns False at once, without a wait, if
        a job on it has not ended."""
        if self.handle is None or medium.handle is None:
            return True
        return lib.lck_engine_quiesce(self.handle, medium.handle) != lib.LCK_ESTATE

    @property
    def cpu_seconds(self) -> float:
        """CPU time of all copy threads so far."""
        return self.query(lambda handle: lib.lck_engine_cpu_ns(handle) * 1e-9, self._cpu_seconds)

    def query(self, ask: Callable[[CData], T], closed: T) -> T:
        """Return ``ask(handle)``, or ``closed`` once the engine is closed. Any thread may call this at any time."""
        if self.is_forked:  # another thread of the parent may have held the lock at the fork
            return closed
        with self._handle_lock:
            return closed if self.handle is None else ask(self.handle)

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that owns the copy threads."""
        return os.getpid() != self._pid

    def close(self) -> None:
        """Join the threads. In a forked child, which has no copy threads, this does nothing."""
        if self.is_forked:
            self.handle = None
            return
        with self._handle_lock:
            self._cpu_seconds = self.cpu_seconds
            handle, self.handle = self.handle, None
        if handle is not None:
            lib.lck_engine_close(handle)


class Job:
    """The copies and the commit of one checkpoint; ``keep`` keeps the memory of its sources alive until they end.

    ``parts``: jobs that were submitted earlier for the same checkpoint and copy some of its tensors (eager copies,
    device transfers). This job ends only after all of them.
    """

    def __init__(self, engine: Engine, ticket: int, keep: object, parts: Sequence[Job] = ()) -> None:
        self._engine = engine
        self._ticket = ticket
        self._keep: object = keep
        self.parts = tuple(parts)
        self.is_released = False
        self._why: BaseException | None = None
        self._info_struct = ffi.new("lck_job_info *")

    def start(self) -> bool:
        """Let the copies of a ``held`` job begin: its sources are complete. Returns False if the job was dropped."""
        status = lib.lck_job_start(self._engine.handle, self._ticket, lib.LCK_OK)
        if status in (lib.LCK_EDROPPED, lib.LCK_ESTATE):  # ESTATE: the job was forgotten
            return False
        check(status, "starting the copies of a checkpoint")
        return True

    def give_up(self, why: BaseException) -> None:
        """Fail a ``held`` job whose sources will never be complete; whoever waits for it gets ``why`` as the reason."""
        self._why = why
        lib.lck_job_start(self._engine.handle, self._ticket, lib.LCK_ESTATE)

    @property
    def needs_sources(self) -> bool:
        """Whether copies of this job may read their sources later; False also if the job was forgotten."""
        out = ffi.new("lck_job_info *")
        status = lib.lck_job_info_get(self._engine.handle, self._ticket, out)
        return status == lib.LCK_OK and out.state < lib.LCK_JOB_COPIED

    def release(self) -> None:
        """Allow the commit. Call it after ``wait(COPIED)`` returned True."""
        if not self.is_released:
            for part in self.parts:
                part.release()
            self.is_released = True
            check(lib.lck_job_release(self._engine.handle, self._ticket), "releasing a checkpoint")

    def commit(self) -> None:
        """Release the job, and commit on this thread. Call it after ``wait(COPIED)`` returned True, if no earlier job
        is open. Raises ``BackgroundError``."""
        self.is_released = True
        for part in self.parts:
            part.release()
        status = lib.lck_job_commit(self._engine.handle, self._ticket, _SLICE_MS)
        if status == lib.LCK_ETIMEDOUT:
            self.wait(ENDED)
        else:
            self._raise(status)

    def drop(self) -> None:
        """Cancel the checkpoint. Allowed before ``release`` only."""
        for part in self.parts:
            if not part.is_released:
                part.drop()
        check(lib.lck_job_drop(self._engine.handle, self._ticket), "dropping a checkpoint")

    def abandon(self) -> None:
        """Cancel the job in any state, wait until nothing of it runs, and free its entries. If it was released, it may
        commit nevertheless."""
        engine = self._engine.handle
        for job in (*self.parts, self):
            if not job.is_released:
                lib.lck_job_drop(engine, job._ticket)
        for job in (*self.parts, self):
            while job.is_released and lib.lck_job_wait(engine, job._ticket, ENDED, _SLICE_MS) == lib.LCK_ETIMEDOUT:
                continue
        self.forget()

    def wait(self, until: int, timeout: float | None = None, *, pause: Callable[[], None] | None = None) -> bool:
        """Copy on this thread too, until all is copied (``COPIED``) or the job ended (``ENDED``).

        Returns False after ``timeout`` seconds. ``pause`` is called every tenth of a second; an exception from it
        leaves the job unchanged. Raises ``BackgroundError`` if the job failed.
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
            self._raise(status)
            return True

    def info(self) -> JobInfo:
        out = self._info_struct
        check(lib.lck_job_info_get(self._engine.handle, self._ticket, out), "reading the state of a checkpoint")
        own = JobInfo(out.state, out.nbytes, out.nbytes_helped)
        return own if not self.parts else _together(own, [part.info() for part in self.parts])

    @property
    def has_ended(self) -> bool:
        return self.info().state >= lib.LCK_JOB_COMMITTED

    @property
    def has_failed(self) -> bool:
        return self.info().state == lib.LCK_JOB_FAILED

    @property
    def has_committed(self) -> bool:
        """Whether the commit record is durable; False also if the job was forgotten."""
        out = ffi.new("lck_job_info *")
        status = self._engine.query(lambda handle: lib.lck_job_info_get(handle, self._ticket, out), lib.LCK_ESTATE)
        return status == lib.LCK_OK and out.state == lib.LCK_JOB_COMMITTED

    def forget(self) -> None:
        """Free the engine's entry of a job that has ended, and the references to its sources."""
        for part in self.parts:
            part.forget()
        lib.lck_job_forget(self._engine.handle, self._ticket)
        self._keep = None

    def _raise(self, status: int) -> None:
        if status == lib.LCK_OK:
            return
        out = ffi.new("lck_job_info *")
        lib.lck_job_info_get(self._engine.handle, self._ticket, out)
        code = out.error
        why, cure = os.strerror(code) if code else reason(status), "the pool's medium (space, health)"
        if self._why is not None:
            why = f"its tensors could not be read from their device ({type(self._why).__name__}: {self._why})"
            cure = "the device (its log, its memory)"
        raise BackgroundError(
            f"A checkpoint could not be written: {why}. The checkpoints committed before are intact; this one was "
            f"never committed. Check {cure}, then start again with resume=True.",
            code or None,
        ) from self._why


def _together(own: JobInfo, parts: Sequence[JobInfo]) -> JobInfo:
    """Combine the jobs of one checkpoint: it is copied once all of them are, and failed once one of them is."""
    state = own.state
    if state <= lib.LCK_JOB_COPIED and any(part.state > lib.LCK_JOB_COMMITTED for part in parts):
        state = lib.LCK_JOB_FAILED
    elif state == lib.LCK_JOB_COPIED and any(part.state < lib.LCK_JOB_COPIED for part in parts):
        state = lib.LCK_JOB_COPYING
    return JobInfo(
        state, own.nbytes + sum(p.nbytes for p in parts), own.nbytes_helped + sum(p.nbytes_helped for p in parts)
    )
