"""One layer of a layer-wise update: what steps it, what its update used, and whether that still is what it was.

And updates that are half made: some layers are new, and ``step()`` is still to come.
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
"""Beginnings of attributes that a layer's instance does not take over: hooks, and a ``step`` that a scheduler wrapped.
So it keeps no optimizer alive, and nobody who looks for optimizers finds it."""
BLOCK = 1 << 20
"""Bytes of a gradient to one checksum."""
Group = dict[str, object]
"""One of an optimizer's ``param_groups``, or its options alone."""
StateSnapshot = dict[object, tuple[object, int]]
"""What is in the state of a parameter: which objects, and the version counters of those that are tensors."""


@dataclass(slots=True, eq=False)
class Layer:
    """A module's own parameters, and what steps them."""

    name: str
    optimizer: Optimizer
    params: list[torch.Tensor]
    groups: list[Group]
    """Those of the user's optimizer, parallel to ``optimizer.param_groups``."""
    arrived: set[int] = field(default_factory=set)
    used: list[Group] = field(default_factory=list)
    """The options of these groups, as they were when the layer was updated; empty where it was not."""

    @property
    def is_ready(self) -> bool:
        return all(id(p) in self.arrived for p in self.params if p.requires_grad)

    def changed(self) -> str | None:
        """What of the user's optimizer is no longer what the update used."""
        return "options (lr, ...) were changed" if list(map(options_of, self.groups)) != self.used else None


@dataclass(slots=True, eq=False)
class UsedGradient:
    """A parameter that was updated, and its gradient, as they were then."""

    layer: Layer
    param: torch.Tensor
    grad: torch.Tensor
    grad_counter: int
    crcs: npt.NDArray[np.uint32] | None
    """Checksums of the gradient, where it is to be compared by its bytes too."""
    param_counter: int = 0
    """After the update, as what follows."""
    state: StateSnapshot = field(default_factory=dict)
    is_hidden: bool = False
    """From ``step()``, which is to pass over the parameter; for good where it raised."""

    def updated(self, optimizer: Optimizer) -> None:
        """Note what the update made."""
        self.param_counter = self.param._version
        self.state = _snapshot(optimizer.state.get(self.param))

    def changed(self, optimizer: Optimizer) -> str | None:
        """What somebody has changed since the update."""
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
        value is before[key][0] and version == before[key][1] for key, (value, version) in now.items()
    )


def _version_counter_of(value: object) -> int:
    return version_counter_of(value) if isinstance(value, torch.Tensor) else 0


def group_structure(optimizer: Optimizer) -> list[object]:
    """What layers depend on: groups, their parameters, and which of them are trained."""
    return [(id(group), [(id(p), p.requires_grad) for p in group["params"]]) for group in optimizer.param_groups]


def options_of(group: Group) -> Group:
    """The options of a group, tensors among them by identity and version counter."""
    return {k: (id(v), v._version) if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}


def make_layer(name: str, params: Sequence[torch.Tensor], group_of: dict[int, Group], optimizer: Optimizer) -> Layer:
    """With an instance of the optimizer's class that was never initialised by itself: it is a view of the user's."""
    groups: dict[int, tuple[Group, list[torch.Tensor]]] = {}
    for p in params:
        groups.setdefault(id(group_of[id(p)]), (group_of[id(p)], []))[1].append(p)
    part = type(optimizer).__new__(type(optimizer))
    part.__dict__.update((k, v) for k, v in optimizer.__dict__.items() if not k.startswith(_NOT_SHARED))
    part.param_groups = [{**group, "params": own} for group, own in groups.values()]
    return Layer(name, part, list(params), [group for group, _ in groups.values()])


def step_layer(layer: Layer, optimizer: Optimizer, params: Sequence[torch.Tensor]) -> None:
    """The user's ``step`` on these parameters, with the options and the state that the user's optimizer has now."""
    part = layer.optimizer
    part.state = optimizer.state
    for mine, theirs in zip(part.param_groups, layer.groups, strict=True):
        mine.update((key, value) for key, value in theirs.items() if key != "params")
    counters = [p._version for p in params]
    type(optimizer).step.__wrapped__(part)  # type: ignore[attr-defined]  # without the hooks around it
    silent = [p for p, before in zip(params, counters, strict=True) if p._version == before]
    if silent:  # a fused kernel: autograd is to know that what it saved is no more
        torch.autograd.graph.increment_version(silent)


def tensors_of(optimizer: Optimizer, param: torch.Tensor) -> list[torch.Tensor]:
    state = optimizer.state.get(param)
    return [param, *(v for v in (state or {}).values() if isinstance(v, torch.Tensor))]


class PartialUpdate:
    """The optimizers (by index) whose update is half made, and an error that waits for their ``step()``."""

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
        """Raises ``SessionError``: no state between two steps is one from which a step starts."""
        if self._indexes:
            raise SessionError(
                "A checkpoint cannot be closed between backward() and step(): with lightck.layerwise some layers are "
                "updated then, and others are not. Call step() of each such optimizer first. (A backward() that "
                "reaches the parameters of another optimizer updates those too: give that one no layers.)"
            )

    def defer(self, work: Callable[[], None]) -> bool:
        """Do it inside a backward pass. False where it raised what a loop may catch and go on from: that is raised by
        ``raise_deferred``, since a backward that ends here would have made some gradients, and not others."""
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
