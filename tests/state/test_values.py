"""The small-state encoder: exact round trips, refusals by path, hostile bytes."""

from __future__ import annotations

import contextlib
import enum
import math
import struct
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightck.errors import CorruptPoolError, StateValueError
from lightck.state import small_state, values
from lightck.state.storable import DTYPES, dtype_from_name, dtype_name


def same(left: object, right: object) -> bool:
    """Whether type, order and bits are equal."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, torch.Tensor):
        raw = [t.reshape(-1).contiguous().view(torch.uint8).tolist() for t in (left, right)]
        return left.dtype == right.dtype and left.shape == right.shape and raw[0] == raw[1]
    if isinstance(left, (np.ndarray, np.generic)):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return same_items(left.items(), right.items())
    if isinstance(left, (set, frozenset)):
        return same_items(*(sorted(items, key=lambda item: values.pack(item, path="")) for items in (left, right)))
    if isinstance(left, deque):
        return left.maxlen == right.maxlen and same_items(left, right)
    if isinstance(left, (list, tuple)):
        return same_items(left, right)
    return left == right


def same_items(left, right) -> bool:
    return len(left) == len(right) and all(map(same, left, right))


def there_and_back(value: object) -> object:
    return values.unpack(values.pack(value, path="state/x"))


floats = st.floats() | st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0])
numpy_codes = st.sampled_from(["?", "<i1", "<u2", ">i4", "<i8", "<u8", "<f2", ">f4", "<f8", "<c8", "<c16"])
arrays = st.builds(
    lambda code, shape, seed: np.asarray(np.random.RandomState(seed).rand(*shape) * 100).astype(code),
    numpy_codes,
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 99),
)
scalars = arrays.filter(lambda a: a.size).map(lambda a: a.astype(a.dtype.newbyteorder("=")).flat[0])
tensors = st.builds(
    lambda dtype, shape: (torch.rand(shape) * 100).to(dtype),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64]),
    st.lists(st.integers(0, 3), max_size=3),
)
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | floats.filter(lambda x: x == x) | st.text() | st.binary(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
plain = st.none() | st.booleans() | st.integers() | floats | st.text() | st.binary()


def containers(inner):
    dicts = st.dictionaries(keys, inner, max_size=4)
    lists = st.lists(inner, max_size=4)
    return (
        lists
        | lists.map(tuple)
        | dicts
        | dicts.map(OrderedDict)
        | dicts.map(lambda d: defaultdict(None, d))
        | st.dictionaries(keys, st.integers(), max_size=3).map(Counter)
        | st.sets(keys, max_size=4)
        | st.builds(lambda items, room: deque(items, room and len(items) + room), lists, st.none() | st.integers(1, 5))
    )


storable = st.recursive(plain | arrays | scalars | tensors, containers, max_leaves=20)


@settings(max_examples=300)
@given(storable)
def test_round_trip(value):
    assert same(there_and_back(value), value)


@pytest.mark.parametrize("bits", [0x7FF8000000000001, 0x7FF0000000000001, 0xFFF8DEADBEEF0000, 1 << 63, 1])
def test_floats_by_their_bits(bits):
    raw = struct.pack("<Q", bits)
    value = struct.unpack("<d", raw)[0]
    assert struct.pack("<d", there_and_back(value)) == raw
    assert struct.pack("<d", there_and_back({"a": [value]})["a"][0]) == raw


@pytest.mark.parametrize(
    "value", [0, -1, 2**63, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 2**5000, -(2**5000), 255 << 64]
)
def test_ints(value):
    assert same(there_and_back(value), value)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_torch_dtype(name):
    dtype = dtype_from_name(name)
    assert dtype_name(dtype) == name
    raw = torch.randint(0, 2 if name == "bool" else 256, (3 * dtype.itemsize,), dtype=torch.uint8)
    for value in (raw.view(dtype), raw.view(dtype)[:1].reshape(()), raw.view(dtype)[:0]):
        assert same(there_and_back(value), value)


@pytest.mark.parametrize("name", ["qint8", "quint4x2", "int3", "uint7", "nn", "Tensor", "", "float33"])
def test_unknown_dtype_is_refused(name):
    with pytest.raises(ValueError, match="dtype"):
        dtype_from_name(name)
    if isinstance(getattr(torch, name, None), torch.dtype):
        with pytest.raises(ValueError, match="cannot be stored"):
            dtype_name(getattr(torch, name))


def test_views_become_dense_and_own_their_memory():
    base = torch.arange(12.0).reshape(3, 4)
    back = there_and_back({"t": base.t(), "p": torch.nn.Parameter(base[1]), "c": torch.tensor([1 + 2j]).conj()})
    assert torch.equal(back["t"], base.t())
    assert type(back["p"]) is torch.Tensor
    assert torch.equal(back["c"], torch.tensor([1 - 2j]))
    back["t"].add_(1)
    back["t"].resize_(100)
    array = there_and_back(np.arange(4)[::2])
    array += 1
    assert array.tolist() == [1, 3]


def test_large_tensors_are_not_part_of_the_bytes():
    big, found = torch.zeros(1024), {}
    value = {"ema": {"w": big, "s": torch.ones(3)}, "list": [0, big], "ema/w": big, 7: (big,)}
    data = values.pack(value, path="state", large=lambda path, tensor: found.setdefault(path, tensor))
    assert list(found) == ["state/ema/w", "state/list/1", "state/ema/w#2", "state/7/0"]
    assert all(tensor is big for tensor in found.values())
    back = values.unpack(data, tensor=found.__getitem__)
    assert back["list"][1] is big
    assert torch.equal(back["ema"]["s"], torch.ones(3))
    for tensor in (None, {}.__getitem__):
        with pytest.raises(CorruptPoolError, match="large tensor"):
            values.unpack(data, tensor=tensor)


class Colour(enum.IntEnum):
    RED = 1


class Odd:
    pass


def loop() -> list:
    out: list = []
    out.append(out)
    return out


def deep(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


def freed() -> torch.Tensor:
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED = {
    "lambda": (lambda: 0, "function"),
    "class": (Odd(), "Odd"),
    "type": (int, "type"),
    "size": (torch.Size([1]), "torch.Size"),
    "enum": (Colour.RED, "Colour"),
    "sparse": (torch.eye(2).to_sparse(), "Tensor"),
    "meta": (torch.empty(2, device="meta"), "Tensor"),
    "quantised": (torch.empty(2, dtype=torch.qint8, device="meta"), "Tensor"),
    "freed": (freed(), "storage was freed"),
    "surrogate": ("\ud800", "surrogates"),
    "objects": (np.array([None]), "dtype is object"),
    "dates": (np.array(["2020"], dtype="datetime64[s]"), "datetime64"),
    "strings": (np.array(["a"]), "dtype"),
    "record": (np.zeros(1, dtype=[("a", "i4")]), "dtype"),
    "masked": (np.ma.masked_array([1]), "MaskedArray"),
    "date": (np.datetime64("2020"), "datetime64"),
    "factory": (defaultdict(list), "default_factory"),
    "key": ({torch.ones(1): 1}, "key of it is a Tensor"),
    "member": ({Odd()}, "item of it is a Odd"),
    "cycle": (loop(), "contains itself"),
    "depth": (deep(31), "more than 32 levels deep"),
    "bytearray": (bytearray(b"x"), "bytearray"),
    "range": (range(3), "range"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_path_and_type(name):
    value, expected = REFUSED[name]
    with pytest.raises(StateValueError, match=r"^state/it/sub/1") as caught:
        values.pack({"sub": [0, value]}, path="state/it")
    assert expected in str(caught.value)
    assert "leave out this value" in str(caught.value)


def test_many_strings_are_packed_in_the_format_of_few():
    few = values.pack([f"name {i}" for i in range(10)], path="x")
    many = values.pack([f"name {i}" for i in range(20)], path="x")
    assert many[3 : 2 + len(few)] == few[1:], "three bytes of header instead of one, then the same items"
    assert there_and_back([f"name {i}" for i in range(20)]) == [f"name {i}" for i in range(20)]
    with pytest.raises(StateValueError, match=r"^state/it/17 .*surrogates"):
        values.pack([*"a" * 17, "\ud800"], path="state/it")


def test_depth_32_is_the_maximum():
    assert same(there_and_back(deep(32)), deep(32))
    with pytest.raises(StateValueError):
        values.pack(deep(33), path="x")
    with pytest.raises(CorruptPoolError):
        values.unpack(msgpack.packb(deep(33)))


def ext(code: int, payload: object) -> bytes:
    return msgpack.packb(msgpack.ExtType(code, payload if isinstance(payload, bytes) else msgpack.packb(payload)))


HOSTILE = {
    "empty": b"",
    "trailing": b"\x01\x01",
    "map": msgpack.packb({1: 2}),
    "float32": msgpack.packb(1.0, use_single_float=True),
    "unused byte": b"\xc1",
    "timestamp": msgpack.packb(msgpack.Timestamp(1)),
    "unknown ext": ext(99, []),
    "empty ext": b"\xc7\x00\x01",
    "list of 4 G": b"\xdd\xff\xff\xff\xff\x01",
    "bin of 4 G": b"\xc6\xff\xff\xff\xff\x01",
    "ext of 4 G": b"\xc9\xff\xff\xff\xff\x01\x01",
    "nested lists": b"\xdd\x00\x0f\xff\xff" * 200_000,
    "nested tuples": b"\xc9\x00\x00\xff\xff\x01" * 20_000,
    "utf-8": b"\xa1\xff",
    "payload ends early": ext(1, b"\x92\x01"),
    "payload goes on": ext(1, b"\x91\x01\x01"),
    "tuple of int": ext(1, 5),
    "dict of ints": ext(2, [1]),
    "dict of triples": ext(2, [[1, 2, 3]]),
    "list as key": ext(2, [[[], 1]]),
    "tensor as key": ext(2, b"\x91\x92" + values.pack(torch.ones(1), path="x") + b"\x01"),
    "key twice": ext(2, [[1, 2], [1, 3]]),
    "key twice, other type": ext(2, [[1, 2], [1.0, 3]]),
    "item twice": ext(6, [1, 1]),
    "list in set": ext(6, [[]]),
    "deque too long": ext(7, [1, [1, 2]]),
    "deque maxlen": ext(7, [2**63, []]),
    "deque maxlen type": ext(7, ["a", []]),
    "big int of str": ext(8, "a"),
    "object dtype": ext(9, ["|O", [1], b"12345678"]),
    "void dtype": ext(9, ["|V8", [1], b"12345678"]),
    "dtype with comma": ext(9, ["i4,i4", [1], b"12345678"]),
    "array size": ext(9, ["<f4", [3], b"12345678"]),
    "array negative": ext(9, ["<f4", [-1, -2], b"12345678"]),
    "array dims": ext(9, ["<f4", [1] * 65, b"1234"]),
    "array huge and empty": ext(9, ["<f4", [0, 2**62, 2**62], b""]),
    "shape of bool": ext(9, ["<f4", [True], b"1234"]),
    "scalar size": ext(10, ["<f4", b"12345678"]),
    "scalar dtype": ext(10, ["|O", b"12345678"]),
    "tensor dtype": ext(11, ["load", [1], b"1"]),
    "tensor quantised": ext(11, ["qint8", [1], b"1"]),
    "tensor size": ext(11, ["float32", [2**61], b"1234"]),
    "tensor huge and empty": ext(11, ["float32", [0, 2**62, 2**62], b""]),
    "tensor of list": ext(11, ["float32", [1], [1]]),
    "large name": ext(12, 5),
    "large unknown": ext(12, "nowhere"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes(name):
    with pytest.raises(CorruptPoolError, match="damaged"):
        values.unpack(HOSTILE[name], tensor={}.__getitem__)


def decode(data: bytes) -> None:
    with contextlib.suppress(CorruptPoolError):
        values.unpack(data, tensor=lambda name: torch.zeros(1))


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_random_bytes(data):
    decode(data)


@settings(max_examples=300)
@given(storable, st.data())
def test_mutated_bytes(value, data):
    packed = bytearray(values.pack(value, path="x"))
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    decode(bytes(packed[: data.draw(st.integers(0, len(packed)))]))
    decode(bytes(packed))


def test_sizes_in_headers_are_not_trusted():
    data = HOSTILE["nested lists"]
    tracemalloc.start()
    decode(data)
    decode(ext(9, ["<f8", [2**40], b""]) * 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * len(data)


def test_sets_are_packed_in_one_order():
    items = [str(number) for number in range(50)]
    assert values.pack(set(items), path="x") == values.pack({*items[25:], *items[:25]}, path="x")
    assert math.isnan(next(iter(there_and_back({math.nan}))))


near = st.sampled_from(
    [
        0,
        0.0,
        -0.0,
        False,
        None,
        "",
        b"",
        (),
        [],
        {},
        1,
        1.0,
        True,
        math.nan,
        {1: 0},
        {True: 0},
        {1.0: 0},
        (1, 2),
        [1, 2],
        [(1,)],
        [[1]],
        {"a": 1, "b": 2},
        {"b": 2, "a": 1},
        OrderedDict(a=1),
        np.float64(1),
        torch.ones(()),
        {1, 2},
        {"lr": 0.1, "betas": (0.9, 0.999)},
        {"lr": 0.1, "betas": [0.9, 0.999]},
    ]
)


def packed_or_refused(pack: Callable[..., bytes], value: object) -> bytes | str:
    try:
        return pack(value, path="x")
    except StateValueError as error:
        return str(error)


@settings(max_examples=300)
@given(st.lists(near | storable, max_size=8))
def test_a_cached_packer_gives_the_bytes_of_a_new_one(seen):
    """The packer gets, one after the other, values that are equal in Python and differ in type, order or bits."""
    again = small_state.CachedPacker()
    for value in [item for item in seen for _ in range(2)]:
        assert packed_or_refused(again.pack, value) == packed_or_refused(values.pack, value)


def test_a_changed_tensor_among_the_options_is_packed_again():
    again, lr = small_state.CachedPacker(), torch.tensor(0.1)
    first = again.pack({"lr": lr}, path="x")
    lr.mul_(2)
    assert again.pack({"lr": lr}, path="x") == values.pack({"lr": lr}, path="x") != first


def test_a_constant_is_a_dict_that_is_packed_once():
    constant = values.ConstantDict(a=1, b=[torch.ones(2)])
    assert values.pack(constant, path="x") == values.pack(dict(constant), path="x")
    assert values.pack([constant, constant], path="x") == values.pack([dict(constant)] * 2, path="x")
    assert type(there_and_back(constant)) is dict
