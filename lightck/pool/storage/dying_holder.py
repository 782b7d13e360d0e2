"""Whether the process that holds a lock was killed and is yet to end, and what makes it end sooner.

The kernel gives up the locks of a killed process when the last of its threads closes its files, after it has freed
their memory. The copy threads of a training have idle priority: where every processor is busy, one that has some
hundred megabytes to free needs half a minute for what takes milliseconds of computation. A restart that comes at once
finds the pool locked meanwhile, by a process that will never write again.
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
_SECONDS_QUIET = 1.0
_PAUSE_SECONDS = 0.01
_PF_EXITING, _PF_DUMPCORE = 0x4, 0x200
"""Of a thread's flags in procfs (include/linux/sched.h): it ends; it writes the core dump of its process."""
_SIGKILL = 1 << (signal.SIGKILL - 1)
_PROCESS_MRELEASE = 448
"""The number of the system call, the same on every architecture but Alpha. Linux 5.15."""


def is_dying(pid: int) -> bool:
    """Whether no thread of this process will run its program again: each is killed, ending, or gone. False where
    procfs does not say so."""
    try:
        return all(map(_is_thread_dying, _threads(pid)))
    except (OSError, ValueError, IndexError):
        return False


def _threads(pid: int) -> list[str]:
    """Their folders in procfs. Raises ``OSError`` where there is no such process."""
    folder = f"/proc/{pid}/task"
    return [f"{folder}/{tid}" for tid in os.listdir(folder)]


def _is_thread_dying(folder: str) -> bool:
    try:
        with open(f"{folder}/stat", "rb") as f:
            fields = f.read().rpartition(b")")[2].split()
        if fields[0] in b"ZX" or int(fields[6]) & (_PF_EXITING | _PF_DUMPCORE):
            return True
        with open(f"{folder}/status", "rb") as f:
            pending = [line.split()[1] for line in f if line.startswith((b"SigPnd:", b"ShdPnd:"))]
    except (FileNotFoundError, ProcessLookupError):
        return True  # it ended between two questions
    return any(int(mask, 16) & _SIGKILL for mask in pending)


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


def own_dying_process() -> int | None:
    """A process of this user that is dying and has not ended: perhaps the one whose files are closed already, so that
    nothing says whose a lock is."""
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}").st_uid == os.geteuid() and has_threads(int(pid)) and is_dying(int(pid)):
                return int(pid)
    return None


def hasten(pid: int) -> None:
    """Have a dying process end sooner, as far as this process may: its threads get the normal priority, which takes a
    privilege (CAP_SYS_NICE or RLIMIT_NICE), and its memory is freed from here, which takes none. The kernel refuses
    the latter for a process that is not dying."""
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
    """For one holder after another, as long as each is dying, and in all no longer than ``SECONDS_MAX``."""

    def __init__(self, pool_path: str) -> None:
        self._pool_path = pool_path
        self._begin: float | None = None
        self._said = False

    @property
    def seconds(self) -> float:
        """For how long was waited."""
        return 0.0 if self._begin is None else time.monotonic() - self._begin

    def wait_briefly(self, pid: int) -> bool:
        """Wait a moment for the end of this dying process, and help it. False where that is over."""
        if self._begin is None:
            self._begin = time.monotonic()
        if self.seconds > SECONDS_MAX:
            return False
        if self.seconds > _SECONDS_QUIET and not self._said:
            self._said = True
            log.warning(
                "lightck: the process that had %r (pid %d) was killed and has not ended yet. Waiting for it, "
                "%.0f seconds at most",
                self._pool_path,
                pid,
                SECONDS_MAX,
            )
        hasten(pid)
        time.sleep(_PAUSE_SECONDS)
        return True
