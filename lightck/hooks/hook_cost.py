"""Measures what hooks cost, for ``stats()``: the time that a hook runs, plus the time that torch takes to call the
hook."""

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
"""Calls of the module in each round, and rounds in each measurement."""
_N_HOOKS = 2
"""Number of hooks on the measured module: one before and one after its forward."""


class HasMeter(Protocol):
    """An object whose methods are hooks."""

    meter: Meter
    seconds_per_hook: float
    """The result of ``seconds_per_hook()`` below."""


def counted(hook: _Hook) -> _Hook:
    """Decorate a hook that is a method: count as stall the time that the hook runs and the time that torch takes to
    call it. If the hook contains a ``Meter.stall`` block, the block counts its own time, which is left out here."""

    @wraps(hook)
    def timed(self: HasMeter, *args: object, **kwargs: object) -> object:
        meter, begin = self.meter, time.perf_counter()
        counted_before = meter.stall_seconds + meter.loop_seconds
        try:
            return hook(self, *args, **kwargs)
        finally:
            seconds = time.perf_counter() - begin + self.seconds_per_hook
            meter.count_hook(seconds - (meter.stall_seconds + meter.loop_seconds - counted_before))

    return timed  # type: ignore[return-value]


def seconds_per_hook() -> float:
    """Return the seconds that torch takes to call one hook that does nothing. Return 0 while torch has global module
    hooks, because the measurement would run these hooks."""
    return 0.0 if _has_any_global_hook() else _measured_seconds_per_hook()  # type: ignore[no-untyped-call]


@cache
def _measured_seconds_per_hook() -> float:
    """Return the seconds per hook call. They are measured once in each process, with ``2 * _CALLS * _ROUNDS`` calls of
    an empty module, which take about a millisecond."""
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
    """Return the seconds per call of the module in the fastest of ``_ROUNDS`` rounds. The fastest round counts, because
    other work of the machine can only make a round slower."""
    rounds = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        for _ in range(_CALLS):
            module(inputs)
        rounds.append(time.perf_counter() - begin)
    return min(rounds) / _CALLS
