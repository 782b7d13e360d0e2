"""One update of one unit (a parameter with its optimizer state), made again from what the update consumed.

The real optimizer's class makes the step (``PartialOptimizer``), on an alias of the parameter that has the recorded
gradient. The parameter's own ``.grad`` is not touched. The bits are those of the training if the implementation is the
recorded one and, unless ``is_independent_of_threads``, the number of intra-op threads too (``intra_op_threads``).

A large float32 unit is updated in slices that stay in the processor's cache, where that gives the same bits and is
faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lightck.errors import ReplayError
from lightck.state.consumed_update import ConsumedGroup, ConsumedStep, Gradient, Implementation, SparseGradient
from lightck.state.device_transfers import is_dense_tensor
from lightck.state.implementation_choice import writes_gradients
from lightck.state.partial_optimizer import PartialOptimizer
from lightck.state.torch_classes import ELEMENT_WISE, irreproducible_reason

SLICE_NUMEL = 1 << 18
"""Elements of a slice: of float32, 1 MiB for each of parameter, gradient, and each tensor of state. (Measured on one
processor, in nanoseconds per element and step, for whole tensors, slices of 64 k and slices of 256 k elements: Adam
4.3, 3.2, 2.7; NAdam 6.4, 3.5, 2.8; Adagrad 3.5, 2.2, 1.6. A slice costs some 50 us more, and holds Python's lock
meanwhile, so smaller ones are slower in parallel. Fused code, and SGD, which makes almost no temporary tensors, are not
faster in slices.)"""
_WIDE = (torch.float32, torch.float64)
"""Dtypes whose bits depend neither on the number of threads nor on slices."""
_SLICEABLE = (Implementation.FOR_LOOP, Implementation.FOREACH)


@dataclass(frozen=True, slots=True)
class Unit:
    """A parameter with its optimizer state, which updates change in place.

    name: of the parameter. parameter: a dense tensor. (A class that is not of ``torch.optim`` may read its attributes
    and ``requires_grad``, so these are those of the training's parameter.) states: index of an optimizer -> the dict
    that it keeps for the parameter, empty before the first update.
    """

    name: str
    parameter: torch.Tensor
    states: Mapping[int, dict[Any, Any]]


def update_unit(
    unit: Unit,
    consumed: ConsumedStep,
    group_index: int,
    optimizer: PartialOptimizer,
    *,
    threads: int,
    slice_numel: int | None = None,
) -> None:
    """Make one step of one optimizer on one unit.

    consumed: what the step consumed. Its tensors are not changed. group_index: the index of the unit's group in
    ``consumed.groups``. optimizer: of the class that made the step. threads: the number of intra-op threads that made
    the step; where it decides no bits, one thread makes it here. slice_numel: the number of elements of a slice, where
    slices give the same bits; None: never in slices.

    Raises:
        ReplayError: the unit's gradient is not recorded, or does not fit, or the step fails.
    """
    if unit.name not in consumed.gradients:
        raise ReplayError(f"the gradient of {unit.name!r} is not recorded")
    gradient = consumed.gradients[unit.name]
    if gradient is None and optimizer.is_torch:
        return  # torch's classes leave such a parameter and its state alone
    group = consumed.groups[group_index]
    implementation = group.other_implementations.get(unit.name, group.implementation)
    state = unit.states.get(consumed.optimizer)
    if state is None:
        raise ReplayError(f"the state of {unit.name!r} in {consumed.class_name} is not known")
    reason = irreproducible_reason(
        optimizer.kind, group.options, implementation is Implementation.FUSED, unit.parameter.dtype
    )
    if reason is not None:
        raise ReplayError(reason)
    numel = unit.parameter.numel()
    is_sliced = slice_numel is not None and slice_numel < numel and optimizer.kind is not torch.optim.SGD
    try:
        _refuse_misfit(unit.parameter, state, gradient, implementation)
        step = _Step(consumed, group_index, _options(group, implementation, optimizer), implementation, optimizer)
        with intra_op_threads(1 if is_independent_of_threads(unit, optimizer, gradient) else threads):
            if is_sliced and is_sliceable(unit.parameter, state, gradient, optimizer, implementation):
                assert isinstance(gradient, torch.Tensor)
                assert slice_numel is not None
                step.make_in_slices(unit.parameter, state, gradient, slice_numel)
            else:
                step.make(unit.parameter, state, gradient)
    except Exception as error:  # the class's code may raise anything, and what it reads may come from a damaged pool
        if isinstance(error, ReplayError):
            raise
        raise ReplayError(f"{optimizer.kind.__name__} raised {type(error).__name__}: {error}") from error


def is_independent_of_threads(unit: Unit, optimizer: PartialOptimizer, gradient: Gradient = None) -> bool:
    """Whether the bits of the unit's updates do not depend on the number of threads, and any thread may make the
    updates: the class is element-wise, and parameter, state and gradient are at least float32, and in the memory of the
    processor."""
    tensors = [unit.parameter, *(v for s in unit.states.values() for v in s.values() if isinstance(v, torch.Tensor))]
    if gradient is not None:
        tensors.append(gradient.values if isinstance(gradient, SparseGradient) else gradient)
    return (
        optimizer.is_torch
        and optimizer.kind in ELEMENT_WISE
        and all(t.is_cpu and (t.dtype in _WIDE or t.dtype == torch.int64) for t in tensors)
    )


def is_sliceable(
    parameter: torch.Tensor,
    state: Mapping[Any, Any],
    gradient: Gradient,
    optimizer: PartialOptimizer,
    implementation: Implementation,
) -> bool:
    """Whether any slice of the memory of a unit's tensors can be updated separately, with the same bits: the class is
    element-wise, and all tensors are at least float32, and lie in memory in the same way. (A first update, which
    creates the state, is made whole. Of fused code, only the bits of whole tensors are known.)"""
    return (
        bool(state)
        and isinstance(gradient, torch.Tensor)
        and optimizer.is_torch
        and optimizer.kind in ELEMENT_WISE
        and implementation in _SLICEABLE
        and all(
            t.dtype in _WIDE and is_dense_tensor(t) and t.stride() == parameter.stride()
            for t in (parameter, gradient, *_state_of_parameter_shape(parameter, state).values())
        )
    )


def group_indexes_of(consumed: ConsumedStep) -> dict[str, int]:
    """Return name -> index of its group, of each parameter that the optimizer has."""
    return {name: g for g, group in enumerate(consumed.groups) for name in group.parameters}


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Let this thread's operations use ``count`` threads during the block."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Step:
    """One step of one optimizer on tensors of one parameter."""

    def __init__(
        self,
        consumed: ConsumedStep,
        group_index: int,
        options: dict[str, Any],
        implementation: Implementation,
        optimizer: PartialOptimizer,
    ) -> None:
        """``group_index``: the index of the parameter's group. ``options``: of this group."""
        self._consumed, self._group_index, self._options = consumed, group_index, options
        self._implementation, self._optimizer = implementation, optimizer
        has_scale = consumed.grad_scale is not None
        self._is_copied = not optimizer.is_torch or writes_gradients(optimizer.kind, options, implementation, has_scale)

    def make(self, parameter: torch.Tensor, state: dict[Any, Any], gradient: Gradient) -> None:
        """``parameter`` and ``state`` are changed in place."""
        alias = _with_gradient(parameter, gradient, self._is_copied)
        if not self._optimizer.is_torch:
            vars(alias).update(vars(parameter))
            alias.requires_grad_(parameter.requires_grad)
        tensors, states = [alias], {alias: state}
        if self._implementation is Implementation.FOREACH_BESIDE_NEW and state:
            # Beside a tensor without momentum, torch takes the code that updates each momentum separately.
            beside = _with_gradient(alias.new_zeros(1), alias.new_zeros(1), False)
            tensors.append(beside)
            states[beside] = {}
        self._optimizer.step(self._groups(tensors), states, self._consumed.grad_scale, self._consumed.found_inf)

    def _groups(self, tensors: list[torch.Tensor]) -> list[tuple[Mapping[str, object], list[torch.Tensor]]]:
        """Return the groups of the step. A class of ``torch.optim`` needs no other group than that of the parameter;
        another class may read the options of any group."""
        if self._optimizer.is_torch:
            return [(self._options, tensors)]
        groups = self._consumed.groups
        own = self._group_index
        return [(self._options, tensors) if g == own else (one.options, []) for g, one in enumerate(groups)]

    def make_in_slices(
        self, parameter: torch.Tensor, state: dict[Any, Any], gradient: torch.Tensor, slice_numel: int
    ) -> None:
        """As ``make``, one slice of the memory after the other."""
        full = {key: _flat(value) for key, value in _state_of_parameter_shape(parameter, state).items()}
        rest = {key: value for key, value in state.items() if key not in full}
        flat, flat_gradient = _flat(parameter), _flat(gradient)
        after: dict[Any, Any] = {}
        for start in range(0, flat.numel(), slice_numel):
            part = slice(start, start + slice_numel)
            views = {key: value[part] for key, value in full.items()}
            after = {**views, **{key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in rest.items()}}
            self.make(flat[part], after, flat_gradient[part])
            if after.keys() != state.keys() or any(after[key] is not view for key, view in views.items()):
                raise ReplayError(f"{self._optimizer.kind.__name__} replaced tensors of its state")
        for key, value in rest.items():
            if isinstance(value, torch.Tensor):
                value.copy_(after[key])
            else:
                state[key] = after[key]


def _options(group: ConsumedGroup, implementation: Implementation, optimizer: PartialOptimizer) -> dict[str, Any]:
    """Return the options of a group, with ``foreach`` and ``fused`` set to the recorded implementation. If they were
    None, torch would choose by the parameters that the step updates, and this step updates only one."""
    options: dict[str, Any] = dict(group.options)
    is_foreach = implementation in (Implementation.FOREACH, Implementation.FOREACH_BESIDE_NEW)
    for key, value in (("foreach", is_foreach), ("fused", implementation is Implementation.FUSED)):
        if key in options and (optimizer.is_torch or options[key] is None):
            options[key] = value
    return options


def _with_gradient(parameter: torch.Tensor, gradient: Gradient, is_copied: bool) -> torch.Tensor:
    """Return a tensor of the same memory that has this gradient. ``is_copied``: it gets a copy of the gradient."""
    alias = parameter.detach()
    if isinstance(gradient, SparseGradient):
        values = gradient.values.clone() if is_copied else gradient.values
        sparse = torch.sparse_coo_tensor(gradient.indices, values, gradient.size, check_invariants=True)
        gradient = sparse._coalesced_(gradient.is_coalesced)
    elif gradient is not None:
        gradient = gradient.detach()
        if is_copied:
            gradient = gradient.clone()
    if gradient is not None and gradient.dtype != alias.dtype and hasattr(alias, "grad_dtype"):
        alias.grad_dtype = gradient.dtype
    alias.grad = gradient
    return alias


def _refuse_misfit(
    parameter: torch.Tensor, state: Mapping[Any, Any], gradient: Gradient, implementation: Implementation
) -> None:
    """Raise ``ReplayError`` for a gradient of another size, and where fused code, which does not check sizes, would
    read beyond the end of a tensor of state."""
    size = None if gradient is None else gradient.size if isinstance(gradient, SparseGradient) else gradient.shape
    if size is not None and tuple(size) != tuple(parameter.shape):
        raise ReplayError(f"the gradient has shape {list(size)}, and the parameter {list(parameter.shape)}")
    if implementation is Implementation.FUSED:
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape != parameter.shape and value.numel() != 1:
                raise ReplayError(f"the state {key!r} has shape {list(value.shape)}, which a fused step cannot use")


def _state_of_parameter_shape(parameter: torch.Tensor, state: Mapping[Any, Any]) -> dict[Any, torch.Tensor]:
    """Return the tensors of the state that have the parameter's shape."""
    return {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.shape == parameter.shape}


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as one dimension."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
