"""How often checkpoints are copied to another host, if the user does not say so: rank 0 measures, and chooses.

A copy of one checkpoint at full speed takes c seconds, on the rank on which it takes longest. When attach copies the
first checkpoint on all ranks at once, each rank measures its time. That checkpoint may be smaller than all later ones
(before the first update, most optimizers have no state), so the time is multiplied by how much more the rank's pool
holds. A step takes s seconds. With n steps between two copies, copying at full speed would take c / (n s) of the
training time. The number n is the smallest with which that is at most a fiftieth: 50 c / s, rounded up to a multiple of
the interval, and at least twice the interval. (With a tenth, two ranks that kept each other's copies on one machine of
two cores became 20 % slower: each end of a copy takes a core for a part of the time.)
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from lightck.pool.format.structures import NUMBER_MAX

COPY_TIME_FRACTION = 0.02
"""Copies at full speed would take at most this fraction of the training time."""
_COMMITS_LEFT_OUT, _COMMITS = 3, 8
"""The time of a step is measured from the end of the third commit of this session on (the first steps are slow), over
eight commits."""
UNMEASURED_SECONDS_PER_BYTE = 2e-9
"""Assumed for a rank that has not measured the speed, because its copy had the first checkpoint already: 500 MB/s."""


class CopyCadence:
    """Measures the time of a step, and chooses the number of steps between two copies."""

    def __init__(self, copy_seconds: float, nbytes: int, interval: int) -> None:
        """``copy_seconds``: how long the copy of a checkpoint takes at full speed (``longest``). ``nbytes``: size
        of a checkpoint of this rank when this was measured. ``interval``: steps between two checkpoints."""
        self._copy_seconds, self._nbytes, self._interval = copy_seconds, nbytes, interval
        self._n_commits = 0
        self._began = 0.0, 0
        """Time and step at which the measurement began."""

    def committed(self, step: int, nbytes: int) -> int | None:
        """Return the chosen number; None while it cannot be chosen. Call at each commit. ``nbytes``: size of a
        checkpoint of this rank now. (Where its tensors have grown, those of the other ranks are taken to have grown as
        much.)"""
        self._n_commits += 1
        now = time.monotonic()
        if self._n_commits == _COMMITS_LEFT_OUT:
            self._began = now, step
        if self._n_commits < _COMMITS_LEFT_OUT + _COMMITS or step <= self._began[1]:
            return None
        step_seconds = max((now - self._began[0]) / (step - self._began[1]), 1e-6)
        return steps_between_copies(self._copy_seconds * nbytes / max(1, self._nbytes), step_seconds, self._interval)


class FirstCopy(NamedTuple):
    """What a rank measured when it copied the first checkpoint."""

    seconds: float
    nbytes_sent: int
    """0 if the copy had the checkpoint already."""
    nbytes: int
    """Size of a checkpoint with all tensors for which its pool has space, optimizer state included."""

    @property
    def seconds_of_all(self) -> float:
        """How long the copy of a checkpoint with all tensors takes."""
        if not self.nbytes_sent:
            return self.nbytes * UNMEASURED_SECONDS_PER_BYTE
        return self.seconds * max(1.0, self.nbytes / self.nbytes_sent)


def longest(measured: Iterable[FirstCopy]) -> float:
    """Return the seconds that the copy of a checkpoint takes on the rank on which it takes longest."""
    return max(one.seconds_of_all for one in measured)


def steps_between_copies(copy_seconds: float, step_seconds: float, interval: int) -> int:
    """Return the number of steps between two copies: at least twice the interval."""
    steps = copy_seconds / (COPY_TIME_FRACTION * step_seconds)
    return min(max(2, ceil(steps / interval)) * interval, NUMBER_MAX - 1)
