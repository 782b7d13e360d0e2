"""Many saved steps of a small model: whether memory, descriptors, threads or the stall grow."""

from __future__ import annotations

import os
import time
from statistics import median
from typing import Any

from bench.measures import loop
from bench.measures.figures import slope
from bench.measures.savers import FULL, NOTHING, make
from bench.measures.training import Training
from bench.running.machine import anonymous_bytes
from bench.workloads import workload

PARTS = 20


def measure(options: dict[str, Any], folder: str) -> dict[str, Any]:
    training = Training(workload(options["workload"], "small"), options.get("batch", 0))
    saver = make(options["saver"], options.get("backend", "file"), strategy=options.get("strategy", FULL))
    saver.start(training, folder, 1)
    parts = [_part(training, saver, options["steps"] // PARTS) for _ in range(PARTS)]
    if options["saver"] != NOTHING:
        loop.check(training, saver, folder)
    columns = {name: [part[name] for part in parts] for name in parts[0]}
    later = {name: values[PARTS // 4 :] for name, values in columns.items()}  # the first steps are warm-up
    return {
        "nbytes": training.nbytes,
        "steps": training.step,
        "parts": columns,
        "memory_growth_bytes": slope(later["anonymous_bytes"]),
        "descriptor_growth": later["descriptors"][-1] - later["descriptors"][0],
        "thread_growth": later["threads"][-1] - later["threads"][0],
        "stall_growth_seconds": slope(later["stall_seconds"]),
    }


def _part(training: Training, saver: Any, steps: int) -> dict[str, float]:
    stalls, seconds = [], []
    for _ in range(steps):
        before, began = saver.costs().stall_seconds, time.perf_counter()
        saver.step_begins(training.step)
        training.iterate()
        saver.window_ends(True)
        seconds.append(time.perf_counter() - began)
        stalls.append(saver.costs().stall_seconds - before)
    return {
        "anonymous_bytes": anonymous_bytes(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "stall_seconds": median(stalls),
        "step_seconds": median(seconds),
    }
