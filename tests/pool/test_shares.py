"""Shares: they cover each tensor once, they are equally large, and each is one run of memory."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lightck.pool.format.assembly import coverage
from lightck.pool.format.layout import Entry, is_dense
from lightck.pool.format.shares import Cut, Divisible, Share, dim_to_divide, divided, entry_of_share

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


def strides_of(shape: tuple[int, ...], order: list[int]) -> tuple[int, ...]:
    """The strides, in elements, of a dense tensor whose dimensions lie in memory in this order, slowest first."""
    array = np.empty([shape[dim] for dim in order], np.uint8).transpose(np.argsort(order))
    return tuple(array.strides)


@given(shapes, st.data())
def test_a_row_is_one_run_of_memory_and_so_is_a_share(shape, data):
    order = data.draw(st.permutations(range(len(shape))))
    stride = strides_of(shape, order)
    dim = dim_to_divide(shape, stride)
    if np.prod(shape, dtype=int) < 2:
        assert dim is None
        return
    start = data.draw(st.integers(0, shape[dim]))
    n_rows = data.draw(st.integers(0, shape[dim] - start))
    cut = Cut(shape, dim, (0, start, start + n_rows, shape[dim]))
    entry = entry_of_share(whole(shape, stride), Share(cut, 1))
    assert is_dense(entry.shape, entry.stride)
    assert entry.nbytes == 4 * np.prod(entry.shape, dtype=int)


def whole(shape: tuple[int, ...], stride: tuple[int, ...]) -> Entry:
    return Entry("model/w", "param", "float32", shape, stride, 4 * int(np.prod(shape, dtype=int)))


tensors = st.lists(
    st.tuples(st.integers(2, 50), st.integers(1, 40)).map(lambda one: ((one[0], one[1]), 0, 4 * one[1])), max_size=8
).map(lambda many: [Divisible(f"model/{i}", *one) for i, one in enumerate(many)])


@given(tensors, st.integers(1, 5))
def test_the_shares_of_all_ranks_cover_each_tensor_once(given_tensors, n_ranks):
    for one in given_tensors:
        cut = divided(given_tensors, n_ranks)[one.name]
        entries = [entry_of_share(whole(one.shape, (one.shape[1], 1)), Share(cut, place)) for place in range(n_ranks)]
        found = coverage(one.shape, [entry.pieces for entry in entries])
        assert found.is_complete
        assert found.repeated is None
        assert sum(entry.nbytes for entry in entries) == 4 * np.prod(one.shape)


@given(tensors, st.integers(1, 5))
def test_each_rank_writes_the_same_number_of_bytes_but_for_a_row(given_tensors, n_ranks):
    cuts = divided(given_tensors, n_ranks)
    total = sum(one.shape[0] * one.weight for one in given_tensors)
    row = max((one.weight for one in given_tensors), default=0)
    for place in range(n_ranks):
        own = sum(Share(cuts[one.name], place).rows[1] * one.weight for one in given_tensors)
        assert abs(own - total / n_ranks) <= row


@given(st.integers(2, 9), st.integers(0, 8), st.integers(1, 8))
def test_who_writes_the_whole_tensor_lists_its_share_first(rows, start, n_rows):
    start = min(start, rows - 1)
    end = min(start + n_rows, rows)
    entry = entry_of_share(whole((rows, 3), (3, 1)), Share(Cut((rows, 3), 0, (0, start, end, rows)), 1, True))
    assert entry.shape == (rows, 3)
    assert entry.pieces[0] == ((start, 0), (end - start, 3), (start, 0))
    found = coverage((rows, 3), [entry.pieces])
    assert found.is_complete
    assert found.repeated is None
    assert all(piece.start == piece.local_start for piece in entry.pieces)
