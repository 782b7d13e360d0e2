"""``interval="auto"`` in a group of ranks: rank 0 measures and proposes, and all ranks follow one schedule.

Rank 0 has an ``Adaptive``, as a single process has. When its interval differs from the one in force, rank 0 proposes a
pattern that begins some checkpoints ahead (``ranks/agreed_interval.py`` says why no rank is left behind).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from statistics import median

from lightck.errors import RankError
from lightck.interrupts import raise_if_interrupted, retry_interrupted
from lightck.pool.listener import CommitListener
from lightck.ranks.agreed_interval import Pattern, Schedule
from lightck.ranks.agreed_step import PASSED, Proposal, StepAgreement
from lightck.ranks.meet import Meeting
from lightck.ranks.waiting import wait_until
from lightck.session.group import Group
from lightck.session.interval import SKIP_SOON, Adaptive, Auto
from lightck.stats import Meter

log = logging.getLogger("lightck")
_LEAD_MIN = 2
"""How many checkpoints ahead a pattern begins at least."""
_LATENCY_SECONDS = 0.3
"""Seconds within which the ranks usually agree. A pattern begins at least this long after it is proposed."""
_LEAD_FACTOR_MAX = 64
_LOWERED_SHARE_MAX = 0.8
"""The interval is lowered only to at most this share of the present one, so that it does not change all the time."""
_PAUSES = (0.0002, 0.01)
"""Seconds between two polls while a step waits for the verdict: at first, and at most."""


class AgreedCadence(CommitListener):
    """The ``Cadence`` of one rank. Rank 0 measures."""

    def __init__(self, auto: Auto, first_step: int, is_first_rank: bool, meter: Meter, timeout: float) -> None:
        """``first_step``: the first step of this session. ``timeout``: seconds of the longest wait for a verdict."""
        self._auto, self._meter, self._timeout = auto, meter, timeout
        self._adaptive = Adaptive(auto) if is_first_rank else None
        self.schedule = Schedule(Pattern(first_step, 1, SKIP_SOON if auto.most > 1 else 0))
        self._propose: Callable[[Proposal], None] | None = None
        self._is_asking, self._lead_factor = False, 1
        self._step = first_step - 1
        """The newest step about which this rank has decided."""
        self._seconds: deque[float] = deque(maxlen=15)
        """How long the last steps took."""
        self._at = math.nan
        """When the last boundary was."""
        self._close: Callable[[], None] = lambda: None

    def begin(self, group: Group, meeting: Meeting) -> None:
        """Agree with the other ranks from now on. All ranks call this."""

        def key(what: str, rank: int) -> str:
            return meeting.key(f"interval-{what}", rank)

        agreement = StepAgreement(group.connect(), key, group.rank, group.world_size, self)
        self._close = agreement.close
        if self._adaptive is not None:
            self._propose = agreement.propose

    def closed(self) -> None:
        """End the helper thread."""
        self._close()

    # -- the helper thread

    def answer(self, proposal: Proposal) -> int:
        return self.schedule.answer(proposal)

    def decided(self, proposal: Proposal, verdict: int) -> None:
        self.schedule.decided(proposal, verdict)
        if verdict == PASSED:  # some rank had passed the first step of the pattern: propose a later one next time
            self._lead_factor = min(2 * self._lead_factor, _LEAD_FACTOR_MAX)
        self._is_asking = False

    # -- the training thread

    @property
    def interval(self) -> int:
        return self.schedule.pattern_at(self._step).interval

    def is_due(self, step: int, saved_step: int) -> bool:
        self._step = max(self._step, step)
        is_due = self.schedule.is_due(step, saved_step)
        return self._when_known(step, saved_step) if is_due is None else is_due

    def will_be_due(self, step: int, saved_step: int) -> bool:
        return self.schedule.is_due(step, saved_step) or False

    def boundary_passed(self, now: float, stall_seconds: float, saved: bool) -> None:
        if self._adaptive is None:
            return
        if now > self._at:
            self._seconds.append(now - self._at)
        self._at = now
        self._adaptive.boundary_passed(now, stall_seconds, saved)
        self._adaptive.interval = self.interval
        wanted = self._wanted(self._adaptive)
        if self._propose is not None and not self._is_asking and self.schedule.is_settled:
            present = self.schedule.pattern_at(self._step)
            if _is_worth_proposing(wanted, present):
                self._is_asking = True
                first = self._step + self._lead(present) * self._lead_factor
                self._propose(Proposal(first, (wanted.interval, wanted.skip)))

    def _lead(self, present: Pattern) -> int:
        """Return in how many steps a proposed pattern begins, while ``_lead_factor`` is 1."""
        steps = math.ceil(_LATENCY_SECONDS / median(self._seconds)) if self._seconds else 0
        return max(_LEAD_MIN * present.max_gap(), steps)

    def _wanted(self, adaptive: Adaptive) -> Pattern:
        """Return what the measurements ask for."""
        interval, most = adaptive.wanted(), self._auto.most
        if interval > 1:
            return Pattern(0, interval, int(interval < most))
        return Pattern(0, 1, 0 if most == 1 else adaptive.saved_between_skips)

    def _when_known(self, step: int, saved_step: int) -> bool:
        """Wait for the verdict on a pattern that begins at this step or before, and return whether the step is due."""
        answers: list[bool] = []

        def is_known() -> bool:
            answer = self.schedule.is_due(step, saved_step)
            answers.extend([] if answer is None else [answer])
            return answer is not None

        with self._meter.wait():
            retry_interrupted(
                lambda: wait_until(
                    is_known,
                    timeout=self._timeout,
                    pauses=_PAUSES,
                    report=lambda seconds: log.warning(
                        "lightck: this rank has waited %.0f seconds until all ranks agree on the interval from step %d "
                        "on. A rank that stands still, or the store of the process group, holds them up",
                        seconds,
                        step,
                    ),
                    error=lambda: _no_verdict(step, self._timeout),
                    between=raise_if_interrupted,
                )
            )
        return answers[-1]


def _is_worth_proposing(wanted: Pattern, present: Pattern) -> bool:
    """Whether rank 0 is to propose the wanted pattern in place of the present one."""
    if 1 < wanted.interval < present.interval:
        return wanted.interval <= _LOWERED_SHARE_MAX * present.interval
    return (wanted.interval, wanted.skip) != (present.interval, present.skip)


def _no_verdict(step: int, timeout: float) -> RankError:
    return RankError(
        f"For {timeout:g} seconds (timeout=) the ranks did not agree on the interval from step {step} on "
        '(interval="auto"). Look for an error of another rank, or of the store of the process group. The checkpoints '
        "that all ranks have are intact."
    )
