"""Where the demo's pool lies, and why there: memory where there is room, else the temporary folder.

The folder made here is removed again, except the one that the user asked to keep.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # tmpfs; Docker gives it 64 MB
ROOM = 3  # times the pool's size that must be free
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """A folder for the pool and the child's output."""

    folder: Path
    why: str

    @property
    def pool(self) -> Path:
        return self.folder / "gpt.pool"

    @property
    def log(self) -> Path:
        return self.folder / "train.log"


def free_nbytes(folder: Path) -> int:
    """Bytes that this user can still write there; 0 where the folder cannot be used."""
    try:
        free = os.statvfs(folder)
    except OSError:
        return 0
    return free.f_bavail * free.f_frsize if os.access(folder, os.W_OK | os.X_OK) else 0


def temporary_parent(pool_nbytes: int) -> tuple[Path, str]:
    """The folder in which a temporary one is made, and the reason."""
    free = free_nbytes(SHARED_MEMORY)
    if free >= ROOM * pool_nbytes:
        return SHARED_MEMORY, f"{free // MIB:,} MiB of memory are free there"
    temporary = Path(tempfile.gettempdir())
    return temporary, f"{SHARED_MEMORY} has {free // MIB:,} MiB free, of {ROOM * pool_nbytes // MIB:,} MiB wanted"


@contextlib.contextmanager
def open_place(pool_nbytes: int, keep: Path | None, pool_dir: Path | None) -> Iterator[Place]:
    """A place for one demo. It is gone afterwards, unless it is the one to keep."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield Place(keep.resolve(), "kept, as asked for by --keep")
        return
    parent, why = temporary_parent(pool_nbytes) if pool_dir is None else (pool_dir, "as asked for by --pool-dir")
    with tempfile.TemporaryDirectory(prefix="lightck-demo-", dir=parent) as folder:
        yield Place(Path(folder), why)
