"""``lightck.layerwise(model, optimizer)``: what can be updated layer by layer, and what is refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightck import sessions
from lightck.errors import SessionError, UnsupportedError
from lightck.hooks.layerwise import Layerwise, layerwise_of, refuse_many_ranks, refuse_parallel
from lightck.state.nest import has_hooks, inner_of

_ALL_AT_ONCE = (torch.optim.LBFGS, torch.optim.SparseAdam)


def layerwise(model: nn.Module, optimizer: Optimizer) -> Layerwise:
    """Update each layer of ``model`` inside ``backward()``, as soon as its gradients are final.

    The loop stays as it is: ``backward()``, then ``optimizer.step()``, which does what is left. The result is the same
    to the bit. Call it before :func:`lightck.attach`; the copy of each layer into the pool then begins at its update.

    Args:
        model: its modules with parameters of their own are the layers.
        optimizer: of a class of ``torch.optim``, without wrappers around it, on the CPU, in one process.

    Raises:
        UnsupportedError: this optimizer, or this training, needs all gradients at once. What cannot be seen here
            (clipping, GradScaler, a second ``backward()``, ``step(closure)``) is refused where it happens.
        TypeError: not a module, or not an optimizer.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"layerwise(model=...) is a {type(model).__name__}. Pass the model, then its optimizer.")
    _refuse(optimizer)
    refuse_parallel(model)
    known = layerwise_of(optimizer)
    if known is not None and known.is_of(model):
        return known
    if sessions.has_open_session(model):
        raise SessionError(
            "This model has an open session, which waits at step() and not before the first layer of it. Call "
            "lightck.layerwise() before lightck.attach()."
        )
    if known is not None:
        raise SessionError("This optimizer updates the layers of another model already. Call remove() of that first.")
    return Layerwise(model, optimizer)


def _refuse(optimizer: Any) -> None:
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer) or not has_hooks(optimizer):
        raise TypeError(f"layerwise(optimizer=...) is a {kind}. Pass an instance of a class of torch.optim.")
    refuse_many_ranks()
    step = getattr(type(optimizer).step, "__wrapped__", None)
    if step is None or not str(step.__module__).startswith("torch.optim.") or inner_of(optimizer):
        raise UnsupportedError(
            f"{kind} has a step() of its own, or wraps another optimizer. What it does with gradients of several "
            "layers cannot be seen from outside. A layer-wise update is for the classes of torch.optim."
        )
    if isinstance(optimizer, _ALL_AT_ONCE) or any(g.get("differentiable") for g in optimizer.param_groups):
        raise UnsupportedError(
            f"{kind} needs the gradients of all layers, or their graph, at once. It cannot be called layer by layer. "
            "Use another optimizer, or leave out lightck.layerwise()."
        )
    devices = {p.device.type for group in optimizer.param_groups for p in group["params"]}
    if devices - {"cpu"}:
        raise UnsupportedError(
            f"The parameters lie on {', '.join(sorted(devices))}. A layer-wise update is there for the CPU only. Leave "
            "out lightck.layerwise()."
        )
