"""The folder that a pool is made in: others who can rename files there could swap the pool for another file."""

from __future__ import annotations

import errno
import os
import stat

from lightck.errors import PoolNotFoundError, PoolPermissionError
from lightck.pool.storage.failures import TRANSIENT, io_error, too_long

_UNMAPPED = "/proc/sys/kernel/overflowuid"
_ALL = "4294967295"


def checked_folder(path: str) -> str:
    """The folder of a pool path; an error where it is missing or where others could swap the pool."""
    folder = os.path.dirname(path)
    try:
        st = os.stat(folder)
    except OSError as err:
        if err.errno in TRANSIENT:
            raise io_error(f"The folder of the pool {path!r} cannot be looked at", err.errno, err.strerror) from err
        if err.errno == errno.ENAMETOOLONG:
            raise too_long(path) from err
        raise PoolNotFoundError(
            f"The pool {path!r} cannot be made: its folder {folder!r} is not there ({err.strerror}). lightck makes "
            "the file, not the folder. Create the folder first."
        ) from err
    if not stat.S_ISDIR(st.st_mode):
        raise PoolNotFoundError(
            f"The pool {path!r} cannot be made: {folder!r} is not a folder. Choose a path in an existing folder."
        )
    _refuse_shared(folder, st)
    return folder


def _refuse_shared(folder: str, st: os.stat_result) -> None:
    """A folder of one's own that its group can write to passes: where every user has a group, that is the default."""
    is_own, is_sticky = st.st_uid == os.geteuid(), bool(st.st_mode & stat.S_ISVTX)
    others = stat.S_IWOTH if is_own else stat.S_IWOTH | stat.S_IWGRP
    if not st.st_mode & others or (is_sticky and (is_own or _is_root(st.st_uid))):
        return
    if is_sticky:
        raise PoolPermissionError(
            f"The folder {folder!r} can be changed by others and belongs to user {st.st_uid}, whom its sticky bit does "
            "not stop: they could swap the pool for another file. Use a folder of your own."
        )
    cure = f"chmod o-w {folder}, or use another folder" if is_own else "Use a folder of your own, or chmod +t this one"
    raise PoolPermissionError(
        f"The folder {folder!r} can be changed by others and has no sticky bit. Anybody could swap the pool for "
        f"another file. {cure}."
    )


def _is_root(owner: int) -> bool:
    """In a user namespace the system's root may be nobody in particular, and so is the owner of its /tmp."""
    if owner == 0:
        return True
    try:
        with open(_UNMAPPED) as unmapped, open("/proc/self/uid_map") as mapped:
            return owner == int(unmapped.read()) and mapped.read().split()[2:] != [_ALL]
    except (OSError, ValueError):
        return False
