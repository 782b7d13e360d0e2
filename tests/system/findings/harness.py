"""What holds for every finding: a killed and resumed training is exact, or lightck said by name what is not.

The reference is the same program in a process that never imported lightck. A run with lightck that is not killed must
equal it; then the program is killed at eight instants, each time on a new pool, and resumed to its end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from resume.forkserver import ForkServer
from resume.harness import Chain, Kill, Mismatch, Reported, Survival, Training

from .programs import PROGRAMS


@dataclass
class Outcome:
    """Of one kill and what followed it."""

    kill: Kill
    warnings: list[str] = field(default_factory=list)
    difference: str | None = None
    """What is not as in the reference; None where the resumed run is exact."""
    compared: list[str] = field(default_factory=list)
    """What a resume said about what it compared with what followed the checkpoint."""


class Bench:
    """Runs programs. A fixture."""

    def __init__(self, ours: ForkServer, plain: ForkServer, folder: Path) -> None:
        self._ours, self._plain, self._folder = ours, plain, folder

    def exact(self, name: str, *, kills: Sequence[Kill] | None = None, quiet: bool = True) -> list[Outcome]:
        """Every resumed run has the bits of the reference; with ``quiet`` nothing is warned about either."""
        outcomes = self.outcomes(name, kills, quiet=quiet)
        for outcome in outcomes:
            assert outcome.difference is None, f"after {outcome.kill}: {outcome.difference}; said: {outcome.warnings}"
            assert not (quiet and outcome.warnings), f"after {outcome.kill}: a false alarm: {outcome.warnings}"
        return outcomes

    def exact_or_reported(
        self,
        name: str,
        warning: str,
        *,
        kills: Sequence[Kill] | None = None,
        quiet: bool = False,
        shown_by: str = "the one that followed",
    ) -> list[Outcome]:
        """A resumed run that differs said so: a warning matches the pattern ``warning``. At least one run was warned.
        ``quiet``: a run that is not killed is not warned. A kill within a commit, or at a moment of the clock, may come
        before what shows the difference: then that cannot be compared, which docs/guarantees.md says, and the resume
        does not say that it compared it (``shown_by``)."""
        outcomes = self.outcomes(name, kills, quiet=quiet)
        reported = [any(re.search(warning, said) for said in outcome.warnings) for outcome in outcomes]
        for outcome, is_reported in zip(outcomes, reported, strict=True):
            came_early = outcome.kill.kind != "place" and not any(shown_by in line for line in outcome.compared)
            assert outcome.difference is None or is_reported or came_early, (
                f"after {outcome.kill}, silently: {outcome.difference}; said: {outcome.warnings}"
            )
        assert any(reported), f"nobody was warned: {[o.warnings for o in outcomes]}"
        return outcomes

    def outcomes(self, name: str, kills: Sequence[Kill] | None = None, *, quiet: bool = False) -> list[Outcome]:
        reference = self.reference(name)
        self._not_killed(name, reference, quiet)
        return [self._outcome(name, reference, kill) for kill in (instants(reference) if kills is None else kills)]

    def reference(self, name: str) -> Reported:
        """The program in a process that never imported lightck."""
        return Training(self._plain, PROGRAMS[name], self._folder).reference()

    def training(self, name: str) -> Training:
        """For tests that need single processes: see ``Training.process``."""
        return Training(self._ours, PROGRAMS[name], self._folder)

    def _not_killed(self, name: str, reference: Reported, quiet: bool) -> None:
        """lightck changes nothing of a training that is not killed."""
        training, survival = self.training(name), Survival()
        chain = Chain(training, reference, self._folder / f"{name}-whole.pool", "not killed")
        assert chain.step(None, survival)
        assert not (quiet and chain.warnings), f"a false alarm without a kill: {chain.warnings}"

    def _outcome(self, name: str, reference: Reported, kill: Kill) -> Outcome:
        outcome, survival = Outcome(kill), Survival()
        pool = self._folder / f"{name}-{kill.kind}-{kill.name}-{kill.nth}.pool"
        chain = Chain(self.training(name), reference, pool, str(kill))
        try:
            if not chain.step(kill, survival):
                chain.warnings.clear()
                while not chain.step(None, survival):
                    pass
        except Mismatch as mismatch:
            outcome.difference = str(mismatch)
        outcome.warnings = chain.warnings
        outcome.compared = [line for line in survival.logs if "the first batch after the resume is the one" in line]
        return outcome


def instants(reference: Reported) -> list[Kill]:
    """Eight: right after updates all over the run, in two commits, and at a moment of the clock."""
    n = reference.updates
    updates = sorted({1, 2, max(n // 3, 1), max(n // 2, 1), max(n - 1, 1)})
    others = [Kill("site", "sealed", 2), Kill("site", "ack", 3), Kill("clock", nth=2, delay=reference.update_seconds)]
    return [*(Kill("place", "update", nth) for nth in updates), *others]
