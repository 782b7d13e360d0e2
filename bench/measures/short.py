"""Short steps: what lightck adds to each step of a small model, measured from outside, beside what its figures say.

Four loops take turns, each with a model, an optimizer and a session of its own: without lightck; with lightck and an
interval so large that nothing is saved; with a checkpoint at every step; and with ``interval="auto"``. torch uses one
thread. The loop without lightck runs twice in each turn: the difference between the two is the A/A line.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import mean, median
from typing import Any

import torch
from torch import nn

import lightck
from bench.measures.figures import Estimate, estimate
from lightck.errors import BenchError

_NEVER = 1_000_000
_INTERVALS: dict[str, int | lightck.Auto] = {"idle": _NEVER, "every": 1, "auto": lightck.Auto()}
_KEPT = 0.98
"""The share of the steps in a mean: the longest ones, in which the machine did something else, are left out."""
_WARM_UP, _SETTLED = 0.25, 3.0
"""Steps before the measured ones, as a share of them; and where ``interval="auto"`` has to find its interval."""


def measure(options: dict[str, Any], folder: str) -> dict[str, Any]:
    """``options``: ``batch``, from which the length of a step follows; ``steps`` of each loop in each of ``turns``."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        turns = [_turn(options["batch"], options["steps"], folder) for _ in range(options["turns"])]
    finally:
        torch.set_num_threads(threads)
    plain = [turn["plain"]["seconds"] for turn in turns]
    same = [(b["seconds"] - a) / a for a, b in zip(plain, (turn["again"] for turn in turns), strict=True)]
    return {
        "batch": options["batch"],
        "seconds": median(plain),
        "same": _as_dict(estimate(same)),
        **{name: _against(turns, name) for name in _INTERVALS},
        "budget": lightck.Auto().budget,
        "warned": any(turn["auto"]["warned"] for turn in turns),
    }


def _turn(batch: int, steps: int, folder: str) -> dict[str, dict[str, float]]:
    """Run each loop once. Returns for each the seconds of a step and, with a session, what its figures say."""
    found = {"plain": _plain(batch, steps)}
    for name, interval in _INTERVALS.items():
        found[name] = _attached(batch, steps, os.path.join(folder, f"{name}.pool"), interval)
    found["again"] = _plain(batch, steps)
    return found


def _plain(batch: int, steps: int) -> dict[str, float]:
    model, optimizer = _made(0)
    _timed(model, optimizer, batch, int(_WARM_UP * steps))
    return _seconds(_timed(model, optimizer, batch, steps))


def _attached(batch: int, steps: int, pool: str, interval: int | lightck.Auto) -> dict[str, float]:
    model, optimizer = _made(0)
    with _warnings() as warned, lightck.attach(model, pool, optimizer=optimizer, interval=interval) as session:
        is_fixed = isinstance(interval, int)
        _timed(model, optimizer, batch, int((_WARM_UP if is_fixed else _SETTLED) * steps))
        before = session.stats()
        found = _seconds(_timed(model, optimizer, batch, steps))
        after = session.stats()
        step = session.step
    _check(model, pool, step)
    os.unlink(pool)
    stall = (after.added_seconds - before.added_seconds) / steps
    return {**found, "stall": stall, "interval": after.interval, "warned": bool(warned)}


def _check(model: nn.Module, pool: str, step: int) -> None:
    other, other_optimizer = _made(1)
    found = lightck.recover(pool, other, other_optimizer)
    expected = model.state_dict()
    if found.step != step or any(not torch.equal(t, expected[name]) for name, t in other.state_dict().items()):
        raise BenchError("The small model does not load back right.")


@contextmanager
def _warnings() -> Iterator[list[logging.LogRecord]]:
    """Collect the warnings about a fixed cost above the budget."""
    records: list[logging.LogRecord] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "will cost more than its budget" in record.getMessage():
                records.append(record)

    handler, log = Collector(logging.WARNING), logging.getLogger("lightck")
    log.addHandler(handler)
    try:
        yield records
    finally:
        log.removeHandler(handler)


def _made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _timed(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int, steps: int) -> list[float]:
    """Seconds of each of these steps."""
    inputs, taken = torch.ones(batch, 64), []
    for _ in range(steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).pow(2).mean().backward()
        optimizer.step()
        taken.append(time.perf_counter() - began)
    return taken


def _seconds(taken: list[float]) -> dict[str, float]:
    return {"seconds": median(taken), "mean": mean(sorted(taken)[: max(int(_KEPT * len(taken)), 1)])}


def _against(turns: list[dict[str, dict[str, float]]], name: str) -> dict[str, Any]:
    """The time that lightck adds to a step: the median over the turns with its bootstrap interval, in seconds, and as
    a share of a step. ``stats_share``: what ``stats()`` says over what is measured. With ``interval="auto"`` most steps
    save nothing, so means are compared there."""
    kind = "mean" if name == "auto" else "seconds"
    added = [turn[name][kind] - (turn["plain"][kind] + turn["again"][kind]) / 2 for turn in turns]
    step = median(turn["plain"][kind] for turn in turns)
    found, stall = estimate(added), median(turn[name]["stall"] for turn in turns)
    return {
        "added": _as_dict(found),
        "share": found.median / step,
        "stall": stall,
        "stats_share": stall / found.median if found.median > 0 else 0.0,
        "interval": int(median(turn[name]["interval"] for turn in turns)),
    }


def _as_dict(found: Estimate) -> dict[str, float]:
    return {"median": found.median, "low": found.low, "high": found.high}
