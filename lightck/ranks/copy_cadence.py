"""How often checkpoints are copied to another host, if the user does not say so: rank 0 measures, and chooses.

A copy of one checkpoint at full speed takes c seconds: its bytes, at the speed of the slowest rank when attach copied
the first checkpoint on all ranks at once. (That one may be smaller: before the first update, most optimizers have no
state.) A step takes s seconds. With n steps between two copies, copying at full speed would take c / (n s) of the
training time. The number n is the smallest with which that is at most a fiftieth: 50 c / s, rounded up to a multiple of
the interval, and at least twice the interval. (With a tenth, two ranks that kept each other's copies on one machine of
two cores became 20 % slower: each end of a copy takes a core for a part of the time.)
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from math import ceil

from lightck.pool.format.structures import NUMBER_MAX

SHARE = 0.02
"""The share of the time that copies at full speed would take."""
_COMMITS_LEFT_OUT, _COMMITS = 3, 8
"""The time of a step is measured from the end of the third commit of this session on (the first steps are slow), over
eight commits."""
UNMEASURED_SECONDS_PER_BYTE = 2e-9
"""Where no rank has measured the speed of a copy, because all copies had the first checkpoint already: 500 MB/s."""


class CopyCadence:
    """Measures the time of a step, and chooses the number of steps between two copies."""

    def __init__(self, seconds_per_byte: float, interval: int) -> None:
        """``seconds_per_byte``: of a copy at full speed. ``interval``: steps between two checkpoints."""
        self._seconds_per_byte, self._interval = seconds_per_byte, interval
        self._n_commits = 0
        self._began = 0.0, 0
        """Time and step at which the measurement began."""

    def committed(self, step: int, nbytes: int) -> int | None:
        """Return the chosen number; None while it cannot be chosen. Call at each commit. ``nbytes``: of the payload of
        a checkpoint."""
        self._n_commits += 1
        now = time.monotonic()
        if self._n_commits == _COMMITS_LEFT_OUT:
            self._began = now, step
        if self._n_commits < _COMMITS_LEFT_OUT + _COMMITS or step <= self._began[1]:
            return None
        step_seconds = max((now - self._began[0]) / (step - self._began[1]), 1e-6)
        return every_for(nbytes * self._seconds_per_byte, step_seconds, self._interval)


def slowest(measured: Iterable[tuple[float, int]]) -> float:
    """Return the seconds per byte of the slowest rank. ``measured``: for each rank the seconds that its first copy
    took, and its number of bytes (0 if the copy had them already)."""
    return max((seconds / nbytes for seconds, nbytes in measured if nbytes), default=UNMEASURED_SECONDS_PER_BYTE)


def every_for(copy_seconds: float, step_seconds: float, interval: int) -> int:
    """Return the number of steps between two copies: at least twice the interval."""
    steps = copy_seconds / (SHARE * step_seconds)
    return min(max(2, ceil(steps / interval)) * interval, NUMBER_MAX - 1)
