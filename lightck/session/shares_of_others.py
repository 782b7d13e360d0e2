"""A rank that wrote its share of some tensors restores them with the shares of the other ranks on its host."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from lightck.errors import PoolError
from lightck.pool.format.structures import DamagedError
from lightck.pool.reader import PoolReader, StoredCheckpoint, open_pool
from lightck.ranks.directory import pool_name, pools_in
from lightck.ranks.rule import CheckpointId
from lightck.restore.contents import Saved
from lightck.restore.held_tensors import HeldTensors
from lightck.restore.logical import has_shares
from lightck.restore.recover import LiveRestore
from lightck.restore.replayed import ReplayedCheckpoint
from lightck.restore.rows_of_others import differing_rows
from lightck.restore.usable import RankCheckpoint, parse, usable_by_id
from lightck.session.group import Group


def restore_one_of(
    restore: LiveRestore, checkpoint_id: CheckpointId, candidates: Sequence[RankCheckpoint], group: Group
) -> tuple[RankCheckpoint | None, str, list[str]]:
    """Restore the first of these checkpoints of one step that verifies. Returns the checkpoint and "", or None and the
    reason why the first one does not verify; and the names of the tensors in which the rows of other ranks differ from
    what this rank held there."""
    problem = "" if candidates else "it can no longer be read"
    for stored in candidates:
        try:
            with whole_of(stored, checkpoint_id, group) as (source, differing):
                restore.take(source, parse(source), [])
            return stored, "", differing
        except DamagedError as err:
            problem = problem or str(err)
    return None, problem, []


@contextmanager
def whole_of(own: RankCheckpoint, checkpoint_id: CheckpointId, group: Group) -> Iterator[tuple[Saved, list[str]]]:
    """Yield this rank's checkpoint, with all rows of each tensor, and the names of the tensors in which the rows of
    other ranks differ from what this rank held there (``differing_rows``). ``checkpoint_id``: of the checkpoint. The
    other ranks' pools are open in the block. Raises ``DamagedError`` if rows are missing."""
    if isinstance(own, ReplayedCheckpoint) or not has_shares(own):
        yield own, []
        return
    with ExitStack() as opened:
        pools = _pools_of_others(own, group, opened)
        found = {rank: next(iter(usable_by_id(pools[rank]).get(checkpoint_id, ())), None) for rank in sorted(pools)}
        of_others = {rank: stored for rank, stored in found.items() if stored is not None}
        held = HeldTensors(own, of_others)
        yield held, differing_rows(own, parse(own).rows_of_others, of_others)


def _pools_of_others(own: StoredCheckpoint, group: Group, opened: ExitStack) -> dict[int, PoolReader]:
    """Open the pools of the other ranks of the same world that are in the directory of ``own`` and can be read. Each
    file is opened once."""
    found: dict[int, PoolReader] = {}
    directory, wanted = os.path.dirname(own.path), own.reader.group
    usual = {pool_name(rank, group.world_size) for rank in range(group.world_size)}
    for path in sorted(pools_in(directory), key=lambda one: one.name not in usual):
        with suppress(PoolError):
            reader = open_pool(str(path))
            opened.callback(reader.close)
            identity = reader.group
            if identity is None or wanted is None or identity.rank == group.rank:
                continue
            if (identity.world_id, identity.world_size) == (wanted.world_id, group.world_size):
                found.setdefault(identity.rank, reader)
    return found
