"""What an update is made of, read right before it: gradients, the optimizer's options, the optimizer's state.

The same batch on the same weights gives the same gradients, to the bit. Where a resumed training gets others, something
that the loss depends on is in no checkpoint: a second model, a number that a module keeps as an attribute, a generator
of the loss's own. Nothing but this shows it. A few words of two gradients cost microseconds; no device is waited for.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from operator import is_
from typing import Any

import torch

from lightck._native import ffi, lib
from lightck.capture.following import First
from lightck.capture.inventory import OptimizerView

GRADIENT, OPTIONS, OPTIMIZER_STATE = 8, 9, 10
"""Kinds, beside those of ``following.py``. The numbers are in the format."""
KINDS = (GRADIENT, OPTIONS, OPTIMIZER_STATE)
_WORDS = 32  # of each tensor
_TENSORS_MAX = 6  # of the state of one parameter
_FLOATS = {torch.float32: 4, torch.float64: 8, torch.float16: 2, torch.bfloat16: 2, torch.complex64: 4,
           torch.complex128: 8}  # fmt: skip
_UNCHANGING = frozenset((int, float, bool, str, type(None)))


class UpdateParts:
    """Of one session's optimizers. An update is known by the number of the optimizer whose ``step`` it is."""

    def __init__(self, views: Sequence[OptimizerView]) -> None:
        """``views``: the session's own list, which may grow."""
        self._views = views
        self._options: dict[int, _Options] = {}

    def some(self, index: int) -> list[First]:
        """A few parts of this update: what is recorded. This runs at each step."""
        found: list[First] = []
        for view in self._views:
            if view.root != index:
                continue
            found.append(First(_name(view, ""), OPTIONS, self._options_of(view).checksum()))
            last = _first_with_gradient(reversed(view.params))
            first = _first_with_gradient(view.params)
            if last is not None:
                _add(found, view, *last, with_state=True)
            if first is not None and last is not None and first[1] is not last[1]:
                _add(found, view, *first, with_state=False)
        return found

    def all(self, index: int) -> Iterator[tuple[str, First]]:
        """Every part with what it is called in a message: whatever was recorded is among them. Once in a resume."""
        for view in self._views:
            if view.root != index:
                continue
            yield view.class_name, First(_name(view, ""), OPTIONS, self._options_of(view).checksum())
            for name, p in view.params:
                gradient = 0 if p.grad is None else _gradient(p)
                if gradient is not None:
                    yield name, First(_name(view, name), GRADIENT, gradient)
                yield name, First(_name(view, name), OPTIMIZER_STATE, _state(view, p))

    def _options_of(self, view: OptimizerView) -> _Options:
        known = self._options.get(view.index)
        if known is None or known.view is not view:
            known = self._options[view.index] = _Options(view)
        return known


class _Options:
    """Options of an optimizer, and their checksum, which is made anew where one is another object than before."""

    def __init__(self, view: OptimizerView) -> None:
        self.view = view
        self._values: list[Any] = []
        self._checksum: int | None = None

    def checksum(self) -> int:
        values = [v for group in self.view.optimizer.param_groups for k, v in group.items() if k != "params"]
        known = self._checksum
        if known is not None and len(values) == len(self._values) and all(map(is_, values, self._values)):
            return known
        found = zlib.crc32(repr([_plain(value) for value in values]).encode("utf-8", "surrogatepass")) & ~1
        self._values = values
        self._checksum = found if all(map(_is_unchanging, values)) else None
        return found


def _is_unchanging(value: Any) -> bool:
    if type(value) is tuple:
        return all(type(each) in _UNCHANGING for each in value)
    return type(value) in _UNCHANGING


def _plain(value: Any) -> Any:
    """What is compared of an option: its number or text, and nothing of what lies on a device."""
    if isinstance(value, (bool, str, type(None))):
        return value
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.is_cpu and value.numel() == 1 and value.layout is torch.strided else None
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return None


def _first_with_gradient(params: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, torch.Tensor] | None:
    return next((each for each in params if each[1].grad is not None), None)


def _add(found: list[First], view: OptimizerView, name: str, p: torch.Tensor, *, with_state: bool) -> None:
    full, checksum = _name(view, name), _gradient(p)
    if checksum is not None:
        found.append(First(full, GRADIENT, checksum))
    if with_state:
        found.append(First(full, OPTIMIZER_STATE, _state(view, p)))


def _name(view: OptimizerView, name: str) -> str:
    return f"{view.index}/{name}"


def _gradient(p: torch.Tensor) -> int | None:
    """None where there is none, or none that can be read."""
    grad = p.grad
    return None if grad is None else _checksum(grad)


def _state(view: OptimizerView, p: torch.Tensor) -> int:
    """Of the tensors in ``optimizer.state[p]``, in whatever order they came; 0 for none."""
    state = None if view.wraps else view.optimizer.state.get(p)
    if type(state) is not dict:
        return 0
    checksum = 0
    for value in islice(state.values(), _TENSORS_MAX):
        if isinstance(value, torch.Tensor):
            checksum += _checksum(value) or 0
    return checksum & 0xFFFFFFFE


def _checksum(tensor: torch.Tensor) -> int | None:
    """Never 0, and its lowest bit is 0: all was looked at that is ever looked at."""
    kind = type(tensor)
    if (kind is not torch.Tensor and kind is not torch.nn.Parameter) or not tensor.is_cpu:
        return None
    if tensor.layout is not torch.strided or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    nbytes = tensor.nbytes
    if tensor.untyped_storage().nbytes() < nbytes:
        return None  # its memory was given back
    data = ffi.cast("char *", tensor.data_ptr())
    crc: int = lib.lck_crc32c_spread(data, nbytes, _FLOATS.get(tensor.dtype, 0), _WORDS)
    return crc & 0xFFFFFFFE or 2
