"""Boxes, pieces and worlds of ranks for the tests, checked against arrays of indices."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import strategies as st

from lightck.pool.format.boxes import Box
from lightck.pool.format.pieces import Piece, Replicate, Shard, StridedShard


def at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(*box, strict=True))


def indices(shape: tuple[int, ...]) -> np.ndarray:
    """A tensor whose elements are all different."""
    return np.arange(math.prod(shape)).reshape(shape)


def filled(local_shape: tuple[int, ...], pieces: tuple[Piece, ...], whole: np.ndarray) -> np.ndarray:
    """The local tensor, with -1 where no piece lies."""
    local = np.full(local_shape, -1)
    for start, size, local_start in pieces:
        local[at(Box(local_start, size))] = whole[at(Box(start, size))]
    return local


@st.composite
def worlds(draw) -> tuple[tuple[int, ...], tuple[int, ...], list[Replicate | Shard | StridedShard]]:
    """Shape, mesh and placements."""
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=0, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    kinds = [st.just(Replicate())]
    if shape:
        dims = st.integers(0, len(shape) - 1)
        kinds += [st.builds(Shard, dims), st.builds(StridedShard, dims, st.integers(1, 5))]
    return shape, mesh, [draw(st.one_of(kinds)) for _ in mesh]


def ranks(mesh: tuple[int, ...]) -> itertools.product:
    return itertools.product(*map(range, mesh))
