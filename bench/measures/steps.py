"""A checkpoint at every step compared with none: added step time and CPU, and the stall of the training thread.

*Difference*: windows with a checkpoint minus the mean of their plain neighbours, with its bootstrap interval and the
A/A line. lightck's hooks also run in plain windows; their time there is measured and added. *Direct*: CPU seconds of
all of lightck's threads and hooks per checkpoint, over one memcpy of the same tensors.
"""

from __future__ import annotations

import gc
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from statistics import mean, median
from typing import Any

from bench.measures import loop
from bench.measures.copies import memcpy_cpu_seconds
from bench.measures.figures import Estimate, against_neighbours, estimate, is_resolved, same_against_same, spread
from bench.measures.loop import Windows, column
from bench.measures.savers import LIGHTCK, Saver, make
from bench.measures.training import Training
from bench.workloads import workload

SPREAD_PAIRS = 5


def measure(options: dict[str, Any], folder: str) -> dict[str, Any]:
    training = _training(options)
    saver = _saver(options)
    found = loop.run(training, saver, folder, options["pairs"])
    loop.check(training, saver, folder)
    result = _result(found, options["saver"])
    result |= {"nbytes": training.nbytes, "batch": training.batch or training.workload.batch, **saver.facts()}
    _emptied(folder)
    copies = memcpy_cpu_seconds([tensor.cpu() for tensor in training.tensors()], folder)
    result["memcpy_cpu_seconds"] = median(copies)
    result["direct"] = result["own_cpu_seconds"] / median(copies)
    waited = result["end_wait_seconds"]
    del training, saver  # a second state would not fit into memory beside the first
    gc.collect()
    if waited > 0.01 * result["step"]["median"]:
        result["spread_out"] = _spread_out(options, folder, math.ceil(waited / result["step"]["median"]))
    return result


def _training(options: dict[str, Any]) -> Training:
    device = options.get("device", "cpu")
    return Training(workload(options["workload"], options["size"]), options.get("batch", 0), device)


def _saver(options: dict[str, Any]) -> Saver:
    return make(options["saver"], options.get("backend", "file"), options.get("staging"))


def _emptied(folder: str) -> None:
    """Remove the files of a saver, whose space the next measure needs."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)


def _result(found: Windows, saver: str) -> dict[str, Any]:
    plain, saved = found.plain, found.saved
    hooks = median(column(plain, "stall_seconds"))
    hooks_cpu = median(column(plain, "own_cpu_seconds")) if saver == LIGHTCK else 0.0
    # With three slots, the bytes of a checkpoint that outlasts the update are counted at the session's next event.
    written = sum(column(found.all[1:], "written_bytes"))
    stalls = column(saved, "stall_seconds")
    step = median(w.seconds for w in plain)
    return {
        "pairs": len(saved),
        "unsettled": found.unsettled,
        "step": asdict(spread([w.seconds for w in plain])),
        "difference": _difference([w.seconds for w in plain], [w.seconds for w in saved], hooks),
        "cpu_step": asdict(spread([w.cpu_seconds for w in plain])),
        "cpu_difference": _difference([w.cpu_seconds for w in plain], [w.cpu_seconds for w in saved], hooks_cpu),
        "thread_difference": _difference(
            [w.thread_seconds for w in plain], [w.thread_seconds for w in saved], hooks_cpu
        ),
        "own_cpu_seconds": mean(column(saved, "own_cpu_seconds")),
        "stall": {**asdict(spread(stalls)), "share": median(stalls) / step, "share_p99": spread(stalls).p99 / step},
        "wait_seconds": median(column(saved, "wait_seconds")),
        "end_wait_seconds": median(column(saved, "end_seconds")),
        "helped_share": sum(column(found.all[1:], "helped_bytes")) / written if written else None,
        "written_bytes": written / len(saved) if written else None,
    }


def _difference(plain: Sequence[float], saved: Sequence[float], hooks: float) -> dict[str, Any]:
    """Seconds, and shares of a plain window. ``hooks``: the time of the saver in plain windows."""
    found, same = estimate(against_neighbours(saved, plain)), estimate(same_against_same(plain))
    base = median(plain)
    shifted = Estimate(found.median + hooks, found.low + hooks, found.high + hooks, found.n)
    return {
        **asdict(shifted),
        "share": shifted.median / base,
        "share_low": shifted.low / base,
        "share_high": shifted.high / base,
        "same_low": same.low / base,
        "same_high": same.high / base,
        "resolved": is_resolved(shifted, same),
    }


def _spread_out(options: dict[str, Any], folder: str, waited_steps: int) -> dict[str, Any]:
    """The cost of a saver whose background work outlasts a step, in windows so long that nothing waits for it."""
    span = waited_steps + 2
    training = _training(options)
    saver = _saver(options)
    found = loop.run(training, saver, folder, min(SPREAD_PAIRS, options["pairs"]), span)
    loop.check(training, saver, folder)
    _emptied(folder)
    cost = estimate(against_neighbours([w.seconds for w in found.saved], [w.seconds for w in found.plain]))
    return {
        "span": span,
        "seconds": cost.median,
        "low": cost.low,
        "high": cost.high,
        "end_wait_seconds": median(column(found.saved, "end_seconds")),
    }
