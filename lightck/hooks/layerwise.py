"""The layer-wise update: each layer is stepped inside the backward pass, as soon as its gradients are final.

So the copy of a layer into the pool begins while other layers still compute. The method is LightCheck's ("LightCheck:
A Cost-Efficient Checkpointing System for Distributed DNN Training with Persistent Memory", ICCD 2023).

In a group of ranks the gradients are final when the ranks have reduced them: with ``fully_shard`` (FSDP2) inside the
backward pass, with DistributedDataParallel at its end, bucket by bucket (``hooks/reduced_buckets.py``).

Each layer has an optimizer of its own: an instance of the class of the user's optimizer, over the layer's parameters.
This instance shares ``state`` with the user's optimizer, and copies the options of the user's optimizer before every
update. So schedulers, ``state_dict`` and a resume see only the user's optimizer, and every element goes through the
same operations as in ``optimizer.step()``. Invariant: each parameter is updated once between two calls of ``step()``,
with the gradient that ``step()`` would have used. If the loop breaks the invariant, an error names the reason.
"""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightck import sessions
from lightck.errors import SessionError, UnsupportedError
from lightck.events import ReducedBucket, StepListener
from lightck.hooks import own_hooks
from lightck.hooks.layers import (
    Layer,
    UsedGradient,
    counters_of,
    crcs_of,
    group_structure,
    make_layer,
    options_of,
    step_layer,
    tensors_of,
)
from lightck.hooks.layerwise_arguments import (
    checked_reduction,
    refuse_many_ranks,
    refuse_scaled,
)
from lightck.hooks.reduced_buckets import CommHook, ReducedBuckets
from lightck.state.blocks import compares_all
from lightck.state.inventory import clean_prefixes
from lightck.state.local_tensors import params_of_fully_shard

_FULLY_COMPARED = 3
"""In the first ``_FULLY_COMPARED`` steps of a ``Layerwise``, the bytes of every gradient and of every updated parameter
are compared."""
_CURE = (
    "To accumulate gradients, put every backward() except the last one before step() into "
    "`with layers.accumulate():`, where layers is what lightck.layerwise() returned. After a backward() that failed, "
    "call layers.forget()."
)
_layerwise_by_optimizer: weakref.WeakKeyDictionary[Optimizer, Layerwise] = weakref.WeakKeyDictionary()


def layerwise_of(optimizer: object) -> Layerwise | None:
    """Return the object that updates this optimizer's layers in the backward pass; None if there is no such object."""
    return _layerwise_by_optimizer.get(optimizer) if isinstance(optimizer, Optimizer) else None


def layerwise(
    model: nn.Module, optimizer: Optimizer, *, comm_hook: CommHook | None = None, comm_state: object = None
) -> Layerwise:
    """Update each layer of ``model`` inside ``backward()``, as soon as its gradients are final.

    The loop stays as it is: ``backward()``, then ``optimizer.step()``, which completes the update. The result is
    bit-identical. Call ``layerwise`` before :func:`lightck.attach`. Then the copy of each layer into the pool begins at
    the layer's update.

    In a group of ranks each rank calls it. A layer is then updated as soon as the ranks have reduced its gradients,
    while other layers are still communicated.

    Args:
        model: each of its modules that has parameters of its own is a layer. In a group of ranks: the
            DistributedDataParallel, or a model after ``fully_shard``.
        optimizer: an instance of a ``torch.optim`` class without wrappers, over CPU parameters.
        comm_hook: your communication hook of the DistributedDataParallel. Pass it here instead of to
            ``register_comm_hook``: torch takes one hook only, which is lightck's. None: gradients are averaged as
            without a hook.
        comm_state: the first argument of ``comm_hook``.

    Returns:
        The layers. A second call with the same model and optimizer returns the same object.

    Raises:
        UnsupportedError: this optimizer, or this training, needs all gradients at once. Clipping, GradScaler,
            a second ``backward()`` and ``step(closure)`` raise this error when they happen.
        SessionError: the model has an open session, or the optimizer updates the layers of another model.
        TypeError: ``model`` is no module, ``optimizer`` is no optimizer of torch, or there is a ``comm_hook`` and no
            DistributedDataParallel.
    """
    has_hook = comm_hook is not None or comm_state is not None
    model, ddp, is_fully_sharded = checked_reduction(model, optimizer, has_hook=has_hook)
    known = layerwise_of(optimizer)
    if known is not None and known.is_of(model) and known.is_reduced_by(ddp, is_fully_sharded):
        if ddp is not None:
            ReducedBuckets.register(ddp, comm_hook, comm_state)  # raises if the hook is another one
        return known
    if sessions.has_open_session(model):
        raise SessionError(
            "This model has an open session, which expects all updates in step(). Layers that are updated earlier "
            "would be saved wrongly. Call lightck.layerwise() before lightck.attach()."
        )
    if known is not None and not known.is_of(model):
        raise SessionError(
            "This optimizer updates the layers of another model already. An optimizer can update the layers of one "
            "model only. First call remove() of the object that lightck.layerwise() returned for the other model."
        )
    if known is not None:
        known.remove()  # the model has another DistributedDataParallel now, or was sharded
    buckets = None if ddp is None else ReducedBuckets.register(ddp, comm_hook, comm_state)
    return Layerwise(model, optimizer, buckets, is_fully_sharded)


class Layerwise:
    """The layers of one model and optimizer, made by :func:`lightck.layerwise`."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, buckets: ReducedBuckets | None, is_fully_sharded: bool
    ) -> None:
        """Use ``layerwise``. ``buckets``: the hook of the DistributedDataParallel that reduces the gradients;
        ``is_fully_sharded``: whether ``fully_shard`` does."""
        self._buckets, self._is_fully_sharded = buckets, is_fully_sharded
        self._computed: set[int] = set()
        """ids of the parameters of which this rank has computed a gradient since the last ``step()``; only with
        ``buckets``."""
        self._listeners: OrderedDict[int, tuple[weakref.ref[StepListener], int]] = OrderedDict()
        """id of a handle -> (weak reference to a listener, the optimizer's index in the listener's session)."""
        self._model = weakref.ref(model)
        self._optimizer = weakref.ref(optimizer)
        self._layers: list[Layer] = []
        self._layer_of: dict[int, Layer] = {}
        """id of a parameter -> its layer."""
        self._used: dict[int, UsedGradient] = {}
        """id of a parameter that was updated since the last ``step()`` -> the gradient that its update used."""
        self._is_first_gradient = True
        """Whether the next gradient is the first one since the last ``step()``."""
        self._updates = 0
        """Number of steps in which this object has updated a layer."""
        self._accumulating = 0
        """Number of ``accumulate()`` blocks that are entered now."""
        self._is_rebind_queued = False
        """Whether ``rebind_gradients`` will be called at the end of this backward pass; only with
        ``is_fully_sharded``."""
        self._compares_all = compares_all()
        self._structure: list[object] = []
        """The ``group_structure`` from which the layers were built."""
        self._param_handles: list[own_hooks.Handle] = []
        self._build(model, optimizer)
        self._step_hooks = (
            optimizer.register_step_pre_hook(self._step_pre),
            optimizer.register_step_post_hook(self._step_post),
        )
        self._handles: list[own_hooks.Handle] = [
            *self._step_hooks,
            model.register_forward_pre_hook(own_hooks.ModuleHook(own_hooks.weak_hook(self._forward_begins))),
            own_hooks.HookFreeCopies(model),
        ]
        if buckets is not None:
            buckets.add(self)
        _layerwise_by_optimizer[optimizer] = self

    # -- what a user calls -------------------------------------------------------------------------------

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the modules that are updated one by one."""
        return tuple(dict.fromkeys(layer.name for layer in self._layers))

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Accumulate gradients: a ``backward()`` inside this block updates no layer. Put every ``backward()`` except
        the last one before ``step()`` into such a block."""
        self._accumulating += 1
        try:
            yield
        finally:
            self._accumulating -= 1

    def forget(self) -> None:
        """Continue after a ``backward()`` that raised. The layers that were updated stay updated, and all gradients are
        set to None. The unfinished update is not counted as a step, and the pool keeps the checkpoint of the step
        before."""
        optimizer = self._optimizer()
        for layer in self._layers:
            for param in layer.params:
                param.grad = None
        self._reset()
        if optimizer is not None:
            for listener, index in self._live_listeners():
                listener.layers_abandoned(index)

    def remove(self) -> None:
        """End the layer-wise update: from now on ``optimizer.step()`` updates all layers. Call ``remove`` between
        ``step()`` and the next ``backward()``. Raises ``SessionError`` between ``backward()`` and ``step()``."""
        if self._used:
            raise SessionError(
                "Layers were updated inside backward(), and optimizer.step() was not called yet. After remove(), "
                "step() would use the gradients of these layers a second time. Call step() first (or forget(), after a "
                "backward() that failed), then remove()."
            )
        own_hooks.remove(self._handles)
        own_hooks.remove(self._param_handles)
        if self._buckets is not None:
            self._buckets.remove(self)
        self._layers.clear()
        self._layer_of.clear()
        optimizer = self._optimizer()
        if optimizer is not None:
            _layerwise_by_optimizer.pop(optimizer, None)

    def is_of(self, model: nn.Module) -> bool:
        """Whether these are the layers of this model (of the module inside a DistributedDataParallel)."""
        return self._model() is model

    def is_reduced_by(self, ddp: object, is_fully_sharded: bool) -> bool:
        """Whether the gradients are reduced as these arguments say (``ddp`` None: by no DistributedDataParallel)."""
        own = None if self._buckets is None else self._buckets.ddp
        return own is ddp and is_fully_sharded == self._is_fully_sharded

    def add_listener(self, listener: StepListener, index: int) -> own_hooks.Handle:
        """Report updates inside the backward pass to ``listener``, until the returned handle is removed. ``index``: the
        number of the optimizer in these events. Only a weak reference to the listener is kept."""
        handle = RemovableHandle(self._listeners)
        self._listeners[handle.id] = weakref.ref(listener), index
        return handle

    def _live_listeners(self) -> list[tuple[StepListener, int]]:
        listeners = [(ref(), index) for ref, index in self._listeners.values()]
        return [(listener, index) for listener, index in listeners if listener is not None]

    # -- layers ------------------------------------------------------------------------------------------

    def _build(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Make one layer for each module that has parameters of its own which are trained by this optimizer. A tied
        parameter belongs to the first of its modules."""
        own_hooks.remove(self._param_handles)
        self._layers.clear()
        self._layer_of.clear()
        group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        # Between unshard and reshard the modules hold other tensors, so fully_shard is asked for its parameters.
        sharded = params_of_fully_shard(model) if self._is_fully_sharded else None
        arrives = self.gradient_arrived if self._buckets is None else self._gradient_computed
        for prefix, module in clean_prefixes(model):
            own = module._parameters.values() if sharded is None else sharded.get(module, ())
            trained = {id(p): p for p in own if p is not None and p.requires_grad}
            params = [p for key, p in trained.items() if key in group_of and key not in self._layer_of]
            if params:
                layer = make_layer(prefix.rstrip(".") or type(model).__name__, params, group_of, optimizer)
                self._layers.append(layer)
                self._layer_of.update((id(p), layer) for p in params)
                hook = own_hooks.weak_hook(arrives)
                handles = [p.register_post_accumulate_grad_hook(hook) for p in params]  # type: ignore[no-untyped-call]
                self._param_handles.extend(handles)
        self._structure = group_structure(optimizer)

    def _rebuild_if_changed(self, optimizer: Optimizer) -> None:
        """Build the layers anew if groups or parameters were added, removed, frozen, or replaced by
        ``load_state_dict``."""
        model = self._model()
        if model is not None and group_structure(optimizer) != self._structure:
            self._build(model, optimizer)

    # -- in the backward pass ----------------------------------------------------------------------------

    @property
    def is_accumulating(self) -> bool:
        """As ``GradientReceiver.is_accumulating``."""
        return self._accumulating > 0

    def has_computed(self, param: torch.Tensor) -> bool:
        """As ``GradientReceiver.has_computed``."""
        return id(param) in self._computed

    def rebind_gradients(self) -> None:
        """As ``GradientReceiver.rebind_gradients``."""
        for used in self._used.values():
            used.rebind()

    def buckets_reduced(self, buckets: Sequence[ReducedBucket]) -> None:
        """As ``GradientReceiver.buckets_reduced``."""
        for listener, _ in self._live_listeners():
            listener.buckets_reduced(buckets)

    def _gradient_computed(self, param: torch.Tensor) -> None:
        """Note that this rank has computed a gradient, which is reduced later."""
        self._computed.add(id(param))

    def gradient_arrived(self, param: torch.Tensor) -> None:
        """Update the layer of ``param`` if all gradients of the layer are final. Called when ``param.grad`` is
        final: by torch, or by ``ReducedBuckets``."""
        optimizer = self._optimizer()
        if self._accumulating or optimizer is None:
            return
        if self._is_first_gradient:
            self._is_first_gradient = False
            self._rebuild_if_changed(optimizer)
        layer = self._layer_of.get(id(param))
        if layer is None:
            return
        if id(param) in self._used:
            raise UnsupportedError(
                f"A second gradient arrived for a parameter of the layer {layer.name!r}. The layer was updated with "
                "the first gradient already, because layers are updated inside backward(). Call optimizer.step() after "
                f"each backward(). {_CURE}"
            )
        layer.arrived.add(id(param))
        if layer.is_ready:
            layer.arrived.clear()
            self._update(layer, optimizer)

    def _update(self, layer: Layer, optimizer: Optimizer) -> None:
        listeners = self._live_listeners()
        if not self._used:
            if self._buckets is None and not self._is_fully_sharded:
                refuse_many_ranks()
            refuse_scaled(optimizer)
            # lightck's pre hook removes the used gradients, and its post hook puts them back. Other hooks must see the
            # gradients. So lightck's pre hook runs as the last pre hook, and its post hook as the first post hook.
            own_hooks.move_to_end(optimizer._optimizer_step_pre_hooks, self._step_hooks[0], last=True)
            own_hooks.move_to_end(optimizer._optimizer_step_post_hooks, self._step_hooks[1], last=False)
            self._updates += 1
            self._is_rebind_queued = False
            for listener, index in listeners:
                listener.layers_begin(index)
        if self._is_fully_sharded and not self._is_rebind_queued and not own_hooks.is_in_nested_backward():
            # fully_shard may add to gradients of other parameters later, in a buffer with one version counter for all.
            own_hooks.call_after_backward(self.rebind_gradients)
            self._is_rebind_queued = True
        begin = time.monotonic_ns()
        params = [p for p in layer.params if p.grad is not None]
        self._record_used(layer, params)
        step_layer(layer, optimizer, params)
        for p in params:
            self._used[id(p)].updated(optimizer)
        for listener, _ in listeners:
            listener.layer_updated(layer.name, begin, [t for p in params for t in tensors_of(optimizer, p)])

    def _record_used(self, layer: Layer, params: Sequence[torch.Tensor]) -> None:
        """Record what the layer's update uses, so that ``step()`` can detect later changes. A write through ``.data``
        moves no version counter, so the bytes of some gradients and parameters are compared as well: in the first
        ``_FULLY_COMPARED`` steps and under ``LIGHTCK_CHECK=1`` those of all layers, later the gradients of the first
        updated layer, and gradients and parameters of at most one more layer.

        The other layers take turns. The parameters are numbered in the order in which a step updates them. Each step
        chooses one number, and the next step chooses the number after it. A layer is compared if the number of its
        first parameter is chosen."""
        layer.used_options = [options_of(group) for group in layer.groups]
        first_number = len(self._used)  # the number of the layer's first parameter
        chosen_number = self._updates % max(len(self._layer_of), 1)
        compares_param = self._compares_all or self._updates <= _FULLY_COMPARED or first_number == chosen_number
        compares_grad = compares_param or first_number == 0
        for p in params:
            grad = p.grad
            assert grad is not None
            crcs = crcs_of(grad) if compares_grad else None
            self._used[id(p)] = UsedGradient(layer, p, grad, counters_of(grad), crcs, compares_param)

    # -- between backward() and step() -------------------------------------------------------------------

    def _forward_begins(self, *_: object) -> None:
        """Refuse a forward between ``backward()`` and ``step()``, because it would compute with parameters of the next
        step."""
        if self._used and torch.is_grad_enabled() and not own_hooks.is_in_backward():
            raise UnsupportedError(
                "A forward of the model began between backward() and step(). Layers of the model were updated "
                "inside backward() already, so this forward would use parameters of the next step. Call "
                "optimizer.step() before the next forward, or run all forwards before backward(). Run a forward that "
                f"only measures under torch.no_grad(). {_CURE}"
            )

    # -- in step() ---------------------------------------------------------------------------------------

    def _step_pre(self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Hide the gradients that layers were updated with: ``step()`` skips parameters without a gradient, and updates
        the others. Raises ``UnsupportedError`` if the layer-wise update differs from what ``step()`` would compute."""
        if own_hooks.closure_of(args, kwargs) is not None:
            raise UnsupportedError(
                "step(closure) was called, and lightck.layerwise() updates the layers inside backward(). The "
                "backward() inside the closure would update the layers before step() does. Call backward() yourself, "
                "then step() without a closure."
            )
        if not self._used:
            return
        refuse_scaled(optimizer)
        self._refuse_changed(optimizer)
        for used in self._used.values():
            used.is_hidden = True
            used.param.grad = None

    def _refuse_changed(self, optimizer: Optimizer) -> None:
        changes = [(used.layer, used.changed(optimizer)) for used in self._used.values()]
        changes += [(layer, layer.changed()) for layer in dict.fromkeys(layer for layer, _ in changes)]
        for layer, what in changes:
            if what is not None:
                raise UnsupportedError(
                    f"The {what} between backward() and step(), and the layer {layer.name!r} was updated inside "
                    "backward(), before that change. Clipping, GradScaler, and anything else that changes "
                    "gradients, parameters or options between backward() and step(), does not work with a layer-wise "
                    "update. Change options before backward(), or leave out lightck.layerwise(). The newest "
                    "checkpoint is that of the step before. To continue from the layers as they are now, call forget() "
                    "of the object that lightck.layerwise() returned."
                )

    def _step_post(self, *_: object) -> None:
        for used in self._used.values():
            if used.is_hidden and used.param.grad is None:
                used.param.grad = used.grad
        self._reset()

    def _reset(self) -> None:
        self._used.clear()
        self._computed.clear()
        self._is_first_gradient = True
        for layer in self._layers:
            layer.arrived.clear()
            layer.used_options.clear()
