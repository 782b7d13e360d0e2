"""Ranks that are killed at random moments and at named points come back together (tests/ranks/kills.py)."""

from __future__ import annotations

import pytest
from ranked import run_ranks

from . import kills_copies
from .kills import POINTS, Kill, campaign
from .trainings import TOPOLOGIES, body


@pytest.mark.parametrize("point", POINTS)
def test_a_named_point_is_one_that_a_resume_passes(point, pool):
    """Else a kill that is planned there never comes."""
    pools, topology = pool.parent / "pools", TOPOLOGIES["ddp"]
    run_ranks(2, body(topology, pools, 2))

    def arm(rank: int) -> None:
        if rank == 1:
            Kill("point", point).arm()

    ended = run_ranks(2, body(topology, pools, 4, before=arm))
    assert ended[1].is_killed


@pytest.mark.parametrize("seed", [1, pytest.param(1000, marks=pytest.mark.campaign)])
def test_killed_ranks_come_back_together(seed):
    tally = campaign(8, seed, ("ddp", "fsdp", "tp"))
    print(f"{tally.n_trials} trials from seed {seed}, {tally.n_killed} ranks killed")


def test_killed_ranks_that_store_gradients_come_back_together():
    tally = campaign(5, seed := 5000, ("ddp gradients", "fsdp gradients", "tp gradients"))
    print(f"{tally.n_trials} trials from seed {seed}, {tally.n_killed} ranks killed")


@pytest.mark.long
def test_killed_ranks_with_an_interval_and_compressed_gradients_come_back_together():
    tally = campaign(4, seed := 6000, ("ddp interval 2", "ddp feedback of steps"))
    print(f"{tally.n_trials} trials from seed {seed}, {tally.n_killed} ranks killed")


@pytest.mark.campaign
@pytest.mark.parametrize("seed", [9, 1])
def test_killed_ranks_whose_hosts_are_lost_come_back_together(seed):
    """Seed 9 once removed the old copies before the pools that needed them."""
    tally = kills_copies.Tally()
    kills_copies.trial(seed, tally)
    print(f"seed {seed}: {tally.n_killed} ranks killed, {tally.n_hosts_lost} hosts lost")


@pytest.mark.long
def test_killed_ranks_of_all_worlds_with_copies_come_back_together():
    tally = kills_copies.campaign(8, seed := 3000)
    print(f"{tally.n_trials} trials from seed {seed}, {tally.n_killed} ranks killed, {tally.n_hosts_lost} hosts lost")


@pytest.mark.long
def test_killed_ranks_of_all_topologies_come_back_together():
    tally = campaign(10, seed := 2000)
    print(f"{tally.n_trials} trials from seed {seed}, {tally.n_killed} ranks killed")
