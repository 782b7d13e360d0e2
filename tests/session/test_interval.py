"""``interval="auto"``: how often a checkpoint is saved where a budget decides."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import adam, crashed, everything, is_step, net, train

import lightck
from lightck.session.interval import Adaptive, cadence_of


@dataclass
class Loop:
    """A training on a clock of its own: each step takes ``step`` seconds, and ``longer`` more behind a saved
    checkpoint, of which ``stall`` are spent inside lightck."""

    pace: Adaptive
    step: float = 1.0
    stall: float = 0.0
    longer: float = 0.0
    now: float = 0.0
    stalled: float = 0.0
    number: int = 0
    saved_step: int = 0
    saved: int = 0

    def run(self, steps: int) -> Loop:
        self.saved = 0
        for _ in range(steps):
            self.number += 1
            is_saved = self.pace.is_due(self.number, self.saved_step)
            self.pace.boundary_passed(self.now, self.stalled, is_saved)
            self.now += self.step
            if is_saved:
                self.saved += 1
                self.saved_step = self.number
                self.now += max(self.longer, self.stall)
                self.stalled += self.stall
        return self

    def overhead(self) -> float:
        return max(self.longer, self.stall) * self.saved


def loop(budget: float = 0.03, mtbf: float | None = None, most: int = 1000, **costs: float) -> Loop:
    return Loop(Adaptive(lightck.Auto(budget, mtbf, most)), **costs)


def test_checkpoints_that_cost_nothing_are_saved_at_every_step():
    trained = loop(stall=0.001).run(1000)
    assert trained.pace.interval == 1
    assert trained.saved >= 980, "but for the few that are left out to see how long a step takes without"


@pytest.mark.parametrize("kind", ["stall", "longer"])
@pytest.mark.parametrize("cost", [0.1, 0.5, 3.0])
def test_what_checkpoints_cost_stays_within_the_budget_in_both_ways(kind: str, cost: float):
    trained = loop(budget=0.05, **{kind: cost}).run(300)
    begun = trained.now
    trained.run(1000)
    assert trained.overhead() <= 0.05 * (trained.now - begun)
    assert trained.pace.interval <= -(-cost // 0.05) + 1, "and no fewer than the budget asks for"


def test_the_interval_follows_the_cost_up_and_down():
    trained = loop(stall=0.01).run(200)
    assert trained.pace.interval == 1
    trained.stall = 0.3
    trained.run(200)
    assert trained.pace.interval in (10, 11)
    trained.stall = 0.01
    trained.run(400)
    assert trained.pace.interval == 1


def test_one_slow_step_changes_nothing():
    trained = loop(stall=0.01).run(200)
    trained.stall, trained.longer = 5.0, 9.0
    trained.run(1)
    trained.stall = trained.longer = 0.01
    trained.run(200)
    assert trained.pace.interval == 1


def test_rare_failures_make_cheap_checkpoints_rarer():
    """Young: sqrt(2 x 0.02 s x 1e6 s) = 200 s apart."""
    assert loop(stall=0.02, mtbf=1e6).run(20_000).pace.interval == pytest.approx(200, rel=0.01)
    assert loop(stall=0.02, mtbf=10.0).run(2000).pace.interval == 1


def test_most_is_the_limit():
    assert loop(stall=9.0, most=20).run(2000).pace.interval == 20


# -- times that change -----------------------------------------------------------------------------------------------


def is_right(trained: Loop) -> bool:
    """Whether the interval is what budget and failures ask for; one more where floats are rounded."""
    auto, cost = trained.pace.auto, max(trained.stall, trained.longer)
    wanted = cost / auto.budget / trained.step
    if auto.mtbf is not None:
        wanted = max(wanted, math.sqrt(2 * cost * auto.mtbf) / trained.step - 0.5)
    wanted = min(max(wanted, 1), auto.most)
    return wanted * (1 - 1e-9) <= trained.pace.interval <= math.ceil(wanted) + 1


def run_on(trained: Loop, checkpoints: int, steps: int) -> Loop:
    """Until there were so many of both."""
    trained.run(steps)
    saved = trained.saved
    while saved < checkpoints:
        saved += trained.run(1).saved
    return trained


class Times:
    """Trainings whose steps take a millisecond to 10 s, and whose checkpoints cost next to nothing to many budgets."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def loop(self) -> Loop:
        auto = lightck.Auto(
            self.draw.choice([0.01, 0.03, 0.1]),
            self.draw.choice([None, None, 10 ** self.draw.uniform(0, 6)]),
            self.draw.choice([1, 2, 50, 1000]),
        )
        trained = Loop(Adaptive(auto))
        self.change(trained)
        return trained

    def change(self, trained: Loop) -> None:
        """Steps, or what checkpoints cost and how, or both."""
        what = self.draw.choice(["steps", "versions", "both"])
        if what != "versions" or not trained.now:
            trained.step = 10 ** self.draw.uniform(-3, 1)
        if what != "steps" or not trained.now:
            cost = trained.step * trained.pace.auto.budget * 10 ** self.draw.uniform(-2, 1.7)
            share = self.draw.choice([0, 1, self.draw.random()])
            trained.stall, trained.longer = cost * share, cost


@given(st.integers(0, 10**9))
def test_the_interval_is_right_soon_after_any_change_of_times(seed: int):
    times = Times(seed)
    trained = run_on(times.loop(), 12, 240)
    for _ in range(4):
        assert is_right(trained)
        steps = 40 if trained.pace.interval > 1 else 240
        times.change(trained)
        run_on(trained, 12, steps)
    assert is_right(trained)


@given(st.integers(0, 10**9))
def test_one_outlier_changes_nothing(seed: int):
    times = Times(seed)
    trained = run_on(times.loop(), 12, 240 + times.draw.randrange(210))
    usual, interval = (trained.step, trained.stall, trained.longer), trained.pace.interval
    trained.step, trained.stall, trained.longer = (t * times.draw.choice([0.0, 1.0, 100.0, 1e9]) for t in usual)
    trained.run(1)
    trained.step, trained.stall, trained.longer = usual
    for _ in range(250):
        assert trained.run(1).pace.interval == pytest.approx(interval, abs=1)


@given(
    st.floats(0, 1, exclude_min=True, exclude_max=True),
    st.none() | st.floats(0, exclude_min=True),
    st.integers(1, 10**30),
    st.lists(st.tuples(*[st.sampled_from([0.0, 5e-324, 1e-9, 1.0, 1e300]) | st.floats(0, 1e300)] * 3), max_size=30),
)
def test_no_times_are_an_error_and_the_interval_keeps_its_bounds(
    budget: float, mtbf: float | None, most: int, times: list[tuple[float, float, float]]
):
    trained = loop(budget, mtbf, most)
    for trained.step, trained.stall, trained.longer in times * 3:
        trained.run(1)
        assert 1 <= trained.pace.interval <= most
        assert trained.number - trained.saved_step < most


@pytest.mark.parametrize("every", [3, 4, 5, 8])
def test_an_evaluation_every_so_many_steps_is_not_taken_for_what_checkpoints_cost(every: int):
    """Also if the right interval is as long, so that the evaluation would follow each checkpoint."""
    for phase in range(every):
        trained, intervals = loop(stall=0.03 * every - 0.01), []
        for number in range(4000):
            trained.step = 31.0 if number % every == phase else 1.0
            intervals.append(trained.run(1).pace.interval)
        assert set(intervals[500:]) <= {every, every + 1}


@pytest.mark.parametrize("slower", [1.1, 10.0])
def test_slower_steps_are_not_taken_for_what_checkpoints_cost(slower: float):
    trained = loop(stall=0.001).run(1000)
    trained.step = slower
    assert {trained.run(1).pace.interval for _ in range(1000)} == {1}


@pytest.mark.parametrize("kind", ["stall", "longer"])
def test_faster_steps_bring_the_budget_back_at_once(kind: str):
    trained = loop(**{kind: 0.25}, step=10.0).run(2000)
    assert trained.pace.interval == 1
    trained.step = 1.0
    trained.run(40)
    assert trained.pace.interval == 9


def test_a_medium_that_was_slow_for_a_while_is_forgiven_after_five_checkpoints():
    trained = loop(stall=0.001).run(300)
    trained.stall = 60.0
    trained.run(20)
    assert trained.pace.interval == 1000
    trained.stall = 0.001
    run_on(trained, 5, 0).run(2)
    assert trained.pace.interval == 1


@pytest.mark.parametrize("cost", [{"stall": 0.001}, {"stall": 0.2}, {"longer": 0.2}])
def test_steps_that_scatter_leave_cheap_checkpoints_and_the_budget_alone(cost: dict[str, float]):
    trained, draw, saved, spent = loop(**cost), random.Random(5), 0, 0.0
    for _ in range(5000):
        trained.step = max(draw.gauss(1.0, 0.1), 0.1)
        saved += trained.run(1).saved
        spent += trained.overhead()
    assert spent <= 0.031 * trained.now
    assert saved >= (4000 if cost == {"stall": 0.001} else 500)


@pytest.mark.parametrize("write", [1.1, 1.5, 3.0])
def test_a_medium_that_keeps_up_with_few_checkpoints_only_is_tried_within_the_budget(write: float):
    """Each checkpoint waits for the one before. Where they are rare they cost nothing, so more of them are tried
    again."""
    trained, busy, spent, intervals = loop(), 0.0, 0.0, set()
    for _ in range(6000):
        trained.stall = max(busy - trained.now, 0.0)
        begun = trained.now
        if trained.run(1).saved:
            busy = max(busy, begun) + write
        spent += trained.overhead()
        intervals.add(trained.pace.interval)
    assert spent <= 0.03 * trained.now
    assert len(intervals) > 1


def test_a_training_that_never_fails_is_saved_as_the_budget_says(pool):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lightck.attach(model, pool, optimizer=optimizer, interval=lightck.Auto(mtbf=math.inf)) as session:
        train(model, optimizer, 40)
    assert session.committed == lightck.recover(pool).step == 40


def test_a_training_at_auto_is_exact_wherever_it_is_killed(pool):
    model = net()
    optimizer = adam(model)
    seen = {}
    with lightck.attach(model, pool, optimizer=optimizer, interval="auto") as session:
        for number in range(40):
            train(model, optimizer, 1, number)
            seen[number + 1] = everything(model, optimizer)
            if number % 8 == 7:
                session._pipeline.finish()
                found = lightck.recover(crashed(pool, f"crashed-{number}.pool"))
                assert is_step(found, seen[found.step])
                assert session.step - found.step <= 2 * session.stats().interval
    assert lightck.recover(pool).step == 40


def test_auto_is_what_its_name_says():
    assert isinstance(cadence_of("auto"), Adaptive)
    assert cadence_of("auto").interval == cadence_of(lightck.Auto()).interval == cadence_of(1).interval == 1


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: lightck.Auto(budget=0), "budget=0"),
        (lambda: lightck.Auto(budget=3), "0.03 for 3 %"),
        (lambda: lightck.Auto(mtbf=-1.0), "mtbf=-1.0"),
        (lambda: lightck.Auto(mtbf=math.nan), "mtbf=nan"),
        (lambda: lightck.Auto(mtbf=10**400), "or None"),
        (lambda: lightck.Auto(budget="3 %"), "budget='3 %'"),
        (lambda: lightck.Auto(most=0), "most=0"),
    ],
)
def test_wrong_budgets_are_refused(make: Callable[[], lightck.Auto], text: str):
    with pytest.raises(ValueError, match=text):
        make()


def test_stats_tell_the_interval(pool):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lightck.attach(model, pool, optimizer=optimizer, interval=4) as session:
        assert session.stats().interval == 4
