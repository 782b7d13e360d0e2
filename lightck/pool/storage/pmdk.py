"""A lightck pool inside a PMDK pool, which libpmemobj makes. The lightck pool has the same bytes as in a plain file.

libpmemobj formats the file as a PMDK pool: a root object, and a few large objects (*arenas*) that are allocated once
and never freed. libpmemobj keeps the PMDK pool open while lightck writes, and is called again only to close the PMDK
pool. lightck itself reads and writes the arenas, through the same mapping, copies and commits as in a plain file.
Reading needs no libpmemobj. The file is created, checked, published and removed like a plain file.
"""

from __future__ import annotations

import errno
import logging
import os
import time

from lightck.errors import (
    CorruptPoolError,
    LibraryMissingError,
    MediumError,
    NoSpaceError,
    PoolError,
    PoolLockedError,
    PoolPermissionError,
)
from lightck.pool.storage import extents, pmdk_file, pmemobj
from lightck.pool.storage.backend import Container
from lightck.pool.storage.durability import Durability
from lightck.pool.storage.extents import Extents
from lightck.pool.storage.failures import as_io_error, io_error, undo_on_error
from lightck.pool.storage.file import FileBackend, FileContainer, ask_file, open_checked
from lightck.pool.storage.pmdk_file import Arena

log = logging.getLogger("lightck")
ARENA_KIND = 1
"""PMDK's type number of the objects that are arenas."""
_LOCKED_ERRNOS = (errno.EAGAIN, errno.EWOULDBLOCK)
"""Errors of libpmemobj that mean: another process has the pool open."""
_DYING_SECONDS = 2.0
"""Maximum wait for libpmemobj's lock when this process has lightck's lock already. A dying process releases lightck's
lock before libpmemobj's lock: on a busy machine, long before."""
_has_warned = False
"""Whether ``_warn_slow_medium`` has warned in this process."""


class PmdkContainer(FileContainer):
    """An open PMDK pool; see ``Container``. The container owns the descriptors of ``file``, so the caller must not
    close ``file`` any more. ``places``: the extents of the lightck pool. ``pool``: libpmemobj's open pool; None if the
    pool is only read."""

    def __init__(self, file: FileContainer, places: Extents, pool: pmemobj.Pool | None = None) -> None:
        super().__init__(file.path, file.fd, file.file_nbytes, file.lock_fd)
        self.nbytes = extents.total(places)
        self.extents = places
        self._pool = pool

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            (pool.abandon if self._has_lost_bytes() else pool.close)()
        super().close()

    def _has_lost_bytes(self) -> bool:
        """Whether the file was truncated. libpmemobj must not close a truncated file, because it would access missing
        pages. If the size is unknown, the result is False, so that the pool is closed: otherwise it would stay locked
        until the process ends."""
        try:
            return os.fstat(self.fd).st_size < self.file_nbytes
        except OSError:
            return False


class PmdkBackend(FileBackend):
    """PMDK pools in files; see ``Backend``."""

    name = "pmdk"

    def __init__(self, arena_nbytes: int = pmdk_file.ARENA_NBYTES_MAX) -> None:
        """``arena_nbytes``: maximum length of an arena, a multiple of 2 MiB. Tests use small arenas."""
        self._arena_nbytes = arena_nbytes

    def claims(self, path: str) -> bool:
        """Whether the path is a PMDK pool, of lightck or of another program: this backend's errors explain why lightck
        cannot use a pool of another program."""
        return ask_file(path, pmdk_file.is_pmdk)

    def recognises(self, path: str) -> bool:
        return ask_file(path, pmdk_file.is_ours)

    def create(self, path: str, nbytes: int) -> Container:
        _load(path)
        durability = self.probe(path)
        lengths = pmdk_file.split(nbytes, self._arena_nbytes)
        file = self.create_file(path, pmdk_file.file_nbytes(lengths))
        with undo_on_error(file.close):
            pool = _open_pmdk(path, file, create=True, shutdown_state=durability.is_persistent_memory)
            container = PmdkContainer(file, (), pool)  # used only to close pool and file if the rest fails
        with undo_on_error(container.close):
            try:
                places = _allocate(pool, file, lengths)
            except pmemobj.PmemobjError as err:
                raise _refused(path, err) from err
        _warn_slow_medium(path, durability)
        return PmdkContainer(file, places, pool)

    def open(self, path: str, *, write: bool) -> Container:
        file = open_checked(path, write=write, nbytes_min=0)
        with undo_on_error(file.close):
            with as_io_error(f"The PMDK pool {path!r} cannot be read"):
                places = pmdk_file.read_extents(file.fd, path, file.nbytes)
                shutdown_state = pmdk_file.has_shutdown_state(file.fd)
            if not write:
                return PmdkContainer(file, places)
            _load(path)
            durability = self.probe(path)
            pool = _open_pmdk(path, file, shutdown_state=shutdown_state)
        _warn_slow_medium(path, durability)
        return PmdkContainer(file, places, pool)


def _open_pmdk(path: str, file: FileContainer, *, create: bool = False, shutdown_state: bool) -> pmemobj.Pool:
    """Open the checked file with libpmemobj, through ``/proc/self/fd`` because the path may name another file now.
    Raises ``PoolError``. ``create`` and ``shutdown_state``: as for ``pmemobj.Pool``."""
    here = f"/proc/self/fd/{file.fd}"
    with as_io_error(f"The PMDK pool {path!r} cannot be inspected"):
        size = os.fstat(file.fd).st_size
    end, pause = time.monotonic() + _DYING_SECONDS, 0.005
    while True:
        try:
            return pmemobj.Pool(here, pmdk_file.LAYOUT, size, create=create, shutdown_state=shutdown_state)
        except pmemobj.PmemobjError as err:
            if err.errno not in _LOCKED_ERRNOS or time.monotonic() >= end:
                raise _refused(path, err) from err
        time.sleep(pause)
        pause *= 2


def _allocate(pool: pmemobj.Pool, file: FileContainer, lengths: list[int]) -> Extents:
    """Allocate arenas of these lengths, and the root object that names the arenas. Returns the extents of the arenas.
    Raises ``PmemobjError`` or ``PoolError``."""
    root = pool.root(pmdk_file.root_nbytes(len(lengths)))
    arenas = []
    for number, length in enumerate(lengths):
        reference = pmdk_file.reference_offset(root, number)
        pool.alloc(reference, pmdk_file.object_nbytes(length), ARENA_KIND)
        with as_io_error(f"The PMDK pool {file.path!r} cannot be read back"):
            uuid_lo, offset = pmdk_file.read_object(file.fd, reference)
        arenas.append(Arena(uuid_lo, offset, pmdk_file.arena_start(offset), length))
    pool.store(root, pmdk_file.pack_root(arenas, file.nbytes))
    return tuple((arena.start, arena.nbytes) for arena in arenas)


def _load(path: str) -> None:
    """Load libpmemobj. Raises ``LibraryMissingError``."""
    try:
        pmemobj.load()
    except pmemobj.MissingError as err:
        raise LibraryMissingError(
            f"The pool {path!r} is a PMDK pool, or is to become one, and PMDK's library cannot be loaded: {err}. "
            "Writing such a pool needs that library; reading does not. Install libpmemobj (Debian and Ubuntu: apt-get "
            f'install libpmemobj1), or put its path into {pmemobj.LIBRARY_VARIABLE}, or use backend="file" for a new '
            "pool."
        ) from err


def _refused(path: str, err: pmemobj.PmemobjError) -> PoolError:
    """Return lightck's error for an error of libpmemobj."""
    reason = err.strerror
    if err.errno in _LOCKED_ERRNOS:
        return PoolLockedError(
            f"The PMDK pool {path!r} is held open by another program ({reason}). A pool has one writer. Wait for that "
            "program, end it, or use another pool; lightck.recover() can read this one meanwhile."
        )
    if err.errno == errno.EEXIST:
        return PoolLockedError(
            f"The PMDK pool {path!r} or a copy of it is open in this process, or in its parent, from which it was "
            f"forked ({reason}): libpmemobj distinguishes pools by an identity that a copy shares. Close the other "
            "pool first, or open this one in a separate process."
        )
    if err.errno in (errno.EIO, errno.EMFILE, errno.ENFILE, errno.EINTR, errno.EAGAIN):
        return io_error(f"libpmemobj cannot open the PMDK pool {path!r}", err.errno, reason)
    if err.errno in (errno.ENOSPC, errno.ENOMEM):
        return NoSpaceError(
            f"libpmemobj has no room for the pool {path!r} ({reason}). A pool is allocated in full when it is made. "
            "Free space or memory, choose another medium, or use fewer slots."
        )
    if err.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return PoolPermissionError(
            f"libpmemobj cannot open the pool {path!r} ({reason}). Check its owner and mode, and that its file system "
            "is not mounted read-only. On persistent memory libpmemobj also reads the device's count of unsafe "
            "shutdowns, which needs root before Linux 5.0.4."
        )
    if "ADR failure" in (reason or ""):
        return MediumError(
            f"libpmemobj refuses the pool {path!r} ({reason}): the machine lost power, and the memory could not save "
            "all pending stores. lightck.recover() reads the newest checkpoint without libpmemobj and verifies every "
            "byte of it. Continue from that checkpoint in a new pool, or make libpmemobj ignore the power loss: "
            "pmempool feature --disable SHUTDOWN_STATE."
        )
    return CorruptPoolError(
        f"libpmemobj refuses the PMDK pool {path!r} ({reason}). Its PMDK structures are damaged, or of another "
        "release. Run `pmempool check`; lightck.recover() can read the pool without libpmemobj."
    )


def _warn_slow_medium(path: str, durability: Durability) -> None:
    """Warn, once in each process, that a PMDK pool is not on persistent memory. PMEM_IS_PMEM_FORCE=1 turns the warning
    off."""
    global _has_warned
    if _has_warned or durability.is_persistent_memory or os.environ.get("PMEM_IS_PMEM_FORCE") == "1":
        return
    _has_warned = True
    log.warning(
        "lightck: the PMDK pool %s is not on persistent memory, so making, opening and closing it is slow: libpmemobj "
        'calls msync for each change of its own structures. A new pool with backend="file" avoids that. What lightck '
        "writes is as durable as in a file: %s",
        path,
        durability,
    )
