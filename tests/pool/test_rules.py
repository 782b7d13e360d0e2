"""Rules of a layout: what they say agrees with tensors that are split by hand, as Megatron splits them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightck.errors import LayoutError
from lightck.layout import Flat, Fused, Layout, Padded, Replicated, Shard, uncovered
from lightck.pool.format.assembly import coverage, local_copies
from lightck.pool.format.pieces import PIECES_MAX, Piece, parse_pieces

PADDING = -1


def numbered(shape) -> np.ndarray:
    """An array whose elements all differ."""
    return np.arange(np.prod(shape, dtype=int)).reshape(shape)


def pieces_of(rule, local, rank, size):
    return Layout({"t": rule}, rank, size).part("t", rule, local.shape)


def assembled(rule, locals_) -> tuple[tuple[int, ...], np.ndarray]:
    """The logical tensor that the pieces of the ranks say, and its shape."""
    parts = [pieces_of(rule, local, rank, len(locals_)) for rank, local in enumerate(locals_)]
    shape = parts[0][0]
    assert all(part[0] == shape for part in parts)
    covered = coverage(shape, [pieces for _, pieces in parts])
    assert covered.is_complete
    assert covered.repeated is None
    whole = np.full(shape, -2)
    for local, (_, pieces) in zip(locals_, parts, strict=True):
        assert parse_pieces([list(map(list, one)) for one in pieces], list(shape), local.shape) == pieces
        for start, size, local_start in pieces:
            into = tuple(slice(at, at + n) for at, n in zip(start, size, strict=True))
            whole[into] = local[tuple(slice(at, at + n) for at, n in zip(local_start, size, strict=True))]
    return shape, whole


@st.composite
def places(draw):
    """Number of ranks, sizes of the other dimensions, and which dimension is cut."""
    ranks, others = draw(st.integers(1, 5)), draw(st.lists(st.integers(1, 3), max_size=2))
    return ranks, others, draw(st.integers(0, len(others)))


def shape_with(others, dim, length) -> tuple[int, ...]:
    return (*others[:dim], length, *others[dim:])


@given(places(), st.integers(0, 4))
def test_even_shards(place, each):
    ranks, others, dim = place
    whole = numbered(shape_with(others, dim, ranks * each))
    shape, found = assembled(Shard(dim), np.split(whole, ranks, dim))
    assert shape == whole.shape
    assert (found == whole).all()


@given(places(), st.data())
def test_shards_of_given_sizes(place, data):
    ranks, others, dim = place
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks))
    whole = numbered(shape_with(others, dim, sum(sizes)))
    locals_ = np.split(whole, np.cumsum(sizes)[:-1], dim)
    shape, found = assembled(Shard(dim, sizes), locals_)
    assert shape == whole.shape
    assert (found == whole).all()


def fused_by_hand(whole, sizes, ranks, dim) -> list[np.ndarray]:
    tensors = np.split(whole, np.cumsum(sizes)[:-1], dim)
    return [np.concatenate([np.split(one, ranks, dim)[rank] for one in tensors], dim) for rank in range(ranks)]


@given(places(), st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_fused_tensors(place, each):
    ranks, others, dim = place
    sizes = [ranks * one for one in each]
    whole = numbered(shape_with(others, dim, sum(sizes)))
    shape, found = assembled(Fused(dim, sizes), fused_by_hand(whole, sizes, ranks, dim))
    assert shape == whole.shape
    assert (found == whole).all()


def test_a_concatenation_of_fused_tensors_would_be_wrong():
    whole = numbered((8 + 2 + 2, 3))  # four heads of queries, one of keys and of values on each of two ranks
    locals_ = fused_by_hand(whole, (8, 2, 2), 2, 0)
    assert (np.concatenate(locals_) != whole).any()
    assert (assembled(Shard(0), locals_)[1] != whole).any()
    assert (assembled(Fused(0, (8, 2, 2)), locals_)[1] == whole).all()
    assert pieces_of(Fused(0, (8, 2, 2)), locals_[1], 1, 2)[1] == (
        Piece((4, 0), (4, 3), (0, 0)),
        Piece((9, 0), (1, 3), (4, 0)),
        Piece((11, 0), (1, 3), (5, 0)),
    )


@given(places(), st.data())
def test_padded_tensors(place, data):
    ranks, others, dim = place
    each = data.draw(st.integers(1, 4))
    size = data.draw(st.integers(0, ranks * each))
    whole = numbered(shape_with(others, dim, size))
    padding = np.full(shape_with(others, dim, ranks * each - size), PADDING)
    locals_ = np.split(np.concatenate([whole, padding], dim), ranks, dim)
    shape, found = assembled(Padded(dim, size), locals_)
    assert shape == whole.shape
    assert (found == whole).all()


def test_a_rank_that_holds_nothing_but_padding():
    rule = Padded(0, 5)
    assert [Layout({"t": rule}, rank, 4).part("t", rule, (2, 3))[1] for rank in range(4)] == [
        (Piece((0, 0), (2, 3), (0, 0)),),
        (Piece((2, 0), (2, 3), (0, 0)),),
        (Piece((4, 0), (1, 3), (0, 0)),),
        (),
    ]


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_from_one_number_of_ranks_to_another(old, new):
    """A padded vocabulary of 10 and fused tensors: what each new rank reads is what it would hold by hand."""
    for rule, whole, by_hand in (
        (Fused(0, (8, 4, 4)), numbered((16, 3)), lambda whole, ranks: fused_by_hand(whole, (8, 4, 4), ranks, 0)),
        (Padded(0, 10), numbered((10, 3)), lambda whole, ranks: vocabulary_by_hand(whole, ranks)),
    ):
        had, wanted = by_hand(whole, old), by_hand(whole, new)
        holders = [pieces_of(rule, local, rank, old)[1] for rank, local in enumerate(had)]
        for rank, expected in enumerate(wanted):
            found = np.full(expected.shape, PADDING)
            shape, pieces = pieces_of(rule, expected, rank, new)
            for copy in local_copies(shape, pieces, holders):
                box, source = (tuple(slice(a, a + n) for a, n in zip(*b, strict=True)) for b in copy[:0:-1])
                found[box] = had[copy.holder][source]
            assert (found == expected).all()


def vocabulary_by_hand(whole, ranks) -> list[np.ndarray]:
    """Padded to a multiple of 3 rows for each rank."""
    n_rows = -(-len(whole) // (3 * ranks)) * 3 * ranks
    padded = np.concatenate([whole, np.full((n_rows - len(whole), *whole.shape[1:]), PADDING)])
    return np.split(padded, ranks)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(0, 3))
def test_flat_ranges(lengths, padding):
    whole, ends = numbered((sum(lengths),)), np.cumsum(lengths).tolist()
    rules = [Flat(whole.shape, end - n, end) for end, n in zip(ends, lengths, strict=True)]
    layouts = [Layout({"t": rule}, rank, len(rules)) for rank, rule in enumerate(rules)]
    found = np.full(whole.shape, -2)
    for layout, rule, n in zip(layouts, rules, lengths, strict=True):
        shape, pieces = layout.part("t", rule, (n + padding,))
        assert shape == whole.shape
        for (start,), (size,), (local_start,) in pieces:
            local = np.concatenate([whole[rule.start : rule.stop], np.full(padding, PADDING)])
            found[start : start + size] = local[local_start : local_start + size]
    assert (found == whole).all()
    assert uncovered([one.ranges for one in layouts]) is None
    assert {one.description for one in layouts} == {layouts[0].description}
    for left_out in range(len(layouts)):
        others = [one.ranges for one in layouts if one is not layouts[left_out]]
        if others:
            assert (uncovered(others) is None) == (lengths[left_out] == 0)


@given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_flat_ranges_of_tensors_with_any_number_of_dimensions(shape, data):
    """Cut anywhere, also in the middle of a row; put together by numpy, which knows of no boxes."""
    n, n_ranks = int(np.prod(shape, dtype=int)), data.draw(st.integers(1, 4))
    ends = [*sorted(data.draw(st.lists(st.integers(0, n), min_size=n_ranks - 1, max_size=n_ranks - 1))), n]
    whole, found, padding = numbered(tuple(shape)), np.full(shape, -2), data.draw(st.integers(0, 3))
    for rank, (start, stop) in enumerate(zip([0, *ends], ends, strict=False)):
        local = np.concatenate([whole.reshape(-1)[start:stop], np.full(padding, PADDING)])
        logical, pieces = pieces_of(Flat(tuple(shape), start, stop), local, rank, n_ranks)
        assert logical == tuple(shape)
        assert len(pieces) <= max(1, 2 * len(shape) - 1)
        if start < stop:
            assert parse_pieces([list(map(list, one)) for one in pieces], list(shape), local.shape) == pieces
        for begin, size, (at, *_) in pieces:
            box = tuple(slice(a, a + length) for a, length in zip(begin, size, strict=True))
            found[box] = local[at : at + int(np.prod(size, dtype=int))].reshape(size)
    assert (found == whole).all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Flat((4, 4), 0, 17), "no elements 0 to 17"),
        (lambda: Flat((1,) * 65, 0, 1), "more than 64 dimensions"),
        (lambda: Flat((2**40, 2**40), 0, 1), "cannot have the shape"),
        (lambda: Flat((4,), 3, 2), "no elements 3 to 2"),
        (lambda: Flat((4,), 0, 5), "no elements 0 to 5"),
    ],
)
def test_flat_ranges_that_do_not_exist(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_replicated_is_no_part():
    assert Layout({"t": Replicated()}, 1, 2).part("t", Replicated(), (4, 3)) is None


def test_empty_tensors_have_no_pieces():
    assert pieces_of(Shard(0), np.zeros((2, 0)), 1, 2) == ((4, 0), ())
    assert pieces_of(Shard(0), np.zeros((0, 3)), 1, 2) == ((0, 3), ())


def test_a_tensor_has_few_pieces():
    assert len(pieces_of(Fused(1, (4, 4, 4)), numbered((3, 6)), 0, 2)[1]) == 3 < PIECES_MAX


@pytest.mark.parametrize(
    ("rule", "shape", "rank", "size", "words"),
    [
        (Shard(2), (4, 4), 0, 2, "has no dimension 2"),
        (Shard(0), (), 0, 2, "has no dimension 0"),
        (Shard(0, (1, 2)), (1,), 0, 3, "2 sizes for 3 ranks"),
        (Shard(0, (1, 2)), (1,), 1, 2, "gives rank 1 the length 2, and the tensor has 1 there"),
        (Fused(0, (4, 3)), (3,), 0, 2, "3 cannot be divided among 2 ranks evenly"),
        (Fused(0, (4, 4)), (5,), 0, 2, "the rule's sizes are 8 together, and 2 ranks with 5 each have 10"),
        (Fused(0, (8, 8)), (8, 16), 0, 4, "the rule's sizes are 16 together, and 4 ranks with 8 each have 32"),
        (Flat((9,), 2, 6), (3,), 0, 2, "one dimension, with at least 4 elements"),
        (Flat((9,), 2, 6), (4, 1), 0, 2, "one dimension, with at least 4 elements"),
        (Padded(0, 9), (4,), 0, 2, "2 ranks with 4 each have 8, and not 9"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_by_name(rule, shape, rank, size, words):
    with pytest.raises(LayoutError, match=rf"the tensor 'a\.weight'.*rank {rank} of {size}: .*{words}"):
        Layout({"t": rule}, rank, size).part("a.weight", rule, shape)


@pytest.mark.parametrize("make", [lambda: Shard(-1), lambda: Shard(True), lambda: Fused(0, ()), lambda: Padded(0, -1)])
def test_rules_that_say_nothing_are_refused(make):
    with pytest.raises(ValueError, match=r"Pass (the number|ints of at least 0)"):
        make()


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0), (True, 2)])
def test_a_place_that_does_not_exist(rank, size):
    with pytest.raises(ValueError, match="pass the number of ranks"):
        Layout({}, rank, size)


def test_a_rule_that_is_none():
    with pytest.raises(TypeError, match="the rule of 'a' is a int"):
        Layout({"a": 3}, 0, 1)


def test_patterns_match_whole_names():
    layout = Layout({r".*\.weight": Shard(0), r"head\..*": Shard(1)}, 0, 2)
    assert layout.rule_of("a.weight") == Shard(0)
    assert layout.rule_of("a.weight.b") is None
    with pytest.raises(LayoutError, match=r"Two rules of layout= match the tensor 'head\.weight'"):
        layout.rule_of("head.weight")
    with pytest.raises(LayoutError, match=r"The rule 'head.*' of layout= matches no parameter"):
        layout.refuse_unused(["a.weight"])


def test_layouts_of_ranks_have_one_description():
    one, other = (Layout({"a": Shard(0), "b": Fused(1, [4, 4])}, rank, 2) for rank in range(2))
    swapped = Layout({"b": Fused(1, (4, 4)), "a": Shard(0)}, 0, 2)
    assert one.description == other.description == swapped.description
    assert one.description != Layout({"a": Shard(0), "b": Fused(1, (2, 6))}, 0, 2).description
    assert one.description != Layout({"a": Shard(0), "b": Fused(1, (4, 4))}, 0, 3).description
