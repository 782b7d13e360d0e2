"""Pieces: what they say agrees with arrays of indices, element by element; what is damaged is refused."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightck.errors import UnsupportedError
from lightck.pool.format import pieces as module
from lightck.pool.format.pieces import (
    Box,
    Copy,
    Coverage,
    Partial,
    Piece,
    Replicate,
    Shard,
    StridedShard,
    assembly,
    coverage,
    local_pieces,
    parse_pieces,
)
from lightck.pool.format.structures import NUMBER_MAX, DamagedError


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


@given(worlds())
def test_a_world_puts_the_whole_together(world):
    shape, mesh, placements = world
    whole = indices(shape)
    parts = [local_pieces(shape, mesh, coordinate, placements) for coordinate in ranks(mesh)]
    copies = assembly(shape, [pieces for _, pieces in parts])
    put = np.full(shape, -1)
    for holder, source, destination in copies:
        put[at(destination)] = filled(*parts[holder], whole)[at(source)]
    assert (put == whole).all()
    assert len(copies) <= sum(len(pieces) for _, pieces in parts)
    is_replicated = any(p == Replicate() and n > 1 for n, p in zip(mesh, placements, strict=True))
    covered = coverage(shape, [pieces for _, pieces in parts])
    assert covered.is_complete
    assert (covered.repeated is not None) == (is_replicated and 0 not in shape)


# -- from a pool -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("items", "shape", "local_shape", "words"),
    [
        (None, [4], (4,), "no list"),
        ({}, [4], (4,), "no list"),
        ([[[0], [1], [0]]] * 2, [4], (1,), "more than the tensor can have"),
        ([[[0], [1], [0]]], [4], (0,), "more than the tensor can have"),
        ([[[0], [1], [0]]], [4, 4], (4,), "logical shape"),
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
    assert coverage([size], [parse_pieces(items, [size], (size,))]) == Coverage(None, None)


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


# -- of several holders ----------------------------------------------------------------------------------------------


@st.composite
def holdings(draw) -> tuple[tuple[int, ...], list[list[Piece]]]:
    """A shape, and pieces of holders that may overlap and leave holes; few distinct corners, so that many meet. Where
    they lie in local tensors: somewhere."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    holders = []
    for _ in range(draw(st.integers(0, 4))):
        pieces = []
        for _ in range(draw(st.integers(0, 4))):
            start = tuple(draw(st.integers(0, n - 1)) for n in shape)
            size = tuple(draw(st.integers(1, n - a)) for a, n in zip(start, shape, strict=True))
            pieces.append(Piece(start, size, tuple(draw(st.integers(0, 9)) for _ in shape)))
        holders.append(pieces)
    return shape, holders


def counts(shape: tuple[int, ...], holders: list[list[Piece]]) -> np.ndarray:
    """How many pieces hold each element."""
    seen = np.zeros(shape, int)
    for start, size, _ in itertools.chain(*holders):
        seen[at(Box(start, size))] += 1
    return seen


def starts_at_the_first(box: Box | None, where: np.ndarray) -> bool:
    """Whether a box lies where something is true, from the first such element on; None if there is none."""
    if box is None or not where.any():
        return box is None and not where.any()
    return box.start == tuple(int(axis[0]) for axis in np.nonzero(where)) and bool(where[at(box)].all())


@given(holdings())
@settings(max_examples=500)
def test_coverage_names_the_first_box_that_is_missing_or_repeated(held):
    shape, holders = held
    covered, seen = coverage(shape, holders), counts(shape, holders)
    if shape:
        assert starts_at_the_first(covered.uncovered, seen == 0)
        assert starts_at_the_first(covered.repeated, seen > 1)
    assert covered.is_complete == bool((seen > 0).all())
    assert (covered.repeated is None) == bool((seen <= 1).all())


@given(holdings())
@settings(max_examples=500)
def test_each_element_is_taken_once_from_the_first_holder(held):
    shape, holders = held
    first = np.full(shape, -1)
    for number, pieces in reversed(list(enumerate(holders))):
        for start, size, _ in pieces:
            first[at(Box(start, size))] = number
    if (first < 0).any():
        with pytest.raises(ValueError, match="no rank holds the part of size"):
            assembly(shape, holders)
        return
    taken = np.full(shape, -1)
    copies = assembly(shape, holders)
    for holder, source, destination in copies:
        assert (taken[at(destination)] == -1).all(), "an element is copied twice"
        taken[at(destination)] = holder
        assert source.size == destination.size
        moves = {
            tuple(a + from_ - b for a, from_, b in zip(destination.start, piece.local_start, piece.start, strict=True))
            for piece in holders[holder]
        }
        assert source.start in moves
    assert (taken == first).all()
    assert copies == sorted(copies, key=lambda copy: copy.destination.start)


def test_a_missing_box_is_named():
    rows = [local_pieces((8, 6), (4, 2), (i, j), [Shard(0), Shard(1)])[1] for i, j in ranks((4, 2))]
    missing = coverage((8, 6), rows[:5] + rows[6:])
    assert missing == Coverage(Box((4, 3), (2, 3)), None)
    assert not missing.is_complete
    with pytest.raises(ValueError, match=r"no rank holds the part of size \(2, 3\) at \(4, 3\)"):
        assembly((8, 6), rows[:5] + rows[6:])


def test_what_is_missing_begins_before_what_is_held():
    assert coverage((2, 4), [[Piece((0, 2), (2, 1), (0, 0))]]).uncovered.start == (0, 0)
    assert coverage((3,), []) == Coverage(Box((0,), (3,)), None)
    assert coverage((), []) == Coverage(Box((), ()), None)


def test_an_empty_tensor_needs_nobody():
    assert coverage((0, 3), [[], []]) == Coverage(None, None)
    assert assembly((0, 3), []) == []


def test_a_tensor_without_dimensions_is_taken_from_the_first():
    whole = [Piece((), (), ())]
    assert coverage((), [[], whole, whole]) == Coverage(None, Box((), ()))
    assert assembly((), [[], whole, whole]) == [Copy(1, Box((), ()), Box((), ()))]


def test_a_later_holder_fills_only_what_is_left():
    half, whole = [Piece((1, 0), (2, 4), (0, 0))], [Piece((0, 0), (4, 4), (0, 0))]
    assert assembly((4, 4), [half, whole]) == [
        Copy(1, Box((0, 0), (1, 4)), Box((0, 0), (1, 4))),
        Copy(0, Box((0, 0), (2, 4)), Box((1, 0), (2, 4))),
        Copy(1, Box((3, 0), (1, 4)), Box((3, 0), (1, 4))),
    ]
    assert assembly((4, 4), [whole, half]) == [Copy(0, Box((0, 0), (4, 4)), Box((0, 0), (4, 4)))]
    assert coverage((4, 4), [half, whole]).repeated == Box((1, 0), (2, 4))


@pytest.mark.parametrize("piece", [Piece((3,), (2,), (0,)), Piece((-1,), (2,), (0,)), Piece((0,), (0,), (0,)),
                                   Piece((0, 0), (1, 1), (0, 0)), Piece((2**70,), (1,), (0,))])  # fmt: skip
@pytest.mark.parametrize("function", [coverage, assembly])
def test_a_piece_outside_of_the_tensor_is_an_error(function, piece):
    with pytest.raises(ValueError, match=r"holder 1 has a part .*which lies outside"):
        function((4,), [[Piece((0,), (4,), (0,))], [piece]])
    with pytest.raises(ValueError, match="cannot have the shape"):
        function((2**63,), [[piece]])


def grid(rows: int, columns: int) -> list[tuple[Piece, ...]]:
    """A tensor of 4096 x 4096 on a mesh."""
    mesh = (rows, columns)
    return [local_pieces((4096, 4096), mesh, at, [Shard(0), Shard(1)])[1] for at in ranks(mesh)]


def test_thousands_of_boxes_take_a_moment():
    """Two groups of 4,096 ranks with different layouts: about 10,000 pairs of boxes meet (0.5 s in all)."""
    begin = time.process_time()
    one, other = grid(64, 64), grid(96, 43)
    assert coverage((4096, 4096), one) == Coverage(None, None)
    assert len(assembly((4096, 4096), one)) == 4096
    assert coverage((4096, 4096), one[:-1]).uncovered == Box((4032, 4032), (64, 64))
    assert coverage((4096, 4096), other + one).is_complete
    assert len(assembly((4096, 4096), one[:-1] + other)) < 4096 + 8
    assert time.process_time() - begin < 20


def test_overlaps_that_no_group_makes_are_bounded(monkeypatch):
    """Slabs across each other in three dimensions leave a million holes."""
    shape = (400, 400, 400)
    slabs = []
    for dim in range(3):
        for place in range(0, 400, 4):
            start, size = [0, 0, 0], [400, 400, 400]
            start[dim], size[dim] = place, 1
            slabs.append(Piece(tuple(start), tuple(size), (0, 0, 0)))
    monkeypatch.setattr(module, "PARTS_MAX", 1000)
    with pytest.raises(DamagedError, match="cut the tensor into more"):
        coverage(shape, [slabs])
    monkeypatch.setattr(module, "OVERLAPS_MAX", 1000)
    with pytest.raises(DamagedError, match="pairs of them overlap"):
        assembly(shape, [slabs])


def test_pairs_are_found_in_blocks_of_any_length(monkeypatch):
    held = [*grid(8, 8), *grid(5, 3)]
    expected = assembly((4096, 4096), held), coverage((4096, 4096), held)
    for most in (1, 7, 50):
        monkeypatch.setattr(module, "_CANDIDATES_MAX", most)
        assert (assembly((4096, 4096), held), coverage((4096, 4096), held)) == expected
