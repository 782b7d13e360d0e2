"""A training with DeepSpeed's tensor parallelism and ZeRO-1: each tensor is cut into two slices, and each slice lies in
the flat partitions of two ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from ranked import run_ranks, values
from torch import nn

from . import zero
from .deepspeed_slices import Case, fused
from .zero import BATCH, STEPS, Saved

N_SLICES = 2
N_RANKS = 4
HEADS = [15, 9, 9]
"""Elements of query, key and value."""
WIDTHS = [[8, 7], [5, 4], [5, 4]]
"""How DeepSpeed cuts them."""


class Model(nn.Module):
    """No attention is computed, but its tensors are there. All sizes but one are odd."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.heads = nn.Linear(7, sum(HEADS))
        self.output = nn.Linear(HEADS[0], 7)
        self.up = nn.Linear(7, 10)
        self.down = nn.Linear(10, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.heads(self.norm(x))
        n = self.output.weight.shape[1]  # of this rank
        query, others = heads[..., :n], heads[..., n:]
        return self.down(torch.tanh(self.up(self.output(torch.tanh(query) * others.mean()))))


def _replicated(n: int) -> Case:
    return Case((n,), 0, [[(0, n)]] * N_SLICES)


LAYOUT = {
    "norm.weight": _replicated(7),
    "norm.bias": _replicated(7),
    "heads.weight": Case((sum(HEADS), 7), 0, fused(HEADS, WIDTHS)),
    "heads.bias": Case((sum(HEADS),), 0, fused(HEADS, WIDTHS)),
    "output.weight": Case((7, 15), 1, [[(0, 8)], [(8, 7)]]),
    "output.bias": _replicated(7),
    "up.weight": Case((10, 7), 0, [[(0, 5)], [(5, 5)]]),
    "up.bias": Case((10,), 0, [[(0, 5)], [(5, 5)]]),
    "down.weight": Case((1, 10), 1, [[(0, 5)], [(5, 5)]]),
    "down.bias": _replicated(1),
}
"""Parameter -> its slices."""
_SPECS = [
    {"patterns": [r".*heads\.weight$"], "partition_type": "column", "shape": [HEADS, -1], "partition_dim": 0},
    {"patterns": [r".*up\.weight$"], "partition_type": "column"},
    {"patterns": [r".*output\.weight$", r".*down\.weight$"], "partition_type": "row"},
]
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
    "tensor_parallel": {
        "autotp_size": N_SLICES,
        "partition_config": {"use_default_specs": False, "layer_specs": _SPECS},
    },
}


def trained(folder: Path) -> list[Saved]:
    """Train, save and convert. Return what was saved of each slice."""

    def trains(rank: int) -> None:
        _train(zero.imported(rank, N_RANKS), rank, folder)

    def converts(rank: int) -> list[Saved]:
        os.environ["DS_ACCELERATOR"] = "cpu"
        zero.convert(folder)
        return [zero.saved(1, folder, number) for number in range(N_SLICES)]

    values(run_ranks(N_RANKS, trains))
    return values(run_ranks(1, converts, has_group=False))[0]


def _train(deepspeed: Any, rank: int, folder: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    torch.manual_seed(1 + rank // N_SLICES)  # the ranks with the slices of a model have the same batches
    for _ in range(STEPS):
        engine.backward((engine(torch.randn(BATCH, 7)) - 1).square().mean())
        engine.step()
    engine.save_checkpoint(str(folder), tag="saved")
    engine.destroy()
