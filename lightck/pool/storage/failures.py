"""Turn errors of the operating system into lightck's errors: the fact, the errno as the reason, and a fitting cure.

A medium error (``is_medium_error``) concerns the bytes that were read, so a reader tries the next copy or an older
checkpoint. Any other error (out of memory, no descriptors) says nothing about the bytes, and is no reason to reject a
copy.
"""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightck.errors import LightckError, PoolIOError, PoolPathError, PoolTruncatedError, is_lack_of_memory

_MEDIUM_ERRNOS = (errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA, errno.EILSEQ, errno.EREMOTEIO)
_MEDIUM_CURE = "Check the health of its medium (dmesg), and make a copy of the pool before you try anything else."
_CURES = {
    errno.ENOMEM: "Free memory, or raise the limit (ulimit -v, or that of the container), and try again.",
    errno.EAGAIN: "End processes or threads, or raise the limit (ulimit -u), and try again.",
    errno.EMFILE: "Close files, or raise the limit (ulimit -n), and try again.",
    errno.ENFILE: "The whole system is out of file descriptors: end programs that have many files open, and try again.",
    errno.ENOLCK: "The file system supports no locks, or has none left: use a local file system, and try again.",
    errno.ENOSPC: "Free space on its file system, or choose another medium.",
    errno.EDQUOT: "Free space on its file system, raise the quota, or choose another medium.",
    errno.EROFS: "Its file system is mounted read-only: choose another folder, or mount it for writing.",
}
UNKNOWN_ANSWER_ERRNOS = (errno.ENOMEM, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EIO)
"""Errors after which the answer to a question about a file is unknown. After any other error the answer is "no"."""
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
"""Errors that concern a path and its permissions. All other errors concern the system."""


def is_medium_error(code: int | None) -> bool:
    """Whether an errno says that the medium cannot deliver these bytes. Other errors say nothing about the bytes."""
    return code in _MEDIUM_ERRNOS


def io_error(fact: str, code: int | None, reason: str | None = None) -> PoolIOError:
    """Return a ``PoolIOError``. ``fact``: a sentence without a full stop, such as "The pool '/a' cannot be read".
    ``code``: the errno. ``reason``: the text for the errno; None: the system's text."""
    why = reason or (os.strerror(code) if code else "unknown reason")
    return PoolIOError(f"{fact}: {why}. {_CURES.get(code or 0, _MEDIUM_CURE)}", code)


def too_long(path: str) -> PoolPathError:
    """Return the error for ENAMETOOLONG."""
    return PoolPathError(
        f"The path {path!r} is too long: file systems allow names of 255 bytes, and the name of the lock file beside a "
        "pool is longer by '.lock'. Choose a shorter one."
    )


@contextmanager
def as_io_error(fact: str) -> Iterator[None]:
    """Convert an ``OSError`` of this block, or a lack of memory, into a ``PoolIOError``. lightck's own errors pass
    through unchanged."""
    try:
        yield
    except LightckError:
        raise
    except (MemoryError, RuntimeError) as err:
        if not is_lack_of_memory(err):
            raise
        raise io_error(fact, errno.ENOMEM) from err
    except OSError as err:
        raise io_error(fact, err.errno, err.strerror) from err


@contextmanager
def undo_on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo`` if this block raises."""
    try:
        yield
    except BaseException:
        undo()
        raise


def truncated_error(path: str, nbytes_before: int | None, nbytes: int) -> PoolTruncatedError:
    """Return the error for a file that does not have the length with which it was made. ``nbytes_before``: that length
    (None: unknown, but more than ``nbytes``)."""
    cure = "Use a complete copy."
    if nbytes_before is not None and nbytes_before < nbytes:
        cut = f"truncate --size={nbytes_before} {shlex.quote(path)}"
        cure += f" If bytes were only added at its end, remove them: {cut}"
    return PoolTruncatedError(
        f"The pool {path!r} was made with {'more' if nbytes_before is None else nbytes_before} bytes and has {nbytes} "
        f"now. It was truncated, extended or copied in part. {cure}"
    )
