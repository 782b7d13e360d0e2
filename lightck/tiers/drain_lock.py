"""One drain per pool."""

from __future__ import annotations

import contextlib
import fcntl
import os


class DrainLock:
    """The file ``POOL.drain``, which a drain locks while it works."""

    def __init__(self, pool: str) -> None:
        self._path, self._fd = f"{pool}.drain", -1

    def take(self) -> bool:
        """Lock the file. Returns False if another drain holds it. Where no file can be made, nothing is locked."""
        if self._fd >= 0:
            return True
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        except OSError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), os.stat(self._path, follow_symlinks=False)):
                self._fd = fd
                return True
        except OSError:
            pass
        os.close(fd)
        return False

    def release(self) -> None:
        """Remove the file, and unlock it."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            os.close(self._fd)
            self._fd = -1
