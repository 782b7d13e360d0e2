"""What hooks cost, for ``stats()``: all the time from a hook's first statement to its last, and torch's call of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from lightck.hooks.own_hooks import ModuleHook
from lightck.stats import Meter

_Hook = TypeVar("_Hook", bound=Callable[..., Any])
_CALLS, _ROUNDS = 40, 7
_N_HOOKS = 2
"""How many hooks the module has whose call is measured."""


class HasMeter(Protocol):
    """An object whose methods are hooks."""

    meter: Meter
    seconds_per_hook: float


def counted(hook: _Hook) -> _Hook:
    """Count the time of a hook that is a method, and torch's time to call it, as stall. A ``stall`` block inside it
    counts its own part."""

    @wraps(hook)
    def timed(self: HasMeter, *args: object, **kwargs: object) -> object:
        meter, begin = self.meter, time.perf_counter()
        counted_before = meter.stall_seconds
        try:
            return hook(self, *args, **kwargs)
        finally:
            seconds = time.perf_counter() - begin + self.seconds_per_hook
            meter.count_hook(seconds - (meter.stall_seconds - counted_before))

    return timed  # type: ignore[return-value]


def seconds_per_hook() -> float:
    """The time that torch takes to call one hook that does nothing; 0 while torch has hooks for all modules, which the
    measurement would run."""
    return 0.0 if _has_any_global_hook() else _measured_seconds_per_hook()  # type: ignore[no-untyped-call]


@cache
def _measured_seconds_per_hook() -> float:
    """Measured once in a process, in a few hundred calls of an empty module, which takes about a millisecond."""
    module, inputs = nn.Identity(), torch.empty(0, device="cpu")
    bare = _seconds_per_call(module, inputs)
    handles = [
        module.register_forward_pre_hook(ModuleHook(_do_nothing), with_kwargs=True),
        module.register_forward_hook(ModuleHook(_do_nothing)),
    ]
    hooked = _seconds_per_call(module, inputs)
    for handle in handles:
        handle.remove()
    return max(hooked - bare, 0.0) / _N_HOOKS


def _do_nothing(*_: object) -> None: ...


def _seconds_per_call(module: nn.Module, inputs: torch.Tensor) -> float:
    """The least of a few rounds: what else the machine does only adds to it."""
    rounds = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        for _ in range(_CALLS):
            module(inputs)
        rounds.append(time.perf_counter() - begin)
    return min(rounds) / _CALLS
