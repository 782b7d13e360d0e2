"""Pools with gradient records: superblock, layout table and manifest are read as they were written, or are damaged.
Whoever cannot read such a pool yet says so.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pools_by_hand as by_hand
import pytest
import test_format
import toys
from hypothesis import given, settings
from hypothesis import strategies as st

import lightck
from lightck.errors import FormatError
from lightck.pool.format import layout
from lightck.pool.format.gradients import (
    CHAIN_COMMITTED,
    HOME_ROW_DTYPE,
    IN_RECORD,
    ChainEntry,
    GradientPart,
    checked_homes,
    part_offset,
)
from lightck.pool.format.group import GroupIdentity
from lightck.pool.format.layout import Entry
from lightck.pool.format.structures import (
    INCOMPAT_GRADIENTS,
    INCOMPAT_GROUP,
    KIB,
    MIB,
    RECORD_SLOTS_MAX,
    SUPERBLOCK_NBYTES,
    DamagedError,
    ManifestHeader,
    Superblock,
    crc64,
)
from lightck.strategy.gradients import Gradients

UUID = bytes(range(16))
HOMES = ((2 * MIB, 6 * MIB), (8 * MIB, 6 * MIB))


def superblock(n_slots: int = 5, **changes: Any) -> Superblock:
    """Two homes of 6 MiB, then the slots."""
    fields: dict[str, Any] = {
        "incompat": INCOMPAT_GRADIENTS,
        "nbytes": (7 + n_slots) * 2 * MIB,
        "slots": tuple(((7 + i) * 2 * MIB, 2 * MIB) for i in range(n_slots)),
        "homes": HOMES,
    }
    return test_format.superblock(n_slots, **{**fields, **changes})


# -- superblock --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_slots", [2, 9, RECORD_SLOTS_MAX])
def test_a_superblock_comes_back(n_slots: int) -> None:
    behind = tuple((off + 2 * n_slots * MIB - 0, n) for off, n in HOMES)
    before = tuple(((1 + i) * 2 * MIB, 2 * MIB) for i in range(n_slots))
    for one in (
        superblock(n_slots),
        superblock(n_slots, incompat=INCOMPAT_GRADIENTS | INCOMPAT_GROUP),
        superblock(n_slots, slots=before, homes=behind),
    ):
        assert len(one.pack()) == SUPERBLOCK_NBYTES
        assert Superblock.unpack(one.pack()) == one
        assert (one.has_gradients, one.home_nbytes) == (True, 6 * MIB)


def test_a_pool_without_gradient_records_has_no_homes() -> None:
    plain = superblock(homes=(), incompat=0)
    assert Superblock.unpack(plain.pack()) == plain
    assert (plain.has_gradients, plain.home_nbytes) == (False, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"homes": ((2 * MIB, 6 * MIB), (6 * MIB, 6 * MIB))},
        {"homes": ((2 * MIB, 6 * MIB), (8 * MIB, 4 * MIB))},
        {"homes": ((2 * MIB, 0), (8 * MIB, 0))},
        {"homes": ((2 * MIB + 1, 6 * MIB), (8 * MIB + 1, 6 * MIB))},
        {"homes": ((0, 6 * MIB), (8 * MIB, 6 * MIB))},
        {"homes": ((2 * MIB, 6 * MIB), (10 * MIB, 6 * MIB))},
        {"homes": ((2 * MIB, 6 * MIB), (2**62, 6 * MIB))},
        {"nbytes": 22 * MIB},
        {"ring_lines": 4},
        {"ring_lines": 65},
        {"slots": ((14 * MIB, 2 * MIB),)},
        {"reserve_offset": 3 * MIB},
    ],
    ids=str,
)
def test_an_impossible_geometry_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(DamagedError):
        Superblock.unpack(superblock(**changes).pack())


def patched(one: Superblock, at: int, form: str, value: int) -> bytes:
    body = bytearray(one.pack()[:-8])
    struct.pack_into(form, body, at, value)
    return bytes(body) + struct.pack("<Q", crc64(body))


@pytest.mark.parametrize(
    ("at", "form", "value"),
    [
        (160, "<I", 2),
        (160, "<I", 4),
        (160, "<I", 2**31),
        (168, "<I", 2),
        (200, "<I", 1),
        (204, "<I", 1),
        (168 + 24, "<Q", 1),
        (168 + 24, "<Q", 256),
        (168 + 24, "<Q", 2**63),
        (200 + 24, "<Q", 2),
        (32, "<Q", 0),
    ],
)
def test_other_regions_are_refused(at: int, form: str, value: int) -> None:
    with pytest.raises(DamagedError):
        Superblock.unpack(patched(superblock(), at, form, value))


@given(
    st.lists(
        st.tuples(
            st.integers(2, 32).map(lambda n: n * 8),
            st.sampled_from([0, 1, 2, 3, 5, 255, 256, 4096, 2 * MIB, 6 * MIB, 14 * MIB, 24 * MIB, 2**32, 2**62, 2**63]),
        ),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=400)
def test_a_hostile_superblock_is_refused_or_in_bounds(changes: list[tuple[int, int]]) -> None:
    body = bytearray(superblock().pack()[:-8])
    for at, value in changes:
        struct.pack_into("<Q", body, at, value)
    try:
        one = Superblock.unpack(bytes(body) + struct.pack("<Q", crc64(body)))
    except (DamagedError, FormatError):
        return
    assert len(one.slots) <= RECORD_SLOTS_MAX
    assert all(0 <= off <= off + n <= one.nbytes for off, n in (*one.slots, *one.homes))
    assert len(one.homes) == (2 if one.has_gradients else 0)


# -- layout table ------------------------------------------------------------------------------------------------------


def in_home(name: str, shape: tuple[int, ...], **fields: Any) -> Entry:
    return by_hand.entry(name, shape, place="home", **fields)


def gradient(name: str, shape: tuple[int, ...], **fields: Any) -> Entry:
    return by_hand.entry(f"gradient/{name}", shape, role="gradient", **fields)


def placed() -> list[Entry]:
    """A weight with optimizer state in homes, a buffer, and the gradient."""
    homes, _ = layout.assign_offsets(
        [
            in_home("model/w", (300, 7)),
            in_home("optimizer/w/exp_avg", (300, 7), role="optimizer"),
            in_home("model/none", (0, 3)),
        ],
        0,
    )
    slots, _ = layout.assign_offsets(
        [by_hand.entry("model/b", (40,), role="buffer"), gradient("w", (300, 7)), gradient("none", (0, 3))], 20 * KIB
    )
    return [*homes, *slots]


def test_a_table_comes_back() -> None:
    entries = tuple(placed())
    table = layout.encode(entries, has_gradients=True)
    assert layout.decode(table, low=20 * KIB, high=MIB, home_nbytes=MIB) == entries
    with pytest.raises(DamagedError, match="wrong keys"):
        layout.decode(table, low=0, high=MIB)
    with pytest.raises(DamagedError, match="wrong keys"):
        layout.decode(layout.encode([by_hand.entry("a", (1,))]), low=0, high=MIB, home_nbytes=MIB)


def test_a_table_of_a_rank_comes_back() -> None:
    group = GroupIdentity(run_id=UUID, world_id=UUID, rank=0, world_size=2)
    entries = tuple(placed())
    for has_shares in (False, True):
        table = layout.encode(entries, group, has_shares=has_shares, has_gradients=True)
        found = layout.decode_of_rank(table, low=20 * KIB, high=MIB, has_shares=has_shares, home_nbytes=MIB)
        assert found == (group, entries)
        with pytest.raises(DamagedError, match="wrong keys"):
            layout.decode_of_rank(table, low=0, high=MIB, has_shares=has_shares)


def test_extents_in_a_home_and_in_a_slot_may_have_the_same_offset() -> None:
    entries = (in_home("a", (64,), offset=256), by_hand.entry("b", (64,), offset=256))
    table = layout.encode(entries, has_gradients=True)
    assert layout.decode(table, low=256, high=512, home_nbytes=512) == entries
    for home_nbytes, low in ((511, 256), (512, 512)):
        with pytest.raises(DamagedError, match="out of place"):
            layout.decode(table, low=low, high=512, home_nbytes=home_nbytes)
    twice = layout.encode([entries[0], entries[0]._replace(name="c")], has_gradients=True)
    with pytest.raises(DamagedError, match="out of place"):
        layout.decode(twice, low=256, high=512, home_nbytes=4096)


WRONG = [
    by_hand.entry("a", (1,), place="else"),
    in_home("a", (1,), role="buffer"),
    in_home("a", (1,), role="state"),
    in_home("gradient/a", (1,), role="gradient"),
    in_home("a", (1,), alias="b", nbytes=0),
    by_hand.entry("gradient/a", (1,)),
    by_hand.entry("a", (1,), role="gradient"),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda one: f"{one.name} {one.role} {one.place}")
def test_an_entry_in_the_wrong_place_is_refused(wrong: Entry) -> None:
    with pytest.raises(ValueError, match="cannot be stored"):
        wrong.to_map(has_gradients=True)
    good = by_hand.entry("a", (1,)).to_map(has_gradients=True)
    item = good | {"name": wrong.name, "role": wrong.role, "place": wrong.place, "alias": wrong.alias}
    item["nbytes"] = wrong.nbytes
    with pytest.raises(DamagedError):
        layout.decode(msgpack.packb({"entries": [item]}), low=0, high=MIB, home_nbytes=MIB)
    for place in (None, 3, ["home"], b"home"):
        with pytest.raises(DamagedError):
            layout.decode(msgpack.packb({"entries": [good | {"place": place}]}), low=0, high=MIB, home_nbytes=MIB)


def test_a_pool_without_gradient_records_holds_neither_homes_nor_gradients() -> None:
    for one in (in_home("a", (1,)), gradient("a", (1,))):
        with pytest.raises(ValueError, match="only a pool with gradient records"):
            layout.encode([one])


def test_no_extra_tensor_lies_in_a_home() -> None:
    extras = [by_hand.entry("state/late", (9,), role="state", offset=MIB), gradient("sparse", (9,), offset=2 * MIB)]
    packed = layout.encode_extras(extras, has_gradients=True)
    assert layout.decode_extras(packed, low=MIB, high=3 * MIB, has_gradients=True) == tuple(extras)
    assert layout.encode_extras([], has_gradients=True) == b""
    for one in (in_home("a", (1,)), in_home("a", (0,))):
        with pytest.raises(DamagedError):
            layout.decode_extras(layout.encode_extras([one], has_gradients=True), low=0, high=MIB, has_gradients=True)


def test_an_extent_holds_only_what_has_its_place() -> None:
    assert not in_home("a", (4,)).can_hold(by_hand.entry("a", (4,)))
    assert in_home("a", (4,)).can_hold(in_home("a", (4,)))


@settings(max_examples=300)
@given(st.data())
def test_a_table_with_changed_bytes_is_read_or_damaged(data: st.DataObject) -> None:
    table = bytearray(layout.encode(placed(), has_gradients=True))
    for _ in range(data.draw(st.integers(1, 3))):
        table[data.draw(st.integers(0, len(table) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DamagedError):
        for entry in layout.decode(bytes(table), low=20 * KIB, high=MIB, home_nbytes=64 * KIB):
            low, high = (20 * KIB, MIB) if entry.place == "slot" else (0, 64 * KIB)
            assert not entry.nbytes or low <= entry.offset <= high - entry.nbytes


# -- manifest ----------------------------------------------------------------------------------------------------------


HEADER = ManifestHeader(20, 1, 9, 9, bytes(16), UUID, 6, 6, 320, 9, 356, 0, 356, 13, 4)
ENTRIES = tuple(placed())
ENTRY_OFFSETS = [one.offset for one in ENTRIES[:3]]


def rows(*values: tuple[int, int, int, int, int]) -> np.ndarray:
    return np.array(list(values), HOME_ROW_DTYPE)


def chain(*steps: int, last: int = 9) -> tuple[ChainEntry, ...]:
    return tuple(
        ChainEntry(step, 20 - 2 * (last - step), 7, 300, step % 5, step % 2, CHAIN_COMMITTED) for step in steps
    )


GOOD = GradientPart(
    rows((10, 4, ENTRY_OFFSETS[0], 0, 1), (0, 0, 0, 0, 0), (0, 0, 0, 0, 0)),
    np.array([11], np.uint32),
    chain(7, 8),
    np.array([1, 2, 3], np.uint32),
)
RECORDS = rows(
    (16, 7, ENTRY_OFFSETS[0], 0, 0),
    (14, 6, ENTRY_OFFSETS[1], 1, 1),
    (0, 0, 0, 0, 0),
    (20, 9, ENTRIES[3].offset, 2, 0),
    (20, 9, ENTRIES[4].offset, 3, 0),
    (20, 9, ENTRIES[5].offset, 4, 0),
)


def manifest_with(part: bytes) -> bytes:
    assert part_offset(HEADER) == 376
    return bytes(376) + part


def unpacked(part: GradientPart, n_homes: int = 3, n_slots: int = 5) -> GradientPart:
    return GradientPart.unpack(manifest_with(part.pack()), HEADER, superblock(n_slots), n_homes)


def check(part: GradientPart = GOOD, records: np.ndarray = RECORDS) -> np.ndarray:
    return checked_homes(records, ENTRIES, 9, unpacked(part), HEADER, MIB)


def same(one: GradientPart, two: GradientPart) -> bool:
    arrays = ((getattr(one, name), getattr(two, name)) for name in ("older", "older_crcs", "sentinels"))
    return one.chain == two.chain and all(np.array_equal(a, b) for a, b in arrays)


def test_a_part_comes_back() -> None:
    assert same(unpacked(GOOD), GOOD)
    assert np.array_equal(check(), RECORDS[:3])
    assert not len(unpacked(GOOD._replace(sentinels=np.zeros(0, np.uint32))).sentinels)
    assert len(GOOD.pack()) == 32 + 3 * 32 + 4 + 2 * 32 + 3 * 4


U32, COUNT = st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1)


@given(
    st.lists(st.tuples(COUNT, COUNT, COUNT, U32, U32), max_size=4),
    st.lists(U32, max_size=4),
    st.integers(0, 9),
    st.booleans(),
    st.data(),
)
def test_any_part_comes_back(older: Any, crcs: list[int], n_chain: int, has_sentinels: bool, data: Any) -> None:
    named = tuple(
        ChainEntry(
            step, 20 - (9 - step), data.draw(st.integers(0, 2**64 - 1)), data.draw(st.integers(1, 8 * KIB)), slot, 1
        )
        for slot, step in zip((0, 1, 2, 3, 5, 6, 7, 8, 9), range(9 - n_chain, 9), strict=False)
    )
    sentinels = data.draw(st.lists(U32, min_size=len(older), max_size=len(older))) if has_sentinels else []
    part = GradientPart(
        np.array(older, HOME_ROW_DTYPE), np.array(crcs, np.uint32), named, np.array(sentinels, np.uint32)
    )
    assert same(unpacked(part, len(older), 12), part)


CHAINS: list[tuple[Callable[[list[ChainEntry]], list[ChainEntry]], str]] = [
    (lambda c: [c[0]._replace(step=6), c[1]], "has a hole"),
    (lambda c: c[:1], "has a hole"),
    (lambda c: [c[1], c[0]], "has a hole"),
    (lambda c: [c[0]._replace(generation=18), c[1]], "has a hole"),
    (lambda c: [c[0], c[1]._replace(generation=20)], "has a hole"),
    (lambda c: [c[0], c[1]._replace(slot=c[0].slot)], "one slot twice"),
    (lambda c: [c[0], c[1]._replace(slot=4)], "one slot twice"),
    (lambda c: [c[0]._replace(slot=5), c[1]], "impossible gradient record"),
    (lambda c: [c[0]._replace(manifest_index=2), c[1]], "impossible gradient record"),
    (lambda c: [c[0]._replace(flags=2), c[1]], "impossible gradient record"),
    (lambda c: [c[0]._replace(manifest_nbytes=8 * KIB + 1), c[1]], "larger than the space"),
    (lambda c: [c[0]._replace(manifest_nbytes=0), c[1]], "larger than the space"),
    (lambda c: [*c, *c, *c], "longer than the log"),
]


@pytest.mark.parametrize(("change", "words"), CHAINS, ids=range(len(CHAINS)))
def test_an_impossible_chain_is_damaged(change: Any, words: str) -> None:
    with pytest.raises(DamagedError, match=words):
        unpacked(GOOD._replace(chain=tuple(change(list(GOOD.chain)))))


def test_a_list_of_bases_of_another_layout_is_damaged() -> None:
    for n_homes in (2, 4):
        with pytest.raises(DamagedError, match="does not belong"):
            unpacked(GOOD, n_homes)
    with pytest.raises(DamagedError, match="does not belong"):
        unpacked(GOOD._replace(sentinels=np.zeros(2, np.uint32)))


def changed(array: np.ndarray, number: int, **fields: int) -> np.ndarray:
    new = array.copy()
    for name, value in fields.items():
        new[name][number] = value
    return new


def old(number: int = 0, **fields: int) -> tuple[GradientPart, np.ndarray]:
    return GOOD._replace(older=changed(GOOD.older, number, **fields)), RECORDS


def base(number: int = 0, **fields: int) -> tuple[GradientPart, np.ndarray]:
    return GOOD, changed(RECORDS, number, **fields)


BASES = [
    (base(offset=4096), "wrong offset"),
    (base(crc=9), "wrong offset"),
    (base(crc=2**32 - 1), "wrong offset"),
    (base(step=10), "newer than the checkpoint"),
    (base(step=2**64 - 1), "newer than the checkpoint"),
    (base(generation=21), "newer than the checkpoint"),
    (base(home=3), "in no home"),
    (base(number=1, step=5), "does not reach back"),
    (base(home=IN_RECORD, generation=17, step=6), "names an older base"),
    (base(number=1, home=IN_RECORD, generation=17, step=6), "lies whole"),
    (base(number=1, home=IN_RECORD, generation=16, step=7), "lies whole"),
    (base(number=1, home=IN_RECORD, generation=20, step=2**64 - 1), "lies whole"),
    (base(home=1), "same home"),
    (old(offset=4096), "wrong offset"),
    (old(crc=1), "wrong offset"),
    (old(step=10), "newer than the checkpoint"),
    (old(generation=16), "newer than the base"),
    (old(home=0), "same home"),
    (old(home=2), "same home"),
    (old(number=2, generation=3, offset=ENTRY_OFFSETS[2]), "newer than the base"),
    ((GOOD._replace(chain=GOOD.chain[1:]), RECORDS), "does not reach back"),
    ((GOOD._replace(chain=()), RECORDS), "does not reach back"),
]


@pytest.mark.parametrize(("broken", "words"), BASES, ids=range(len(BASES)))
def test_an_impossible_list_of_bases_is_damaged(broken: tuple[GradientPart, np.ndarray], words: str) -> None:
    with pytest.raises(DamagedError, match=words):
        check(*broken)


def test_a_tensor_may_lie_whole_in_a_record_that_the_chain_names() -> None:
    for generation, step in ((16, 6), (18, 7), (20, 8)):
        part, records = base(number=1, home=IN_RECORD, generation=generation, step=step, offset=77, crc=2**32 - 1)
        assert check(part, records)["home"].tolist() == [0, IN_RECORD, 0]


def test_a_full_checkpoint_needs_no_chain() -> None:
    records = changed(changed(RECORDS, 0, step=9, generation=20), 1, step=9, generation=20)
    assert len(check(GOOD._replace(chain=()), records)) == 3


@settings(max_examples=400)
@given(st.data())
def test_a_part_with_changed_bytes_is_read_in_bounds_or_damaged(data: Any) -> None:
    packed = bytearray(GOOD.pack())
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    cut = packed[: data.draw(st.none() | st.integers(0, len(packed)))]
    with contextlib.suppress(DamagedError):
        part = GradientPart.unpack(manifest_with(bytes(cut)), HEADER, superblock(), 3)
        steps = [one.step for one in part.chain]
        assert steps == list(range(9 - len(steps), 9))
        found = checked_homes(RECORDS, ENTRIES, 9, part, HEADER, MIB)
        assert not (part.older["generation"] >= found["generation"])[part.older["generation"] > 0].any()
        assert ((part.older["crc"] < len(part.older_crcs)) | (part.older["generation"] == 0)).all()


# -- what cannot be read so --------------------------------------------------------------------------------------------


def test_a_pool_is_refused_by_name_by_what_makes_no_updates_again(pool: Path) -> None:
    model = toys.net()
    with lightck.attach(model, pool, optimizer=(optimizer := toys.adam(model)), strategy=Gradients(base_every=3)):
        toys.train(model, optimizer, 3)
    before, words = pool.read_bytes(), "holds gradient records"
    with pytest.raises(FormatError, match=words):
        lightck.recover(pool, lazy=True)
    with pytest.raises(FormatError, match=words):
        lightck.attach(model, pool, optimizer=optimizer, resume=True)
    assert pool.read_bytes() == before
