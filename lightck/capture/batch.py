"""A checksum of the beginning of a batch: whether a replay gives the batch that was given before."""

from __future__ import annotations

import zlib
from collections import UserDict
from collections.abc import Iterable
from itertools import islice

import numpy as np
import torch

from lightck.capture.lanes import bytes_in_order

_CHECKED_BYTES = 4 << 10  # of each tensor of a batch
_CHECKED_PARTS = 16  # of each batch, containers included: a checksum may cost microseconds, not more


def checksum_of(batch: object) -> int | None:
    """CRC-32 of the first bytes of a batch; None where it holds something else than CPU tensors and plain data."""
    crc = 0
    todo = [batch]
    for _ in range(_CHECKED_PARTS):
        if not todo:
            break
        item = todo.pop()
        parts = _parts(item)
        if parts is not None:
            todo.extend(islice(parts, _CHECKED_PARTS))
            continue
        raw = _leaf_bytes(item)
        if raw is None:
            return None
        crc = zlib.crc32(raw, crc)
    return crc


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
    kind = type(item)
    if kind is bytes:
        return item[:_CHECKED_BYTES]  # type: ignore[index, no-any-return]
    if kind in (int, float, str, bool, type(None)):
        return repr(item).encode("utf-8", "surrogatepass")[:_CHECKED_BYTES]
    if kind is torch.Tensor:
        try:
            return _tensor_bytes(item)  # type: ignore[arg-type]
        except RuntimeError:  # a dtype that torch cannot copy: nothing to compare is no error
            return None
    if kind is np.ndarray and not item.dtype.hasobject:  # type: ignore[attr-defined]
        count = _CHECKED_BYTES // max(item.dtype.itemsize, 1)  # type: ignore[attr-defined]
        return item.flat[:count].tobytes()  # type: ignore[attr-defined, no-any-return]
    return None


def _tensor_bytes(item: torch.Tensor) -> bytes | None:
    # Reading from a device would make the training thread wait for it.
    if not item.is_cpu or item.layout is not torch.strided or item.is_quantized:
        return None
    dense = item.detach().resolve_conj().resolve_neg()
    while dense.dim() > 1 and not dense.is_contiguous() and dense.nbytes > _CHECKED_BYTES:
        dense = dense[0]  # never copy a whole batch in order to read its beginning
    flat = dense.reshape(-1)[: max(_CHECKED_BYTES // item.itemsize, 1)]
    return bytes_in_order(flat).numpy().tobytes()
