"""lightck's hooks stay out of copies of a module: deep and pickled ones, ``torch.save(model)``, spawned processes.

A module's hooks lie in its ``__dict__``, which every copy takes along. So while a module has hooks of lightck's, copies
of its class are made by a function that leaves these out (``copyreg``, which pickle, copy and torch ask first).
"""

from __future__ import annotations

import copy
import copyreg
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from lightck.errors import UnsupportedError

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_BESIDE = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""What a module keeps by the numbers of its hooks."""
_classes: dict[type, list[Any]] = {}
"""Class -> how many hooked modules of it there are, and who copied it before."""


class OwnHook:
    """A hook of lightck's on a module."""

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


class CleanCopies:
    """From its making until ``remove``, or the end of the module, copies of this module have no ``OwnHook``."""

    def __init__(self, module: nn.Module) -> None:
        kind = type(module)
        _classes.setdefault(kind, [0, copyreg.dispatch_table.get(kind)])[0] += 1
        copyreg.dispatch_table[kind] = _reduced
        self._end = weakref.finalize(module, _release, kind)
        self._end.atexit = False

    def remove(self) -> None:
        self._end()


def _release(kind: type) -> None:
    known = _classes[kind]
    known[0] -= 1
    if known[0]:
        return
    del _classes[kind]
    if copyreg.dispatch_table.get(kind) is _reduced:
        del copyreg.dispatch_table[kind]
        if known[1] is not None:
            copyreg.dispatch_table[kind] = known[1]


def _reduced(module: nn.Module) -> Any:
    """What ``module.__reduce_ex__`` gives, without our hooks."""
    theirs: Callable[[Any], Any] | None = _classes.get(type(module), [0, None])[1]
    reduced = theirs(module) if theirs is not None else module.__reduce_ex__(2)
    if not isinstance(reduced, tuple) or sys._getframe(1).f_code is copy.copy.__code__:
        return reduced  # a shallow copy trains the same parameters, and is followed
    function, arguments, *rest = reduced
    return (function, tuple(map(_without, arguments)), *map(_without, rest[:1]), *rest[1:])


def _without(state: Any) -> Any:
    """A module's state: its ``__dict__``, or that and its slots."""
    if type(state) is tuple and len(state) == 2:
        return _without(state[0]), state[1]
    if not isinstance(state, dict):
        return state
    own = {number for key in _HOOKS for number, hook in (state.get(key) or {}).items() if isinstance(hook, OwnHook)}
    if not own:
        return state
    clean = copy.copy(state)
    for key in (*_HOOKS, *_BESIDE):
        if key in state:
            clean[key] = type(state[key])((n, hook) for n, hook in state[key].items() if n not in own)
    return clean
