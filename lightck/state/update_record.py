"""What an update consumed, as a checkpoint stores it, and back. (docs/format.md, "What an update consumed".)

The bytes of the gradients are tensors of the pool. Everything else is one plain value of the small state, under the key
``update``: options, implementations, which parameters had a gradient, and in which order the elements of each
gradient lay in memory.
The value is untrusted when it is read: every part is checked before it is used, and a gradient is read only when the
replay of its parameter asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_
from typing import Protocol, TypeVar

import torch

from lightck.errors import CorruptPoolError
from lightck.pool.format.layout import GRADIENT_PREFIX, INT_MAX, NDIM_MAX, is_dense, is_name
from lightck.pool.format.structures import NUMBER_MAX
from lightck.state import values
from lightck.state.consumed_update import (
    ConsumedGroup,
    ConsumedStep,
    ConsumedUpdate,
    Gradient,
    Implementation,
    SlicedGradients,
    SparseGradient,
)
from lightck.state.indexed_gradient import IndexedGradient, dense_gradient, problem_of
from lightck.state.options_watch import OptionsWatch
from lightck.state.small_state import CachedPacker, pack_plain
from lightck.state.values import typed

UPDATE_KEY = "update"
"""Key of the small state under which the value of an update lies."""
BASE_EVERY_KEY = "base_every"
"""Key of the small state that says in how many steps each unit is written once. No recovery reads it."""
RECORD_VERSION, INDEXED_VERSION = 1, 2
"""Versions of the value: without, and with gradients in their indexed form."""
THREADS_MAX = 4096
"""Maximum number of intra-op threads of an update. A replay starts as many."""
OPTIMIZERS_MAX = 1 << 20
_SPARSE, _INDEXED = "sparse", "indexed"

Read = Callable[[str], torch.Tensor]
"""Reads a tensor of the pool by the name of its entry, with its elements in row-major order. Raises ``LookupError`` if
the record holds no such tensor."""


class ReadSlice(Protocol):
    """Reads slices of the tensors of the pool, by the names of their entries."""

    def layout(self, entry_name: str) -> torch.Tensor | None:
        """Return a tensor on the meta device with the shape, the strides and the dtype of an entry; None: only the
        whole tensor can be read, or there is none."""

    def read(self, entry_name: str, start: int, into: torch.Tensor) -> None:
        """As ``SlicedGradients.read_slice``."""


ShapeOf = Callable[[str], tuple[int, ...] | None]
"""Returns the shape that a parameter has in the pool; None if it is not known. A gradient in its indexed form does not
prove its own shape, and is read only if it has this one."""


def no_shape(_parameter: str) -> tuple[int, ...] | None:
    """No shape is known."""
    return None


class CapturedGradient(Protocol):
    """A gradient, as it is captured. The attributes are those of ``hooks.captured_update.HeldGradient``."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def sparse_shape(self) -> tuple[int, ...] | None: ...
    @property
    def is_coalesced(self) -> bool: ...
    @property
    def n_used(self) -> int | None: ...


G = TypeVar("G", bound=CapturedGradient)
G_co = TypeVar("G_co", bound=CapturedGradient, covariant=True)


class CapturedStep(Protocol[G_co]):
    """One step of one optimizer; the attributes are those of ``hooks.captured_update.CapturedStep``."""

    @property
    def optimizer(self) -> int: ...
    @property
    def class_name(self) -> str: ...
    @property
    def groups(self) -> Sequence[ConsumedGroup]: ...
    @property
    def gradients(self) -> Mapping[str, G_co | None]: ...
    @property
    def grad_scale(self) -> torch.Tensor | None: ...
    @property
    def found_inf(self) -> torch.Tensor | None: ...


class CapturedUpdate(Protocol[G_co]):
    """One update; the attributes are those of ``hooks.captured_update.CapturedUpdate``."""

    @property
    def step(self) -> int: ...
    @property
    def optimizer_steps(self) -> Sequence[CapturedStep[G_co]]: ...
    @property
    def threads(self) -> int: ...
    @property
    def reasons(self) -> Sequence[str]: ...


# -- what is stored ----------------------------------------------------------------------------------------------------


def gradient_names(parameter: str, *, has_indices: bool) -> tuple[str, ...]:
    """Return the names of the pool's entries for the gradient of a parameter: one for a dense gradient; for a sparse
    one, or a dense one in its indexed form (``has_indices``), those of its indices and its values."""
    name = GRADIENT_PREFIX + parameter
    return (f"{name}/indices", f"{name}/values") if has_indices else (name,)


def names_of(gradient: CapturedGradient) -> tuple[str, ...]:
    """Return the names of the pool's entries for a gradient."""
    return gradient_names(gradient.name, has_indices=gradient.sparse_shape is not None or gradient.n_used is not None)


def gradient_tensors(update: CapturedUpdate[G]) -> list[tuple[str, G, int]]:
    """Return what the pool stores of the gradients of an update: for each tensor the name of its entry, the gradient,
    and the number of the tensor in ``HeldGradient.tensors``. The elements of each are stored in row-major order."""
    return [
        (entry_name, gradient, number)
        for step in update.optimizer_steps
        for gradient in step.gradients.values()
        if gradient is not None
        for number, entry_name in enumerate(names_of(gradient))
    ]


def unrecordable_reason(update: CapturedUpdate[CapturedGradient]) -> str:
    """Return a sentence that says why an update cannot be stored, so that it leaves a hole; "" if it can be stored.
    (An option that cannot be stored raises ``StateValueError`` in ``update_value``, as it does in every checkpoint.)"""
    if update.reasons:
        return update.reasons[0]
    if not 1 <= update.threads <= THREADS_MAX:
        return f"The update was made by {update.threads} intra-op threads, and at most {THREADS_MAX} can be recorded."
    seen: set[str] = set()
    for step in update.optimizer_steps:
        for name, gradient in step.gradients.items():
            if name in seen:
                return f"The parameter {name!r} was updated twice in one step, and a record holds one gradient of it."
            seen.add(name)
            if gradient is not None and gradient.sparse_shape is None and not has_dense_memory(gradient):
                return (
                    f"The gradient of {name!r} has gaps or overlaps in its memory (strides {list(gradient.strides)}), "
                    "which cannot be recorded."
                )
        for group in step.groups:
            for key, option in group.options.items():
                if not isinstance(option, torch.Tensor) and _has_special_tensor(option):
                    return (
                        f"The option {key!r} of {step.class_name} holds tensors on a device, or with requires_grad, "
                        "inside a list, tuple or dict, which cannot be recorded."
                    )
    names = [name for name, _, _ in gradient_tensors(update)]
    if len(set(names)) != len(names):
        return "Two gradients would be stored under one name, because a parameter is named like a part of another one."
    wrong = next((name for name in names if not is_name(name)), None)
    return "" if wrong is None else f"The name {wrong[:60]!r}... of a gradient is too long to be stored."


def has_dense_memory(gradient: CapturedGradient) -> bool:
    same_length = len(gradient.shape) == len(gradient.strides) <= NDIM_MAX
    return same_length and is_dense(gradient.shape, gradient.strides)


def _has_special_tensor(option: object) -> bool:
    if isinstance(option, torch.Tensor):
        return option.requires_grad or not option.is_cpu
    if isinstance(option, dict):
        return any(map(_has_special_tensor, option.values()))
    return isinstance(option, (list, tuple)) and any(map(_has_special_tensor, option))


def update_value(update: CapturedUpdate[CapturedGradient]) -> dict[str, object]:
    """Return the value of the small state for one update that can be stored (``unrecordable_reason``). Raises
    ``StateValueError`` for an option that cannot be stored."""
    return UpdatePacker().value(update)


class UpdatePacker:
    """Makes the values of the updates of one training, and packs again only what changed since the update before:
    names, options and strides seldom do."""

    def __init__(self) -> None:
        self._steps: dict[int, _PackedStep] = {}
        """Number of an optimizer -> its last step."""

    def value(self, update: CapturedUpdate[CapturedGradient]) -> dict[str, object]:
        """Return the same value as ``update_value``."""
        steps = [self._steps.setdefault(step.optimizer, _PackedStep()).value(step) for step in update.optimizer_steps]
        has_indexed = any(
            one is not None and one.n_used is not None for s in update.optimizer_steps for one in s.gradients.values()
        )
        version = INDEXED_VERSION if has_indexed else RECORD_VERSION
        return {"version": version, "step": update.step, "threads": update.threads, "steps": steps}


class _PackedStep:
    """The packed parts of the last step of one optimizer."""

    def __init__(self) -> None:
        self._names: list[tuple[str, ...]] = []
        self._packed_names = b""
        self._options_watch, self._packed_options = OptionsWatch(), b""
        self._implementations = CachedPacker()
        self._gradients: list[object] | None = None
        self._packed_gradients = b""

    def value(self, step: CapturedStep[CapturedGradient]) -> dict[str, object]:
        names = [group.parameters for group in step.groups]
        if len(names) != len(self._names) or not all(map(is_, names, self._names)):
            self._packed_names = pack_plain([list(one) for one in names])
            self._names = names
        if self._options_watch.may_have_changed([group.options for group in step.groups]):
            path = f"param_groups of {step.class_name}"
            self._packed_options = values.pack([_options_value(group) for group in step.groups], path=path)
        implementations = [
            [group.implementation.value, {name: one.value for name, one in group.other_implementations.items()}]
            for group in step.groups
        ]
        gradients = [_gradient_value(step.gradients[name]) for group in names for name in group]
        if gradients != self._gradients:
            self._gradients = gradients
            self._packed_gradients = pack_plain([list(one) if type(one) is tuple else one for one in gradients])
        return {
            "optimizer": step.optimizer,
            "class": step.class_name,
            "names": self._packed_names,
            "options": self._packed_options,
            "implementations": self._implementations.pack(implementations, path="implementations"),
            "gradients": self._packed_gradients,
            "grad_scale": _tensor_value(step.grad_scale),
            "found_inf": _tensor_value(step.found_inf),
        }


def _options_value(group: ConsumedGroup) -> dict[str, object]:
    """Return the options of a group, and what ``values.pack`` does not keep of its tensors."""
    kept = {
        key: [option.device.type, option.requires_grad]
        for key, option in group.options.items()
        if isinstance(option, torch.Tensor)
    }
    options = {key: option.detach() if key in kept else option for key, option in group.options.items()}  # type: ignore[attr-defined]
    return {"options": options, "tensors": kept}


def _gradient_value(gradient: CapturedGradient | None) -> object:
    if gradient is None:
        return None
    if gradient.sparse_shape is not None:
        return [_SPARSE, list(gradient.sparse_shape), gradient.is_coalesced]
    if gradient.n_used is not None:
        return [_INDEXED, list(gradient.shape), list(gradient.strides), gradient.n_used]
    return gradient.strides


def _tensor_value(tensor: torch.Tensor | None) -> list[object] | None:
    return None if tensor is None else [tensor.detach(), tensor.device.type]


# -- what is read ------------------------------------------------------------------------------------------------------


def consumed_update(
    value: object, read: Read, shape_of: ShapeOf = no_shape, slices: ReadSlice | None = None
) -> ConsumedUpdate:
    """Return what an update consumed, from its value in the small state. ``read``: called for the tensors of a gradient
    each time that the replay asks for it, perhaps in several threads. ``shape_of``: see ``ShapeOf``. ``slices``: called
    in the same way; None: slices cannot be read.

    Raises ``CorruptPoolError`` if the value is malformed. A gradient that does not fit its description raises it when
    it is read."""
    try:
        raw = typed(value, dict)
        if typed(raw["version"], int) not in (RECORD_VERSION, INDEXED_VERSION):
            raise CorruptPoolError(
                f"what its update consumed was saved in format {raw['version']}, and this lightck reads "
                f"{RECORD_VERSION} and {INDEXED_VERSION}: read it with the release that saved it"
            )
        steps = tuple(_step(one, read, shape_of, slices) for one in typed(raw["steps"], list))
        update = ConsumedUpdate(_number(raw["step"], 0, NUMBER_MAX), steps, _number(raw["threads"], 1, THREADS_MAX + 1))
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, RuntimeError, OverflowError) as err:
        raise _malformed(f"{type(err).__name__}: {err}") from err
    names = [name for step in update.optimizer_steps for name in step.gradients]
    if len(set(names)) != len(names):
        raise _malformed("a parameter is updated twice")
    return update


class StoredGradients(SlicedGradients):
    """Name of a parameter -> its gradient, which is read from the pool each time that it is asked for."""

    def __init__(
        self,
        described: Mapping[str, list[object] | None],
        read: Read,
        shape_of: ShapeOf,
        slices: ReadSlice | None = None,
    ) -> None:
        """``described``: name -> what the value says of the gradient."""
        self._described, self._read, self._shape_of, self._slices = described, read, shape_of, slices

    def __getitem__(self, name: str) -> Gradient:
        found = self._described[name]
        if found is None:
            return None
        if _is_indexed(found):
            return self._indexed(name, found)
        return self._sparse(name, found) if _is_sparse(found) else self._dense(name, found)

    def __contains__(self, name: object) -> bool:
        return name in self._described  # that of Mapping would read the gradient

    def __iter__(self) -> Iterator[str]:
        return iter(self._described)

    def __len__(self) -> int:
        return len(self._described)

    def is_absent(self, name: str) -> bool:
        return self._described[name] is None

    def layout(self, name: str) -> torch.Tensor | None:
        found = self._described[name]
        if self._slices is None or found is None or _is_indexed(found) or _is_sparse(found):
            return None
        (entry_name,) = gradient_names(name, has_indices=False)
        layout = self._slices.layout(entry_name)
        # If the strides are equal, the row-major order of the pool is the order of the gradient's own memory.
        return layout if layout is not None and list(layout.stride()) == found else None

    def read_slice(self, name: str, start: int, into: torch.Tensor) -> None:
        assert self._slices is not None, "slices are read only of a gradient for which layout() returned a tensor"
        (entry_name,) = gradient_names(name, has_indices=False)
        self._slices.read(entry_name, start, into)

    def _dense(self, name: str, strides: list[object]) -> torch.Tensor:
        tensor = self._tensor(*gradient_names(name, has_indices=False))
        checked = tuple(_number(one, 0, INT_MAX) for one in strides)
        if len(checked) != tensor.dim() or not is_dense(tensor.shape, checked):
            raise _malformed(f"the strides of the gradient of {name!r} do not fit its shape")
        if tensor.stride() == checked:
            return tensor
        return torch.empty_strided(tensor.shape, checked, dtype=tensor.dtype, device=tensor.device).copy_(tensor)

    def _sparse(self, name: str, found: list[object]) -> SparseGradient:
        _, shape, is_coalesced = found
        size = tuple(_number(one, 0, INT_MAX) for one in typed(shape, list))
        indices, held = (self._tensor(one) for one in gradient_names(name, has_indices=True))
        fits = indices.dtype == torch.int64 and indices.dim() == 2 and indices.shape[0] <= len(size)
        if not fits or tuple(held.shape) != (indices.shape[1], *size[indices.shape[0] :]):
            raise _malformed(f"the parts of the sparse gradient of {name!r} do not fit each other")
        return SparseGradient(indices, held, size, typed(is_coalesced, bool))

    def _indexed(self, name: str, found: list[object]) -> torch.Tensor:
        _, raw_shape, raw_strides, n_used = found
        shape, strides = (
            tuple(_number(one, 0, INT_MAX) for one in typed(part, list)) for part in (raw_shape, raw_strides)
        )
        if shape != self._shape_of(name) or len(shape) != len(strides) or not is_dense(shape, strides):
            raise _malformed(f"shape and strides of the gradient of {name!r} do not fit its parameter")
        indices, held = (self._tensor(one) for one in gradient_names(name, has_indices=True))
        form = IndexedGradient(indices, held, typed(n_used, int))
        problem = problem_of(form, math.prod(shape))
        if problem is not None:
            raise _malformed(f"the gradient of {name!r} is damaged: {problem}")
        return dense_gradient(form, shape, strides)

    def _tensor(self, entry_name: str) -> torch.Tensor:
        try:
            return self._read(entry_name)
        except LookupError:
            raise CorruptPoolError(
                f"its gradient record does not hold {entry_name!r}, which its update consumed"
            ) from None


def _step(value: object, read: Read, shape_of: ShapeOf, slices: ReadSlice | None) -> ConsumedStep:
    raw = typed(value, dict)
    names = [[typed(name, str) for name in typed(group, list)] for group in _unpacked_list(raw["names"])]
    options = [_options(group) for group in _unpacked_list(raw["options"])]
    implementations = [_implementations(group) for group in _unpacked_list(raw["implementations"])]
    described = [_described(one) for one in _unpacked_list(raw["gradients"])]
    all_names = [name for group in names for name in group]
    if len(set(all_names)) != len(all_names) or len(described) != len(all_names):
        raise _malformed("its gradients are not those of the parameters of its groups")
    groups = tuple(
        ConsumedGroup(tuple(parameters), of_group, chosen, exceptions)
        for parameters, of_group, (chosen, exceptions) in zip(names, options, implementations, strict=True)
    )
    return ConsumedStep(
        _number(raw["optimizer"], 0, OPTIMIZERS_MAX),
        typed(raw["class"], str),
        groups,
        StoredGradients(dict(zip(all_names, described, strict=True)), read, shape_of, slices),
        _tensor(raw["grad_scale"]),
        _tensor(raw["found_inf"]),
    )


def _unpacked_list(value: object) -> list[object]:
    return typed(values.unpack(typed(value, bytes)), list)


def _options(value: object) -> dict[str, object]:
    raw = typed(value, dict)
    options = {typed(key, str): option for key, option in typed(raw["options"], dict).items()}
    for key, kept in typed(raw["tensors"], dict).items():
        device, requires_grad = typed(kept, list)
        tensor = _placed(typed(options[key], torch.Tensor), typed(device, str))
        options[key] = tensor.requires_grad_(typed(requires_grad, bool))
    return options


def _implementations(value: object) -> tuple[Implementation, dict[str, Implementation]]:
    chosen, exceptions = typed(value, list)
    found = {typed(name, str): Implementation(one) for name, one in typed(exceptions, dict).items()}
    return Implementation(chosen), found


def _described(value: object) -> list[object] | None:
    """Return what a value says of a gradient. Its numbers are checked when the gradient is read."""
    found = None if value is None else typed(value, list)
    lengths = {_SPARSE: 3, _INDEXED: 4}
    expected = lengths.get(found[0]) if found and isinstance(found[0], str) else None
    if found is not None and (len(found) > NDIM_MAX or expected not in (None, len(found))):
        raise _malformed("a gradient is described wrongly")
    return found


def _is_sparse(described: list[object]) -> bool:
    return described[:1] == [_SPARSE]


def _is_indexed(described: list[object]) -> bool:
    return described[:1] == [_INDEXED]


def _tensor(value: object) -> torch.Tensor | None:
    if value is None:
        return None
    tensor, device = typed(value, list)
    if typed(tensor, torch.Tensor).numel() != 1:
        raise _malformed("grad_scale or found_inf has not one element")
    return _placed(tensor, typed(device, str))


def _placed(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Return a tensor on the kind of device on which the update had it, if this machine has one."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return tensor.to(found) if found is not None and found.type == device else tensor


def _number(value: object, low: int, end: int) -> int:
    number = typed(value, int)
    if not low <= number < end:
        raise _malformed(f"the number {number} is out of range")
    return number


def _malformed(reason: str) -> CorruptPoolError:
    return CorruptPoolError(f"what its update consumed is malformed ({reason})")
