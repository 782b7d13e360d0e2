"""The format: docs/format.md, the library and a second reader agree; its rules hold; damage is noticed."""

from __future__ import annotations

import collections
import contextlib
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import format_reference as reference
import msgpack
import numpy as np
import pytest
import torch
import toys
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import lightck
from lightck._native import lib
from lightck.errors import FormatError, NotAPoolError
from lightck.pool.commit_log import CommitLog, candidates, is_dead, next_position, read_commit_log
from lightck.pool.format import layout
from lightck.pool.format.layout import ITEM_NBYTES, Entry
from lightck.pool.format.structures import (
    KIB,
    KIND_ADOPTION,
    KIND_CHECKPOINT,
    MIB,
    NEXT_ENTRIES_MAX,
    NEXT_NBYTES,
    RING_LINES,
    SLOTS_MAX,
    CommitRecord,
    DamagedError,
    ManifestHeader,
    NextBatch,
    Superblock,
    align_up,
    crc64,
    layout_hash,
    next_batch_key,
    pack_next_batch,
    pack_slot_header,
    unpack_next_batch,
    unpack_slot_header,
    uuid_words,
)
from lightck.pool.reader import PoolReader, StoredCheckpoint, open_pool
from lightck.pool.slots import Slot, Slots
from lightck.state import values

# -- a pool with everything in it ------------------------------------------------------------------------------------


class Everything:
    """State of every kind that can be stored; one large tensor that changes its size."""

    def __init__(self) -> None:
        self.rows = 2000
        self.value: dict[str, Any] = {
            "none": None,
            "bools": [True, False],
            "ints": [0, -1, 127, -33, 2**31, -(2**63)],
            "long ints": [2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**90)],
            "floats": [0.0, -0.0, 1.5, float("inf"), float("nan")],
            "text": "é" * 200,
            "bytes": b"\0\xff" * 200,
            "tuple": (1, (2, ("three",))),
            "ordered": collections.OrderedDict(b=1, a=2),
            "empty": [{}, (), [], ""],
            "counter": collections.Counter("hello"),
            "default": collections.defaultdict(None, {1: 2}),
            "set": {3, 1, 2},
            "frozen": frozenset({"x"}),
            "deque": collections.deque([1, 2], 5),
            "array": np.arange(6, dtype=np.int16).reshape(2, 3),
            "scalar": np.float32(0.1),
            "tensor": torch.arange(4, dtype=torch.bfloat16),
            7: "an int as key",
            (1, 2): "a tuple as key",
        }

    def state_dict(self) -> dict[str, Any]:
        return {**self.value, "large": torch.full((self.rows,), 2.5)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.rows = state, len(state["large"])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.big = nn.Linear(640, 520, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
        self.tied = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
        self.tied.weight = self.out.weight
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.big(x)[:, :4] + self.conv(x[:1, :18].reshape(1, 2, 3, 3)).sum())
        return (self.tied(self.out(y.to(torch.bfloat16))).float() * self.frozen.sum()).square().sum()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five checkpoints in three slots, of which the last two follow an adoption; extras; a tensor left out."""
    path = tmp_path_factory.mktemp("format") / "run.pool"
    for attachment, steps in enumerate((4, 2)):
        model, state = Model(), Everything()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4, momentum=0.5)
        options: dict[str, Any] = {"slots": 3} if attachment == 0 else {"resume": True}
        with lightck.attach(model, path, optimizer=optimizer, state={"all": state}, **options) as session:
            for number in range(steps):
                optimizer.zero_grad()
                model(torch.arange(2.0 * 640).reshape(2, 640) / 640).backward()
                optimizer.step()
                state.rows = 2000 + 100 * number
            session.flush()
    return path


@pytest.fixture(scope="module")
def read_by_reference(made: Path) -> reference.Pool:
    return reference.Pool(made.read_bytes())


@pytest.fixture(scope="module")
def library(made: Path) -> Iterator[PoolReader]:
    reader = open_pool(str(made))
    yield reader
    reader.close()


def test_both_readers_see_the_same_superblock(library: PoolReader, read_by_reference: reference.Pool) -> None:
    ours, theirs = library.superblock, read_by_reference.superblock
    for name in Superblock.__slots__:
        if name in ("table_offsets", "slots", "homes"):
            continue
        assert getattr(ours, name) == theirs[name], name
    assert ours.table_offsets == (theirs["table_a"], theirs["table_b"])
    assert list(ours.slots) == read_by_reference.slots


def test_both_superblocks_and_both_layout_tables_are_the_same(made: Path, library: PoolReader) -> None:
    data, sb = toys.content(made), library.superblock
    assert data[: 4 * KIB] == data[4 * KIB : 8 * KIB]
    (a, b), n = sb.table_offsets, sb.table_nbytes
    assert data[a : a + n] == data[b : b + n]


def test_both_readers_see_the_same_layout(library: PoolReader, read_by_reference: reference.Pool) -> None:
    assert [e.to_map() for e in library.entries] == read_by_reference.entries
    for entry in read_by_reference.entries:
        assert entry["offset"] % (4 * KIB if entry["nbytes"] >= MIB else 256) == 0
        assert entry["global_shape"] == entry["shape"]
        assert entry["offsets"] == [0] * len(entry["shape"])
        assert entry["placements"] is entry["mesh"] is None


def test_both_readers_see_the_same_lines(library: PoolReader, read_by_reference: reference.Pool) -> None:
    lines = library.commit_log().records
    assert not read_by_reference.damaged
    assert lines.keys() == read_by_reference.records.keys()
    for position, line in lines.items():
        for name in CommitRecord.__slots__:
            assert getattr(line, name) == read_by_reference.records[position][name], (position, name)
    assert {line.kind for line in lines.values()} == {KIND_CHECKPOINT, KIND_ADOPTION}


def test_both_readers_see_the_same_slot_headers(library: PoolReader, read_by_reference: reference.Pool) -> None:
    for slot in range(3):
        assert library.slot_generation(slot) == read_by_reference.slot_generation(slot) is not None


def test_both_readers_see_what_followed(library: PoolReader, read_by_reference: reference.Pool) -> None:
    seen = 0
    lines = candidates(library.commit_log())
    for line in (ln for ln in lines if library.slot_generation(ln.slot) == ln.payload_generation):
        ours, theirs = library.next_batches(line), read_by_reference.next_batches(line.slot)
        assert ours is None if theirs is None else [tuple(entry) for entry in ours or ()] == theirs
        seen += bool(theirs)
    assert seen, "of the checkpoints that others came after, something is recorded"


def test_both_readers_see_the_same_checkpoints(library: PoolReader, read_by_reference: reference.Pool) -> None:
    ours = [v for v in library.checkpoints() if isinstance(v, StoredCheckpoint)]
    theirs = {v.record["generation"]: v for v in read_by_reference.checkpoints()}
    assert len(ours) == 3
    assert any(v.extras for v in ours), "the pool was to hold extras"
    for checkpoint in ours:
        other = theirs[checkpoint.record.generation]
        header = checkpoint.header
        assert [tuple(r) for r in checkpoint.records.tolist()] == [tuple(r.values()) for r in other.records]
        assert checkpoint.crcs.tolist() == other.crcs
        assert [e.to_map() for e in checkpoint.extras] == other.extras
        assert (header.iteration, header.incarnation, header.origin) == tuple(
            other.manifest[n] for n in ("iteration", "incarnation", "origin")
        )
        assert {n for n, e in checkpoint.entries.items() if e.alias is None} == other.tensors.keys()
        assert {n: e.alias for n, e in checkpoint.entries.items() if e.alias is not None} == other.aliases


def test_both_readers_see_the_same_bytes(library: PoolReader, read_by_reference: reference.Pool) -> None:
    by_generation = {v.record["generation"]: v for v in read_by_reference.checkpoints()}
    for checkpoint in [v for v in library.checkpoints() if isinstance(v, StoredCheckpoint)]:
        other = by_generation[checkpoint.record.generation]
        for name, entry in checkpoint.entries.items():
            if entry.alias is None:
                got = np.empty(entry.nbytes, np.uint8)
                checkpoint.read_into(name, got.ctypes.data)
                assert got.tobytes() == other.tensors[name], name


def test_the_second_reader_recovers_what_the_library_does(made: Path, read_by_reference: reference.Pool) -> None:
    newest = read_by_reference.checkpoints()[0]
    checkpoint = lightck.recover(made)
    assert checkpoint.step == newest.record["step"] == 6
    for name, tensor in checkpoint.model.items():
        full = newest.aliases.get(f"model/{name}", f"model/{name}")
        entry = next(e for e in read_by_reference.entries if e["name"] == full)
        raw = torch.frombuffer(bytearray(newest.tensors[full] or b"\0" * 16), dtype=tensor.dtype)
        assert torch.equal(raw.as_strided(entry["shape"], entry["stride"]), tensor.detach()), name


def test_the_small_state_decodes_as_drawn(library: PoolReader, read_by_reference: reference.Pool) -> None:
    theirs = read_by_reference.checkpoints()[0].state
    ours = values.unpack(next(v for v in library.checkpoints() if isinstance(v, StoredCheckpoint)).state)
    assert as_reference(ours) == theirs
    packed = theirs["state"]["all"]
    state = reference.MessagePack.decode(packed)
    expected = Everything().value
    assert repr(as_reference(expected)) == repr({k: v for k, v in state.items() if k != "large"})
    assert state["large"] == reference.Raw("large", name="state/all/large")
    for key, value in expected.items():
        assert type(state[key]) is type(value) or isinstance(state[key], reference.Raw)


def as_reference(value: Any) -> Any:
    """A decoded value of the library in the terms of the second reader."""
    if isinstance(value, torch.Tensor):
        raw = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return reference.Raw("tensor", str(value.dtype)[6:], tuple(value.shape), raw)
    if isinstance(value, np.ndarray):
        return reference.Raw("array", value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, np.generic):
        return reference.Raw("scalar", value.dtype.str, None, value.tobytes())
    if type(value) in (dict, collections.OrderedDict):
        return type(value)((k, as_reference(v)) for k, v in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(as_reference, value))
    return value


@given(st.binary(max_size=300), st.binary(min_size=16, max_size=16), *[st.integers(0, 2**64 - 1)] * 3)
def test_checksums_agree(data: bytes, uuid: bytes, tensor: int, generation: int, index: int) -> None:
    assert crc64(data) == reference.crc64(data)
    assert lib.lck_block_seed(*uuid_words(uuid), tensor, generation, index) == reference.seed(
        uuid, tensor, generation, index
    )


def test_check_values() -> None:
    assert reference.crc32c(b"123456789") == 0xE3069283
    assert reference.crc64(b"123456789") == crc64(b"123456789") == 0x995DC9BBDF1939FA


# -- structures ------------------------------------------------------------------------------------------------------

UUID = bytes(range(16))
U64, COUNT = st.integers(0, 2**64 - 1), st.integers(0, 2**63 - 1)
LINES = st.builds(
    CommitRecord,
    st.integers(1, 2**63 - 1),
    COUNT,
    COUNT,
    COUNT,
    U64,
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 2]),
    st.integers(0, 255),
    st.integers(0, 1),
)


def superblock(n_slots: int = 2, **changes: Any) -> Superblock:
    fields: dict[str, Any] = {
        "uuid": UUID,
        "nbytes": (1 + n_slots) * 2 * MIB,
        "table_offsets": (16 * KIB, 20 * KIB),
        "table_nbytes": 100,
        "table_hash": bytes(16),
        "block": MIB,
        "manifest_offset": 4 * KIB,
        "manifest_nbytes": 8 * KIB,
        "payload_offset": 20 * KIB,
        "reserve_offset": 1 * MIB,
        "slots": tuple(((1 + i) * 2 * MIB, 2 * MIB) for i in range(n_slots)),
    }
    return Superblock(**{**fields, **changes})


def test_a_superblock_comes_back(library: PoolReader) -> None:
    for sb in (superblock(), superblock(SLOTS_MAX, compat=5, ro_compat=6), library.superblock):
        assert len(sb.pack()) == 4 * KIB
        assert Superblock.unpack(sb.pack()) == sb


@given(LINES)
def test_a_line_comes_back(line: CommitRecord) -> None:
    data = line.pack(UUID)
    assert CommitRecord.unpack(data, UUID) == line
    with pytest.raises(DamagedError):
        CommitRecord.unpack(data, bytes(16))  # another pool's


@given(
    st.builds(
        ManifestHeader,
        *[COUNT] * 4,
        *[st.binary(min_size=16, max_size=16)] * 2,
        st.integers(3, 5),
        st.integers(0, 3),
        st.just(320),
        st.integers(0, 9),
        *[st.integers(0, 30)] * 4,
        st.integers(0, 7),
    )
)
def test_a_manifest_header_comes_back(header: ManifestHeader) -> None:
    assert ManifestHeader.unpack(header.pack().ljust(400, b"\0")) == header


@pytest.mark.parametrize("field", ["generation", "incarnation", "step", "payload_generation"])
def test_a_line_counts_below_2_to_the_63(field: str) -> None:
    good = CommitRecord(*[2**63 - 1] * 4, 2**64 - 1, 128, 1, 0, 0)
    assert CommitRecord.unpack(good.pack(UUID), UUID) == good
    with pytest.raises(DamagedError, match="numbers"):
        CommitRecord.unpack(good._replace(**{field: 2**63}).pack(UUID), UUID)


def test_a_slot_header_and_a_superblock_count_below_2_to_the_63() -> None:
    assert unpack_slot_header(pack_slot_header(2**63, 0, UUID), 0, UUID) is None
    with pytest.raises(DamagedError):
        Superblock.unpack(superblock(nbytes=2**63).pack())


@given(st.binary(max_size=400))
def test_a_hostile_manifest_is_damaged_or_in_bounds(noise: bytes) -> None:
    data = b"LCKMANI1" + noise
    try:
        header = ManifestHeader.unpack(data)
    except DamagedError:
        return
    assert header.state_offset + header.state_nbytes <= len(data)
    assert header.crcs_offset + 4 * header.crcs_count <= len(data)


NEXT_BATCHES = st.lists(
    st.builds(NextBatch, st.binary(min_size=8, max_size=8), *[st.integers(0, 2**32 - 1)] * 2), max_size=NEXT_ENTRIES_MAX
)


@given(COUNT, NEXT_BATCHES, st.binary(max_size=300))
def test_what_followed_comes_back(generation: int, entries: list[NextBatch], behind: bytes) -> None:
    data = pack_next_batch(generation, entries, UUID)
    assert len(data) <= NEXT_NBYTES
    assert unpack_next_batch(data + behind, generation, UUID) == tuple(entries)
    assert unpack_next_batch(data + behind, generation + 1, UUID) is None
    assert unpack_next_batch(data + behind, generation, bytes(16)) is None


@given(COUNT, NEXT_BATCHES, st.data())
def test_what_followed_cut_off_or_with_a_flipped_bit_is_absent(
    generation: int, entries: list[NextBatch], draw: st.DataObject
) -> None:
    data = pack_next_batch(generation, entries, UUID)
    assert unpack_next_batch(data[: draw.draw(st.integers(0, len(data) - 1))], generation, UUID) is None
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    assert unpack_next_batch(bytes(flipped).ljust(NEXT_NBYTES, b"\0"), generation, UUID) is None


@given(st.binary(max_size=NEXT_NBYTES), COUNT)
def test_a_hostile_record_is_absent(noise: bytes, generation: int) -> None:
    assert unpack_next_batch(noise, generation, UUID) is None
    assert unpack_next_batch(pack_next_batch(generation, [], UUID)[:8] + noise, generation, UUID) is None


def test_more_that_followed_than_there_is_room_for() -> None:
    entries = [NextBatch(next_batch_key(str(i)), 1, i) for i in range(NEXT_ENTRIES_MAX + 5)]
    data = pack_next_batch(7, entries, UUID)
    assert len(data) <= NEXT_NBYTES
    assert unpack_next_batch(data, 7, UUID) == tuple(entries[:NEXT_ENTRIES_MAX])
    assert next_batch_key("") != next_batch_key("a") != next_batch_key("b")


@given(COUNT, st.integers(0, 7))
def test_a_slot_header_comes_back(generation: int, slot: int) -> None:
    data = pack_slot_header(generation, slot, UUID)
    assert unpack_slot_header(data, slot, UUID) == generation
    assert unpack_slot_header(data, slot + 1, UUID) is None
    assert unpack_slot_header(data, slot, bytes(16)) is None


def flips(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Every single-bit flip: bit number and result."""
    changed = bytearray(data)
    for bit in range(8 * len(data)):
        changed[bit // 8] ^= 1 << bit % 8
        yield bit, bytes(changed)
        changed[bit // 8] ^= 1 << bit % 8


def test_every_flipped_bit_of_a_superblock_is_noticed() -> None:
    for bit, data in flips(superblock().pack()):
        with pytest.raises((DamagedError, NotAPoolError)):
            Superblock.unpack(data)
        assert bit >= 0


def test_every_flipped_bit_of_a_line_is_noticed() -> None:
    line = CommitRecord(6, 2, 3, 6, 5, 6, KIND_CHECKPOINT, 1, 0).pack(UUID)
    for _, data in flips(line):
        with pytest.raises(DamagedError):
            CommitRecord.unpack(data, UUID)


def test_every_flipped_bit_of_a_slot_header_is_noticed() -> None:
    for _, data in flips(pack_slot_header(9, 1, UUID)):
        assert unpack_slot_header(data, 1, UUID) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": ((2 * MIB, 2 * MIB),)},
        {"slots": ((2 * MIB, 2 * MIB), (3 * MIB, 2 * MIB))},
        {"slots": ((2 * MIB, 2 * MIB), (4 * MIB, 4 * MIB))},
        {"slots": ((2 * MIB, 2 * MIB), (2**63, 2 * MIB))},
        {"nbytes": 4 * MIB},
        {"table_nbytes": 2**40},
        {"table_offsets": (16 * KIB, 2 * MIB)},
        {"block": 0},
        {"block": 100},
        {"block": 2 * MIB},
        {"manifest_nbytes": 1 * MIB},
        {"payload_offset": 3 * MIB},
        {"reserve_offset": 3 * MIB},
        {"ring_stride": 32},
        {"ring_lines": 2},
        {"ring_lines": 2**31},
        {"ring_offset": 2**62},
        {"incompat": 2},
    ],
    ids=str,
)
def test_an_impossible_geometry_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(DamagedError):
        Superblock.unpack(superblock(**changes).pack())


@pytest.mark.parametrize(
    ("at", "form", "value"),
    [(8, "<I", 0x04030201), (12, "<H", 2), (32, "<Q", 8)],
    ids=["byte order", "major", "incompat"],
)
def test_a_format_of_another_kind_is_refused(at: int, form: str, value: int) -> None:
    body = bytearray(superblock().pack()[:-8])
    struct.pack_into(form, body, at, value)
    with pytest.raises(FormatError):
        Superblock.unpack(bytes(body) + struct.pack("<Q", crc64(body)))


# -- layout ----------------------------------------------------------------------------------------------------------


@st.composite
def entries(draw: st.DrawFn) -> list[Entry]:
    found = []
    for i in range(draw(st.integers(0, 6))):
        dtype = draw(st.sampled_from(sorted(ITEM_NBYTES)))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
        order = draw(st.permutations(range(len(shape))))
        stride, step = [0] * len(shape), 1
        for dim in order:
            stride[dim] = step
            step *= max(shape[dim], 1)
        nbytes = int(np.prod(shape, dtype=np.int64)) * ITEM_NBYTES[dtype]
        found.append(Entry(f"name {i}", draw(st.sampled_from(layout.ROLES)), dtype, shape, tuple(stride), nbytes))
    return found


@given(entries())
def test_a_layout_comes_back_and_does_not_overlap(plain: list[Entry]) -> None:
    placed, end = layout.assign_offsets(plain, 20 * KIB)
    assert layout.decode(layout.encode(placed), low=20 * KIB, high=end) == tuple(placed)
    ends = [e.offset + e.nbytes for e in placed if e.nbytes]
    if ends:
        with pytest.raises(DamagedError):
            layout.decode(layout.encode(placed), low=20 * KIB, high=max(ends) - 1)


@st.composite
def named_entries(draw: st.DrawFn) -> list[Entry]:
    """With everything that an entry can say: names of any kind, layers, devices, ties."""
    text = st.text("aZ/._1 \n\x7fé€漢\U0001f600", min_size=1, max_size=40)
    found = []
    for entry in draw(entries()):
        alias, layer = draw(st.none() | text), draw(st.integers(-1, 300) | st.just(2**40))
        found.append(
            entry._replace(
                name=draw(text),
                device=draw(text),
                layer=layer,
                alias=alias,
                nbytes=0 if alias is not None else entry.nbytes,
            )
        )
    return found


@given(named_entries())
def test_a_table_is_read_as_it_was_written(plain: list[Entry]) -> None:
    placed, end = layout.assign_offsets(plain, 20 * KIB)
    assert layout.decode_extras(layout.encode_extras(placed), low=20 * KIB, high=end) == tuple(placed)


def test_large_numbers_and_long_names_are_read() -> None:
    many = [
        Entry(
            f"{'n' * (i * 7)}{i}", "param", "int64", (1, 300, 70_000), (21 * 10**6, 70_000, 1), 8 * 21 * 10**6, layer=i
        )
        for i in range(585)
    ]
    placed, end = layout.assign_offsets(many, 0)
    assert end > 2**36
    assert layout.decode(layout.encode(placed), low=0, high=end) == tuple(placed)


@settings(max_examples=500)
@given(st.data())
def test_a_table_with_changed_bytes_is_read_or_damaged(data: st.DataObject) -> None:
    placed, end = layout.assign_offsets(data.draw(named_entries()), 256)
    table = bytearray(layout.encode(placed))
    for _ in range(data.draw(st.integers(1, 3))):
        table[data.draw(st.integers(0, len(table) - 1))] = data.draw(st.integers(0, 255))
    high = data.draw(st.sampled_from([end, end - 256, MIB]))
    with contextlib.suppress(DamagedError):
        read = layout.decode(bytes(table[: data.draw(st.none() | st.integers(0, len(table)))]), low=256, high=high)
        assert all(256 <= entry.offset <= high - entry.nbytes for entry in read if entry.nbytes)


@settings(max_examples=500)
@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "shape": st.lists(
                    st.integers(0, 5) | st.sampled_from([2**20, 2**31, 2**55, 2**61, 2**62, -1]), max_size=5
                ),
                "stride": st.lists(st.integers(0, 5) | st.sampled_from([2**20, 2**61]), max_size=5),
                "nbytes": st.sampled_from([0, 24, 25, 2**62]),
                "offset": st.sampled_from([0, 255, 300, 512, 2**62, -256]),
                "layer": st.sampled_from([-1, -2, 0, 2**63]),
                "alias": st.sampled_from(["", "a", "b\0", None, 3]),
                "name": st.sampled_from(["", "b", "a\0", 5, "a" * 4096, "a" * 4097, "\ud800"]),
                "role": st.sampled_from(["param", "", "other", "param\0"]),
                "dtype": st.sampled_from(["bool", "", "bool\0param"]),
                "device": st.sampled_from(["cuda", "", None]),
                "placements": st.sampled_from([[], "x"]),
                "more": st.just(1),
            },
        ),
        max_size=3,
    )
)
@example([{"nbytes": 0, "shape": [0, 0]}])
def test_an_impossible_entry_is_read_or_damaged(changed: list[dict[str, Any]]) -> None:
    table = msgpack.packb({"entries": [entry_map(**one) for one in changed]}, unicode_errors="surrogatepass")
    with contextlib.suppress(DamagedError):
        for entry in layout.decode(table, low=256, high=MIB):
            itemsize = {"float32": 4, "bool": 1}[entry.dtype]
            nbytes = 0 if entry.alias is not None else itemsize * math.prod(entry.shape)
            assert entry.nbytes == nbytes, "what is taken goes together"


@settings(max_examples=300)
@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "shape": st.sampled_from([[2, 3], [3, 2], [2, 3, 1], [], (2, 3), [2, 3.0], "ab"]),
                "stride": st.sampled_from([[3, 1], [1, 2], [True, 1], None]),
                "nbytes": st.sampled_from([0, 24, 24.0, 2**62, True]),
                "offset": st.sampled_from([256, -256, 2**62, "x"]),
                "layer": st.sampled_from([-1, -2, 2**62, None]),
                "alias": st.sampled_from(["a", "b\0", None, 3, "a" * 2000]),
                "name": st.sampled_from(["b", "gradient/a", 5, "a\0", "a" * 4096, "a" * 4097]),
                "role": st.sampled_from(["buffer", "gradient", "other", [1]]),
                "dtype": st.sampled_from(["int32", "other", [1]]),
                "device": st.sampled_from(["cuda", None, "a\0"]),
                "place": st.sampled_from(["slot", "home", 1]),
                "placements": st.just([]),
            },
        )
        | st.sampled_from([None, [], "entry"]),
        max_size=4,
    ),
    st.booleans(),
)
def test_entries_are_parsed_together_as_each_by_itself(changed: list[Any], has_place: bool) -> None:
    keys = layout._PLAIN_KEYS | ({"place"} if has_place else set())
    place = {"place": "slot"} if has_place else {}
    items = [{**entry_map(**place), **one} if isinstance(one, dict) else one for one in changed]

    def parsed(items: list[Any]) -> list[Entry] | str:
        try:
            return layout._entries(items, keys)
        except DamagedError as err:
            return str(err)

    alone = [parsed([item]) for item in items]
    wrong = next((one for one in alone if isinstance(one, str)), None)
    assert parsed(items) == (wrong or [entry for one in alone for entry in one])


def test_a_table_that_ends_after_any_byte_is_damaged() -> None:
    table = layout.encode(
        [Entry(f"p{i}", "param", "float32", (2, 3), (3, 1), 24, offset=256 + 256 * i) for i in range(70)]
    )
    assert len(layout.decode(table, low=256, high=MIB)) == 70
    for end in range(len(table)):
        with pytest.raises(DamagedError):
            layout.decode(table[:end], low=256, high=MIB)


def entry_map(**changes: Any) -> dict[str, Any]:
    return {**Entry("a", "param", "float32", (2, 3), (3, 1), 24, offset=256).to_map(), **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"name": 5},
        {"name": "a" * 5000},
        {"name": "a\0"},
        {"role": "other"},
        {"dtype": "float31"},
        {"shape": [2, -3]},
        {"shape": [2**40, 2**40], "stride": [2**40, 1]},
        {"shape": [2, 3, 1]},
        {"stride": [6, 1]},
        {"stride": [1, 1]},
        {"nbytes": 25},
        {"nbytes": True},
        {"offset": 250},
        {"offset": 0},
        {"offset": 2**61},
        {"layer": -2},
        {"alias": "b"},
        {"device": None},
        {"more": 1},
    ],
    ids=str,
)
def test_an_impossible_entry_is_damaged(changes: dict[str, Any]) -> None:
    layout.decode(msgpack.packb({"entries": [entry_map()]}), low=256, high=MIB)
    with pytest.raises(DamagedError):
        layout.decode(msgpack.packb({"entries": [entry_map(**changes)]}), low=256, high=MIB)


@pytest.mark.parametrize(
    "table",
    [
        b"",
        b"\x80",
        b"\x81\xa7entries\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa7entries\xc6\xff\xff\xff\xff",
        b"\x91" * 5000,
        b"\xc1",
        msgpack.packb({"entries": [entry_map(), entry_map()]}),
    ],
    ids=range(8),
)
def test_an_impossible_table_is_damaged(table: bytes) -> None:
    with pytest.raises(DamagedError):
        layout.decode(table, low=256, high=MIB)


LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=5)
TREES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
)


@settings(max_examples=300)
@given(st.binary(max_size=200) | TREES.map(lambda tree: msgpack.packb({"entries": tree})))
def test_a_hostile_table_is_damaged_or_empty(data: bytes) -> None:
    for decode in (layout.decode, layout.decode_extras):
        try:
            found = decode(data, low=0, high=MIB)
        except DamagedError:
            continue
        assert found == ()


@settings(max_examples=200)
@given(st.data())
def test_a_table_with_any_changed_byte_is_damaged_or_in_bounds(data: st.DataObject) -> None:
    placed, end = layout.assign_offsets(data.draw(entries()), 256)
    table = bytearray(layout.encode(placed))
    table[data.draw(st.integers(0, len(table) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = layout.decode(bytes(table), low=256, high=end)
    except DamagedError:
        return
    assert all(e.offset >= 256 and e.offset + e.nbytes <= end for e in found if e.nbytes)


# -- ring ------------------------------------------------------------------------------------------------------------


class Writer:
    """A pool's ring and slots as a writer moves them, with nothing else of a pool."""

    def __init__(self, slots: int) -> None:
        self.commit_log = CommitLog({}, ())
        self.slots = Slots([Slot(i, 0, None, None) for i in range(slots)])  # type: ignore[arg-type]
        self.generation = self.last = 0
        self.incarnation = 1
        self.last = -1

    def put(self, line: CommitRecord) -> CommitRecord:
        self.last = next_position(self.commit_log, self.slots.contents(), RING_LINES, self.last)
        self.commit_log = CommitLog({**self.commit_log.records, self.last: line}, ())
        return line

    def commit(self, step: int) -> CommitRecord:
        slot = self.slots.choose()
        assert slot is not None
        self.generation += 1
        slot.generation = self.generation
        line = CommitRecord(
            self.generation, self.incarnation, step, self.generation, 0, 0, KIND_CHECKPOINT, slot.index, 0
        )
        self.put(line)
        self.slots.protected = slot.index
        return line

    def restart(self, adopted: CommitRecord) -> CommitRecord:
        """A new process continues from this line: what it knows is what lies in the ring and in the headers."""
        contents = self.slots.contents()
        generation = max(self.commit_log.generation, *(g or 0 for g in contents.values())) + 1
        incarnation = self.commit_log.incarnation + 1
        commit_log, last = (
            self.commit_log,
            max(self.commit_log.records, key=lambda p: self.commit_log.records[p].generation),
        )
        self.__init__(len(contents))  # type: ignore[misc]
        self.commit_log, self.last, self.generation, self.incarnation = commit_log, last, generation, incarnation
        for slot in self.slots.slots:
            slot.generation = contents[slot.index]
        line = CommitRecord(
            generation, incarnation, adopted.step, adopted.payload_generation, 0, 0, KIND_ADOPTION, adopted.slot, 0
        )
        self.put(line)
        self.slots.protected = adopted.slot
        self.slots.dead = (adopted.payload_generation, generation)
        return line

    def whole(self) -> list[CommitRecord]:
        """Live lines whose bytes still lie in their slot, newest first."""
        contents = self.slots.contents()
        return [ln for ln in candidates(self.commit_log) if contents[ln.slot] == ln.payload_generation]


@pytest.mark.parametrize("restarts", [1, 15, 40])
@pytest.mark.parametrize("slots", [2, 3, 8])
def test_failed_restarts_do_not_evict_the_fall_back(slots: int, restarts: int) -> None:
    writer = Writer(slots)
    for step in range(1, 3 * slots):
        writer.commit(step)
    before = [(ln.step, ln.slot) for ln in writer.whole()]
    assert len(before) == slots
    for _ in range(restarts):
        writer.restart(writer.whole()[0])
    assert [(ln.step, ln.slot) for ln in writer.whole()] == before


@settings(max_examples=200)
@given(st.sampled_from([2, 3, 8]), st.lists(st.integers(0, 9), max_size=60))
def test_what_is_newest_and_its_fall_back_stay_whatever_happens(slots: int, events: list[int]) -> None:
    """0..5: a checkpoint; 6, 7: a restart from the newest; 8, 9: from the oldest that is there."""
    writer = Writer(slots)
    writer.commit(1)
    for number, event in enumerate(events, 2):
        if event < 6:
            line = writer.commit(number)
            assert writer.whole()[0] == line
            assert number == 2 or len(writer.whole()) >= 2 or event >= 6
        else:
            chosen = writer.whole()[0 if event < 8 else -1]
            line = writer.restart(chosen)
            assert writer.whole()[0] == line
            assert not [ln for ln in writer.whole() if chosen.payload_generation < ln.generation < line.generation]
        held = {ln.slot: ln for ln in writer.commit_log.records.values()}
        for slot in writer.slots.slots:
            if slot.generation is not None:
                assert any(
                    ln.payload_generation == slot.generation and ln.slot == slot.index
                    for ln in writer.commit_log.records.values()
                ), "a slot's content lost its line"
        assert len(held) <= slots


def test_lines_of_a_left_timeline_are_dead_but_can_be_asked_for() -> None:
    writer = Writer(3)
    lines = [writer.commit(step) for step in (1, 2, 3)]
    adoption = writer.restart(lines[1])
    assert candidates(writer.commit_log) == [adoption, lines[0]]
    assert is_dead(lines[2], writer.commit_log)
    assert candidates(writer.commit_log, step=3) == [lines[2]]
    assert writer.slots.choose().index == lines[2].slot  # type: ignore[union-attr]
    after = writer.commit(3)
    assert candidates(writer.commit_log) == [after, adoption, lines[0]]
    assert after.slot == lines[2].slot


def test_checkpoints_are_ordered_by_incarnation_and_generation_never_by_step() -> None:
    a = CommitRecord(5, 1, 900, 5, 0, 0, KIND_CHECKPOINT, 0, 0)
    b = CommitRecord(6, 1, 2, 6, 0, 0, KIND_CHECKPOINT, 1, 0)
    c = CommitRecord(4, 2, 1, 4, 0, 0, KIND_CHECKPOINT, 2, 0)
    assert candidates(CommitLog({0: a, 1: b, 2: c}, ())) == [c, b, a]


def test_a_ring_tells_empty_from_damaged_lines() -> None:
    sb = superblock()
    line = CommitRecord(1, 1, 1, 1, 0, 0, KIND_CHECKPOINT, 0, 0).pack(UUID)

    def commit_log(lines: dict[int, bytes]) -> CommitLog:
        return read_commit_log(sb, lambda offset, n: lines.get((offset - sb.ring_offset) // sb.ring_stride, bytes(n)))

    assert commit_log({}).is_empty
    assert commit_log({3: bytes(8) + line[8:]}) == commit_log({3: line}), "only the last store of the line is missing"
    assert commit_log({3: bytes(8) + line[8:40] + bytes(24)}).is_empty, "half a body was never completed"
    assert commit_log({3: line}).records[3].generation == 1
    damaged = commit_log({3: line[:20] + b"\xff" + line[21:]})
    assert damaged.damaged == (3,)
    assert not damaged.is_empty


def test_alignment_and_hash_helpers() -> None:
    assert [align_up(n, 8) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]
    assert len(layout_hash(b"")) == 16
