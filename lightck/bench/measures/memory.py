"""Private memory of a training that saves every step: while it trains, at its peak, and with the files that it keeps.

One saver per row; the table compares with the row that saves nothing. A pool is mapped and shared, so it is no private
memory; it counts with the files. While it trains, what is free in the heap is given back before each look: how much of
freed activations the C library keeps differs by hundreds of megabytes between two runs of the same loop.
"""

from __future__ import annotations

import ctypes
from statistics import median
from typing import Any

from lightck.bench import loop
from lightck.bench.machine import PeakMemory, all_anonymous_bytes
from lightck.bench.savers import NOTHING, make
from lightck.bench.training import Training
from lightck.bench.workloads import workload


def measure(options: dict[str, Any], folder: str) -> dict[str, Any]:
    training = Training(workload(options["workload"], options["size"]), options.get("batch", 0))
    saver = make(options["saver"], options.get("backend", "file"), options.get("rivals"))
    settled: list[int] = []
    with PeakMemory(folder) as peak:
        saver.start(training, folder, 1)
        for _ in range(options["steps"]):
            saver.step_begins(training.step)
            training.iterate()
            _give_back_free_heap()
            settled.append(all_anonymous_bytes())
        saver.window_ends(True)
        if options["saver"] != NOTHING:
            saver.finish(training.step)
    if options["saver"] != NOTHING:
        loop.compare(training, saver, folder)  # after the peak was taken
    return {
        "nbytes": training.nbytes,
        "settled_bytes": median(settled[len(settled) // 2 :]),
        "peak_bytes": peak.anonymous,
        "peak_with_files_bytes": peak.with_files,
        **saver.facts(),
    }



def _give_back_free_heap() -> None:
    """Where the C library is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
