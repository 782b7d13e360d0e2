"""Private memory of a training that saves every step: while it trains, at its peak, and with the files that it keeps.

One saver per row; the table compares with the row that saves nothing. A pool is mapped and shared, so it is no private
memory; it counts with the files. While it trains, what is free in the heap is given back before each look: how much of
freed activations the C library keeps differs by hundreds of megabytes between two runs of the same loop.

Three looks at each step, all while no activation is alive: after the update, when no version is in flight; at the begin
of the forward, when one was just closed; and before the update, ahead of what the saver still waits for there.
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
    looks = _Signatures()
    with PeakMemory(folder) as peak:
        # torch calls hooks in the order of their registration: this one before the saver's, the other one after them.
        training.optimizer.register_step_pre_hook(lambda *_: looks.look("before update"))
        saver.start(training, folder, 1)
        training.model.register_forward_pre_hook(lambda *_: looks.look("forward begins"))
        for _ in range(options["steps"]):
            saver.step_begins(training.step)
            training.iterate()
            looks.look("settled")
        saver.window_ends(True)
        if options["saver"] != NOTHING:
            saver.finish(training.step)
    if options["saver"] != NOTHING:
        loop.compare(training, saver, folder)  # after the peak was taken
    return {
        "nbytes": training.nbytes,
        "settled_bytes": looks.settled("settled"),
        "in_flight_bytes": {name: looks.settled(name) for name in ("forward begins", "before update")},
        "peak_bytes": peak.anonymous,
        "peak_with_files_bytes": peak.with_files,
        **saver.facts(),
    }


class _Signatures:
    """Private memory at the same moments of each step."""

    def __init__(self) -> None:
        self._found: dict[str, list[int]] = {}

    def look(self, name: str) -> None:
        _give_back_free_heap()
        self._found.setdefault(name, []).append(all_anonymous_bytes())

    def settled(self, name: str) -> float:
        """Of the later half of the steps."""
        found = self._found[name]
        return median(found[len(found) // 2 :])


def _give_back_free_heap() -> None:
    """Where the C library is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
