"""A rank that wrote its share of some tensors restores them with the shares of the other ranks on its host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

from lightck.pool.reader import StoredCheckpoint, open_pool
from lightck.ranks.rule import CheckpointId
from lightck.restore.contents import Saved
from lightck.restore.held_tensors import HeldTensors
from lightck.restore.logical import has_shares
from lightck.restore.rows_of_others import differing_rows
from lightck.restore.usable import parse, usable_by_id
from lightck.session.group import Group, path_of_pool


@contextmanager
def whole_of(own: StoredCheckpoint, name: CheckpointId, group: Group) -> Iterator[tuple[Saved, list[str]]]:
    """Yield this rank's checkpoint, with all rows of each tensor, and the names of tensors of which it held other rows
    (``differing_rows``). ``name``: its id. The other ranks' pools are open in the block. Raises ``DamagedError`` if
    rows are missing."""
    if not has_shares(own):
        yield own, []
        return
    with ExitStack() as opened:
        of_others = {
            rank: stored
            for rank in range(group.world_size)
            if rank != group.rank and (stored := _checkpoint_of(rank, own, name, group, opened)) is not None
        }
        held = HeldTensors(own, of_others)
        yield held, differing_rows(own, parse(own).rows_of_others, of_others)


def _checkpoint_of(
    rank: int, own: StoredCheckpoint, name: CheckpointId, group: Group, opened: ExitStack
) -> StoredCheckpoint | None:
    """Return the checkpoint of another rank; None if the directory of ``own`` does not have it."""
    path = path_of_pool(os.path.dirname(own.path), rank, group.world_size)
    if path is None:
        return None
    reader = opened.enter_context(closing(open_pool(path)))
    identity, wanted = reader.group, own.reader.group
    if identity is None or wanted is None or identity.world_id != wanted.world_id:
        return None
    return next(iter(usable_by_id(reader).get(name, ())), None)
