"""A pool as a plain file on tmpfs, a disk, or persistent memory with a file system (fsdax).

No symbolic link is followed. Owner, mode, kind and size are read from the descriptor, not from the path. A pool of
another user can be read if its mode permits it, and is never written. A new pool is allocated in full under a temporary
name beside its path (``temporary``). So a full file system causes an error at creation and not a SIGBUS later. No pool
is created in a folder where another user could replace the pool by renaming files.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator

from lightck._native import NativeError, check, lib
from lightck.errors import (
    NoSpaceError,
    NotAPoolError,
    PoolError,
    PoolNotFoundError,
    PoolPathError,
    PoolPermissionError,
    PoolTruncatedError,
)
from lightck.pool.format.structures import MAGIC, POOL_NBYTES_MIN, SUPERBLOCK_OFFSETS
from lightck.pool.storage import durability, extents, lock, temporary
from lightck.pool.storage.backend import Container
from lightck.pool.storage.extents import Extents
from lightck.pool.storage.failures import (
    PATH_ERRNOS,
    UNKNOWN_ANSWER_ERRNOS,
    as_io_error,
    io_error,
    is_medium_error,
    too_long,
    undo_on_error,
)
from lightck.pool.storage.pmdk_file import is_pmdk

log = logging.getLogger("lightck")
_HUGE_PAGE, _SLICE = 2 << 20, 256 << 20
"""Bytes of a huge page, and of one native call that allocates huge pages."""
_HUGE_SECONDS = 2.0
"""When this number of seconds has passed, no further slice of a file gets huge pages."""
_OVERFLOW_UID_FILE = "/proc/sys/kernel/overflowuid"
"""Contains the uid that the kernel shows for an owner who has no uid in this user namespace."""
_N_ALL_UIDS = "4294967295"
"""Number of uids in the uid map of the initial user namespace, where every owner has a uid."""
_IS_FOLDER = (
    "{path!r} is a directory. A pool is one regular file. Name a file in that directory: add '/run.pool', or the name "
    "of a pool in it."
)
_IS_SPECIAL = (
    "{path!r} is a pipe, a socket or another special file. A pool is one regular file. Name a regular file, or a path "
    "that does not exist yet."
)
_IS_DEVICE = (
    "{path!r} is a device. A pool of this backend is one regular file. Make a file system on the device and name a "
    'file there; a device-dax device (/dev/dax0.0) can hold a pool without a file system, with backend="auto".'
)


class FileContainer:
    """An open pool file; see ``Container``."""

    def __init__(self, path: str, fd: int, nbytes: int, lock_fd: int | None = None) -> None:
        """``lock_fd``: a descriptor that locks a new file while it has its temporary name; None for an existing
        file."""
        self.path = path
        self.fd = fd
        self.nbytes = self.file_nbytes = nbytes  # length of the pool, length of the file
        self.extents: Extents = ((0, nbytes),)
        self.lock_fd = lock_fd
        self._pid = os.getpid()

    @property
    def reads_from(self) -> tuple[int, Extents]:
        return self.fd, self.extents

    def read(self, offset: int, nbytes: int) -> bytes:
        return extents.read(self.fd, self.extents, offset, nbytes)

    def publish(self) -> None:
        assert self.lock_fd is not None, "published once"
        with _creation_errors(self.path):
            os.fsync(self.fd)
            os.rename(temporary.path_of(self.path), self.path)
            self._unlock()
            sync_folder(os.path.dirname(self.path))

    def is_current(self) -> bool:
        if self.lock_fd is not None:
            return True
        try:
            there = os.stat(self.path, follow_symlinks=False)
            here = os.fstat(self.fd)
        except OSError as err:
            return err.errno in UNKNOWN_ANSWER_ERRNOS  # the answer is unknown: checked again at the next checkpoint
        is_same_file = (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
        return is_same_file and here.st_size >= self.file_nbytes

    def close(self) -> None:
        if self.fd < 0:
            return
        if self.lock_fd is not None and os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                os.unlink(temporary.path_of(self.path))
        self._unlock()
        os.close(self.fd)
        self.fd = -1

    def _unlock(self) -> None:
        if self.lock_fd is not None:
            lock.unlock_file(self.lock_fd)
            self.lock_fd = None


class FileBackend:
    """Plain files; see ``Backend``."""

    name = "file"

    def claims(self, path: str) -> bool:
        return self.recognises(path)

    def recognises(self, path: str) -> bool:
        return ask_file(path, _has_magic)

    def probe(self, path: str) -> durability.Durability:
        folder = checked_folder(path)
        return durability.probe(folder, path if _is_regular(path) else None)

    def remove_stale(self, path: str) -> None:
        temporary.remove_stale(path)

    def discard(self, path: str) -> None:
        if temporary.remove(path):
            with as_io_error(f"The pool {path!r} was removed, but its folder cannot be synced"):
                sync_folder(os.path.dirname(path))

    def create(self, path: str, nbytes: int) -> Container:
        return self.create_file(path, nbytes)

    def create_file(self, path: str, nbytes: int) -> FileContainer:
        """Create a file of ``nbytes`` under its temporary name; ``publish`` renames the file. Raises as
        ``Backend.create``."""
        checked_folder(path)
        temporary.remove_stale(path)
        with _creation_errors(path):
            fd, lock_fd = temporary.make(path)
        container = FileContainer(path, fd, nbytes, lock_fd)
        with undo_on_error(container.close):
            with _creation_errors(path):
                _allocate(path, fd, nbytes)
            if durability.probe(os.path.dirname(path), temporary.path_of(path)).is_persistent_memory:
                _prewrite(path, fd, nbytes)
        return container

    def open(self, path: str, *, write: bool) -> Container:
        if ask_file(path, is_pmdk):
            raise NotAPoolError(
                f"The file {path!r} is a PMDK pool, not a pool in a plain file. Nothing was changed. Use "
                'backend="auto" or "pmdk", or another path.'
            )
        return open_checked(path, write=write)


def open_checked(path: str, *, write: bool, nbytes_min: int = POOL_NBYTES_MIN) -> FileContainer:
    """Open an existing file, and check its kind, mode, number of hard links and size; for writing also its owner.
    Raises ``PoolError``."""
    try:
        fd = _open(path, os.O_RDWR if write else os.O_RDONLY)
    except OSError as err:
        raise _cannot_open(path, err, write) from err
    with undo_on_error(lambda: os.close(fd)), as_io_error(f"The pool {path!r} cannot be opened"):
        return FileContainer(path, fd, _checked_size(path, fd, nbytes_min, write))


def ask_file(path: str, question: Callable[[int], bool]) -> bool:
    """Return ``question(descriptor)`` for the file at this path; False if there is no readable file at the path.

    Raises ``PoolIOError`` if the answer is unknown (out of memory, no descriptors)."""
    try:
        fd = _open(path, os.O_RDONLY)
    except OSError as err:
        _refuse_unknown(path, err)
        return False
    try:
        return question(fd)
    except OSError as err:
        if not is_medium_error(err.errno):
            _refuse_unknown(path, err)
        return False
    finally:
        os.close(fd)


def _refuse_unknown(path: str, err: OSError) -> None:
    """Raise ``PoolIOError`` if the error is in ``UNKNOWN_ANSWER_ERRNOS``."""
    if err.errno in UNKNOWN_ANSWER_ERRNOS:
        raise io_error(f"The file {path!r} cannot be read", err.errno, err.strerror) from err


def _has_magic(fd: int) -> bool:
    return any(_has_magic_at(fd, offset) for offset in SUPERBLOCK_OFFSETS)


def _has_magic_at(fd: int, offset: int) -> bool:
    try:
        return os.pread(fd, len(MAGIC), offset) == MAGIC
    except OSError as err:
        if not is_medium_error(err.errno):
            raise
        return False  # the other superblock is enough


def _open(path: str, flags: int) -> int:
    # O_NONBLOCK: opening a FIFO must not hang.
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)


def _checked_size(path: str, fd: int, nbytes_min: int, write: bool) -> int:
    """Check an open file for ``open_checked``, and return its size in bytes. Raises ``PoolError``."""
    st = os.fstat(fd)
    if stat.S_ISCHR(st.st_mode) or stat.S_ISBLK(st.st_mode):
        raise PoolPathError(_IS_DEVICE.format(path=path))
    if not stat.S_ISREG(st.st_mode):
        raise PoolPathError((_IS_FOLDER if stat.S_ISDIR(st.st_mode) else _IS_SPECIAL).format(path=path))
    if write and st.st_uid != os.geteuid():
        raise PoolPermissionError(
            f"The pool {path!r} belongs to user {st.st_uid}, not to you. A pool that others can write is not trusted. "
            "It can be read: lightck.recover(). To continue training from it, copy it to a file of your own."
        )
    if st.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PoolPermissionError(
            f"The pool {path!r} can be written by others (mode {stat.S_IMODE(st.st_mode):o}). A pool that others can "
            f"write is not trusted. If you trust its content: chmod 600 {path}"
        )
    if st.st_nlink > 1:
        raise PoolPermissionError(
            f"The pool {path!r} has {st.st_nlink} hard links. A program could change the pool under another name. "
            "Remove the other links."
        )
    if st.st_size < nbytes_min:
        if os.pread(fd, len(MAGIC), 0) == MAGIC:
            raise PoolTruncatedError(
                f"The pool {path!r} has only {st.st_size} bytes, fewer than any pool. It was truncated or copied in "
                "part. Use a complete copy."
            )
        what = "empty" if st.st_size == 0 else f"only {st.st_size} bytes long"
        raise NotAPoolError(
            f"The file {path!r} is {what}: it is not a lightck pool. Nothing was changed. Choose another path, or "
            "remove the file if nobody needs it."
        )
    return st.st_size


def _allocate(path: str, fd: int, nbytes: int) -> None:
    """Allocate the whole file, on tmpfs in huge pages if possible. Raises ``NoSpaceError`` or ``OSError``."""
    huge_nbytes = _allocate_huge_pages(fd, nbytes)
    log.debug("lightck: %d of %d bytes of %r are in huge pages", huge_nbytes, nbytes, path)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as err:
        if err.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
            raise
        beside = " beside the present one (it stays until the new one is complete)" if os.path.lexists(path) else ""
        needs = f"The pool {path!r} needs {nbytes / 1e6:,.1f} MB{beside}"
        if err.errno == errno.EFBIG:
            raise NoSpaceError(
                f"{needs}, more than the largest file that this process or this file system allows ({err.strerror}). "
                "Raise the process's limit (ulimit -f), choose another file system, or use fewer slots."
            ) from err
        raise NoSpaceError(
            f"{needs} and {_free_space_text(fd)} ({err.strerror}). A pool is allocated in full when it is made. Free "
            "space, choose another medium, or use fewer slots."
        ) from err


def _allocate_huge_pages(fd: int, nbytes: int) -> int:
    """Allocate huge pages for a new file on tmpfs. Returns the number of bytes in huge pages.

    The file is allocated in slices of ``_SLICE`` bytes. Between two slices Ctrl-C is handled and ``_HUGE_SECONDS`` is
    checked, because a GB can take seconds in a virtual machine whose host must find the memory first. After
    ``_HUGE_SECONDS`` the rest of the file gets small pages from ``_allocate``. That is fast, because the kernel zeroes
    a small page only at its first write. A file that does not fit gets no huge pages, because they would use up the
    free space before ``_allocate`` refuses the file."""
    try:
        space = os.fstatvfs(fd)
    except OSError:
        return 0  # huge pages are optional, so this failure is no error
    if space.f_blocks and space.f_bavail * space.f_frsize < nbytes:
        return 0
    threads, made, deadline = len(os.sched_getaffinity(0)), 0, time.monotonic() + _HUGE_SECONDS
    for at in range(0, nbytes, _SLICE):
        slice_nbytes = min(_SLICE, nbytes - at)
        done = lib.lck_huge(fd, at, slice_nbytes, threads)
        made += done
        is_page_missing = done + _HUGE_PAGE <= slice_nbytes  # the kernel grants no more huge pages
        if is_page_missing or time.monotonic() > deadline:
            break
    return made


def _free_space_text(fd: int) -> str:
    """Return the end of a sentence that states the free space. What this file has allocated counts as free."""
    try:
        space, allocated = os.fstatvfs(fd), os.fstat(fd).st_blocks * 512
    except OSError:
        return "its file system does not have that much"
    return f"its file system has {(space.f_bavail * space.f_frsize + allocated) / 1e6:,.1f} MB left"


def _prewrite(path: str, fd: int, nbytes: int) -> None:
    """Write zeros over the allocated space, so that a later store through a MAP_SYNC mapping need not wait for the file
    system's journal. Raises ``PoolError``."""
    try:
        check(lib.lck_prewrite(fd, nbytes), "writing zeros")
    except NativeError as err:
        raise _cannot_write(path, err) from err


def _is_regular(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _cannot_open(path: str, err: OSError, write: bool) -> Exception:
    if err.errno == errno.ENOENT or err.errno == errno.ENOTDIR:
        return PoolNotFoundError(
            f"There is no pool at {path!r}. No pool was made there, or the pool was removed. Check the path; "
            "lightck.attach() makes a pool."
        )
    if err.errno == errno.ELOOP:
        return PoolPathError(
            f"{path!r} is a symbolic link. Links are not followed, because a user who can change a link could redirect "
            "the pool. Name the file that the link points to."
        )
    if err.errno in (errno.EISDIR, errno.ENXIO):
        return PoolPathError((_IS_FOLDER if err.errno == errno.EISDIR else _IS_SPECIAL).format(path=path))
    if err.errno == errno.ENAMETOOLONG:
        return too_long(path)
    what = "written" if write else "read"
    if err.errno not in PATH_ERRNOS:
        return io_error(f"The pool {path!r} cannot be {what}", err.errno, err.strerror)
    return PoolPermissionError(
        f"The pool {path!r} cannot be {what}: {err.strerror}. Check its owner and mode, and that the file system is "
        "not mounted read-only."
    )


@contextlib.contextmanager
def _creation_errors(path: str) -> Iterator[None]:
    try:
        yield
    except PoolError:
        raise
    except OSError as err:
        raise _cannot_write(path, err) from err


def _cannot_write(path: str, err: OSError) -> Exception:
    if err.errno not in PATH_ERRNOS:
        return io_error(f"The pool {path!r} cannot be made", err.errno, err.strerror)
    return PoolPermissionError(
        f"The pool {path!r} cannot be made: {err.strerror or err}. lightck writes a new file in the same folder and "
        "renames that file. Choose a folder that you can write to."
    )


def sync_folder(folder: str) -> None:
    """Make the names in a folder durable. Raises ``OSError``."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# -- the folder ----------------------------------------------------------------------------------------------


def checked_folder(path: str) -> str:
    """Return the folder of a pool path. Raises ``PoolError`` if it is missing or if other users could replace the
    pool."""
    folder = os.path.dirname(path)
    try:
        st = os.stat(folder)
    except OSError as err:
        if err.errno in UNKNOWN_ANSWER_ERRNOS:
            raise io_error(f"The folder of the pool {path!r} cannot be inspected", err.errno, err.strerror) from err
        if err.errno == errno.ENAMETOOLONG:
            raise too_long(path) from err
        raise PoolNotFoundError(
            f"The pool {path!r} cannot be made: its folder {folder!r} is missing ({err.strerror}). lightck makes the "
            "file, not the folder. Create the folder first."
        ) from err
    if not stat.S_ISDIR(st.st_mode):
        raise PoolNotFoundError(
            f"The pool {path!r} cannot be made: {folder!r} is not a folder. Choose a path in an existing folder."
        )
    _refuse_shared(folder, st)
    return folder


def others_write(st: os.stat_result) -> bool:
    """Whether other users can write to a file or folder, according to its mode. If the file belongs to this user, write
    permission of the group is ignored: where every user has a separate group, files are group-writable by default."""
    others = stat.S_IWOTH if st.st_uid == os.geteuid() else stat.S_IWOTH | stat.S_IWGRP
    return bool(st.st_mode & others)


def _refuse_shared(folder: str, st: os.stat_result) -> None:
    is_own, is_sticky = st.st_uid == os.geteuid(), bool(st.st_mode & stat.S_ISVTX)
    if not others_write(st) or (is_sticky and (is_own or _is_root(st.st_uid))):
        return
    if is_sticky:
        raise PoolPermissionError(
            f"The folder {folder!r} can be changed by others and belongs to user {st.st_uid}. That user can "
            "replace any file in the folder, also the pool, despite the sticky bit. Use a folder of your own."
        )
    cure = f"chmod o-w {folder}, or use another folder" if is_own else "Use a folder of your own"
    raise PoolPermissionError(
        f"The folder {folder!r} can be changed by others and has no sticky bit. Others could replace the pool by "
        f"another file. {cure}."
    )


def _is_root(owner: int) -> bool:
    """Whether a uid is the system's root. In a user namespace root may have no uid. The kernel then shows the overflow
    uid, for example as the owner of /tmp, so in a user namespace the overflow uid counts as root."""
    if owner == 0:
        return True
    try:
        with open(_OVERFLOW_UID_FILE) as overflow, open("/proc/self/uid_map") as uid_map:
            return owner == int(overflow.read()) and uid_map.read().split()[2:] != [_N_ALL_UIDS]
    except (OSError, ValueError):
        return False
