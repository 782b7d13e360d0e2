"""When each module's forward and backward ran, by hooks that exist only while a trace is recorded.

Forward: pre and post hooks of the modules that compute (leaves, and those with parameters of their own). Backward:
hooks on the autograd nodes between a module's output and its input, and on the gradients of its parameters. Module
backward hooks are not used: they put a node of their own into the graph, and an in-place operation on its output would
then raise. On an accelerator the times are those at which Python handed the work over. Compiled code is a black box.
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
"""(row, name, begin, end, args) of one event, in nanoseconds of CLOCK_MONOTONIC."""

_NODES_MAX = 32
"""Autograd nodes of one module that are looked at."""


class Layers:
    """Hooks on the modules of one model, and what they saw. ``guard`` wraps each hook: none raises into a training."""

    def __init__(self, model: nn.Module, add: Add, guard: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        self._add = add
        self._guard = guard
        self._model = type(model).__name__
        self._open: dict[int, list[tuple[int, Node | None]]] = {}
        """Module -> begin of its forward, and the node that its input came from."""
        self._forward_since = 0
        self._backward_since = 0
        self._last_seen = 0
        """The last event of the backward pass that is under way."""
        self._running: tuple[str, int, int] | None = None
        """The module whose backward runs: name, its number, begin."""
        self.is_on = True
        self.compiled: list[str] = []
        """Modules of compiled code, in which no hook is called."""
        self._handles: list[Handle] = []
        self._modules = list(self._computing(model))

    def install(self) -> None:
        """``remove`` takes out what is there, also after a failure in here."""
        for number, (name, module) in enumerate(self._modules):
            self._hook(module, name or self._model, number)
        self._modules.clear()

    def _computing(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        inside: set[int] = set()
        for dot, module in clean_prefixes(model):
            if id(module) in inside or getattr(module, "_compiled_call_impl", None) is not None:
                inside.update(map(id, module.children()))
                if id(module) not in inside:
                    self.compiled.append(dot[:-1] or self._model)
                continue
            if type(module).__name__ == "OptimizedModule":
                self.compiled.append(dot[:-1] or self._model)
                inside.update(map(id, module.children()))
                yield dot[:-1], module
            elif not module._modules or module._parameters:
                yield dot[:-1], module

    def _hook(self, module: nn.Module, name: str, number: int) -> None:
        def before(_module: nn.Module, args: object) -> None:
            if self._is_wanted():
                self._open.setdefault(id(module), []).append((time.monotonic_ns(), _node(args)))

        def after(_module: nn.Module, _args: object, output: object) -> None:
            begun = self._open.get(id(module))
            if not begun or not self._is_wanted():
                return
            begin, source = begun.pop()
            again = {"recomputed": True} if self._backward_since else {}
            args = {"module": name, "layer": number, **again}
            self._add(FORWARD, name, begin, time.monotonic_ns(), args)
            node = _node(output)
            if node is not None and node is not source:
                self._follow(node, source, name, number)

        self._handles.append(HookFreeCopies(module))
        self._handles.append(module.register_forward_pre_hook(self._eager(before)))
        self._handles.append(module.register_forward_hook(self._eager(after)))
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad and parameter.is_leaf:
                hook = self._eager(lambda _parameter: self._accumulated(name))
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _eager(self, hook: Callable[..., None]) -> OwnHook:
        return OwnHook(self._guard(hook))

    def _is_wanted(self) -> bool:
        return self.is_on and bool(self._forward_since or self._backward_since)

    def _follow(self, node: Node, source: Node | None, name: str, number: int) -> None:
        """The backward of a module begins with the node of its output, and runs up to that of its input."""
        node.register_prehook(self._eager(lambda _grads: self._backward_begins(name, number)))
        ran = self._eager(lambda _inputs, _outputs: self._node_ran(name))
        todo, seen = [node], {id(node), id(source)}
        for each in itertools.islice(todo, _NODES_MAX):
            each.register_hook(ran)
            for below, _ in each.next_functions:
                if below is not None and id(below) not in seen and not hasattr(below, "variable"):
                    seen.add(id(below))
                    todo.append(below)

    # -- the passes, as the session's own hooks tell them ------------------------------------------------

    def forward_begins(self) -> None:
        self.backward_over()
        self._open.clear()
        self._forward_since = time.monotonic_ns()

    def forward_ended(self) -> None:
        if self._forward_since:
            self._add(FORWARD, self._model, self._forward_since, time.monotonic_ns(), {"whole": True})
        self._forward_since = 0

    def backward_over(self) -> None:
        """A forward or an update begins: what is still open of the backward pass ended with its last event."""
        self._module_over(self._last_seen)
        if self._backward_since:
            self._add(BACKWARD, self._model, self._backward_since, self._last_seen, {"whole": True})
        self._backward_since = 0

    # -- the backward pass -------------------------------------------------------------------------------

    def _backward_begins(self, name: str, number: int) -> None:
        if not self.is_on:
            return
        now = time.monotonic_ns()
        self._module_over(self._last_seen)
        self._running = name, number, now
        self._backward_since = self._backward_since or now
        self._last_seen = now

    def _node_ran(self, name: str) -> None:
        if self._running is not None and self._running[0] == name:
            self._last_seen = time.monotonic_ns()

    def _accumulated(self, name: str) -> None:
        """A gradient is there. That of a tied parameter comes late, in the backward of another module: it ends none."""
        if self.is_on and self._backward_since:
            self._last_seen = time.monotonic_ns()

    def _module_over(self, end: int) -> None:
        if self._running is not None:
            name, number, begin = self._running
            self._add(BACKWARD, name, begin, max(begin, end), {"module": name, "layer": number})
        self._running = None

    # -- the end -----------------------------------------------------------------------------------------

    def remove(self) -> None:
        """Take all hooks out. Those on autograd nodes go with their graph and do nothing until then."""
        if self.is_on:
            self.backward_over()
        self.is_on = False
        remove(self._handles)
        self._open.clear()


def _node(value: object, depth: int = 2) -> Node | None:
    """The autograd node of the first tensor in what a module takes or gives, or None."""
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
