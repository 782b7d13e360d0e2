"""Ranks that are killed at random moments and at named points come back together (tests/ranks/kills.py)."""

from __future__ import annotations

import pytest

from .kills import campaign


@pytest.mark.parametrize("seed", [1, 1000])
def test_killed_ranks_come_back_together(seed):
    tally = campaign(8, seed, ("ddp", "fsdp", "tp"))
    print(f"{tally.n_trials} trials from seed {seed}, {tally.n_killed} ranks killed")


@pytest.mark.long
def test_killed_ranks_of_all_topologies_come_back_together():
    tally = campaign(60, seed := 2000)
    print(f"{tally.n_trials} trials from seed {seed}, {tally.n_killed} ranks killed")
