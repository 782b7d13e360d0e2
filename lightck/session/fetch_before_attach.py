"""Fetches the newest checkpoint of the tiers before ``attach``, for a framework that reads the checkpoint first.

``attach(resume=True, tiers=...)`` fetches it too. After ``fetch_newest``, ``attach`` finds pools that are not older
than the tiers.
"""

from __future__ import annotations

import os

from lightck.pool.storage.backends import backend_for, pool_path
from lightck.pool.storage.lock import PoolLock
from lightck.ranks.copy_file import copies_in
from lightck.ranks.directory import pools_in
from lightck.restore.together import TIMEOUT
from lightck.session.group import checked_timeout, ensure_directory, group_of, world_of_one
from lightck.session.group_start import GroupStart
from lightck.session.newest_of_group import replace_pools_from_tier
from lightck.session.newest_of_tiers import replace_pool_from_tier
from lightck.tiers.open_store import open_store
from lightck.tiers.tier import checked_tiers


def is_empty_directory(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a directory in which a group has begun nothing yet: no pool lies in it, and no peer copy."""
    return os.path.isdir(path) and not pools_in(path) and not copies_in(os.fspath(path))


def fetch_newest(
    path: str | os.PathLike[str],
    tiers: object,
    *,
    backend: str = "auto",
    group: object = None,
    timeout: float = TIMEOUT,
) -> None:
    """If a tier holds a newer checkpoint than the pool, or than the pools of a group have in common, make the pools
    anew from it. The arguments are those of ``attach``; all ranks of a group call this. Raises ``PoolError``,
    ``TierError``, ``RankError``, and ``TypeError`` or ``ValueError`` for a wrong argument."""
    sent_to = [each for each in checked_tiers(tiers) if not each.is_export]
    if not sent_to:
        return
    with GroupStart.of(group_of(group) or world_of_one(path, group), checked_timeout(timeout)) as start:
        if start is not None:
            replace_pools_from_tier(ensure_directory(path), start.group, start.meeting, sent_to, backend)
            return
        own = pool_path(path)
        lock = PoolLock(own)
        try:
            stores = [open_store(each.path, each.options) for each in sent_to]
            replace_pool_from_tier(own, backend_for(own, backend), stores)
        finally:
            lock.release()
