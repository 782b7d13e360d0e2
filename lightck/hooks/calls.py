"""Hooks that keep nothing alive, and what one can tell of the call that it is in: the closure that ``step`` was given,
and who called."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from lightck.hooks.copies import OwnHook

_DEPTH = 17
"""Frames that are looked at, the asking one among them."""


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """For a global hook: torch's registry must not keep a session alive that its model no longer does."""
    ref = weakref.WeakMethod(method)

    def hook(*args: Any) -> None:
        alive = ref()
        if alive is not None:
            alive(*args)

    return hook


class ModuleHook(OwnHook):
    """A hook of the model itself. A copy of the model (for an EMA, say) is not the model that is saved: a deep or
    pickled copy has no such hook, or where its class makes its copies itself, one that does nothing."""

    def __init__(self, method: Callable[..., None] | None = None, *, with_inputs: bool = False) -> None:
        """``with_inputs``: the method gets what torch calls the hook with, and not the module alone."""
        self._method = method
        self._with_inputs = with_inputs

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if self._method is None or torch.compiler.is_compiling() or _is_transformed():
            return  # such a call is no step of the loop, and its tensors may have no memory
        self._method(module, *(args if self._with_inputs else ()))

    def __deepcopy__(self, memo: Any) -> ModuleHook:
        return ModuleHook()

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()


def _is_transformed() -> bool:
    """Whether the call is traced, inside a transform of torch.func (grad, vmap, jvp), or on fake tensors, where even
    the random state that one reads has no memory."""
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    )


def closure_of(args: Any, kwargs: Any) -> tuple[Any, Callable[[Any], tuple[Any, Any]]]:
    """The closure in the arguments of ``step`` (args[0] is the optimizer), and how to put another in its place."""
    if callable(kwargs.get("closure")):
        return kwargs["closure"], lambda new: (args, {**kwargs, "closure": new})
    if len(args) > 1 and callable(args[1]):
        return args[1], lambda new: ((args[0], new, *args[2:]), kwargs)
    return None, lambda new: (args, kwargs)


def is_called_by(matches: Callable[[FrameType], bool]) -> bool:
    """Whether one of the nearest callers is such a frame."""
    frame, depth = sys._getframe(1), 0
    while frame is not None and depth < _DEPTH:
        if matches(frame):
            return True
        frame, depth = frame.f_back, depth + 1  # type: ignore[assignment]
    return False


def is_in_backward() -> bool:
    """Whether autograd runs on this thread: what is called is a hook, or computed again for a checkpointed segment."""
    return torch._C._current_graph_task_id() != -1
