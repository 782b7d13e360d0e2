"""The group of ranks in which ``attach`` acts, and the directory with one pool for each rank.

Each pool stores which rank it belongs to (``GroupIdentity``). So a rank finds its pool even if files were renamed or
swapped.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from lightck.errors import PoolError, PoolPathError, RankError, UnsupportedError
from lightck.pool.format.group import GroupIdentity
from lightck.pool.reader import open_pool
from lightck.pool.storage.backends import backend_for
from lightck.pool.storage.backends import pool_path as checked_path
from lightck.ranks.agreed_end import EndAgreement
from lightck.ranks.directory import make_directory, pool_name, pools_in
from lightck.ranks.meet import Store
from lightck.ranks.neighbours import GroupRule
from lightck.restore.together import store_of

log = logging.getLogger("lightck")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
HOST_VARIABLE = "LIGHTCK_TEST_HOST"
"""Environment variable of tests, in which each directory stands for a host: its value replaces the host's name and boot
id."""


@dataclass(frozen=True, slots=True)
class Membership:
    """The rank of a session in its group, and what it knows of the group."""

    rank: int
    world_size: int
    commit_rule: GroupRule
    """Says when a checkpoint of this rank may commit, and which ones must be kept."""
    agree_on_end: Callable[[Callable[[int], None]], EndAgreement]
    """Starts a new agreement on the point at which the loops of all ranks end. Every rank must call it the same number
    of times. The argument is called with the number of the signal when another rank was asked to stop."""


@dataclass(frozen=True, slots=True)
class Group:
    """This process as one rank of a group. (The group has one rank only if a single process attaches to the directory
    of a group.)"""

    rank: int
    world_size: int
    store: Store
    """The key-value store of the process group, over a connection that no other thread uses."""
    members: tuple[int, ...] = (0,)
    """For each rank, its rank in the default process group."""
    new_connection: Callable[[], Store] | None = None
    """Returns another connection to the store; None: there is no other rank."""

    def connect(self) -> Store:
        """Return another connection to the store, for a thread of its own."""
        return self.store if self.new_connection is None else self.new_connection()


def group_of(group: object) -> Group | None:
    """Return the group for the ``group`` argument of attach. None: the default process group, if one is initialized. A
    process group: that group. False: no group, so this process is saved alone. A group of one rank is no group. Raises
    ``TypeError`` for another value, and ``UnsupportedError`` if this process is no member of the group."""
    dist = torch.distributed
    if group is False:
        return None
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise TypeError(
                f"group is a {type(group).__name__}, and no process group is initialized in this process. Call "
                "torch.distributed.init_process_group before attach, or leave group= out."
            )
        return None
    if group is not None and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise _no_member()
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group is a {type(group).__name__}. Pass a process group, False for this process alone, or leave it out."
        )
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise _no_member()
    if world_size < 2:
        return None
    members = tuple(dist.get_process_group_ranks(group))
    return Group(rank, world_size, store_of(group), members, partial(store_of, group))


def _no_member() -> UnsupportedError:
    return UnsupportedError(
        "This process is no member of the process group that was passed as group=. Call attach on its members only, or "
        "pass the group of this process."
    )


class _OwnStore:
    """The store of a world of one rank."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes, /) -> None:
        self._values[key] = bytes(value)

    def check(self, keys: list[str], /) -> bool:
        return all(key in self._values for key in keys)

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        return [self._values[key] for key in keys]

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        if self._values.get(key, b"") == expected.encode():
            self._values[key] = desired.encode()
        return self._values[key]


def world_of_one(pool_path: object, group: object) -> Group | None:
    """Return this process as the only rank of a world, if the path is a directory with pools of ranks; None for any
    other path. ``group``: the argument of attach. Raises ``UnsupportedError`` if that is False and other processes
    could be ranks of this world too."""
    if not isinstance(pool_path, (str, os.PathLike)):
        return None
    path = os.fspath(pool_path)
    if not os.path.isdir(path) or not pools_in(path):
        return None
    dist = torch.distributed
    if group is False and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise UnsupportedError(
            f"{path!r} is the directory of a group of ranks, and group=False saves this process alone. Name a file of "
            "its own for each process, or leave group= out, so that all ranks attach together."
        )
    return Group(0, 1, _OwnStore())


def checked_timeout(timeout: object) -> float:
    """Return the ``timeout`` argument of attach in seconds. Raises ``TypeError`` or ``ValueError``."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout={timeout!r} is a {type(timeout).__name__}. Pass a number of seconds, such as 600.")
    if not timeout > 0:
        raise ValueError(f"timeout={timeout!r}: pass a number of seconds above 0.")
    return float(timeout)


def host_name() -> str:
    return os.environ.get(HOST_VARIABLE) or socket.gethostname()


def boot_id() -> str:
    """Return a text that is equal for two processes if they run on the same host, also in different containers."""
    if HOST_VARIABLE in os.environ or not _BOOT_ID.exists():
        return host_name()
    return _BOOT_ID.read_text().strip()


# -- the directory -----------------------------------------------------------------------------------------------------


def ensure_directory(path: str | os.PathLike[str]) -> str:
    """Create the directory of the group's pools if it does not exist, and return its absolute path. The folder above it
    must exist. Raises ``PoolError``."""
    directory = checked_path(path)
    make_directory(directory)
    if not os.path.isdir(directory):
        raise PoolPathError(
            f"{directory!r} is a file. In a process group each rank has a pool of its own, so pool_path names a "
            "directory, which attach creates. Choose another path; or pass group=False, to save this process "
            "alone. To continue from the pool of a single process, make a directory, move the pool there under the "
            f"name {pool_name(0, 1)}, and pass the directory."
        )
    return directory


def refuse_other_pools(directory: str) -> None:
    """Raise ``PoolPathError`` if the directory has no pool of a rank, and a pool under another name: whoever put it
    there expects that the training continues from it."""
    if pools_in(directory):
        return
    for name in sorted(os.listdir(directory)):
        path = os.path.join(directory, name)
        if not name.startswith(".") and os.path.isfile(path) and backend_for(path).recognises(path):
            raise PoolPathError(
                f"The directory {directory!r} has no pool of a rank, but it holds the pool {name!r}. Nothing was "
                f"changed. To continue from the pool of a single process, give it the name {pool_name(0, 1)}; to begin "
                "a new training, pass another directory."
            )


def directory_id(directory: str) -> str:
    """Return a text that is equal for two processes only if they see the same directory on the same host."""
    st = os.stat(directory)
    return f"{boot_id()}:{st.st_dev}:{st.st_ino}"


def path_of_own_pool(directory: str, group: Group) -> str:
    """Return the path of this rank's pool. If the file with this rank's name is missing or is the pool of another rank,
    search all pools in the directory for that of this rank. If there is none, return the path with this rank's name.
    Raises ``RankError`` if the file with this rank's name is the pool of another rank, and this rank's own pool is
    missing."""
    expected = os.path.join(directory, pool_name(group.rank, group.world_size))
    found = path_of_pool(directory, group.rank, group.world_size)
    if found is not None:
        if found != expected:
            log.warning(
                "lightck: the pool %r is that of rank %d, although its name says otherwise. It is used as the pool of "
                "this rank",
                found,
                group.rank,
            )
        return found
    other = _identity(expected)
    if other is not None:
        raise RankError(
            f"The pool {expected!r} is that of rank {other.rank}, and no pool in the directory is that of rank "
            f"{group.rank}. Nothing was changed. Put the pool of rank {group.rank} back, or use another directory."
        )
    return expected


def path_of_pool(directory: str, rank: int, world_size: int) -> str | None:
    """Return the path of the pool that says inside that it belongs to this rank: first the one with the rank's name,
    then any other. None if there is none that can be read."""
    expected = os.path.join(directory, pool_name(rank, world_size))
    for path in (expected, *(str(other) for other in pools_in(directory) if str(other) != expected)):
        identity = _identity(path)
        if identity is not None and (identity.rank, identity.world_size) == (rank, world_size):
            return path
    return None


def _identity(path: str) -> GroupIdentity | None:
    """Return the rank and the group that a pool belongs to. Return None if the pool is missing or cannot be read, or if
    a single process made it."""
    try:
        with closing(open_pool(path, gradients=True)) as reader:
            return reader.group
    except PoolError:
        return None
