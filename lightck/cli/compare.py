"""Differences between two checkpoints, A and B: large tensors one at a time, values of the small state by their path.

Equal means equal in bits: a NaN equals a NaN with the same bits, and -0.0 does not equal 0.0. Distances are computed in
double precision, which rounds integers beyond 2**53. Dtypes that torch cannot convert to numbers have no distance.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from lightck.cli.text import Facts
from lightck.pool.format.layout import Entry
from lightck.restore.contents import Contents, Source, load_tensor
from lightck.state import values
from lightck.state.device_transfers import bytes_in_order

_CHUNK = 1 << 20
"""The number of elements that are compared at a time."""


@dataclass(slots=True)
class Distance:
    """The distance between two tensors a and b of the same dtype and shape.

    elements: number of elements of each tensor. differing: number of elements whose bits differ. max_abs: largest
    |a - b|. max_rel: largest |a - b| / max(|a|, |b|). nan_a, nan_b: number of NaN elements in a and b, which are left
    out of ``max_abs`` and ``max_rel``. All fields but ``elements`` and ``differing`` are None for a dtype that torch
    cannot convert to numbers.
    """

    elements: int
    differing: int = 0
    max_abs: float | None = None
    max_rel: float | None = None
    nan_a: int | None = None
    nan_b: int | None = None


def distance(a: torch.Tensor, b: torch.Tensor) -> Distance:
    """Return the distance between two tensors of the same dtype and shape."""
    wide = _widest(a.dtype)
    found = Distance(a.numel()) if wide is None else Distance(a.numel(), 0, 0.0, 0.0, 0, 0)
    one, other = _flat_pair(a.detach(), b.detach())
    for start in range(0, found.elements, _CHUNK):
        _add(found, one[start : start + _CHUNK], other[start : start + _CHUNK], wide)
    return found


def _widest(dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype in which distances between tensors of ``dtype`` are computed. Return None if torch cannot
    convert ``dtype`` to numbers (float4, bits8)."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    try:
        torch.empty(1, dtype=dtype).to(wide)
    except NotImplementedError:
        return None
    return wide


def _flat_pair(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both tensors in one dimension, with corresponding elements at the same index."""
    if a.stride() == b.stride():
        return a.as_strided((a.numel(),), (1,)), b.as_strided((b.numel(),), (1,))
    return a.reshape(-1), b.reshape(-1)


def _add(found: Distance, a: torch.Tensor, b: torch.Tensor, wide: torch.dtype | None) -> None:
    """Add one chunk of both tensors to ``found``. ``wide``: as ``_widest`` returns it."""
    bits_a, bits_b = (bytes_in_order(t).view(t.numel(), -1) for t in (a, b))
    differs = (bits_a != bits_b).any(1)
    found.differing += int(differs.sum())
    if wide is not None:
        _add_numbers(found, a.to(wide), b.to(wide), differs)


def _add_numbers(found: Distance, x: torch.Tensor, y: torch.Tensor, differs: torch.Tensor) -> None:
    found.nan_a = (found.nan_a or 0) + int(x.isnan().sum())
    found.nan_b = (found.nan_b or 0) + int(y.isnan().sum())
    counted = differs & ~x.isnan() & ~y.isnan()
    if not counted.any():
        return
    x, y = x[counted], y[counted]
    apart = (x - y).abs()
    scale = torch.maximum(x.abs(), y.abs())
    relative = torch.where(apart == 0, 0.0, apart / scale).nan_to_num(nan=math.inf, posinf=math.inf)
    found.max_abs = max(found.max_abs or 0.0, float(apart.max()))
    found.max_rel = max(found.max_rel or 0.0, float(relative.max()))


# -- tensors ---------------------------------------------------------------------------------------------------------


def tensors(a: Source, b: Source, advance: Callable[[int], None]) -> Iterator[Facts]:
    """Yield one row for each tensor that differs between the checkpoints or exists in one of them only. ``advance`` is
    called with the number of bytes of each tensor that exists in both."""
    for name in dict.fromkeys((*a.entries, *b.entries)):
        one, other = a.entries.get(name), b.entries.get(name)
        if one is None or other is None:
            only = "A" if other is None else "B"
            yield {"tensor": name, "change": f"only in {only}", "distance": None}
            continue
        change = _metadata_change(one, other)
        if change is not None:
            yield {"tensor": name, "change": change, "distance": None}
        elif one.alias is None:
            found = distance(load_tensor(a, name), load_tensor(b, name))
            if found.differing:
                yield {"tensor": name, "change": "values", "distance": _plain(found)}
        advance(one.nbytes)


def _metadata_change(a: Entry, b: Entry) -> str | None:
    """Return the first difference in dtype, shape, tied name, strides or pieces as text; None if there is none."""
    for what in ("dtype", "shape", "alias", "stride", "logical_shape"):
        one, other = getattr(a, what), getattr(b, what)
        if one != other:
            label = {"alias": "tied to", "stride": "strides", "logical_shape": "logical shape"}.get(what, what)
            return f"{label} {_shown(one)} -> {_shown(other)}"
    if a.pieces != b.pieces:
        return "the two pools hold different parts of this tensor"
    return None


def _shown(value: object) -> str:
    return "nothing" if value is None else str(value)


def _plain(found: Distance) -> Facts:
    """Return the distance as a JSON object; an infinity, which JSON lacks, becomes a string."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(found).items()}


# -- small state -----------------------------------------------------------------------------------------------------


def small_state(a: Contents, b: Contents) -> Iterator[dict[str, str]]:
    """Yield one object for each value of the small state that differs: its path and the change. Large tensors are not
    compared: ``tensors`` does that."""
    one, other = _as_tree(a), _as_tree(b)
    for path, change in _walk(one, other, ""):
        yield {"path": path, "change": change}


def _as_tree(contents: Contents) -> Facts:
    has_several = len(contents.optimizers) > 1
    optimizers = {
        f"optimizer.{i}" if has_several else "optimizer": {
            "class": saved.class_name,
            "param_groups": [
                {**options, "params": names} for options, names in zip(saved.groups, saved.names, strict=True)
            ],
            "state": _unpacked(saved.packed_param_state),
            "rest": _unpacked(saved.packed_other_state),
        }
        for i, saved in enumerate(contents.optimizers)
    }
    return {
        "step": contents.step,
        "iteration": contents.iteration,
        **optimizers,
        "state": {name: _unpacked(packed) for name, packed in contents.state.items()},
        "extra_state": {name: _unpacked(packed) for name, packed in contents.extra.items()},
        "loaders": contents.loaders,
        "rng": {name: _Blob(value) for name, value in contents.rng.to_value().items()},
    }


class _Blob:
    """A value that is only compared and never shown: a generator's state."""

    def __init__(self, value: object) -> None:
        self.packed = values.pack(value, path="rng")


class _LargeTensor:
    """Placeholder for a large tensor, which ``tensors`` compares."""


def _unpacked(packed: bytes) -> object:
    return values.unpack(packed, tensor=lambda _: _LargeTensor())  # type: ignore[arg-type, return-value]


def _walk(a: Any, b: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield (path, change) for each difference between two nested values."""
    if type(a) is not type(b):
        yield path, f"{_short(a)} -> {_short(b)}"
    elif isinstance(a, Mapping):
        yield from _walk_map(a, b, path)
    elif isinstance(a, (list, tuple, deque)):
        yield from _walk_list(list(a), list(b), path)
    elif isinstance(a, torch.Tensor):
        yield from _walk_tensor(a, b, path)
    elif not _equal(a, b):
        yield path, "differs" if isinstance(a, (_Blob, bytes)) else f"{_short(a)} -> {_short(b)}"


def _walk_map(a: Mapping[object, object], b: Mapping[object, object], path: str) -> Iterator[tuple[str, str]]:
    for key in dict.fromkeys((*a, *b)):
        inner = f"{path}/{key}" if path else str(key)
        if key not in a or key not in b:
            yield inner, "only in A" if key in a else "only in B"
        else:
            yield from _walk(a[key], b[key], inner)


def _walk_list(a: list[object], b: list[object], path: str) -> Iterator[tuple[str, str]]:
    if len(a) != len(b):
        yield path, f"{len(a)} items -> {len(b)} items"
    for i, (one, other) in enumerate(zip(a, b, strict=False)):
        yield from _walk(one, other, f"{path}/{i}")


def _walk_tensor(a: torch.Tensor, b: torch.Tensor, path: str) -> Iterator[tuple[str, str]]:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        yield path, f"{_short(a)} -> {_short(b)}"
    elif (found := distance(a, b)).differing:
        share = f"{found.differing} of {found.elements} elements differ"
        if found.max_abs is None:
            yield path, share
        elif found.elements == 1:
            yield path, f"{a.item()!r} -> {b.item()!r}"
        else:
            yield path, f"{share}, by at most {found.max_abs:.3g}"


def _equal(a: object, b: Any) -> bool:
    if isinstance(a, _Blob):
        return bool(a.packed == b.packed)
    if isinstance(a, float) and not isinstance(a, np.generic):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, (np.ndarray, np.generic)):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    return isinstance(a, _LargeTensor) or bool(a == b)


def _short(value: object) -> str:
    if isinstance(value, _LargeTensor):
        return "a large tensor"
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    if isinstance(value, (Mapping, list, tuple, deque, set, frozenset, np.ndarray, bytes)):
        return f"{type(value).__name__} of {value.size if isinstance(value, np.ndarray) else len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
