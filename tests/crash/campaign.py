"""A campaign: one kind of fault, injected again and again, each trial drawn from the seed and its own number.

So a trial can be repeated alone (``--trial``), independent of earlier ones. A trial has one of three right outcomes
(exact, older exact, typed error where nothing was promised), which the campaign counts under its own names, or it is a
*finding*. ``docs/guarantees.md`` cites the counts, which ``docs/evidence/`` keeps.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Order:
    """The parameters of one run of a campaign."""

    seed: int
    trials: range
    """The numbers of the trials; a seed and a number determine a trial."""
    backend: str
    """The backend of the pools: ``file`` or ``pmdk``."""
    folder: str
    """An empty folder for pools, which the caller removes."""
    say: Callable[[str], None] = field(default=lambda _: None)
    """Called with each line of progress."""

    def rng(self, trial: int) -> random.Random:
        """The random generator for all choices of a trial."""
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
    """The counts and findings of the trials so far."""

    counts: Counter[str] = field(default_factory=Counter)
    """By name of what was counted: ``kills``, ``images``, ``exact``, ``older``, ..."""
    findings: list[Finding] = field(default_factory=list)

    def found(self, trial: int, reason: str) -> None:
        self.findings.append(Finding(trial, reason))


@dataclass(frozen=True, slots=True)
class Campaign:
    """One kind of fault. ``run`` runs the trials of an order and returns their tally."""

    name: str
    summary: str
    """One line: the fault, and what must hold."""
    small: int
    """The number of trials in CI: seconds, not minutes."""
    long: int
    """The number of trials for the results in ``docs/evidence/``."""
    run: Callable[[Order], Tally]
    backends: tuple[str, ...] = ("file", "pmdk")
    """The backends that it supports."""
