"""The seam below a pool: where its bytes lie. Everything above it is the same for every backend.

Order of calls: ``create`` gives a container that is allocated, zeroed and not yet visible at its path; the pool is
written into it; ``publish`` makes it durable and visible at once, replacing what was there. ``open`` gives a
container of an existing pool. ``close`` may be called twice. Edge cases are in the methods' docstrings, and
``tests/pool/storage/test_backend_conformance.py`` holds every backend to them.
"""

from __future__ import annotations

from typing import Protocol

from lightck.pool.storage.durability import Durability
from lightck.pool.storage.extents import Extents


class Container(Protocol):
    """The bytes of one pool: ``nbytes`` of them, in ``extents`` of the file behind ``fd`` (which may have more)."""

    @property
    def fd(self) -> int: ...

    @property
    def extents(self) -> Extents: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def source(self) -> tuple[int, Extents]:
        """What verified reads go by: ``fd`` and ``extents``; where the medium has no read(), ``LCK_MEMORY`` and
        addresses."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the pool; fewer where the file ends."""

    def publish(self) -> None:
        """Make the container durable (data, then its name) and visible at its path, atomically. Once only."""

    def is_current(self) -> bool:
        """Whether the path still names this very container, whole (nobody deleted, replaced or truncated it). One that
        is not published yet has no path that could be lost: yes."""

    def close(self) -> None:
        """Give up the descriptor; a container that was never published disappears."""


class Backend(Protocol):
    """A kind of place for pools."""

    @property
    def name(self) -> str: ...

    def claims(self, path: str) -> bool:
        """Whether what lies at ``path`` is for this backend and no other: a pool that it recognises, or what it alone
        can say is wrong with it. False for a new pool of a kind that the user has to choose."""

    def recognises(self, path: str) -> bool:
        """Whether an existing file at ``path`` is, by its signature, a pool of this backend."""

    def probe(self, path: str) -> Durability:
        """What a pool at this path would survive."""

    def remove_stale(self, path: str) -> None:
        """Remove what a kill left behind while a pool was being made at this path. The caller holds its lock."""

    def discard(self, path: str) -> None:
        """Remove the pool at this path, if there is one, durably. The caller holds its lock."""

    def create(self, path: str, nbytes: int) -> Container:
        """Allocate all of ``nbytes`` now. Raises ``NoSpaceError`` and leaves nothing behind where they are not
        to be had, ``PoolNotFoundError`` without a folder, ``PoolPermissionError`` where it cannot be written."""

    def open(self, path: str, *, write: bool) -> Container:
        """Raises ``PoolNotFoundError``, ``PoolPathError``, ``PoolPermissionError``, ``NotAPoolError`` (too small)."""
