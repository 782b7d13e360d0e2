"""Make the golden pools of ranks anew: ``PYTHONPATH=tests python tests/pool/golden/make_group_golden.py``, from the top
of the repository. What ``make_golden.py`` says of when this may be done holds here too.

``v1-group.pool.xz`` is the pool of rank 3 of 4, at (1, 1) of a mesh of 2 x 2. Its tensors: a plain one and one that is
tied to it, a scalar, an uneven shard in bfloat16, an empty shard, a strided shard of three pieces, one with padding,
and an extra entry that is sharded. Its last checkpoint has all of them, the ones before it lack the extra entry. An
adoption lies between them.

``v1-group-replica.pool.xz`` is the pool of rank 1 of 2 without a mesh, with plain tensors alone.

The tensors' bytes are those of ``pools_by_hand.content``. ``v1-group.json`` holds what is in both pools.
"""

from __future__ import annotations

import json
import lzma
import random
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pools_by_hand as by_hand
import torch

from lightck.pool.format.group import GroupIdentity
from lightck.pool.format.layout import Entry
from lightck.pool.format.pieces import Piece, Replicate, Shard, StridedShard, local_pieces
from lightck.pool.reader import StoredCheckpoint, open_pool

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


MAKERS = {"v1-group": make, "v1-group-replica": make_replica}


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
            "entries": [one.to_map(has_group=True) for one in reader.entries],
            "checkpoints": [_checkpoint(v) for v in checkpoints],
        }
    return dict(json.loads(json.dumps(found)))


def _checkpoint(stored: StoredCheckpoint) -> dict[str, Any]:
    return {
        "step": stored.step,
        "generation": stored.record.generation,
        "incarnation": stored.record.incarnation,
        "extras": [one.to_map(has_group=True) for one in stored.extras],
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
