"""One layer of a layer-wise update: the optimizer that steps it, the inputs of its update, and their later changes.

``PartialUpdate`` tracks updates that are not complete: some layers are updated, and ``step()`` was not called yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch.optim import Optimizer

from lightck.errors import SessionError, StateChangedError
from lightck.state.blocks import checksums
from lightck.state.signatures import version_counter_of

_NOT_SHARED = ("step", "_optimizer_")
"""Prefixes of the attributes that a layer's optimizer instance does not get. An instance has the attribute ``step``
only if a scheduler has wrapped that method; a copy of the attribute would keep the user's optimizer alive. The names of
the hook registries begin with ``_optimizer_``. A search for optimizers skips an instance without these registries."""
BLOCK = 1 << 20
"""Bytes of a gradient per checksum."""
Group = dict[str, object]
"""One of an optimizer's ``param_groups``, or its options alone."""
StateSnapshot = dict[object, tuple[object, int]]
"""Key -> value and its version counter (0 for values that are no tensors), of one parameter's optimizer state."""


@dataclass(slots=True, eq=False)
class Layer:
    """A module's own parameters, and the optimizer instance that steps them."""

    name: str
    optimizer: Optimizer
    params: list[torch.Tensor]
    groups: list[Group]
    """The groups of the user's optimizer, in the order of ``optimizer.param_groups``."""
    arrived: set[int] = field(default_factory=set)
    """ids of the parameters whose gradients are final."""
    used: list[Group] = field(default_factory=list)
    """The options of ``groups`` at the layer's update; empty before it."""

    @property
    def is_ready(self) -> bool:
        return all(id(p) in self.arrived for p in self.params if p.requires_grad)

    def changed(self) -> str | None:
        """What differs from the options that the update used, for a message; None if nothing does."""
        return "options (lr, ...) were changed" if list(map(options_of, self.groups)) != self.used else None


@dataclass(slots=True, eq=False)
class UsedGradient:
    """A parameter that was updated, and the gradient that its update used."""

    layer: Layer
    param: torch.Tensor
    grad: torch.Tensor
    grad_counter: int
    crcs: npt.NDArray[np.uint32] | None
    """Checksums of the gradient, if its bytes are compared too."""
    param_counter: int = 0
    """Version counter of the parameter after its update."""
    state: StateSnapshot = field(default_factory=dict)
    """The parameter's optimizer state after its update."""
    is_hidden: bool = False
    """Whether lightck has set ``param.grad`` to None, so that ``step()`` skips the parameter. If ``step()`` raises,
    ``param.grad`` stays None."""

    def updated(self, optimizer: Optimizer) -> None:
        """Record the parameter and its state after the update."""
        self.param_counter = self.param._version
        self.state = _snapshot(optimizer.state.get(self.param))

    def changed(self, optimizer: Optimizer) -> str | None:
        """What was changed since the update, for a message; None if nothing was."""
        if self.is_hidden:
            return None
        grad = self.param.grad
        if grad is None:
            return "gradients were removed"
        if grad is not self.grad or grad._version != self.grad_counter:
            return "gradients were changed"
        if self.crcs is not None and not np.array_equal(checksums(grad, BLOCK), self.crcs):
            return "gradients were changed"
        if self.param._version != self.param_counter:
            return "parameters were written"
        return None if _matches_snapshot(optimizer.state.get(self.param), self.state) else "optimizer state was changed"


def _snapshot(state: Mapping[object, object] | None) -> StateSnapshot:
    return {key: (value, _version_counter_of(value)) for key, value in (state or {}).items()}


def _matches_snapshot(state: Mapping[object, object] | None, before: StateSnapshot) -> bool:
    now = _snapshot(state)
    return now.keys() == before.keys() and all(
        value is before[key][0] and counter == before[key][1] for key, (value, counter) in now.items()
    )


def _version_counter_of(value: object) -> int:
    return version_counter_of(value) if isinstance(value, torch.Tensor) else 0


def group_structure(optimizer: Optimizer) -> list[object]:
    """Groups, their parameters, and which of them are trained: layers are built anew when this changes."""
    return [(id(group), [(id(p), p.requires_grad) for p in group["params"]]) for group in optimizer.param_groups]


def options_of(group: Group) -> Group:
    """The options of a group; a tensor is represented by its identity and version counter."""
    return {k: (id(v), v._version) if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}


def make_layer(name: str, params: Sequence[torch.Tensor], group_of: dict[int, Group], optimizer: Optimizer) -> Layer:
    """Make a layer. Its optimizer is an instance of the user's class that shares the user's attributes; its
    ``__init__`` does not run."""
    groups: dict[int, tuple[Group, list[torch.Tensor]]] = {}
    for p in params:
        groups.setdefault(id(group_of[id(p)]), (group_of[id(p)], []))[1].append(p)
    part = type(optimizer).__new__(type(optimizer))
    part.__dict__.update((k, v) for k, v in optimizer.__dict__.items() if not k.startswith(_NOT_SHARED))
    part.param_groups = [{**group, "params": own} for group, own in groups.values()]
    return Layer(name, part, list(params), [group for group, _ in groups.values()])


def step_layer(layer: Layer, optimizer: Optimizer, params: Sequence[torch.Tensor]) -> None:
    """Run the class's ``step`` on these parameters, with the present options and state of the user's optimizer."""
    part = layer.optimizer
    part.state = optimizer.state
    for mine, theirs in zip(part.param_groups, layer.groups, strict=True):
        mine.update((key, value) for key, value in theirs.items() if key != "params")
    counters = [p._version for p in params]
    type(optimizer).step.__wrapped__(part)  # type: ignore[attr-defined]  # without the hooks around it
    silent = [p for p, before in zip(params, counters, strict=True) if p._version == before]
    if silent:  # a fused kernel moves no version counter, but autograd needs it to detect changes of saved tensors
        torch.autograd.graph.increment_version(silent)


def tensors_of(optimizer: Optimizer, param: torch.Tensor) -> list[torch.Tensor]:
    state = optimizer.state.get(param)
    return [param, *(v for v in (state or {}).values() if isinstance(v, torch.Tensor))]


class PartialUpdate:
    """The indexes of optimizers whose update is not complete, and an error that is raised at their ``step()``."""

    def __init__(self) -> None:
        self._indexes: set[int] = set()
        self._error: StateChangedError | None = None

    def __bool__(self) -> bool:
        return bool(self._indexes)

    def begin(self, index: int) -> None:
        self._indexes.add(index)

    def end(self, index: int) -> None:
        self._indexes.discard(index)

    def refuse_boundary(self) -> None:
        """Raise ``SessionError`` while an update is not complete: no step starts from such a state."""
        if self._indexes:
            raise SessionError(
                "A checkpoint cannot be closed between backward() and step(): lightck.layerwise() updates layers "
                "inside backward(), so some are updated now and others are not. Call step() of each layer-wise "
                "optimizer first. (A backward() updates the layers of every layer-wise optimizer that it reaches. If "
                "this backward() is not meant to update some optimizer's layers, do not call lightck.layerwise() for "
                "that optimizer.)"
            )

    def call_in_backward(self, work: Callable[[], None]) -> bool:
        """Call ``work`` inside a backward pass, and return whether it succeeded. If it raises ``StateChangedError``,
        keep the error for ``raise_deferred``: a backward pass that ended here would have computed only some of the
        gradients."""
        try:
            work()
        except StateChangedError as err:
            self._error = err
            return False
        return True

    def raise_deferred(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
