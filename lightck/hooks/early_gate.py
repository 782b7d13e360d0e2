"""The early gate of a group of ranks: a moment in the backward pass, before the last gradients of this rank are sent.

A rank's update can begin only after every rank has sent its gradients. So, if each rank waits for its checkpoint *t*
before it sends the last gradients of step *t + 1*, no rank finishes step *t + 1* before checkpoint *t* is common. The
gate before ``optimizer.step()`` comes too late for that: by then this rank has sent everything.

The hook is on the gradient of the output of one module that owns trainable parameters. The gradients of these
parameters are computed after the hook has run, so they cannot have been sent before. The module is the first one in the
order of registration. It usually runs first in the forward, so its gradients come last in the backward pass, and the
copies have nearly the whole step until the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from lightck.hooks import own_hooks


class EarlyGate:
    """The hooks of the early gate of one session. They do not run in a step in which the module does not run, or in a
    graph that torch.compile has traced."""

    def __init__(self, model: nn.Module, is_needed: Callable[[], bool], pass_gate: Callable[[], None]) -> None:
        """``is_needed``: whether a checkpoint waits for the gate now. ``pass_gate``: called in the backward pass."""
        self._is_needed, self._pass_gate = is_needed, pass_gate
        module = gate_module(model)
        self.handles: list[own_hooks.Handle] = []
        if module is not None:
            hook = module.register_forward_hook(own_hooks.ModuleHook(self._forward))
            self.handles = [hook, own_hooks.HookFreeCopies(module)]

    def _forward(self, module: nn.Module, _: object, output: object) -> None:
        if not module.training or not torch.is_grad_enabled() or not self._is_needed():
            return
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._backward)  # type: ignore[no-untyped-call]
                return

    def _backward(self, _: torch.Tensor) -> None:
        self._pass_gate()


def gate_module(model: nn.Module) -> nn.Module | None:
    """Return the module whose output gets the hook; None if no module owns a trainable parameter. The root is the last
    choice, because the gradient of the root's output comes at the very beginning of the backward pass."""
    modules = [m for m in model.modules() if any(p is not None and p.requires_grad for p in m._parameters.values())]
    return next((module for module in modules if module is not model), modules[0] if modules else None)


def _tensors(output: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in the output of a module: in tuples, lists and dicts too."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for one in output:
            yield from _tensors(one)
    elif isinstance(output, dict):
        yield from _tensors(list(output.values()))
