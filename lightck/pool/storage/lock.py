"""One writer per pool: two kernel locks on ``<pool>.lock``, and a registry inside this process.

A POSIX record lock (on byte 0) ends with its process, even if forked children continue, and the kernel reports the
lock's owner. But the kernel also drops a record lock when the process closes any descriptor of the file, for example
after a read of the file for a backup of the folder. An open file description lock (OFD lock, on byte 1) survives such a
close. But it also survives a killed training if a DataLoader worker has inherited the descriptor. Therefore a forked
child closes the descriptor at its start, and a process that finds only an OFD lock tries again for a moment.

A killed process keeps its locks until its last thread has ended, which can take long on a busy machine. A new process
waits for a dying holder (``dying_holder``). A holder that is not dying makes the new process raise at once.

A pool on a device has no lock file, because the folder of the device belongs to another user. The device itself is
locked, by an OFD lock only: a record lock would be dropped when a reader in the same process closes the device.

Cleaners of temporary files may delete the lock file, and a lock on a deleted file keeps no process out. Therefore
``refuse_if_lost`` checks the file before each checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import logging
import math
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
from lightck.pool.storage.failures import UNKNOWN_ANSWER_ERRNOS, as_io_error, io_error, too_long, undo_on_error

log = logging.getLogger("lightck")
_held: dict[tuple[int, int], str] = {}
"""(device, inode) of each file that this process has locked -> path of the pool."""
# Guards ``_held``. (``lock_file`` and ``unlock_file`` change ``_descriptors`` without it.) Re-entrant: a garbage
# collection on the thread that holds this guard may end a session, which then releases its ``PoolLock``.
_guard = threading.RLock()
_descriptors: set[int] = set()
"""Descriptors of the locks that this process holds. A forked child closes them."""
_FLOCK = struct.Struct("hhqqi4x")
_NBYTES = 2
"""Locks of a pool lie in this many bytes, from the first byte of the file on. (Beyond the end of a pool's file lie the
locks of its readers, ``pool/slot_locks.py``.)"""
_ATTEMPTS = 100
"""Maximum number of attempts to lock. A second attempt can succeed, because the holder may have released the lock just
now, or because the worker of a killed training may close its descriptor in a moment."""
_PAUSE_SECONDS = 0.005
"""Pause between two attempts."""
_CHECK_VALID_SECONDS = 0.001
"""Seconds for which a full check of the lock (``PoolLock.refuse_if_lost``) stays valid. This is less time than
another training needs to open a pool."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that has a pool open for writing. ``pid`` is None if the present process cannot see it, for example
    from inside a container."""

    pid: int | None
    command: str


class _DyingError(PoolLockedError):
    """The holder was killed but has not ended yet."""

    def __init__(self, pool_path: str, pid: int) -> None:
        super().__init__(
            f"The pool {pool_path!r} is still locked by pid {pid}, which was killed, and did not end within "
            f"{dying_holder.SECONDS_MAX:.0f} seconds. A pool has one writer. That process gets no processor time, or "
            "is blocked in a system call. Wait until it has ended (ps -L shows its threads), and start again."
        )
        self.pid = pid


def holder_of(pool_path: str) -> Holder | None:
    """Return the process that has this pool open for writing; None if there is none, or if the lock file cannot be
    read. This function takes no lock and creates no lock file."""
    path = _lock_target(pool_path)
    with _guard:
        try:
            st = os.stat(path, follow_symlinks=False)
            if (st.st_dev, st.st_ino) in _held:  # opening and closing the file would drop the record lock
                return Holder(os.getpid(), _command_of(os.getpid()))
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            return _holder(fd)
        finally:
            os.close(fd)


def _lock_target(pool_path: str) -> str:
    """Return the path of the file that is locked for this pool."""
    return pool_path if _is_device(pool_path) else pool_path + ".lock"


def _is_device(path: str) -> bool:
    try:
        return stat.S_ISCHR(os.stat(path, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _conflict(fd: int) -> int | None:
    """Query the kernel for a lock of another holder on the open file. Returns the pid of the holder of a record lock
    (0: the pid is not visible to this process), -1 for an OFD lock, None if there is no lock or the query fails."""
    probe = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, _NBYTES, 0)
    try:
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, probe))
    except (OSError, struct.error):
        return None
    return None if kind == fcntl.F_UNLCK else max(int(pid), -1)


def _holder(fd: int) -> Holder | None:
    """Return the holder of a lock on the open file, other than this descriptor; None if there is no lock."""
    pid = _conflict(fd)
    if pid is None:
        return None
    owner = _ofd_holder(os.fstat(fd)) if pid == -1 else pid
    return Holder(owner, _command_of(owner)) if owner is not None and owner > 0 else Holder(None, "")


def _ofd_holder(st: os.stat_result) -> int | None:
    """Return the pid of the holder of an OFD lock, for which the kernel reports no pid. The holder is looked for in the
    part of procfs that this process can read; None if it is not found there."""
    file = f"{os.major(st.st_dev):02x}:{os.minor(st.st_dev):02x}:{st.st_ino} "
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            # If the main thread of a dying process has ended, procfs shows descriptors only for the other threads.
            folders = iter([f"/proc/{pid}", *(f"/proc/{pid}/task/{tid}" for tid in os.listdir(f"/proc/{pid}/task"))])
            descriptors = next(filter(None, map(_descriptors_in, folders)), [])
            if any(_holds(info, file) for info in descriptors):
                return int(pid)
    return None


def _descriptors_in(folder: str) -> list[str]:
    """Return the paths of a thread's fdinfo files; [] if they cannot be listed."""
    with contextlib.suppress(OSError):
        return [f"{folder}/fdinfo/{number}" for number in os.listdir(f"{folder}/fdinfo")]
    return []


def _holds(info: str, file: str) -> bool:
    """Whether the descriptor with the fdinfo file ``info`` holds an OFD lock on ``file`` ("major:minor:inode ", as in
    fdinfo)."""
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
    """The lock of one pool, held from construction until ``release``."""

    def __init__(self, pool_path: str) -> None:
        """Raises ``PoolLockedError`` if another session holds the lock, or another ``PoolError``."""
        self.path = _lock_target(pool_path)
        self._is_device = self.path == pool_path
        self._pool_path = pool_path
        self._pid = os.getpid()
        self._fd = -1
        self._checked_at = -math.inf
        wait = dying_holder.DyingHolderWait(pool_path)
        while not self._try_take(wait):
            pass

    def _try_take(self, wait: dying_holder.DyingHolderWait) -> bool:
        """Lock, and return True. If the holder is dying, wait briefly without ``_guard``, and return False. Raises
        ``PoolLockedError`` if the holder is not dying, or if these waits took more than
        ``dying_holder.SECONDS_MAX``."""
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
        """Open and lock the file, and register the lock in ``_held``. The caller holds ``_guard``."""
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
            gc.collect()  # the session of an unreferenced model ends when the model is collected
        if self._is_held_here():
            raise PoolLockedError(
                f"The pool {self._pool_path!r} is open in another session of this process. A pool has one writer. "
                "Close that session first (session.close(), or leave its `with`). If only the traceback of an error "
                "refers to it, as in a notebook: for session in lightck.sessions.open_sessions(): session.abandon()"
            )

    def _is_held_here(self) -> bool:
        try:
            st = os.stat(self.path, follow_symlinks=False)
        except OSError as err:
            # After a transient error this process may hold the lock. Raise, so that the file is not opened a second
            # time: the close of the second descriptor would drop the lock.
            if err.errno in UNKNOWN_ANSWER_ERRNOS:
                raise io_error(f"The lock file {self.path!r} cannot be inspected", err.errno, err.strerror) from err
            return False
        return (st.st_dev, st.st_ino) in _held

    def _open(self) -> int:
        if self._is_device:
            return self._open_device()
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(self.path, flags, 0o600)
        except OSError as err:
            if err.errno in (*UNKNOWN_ANSWER_ERRNOS, errno.ENOSPC, errno.EDQUOT):
                raise io_error(f"The lock file {self.path!r} cannot be opened", err.errno, err.strerror) from err
            if err.errno == errno.ENAMETOOLONG:
                raise too_long(self._pool_path) from err
            if err.errno == errno.ENOENT:
                raise PoolNotFoundError(
                    f"No file can be made beside {self._pool_path!r} ({err.strerror}). Its folder does not "
                    "exist, or belongs to the kernel and takes no files (/proc). Create the folder, or choose a path "
                    "in another folder."
                ) from err
            raise PoolPermissionError(
                f"The lock file {self.path!r} cannot be opened: {err.strerror}. Every writer locks that file. "
                "Put the pool into a folder that you can write to."
            ) from err
        with undo_on_error(lambda: os.close(fd)):
            with as_io_error(f"The lock file {self.path!r} cannot be inspected"):
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
                f"The lock file {self.path!r} belongs to another user. That user may be using the pool. Choose a pool "
                "path in a folder of your own. If no process uses the pool, you may remove the lock file instead."
            )

    def _open_device(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as err:
            raise PoolPermissionError(
                f"The device {self.path!r} cannot be opened to lock it: {err.strerror}. Every writer of a pool locks "
                "its device. Change the owner of the device to you: chown."
            ) from err

    def _lock(self) -> tuple[int, int]:
        """Lock the open file. Returns (device, inode) of the file. Raises ``_DyingError`` or ``PoolLockedError``.

        If another process holds the record lock, this raises at once. If only the OFD lock is held, this tries again
        for a moment, because the worker of a killed training may still hold it."""
        for _ in range(_ATTEMPTS):
            if self._try_lock():
                with as_io_error(f"The lock file {self.path!r} cannot be inspected"):
                    st = os.fstat(self._fd)
                return st.st_dev, st.st_ino
            pid = _conflict(self._fd)
            if pid == -1:
                time.sleep(_PAUSE_SECONDS)
            elif pid is not None:
                self._refuse_dying(pid)
                if _conflict(self._fd) == pid:  # otherwise the process has ended meanwhile
                    break
        holder = _holder(self._fd)
        if _conflict(self._fd) == -1:
            pid = None if holder is None else holder.pid
            self._refuse_dying(dying_holder.dying_process_of_this_user() if pid is None else pid)
        who = (
            "its pid is not visible here"
            if holder is None or holder.pid is None
            else (f"pid {holder.pid}: {holder.command}")
        )
        raise PoolLockedError(
            f"The pool {self._pool_path!r} is open in another process ({who}). A pool has one writer. "
            "Wait for that process, end it, or use another pool; lightck.recover() can read this one meanwhile."
        )

    def _refuse_dying(self, pid: int | None) -> None:
        """Raise ``_DyingError`` if process ``pid`` is dying."""
        if pid is not None and dying_holder.is_dying(pid):
            raise _DyingError(self._pool_path, pid)

    def _try_lock(self) -> bool:
        """Lock the open file. Returns False if another holder has a lock on it. Raises ``PoolIOError``."""
        try:
            if self._is_device:
                _take_ofd_lock(self._fd, 0, _NBYTES)
            else:
                _lock_both(self._fd)
        except OSError as err:
            if err.errno not in (errno.EACCES, errno.EAGAIN):
                raise io_error(f"The pool {self._pool_path!r} cannot be locked", err.errno, err.strerror) from err
            return False
        return True

    def refuse_if_lost(self, *, path_only: bool = False) -> None:
        """Check the lock before a slot is written. If the lock file was removed, create and lock a new one.

        Nothing is checked within ``_CHECK_VALID_SECONDS`` after a full check. ``path_only``: check only that the path
        still names the locked file, which is no full check. Raises ``BackgroundError`` if another process may have
        opened the pool meanwhile."""
        if time.monotonic() - self._checked_at < _CHECK_VALID_SECONDS:
            return
        try:
            st = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            self._take_again()
            return
        except OSError:
            return  # the answer is unknown: checked again at the next checkpoint
        try:
            is_ours = (st.st_dev, st.st_ino) == self._key
            if is_ours and not path_only:
                is_ours = self._try_lock()  # lock again: the kernel may have dropped the record lock
        except PoolIOError:
            return  # the answer is unknown: checked again at the next checkpoint
        if not is_ours:
            raise self._lost()
        if not path_only:
            self._checked_at = time.monotonic()

    def _take_again(self) -> None:
        """Create and lock a new lock file in place of the removed one. Raises ``BackgroundError``."""
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
            "lightck: the lock file %r was removed while its pool is in use, and was created again. The lock file "
            "keeps other trainings out of the pool: exclude the file from cleaners of temporary files",
            self.path,
        )

    def _lost(self) -> BackgroundError:
        return BackgroundError(
            f"The lock file {self.path!r} was removed or replaced while its pool is in use. Another training may be "
            "using the pool now, so nothing more is written to it. End the other training, or close this session and "
            "attach to another pool: the training in memory is intact.",
            errno.ENOLCK,
        )

    def release(self) -> None:
        """Release the lock. In a forked child this does nothing, because the child has closed the descriptor at its
        start."""
        with _guard:
            if self._fd >= 0 and os.getpid() == self._pid:
                _held.pop(self._key, None)
                self._drop()


def lock_file(path: str) -> int:
    """Lock a temporary file. Returns a descriptor that holds the lock until ``unlock_file`` or the end of the process.
    Raises ``OSError``.

    If the file system has no OFD locks, the file stays unlocked, and only the pool's own lock protects it."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    _descriptors.add(fd)
    with contextlib.suppress(OSError):
        _take_ofd_lock(fd, 0, _NBYTES)
    return fd


def is_locked(fd: int) -> bool:
    """Whether a holder other than this descriptor has a lock on the open file."""
    return _conflict(fd) is not None


def unlock_file(fd: int) -> None:
    """Release the lock of ``lock_file``. In a forked child this does nothing: the child closed the descriptor at its
    start, and the number may belong to another file now."""
    if fd in _descriptors:
        _close(fd)


def _close(fd: int) -> None:
    _descriptors.discard(fd)
    os.close(fd)


def _lock_both(fd: int) -> None:
    """Take the record lock and the OFD lock. Raises ``OSError`` (EAGAIN if another holder has one of the two locks).
    After an error, this descriptor holds neither lock."""
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
    try:
        _take_ofd_lock(fd, 1, 1)
    except OSError as err:
        if err.errno == errno.EINVAL:
            return  # a sandbox whose kernel has no OFD locks: the record lock is enough
        fcntl.lockf(fd, fcntl.LOCK_UN, 1, 0)
        raise


def _take_ofd_lock(fd: int, start: int, nbytes: int) -> None:
    """Take an OFD lock on these bytes."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, nbytes, 0))


def _forget_in_child() -> None:
    """Reset the registry in a forked child, which owns none of its parent's locks and may open other pools."""
    global _guard
    _guard = threading.RLock()
    _held.clear()
    while _descriptors:  # an OFD lock exists as long as any process has the descriptor
        os.close(_descriptors.pop())


os.register_at_fork(after_in_child=_forget_in_child)
