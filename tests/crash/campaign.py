"""A campaign: one kind of fault, injected again and again, each trial drawn from the seed and its own number.

So a trial can be repeated alone (``--trial``), whatever ran before it. A trial ends in one of three ways that are right
(exact, older exact, typed error where nothing was promised), which the campaign counts by names of its own, or in a
*finding*. What a finished campaign counted is a ``Result``; kept in ``docs/evidence/`` it is what
``docs/guarantees.md`` cites.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Order:
    """What one run of a campaign is asked to do."""

    seed: int
    trials: range
    """Numbers of the trials, of which each is the same in every run with this seed."""
    backend: str
    """``file`` or ``pmdk``: what the pools of the campaign are, where they may be either."""
    folder: str
    """An empty folder for pools, removed at the end by who made it."""
    say: Callable[[str], None] = field(default=lambda _: None)
    """Takes a line of progress."""

    def rng(self, trial: int) -> random.Random:
        """The source of every choice of this trial."""
        return random.Random(f"{self.seed}:{trial}")


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken promise, and the trial that shows it."""

    trial: int
    reason: str

    def __str__(self) -> str:
        return f"trial {self.trial}: {self.reason}"


@dataclass(slots=True)
class Tally:
    """What the trials so far came to."""

    counts: Counter[str] = field(default_factory=Counter)
    """By name of what was counted: ``kills``, ``images``, ``exact``, ``older``, ..."""
    findings: list[Finding] = field(default_factory=list)

    def found(self, trial: int, reason: str) -> None:
        self.findings.append(Finding(trial, reason))


@dataclass(frozen=True, slots=True)
class Campaign:
    """One kind of fault. ``run`` plays the trials of an order and returns what they came to."""

    name: str
    summary: str
    """One line: what is done, and what must hold."""
    small: int
    """How many trials CI plays: seconds, not minutes."""
    long: int
    """How many the evidence in ``docs/evidence/`` is made of."""
    run: Callable[[Order], Tally]
    backends: tuple[str, ...] = ("file", "pmdk")
    """Pools it can be played on."""
