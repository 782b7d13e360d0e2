"""Make the golden pools of ranks anew: ``PYTHONPATH=tests python tests/pool/golden/make_group_golden.py``, from the top
of the repository. What ``make_golden.py`` says of when this may be done holds here too.

``v1-group.pool.xz`` is the pool of rank 3 of 4, at (1, 1) of a mesh of 2 x 2. Its tensors: a plain one and one that is
tied to it, a scalar, an uneven shard in bfloat16, an empty shard, a strided shard of three pieces, one with padding,
and an extra entry that is sharded. Its last checkpoint has all of them, the ones before it lack the extra entry. An
adoption lies between them.

``v1-group-replica.pool.xz`` is the pool of rank 1 of 2 without a mesh, with plain tensors alone.

``v1-group-shares.pool.xz`` is that of rank 3 of 4 again. Ranks 1 and 3 divide a whole tensor, a shard, a strided shard
of several pieces and one of which rank 3 writes no row; one they hold with different bytes. The extra entry is a share.

The tensors' bytes are those of ``pools_by_hand.content``. ``v1-group.json`` holds what is in both pools.
"""

from __future__ import annotations

import json
import lzma
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pools_by_hand as by_hand
import torch

from lightck.pool.format.group import GroupIdentity
from lightck.pool.format.layout import Entry, entry_of_share
from lightck.pool.format.pieces import Piece, Replicate, Shard, StridedShard, local_pieces
from lightck.pool.format.shares import Cut, Share
from lightck.pool.reader import PoolReader, StoredCheckpoint, open_pool

HERE = Path(__file__).parent
EXPECTED = HERE / "v1-group.json"
MESH, PLACE = (2, 2), (1, 1)
RUN, WORLD, OTHER_WORLD = (bytes(range(start, start + 16)) for start in (0, 16, 32))
SHARDED = GroupIdentity(run_id=RUN, world_id=WORLD, rank=3, world_size=4, mesh_shape=MESH, coordinate=PLACE)
REPLICA = GroupIdentity(run_id=RUN, world_id=OTHER_WORLD, rank=1, world_size=2)


def part(name: str, logical_shape: tuple[int, ...], *placements: Any, **fields: Any) -> Entry:
    shape, pieces = local_pieces(logical_shape, MESH, PLACE, placements)
    return by_hand.entry(name, shape, logical_shape=logical_shape, pieces=pieces, **fields)


def entries() -> list[Entry]:
    padded = (Piece((6, 0), (4, 2), (0, 0)),)
    return [
        by_hand.entry("model/plain", (5, 2), layer=0),
        by_hand.entry("model/tied", (5, 2), layer=1, alias="model/plain", nbytes=0),
        part("model/scale", (), Replicate(), Replicate(), layer=1),
        part("model/uneven", (13, 3), Replicate(), Shard(0), dtype="bfloat16", layer=2),
        part("model/empty", (1, 3), Replicate(), Shard(0), layer=3),
        part("model/strided", (12, 2), StridedShard(0, 3), Replicate(), layer=4),
        by_hand.entry("model/padded", (6, 2), logical_shape=(10, 2), pieces=padded, layer=5),
    ]


def make(path: Path) -> None:
    """``v1-group``."""
    state = _state()
    with patch("os.urandom", lambda n: bytes(range(n))):
        by_hand.make(path, entries(), group=SHARDED)
    with by_hand.writer_of(path) as writer:
        by_hand.commit(writer, 1, state=state)
        by_hand.commit(writer, 2, state=state)
    with by_hand.writer_of(path) as writer:
        writer.adopt(max(writer.commit_log.records.values()))
        extra = part("state/late", (9, 4), Shard(1), Shard(0), role="state")
        by_hand.commit(writer, 3, [extra], state=state)


def make_replica(path: Path) -> None:
    """``v1-group-replica``."""
    with patch("os.urandom", lambda n: bytes(range(n))):
        by_hand.make(path, [by_hand.entry("model/w", (4, 3), layer=0)], group=REPLICA)
    with by_hand.writer_of(path) as writer:
        by_hand.commit(writer, 1, state=_state())


def share(held: Entry, bound: int, *, is_whole: bool = False) -> Entry:
    """What rank 3 writes of a tensor. ``bound``: the first of its rows."""
    cut = Cut(held.shape, 0, (0, bound, held.shape[0]), (1, 3))
    return entry_of_share(held, Share(cut, 1, is_whole))


def make_shares(path: Path) -> None:
    """``v1-group-shares``."""
    state = _state()
    shares = [
        by_hand.entry("model/plain", (3,), layer=0),
        share(by_hand.entry("model/whole", (5, 2), layer=0), 2),
        share(part("model/shard", (13, 3), Replicate(), Shard(0), dtype="bfloat16", layer=1), 4),
        share(part("model/strided", (12, 2), Replicate(), StridedShard(0, 3), layer=2), 1),
        share(part("model/empty", (4, 3), Replicate(), Shard(0), layer=3), 2),
        share(part("model/differs", (8, 3), Replicate(), Shard(0), layer=4), 1, is_whole=True),
    ]
    with patch("os.urandom", lambda n: bytes(range(n))):
        by_hand.make(path, shares, group=SHARDED)
    with by_hand.writer_of(path) as writer:
        by_hand.commit(writer, 1, state=state)
        extra = share(part("optimizer/shard/late", (13, 3), Replicate(), Shard(0), role="optimizer"), 4)
        by_hand.commit(writer, 2, [extra], state=state)


MAKERS = {"v1-group": make, "v1-group-replica": make_replica, "v1-group-shares": make_shares}


def _state() -> bytes:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    return by_hand.small_state()


def expected(path: Path) -> dict[str, Any]:
    """What lies in a pool, as JSON has it."""
    with closing(open_pool(str(path))) as reader:
        checkpoints = [v for v in reader.checkpoints() if isinstance(v, StoredCheckpoint)]
        assert reader.group is not None
        group = {name: getattr(reader.group, name) for name in GroupIdentity.__slots__}
        found = {
            "group": {name: value.hex() if isinstance(value, bytes) else value for name, value in group.items()},
            "entries": maps(reader, reader.entries),
            "checkpoints": [_checkpoint(v) for v in checkpoints],
        }
    return dict(json.loads(json.dumps(found)))


def maps(reader: PoolReader, entries: Sequence[Entry]) -> list[dict[str, object]]:
    return [one.to_map(has_group=True, has_shares=reader.superblock.has_shares) for one in entries]


def _checkpoint(stored: StoredCheckpoint) -> dict[str, Any]:
    return {
        "step": stored.step,
        "generation": stored.record.generation,
        "incarnation": stored.record.incarnation,
        "extras": maps(stored.reader, stored.extras),
        "tensors": {name: bytes_of(stored, name).hex() for name, one in stored.entries.items() if one.alias is None},
    }


def bytes_of(stored: StoredCheckpoint, name: str) -> bytes:
    data = np.zeros(stored.entries[name].nbytes, np.uint8)
    stored.read_into(name, data.ctypes.data)
    return data.tobytes()


def main() -> int:
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for name, maker in MAKERS.items():
            path = Path(folder) / f"{name}.pool"
            maker(path)
            found[name] = expected(path)
            packed = lzma.compress(path.read_bytes(), preset=9 | lzma.PRESET_EXTREME)
            (HERE / f"{name}.pool.xz").write_bytes(packed)
            print(f"{name}: {len(packed)} bytes")
    EXPECTED.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
