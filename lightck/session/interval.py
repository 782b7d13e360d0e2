"""How often a checkpoint is saved: every n-th update, or as often as a budget allows.

After each update the session asks a ``Cadence`` whether the checkpoint of this step is due. For ``Auto`` lightck
measures what a checkpoint costs, in two parts: the time inside lightck on the training thread, and how much longer a
step takes while a checkpoint is written. The interval becomes larger or smaller with the measured cost. The interval
does not affect a resume, because every saved checkpoint is exact.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol, SupportsFloat, SupportsIndex

log = logging.getLogger("lightck")


class Cadence(Protocol):
    """Decides when a checkpoint is due."""

    @property
    def interval(self) -> int:
        """Updates from one saved checkpoint to the next, at present."""
        ...

    def is_due(self, step: int, saved_step: int) -> bool:
        """Whether the checkpoint of ``step`` is to be saved. ``saved_step``: the step of the last saved checkpoint."""
        ...

    def will_be_due(self, step: int, saved_step: int) -> bool:
        """Whether the checkpoint of ``step`` is certain to be saved. Called before the update number ``step`` has
        ended."""
        ...

    def boundary_passed(self, now: float, stall_seconds: float, saved: bool) -> None:
        """Record a boundary. ``now``: its time, in seconds of a monotonic clock; ``stall_seconds``: seconds that
        lightck's code has taken from the training thread so far; ``saved``: whether the checkpoint of the boundary is
        saved."""
        ...


@dataclass(frozen=True, slots=True)
class Every:
    """Saves every ``interval``-th step, counted from step 0 of the training."""

    interval: int = 1

    def is_due(self, step: int, saved_step: int) -> bool:
        return step // self.interval > saved_step // self.interval

    def will_be_due(self, step: int, saved_step: int) -> bool:
        return self.is_due(step, saved_step)

    def boundary_passed(self, now: float, stall_seconds: float, saved: bool) -> None:
        """Nothing is measured."""


@dataclass(frozen=True, slots=True)
class Auto:
    """An interval that keeps the cost of checkpoints within a budget: ``attach(..., interval=Auto(budget=0.03))``.

    Args:
        budget: the share of the training's time that checkpoints may cost: 0.03 is 3 %.
        mtbf: mean time between failures, in seconds. Checkpoints are then at least sqrt(2 x cost x mtbf) seconds
            apart, even if the budget allows more of them. (``cost``: seconds that one checkpoint costs.) This distance
            minimizes the cost of checkpoints plus the work that failures lose (Young, Commun. ACM 17(9), 1974). None or
            infinity: only the budget counts.
        most: upper bound of the interval, in updates.

    The time that lightck's hooks take at every step, with a checkpoint or without, counts against the budget. A quarter
    of the budget is always left for checkpoints. If hooks and checkpoints together then exceed the budget, a warning
    says so.

    The budget is CheckFreq's rule (Mohan et al., FAST 2021), measured during the whole training and not only at its
    start. At an interval of 1 a checkpoint is left out now and then, to measure a step without a checkpoint. After a
    lasting change of the time of steps or checkpoints, the interval is right again once 12 checkpoints were saved and
    40 steps were made (240 steps if the interval was 1, because steps without a checkpoint are rare then). One outlier
    changes nothing. If the times of steps vary much (batches of varying length), only a half to a quarter of the
    checkpoints that the budget allows are saved.
    """

    budget: float = 0.03
    mtbf: float | None = None
    most: int = 1000

    def __post_init__(self) -> None:
        budget, mtbf = _number(self.budget), None if self.mtbf is None else _number(self.mtbf)
        if not 0 < budget < 1:
            raise ValueError(
                f"budget={self.budget!r}: pass the share of the time that checkpoints may cost, between 0 and 1, "
                "as 0.03 for 3 %."
            )
        if mtbf is not None and not mtbf > 0:
            raise ValueError(f"mtbf={self.mtbf!r}: pass the mean time between failures in seconds, above 0, or None.")
        if type(self.most) is not int or self.most < 1:
            raise ValueError(
                f"most={self.most!r}: pass the largest number of updates between checkpoints, an int of at least 1."
            )
        object.__setattr__(self, "budget", budget)
        object.__setattr__(self, "mtbf", mtbf)


def _number(value: object) -> float:
    """Convert ``value`` to float. Return NaN if it is no number, or is too large for a float."""
    try:
        return float(value) if isinstance(value, (SupportsFloat, SupportsIndex)) else math.nan
    except (TypeError, ValueError, OverflowError):
        return math.nan


# A *pair* is a step that follows a saved checkpoint, and the next step, which follows none (see ``Adaptive``).
_WARM_UP = 3
"""How many steps after the first boundary are not measured, because they create optimizer state and touch memory for
the first time."""
_STEPS = 15
"""The step time is the median of the last ``_STEPS`` steps."""
_UNSAVED = 5
"""The time that hooks take at every step is the least stall of the last ``_UNSAVED`` steps without a checkpoint."""
_AGREE_UP, _AGREE_DOWN = 3, 5
"""How many measurements in a row must agree before the cost is raised (``_AGREE_UP``) or lowered (``_AGREE_DOWN``)."""
_LEFT_MIN = 0.25
"""The least share of the budget that is left for checkpoints, however much the hooks cost."""
SKIP_SOON, _SKIP_EVERY = 4, 200
"""At an interval of 1: how many checkpoints in a row are saved before one is left out, so that a pair can be measured.
``SKIP_SOON`` applies while fewer than ``_AGREE_UP`` pairs are known, ``_SKIP_EVERY`` afterwards."""


@dataclass(slots=True)
class _Cost:
    """A cost in seconds. If the last three measurements are all above ``value``, ``value`` is raised to the least of
    them. If the last five measurements (or all, while there are three or four) are all below ``value``, ``value`` is
    lowered to the largest of them.

    So one outlier changes nothing. Some media keep up with few checkpoints but not with many. On such a medium the
    interval does not settle: while few checkpoints are saved, each costs little, so more are saved. Then each costs
    much, so fewer are saved again. The budget is exceeded by little, because ``value`` usually falls only after five
    low measurements.
    """

    value: float = 0.0
    last: deque[float] = field(default_factory=lambda: deque(maxlen=_AGREE_DOWN))
    """The last measurements, in seconds, the newest at the end."""

    def measured(self, seconds: float) -> None:
        self.last.append(seconds)
        if len(self.last) >= _AGREE_UP:
            self.value = max(min(self.value, max(self.last)), min(list(self.last)[-_AGREE_UP:]))


@dataclass(frozen=True, slots=True)
class _Step:
    """The time from one boundary to the next. ``outside``: seconds outside lightck; ``stall``: seconds inside
    lightck; ``saved``: whether the checkpoint that closed at the first of the two boundaries was saved."""

    outside: float
    stall: float
    saved: bool


@dataclass(slots=True)
class Adaptive:
    """The cadence of an ``Auto``: ``boundary_passed`` measures, and ``is_due`` decides.

    The cost of a checkpoint is the *stall* of the step after it, plus the *extra* time of that step compared with the
    next step, which has no checkpoint. Only neighbouring steps are compared, since the time of steps may drift. At an
    interval of 1 such pairs exist only where a checkpoint is left out. At a larger interval every second checkpoint is
    delayed by one step. Otherwise periodic work of the loop (an evaluation) might fall into the step after each of
    ``_AGREE_UP`` successive checkpoints: these measurements would agree, and the cost of the work would be taken for
    the cost of checkpoints.
    """

    auto: Auto
    interval: int = 1
    _stall: _Cost = field(default_factory=_Cost)
    _extra: _Cost = field(default_factory=_Cost)
    _steps: deque[_Step] = field(default_factory=lambda: deque(maxlen=_STEPS))
    """The last steps that were measured, the newest at the end."""
    _unsaved_stalls: deque[float] = field(default_factory=lambda: deque(maxlen=_UNSAVED))
    """Stalls of the last steps without a checkpoint."""
    _n_boundaries: int = 0
    """Number of boundaries so far."""
    _last: tuple[float, float] = (0.0, 0.0)
    """Time and total stall at the last boundary."""
    _n_saved: int = 0
    """Number of saved checkpoints so far."""
    _saved_in_a_row: int = 0
    """Saved checkpoints in a row up to the last boundary."""
    _is_warned: bool = False

    def is_due(self, step: int, saved_step: int) -> bool:
        self.interval = self.wanted()
        return step - saved_step >= min(self.interval + self._is_delayed(), self.auto.most)

    def will_be_due(self, step: int, saved_step: int) -> bool:
        """Return False, because the measurements until the boundary may change the decision."""
        return False

    def boundary_passed(self, now: float, stall_seconds: float, saved: bool) -> None:
        took, stall = now - self._last[0], stall_seconds - self._last[1]
        if self._n_boundaries > _WARM_UP:
            self._measure(_Step(took - stall, stall, self._saved_in_a_row > 0))
        self._n_boundaries += 1
        self._last = now, stall_seconds
        if not saved and self._saved_in_a_row > SKIP_SOON:
            # More than SKIP_SOON checkpoints in a row were saved. No pair was measured meanwhile, so all are old.
            self._extra.last.clear()
        self._saved_in_a_row = self._saved_in_a_row + 1 if saved else 0
        self._n_saved += saved

    def _measure(self, step: _Step) -> None:
        """Add a step. If it followed a saved checkpoint, its stall is a measurement of ``_stall``. If it completes a
        pair, the pair's extra time is a measurement of ``_extra``."""
        if step.saved:
            self._stall.measured(step.stall - min(self._unsaved_stalls, default=0.0))
        else:
            self._unsaved_stalls.append(step.stall)
            if self._steps and self._steps[-1].saved:
                self._extra.measured(self._steps[-1].outside - step.outside)
        self._steps.append(step)

    def _warn_fixed_cost(self) -> None:
        """Warn once if the hooks leave less than a quarter of the budget for checkpoints. The budget will be exceeded
        then, because checkpoints always get a quarter of it."""
        if self._is_warned or len(self._unsaved_stalls) < _UNSAVED or len(self._steps) < _STEPS:
            return
        fixed, share = self._fixed()
        if share > (1 - _LEFT_MIN) * self.auto.budget:
            self._is_warned = True
            enough = math.ceil(200 * share) / 100
            log.warning(
                'lightck: interval="auto" will cost more than its budget of %g %%: lightck\'s hooks alone cost %.1f %% '
                "of each step (%.0f us), and a quarter of the budget is always kept for checkpoints. Make steps "
                "longer (a larger batch)%s",
                100 * self.auto.budget,
                100 * share,
                1e6 * fixed,
                f", or pass a larger budget: interval=lightck.Auto(budget={enough:.2f})" if enough < 1 else "",
            )

    def _fixed(self) -> tuple[float, float]:
        """Return the time that the hooks take in a step without a checkpoint, in seconds and as a share of the step's
        time. Return (0, 0) while too few steps are measured."""
        if len(self._unsaved_stalls) < _UNSAVED or not self._steps:
            return 0.0, 0.0
        fixed = min(self._unsaved_stalls)
        whole = fixed + sorted(step.outside for step in self._steps)[len(self._steps) // 2]
        return fixed, fixed / whole if whole > 0 else 0.0

    def wanted(self) -> int:
        """Return the interval that the measured costs allow.

        If the stalls alone allow an interval of 1, the extra time decides between 1 and a larger interval. The extra
        time is measured in pairs, and there are few of them at an interval of 1. So the interval stays at 2 or less
        until enough recent pairs were measured."""
        self._warn_fixed_cost()
        wanted, pairs = self._wanted_interval(self._extra.value), self._extra.last
        enters_or_leaves_1 = (wanted == 1) != (self.interval == 1)
        stalls_allow_1 = self._wanted_interval(0.0) == 1
        if (enters_or_leaves_1 or len(pairs) < _AGREE_UP) and stalls_allow_1:
            if enters_or_leaves_1 and (wanted == 1 or self._saved_in_a_row > SKIP_SOON):
                # If the interval becomes 1, pairs that were measured at a larger interval do not apply. If it was 1,
                # the pairs are old, because more than SKIP_SOON checkpoints in a row were saved since.
                pairs.clear()
            wanted = wanted if len(pairs) >= _AGREE_UP else min(wanted, 2)  # 2: each checkpoint gives a pair
        return min(wanted, self.auto.most)

    @property
    def saved_between_skips(self) -> int:
        """At an interval of 1: how many checkpoints in a row are saved before one is left out."""
        return SKIP_SOON if len(self._extra.last) < _AGREE_UP else _SKIP_EVERY

    def _is_delayed(self) -> bool:
        """Whether the next checkpoint is delayed by one step. At an interval of 1 the delay leaves out one
        checkpoint."""
        if self.interval > 1:
            return self._n_saved % 2 == 1
        return self._saved_in_a_row >= self.saved_between_skips

    def _wanted_interval(self, extra: float) -> int:
        """Return the smallest interval that keeps within the budget. ``extra``: by how many seconds a checkpoint makes
        the step after it longer. Return the present interval if no step was measured yet, or if ``extra`` is out of
        date: longer than the steps are now."""
        extra = max(extra, 0.0)
        steps = sorted([s.outside - extra * s.saved for s in self._steps])
        step = steps[len(steps) // 2] if steps else 0.0
        if step <= 0:
            return self.interval
        cost, mtbf, most = max(self._stall.value, 0.0) + extra, self.auto.mtbf, self.auto.most
        left = max(self.auto.budget - self._fixed()[1], _LEFT_MIN * self.auto.budget)
        wanted = math.ceil(min(cost / left / step, most))  # floats: an overflow is infinity and no error
        if mtbf is not None and not math.isinf(mtbf):
            wanted = max(wanted, round(min(math.sqrt(2 * cost * mtbf) / step, most)))
        return max(wanted, 1)


def cadence_of(interval: int | str | Auto) -> Cadence:
    """The cadence for the ``interval`` argument of ``attach``. Raises ``ValueError`` for a wrong argument."""
    if interval == "auto":
        interval = Auto()
    if isinstance(interval, Auto):
        return Adaptive(interval)
    if type(interval) is not int or interval < 1:
        raise ValueError(
            f"interval={interval!r}: pass the number of updates between checkpoints, an int of at least 1; or "
            '"auto", or lightck.Auto(budget=0.03).'
        )
    return Every(interval)
