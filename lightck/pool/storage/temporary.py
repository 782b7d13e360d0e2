"""The file in which a new pool is made, beside the path whose name it gets once it is whole.

Its own name is one that nobody chooses, and the same at each attach of a pool: so what a crash left is found by the
next one. It is locked while it is made. Whatever else has this name was not made here: it stays, and is in the way.
"""

from __future__ import annotations

import os
import stat
from hashlib import blake2b

from lightck.errors import PoolPermissionError
from lightck.pool.storage import lock
from lightck.pool.storage.failures import PATH_ERRNOS, TRANSIENT_ERRNOS, io_error, undo_on_error


def name_of(path: str) -> str:
    """Of the pool's name alone: its folder may be mounted elsewhere by the next attach."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".lightck-{blake2b(os.fsencode(name), digest_size=8).hexdigest()}.new")


def make(path: str) -> tuple[int, int]:
    """Descriptors of a new, empty file: one to write it, one that keeps it locked (``lock.unlock_file``). Raises
    ``OSError`` too."""
    name = name_of(path)
    try:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError as err:
        raise PoolPermissionError(
            f"The pool {path!r} cannot be made: {name!r}, under which it is made first, is there, and no crashed "
            "training of yours left it. It is not touched. Remove it if nobody needs it, or choose another name for "
            "the pool."
        ) from err
    with undo_on_error(lambda: os.unlink(name)), undo_on_error(lambda: os.close(fd)):
        os.fchmod(fd, 0o600)
        return fd, lock.lock_file(name)


def remove_stale(path: str) -> None:
    """Remove what a crash left while a pool was made at this path. The caller holds the pool's lock."""
    name = name_of(path)
    if _is_left(name):
        removed(name)


def _is_left(name: str) -> bool:
    """Whether a file was made here, by this user, and nobody works on it. Links are not followed."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as err:
        if err.errno in TRANSIENT_ERRNOS:
            raise io_error(f"The file {name!r} cannot be looked at", err.errno, err.strerror) from err
        return False
    try:
        st = os.fstat(fd)
        is_own = stat.S_ISREG(st.st_mode) and st.st_uid == os.geteuid() and st.st_nlink == 1
        return is_own and not lock.is_locked(fd)
    finally:
        os.close(fd)


def removed(path: str) -> bool:
    """False where nothing was there."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    except OSError as err:
        if err.errno not in PATH_ERRNOS:
            raise io_error(f"{path!r} cannot be removed", err.errno, err.strerror) from err
        raise PoolPermissionError(
            f"{path!r} cannot be removed: {err.strerror}. It is in the way of a new pool. Remove it yourself, or "
            "choose another path."
        ) from err
    return True
