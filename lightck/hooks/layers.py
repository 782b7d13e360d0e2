"""One layer of a layer-wise update: the optimizer that steps the layer, and a record of the gradients, options and
state of its update. A comparison with this record detects later changes.

``PartialUpdate`` records which updates are not complete: some layers are updated, and ``step()`` was not called yet.
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
from lightck.state.local_tensors import local_of
from lightck.state.signatures import version_counter_of

_NOT_COPIED = ("step", "_optimizer_")
"""Prefixes of the attributes that are not copied from the user's optimizer to a layer's optimizer. ``step`` is an
attribute of an instance only if a scheduler has wrapped the method; a copy of this attribute would keep the user's
optimizer alive. ``_optimizer_`` begins the names of the hook registries. Without registries, attach does not find a
layer's optimizer when it searches for optimizers."""
BLOCK = 1 << 20
"""Bytes of a gradient that one checksum covers."""
Group = dict[str, object]
"""One item of an optimizer's ``param_groups``, or only the options of an item."""
Counters = tuple[int, int]
"""See ``counters_of``."""
StateSnapshot = dict[object, tuple[object, Counters]]
"""One parameter's optimizer state: key -> (value, version counters of the value; zeros if the value is no tensor)."""


@dataclass(slots=True, eq=False)
class Layer:
    """A module's own trained parameters, and the optimizer instance that steps them inside the backward pass."""

    name: str
    optimizer: Optimizer
    params: list[torch.Tensor]
    groups: list[Group]
    """The groups of the user's optimizer, in the order of ``optimizer.param_groups``."""
    arrived: set[int] = field(default_factory=set)
    """ids of the parameters whose gradients are final. Emptied when the layer is updated."""
    used_options: list[Group] = field(default_factory=list)
    """The options of ``groups`` that the layer's update used; empty before this update."""

    @property
    def is_ready(self) -> bool:
        return all(id(p) in self.arrived for p in self.params if p.requires_grad)

    def changed(self) -> str | None:
        """Return a phrase for a message if the options differ from those that the update used, else None."""
        return "options (lr, ...) were changed" if list(map(options_of, self.groups)) != self.used_options else None


@dataclass(slots=True, eq=False)
class UsedGradient:
    """A parameter that was updated, and the gradient that its update used."""

    layer: Layer
    param: torch.Tensor
    grad: torch.Tensor
    grad_counters: Counters
    """Version counters of the gradient before the update."""
    crcs: npt.NDArray[np.uint32] | None
    """Checksums of the gradient, one for each ``BLOCK`` bytes; None if the bytes are not compared."""
    compares_param: bool = False
    """Whether the bytes of the parameter are compared."""
    param_counters: Counters = (0, 0)
    """Version counters of the parameter after its update."""
    param_address: int = 0
    """Where the parameter lay then. An assignment to ``.data`` moves no counter."""
    param_crcs: npt.NDArray[np.uint32] | None = None
    """Checksums of the parameter then; None if the bytes are not compared."""
    state: StateSnapshot = field(default_factory=dict)
    """The parameter's optimizer state after its update."""
    is_hidden: bool = False
    """Whether lightck has set ``param.grad`` to None, so that ``step()`` skips the parameter. If ``step()`` raises,
    ``param.grad`` stays None."""

    def updated(self, optimizer: Optimizer) -> None:
        """Record what the parameter and its optimizer state are right after the update."""
        self.param_counters, self.param_address = counters_of(self.param), local_of(self.param).data_ptr()
        self.param_crcs = crcs_of(self.param) if self.compares_param else None
        self.state = _snapshot(optimizer.state.get(self.param))

    def rebind(self) -> None:
        """Treat ``param.grad`` as the gradient that was used: torch has just written the same bits there. (Its bytes
        are compared with ``crcs`` in ``step()``.)"""
        if self.param.grad is not None and not self.is_hidden:
            self.grad, self.grad_counters = self.param.grad, counters_of(self.param.grad)

    def changed(self, optimizer: Optimizer) -> str | None:
        """Return a phrase for a message that names what was changed since the update. Return None if nothing was
        changed, or if lightck hides the gradient."""
        if self.is_hidden:
            return None
        grad = self.param.grad
        if grad is None:
            return "gradients were removed"
        if grad is not self.grad or counters_of(grad) != self.grad_counters:
            return "gradients were changed"
        if self.crcs is not None and not np.array_equal(crcs_of(grad), self.crcs):  # type: ignore[arg-type]
            return "gradients were changed"
        if self._is_param_written:
            return "parameters were written"
        return None if _matches_snapshot(optimizer.state.get(self.param), self.state) else "optimizer state was changed"

    @property
    def _is_param_written(self) -> bool:
        if counters_of(self.param) != self.param_counters or local_of(self.param).data_ptr() != self.param_address:
            return True
        return self.param_crcs is not None and not np.array_equal(crcs_of(self.param), self.param_crcs)  # type: ignore[arg-type]


def crcs_of(tensor: torch.Tensor) -> npt.NDArray[np.uint32] | None:
    """Return the checksums of a tensor's bytes, one for each ``BLOCK`` of them; None if its memory has gaps."""
    local = local_of(tensor)
    has_blocks = local.layout is torch.strided and local.is_contiguous() and not local.is_conj()
    return checksums(local, BLOCK) if has_blocks else None


def counters_of(tensor: torch.Tensor) -> Counters:
    """Return the version counters of a tensor and of its local tensor: a write to a DTensor moves only the first."""
    return version_counter_of(tensor), version_counter_of(local_of(tensor))


def _snapshot(state: Mapping[object, object] | None) -> StateSnapshot:
    return {key: (value, _counters_of_value(value)) for key, value in (state or {}).items()}


def _matches_snapshot(state: Mapping[object, object] | None, before: StateSnapshot) -> bool:
    now = _snapshot(state)
    return now.keys() == before.keys() and all(
        value is before[key][0] and counters == before[key][1] for key, (value, counters) in now.items()
    )


def _counters_of_value(value: object) -> Counters:
    return counters_of(value) if isinstance(value, torch.Tensor) else (0, 0)


def group_structure(optimizer: Optimizer) -> list[object]:
    """Return the identities of an optimizer's groups and parameters, and which parameters require gradients. If this
    result has changed since the layers were built, the layers are built anew."""
    return [(id(group), [(id(p), p.requires_grad) for p in group["params"]]) for group in optimizer.param_groups]


def options_of(group: Group) -> Group:
    """Return the options of a group. An option that is a tensor is represented by its id and version counter."""
    return {k: (id(v), v._version) if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}


def make_layer(name: str, params: Sequence[torch.Tensor], group_of: dict[int, Group], optimizer: Optimizer) -> Layer:
    """Return a new layer. ``optimizer``: the user's optimizer. The layer's optimizer has the same class and shares its
    attributes, and ``__init__`` is not called for it. ``group_of``: id of a parameter -> its group in ``optimizer``."""
    groups: dict[int, tuple[Group, list[torch.Tensor]]] = {}
    for p in params:
        groups.setdefault(id(group_of[id(p)]), (group_of[id(p)], []))[1].append(p)
    layer_optimizer = type(optimizer).__new__(type(optimizer))
    layer_optimizer.__dict__.update((k, v) for k, v in optimizer.__dict__.items() if not k.startswith(_NOT_COPIED))
    layer_optimizer.param_groups = [{**group, "params": own} for group, own in groups.values()]
    return Layer(name, layer_optimizer, list(params), [group for group, _ in groups.values()])


def step_layer(layer: Layer, optimizer: Optimizer, params: Sequence[torch.Tensor]) -> None:
    """Step a layer, without the hooks of ``step``. ``optimizer``: the user's optimizer, whose present options and state
    are used. ``params``: the parameters of the layer that have gradients."""
    layer_optimizer = layer.optimizer
    layer_optimizer.state = optimizer.state
    for own, group in zip(layer_optimizer.param_groups, layer.groups, strict=True):
        own.update((key, value) for key, value in group.items() if key != "params")
    counters = [p._version for p in params]
    type(optimizer).step.__wrapped__(layer_optimizer)  # type: ignore[attr-defined]  # without the hooks around it
    silent = [p for p, before in zip(params, counters, strict=True) if p._version == before]
    if silent:
        # A fused kernel moves no version counter. Autograd uses the counter to detect that a tensor which it saved for
        # a backward pass was overwritten. So the counter is moved here.
        torch.autograd.graph.increment_version(silent)


def tensors_of(optimizer: Optimizer, param: torch.Tensor) -> list[torch.Tensor]:
    """Return a parameter and the tensors of its optimizer state: of a DTensor the local tensor."""
    state = optimizer.state.get(param)
    return [local_of(param), *(local_of(v) for v in (state or {}).values() if isinstance(v, torch.Tensor))]


class PartialUpdate:
    """The indexes of the optimizers whose updates are not complete, and an error that ``step()`` must raise."""

    def __init__(self) -> None:
        self._indexes: set[int] = set()
        self._error: StateChangedError | None = None
        """The error that ``raise_deferred`` raises, or None."""

    def __bool__(self) -> bool:
        return bool(self._indexes)

    def begin(self, index: int) -> None:
        self._indexes.add(index)

    def end(self, index: int) -> None:
        self._indexes.discard(index)

    def refuse_boundary(self) -> None:
        """Raise ``SessionError`` while an update is not complete, because no step starts from a state in which only
        some layers are updated."""
        if self._indexes:
            raise SessionError(
                "A checkpoint cannot be closed between backward() and step(): lightck.layerwise() updates layers "
                "inside backward(), so some layers are updated now and others are not. Call step() of each layer-wise "
                "optimizer first. (A backward() updates the layers of every layer-wise optimizer that it reaches. If "
                "this backward() is not meant to update some optimizer's layers, do not call lightck.layerwise() for "
                "that optimizer.)"
            )

    def call_and_defer_error(self, work: Callable[[], None]) -> bool:
        """Call ``work`` inside a backward pass, and return whether it succeeded. If ``work`` raises
        ``StateChangedError``, keep the error for ``raise_deferred``, because an error that is raised here would end the
        backward pass before all gradients are computed."""
        try:
            work()
        except StateChangedError as err:
            self._error = err
            return False
        return True

    def raise_deferred(self) -> None:
        """Raise the error that ``call_and_defer_error`` kept, if there is one, and forget it."""
        error, self._error = self._error, None
        if error is not None:
            raise error
