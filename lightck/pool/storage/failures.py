"""What the system refused, as lightck's errors: the fact, the errno as the reason, and the cure that fits it.

An error of the medium (``is_medium_error``) says something about the bytes at hand, so a reader goes on to the next copy
or the older version. Any other (no memory, no descriptors) says nothing about them, and nothing is passed over for it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightck.errors import LightckError, PoolIOError, PoolPathError

_OF_MEDIUM = (errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA, errno.EILSEQ, errno.EREMOTEIO)
_MEDIUM = "Look at the health of its medium (dmesg), and keep a copy of the pool before anything else is tried."
_CURES = {
    errno.ENOMEM: "Free memory, or raise the limit (ulimit -v, the container's), and try again.",
    errno.EAGAIN: "End processes or threads, or raise the limit (ulimit -u), and try again.",
    errno.EMFILE: "Close files, or raise the limit (ulimit -n), and try again.",
    errno.ENFILE: "The whole system is out of descriptors: end what holds them, and try again.",
    errno.ENOLCK: "The file system has no locks (left): put the pool on a local one, and try again.",
    errno.ENOSPC: "Free space there, or choose another medium.",
    errno.EDQUOT: "Free space there, raise the quota, or choose another medium.",
    errno.EROFS: "Its file system is mounted read-only: choose another folder, or mount it for writing.",
}
TRANSIENT_ERRNOS = (errno.ENOMEM, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EIO)
"""Errors that do not answer a question, rather than answering it with no."""
PATH_ERRNOS = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENOTEMPTY,
    errno.EBUSY,
    errno.ETXTBSY,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
)
"""Errors about a path, and who may do what there; all others are the system's."""


def is_medium_error(code: int | None) -> bool:
    """Whether an errno says that these bytes cannot be had, rather than that nothing can be had now."""
    return code in _OF_MEDIUM


def io_error(fact: str, code: int | None, reason: str | None = None) -> PoolIOError:
    """``fact`` ends without a stop: "The pool '/a' cannot be read"."""
    why = reason or (os.strerror(code) if code else "for a reason that is not known")
    return PoolIOError(f"{fact}: {why}. {_CURES.get(code or 0, _MEDIUM)}", code)


def too_long(path: str) -> PoolPathError:
    """For ENAMETOOLONG: nobody has such a file, and nobody can make one."""
    return PoolPathError(
        f"The path {path!r} is too long: file systems take names of 255 bytes, and the lock file beside a pool has "
        "'.lock' behind its name. Choose a shorter one."
    )


@contextmanager
def as_io_error(fact: str) -> Iterator[None]:
    """Raise what the system refuses in this block as ``PoolIOError``, memory too; lightck's own errors pass."""
    try:
        yield
    except LightckError:
        raise
    except MemoryError as err:
        raise io_error(fact, errno.ENOMEM) from err
    except OSError as err:
        raise io_error(fact, err.errno, err.strerror) from err


@contextmanager
def undo_on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Where this block fails, undo what was done before it."""
    try:
        yield
    except BaseException:
        undo()
        raise
