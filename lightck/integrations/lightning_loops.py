"""The counters of a Trainer's loops, as JSON.

``saved`` returns what ``fit_loop.state_dict()`` holds, loaders' states left out, because the session has the positions
in the loaders. It reads the counters itself: Lightning copies each by ``dataclasses.asdict``, which takes six times as
long, and this is done at each step.
"""

from __future__ import annotations

import json
from typing import Any

_STATE = "state_dict"
"""Name under which a loop saves what its counters do not say."""


def saved(fit_loop: Any) -> bytes:
    """Return the counters of this loop and of all loops inside it."""
    found: dict[str, Any] = {}
    _collect(fit_loop, "", found)
    found[_STATE] = {}
    return json.dumps(found).encode()


def restore(fit_loop: Any, counters: bytes) -> None:
    """Set the counters, as Lightning does it for a restart."""
    fit_loop.load_state_dict(json.loads(counters))


def global_step(counters: bytes) -> int:
    """Return the Trainer's ``global_step``: the number of steps of all optimizers."""
    loops = json.loads(counters)
    automatic = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]["completed"]
    return int(automatic or loops["epoch_loop.manual_optimization.optim_step_progress"]["total"]["completed"])


def limits(fit_loop: Any) -> list[int]:
    """Return the numbers of epochs and of updates after which the training ends; -1: no limit."""
    return [-1 if one is None else int(one) for one in (fit_loop.max_epochs, fit_loop.max_steps)]


def are_raised(fit_loop: Any, before: list[int]) -> bool:
    """Whether a limit is larger than it was."""
    pairs = zip(limits(fit_loop), before, strict=True)
    return any(then != -1 and (now == -1 or now > then) for now, then in pairs)


def are_reached(fit_loop: Any) -> bool:
    """Whether the training has reached one of its limits. (Lightning counts also an epoch that a request to stop has
    cut short.)"""
    n_cut = not fit_loop.epoch_loop.batch_progress.is_last_batch
    done = (fit_loop.epoch_progress.current.processed - n_cut, fit_loop.epoch_loop.global_step)
    return any(limit != -1 and n >= limit for n, limit in zip(done, limits(fit_loop), strict=True))


def _collect(loop: Any, prefix: str, found: dict[str, Any]) -> None:
    if prefix:
        found[prefix + _STATE] = loop.on_save_checkpoint()
    for name, value in vars(loop).items():
        if hasattr(value, "from_state_dict"):
            found[prefix + name] = _counters(value)
        elif hasattr(value, "on_save_checkpoint") and hasattr(value, "restarting"):
            _collect(value, f"{prefix}{name}.", found)


def _counters(progress: Any) -> dict[str, Any]:
    return {
        name: _counters(value) if hasattr(value, "from_state_dict") else value for name, value in vars(progress).items()
    }
