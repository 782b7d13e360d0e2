"""Which checkpoint of a rank's pool is sent last, when its training was killed.

A checkpoint counts only if all ranks send it, and ranks may be killed one step apart. If the pools of all ranks lie in
one directory, the newest checkpoint that all of them hold is known, and no pool overwrites it before all hold a newer
one (``ranks/rule.py``). The pools of other hosts cannot be read, so all that the own pool holds is sent: the newest
common checkpoint is among it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress

from lightck.errors import PoolError
from lightck.pool.commit_log import candidates
from lightck.pool.format.structures import DamagedError
from lightck.pool.reader import open_pool


def generations_at_end(pool: str, pools_of_ranks: Sequence[str]) -> list[int | None]:
    """Return the generations of the checkpoints to be sent, newest first. (None is not among them.)
    ``pools_of_ranks``: the pools of all ranks; empty if they cannot be read. Raises ``PoolError`` if the own pool
    cannot be read."""
    own = _generations(pool)
    if pools_of_ranks:
        with suppress(PoolError):  # a rank's pool is lost: nothing is known
            held = [set(_generations(each)) for each in pools_of_ranks]
            newest = max(set.intersection(set(own), *held), default=None)
            return [] if newest is None else [own[newest]]
    return [own[each] for each in sorted(own, reverse=True)]


def _generations(pool: str) -> dict[tuple[int, int], int]:
    """Return (incarnation, step) -> generation of each checkpoint of a pool whose header can be read."""
    found: dict[tuple[int, int], int] = {}
    with closing(open_pool(pool)) as reader:
        for record in candidates(reader.commit_log()):
            with suppress(DamagedError):
                incarnation = reader.checkpoint(record).header.incarnation
                found.setdefault((incarnation, record.step), record.payload_generation)
    return found
