"""The native engine and medium as Python objects: threads that copy, the mapping they copy into, and jobs.

Thin: handles with an explicit ``close``, statuses turned into errors. All waiting is done in slices without the GIL,
so that signals (Ctrl-C) are served while the training thread waits.
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
JOBS_MAX = 32
"""Jobs that an engine holds at once, ended ones that are not forgotten included."""
THREADS_MAX = 2
_SLICE_MS = 100
_ZEROS = 1 << 20


def check(status: int, what: str) -> None:
    """Raise ``BackgroundError`` unless a native call went well."""
    try:
        _check(status, what)
    except NativeError as err:
        raise BackgroundError(
            f"The pool could not be written: {err}. The versions committed before are intact. Look at the pool's "
            "medium (space, health), then start again with resume=True.",
            err.errno,
        ) from err


class Medium:
    """A writable mapping of a pool; every store goes through its choke point in C."""

    trace_from_start = False
    """Set by tests: record every medium from the moment it is mapped."""

    def __init__(self, fd: int, extents: Extents, tier: int) -> None:
        out = ffi.new("lck_medium **")
        emulation.active_profile()  # a choice that cannot be met fails here
        status = lib.lck_medium_open(fd, native(extents), len(extents), tier, out)
        if status != lib.LCK_OK:
            raise io_error("The pool cannot be mapped into memory", errno_of(status), reason(status))
        self.handle: CData | None = out[0]
        self.nbytes = lib.lck_medium_size(self.handle)
        self.address = lib.lck_medium_address(self.handle)
        if Medium.trace_from_start:
            check(lib.lck_trace_start(self.handle), "starting a trace")

    def store(self, offset: int, data: bytes) -> None:
        """Ordinary store, written back; ordered by the next ``sync``."""
        check(lib.lck_m_store(self.handle, offset, data, len(data)), "storing")
        check(lib.lck_m_flush(self.handle, offset, len(data)), "flushing")

    def zero(self, offset: int, nbytes: int) -> None:
        """Zeros, streamed past the caches; ordered by the next ``sync``."""
        zeros = ffi.new("char[]", min(nbytes, _ZEROS))
        for at in range(offset, offset + nbytes, _ZEROS):
            n = min(_ZEROS, offset + nbytes - at)
            check(lib.lck_m_copy(self.handle, at, zeros, n, ffi.NULL), "writing zeros")

    def sync(self) -> None:
        check(lib.lck_m_sync(self.handle), "making the pool durable")

    def store_commit_record(self, offset: int, store_commit_record: bytes) -> None:
        """One commit line, its first eight bytes last, durable on return."""
        check(lib.lck_m_commit_record(self.handle, offset, store_commit_record), "writing a commit line")

    def close(self) -> None:
        if self.handle is not None:
            lib.lck_medium_close(self.handle)
            self.handle = None


@dataclass(frozen=True, slots=True)
class JobInfo:
    state: int
    nbytes: int
    nbytes_helped: int


def find_openmp(library: str) -> bool:
    """Whether this library, which is loaded already, uses GNU OpenMP."""
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
            raise io_error("The threads that copy versions cannot be started", errno_of(status), reason(status))
        self.handle: CData | None = out[0]
        self._pid = os.getpid()
        self._handle_lock = threading.RLock()
        """Held to ask, and to take the handle away: a signal's handler may ask in the middle of that."""
        self._cpu_seconds = 0.0
        """When it was closed."""

    def run_on(self, processors: frozenset[int]) -> None:
        """From now on the copy threads run on these processors; without any, where this thread may run. Where the
        system does not allow it they stay where they are: that costs speed and nothing else."""
        if processors == self._processors:
            return
        numbers = sorted(processors or os.sched_getaffinity(0))
        status = lib.lck_engine_run_on(self.handle, numbers, len(numbers))
        if status != lib.LCK_OK:
            log.warning("lightck: the copy threads could not be moved next to the pool: %s", reason(status))
            return
        self._processors = processors
        log.info("lightck: copies run on %d processors%s", len(numbers), " next to the pool" if processors else "")

    def set_passive_waiting(self, on: bool) -> bool:
        """Whether OpenMP's threads sleep soon where they wait while a version is copied, instead of spinning. False
        where that cannot be had: without ``find_openmp``, or where no thread more can be started."""
        return lib.lck_engine_passive(self.handle, on) == lib.LCK_OK

    def populate(self, medium: Medium) -> None:
        check(lib.lck_engine_populate(self.handle, medium.handle), "populating the pool")

    def quiesce(self, medium: Medium) -> bool:
        """Wait until no thread touches this mapping any more. False where a job on it has not ended."""
        if self.handle is None or medium.handle is None:
            return True
        return lib.lck_engine_quiesce(self.handle, medium.handle) != lib.LCK_ESTATE

    @property
    def cpu_seconds(self) -> float:
        """CPU time of all copy threads so far."""
        return self.query(lambda handle: lib.lck_engine_cpu_ns(handle) * 1e-9, self._cpu_seconds)

    def query(self, ask: Callable[[CData], T], closed: T) -> T:
        """What any thread may ask at any time: of the handle, while there is one."""
        if self.is_forked:  # another thread may have been asking then
            return closed
        with self._handle_lock:
            return closed if self.handle is None else ask(self.handle)

    @property
    def is_forked(self) -> bool:
        """Whether this is a child of the process whose threads these are."""
        return os.getpid() != self._pid

    def close(self) -> None:
        """Join the threads. In a forked child, where they do not exist, nothing happens."""
        if self.is_forked:
            self.handle = None
            return
        with self._handle_lock:
            self._cpu_seconds = self.cpu_seconds
            handle, self.handle = self.handle, None
        if handle is not None:
            lib.lck_engine_close(handle)


class Job:
    """One version on its way into the pool. ``keep`` holds what its sources live in until the copies ended.

    ``parts``: copies of the same version that were begun before it; it ends only with them.
    """

    def __init__(self, engine: Engine, ticket: int, keep: object, parts: Sequence[Job] = ()) -> None:
        self._engine = engine
        self._ticket = ticket
        self._keep: object = keep
        self.parts = tuple(parts)
        self.is_released = False
        self._why: BaseException | None = None

    def start(self) -> bool:
        """The sources of a job that was begun ``held`` are filled: its copies may begin. False where it was dropped."""
        status = lib.lck_job_start(self._engine.handle, self._ticket, lib.LCK_OK)
        if status in (lib.LCK_EDROPPED, lib.LCK_ESTATE):  # the second: forgotten since
            return False
        check(status, "starting the copies of a version")
        return True

    def give_up(self, why: BaseException) -> None:
        """The sources of a job that was begun ``held`` will never be filled: who waits for it gets ``why`` as the
        reason."""
        self._why = why
        lib.lck_job_start(self._engine.handle, self._ticket, lib.LCK_ESTATE)

    @property
    def needs_sources(self) -> bool:
        """Whether its copies may still read; False also where the job is forgotten already."""
        out = ffi.new("lck_job_info *")
        status = lib.lck_job_info_get(self._engine.handle, self._ticket, out)
        return status == lib.LCK_OK and out.state < lib.LCK_JOB_COPIED

    def release(self) -> None:
        """Allow the commit. All is copied: ``wait(COPIED)`` returned True."""
        if not self.is_released:
            for part in self.parts:
                part.release()
            self.is_released = True
            check(lib.lck_job_release(self._engine.handle, self._ticket), "releasing a version")

    def drop(self) -> None:
        """Give the version up. Before the release only."""
        for part in self.parts:
            if not part.is_released:
                part.drop()
        check(lib.lck_job_drop(self._engine.handle, self._ticket), "dropping a version")

    def abandon(self) -> None:
        """Whatever became of it: nothing of it is under way afterwards, and its entries are free. If it was released it
        may have committed."""
        engine = self._engine.handle
        for job in (*self.parts, self):
            if not job.is_released:
                lib.lck_job_drop(engine, job._ticket)
        for job in (*self.parts, self):
            while job.is_released and lib.lck_job_wait(engine, job._ticket, ENDED, _SLICE_MS) == lib.LCK_ETIMEDOUT:
                continue
        self.forget()

    def wait(self, until: int, timeout: float | None = None, *, pause: Callable[[], None] | None = None) -> bool:
        """Help until copied (``COPIED``) or ended (``ENDED``). False after ``timeout`` seconds.

        ``pause`` is called every tenth of a second; what it raises leaves the job as it is. Raises
        ``BackgroundError`` where the job failed.
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
        out = ffi.new("lck_job_info *")
        check(lib.lck_job_info_get(self._engine.handle, self._ticket, out), "asking for a version's state")
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
        """Whether its line is durable; False also where the job is forgotten already."""
        out = ffi.new("lck_job_info *")
        status = self._engine.query(lambda handle: lib.lck_job_info_get(handle, self._ticket, out), lib.LCK_ESTATE)
        return status == lib.LCK_OK and out.state == lib.LCK_JOB_COMMITTED

    def forget(self) -> None:
        """Free the engine's entry of a job that has ended, and its sources."""
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
            why = f"its tensors did not come from their device ({type(self._why).__name__}: {self._why})"
            cure = "the device (its log, its memory)"
        raise BackgroundError(
            f"A checkpoint could not be written: {why}. The versions committed before are intact; this one was "
            f"never called good. Look at {cure}, then start again with resume=True.",
            code or None,
        ) from self._why


def _together(own: JobInfo, parts: Sequence[JobInfo]) -> JobInfo:
    """A version is copied when all of it is, and has failed when some of it has."""
    state = own.state
    if state <= lib.LCK_JOB_COPIED and any(part.state > lib.LCK_JOB_COMMITTED for part in parts):
        state = lib.LCK_JOB_FAILED
    elif state == lib.LCK_JOB_COPIED and any(part.state < lib.LCK_JOB_COPIED for part in parts):
        state = lib.LCK_JOB_COPYING
    return JobInfo(
        state, own.nbytes + sum(p.nbytes for p in parts), own.nbytes_helped + sum(p.nbytes_helped for p in parts)
    )
