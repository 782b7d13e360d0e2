"""A layout table in the form in which lightck writes it, in a fifth of the time that reading it item by item takes.

The native library takes the table apart: numbers into arrays, texts into one string. What is then left to check is
checked for all entries together. ``read`` takes no table that ``layout_decode.by_item`` would refuse, and says nothing
of why it does not take one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lightck._native import ffi, lib
from lightck.pool.format.layout import ITEM_NBYTES, ROLES, Entry
from lightck.pool.format.structures import EXTENT_ALIGN

_ROW = np.dtype(
    [("nbytes", "<u8"), ("offset", "<u8"), ("layer", "<i8"), ("numel", "<u8"), ("ndim", "<u4"), ("aliased", "<u4")]
)
"""``lck_row``."""
_DIM_NBYTES = 8
"""Of a table, for each dimension of a shape or stride in it: in the tables of trainings it is twice that."""
_TEXTS = 5
"""Of an entry: name, role, dtype, device, alias."""


def read(table: bytes, low: int, high: int) -> tuple[Entry, ...] | None:
    """The entries, every extent in [low, high), each as ``layout_decode`` would give it; None where it is for that to
    say what they are. Whether names are unique, and aliases name anything, is not looked at."""
    parts = _taken_apart(table)
    if parts is None:
        return None
    rows, dims, texts = parts
    names, roles, dtypes, devices, aliases = (texts[i::_TEXTS] for i in range(_TEXTS))
    if not (set(roles) <= set(ROLES) and ITEM_NBYTES.keys() >= set(dtypes)):
        return None
    if not (_sizes_fit(rows, dtypes) and _in_place(rows, low, high)):
        return None
    shapes = _cut(rows["ndim"], dims)
    columns = zip(
        names,
        roles,
        dtypes,
        shapes[0::2],
        shapes[1::2],
        rows["nbytes"].tolist(),
        devices,
        rows["offset"].tolist(),
        rows["layer"].tolist(),
        (alias or None for alias in aliases),
        strict=True,
    )
    return tuple(map(Entry._make, columns))


def _taken_apart(table: bytes) -> tuple[Any, tuple[int, ...], list[str]] | None:
    """Rows, dimensions and texts as ``lck_table_read`` gives them."""
    rows = np.empty(len(table) // lib.LCK_ENTRY_MIN, _ROW)
    dims = np.empty(len(table) // _DIM_NBYTES, "<i8")
    texts = np.empty(len(table), "u1")
    count, nbytes = ffi.new("uint64_t *"), ffi.new("uint64_t *")
    status = lib.lck_table_read(
        ffi.from_buffer(table),
        len(table),
        ffi.cast("lck_row *", rows.ctypes.data),
        count,
        ffi.cast("int64_t *", dims.ctypes.data),
        len(dims),
        ffi.cast("char *", texts.ctypes.data),
        nbytes,
    )
    if status != lib.LCK_OK:
        return None
    rows = rows[: count[0]]
    found = _texts(texts[: nbytes[0]].tobytes())
    return None if found is None else (rows, tuple(dims[: 2 * int(rows["ndim"].sum())].tolist()), found)


def _texts(raw: bytes) -> list[str] | None:
    """Each ends in a zero byte. Decoded as a whole where a character is a byte: a single wider one would make it four
    times as large."""
    try:
        found = raw.decode().split("\0") if raw.isascii() else [text.decode() for text in raw.split(b"\0")]
    except UnicodeDecodeError:
        return None
    return found[:-1]


def _sizes_fit(rows: Any, dtypes: list[str]) -> bool:
    items = np.fromiter(map(ITEM_NBYTES.__getitem__, dtypes), "<u8", len(dtypes))
    return bool((rows["nbytes"] == np.where(rows["aliased"] != 0, 0, rows["numel"] * items)).all())


def _in_place(rows: Any, low: int, high: int) -> bool:
    """Whether extents are aligned, in bounds and apart."""
    used = rows[rows["nbytes"] > 0]
    used = used[np.argsort(used["offset"], kind="stable")]
    begins, ends = used["offset"], used["offset"] + used["nbytes"]
    if not len(used):
        return True
    apart = bool((begins[1:] >= ends[:-1]).all() and (begins % EXTENT_ALIGN == 0).all())
    return apart and int(begins[0]) >= low and int(ends[-1]) <= high


def _cut(ndim: Any, dims: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Of each entry its shape, then its stride."""
    ends = np.repeat(ndim, 2).cumsum().tolist()
    return [dims[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
