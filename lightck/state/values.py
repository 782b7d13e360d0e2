"""The small state of a checkpoint as bytes: MessagePack and thirteen extension types (docs/format.md, "Small state").

``unpack`` returns a packed value with its exact types, order and float bits. (Exceptions: an ``nn.Parameter`` becomes a
tensor, a ``ConstantDict`` a dict.) ``pack`` refuses a value for which this is impossible, and its error names the path
of the value. ``unpack`` does not trust its input: damage raises ``CorruptPoolError``, and a size is trusted only when
as many bytes are present. No code and no class is ever stored or looked up. Large tensors are stored elsewhere, and
only their names are part of these bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, cast

import msgpack
import numpy as np
import numpy.typing as npt
import torch

from lightck.errors import CorruptPoolError, StateValueError
from lightck.state.local_tensors import is_dtensor
from lightck.state.storable import (
    DTYPES,
    INT_NBYTES_MAX,
    NUMPY_CODES,
    NUMPY_SCALARS,
    PLAIN,
    dtype_name,
    has_many_collisions,
    is_key,
    unstorable_reason,
)

T = TypeVar("T")
STATE_VERSION = 1
"""Version of the set of parts that the small state consists of."""
# Codes of the extension types.
TUPLE, DICT, ORDERED_DICT, COUNTER, DEFAULT_DICT, SET, DEQUE = 1, 2, 3, 4, 5, 6, 7
BIG_INT, ARRAY, SCALAR, TENSOR, LARGE_TENSOR, FROZENSET = 8, 9, 10, 11, 12, 13
MAX_DEPTH = 32
"""Maximum nesting of containers, the outermost included."""
MAX_DIMS = 64
"""Maximum number of dimensions of an array or tensor that is unpacked."""
_NUMPY_DTYPES = {np.dtype(order + code).str: np.dtype(order + code) for code in NUMPY_CODES for order in "<>"}
_SCALAR_DTYPES = {name: np.dtype(name) for name in NUMPY_SCALARS.values()}
_LEAF = MAX_DEPTH + 1
"""The depth to pass for a value that must not be a container, because at this depth lists and extensions are
refused."""
_TEXT_LIST_MIN = 16
"""A list of at least this many items is encoded by one fast call, if all of them are text. Shorter lists are not tested
for that."""


# --------------------------------------------------------------------------------------------------- packing


def pack(
    value: object,
    *,
    path: str,
    large: Callable[[str, torch.Tensor], None] | None = None,
    large_nbytes: int = 4096,
) -> bytes:
    """Encode one value, and return the bytes.

    Args:
        value: None, bool, int, float, str, bytes, list, tuple, dict, OrderedDict, Counter, defaultdict(None), set,
            frozenset, deque, numpy arrays and scalars (bool, int, float, complex), strided torch tensors. Subclasses
            are refused, apart from ``nn.Parameter`` and ``ConstantDict``, which are unpacked as a tensor and a dict.
            At most 32 containers may be nested, the outermost included.
        path: where the value lies, e.g. ``state/ema``; starts the paths in errors and the names of large tensors.
        large: called with (path, tensor) for each tensor of ``large_nbytes`` or more, in order; only the path is
            stored. The tensor is the caller's own (a copy of a conjugated or negated one). Each call has another path:
            if the keys of several tensors join to the same path, the second path ends with ``#2``, and so on.

    Raises:
        StateValueError: something cannot be stored; the message names its path and type.
    """
    return _Packer(path, large, large_nbytes).encode(value)


class ConstantDict(dict[Any, object]):
    """A dict that is packed only once, because nobody changes it or anything in it. It is stored, and unpacked, as a
    plain dict."""

    __slots__ = ("packed",)
    packed: bytes | None
    """The packed form. The attribute is missing until the dict is packed."""


class _Packer:
    """Encodes values, innermost first. ``_path``: the keys and indices that lead to the value that is being encoded.
    They are joined only for errors and for names of large tensors. ``_names``: the names of large tensors so far."""

    __slots__ = ("_large", "_large_nbytes", "_msgpack", "_names", "_path", "_writer")

    def __init__(self, path: str, large: Callable[[str, torch.Tensor], None] | None, large_nbytes: int) -> None:
        self._path: list[object] = [path]
        self._large = large
        self._large_nbytes = large_nbytes
        self._names: set[str] = set()
        self._writer = msgpack.Packer(strict_types=True, use_bin_type=True)
        self._msgpack: Callable[[object], bytes] = self._writer.pack

    def encode(self, value: object) -> bytes:
        handler = _ENCODE.get(type(value))
        if handler is None:
            raise self.refused(value, _refusal_reason(value))
        try:
            return handler(self, value)
        except OverflowError as error:
            raise self.refused(value, f"it is too large for one value ({error})") from error

    def plain(self, value: object) -> bytes:
        try:
            return self._msgpack(value)
        except ValueError as error:
            raise self.refused(value, f"it is too large for one value ({error})") from error

    def ext(self, code: int, payload: bytes) -> bytes:
        if len(payload) >= 1 << 32:
            raise OverflowError("4 GiB or more")
        return cast("bytes", self._writer.pack_ext_type(code, payload))

    def header(self, count: int) -> bytes:
        return cast("bytes", self._writer.pack_array_header(count))

    def refused(self, value: object, why: str) -> StateValueError:
        """Return the error for a value at the current path that cannot be stored."""
        kind = type(value)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        cure = "let state_dict() return numbers, strings, tensors, or lists and dicts of them, or leave out this value"
        if "lr_lambdas" in self._path:
            cure = "LambdaLR saves all attributes of a callable object, so make this one a method of its class"
        return StateValueError(
            f"{self.path()} is a {name} that cannot be stored: {why}. A checkpoint keeps plain data and never code or "
            f"classes: {cure}."
        )

    def path(self) -> str:
        return "/".join(part if type(part) is str else repr(part) for part in self._path)

    def integer(self, value: int) -> bytes:
        if -(1 << 63) <= value < 1 << 64:
            return self._msgpack(value)
        nbytes = value.bit_length() // 8 + 1
        if nbytes > INT_NBYTES_MAX:
            raise self.refused(value, f"it has more than {INT_NBYTES_MAX} bytes, which Python cannot print")
        return self.ext(BIG_INT, self.plain(value.to_bytes(nbytes, "little", signed=True)))

    def text(self, value: str) -> bytes:
        try:
            return self._msgpack(value)
        except UnicodeEncodeError:
            raise self.refused(value, "it holds lone surrogates, which cannot be encoded as text") from None
        except ValueError as error:
            raise self.refused(value, f"it is too large for one value ({error})") from error

    def items(self, values: Collection[object]) -> list[bytes]:
        self._check_depth(values)
        path, out = self._path, []
        for index, item in enumerate(values):
            path.append(index)
            out.append(self.encode(item))
            path.pop()
        return out

    def sequence(self, values: Collection[object]) -> bytes:
        if len(values) >= _TEXT_LIST_MIN and set(map(type, values)) == {str}:
            self._check_depth(values)
            with contextlib.suppress(ValueError):  # the general path below reports which item is no text
                return self._msgpack(list(values))
        items = self.items(values)
        return self.header(len(items)) + b"".join(items)

    def pairs(self, value: Mapping[object, object]) -> bytes:
        self._check_depth(value)
        if has_many_collisions(value):
            raise self.refused(value, "too many of its keys have the same hash")
        path, out = self._path, [self.header(len(value))]
        for key, item in value.items():
            if not is_key(key):
                raise self.refused(value, f"a key of it is a {type(key).__qualname__}, which does not compare by value")
            path.append(key)
            out += (PAIR, self.encode(key), self.encode(item))
            path.pop()
        return b"".join(out)

    def constant(self, value: ConstantDict) -> bytes:
        packed = getattr(value, "packed", None)
        if packed is None:
            packed = value.packed = self.ext(DICT, self.pairs(value))
        return packed

    def members(self, value: Collection[object]) -> bytes:
        for item in value:
            if not is_key(item):
                raise self.refused(
                    value, f"an item of it is a {type(item).__qualname__}, which does not compare by value"
                )
        if has_many_collisions(value):
            raise self.refused(value, "too many of its items have the same hash")
        # Sorted, so that equal sets give equal bytes whatever the hash seed.
        return self.header(len(value)) + b"".join(sorted(self.items(value)))

    def _check_depth(self, value: object) -> None:
        if len(self._path) > MAX_DEPTH:
            raise self.refused(value, f"it is nested more than {MAX_DEPTH} levels deep, or contains itself")

    def array(self, value: npt.NDArray[np.generic]) -> bytes:
        if value.dtype.str not in _NUMPY_DTYPES:
            raise self.refused(value, f"its dtype is {value.dtype}, and only bool, int, float and complex are kept")
        return self.ext(ARRAY, self._array_fields(value.dtype.str, value.shape, value.tobytes()))

    def _array_fields(self, dtype: str, shape: tuple[int, ...], raw: bytes) -> bytes:
        sizes = b"".join(map(self._msgpack, shape))
        return b"".join((b"\x93", self._msgpack(dtype), self.header(len(shape)), sizes, self.plain(raw)))

    def scalar(self, value: np.generic) -> bytes:
        return self.ext(SCALAR, PAIR + self._msgpack(NUMPY_SCALARS[type(value)]) + self._msgpack(value.tobytes()))

    def tensor(self, value: torch.Tensor) -> bytes:
        why = unstorable_reason(value)
        if why is not None:
            raise self.refused(value, f"{why[0]} ({why[1]})")
        dtype = dtype_name(value.dtype)
        if value.is_conj() or value.is_neg():
            value = value.detach().resolve_conj().resolve_neg()
        if self._large is not None and value.nbytes >= self._large_nbytes:
            return self._large_tensor(value, self._large)
        return self.ext(TENSOR, self._array_fields(dtype, value.shape, self._tensor_bytes(value)))

    def _large_tensor(self, value: torch.Tensor, large: Callable[[str, torch.Tensor], None]) -> bytes:
        path = name = self.path()
        number = 1
        while name in self._names:
            number += 1
            name = f"{path}#{number}"
        self._names.add(name)
        large(name, value)
        return self.ext(LARGE_TENSOR, self.text(name))

    def _tensor_bytes(self, value: torch.Tensor) -> bytes:
        nbytes = value.nbytes
        try:
            dense = value if value.is_cpu and value.is_contiguous() else value.detach().cpu().contiguous()
        except RuntimeError as error:
            raise self.refused(value, f"torch cannot copy it ({error})") from error
        return ctypes.string_at(dense.data_ptr(), nbytes) if nbytes else b""


def _refusal_reason(value: object) -> str:
    for kind in (torch.Tensor, np.ndarray, *_ENCODE):
        if isinstance(value, kind):
            if is_dtensor(value):
                return "it is a DTensor, which is saved only as a parameter, a buffer or an optimizer's state of one"
            return f"it is a subclass of {kind.__qualname__}, and what the subclass adds would be lost"
    return "lightck does not keep objects of this type"


def _encode_default_dict(packer: _Packer, value: defaultdict[object, object]) -> bytes:
    if value.default_factory is not None:
        raise packer.refused(value, "its default_factory is code")
    return packer.ext(DEFAULT_DICT, packer.pairs(value))


PAIR = b"\x92"  # the header of a MessagePack array of two items
_ENCODE: dict[type, Callable[[_Packer, Any], bytes]] = {
    int: _Packer.integer,
    str: _Packer.text,
    list: _Packer.sequence,
    tuple: lambda packer, value: packer.ext(TUPLE, packer.sequence(value)),
    dict: lambda packer, value: packer.ext(DICT, packer.pairs(value)),
    ConstantDict: _Packer.constant,
    OrderedDict: lambda packer, value: packer.ext(ORDERED_DICT, packer.pairs(value)),
    Counter: lambda packer, value: packer.ext(COUNTER, packer.pairs(value)),
    defaultdict: _encode_default_dict,
    set: lambda packer, value: packer.ext(SET, packer.members(value)),
    frozenset: lambda packer, value: packer.ext(FROZENSET, packer.members(value)),
    deque: lambda packer, value: packer.ext(DEQUE, PAIR + packer.plain(value.maxlen) + packer.sequence(value)),
    np.ndarray: _Packer.array,
    torch.Tensor: _Packer.tensor,
    torch.nn.Parameter: _Packer.tensor,
    **dict.fromkeys(NUMPY_SCALARS, _Packer.scalar),
    **dict.fromkeys(PLAIN, _Packer.plain),
}


# ------------------------------------------------------------------------------------------------- unpacking


def unpack(data: bytes, *, tensor: Callable[[str], torch.Tensor] | None = None) -> Any:
    """Return the value that `pack` encoded; ``data`` is untrusted.

    Args:
        data: the bytes of exactly one value.
        tensor: called with the name of a large tensor. Returns the tensor, or raises LookupError if the checkpoint has
            no such tensor. Other errors pass through. None: a large tensor in ``data`` is damage.

    Raises:
        CorruptPoolError: the bytes are no packed value, name a large tensor that is missing, or name the same large
            tensor twice.
    """
    reader = _Reader(bytes(data), tensor)
    value = reader.value(0)
    reader.finish()
    return value


def typed(value: object, kind: type[T]) -> T:
    """Return a value that was unpacked from the small state, if it is of exactly this type. Raises ``CorruptPoolError``
    otherwise. The message is reported as the reason why a checkpoint was rejected, and its first word, "its", refers to
    the checkpoint."""
    if type(value) is not kind or not isinstance(value, kind):
        raise CorruptPoolError(f"its saved options, counters or random states are malformed ({kind.__name__} expected)")
    return value


def _corrupt(reason: str) -> CorruptPoolError:
    return CorruptPoolError(f"the saved options, counters or random states are damaged: {reason}")


class _Reader:
    """A strict reader of one MessagePack value, because the msgpack library trusts the sizes in headers.

    ``_end``: the position after the last byte of the extension that is being read, or of the data outside of
    extensions. ``_seen``: the names of large tensors so far. ``depth``: the number of containers around a value.
    """

    __slots__ = ("_data", "_end", "_pos", "_seen", "_tensor")

    def __init__(self, data: bytes, tensor: Callable[[str], torch.Tensor] | None) -> None:
        self._data = data
        self._pos = 0
        self._end = len(data)
        self._tensor = tensor
        self._seen: set[str] = set()

    def finish(self) -> None:
        """Raise ``CorruptPoolError`` if bytes are left before ``_end``."""
        if self._pos != self._end:
            raise _corrupt(f"{self._end - self._pos} bytes too many")

    def value(self, depth: int) -> object:
        tag = self._take(1)[0]
        if tag < 0x80:
            return tag
        if tag >= 0xE0:
            return tag - 256
        if tag in _CONSTANTS:
            return _CONSTANTS[tag]
        if tag in _NUMBERS:
            number = _NUMBERS[tag]
            return number.unpack(self._take(number.size))[0]
        return self._sized(tag, depth)

    def _sized(self, tag: int, depth: int) -> object:
        if 0x90 <= tag < 0xA0:
            return self._list(tag & 0x0F, depth)
        if 0xA0 <= tag < 0xC0:
            return self._text(tag & 0x1F)
        if tag in _FIXED_EXTENSIONS:
            return self._extension(_FIXED_EXTENSIONS[tag], depth)
        if tag not in _SIZED:
            raise _corrupt(f"the type byte {tag:#04x} is not used here")
        width, read = _SIZED[tag]
        return read(self, int.from_bytes(self._take(width), "big"), depth)

    def _take(self, count: int) -> bytes:
        start = self._pos
        stop = start + count
        if stop > self._end:
            raise _corrupt("it ends too early")
        self._pos = stop
        return self._data[start:stop]

    def _text(self, count: int, _depth: int = 0) -> str:
        try:
            return self._take(count).decode()
        except UnicodeDecodeError as error:
            raise _corrupt(f"a string is not UTF-8 ({error.reason})") from None

    def _binary(self, count: int, _depth: int) -> bytes:
        return self._take(count)

    def _list(self, count: int, depth: int) -> list[object]:
        if depth >= MAX_DEPTH:
            raise _corrupt(f"it is nested more than {MAX_DEPTH} levels deep")
        if count > self._end - self._pos:
            raise _corrupt("a list is longer than its bytes")
        return [self.value(depth + 1) for _ in range(count)]

    def _count(self) -> int:
        """Read the header of a list, and return its number of items."""
        tag = self._take(1)[0]
        if 0x90 <= tag < 0xA0:
            return tag & 0x0F
        if tag not in (0xDC, 0xDD):
            raise _corrupt("a list is missing")
        return int.from_bytes(self._take(2 if tag == 0xDC else 4), "big")

    def _extension(self, size: int, depth: int) -> object:
        code = self._take(1)[0]
        read = _DECODE.get(code)
        if read is None or depth >= _LEAF:
            raise _corrupt(f"extension type {code} is not known here")
        outer, self._end = self._end, self._pos + size
        if self._end > outer:
            raise _corrupt("it ends too early")
        value = read(self, depth)
        self.finish()
        self._end = outer
        return value

    # These methods read payloads of extensions. An extension and the list in it count as one container, as in _Packer.

    def sequence(self, depth: int) -> list[object]:
        return self._list(self._count(), depth)

    def pairs(self, depth: int) -> dict[object, object]:
        if depth >= MAX_DEPTH:
            raise _corrupt(f"it is nested more than {MAX_DEPTH} levels deep")
        count = self._count()
        if 3 * count > self._end - self._pos:
            raise _corrupt("a dict is longer than its bytes")
        keys, items = [], []
        for _ in range(count):
            self.fields(2)
            keys.append(self.value(depth + 1))
            if not is_key(keys[-1]):
                raise _corrupt(f"a {type(keys[-1]).__qualname__} is the key of a dict")
            items.append(self.value(depth + 1))
        out = dict(zip(keys, items, strict=True)) if not has_many_collisions(keys) else {}
        if len(out) != count:
            raise _corrupt("a dict has a key twice, or too many of one hash")
        return out

    def members(self, depth: int) -> list[object]:
        items = self.sequence(depth)
        if not all(map(is_key, items)) or has_many_collisions(items) or len(set(items)) != len(items):
            raise _corrupt("a set holds an item twice, or one that cannot be in a set")
        return items

    def fields(self, count: int) -> None:
        """Read the header of a list, which must have ``count`` items."""
        if self._count() != count:
            raise _corrupt("a payload has the wrong number of fields")

    def exactly(self, kind: type[T]) -> T:
        """Return the next value, which must be of exactly this type and no container."""
        value = self.value(_LEAF)
        if type(value) is not kind or not isinstance(value, kind):
            raise _corrupt(f"a {type(value).__qualname__} stands where a {kind.__qualname__} belongs")
        return value

    def shape(self) -> tuple[int, ...]:
        count = self._count()
        if count > MAX_DIMS:
            raise _corrupt(f"an array has {count} dimensions")
        sizes = tuple(self.exactly(int) for _ in range(count))
        if any(not 0 <= size < 1 << 63 for size in sizes):
            raise _corrupt("an array has a negative or impossible size")
        return sizes

    def large(self, _depth: int) -> torch.Tensor:
        name = self.exactly(str)
        if self._tensor is None:
            raise _corrupt(f"it names the large tensor {name!r} in a part that cannot hold one")
        if name in self._seen:  # `pack` uses each name once; each use here allocates the memory of a tensor
            raise _corrupt(f"it names the large tensor {name!r} twice")
        self._seen.add(name)
        try:
            return self._tensor(name)
        except LookupError:
            raise _corrupt(f"the large tensor {name!r} is not in the checkpoint") from None


def _decode_big_int(reader: _Reader, _depth: int) -> int:
    raw = reader.exactly(bytes)
    if len(raw) > INT_NBYTES_MAX:
        raise _corrupt(f"an int has {len(raw)} bytes")
    return int.from_bytes(raw, "little", signed=True)


def _decode_deque(reader: _Reader, depth: int) -> deque[object]:
    reader.fields(2)
    limit = reader.value(_LEAF)
    items = reader.sequence(depth)
    if limit is not None and (type(limit) is not int or not len(items) <= limit < 1 << 63):
        raise _corrupt("a deque has a wrong maxlen")
    return deque(items, limit)


_Dtype = TypeVar("_Dtype", "np.dtype[np.generic]", torch.dtype)


def _array_fields(
    reader: _Reader, dtypes: Mapping[str, _Dtype], kind: str
) -> tuple[_Dtype, tuple[int, ...], bytearray]:
    reader.fields(3)
    dtype = dtypes.get(reader.exactly(str))
    if dtype is None:
        raise _corrupt(f"a {kind} has an unknown dtype")
    shape, raw = reader.shape(), reader.exactly(bytes)
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise _corrupt(f"an array of shape {shape} has {len(raw)} bytes")
    return dtype, shape, bytearray(raw)


def _decode_array(reader: _Reader, _depth: int) -> npt.NDArray[np.generic]:
    dtype, shape, raw = _array_fields(reader, _NUMPY_DTYPES, "numpy array")
    try:
        return np.frombuffer(raw, dtype).reshape(shape)
    except (ValueError, OverflowError) as error:
        raise _corrupt(f"numpy cannot make an array of shape {shape} ({error})") from None


def _decode_scalar(reader: _Reader, _depth: int) -> object:
    reader.fields(2)
    dtype = _SCALAR_DTYPES.get(reader.exactly(str))
    raw = reader.exactly(bytes)
    if dtype is None or len(raw) != dtype.itemsize:
        raise _corrupt("a numpy scalar has an unknown dtype or a wrong size")
    return np.frombuffer(raw, dtype)[0]


def _decode_tensor(reader: _Reader, _depth: int) -> torch.Tensor:
    dtype, shape, raw = _array_fields(reader, DTYPES, "tensor")
    try:
        if not raw:
            return torch.empty(shape, dtype=dtype)
        # The clone has memory that torch allocated, which is aligned and resizable.
        return torch.frombuffer(raw, dtype=torch.uint8).clone().view(dtype).reshape(shape)
    except (RuntimeError, ValueError, OverflowError, TypeError) as error:
        raise _corrupt(f"torch cannot make a tensor of shape {shape} ({error})") from None


_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = {
    **{0xCC + index: struct.Struct(">" + code) for index, code in enumerate("BHIQbhiq")},
    0xCB: struct.Struct(">d"),
}
_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_SIZED: dict[int, tuple[int, Callable[[_Reader, int, int], object]]] = {
    **{0xC4 + index: (1 << index, _Reader._binary) for index in range(3)},
    **{0xC7 + index: (1 << index, _Reader._extension) for index in range(3)},
    **{0xD9 + index: (1 << index, _Reader._text) for index in range(3)},
    **{0xDC + index: (2 << index, _Reader._list) for index in range(2)},
}
_DECODE: dict[int, Callable[[_Reader, int], object]] = {
    TUPLE: lambda reader, depth: tuple(reader.sequence(depth)),
    DICT: _Reader.pairs,
    ORDERED_DICT: lambda reader, depth: OrderedDict(reader.pairs(depth)),
    COUNTER: lambda reader, depth: Counter(reader.pairs(depth)),
    DEFAULT_DICT: lambda reader, depth: defaultdict(None, reader.pairs(depth)),
    SET: lambda reader, depth: set(reader.members(depth)),
    FROZENSET: lambda reader, depth: frozenset(reader.members(depth)),
    DEQUE: _decode_deque,
    BIG_INT: _decode_big_int,
    ARRAY: _decode_array,
    SCALAR: _decode_scalar,
    TENSOR: _decode_tensor,
    LARGE_TENSOR: _Reader.large,
}
