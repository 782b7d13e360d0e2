"""The hooks that lightck puts on modules and optimizers: they keep nothing alive, and stay out of copies of a model.

A module's hooks lie in its ``__dict__``, which every copy takes along: deep and pickled ones, ``torch.save(model)``,
spawned processes. So while a module has hooks of lightck's, copies of its class are made by a function that leaves
these out (``copyreg``, which pickle, copy and torch ask first). Here too is what a hook can tell of the call that it is
in: the closure that ``step`` was given, and who called.
"""

from __future__ import annotations

import copy
import copyreg
import sys
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightck.errors import UnsupportedError

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_HOOK_FLAGS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""What a module keeps by the numbers of its hooks."""
_FRAMES_MAX = 17
"""Frames that are looked at, the asking one among them."""
_Reduced = str | tuple[Any, ...]
_hooked: Counter[type] = Counter()
"""Class -> how many hooked modules of it there are."""
_previous_reducers: dict[type, Callable[[nn.Module], _Reduced]] = {}
"""Class -> who copied it before, where somebody did."""
Closure = Callable[..., object]
Call = tuple[tuple[object, ...], dict[str, object]]
"""Arguments of an optimizer's ``step``; the first one is the optimizer."""


class Handle(Protocol):
    """What takes a hook out again, as torch's ``RemovableHandle``."""

    def remove(self) -> None: ...


def remove(handles: list[Handle]) -> None:
    """Take hooks out. Handles hold nothing alive, so this also works when the session is being collected."""
    for handle in handles:
        handle.remove()
    handles.clear()


def move_to_end(hooks: object, handle: RemovableHandle, *, last: bool) -> None:
    """Let a hook in one of torch's registries run behind, or before, those of others."""
    if isinstance(hooks, OrderedDict) and handle.id in hooks:
        hooks.move_to_end(handle.id, last=last)


def weak_hook(method: Callable[..., None]) -> Callable[..., None]:
    """For a global hook: torch's registry must not keep a session alive that its model no longer does."""
    ref = weakref.WeakMethod(method)

    def hook(*args: object) -> None:
        alive = ref()
        if alive is not None:
            alive(*args)

    return hook


class OwnHook:
    """A hook of lightck's on a module. Inside a graph that torch.compile traces it does nothing.

    A copy of the model (for an EMA, say) is not the model that is saved: a deep or pickled copy has no such hook, or
    where its class makes its copies itself, one that does nothing.
    """

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: object) -> None:
        if self._call is not None and not torch.compiler.is_compiling():
            self._call(*args)

    def __deepcopy__(self, memo: object) -> OwnHook:
        return type(self)()

    def __reduce__(self) -> tuple[type[OwnHook], tuple[()]]:
        return type(self), ()

    @property
    def __name__(self) -> str:
        """torch.jit.script asks for it, to compile the hook with the module."""
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch.jit"):
            raise UnsupportedError(
                "torch.jit.script() compiles a module with its hooks, and an open lightck session has hooks on this "
                "one. Script a copy, which has none: torch.jit.script(copy.deepcopy(model)); or close the session "
                "first."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute '__name__'")


class ModuleHook(OwnHook):
    """One that says where the loop is. Calls that are no step of it, and whose tensors may have no memory, it lets by:
    those that are traced, inside a transform of torch.func (grad, vmap, jvp), or on fake tensors, where even the random
    state that one reads has no memory."""

    def __call__(self, *args: object) -> None:
        if self._call is None or torch.compiler.is_compiling() or _is_transformed():
            return
        self._call(*args)


def _is_transformed() -> bool:
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    )


class HookFreeCopies:
    """From its making until ``remove``, or the end of the module, copies of this module have no ``OwnHook``."""

    def __init__(self, module: nn.Module) -> None:
        kind = type(module)
        before = copyreg.dispatch_table.get(kind)
        if before is not None and not _hooked[kind]:
            _previous_reducers[kind] = before
        _hooked[kind] += 1
        copyreg.dispatch_table[kind] = _reduce
        self._end = weakref.finalize(module, _release, kind)
        self._end.atexit = False

    def remove(self) -> None:
        self._end()


def _release(kind: type) -> None:
    _hooked[kind] -= 1
    if _hooked[kind]:
        return
    del _hooked[kind]
    theirs = _previous_reducers.pop(kind, None)
    if copyreg.dispatch_table.get(kind) is _reduce:
        del copyreg.dispatch_table[kind]
        if theirs is not None:
            copyreg.dispatch_table[kind] = theirs


def _reduce(module: nn.Module) -> _Reduced:
    """What ``module.__reduce_ex__`` gives, without our hooks."""
    theirs = _previous_reducers.get(type(module))
    reduced = theirs(module) if theirs is not None else module.__reduce_ex__(2)
    if not isinstance(reduced, tuple) or sys._getframe(1).f_code is copy.copy.__code__:
        return reduced  # a shallow copy trains the same parameters, and is followed
    function, arguments, *rest = reduced
    return (function, tuple(map(_without_own_hooks, arguments)), *map(_without_own_hooks, rest[:1]), *rest[1:])


def _without_own_hooks(state: object) -> object:
    """A module's state: its ``__dict__``, or that and its slots."""
    if type(state) is tuple and len(state) == 2:
        return _without_own_hooks(state[0]), state[1]
    if not isinstance(state, dict):
        return state
    own = {number for key in _HOOKS for number, hook in (state.get(key) or {}).items() if isinstance(hook, OwnHook)}
    if not own:
        return state
    clean = copy.copy(state)
    for key in (*_HOOKS, *_HOOK_FLAGS):
        if key in state:
            clean[key] = type(state[key])((n, hook) for n, hook in state[key].items() if n not in own)
    return clean


def closure_of(args: tuple[object, ...], kwargs: dict[str, object]) -> Closure | None:
    """The closure that ``step`` was given."""
    named = kwargs.get("closure")
    if callable(named):
        return named
    return args[1] if len(args) > 1 and callable(args[1]) else None


def with_closure(args: tuple[object, ...], kwargs: dict[str, object], new: Closure) -> Call:
    """The arguments of ``step`` with another closure in the place of theirs."""
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": new}
    return (args[0], new, *args[2:]), kwargs


def is_called_by(matches: Callable[[FrameType], bool]) -> bool:
    """Whether one of the nearest callers is such a frame."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_MAX):
        if frame is None or matches(frame):
            return frame is not None
        frame = frame.f_back
    return False


def is_in_backward() -> bool:
    """Whether autograd runs on this thread: what is called is a hook, or computed again for a checkpointed segment."""
    return torch._C._current_graph_task_id() != -1
