"""Slices of tensors under tensor parallelism, and what DeepSpeed merges them into.

A slice is cut along one dimension: it has some runs of it, one after the other. DeepSpeed knows most of these layouts
by patterns of names (``PARAMETER_WITH_SUB_PARAMS`` and others), and others by an affine map: for each rank, strided
views of the whole tensor and of the slice. As in ``zero.py``, DeepSpeed is imported in a forked process only.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from ranked import run_ranks, values

from lightck.pool.format.boxes import Box, Ints, intersection, whole_box
from lightck.pool.format.pieces import Piece, Placement, Replicate, Shard, StridedShard, local_pieces

from .zero import KINDS, Tensors

Runs: TypeAlias = list[tuple[int, int]]
"""Start and length of what a rank has of one dimension."""
ALL = ".*"
"""The pattern of all parameters."""
FUSED = "parameter_with_sub_params"
WIDTHS = "sub_param_shard_widths"


@dataclass
class Case:
    """A tensor, and its slices on the ranks."""

    shape: Ints
    dim: int
    """The dimension that is cut."""
    runs: list[Runs]
    """What each rank has of it."""
    info: dict[str, Any] = field(default_factory=dict)
    """How DeepSpeed is to merge the slices: ``universal_checkpoint_info``."""
    map: tuple[Any, ...] = ()
    """A function of ``deepspeed.checkpoint.affine`` and its arguments, which make an affine map of the same layout. If
    there is no ``info``, DeepSpeed merges by this map."""
    placement: Placement | None = None
    """The placement that gives the same runs, if there is one."""
    n_rows: int = 0
    """How many of the first rows are no padding; 0: all are."""

    @property
    def logical_shape(self) -> Ints:
        return (self.n_rows or self.shape[0], *self.shape[1:])

    def pieces(self) -> list[tuple[Piece, ...]]:
        """The pieces of each rank. Padding belongs to none."""
        n_ranks = len(self.runs)
        if self.placement is None:
            found = [tuple(_pieces(self.shape, self.dim, runs)) for runs in self.runs]
        else:
            found = [local_pieces(self.shape, [n_ranks], [rank], [self.placement])[1] for rank in range(n_ranks)]
        return [tuple(_without_padding(pieces, self.logical_shape)) for pieces in found]

    def slices(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Cut the tensor for the ranks."""
        return [torch.cat([whole.narrow(self.dim, *run) for run in runs], self.dim) for runs in self.runs]


def _pieces(shape: Ints, dim: int, runs: Runs) -> list[Piece]:
    ends = np.cumsum([length for _, length in runs]).tolist()
    zeros = (0,) * len(shape)
    return [
        Piece(_with(zeros, dim, start), _with(shape, dim, length), _with(zeros, dim, end - length))
        for (start, length), end in zip(runs, ends, strict=True)
        if length
    ]


def _with(sizes: Ints, dim: int, size: int) -> Ints:
    return (*sizes[:dim], size, *sizes[dim + 1 :])


def _without_padding(pieces: Sequence[Piece], shape: Ints) -> list[Piece]:
    """Each piece begins in the tensor, if any of it lies in the tensor."""
    kept = [(intersection(Box(piece.start, piece.size), whole_box(shape)), piece.local_start) for piece in pieces]
    return [Piece(*box, local_start) for box, local_start in kept if box is not None]


def fused(sizes: list[int], widths: list[list[int]]) -> list[Runs]:
    """The runs of each rank of a tensor that has several parts, such as query, key and value. ``widths``: for each
    part, how much of it each rank has."""
    begins = np.cumsum([0, *sizes])[:-1].tolist()
    of_parts = [
        [(begin + sum(of_part[:rank]), width) for rank, width in enumerate(of_part)]
        for begin, of_part in zip(begins, widths, strict=True)
    ]
    return [list(runs) for runs in zip(*of_parts, strict=True)]


def _fused_info(shape: tuple[Any, ...], dim: int, widths: list[list[int]]) -> dict[str, Any]:
    parts = {"patterns": [ALL], "shape": shape, "partition_dim": dim}
    return {FUSED: [parts], WIDTHS: {ALL: widths}, "universal_checkpoint_version": 0.4}


GROUPED = [[8, 8, 4], [4, 4, 4], [4, 4, 4]]
"""Heads of 4 elements: 5 of the query, 3 each of key and value."""
FEW = [[8, 4, 0], [4, 0, 0], [4, 0, 0]]
"""3 heads of the query, one each of key and value; the last rank has nothing."""
BLOCKS = [[0, 1, 4], [2, 5, 6], [3]]
"""Which heads of 2 elements each rank has."""
CASES = {
    "rows": Case(
        (10, 7),
        0,
        [[(0, 4)], [(4, 4)], [(8, 2)]],
        {"universal_checkpoint_version": 0.4},
        ("contiguous_split_map", (10, 7), [4, 4, 2], 0),
        Shard(0),
    ),
    "columns": Case(
        (4, 7),
        1,
        [[(0, 3)], [(3, 3)], [(6, 1)]],
        {"parameter_with_row_parallelism_patterns": [ALL]},
        ("contiguous_split_map", (4, 7), [3, 3, 1], 1),
        Shard(1),
    ),
    "replicated": Case(
        (3, 5),
        0,
        [[(0, 3)]] * 3,
        {"tp_replicated_parameter_patterns": [ALL]},
        ("replicated_map", (3, 5), 3),
        Replicate(),
    ),
    "padded vocabulary": Case(
        (12, 5),
        0,
        [[(0, 4)], [(4, 4)], [(8, 4)]],
        {"vocabulary_parameter_patterns": [ALL], "original_vocab_size": 9},
        placement=Shard(0),
        n_rows=9,
    ),
    "vocabulary, a rank of padding": Case(
        (12, 5),
        0,
        [[(0, 4)], [(4, 4)], [(8, 4)]],
        {"vocabulary_parameter_patterns": [ALL], "original_vocab_size": 7},
        n_rows=7,
    ),
    "gate and up": Case(
        (12, 5),
        0,
        fused([6, 6], [[2, 2, 2]] * 2),
        {"parameter_with_2_sub_params_cat_dim_0": [ALL]},
        ("sub_param_map", (12, 5), [6, 6], [[2, 2, 2]] * 2, 0),
        StridedShard(0, 2),
    ),
    "query, key, value of one size": Case(
        (18, 5),
        0,
        fused([6, 6, 6], [[2, 2, 2]] * 3),
        {FUSED: [{"patterns": [ALL], "shape": (3, -1), "partition_dim": 0}]},
        ("sub_param_map", (18, 5), [6, 6, 6], [[2, 2, 2]] * 3, 0),
        StridedShard(0, 3),
    ),
    "grouped heads": Case(
        (44, 5),
        0,
        fused([20, 12, 12], GROUPED),
        _fused_info(((20, 12, 12), -1), 0, GROUPED),
        ("sub_param_map", (44, 5), [20, 12, 12], GROUPED, 0),
    ),
    "grouped heads in the columns": Case(
        (3, 44),
        1,
        fused([20, 12, 12], GROUPED),
        _fused_info((3, (20, 12, 12)), 1, GROUPED),
        ("sub_param_map", (3, 44), [20, 12, 12], GROUPED, 1),
    ),
    "grouped heads of a bias": Case(
        (44,),
        0,
        fused([20, 12, 12], GROUPED),
        _fused_info(((20, 12, 12),), 0, GROUPED),
        ("sub_param_map", (44,), [20, 12, 12], GROUPED, 0),
    ),
    "fewer heads than ranks": Case(
        (20, 3),
        0,
        fused([12, 4, 4], FEW),
        _fused_info(((12, 4, 4), -1), 0, FEW),
        ("sub_param_map", (20, 3), [12, 4, 4], FEW, 0),
    ),
    "key and value on all ranks": Case(
        (36, 3),
        0,
        [[(0, 8), (20, 16)], [(8, 8), (20, 16)], [(16, 4), (20, 16)]],
        map=("segmented_map", (36, 3), [(20, False), (16, True)], 0, 3, [[8, 8, 4]]),
    ),
    "chosen heads": Case(
        (14, 3),
        0,
        [[(0, 4), (8, 2)], [(4, 2), (10, 4)], [(6, 2)]],
        map=("block_gather_map", (14, 3), dict(enumerate(BLOCKS)), 2, 0),
    ),
    "chosen columns": Case(
        (2, 14, 3),
        1,
        [[(0, 4), (8, 2)], [(4, 2), (10, 4)], [(6, 2)]],
        map=("block_gather_map", (2, 14, 3), dict(enumerate(BLOCKS)), 2, 1),
    ),
}


@dataclass
class Merged:
    """What DeepSpeed makes of the slices of a case."""

    tensors: Tensors
    """Kind -> the whole tensor."""
    pieces: list[set[Piece]] | None
    """The affine map, as pieces of each rank; None without a map."""


def tensors(case: Case) -> Tensors:
    """Kind -> a tensor. All elements are different."""
    n = math.prod(case.shape)
    return {kind: torch.arange(at * n, (at + 1) * n).view(case.shape).float() for at, kind in enumerate(KINDS)}


def merged(folder: Path) -> dict[str, Merged]:
    """Let DeepSpeed merge the slices of all cases."""

    def body(rank: int) -> dict[str, Merged]:
        os.environ["DS_ACCELERATOR"] = "cpu"
        return {name: _merged(case, folder / name) for name, case in CASES.items()}

    return values(run_ranks(1, body, has_group=False))[0]


AVERAGE = "parameter_to_average_patterns"


def averaged(folder: Path, slices: Sequence[torch.Tensor]) -> torch.Tensor:
    """What DeepSpeed makes of a parameter that each rank holds whole, with values of its own."""

    def body(rank: int) -> torch.Tensor:
        os.environ["DS_ACCELERATOR"] = "cpu"
        merge = importlib.import_module("deepspeed.checkpoint.ds_to_universal").merge_tp_slices
        for at, one in enumerate(slices):
            for kind in KINDS:
                (folder / "slices" / "tensor" / str(at)).mkdir(parents=True, exist_ok=True)
                torch.save(one.flatten(), folder / "slices" / "tensor" / str(at) / f"{kind}.00")
        where = str(folder / "universal"), str(folder / "slices")
        merge({AVERAGE: [ALL]}, *where, len(slices), ("tensor", [one.shape for one in slices]))
        return torch.load(folder / "universal" / "tensor" / "exp_avg_sq.pt", weights_only=False)["param"]

    return values(run_ranks(1, body, has_group=False))[0]


def _merged(case: Case, folder: Path) -> Merged:
    """Save the slices as DeepSpeed's tool has them between its two steps, and run the second step."""
    affine = importlib.import_module("deepspeed.checkpoint.affine")
    merge = importlib.import_module("deepspeed.checkpoint.ds_to_universal").merge_tp_slices
    for kind, whole in tensors(case).items():
        for rank, part in enumerate(case.slices(whole)):
            if part.numel():
                (folder / "slices" / "tensor" / str(rank)).mkdir(parents=True, exist_ok=True)
                torch.save(part.flatten(), folder / "slices" / "tensor" / str(rank) / f"{kind}.00")
    shapes = [part.shape for part in case.slices(torch.empty(case.shape))]
    found = getattr(affine, case.map[0])(*case.map[1:]) if case.map else None
    info = case.info or {"affine_map": {"version": 1, "params": {ALL: found.to_dict()}}}
    merge(info, str(folder / "universal"), str(folder / "slices"), len(case.runs), ("tensor", shapes))
    whole = {
        kind: torch.load(folder / "universal" / "tensor" / f"{kind}.pt", weights_only=False)["param"] for kind in KINDS
    }
    return Merged(whole, found and [_boxes(found, rank) for rank in range(len(case.runs))])


def _boxes(found: Any, rank: int) -> set[Piece]:
    """The affine map of a rank, as pieces."""
    return {
        Piece(
            _corner(view.source_offset, found.logical_shape),
            view.shape,
            _corner(view.dest_offset, found.shard_shapes[rank]),
        )
        for view in found.pieces_by_rank[rank]
        if view.numel
    }


def _corner(offset: int, shape: Ints) -> Ints:
    return tuple(int(at) for at in np.unravel_index(offset, shape))
