"""The counts and the violations of a simulator check."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

SHOWN_MAX = 8
"""Words that a violation names."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise, with what it takes to see it again."""

    model: str
    tape: int
    event: int
    image: str
    words: tuple[int, ...]
    """Offsets of the words that did not arrive, as few as it takes."""
    reason: str
    seed: int

    def __str__(self) -> str:
        where = f"{self.model}, file {self.tape}, before event {self.event}, seed {self.seed}, {self.image}"
        words = "".join(f" {at:#x}" for at in self.words[:SHOWN_MAX])
        more = f" and {len(self.words) - SHOWN_MAX} more" if len(self.words) > SHOWN_MAX else ""
        return f"{self.reason} [{where}{', without' if words else ''}{words}{more}]"


@dataclass(frozen=True, slots=True)
class Report:
    """The counts of a check."""

    model: str
    events: int
    crash_points: int
    images: int
    """Judged: the outcome of their recovery is known, and compared with what was promised at that moment."""
    distinct: int
    """Of these, how many have bytes that no image had before, in this check or an earlier one that shares ``seen``."""
    recovered: int
    """Images on which recovery ran. The others differ from one of these only in bytes that it did not read."""
    verified: int
    """How often ``lightck verify`` ran."""
    went_on: int
    """From how many a training went on. Images of those trainings are counted like all others."""
    outcomes: Counter[str]
    """Of the recoveries that ran because nothing like the image was seen before."""
    violations: tuple[Violation, ...]

    def __str__(self) -> str:
        outcomes = ", ".join(f"{n} {name}" for name, n in sorted(self.outcomes.items()))
        head = (
            f"{self.model}: {self.events} events, {self.crash_points} crash points, {self.images} images "
            f"({self.distinct} distinct), {self.recovered} recoveries, {self.verified} verified, "
            f"{self.went_on} trained on: {outcomes}; {len(self.violations)} violations"
        )
        return "\n".join([head, *map(str, self.violations)])
