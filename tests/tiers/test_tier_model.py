"""Every interleaving of what happens in a tier: each claim about its rules is a row. What is wrong stays as a row whose
counterexample must be found."""

from __future__ import annotations

import pytest

from lightck.tiers.decisions import Retention
from tiers import tier_mutants as mutants
from tiers.tier_explore import walk
from tiers.tier_model import Model
from tiers.tier_rows import Row, safe, wrong

LAST_2 = Retention(keep_last=2)
EVERY_SECOND = Retention(keep_last=1, keep_every=2)
NOT_WHOLE = "is complete, and an object that it needs is gone"
SAFE = [
    safe("1 rank, a drain killed once", 779, lives=1),
    safe("1 rank, a drain killed twice", 4_413, lives=2),
    safe("1 rank, a fast and a slow reader", 1_732, fast_readers=1, slow_readers=1),
    safe("1 rank, 2 claims, 2 steps", 8_468, claims=2, steps=2),
    safe("1 rank, 2 claims, 2 steps, gc", 41_261, claims=2, steps=2, collects=True),
    safe("1 rank, 2 claims", 1_884, claims=2, is_fine=False),
    safe("1 rank, 2 claims, gc", 5_013, claims=2, is_fine=False, collects=True),
    safe("1 rank, 2 claims, drains killed, 2 steps", 8_532, claims=2, is_fine=False, lives=1, steps=2),
    safe("1 rank, 2 claims, readers", 54_850, claims=2, is_fine=False, fast_readers=1, slow_readers=1),
    safe("1 rank, 2 trainings claim at once", 8_700, claims=3, steps=1, is_fine=False),
    safe("1 rank, 2 claims, 2 stay", 1_380, claims=2, is_fine=False, retention=LAST_2),
    safe("1 rank, 2 claims, every second step stays", 3_638, claims=2, steps=4, is_fine=False, retention=EVERY_SECOND),
    safe("2 ranks", 2_956, n=2),
    safe("2 ranks, drains killed", 4_925, n=2, lives=1, is_fine=False),
    safe("2 ranks, readers", 3_556, n=2, is_fine=False, fast_readers=1, slow_readers=1),
    safe("2 ranks, every second step stays", 484, n=2, steps=4, is_fine=False, retention=EVERY_SECOND),
    safe("2 ranks, 2 claims, 2 steps", 58_368, n=2, claims=2, steps=2, is_fine=False),
]
WRONG = [
    wrong(mutants.SharesAcrossClaims, f"2.2 {NOT_WHOLE}", 976, claims=2, is_fine=False),
    wrong(mutants.SharesAcrossRanks, f"1.2 {NOT_WHOLE}", 190, n=2, is_fine=False),
    wrong(mutants.OlderClaimsDelete, "the newest checkpoint, 2.1, is gone", 846, claims=2, is_fine=False),
    wrong(mutants.MeasuresByItsOwnClock, "an object is gone before the grace has passed", 257, fast_readers=1),
    wrong(mutants.DeletesObjectsFirst, f"1.1 {NOT_WHOLE}", 55),
    wrong(mutants.CollectsBelowTheHighest, f"1.1 {NOT_WHOLE}", 485, claims=2, collects=True),
]
RANDOM = Model(
    n=2, claims=3, numbers=4, steps=5, lives=2, fast_readers=1, slow_readers=1, collects=True, retention=EVERY_SECOND
)
"""Too large to explore: what random runs go through."""


OF_LARGER_ROWS = "2 ranks, 2 claims, 2 steps"
"""Rows of ``large_tier_models.py`` have these actors and more."""


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.name, marks=pytest.mark.campaign if row.name == OF_LARGER_ROWS else ()) for row in SAFE],
)
def test_rules_of_a_tier_are_safe(row: Row) -> None:
    row.check()


@pytest.mark.parametrize("row", WRONG, ids=[row.name for row in WRONG])
def test_counterexample_is_found(row: Row) -> None:
    row.check()


def test_rules_are_safe_with_late_listings_and_late_requests() -> None:
    for seed in range(300):
        found = walk(RANDOM, seed)
        assert found.problem is None, str(found)


@pytest.mark.parametrize("mutant", [mutants.DeletesAtOnceAfterAStart, mutants.UsesWhatItFinds])
def test_counterexample_is_found_by_random_runs(mutant: type[Model]) -> None:
    """What only a late listing or a late request makes wrong."""
    model = mutant(n=2, claims=2, lives=2, steps=5)
    found = next(result for seed in range(1000) if (result := walk(model, seed)).problem)
    assert NOT_WHOLE in str(found)
