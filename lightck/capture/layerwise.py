"""The layer-wise update: each layer is stepped inside the backward pass, as soon as its gradients are final.

So the copy of a layer into the pool begins while other layers still compute. The flow is LightCheck's ("LightCheck:
A Cost-Efficient Checkpointing System for Distributed DNN Training with Persistent Memory", ICCD 2023).

Each layer has an instance of the user's own optimizer class over its parameters. It shares ``state`` with the user's
optimizer and takes its options anew at every update, so schedulers, ``state_dict`` and a resume see one optimizer, and
every element goes through the same operations as in ``optimizer.step()``. Invariant: each parameter is updated once
between two calls of ``step()``, with the gradient that ``step()`` would have used, or an error says why it cannot be.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from lightck.capture.inventory import clean_prefixes
from lightck.errors import SessionError, UnsupportedError

_NOT_SHARED = ("step", "_optimizer_")
"""Beginnings of attributes that a layer's instance does not take over: hooks, and a ``step`` that a scheduler wrapped.
So it keeps no optimizer alive, and nobody who looks for optimizers finds it."""


_is_trained = attrgetter("requires_grad")


class Listener(Protocol):
    """Who is told of updates inside the backward pass."""

    def layers_begin(self, optimizer: Optimizer) -> None:
        """Nothing may be updated before this returns."""

    def layer_updated(self, name: str, begin: int, tensors: Sequence[torch.Tensor]) -> None:
        """These are what they will be after the step. ``begin``: nanoseconds of CLOCK_MONOTONIC."""


@dataclass(slots=True)
class _Layer:
    """A module's own parameters, and what steps them."""

    name: str
    optimizer: Any
    params: list[torch.Tensor]
    groups: list[dict[str, Any]]
    """Those of the user's optimizer, parallel to ``optimizer.param_groups``."""
    arrived: set[int] = field(default_factory=set)

    @property
    def is_ready(self) -> bool:
        return all(id(p) in self.arrived for p in self.params if p.requires_grad)


@dataclass(frozen=True, slots=True)
class _Used:
    """A gradient as it was when its parameter was updated."""

    param: torch.Tensor
    grad: torch.Tensor
    version: int


_known: weakref.WeakKeyDictionary[Optimizer, Layerwise] = weakref.WeakKeyDictionary()


def layerwise_of(optimizer: Any) -> Layerwise | None:
    """What updates this optimizer's layers in the backward pass, or None."""
    return _known.get(optimizer) if isinstance(optimizer, Optimizer) else None


class Layerwise:
    """Made by :func:`lightck.layerwise`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._listener: weakref.ref[Listener] | None = None
        self._model = weakref.ref(model)
        self._optimizer = weakref.ref(optimizer)
        self._layer_of: dict[int, _Layer] = {}
        self._used: dict[int, _Used] = {}
        """Parameters that were updated since the last ``step()``."""
        self._put_back: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._accumulating = 0
        self._shape: list[tuple[int, list[bool]]] = []
        self._param_handles: list[Any] = []
        self._build(model, optimizer)
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(self._step_pre),
            optimizer.register_step_post_hook(self._step_post),
        ]
        _known[optimizer] = self

    # -- what a user calls -------------------------------------------------------------------------------

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the modules that are updated one by one."""
        return tuple(dict.fromkeys(layer.name for layer in self._layer_of.values()))

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Around every ``backward()`` but the last one before ``step()``: gradients add up, and nothing is updated."""
        self._accumulating += 1
        try:
            yield
        finally:
            self._accumulating -= 1

    def remove(self) -> None:
        """From here on ``optimizer.step()`` updates everything again. Between ``step()`` and ``backward()`` only."""
        if self._used:
            raise SessionError(
                "Layers were updated whose optimizer.step() is still to come. Their gradients would count twice. Call "
                "step() first, then remove()."
            )
        for handle in [*self._handles, *self._param_handles]:
            handle.remove()
        self._handles.clear()
        self._param_handles.clear()
        self._layer_of.clear()
        optimizer = self._optimizer()
        if optimizer is not None:
            _known.pop(optimizer, None)

    def tell(self, listener: Listener) -> _Telling:
        """Tell this one, and no other, until the handle is removed."""
        self._listener = weakref.ref(listener)
        return _Telling(self)

    @property
    def listener(self) -> Listener | None:
        return None if self._listener is None else self._listener()

    def hush(self) -> None:
        self._listener = None

    # -- layers ------------------------------------------------------------------------------------------

    def _build(self, model: nn.Module, optimizer: Optimizer) -> None:
        """A layer for each module that trains parameters of this optimizer; a tied one belongs to its first module."""
        for handle in self._param_handles:
            handle.remove()
        self._param_handles.clear()
        self._layer_of.clear()
        group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for prefix, module in clean_prefixes(model):
            own = [p for p in module._parameters.values() if p is not None and p.requires_grad and id(p) in group_of]
            params = [p for p in own if id(p) not in self._layer_of]
            if params:
                layer = _layer(prefix.rstrip(".") or type(model).__name__, params, group_of, optimizer)
                self._layer_of.update((id(p), layer) for p in params)
                hook = _weakly(self)
                handles = [p.register_post_accumulate_grad_hook(hook) for p in params]  # type: ignore[no-untyped-call]
                self._param_handles.extend(handles)
        self._shape = _shape_of(optimizer)

    # -- in the backward pass ----------------------------------------------------------------------------

    def arrived(self, param: torch.Tensor) -> None:
        """The gradient of this backward pass is in ``param.grad``."""
        layer = self._layer_of.get(id(param))
        if self._accumulating or layer is None:
            return
        if id(param) in self._used:
            raise UnsupportedError(
                f"A second gradient arrived for a parameter of {layer.name!r}, which was updated with the first one "
                "already: layers are updated inside backward(). Call optimizer.step() after each backward(); to add "
                "gradients up, put all but the last into `with layerwise.accumulate():`."
            )
        layer.arrived.add(id(param))
        if layer.is_ready:
            layer.arrived.clear()
            self._update(layer)

    def _update(self, layer: _Layer) -> None:
        optimizer, listener = self._optimizer(), self.listener
        if optimizer is None:
            return
        if not self._used:
            refuse_many_ranks()
            _refuse_scaled(optimizer)
            if listener is not None:
                listener.layers_begin(optimizer)
        begin = time.monotonic_ns()
        params = [p for p in layer.params if p.grad is not None]
        self._used.update((id(p), _Used(p, p.grad, p.grad._version)) for p in params if p.grad is not None)
        _step(layer, optimizer, params)
        if listener is not None:
            listener.layer_updated(layer.name, begin, [t for p in params for t in _tensors_of(optimizer, p)])

    # -- in step() ---------------------------------------------------------------------------------------

    def _step_pre(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Hide the gradients that were used: ``step()`` passes over parameters without one, and does the others."""
        self._show_gradients()
        if _shape_of(optimizer) != self._shape:
            model = self._model()
            if model is not None:
                self._build(model, optimizer)
        if callable(kwargs.get("closure")) or (len(args) > 1 and callable(args[1])):
            raise UnsupportedError(
                "step(closure) was called, and layers are updated inside backward(): the closure's backward would "
                "update them before step() does. Call backward() yourself, then step()."
            )
        if not self._used:
            return
        _refuse_scaled(optimizer)
        self._refuse_changed()
        for used in self._used.values():
            if used.param.grad is not None:
                self._put_back.append((used.param, used.param.grad))
                used.param.grad = None

    def _refuse_changed(self) -> None:
        for used in self._used.values():
            grad = used.param.grad
            if grad is not None and (grad is not used.grad or grad._version != used.version):
                name = self._layer_of[id(used.param)].name if id(used.param) in self._layer_of else "a layer"
                raise UnsupportedError(
                    f"The gradients of {name!r} were changed between backward() and step(), and the layer was updated "
                    "with what they were before. Clipping by the global norm, GradScaler and other things that look at "
                    "all gradients cannot go with a layer-wise update. Leave out lightck.layerwise(), or those. (What "
                    "is committed in the pool is from before this step.)"
                )

    def _show_gradients(self) -> None:
        for param, grad in self._put_back:
            param.grad = grad
        self._put_back.clear()

    def _step_post(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._show_gradients()
        self._used.clear()
        for layer in self._layer_of.values():
            layer.arrived.clear()


class _Telling:
    """As torch's handles of hooks."""

    def __init__(self, layers: Layerwise) -> None:
        self._layers = weakref.ref(layers)

    def remove(self) -> None:
        layers = self._layers()
        if layers is not None:
            layers.hush()


def refuse_many_ranks() -> None:
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise UnsupportedError(
            "A process group of several ranks is there. Its gradients are reduced after this process has them, and a "
            "layer-wise update would use the unreduced ones. Leave out lightck.layerwise()."
        )


def _refuse_scaled(optimizer: Any) -> None:
    fused = getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None
    if fused or _is_called_by_a_scaler():
        raise UnsupportedError(
            "A GradScaler drives this optimizer. Whether a step is skipped is known when all gradients are there, and "
            "a layer-wise update comes before that. Leave out lightck.layerwise(), or the scaler (bfloat16 needs none)."
        )


def _is_called_by_a_scaler() -> bool:
    """Asked of the stack: what ``unscale_`` writes to the gradients moves no version counter (measured)."""
    frame, depth = sys._getframe(1), 0
    while frame is not None and depth < 12:
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            return True
        frame, depth = frame.f_back, depth + 1  # type: ignore[assignment]
    return False


def _shape_of(optimizer: Optimizer) -> list[tuple[int, list[bool]]]:
    """What layers depend on: groups, how many parameters each has, and which of them are trained."""
    return [(id(group), list(map(_is_trained, group["params"]))) for group in optimizer.param_groups]


def _layer(name: str, params: Sequence[torch.Tensor], group_of: dict[int, dict[str, Any]],
           optimizer: Optimizer) -> _Layer:  # fmt: skip
    """With an instance of the optimizer's class that was never initialised by itself: it is a view of the user's."""
    groups: dict[int, tuple[dict[str, Any], list[torch.Tensor]]] = {}
    for p in params:
        groups.setdefault(id(group_of[id(p)]), (group_of[id(p)], []))[1].append(p)
    part = type(optimizer).__new__(type(optimizer))
    part.__dict__.update((k, v) for k, v in optimizer.__dict__.items() if not k.startswith(_NOT_SHARED))
    part.param_groups = [{**group, "params": own} for group, own in groups.values()]
    return _Layer(name, part, list(params), [group for group, _ in groups.values()])


def _step(layer: _Layer, optimizer: Optimizer, params: Sequence[torch.Tensor]) -> None:
    """The user's ``step`` on these parameters, with the options and the state that the user's optimizer has now."""
    part = layer.optimizer
    part.state = optimizer.state
    for mine, theirs in zip(part.param_groups, layer.groups, strict=True):
        mine.update((key, value) for key, value in theirs.items() if key != "params")
    versions = [p._version for p in params]
    type(optimizer).step.__wrapped__(part)  # type: ignore[attr-defined]  # without the hooks around it
    silent = [p for p, before in zip(params, versions, strict=True) if p._version == before]
    if silent:  # a fused kernel: autograd is to know that what it saved is no more
        torch.autograd.graph.increment_version(silent)


def _tensors_of(optimizer: Optimizer, param: torch.Tensor) -> list[torch.Tensor]:
    state = optimizer.state.get(param)
    return [param, *(v for v in (state or {}).values() if isinstance(v, torch.Tensor))]


def _weakly(owner: Layerwise) -> Any:
    """A parameter's hook must not keep the optimizer alive."""
    ref = weakref.ref(owner)

    def hook(param: torch.Tensor) -> None:
        alive = ref()
        if alive is not None:
            alive.arrived(param)

    return hook
