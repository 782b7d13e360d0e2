"""The directory of a group: one pool for each rank.

Each pool stores which rank it belongs to (``GroupIdentity``), and only that is trusted. The names of the files are for
people.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lightck.errors import PoolNotFoundError, PoolPathError, RankError, listed
from lightck.pool.reader import PoolReader, open_pool
from lightck.pool.storage.failures import io_error
from lightck.ranks.copy_file import is_peer_copy, readable_copies

_POOL_NAME = re.compile(r"rank-(\d{5,})-of-(\d{5,})(?:-[0-9a-f]{8})?\.pool")
_CLAIM = re.compile(r"\d{6,18}-[0-9a-f]{8}")
"""Names of the folders in a tier (``tiers/names.py``)."""


def pool_name(rank: int, world_size: int, suffix: str = "") -> str:
    """Return the usual name of a rank's pool. ``suffix``: eight hexadecimal digits, or empty. A pool has one only if
    another world with as many ranks has a pool under the name without it. A peer copy always has one."""
    return f"rank-{rank:05d}-of-{world_size:05d}{'-' * bool(suffix)}{suffix}.pool"


def world_size_in(name: str) -> int | None:
    """Return the number of ranks in the name of a rank's pool; None for another name."""
    match = _POOL_NAME.fullmatch(name)
    return int(match[2]) if match else None


def directory_of_group(pool: str) -> str | None:
    """Return the directory of a group's pools from the path of the pool of one rank; None for another path."""
    folder, name = os.path.split(pool)
    return None if world_size_in(name) is None else folder or os.curdir


def pools_in(directory: str | os.PathLike[str]) -> list[Path]:
    """Return the paths of the files in a directory whose names are those of ranks' pools, sorted by rank."""
    return sorted(path for path in Path(directory).iterdir() if _POOL_NAME.fullmatch(path.name))


def make_directory(directory: str) -> None:
    """Create the directory, unless something is there. The folder above it must exist. Raises ``PoolError``."""
    try:
        os.mkdir(directory)
    except FileExistsError:
        pass
    except FileNotFoundError:
        raise PoolNotFoundError(
            f"The directory {directory!r} cannot be created, because the folder above it does not exist. Create that "
            "folder, or choose another path."
        ) from None
    except OSError as err:
        raise io_error(f"The directory {directory!r} cannot be created", err.errno, err.strerror) from err


def existing_pools(directory: str) -> list[Path]:
    """Return what ``pools_in`` returns. Raises ``PoolPathError`` if there is no pool."""
    paths = pools_in(directory)
    if not paths:
        lost = lost_claim_in(directory)
        if lost is not None:
            raise PoolPathError(f"{directory!r} holds no pool of a rank. {lost_claims_text(lost)}")
        if any(_CLAIM.fullmatch(each.name) for each in Path(directory).iterdir()):
            raise PoolPathError(
                f"{directory!r} is a tier, and this needs a pool. Make one from its newest checkpoint: lightck copy "
                f"{directory} NEW.pool."
            )
        raise PoolPathError(
            f"{directory!r} is a directory. It holds no pool of a rank (rank-00000-of-00002.pool and so on), and is no "
            "tier. Pass the directory that the ranks passed to attach, or the file of a single process."
        )
    return paths


def lost_claims_text(folder: str) -> str:
    """Return a text that says why a tier is unusable. ``folder``: the name of the folder of a claim in it."""
    return (
        f"It looks like a tier whose claim files are missing: {folder}/claim.json is no file, and without one nothing "
        "reads the tier. Put the claim files back, from a copy of the tier, or name another place."
    )


def lost_claim_in(directory: str) -> str | None:
    """If a directory has folders of claims, and none of them has its claim file, return the name of the first one.
    Otherwise return None."""
    try:
        claims = sorted(each.name for each in Path(directory).iterdir() if _CLAIM.fullmatch(each.name))
    except (OSError, ValueError):  # a path with a NUL
        return None
    has_file = any((Path(directory) / each / "claim.json").is_file() for each in claims)
    return claims[0] if claims and not has_file else None


@dataclass(frozen=True, slots=True)
class World:
    """The pools of one world in a directory. A *world* is the ranks that train together, as long as neither their
    number nor their parts of the tensors change; then a new world begins, with a new id. (Torch calls all processes of
    a job a world.)"""

    run_id: bytes
    world_id: bytes
    world_size: int
    readers: dict[int, PoolReader]
    """Rank -> its open pool, in the order of the ranks. A rank whose pool is missing is left out."""

    @property
    def missing(self) -> list[int]:
        """The ranks whose pools are missing, and for which no peer copy was opened."""
        return [rank for rank in range(self.world_size) if rank not in self.readers]

    @property
    def ranks_from_copies(self) -> list[int]:
        """The ranks whose pools are missing, and for which a peer copy was opened instead."""
        return [rank for rank, reader in self.readers.items() if is_peer_copy(reader.path)]

    @property
    def incarnation(self) -> int:
        """The largest incarnation in the pools."""
        return max(reader.commit_log().incarnation for reader in self.readers.values())


@contextmanager
def open_worlds(directory: str) -> Iterator[list[World]]:
    """Open all pools of ranks in a directory for reading, until the end of the block. Yields their worlds, the newest
    one first: a world with the pools of all ranks before one without, then by the largest incarnation. (There are
    several if a training was loaded into another number of ranks, and was killed while it did so.)

    Raises ``PoolPathError`` if the directory holds no pool of a rank, ``RankError`` if the pools belong to several
    trainings or if two belong to one rank, and what ``open_pool`` raises. In the place of a pool that is missing, a
    peer copy is opened, if the directory has one."""
    with ExitStack() as stack:
        readers = []
        for path in existing_pools(directory):
            readers.append(open_pool(str(path), gradients=True))
            stack.callback(readers[-1].close)
        worlds = worlds_of(directory, readers)
        if any(world.missing for world in worlds):
            _add_copies(directory, worlds, stack)
            worlds = _in_order(worlds)
        yield worlds


def _add_copies(directory: str, worlds: Sequence[World], stack: ExitStack) -> None:
    """Open the peer copies of pools that are missing in these worlds: of two copies of one pool, that with the newest
    checkpoint."""
    found: dict[tuple[int, int], tuple[tuple[int, int], PoolReader]] = {}
    for _, reader in readable_copies(directory):
        stack.callback(reader.close)
        newest = max(((one.incarnation, one.step) for one in reader.commit_log().records.values()), default=None)
        for number, world in enumerate(worlds):
            identity = reader.group
            if identity is None or newest is None or identity.world_id != world.world_id:
                continue
            place = number, identity.rank
            if identity.rank in world.missing and (place not in found or newest > found[place][0]):
                found[place] = newest, reader
    for (number, rank), (_, reader) in found.items():
        readers = worlds[number].readers
        readers[rank] = reader
        in_order = dict(sorted(readers.items()))
        readers.clear()
        readers.update(in_order)


def worlds_of(directory: str, readers: Sequence[PoolReader]) -> list[World]:
    """Return the worlds of these open pools, in the order of ``open_worlds``. Raises ``RankError`` as it does."""
    found: dict[tuple[bytes, bytes, int], dict[int, PoolReader]] = {}
    for reader in readers:
        run_id, world_id, world_size, rank = _identity_of(reader)
        ranks = found.setdefault((run_id, world_id, world_size), {})
        same = ranks.setdefault(rank, reader)
        if same is not reader:
            raise RankError(
                f"{same.path!r} and {reader.path!r} are both pools of rank {rank}. Keep one of them in the directory."
            )
    runs = {run_id for run_id, _, _ in found}
    if len(runs) > 1:
        raise RankError(
            f"The pools in {directory!r} belong to {len(runs)} different trainings. Keep those of one training in "
            "the directory (`lightck inspect --json` shows the run of each pool)."
        )
    return _in_order([World(*ids, dict(sorted(ranks.items()))) for ids, ranks in found.items()])


def _in_order(worlds: Sequence[World]) -> list[World]:
    return sorted(worlds, key=lambda world: (not world.missing, world.incarnation), reverse=True)


def _identity_of(reader: PoolReader) -> tuple[bytes, bytes, int, int]:
    """Return run id, world id and number of ranks of the pool's world, and the rank of the pool. The pool of a single
    process counts as a world of one, if it has the name of its only rank."""
    group = reader.group
    if group is not None:
        return group.run_id, group.world_id, group.world_size, group.rank
    if os.path.basename(reader.path) == pool_name(0, 1):
        return reader.superblock.uuid, reader.superblock.uuid, 1, 0
    raise RankError(
        f"The pool {reader.path!r} is that of a single process, and not of a rank. Recover it by its own path. To load "
        f"it into a group, make a directory, and move the pool there under the name {pool_name(0, 1)}."
    )


@contextmanager
def open_all(directory: str) -> Iterator[list[PoolReader]]:
    """Open the pools of the newest world for reading, in the order of the ranks, until the end of the block. Raises as
    ``open_worlds`` does, and ``RankError`` if the pool of a rank is missing."""
    with open_worlds(directory) as worlds:
        newest = worlds[0]
        if newest.missing:
            raise missing_error(directory, newest)
        yield list(newest.readers.values())


def missing_error(directory: str, world: World, detail: str = "") -> RankError:
    """Return the error for a world that lacks pools. ``detail``: what that makes impossible; a sentence, or empty."""
    missing = list(map(str, world.missing))
    many = "s" * (len(missing) > 1)
    return RankError(
        f"The directory {directory!r} lacks the pool{many} of rank{many} {listed(missing, 8)} of this training, "
        f"which has {world.world_size} ranks. {detail}{' ' * bool(detail)}Put what is missing back: it may hold parts "
        "of the model that no other rank has. If the ranks ran on several hosts, copy the pools of all hosts into one "
        "directory. (attach(..., overwrite=True) on all ranks discards what is left, and starts afresh.)"
    )
