"""The layout table: which extents a slot has, laid out once, found by its hash.

An ``Entry`` describes one tensor's bytes; ``place`` gives entries their offsets; ``encode`` turns the table into bytes,
and ``layout_decode`` back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgpack

from lightck.pool.format.structures import EXTENT_ALIGN, LARGE_EXTENT, LARGE_EXTENT_ALIGN, align_up

ENTRIES_MAX = 1 << 20
NDIM_MAX = 64
INT_MAX = 1 << 62
NAME_NBYTES_MAX = 4096
ROLES = ("param", "buffer", "optimizer", "state")

# Bytes per element of every dtype name that a table may hold. The pool knows names and sizes, not torch.
ITEM_NBYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "bits1x8": 1,
    "bits2x4": 1,
    "bits4x2": 1,
    "bits8": 1,
    "bits16": 2,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}


class Entry(NamedTuple):
    """One extent: the bytes of one tensor. docs/format.md, "Layout table", explains each field."""

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    nbytes: int
    device: str = "cpu"
    offset: int = 0
    layer: int = -1
    alias: str | None = None

    def same_bytes_as(self, other: Entry) -> bool:
        """Whether a tensor of ``other``'s kind fits this extent as it is."""
        return (self.dtype, self.shape, self.stride, self.alias, self.device) == (
            other.dtype,
            other.shape,
            other.stride,
            other.alias,
            other.device,
        )

    def to_map(self) -> dict[str, Any]:
        plain = self._asdict() | {"shape": list(self.shape), "stride": list(self.stride)}
        return plain | {
            "global_shape": list(self.shape),
            "placements": None,
            "mesh": None,
            "offsets": [0] * len(self.shape),
        }


def place(entries: Iterable[Entry], start: int) -> tuple[list[Entry], int]:
    """Give each entry its offset, in order, from ``start``. Returns them and the first free offset after them."""
    placed, at = [], start
    for entry in entries:
        at = align_up(at, LARGE_EXTENT_ALIGN if entry.nbytes >= LARGE_EXTENT else EXTENT_ALIGN)
        placed.append(entry._replace(offset=at))
        at += entry.nbytes
    return placed, align_up(at, LARGE_EXTENT_ALIGN)


def blocks_of(nbytes: int, block: int) -> int:
    return -(-nbytes // block)


def encode(entries: Sequence[Entry]) -> bytes:
    return bytes(msgpack.packb({"entries": [e.to_map() for e in entries]}, use_bin_type=True))


def encode_extras(entries: Sequence[Entry]) -> bytes:
    return bytes(msgpack.packb([e.to_map() for e in entries], use_bin_type=True)) if entries else b""


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill one run of memory without gaps or overlaps, in some order of dimensions."""
    if is_contiguous(shape, stride) or 0 in shape:
        return True
    expected = 1
    for step, size in sorted((st, sz) for st, sz in zip(stride, shape, strict=True) if sz != 1):
        if step != expected:
            return False
        expected *= size
    return True


def is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """The same with the last dimension running fastest, of at least one element."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


def is_name(text: str) -> bool:
    """Whether an entry may have this name."""
    fits = len(text) <= NAME_NBYTES_MAX // 4 or len(text.encode("utf-8", "replace")) <= NAME_NBYTES_MAX
    return fits and "\0" not in text
