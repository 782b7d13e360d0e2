"""One writer per pool: two locks on ``<pool>.lock``, and a registry inside this process.

A record lock (on byte 0) ends with the process, whatever forked children live on, and the kernel tells whose it is.
But it goes when any descriptor of its file is closed: a backup of the folder, made by the training itself, is enough.
The lock of the open file (OFD, on byte 1) stays then. What that one would outlive is a killed trainer, in a DataLoader
worker that has the descriptor too: so a forked child closes it at its start, and who finds it alone waits a moment.

A process that was killed keeps its locks until the last of its threads has ended, and that one may be starved: a holder
that is dying is waited for (``dying``), any other is refused at once.

A device is locked itself, and by an OFD lock alone, since its readers open it too: its folder is not its owner's.

Cleaners of temporary files remove what looks old: a lock on a file that has no name any more keeps nobody out, which is
looked at before each version.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import logging
import os
import stat
import struct
import threading
import time
from dataclasses import dataclass

from lightck.errors import (
    BackgroundError,
    LightckError,
    PoolIOError,
    PoolLockedError,
    PoolNotFoundError,
    PoolPermissionError,
)
from lightck.pool.storage import dying_holder
from lightck.pool.storage.failures import TRANSIENT_ERRNOS, as_io_error, io_error, too_long, undo_on_error

log = logging.getLogger("lightck")
_held: dict[tuple[int, int], str] = {}
# Re-entrant: a collection while it is held may end a forgotten session, which releases its lock.
_guard = threading.RLock()
_descriptors: set[int] = set()
"""Of the locks that are held: a forked child closes them."""
_FLOCK = struct.Struct("hhqqi4x")
_ATTEMPTS = 100
"""To take locks that somebody gave up between our asking for them and our asking who has them, or is about to give up:
the worker of a killed training is yet to close its descriptor."""
_PAUSE_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that has a pool open for writing. ``pid`` is None where it is not visible from here (a container)."""

    pid: int | None
    command: str


class _DyingError(PoolLockedError):
    """The holder was killed, and has not ended yet."""

    def __init__(self, pool_path: str, pid: int) -> None:
        super().__init__(
            f"The pool {pool_path!r} is still locked by pid {pid}, which was killed, and did not end within "
            f"{dying_holder.SECONDS_MAX:.0f} seconds. A pool has one writer. It is starved by what else runs here, or "
            "stuck in a call of the system. Wait until it is gone (ps -L shows its threads), and start again."
        )
        self.pid = pid


def holder_of(pool_path: str) -> Holder | None:
    """Who has this pool open for writing, or None. Takes no lock, and makes no lock file where there is none."""
    path = _lock_target(pool_path)
    with _guard:
        try:
            st = os.stat(path, follow_symlinks=False)
            if (st.st_dev, st.st_ino) in _held:  # opening it here, and closing it, would drop a record lock
                return Holder(os.getpid(), _command_of(os.getpid()))
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            return _holder(fd)
        finally:
            os.close(fd)


def _lock_target(pool_path: str) -> str:
    """What is locked for this pool."""
    return pool_path if _is_device(pool_path) else pool_path + ".lock"


def _is_device(path: str) -> bool:
    try:
        return stat.S_ISCHR(os.stat(path, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _conflict(fd: int) -> int | None:
    """The answer of the kernel: the pid whose record lock keeps a writer out (0: it is not visible from here), -1 where
    it is an OFD lock, or None."""
    probe = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, probe))
    except (OSError, struct.error):
        return None
    return None if kind == fcntl.F_UNLCK else max(int(pid), -1)


def _holder(fd: int) -> Holder | None:
    """Who holds a lock that would keep a writer out."""
    pid = _conflict(fd)
    if pid is None:
        return None
    owner = _ofd_holder(os.fstat(fd)) if pid == -1 else pid
    return Holder(owner, _command_of(owner)) if owner is not None and owner > 0 else Holder(None, "")


def _ofd_holder(st: os.stat_result) -> int | None:
    """An OFD lock has no pid; whose descriptor it is stands in procfs, as far as we may look."""
    file = f"{os.major(st.st_dev):02x}:{os.minor(st.st_dev):02x}:{st.st_ino} "
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            # The main thread of a process that is dying may have ended, and has no descriptors then.
            folders = iter([f"/proc/{pid}", *(f"/proc/{pid}/task/{tid}" for tid in os.listdir(f"/proc/{pid}/task"))])
            descriptors = next(filter(None, map(_descriptors_in, folders)), [])
            if any(_holds(info, file) for info in descriptors):
                return int(pid)
    return None


def _descriptors_in(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return [f"{folder}/fdinfo/{number}" for number in os.listdir(f"{folder}/fdinfo")]
    return []


def _holds(info: str, file: str) -> bool:
    with contextlib.suppress(OSError), open(info) as f:
        return any(line.startswith("lock:") and "OFDLCK" in line and file in line for line in f)
    return False


def _command_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            return f.read(200).replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""


class PoolLock:
    """Holds the lock of one pool from construction until ``release``."""

    def __init__(self, pool_path: str) -> None:
        self.path = _lock_target(pool_path)
        self._is_device = self.path == pool_path
        self._pool_path = pool_path
        self._pid = os.getpid()
        self._fd = -1
        wait = dying_holder.DyingHolderWait(pool_path)
        while not self._try_take(wait):
            pass

    def _try_take(self, wait: dying_holder.DyingHolderWait) -> bool:
        """False where a holder is dying: then a moment was waited, without the guard. Raises its error where that
        takes too long."""
        try:
            with _guard:
                self._refuse_second_session()
                self._take()
            return True
        except _DyingError as err:
            if not wait.wait_briefly(err.pid):
                raise
        return False

    def _take(self) -> None:
        self._fd = self._open()
        _descriptors.add(self._fd)
        with undo_on_error(self._drop):
            self._key = self._lock()
        _held[self._key] = self._pool_path

    def _drop(self) -> None:
        _close(self._fd)
        self._fd = -1

    def _refuse_second_session(self) -> None:
        if self._is_held_here():
            gc.collect()  # the session of a model that nobody has any more ends when the model is collected
        if self._is_held_here():
            raise PoolLockedError(
                f"The pool {self._pool_path!r} is open in another session of this process. A pool has one writer. "
                "Close that session first (session.close(), or leave its `with`). Where only the traceback of an error "
                "holds it, as in a notebook: for session in lightck.sessions.open_sessions(): session.abandon()"
            )

    def _is_held_here(self) -> bool:
        try:
            st = os.stat(self.path, follow_symlinks=False)
        except OSError as err:
            if err.errno in TRANSIENT_ERRNOS:  # not known is not no: another descriptor would take our own lock away
                raise io_error(f"The lock file {self.path!r} cannot be looked at", err.errno, err.strerror) from err
            return False
        return (st.st_dev, st.st_ino) in _held

    def _open(self) -> int:
        if self._is_device:
            return self._open_device()
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(self.path, flags, 0o600)
        except OSError as err:
            if err.errno in (*TRANSIENT_ERRNOS, errno.ENOSPC, errno.EDQUOT):
                raise io_error(f"The lock file {self.path!r} cannot be opened", err.errno, err.strerror) from err
            if err.errno == errno.ENAMETOOLONG:
                raise too_long(self._pool_path) from err
            if err.errno == errno.ENOENT:
                raise PoolNotFoundError(
                    f"No file can be made beside {self._pool_path!r} ({err.strerror}). Its folder is gone, or one of "
                    "the kernel's own, which takes no files (/proc). Choose a path in another folder."
                ) from err
            raise PoolPermissionError(
                f"The lock file {self.path!r} cannot be opened: {err.strerror}. Every writer of a pool locks it. "
                "Give the pool a folder that you can write to."
            ) from err
        with undo_on_error(lambda: os.close(fd)):
            with as_io_error(f"The lock file {self.path!r} cannot be looked at"):
                st = os.fstat(fd)
            if not stat.S_ISREG(st.st_mode):
                raise PoolPermissionError(
                    f"The lock file {self.path!r} is a special file. Only a regular file can be locked. Remove it."
                )
            self._refuse_foreign(st.st_uid)
        return fd

    def _refuse_foreign(self, owner: int) -> None:
        if owner != os.geteuid():
            raise PoolPermissionError(
                f"The lock file {self.path!r} belongs to another user. Someone else could hold the pool. "
                "Choose a pool path in a folder of your own, or remove the file."
            )

    def _open_device(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as err:
            raise PoolPermissionError(
                f"The device {self.path!r} cannot be opened to be locked: {err.strerror}. Every writer of a pool locks "
                "it. Have the device given to you: chown."
            ) from err

    def _lock(self) -> tuple[int, int]:
        for _ in range(_ATTEMPTS):
            if self._try_lock():
                with as_io_error(f"The lock file {self.path!r} cannot be looked at"):
                    st = os.fstat(self._fd)
                return st.st_dev, st.st_ino
            pid = _conflict(self._fd)
            if pid == -1:
                time.sleep(_PAUSE_SECONDS)
            elif pid is not None:
                self._refuse_dying(pid)
                if _conflict(self._fd) == pid:  # else it has ended meanwhile
                    break
        holder = _holder(self._fd)
        if _conflict(self._fd) == -1:
            self._refuse_dying(dying_holder.own_dying_process() if holder is None or holder.pid is None else holder.pid)
        who = (
            "its pid is not visible from here"
            if holder is None or holder.pid is None
            else (f"pid {holder.pid}: {holder.command}")
        )
        raise PoolLockedError(
            f"The pool {self._pool_path!r} is open in another process ({who}). A pool has one writer. "
            "Wait for it, end it, or use another pool; lightck.recover() can read meanwhile."
        )

    def _refuse_dying(self, pid: int | None) -> None:
        if pid is not None and dying_holder.is_dying(pid):
            raise _DyingError(self._pool_path, pid)

    def _try_lock(self) -> bool:
        try:
            if self._is_device:
                _lock_open_file(self._fd, 0, 0)
            else:
                _lock_both(self._fd)
        except OSError as err:
            if err.errno not in (errno.EACCES, errno.EAGAIN):
                raise io_error(f"The pool {self._pool_path!r} cannot be locked", err.errno, err.strerror) from err
            return False
        return True

    def refuse_if_lost(self, *, by_file: bool = False) -> None:
        """Before a slot is written. Where the lock file was removed a new one is made; where another process may have
        the pool since, raises ``BackgroundError``. ``by_file``: whether the lock file is ours is all that is asked, as
        right behind a whole answer."""
        try:
            st = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            self._take_again()
            return
        except OSError:
            return  # not known to be lost, and asked again at the next version
        try:
            is_ours = (st.st_dev, st.st_ino) == self._key
            is_ours = is_ours and (by_file or self._try_lock())  # again: the record lock may have gone
        except PoolIOError:
            return
        if not is_ours:
            raise self._lost()

    def _take_again(self) -> None:
        with _guard:
            old_fd, old_key = self._fd, self._key
            try:
                self._take()
            except LightckError as err:
                self._fd = old_fd
                raise self._lost() from err
            _held.pop(old_key, None)
            _close(old_fd)
        log.warning(
            "lightck: the lock file %r was removed while its pool is in use, and is made again. It keeps other "
            "trainings out: keep cleaners of temporary files away from it",
            self.path,
        )

    def _lost(self) -> BackgroundError:
        return BackgroundError(
            f"The lock file {self.path!r} was removed or replaced while its pool is in use. Another training may have "
            "the pool since, so nothing more is written to it. End the other one, or close this session and attach "
            "to another pool: the training in memory is whole.",
            errno.ENOLCK,
        )

    def release(self) -> None:
        """Give the lock up. A forked child does not hold it, and has closed its descriptor at its start."""
        with _guard:
            if self._fd >= 0 and os.getpid() == self._pid:
                _held.pop(self._key, None)
                self._drop()


def lock_file(path: str) -> int:
    """Lock a file that is being made, as long as the descriptor that this gives is open, and this process lives. Where
    the file system has no such locks nothing is lost: the pool's own lock is held besides."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    _descriptors.add(fd)
    with contextlib.suppress(OSError):
        _lock_open_file(fd, 0, 0)
    return fd


def is_locked(fd: int) -> bool:
    """Whether anybody but the caller has a lock on this file."""
    return _conflict(fd) is not None


def unlock_file(fd: int) -> None:
    """Of ``hold``. A forked child has closed its descriptor at its start, and its number may be another file's."""
    if fd in _descriptors:
        _close(fd)


def _close(fd: int) -> None:
    _descriptors.discard(fd)
    os.close(fd)


def _lock_both(fd: int) -> None:
    """Raises ``OSError``: EAGAIN where one is taken, and then neither is."""
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
    try:
        _lock_open_file(fd, 1, 1)
    except OSError as err:
        if err.errno == errno.EINVAL:
            return  # a sandbox whose kernel has none
        fcntl.lockf(fd, fcntl.LOCK_UN, 1, 0)
        raise


def _lock_open_file(fd: int, start: int, nbytes: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, nbytes, 0))


def _forget_in_child() -> None:
    """A forked child owns none of its parent's locks, and may open pools of its own."""
    global _guard
    _guard = threading.RLock()
    _held.clear()
    while _descriptors:  # an OFD lock is held as long as any process has the descriptor
        os.close(_descriptors.pop())


os.register_at_fork(after_in_child=_forget_in_child)
