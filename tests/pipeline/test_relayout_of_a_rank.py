"""A relayout of the pool of a rank: the new file belongs to the same group and knows the same pieces."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pools_by_hand as by_hand
import pytest

from lightck.pipeline.current_pool import CurrentPool
from lightck.pipeline.pool_kind import WholeCheckpoints
from lightck.pool.engine import Engine
from lightck.pool.format.group import GroupIdentity
from lightck.pool.format.layout import Entry
from lightck.pool.format.pieces import Shard, StridedShard, local_pieces
from lightck.pool.listener import CommitEvents
from lightck.pool.reader import StoredCheckpoint, open_pool
from lightck.pool.storage.backends import backend_for
from lightck.tiers.pin import Holds

GROUP = GroupIdentity(
    run_id=bytes(16), world_id=bytes(range(16)), rank=1, world_size=2, mesh_shape=(2,), coordinate=(1,)
)


def part(name: str, logical_shape: tuple[int, ...], placement: Shard | StridedShard) -> Entry:
    shape, pieces = local_pieces(logical_shape, GROUP.mesh_shape, GROUP.coordinate, [placement])
    return by_hand.entry(name, shape, logical_shape=logical_shape, pieces=pieces)


@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_relayout_keeps_group_and_pieces(pool: Path, is_pinned: bool) -> None:
    weight, late = part("model/w", (9, 4), Shard(0)), part("state/late", (12, 2), StridedShard(0, 3))
    late = late._replace(role="state")
    by_hand.make(pool, [weight], group=GROUP)
    with by_hand.writer_of(pool) as writer:
        by_hand.commit(writer, 1, [late])
    kind, engine, events = backend_for(str(pool)), Engine(1), CommitEvents()
    current = CurrentPool(str(pool), kind, kind.probe(str(pool)), engine, 3, None, events, WholeCheckpoints())
    try:
        old = current.open(open_pool(str(pool), write=True))
        old.adopt(max(old.commit_log.records.values()))
        if is_pinned:
            holds = Holds()
            holds.take(old, is_pin=True)
            events.add(holds)
        current.n_slots = 3
        more = part("model/more", (5, 5), Shard(1))
        current.relayout([weight, more], 100, lambda writer: by_hand.commit(writer, 2))
    finally:
        current.close()
        engine.close()
    with closing(open_pool(str(pool))) as reader:
        assert reader.group == GROUP
        assert len(reader.superblock.slots) == 3
        newest, *others = [v for v in reader.checkpoints() if isinstance(v, StoredCheckpoint)]
        newest.verify()
        assert [v.step for v in others] == ([1] if is_pinned else [])
        if is_pinned:
            others[0].verify()
            assert others[0].entries["state/late"]._replace(offset=0) == late
        assert newest.entries["model/w"]._replace(offset=0) == weight
        assert newest.entries["model/more"]._replace(offset=0) == more
