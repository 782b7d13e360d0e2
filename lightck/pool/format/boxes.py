"""Boxes: parts of a tensor that are a run of elements in each dimension.

The functions of this file cut boxes, and find those that have elements in common. They know neither ranks nor pools.
Everything is counted in elements, from 0; every tuple has one integer for each dimension. Nothing here knows of torch,
and nothing loops over elements: the cost depends on the number of boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from lightck.pool.format.structures import NUMBER_MAX, DamagedError

Ints: TypeAlias = tuple[int, ...]
Corner: TypeAlias = npt.NDArray[np.int64]
"""A corner of one box; shape (number of dimensions,)."""
Corners: TypeAlias = npt.NDArray[np.int64]
"""A corner of each of many boxes; shape (number of boxes, number of dimensions)."""

PARTS_MAX = 1 << 18
"""Maximum number of boxes into which the boxes of one tensor are cut."""
_CANDIDATES_MAX = 1 << 20
"""Pairs that are compared at a time, to bound the memory."""


class Box(NamedTuple):
    """A part of a tensor: in each dimension ``size`` elements, from ``start`` on."""

    start: Ints
    size: Ints


# -- checks -----------------------------------------------------------------------------------------------------------


def are_ints(value: object, length: int) -> TypeGuard[Sequence[int]]:
    return isinstance(value, (list, tuple)) and len(value) == length and all(type(number) is int for number in value)


def are_sizes(shape: object, ndim: int) -> TypeGuard[Sequence[int]]:
    """Whether this is a shape of ``ndim`` dimensions. The product of the sizes other than 0 is limited, also if the
    tensor is empty."""
    if not are_ints(shape, ndim):
        return False
    return all(0 <= size < NUMBER_MAX for size in shape) and math.prod(filter(None, shape)) < NUMBER_MAX


def check_shape(shape: Sequence[int]) -> None:
    """Raise ``ValueError`` unless a tensor can have this shape."""
    if not are_sizes(tuple(shape), len(shape)):
        raise ValueError(f"a tensor cannot have the shape {tuple(shape)}")


def is_in(start: Sequence[int], size: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a box lies in a tensor and has at least one element."""
    return all(at >= 0 and 0 < n <= whole - at for at, n, whole in zip(start, size, shape, strict=True))


# -- one or two boxes --------------------------------------------------------------------------------------------------


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box that is the whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def intersection(one: Box, other: Box) -> Box | None:
    """Return what two boxes of one tensor have in common; None if they have no element in common."""
    start = tuple(map(max, one.start, other.start))
    ends = [min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True)]
    size = tuple(end - at for end, at in zip(ends, start, strict=True))
    return Box(start, size) if all(n > 0 for n in size) else None


def subtraction(box: Box, taken: Sequence[Box]) -> list[Box]:
    """Return the elements of ``box`` that are in none of the boxes ``taken``, as boxes without common elements. Raises
    ``DamagedError`` if more than ``PARTS_MAX`` parts are cut on the way."""
    return Cutter().without(box, *corners(taken, len(box.start)))


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the elements ``start`` to ``stop`` (excluded) of a tensor in C order (last dimension fastest), as boxes.
    Each of them is a run in C order, they follow each other in C order, and there are at most ``2 * ndim - 1`` (one,
    if the tensor has no dimensions).

    Raises ``ValueError`` unless ``0 <= start <= stop <=`` the number of elements."""
    check_shape(shape)
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"a tensor of shape {tuple(shape)} has no elements {start} to {stop}")
    return list(_flat_boxes(tuple(shape), start, stop)) if start < stop else []


def _flat_boxes(shape: Ints, start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of a range that is not empty."""
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last:
        yield from _in_row(first, shape[1:], start - first * row, stop - first * row)
        return
    if start > first * row:
        yield from _in_row(first, shape[1:], start - first * row, row)
        first += 1
    end = last + 1 if stop == (last + 1) * row else last
    if first < end:
        yield Box((first, *(0 for _ in shape[1:])), (end - first, *shape[1:]))
    if end == last:
        yield from _in_row(last, shape[1:], 0, stop - last * row)


def _in_row(row: int, shape: Ints, start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of a range of elements of one row. ``shape``: of the row."""
    if stop - start == math.prod(shape):
        yield Box((row, *(0 for _ in shape)), (1, *shape))
        return
    for box in _flat_boxes(shape, start, stop):
        yield Box((row, *box.start), (1, *box.size))


# -- many boxes --------------------------------------------------------------------------------------------------------


def corners(boxes: Sequence[Box], ndim: int) -> tuple[Corners, Corners]:
    """Return where the boxes start and where they end."""
    low = np.array([box.start for box in boxes], np.int64).reshape(len(boxes), ndim)
    return low, low + np.array([box.size for box in boxes], np.int64).reshape(len(boxes), ndim)


def box_between(low: Corner, high: Corner) -> Box:
    """Return the box between two corners."""
    return Box(tuple(low.tolist()), tuple((high - low).tolist()))


class Cutter:
    """Takes boxes out of other boxes. It cuts at most ``PARTS_MAX`` parts in all calls together."""

    def __init__(self) -> None:
        self._n_parts = 0

    def without(self, box: Box, lows: Corners, highs: Corners) -> list[Box]:
        """Return the elements of ``box`` that are in none of the boxes with the corners ``lows`` and ``highs``, as
        boxes without common elements. Raises ``DamagedError`` if the limit is reached.

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
                left.append(box_between(low, high))
                continue
            taken = (np.minimum(highs, high) - np.maximum(lows, low)).prod(axis=1, dtype=np.float64).argmax()
            for slab_low, slab_high in _slabs(low, high, lows[taken], highs[taken]):
                todo.append((slab_low, slab_high, lows, highs))
        return left


def _slabs(low: Corner, high: Corner, taken_low: Corner, taken_high: Corner) -> Iterator[tuple[Corner, ...]]:
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


def overlapping_pairs(low: Corners, high: Corners) -> Iterator[tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]]:
    """Find the pairs of boxes that have elements in common, each pair once. Yields many pairs at a time, as two arrays:
    the number of each pair's first box, and the number of its second box. The first number is the smaller one.

    The boxes are sorted along the dimension in which most of them differ. Two boxes are compared only if, in this
    dimension, the one that starts later starts before the other one ends."""
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
