"""Chooses the folder of the demo's pool: a new folder in /dev/shm if /dev/shm has room, else in the temporary folder.

The new folder is removed at the end. The folder that ``--keep`` names is not removed.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # tmpfs; Docker gives it 64 MB
ROOM = 3  # the free space that is needed, in multiples of the pool's size
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """A folder for the pool and the output of the child processes."""

    folder: Path
    why: str
    """Why this folder was chosen, as text."""

    @property
    def pool(self) -> Path:
        return self.folder / "gpt.pool"

    @property
    def log(self) -> Path:
        return self.folder / "train.log"


def free_nbytes(folder: Path) -> int:
    """Return the number of bytes that are free for this user in a folder; 0 if the folder cannot be used."""
    try:
        free = os.statvfs(folder)
    except OSError:
        return 0
    return free.f_bavail * free.f_frsize if os.access(folder, os.W_OK | os.X_OK) else 0


def temporary_parent(pool_nbytes: int) -> tuple[Path, str]:
    """Return the folder in which to create the folder of the pool, and the reason for the choice as text. The folder is
    /dev/shm if ``ROOM`` times ``pool_nbytes`` are free there, else the temporary folder."""
    free = free_nbytes(SHARED_MEMORY)
    if free >= ROOM * pool_nbytes:
        return SHARED_MEMORY, f"it has {free // MIB:,} MiB free"
    temporary = Path(tempfile.gettempdir())
    return temporary, f"{SHARED_MEMORY} has {free // MIB:,} MiB free, and {ROOM * pool_nbytes // MIB:,} MiB are needed"


@contextlib.contextmanager
def open_place(pool_nbytes: int, keep: Path | None, pool_dir: Path | None) -> Iterator[Place]:
    """Create the folder for one demo; the block receives its ``Place``. If ``keep`` is not None, the folder is
    ``keep``, and it stays. Otherwise a new folder is made, in ``pool_dir`` or in the folder that ``temporary_parent``
    chooses, and is removed at the end of the block."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield Place(keep.resolve(), "kept, requested by --keep")
        return
    parent, why = temporary_parent(pool_nbytes) if pool_dir is None else (pool_dir, "requested by --pool-dir")
    with tempfile.TemporaryDirectory(prefix="lightck-demo-", dir=parent) as folder:
        yield Place(Path(folder), why)
