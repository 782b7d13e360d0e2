"""Records when the forward and backward of each module run, with hooks that exist only during a recording.

Forward times come from forward hooks on the modules that compute: modules without submodules, and modules with
parameters of their own. Backward times come from hooks on the autograd nodes between the module's output and its input,
and on the gradients of the module's parameters. Module backward hooks are not used: they add a node to the graph, and
an in-place operation on the output of this node would raise. On an accelerator the recorded times are those at which
Python queued the work. What ``torch.compile(module)`` returns is recorded as a whole. A module that was compiled in
place (``module.compile()``) is not recorded. If the model itself was compiled in place, its whole forward passes are
recorded, but no module and no backward.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.autograd.graph import Node

from lightck.hooks.own_hooks import Handle, HookFreeCopies, OwnHook, remove
from lightck.profiler.events import BACKWARD, FORWARD, Args
from lightck.state.inventory import clean_prefixes

Add = Callable[[str, str, int, int, Args], None]
"""Adds one event: (row, name, begin, end, args). ``begin`` and ``end`` are nanoseconds of CLOCK_MONOTONIC."""

_NODES_MAX = 32
"""The largest number of autograd nodes that get hooks for one call of a module."""


class ModuleHooks:
    """The hooks on the modules of one model. ``add`` is called with each event. ``guard`` wraps each hook so that no
    exception of the hook reaches the training."""

    def __init__(self, model: nn.Module, add: Add, guard: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        self._add = add
        self._guard = guard
        self._model = type(model).__name__
        self._open: dict[int, list[tuple[int, Node | None]]] = {}
        """``id`` of a module -> one pair for each forward of it that has not returned: the time when the forward began,
        and the autograd node of its input."""
        self._forward_since = 0
        """Time at which the running forward pass of the model began; 0 if none runs. All times are nanoseconds of
        CLOCK_MONOTONIC."""
        self._backward_since = 0
        """Time at which the running backward pass began; 0 if none runs."""
        self._last_seen = 0
        """Time of the last hook of the running backward pass."""
        self._running: tuple[str, int, int] | None = None
        """The module whose backward runs: its name, its layer number (its position in the order of the hooked modules,
        from 0), and the time at which its backward began."""
        self.is_on = True
        self.compiled: list[str] = []
        """Names of compiled modules. The modules inside of them get no hooks, nor does one that was compiled in
        place."""
        self._handles: list[Handle] = []
        self._modules = list(self._computing(model))
        """(name, module) of each module that ``install`` will hook."""

    def install(self) -> None:
        """Install the hooks. If this raises, the caller must call ``remove``, which removes the hooks installed so
        far."""
        for layer, (name, module) in enumerate(self._modules):
            self._hook(module, name or self._model, layer)
        self._modules.clear()

    def _computing(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yield (name, module) of each module that gets hooks. Modules inside a compiled module get none, and
        neither does a module that was compiled in place."""
        in_compiled: set[int] = set()
        for prefix, module in clean_prefixes(model):
            name = prefix.removesuffix(".")
            if id(module) in in_compiled or getattr(module, "_compiled_call_impl", None) is not None:
                in_compiled.update(map(id, module.children()))
                if id(module) not in in_compiled:
                    self.compiled.append(name or self._model)
                continue
            if type(module).__name__ == "OptimizedModule":
                self.compiled.append(name or self._model)
                in_compiled.update(map(id, module.children()))
                yield name, module
            elif not module._modules or module._parameters:
                yield name, module

    def _hook(self, module: nn.Module, name: str, layer: int) -> None:
        def before(_module: nn.Module, args: object) -> None:
            if self._in_pass():
                self._open.setdefault(id(module), []).append((time.monotonic_ns(), _node(args)))

        def after(_module: nn.Module, _args: object, output: object) -> None:
            begun = self._open.get(id(module))
            if not begun or not self._in_pass():
                return
            begin, input_node = begun.pop()
            recomputed = {"recomputed": True} if self._backward_since else {}
            args = {"module": name, "layer": layer, **recomputed}
            self._add(FORWARD, name, begin, time.monotonic_ns(), args)
            node = _node(output)
            if node is not None and node is not input_node:
                self._hook_backward(node, input_node, name, layer)

        self._handles.append(HookFreeCopies(module))  # deep and pickled copies of the module get none of these hooks
        self._handles.append(module.register_forward_pre_hook(self._guarded(before)))
        self._handles.append(module.register_forward_hook(self._guarded(after)))
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad and parameter.is_leaf:
                hook = self._guarded(lambda _parameter: self._accumulated())
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _guarded(self, hook: Callable[..., None]) -> OwnHook:
        return OwnHook(self._guard(hook))

    def _in_pass(self) -> bool:
        """Whether a forward or backward pass of the training runs."""
        return self.is_on and bool(self._forward_since or self._backward_since)

    def _hook_backward(self, node: Node, input_node: Node | None, name: str, layer: int) -> None:
        """Add hooks to the autograd nodes of one call of a module: from ``node``, which computed the module's output,
        to ``input_node``, which computed its input and gets no hook. ``input_node`` is None if the input has no
        node."""
        node.register_prehook(self._guarded(lambda _grads: self._backward_begins(name, layer)))
        ran = self._guarded(lambda _inputs, _outputs: self._node_ran(name))
        todo, seen = [node], {id(node), id(input_node)}
        for each in itertools.islice(todo, _NODES_MAX):  # ``todo`` grows in the loop
            each.register_hook(ran)
            for below, _ in each.next_functions:  # AccumulateGrad has ``variable``: parameters have hooks of their own
                if below is not None and id(below) not in seen and not hasattr(below, "variable"):
                    seen.add(id(below))
                    todo.append(below)

    # -- forward and backward passes: the recording calls these methods at step events -------------------

    def forward_begins(self) -> None:
        self.backward_over()
        self._open.clear()
        self._forward_since = time.monotonic_ns()

    def forward_ended(self) -> None:
        if self._forward_since:
            self._add(FORWARD, self._model, self._forward_since, time.monotonic_ns(), {"whole": True})
        self._forward_since = 0

    def backward_over(self) -> None:
        """End the backward pass at the time of its last hook, because a forward or an update begins."""
        self._module_over(self._last_seen)
        if self._backward_since:
            self._add(BACKWARD, self._model, self._backward_since, self._last_seen, {"whole": True})
        self._backward_since = 0

    # -- the backward pass -------------------------------------------------------------------------------

    def _backward_begins(self, name: str, layer: int) -> None:
        if not self.is_on:
            return
        now = time.monotonic_ns()
        self._module_over(self._last_seen)
        self._running = name, layer, now
        self._backward_since = self._backward_since or now
        self._last_seen = now

    def _node_ran(self, name: str) -> None:
        if self._running is not None and self._running[0] == name:
            self._last_seen = time.monotonic_ns()

    def _accumulated(self) -> None:
        """A gradient of a parameter was accumulated. Only the time is recorded. The backward of the parameter's module
        does not end here, because the gradient of a tied parameter may be accumulated later, during the backward of
        another module."""
        if self.is_on and self._backward_since:
            self._last_seen = time.monotonic_ns()

    def _module_over(self, end: int) -> None:
        """Add the event of the module whose backward is recorded as running, if any. Its backward ended at ``end``."""
        if self._running is not None:
            name, layer, begin = self._running
            self._add(BACKWARD, name, begin, max(begin, end), {"module": name, "layer": layer})
        self._running = None

    # -- the end -----------------------------------------------------------------------------------------

    def remove(self) -> None:
        """Remove all hooks on modules and parameters. Hooks on autograd nodes exist until the graph is freed, and do
        nothing from now on."""
        if self.is_on:
            self.backward_over()
        self.is_on = False
        remove(self._handles)
        self._open.clear()


def _node(value: object, depth: int = 2) -> Node | None:
    """Return the autograd node of the first tensor that has one in a module's input or output; None if no tensor has
    one. ``depth``: how many levels of dicts, tuples and lists are searched."""
    if isinstance(value, torch.Tensor):
        return value.grad_fn
    if depth == 0:
        return None
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return None
    found = (_node(each, depth - 1) for each in itertools.islice(value, 8))
    return next((node for node in found if node is not None), None)
