"""Shares: which rows of a tensor each rank of a host writes, if several of them hold the same.

What they hold is a *held tensor*: a whole tensor, or the same shard of one (the local tensor of a DTensor). The ranks
that hold the same tensors lay them end to end, and cut the result into as many parts of equal size as there are ranks.
A cut lies between two rows of a tensor. So a rank writes some of the tensors whole, a few in part, and the others not
at all. In the pool a share is a part of the logical tensor, with pieces, as a shard is; and it says what the rank
holds, and which ranks write the other rows. Nothing here knows of torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from lightck.pool.format.boxes import Ints, are_ints, are_sizes
from lightck.pool.format.group import RANKS_MAX
from lightck.pool.format.pieces import Piece, is_flat, parse_pieces
from lightck.pool.format.structures import DamagedError


class Cut(NamedTuple):
    """How ranks of a host divide one tensor that all of them hold."""

    shape: Ints
    """The shape of the held tensor."""
    dim: int
    """The dimension that is divided; "row" means an index of this dimension."""
    bounds: Ints
    """The rank ``ranks[n]`` writes the rows from ``bounds[n]`` to ``bounds[n + 1]`` (excluded)."""
    ranks: Ints
    """The ranks that divide it, in ascending order."""


class Share(NamedTuple):
    """What one rank writes of a tensor."""

    cut: Cut
    place: int
    """The rank is number ``place`` in ``cut.ranks``, from 0."""
    is_whole: bool = False
    """Whether the rank writes the other rows too, because its tensor differs from that of another rank."""
    pieces: tuple[Piece, ...] | None = None
    """The pieces of the logical tensor that the held tensor consists of; set in entries only. None: the held tensor is
    the whole logical tensor."""

    @property
    def rows(self) -> tuple[int, int]:
        """First row and number of rows that the cut gives to this rank, also if ``is_whole`` is true."""
        return self.rows_of(self.place)

    def rows_of(self, place: int) -> tuple[int, int]:
        """First row and number of rows that the cut gives to the rank ``cut.ranks[place]``."""
        first, end = self.cut.bounds[place : place + 2]
        return first, end - first


class Divisible(NamedTuple):
    """A tensor that is to be divided. ``row_nbytes``: bytes that are written for one row (of the tensor, and of
    optimizer state that is divided in the same way)."""

    name: str
    shape: Ints
    dim: int
    row_nbytes: int


def dim_to_divide(shape: Sequence[int], stride: Sequence[int]) -> int | None:
    """Return the dimension whose rows lie one after the other in memory, if the tensor is dense. Return None for a
    tensor with less than two elements, which is not divided."""
    if math.prod(shape) < 2:
        return None
    return max((dim for dim, size in enumerate(shape) if size > 1), key=lambda dim: (stride[dim], -dim))


def divide(tensors: Iterable[Divisible], ranks: Ints) -> dict[str, Cut]:
    """Divide tensors among these ranks. Returns name -> cut. All ranks that pass the same tensors in the same order get
    the same result, in which a rank's part differs from the mean by at most one row."""
    tensors, n_ranks = list(tensors), len(ranks)
    total, before, cuts = sum(one.shape[one.dim] * one.row_nbytes for one in tensors), 0, {}
    for one in tensors:
        rows = one.shape[one.dim]
        inner = [
            min(max(round((total * n / n_ranks - before) / max(one.row_nbytes, 1)), 0), rows) for n in range(1, n_ranks)
        ]
        cuts[one.name] = Cut(one.shape, one.dim, (0, *inner, rows), ranks)
        before += rows * one.row_nbytes
    return cuts


def written_part(share: Share) -> tuple[Ints, tuple[Piece, ...]]:
    """Return the shape and the pieces of what a rank writes."""
    held = _whole_piece(share.cut.shape) if share.pieces is None else share.pieces
    if share.is_whole:
        return share.cut.shape, held
    (shape, dim, *_), (first, n_rows) = share.cut, share.rows
    rows = [_rows_of(piece, dim, first, n_rows) for piece in held]
    return (*shape[:dim], n_rows, *shape[dim + 1 :]), tuple(piece for piece in rows if piece is not None)


def _whole_piece(shape: Ints) -> tuple[Piece, ...]:
    zeros = (0,) * len(shape)
    return (Piece(zeros, shape, zeros),)


def _rows_of(piece: Piece, dim: int, first: int, n_rows: int) -> Piece | None:
    """Return the part of a piece that lies in these rows of the local tensor. Its local start is that in a tensor of
    these rows alone. None: no element of the piece lies in these rows."""
    start, size, local_start = piece
    low, high = max(first, local_start[dim]), min(first + n_rows, local_start[dim] + size[dim])
    if low >= high:
        return None
    return Piece(
        (*start[:dim], start[dim] + low - local_start[dim], *start[dim + 1 :]),
        (*size[:dim], high - low, *size[dim + 1 :]),
        (*local_start[:dim], low - first, *local_start[dim + 1 :]),
    )


# -- in a pool ---------------------------------------------------------------------------------------------------------


def share_to_map(share: Share) -> dict[str, object]:
    """Return the map that an entry contains."""
    cut = share.cut
    pieces = None if share.pieces is None else [[list(numbers) for numbers in piece] for piece in share.pieces]
    return {
        "shape": list(cut.shape),
        "dim": cut.dim,
        "bounds": list(cut.bounds),
        "ranks": list(cut.ranks),
        "place": share.place,
        "whole": share.is_whole,
        "pieces": pieces,
    }


def parse_share(item: object, local_shape: Ints, logical_shape: object, pieces: tuple[Piece, ...] | None) -> Share:
    """Check a share that was read from a pool, and return it. ``local_shape``, ``logical_shape``, ``pieces``: of its
    entry, already checked (None: the entry is no part). Raises ``DamagedError`` unless each value has its type, the
    bounds divide the rows of the held tensor among the ranks, and the entry is what the rank writes of it."""
    if not isinstance(item, dict) or item.keys() != _KEYS:
        raise DamagedError("share: it has the wrong keys")
    shape, dim, bounds, ranks = item["shape"], item["dim"], item["bounds"], item["ranks"]
    ndim, n_ranks = len(local_shape), len(ranks) if isinstance(ranks, list) else 0
    if not are_sizes(shape, ndim) or type(dim) is not int or not 0 <= dim < ndim:
        raise DamagedError("share: its shape or its dimension does not fit the tensor")
    if n_ranks < 2 or not are_ints(ranks, n_ranks) or not all(a < b for a, b in pairwise([-1, *ranks])):
        raise DamagedError("share: its ranks are no list of two or more ranks in ascending order")
    if not are_ints(bounds, n_ranks + 1) or not all(a <= b for a, b in pairwise([0, *bounds])):
        raise DamagedError("share: its bounds do not fit its ranks")
    if (bounds[0], bounds[-1]) != (0, shape[dim]) or ranks[-1] >= RANKS_MAX:
        raise DamagedError("share: its bounds do not divide the rows of the tensor, or a rank is too large")
    if type(item["place"]) is not int or not 0 <= item["place"] < n_ranks or type(item["whole"]) is not bool:
        raise DamagedError("share: its place is not an index into its ranks, or its key whole is not a bool")
    held = None if item["pieces"] is None else parse_pieces(item["pieces"], logical_shape, shape)
    if held is None and logical_shape != shape:
        raise DamagedError("share: the rank does not hold the whole tensor, and no pieces say what it holds")
    if held is not None and is_flat(held):
        raise DamagedError("share: the tensor is flat, and ranks of a host never divide such a tensor")
    cut = Cut(tuple(shape), dim, tuple(bounds), tuple(ranks))
    share = Share(cut, item["place"], item["whole"], held)
    if 0 in cut.shape or written_part(share) != (local_shape, pieces):
        raise DamagedError("share: the tensor in the pool is not the part that the bounds give to this rank")
    return share


_KEYS = {"shape", "dim", "bounds", "ranks", "place", "whole", "pieces"}
