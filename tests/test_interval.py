"""``interval="auto"``: how often a version is saved where a budget decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from toys import adam, crashed, everything, is_step, net, train

import lightck
from lightck.interval import Adaptive, cadence


@dataclass
class Loop:
    """A training on a clock of its own: each step takes ``step`` seconds, and ``longer`` more behind a saved version,
    of which ``stall`` are spent inside lightck."""

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
            self.pace.passed(self.now, self.stalled, is_saved)
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


def test_versions_that_cost_nothing_are_saved_at_every_step():
    trained = loop(stall=0.001).run(1000)
    assert trained.pace.interval == 1
    assert trained.saved >= 980, "but for the few that are left out to see how long a step takes without"


@pytest.mark.parametrize("kind", ["stall", "longer"])
@pytest.mark.parametrize("cost", [0.1, 0.5, 3.0])
def test_what_versions_cost_stays_within_the_budget_in_both_ways(kind: str, cost: float):
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


def test_rare_failures_make_cheap_versions_rarer():
    """Young: sqrt(2 x 0.02 s x 1e6 s) = 200 s apart."""
    assert loop(stall=0.02, mtbf=1e6).run(20_000).pace.interval == pytest.approx(200, rel=0.01)
    assert loop(stall=0.02, mtbf=10.0).run(2000).pace.interval == 1


def test_most_is_the_limit():
    assert loop(stall=9.0, most=20).run(2000).pace.interval == 20


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
    assert isinstance(cadence("auto"), Adaptive)
    assert cadence("auto").interval == cadence(lightck.Auto()).interval == cadence(1).interval == 1


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: lightck.Auto(budget=0), "budget=0"),
        (lambda: lightck.Auto(budget=3), "0.03 for 3 %"),
        (lambda: lightck.Auto(mtbf=-1.0), "mtbf=-1.0"),
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
