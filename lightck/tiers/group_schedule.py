"""Which checkpoints the ranks of a group send to their tiers.

A checkpoint in a tier is complete when every rank has sent its part, so all ranks must send the same step. Rank 0
chooses one that lies some checkpoints ahead, and the ranks agree on it (``ranks/agreed_step.py``). When a rank reaches
that step, it holds the checkpoint, and offers it to its drain as soon as it is known that all ranks do.

    due       on rank 0: a time has passed, or a step comes near -> propose a step
    planned   a rank has accepted the step, and has not reached it
    reached   it has committed the checkpoint, and holds it
    offered   all ranks have accepted: the drain gets it

Invariant: a rank accepts a step only before it has committed a checkpoint of that step or a later one, and only if
nothing else is planned, and its drain is ready. So one slot is enough, and no drain gets a checkpoint that another rank
cannot send.

Failure cases: a rank that accepted leaves out the checkpoint of that step (it was skipped): it drops the plan, the
others send their parts, and the checkpoint stays incomplete; the next one is planned.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from lightck.ranks.agreed_step import ACCEPTED, NOT_READY, PASSED, Proposal
from lightck.tiers.due_steps import seconds_until_due
from lightck.tiers.tier import Tier

_LEAD_MIN = 4
"""How many checkpoints ahead rank 0 plans at least. This is more than another rank can be ahead of rank 0."""
_LATENCY_SECONDS = 0.2
"""How long the ranks are assumed to take to agree, until this is measured."""
_LATENCY_SECONDS_MIN = 0.1
_LEAD_FACTOR_MAX = 64
_PAUSE_SECONDS, _PAUSE_SECONDS_MAX = 0.25, 2.0
"""How long rank 0 waits after a proposal that was not accepted: at first, and at most."""


class GroupSchedule:
    """The plan of one rank. ``answer`` and ``decided`` are called on a helper thread; all else on the training
    thread."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        interval: int,
        newest: Sequence[int | None],
        ages: Sequence[float | None],
        is_ready: Callable[[], bool],
        propose: Callable[[Proposal], None] | None,
    ) -> None:
        """``interval``: updates from one checkpoint to the next. ``newest``: for each tier, the step of its newest
        checkpoint. ``ages``: how many seconds ago each tier got its newest one. ``is_ready``: whether the drain of this
        rank could take a checkpoint. ``propose``: asks all ranks to accept a proposal, whose items are the numbers of
        the tiers for which the checkpoint is due; None on all ranks but rank 0."""
        self._tiers, self._interval, self._is_ready, self._propose = tiers, interval, is_ready, propose
        self._lock = threading.Lock()
        self._newest = 0
        """The step of the newest checkpoint that this rank has committed."""
        self._plan: Proposal | None = None
        self._is_agreed: bool | None = None
        """The verdict on the plan; None: it is not known yet."""
        self._is_reached = self._is_closed = False
        # -- on rank 0
        now = time.monotonic()
        self._is_asking = False
        self._asked_at, self._not_before, self._n_refused = now, now, 0
        self._latency, self._lead_factor = _LATENCY_SECONDS, 1
        self._committed_at = now
        self._durations: deque[float] = deque(maxlen=16)
        """For each of the last checkpoints, the time since the one before, in seconds."""
        self._last = [step or 0 for step in newest]
        self._next_at = [
            now if step is None else now + seconds_until_due(tier.every_seconds, age)
            for tier, step, age in zip(tiers, newest, ages, strict=True)
        ]
        self._is_empty = [step is None for step in newest]

    # -- the helper thread

    def answer(self, proposal: Proposal) -> int:
        with self._lock:
            if proposal.step <= self._newest:
                return PASSED
            if self._is_closed or self._plan is not None or not self._is_ready():
                return NOT_READY
            self._plan, self._is_agreed, self._is_reached = proposal, None, False
            return ACCEPTED

    def decided(self, proposal: Proposal, verdict: int) -> None:
        is_agreed = verdict == ACCEPTED
        with self._lock:
            if self._plan is not None and self._plan.step == proposal.step:
                self._is_agreed = is_agreed
                if not is_agreed and not self._is_reached:
                    self._plan = None
            if self._propose is not None:
                self._learn(proposal, verdict)

    def _learn(self, proposal: Proposal, verdict: int) -> None:
        now = time.monotonic()
        self._is_asking, self._latency = False, now - self._asked_at
        if verdict == ACCEPTED:
            self._lead_factor, self._n_refused = 1, 0
            for number in proposal.items:
                self._last[number], self._is_empty[number] = proposal.step, False
                self._next_at[number] = now + (self._tiers[number].every_seconds or 0.0)
            return
        self._not_before = now + min(_PAUSE_SECONDS * 2**self._n_refused, _PAUSE_SECONDS_MAX)
        self._n_refused = min(self._n_refused + 1, 16)
        if verdict == PASSED:  # it was too near
            self._lead_factor = min(2 * self._lead_factor, _LEAD_FACTOR_MAX)

    # -- the training thread

    def reached(self, step: int) -> Proposal | None:
        """Take note that the checkpoint of a step was committed. Returns the plan if it is for this step: the caller
        holds the checkpoint then."""
        with self._lock:
            self._measure(step)
            self._newest = max(self._newest, step)
            plan = self._plan
            if plan is None or plan.step > step or self._is_reached:
                return None
            if plan.step < step:
                self._drop()
                return None
            self._is_reached = True
            return plan

    def take_verdict(self) -> bool | None:
        """Return whether all ranks have accepted the plan that was reached, and end the plan. None: it is not known
        yet, and the plan stays."""
        with self._lock:
            if self._is_reached and self._is_agreed is not None:
                self._plan, self._is_reached = None, False
                return self._is_agreed
            return None

    def close(self) -> None:
        """Accept nothing more."""
        with self._lock:
            self._is_closed, self._plan, self._is_reached = True, None, False

    def _drop(self) -> None:
        """Forget a plan whose checkpoint was left out, and plan another one."""
        if self._propose is not None and self._plan is not None:
            for number in self._plan.items:
                self._next_at[number] = time.monotonic()
                self._last[number] = min(self._last[number], self._plan.step - 1)
        self._plan = None

    def _measure(self, step: int) -> None:
        now = time.monotonic()
        if step > self._newest:
            self._durations.append((now - self._committed_at) * self._interval / (step - self._newest))
            self._committed_at = now

    # -- what is due, on rank 0

    def propose_if_due(self, step: int) -> None:
        """Propose the next checkpoint for which a tier asks, if it is near."""
        now = time.monotonic()
        if self._propose is None or self._is_asking or self._plan is not None or now < self._not_before:
            return
        if self._is_closed or not self._durations or not self._is_ready():
            return
        lead = self._lead() * self._interval
        wanted = {number: self._wanted(number, step + lead, now) for number in range(len(self._tiers))}
        found = [each for each in wanted.values() if each is not None and each <= step + 2 * lead]
        if not found:
            return
        chosen = min(found)
        items = [number for number, each in wanted.items() if each is not None and self._suits(number, each, chosen)]
        self._is_asking, self._asked_at = True, now
        self._propose(Proposal(chosen, items))

    def _lead(self) -> int:
        seconds = sorted(self._durations)[len(self._durations) // 4]  # lower quartile: leaves out long evaluations
        latency = max(self._latency, _LATENCY_SECONDS_MIN)
        return _LEAD_MIN + math.ceil(self._lead_factor * 2 * latency / max(seconds, 1e-4))

    def _wanted(self, number: int, first: int, now: float) -> int | None:
        """Return the first step, not before ``first``, whose checkpoint a tier wants; None if it wants none yet."""
        tier, last, found = self._tiers[number], self._last[number], []
        if self._is_empty[number] or (tier.every_seconds is not None and now >= self._next_at[number]):
            found.append(self._saved_from(first))
        elif tier.every_steps is not None:
            found.append(self._saved_from(max(first, (last // tier.every_steps + 1) * tier.every_steps)))
        if tier.keep_every is not None:
            found.append(_multiple_from(first, math.lcm(tier.keep_every, self._interval)))
        return min(found, default=None)

    def _suits(self, number: int, wanted: int, chosen: int) -> bool:
        """Whether the checkpoint of step ``chosen`` will do for a tier that wants that of step ``wanted``."""
        every = self._tiers[number].keep_every
        return wanted == chosen or (wanted < chosen and (every is None or wanted % every != 0))

    def _saved_from(self, step: int) -> int:
        """Return the first step from this one on at which a checkpoint is saved."""
        return _multiple_from(step, self._interval)

    def is_missed(self, number: int, step: int) -> bool:
        """Whether a tier keeps the checkpoint of this step, and it was not planned. Called before ``reached``."""
        every, plan = self._tiers[number].keep_every, self._plan
        is_planned = plan is not None and plan.step == step and number in plan.items
        return every is not None and step > 0 and step % every == 0 and not is_planned


def _multiple_from(first: int, divisor: int) -> int:
    return -(-first // divisor) * divisor
