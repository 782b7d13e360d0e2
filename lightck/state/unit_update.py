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

from lightck.errors import ReplayError, is_lack_of_memory
from lightck.state.consumed_update import (
    ConsumedGroup,
    ConsumedStep,
    Gradient,
    Implementation,
    SlicedGradients,
    SparseGradient,
)
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
_FUSED_SLICE_MULTIPLE = 64
"""A number of elements. torch's fused code gives whole cache lines to each thread, and divides them into vectors and a
remainder, which rounds in another way than a vector. If each slice begins at a multiple of this number, its elements
are divided as in the whole tensor."""


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
    the step; where this number decides no bits, one thread is used here. slice_numel: the number of elements of a
    slice, where slices give the same bits; None: never in slices.

    Raises:
        ReplayError: the unit's gradient is not recorded, or does not fit, or the step fails.
    """
    if unit.name not in consumed.gradients:
        raise ReplayError(f"the gradient of {unit.name!r} is not recorded")
    gradient = consumed.gradients[unit.name]
    if gradient is None and optimizer.is_torch:
        return  # torch's classes leave such a parameter and its state alone
    state = unit.states.get(consumed.optimizer)
    if state is None:
        raise ReplayError(f"the state of {unit.name!r} in {consumed.class_name} is not known")
    step = _step_of(unit, consumed, group_index, optimizer)
    numel = unit.parameter.numel()
    is_sliced = slice_numel is not None and slice_numel < numel and optimizer.kind is not torch.optim.SGD
    with _as_replay_error(optimizer):
        _refuse_misfit(unit.parameter, state, gradient, step.implementation)
        with intra_op_threads(1 if is_independent_of_threads(unit, optimizer, gradient) else threads):
            if is_sliced and is_sliceable(unit.parameter, state, gradient, optimizer, step.implementation):
                assert isinstance(gradient, torch.Tensor)
                assert slice_numel is not None
                step.make_in_slices(unit.parameter, state, gradient, slice_numel)
            else:
                step.make(unit.parameter, state, gradient)


class UpdateInSlices:
    """One step of one optimizer on one unit, which can be made on any slice of the unit's memory, with the same bits.
    Slices that do not overlap may be updated at the same time."""

    def __init__(
        self, name: str, optimizer: PartialOptimizer, gradients: Mapping[str, Gradient], step: _Step, dtype: torch.dtype
    ) -> None:
        """Use ``update_in_slices``. ``dtype``: of the gradient."""
        self._name, self._optimizer, self._gradients, self._step, self._dtype = name, optimizer, gradients, step, dtype

    def make(
        self, parameter: torch.Tensor, views: Mapping[Any, torch.Tensor], rest: Mapping[Any, Any], part: slice
    ) -> dict[Any, Any]:
        """Update one slice of the unit's memory. Return the new ``rest``.

        parameter: the slice of the parameter, and views: of each tensor of state that has the parameter's shape. They
        are changed in place. rest: the other state, whose tensors may be changed. part: which slice it is.

        Raises ``ReplayError``, and what the reading of the gradient raises."""
        gradient = self._gradient(part, parameter.numel())
        state = {**views, **rest}
        with _as_replay_error(self._optimizer):
            self._step.make(parameter, state, gradient)
        self._step.refuse_replaced(state, views, rest)
        return {key: state[key] for key in rest}

    def _gradient(self, part: slice, numel: int) -> torch.Tensor:
        if isinstance(self._gradients, SlicedGradients):
            gradient = torch.empty(numel, dtype=self._dtype)
            self._gradients.read_slice(self._name, part.start, gradient)
            return gradient
        whole = self._gradients[self._name]
        assert isinstance(whole, torch.Tensor), "update_in_slices has checked that the gradient is dense"
        return flat(whole)[part]


def update_in_slices(
    unit: Unit, consumed: ConsumedStep, group_index: int, optimizer: PartialOptimizer, slice_numel: int
) -> UpdateInSlices | None:
    """Return the step of one optimizer on one unit, to be made in slices; None if that may give other bits, if the
    unit's gradient cannot be read in slices, or if ``update_unit`` would refuse the step. Arguments: as there.
    No gradient is read."""
    state, layout = unit.states.get(consumed.optimizer), _layout(consumed.gradients, unit.name)
    if state is None or layout is None:
        return None
    try:
        step = _step_of(unit, consumed, group_index, optimizer)
        _refuse_misfit(unit.parameter, state, layout, step.implementation)
    except ReplayError:
        return None
    is_exact = is_independent_of_threads(unit, optimizer) and is_sliceable(
        unit.parameter, state, layout, optimizer, step.implementation, slice_numel
    )
    return UpdateInSlices(unit.name, optimizer, consumed.gradients, step, layout.dtype) if is_exact else None


def is_left_alone(unit: Unit, consumed: ConsumedStep, optimizer: PartialOptimizer) -> bool:
    """Whether a step does nothing to a unit, because it has no gradient. False if that is not known before the gradient
    is read."""
    gradients, name = consumed.gradients, unit.name
    if not optimizer.is_torch or name not in gradients:
        return False
    if isinstance(gradients, SlicedGradients):
        return gradients.is_absent(name)
    return type(gradients) is dict and gradients[name] is None


def _layout(gradients: Mapping[str, Gradient], name: str) -> torch.Tensor | None:
    """Return a tensor with the shape, the strides and the dtype of a dense gradient in the memory of the processor."""
    if name not in gradients:
        return None
    if isinstance(gradients, SlicedGradients):
        return gradients.layout(name)
    if type(gradients) is not dict:
        return None  # another kind of mapping may read a whole gradient at each access
    found = gradients[name]
    return found if isinstance(found, torch.Tensor) and found.is_cpu else None


def _step_of(unit: Unit, consumed: ConsumedStep, group_index: int, optimizer: PartialOptimizer) -> _Step:
    """Return the step on a unit. Raises ``ReplayError`` if torch does not reproduce its own bits there."""
    group = consumed.groups[group_index]
    implementation = group.other_implementations.get(unit.name, group.implementation)
    is_fused = implementation is Implementation.FUSED
    reason = irreproducible_reason(optimizer.kind, group.options, is_fused, unit.parameter.dtype)
    if reason is not None:
        raise ReplayError(reason)
    return _Step(consumed, group_index, _options(group, implementation, optimizer), implementation, optimizer)


@contextmanager
def _as_replay_error(optimizer: PartialOptimizer) -> Iterator[None]:
    """Raise what the class's code raises, which may be anything (what it reads may come from a damaged pool), as
    ``ReplayError``. A lack of memory is raised as it is."""
    try:
        yield
    except ReplayError:
        raise
    except Exception as error:
        if is_lack_of_memory(error):
            raise  # it says nothing about the update
        raise ReplayError(f"{optimizer.kind.__name__} raised {type(error).__name__}: {error}") from error


def is_independent_of_threads(unit: Unit, optimizer: PartialOptimizer, gradient: Gradient = None) -> bool:
    """Whether the bits of the unit's updates do not depend on the number of threads, and any thread may make the
    updates: the class is element-wise, and parameter, state and gradient are float32, float64 or int64, and in the
    memory of the processor."""
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
    slice_numel: int = 1,
) -> bool:
    """Whether any slice of the memory of a unit's tensors can be updated separately, with the same bits: the class is
    element-wise, and the parameter, the gradient and the state of the parameter's shape are at least float32, and lie
    in memory in the same way. (A first update, which creates the state, is made whole.) ``slice_numel``: slices begin
    at multiples of it."""
    is_fused = implementation is Implementation.FUSED
    return (
        bool(state)
        and isinstance(gradient, torch.Tensor)
        and optimizer.is_torch
        and optimizer.kind in ELEMENT_WISE
        and (implementation in _SLICEABLE or (is_fused and slice_numel % _FUSED_SLICE_MULTIPLE == 0))
        and all(
            t.dtype in _WIDE and is_dense_tensor(t) and t.stride() == parameter.stride()
            for t in (parameter, gradient, *state_of_parameter_shape(parameter, state).values())
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
        self.implementation, self._optimizer = implementation, optimizer
        has_scale = consumed.grad_scale is not None
        self._is_copied = not optimizer.is_torch or writes_gradients(optimizer.kind, options, implementation, has_scale)

    def make(self, parameter: torch.Tensor, state: dict[Any, Any], gradient: Gradient) -> None:
        """``parameter`` and ``state`` are changed in place."""
        alias = _with_gradient(parameter, gradient, self._is_copied)
        if not self._optimizer.is_torch:
            vars(alias).update(vars(parameter))
            alias.requires_grad_(parameter.requires_grad)
        tensors, states = [alias], {alias: state}
        if self.implementation is Implementation.FOREACH_BESIDE_NEW and state:
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
        full = {key: flat(value) for key, value in state_of_parameter_shape(parameter, state).items()}
        rest = {key: value for key, value in state.items() if key not in full}
        elements, flat_gradient = flat(parameter), flat(gradient)
        after: dict[Any, Any] = {}
        for start in range(0, elements.numel(), slice_numel):
            part = slice(start, start + slice_numel)
            views = {key: value[part] for key, value in full.items()}
            after = {**views, **copied(rest)}
            self.make(elements[part], after, flat_gradient[part])
            self.refuse_replaced(after, views, rest)
        put_into(state, {key: after[key] for key in rest})

    def refuse_replaced(
        self, state: Mapping[Any, Any], views: Mapping[Any, torch.Tensor], rest: Mapping[Any, Any]
    ) -> None:
        """Raise ``ReplayError`` if a step has not left the state of a slice in the memory of the unit."""
        if state.keys() != {*views, *rest} or any(state[key] is not view for key, view in views.items()):
            raise ReplayError(f"{self._optimizer.kind.__name__} replaced tensors of its state")


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


def state_of_parameter_shape(parameter: torch.Tensor, state: Mapping[Any, Any]) -> dict[Any, torch.Tensor]:
    """Return the tensors of the state that have the parameter's shape."""
    return {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.shape == parameter.shape}


def copied(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the state with copies of its tensors."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def put_into(state: dict[Any, Any], values: Mapping[Any, Any]) -> None:
    """Give a state these values. Its tensors stay, and are written."""
    for key, value in values.items():
        if isinstance(state[key], torch.Tensor):
            state[key].copy_(value)
        else:
            state[key] = value


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor as one dimension."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
