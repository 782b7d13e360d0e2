"""Detect that the holder of a lock was killed but has not ended yet, and make it end sooner.

The last thread of a killed process frees the process's memory and then closes the process's files. The kernel releases
the locks when the files are closed. That last thread may be a copy thread of a training, which has idle priority. If
all processors are busy, such a thread may need half a minute, instead of milliseconds, to free some hundred megabytes.
A training that is restarted meanwhile finds the pool locked by a process that will never write again.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import time

log = logging.getLogger("lightck")
SECONDS_MAX = 60.0
"""Maximum seconds of one ``DyingHolderWait``."""
_SECONDS_QUIET = 1.0
"""A wait that takes longer than this logs a warning, once."""
_PAUSE_SECONDS = 0.01
_PF_EXITING, _PF_DUMPCORE = 0x4, 0x200
"""Flags of a thread in procfs (include/linux/sched.h). The thread is exiting, or writes the core dump of its
process."""
_SIGKILL_BIT = 1 << (signal.SIGKILL - 1)
_PROCESS_MRELEASE = 448
"""The number of the system call process_mrelease (Linux 5.15), the same on all architectures except Alpha."""


def is_dying(pid: int) -> bool:
    """Whether every thread of this process is killed, exiting or gone. False if procfs does not show the process."""
    try:
        return all(map(_is_thread_dying, _threads(pid)))
    except (OSError, ValueError, IndexError):
        return False


def _threads(pid: int) -> list[str]:
    """Return the procfs folders of a process's threads. Raises ``OSError`` if there is no such process."""
    folder = f"/proc/{pid}/task"
    return [f"{folder}/{tid}" for tid in os.listdir(folder)]


def _is_thread_dying(folder: str) -> bool:
    """Whether the thread with this procfs folder is killed, exiting or gone. Raises ``OSError``."""
    try:
        with open(f"{folder}/stat", "rb") as f:
            fields = f.read().rpartition(b")")[2].split()
        if fields[0] in b"ZX" or int(fields[6]) & (_PF_EXITING | _PF_DUMPCORE):
            return True
        with open(f"{folder}/status", "rb") as f:
            pending = [line.split()[1] for line in f if line.startswith((b"SigPnd:", b"ShdPnd:"))]
    except (FileNotFoundError, ProcessLookupError):
        return True  # the thread ended between two reads
    return any(int(mask, 16) & _SIGKILL_BIT for mask in pending)


def has_threads(pid: int) -> bool:
    """Whether a thread of this process has not ended yet."""
    try:
        for folder in _threads(pid):
            with open(f"{folder}/stat", "rb") as f:
                if f.read().rpartition(b")")[2].split()[0] not in b"ZX":
                    return True
    except (OSError, IndexError):
        pass
    return False


def dying_process_of_this_user() -> int | None:
    """Return the pid of any dying process of this user, or None. Used if the holder of a lock is unknown, because it
    may be a dying process whose descriptors procfs no longer shows."""
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == os.geteuid() and has_threads(int(pid)) and is_dying(int(pid)):
                return int(pid)
    return None


def hasten(pid: int) -> None:
    """Make a dying process end sooner: give its threads normal priority, and call process_mrelease to free its memory.

    Without CAP_SYS_NICE or RLIMIT_NICE the priority stays unchanged. The kernel frees no memory of a process that is
    not dying."""
    with contextlib.suppress(OSError):
        for folder in _threads(pid):
            tid = int(os.path.basename(folder))
            with contextlib.suppress(OSError):
                if os.sched_getscheduler(tid) == os.SCHED_IDLE:
                    os.sched_setscheduler(tid, os.SCHED_OTHER, os.sched_param(0))
    with contextlib.suppress(OSError):
        fd = os.pidfd_open(pid)
        try:
            ctypes.CDLL(None).syscall(_PROCESS_MRELEASE, fd, 0)
        finally:
            os.close(fd)


class DyingHolderWait:
    """The wait for dying holders of a lock, one after another, for at most ``SECONDS_MAX`` in total."""

    def __init__(self, pool_path: str) -> None:
        self._pool_path = pool_path
        self._begin: float | None = None
        self._has_warned = False

    @property
    def seconds(self) -> float:
        """Seconds since the first call of ``wait_briefly``; 0 before it."""
        return 0.0 if self._begin is None else time.monotonic() - self._begin

    def wait_briefly(self, pid: int) -> bool:
        """Hasten this dying process, sleep ``_PAUSE_SECONDS``, and return True. If the wait has taken more than
        ``SECONDS_MAX``, only return False."""
        if self._begin is None:
            self._begin = time.monotonic()
        if self.seconds > SECONDS_MAX:
            return False
        if self.seconds > _SECONDS_QUIET and not self._has_warned:
            self._has_warned = True
            log.warning(
                "lightck: the process that had the pool %r open (pid %d) was killed and has not ended yet. Waiting for "
                "it, %.0f seconds at most",
                self._pool_path,
                pid,
                SECONDS_MAX,
            )
        hasten(pid)
        time.sleep(_PAUSE_SECONDS)
        return True
