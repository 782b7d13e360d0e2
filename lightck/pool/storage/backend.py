"""The storage interface of a pool: ``Backend`` and ``Container``. All code above it is the same for every backend.

Order of calls: ``create`` returns a container that is allocated, zeroed and not yet visible at its path. The caller
writes the pool into the container. ``publish`` then makes the container durable and visible, atomically, and replaces
what was at the path. ``open`` returns a container of an existing pool. A second ``close`` does nothing. The methods'
docstrings define the edge cases, and ``tests/pool/storage/test_backend_conformance.py`` checks every backend against
these docstrings.
"""

from __future__ import annotations

from typing import Protocol

from lightck.pool.storage.durability import Durability
from lightck.pool.storage.extents import Extents


class Container(Protocol):
    """The bytes of one pool: the first ``nbytes`` bytes of its file extents, which are runs of bytes in the file ``fd``
    (``extents.py``). The file extents together may be longer than ``nbytes``."""

    @property
    def fd(self) -> int: ...

    @property
    def extents(self) -> Extents: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def reads_from(self) -> tuple[int, Extents]:
        """What verified reads read from: the file ``fd`` and its ``extents``. If the medium has no read(), they read
        from memory: ``LCK_MEMORY`` and (address, nbytes) pairs."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read bytes of the pool. At the end of the file the result is shorter than ``nbytes``. Raises ``OSError``."""

    def publish(self) -> None:
        """Make the container durable (first its data, then its name) and visible at its path, atomically. Allowed
        once."""

    def is_current(self) -> bool:
        """Whether the path names this container, and nobody deleted, replaced or truncated the container. True for a
        container that is not published yet."""

    def close(self) -> None:
        """Close the descriptor. A container that was never published is also removed."""


class Backend(Protocol):
    """A kind of storage for pools."""

    @property
    def name(self) -> str: ...

    def claims(self, path: str) -> bool:
        """Whether ``path`` belongs to this backend alone. True for a pool that this backend recognises. True also for a
        file that no backend can use, where this backend's errors say why (a PMDK pool of another program). False for
        any other path: the caller chooses the backend."""

    def recognises(self, path: str) -> bool:
        """Whether an existing file at ``path`` is, by its signature, a pool of this backend."""

    def probe(self, path: str) -> Durability:
        """Return what a pool at this path would survive. Raises ``PoolError`` if the path's folder is missing or
        unsafe, or if the path cannot be inspected."""

    def remove_stale(self, path: str) -> None:
        """If a process was killed while it created a pool at this path, remove what it left. The caller holds the
        pool's lock."""

    def discard(self, path: str) -> None:
        """Remove the pool at this path, if there is one, durably. The caller holds the pool's lock."""

    def create(self, path: str, nbytes: int) -> Container:
        """Create a container of ``nbytes`` bytes, all of them allocated. Raises ``PoolError``, for example
        ``NoSpaceError`` (nothing is left behind), ``PoolNotFoundError`` (the folder is missing),
        ``PoolPermissionError``, or ``NotAPoolError`` (a device holds data of another program)."""

    def open(self, path: str, *, write: bool) -> Container:
        """Open an existing pool. Raises ``PoolError``, for example ``PoolNotFoundError``, ``PoolPathError``,
        ``PoolPermissionError``, ``PoolTruncatedError`` or ``NotAPoolError`` (both also for a file that is too
        small)."""
