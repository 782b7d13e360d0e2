"""A trial: a better alternative wins even with noisy costs, among equals the first one wins, and every trial ends."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightck.pipeline.trial import Margin, Trial

A, B, C = "ABC"
STAGING = {"rounds": 3, "warm_up": 2, "lead_in": 1}


def turns(trial: Trial[str], costs: Callable[[str, int], Sequence[float]], checkpoints: int = 1000) -> str:
    """The alternatives that carried the checkpoints until the trial was over. ``costs`` takes the alternative and the
    number of the checkpoint."""
    carried = ""
    while not trial.is_over and len(carried) < checkpoints:
        carried += trial.begin()
        trial.finish(*costs(carried[-1], len(carried)))
    return carried


@given(st.permutations([0.010, 0.013, 0.030]), st.integers(0, 1000))
def test_with_noisy_times_the_better_alternative_wins(seconds, seed):
    """One checkpoint in ten is slow for other reasons, all become slower over time, and warm-up and changes of the
    alternative cost more."""
    costs, draw, before = dict(zip("ABC", seconds, strict=True)), random.Random(seed), [""]

    def noisy(one: str, number: int) -> list[float]:
        changed, before[0] = before[0] != one, one
        slow = 9.0 if number <= 2 or (changed and number > 3) or number % 10 == seed % 10 else 0.0
        return [costs[one] * draw.uniform(0.95, 1.05) * (1 + number / 1000) + slow]

    trial = Trial("ABC", [Margin(0.1, 0.0002)], rounds=9, warm_up=2, lead_in=1)
    turns(trial, noisy)
    assert costs[trial.current] == min(seconds)


@pytest.mark.parametrize(
    ("costs", "winner"),
    [([0.0105, 0.01], A), ([0.0002, 0.0001], A), ([0.0113, 0.01], A), ([0.0114, 0.01], B), ([0.02, 0.0105, 0.01], B)],
)
def test_among_alternatives_that_are_alike_the_first_wins(costs, winner):
    trial = Trial("ABC"[: len(costs)], [Margin(0.1, 0.0002)], rounds=3)
    turns(trial, lambda one, _: [costs["ABC".index(one)]])
    assert trial.current == winner


def test_every_second_round_is_reversed_and_checkpoints_that_do_not_count_decide_nothing():
    trial = Trial("ABC", [Margin(0.1)], **STAGING)
    counts = range(4, 21, 2)
    carried = turns(trial, lambda one, number: [9.0 if (one == C) != (number in counts) else 1.0])
    assert carried == "AA" + "AABBCC" + "CCBBAA" + "AABBCC"
    assert trial.current == C
    assert [trial.medians(one) for one in "ABC"] == [[9.0], [9.0], [1.0]]


@pytest.mark.parametrize("at", range(20))
def test_a_withdrawn_alternative_is_replaced_by_the_next(at):
    """At any time during the trial, and also after it has won."""
    costs = {A: 1.0, B: 0.5, C: 0.7}
    trial = Trial("ABC", [Margin(0.1)], **STAGING)
    turns(trial, lambda one, _: [costs[one]], at)
    trial.begin()
    trial.withdraw(B)
    assert trial.current != B
    trial.finish(costs[trial.current])
    assert B not in turns(trial, lambda one, _: [costs[one]])
    assert trial.current == C
    trial.withdraw(C)
    assert (trial.current, trial.alternatives, trial.is_over) == (A, [A], True)


def test_the_first_wins_without_rounds_or_others_and_if_the_trial_is_cancelled():
    named = Trial("AB", [Margin(0.1)], rounds=0, warm_up=2)
    assert [named.begin() for _ in range(20)] == [A] * 20
    named.withdraw(A)
    assert named.begin() == B
    assert Trial("A", [Margin(0.1)], **STAGING).is_over
    trial = Trial("ABC", [Margin(0.1)], rounds=3)
    turns(trial, lambda one, _: [2.0 if one == A else 1.0], 4)
    trial.cancel()
    assert (trial.begin(), trial.is_over) == (A, True)
    trial.withdraw(A)
    assert (trial.begin(), trial.is_over) == (B, True)


@given(
    *(st.integers(least, 3) for least in (1, 0, 0, 0)),
    st.lists(st.floats(0, 10), min_size=200, max_size=200),
    st.lists(st.sampled_from(["finished", "finished", "finished", "dropped", "withdrawn"]), max_size=200),
)
def test_every_trial_ends_after_a_bounded_number_of_checkpoints(count, rounds, warm_up, lead_in, costs, events):
    trial, begun = Trial("ABC"[:count], [Margin(0.1)], rounds=rounds, warm_up=warm_up, lead_in=lead_in), 0
    while not trial.is_over:
        assert trial.begin() in trial.alternatives
        event = events[begun] if begun < len(events) else "dropped"
        if event == "finished":
            trial.finish(costs[begun])
        elif event == "withdrawn" and len(trial.alternatives) > 1:
            trial.withdraw(trial.current)
        begun += 1
    assert begun <= 2 * (warm_up + rounds * count * (lead_in + 1)) + 1
    assert trial.current in trial.alternatives
