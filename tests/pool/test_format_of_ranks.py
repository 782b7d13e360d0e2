"""Pools of a rank: what the layout table says of the group and of pieces is read as it was written, or is damaged; a
pool of one process has the same bytes as before there were such pools.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import format_reference as reference
import msgpack
import pools_by_hand as by_hand
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightck.errors import CorruptPoolError, FormatError
from lightck.pool.format import layout, structures
from lightck.pool.format.group import MESH_NDIM_MAX, RANKS_MAX, GroupIdentity
from lightck.pool.format.layout import Entry
from lightck.pool.format.pieces import PIECES_MAX, Piece, Replicate, Shard, StridedShard, local_pieces
from lightck.pool.format.structures import KIB, MIB, DamagedError
from lightck.pool.reader import StoredCheckpoint, open_pool

RUN, WORLD = bytes(range(16)), bytes(range(16, 32))
GROUP = GroupIdentity(run_id=RUN, world_id=WORLD, rank=2, world_size=8, mesh_shape=(2, 4), coordinate=(0, 2))


def part(name: str, logical_shape: tuple[int, ...], *placements: Any, mesh: Any = (4,), at: Any = (2,)) -> Entry:
    """The entry of what a rank holds of a tensor."""
    shape, pieces = local_pieces(logical_shape, mesh, at, placements)
    return by_hand.entry(name, shape, logical_shape=logical_shape, pieces=pieces)


# -- a pool of one process -------------------------------------------------------------------------------------------


@pytest.mark.skipif("LIGHTCK_TEST_BACKEND" in os.environ, reason="the digest is of a pool in a plain file")
def test_a_pool_of_one_process_has_the_bytes_that_it_had_before(pool: Path) -> None:
    """The digest is of the pool that commit c730af5 made from these calls, which knew of no pieces."""
    entries = [
        by_hand.entry("model/w", (300, 7), layer=0),
        by_hand.entry("model/tied", (300, 7), layer=1, alias="model/w", nbytes=0),
        by_hand.entry("model/empty", (0, 3), dtype="bfloat16"),
        by_hand.entry("optimizer/w/step", (), role="optimizer"),
        by_hand.entry("state/large", (700, 500), role="state"),
    ]
    with patch("os.urandom", lambda n: bytes(range(n))):
        by_hand.make(pool, entries)
    with by_hand.writer_of(pool) as writer:
        by_hand.commit(writer, 1)
        by_hand.commit(writer, 2, left_out=["model/tied"])
        by_hand.commit(writer, 3, [by_hand.entry("state/late", (40,), role="state")])
    digest = hashlib.sha256(pool.read_bytes()).hexdigest()
    assert digest == "e5ccd81a0ff57b088f70e6707f1f253083d8e1d437260214b81f34fc53b6c74a"


def test_a_pool_of_one_process_has_no_flag_and_no_group(pool: Path) -> None:
    by_hand.make(pool, [by_hand.entry("model/w", (3,))])
    with contextlib.closing(open_pool(str(pool))) as reader:
        assert (reader.superblock.incompat, reader.superblock.has_group, reader.group) == (0, False, None)
        assert [(e.logical_shape, e.pieces) for e in reader.entries] == [(None, None)]


def test_a_pool_of_one_process_cannot_have_pieces(pool: Path) -> None:
    with pytest.raises(ValueError, match="'model/w' is a part of a tensor, and only the pool of a rank can hold parts"):
        by_hand.make(pool, [part("model/w", (8, 2), Shard(0))])
    assert not pool.exists()


# -- round trips -----------------------------------------------------------------------------------------------------


@st.composite
def groups(draw: st.DrawFn) -> GroupIdentity:
    size = draw(st.integers(1, 64) | st.just(RANKS_MAX))
    mesh: list[int] = []
    for _ in range(draw(st.integers(0, 4))):
        product = max(1, size // max(1, _product(mesh)))
        mesh.append(draw(st.integers(1, product)))
    return GroupIdentity(
        run_id=draw(st.binary(min_size=16, max_size=16)),
        world_id=draw(st.binary(min_size=16, max_size=16)),
        rank=draw(st.integers(0, size - 1)),
        world_size=size,
        mesh_shape=tuple(mesh),
        coordinate=tuple(draw(st.integers(0, ranks - 1)) for ranks in mesh),
    )


def _product(sizes: list[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


@st.composite
def parts(draw: st.DrawFn) -> list[Entry]:
    """Entries as a rank of some mesh would have them: plain, even, uneven, empty, strided; tied ones too."""
    mesh = draw(st.sampled_from([(1,), (3,), (2, 2), (2, 3)]))
    at = tuple(draw(st.integers(0, ranks - 1)) for ranks in mesh)
    found: list[Entry] = []
    for i in range(draw(st.integers(0, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        cut = st.integers(0, max(len(shape) - 1, 0))
        placement = st.builds(Shard, cut) | st.builds(StridedShard, cut, st.integers(1, 3))
        if not shape or draw(st.booleans()):
            found.append(by_hand.entry(f"name {i}", shape))
        else:
            found.append(part(f"name {i}", shape, *[draw(placement) for _ in mesh], mesh=mesh, at=at))
        if draw(st.booleans()):
            found.append(found[-1]._replace(name=f"tied {i}", alias=f"name {i}", nbytes=0))
    return found


@given(groups())
def test_a_group_comes_back(group: GroupIdentity) -> None:
    assert layout.decode_of_rank(layout.encode([], group), low=0, high=0) == (group, ())


@given(groups(), parts())
def test_a_table_with_pieces_comes_back(group: GroupIdentity, plain: list[Entry]) -> None:
    placed, end = layout.assign_offsets(plain, 20 * KIB)
    table = layout.encode(placed, group)
    assert layout.decode_of_rank(table, low=20 * KIB, high=end) == (group, tuple(placed))
    decoded = reference.MessagePack.decode(table)
    assert list(decoded) == ["group", "entries"]
    assert decoded["entries"] == [one.to_map(has_group=True) for one in placed]
    with pytest.raises(DamagedError):
        layout.decode(table, low=20 * KIB, high=end)


@given(parts())
def test_extras_with_pieces_come_back(plain: list[Entry]) -> None:
    placed, end = layout.assign_offsets(plain, 20 * KIB)
    packed = layout.encode_extras(placed, has_group=True)
    assert layout.decode_extras(packed, low=20 * KIB, high=end, has_group=True) == tuple(placed)
    if placed:
        with pytest.raises(DamagedError):
            layout.decode_extras(packed, low=20 * KIB, high=end)


def test_the_largest_number_of_pieces_comes_back() -> None:
    many = part("model/w", (PIECES_MAX * 4, 1), StridedShard(0, PIECES_MAX))
    assert len(many.pieces or ()) == PIECES_MAX
    table = layout.encode([many._replace(offset=256)], GROUP)
    assert layout.decode_of_rank(table, low=256, high=MIB)[1] == (many._replace(offset=256),)


def test_a_scalar_is_one_piece() -> None:
    scalar = part("model/w", (), Replicate())._replace(offset=256)
    assert scalar.pieces == (Piece((), (), ()),)
    assert layout.decode_of_rank(layout.encode([scalar], GROUP), low=256, high=MIB)[1] == (scalar,)


# -- what cannot be written ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"run_id": bytes(15)},
        {"world_id": "0" * 16},
        {"rank": -1},
        {"rank": 8},
        {"rank": True},
        {"world_size": RANKS_MAX + 1},
        {"mesh_shape": (2, 4, 1)},
        {"coordinate": (0, 4)},
        {"coordinate": (-1, 2)},
        {"mesh_shape": (3, 4)},
        {"mesh_shape": (2, 2**70)},
        {"mesh_shape": (), "coordinate": (0,)},
        {"mesh_shape": (1,) * (MESH_NDIM_MAX + 1), "coordinate": (0,) * (MESH_NDIM_MAX + 1)},
        {"mesh_shape": (2.0, 4)},
    ],
    ids=str,
)
def test_an_impossible_group_is_refused(changes: dict[str, Any]) -> None:
    fields = {name: getattr(GROUP, name) for name in GroupIdentity.__slots__}
    assert GroupIdentity(**fields) == GROUP
    with pytest.raises(ValueError, match=r"id of a run|no rank|no integer|mesh|place"):
        GroupIdentity(**{**fields, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"pieces": None},
        {"logical_shape": None},
        {"logical_shape": (8,)},
        {"pieces": (Piece((7, 0), (2, 2), (0, 0)),)},
        {"pieces": (Piece((0, 0), (2, 2), (1, 0)),)},
        {"pieces": (Piece((0, 0), (2, 2), (0, 0)), Piece((2, 0), (1, 2), (0, 0)))},
    ],
    ids=range(6),
)
def test_a_piece_that_no_reader_would_take_is_not_written(changes: dict[str, Any]) -> None:
    good = part("model/w", (8, 2), Shard(0))
    assert layout.encode([good], GROUP)
    for write in (lambda bad: layout.encode([bad], GROUP), lambda bad: layout.encode_extras([bad], has_group=True)):
        with pytest.raises(ValueError, match="'model/w' cannot be stored: pieces"):
            write(good._replace(**changes))


def test_more_pieces_than_a_table_can_have_are_not_written_and_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    placed, end = layout.assign_offsets([part(f"model/{i}", (16,), StridedShard(0, 4)) for i in range(3)], 256)
    table = layout.encode(placed, GROUP)
    for limit, number in (("LIST_PIECES_MAX", 3 * 4), ("LIST_PAIRS_MAX", 3 * 4**2)):
        with monkeypatch.context() as during:
            during.setattr(layout, limit, number)
            assert layout.encode(placed, GROUP) == table
            assert len(layout.decode_of_rank(table, low=256, high=end)[1]) == 3
            during.setattr(layout, limit, number - 1)
            with pytest.raises(ValueError, match="12 pieces together"):
                layout.encode(placed, GROUP)
            with pytest.raises(DamagedError, match="too many pieces"):
                layout.decode_of_rank(table, low=256, high=end)


# -- what is read is untrusted ---------------------------------------------------------------------------------------


def packed(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A table whose decoded form was changed."""
    tree = reference.MessagePack.decode(layout.encode([part("a", (8, 2), Shard(0))._replace(offset=256)], GROUP))
    change(tree)
    return bytes(msgpack.packb(tree))


def deep() -> list[Any]:
    """A list in a list, and so on, so deep that its repr raises ``RecursionError``."""
    found: list[Any] = []
    for _ in range(1010):
        found = [found]
    return found


IMPOSSIBLE: dict[str, Callable[[dict[str, Any]], object]] = {
    "no group": lambda t: t.pop("group"),
    "another key": lambda t: t.update(more=1),
    "an unknown key of the group": lambda t: t["group"].update(more=1),
    "a missing key of the group": lambda t: t["group"].pop("mesh"),
    "a group that is a list": lambda t: t.update(group=[]),
    "a long id": lambda t: t["group"].update(run=bytes(17)),
    "an id that is text": lambda t: t["group"].update(run="r" * 16),
    "a rank beyond the world": lambda t: t["group"].update(rank=8),
    "a world of 0": lambda t: t["group"].update(rank=0, size=0),
    "a rank that is a deep list": lambda t: t["group"].update(rank=deep()),
    "an id that is a deep list": lambda t: t["group"].update(run=deep()),
    "a place that is a deep list": lambda t: t["group"].update(coordinate=[deep(), deep()]),
    "a piece that is a deep list": lambda t: t["entries"][0].update(pieces=[deep()]),
    "a logical shape that is a deep list": lambda t: t["entries"][0].update(logical_shape=deep()),
    "a mesh that is no list": lambda t: t["group"].update(mesh=None),
    "a mesh of text": lambda t: t["group"].update(mesh=["a", "b"]),
    "a mesh of maps": lambda t: t["group"].update(mesh=[{}, {}]),
    "a place outside of the mesh": lambda t: t["group"].update(coordinate=[0, 4]),
    "a large mesh": lambda t: t["group"].update(mesh=[2**62, 2**62], coordinate=[0, 0]),
    "the keys of another pool": lambda t: t["entries"][0].update(global_shape=[2, 2]),
    "no pieces": lambda t: t["entries"][0].update(pieces=None),
    "no logical shape": lambda t: t["entries"][0].update(logical_shape=None),
    "pieces that are a map": lambda t: t["entries"][0].update(pieces={}),
    "pieces that are text": lambda t: t["entries"][0].update(pieces="abc"),
    "a piece that is a number": lambda t: t["entries"][0].update(pieces=[1]),
    "a piece of two lists": lambda t: t["entries"][0].update(pieces=[[[0, 0], [1, 1]]]),
    "a piece of one dimension": lambda t: t["entries"][0].update(pieces=[[[0], [1], [0]]]),
    "an empty piece": lambda t: t["entries"][0].update(pieces=[[[0, 0], [0, 1], [0, 0]]]),
    "a negative start": lambda t: t["entries"][0].update(pieces=[[[-1, 0], [1, 1], [0, 0]]]),
    "a piece beyond the tensor": lambda t: t["entries"][0].update(pieces=[[[8, 0], [1, 1], [0, 0]]]),
    "a piece beyond the local tensor": lambda t: t["entries"][0].update(pieces=[[[0, 0], [3, 1], [0, 0]]]),
    "a bool as a size": lambda t: t["entries"][0].update(pieces=[[[0, 0], [True, 1], [0, 0]]]),
    "the same piece twice": lambda t: t["entries"][0].update(pieces=[[[0, 0], [1, 1], [0, 0]]] * 2),
    "a huge logical shape": lambda t: t["entries"][0].update(logical_shape=[2**62, 2]),
    "more pieces than an entry has": lambda t: t["entries"][0].update(pieces=[[[0, 0], [1, 1], [0, 0]]] * 5000),
}


@pytest.mark.parametrize("change", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_an_impossible_table_of_a_rank_is_damaged(change: Callable[[dict[str, Any]], object]) -> None:
    assert layout.decode_of_rank(packed(lambda _: None), low=256, high=MIB)[0] == GROUP
    with pytest.raises(DamagedError):
        layout.decode_of_rank(packed(change), low=256, high=MIB)


@pytest.mark.parametrize(
    "table",
    [
        b"",
        b"\x82\xa5group",
        b"\x82\xa5group\xdd\xff\xff\xff\xff",
        b"\x82\xa5group" + b"\xdc\x10\x00" * 2000,
        b"\x82\xa5group" + b"\x91" * 5000,
        b"\x82\xa7entries\x90\xa5group\x80",
        layout.encode([], GROUP)[:-1] + b"\xdd\xff\xff\xff\xff",
        layout.encode([], GROUP) + b"\0",
        layout.encode([]),
    ],
    ids=range(9),
)
def test_a_broken_table_of_a_rank_is_damaged(table: bytes) -> None:
    with pytest.raises(DamagedError):
        layout.decode_of_rank(table, low=256, high=MIB)


@settings(max_examples=500)
@given(groups(), parts(), st.data())
def test_a_table_of_a_rank_with_changed_bytes_is_read_or_damaged(
    group: GroupIdentity, plain: list[Entry], data: st.DataObject
) -> None:
    placed, end = layout.assign_offsets(plain, 256)
    table = bytearray(layout.encode(placed, group))
    for _ in range(data.draw(st.integers(1, 3))):
        table[data.draw(st.integers(0, len(table) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DamagedError):
        cut = data.draw(st.none() | st.integers(0, len(table)))
        read, entries = layout.decode_of_rank(bytes(table[:cut]), low=256, high=end)
        assert 0 <= read.rank < read.world_size
        for one in entries:
            assert one.offset + one.nbytes <= end or not one.nbytes
            for piece in one.pieces or ():
                assert all(
                    a >= 0 and a + n <= whole
                    for start, sizes in ((piece.start, one.logical_shape), (piece.local_start, one.shape))
                    for a, n, whole in zip(start, piece.size, sizes or (), strict=True)
                )


NUMBERS = st.integers(-1, 9) | st.sampled_from([2**31, 2**62, 2**63, 2**64 - 1, True, None, "a"])


@settings(max_examples=500)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "logical_shape": st.lists(NUMBERS, max_size=3) | st.none(),
            "pieces": st.lists(st.lists(st.lists(NUMBERS, max_size=3), max_size=3), max_size=4) | st.none(),
        },
    ),
    st.fixed_dictionaries(
        {},
        optional={
            "run": st.binary(max_size=18) | NUMBERS,
            "rank": NUMBERS,
            "size": NUMBERS,
            "mesh": st.lists(NUMBERS, max_size=3) | NUMBERS,
            "coordinate": st.lists(NUMBERS, max_size=3) | NUMBERS,
        },
    ),
)
def test_a_hostile_table_of_a_rank_is_read_or_damaged(entry: dict[str, Any], group: dict[str, Any]) -> None:
    table = packed(lambda tree: (tree["entries"][0].update(entry), tree["group"].update(group)))
    with contextlib.suppress(DamagedError):
        read, (one,) = layout.decode_of_rank(table, low=256, high=MIB)
        assert layout.encode([one], read) == layout.encode([one], GroupIdentity.parse(read.to_map()))
        assert (one.logical_shape is None) == (one.pieces is None)


# -- whole pools -----------------------------------------------------------------------------------------------------


def entries_of_a_rank() -> list[Entry]:
    return [
        by_hand.entry("model/plain", (5,)),
        part("model/uneven", (13, 3), Shard(0), at=(3,)),
        part("model/empty", (3, 3), Shard(0), at=(3,)),
        part("model/strided", (16, 2), StridedShard(0, 2), Shard(0), mesh=(2, 2), at=(1, 0)),
    ]


def test_both_readers_see_the_same_group_and_pieces(pool: Path) -> None:
    by_hand.make(pool, entries_of_a_rank(), group=GROUP)
    late = part("state/late", (40,), StridedShard(0, 3))._replace(role="state")
    with by_hand.writer_of(pool) as writer:
        by_hand.commit(writer, 1)
        by_hand.commit(writer, 2, [late])
    drawn = reference.Pool(pool.read_bytes())
    assert drawn.superblock["incompat"] == 1
    with contextlib.closing(open_pool(str(pool))) as reader:
        assert reader.group == GROUP
        assert drawn.group == GROUP.to_map()
        assert [one.to_map(has_group=True) for one in reader.entries] == drawn.entries
        newest = next(v for v in reader.checkpoints() if isinstance(v, StoredCheckpoint))
        newest.verify()
        assert newest.entries["state/late"]._replace(offset=0) == late
        [theirs, older] = drawn.checkpoints()
        assert [one.to_map(has_group=True) for one in newest.extras] == theirs.extras
        for name, one in newest.entries.items():
            assert theirs.tensors[name] == by_hand.content(one, 2).tobytes()
        assert "state/late" not in older.tensors


def test_a_lightck_that_does_not_know_the_flag_refuses_the_pool(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand.make(pool, entries_of_a_rank(), group=GROUP)
    monkeypatch.setattr(structures, "INCOMPAT_KNOWN", 0)
    with pytest.raises(FormatError, match=r"features 0x1\).*newer lightck"):
        open_pool(str(pool))


def test_a_pool_whose_table_lacks_the_group_is_corrupt(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as during:
        plain = layout.encode
        during.setattr(layout, "encode", lambda entries, group=None, **_: plain(entries))
        by_hand.make(pool, [by_hand.entry("model/w", (3,))], group=GROUP)
    with pytest.raises(CorruptPoolError, match="impossible layout"):
        open_pool(str(pool))


def test_a_tensor_with_other_pieces_does_not_fit_its_extent(pool: Path) -> None:
    entries = entries_of_a_rank()
    by_hand.make(pool, entries, group=GROUP)
    uneven = entries[1]
    other = uneven._replace(pieces=tuple(piece._replace(start=(0, 0)) for piece in uneven.pieces or ()))
    with by_hand.writer_of(pool) as writer:
        assert writer.has_extent_for(uneven)
        assert not writer.has_extent_for(other)
        assert not writer.has_extent_for(uneven._replace(pieces=None, logical_shape=None))


def test_tied_tensors_with_other_pieces_make_a_checkpoint_damaged() -> None:
    owner = part("model/w", (8, 2), Shard(0))
    tied = owner._replace(name="model/tied", alias="model/w", nbytes=0)
    layout.check_ties({"model/w": owner, "model/tied": tied})
    with pytest.raises(DamagedError, match="is tied to 'model/w'"):
        layout.check_ties({"model/w": owner, "model/tied": tied._replace(logical_shape=None, pieces=None)})
