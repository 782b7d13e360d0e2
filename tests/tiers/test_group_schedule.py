"""Which checkpoints the ranks of a group plan to send: the rules, one rank at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import lightck
from lightck.ranks.agreed_step import ACCEPTED, NOT_READY, PASSED, Proposal
from lightck.tiers import group_schedule
from lightck.tiers.group_schedule import GroupSchedule


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(group_schedule.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def schedule_of(
    *tiers: lightck.Tier,
    interval: int = 1,
    newest: Sequence[int | None] = (),
    ages: Sequence[float | None] = (),
    is_ready: bool = True,
) -> tuple[GroupSchedule, list[Proposal]]:
    """A schedule of rank 0, and what it has proposed. ``ages``: as if everything was sent just now, if not given."""
    proposed: list[Proposal] = []
    steps = list(newest) or [None] * len(tiers)
    ages = list(ages) or [None if step is None else 0.0 for step in steps]
    return GroupSchedule(tiers, interval, steps, ages, lambda: is_ready, proposed.append), proposed


def run(schedule: GroupSchedule, clock: Clock, first: int, last: int, seconds: float = 1.0) -> None:
    """Commit these steps."""
    for step in range(first, last + 1):
        clock.now += seconds
        schedule.reached(step)
        schedule.propose_if_due(step)


def agree(schedule: GroupSchedule, plan: Proposal, verdict: int = ACCEPTED) -> None:
    assert schedule.answer(plan) == ACCEPTED
    schedule.decided(plan, verdict)


def test_an_empty_tier_gets_a_checkpoint_some_steps_ahead_at_once(clock):
    schedule, proposed = schedule_of(lightck.Tier("/t", every="1h"))
    run(schedule, clock, 1, 1)
    (plan,) = proposed
    assert 1 + group_schedule._LEAD_MIN <= plan.step <= 10
    assert plan.items == [0]


def test_the_faster_the_steps_the_further_ahead_it_plans(clock):
    slow, of_slow = schedule_of(lightck.Tier("/t", every="1h"))
    fast, of_fast = schedule_of(lightck.Tier("/t", every="1h"), newest=[1])
    run(slow, clock, 1, 1)
    run(fast, clock, 1, 100, seconds=0.001)
    clock.now += 3600
    run(fast, clock, 101, 101, seconds=0.001)
    (plan,) = of_fast
    assert plan.step - 101 > 10 * (of_slow[0].step - 1)


@pytest.mark.parametrize(("age", "seconds"), [(1000.0, 2600), (9000.0, 0), (0.0, 3600), (-9000.0, 3600)])
def test_the_time_of_a_tier_goes_on_after_a_restart(clock, age, seconds):
    schedule, proposed = schedule_of(lightck.Tier("/t", every="1h"), newest=[7], ages=[age])
    if seconds:
        clock.now += seconds - 10
        run(schedule, clock, 8, 8)
        assert not proposed
        clock.now += 9
    run(schedule, clock, 9, 10)
    assert len(proposed) == 1


def test_one_checkpoint_is_planned_at_a_time_and_the_next_one_when_it_is_due(clock):
    schedule, proposed = schedule_of(lightck.Tier("/t", every="60s"))
    run(schedule, clock, 1, 3)
    assert len(proposed) == 1
    agree(schedule, proposed[0])
    assert schedule.answer(Proposal(100, [0])) != ACCEPTED, "one is planned"
    run(schedule, clock, 4, proposed[0].step - 1)
    assert schedule.take_verdict() is None
    assert schedule.reached(proposed[0].step) == proposed[0]
    assert schedule.take_verdict() is True
    assert schedule.take_verdict() is None, "it is over"
    run(schedule, clock, proposed[0].step + 1, proposed[0].step + 40)
    assert len(proposed) == 1
    run(schedule, clock, proposed[0].step + 41, proposed[0].step + 80)
    assert len(proposed) == 2


def test_a_step_that_was_committed_is_not_accepted(clock):
    schedule, _ = schedule_of(lightck.Tier("/t", every="1h"))
    schedule.reached(7)
    assert schedule.answer(Proposal(7, [0])) != ACCEPTED
    assert schedule.answer(Proposal(8, [0])) == ACCEPTED


def test_a_rank_whose_drain_is_busy_accepts_nothing(clock):
    schedule, proposed = schedule_of(lightck.Tier("/t", every="1h"), is_ready=False)
    assert schedule.answer(Proposal(8, [0])) != ACCEPTED
    run(schedule, clock, 1, 3)
    assert not proposed


def test_a_rank_that_is_not_ready_for_long_delays_nothing_afterwards(clock):
    """Steps of ten seconds, and a drain that cannot write for six minutes."""
    schedule, proposed = schedule_of(lightck.Tier("/t", every="1min"))
    for step in range(1, 37):
        clock.now += 10
        schedule.reached(step)
        schedule.propose_if_due(step)
        if proposed and schedule._is_asking:
            agree(schedule, proposed[-1], NOT_READY)
    run(schedule, clock, 37, 38, seconds=10)
    assert proposed[-1].step <= 38 + 2 * group_schedule._LEAD_MIN


def test_what_was_too_near_is_proposed_again_further_ahead(clock):
    schedule, proposed = schedule_of(lightck.Tier("/t", every="1h"))
    run(schedule, clock, 1, 1, seconds=0.05)
    agree(schedule, proposed[0], PASSED)
    assert schedule.answer(Proposal(100, [0])) == ACCEPTED, "the refused plan is forgotten"
    schedule.decided(Proposal(100, [0]), PASSED)
    run(schedule, clock, 2, 20, seconds=0.05)
    assert len(proposed) == 2
    assert proposed[1].step - proposed[0].step > 2 * group_schedule._LEAD_MIN


def test_a_plan_that_was_refused_after_it_was_reached_is_not_sent(clock):
    schedule, proposed = schedule_of(lightck.Tier("/t", every="1h"))
    run(schedule, clock, 1, 1)
    (plan,) = proposed
    assert schedule.answer(plan) == ACCEPTED
    assert schedule.reached(plan.step) == plan
    assert schedule.reached(plan.step) is None, "it is held once"
    assert schedule.take_verdict() is None
    schedule.decided(plan, PASSED)
    assert schedule.take_verdict() is False


def test_a_plan_whose_checkpoint_was_left_out_is_dropped_and_planned_again(clock):
    schedule, proposed = schedule_of(lightck.Tier("/t", every="1h"))
    run(schedule, clock, 1, 1)
    agree(schedule, proposed[0])
    assert schedule.reached(proposed[0].step + 1) is None
    schedule.propose_if_due(proposed[0].step + 1)
    assert len(proposed) == 2


def test_steps_are_multiples_of_the_interval_and_of_keep_every(clock):
    schedule, proposed = schedule_of(
        lightck.Tier("/t", every="1h", keep_last=2, keep_every=25), interval=10, newest=[1]
    )
    for step in range(10, 1000, 10):
        clock.now += 1
        plan = schedule.reached(step)
        if plan is not None:
            assert schedule.take_verdict() is True
        schedule.propose_if_due(step)
        if proposed and proposed[-1].step > step and schedule._plan is None:
            agree(schedule, proposed[-1])
    steps = [plan.step for plan in proposed]
    assert steps[:3] == [100, 150, 200], "50, too, is so near that it may pass on another rank"
    assert all(step % 50 == 0 for step in steps)


def test_two_tiers_share_a_checkpoint(clock):
    schedule, proposed = schedule_of(lightck.Tier("/a", every=10), lightck.Tier("/b", every=10), newest=[1, 1])
    run(schedule, clock, 2, 9)
    assert proposed == [Proposal(10, [0, 1])]


def test_nothing_is_accepted_after_the_end(clock):
    schedule, proposed = schedule_of(lightck.Tier("/t", every="1h"))
    schedule.close()
    assert schedule.answer(Proposal(8, [0])) != ACCEPTED
    run(schedule, clock, 1, 5)
    assert not proposed
