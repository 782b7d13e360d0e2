"""How often a checkpoint is saved: every n-th update, or as often as a budget allows.

A ``Cadence`` is asked at each boundary whether the checkpoint is due. ``Auto`` measures in both ways what a checkpoint
costs (time inside lightck on the training thread; how much longer steps take in which one is written) and follows it up
and down. It decides by time, and by nothing that a resume needs: a checkpoint is exact whenever it is saved.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol, SupportsFloat, SupportsIndex


class Cadence(Protocol):
    """When a checkpoint is due."""

    @property
    def interval(self) -> int:
        """Updates between checkpoints, as of now."""
        ...

    def is_due(self, step: int, saved_step: int) -> bool:
        """Whether the checkpoint of ``step`` is to be saved; ``saved_step``: the last one that was."""
        ...

    def will_be_due(self, step: int, saved_step: int) -> bool:
        """Whether it is certain already that the checkpoint of ``step`` will be saved."""
        ...

    def boundary_passed(self, now: float, stall_seconds: float, saved: bool) -> None:
        """A boundary was passed at this time, with so much stall in the session so far; was its checkpoint saved?"""
        ...


@dataclass(frozen=True, slots=True)
class Every:
    """Every ``interval``-th step, counted from step 0 of the training."""

    interval: int = 1

    def is_due(self, step: int, saved_step: int) -> bool:
        return step // self.interval > saved_step // self.interval

    def will_be_due(self, step: int, saved_step: int) -> bool:
        return self.is_due(step, saved_step)

    def boundary_passed(self, now: float, stall_seconds: float, saved: bool) -> None:
        """Nothing is measured."""


@dataclass(frozen=True, slots=True)
class Auto:
    """``attach(..., interval=lightck.Auto(budget=0.03))``: checkpoints as often as they cost at most this.

    Args:
        budget: the share of the training's time that checkpoints may cost: 0.03 is 3 %.
        mtbf: mean time between failures, in seconds. Where checkpoints are so cheap that fewer of them would lose less
            to
            failures than they save, there are fewer: sqrt(2 x cost x mtbf) apart (Young, Commun. ACM 17(9), 1974).
            None, or infinite: the budget decides alone.
        most: never more updates apart than this.

    The budget is CheckFreq's rule (Mohan et al., FAST 2021), measured all the time and not only at the start: now and
    then three checkpoints are left out, to see how long a step takes without. Where steps or checkpoints begin to take
    another time, and stay so, the interval is right again, up or down, 12 checkpoints and 40 steps later; where it was
    1, and only steps without a checkpoint tell how much longer the others are, 12 checkpoints and 240 steps. One
    outlier changes nothing. Where steps differ much among themselves (batches of varying length), it stays on the safe
    side: a half to a quarter of the checkpoints that the budget allows.
    """

    budget: float = 0.03
    mtbf: float | None = None
    most: int = 1000

    def __post_init__(self) -> None:
        budget, mtbf = _number(self.budget), None if self.mtbf is None else _number(self.mtbf)
        if not 0 < budget < 1:
            raise ValueError(
                f"budget={self.budget!r}: the share of the time that checkpoints may cost, as 0.03 for 3 %."
            )
        if mtbf is not None and not mtbf > 0:
            raise ValueError(f"mtbf={self.mtbf!r}: the mean time between failures in seconds, or None.")
        if type(self.most) is not int or self.most < 1:
            raise ValueError(f"most={self.most!r}: the largest number of updates between checkpoints, at least 1.")
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
_UNSAVED = 5
"""The last steps without a checkpoint, whose least stall is what hooks take anyway."""
_AGREE_UP, _AGREE_DOWN = 3, 5
"""Measurements in a row that must agree before a cost is taken to be more, or less."""
_SKIP_EVERY, _SKIP_SOON = 200, 4
"""Saved checkpoints, one behind the other, after which one is left out; and then, until there are pairs enough."""


@dataclass(slots=True)
class _Cost:
    """Seconds, moved only as far as the last measurements agree: up to the least of three, down to the largest of five.

    So one outlier changes nothing. And a medium that keeps up with few checkpoints only, which makes them look cheap
    until there are more, costs little above the budget: five intervals pass before more checkpoints are tried in vain
    again.
    """

    value: float = 0.0
    last: deque[float] = field(default_factory=lambda: deque(maxlen=_AGREE_DOWN))

    def measured(self, seconds: float) -> None:
        self.last.append(seconds)
        if len(self.last) >= _AGREE_UP:
            self.value = max(min(self.value, max(self.last)), min(list(self.last)[-_AGREE_UP:]))


@dataclass(frozen=True, slots=True)
class _Step:
    """From one boundary to the next. ``own``: seconds outside lightck; ``saved``: behind a checkpoint that was
    saved."""

    own: float
    stall: float
    saved: bool


@dataclass(slots=True)
class Adaptive:
    """The cadence of an ``Auto``: ``passed`` measures, and ``is_due`` decides.

    A checkpoint costs what the step behind it is *stalled*, and what that step is *longer* otherwise than the next one,
    which has none. Neighbours only are compared, since the steps of another hour may take another time. At an interval
    of 1 there are such pairs only where a checkpoint is left out. At a larger one every second checkpoint comes a step
    later: what the loop does every so many steps (an evaluation) is then never behind three checkpoints in a row, and
    not taken for their cost.
    """

    auto: Auto
    interval: int = 1
    _stall: _Cost = field(default_factory=_Cost)
    _extra: _Cost = field(default_factory=_Cost)
    _steps: deque[_Step] = field(default_factory=lambda: deque(maxlen=_STEPS))
    _unsaved_stalls: deque[float] = field(default_factory=lambda: deque(maxlen=_UNSAVED))
    """Stalls of steps without a checkpoint."""
    _boundaries: int = 0
    _last: tuple[float, float] = (0.0, 0.0)
    """Time and stall so far, at the last boundary."""
    _saved: int = 0
    _saved_in_a_row: int = 0
    """Saved checkpoints up to that boundary, none of them left out."""

    def is_due(self, step: int, saved_step: int) -> bool:
        self._decide()
        return step - saved_step >= min(self.interval + self._is_delayed(), self.auto.most)

    def will_be_due(self, step: int, saved_step: int) -> bool:
        """What it measures until the boundary may change its mind."""
        return False

    def boundary_passed(self, now: float, stall_seconds: float, saved: bool) -> None:
        took, stall = now - self._last[0], stall_seconds - self._last[1]
        if self._boundaries > _WARM_UP:
            self._measure(_Step(took - stall, stall, self._saved_in_a_row > 0))
        self._boundaries += 1
        self._last = now, stall_seconds
        if not saved and self._saved_in_a_row > _SKIP_SOON:
            self._extra.last.clear()  # of long ago
        self._saved_in_a_row = self._saved_in_a_row + 1 if saved else 0
        self._saved += saved

    def _measure(self, step: _Step) -> None:
        if step.saved:
            self._stall.measured(step.stall - min(self._unsaved_stalls, default=0.0))
        else:
            self._unsaved_stalls.append(step.stall)
            if self._steps and self._steps[-1].saved:
                self._extra.measured(self._steps[-1].own - step.own)
        self._steps.append(step)

    def _decide(self) -> None:
        wanted, pairs = self._wanted_interval(self._extra.value), self._extra.last
        is_turn = (wanted == 1) != (self.interval == 1)
        if (is_turn or len(pairs) < _AGREE_UP) and self._wanted_interval(
            0.0
        ) == 1:  # it hangs on pairs: stalls alone would allow 1
            if is_turn and (wanted == 1 or self._saved_in_a_row > _SKIP_SOON):
                pairs.clear()  # those of a larger interval tell nothing of 1; those of 1 may be of long ago
            wanted = wanted if len(pairs) >= _AGREE_UP else min(wanted, 2)  # at 2 each checkpoint makes a new one
        self.interval = min(wanted, self.auto.most)

    def _is_delayed(self) -> bool:
        """Whether the next checkpoint comes a step later; at an interval of 1 that leaves one out."""
        if self.interval > 1:
            return self._saved % 2 == 1
        return self._saved_in_a_row >= (_SKIP_SOON if len(self._extra.last) < _AGREE_UP else _SKIP_EVERY)

    def _wanted_interval(self, extra: float) -> int:
        """The interval at which checkpoints take what they may, if each makes its step so much extra."""
        extra = max(extra, 0.0)
        steps = sorted([s.own - extra * s.saved for s in self._steps])
        step = steps[len(steps) // 2] if steps else 0.0
        if step <= 0:
            return self.interval  # nothing was measured yet, or ``extra`` is out of date
        cost, mtbf, most = max(self._stall.value, 0.0) + extra, self.auto.mtbf, self.auto.most
        wanted = math.ceil(min(cost / self.auto.budget / step, most))  # floats: too much is infinite, and no error
        if mtbf is not None and not math.isinf(mtbf):
            wanted = max(wanted, round(min(math.sqrt(2 * cost * mtbf) / step, most)))
        return max(wanted, 1)


def cadence_of(interval: int | str | Auto) -> Cadence:
    """What ``attach`` was told, as an object."""
    if interval == "auto":
        interval = Auto()
    if isinstance(interval, Auto):
        return Adaptive(interval)
    if type(interval) is not int or interval < 1:
        raise ValueError(
            f'interval={interval!r}: the number of updates between checkpoints, an int of at least 1; or "auto", or '
            "lightck.Auto(budget=0.03)."
        )
    return Every(interval)
