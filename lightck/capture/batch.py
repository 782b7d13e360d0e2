"""A checksum of a batch: whether a replay, or a resumed training, has the batch that was there before.

It costs microseconds and waits for no device: of a tensor on the CPU its shape, its dtype and some kilobytes spread
over its elements count, of one on a device its shape and its dtype.
"""

from __future__ import annotations

import zlib
from collections import UserDict
from collections.abc import Iterable
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch

from lightck._native import ffi, lib
from lightck.capture.lanes import bytes_in_order

_CHECKED_BYTES = 4 << 10  # of each tensor
_CHECKED_TENSORS = 8  # of each batch; of others the shape and dtype
_CHECKED_PARTS = 64  # of each batch, containers included: a checksum may cost microseconds, not more
_PIECE = 256  # a large tensor is read in pieces of so many bytes, spread from its beginning to its end
_IN_PART = 1
"""The lowest bit of a checksum: some of the batch was not looked at (a tensor on a device, an object)."""


def checksum_of(batch: object) -> int | None:
    """A checksum of 32 bits; None where nothing in the batch can be compared. Compare two by `differ`."""
    found: list[bytes] = []
    in_part, is_comparable, tensors = 0, False, 0
    todo = [batch]
    for _ in range(_CHECKED_PARTS):
        if not todo:
            break
        item = todo.pop()
        kind = type(item)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            tensors, is_comparable = tensors + 1, True
            found.append(_head(item.dtype, item.shape))  # type: ignore[attr-defined]
            raw = _tensor_bytes(item) if tensors <= _CHECKED_TENSORS else b""  # type: ignore[arg-type]
        elif (parts := _parts(item)) is not None:
            todo.extend(islice(parts, _CHECKED_PARTS))
            continue
        else:
            raw = _leaf_bytes(item)
            is_comparable |= raw is not None and item is not None
        if raw is None:
            in_part, raw = _IN_PART, kind.__qualname__.encode("utf-8", "surrogatepass")
        found.append(raw)
    return zlib.crc32(b"\0".join(found)) & ~_IN_PART | in_part if is_comparable else None


def differ(was: int, now: int) -> bool:
    """Whether two checksums show that the batches differ. A batch that lies on a device in one process and not in the
    other is not compared."""
    return was != now and not (was ^ now) & _IN_PART


def is_in_part(checksum: int) -> bool:
    """Whether some of the batch could not be looked at: tensors on a device, objects."""
    return bool(checksum & _IN_PART)


@lru_cache(maxsize=512)
def _head(dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{dtype}{tuple(shape)}".encode()


def _parts(item: object) -> Iterable[object] | None:
    """What a container holds: subclasses too (named tuples, tokenizers' encodings), by no code of theirs."""
    if isinstance(item, list):
        return list.__iter__(item)
    if isinstance(item, tuple):
        return tuple.__iter__(item)
    if isinstance(item, UserDict):
        item = item.data
    return dict.values(item) if isinstance(item, dict) else None


def _leaf_bytes(item: object) -> bytes | None:
    """Of anything but a tensor; None where it is of a kind that is not looked into."""
    kind = type(item)
    if kind is bytes:
        return item[:_CHECKED_BYTES]  # type: ignore[index, no-any-return]
    if kind in (int, float, str, bool, type(None)):
        return repr(item).encode("utf-8", "surrogatepass")[:_CHECKED_BYTES]
    if isinstance(item, np.ndarray) and kind is np.ndarray and not item.dtype.hasobject:
        step = max(-(-item.nbytes // _CHECKED_BYTES), 1)
        return f"{item.dtype.str}{item.shape}".encode() + item.flat[::step].tobytes()
    if isinstance(item, np.generic) and not item.dtype.hasobject:
        return item.dtype.str.encode() + item.tobytes()
    if isinstance(item, torch.Tensor):  # a subclass: nothing of its own code is run
        with torch._C.DisableTorchFunctionSubclass():
            return None if item.layout is not torch.strided else _head(item.dtype, item.shape)
    return None


def _tensor_bytes(item: torch.Tensor) -> bytes | None:
    """Something of the tensor's bytes. None where they cannot be read: reading from a device would make the training
    thread wait for it."""
    if not item.is_cpu or item.layout is not torch.strided or item.is_quantized:
        return None
    try:
        if item.is_contiguous() and not item.is_conj() and not item.is_neg():
            return _memory_bytes(item)
        return _memory_bytes(bytes_in_order(_thinned(item.detach())))
    except RuntimeError:  # a dtype that torch cannot copy, or no memory of its own: nothing to compare is no error
        return None


def _thinned(item: torch.Tensor) -> torch.Tensor:
    """Elements in equal steps, a few kilobytes: a batch that is no block of memory is never copied whole."""
    while item.nbytes > 4 * _CHECKED_BYTES:
        dim = max(range(item.dim()), key=item.size)
        step = min(max(item.nbytes // (2 * _CHECKED_BYTES), 2), item.size(dim))
        item = item[(slice(None),) * dim + (slice(None, None, step),)]
    return item


def _memory_bytes(item: torch.Tensor) -> bytes | None:
    nbytes = item.nbytes
    if not nbytes:
        return b""
    if item.untyped_storage().nbytes() < nbytes:
        return None  # its memory was given back
    memory = ffi.buffer(ffi.cast("char *", item.data_ptr()), nbytes)
    if nbytes <= _CHECKED_BYTES:
        return _crc(memory)
    pieces = _CHECKED_BYTES // _PIECE - 1
    step = (nbytes - _PIECE) // pieces
    spread = np.frombuffer(memory, np.uint8, pieces * step).reshape(pieces, step)[:, :_PIECE]
    return _crc(spread.tobytes() + memory[nbytes - _PIECE : nbytes])


def _crc(data: Any) -> bytes:
    return int(lib.lck_crc32c(ffi.from_buffer(data), len(data))).to_bytes(4, "little")
