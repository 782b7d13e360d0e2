"""A checksum of a batch, to check that a replay or a resumed training gets the same batch as before.

It takes microseconds and waits for no device. It covers the shape, the dtype and some kilobytes spread over the
elements of a tensor on the CPU, and the shape and the dtype of a tensor on a device.
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

_CHECKED_BYTES = 4 << 10
"""A tensor of at most this size is read whole. Of a larger one this many bytes and its last word are read at most."""
_CHECKED_TENSORS = 16
"""Of a larger tensor, ``_MANY_WORDS`` words are read if it is among the first ``_CHECKED_TENSORS`` tensors that are
visited in a batch (a container is visited from its end), and ``_FEW_WORDS`` words otherwise."""
_CHECKED_PARTS = 256
"""The largest number of objects of a batch, containers included, that are read, so that a checksum takes
microseconds."""
_CHECKED_ITEMS = 64
"""The largest number of items of a list that are read."""
_WORD = 8
"""Bytes of a word. A large tensor is not read whole, but only at single words that are spread over it."""
_MANY_WORDS, _FEW_WORDS = _CHECKED_BYTES // _WORD, 32
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_PARTIAL = 1
"""The lowest bit of a checksum. It is set if the batch has a part of which nothing could be read (a tensor on a device,
an object). It is not set for a tensor of a subclass, of which only dtype and shape are covered, and not if the batch
has more parts than are read."""


TensorChecksums = dict[int, tuple[torch.Tensor, int, bytes | None]]
"""id of a tensor -> the tensor, its version counter when it was read, and its checksum (None if it could not be
read)."""


def checksum_of(batch: object, cache: TensorChecksums | None = None) -> int | None:
    """Return a checksum of 32 bits, or None if nothing in the batch can be compared. Compare checksums with `differ`.
    ``cache``: checksums of tensors that were read already, and are not read again. The checksums of the tensors that
    are read now are added to it."""
    found: list[bytes] = []
    partial_bit, is_comparable, tensors = 0, False, 0
    todo = [batch]
    for _ in range(_CHECKED_PARTS):
        if not todo:
            break
        item = todo.pop()
        kind = type(item)
        if (kind is _Tensor or kind is _Parameter) and not item.is_nested:  # type: ignore[attr-defined]
            tensors, is_comparable = tensors + 1, True
            raw = _read(item, tensors <= _CHECKED_TENSORS, cache)  # type: ignore[arg-type]
            found.append(_dtype_and_shape(item.dtype, item.shape))  # type: ignore[attr-defined]
        elif (parts := _contents(item)) is not None:
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
    """Whether two checksums show that their batches differ. If one of the two covers its whole batch and the other does
    not (because the batch was on a device in one of the runs), they show nothing, and the result is False."""
    return was != now and not (was ^ now) & _PARTIAL


def is_partial(checksum: int) -> bool:
    """Whether the batch has parts of which nothing could be read (see ``_PARTIAL``)."""
    return bool(checksum & _PARTIAL)


@lru_cache(maxsize=512)
def _dtype_and_shape(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{dtype}{tuple(shape)}".encode()


def _contents(item: object) -> Iterable[object] | None:
    """Return what a container holds, or None for any other object. Subclasses (named tuples, tokenizers' encodings)
    are containers as well; none of their code runs."""
    kind = type(item)
    if (kind is tuple or kind is list) and len(item) <= _CHECKED_ITEMS:  # type: ignore[arg-type]
        return item  # type: ignore[return-value]
    if isinstance(item, list):
        return _sampled_items(list.__len__(item), partial(list.__getitem__, item))
    if isinstance(item, tuple):
        return _sampled_items(tuple.__len__(item), partial(tuple.__getitem__, item))
    if isinstance(item, UserDict):
        item = item.data
    return islice(dict.values(item), _CHECKED_PARTS) if isinstance(item, dict) else None


def _sampled_items(count: int, get: Callable[[int], object]) -> Iterable[object]:
    """Return the items of a short list; of a long one, its length followed by some of its items. ``get``: returns one
    item."""
    if count <= _CHECKED_ITEMS:
        return map(get, range(count))
    return [count, *map(get, sample_positions(count, _CHECKED_ITEMS).tolist())]


def _leaf_bytes(item: object) -> bytes | None:
    """Return what is compared of an object other than a plain tensor, or None for a type that is not covered."""
    kind = type(item)
    if isinstance(item, bytes) and kind is bytes:
        return b"%d" % len(item) + _spread_crc(item, len(item))
    if isinstance(item, str) and kind is str and len(item) > _CHECKED_BYTES:
        item = f"{len(item)}" + "".join(item[at] for at in sample_positions(len(item), _MANY_WORDS).tolist())
    if kind in (int, float, str, bool, type(None)):
        return repr(item).encode("utf-8", "surrogatepass")
    if isinstance(item, np.ndarray) and kind is np.ndarray and not item.dtype.hasobject:
        head = f"{item.dtype.str}{item.shape}".encode()
        if item.nbytes > _CHECKED_BYTES and not item.flags.c_contiguous:
            return head + bytes(item[_coordinates(item.shape, max(_CHECKED_BYTES // item.itemsize, 1))].tobytes())
        flat = np.ascontiguousarray(item).reshape(-1).view(np.uint8)
        return head + _spread_crc(flat, item.nbytes)
    if isinstance(item, np.generic) and not item.dtype.hasobject:
        return item.dtype.str.encode() + item.tobytes()
    if isinstance(item, torch.Tensor):  # a subclass, none of whose code may run
        with torch._C.DisableTorchFunctionSubclass():
            is_plain = item.layout is torch.strided and not item.is_nested
            return _dtype_and_shape(item.dtype, item.shape) if is_plain else None
    return None


def _read(item: torch.Tensor, is_thorough: bool, cache: TensorChecksums | None) -> bytes | None:
    """Return the checksum of many words (``is_thorough``) or of few words of a tensor; None if it cannot be read."""
    if cache is None or not is_thorough:
        return _tensor_checksum(item, _MANY_WORDS if is_thorough else _FEW_WORDS)
    known = cache.get(id(item))
    version = -1 if item.is_inference() else item._version
    if known is None or known[1] != version or version < 0:
        known = cache[id(item)] = item, version, _tensor_checksum(item, _MANY_WORDS)
    return known[2]


def _tensor_checksum(item: torch.Tensor, words: int) -> bytes | None:
    """Return a checksum of some of the tensor's bytes. Return None if they cannot be read, or lie on a device, because
    the training thread would have to wait for the device."""
    if not item.is_cpu or item.layout is not torch.strided or item.is_quantized:
        return None
    try:
        if not item.is_contiguous() or item.is_conj() or item.is_neg():
            item = bytes_in_order(_thinned(item.detach()))
        return _storage_checksum(item, words)
    except RuntimeError:  # torch cannot copy this dtype, or the tensor has no memory: it is not covered
        return None


def _thinned(item: torch.Tensor) -> torch.Tensor:
    """Return some elements of the tensor, ``_CHECKED_BYTES`` in all, or the tensor itself if it is smaller. (The caller
    copies the result, and a copy of a large tensor would take too long.)"""
    if item.nbytes <= _CHECKED_BYTES:
        return item
    at = _coordinates(tuple(item.shape), max(_CHECKED_BYTES // item.itemsize, 1))
    return item[tuple(map(torch.from_numpy, at))]


def _storage_checksum(item: torch.Tensor, words: int) -> bytes | None:
    nbytes = item.nbytes
    if not nbytes:
        return b""
    if item.untyped_storage().nbytes() < nbytes:
        return None  # its memory was freed
    data = ffi.cast("char *", item.data_ptr())
    return _memory_crc(data, nbytes, words)


def _spread_crc(data: bytes | npt.NDArray[np.uint8], nbytes: int) -> bytes:
    """Return the checksum of all bytes if the data have at most ``_CHECKED_BYTES``. Otherwise return the checksum of
    single words, followed by the last word itself."""
    return _memory_crc(ffi.from_buffer(data), nbytes, _MANY_WORDS)


def _memory_crc(data: CData, nbytes: int, words: int) -> bytes:
    """Do what `_spread_crc` does, for bytes in memory. ``words``: how many single words of longer data are read."""
    if nbytes <= _CHECKED_BYTES:
        return lib.lck_crc32c(data, nbytes).to_bytes(4, "little")
    crc = lib.lck_crc32c_words(data, _word_offsets(nbytes // _WORD, words), words)
    return crc.to_bytes(4, "little") + bytes(ffi.buffer(data + (nbytes - _WORD), _WORD))


@lru_cache(maxsize=256)
def _word_offsets(total: int, count: int) -> CData:
    """Return `sample_positions` as a C array."""
    return ffi.new("int64_t[]", sample_positions(total, count).tolist())


@lru_cache(maxsize=256)
def sample_positions(total: int, count: int) -> npt.NDArray[np.int64]:
    """Return ``count`` fixed numbers from 0 to ``total`` - 1. ``count`` is at most ``total``.

    The range is split into ``count`` equal intervals, and each number lies in one of them, at a pseudo-random distance
    from its beginning (splitmix64). Equal distances could hit the same columns of every row."""
    begins = np.arange(count + 1, dtype=np.int64) * total // count
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # splitmix64
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    share = (mixed ^ (mixed >> np.uint64(31))) >> np.uint64(40)  # 24 bits: a part of the interval, in units of 2 ** -24
    return begins[:-1] + (share.astype(np.int64) * np.diff(begins) >> 24)


@lru_cache(maxsize=16)
def _coordinates(shape: tuple[int, ...], count: int) -> tuple[npt.NDArray[np.int64], ...]:
    """Return the indices of ``count`` fixed elements, or of all if there are fewer: one array per dimension."""
    total = math.prod(shape)
    return np.unravel_index(sample_positions(total, count) if total > count else np.arange(total), shape)
