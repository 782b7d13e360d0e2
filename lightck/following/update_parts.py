"""Checksums of what an update uses, read right before it: gradients, the optimizer's options, the optimizer's state.

The same batch on the same weights gives bit-identical gradients. If a resumed training has other gradients, the loss
depends on something that is in no checkpoint: a second model, a number that a module keeps as an attribute, a generator
of the loss's own. Only a comparison of gradients finds such a difference. To read a few words of two gradients takes
microseconds, and waits for no device.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from operator import is_
from typing import TYPE_CHECKING

import torch

from lightck._native import ffi, lib
from lightck.following.first_batch import FirstInput
from lightck.state.inventory import OptimizerView
from lightck.state.local_tensors import local_of
from lightck.state.options_watch import OptionsWatch

if TYPE_CHECKING:
    from lightck._native import CData

GRADIENT, OPTIONS, OPTIMIZER_STATE, LAYERWISE_STATE = 8, 9, 10, 11
"""Kinds, in addition to those of ``first_batch.py``. Pools store these numbers. A layer-wise update has changed the
optimizer's state before ``step``, so its state is a kind of its own, and is compared with that of another layer-wise
update only."""
KINDS = (GRADIENT, OPTIONS, OPTIMIZER_STATE, LAYERWISE_STATE)
_WORDS = 32
"""Words of 8 bytes that are read of each tensor."""
_TENSORS_MAX = 6
"""The largest number of tensors that are read of the optimizer state of one parameter."""
_FLOATS = {
    torch.float32: 4,
    torch.float64: 8,
    torch.float16: 2,
    torch.bfloat16: 2,
    torch.complex64: 4,
    torch.complex128: 8,
}
"""dtype -> bytes of one floating-point number. (A complex element consists of two.)"""


class UpdateParts:
    """Reads the parts of updates of one session's optimizers. In its methods, ``index`` is the index of the optimizer
    whose ``step`` makes the update."""

    def __init__(
        self, views: Sequence[OptimizerView], is_layerwise: Callable[[object], bool] = lambda _: False
    ) -> None:
        """``views``: the session's list of optimizers, which may grow. ``is_layerwise``: whether an optimizer updates
        layers inside ``backward``."""
        self._views, self._is_layerwise = views, is_layerwise
        self._options: dict[int, _Options] = {}
        self._chosen: dict[int, tuple[int, ...] | None] = {}
        """Index of a view -> positions in ``view.params`` of the parameters whose gradients ``to_record`` reads; None
        if the gradients are on a device."""
        self._states: dict[int, _StateReads] = {}
        """Index of a view -> how ``to_record`` reads the state of one parameter."""

    def to_record(self, index: int) -> list[FirstInput]:
        """Return the few parts of this update that are recorded with a checkpoint. Runs at every step."""
        found: list[FirstInput] = []
        for view in self._views:
            if view.root != index:
                continue
            found.append(self._options_of(view))
            chosen = self._chosen.get(view.index, ())
            if chosen is not None and not (chosen and _have_gradients(view, chosen)):
                chosen = self._chosen[view.index] = _choose(view)
            for at in chosen or ():
                name, p = view.params[at]
                gradient = _gradient_checksum(p)
                if gradient is not None:
                    found.append(FirstInput(_name(view, name), GRADIENT, gradient))
            if chosen:  # only the last parameter: an update writes the state of all parameters, or of none
                name, p = view.params[chosen[-1]]
                reads = self._states.get(view.index)
                if reads is None:
                    reads = self._states[view.index] = _StateReads()
                found.append(FirstInput(_name(view, name), self._state_kind(view), reads.checksum(view, p)))
        return found

    def to_compare(self, index: int) -> Iterator[tuple[str, FirstInput]]:
        """Yield all parts of this update, each with a name for a message. They include the parts that ``to_record``
        returned in the interrupted run. Runs once per optimizer after a resume."""
        for view in self._views:
            if view.root != index:
                continue
            yield view.class_name, self._options_of(view)
            for name, p in view.params:
                gradient = _missing_gradient_checksum(view, p) if p.grad is None else _gradient_checksum(p)
                if gradient is not None:
                    yield name, FirstInput(_name(view, name), GRADIENT, gradient)
                yield name, FirstInput(_name(view, name), self._state_kind(view), _state_checksum(view, p))

    def _state_kind(self, view: OptimizerView) -> int:
        return LAYERWISE_STATE if self._is_layerwise(view.optimizer) else OPTIMIZER_STATE

    def _options_of(self, view: OptimizerView) -> FirstInput:
        known = self._options.get(view.index)
        if known is None:
            known = self._options[view.index] = _Options()
        return known.part(view)


class _Options:
    """The checksum of an optimizer's options, computed again only if an option may have changed."""

    def __init__(self) -> None:
        self._watch = OptionsWatch()
        self._part = FirstInput("", OPTIONS, 0)

    def part(self, view: OptimizerView) -> FirstInput:
        """Return the checksum as a part of an update."""
        groups = view.optimizer.param_groups
        if self._watch.may_have_changed(groups):
            values = [_plain(v) for group in groups for k, v in group.items() if k != "params"]
            checksum = zlib.crc32(repr(values).encode("utf-8", "surrogatepass")) & ~1
            self._part = FirstInput(_name(view, ""), OPTIONS, checksum)
        return self._part


def _plain(value: object) -> object:
    """Return the value of an option in a form that can be compared: a number or text, or None for a value that is on a
    device or of another type."""
    if isinstance(value, (bool, str, type(None))):
        return value
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:  # a whole number that is too large for a float
            return str(hash(value))
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.is_cpu and value.numel() == 1 and value.layout is torch.strided else None
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return None


def _have_gradients(view: OptimizerView, chosen: tuple[int, ...]) -> bool:
    """Whether all parameters at the positions ``chosen`` have a gradient."""
    params = view.params
    return all(at < len(params) and params[at][1].grad is not None for at in chosen)


def _choose(view: OptimizerView) -> tuple[int, ...] | None:
    """Return the positions of two parameters whose gradients are read: of those whose gradient can be read, the first
    and the last with at most one dimension, or, if all of them have more dimensions, the first and the last of all.

    Gradients of embeddings may have rows that stay zero for many steps; gradients of biases and scales have no such
    rows. The gradients of the first and the last layers depend on all layers. The result is empty if no gradient can be
    read now, and None if the gradients are on a device."""
    flat: list[int] = []
    others: list[int] = []
    for at, (_, p) in enumerate(view.params):
        if p.grad is None:
            continue
        if not p.grad.is_cpu:
            return None
        (flat if p.dim() <= 1 else others).append(at)
    for kind in (flat, others):
        found = next((at for at in kind if _gradient_checksum(view.params[at][1]) is not None), None)
        if found is not None:
            last = next(at for at in reversed(kind) if _gradient_checksum(view.params[at][1]) is not None)
            return (found, last) if found != last else (found,)
    return ()


def _missing_gradient_checksum(view: OptimizerView, p: torch.Tensor) -> int:
    """Return the checksum of a missing gradient: the checksum of zeros if the optimizer treats a missing gradient like
    zeros (plain SGD), else 0."""
    groups = view.optimizer.param_groups
    if type(view.optimizer) is torch.optim.SGD and not any(g["momentum"] or g["weight_decay"] for g in groups):
        return _checksum(torch.zeros_like(p.detach(), memory_format=torch.contiguous_format)) or 0
    return 0


def _name(view: OptimizerView, name: str) -> str:
    """Return the name of a part. ``name``: of the parameter; empty for the options."""
    return f"{view.index}/{name}"


def _gradient_checksum(p: torch.Tensor) -> int | None:
    """Return the checksum of a parameter's gradient; None if the parameter has no gradient, or the gradient cannot be
    read."""
    grad = p.grad
    return None if grad is None else _checksum(local_of(grad))


def _state_checksum(view: OptimizerView, p: torch.Tensor) -> int:
    """Return the checksum of the tensors in ``optimizer.state[p]``, independent of their order; 0 if it holds no
    tensors."""
    state = None if view.wraps else view.optimizer.state.get(p)
    if type(state) is not dict:
        return 0
    checksum = 0
    for value in islice(state.values(), _TENSORS_MAX):
        if isinstance(value, torch.Tensor):
            checksum += _checksum(local_of(value)) or 0
    return checksum & 0xFFFFFFFE


class _StateReads:
    """Returns what ``_state_checksum`` returns, in less time: tensors that have not moved since the last call are read
    without a new search for their memory."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        """The values of the parameter's state at the last call. Empty if one of them is no tensor, or cannot be
        read."""
        self._places: list[tuple[int, int]] = []
        """Address and bytes of each of ``_tensors``."""
        self._reads: list[tuple[CData, int, int, int]] = []
        """The arguments of ``lck_crc32c_spread`` for each of ``_tensors``."""

    def checksum(self, view: OptimizerView, p: torch.Tensor) -> int:
        state = None if view.wraps else view.optimizer.state.get(p)
        held = [] if type(state) is not dict else list(islice(state.values(), _TENSORS_MAX))
        tensors, known = [local_of(v) if isinstance(v, torch.Tensor) else v for v in held], self._tensors
        if not known or len(tensors) != len(known) or not all(map(is_, tensors, known)) or not self._are_in_place():
            self._tensors = []
            reads = [_read_of(tensor) if isinstance(tensor, torch.Tensor) else None for tensor in tensors]
            found = [read for read in reads if read is not None]
            if len(found) < len(tensors):
                return _state_checksum(view, p)
            self._tensors, self._reads = tensors, found
            self._places = list(map(_place_of, tensors))
        return sum(_crc(read) for read in self._reads) & 0xFFFFFFFE

    def _are_in_place(self) -> bool:
        return list(map(_place_of, self._tensors)) == self._places


def _place_of(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


def _checksum(tensor: torch.Tensor) -> int | None:
    """Return the checksum of a CPU tensor; None if the tensor cannot be read. The checksum is never 0, and its lowest
    bit is 0."""
    read = _read_of(tensor)
    return None if read is None else _crc(read)


def _crc(read: tuple[CData, int, int, int]) -> int:
    return lib.lck_crc32c_spread(*read) & 0xFFFFFFFE or 2


def _read_of(tensor: torch.Tensor) -> tuple[CData, int, int, int] | None:
    """Return the arguments with which ``lck_crc32c_spread`` reads a CPU tensor; None if the tensor cannot be read."""
    kind = type(tensor)
    if (kind is not torch.Tensor and kind is not torch.nn.Parameter) or not tensor.is_cpu:
        return None
    if tensor.layout is not torch.strided or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    nbytes = tensor.nbytes
    if tensor.untyped_storage().nbytes() < nbytes:
        return None  # its storage was resized to fewer bytes
    return ffi.cast("char *", tensor.data_ptr()), nbytes, _FLOATS.get(tensor.dtype, 0), _WORDS
