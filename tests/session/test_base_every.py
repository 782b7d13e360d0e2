"""``Gradients(base_every="auto")`` chooses ``base_every`` from bytes and space at attach, and lowers it to what was
measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from toys import adam, crashed, everything, is_step, kill_at, killed_child, net, same, train

import lightck
from lightck.cli.inspect import pool_facts
from lightck.errors import PoolNotFoundError
from lightck.pool.create import pool_nbytes
from lightck.pool.gradient_log import records_default
from lightck.pool.gradient_reader import checkpoint_of, committed
from lightck.pool.reader import open_pool
from lightck.session import base_every
from lightck.session.base_every import MEASURED, WARM_UP, BaseEveryTuner, CopyCosts, best_base_every
from lightck.strategy.gradients import Gradients

AUTO = Gradients(base_every="auto")


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def n_records(pool: Path) -> int:
    with closing(open_pool(str(pool), gradients=True)) as reader:
        return len(reader.superblock.slots)


def needed(pool: Path) -> tuple[int, int]:
    """Step of the newest checkpoint, and how many of the records before it it needs."""
    with closing(open_pool(str(pool), gradients=True)) as reader:
        checkpoint = checkpoint_of(reader, committed(reader)[0])
        return checkpoint.step, len(checkpoint.needed_records())


# -- at attach -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "expected"), [(adam, 6), (momentum, 4)])
def test_it_is_twice_the_ratio_of_changed_bytes_to_gradients(make, expected, pool):
    model = net(64)
    optimizer = make(model)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=AUTO) as session:
        assert session.stats().base_every == expected
        train(model, optimizer, 3 * expected)
        session.flush()
    assert n_records(pool) == records_default(expected)
    assert needed(pool) == (3 * expected, expected - 2)
    assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_an_optimizer_whose_state_is_not_known_at_attach_gets_a_pool_at_its_first_step(pool):
    class Own(torch.optim.AdamW):
        """So its state is not predicted."""

    model = net(64)
    optimizer = Own(model.parameters())
    strategy = Gradients(base_every="auto", own_optimizers=True)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy) as session:
        assert session.stats().base_every is None
        train(model, optimizer, 2)
        session.flush()
        assert session.stats().base_every == 6
    assert n_records(pool) == records_default(6)


class Space(NamedTuple):
    free: int


@pytest.fixture
def nbytes_of(folder: Path) -> Any:
    """A function that returns the size of the pool of ``net()`` with ``adam`` for a ``base_every``."""
    model = net()
    path = folder / "sized.pool"
    with lightck.attach(model, path, optimizer=adam(model), strategy=Gradients(base_every=2)):
        pass
    with closing(open_pool(str(path), gradients=True)) as reader:
        entries = list(reader.entries)
    return lambda n: pool_nbytes(entries, slots=records_default(n), state_nbytes=0)


@pytest.mark.parametrize(("holds", "expected"), [(5, 5), (3, 3), (2, 2), (0, 2)])
def test_it_takes_at_most_half_of_the_free_space(holds, expected, pool, nbytes_of, monkeypatch):
    free = 2 * nbytes_of(holds) if holds else 1000
    asked = []
    monkeypatch.setattr(base_every.shutil, "disk_usage", lambda folder: asked.append(folder) or Space(free))
    model = net()
    with lightck.attach(model, pool, optimizer=adam(model), strategy=AUTO) as session:
        assert session.stats().base_every == expected
    assert n_records(pool) == records_default(expected)
    assert set(asked) == {str(pool.parent)}


def test_what_the_new_pool_replaces_counts_as_free(pool, nbytes_of, monkeypatch):
    monkeypatch.setattr(base_every.shutil, "disk_usage", lambda _: Space(2 * nbytes_of(3)))
    for _ in range(2):
        model = net()
        with lightck.attach(model, pool, optimizer=adam(model), strategy=AUTO, overwrite=True) as session:
            chosen = session.stats().base_every
    assert chosen == 5  # the first pool has half of the space


def test_a_missing_folder_is_named(folder):
    model = net()
    with pytest.raises(PoolNotFoundError, match="missing"):
        lightck.attach(model, folder / "missing" / "run.pool", optimizer=adam(model), strategy=AUTO)


def test_a_device_offers_its_own_size(monkeypatch):
    from lightck.pool.storage.backends import DEVDAX

    monkeypatch.setattr(type(DEVDAX), "size_and_durability", lambda *_: (123, None))
    assert base_every.free_nbytes("/dev/dax0.0", DEVDAX) == 123


@pytest.mark.parametrize(("records", "expected"), [(2, 2), (3, 2), (7, 4), (11, 6), (40, 6)])
def test_the_records_that_the_user_asks_for_bound_it(records, expected, pool):
    model = net()
    strategy = Gradients(base_every="auto", log_records=records)
    with lightck.attach(model, pool, optimizer=adam(model), strategy=strategy) as session:
        assert session.stats().base_every == expected
    assert n_records(pool) == records


@pytest.mark.parametrize(("before", "expected"), [(Gradients(3), 3), (Gradients(12), 6), (Gradients(4, 4), 2)], ids=str)
def test_after_a_resume_the_records_of_the_pool_bound_it(before, expected, pool):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=before):
        train(model, optimizer, 5)
    n = n_records(pool)
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=AUTO, resume=True) as session:
        assert session.stats().base_every == expected
        train(model, optimizer, 4, 5)
        session.flush()
        assert is_step(lightck.recover(pool), everything(model, optimizer))
    assert n_records(pool) == n


@pytest.mark.parametrize(
    ("strategy", "error", "message"),
    [
        (Gradients(base_every="six"), TypeError, 'Pass a whole number, or "auto"'),
        (Gradients(base_every=6.0), TypeError, "is a float"),  # type: ignore[arg-type]
        (Gradients(base_every="auto", log_records=1), ValueError, "log_records=1 is too small"),
        (Gradients(base_every="auto", mtbf=-1), ValueError, "above 0"),
        (Gradients(base_every="auto", mtbf=math.nan), ValueError, "above 0"),
        (Gradients(base_every="auto", mtbf="1 h"), TypeError, "in seconds"),  # type: ignore[arg-type]
        (Gradients(mtbf=3600), ValueError, 'pass base_every="auto"'),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(strategy, error, message, pool):
    model = net()
    with pytest.raises(error, match=message):
        lightck.attach(model, pool, optimizer=adam(model), strategy=strategy)
    assert not pool.exists()


# -- what is measured ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("copy_seconds", "nbytes", "changed_nbytes", "mtbf", "step", "update", "expected"),
    [
        (1.0, 10**10, 12 * 10**9, 3600, 1.0, 3.0, math.sqrt(2 * 1.2 * 3600 / 3)),
        (1.0, 10**9, 10**9, 50, 1.0, 1.0, 10.0),
        (1.0, 10**9, 10**9, 200, 1.0, 1.0, 20.0),  # four times as long between failures
        (1.0, 10**9, 10**9, 50, 4.0, 1.0, 5.0),  # four times as many failures in a step
        (1.0, 10**9, 10**9, 50, 1.0, 4.0, 5.0),  # a recovery takes four times as long
        (1.0, 10**9, 10**9, math.inf, 1.0, 1.0, math.inf),
        (1.0, 0, 10**9, 50, 1.0, 1.0, math.inf),  # nothing was written
        (1.0, 10**9, 10**9, 50, 1.0, 0.0, math.inf),
    ],
)
def test_the_best_number_balances_copies_and_recoveries(
    copy_seconds, nbytes, changed_nbytes, mtbf, step, update, expected
):
    costs = CopyCosts(copy_seconds, nbytes, update)
    found = best_base_every(costs, changed_nbytes=changed_nbytes, step_seconds=step, mtbf=mtbf)
    assert found == pytest.approx(expected)


def test_the_best_number_has_the_least_cost():
    a, state, mtbf, t, q = 2e-10, 3 * 10**9, 600.0, 0.5, 0.4
    best = best_base_every(CopyCosts(a, 1, q), changed_nbytes=state, step_seconds=t, mtbf=mtbf)

    def cost(n: float) -> float:
        return a * state / n + t / mtbf * q * n / 2

    assert cost(best) < min(cost(best * 1.1), cost(best / 1.1))


class Measured:
    """A tuner with a clock and costs that the test sets."""

    def __init__(self, mtbf: float, now: int | None = 6) -> None:
        self.time, self.costs, self.lowered = 0.0, CopyCosts(0.0, 0, 0.0), list[int]()
        self.tuner = BaseEveryTuner(
            mtbf,
            costs=lambda: self.costs,
            changed_nbytes=lambda: 10**9,
            base_every=lambda: now,
            lower=self.lowered.append,
            clock=lambda: self.time,
        )

    def step(self, number: int, seconds: float = 1.0, update: float = 1.0) -> None:
        self.time += seconds
        copied, nbytes, updates = self.costs
        self.costs = CopyCosts(copied + 0.1, nbytes + 10**8, updates + update)
        self.tuner.step_ended(number)


@pytest.mark.parametrize(
    ("mtbf", "now", "expected"),
    [(8, 6, [4]), (4.5, 6, [3]), (0.001, 6, [2]), (50, 6, []), (18, 6, []), (8, 4, []), (8, None, []), (0.001, 2, [])],
)
def test_after_ten_steps_it_is_lowered_if_less_is_better(mtbf, now, expected):
    """a is 1e-9, S is 1e9, t and q are 1, so n* is the square root of twice the time between failures."""
    measured = Measured(mtbf, now)
    for number in range(1, MEASURED):
        measured.step(number)
        assert measured.lowered == []
    for number in range(MEASURED, 3 * MEASURED):
        measured.step(number)
        assert measured.lowered == expected


def test_slow_first_steps_and_one_slow_step_change_nothing():
    measured = Measured(8)
    for number in range(1, MEASURED + 1):
        is_slow = number <= WARM_UP or number == 7
        measured.step(number, seconds=100.0 if is_slow else 1.0, update=50.0 if is_slow else 1.0)
    assert measured.lowered == [4]


@pytest.fixture
def best_is_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Whatever is measured, two is best. Yields what was measured."""
    calls: list[dict[str, Any]] = []

    def best(costs: CopyCosts, **more: Any) -> float:
        calls.append({"costs": costs, **more})
        return 2.2

    monkeypatch.setattr(base_every, "best_base_every", best)
    return calls


def test_the_pool_keeps_its_records_and_a_full_checkpoint_lowers_it(pool, best_is_two):
    model = net(64)
    optimizer = adam(model)
    strategy = Gradients(base_every="auto", mtbf=3600)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy) as session:
        for number in range(2 * MEASURED):
            train(model, optimizer, 1, number)
            session.flush()
            lowered = number + 1 >= MEASURED
            assert session.stats().base_every == (2 if lowered else 6)
            assert is_step(lightck.recover(pool), everything(model, optimizer))
            if number + 1 == MEASURED:
                assert needed(pool) == (MEASURED, 0)
    assert needed(pool)[1] == 0  # n - 2
    assert n_records(pool) == records_default(6)
    [measured] = best_is_two
    assert measured["mtbf"] == 3600
    assert measured["costs"].copied_nbytes > 0
    assert measured["costs"].update_seconds > 0
    assert measured["changed_nbytes"] == sum(
        t.nbytes for p in model.parameters() for t in (p, *optimizer.state[p].values())
    )


def test_without_mtbf_nothing_is_measured(pool, best_is_two):
    model = net(64)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=AUTO) as session:
        train(model, optimizer, MEASURED + 3)
        session.flush()
        assert session.stats().base_every == 6
    assert best_is_two == []


@pytest.mark.parametrize("site", ["header", "block", "manifest", "sealed"])
@pytest.mark.parametrize("step", [MEASURED, MEASURED + 1])
def test_a_crash_while_it_is_lowered_loses_nothing(site, step, pool, best_is_two):
    """``step``: the one whose checkpoint is being written. The training that goes on has the bits of one that was not
    interrupted."""

    def made() -> Any:
        model = net(64)
        return model, adam(model)

    strategy = Gradients(base_every="auto", mtbf=3600)

    def killed() -> None:
        model, optimizer = made()
        with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy) as session:
            train(model, optimizer, step - 1)
            session.flush()
            kill_at(site)
            train(model, optimizer, 3, step - 1)

    killed_child(killed)
    model, optimizer = made()
    with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy, resume=True) as session:
        assert session.step >= step - 1
        assert session.stats().base_every == 6
        train(model, optimizer, step + 4 - session.step, session.step)
    expected, expected_optimizer = made()
    train(expected, expected_optimizer, step + 4)
    assert same(everything(model, optimizer), everything(expected, expected_optimizer))


def test_a_restart_with_a_smaller_number_in_the_same_pool(pool, best_is_two):
    model = net(64)
    optimizer = adam(model)
    strategy = Gradients(base_every="auto", mtbf=3600)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy):
        train(model, optimizer, MEASURED + 3)
    image = crashed(pool)
    model = net(64)
    optimizer = adam(model)
    with lightck.attach(model, image, optimizer=optimizer, strategy=Gradients(base_every=2), resume=True):
        train(model, optimizer, 4, MEASURED + 3)
    assert is_step(lightck.recover(image), everything(model, optimizer))


# -- what is shown ---------------------------------------------------------------------------------------------------


def shown(pool: Path) -> dict[str, Any]:
    """What ``lightck inspect --json`` says of the gradients."""
    return pool_facts(str(pool), None, False)["shown"]["gradients"]


def test_inspect_shows_it(pool, best_is_two):
    model = net(64)
    optimizer = adam(model)
    strategy = Gradients(base_every="auto", mtbf=3600)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy) as session:
        train(model, optimizer, 4)
        session.flush()
        assert shown(pool)["base_every"] == 6
        train(model, optimizer, MEASURED, 4)
        session.flush()
        assert shown(pool)["base_every"] == 2


def test_another_strategy_has_none(pool):
    model = net()
    with lightck.attach(model, pool, optimizer=adam(model)) as session:
        assert session.stats().base_every is None
