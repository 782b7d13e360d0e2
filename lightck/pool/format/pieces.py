"""Pieces: which part of a logical tensor lies where in a local tensor.

A rank of a group holds a *local tensor*. Its elements belong to a *logical tensor*, the one that the model would have
in a single process. A ``Piece`` is a box that lies in both tensors. The functions of this file compute the pieces of a
rank from its placements, check pieces that were read from a pool, say whether the pieces of several holders cover the
logical tensor, and put the logical tensor together. A *holder* is whatever has a local tensor: a rank, or the pool of a
rank. Some elements of a local tensor may belong to no piece (padding), and several holders may hold the same elements
(replication).

Everything is counted in elements, from 0; every tuple has one integer for each dimension. Nothing here knows of torch,
and nothing loops over elements: the cost depends on the number of boxes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from lightck.errors import UnsupportedError
from lightck.pool.format.structures import NUMBER_MAX, DamagedError

Ints: TypeAlias = tuple[int, ...]
_Corner: TypeAlias = npt.NDArray[np.int64]
"""A corner of one box; shape (number of dimensions,)."""
_Corners: TypeAlias = npt.NDArray[np.int64]
"""A corner of each of many boxes; shape (number of boxes, number of dimensions)."""

PIECES_MAX = 1 << 12
"""Maximum number of pieces of one local tensor that a pool may have. Each is compared with many others."""
OVERLAPS_MAX = 1 << 20
"""Maximum number of pairs of different boxes, in one tensor, that have elements in common. (If two groups hold a tensor
in different ways, there are about as many such pairs as boxes.)"""
PARTS_MAX = 1 << 18
"""Maximum number of boxes into which the boxes of one tensor are cut."""
_CANDIDATES_MAX = 1 << 20
"""Pairs that are compared at a time, to bound the memory."""


# -- values -----------------------------------------------------------------------------------------------------------


class Box(NamedTuple):
    """A part of a tensor: in each dimension ``size`` elements, from ``start`` on."""

    start: Ints
    size: Ints


class Piece(NamedTuple):
    """A box of the logical tensor, and where it lies in the local tensor. It has at least one element."""

    start: Ints
    """First element in the logical tensor."""
    size: Ints
    local_start: Ints
    """First element in the local tensor."""


class Copy(NamedTuple):
    """A part of the logical tensor that is taken from one holder."""

    holder: int
    """Position of the holder in the list of holders."""
    source: Box
    """Where the elements lie in the holder's local tensor."""
    destination: Box
    """Where they lie in the logical tensor; of the size of ``source``."""


class Coverage(NamedTuple):
    """What the pieces of several holders cover. "First" is meant in C order (last dimension fastest)."""

    uncovered: Box | None
    """A box whose elements no piece holds. It begins at the first such element. None if each element is held."""
    repeated: Box | None
    """A box whose elements two pieces hold. It begins at the first such element. None if no element is held twice."""

    @property
    def is_complete(self) -> bool:
        """Whether each element is held."""
        return self.uncovered is None


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
    _check_shape(shape)
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
    return tuple(map(_total, dims)), tuple(_product(dims))


def _sharded_dim(placement: Placement, mesh_dim: int, ndim: int) -> int | None:
    """Return the dimension that a placement cuts, if any. Raises as ``local_pieces`` does."""
    if isinstance(placement, Replicate):
        return None
    if isinstance(placement, Partial):
        raise UnsupportedError(
            f"The tensor's placement is Partial({placement.reduce_op}) on mesh dimension {mesh_dim}: what a rank holds "
            "is not a part of the tensor until it is reduced. Redistribute the tensor to Replicate or Shard first."
        )
    if not isinstance(placement, (Shard, StridedShard)):
        raise TypeError(f"the placement on mesh dimension {mesh_dim} is of an unknown class: {placement!r}")
    if not 0 <= placement.dim < ndim:
        raise ValueError(f"{placement} cannot cut a tensor of {ndim} dimensions")
    if isinstance(placement, StridedShard) and placement.split_factor < 1:
        raise ValueError(f"{placement}: split_factor must be at least 1")
    return placement.dim


_Runs: TypeAlias = list[tuple[int, int]]
"""What a local tensor holds of one dimension, in its order: start and length of each run. No run is empty, and no run
continues the one before it."""


def _total(runs: _Runs) -> int:
    return sum(length for _, length in runs)


def _own_runs(runs: _Runs, placement: Placement, ranks: int, rank: int) -> _Runs:
    """Return what ``rank`` of ``ranks`` gets of these runs."""
    length = _total(runs)
    each = -(-length // placement.split_factor) if isinstance(placement, StridedShard) else length
    taken: _Runs = []
    for low in range(0, length, each) if length else ():
        start, stop = _chunk(min(each, length - low), ranks, rank)
        for begin, n in _between(runs, low + start, low + stop):
            if taken and sum(taken[-1]) == begin:
                begin, n = taken[-1][0], taken.pop()[1] + n
            taken.append((begin, n))
    return taken


def _chunk(length: int, chunks: int, index: int) -> tuple[int, int]:
    """Return start and end of one chunk, by the rule of ``torch.chunk``."""
    each = -(-length // chunks)
    return min(each * index, length), min(each * (index + 1), length)


def _between(runs: _Runs, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of the elements at positions ``start`` to ``stop`` (excluded) of the local tensor."""
    at = 0
    for begin, length in runs:
        low, high = max(start - at, 0), min(stop - at, length)
        if low < high:
            yield begin + low, high - low
        at += length


def _product(dims: list[_Runs]) -> Iterator[Piece]:
    """Yield a piece for each way to choose a run of each dimension, in C order of the local tensor."""
    placed = []
    for runs in dims:
        ends = itertools.accumulate(length for _, length in runs)
        placed.append([(start, length, end - length) for (start, length), end in zip(runs, ends, strict=True)])
    for chosen in itertools.product(*placed):
        start, size, local_start = zip(*chosen, strict=True) if chosen else ((), (), ())
        yield Piece(start, size, local_start)


# -- from a pool ------------------------------------------------------------------------------------------------------


def parse_pieces(items: object, shape: object, local_shape: Sequence[int]) -> tuple[Piece, ...]:
    """Check pieces that were read from a pool, and return them.

    ``items``: a list with [start, size, start in the local tensor] for each piece; each of the three is a list of
    integers. ``shape``: the logical shape as it was read, a list of integers. ``local_shape``: the shape of the local
    tensor, already checked.

    Raises ``DamagedError`` unless all of these conditions hold:

    - Each value has its type.
    - The logical tensor has as many dimensions as the local tensor, and less than 2**63 elements.
    - Each piece has one number for each dimension, has at least one element, and lies in both tensors.
    - There are no more pieces than ``PIECES_MAX``, nor than elements in the local tensor.
    - No two pieces have an element of the local tensor in common."""
    if not _are_sizes(shape, len(local_shape)):
        raise DamagedError("pieces: the logical shape does not fit the tensor, or is too large")
    if not isinstance(items, (list, tuple)) or len(items) > min(PIECES_MAX, math.prod(local_shape)):
        raise DamagedError("pieces: they are no list, or more than the tensor can have")
    pieces = tuple(_parsed(item, shape, local_shape) for item in items)
    in_local = _corners([Box(piece.local_start, piece.size) for piece in pieces], len(local_shape))
    for first, second in _overlapping_pairs(*in_local):
        one, other = pieces[first[0]].local_start, pieces[second[0]].local_start
        raise DamagedError(f"pieces: those at {one} and {other} of the local tensor overlap")
    return pieces


def _are_ints(value: object, ndim: int) -> TypeGuard[Sequence[int]]:
    return isinstance(value, (list, tuple)) and len(value) == ndim and all(type(number) is int for number in value)


def _are_sizes(shape: object, ndim: int) -> TypeGuard[Sequence[int]]:
    """Whether this is a shape of ``ndim`` dimensions. The product of the sizes other than 0 is limited, also if the
    tensor is empty."""
    if not _are_ints(shape, ndim):
        return False
    return all(0 <= size < NUMBER_MAX for size in shape) and math.prod(filter(None, shape)) < NUMBER_MAX


def _check_shape(shape: Sequence[int]) -> None:
    """Raise ``ValueError`` unless a tensor can have this shape."""
    if not _are_sizes(tuple(shape), len(shape)):
        raise ValueError(f"a tensor cannot have the shape {tuple(shape)}")


def _parsed(item: object, shape: Sequence[int], local_shape: Sequence[int]) -> Piece:
    """Parse one piece. Raises ``DamagedError``."""
    ndim = len(local_shape)
    if not isinstance(item, (list, tuple)) or len(item) != 3 or not all(_are_ints(part, ndim) for part in item):
        raise DamagedError(f"pieces: one does not have {ndim} numbers for each of start, size and local start")
    piece = Piece(*map(tuple, item))
    if not _is_in(piece.start, piece.size, shape):
        raise DamagedError("pieces: one is empty, or lies outside of the logical tensor")
    if not _is_in(piece.local_start, piece.size, local_shape):
        raise DamagedError("pieces: one lies outside of the local tensor")
    return piece


def _is_in(start: Sequence[int], size: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a box that is not empty lies in a tensor."""
    return all(at >= 0 and 0 < n <= whole - at for at, n, whole in zip(start, size, shape, strict=True))


# -- of several holders -----------------------------------------------------------------------------------------------


def coverage(shape: Sequence[int], holders: Sequence[Sequence[Piece]]) -> Coverage:
    """Return whether the pieces of the holders cover the logical tensor, and whether any of them overlap there.

    ``shape``: the shape of the logical tensor. ``holders``: the pieces of each holder.

    Raises ``ValueError`` if a piece lies outside of the tensor, and ``DamagedError`` if so many pieces overlap in
    different ways that no group can have made them."""
    held = _Held(shape, holders)
    return Coverage(None if held.is_complete(held.copies()) else held.uncovered(), held.repeated())


def assembly(shape: Sequence[int], holders: Sequence[Sequence[Piece]]) -> list[Copy]:
    """Return the copies that put the logical tensor together from the pieces of the holders. Each element is copied
    exactly once, from the first holder that holds it. The copies are in C order of their first elements in the logical
    tensor. A piece that overlaps no other piece is one copy.

    ``shape``: the shape of the logical tensor. ``holders``: the pieces of each holder.

    Raises ``ValueError`` if a piece lies outside of the tensor, or if the pieces do not cover the tensor, and
    ``DamagedError`` as ``coverage`` does."""
    held = _Held(shape, holders)
    copies = held.copies()
    if not held.is_complete(copies):
        start, size = held.uncovered()
        raise ValueError(f"the pieces do not cover the tensor: nobody holds the box of size {size} at {start}")
    return sorted(copies, key=lambda copy: copy.destination.start)


class _Held:
    """The boxes of all holders in one logical tensor. A box that several holders hold occurs once, for the first of
    them."""

    def __init__(self, shape: Sequence[int], holders: Sequence[Sequence[Piece]]) -> None:
        _check_shape(shape)
        self.shape = tuple(shape)
        self._sources: dict[Box, tuple[int, Ints]] = {}
        """Box -> its first holder, and where the box lies in the local tensor of that holder. In order of the
        holders."""
        self._repeated: list[Box] = []
        """Boxes whose elements are held more than once: not all of them, but always the first one in C order."""
        for holder, pieces in enumerate(holders):
            for start, size, local_start in pieces:
                if not (len(start) == len(size) == len(shape) and _is_in(start, size, shape)):
                    part = f"of size {size} at {start}"
                    raise ValueError(f"the part of holder {holder}, {part}, lies outside of a tensor of {self.shape}")
                box = Box(tuple(start), tuple(size))
                if box in self._sources:
                    self._repeated.append(box)
                self._sources.setdefault(box, (holder, tuple(local_start)))
        self._corners = _corners(list(self._sources), len(shape))
        self._earlier = self._find_earlier()
        self._n_parts = 0

    def _find_earlier(self) -> dict[int, list[int]]:
        """Return, for each box that has elements in common with earlier boxes, the numbers of those boxes."""
        low, high = self._corners
        earlier: dict[int, list[int]] = {}
        n_overlaps = 0
        for first, second in _overlapping_pairs(low, high):
            n_overlaps += len(first)
            if n_overlaps > OVERLAPS_MAX:
                raise DamagedError(f"pieces: more than {OVERLAPS_MAX} pairs of them overlap, which no sharding makes")
            start = np.maximum(low[first], low[second])
            least = np.lexsort(start.T[::-1])[0]
            end = np.minimum(high[first[least]], high[second[least]])
            self._repeated.append(_box(start[least], end))
            for before, after in zip(first.tolist(), second.tolist(), strict=True):
                earlier.setdefault(after, []).append(before)
        return earlier

    def copies(self) -> list[Copy]:
        """Return the copies, in order of the holders. Elements that nobody holds are in no copy."""
        return [
            Copy(holder, Box(tuple(map(_moved, part.start, box.start, local_start)), part.size), part)
            for number, (box, (holder, local_start)) in enumerate(self._sources.items())
            for part in self._parts(number, box)
        ]

    def _parts(self, number: int, box: Box) -> list[Box]:
        """Return, as boxes, those elements of this box that no earlier box holds."""
        if number not in self._earlier:
            return [box]
        low, high = (corner[self._earlier[number]] for corner in self._corners)
        return self._without(box, low, high)

    def is_complete(self, copies: list[Copy]) -> bool:
        """Whether these copies, which have no element in common, are the whole tensor."""
        return sum(math.prod(copy.destination.size) for copy in copies) == math.prod(self.shape)

    def uncovered(self) -> Box:
        """Return the first box in C order that nobody holds. Call only if there is one."""
        return min(self._without(Box((0,) * len(self.shape), self.shape), *self._corners))

    def repeated(self) -> Box | None:
        """Return the first box in C order that is held more than once."""
        return min(self._repeated, default=None)

    def _without(self, box: Box, lows: _Corners, highs: _Corners) -> list[Box]:
        """Return the elements of ``box`` that are in none of the boxes with the corners ``lows`` and ``highs``, as
        boxes without common elements.

        The box that covers most of ``box`` is removed first. The rest of ``box`` is cut into slabs, and each slab is
        treated in the same way."""
        left: list[Box] = []
        todo = [(np.array(box.start, np.int64), np.array(box.start, np.int64) + box.size, lows, highs)]
        while todo:
            self._n_parts += 1
            if self._n_parts > PARTS_MAX:
                raise DamagedError(f"pieces: their overlaps cut the tensor into more than {PARTS_MAX} parts")
            low, high, lows, highs = todo.pop()
            overlaps = ((lows < high) & (low < highs)).all(axis=1)
            lows, highs = lows[overlaps], highs[overlaps]
            if not len(lows):
                left.append(_box(low, high))
                continue
            taken = (np.minimum(highs, high) - np.maximum(lows, low)).prod(axis=1, dtype=np.float64).argmax()
            for slab_low, slab_high in _slabs(low, high, lows[taken], highs[taken]):
                todo.append((slab_low, slab_high, lows, highs))
        return left


def _moved(at: int, start: int, local_start: int) -> int:
    """Return where the element ``at`` of the logical tensor lies in the local tensor, in one dimension. ``start``,
    ``local_start``: where the element's piece starts in both tensors."""
    return local_start + at - start


def _corners(boxes: Sequence[Box], ndim: int) -> tuple[_Corners, _Corners]:
    """Return where the boxes start and where they end."""
    low = np.array([box.start for box in boxes], np.int64).reshape(len(boxes), ndim)
    return low, low + np.array([box.size for box in boxes], np.int64).reshape(len(boxes), ndim)


def _box(low: _Corner, high: _Corner) -> Box:
    """Return the box between two corners."""
    return Box(tuple(low.tolist()), tuple((high - low).tolist()))


def _slabs(low: _Corner, high: _Corner, taken_low: _Corner, taken_high: _Corner) -> Iterator[tuple[_Corner, ...]]:
    """Take the box with the corners ``taken_low`` and ``taken_high`` out of the box with the corners ``low`` and
    ``high``. Cut the rest into slabs, and yield start and end of each slab."""
    low, high = low.copy(), high.copy()
    for dim in range(len(low)):
        if low[dim] < taken_low[dim]:
            end = high.copy()
            end[dim] = taken_low[dim]
            yield low.copy(), end
            low[dim] = taken_low[dim]
        if taken_high[dim] < high[dim]:
            start = low.copy()
            start[dim] = taken_high[dim]
            yield start, high.copy()
            high[dim] = taken_high[dim]


def _overlapping_pairs(low: _Corners, high: _Corners) -> Iterator[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]]:
    """Find the pairs of boxes that have elements in common, each pair once. Yields many pairs at a time, as two arrays:
    the number of each pair's first box, and the number of its second box. The first number is the smaller one.

    The boxes are sorted along the dimension in which most of them differ. Two boxes are compared only if, in this
    dimension, one starts before the other one ends."""
    count, ndim = low.shape
    if count < 2:
        return
    axis = max(range(ndim), key=lambda dim: len(np.unique(low[:, dim])))
    order = np.argsort(low[:, axis], kind="stable")
    low, high = low[order], high[order]
    # For each box in this order: how many of the boxes after it start before it ends.
    n_after = np.searchsorted(low[:, axis], high[:, axis]) - np.arange(1, count + 1)
    ends = np.cumsum(n_after)
    begin = 0
    while begin < count:
        n_compared = ends[begin] - n_after[begin]  # pairs of the earlier rounds
        end = max(begin + 1, int(np.searchsorted(ends, n_compared + _CANDIDATES_MAX, "right")))
        numbers, lengths = np.arange(begin, end), n_after[begin:end]
        first = np.repeat(numbers, lengths)
        second = first + 1 + np.arange(len(first)) - np.repeat(ends[begin:end] - lengths - n_compared, lengths)
        for dim in range(ndim):
            overlaps = (low[first, dim] < high[second, dim]) & (low[second, dim] < high[first, dim])
            first, second = first[overlaps], second[overlaps]
        if len(first):
            yield np.minimum(order[first], order[second]), np.maximum(order[first], order[second])
        begin = end
