"""How often a version is saved: every n-th update, or as often as a budget allows.

A ``Cadence`` is asked at each boundary whether the version is due. ``Auto`` measures in both ways what a version costs
(time inside lightck on the training thread; how much longer steps take in which one is written) and follows it up and
down. It decides by time, and by nothing that a resume needs: a version is exact whenever it is saved.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol


class Cadence(Protocol):
    """When a version is due."""

    @property
    def interval(self) -> int:
        """Updates between versions, as of now."""
        ...

    def is_due(self, step: int, saved_step: int) -> bool:
        """Whether the version of ``step`` is to be saved; ``saved_step``: the last one that was."""
        ...

    def foresees(self, step: int, saved_step: int) -> bool:
        """Whether it is certain already that the version of ``step`` will be saved."""
        ...

    def passed(self, now: float, stall_seconds: float, saved: bool) -> None:
        """A boundary was passed at this time, with so much stall in the session so far; was its version saved?"""
        ...


@dataclass(frozen=True, slots=True)
class Every:
    """Every ``interval``-th step, counted from step 0 of the training."""

    interval: int = 1

    def is_due(self, step: int, saved_step: int) -> bool:
        return step // self.interval > saved_step // self.interval

    def foresees(self, step: int, saved_step: int) -> bool:
        return self.is_due(step, saved_step)

    def passed(self, now: float, stall_seconds: float, saved: bool) -> None:
        """Nothing is measured."""


@dataclass(frozen=True, slots=True)
class Auto:
    """``attach(..., interval=lightck.Auto(budget=0.03))``: versions as often as they cost at most this.

    Args:
        budget: the share of the training's time that versions may cost: 0.03 is 3 %.
        mtbf: mean time between failures, in seconds. Where versions are so cheap that fewer of them would lose less to
            failures than they save, there are fewer: sqrt(2 x cost x mtbf) apart (Young, Commun. ACM 17(9), 1974).
        most: never more updates apart than this.

    The budget is CheckFreq's rule (Mohan et al., FAST 2021), measured all the time and not only at the start: now and
    then one version is left out, to see how long a step takes without.
    """

    budget: float = 0.03
    mtbf: float | None = None
    most: int = 1000

    def __post_init__(self) -> None:
        if not 0 < self.budget < 1:
            raise ValueError(f"budget={self.budget!r}: the share of the time that versions may cost, as 0.03 for 3 %.")
        if self.mtbf is not None and not self.mtbf > 0:
            raise ValueError(f"mtbf={self.mtbf!r}: the mean time between failures in seconds, or None.")
        if type(self.most) is not int or self.most < 1:
            raise ValueError(f"most={self.most!r}: the largest number of updates between versions, at least 1.")


_WARM_UP = 3
"""Steps that count for nothing: the first ones make optimizer state and touch memory."""
_REMEMBERED = 15
"""Steps of each kind that medians are taken of."""
_LOOK_EVERY = 5
"""Saved versions between two looks."""
_WITHOUT_MIN = 3
_WITHOUT_EVERY = 100
"""Saved versions, one behind the other, after which one is left out."""


@dataclass(slots=True)
class Adaptive:
    """The cadence of an ``Auto``."""

    auto: Auto
    interval: int = 1
    _seen: int = 0
    _last: tuple[float, float] | None = None
    _was_saved: bool = False
    _with: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """(seconds, stall seconds) of steps behind a boundary whose version was saved."""
    _without: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _looks: int = 0
    _in_a_row: int = 0
    _fewer_wanted: int = 0

    def is_due(self, step: int, saved_step: int) -> bool:
        return step - saved_step >= self.interval + self._leaves_one_out()

    def foresees(self, step: int, saved_step: int) -> bool:
        """What it measures until the boundary may change its mind."""
        return False

    def _leaves_one_out(self) -> bool:
        """At an interval of 1 nothing else would tell how long a step takes without a version."""
        if self.interval > 1 or self._seen < _WARM_UP + _LOOK_EVERY or self._in_a_row == 0:
            return False
        wanted = 2 if len(self._without) < _WITHOUT_MIN else _WITHOUT_EVERY
        return self._in_a_row >= wanted

    def passed(self, now: float, stall_seconds: float, saved: bool) -> None:
        last, self._last = self._last, (now, stall_seconds)
        was_saved, self._was_saved = self._was_saved, saved
        self._in_a_row = self._in_a_row + 1 if saved else 0
        self._seen += 1
        if last is None or self._seen <= _WARM_UP:
            return
        took = (now - last[0], stall_seconds - last[1])
        (self._with if was_saved else self._without).append(took)
        if was_saved:
            self._looks += 1
            if self._looks % _LOOK_EVERY == 0:
                self._follow(self._wanted())

    def _wanted(self) -> int:
        """The interval at which versions cost what they may."""
        step, cost = self.step_seconds(), self.cost_seconds()
        if step <= 0:
            return self.interval
        wanted = math.ceil(cost / (self.auto.budget * step))
        if self.auto.mtbf is not None:
            wanted = max(wanted, round(math.sqrt(2 * cost * self.auto.mtbf) / step))
        return min(max(wanted, 1), self.auto.most)

    def step_seconds(self) -> float:
        """A step without a version."""
        if len(self._without) >= _WITHOUT_MIN:
            return median(took - stall for took, stall in self._without)
        return median(took - stall for took, stall in self._with)

    def cost_seconds(self) -> float:
        """What a version costs: the time inside lightck, or the difference between steps with and without one where
        that is larger, and larger than their scatter."""
        direct = median(stall for _, stall in self._with)
        if len(self._without) < _WITHOUT_MIN:
            return direct
        direct -= median(stall for _, stall in self._without)
        longer = median(took for took, _ in self._with) - median(took for took, _ in self._without)
        scatter = _scatter([took for took, _ in self._with]) + _scatter([took for took, _ in self._without])
        return max(direct, longer if longer > scatter else 0.0, 0.0)

    def _follow(self, wanted: int) -> None:
        """Up at once: the budget is a promise. Down only when two looks agree."""
        self._fewer_wanted = self._fewer_wanted + 1 if wanted < self.interval else 0
        if wanted > self.interval or self._fewer_wanted >= 2:
            self.interval, self._fewer_wanted = wanted, 0
            self._with.clear()


def _scatter(values: list[float]) -> float:
    """Median distance from the median."""
    middle = median(values)
    return median(abs(value - middle) for value in values)


def cadence(interval: int | str | Auto) -> Cadence:
    """What ``attach`` was told, as an object."""
    if interval == "auto":
        interval = Auto()
    if isinstance(interval, Auto):
        return Adaptive(interval)
    if type(interval) is not int or interval < 1:
        raise ValueError(
            f"interval={interval!r}: the number of updates between versions, an int of at least 1; or \"auto\", or "
            "lightck.Auto(budget=0.03)."
        )
    return Every(interval)
