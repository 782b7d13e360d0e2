"""What ``lightck.layerwise`` refuses: trainings whose update needs more than the final gradients of one layer.

A gradient is final when nothing changes it any more before ``step()``. In one process that is when autograd has
accumulated it. In a group of ranks it is when the ranks have reduced it: with ``fully_shard`` (FSDP2) torch then calls
the same hook, and with DistributedDataParallel ``ReducedBuckets`` takes the gradients from the buckets.
"""

from __future__ import annotations

from types import FrameType
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn
from torch.optim import Optimizer

from lightck.errors import UnsupportedError
from lightck.hooks import own_hooks
from lightck.state.local_tensors import is_dtensor, params_of_fully_shard
from lightck.state.optimizer_wrappers import has_hooks, inner_of
from lightck.state.ranks import rank_and_world_size

_NEEDS_ALL_GRADIENTS = (torch.optim.LBFGS, torch.optim.SparseAdam)
"""Optimizers that cannot be stepped layer by layer."""


class GradientReduction(NamedTuple):
    """How the gradients of a model are reduced. module: the model, or the module inside ``ddp``. ddp: the
    DistributedDataParallel; None: there is none. is_fully_sharded: whether ``fully_shard`` reduces them."""

    module: nn.Module
    ddp: Any
    is_fully_sharded: bool


def checked_reduction(model: object, optimizer: Optimizer, *, has_hook: bool) -> GradientReduction:
    """Return how the gradients are reduced. ``has_hook``: whether the user passes a communication hook. Raises
    ``TypeError``, or ``UnsupportedError`` for a training that cannot be updated layer by layer."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"layerwise(model=...) is a {type(model).__name__}. Pass the model, then its optimizer.")
    _refuse_optimizer(optimizer)
    ddp = model if _is_ddp(model) else None
    if ddp is None and has_hook:
        raise TypeError("layerwise(comm_hook=..., comm_state=...) are for a DistributedDataParallel. Pass it as model.")
    module: nn.Module = model if ddp is None else ddp.module
    _refuse_inner_ddp(module)
    is_fully_sharded = _is_fully_sharded_training(module, optimizer)
    if ddp is not None:
        _refuse_ddp(ddp, optimizer)
    elif not is_fully_sharded:
        refuse_many_ranks()
    return GradientReduction(module, ddp, is_fully_sharded)


def _is_ddp(model: nn.Module) -> TypeGuard[Any]:
    """Whether the module is a DistributedDataParallel."""
    return isinstance(model, nn.parallel.DistributedDataParallel)


def _refuse_optimizer(optimizer: object) -> None:
    """Raise ``TypeError`` or ``UnsupportedError`` for an optimizer that cannot update one layer alone."""
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer) or not has_hooks(optimizer):
        raise TypeError(f"layerwise(optimizer=...) is a {kind}. Pass an instance of a class of torch.optim.")
    step = getattr(type(optimizer).step, "__wrapped__", None)
    if step is None or not str(step.__module__).startswith("torch.optim.") or inner_of(optimizer):
        raise UnsupportedError(
            f"{kind} has a step() of its own, or wraps another optimizer. lightck cannot see whether such a step() "
            "combines the gradients of several layers. Use a class of torch.optim itself, or leave out "
            "lightck.layerwise()."
        )
    if isinstance(optimizer, _NEEDS_ALL_GRADIENTS) or any(g.get("differentiable") for g in optimizer.param_groups):
        raise UnsupportedError(
            f"{kind} needs the gradients of all layers at once, takes sparse gradients only, or was built with "
            "differentiable=True. Such an optimizer cannot update layer by layer. Use another optimizer, or leave out "
            "lightck.layerwise()."
        )
    devices = {p.device.type for group in optimizer.param_groups for p in group["params"]}
    if devices - {"cpu"}:
        raise UnsupportedError(
            f"The parameters lie on {', '.join(sorted(devices))}. A layer-wise update works on the CPU only. Leave "
            "out lightck.layerwise()."
        )


def _is_fully_sharded_training(model: nn.Module, optimizer: Optimizer) -> bool:
    """Whether ``fully_shard`` reduces the gradients of all parameters of the optimizer. Raises ``UnsupportedError`` if
    they are DTensors, and it does not."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(map(is_dtensor, params)):
        return False
    reduced = {id(p) for own in params_of_fully_shard(model).values() for p in own}
    if any(id(p) not in reduced for p in params):
        raise UnsupportedError(
            "Some parameters of the optimizer are DTensors, and fully_shard does not reduce the gradients of all of "
            "them (tensor parallelism without fully_shard, ignored_params=, or a parameter outside of the model). "
            "lightck does not know when the other gradients are final. Leave out lightck.layerwise()."
        )
    return True


def _refuse_inner_ddp(model: nn.Module) -> None:
    """Refuse a model that contains a DistributedDataParallel, which moves gradients into buckets after lightck's hooks
    have received them."""
    if any(map(_is_ddp, model.modules())):
        raise UnsupportedError(
            "A part of the model is wrapped in DistributedDataParallel, which replaces each gradient by the reduced "
            "one from its buckets. A layer-wise update would use the gradient from before. Wrap the whole model, and "
            "pass the wrapper: lightck.layerwise(ddp, optimizer), before torch.compile(ddp); or leave out "
            "lightck.layerwise()."
        )


def _refuse_ddp(ddp: Any, optimizer: Optimizer) -> None:
    """Refuse what a DistributedDataParallel does to gradients outside of its buckets."""
    if getattr(ddp, "mixed_precision", None) is not None:
        raise UnsupportedError(
            "DistributedDataParallel(mixed_precision=...) converts the reduced gradients after its buckets are "
            "complete, and a layer-wise update would use them before. Use torch.autocast, or leave out "
            "lightck.layerwise()."
        )
    ignored = set(getattr(ddp, "parameters_to_ignore", ()) or ())
    of_ddp = {id(p) for name, p in ddp.module.named_parameters() if name not in ignored}
    if any(id(p) not in of_ddp for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
        raise UnsupportedError(
            "The optimizer has parameters that the DistributedDataParallel does not reduce (ignored ones, or ones of "
            "another model). Give them an optimizer of their own, or leave out lightck.layerwise()."
        )


def refuse_many_ranks() -> None:
    """Refuse a process that is one of several ranks, if nothing is known to reduce the gradients."""
    if rank_and_world_size() is not None:
        raise UnsupportedError(
            "This process is one of several ranks, and the model is neither a DistributedDataParallel nor a model "
            "after fully_shard. So gradients are reduced at a moment that lightck does not know, and a layer-wise "
            "update would use the unreduced ones. Pass the DistributedDataParallel itself to lightck.layerwise(), or "
            "call fully_shard before lightck.layerwise(), or leave out lightck.layerwise()."
        )


def refuse_scaled(optimizer: Optimizer) -> None:
    """Refuse a step that a GradScaler calls."""
    # A scaler sets these attributes of a fused optimizer, before it calls ``step``.
    has_scale = getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None
    # For other optimizers the call stack is searched. The check for changed gradients would not find a scaler, because
    # ``unscale_`` moves no version counter.
    if has_scale or own_hooks.is_called_by(_is_of_scaler):
        raise UnsupportedError(
            "A GradScaler calls step() of this optimizer. The scaler decides whether to skip a step only when all "
            "gradients are computed, and a layer-wise update is made before that decision. Leave out "
            "lightck.layerwise(), or the scaler (bfloat16 needs no scaler)."
        )


def _is_of_scaler(frame: FrameType) -> bool:
    """Whether this frame runs a method of an enabled GradScaler. (A disabled GradScaler does nothing but call
    ``step``.)"""
    scaler = frame.f_locals.get("self") if frame.f_globals.get("__name__") == "torch.amp.grad_scaler" else None
    return scaler is not None and bool(scaler.is_enabled())
