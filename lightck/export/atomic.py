"""A file that appears under its name complete and durable, or not at all.

It is written under another name in the same folder, synced and renamed. Its mode is what the umask leaves, as for any
file that a user makes. Only a file is ever replaced, and never a pool: a rename over ``/dev/null`` would succeed.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from lightck.errors import ExportError, ExportExistsError
from lightck.failure_recording import FailureRecordingFile
from lightck.pool.storage.backends import is_pool
from lightck.pool.storage.file import sync_folder

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EINVAL)


def file_path(path: str | os.PathLike[str]) -> str:
    """The path as a string. Raises ``TypeError`` for bytes, whose like no other path here is, and ``ExportError``."""
    text = os.fspath(path)
    if isinstance(text, bytes):
        raise TypeError(f"The path {text!r} is bytes. Pass a str or a path object: os.fsdecode(path).")
    if "\0" in text:
        raise _error(text, OSError(errno.EINVAL, "it has a NUL in it, which no name of a file can have"))
    return text


@contextmanager
def atomic_file(path: str, *, overwrite: bool, temporary: str | None = None) -> Iterator[IO[bytes]]:
    """A file to write into; leaving the block without an exception gives it its name.

    ``temporary`` is the name until then, in the same folder; a random one by default. Raises ``ExportError``, and
    ``PoolIOError`` where it cannot be seen now whether a pool lies there.
    """
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
        sync_folder(os.path.dirname(os.path.abspath(path)))
    except ExportError:
        raise
    except OSError as err:
        raise _error(path, err) from err
    except RuntimeError as err:
        if raw.failure is not None:
            raise _error(path, raw.failure) from err
        raise
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def refuse_existing(path: str, *, overwrite: bool) -> None:
    """Raises ``ExportExistsError`` for what must not be replaced: what is no file or is a pool, whatever is told; a
    file, unless told to."""
    if type(overwrite) is not bool:
        raise TypeError(f"overwrite={overwrite!r} is a {type(overwrite).__name__}. Pass True or False.")
    refuse_irreplaceable(path)
    if not overwrite and os.path.lexists(path):
        raise _exists(path)


def refuse_irreplaceable(path: str) -> None:
    if is_pool(path):
        raise ExportExistsError(
            f"{path!r} is a pool. It may hold all that there is of a training, so no other file replaces it, not even "
            "where files may be overwritten. Choose another name; if nobody needs the pool, remove it first."
        )
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as err:  # what cannot be looked at may be anything
        raise _error(path, err) from err
    if stat.S_ISLNK(mode):
        raise ExportExistsError(
            f"{path!r} is a symbolic link, and a file would replace the link, not what it leads to. "
            f"Name the file itself ({os.path.realpath(path)!r}), or remove the link."
        )
    if not stat.S_ISREG(mode):
        raise ExportExistsError(
            f"{path!r} is no file but a {_kind(mode)}, which a file would replace for everybody who uses it. "
            "Choose the name of a file."
        )


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "directory"), (stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket"))
    return next((name for is_of, name in kinds if is_of(mode)), "device")


def _give_name(temporary: str, path: str, overwrite: bool) -> None:
    if not overwrite:
        try:
            os.link(temporary, path)  # fails where somebody made the file meanwhile; a rename would replace it
            return
        except FileExistsError as err:
            raise _exists(path) from err
        except OSError as err:
            if err.errno not in _NO_LINKS:
                raise
    refuse_irreplaceable(path)  # it may have come meanwhile
    os.rename(temporary, path)


def _exists(path: str) -> ExportExistsError:
    return ExportExistsError(
        f"The file {path!r} exists. It is not overwritten unasked. Choose another name, or say overwrite=True."
    )


def _error(path: str, err: OSError) -> ExportError:
    return ExportError(
        f"The file {path!r} could not be written: {err.strerror or err}. Nothing is left of it, and a file that was "
        "there before is as it was. Look at its folder (space, owner, limits), or choose another.",
        err.errno,
    )
