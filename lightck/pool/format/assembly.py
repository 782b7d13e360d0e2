"""Logical tensors from the pieces of several holders: whether they are complete, and what to copy from whom.

A *holder* is whatever has a local tensor: a rank, or the pool of a rank. Several holders may hold the same elements
(replication). ``assembly`` and ``local_copies`` take no flat pieces: the caller treats each flat piece as a local
tensor of its own (``Piece.alone``). As in ``pieces.py``, nothing here knows of torch, and nothing loops over elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightck.pool.format.boxes import (
    Box,
    Cutter,
    Ints,
    box_between,
    check_shape,
    corners,
    intersection,
    is_in,
    overlapping_pairs,
    whole_box,
)
from lightck.pool.format.pieces import Piece
from lightck.pool.format.structures import DamagedError

OVERLAPS_MAX = 1 << 20
"""Maximum number of pairs of different boxes, in one tensor, that have elements in common. (If two groups hold a tensor
in different ways, there are about as many such pairs as boxes.)"""


class Copy(NamedTuple):
    """A part of the logical tensor that is taken from one holder."""

    holder: int
    """Position of the holder in the list of holders."""
    source: Box
    """Where the elements lie in the holder's local tensor."""
    destination: Box
    """Where they lie in the logical tensor (``local_copies``: in the local tensor to fill); of the size of
    ``source``."""


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


def coverage(shape: Sequence[int], holders: Sequence[Sequence[Piece]]) -> Coverage:
    """Return whether the pieces of the holders cover the logical tensor, and whether any of them overlap there.

    ``shape``: the shape of the logical tensor. ``holders``: the pieces of each holder.

    Raises ``ValueError`` if a piece lies outside of the tensor, and ``DamagedError`` if so many pieces overlap in
    different ways that no group can have made them."""
    boxes = _BoxesOfHolders(shape, holders)
    return Coverage(None if boxes.is_complete(boxes.copies()) else boxes.uncovered(), boxes.repeated())


def assembly(shape: Sequence[int], holders: Sequence[Sequence[Piece]]) -> list[Copy]:
    """Return the copies that put the logical tensor together from the pieces of the holders. Each element is copied
    exactly once, from the first holder that holds it. The copies are in C order of their first elements in the logical
    tensor. A piece that overlaps no other piece is one copy.

    ``shape``: the shape of the logical tensor. ``holders``: the pieces of each holder.

    Raises ``ValueError`` if a piece lies outside of the tensor, or if the pieces do not cover the tensor, and
    ``DamagedError`` as ``coverage`` does."""
    boxes = _BoxesOfHolders(shape, holders)
    copies = boxes.copies()
    if not boxes.is_complete(copies):
        start, size = boxes.uncovered()
        raise ValueError(f"the pieces do not cover the tensor: no rank holds the part of size {size} at {start}")
    return sorted(copies, key=lambda copy: copy.destination.start)


def local_copies(shape: Sequence[int], wanted: Sequence[Piece], holders: Sequence[Sequence[Piece]]) -> list[Copy]:
    """Return the copies that fill a local tensor from the local tensors of the holders. ``destination`` of a copy is a
    box of the local tensor to fill. Each element is copied exactly once, from the first holder that holds it.

    ``shape``: the shape of the logical tensor. ``wanted``: the pieces of the local tensor to fill. ``holders``: the
    pieces of each holder. Raises as ``assembly`` does."""
    copies = assembly(shape, holders)
    low, high = corners([copy.destination for copy in copies], len(shape))
    filled: list[Copy] = []
    for piece in wanted:
        box = Box(piece.start, piece.size)
        end = np.array(box.start, np.int64) + box.size
        for number in np.flatnonzero(((low < end) & (np.array(box.start, np.int64) < high)).all(axis=1)).tolist():
            copy = copies[number]
            common = intersection(copy.destination, box)
            assert common is not None, "the comparison above found common elements"
            filled.append(
                Copy(
                    copy.holder,
                    Box(tuple(map(_local_index, common.start, copy.destination.start, copy.source.start)), common.size),
                    Box(tuple(map(_local_index, common.start, piece.start, piece.local_start)), common.size),
                )
            )
    return filled


class _BoxesOfHolders:
    """The boxes of all holders in one logical tensor. A box that several holders hold occurs once, for the first of
    them."""

    def __init__(self, shape: Sequence[int], holders: Sequence[Sequence[Piece]]) -> None:
        check_shape(shape)
        self.shape = tuple(shape)
        self._sources: dict[Box, tuple[int, Ints]] = {}
        """Box -> its first holder, and where the box lies in the local tensor of that holder. In order of the
        holders."""
        self._repeated: list[Box] = []
        """Boxes whose elements are held more than once: not all of them, but always the first one in C order."""
        for holder, pieces in enumerate(holders):
            for start, size, local_start in pieces:
                if not (len(start) == len(size) == len(shape) and is_in(start, size, shape)):
                    raise ValueError(
                        f"holder {holder} has a part of size {size} at {start}, which lies outside of the tensor of "
                        f"shape {self.shape}"
                    )
                box = Box(tuple(start), tuple(size))
                if box in self._sources:
                    self._repeated.append(box)
                self._sources.setdefault(box, (holder, tuple(local_start)))
        self._corners = corners(list(self._sources), len(shape))
        self._earlier = self._find_earlier()
        self._cutter = Cutter()

    def _find_earlier(self) -> dict[int, list[int]]:
        """Return, for each box that has elements in common with earlier boxes, the numbers of those boxes."""
        low, high = self._corners
        earlier: dict[int, list[int]] = {}
        n_overlaps = 0
        for first, second in overlapping_pairs(low, high):
            n_overlaps += len(first)
            if n_overlaps > OVERLAPS_MAX:
                raise DamagedError(f"pieces: more than {OVERLAPS_MAX} pairs of them overlap, which no sharding makes")
            start = np.maximum(low[first], low[second])
            least = np.lexsort(start.T[::-1])[0]
            end = np.minimum(high[first[least]], high[second[least]])
            self._repeated.append(box_between(start[least], end))
            for before, after in zip(first.tolist(), second.tolist(), strict=True):
                earlier.setdefault(after, []).append(before)
        return earlier

    def copies(self) -> list[Copy]:
        """Return the copies, in order of the holders. Elements that nobody holds are in no copy."""
        return [
            Copy(holder, Box(tuple(map(_local_index, part.start, box.start, local_start)), part.size), part)
            for number, (box, (holder, local_start)) in enumerate(self._sources.items())
            for part in self._parts(number, box)
        ]

    def _parts(self, number: int, box: Box) -> list[Box]:
        """Return, as boxes, those elements of this box that no earlier box holds."""
        if number not in self._earlier:
            return [box]
        low, high = (corner[self._earlier[number]] for corner in self._corners)
        return self._cutter.without(box, low, high)

    def is_complete(self, copies: list[Copy]) -> bool:
        """Whether these copies, which have no element in common, are the whole tensor."""
        return sum(math.prod(copy.destination.size) for copy in copies) == math.prod(self.shape)

    def uncovered(self) -> Box:
        """Return the first box in C order that nobody holds. Call only if there is one."""
        return min(self._cutter.without(whole_box(self.shape), *self._corners))

    def repeated(self) -> Box | None:
        """Return the first box in C order that is held more than once."""
        return min(self._repeated, default=None)


def _local_index(at: int, start: int, local_start: int) -> int:
    """Return where the element ``at`` of the logical tensor lies in the local tensor, in one dimension. ``start``,
    ``local_start``: where the element's piece starts in both tensors."""
    return local_start + at - start
