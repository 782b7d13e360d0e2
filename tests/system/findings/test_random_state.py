"""A resumed run that draws other random numbers says so, where its data are the same."""

from __future__ import annotations

import pytest
from resume.harness import Kill

from .harness import Bench

pytestmark = pytest.mark.long


@pytest.mark.parametrize("name", ["evaluation-that-draws-at-the-top", "drawn-between-attach-and-the-loop"])
def test_other_random_numbers_are_reported(name: str, bench: Bench) -> None:
    """A kill right after the commit comes before the random state that follows is known. So most of these kills cause
    a warning, and each one that was compared does."""
    outcomes = bench.outcomes(name, [Kill("place", "update", n) for n in (2, 3, 5, 6, 7, 8, 10, 12)])
    reported = ["random state at the first training forward" in " ".join(outcome.warnings) for outcome in outcomes]
    for outcome, is_reported in zip(outcomes, reported, strict=True):
        assert is_reported or outcome.difference is None, (outcome.kill, outcome.difference, outcome.warnings)
    assert any(reported)


def test_numbers_drawn_before_attach_are_exact(bench: Bench) -> None:
    bench.exact("drawn-before-attach")
