"""The directory of a group: one pool for each rank.

Each pool stores which rank it belongs to (``GroupIdentity``), and only that is trusted. The names of the files are for
people.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lightck.errors import PoolPathError, RankError, listed
from lightck.pool.reader import PoolReader, open_pool

_POOL_NAME = re.compile(r"rank-(\d{5,})-of-(\d{5,})\.pool")


def pool_name(rank: int, world_size: int) -> str:
    return f"rank-{rank:05d}-of-{world_size:05d}.pool"


def world_size_in(name: str) -> int | None:
    """Return the number of ranks in the name of a rank's pool; None for another name."""
    match = _POOL_NAME.fullmatch(name)
    return int(match[2]) if match else None


def pools_in(directory: str | os.PathLike[str]) -> list[Path]:
    """Return the paths of the files in a directory whose names are those of ranks' pools, sorted by rank."""
    return sorted(path for path in Path(directory).iterdir() if _POOL_NAME.fullmatch(path.name))


def existing_pools(directory: str) -> list[Path]:
    """Return what ``pools_in`` returns. Raises ``PoolPathError`` if there is no pool."""
    paths = pools_in(directory)
    if not paths:
        raise PoolPathError(
            f"{directory!r} is a directory. It holds no pool of a rank (rank-00000-of-00002.pool and so on). Pass the "
            "directory that the ranks passed to attach, or the file of a single process."
        )
    return paths


@contextmanager
def open_all(directory: str) -> Iterator[list[PoolReader]]:
    """Open the pools of all ranks for reading, in the order of the ranks, until the end of the block.

    Raises ``PoolPathError`` if the directory holds no pool of a rank, ``RankError`` if the pools belong to several
    trainings or if one is missing, and what ``open_pool`` raises."""
    with ExitStack() as stack:
        readers = []
        for path in existing_pools(directory):
            readers.append(open_pool(str(path)))
            stack.callback(readers[-1].close)
        yield _in_order(directory, readers)


def _in_order(directory: str, readers: list[PoolReader]) -> list[PoolReader]:
    """Check that these are the pools of all ranks of one training, and return them in the order of the ranks. Raises
    ``RankError``."""
    of_rank: dict[int, PoolReader] = {}
    worlds = set()
    for reader in readers:
        group = reader.group
        if group is None:
            raise RankError(
                f"The pool {reader.path!r} is that of a single process, and not of a rank. Recover it by its own path."
            )
        worlds.add((group.run_id, group.world_id, group.world_size))
    if len(worlds) > 1:
        raise RankError(
            f"The pools in {directory!r} belong to {len(worlds)} different trainings. Keep those of one training in "
            "the directory (`lightck inspect --json` shows the run of each pool)."
        )
    for reader in readers:
        assert reader.group is not None, "checked above"
        same = of_rank.setdefault(reader.group.rank, reader)
        if same is not reader:
            raise RankError(
                f"{same.path!r} and {reader.path!r} are both pools of rank {reader.group.rank}. Keep one of them in "
                "the directory."
            )
    ((_, _, world_size),) = worlds
    missing = [str(rank) for rank in range(world_size) if rank not in of_rank]
    if missing:
        many = "s" * (len(missing) > 1)
        raise RankError(
            f"The directory {directory!r} lacks the pool{many} of rank{many} {listed(missing, 8)} of this training, "
            f"which has {world_size} ranks. Put what is missing back: it may hold parts of the model that no other "
            "rank has. If the ranks ran on several hosts, copy the pools of all hosts into one directory."
        )
    return [of_rank[rank] for rank in range(world_size)]
