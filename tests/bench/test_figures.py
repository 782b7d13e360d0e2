"""The statistics, against cases whose answers are known."""

from __future__ import annotations

import random

import pytest

from bench.measures.figures import (
    Estimate,
    against_neighbours,
    estimate,
    is_resolved,
    same_against_same,
    slope,
    smallest_interval,
    spread,
)


def test_a_drift_cancels_in_the_difference():
    times = [10 + 0.3 * i for i in range(21)]
    saved = [t + 0.5 for t in times[1::2]]
    assert against_neighbours(saved, times[::2]) == pytest.approx([0.5] * 10)
    assert same_against_same(times[::2]) == pytest.approx([0.0] * 9)


def test_windows_have_to_be_in_turn():
    with pytest.raises(ValueError, match="not one more"):
        against_neighbours([1.0, 2.0], [1.0, 2.0])


def test_the_interval_covers_what_is_true():
    hits = 0
    for seed in range(60):
        draw = random.Random(seed)
        found = estimate([draw.gauss(2.0, 1.0) for _ in range(30)])
        assert found.low <= found.median <= found.high
        hits += found.low <= 2.0 <= found.high
    assert hits >= 50  # 57 of 60 are expected; the seeds are fixed


def test_an_estimate_is_the_same_each_time():
    samples = [1.0, 5.0, 2.0, 8.0]
    assert estimate(samples) == estimate(samples)


def test_what_equal_windows_differ_by_too_is_not_resolved():
    same = Estimate(0.0, -0.1, 0.1, 30)
    assert not is_resolved(Estimate(0.05, 0.04, 0.06, 30), same)
    assert is_resolved(Estimate(0.2, 0.1, 0.3, 30), same)
    assert is_resolved(Estimate(-0.2, -0.3, -0.1, 30), same)


def test_spread_gives_the_quartiles_and_the_tail():
    found = spread([float(n) for n in range(101)])
    assert (found.median, found.low, found.high, found.p99, found.n) == (50.0, 25.0, 75.0, 99.0, 101)


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_what_is_no_number_is_refused(samples):
    with pytest.raises(ValueError, match="finite"):
        spread(samples)


@pytest.mark.parametrize(
    ("cost", "step", "every"),
    [(0.0, 1.0, 1), (-0.2, 1.0, 1), (0.05, 1.0, 1), (0.051, 1.0, 2), (1.6, 2.0, 16), (55.0, 1.0, 1100)],
)
def test_smallest_interval_within_five_percent(cost, step, every):
    assert smallest_interval(cost, step) == every


def test_slope_is_the_growth_from_end_to_end():
    assert slope([3.0] * 9) == pytest.approx(0.0, abs=1e-9)
    assert slope([float(n) for n in range(11)]) == pytest.approx(10.0)
