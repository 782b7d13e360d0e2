"""The temporary file in which a new pool is made, beside the path to which it is renamed once it is complete.

The name of the temporary file depends only on the pool's name, so that an attach finds the file that a crash left. The
file is locked until it is renamed. If another program has made a file of this name, that file is not touched, and no
new pool can be made.
"""

from __future__ import annotations

import os
import re
import stat
from hashlib import blake2b

from lightck.errors import PoolPermissionError
from lightck.pool.storage import lock
from lightck.pool.storage.failures import PATH_ERRNOS, UNKNOWN_ANSWER_ERRNOS, io_error, undo_on_error

_NAME = re.compile(r"\.lightck-[0-9a-f]{16}\.new")


def path_of(path: str) -> str:
    """Return the path of the temporary file. Its name is a hash of the pool's name without the folder, because the
    folder may be mounted elsewhere later."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".lightck-{blake2b(os.fsencode(name), digest_size=8).hexdigest()}.new")


def make(path: str) -> tuple[int, int]:
    """Create an empty temporary file. Returns two descriptors: one to write the file, and one that locks the file until
    ``lock.unlock_file``.

    Raises ``PoolPermissionError`` if a file of this name exists, and ``OSError``."""
    new = path_of(path)
    try:
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError as err:
        raise PoolPermissionError(
            f"The pool {path!r} cannot be made: its temporary file {new!r} exists, and is in use by another process, "
            "belongs to another user, or is a link or no plain file. It was not touched. Remove it if nobody needs it, "
            "or choose another name for the pool."
        ) from err
    with undo_on_error(lambda: os.unlink(new)), undo_on_error(lambda: os.close(fd)):
        os.fchmod(fd, 0o600)
        return fd, lock.lock_file(new)


def remove_stale(path: str) -> None:
    """Remove the temporary file that a crash left at this path. The caller holds the pool's lock."""
    new = path_of(path)
    if _is_left_by_crash(new):
        remove(new)


def remove_all_stale(folder: str) -> None:
    """Remove the temporary files that crashes left in a folder, of pools of any name. The caller knows that nobody
    makes a pool in the folder now."""
    for name in os.listdir(folder):
        new = os.path.join(folder, name)
        if _NAME.fullmatch(name) and _is_left_by_crash(new):
            remove(new)


def _is_left_by_crash(path: str) -> bool:
    """Whether this is a regular file of this user that no process has locked. False for a symbolic link. Raises
    ``PoolIOError``."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as err:
        if err.errno in UNKNOWN_ANSWER_ERRNOS:
            raise io_error(f"The file {path!r} cannot be inspected", err.errno, err.strerror) from err
        return False
    try:
        st = os.fstat(fd)
        is_own = stat.S_ISREG(st.st_mode) and st.st_uid == os.geteuid() and st.st_nlink == 1
        return is_own and not lock.is_locked(fd)
    finally:
        os.close(fd)


def remove(path: str) -> bool:
    """Remove a file. Returns False if there was no file. Raises ``PoolPermissionError`` or ``PoolIOError``."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    except OSError as err:
        if err.errno not in PATH_ERRNOS:
            raise io_error(f"{path!r} cannot be removed", err.errno, err.strerror) from err
        raise PoolPermissionError(
            f"{path!r} cannot be removed: {err.strerror}. This file is in the way of a new pool. Remove it yourself, "
            "or choose another path."
        ) from err
    return True
