"""The step time of a workload at each candidate batch size, from which its frozen batch size is chosen."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from bench.measures.training import Training
from bench.workloads import BATCHES, SECONDS_MAX, workload


def measure(options: dict[str, Any], folder: str) -> dict[str, Any]:
    """Measure batch sizes from the smallest on, until one is too slow."""
    of = workload(options["workload"], options["size"])
    found: dict[str, float] = {}
    for batch in BATCHES:
        training = Training(of, batch)
        training.iterate()
        found[str(batch)] = median(_step(training) for _ in range(options["steps"]))
        if found[str(batch)] > SECONDS_MAX:
            break
    fitting = [int(batch) for batch, seconds in found.items() if seconds <= SECONDS_MAX]
    return {"seconds": found, "batch": max(fitting, default=BATCHES[0])}


def _step(training: Training) -> float:
    began = time.perf_counter()
    training.iterate()
    return time.perf_counter() - began
