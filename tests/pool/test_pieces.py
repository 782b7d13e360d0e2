"""Pieces: what they say agrees with arrays of indices, element by element; what is damaged is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from boxes_by_hand import at, filled, indices, ranks, worlds
from hypothesis import given, settings
from hypothesis import strategies as st

from lightck.errors import UnsupportedError
from lightck.pool.format import pieces as module
from lightck.pool.format.boxes import Box
from lightck.pool.format.pieces import (
    Partial,
    Piece,
    Replicate,
    Shard,
    StridedShard,
    local_pieces,
    parse_pieces,
)
from lightck.pool.format.structures import NUMBER_MAX, DamagedError

# -- from placements -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "mesh", "coordinate", "placements", "local_shape", "pieces"),
    [
        ((5, 3), (2,), (0,), [Shard(0)], (3, 3), [Piece((0, 0), (3, 3), (0, 0))]),
        ((5, 3), (2,), (1,), [Shard(0)], (2, 3), [Piece((3, 0), (2, 3), (0, 0))]),
        ((5, 3), (2,), (1,), [Replicate()], (5, 3), [Piece((0, 0), (5, 3), (0, 0))]),
        ((5,), (4,), (3,), [Shard(0)], (0,), []),  # runs of 2, 2, 1, 0
        ((0, 3), (2,), (1,), [Shard(1)], (0, 1), []),
        ((0,), (2,), (0,), [Shard(0)], (0,), []),
        ((), (2,), (1,), [Replicate()], (), [Piece((), (), ())]),
        ((7,), (2, 2), (1, 0), [Shard(0), Shard(0)], (2,), [Piece((4,), (2,), (0,))]),
        ((4, 5), (2, 2), (1, 1), [Shard(0), Shard(1)], (2, 2), [Piece((2, 3), (2, 2), (0, 0))]),
        (  # the example in torch: [0, 1, 5], [2, 3, 6], [4, 7], [8]
            (9,), (4,), (0,), [StridedShard(0, 2)], (3,), [Piece((0,), (2,), (0,)), Piece((5,), (1,), (2,))],
        ),
        ((9,), (1,), (0,), [StridedShard(0, 4)], (9,), [Piece((0,), (9,), (0,))]),  # runs that touch are one
        ((8,), (2, 2), (0, 1), [StridedShard(0, 2), Shard(0)], (2,), [Piece((4,), (2,), (0,))]),
    ],
)  # fmt: skip
def test_pieces_of_placements(shape, mesh, coordinate, placements, local_shape, pieces):
    assert local_pieces(shape, mesh, coordinate, placements) == (local_shape, tuple(pieces))


def test_a_dimension_longer_than_memory_costs_no_more():
    shape, pieces = local_pieces((NUMBER_MAX - 1,), (3,), (2,), [StridedShard(0, 2)])
    assert sum(size[0] for _, size, _ in pieces) == shape[0] > 2**61
    assert len(pieces) == 2


def test_partial_is_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"Partial\(avg\) on mesh dimension 1.*Redistribute"):
        local_pieces((4,), (2, 2), (0, 0), [Shard(0), Partial("avg")])


@pytest.mark.parametrize(
    ("shape", "mesh", "coordinate", "placements", "words"),
    [
        ((-1,), (2,), (0,), [Shard(0)], "cannot have the shape"),
        ((2**32, 2**31), (2,), (0,), [Shard(0)], "cannot have the shape"),
        ((4,), (2, 2), (0, 0), [Shard(0)], "one coordinate and one placement for each"),
        ((4,), (2,), (0, 0), [Shard(0)], "one coordinate and one placement for each"),
        ((4,), (2,), (2,), [Shard(0)], "is no coordinate"),
        ((4,), (2,), (-1,), [Shard(0)], "is no coordinate"),
        ((4,), (0,), (0,), [Shard(0)], "is no coordinate"),
        ((4,), (2,), (0,), [Shard(1)], "cannot cut a tensor of 1 dim"),
        ((4,), (2,), (0,), [Shard(-1)], "cannot cut a tensor of 1 dim"),
        ((), (2,), (0,), [StridedShard(0, 2)], "cannot cut a tensor of 0 dim"),
        ((4,), (2,), (0,), [StridedShard(0, 0)], "split_factor must be at least 1"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(shape, mesh, coordinate, placements, words):
    with pytest.raises(ValueError, match=words):
        local_pieces(shape, mesh, coordinate, placements)


def test_a_placement_of_another_class_is_refused():
    with pytest.raises(TypeError, match="mesh dimension 0 is of an unknown class: 'S"):
        local_pieces((4,), (2,), (0,), ["S(0)"])


@given(worlds())
def test_each_element_is_on_as_many_ranks_as_replicate_it(world):
    shape, mesh, placements = world
    whole = indices(shape)
    seen = np.zeros(shape, int)
    for coordinate in ranks(mesh):
        local_shape, pieces = local_pieces(shape, mesh, coordinate, placements)
        local = filled(local_shape, pieces, whole)
        assert (local >= 0).all(), "pieces fill the local tensor"
        assert sum(math.prod(piece.size) for piece in pieces) == local.size
        assert parse_pieces([list(map(list, piece)) for piece in pieces], list(shape), local_shape) == pieces
        for start, size, _ in pieces:
            seen[at(Box(start, size))] += 1
    assert (seen == math.prod(n for n, p in zip(mesh, placements, strict=True) if p == Replicate())).all()


# -- from a pool -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("items", "shape", "local_shape", "words"),
    [
        (None, [4], (4,), "no list"),
        ({}, [4], (4,), "no list"),
        ([[[0], [1], [0]]] * 2, [4], (1,), "more than the tensor can have"),
        ([[[0], [1], [0]]], [4], (0,), "more than the tensor can have"),
        ([[[0], [1], [0]]], [4, 4], (4,), "2 numbers for each of start and size, and 1"),
        ([[[0, 0], [1, 1], [0]]], [4, 4], (4, 1), "2 numbers for each of start and size, and 2"),
        ([[[0], [1], [0]]], [4, 4], (4, 4, 4), "logical shape"),
        ([], [1] * 65, (4,), "logical shape"),
        ([[[0, 0], [2, 3], [0]]], [4, 4], (5,), "outside of the local"),
        ([[[0, 0], [2, 1], [0]], [[0, 1], [1, 1], [1]]], [4, 4], (5,), "overlap"),
        ([[[], [], [5]]], [], (5,), "outside of the local"),
        ([[[0], [1], [0]]], None, (4,), "logical shape"),
        ([[[0], [1], [0]]], [True], (4,), "logical shape"),
        ([[[0], [1], [0]]], [-1], (4,), "logical shape"),
        ([[[0], [1], [0]]], [NUMBER_MAX], (4,), "logical shape"),
        ([[[0, 0], [1, 1], [0, 0]]], [2**32, 2**31], (1, 1), "logical shape"),
        ([], [0, 2**32, 2**31], (0, 1, 1), "logical shape"),
        ([[[0], [1]]], [4], (4,), "1 numbers for each"),
        ([[[0], [1], [0], [0]]], [4], (4,), "1 numbers for each"),
        ([[[0], [1], 0]], [4], (4,), "1 numbers for each"),
        ([[[0], [1], [0, 0]]], [4], (4,), "1 numbers for each"),
        ([[[0], [1.0], [0]]], [4], (4,), "1 numbers for each"),
        ([[[False], [1], [0]]], [4], (4,), "1 numbers for each"),
        (["012"], [4], (4,), "1 numbers for each"),
        ([[[0], [0], [0]]], [4], (4,), "is empty"),
        ([[[0], [-1], [0]]], [4], (4,), "is empty"),
        ([[[-1], [1], [0]]], [4], (4,), "outside of the logical tensor"),
        ([[[3], [2], [0]]], [4], (4,), "outside of the logical tensor"),
        ([[[NUMBER_MAX - 1], [NUMBER_MAX - 1], [0]]], [4], (4,), "outside of the logical tensor"),
        ([[[2**64], [1], [0]]], [4], (4,), "outside of the logical tensor"),
        ([[[0], [2], [3]]], [4], (4,), "outside of the local tensor"),
        ([[[0], [1], [-1]]], [4], (4,), "outside of the local tensor"),
        ([[[0], [1], [2**63]]], [4], (4,), "outside of the local tensor"),
        ([[[0], [2], [0]], [[2], [2], [1]]], [4], (4,), r"\(0,\) and \(1,\) of the local tensor overlap"),
        ([[[0, 0], [2, 1], [0, 0]], [[0, 0], [1, 2], [1, 0]]], [4, 4], (4, 4), "overlap"),
    ],
)
def test_damaged_pieces_are_refused(items, shape, local_shape, words):
    with pytest.raises(DamagedError, match=words):
        parse_pieces(items, shape, local_shape)


def test_the_largest_tensor_is_accepted():
    size = NUMBER_MAX - 1
    items = [[[0], [size - 1], [1]], [[size - 1], [1], [0]]]
    assert parse_pieces(items, [size], (size,)) == (Piece((0,), (size - 1,), (1,)), Piece((size - 1,), (1,), (0,)))
    assert parse_pieces([[[], [], []]], [], ()) == (Piece((), (), ()),)


def test_more_pieces_than_the_limit_are_refused(monkeypatch):
    items = [[[i], [1], [i]] for i in range(4)]
    assert len(parse_pieces(items, [4], (4,))) == 4
    monkeypatch.setattr(module, "PIECES_MAX", 3)
    with pytest.raises(DamagedError, match="more than the tensor can have"):
        parse_pieces(items, [4], (4,))


NUMBERS = st.lists(st.integers(-1, 5), min_size=2, max_size=2)


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS).map(list), max_size=4), st.tuples(*[st.integers(0, 4)] * 2))
@settings(max_examples=500)
def test_pieces_are_accepted_exactly_if_they_fit(items, local_shape):
    shape = [5, 4]
    fits = len(items) <= math.prod(local_shape)
    taken = np.zeros(local_shape, int)
    for start, size, local_start in items:
        fits = fits and min(size) > 0 and min(start + local_start) >= 0
        fits = fits and all(a + n <= whole for a, n, whole in zip(start, size, shape, strict=True))
        fits = fits and all(a + n <= whole for a, n, whole in zip(local_start, size, local_shape, strict=True))
        if fits:
            taken[at(Box(tuple(local_start), tuple(size)))] += 1
    if fits and taken.max(initial=0) <= 1:
        assert [[list(part) for part in piece] for piece in parse_pieces(items, shape, local_shape)] == items
    else:
        with pytest.raises(DamagedError):
            parse_pieces(items, shape, local_shape)


def test_disjoint_pieces_are_accepted_in_any_arrangement():
    """A checkerboard of which the boxes share all starts with others, in both dimensions."""
    items = [[[i, j], [1, 1], [i, j]] for i in range(20) for j in range(20)]
    np.random.default_rng(0).shuffle(items)
    assert len(parse_pieces(items, [20, 20], (20, 20))) == 400
    items[7] = [[0, 0], [1, 1], items[8][2]]
    with pytest.raises(DamagedError, match="overlap"):
        parse_pieces(items, [20, 20], (20, 20))
