"""Copies of units in host memory, on which the updates of the training are made too. (A unit is a parameter with its
optimizer state.)

A copy has the shape, strides and dtype of its tensor. Only units whose tensors are dense, whole, and updated by an
optimizer have copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightck.errors import ReplayError
from lightck.state.device_transfers import is_dense_tensor, transfer_of
from lightck.state.inventory import Live, OptimizerView, param_of, unit_of
from lightck.state.signatures import MemoryLayout, memory_layout_of
from lightck.state.unit_update import Unit


@dataclass(frozen=True, slots=True)
class UnitTensors:
    """The live tensors of a unit. lives: the parameter, then its optimizer state. state_by_optimizer: index of each
    optimizer that updates the parameter -> the state tensors that this optimizer keeps for it."""

    name: str
    lives: list[Live]
    state_by_optimizer: Mapping[int, list[Live]]

    def layouts(self) -> list[tuple[int, MemoryLayout]]:
        """Return identity and memory layout of each tensor."""
        return [(id(live.tensor), memory_layout_of(live.tensor)) for live in self.lives]


def unit_tensors(lives: Iterable[Live], views: Sequence[OptimizerView]) -> Iterator[UnitTensors]:
    """Yield the units that can have copies. lives: all tensors of the training. views: of its optimizers."""
    parameters: dict[int, Live] = {}
    state_of: defaultdict[int, list[Live]] = defaultdict(list)
    shared: set[str] = set()
    """Names of units whose optimizer state belongs to another unit too."""
    for live in lives:
        if live.role == "param" and live.alias is None:
            parameters[id(live.registered)] = live
        elif live.role == "optimizer":
            state_of[id(live.owner)].append(live)
            shared |= {param_of(live.name), param_of(live.alias)} if live.alias is not None else set()
    by_optimizer: defaultdict[int, dict[int, list[Live]]] = defaultdict(dict)
    without_copy: set[int] = set()
    """Ids of parameters that a wrapper or a wrapped optimizer updates, or whose state is not only tensors."""
    for view in views:
        for _, p in view.params:
            state = view.optimizer.state.get(p, {})
            found = by_optimizer[id(p)][view.root] = state_of[id(state)]
            if view.wraps or view.is_wrapped or not isinstance(state, dict) or len(found) != len(state):
                without_copy.add(id(p))
    for key, parameter in parameters.items():
        states = by_optimizer.get(key)
        if not states or key in without_copy or parameter.is_frozen or unit_of(parameter) in shared:
            continue
        tensors = [parameter, *(live for state in states.values() for live in state)]
        is_ordinary = type(parameter.registered) in (torch.Tensor, torch.nn.Parameter) and parameter.tensor.numel() > 0
        if is_ordinary and all(map(_can_be_copied, tensors)):
            yield UnitTensors(unit_of(parameter), tensors, states)


def _can_be_copied(live: Live) -> bool:
    tensor = live.tensor
    is_whole = live.dtensor is None and live.share is None and live.part is None
    if not is_whole or tensor.layout is not torch.strided or not is_dense_tensor(tensor):
        return False
    return transfer_of(tensor) is not None or tensor.is_cpu


def dense_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor in host memory, with its strides: the tensor itself, detached, or a copy from its device.
    The device must have done all work that writes the tensor."""
    transfer = transfer_of(tensor)
    if transfer is None:
        return tensor.detach()
    flat = transfer.read(tensor).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())


class UnitReplica:
    """The copies of one unit. ``is_current``: whether they have the bytes of the unit after its last update.
    ``was_copied``: whether ``renew`` was ever called."""

    def __init__(self, tensors: UnitTensors) -> None:
        """Allocate the copies. They are not current before ``renew``."""
        self.name, self.lives = tensors.name, tensors.lives
        self.copies = [_new_copy(live.tensor) for live in tensors.lives]
        self.is_on_device = any(transfer_of(live.tensor) is not None for live in tensors.lives)
        self.is_current = self.was_copied = False
        self._layouts = tensors.layouts()
        self._live_ids = {index: [id(live) for live in state] for index, state in tensors.state_by_optimizer.items()}
        """Index of an optimizer -> ids of those of ``lives`` that are its state of the parameter."""
        parameter = tensors.lives[0].tensor
        # A class that is not of torch.optim may read the parameter's attributes.
        vars(self.copies[0]).update(vars(parameter))
        self.copies[0].requires_grad_(parameter.requires_grad)
        self.unit = Unit(self.name, self.copies[0], {index: {} for index in tensors.state_by_optimizer})
        self._fill_states()

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self.copies)

    def is_of(self, tensors: UnitTensors | None) -> bool:
        """Whether these are the tensors of which this has copies, in the same memory."""
        if tensors is None or tensors.layouts() != self._layouts:
            return False
        return tensors.state_by_optimizer.keys() == self._live_ids.keys()

    def renew(self) -> None:
        """Copy the live tensors."""
        with torch.no_grad():
            for live, copy in zip(self.lives, self.copies, strict=True):
                copy.copy_(dense_on_host(live.tensor))
        self._fill_states()
        self.is_current = self.was_copied = True

    def refuse_replaced(self) -> None:
        """Raise ``ReplayError`` if an update has put other tensors in the place of the copies."""
        for index, state in self._states().items():
            found = self.unit.states[index]
            if found.keys() != state.keys() or any(found[key] is not copy for key, copy in state.items()):
                raise ReplayError("an update of its copy replaced tensors of its state")

    def _fill_states(self) -> None:
        for index, state in self._states().items():
            self.unit.states[index].clear()
            self.unit.states[index].update(state)

    def _states(self) -> dict[int, dict[Any, torch.Tensor]]:
        item_of = {id(live): (live.key, copy) for live, copy in zip(self.lives, self.copies, strict=True)}
        return {index: dict(item_of[one] for one in ids) for index, ids in self._live_ids.items()}


def _new_copy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest absolute difference of elements of two tensors in host memory; infinity if one of them is NaN
    and the other is not. 0.0 says that they are equal as numbers, not that they have the same bits."""
    if one.dtype.is_complex:
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    with torch.no_grad():
        first, second = one.double(), other.double()
        same = (first == second) | (first.isnan() & second.isnan())
        inf = float("inf")
        differences = (first - second).abs().nan_to_num(nan=inf, posinf=inf).masked_fill(same, 0.0)
        return float(differences.max()) if differences.numel() else 0.0
