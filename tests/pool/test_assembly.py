"""Logical tensors from the pieces of several holders: complete, exact, and each element from one of them."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from boxes_by_hand import at, filled, indices, ranks, worlds
from hypothesis import given, settings
from hypothesis import strategies as st

from lightck.pool.format import assembly as module
from lightck.pool.format import boxes
from lightck.pool.format.assembly import Copy, Coverage, assembly, coverage, local_copies
from lightck.pool.format.boxes import Box
from lightck.pool.format.pieces import Piece, Replicate, Shard, local_pieces, parse_pieces
from lightck.pool.format.structures import NUMBER_MAX, DamagedError


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


@given(worlds(), worlds(), st.data())
@settings(max_examples=300)
def test_every_world_fills_the_local_tensors_of_every_other(one, other, data):
    shape, mesh, placements = one
    _, new_mesh, new_placements = other
    new_placements = [p if p == Replicate() or p.dim < len(shape) else Replicate() for p in new_placements]
    whole = indices(shape)
    parts = [local_pieces(shape, mesh, coordinate, placements) for coordinate in ranks(mesh)]
    coordinate = data.draw(st.sampled_from(list(ranks(new_mesh))))
    local_shape, wanted = local_pieces(shape, new_mesh, coordinate, new_placements)
    put = np.full(local_shape, -1)
    for holder, source, destination in local_copies(shape, wanted, [pieces for _, pieces in parts]):
        assert source.size == destination.size
        assert (put[at(destination)] == -1).all(), "an element is copied twice"
        put[at(destination)] = filled(*parts[holder], whole)[at(source)]
    assert (put == filled(local_shape, wanted, whole)).all()


def test_the_largest_tensor_is_covered():
    size = NUMBER_MAX - 1
    items = [[[0], [size - 1], [1]], [[size - 1], [1], [0]]]
    assert coverage([size], [parse_pieces(items, [size], (size,))]) == Coverage(None, None)


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
    monkeypatch.setattr(boxes, "PARTS_MAX", 1000)
    with pytest.raises(DamagedError, match="cut the tensor into more"):
        coverage(shape, [slabs])
    monkeypatch.setattr(module, "OVERLAPS_MAX", 1000)
    with pytest.raises(DamagedError, match="pairs of them overlap"):
        assembly(shape, [slabs])


def test_pairs_are_found_in_blocks_of_any_length(monkeypatch):
    held = [*grid(8, 8), *grid(5, 3)]
    expected = assembly((4096, 4096), held), coverage((4096, 4096), held)
    for most in (1, 7, 50):
        monkeypatch.setattr(boxes, "_CANDIDATES_MAX", most)
        assert (assembly((4096, 4096), held), coverage((4096, 4096), held)) == expected
