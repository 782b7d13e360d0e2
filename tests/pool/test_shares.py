"""Shares: they cover each tensor once, they are equally large, and each is one run of memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightck.pool.format import layout
from lightck.pool.format.assembly import coverage
from lightck.pool.format.group import GroupIdentity
from lightck.pool.format.layout import Entry, entry_of_share, held_entry, is_dense
from lightck.pool.format.pieces import Piece, Replicate, Shard, StridedShard, local_pieces
from lightck.pool.format.shares import (
    Cut,
    Divisible,
    Share,
    dim_to_divide,
    divide,
    parse_share,
    share_to_map,
)
from lightck.pool.format.structures import MIB, DamagedError

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
    start = data.draw(st.integers(0, shape[dim]), (0, 1, 2))
    n_rows = data.draw(st.integers(0, shape[dim] - start))
    cut = Cut(shape, dim, (0, start, start + n_rows, shape[dim]), (0, 1, 2))
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
        cut = divide(given_tensors, tuple(range(n_ranks)))[one.name]
        entries = [entry_of_share(whole(one.shape, (one.shape[1], 1)), Share(cut, place)) for place in range(n_ranks)]
        found = coverage(one.shape, [entry.pieces for entry in entries])
        assert found.is_complete
        assert found.repeated is None
        assert sum(entry.nbytes for entry in entries) == 4 * np.prod(one.shape)


@given(tensors, st.integers(1, 5))
def test_each_rank_writes_the_same_number_of_bytes_but_for_a_row(given_tensors, n_ranks):
    cuts = divide(given_tensors, tuple(range(n_ranks)))
    total = sum(one.shape[0] * one.row_nbytes for one in given_tensors)
    row = max((one.row_nbytes for one in given_tensors), default=0)
    for place in range(n_ranks):
        own = sum(Share(cuts[one.name], place).rows[1] * one.row_nbytes for one in given_tensors)
        assert abs(own - total / n_ranks) <= row


@given(st.integers(2, 9), st.integers(0, 8), st.integers(1, 8))
def test_who_writes_the_whole_tensor_has_the_pieces_that_it_holds(rows, start, n_rows):
    start = min(start, rows - 1)
    end = min(start + n_rows, rows)
    cut = Cut((rows, 3), 0, (0, start, end, rows), (0, 1, 2))
    entry = entry_of_share(whole((rows, 3), (3, 1)), Share(cut, 1, True))
    assert entry.shape == (rows, 3)
    assert entry.pieces == (((0, 0), (rows, 3), (0, 0)),)
    assert entry.share.rows == (start, end - start)


placements = st.sampled_from([Shard(0), Shard(1), StridedShard(0, 2), Replicate()])


@given(st.tuples(st.integers(2, 12), st.integers(2, 5)), placements, st.integers(1, 3), st.integers(2, 4), st.data())
def test_the_shares_of_a_shard_are_what_it_is(logical, placement, n_shards, n_ranks, data):
    """Each shard of a tensor is divided among ranks of its own."""
    entries = []
    for at in range(n_shards):
        shape, pieces = local_pieces(logical, (n_shards,), (at,), [placement])
        dim = dim_to_divide(shape, (max(shape[1], 1), 1))
        if dim is None:
            return
        cuts = sorted(data.draw(st.lists(st.integers(0, shape[dim]), min_size=n_ranks - 1, max_size=n_ranks - 1)))
        cut = Cut(shape, dim, (0, *cuts, shape[dim]), tuple(at + n_shards * place for place in range(n_ranks)))
        held = whole(shape, (shape[1], 1))._replace(logical_shape=logical, pieces=pieces)
        entries += [entry_of_share(held, Share(cut, place)) for place in range(n_ranks)]
        assert all(held_entry(entry) == held for entry in entries[-n_ranks:])
    found = coverage(logical, [entry.pieces for entry in entries])
    assert found.is_complete
    assert (found.repeated is None) == (n_shards == 1 or placement != Replicate())
    for entry in entries:
        parsed = parse_share(share_to_map(entry.share), entry.shape, list(logical), entry.pieces)
        assert parsed == entry.share


def a_share() -> Entry:
    held = whole((6, 2), (2, 1))._replace(logical_shape=(12, 2), pieces=(Piece((6, 0), (6, 2), (0, 0)),))
    return entry_of_share(held, Share(Cut((6, 2), 0, (0, 2, 6), (1, 3)), 1))


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [6]},
        {"shape": [7, 2]},
        {"shape": [1 << 62, 1 << 62]},
        {"dim": 2},
        {"dim": -1},
        {"dim": True},
        {"dim": 1},
        {"bounds": [0, 6]},
        {"bounds": [0, 3, 6]},
        {"bounds": [0, 7, 6]},
        {"bounds": [0, 2, 7]},
        {"bounds": [1, 2, 6]},
        {"bounds": None},
        {"ranks": [3, 1]},
        {"ranks": [1, 1]},
        {"ranks": [3]},
        {"ranks": [-1, 3]},
        {"ranks": [1, 1 << 20]},
        {"ranks": {}},
        {"place": 2},
        {"place": 0},
        {"place": -1},
        {"place": True},
        {"whole": True},
        {"whole": 0},
        {"pieces": None},
        {"pieces": []},
        {"pieces": [[[5, 0], [6, 2], [0, 0]]]},
        {"pieces": [[[7, 0], [6, 2], [0, 0]]]},
        {"other": 1},
    ],
    ids=str,
)
def test_a_share_that_contradicts_itself_or_its_entry_is_refused(changes):
    entry = a_share()
    item = share_to_map(entry.share)
    assert parse_share(item, entry.shape, [12, 2], entry.pieces) == entry.share
    with pytest.raises(DamagedError, match=r"share|pieces"):
        parse_share(item | changes, entry.shape, [12, 2], entry.pieces)


@pytest.mark.parametrize("item", [None, [], {}, 5])
def test_what_is_no_share_is_refused(item):
    with pytest.raises(DamagedError, match="share"):
        parse_share(item, (2, 2), [2, 2], None)


def test_a_share_of_a_flat_tensor_is_refused():
    """Of a logical tensor without dimensions, too."""
    item = {"shape": [2], "dim": 0, "bounds": [0, 1, 2], "ranks": [0, 1], "place": 0, "whole": False}
    for logical, pieces in (([], [[[], [], [0]]]), ([2, 1], [[[0, 0], [2, 1], [0]]])):
        with pytest.raises(DamagedError, match="flat"):
            parse_share(item | {"pieces": pieces}, (1,), logical, ())


def test_only_a_pool_with_shares_holds_them():
    entry = a_share()._replace(offset=256)
    group = GroupIdentity(
        run_id=bytes(16), world_id=bytes(16), rank=3, world_size=4, mesh_shape=(2, 2), coordinate=(1, 1)
    )
    table = layout.encode([entry], group, has_shares=True)
    assert layout.decode_of_rank(table, low=256, high=MIB, has_shares=True) == (group, (entry,))
    extras = layout.encode_extras([entry], has_group=True, has_shares=True)
    assert layout.decode_extras(extras, low=256, high=MIB, has_group=True, has_shares=True) == (entry,)
    for write in (lambda: layout.encode([entry], group), lambda: layout.encode_extras([entry], has_group=True)):
        with pytest.raises(ValueError, match="share"):
            write()
    with pytest.raises(DamagedError, match="keys"):
        layout.decode_of_rank(table, low=256, high=MIB)
    with pytest.raises(DamagedError, match="keys"):
        layout.decode_extras(extras, low=256, high=MIB, has_group=True)
