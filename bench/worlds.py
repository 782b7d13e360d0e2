"""What it costs to read another world's pools: python bench/worlds.py [--out DIR].

Two ranks of ``fully_shard`` save a model with AdamW. Then the parts of the ranks of other worlds are read and verified,
one rank after the other, and so are those of the same world; these take turns. A row says how long a byte takes in
another world, over how long it takes in the same one, and how many bytes of the pools are read for each byte of a part.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import lightck
from lightck.pool.format.pieces import Placement, Replicate, Shard, local_pieces
from lightck.pool.reader import StoredCheckpoint
from lightck.ranks.directory import open_worlds
from lightck.restore.contents import empty_for
from lightck.restore.directory import common_checkpoints, logical_of
from lightck.restore.logical import LogicalCheckpoint
from lightck.restore.relocated import Relocated
from lightck.state.parts import Part

if __name__ == "__main__":  # the processes of the ranks are made by a module of the tests
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

SAVED = 2
"""Number of ranks that save."""


def save(directory: Path, width: int, layers: int) -> None:
    """Save a model on ``SAVED`` ranks."""
    from ranked import run_ranks, values
    from torch.distributed.fsdp import fully_shard

    def body(rank: int) -> None:
        torch.set_num_threads(1)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        with lightck.attach(model, directory, optimizer=optimizer, interval=1):
            model(torch.ones(1, width)).sum().backward()
            optimizer.step()

    values(run_ranks(SAVED, body))


def parts(logical: LogicalCheckpoint, n_ranks: int, rank: int, placement: Placement) -> dict[str, Part]:
    """The parts of one rank, if all parameters are cut in one way."""
    found = {}
    for name, entry in logical.entries.items():
        if entry.role == "param":
            shape, pieces = local_pieces(entry.shape, (n_ranks,), (rank,), [placement])
            found[name] = Part(shape, entry.shape, pieces)
    return found


class Reading:
    """The parts of one rank, with memory for them."""

    def __init__(self, logical: LogicalCheckpoint, n_ranks: int, rank: int, placement: Placement) -> None:
        self._source = Relocated(logical, parts(logical, n_ranks, rank, placement))
        own = {name: entry for name, entry in self._source.entries.items() if entry.nbytes}
        self._tensors = {name: empty_for(entry, "cpu").zero_() for name, entry in own.items()}
        self.nbytes = sum(entry.nbytes for entry in own.values())

    def seconds(self) -> float:
        begin = time.perf_counter()
        self._source.read_many([(name, tensor.data_ptr()) for name, tensor in self._tensors.items()])
        return time.perf_counter() - begin

    def pool_nbytes(self) -> int:
        """How many bytes of the pools are read."""
        n_read: list[int] = []
        read = StoredCheckpoint.read_blocks

        def counted(stored: StoredCheckpoint, places: Sequence[tuple[str, int, int, int]]) -> None:
            n_read.extend(nbytes for _, _, nbytes, _ in places)
            read(stored, places)

        StoredCheckpoint.read_blocks = counted  # type: ignore[assignment,method-assign]
        try:
            self.seconds()
        finally:
            StoredCheckpoint.read_blocks = read  # type: ignore[method-assign]
        return sum(n_read)


WORLDS: dict[str, tuple[int, Placement]] = {
    "3 ranks, rows": (3, Shard(0)),
    "4 ranks, rows": (4, Shard(0)),
    "2 ranks, columns": (2, Shard(1)),
    "3 ranks, columns": (3, Shard(1)),
    "1 rank, whole": (1, Replicate()),
}


def measure(directory: Path, turns: int) -> list[dict[str, Any]]:
    rows = []
    with ExitStack() as stack:
        (world,) = stack.enter_context(open_worlds(str(directory)))
        held = common_checkpoints(world)
        logical = logical_of(str(directory), world, held[max(held)])
        same = Reading(logical, SAVED, 0, Shard(0))
        for name, (n_ranks, placement) in WORLDS.items():
            other = Reading(logical, n_ranks, n_ranks - 1, placement)
            pairs = [(same.seconds(), other.seconds()) for _ in range(turns + 1)][1:]
            ratios = [(b / other.nbytes) / (a / same.nbytes) for a, b in pairs]
            rows.append(
                {
                    "world": name,
                    "nbytes": other.nbytes,
                    "seconds_per_byte_over_same_world": ratios,
                    "same_world_bytes_per_second": same.nbytes / median(a for a, _ in pairs),
                    "pool_bytes_over_own": other.pool_nbytes() / other.nbytes,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write worlds.json into this folder")
    parser.add_argument("--small", action="store_true", help="a small model: only that it runs")
    args = parser.parse_args()
    width, layers, turns = (256, 2, 1) if args.small else (4096, 3, 7)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        save(Path(folder) / "pools", width, layers)
        rows = measure(Path(folder) / "pools", turns)
    for row in rows:
        ratio, more = median(row["seconds_per_byte_over_same_world"]), row["pool_bytes_over_own"]
        speed = row["same_world_bytes_per_second"] / 1e9
        print(f"{row['world']}: a byte takes {ratio:.2f} x as long as in the same world ({speed:.2f} GB/s there)")
        print(f"  {more:.2f} bytes of the pools are read for each")
    if args.out is not None:
        (args.out / "worlds.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
