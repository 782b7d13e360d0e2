"""Shares: which rows of a tensor each rank of a host writes, if all of them hold the whole tensor.

The ranks of a host lay all these tensors end to end, and cut the result into as many parts of equal size as there are
ranks. A cut lies between two rows of a tensor. So each rank writes most of its tensors whole, a few in part, and the
others not at all. In the pool a share is a part of the tensor: it has the logical shape and pieces, as the shard of a
DTensor has. Nothing here knows of torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightck.pool.format.boxes import Ints
from lightck.pool.format.layout import ITEM_NBYTES, Entry
from lightck.pool.format.pieces import Piece


class Cut(NamedTuple):
    """How the ranks of a host divide one tensor."""

    shape: Ints
    """Of the tensor."""
    dim: int
    """The dimension that is divided; "row" means an index of this dimension."""
    bounds: Ints
    """The n-th rank of the host writes the rows from ``bounds[n]`` to ``bounds[n + 1]`` (excluded)."""


class Share(NamedTuple):
    """What one rank writes of a tensor."""

    cut: Cut
    place: int
    """The rank is number ``place`` among the ranks of its host, from 0."""
    is_whole: bool = False
    """Whether the rank writes the other rows too, because its tensor differs from that of another rank."""

    @property
    def rows(self) -> tuple[int, int]:
        """First row, and number of rows."""
        first, end = self.cut.bounds[self.place : self.place + 2]
        return first, end - first


class Divisible(NamedTuple):
    """A tensor that is to be divided. ``weight``: bytes that are written for one row (of the tensor, and of optimizer
    state that is divided in the same way)."""

    name: str
    shape: Ints
    dim: int
    weight: int


def dim_to_divide(shape: Sequence[int], stride: Sequence[int]) -> int | None:
    """Return the dimension whose rows lie one after the other in memory, if the tensor is dense. Return None for a
    tensor with less than two elements, which is not divided."""
    if math.prod(shape) < 2:
        return None
    return max((dim for dim, size in enumerate(shape) if size > 1), key=lambda dim: (stride[dim], -dim))


def divided(tensors: Iterable[Divisible], n_ranks: int) -> dict[str, Cut]:
    """Divide tensors among ``n_ranks`` ranks. Returns name -> cut. All ranks that pass the same tensors in the same
    order get the same result, in which a rank's part differs from the mean by less than one row."""
    tensors = list(tensors)
    total, before, cuts = sum(one.shape[one.dim] * one.weight for one in tensors), 0, {}
    for one in tensors:
        rows = one.shape[one.dim]
        inner = [
            min(max(round((total * n / n_ranks - before) / max(one.weight, 1)), 0), rows) for n in range(1, n_ranks)
        ]
        cuts[one.name] = Cut(one.shape, one.dim, (0, *inner, rows))
        before += rows * one.weight
    return cuts


def entry_of_share(entry: Entry, share: Share) -> Entry:
    """Return the entry of a share. ``entry``: that of the whole tensor, of shape ``share.cut.shape``."""
    shape, pieces = written_part(share)
    nbytes = 0 if entry.alias is not None else math.prod(shape) * ITEM_NBYTES[entry.dtype]
    return entry._replace(shape=shape, nbytes=nbytes, logical_shape=entry.shape, pieces=pieces)


def written_part(share: Share) -> tuple[Ints, tuple[Piece, ...]]:
    """Return the shape and the pieces of what a rank writes.

    If it writes the whole tensor, the first piece is its share, which must not be empty. The pieces for the rows before
    and after it follow. So a reader knows whose share each row is, even if several ranks write the whole tensor."""
    (shape, dim, _), (first, n_rows) = share.cut, share.rows
    if share.is_whole:
        last = first + n_rows
        runs = [(first, n_rows), (0, first), (last, shape[dim] - last)]
        return shape, tuple(_rows(shape, dim, at, n, at) for at, n in runs if n)
    own = (*shape[:dim], n_rows, *shape[dim + 1 :])
    return own, (_rows(shape, dim, first, n_rows, 0),) if n_rows else ()


def _rows(shape: Ints, dim: int, start: int, n_rows: int, local: int) -> Piece:
    """Return the piece of ``n_rows`` rows that begin at ``start`` in the tensor and at ``local`` in the local one."""
    zeros = (0,) * len(shape)
    return Piece(
        (*zeros[:dim], start, *zeros[dim + 1 :]),
        (*shape[:dim], n_rows, *shape[dim + 1 :]),
        (*zeros[:dim], local, *zeros[dim + 1 :]),
    )
