"""The audit of updates: some of what an update changes is computed again at once, as a recovery would, and compared.

So a systematic difference between training and replay shows in the first updates, and not in a recovery. In the first
updates a part of each parameter is audited, later one parameter at every eighth update, in turn. A large parameter of
an element-wise optimizer is audited in a window; large ones of other optimizers are not audited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from lightck.errors import ReplayError
from lightck.hooks.captured_update import CapturedStep, HeldGradient
from lightck.state.consumed_update import ConsumedStep, Gradient, SparseGradient
from lightck.state.device_transfers import is_dense_tensor
from lightck.state.neutral_settings import neutral_settings
from lightck.state.partial_optimizer import PartialOptimizer
from lightck.state.unit_update import Unit, is_sliceable, update_unit
from lightck.state.update_record import has_dense_memory

TensorsOf = Callable[[HeldGradient], tuple[torch.Tensor, ...]]
FIRST_UPDATES, EVERY = 3, 8
WINDOW_NUMEL = 16 << 10
"""Elements of a window."""
WHOLE_NBYTES_MAX = 1 << 20
"""The largest parameter that is audited whole."""


@dataclass(slots=True, eq=False)
class _Copy:
    """A part of a unit before the update. live, state: views of the tensors that the update changes."""

    live: torch.Tensor
    state: Mapping[Any, Any]
    window: slice | None
    unit: Unit
    gradient: Gradient
    group_index: int


class UpdateAudit:
    """The audit of one session."""

    def __init__(self) -> None:
        self._n_updates: dict[int, int] = {}
        """Number of an optimizer -> how many of its updates have begun."""
        self._running: dict[int, tuple[CapturedStep, PartialOptimizer, list[_Copy]]] = {}

    def forget(self) -> None:
        """Drop all references to tensors."""
        self._running.clear()

    def begin(self, index: int, optimizer: Optimizer, step: CapturedStep, tensors_of: TensorsOf) -> None:
        """Copy what is audited, right before the update. ``tensors_of``: returns the tensors of a gradient; none if
        they are not known."""
        self._running.pop(index, None)
        n = self._n_updates[index] = self._n_updates.get(index, -1) + 1
        if n >= FIRST_UPDATES and n % EVERY:
            return
        partial = PartialOptimizer.of(optimizer)
        candidates = list(_updated(optimizer, step, tensors_of))
        if n >= FIRST_UPDATES and candidates:
            candidates = [candidates[n // EVERY % len(candidates)]]
        copies = [_copied(n, *one, optimizer, step, partial) for one in candidates]
        self._running[index] = step, partial, [one for one in copies if one is not None]

    def difference(self, index: int) -> str:
        """Return, right after the update, what a replay computes differently; "" if nothing does."""
        step, partial, copies = self._running.pop(index, (None, None, []))
        for copy in copies:
            assert step is not None
            assert partial is not None
            name = copy.unit.name
            gradients = {name: copy.gradient}
            consumed = ConsumedStep(index, step.class_name, step.groups, gradients, step.grad_scale, step.found_inf)
            try:
                with neutral_settings():
                    update_unit(copy.unit, consumed, copy.group_index, partial, threads=torch.get_num_threads())
            except ReplayError as err:
                return f"the update of {name!r} cannot be made again: {err}"
            if _can_be_compared(copy.state) and not _is_equal(copy, copy.unit.states[index]):
                return f"the update of {name!r} has other bits if it is made again"
        return ""


def _updated(
    optimizer: Optimizer, step: CapturedStep, tensors_of: TensorsOf
) -> Iterator[tuple[int, torch.Tensor, HeldGradient, tuple[torch.Tensor, ...]]]:
    """Yield group index, parameter and gradient, with its tensors, of each parameter that has one."""
    for g, (group, consumed) in enumerate(zip(optimizer.param_groups, step.groups, strict=True)):
        for p, name in zip(group["params"], consumed.parameters, strict=True):
            gradient = step.gradients.get(name)
            if gradient is None or type(p) not in (torch.Tensor, torch.nn.Parameter):
                continue
            if gradient.is_sparse or has_dense_memory(gradient):  # else its update leaves no record
                tensors = tensors_of(gradient)
                if tensors:
                    yield g, p, gradient, tensors


def _copied(
    n: int,
    group_index: int,
    p: torch.Tensor,
    held: HeldGradient,
    tensors: tuple[torch.Tensor, ...],
    optimizer: Optimizer,
    step: CapturedStep,
    partial: PartialOptimizer,
) -> _Copy | None:
    """Return a copy of a window of a unit, or of all of it; None if it is not audited. ``n``: the number of the update,
    which chooses the window."""
    state, group, live = optimizer.state.get(p, {}), step.groups[group_index], p.detach()
    if not _can_be_compared(state):
        return None
    implementation = group.other_implementations.get(held.name, group.implementation)
    gradient = held.as_copied(tensors) if not held.is_sparse else None
    assert gradient is None or isinstance(gradient, torch.Tensor)
    window = None
    if live.numel() > WINDOW_NUMEL:
        if gradient is not None and is_sliceable(live, state, gradient, partial, implementation):
            start = n * WINDOW_NUMEL % (live.numel() - WINDOW_NUMEL + 1)
            window = slice(start, start + WINDOW_NUMEL)
        elif live.nbytes > WHOLE_NBYTES_MAX:
            return None
    if not is_dense_tensor(live):
        return None
    consumed: Gradient
    if gradient is not None:
        consumed = _window(gradient, window).clone()
    else:
        indices, values = (tensor.clone() for tensor in tensors)
        consumed = SparseGradient(indices, values, held.sparse_shape or (), held.is_coalesced)
    before = {key: _state_window(value, live, window) for key, value in state.items()}
    copies = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in before.items()}
    parameter = _window(live, window).clone()
    if not partial.is_torch:
        vars(parameter).update(vars(p))
        parameter.requires_grad_(p.requires_grad)
    unit = Unit(held.name, parameter, {step.optimizer: copies})
    return _Copy(live, _LiveState(optimizer, p), window, unit, consumed, group_index)


def _can_be_compared(state: Mapping[Any, Any]) -> bool:
    """Whether all tensors of a state are dense. (No checkpoint holds others: the boundary refuses them by name.)"""
    return all(one.layout is torch.strided for one in state.values() if isinstance(one, torch.Tensor))


class _LiveState(Mapping[Any, Any]):
    """The state of a parameter as it is when it is read. (The first update creates it.)"""

    def __init__(self, optimizer: Optimizer, p: torch.Tensor) -> None:
        self._optimizer, self._p = optimizer, p

    def _now(self) -> Mapping[Any, Any]:
        found: Mapping[Any, Any] = self._optimizer.state.get(self._p, {})
        return found

    def __getitem__(self, key: Any) -> Any:
        return self._now()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


def _window(tensor: torch.Tensor, window: slice | None) -> torch.Tensor:
    """Return a window of the memory of a dense tensor; all of it if ``window`` is None."""
    return tensor.detach() if window is None else tensor.detach().as_strided((tensor.numel(),), (1,))[window]


def _state_window(value: Any, parameter: torch.Tensor, window: slice | None) -> Any:
    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
        return _window(value, window)
    return value


def _is_equal(copy: _Copy, replayed: Mapping[Any, Any]) -> bool:
    """Whether the replay of a part has the bits of the training."""
    if not _same_bits(copy.unit.parameter, _window(copy.live, copy.window)) or replayed.keys() != set(copy.state):
        return False
    for key, value in copy.state.items():
        now, found = _state_window(value, copy.live, copy.window), replayed[key]
        if isinstance(now, torch.Tensor) and isinstance(found, torch.Tensor):
            if not _same_bits(now, found):
                return False
        elif type(now) is not type(found) or bool(now != found):
            return False
    return True


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)
