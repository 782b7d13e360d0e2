"""Pieces: which part of a logical tensor lies where in a local tensor.

A rank of a group holds a *local tensor*. Its elements belong to a *logical tensor*, the one that the model would have
in a single process. A ``Piece`` is a box that lies in both tensors. The functions of this file compute the pieces of a
rank from its placements, and check pieces that were read from a pool. (``assembly.py`` puts the pieces of several ranks
together.) Some elements of a local tensor may belong to no piece (padding).

A local tensor of one dimension may hold a tensor of any other number of dimensions *flat* (ZeRO): the elements of each
piece then lie one after the other in it, in C order, and the piece's start in it is one number.

Everything is counted in elements, from 0. Every tuple has one integer for each dimension; only the place of a flat
piece in its local tensor (``local_start``, ``local_size``) is a single number. Nothing here knows of torch, and nothing
loops over elements: the cost depends on the number of boxes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from lightck.errors import UnsupportedError
from lightck.pool.format.boxes import (
    Box,
    Ints,
    are_ints,
    are_sizes,
    check_shape,
    corners,
    flat_boxes,
    is_in,
    overlapping_pairs,
)
from lightck.pool.format.structures import DamagedError

PIECES_MAX = 1 << 12
"""Maximum number of pieces of one local tensor that a pool may have. Each is compared with many others."""
FLAT_NDIM_MAX = 64
"""Maximum number of dimensions of a tensor that is held flat."""


# -- values -----------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A box of the logical tensor, and where it lies in the local tensor. It has at least one element."""

    start: Ints
    """First element in the logical tensor."""
    size: Ints
    local_start: Ints
    """First element in the local tensor."""

    @property
    def is_flat(self) -> bool:
        """Whether the elements lie one after the other in a local tensor of one dimension, and the logical tensor has
        another number of dimensions."""
        return len(self.local_start) != len(self.size)

    @property
    def local_size(self) -> Ints:
        """Number of the piece's elements in each dimension of the local tensor."""
        return (math.prod(self.size),) if self.is_flat else self.size

    @property
    def alone(self) -> Piece:
        """The piece as it lies in a tensor that is nothing but this piece."""
        return self._replace(local_start=(0,) * len(self.size))


def is_flat(pieces: Sequence[Piece]) -> bool:
    """Whether a local tensor with these pieces holds a tensor of another number of dimensions."""
    return any(piece.is_flat for piece in pieces)


@dataclass(frozen=True, slots=True)
class Replicate:
    """Each rank along this mesh dimension holds the same elements."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Dimension ``dim`` is cut into one run for each rank along this mesh dimension. The length of a run is rounded up,
    so the last runs may be shorter or empty (the rule of ``torch.chunk``)."""

    dim: int


@dataclass(frozen=True, slots=True)
class StridedShard:
    """Dimension ``dim`` is cut into ``split_factor`` runs, and each of these runs is cut for the ranks as by ``Shard``.
    A rank holds its part of each run, one part after the other (torch's ``_StridedShard``)."""

    dim: int
    split_factor: int


@dataclass(frozen=True, slots=True)
class Partial:
    """Each rank along this mesh dimension holds numbers that must first be reduced to give the tensor. This placement
    is refused. ``reduce_op``: torch's name of the reduction, such as "sum"."""

    reduce_op: str


Placement: TypeAlias = Replicate | Shard | StridedShard | Partial


# -- from placements --------------------------------------------------------------------------------------------------


def local_pieces(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[Ints, tuple[Piece, ...]]:
    """Return what the rank at ``coordinate`` of a device mesh holds of a tensor: the shape of its local tensor, and the
    pieces, which fill the local tensor and are in its C order. An empty local tensor has no pieces, and a tensor
    without dimensions has one.

    ``shape``: shape of the logical tensor, which must have less than 2**63 elements. ``mesh_shape``: number of ranks
    along each mesh dimension. ``placements``: one for each mesh dimension; each placement cuts what the placements
    before it have left for this rank, as in torch.

    Raises ``UnsupportedError`` for ``Partial``, ``TypeError`` for a placement of another class, and ``ValueError`` if
    the arguments do not fit each other."""
    check_shape(shape)
    if not len(mesh_shape) == len(coordinate) == len(placements):
        raise ValueError(
            f"a mesh of shape {tuple(mesh_shape)} needs one coordinate and one placement for each dimension, not "
            f"{tuple(coordinate)} and {tuple(placements)}"
        )
    if not all(0 <= at < ranks for at, ranks in zip(coordinate, mesh_shape, strict=True)):
        raise ValueError(f"{tuple(coordinate)} is no coordinate of a mesh of shape {tuple(mesh_shape)}")
    dims = [[(0, size)] if size else [] for size in shape]
    for mesh_dim, placement in enumerate(placements):
        dim = _sharded_dim(placement, mesh_dim, len(shape))
        if dim is not None:
            dims[dim] = _own_runs(dims[dim], placement, mesh_shape[mesh_dim], coordinate[mesh_dim])
    return tuple(map(_total, dims)), tuple(pieces_of_runs(dims))


def _sharded_dim(placement: Placement, mesh_dim: int, ndim: int) -> int | None:
    """Return the dimension that a placement cuts, if any. Raises as ``local_pieces`` does."""
    if isinstance(placement, Replicate):
        return None
    if isinstance(placement, Partial):
        raise UnsupportedError(
            f"The tensor's placement is Partial({placement.reduce_op}) on mesh dimension {mesh_dim}: a rank holds "
            "values that are not reduced yet, and not a part of the tensor. Redistribute the tensor to Replicate or "
            "Shard first."
        )
    if not isinstance(placement, (Shard, StridedShard)):
        raise TypeError(f"the placement on mesh dimension {mesh_dim} is of an unknown class: {placement!r}")
    if not 0 <= placement.dim < ndim:
        raise ValueError(f"{placement} cannot cut a tensor of {ndim} dimensions")
    if isinstance(placement, StridedShard) and placement.split_factor < 1:
        raise ValueError(f"{placement}: split_factor must be at least 1")
    return placement.dim


Runs: TypeAlias = list[tuple[int, int]]
"""What a local tensor holds of one dimension, in its order: start and length of each run. No run is empty, and no run
continues the one before it."""


def _total(runs: Runs) -> int:
    return sum(length for _, length in runs)


def _own_runs(runs: Runs, placement: Placement, ranks: int, rank: int) -> Runs:
    """Return what ``rank`` of ``ranks`` gets of these runs."""
    length = _total(runs)
    each = -(-length // placement.split_factor) if isinstance(placement, StridedShard) else length
    taken: Runs = []
    for low in range(0, length, each) if length else ():
        start, stop = _chunk(min(each, length - low), ranks, rank)
        for begin, n in _between(runs, low + start, low + stop):
            if taken and sum(taken[-1]) == begin:  # this run continues the last one
                begin, n = taken[-1][0], taken.pop()[1] + n
            taken.append((begin, n))
    return taken


def _chunk(length: int, chunks: int, index: int) -> tuple[int, int]:
    """Return start and end of one chunk, by the rule of ``torch.chunk``."""
    each = -(-length // chunks)
    return min(each * index, length), min(each * (index + 1), length)


def _between(runs: Runs, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of the elements at positions ``start`` to ``stop`` (excluded) of the local tensor."""
    at = 0
    for begin, length in runs:
        low, high = max(start - at, 0), min(stop - at, length)
        if low < high:
            yield begin + low, high - low
        at += length


def pieces_of_runs(dims: list[Runs]) -> Iterator[Piece]:
    """Yield a piece for each way to choose a run of each dimension, in C order of the local tensor. ``dims``: the runs
    of each dimension."""
    placed = []
    for runs in dims:
        ends = itertools.accumulate(length for _, length in runs)
        placed.append([(start, length, end - length) for (start, length), end in zip(runs, ends, strict=True)])
    for chosen in itertools.product(*placed):
        start, size, local_start = zip(*chosen, strict=True) if chosen else ((), (), ())
        yield Piece(start, size, local_start)


def flat_pieces(shape: Sequence[int], start: int, stop: int) -> tuple[Piece, ...]:
    """Return the pieces of a local tensor of one dimension that begins with the elements ``start`` to ``stop``
    (excluded) of a logical tensor of this shape, in C order. There are at most ``2 * ndim - 1`` (one, if the
    tensor has no dimensions). Raises ``ValueError`` as ``flat_boxes`` does."""
    found, at = [], 0
    for box in flat_boxes(shape, start, stop):
        found.append(Piece(box.start, box.size, (at,)))
        at += math.prod(box.size)
    return tuple(found)


# -- from a pool ------------------------------------------------------------------------------------------------------


def parse_pieces(items: object, shape: object, local_shape: Sequence[int]) -> tuple[Piece, ...]:
    """Check pieces that were read from a pool, and return them.

    ``items``: a list with [start, size, start in the local tensor] for each piece; each of the three is a list of
    integers. ``shape``: the logical shape as it was read, a list of integers. ``local_shape``: the shape of the local
    tensor, already checked.

    Raises ``DamagedError`` unless all of these conditions hold:

    - Each value has its type.
    - The logical tensor has as many dimensions as the local tensor, or the local tensor has one (it is flat, and the
      logical one has at most ``FLAT_NDIM_MAX``). The logical tensor has less than 2**63 elements.
    - Each piece has one number for each dimension, has at least one element, and lies in both tensors.
    - There are no more pieces than ``PIECES_MAX``, nor than elements in the local tensor.
    - No two pieces have an element of the local tensor in common."""
    ndim = len(shape) if isinstance(shape, (list, tuple)) and _may_be_flat(shape, local_shape) else len(local_shape)
    if not are_sizes(shape, ndim):
        raise DamagedError("pieces: the logical shape does not fit the tensor, or is too large")
    if not isinstance(items, (list, tuple)) or len(items) > min(PIECES_MAX, math.prod(local_shape)):
        raise DamagedError("pieces: they are no list, or more than the tensor can have")
    pieces = tuple(_parsed(item, shape, local_shape) for item in items)
    in_local = corners([Box(piece.local_start, piece.local_size) for piece in pieces], len(local_shape))
    for first, second in overlapping_pairs(*in_local):
        one, other = pieces[first[0]].local_start, pieces[second[0]].local_start
        raise DamagedError(f"pieces: those at {one} and {other} of the local tensor overlap")
    return pieces


def _may_be_flat(shape: Sequence[object], local_shape: Sequence[int]) -> bool:
    return len(local_shape) == 1 and len(shape) <= FLAT_NDIM_MAX


def _parsed(item: object, shape: Sequence[int], local_shape: Sequence[int]) -> Piece:
    """Parse one piece. Raises ``DamagedError``."""
    lengths = (len(shape), len(shape), len(local_shape))
    if not isinstance(item, (list, tuple)) or len(item) != 3 or not all(map(are_ints, item, lengths)):
        raise DamagedError(
            f"pieces: one does not have {lengths[0]} numbers for each of start and size, and {lengths[2]} for its "
            "local start"
        )
    piece = Piece(*map(tuple, item))
    if not is_in(piece.start, piece.size, shape):
        raise DamagedError("pieces: one is empty, or lies outside of the logical tensor")
    if not is_in(piece.local_start, piece.local_size, local_shape):
        raise DamagedError("pieces: one lies outside of the local tensor")
    return piece
