"""Private memory of a training that saves every step: while it trains, at its peak, and with the files that it keeps.

One saver per row; the table compares with the row that saves nothing. A pool is a shared mapping, so it counts as a
file and not as private memory. Free heap memory is returned to the system before each sample: the amount of freed
activations that the C library keeps differs by hundreds of megabytes between two runs of the same loop.

Each step has three samples, all while no activation is alive: after the update, without an in-flight checkpoint; at the
start of the forward, when a checkpoint was just closed; and before the update, before the saver waits there.
"""

from __future__ import annotations

import ctypes
from statistics import median
from typing import Any

from bench.measures import loop
from bench.measures.savers import NOTHING, make
from bench.measures.training import Training
from bench.running.machine import PeakMemory, all_anonymous_bytes
from bench.workloads import workload


def measure(options: dict[str, Any], folder: str) -> dict[str, Any]:
    training = Training(workload(options["workload"], options["size"]), options.get("batch", 0))
    saver = make(options["saver"], options.get("backend", "file"))
    samples = Samples()
    with PeakMemory(folder) as peak:
        # torch calls hooks in the order of registration: this one before the saver's hooks, the other one after them.
        training.optimizer.register_step_pre_hook(lambda *_: samples.take("before update"))
        saver.start(training, folder, 1)
        training.model.register_forward_pre_hook(lambda *_: samples.take("forward begins"))
        for _ in range(options["steps"]):
            saver.step_begins(training.step)
            training.iterate()
            samples.take("settled")
        saver.window_ends(True)
        if options["saver"] != NOTHING:
            saver.finish(training.step)
    if options["saver"] != NOTHING:
        loop.compare(training, saver, folder)  # after the peak was sampled
    return {
        "nbytes": training.nbytes,
        "settled_bytes": samples.settled("settled"),
        "in_flight_bytes": {name: samples.settled(name) for name in ("forward begins", "before update")},
        "peak_bytes": peak.anonymous,
        "peak_with_files_bytes": peak.with_files,
        **saver.facts(),
    }


class Samples:
    """Private memory at the same moments of each step."""

    def __init__(self) -> None:
        self._found: dict[str, list[int]] = {}

    def take(self, name: str) -> None:
        _give_back_free_heap()
        self._found.setdefault(name, []).append(all_anonymous_bytes())

    def settled(self, name: str) -> float:
        """The median over the later half of the steps."""
        found = self._found[name]
        return median(found[len(found) // 2 :])

    def largest(self) -> dict[str, float]:
        """The largest sample of each moment."""
        return {name: float(max(found)) for name, found in self._found.items()}


def _give_back_free_heap() -> None:
    """Return free heap memory to the system, if the C library is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
