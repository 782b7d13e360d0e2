"""A checksum of a batch: whether a replay, or a resumed training, has the batch that was there before.

It costs microseconds and waits for no device: of a tensor on the CPU its shape, its dtype and some kilobytes spread
over its elements count, of one on a device its shape and its dtype.
"""

from __future__ import annotations

import math
import zlib
from collections import UserDict
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from lightck._native import ffi, lib
from lightck.state.device_transfers import bytes_in_order

if TYPE_CHECKING:
    from lightck._native import CData

_CHECKED_BYTES = 4 << 10  # of each tensor; a smaller one is read whole
_CHECKED_TENSORS = 16  # of each batch; of others a few words
_CHECKED_PARTS = 256  # of each batch, containers included: a checksum may cost microseconds, not more
_CHECKED_ITEMS = 64  # of each list
_WORD = 8  # a large tensor is read in single words, spread over it
_MANY, _FEW = _CHECKED_BYTES // _WORD, 32
_PARTIAL = 1
"""The lowest bit of a checksum: some of the batch was not looked at (a tensor on a device, an object)."""


TensorReads = dict[int, tuple[torch.Tensor, int, bytes | None]]
"""Tensors that were read, by their ids: the tensor, its version counter then, and what was read."""


def checksum_of(batch: object, read: TensorReads | None = None) -> int | None:
    """A checksum of 32 bits; None where nothing in the batch can be compared. Compare two by `differ`. ``read``: what
    is in it is not read again, and what is read is put into it."""
    found: list[bytes] = []
    partial_bit, is_comparable, tensors = 0, False, 0
    todo = [batch]
    for _ in range(_CHECKED_PARTS):
        if not todo:
            break
        item = todo.pop()
        kind = type(item)
        if (kind is torch.Tensor or kind is torch.nn.Parameter) and not item.is_nested:  # type: ignore[attr-defined]
            tensors, is_comparable = tensors + 1, True
            raw = _read(item, tensors <= _CHECKED_TENSORS, read)  # type: ignore[arg-type]
            found.append(_dtype_and_shape(item.dtype, item.shape))  # type: ignore[attr-defined]
        elif (parts := _parts(item)) is not None:
            todo.extend(parts)
            continue
        else:
            raw = _leaf_bytes(item)
            is_comparable |= raw is not None and item is not None
        if raw is None:
            partial_bit, raw = _PARTIAL, kind.__qualname__.encode("utf-8", "surrogatepass")
        found.append(raw)
    return zlib.crc32(b"\0".join(found)) & ~_PARTIAL | partial_bit if is_comparable else None


def differ(was: int, now: int) -> bool:
    """Whether two checksums show that the batches differ. A batch that lies on a device in one process and not in the
    other is not compared."""
    return was != now and not (was ^ now) & _PARTIAL


def is_partial(checksum: int) -> bool:
    """Whether some of the batch could not be looked at: tensors on a device, objects."""
    return bool(checksum & _PARTIAL)


@lru_cache(maxsize=512)
def _dtype_and_shape(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{dtype}{tuple(shape)}".encode()


def _parts(item: object) -> Iterable[object] | None:
    """What a container holds: subclasses too (named tuples, tokenizers' encodings), by no code of theirs."""
    if isinstance(item, list):
        return _some(list.__len__(item), partial(list.__getitem__, item))
    if isinstance(item, tuple):
        return _some(tuple.__len__(item), partial(tuple.__getitem__, item))
    if isinstance(item, UserDict):
        item = item.data
    return islice(dict.values(item), _CHECKED_PARTS) if isinstance(item, dict) else None


def _some(count: int, get: Callable[[int], object]) -> Iterable[object]:
    if count <= _CHECKED_ITEMS:
        return map(get, range(count))
    return [count, *map(get, sample_positions(count, _CHECKED_ITEMS).tolist())]


def _leaf_bytes(item: object) -> bytes | None:
    """Of anything but a tensor; None where it is of a kind that is not looked into."""
    kind = type(item)
    if isinstance(item, bytes) and kind is bytes:
        return b"%d" % len(item) + _spread_crc(item, len(item))
    if isinstance(item, str) and kind is str and len(item) > _CHECKED_BYTES:
        item = f"{len(item)}" + "".join(item[at] for at in sample_positions(len(item), _MANY).tolist())
    if kind in (int, float, str, bool, type(None)):
        return repr(item).encode("utf-8", "surrogatepass")
    if isinstance(item, np.ndarray) and kind is np.ndarray and not item.dtype.hasobject:
        head = f"{item.dtype.str}{item.shape}".encode()
        if item.nbytes > _CHECKED_BYTES and not item.flags.c_contiguous:
            return head + bytes(item[_coordinates(item.shape, _CHECKED_BYTES // item.itemsize)].tobytes())
        flat = np.ascontiguousarray(item).reshape(-1).view(np.uint8)
        return head + _spread_crc(flat, item.nbytes)
    if isinstance(item, np.generic) and not item.dtype.hasobject:
        return item.dtype.str.encode() + item.tobytes()
    if isinstance(item, torch.Tensor):  # a subclass: nothing of its own code is run
        with torch._C.DisableTorchFunctionSubclass():
            is_plain = item.layout is torch.strided and not item.is_nested
            return _dtype_and_shape(item.dtype, item.shape) if is_plain else None
    return None


def _read(item: torch.Tensor, is_thorough: bool, read: TensorReads | None) -> bytes | None:
    """Of the first tensors many words, and of those after them a few."""
    if read is None or not is_thorough:
        return _tensor_bytes(item, _MANY if is_thorough else _FEW)
    known = read.get(id(item))
    version = -1 if item.is_inference() else item._version
    if known is None or known[1] != version or version < 0:
        known = read[id(item)] = item, version, _tensor_bytes(item, _MANY)
    return known[2]


def _tensor_bytes(item: torch.Tensor, words: int) -> bytes | None:
    """Something of the tensor's bytes. None where they cannot be read: reading from a device would make the training
    thread wait for it."""
    if not item.is_cpu or item.layout is not torch.strided or item.is_quantized:
        return None
    try:
        if not item.is_contiguous() or item.is_conj() or item.is_neg():
            item = bytes_in_order(_thinned(item.detach()))
        return _memory_bytes(item, words)
    except RuntimeError:  # a dtype that torch cannot copy, or no memory of its own: nothing to compare is no error
        return None


def _thinned(item: torch.Tensor) -> torch.Tensor:
    """Some kilobytes of single elements: a batch that is no block of memory is never copied whole."""
    if item.nbytes <= _CHECKED_BYTES:
        return item
    at = _coordinates(tuple(item.shape), max(_CHECKED_BYTES // item.itemsize, 1))
    return item[tuple(map(torch.from_numpy, at))]


def _memory_bytes(item: torch.Tensor, words: int) -> bytes | None:
    nbytes = item.nbytes
    if not nbytes:
        return b""
    if item.untyped_storage().nbytes() < nbytes:
        return None  # its memory was given back
    data = ffi.cast("char *", item.data_ptr())
    return _memory_crc(data, nbytes, words)


def _spread_crc(data: bytes | npt.NDArray[np.uint8], nbytes: int) -> bytes:
    """Of single words and of the last bytes; of few bytes all of them."""
    return _memory_crc(ffi.from_buffer(data), nbytes, _MANY)


def _memory_crc(data: CData, nbytes: int, words: int) -> bytes:
    """Of few bytes all of them."""
    if nbytes <= _CHECKED_BYTES:
        return lib.lck_crc32c(data, nbytes).to_bytes(4, "little")
    crc = lib.lck_crc32c_words(data, _word_offsets(nbytes // _WORD, words), words)
    return crc.to_bytes(4, "little") + bytes(ffi.buffer(data + (nbytes - _WORD), _WORD))


@lru_cache(maxsize=256)
def _word_offsets(total: int, count: int) -> CData:
    """`places` as C reads them."""
    return ffi.new("int64_t[]", sample_positions(total, count).tolist())


@lru_cache(maxsize=256)
def sample_positions(total: int, count: int) -> npt.NDArray[np.int64]:
    """``count`` of the numbers below ``total``, which is larger: one in each of as many equal gaps, at a pseudo-random
    distance from its beginning, so that no row length of a batch keeps step with them. For ever the same ones."""
    begins = np.arange(count + 1, dtype=np.int64) * total // count
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # splitmix64
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    share = (mixed ^ (mixed >> np.uint64(31))) >> np.uint64(40)  # of 2 ** 24
    return begins[:-1] + (share.astype(np.int64) * np.diff(begins) >> 24)


@lru_cache(maxsize=16)
def _coordinates(shape: tuple[int, ...], count: int) -> tuple[npt.NDArray[np.int64], ...]:
    total = math.prod(shape)
    return np.unravel_index(sample_positions(total, count) if total > count else np.arange(total), shape)
