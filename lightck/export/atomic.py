"""Write a file that appears under its name complete and durable, or not at all.

The file is written under a temporary name in the same folder, synced and renamed. Its mode follows the umask. The new
file may replace a regular file that is no pool, and nothing else. The kind of the existing file is checked before the
rename, which would replace even ``/dev/null``.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from lightck.errors import ExportError, ExportExistsError, LightckError
from lightck.failure_recording import FailureRecordingFile
from lightck.pool.storage.backends import is_pool
from lightck.pool.storage.file import sync_folder

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EINVAL)
"""Errors of ``link`` on a file system without hard links."""


def file_path(path: str | os.PathLike[str]) -> str:
    """Return the path as a string. Raises ``TypeError`` for bytes, and ``ExportError`` for a path with a NUL byte."""
    text = os.fspath(path)
    if isinstance(text, bytes):
        raise TypeError(f"The path {text!r} is bytes. Pass a str or a path object: os.fsdecode(path).")
    if "\0" in text:
        raise _error(text, OSError(errno.EINVAL, "it contains a NUL, and no file name can contain one"))
    return text


@contextmanager
def atomic_file(path: str, *, overwrite: bool, temporary: str | None = None) -> Iterator[IO[bytes]]:
    """Open a temporary file for writing. If the block ends without an exception, the file is renamed to ``path``. If
    the block raises, the file is removed.

    ``temporary``: path of the temporary file, in the folder of ``path``; a random name by default. Raises
    ``ExportError``, and ``PoolIOError`` if it cannot be determined whether ``path`` is a pool.
    """
    handled = sys.exc_info()[1]
    refuse_existing(path, overwrite=overwrite)
    temporary = temporary or f"{path}.{secrets.token_hex(4)}.tmp"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        raw = FailureRecordingFile(os.open(temporary, flags, 0o666), "wb")
    except OSError as err:
        raise _error(path, err) from err
    try:
        with io.BufferedWriter(raw) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _give_name(temporary, path, overwrite)
        sync_folder_of(path)
    except LightckError:  # for example, a tensor could not be read from the pool
        raise
    except OSError as err:
        raise _error(path, err) from err
    except RuntimeError as err:  # torch raises one of its own when a write has raised
        interrupt = cause_of(err, handled, KeyboardInterrupt)
        if interrupt is not None:
            raise interrupt from err
        if raw.failure is not None:
            raise _error(path, raw.failure) from err
        raise
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def cause_of(
    err: BaseException, handled: BaseException | None, kinds: type[BaseException] | tuple[type[BaseException], ...]
) -> BaseException | None:
    """Return the error of one of these kinds from which ``err`` comes, or None. ``handled``: the exception that the
    caller of the export is handling (in an ``except`` block), or None. Python makes it the context of every later
    error, but it is not their cause, so the search ends there."""
    found: BaseException | None = err
    while found is not None and found is not handled:
        if isinstance(found, kinds):
            return found
        found = found.__cause__ or found.__context__
    return None


def refuse_existing(path: str, *, overwrite: bool) -> None:
    """Raise ``ExportExistsError`` for a path that must not be replaced. Without ``overwrite`` this is every path that
    exists; with ``overwrite`` it is a pool, or anything else that is no regular file. Raises ``ExportError`` if the
    path cannot be examined."""
    if type(overwrite) is not bool:
        raise TypeError(f"overwrite={overwrite!r} is a {type(overwrite).__name__}. Pass True or False.")
    refuse_irreplaceable(path)
    if not overwrite and os.path.lexists(path):
        raise _exists(path)


def refuse_irreplaceable(path: str) -> None:
    """Raise ``ExportExistsError`` for a path that is never replaced: a pool, or anything else that is no regular file.
    Raises ``ExportError`` if the path cannot be examined."""
    if is_pool(path):
        raise ExportExistsError(
            f"{path!r} is a pool. It may hold the only copy of a training, so no other file replaces it, not even with "
            "overwrite=True. Choose another name; if nobody needs the pool, remove it first."
        )
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as err:  # a file whose kind is unknown is not replaced
        raise _error(path, err) from err
    if stat.S_ISLNK(mode):
        raise ExportExistsError(
            f"{path!r} is a symbolic link, and the export would replace the link, not the file that it points to. "
            f"Name the file itself ({os.path.realpath(path)!r}), or remove the link."
        )
    if not stat.S_ISREG(mode):
        raise ExportExistsError(
            f"{path!r} is not a regular file but a {_kind(mode)}, and an export replaces only regular files. Choose "
            "the name of a file."
        )


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "directory"), (stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket"))
    return next((name for is_of, name in kinds if is_of(mode)), "device")


def _give_name(temporary: str, path: str, overwrite: bool) -> None:
    if not overwrite:
        try:
            os.link(temporary, path)  # unlike a rename, fails if ``path`` was made meanwhile
            return
        except FileExistsError as err:
            raise _exists(path) from err
        except OSError as err:
            if err.errno not in _NO_LINKS:
                raise
    refuse_irreplaceable(path)  # a pool or a device may have been made there meanwhile
    os.rename(temporary, path)


def sync_folder_of(path: str, what: str = "file") -> None:
    """Sync the folder above a path that has just got its name. Raises ``ExportError``."""
    try:
        sync_folder(os.path.dirname(os.path.abspath(path)))
    except OSError as err:
        raise ExportError(
            f"The {what} {path!r} is complete, but the folder above it could not be synced: {err.strerror or err}. "
            f"After a power cut the {what} may be missing, or the one that it replaced may be back. Check the medium "
            "and export again.",
            err.errno,
        ) from err


def _exists(path: str) -> ExportExistsError:
    return ExportExistsError(
        f"The file {path!r} exists. An existing file is overwritten only on request. Choose another name, or pass "
        "overwrite=True."
    )


def _error(path: str, err: OSError) -> ExportError:
    return ExportError(
        f"The file {path!r} could not be written: {err.strerror or err}. No part of it was left behind, and an "
        "existing file is unchanged. Check the folder (space, owner, limits), or choose another folder.",
        err.errno,
    )
