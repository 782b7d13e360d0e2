"""The hooks that lightck puts on modules and optimizers. A copy of a model has none of these hooks.

A module's hooks keep the session alive as long as the model lives; hooks in torch's global registries keep nothing
alive.

A module's hooks are in its ``__dict__``, which every copy includes: ``copy.deepcopy``, pickle, ``torch.save(model)``,
spawned processes. So lightck registers a function with ``copyreg`` for the class of a module that has its hooks. This
function makes the copies, and leaves lightck's hooks out. (pickle, copy and torch look into ``copyreg`` first.) This
file also has helpers for hooks: the closure that was passed to ``step``, and a search of the call stack.
"""

from __future__ import annotations

import copy
import copyreg
import sys
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from types import FrameType, MethodType
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.utils import stateless
from torch.utils.hooks import RemovableHandle

from lightck.errors import UnsupportedError

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
"""Dicts of a module: id of a hook -> the hook."""
_HOOK_FLAGS = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""Further dicts of a module whose keys are the ids of its hooks."""
_FRAMES_MAX = 18
"""How many frames of the call stack ``is_called_by`` examines, beginning with the frame of the function that calls
it."""
_FUNCTIONAL_CALL = stateless._functional_call.__code__
_Reduced = str | tuple[Any, ...]
_hooked: Counter[type] = Counter()
"""Class -> number of ``HookFreeCopies`` in effect for modules of this class (one module may have several)."""
_previous_reducers: dict[type, Callable[[nn.Module], _Reduced]] = {}
"""Class -> the function that was registered with ``copyreg`` until lightck registered ``_reduce`` in its place."""
Closure = Callable[..., object]
Call = tuple[tuple[object, ...], dict[str, object]]
"""Positional and keyword arguments of an optimizer's ``step``. The first positional argument is the optimizer."""


class Handle(Protocol):
    """Removes a hook, as torch's ``RemovableHandle`` does."""

    def remove(self) -> None: ...


def remove(handles: list[Handle]) -> None:
    """Remove hooks, and empty the list. This needs only the handles, so it also works while the session is being
    garbage-collected."""
    for handle in handles:
        handle.remove()
    handles.clear()


def silence(handles: list[Handle]) -> None:
    """Remove hooks, and empty the list, inside a hook of an optimizer. torch iterates over that optimizer's registry at
    this moment, and a removal from it would end in an error. So there a function that does nothing takes the place of a
    hook."""
    for handle in handles:
        registry = handle.hooks_dict_ref() if isinstance(handle, RemovableHandle) else None
        if isinstance(handle, RemovableHandle) and registry and isinstance(registry.get(handle.id), MethodType):
            registry[handle.id] = _do_nothing
        else:
            handle.remove()
    handles.clear()


def _do_nothing(*_: object, **__: object) -> None: ...


def move_to_end(hooks: object, handle: RemovableHandle, *, last: bool) -> None:
    """Move a hook to the end (``last``) or the beginning of one of torch's registries."""
    if isinstance(hooks, OrderedDict) and handle.id in hooks:
        hooks.move_to_end(handle.id, last=last)


def weak_hook(method: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that calls ``method`` as long as the method's object is alive. The hook has only a weak reference
    to this object, so the module or parameter that has the hook does not keep the object alive."""
    ref = weakref.WeakMethod(method)

    def hook(*args: object) -> None:
        alive = ref()
        if alive is not None:
            alive(*args)

    return hook


class OwnHook:
    """A hook of lightck on a module. Inside a graph that torch.compile traces it does nothing.

    lightck does not save copies of the model (an EMA, for example), so their forwards must not be reported.
    ``HookFreeCopies`` leaves this hook out of deep and pickled copies. If a module's class makes its copies itself, the
    copied module has a copy of this hook that does nothing.
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
        """If torch.jit.script reads this attribute, raise ``UnsupportedError``, which explains why torch.jit.script
        fails. Otherwise raise ``AttributeError``."""
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch.jit"):
            raise UnsupportedError(
                "torch.jit.script() compiles a module with its hooks, and an open lightck session has hooks on this "
                "module. Script a copy, which has no hooks of lightck: torch.jit.script(copy.deepcopy(model)). Or "
                "close the session first."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute '__name__'")


class ModuleHook(OwnHook):
    """A hook that reports the progress of the loop. It ignores calls of the module that belong to no training step: a
    trace, a transform of torch.func (grad, vmap, jvp), a call under fake tensors. The tensors of such a call may have
    no memory. Under fake tensors even the random state has no memory."""

    def __call__(self, *args: object) -> None:
        if self._call is None or torch.compiler.is_compiling() or _is_transformed():
            return
        self._call(*args)


_tracing_state, _transform = torch._C._get_tracing_state, torch._C._functorch.peek_interpreter_stack
_dispatch_mode, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE
_PROXY = torch._C._TorchDispatchModeKey.PROXY


def _is_transformed() -> bool:
    """Whether a trace, a transform of torch.func or a fake tensor mode is active now."""
    return (
        _tracing_state() is not None
        or _transform() is not None
        or _dispatch_mode(_FAKE) is not None
        or _dispatch_mode(_PROXY) is not None
    )


class HookFreeCopies:
    """Until ``remove`` is called or the module is garbage-collected, deep and pickled copies of the module have no
    ``OwnHook``."""

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
    previous = _previous_reducers.pop(kind, None)
    if copyreg.dispatch_table.get(kind) is _reduce:
        del copyreg.dispatch_table[kind]
        if previous is not None:
            copyreg.dispatch_table[kind] = previous


def _reduce(module: nn.Module) -> _Reduced:
    """Return the result of ``module.__reduce_ex__``, without lightck's hooks."""
    previous = _previous_reducers.get(type(module))
    reduced = previous(module) if previous is not None else module.__reduce_ex__(2)
    if not isinstance(reduced, tuple) or sys._getframe(1).f_code is copy.copy.__code__:
        return reduced  # a shallow copy trains the same parameters, so its hooks stay
    function, arguments, *rest = reduced
    return (function, tuple(map(_without_own_hooks, arguments)), *map(_without_own_hooks, rest[:1]), *rest[1:])


def _without_own_hooks(state: object) -> object:
    """Return a module's state without lightck's hooks. ``state``: the module's ``__dict__``, or a pair of ``__dict__``
    and slots."""
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
    """Return the closure that was passed to ``step``, or None."""
    named = kwargs.get("closure")
    if callable(named):
        return named
    return args[1] if len(args) > 1 and callable(args[1]) else None


def with_closure(args: tuple[object, ...], kwargs: dict[str, object], new: Closure) -> Call:
    """Return the arguments of ``step``, with ``new`` in the place of the closure that they contain."""
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": new}
    return (args[0], new, *args[2:]), kwargs


def is_called_by(matches: Callable[[FrameType], bool]) -> bool:
    """Whether ``matches`` holds for one of the nearest ``_FRAMES_MAX`` frames."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_MAX):
        if frame is None or matches(frame):
            return frame is not None
        frame = frame.f_back
    return False


def is_in_functional_call() -> bool:
    """Whether ``torch.func.functional_call`` runs the forward of the module whose hook calls this function, or of a
    module around it. The module then holds other tensors in place of its own."""
    frame: FrameType | None = sys._getframe(1)  # not ``is_called_by``, because this runs at each forward
    for _ in range(_FRAMES_MAX):
        if frame is None or frame.f_code is _FUNCTIONAL_CALL:
            return frame is not None
        frame = frame.f_back
    return False


_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


def is_in_nested_backward() -> bool:
    """Whether a backward pass runs on this thread inside another one, as reentrant activation checkpointing makes it.
    Its callbacks (``call_after_backward``) are called at its own end, and the outer pass goes on computing after
    that."""
    frame: FrameType | None = sys._getframe()
    depth = 0
    while frame is not None and depth < 2:
        depth += frame.f_code is _RUN_BACKWARD
        frame = frame.f_back
    return depth >= 2


def call_after_backward(callback: Callable[[], None]) -> None:
    """Let autograd call this at the end of the backward pass that runs now, after the callbacks that are queued."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def is_in_backward() -> bool:
    """Whether a backward pass runs on this thread. If so, the caller is a hook of autograd, or a forward that
    activation checkpointing recomputes."""
    return torch._C._current_graph_task_id() != -1
