"""A way to save that stores gradients, or a rival, at every step, with ``FullState()`` in turn beside it.

Up to four trainings take turns, each in a process of its own (``turns.py``): one that saves nothing, the same again,
one with ``FullState()``, and the one to be measured. Each window is compared with the mean of the windows of the first
before and after it. What is so found of the second is the A/A line, which has in it that two processes differ. Where
memory is too short for the second, the A/A line is that of the first one's windows with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.measures.figures import against_neighbours, estimate, is_resolved, same_against_same
from bench.measures.savers import FULL, LIGHTCK
from bench.measures.turns import Recovered, Spec, Trained
from bench.rivals.lowdiff import BEHIND_MAX
from bench.running.elsewhere import Elsewhere
from bench.running.machine import available_bytes
from bench.workloads import checkpoint_nbytes, gpt2_of
from lightck.errors import BenchError
from lightck.pool.storage import durability

PLAIN, AGAIN, OURS = "plain", "again", "saver"
_PROCESS_BYTES = 450_000_000
"""Private memory of a training besides its state and gradients: torch, and the activations of a short batch."""
Windows = dict[str, list[dict[str, Any]]]


def measure(options: dict[str, Any], folder: str) -> dict[str, Any]:
    """``options``: see ``bench/tables/gradients.py``, which makes them."""
    of = gpt2_of(options["layers"], options["size"])
    sizes = checkpoint_nbytes(of), gradient_nbytes(of)
    check_memory(needed_bytes(options, *sizes), available_bytes(), folder, options["saver"])
    specs = dict(_specs(options, folder))
    with ExitStack() as stack:
        loops = {
            name: stack.enter_context(Elsewhere(f"the training {name!r}", partial(Trained, spec)))
            for name, spec in specs.items()
        }
        windows = _taken_in_turn(loops, options)
        memory = {name: loop.call("memory", options["window"]) for name, loop in loops.items()}
        facts = {name: loops[name].call("finish", options["window"] // 2) for name in (FULL, OURS)}
        found: dict[str, Any] = {name: _recovered(specs[name]) for name in (FULL, OURS)}
        for name in (FULL, OURS):
            loops[name].call("remove")
        memcpy = loops[PLAIN].call("memcpy", folder)
    plain = windows[PLAIN]
    for name in (FULL, OURS):
        found[name] |= facts[name] | _figures(windows[name], plain, memcpy, sizes)
        found[name]["memory"] = max(memory[name][at] - memory[PLAIN][at] for at in memory[PLAIN]) / sizes[1]
        found[name] |= predicted(specs[name], facts[name].get("base_every"), sizes)
    same = windows.get(AGAIN)
    return {
        "state_bytes": sizes[0],
        "gradient_bytes": sizes[1],
        "step": median(one for window in plain for one in window["step_seconds"]),
        "same": asdict(estimate(_added(same, plain, "seconds") if same else _same(plain))),
        "same_is_another_process": bool(same),
        "memcpy": memcpy,
        FULL: found[FULL],
        OURS: found[OURS],
    }


def gradient_nbytes(of: Any) -> int:
    """The bytes of one set of gradients."""
    with torch.device("meta"):
        return sum(p.nbytes for p in of.model().parameters())


def _specs(options: dict[str, Any], folder: str) -> Iterator[tuple[str, Spec]]:
    base = Spec(options["layers"], options["size"], folder, interval=options["interval"])
    yield PLAIN, replace(base, folder=str(Path(folder, PLAIN)))
    if options["again"]:
        yield AGAIN, replace(base, folder=str(Path(folder, AGAIN)))
    yield FULL, replace(base, folder=str(Path(folder, FULL)), saver=LIGHTCK)
    yield (
        OURS,
        replace(
            base,
            folder=str(Path(folder, OURS)),
            saver=options["saver"],
            strategy=options.get("strategy", FULL),
            rival=options.get("rival"),
        ),
    )


def _taken_in_turn(loops: dict[str, Elsewhere], options: dict[str, Any]) -> Windows:
    """Warm up each training, and then measure windows in turn; the first training has one more than the others."""
    for loop in loops.values():
        for _ in range(options["warm_up"]):
            loop.call("window", options["window"])
    windows: Windows = {name: [] for name in loops}
    for _ in range(options["rounds"]):
        for name, loop in loops.items():
            windows[name].append(loop.call("window", options["window"]))
    windows[PLAIN].append(loops[PLAIN].call("window", options["window"]))
    return windows


def _recovered(spec: Spec) -> dict[str, Any]:
    with Elsewhere("the recovery", partial(Recovered, spec)) as fresh:
        found: dict[str, Any] = fresh.call("measure")
    return found


# -- figures ---------------------------------------------------------------------------------------------------------


def _figures(
    windows: list[dict[str, Any]], plain: list[dict[str, Any]], memcpy: float, sizes: tuple[int, int]
) -> dict[str, Any]:
    """What a step costs that is saved (with an interval: an update), on average over the windows."""
    steps = len(windows[0]["step_seconds"])
    added, cpu = estimate(_added(windows, plain, "seconds")), _cpu_added(windows, plain, memcpy * steps)
    same = estimate(_same(plain))
    return {
        "bytes": sum(window["bytes"] for window in windows) / steps / len(windows) / sizes[0],
        "cpu": sum(window["own_cpu"] for window in windows) / steps / len(windows) / memcpy,
        "cpu_added": asdict(estimate(cpu)),
        "step_added": asdict(added) | {"resolved": is_resolved(added, same)},
        "unsettled": sum(not window["is_settled"] for window in windows),
        **_stalls(windows),
    }


def _added(windows: list[dict[str, Any]], plain: list[dict[str, Any]], name: str) -> list[float]:
    """What each window has more than its neighbours that save nothing, as a share of them."""
    times = [window[name] for window in plain]
    return [
        difference / ((before + after) / 2)
        for difference, before, after in zip(
            against_neighbours([window[name] for window in windows], times), times, times[1:], strict=False
        )
    ]


def _same(plain: list[dict[str, Any]]) -> list[float]:
    times = [window["seconds"] for window in plain]
    return [difference / median(times) for difference in same_against_same(times)]


def _cpu_added(windows: list[dict[str, Any]], plain: list[dict[str, Any]], memcpy: float) -> list[float]:
    """The CPU time that each window has more than its neighbours, as a multiple of a memcpy of the state per step."""
    differences = against_neighbours([window["cpu"] for window in windows], [window["cpu"] for window in plain])
    return [difference / memcpy for difference in differences]


def _stalls(windows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The stall as a share of a step: the mean and the median of all steps, of those in which most is written (the
    largest parameter is due), and the largest."""
    stalls, written = [], []
    for window in windows:
        stalls += [stall / step for stall, step in zip(window["step_stalls"], window["step_seconds"], strict=True)]
        written += window["step_bytes"]
    largest = [stall for stall, nbytes in zip(stalls, written, strict=True) if nbytes >= 0.98 * max(written)]
    total = sum(sum(window["step_stalls"]) for window in windows) / sum(window["seconds"] for window in windows)
    return {
        "stall_mean": total,
        "stall": median(stalls),
        "stall_of_largest": median(largest),
        "largest_steps": float(len(largest)),
        "stall_max": max(stalls),
    }


# -- what the algebra says -------------------------------------------------------------------------------------------


def predicted(spec: Spec, base_every: int | None, sizes: tuple[int, int]) -> dict[str, float]:
    """The bytes of an update as a multiple of the state, and of a pool in bytes, by docs/gradients.md and the algorithm
    of a rival; without those of which they say nothing. ``base_every``: what the session used."""
    state, gradients = sizes
    share, rival = gradients / state, spec.rival or {}
    by_bytes: dict[str, Callable[[], float]] = {
        "LowDiff": lambda: 1 / rival["base_every"] + share / rival["batch"],
        "LowDiff (one by one)": lambda: 1 / rival["base_every"] + share,
        "LowDiff+": lambda: 1 / rival["persist_every"],
    }
    if spec.saver == LIGHTCK and spec.strategy == FULL:
        return {"predicted_bytes": 1 / spec.interval, "predicted_pool": 2 * state}
    if spec.saver == LIGHTCK and "topk" not in spec.strategy:
        assert base_every is not None, "a session with Gradients says it"
        return {
            "predicted_bytes": share + 1 / base_every,
            "predicted_pool": 2 * state + (2 * _base_every(spec.strategy) - 1) * gradients,
        }
    if spec.saver in by_bytes:
        return {"predicted_bytes": by_bytes[spec.saver]()}
    return {"predicted_bytes": 1.0} if spec.saver != LIGHTCK and "LowDiff" not in spec.saver else {}


def _base_every(strategy: str) -> int:
    return int(strategy.split()[1])


# -- memory ----------------------------------------------------------------------------------------------------------


def needed_bytes(options: dict[str, Any], state: int, gradients: int) -> tuple[int, int]:
    """(private memory, files) that a row needs, in bytes, at most. The files of ``FullState()`` are two states."""
    strategy, saver, rival = options.get("strategy", FULL), options["saver"], options.get("rival") or {}
    loops = 4 if options["again"] else 3
    private, full = loops * (state + 2 * gradients + _PROCESS_BYTES), 2 * state
    if saver == LIGHTCK:
        records = 0 if strategy == FULL else 2 * _base_every(strategy) - 1
        return private + gradients, full + 2 * state + records * gradients
    private += state  # a copy, or a replica
    held = {
        "LowDiff": BEHIND_MAX + 2,
        "LowDiff (one by one)": BEHIND_MAX + 1 + rival.get("batch", 0),
        "LowDiff+": BEHIND_MAX + 1,
    }
    batches = 2 * rival.get("base_every", 0)  # updates that lie behind the last full checkpoint but one
    written = {"LowDiff": batches // rival.get("batch", 1), "LowDiff (one by one)": batches}
    return (
        private + held.get(saver, 0) * gradients,
        full + 3 * state + written.get(saver, 0) * gradients,  # two that are kept, one that is written
    )


def check_memory(needed: tuple[int, int], available: int, folder: str, saver: str) -> None:
    """Raise ``BenchError`` if trainings and files do not fit. Files count as memory where the medium is memory."""
    private, files = needed
    is_memory = durability.probe(folder).medium == "tmpfs"
    total = private + (files if is_memory else 0)
    if total > available:
        where = f" and {files / 1e9:.1f} GB of files on tmpfs" if is_memory else ""
        raise BenchError(
            f"Memory is short for this row of {saver}: its trainings need {private / 1e9:.1f} GB{where}, and "
            f"{available / 1e9:.1f} GB are free. Take the row with a smaller base_every, measure fewer layers "
            "(--layers), or put the files on a disk (--pool-dir)."
        )
