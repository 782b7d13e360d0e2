"""Which steps all ranks of a group save, while the interval changes (``interval="auto"``).

Rank 0 measures, and chooses an interval. All ranks follow one schedule, so each saved step is saved on all of them:

    propose   rank 0 proposes a ``Pattern``: an interval, and the step, some checkpoints ahead, from which it counts
    answer    each rank accepts it, if it has not decided about that step yet
    verdict   all have accepted: the pattern is in force from its step on, on all ranks; else it is dropped on all

*Data flow.* ``StepAgreement`` (``agreed_step.py``) carries proposals, answers and verdicts between helper threads. The
training thread asks ``is_due`` for each step.

*Invariant.* All ranks decide the same about each step. A rank decides by the newest pattern that begins at the step or
before it. It refuses a pattern that begins at a step about which it has decided. And it does not decide about a step
at or after the beginning of a pattern whose verdict it does not know: it waits. The wait needs the helper threads of
the other ranks only, and no training thread, so it ends while all ranks live.
``tests/ranks/test_agreed_interval.py`` runs this through every interleaving of small groups.

*Failure cases.* A rank was killed, or the store fails: no verdict comes, and a rank that reaches the step raises
``RankError`` after its timeout. The checkpoints are intact.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from lightck.ranks.agreed_step import ACCEPTED, PASSED, Proposal


class Pattern(NamedTuple):
    """Which steps are saved, from step ``first`` on. Step ``first`` is saved."""

    first: int
    interval: int
    """Updates from one saved step to the next."""
    skip: int = 0
    """A number with an interval of 1, and a flag with a larger one.

    - Interval 1: after so many saved steps one is left out, to be compared with them; 0: none is left out.
    - A larger interval: 1 if every second checkpoint comes one step later, so that checkpoints do not always meet what
      the loop does at each n-th step; else 0."""

    def is_due(self, step: int) -> bool:
        """Whether a step from ``first`` on is saved."""
        offset = step - self.first
        if self.interval == 1:
            return not self.skip or offset % (self.skip + 1) != self.skip
        if not self.skip:
            return offset % self.interval == 0
        return offset % (2 * self.interval + 1) in (0, self.interval)

    def max_gap(self) -> int:
        """Return a number: any run of so many steps from ``first`` on contains a saved one."""
        return self.interval + 1


class Schedule:
    """The patterns of one rank. ``answer`` and ``decided`` are called on a helper thread, all else on the training
    thread."""

    def __init__(self, begin: Pattern) -> None:
        """``begin``: the pattern with which all ranks begin."""
        self._lock = threading.Lock()
        self._patterns = [begin]
        """The patterns that are needed, in the order of ``first``. The last ones may not have begun yet."""
        self._pending: Pattern | None = None
        """A pattern that this rank has accepted, and whose verdict it does not know."""
        self._decided = begin.first - 1
        """The newest step about which this rank has decided."""

    # -- the helper thread

    def answer(self, proposal: Proposal) -> int:
        with self._lock:
            if proposal.step <= self._decided:
                return PASSED
            self._pending = Pattern(proposal.step, *proposal.items)
            return ACCEPTED

    def decided(self, proposal: Proposal, verdict: int) -> None:
        with self._lock:
            pending, self._pending = self._pending, None
            if pending is not None and verdict == ACCEPTED:
                self._patterns = [*(one for one in self._patterns if one.first < pending.first), pending]

    # -- the training thread

    def is_due(self, step: int, saved_step: int) -> bool | None:
        """Whether to save at this step: the schedule names it, or names an earlier step after ``saved_step`` at
        which nothing was saved. None: it is not known yet, and the caller asks again. ``saved_step``: the step that was
        saved last."""
        with self._lock:
            if self._pending is not None and step >= self._pending.first:
                return None
            self._decided = max(self._decided, step)
            before_window = step - max(pattern.max_gap() for pattern in self._patterns)
            while len(self._patterns) > 1 and self._patterns[1].first <= before_window:
                del self._patterns[0]
            return any(self._saves(one) for one in range(max(saved_step, before_window) + 1, step + 1))

    def _saves(self, step: int) -> bool:
        pattern = self._pattern_at(step)
        return step >= pattern.first and pattern.is_due(step)

    def _pattern_at(self, step: int) -> Pattern:
        return next((one for one in reversed(self._patterns) if one.first <= step), self._patterns[0])

    def pattern_at(self, step: int) -> Pattern:
        """The pattern in force at a step."""
        with self._lock:
            return self._pattern_at(step)

    @property
    def is_settled(self) -> bool:
        """Whether the newest pattern is in force, and none is pending."""
        with self._lock:
            return self._pending is None and self._patterns[-1].first <= self._decided
