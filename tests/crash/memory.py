"""Pools in anonymous memory: a second implementation of ``Backend``, for tests.

A pool lives in a memfd, and its path is a name in this object: it is gone with it. Nothing touches a file system, so
a test can have as many pools as it likes, and a medium that is as small as it likes.
"""

from __future__ import annotations

import os

from lightck.errors import NoSpaceError, NotAPoolError, PoolNotFoundError, PoolPathError
from lightck.pool.format.structures import MAGIC, POOL_NBYTES_MIN, SUPERBLOCK_OFFSETS
from lightck.pool.storage import extents
from lightck.pool.storage.durability import MEDIUM_CACHE, Durability
from lightck.pool.storage.extents import Extents


class MemoryContainer:
    """An open pool in memory; see ``Container``."""

    def __init__(self, backend: MemoryBackend, path: str, fd: int, nbytes: int, *, is_new: bool) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.extents: Extents = ((0, nbytes),)
        self._backend = backend
        self._path = path
        self._is_new = is_new

    @property
    def reads_from(self) -> tuple[int, Extents]:
        return self.fd, self.extents

    def read(self, offset: int, nbytes: int) -> bytes:
        return extents.read(self.fd, self.extents, offset, nbytes)

    def publish(self) -> None:
        assert self._is_new, "published once"
        self._is_new = False
        self._backend.put(self._path, os.dup(self.fd))

    def is_current(self) -> bool:
        if self._is_new:
            return True
        known = self._backend.pools.get(self._path)
        is_whole = os.fstat(self.fd).st_size >= self.nbytes
        return known is not None and os.path.sameopenfile(known, self.fd) and is_whole

    def close(self) -> None:
        if self.fd >= 0:
            if self._is_new:
                self._backend.free += self.nbytes
            os.close(self.fd)
            self.fd = -1


class MemoryBackend:
    """A medium of ``capacity`` bytes; see ``Backend``."""

    name = "memory"

    def __init__(self, capacity: int = 1 << 40) -> None:
        self.free = capacity
        self.pools: dict[str, int] = {}
        """path -> descriptor."""

    def claims(self, path: str) -> bool:
        return self.recognises(path)

    def recognises(self, path: str) -> bool:
        fd = self.pools.get(path)
        return fd is not None and any(os.pread(fd, len(MAGIC), at) == MAGIC for at in SUPERBLOCK_OFFSETS)

    def probe(self, path: str) -> Durability:
        return Durability(False, False, False, False, "memory", ("it ends with this object",), MEDIUM_CACHE)

    def remove_stale(self, path: str) -> None:
        """Nothing is ever left behind: what was not published has no name."""

    def discard(self, path: str) -> None:
        fd = self.pools.pop(path, None)
        if fd is not None:
            self.free += os.fstat(fd).st_size
            os.close(fd)

    def create(self, path: str, nbytes: int) -> MemoryContainer:
        if path.endswith("/"):
            raise PoolPathError(f"{path!r} is no name for a pool. It ends with a slash. Leave that out.")
        if nbytes > self.free:
            raise NoSpaceError(
                f"The pool {path!r} needs {nbytes} bytes and the medium has {self.free} left. A pool is allocated in "
                "full when it is made. Discard another."
            )
        fd = os.memfd_create("lightck-pool")
        os.ftruncate(fd, nbytes)
        self.free -= nbytes
        return MemoryContainer(self, path, fd, nbytes, is_new=True)

    def open(self, path: str, *, write: bool) -> MemoryContainer:
        known = self.pools.get(path)
        if known is None:
            raise PoolNotFoundError(f"There is no pool at {path!r}. Nothing was published there. Make one first.")
        nbytes = os.fstat(known).st_size
        if nbytes < POOL_NBYTES_MIN:
            raise NotAPoolError(f"The pool {path!r} has only {nbytes} bytes. That is too small. Make it anew.")
        fd = os.open(f"/proc/self/fd/{known}", (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC)
        return MemoryContainer(self, path, fd, nbytes, is_new=False)

    def put(self, path: str, fd: int) -> None:
        """From now on this descriptor is the pool at this path."""
        self.discard(path)
        self.pools[path] = fd

    def close(self) -> None:
        """Discard all pools."""
        for path in list(self.pools):
            self.discard(path)
