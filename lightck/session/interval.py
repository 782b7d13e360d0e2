"""How often a version is saved: every n-th update, or as often as a budget allows.

A ``Cadence`` is asked at each boundary whether the version is due. ``Auto`` measures in both ways what a version costs
(time inside lightck on the training thread; how much longer steps take in which one is written) and follows it up and
down. It decides by time, and by nothing that a resume needs: a version is exact whenever it is saved.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol, SupportsFloat, SupportsIndex


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
            None, or infinite: the budget decides alone.
        most: never more updates apart than this.

    The budget is CheckFreq's rule (Mohan et al., FAST 2021), measured all the time and not only at the start: now and
    then three versions are left out, to see how long a step takes without. Where steps or versions begin to take
    another time, and stay so, the interval is right again, up or down, 12 versions and 40 steps later; where it was 1,
    and only steps without a version tell how much longer the others are, 12 versions and 240 steps. One outlier changes
    nothing. Where steps differ much among themselves (batches of varying length), it stays on the safe side: a half
    to a quarter of the versions that the budget allows.
    """

    budget: float = 0.03
    mtbf: float | None = None
    most: int = 1000

    def __post_init__(self) -> None:
        budget, mtbf = _number(self.budget), None if self.mtbf is None else _number(self.mtbf)
        if not 0 < budget < 1:
            raise ValueError(f"budget={self.budget!r}: the share of the time that versions may cost, as 0.03 for 3 %.")
        if mtbf is not None and not mtbf > 0:
            raise ValueError(f"mtbf={self.mtbf!r}: the mean time between failures in seconds, or None.")
        if type(self.most) is not int or self.most < 1:
            raise ValueError(f"most={self.most!r}: the largest number of updates between versions, at least 1.")
        object.__setattr__(self, "budget", budget)
        object.__setattr__(self, "mtbf", mtbf)


def _number(value: object) -> float:
    """NaN for what is no number, or one that is too large for a float."""
    try:
        return float(value) if isinstance(value, (SupportsFloat, SupportsIndex)) else math.nan
    except (TypeError, ValueError, OverflowError):
        return math.nan


_WARM_UP = 3
"""Steps that count for nothing: the first ones make optimizer state and touch memory."""
_STEPS = 15
"""The last steps, whose median is the time that a step takes."""
_PLAIN = 5
"""The last steps without a version, whose least stall is what hooks take anyway."""
_UP, _DOWN = 3, 5
"""Measurements in a row that must agree before a cost is taken to be more, or less."""
_LEFT_OUT_EVERY, _LEFT_OUT_SOON = 200, 4
"""Saved versions, one behind the other, after which one is left out; and then, until there are pairs enough."""


@dataclass(slots=True)
class _Cost:
    """Seconds, moved only as far as the last measurements agree: up to the least of three, down to the largest of five.

    So one outlier changes nothing. And a medium that keeps up with few versions only, which makes them look cheap until
    there are more, costs little above the budget: five intervals pass before more versions are tried in vain again.
    """

    value: float = 0.0
    last: deque[float] = field(default_factory=lambda: deque(maxlen=_DOWN))

    def measured(self, seconds: float) -> None:
        self.last.append(seconds)
        if len(self.last) >= _UP:
            self.value = max(min(self.value, max(self.last)), min(list(self.last)[-_UP:]))


@dataclass(frozen=True, slots=True)
class _Step:
    """From one boundary to the next. ``own``: seconds outside lightck; ``saved``: behind a version that was saved."""

    own: float
    stall: float
    saved: bool


@dataclass(slots=True)
class Adaptive:
    """The cadence of an ``Auto``: ``passed`` measures, and ``is_due`` decides.

    A version costs what the step behind it is *stalled*, and what that step is *longer* otherwise than the next one,
    which has none. Neighbours only are compared, since the steps of another hour may take another time. At an interval
    of 1 there are such pairs only where a version is left out. At a larger one every second version comes a step later:
    what the loop does every so many steps (an evaluation) is then never behind three versions in a row, and not taken
    for their cost.
    """

    auto: Auto
    interval: int = 1
    _stalled: _Cost = field(default_factory=_Cost)
    _longer: _Cost = field(default_factory=_Cost)
    _steps: deque[_Step] = field(default_factory=lambda: deque(maxlen=_STEPS))
    _plain: deque[float] = field(default_factory=lambda: deque(maxlen=_PLAIN))
    """Stalls of steps without a version."""
    _passed: int = 0
    _last: tuple[float, float] = (0.0, 0.0)
    """Time and stall so far, at the last boundary."""
    _saved: int = 0
    _in_a_row: int = 0
    """Saved versions up to that boundary, none of them left out."""

    def is_due(self, step: int, saved_step: int) -> bool:
        self._decide()
        return step - saved_step >= min(self.interval + self._is_late(), self.auto.most)

    def foresees(self, step: int, saved_step: int) -> bool:
        """What it measures until the boundary may change its mind."""
        return False

    def passed(self, now: float, stall_seconds: float, saved: bool) -> None:
        took, stall = now - self._last[0], stall_seconds - self._last[1]
        if self._passed > _WARM_UP:
            self._measure(_Step(took - stall, stall, self._in_a_row > 0))
        self._passed += 1
        self._last = now, stall_seconds
        if not saved and self._in_a_row > _LEFT_OUT_SOON:
            self._longer.last.clear()  # of long ago
        self._in_a_row = self._in_a_row + 1 if saved else 0
        self._saved += saved

    def _measure(self, step: _Step) -> None:
        if step.saved:
            self._stalled.measured(step.stall - min(self._plain, default=0.0))
        else:
            self._plain.append(step.stall)
            if self._steps and self._steps[-1].saved:
                self._longer.measured(self._steps[-1].own - step.own)
        self._steps.append(step)

    def _decide(self) -> None:
        wanted, pairs = self._wanted(self._longer.value), self._longer.last
        is_turn = (wanted == 1) != (self.interval == 1)
        if (is_turn or len(pairs) < _UP) and self._wanted(0.0) == 1:  # it hangs on pairs: stalls alone would allow 1
            if is_turn and (wanted == 1 or self._in_a_row > _LEFT_OUT_SOON):
                pairs.clear()  # those of a larger interval tell nothing of 1; those of 1 may be of long ago
            wanted = wanted if len(pairs) >= _UP else min(wanted, 2)  # at 2 each version makes a new one
        self.interval = min(wanted, self.auto.most)

    def _is_late(self) -> bool:
        """Whether the next version comes a step later; at an interval of 1 that leaves one out."""
        if self.interval > 1:
            return self._saved % 2 == 1
        return self._in_a_row >= (_LEFT_OUT_SOON if len(self._longer.last) < _UP else _LEFT_OUT_EVERY)

    def _wanted(self, longer: float) -> int:
        """The interval at which versions take what they may, if each makes its step so much longer."""
        longer = max(longer, 0.0)
        steps = sorted([s.own - longer * s.saved for s in self._steps])
        step = steps[len(steps) // 2] if steps else 0.0
        if step <= 0:
            return self.interval  # nothing was measured yet, or ``longer`` is out of date
        cost, mtbf, most = max(self._stalled.value, 0.0) + longer, self.auto.mtbf, self.auto.most
        wanted = math.ceil(min(cost / self.auto.budget / step, most))  # floats: too much is infinite, and no error
        if mtbf is not None and not math.isinf(mtbf):
            wanted = max(wanted, round(min(math.sqrt(2 * cost * mtbf) / step, most)))
        return max(wanted, 1)


def cadence(interval: int | str | Auto) -> Cadence:
    """What ``attach`` was told, as an object."""
    if interval == "auto":
        interval = Auto()
    if isinstance(interval, Auto):
        return Adaptive(interval)
    if type(interval) is not int or interval < 1:
        raise ValueError(
            f'interval={interval!r}: the number of updates between versions, an int of at least 1; or "auto", or '
            "lightck.Auto(budget=0.03)."
        )
    return Every(interval)
