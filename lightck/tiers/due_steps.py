"""Says for which tiers a checkpoint is due by its step, whether a tier needs exactly this checkpoint, and when a
checkpoint is due by time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

Metrics = Mapping[str, float]


class Wishes(Protocol):
    """What a tier asks for by step: a ``Tier``, or the ``TierSettings`` of a drain."""

    @property
    def every_steps(self) -> int | None: ...
    @property
    def keep_every(self) -> int | None: ...
    @property
    def keep_best(self) -> tuple[str, int, str] | None: ...


def needs_step(tier: Wishes, step: int, metrics: Metrics) -> bool:
    """Return whether a tier needs the checkpoint of this step, and no other one will do. ``metrics``: what was logged
    at the step."""
    is_kept = tier.keep_every is not None and step % tier.keep_every == 0
    return is_kept or (tier.keep_best is not None and tier.keep_best[0] in metrics)


def is_due(tier: Wishes, step: int, last: int) -> bool:
    """Return whether a multiple of ``every_steps`` lies above ``last`` and not above ``step``: then the checkpoint of
    the step is due. ``last``: the step of the last checkpoint that was due by its step, or lies in the tier."""
    return tier.every_steps is not None and step // tier.every_steps > last // tier.every_steps


def seconds_until_due(every_seconds: float | None, age: float | None) -> float:
    """Return in how many seconds a checkpoint is due by time. ``age``: the seconds since the newest one was sent, also
    by an earlier process; None: none was. A clock that jumps changes the result by one period at most."""
    every = every_seconds or 0.0
    return every if age is None else min(max(every - age, 0.0), every)


class DueSteps:
    """The checkpoints that are due by their steps for the tiers of one drain."""

    def __init__(self, tiers: Sequence[Wishes], feeds: Mapping[int, Sequence[Wishes]]) -> None:
        """``feeds``: for the number of a tier, the other tiers that are sent what lies in it: so it needs what they
        need."""
        self._tiers = tiers
        self._needs = [(each, *feeds.get(number, ())) for number, each in enumerate(tiers)]
        self._last = [0] * len(tiers)
        """For each tier the step of the last checkpoint that was due by its step, or lies in the tier."""
        self.is_empty = [True] * len(tiers)
        """Whether the tier holds no checkpoint: then the first one is sent at once."""

    def begin(self, newest: Sequence[int | None], is_empty: Sequence[bool]) -> None:
        """Begin with what the tiers hold: the step of the newest checkpoint of each (None: there is none)."""
        self._last, self.is_empty = [step or 0 for step in newest], list(is_empty)

    def at(self, step: int, metrics: Metrics) -> list[int]:
        """Return the numbers of the tiers for which the checkpoint of a step is due."""
        return [
            number
            for number, tier in enumerate(self._tiers)
            if self.is_empty[number] or is_due(tier, step, self._last[number]) or self.needs_step(number, step, metrics)
        ]

    def needs_step(self, number: int, step: int, metrics: Metrics) -> bool:
        """Return whether a tier, or one that is fed from it, needs the checkpoint of this step."""
        return any(needs_step(each, step, metrics) for each in self._needs[number])

    def taken(self, number: int, step: int) -> None:
        """The checkpoint of a step is being sent to a tier, or lies there."""
        self._last[number], self.is_empty[number] = step, False
