"""The statistics of the benches: medians, spreads, paired differences with a bootstrap interval.

Plain numbers in, plain numbers out; every interval is of 95 % and comes from a fixed seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RESAMPLES, SEED, COVERAGE = 4000, 5, 0.95
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Spread:
    """A summary of a column of samples."""

    median: float
    low: float
    """The distance between the quartiles."""
    high: float
    p99: float
    n: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median with its bootstrap interval."""

    median: float
    low: float
    high: float
    n: int

    @property
    def width(self) -> float:
        return self.high - self.low


def spread(samples: Sequence[float]) -> Spread:
    values = _finite(samples)
    low, median, high, p99 = np.percentile(values, [25, 50, 75, 99])
    return Spread(float(median), float(low), float(high), float(p99), len(values))


def estimate(samples: Sequence[float]) -> Estimate:
    """The median and its percentile bootstrap interval."""
    values = _finite(samples)
    draws = np.random.default_rng(SEED).integers(len(values), size=(RESAMPLES, len(values)))
    medians = np.median(values[draws], axis=1)
    tail = 50 * (1 - COVERAGE)
    low, high = np.percentile(medians, [tail, 100 - tail])
    return Estimate(float(np.median(values)), float(low), float(high), len(values))


def against_neighbours(measured: Sequence[float], plain: Sequence[float]) -> list[float]:
    """Each measured window minus the mean of the plain windows before and after it, so that drift cancels.

    The order is plain, measured, plain, ..., plain, with one plain window more than measured ones.
    """
    if len(plain) != len(measured) + 1:
        raise ValueError(f"{len(measured)} measured windows lie between {len(plain)} plain ones, not one more")
    return [m - (before + after) / 2 for m, before, after in zip(measured, plain, plain[1:], strict=False)]


def same_against_same(plain: Sequence[float]) -> list[float]:
    """The A/A line: the same difference between plain windows."""
    inner = plain[1:-1]
    return [m - (before + after) / 2 for m, before, after in zip(inner, plain, plain[2:], strict=False)]


def is_resolved(difference: Estimate, same: Estimate) -> bool:
    """Whether a difference exceeds the noise between equal windows: "not resolved" if the A/A line is wider."""
    return abs(difference.median) > same.width / 2


def smallest_interval(cost: float, step: float, share: float = 0.05) -> int:
    """The smallest interval, in steps, at which checkpoints cost at most this share of the time."""
    if step <= 0:
        raise ValueError(f"a step of {step} seconds")
    return max(1, math.ceil(cost / (share * step) - 1e-9))


def slope(values: Sequence[float]) -> float:
    """The change of a least-squares line through the values, from the first to the last."""
    array = _finite(values)
    if len(array) < 2:
        return 0.0
    return float(np.polyfit(np.arange(len(array)), array, 1)[0] * (len(array) - 1))


def _finite(samples: Sequence[float]) -> Floats:
    values = np.asarray(samples, np.float64)
    if values.size == 0 or not np.isfinite(values).all():
        raise ValueError(f"{values.size} samples, not all of them finite")
    return values
