"""A pool in anonymous memory, for a reader of a checkpoint that lies in a tier, or whose updates must be replayed.

No path names it, and nothing of it is left when it is closed. It survives nothing.
"""

from __future__ import annotations

import os

from lightck.pool.storage.durability import MEDIUM_CACHE, Durability
from lightck.pool.storage.failures import as_io_error, undo_on_error
from lightck.pool.storage.file import FileBackend, FileContainer

_MEMORY = Durability(False, False, False, False, "memory", ("it is anonymous memory of this process",), MEDIUM_CACHE)


class MemoryBackend(FileBackend):
    """Makes pools in anonymous memory; see ``Backend``. A path only names the pool in messages."""

    name = "memory"

    def probe(self, path: str) -> Durability:
        return _MEMORY

    def create_file(self, path: str, nbytes: int) -> FileContainer:
        """Return memory for a pool, which takes space when it is written. Raises ``PoolIOError``."""
        with as_io_error(f"There is no memory for a copy of {path!r}"):
            container = FileContainer(path, os.memfd_create("lightck-pool", os.MFD_CLOEXEC), nbytes)
            with undo_on_error(container.close):
                os.ftruncate(container.fd, nbytes)
            return container
