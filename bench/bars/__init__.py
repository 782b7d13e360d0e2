"""The bars: ``bars.json`` holds the targets, and a metric (``metrics.py``) computes the value from the kept results.

A bar is not reached if it has no result, if it is a difference whose A/A line is wider than the bar, or if it combines
rows of different machines. A bar that its value reaches, but the worse end of its interval does not, holds; the output
says that it is not shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.bars.metrics import METRICS, Reached
from bench.tables.results import Results, megabytes, milliseconds, percent, reading, times

FILE = Path(__file__).with_name("bars.json")
UNITS: dict[str, Callable[[float], str]] = {
    "times": times,
    "share": percent,
    "bytes": megabytes,
    "seconds": lambda s: f"{1e6 * s:.2f} us" if s < 1e-3 else milliseconds(s),
    "count": lambda n: f"{n:,.0f}",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """One target, for each of ``over``."""

    name: str
    says: str
    metric: str
    over: tuple[str, ...]
    limit: float
    is_maximum: bool
    aim: float | None
    unit: str
    each_of: tuple[str, ...] = ()
    """The rows that each of ``over`` needs: workloads, loads, savers."""

    def holds(self, one: Reached) -> bool:
        """Whether the value reaches the bar; False without a value, or if the noise is as wide as the bar."""
        return one.value is not None and not one.refused and one.blur <= self.limit and self._reaches(one.value)

    def is_shown(self, one: Reached) -> bool:
        """Whether the worse end of the interval, if any, reaches the bar too."""
        return one.end is None or self._reaches(one.end)

    def _reaches(self, value: float) -> bool:
        return value <= self.limit if self.is_maximum else value >= self.limit

    def text(self, value: float) -> str:
        return UNITS[self.unit](value)

    @property
    def wanted(self) -> str:
        return f"{'at most' if self.is_maximum else 'at least'} {self.text(self.limit)}"


def bars(file: Path = FILE) -> list[Bar]:
    return [_bar(**facts) for facts in json.loads(file.read_text())]


def _bar(
    *,
    name: str,
    says: str,
    metric: str,
    over: Sequence[str],
    unit: str,
    at_most: float | None = None,
    at_least: float | None = None,
    aim: float | None = None,
    each_of: Sequence[str] = (),
) -> Bar:
    limits = [limit for limit in (at_most, at_least) if limit is not None]
    if len(limits) != 1 or metric not in METRICS or unit not in UNITS:
        raise ValueError(f"the bar {name!r} needs one limit, a known metric and a known unit")
    return Bar(name, says, metric, tuple(over), limits[0], at_most is not None, aim, unit, tuple(each_of))


def reached(bar: Bar, results: Results) -> list[Reached]:
    with reading(bar.name):
        return [METRICS[bar.metric](results, what, bar.each_of) for what in bar.over]
