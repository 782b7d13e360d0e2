"""The file ``POOL.drain``: who may send checkpoints of a pool to its tiers.

    each drain of a training     shares byte 0 with the training's other drains, and locks byte 1 + its own number
    whoever sends by hand        locks byte 0: ``late_drain.py`` writes below the claim of the last training

So a tier has one writer below a claim. The drains of a training that was killed finish before those of the next one
begin, which wait for them for a limited time.

These are open file description locks (``F_OFD_SETLK``), also on a network file system. (No ``flock`` is used beside
them: there it is emulated with locks of byte ranges, so locks of the two kinds would exclude each other.)
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct

_NO_LOCKS = (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""The file system has none."""


class DrainLock:
    """The lock of one drain, or of whoever sends by hand."""

    def __init__(self, pool: str, number: int | None = None) -> None:
        """``number``: the number of the drain among those of its training; None: somebody sends by hand, and nobody
        else may send anything."""
        self._path, self._number, self._fd = f"{pool}.drain", number, -1
        self._is_taken = False

    def take(self) -> bool:
        """Lock the file. Returns False if a lock of another process excludes this one. Even then a drain has its shared
        lock of byte 0, unless somebody sends by hand. Where no file can be made, or the file system has no locks,
        nothing is locked, and the result is True."""
        if self._is_taken:
            return True
        if self._fd < 0:
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
                fd = os.open(self._path, flags, 0o600)
            except OSError:
                return True
            if not self._lock_first_byte(fd):
                os.close(fd)
                return False
            self._fd = fd
        self._is_taken = self._number is None or _try_lock(self._fd, fcntl.F_WRLCK, self._number + 1)
        return self._is_taken

    def _lock_first_byte(self, fd: int) -> bool:
        """Lock byte 0: shared for a drain, exclusive for whoever sends by hand. Returns False if another lock excludes
        this one, or if the file has been removed since it was opened."""
        try:
            kind = fcntl.F_WRLCK if self._number is None else fcntl.F_RDLCK
            return _try_lock(fd, kind, 0) and os.path.samestat(os.fstat(fd), os.stat(self._path, follow_symlinks=False))
        except OSError:
            return False

    def is_another_at_work(self, number: int) -> bool:
        """Whether the drain of this number has the file locked."""
        if self._fd < 0:
            return False
        with contextlib.suppress(OSError):
            found = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _flock_struct(fcntl.F_WRLCK, number + 1))
            return bool(struct.unpack_from("h", found)[0] != fcntl.F_UNLCK)
        return False

    def release(self) -> None:
        """Unlock the file. The last one removes it."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                if _try_lock(self._fd, fcntl.F_WRLCK, 0):
                    os.unlink(self._path)
            os.close(self._fd)
            self._fd, self._is_taken = -1, False


def _try_lock(fd: int, kind: int, byte: int) -> bool:
    """Lock a byte of an open file. Returns False if another one has it locked."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock_struct(kind, byte))
    except OSError as err:
        return err.errno in _NO_LOCKS
    return True


def _flock_struct(kind: int, byte: int) -> bytes:
    """Return a ``struct flock`` for one byte."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0)
