"""Write a safetensors file tensor by tensor.

The safetensors library needs all tensors in memory before it writes the first one. This module reads one tensor at a
time from the pool, in the order of the file. tests/export/test_export.py reads the files with the safetensors library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO

import torch

from lightck.errors import StateValueError
from lightck.pool.format.layout import ITEM_NBYTES
from lightck.state.device_transfers import bytes_in_order

DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
"""torch's name of a dtype -> its name in safetensors."""
_CHUNK_NBYTES = 16 << 20
"""The largest number of bytes in one call of ``write``."""


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of the file: its header fields, and a function that reads its values."""

    dtype: str
    """Torch's dtype name without ``torch.``."""
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_NBYTES[self.dtype]


def check_dtype(name: str, dtype: str, cure: str) -> None:
    """Raise ``StateValueError`` for a dtype that safetensors lacks. ``cure``: the advice at the end of the message."""
    if dtype not in DTYPES:
        raise StateValueError(
            f"The tensor {name!r} has dtype {dtype}, which safetensors does not have. Nothing was written. {cure}"
        )


def write_tensors(file: IO[bytes], tensors: Mapping[str, PlannedTensor], metadata: Mapping[str, str]) -> None:
    """Write header and data. Tensors are ordered by the size of their items, 8 bytes first, so that each tensor is
    aligned to its item size."""
    order = sorted(tensors, key=lambda name: (-ITEM_NBYTES[tensors[name].dtype], name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name in order:
        planned = tensors[name]
        end = at + planned.nbytes
        header[name] = {"dtype": DTYPES[planned.dtype], "shape": list(planned.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        _write_bytes(file, tensors[name])


def _write_bytes(file: IO[bytes], planned: PlannedTensor) -> None:
    if not planned.nbytes:
        return
    data = bytes_in_order(planned.read().to("cpu")).numpy().data
    assert len(data) == planned.nbytes, "the header is written with this size"
    for start in range(0, len(data), _CHUNK_NBYTES):
        file.write(data[start : start + _CHUNK_NBYTES])
