"""``strategy="auto"`` begins with ``FullState``, measures, and goes on with ``Gradients`` where it costs less. Each
checkpoint is exact on the way."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from toys import (
    adam,
    batch,
    crashed,
    everything,
    forward,
    is_step,
    kill_at,
    killed_child,
    net,
    on_small_tmpfs,
    same,
    train,
)

import lightck
from lightck.cli import main
from lightck.errors import CheckpointExistsError, UnsupportedError
from lightck.pool.reader import open_pool
from lightck.session import strategy_choice
from lightck.session.base_every import MEASURED, WARM_UP
from lightck.session.strategy_choice import StepCosts, reason_to_keep

SWITCHES = MEASURED
"""The step whose checkpoint is the first in the new pool."""
RETURNS = MEASURED + WARM_UP + 2 * 6
"""The step whose checkpoint is the first in a whole pool again, if the session goes back."""


def has_gradients(pool: Path) -> bool:
    with closing(open_pool(str(pool), gradients=True)) as reader:
        return reader.superblock.has_gradients


@pytest.fixture
def prefers(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that lets a strategy win each measurement, whatever the machine does."""

    def prefer(name: str) -> None:
        monkeypatch.setattr(strategy_choice, "COST_MIN", -1.0)
        asked: list[StepCosts] = []

        def added(spent: StepCosts, processors: int) -> float:
            asked.append(spent)
            is_full_state = len(asked) % 2 == 1
            return 1.0 if is_full_state else {"Gradients": 0.5, "FullState": 2.0}[name]

        monkeypatch.setattr(strategy_choice, "added_seconds", added)

    return prefer


def made(width: int = 64) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = net(width)
    return model, adam(model)


def uninterrupted(steps: int) -> dict[str, Any]:
    model, optimizer = made()
    train(model, optimizer, steps)
    return everything(model, optimizer)


# -- the choice --------------------------------------------------------------------------------------------------------


def test_gradients_are_stored_after_ten_steps_if_they_cost_less(pool, prefers):
    prefers("Gradients")
    model, optimizer = made()
    with lightck.attach(model, pool, optimizer=optimizer, strategy="auto") as session:
        train(model, optimizer, SWITCHES - 1)
        session.flush()
        assert session.stats().strategy == "FullState"
        assert not has_gradients(pool)
        train(model, optimizer, 1, SWITCHES - 1)
        session.flush()
        assert has_gradients(pool)
        train(model, optimizer, RETURNS, SWITCHES)
        session.flush()
        stats = session.stats()
        assert (stats.strategy, stats.base_every) == ("Gradients", 6)
        assert "with Gradients" in stats.strategy_reason
    assert same(everything(model, optimizer), uninterrupted(SWITCHES + RETURNS))
    checkpoint = lightck.recover(pool)
    assert is_step(checkpoint, everything(model, optimizer))
    assert checkpoint.exact


def test_it_goes_back_if_gradients_cost_more(pool, prefers, caplog):
    prefers("FullState")
    model, optimizer = made()
    hooks = [len(optimizer._optimizer_step_pre_hooks)]
    with (
        caplog.at_level(logging.INFO, "lightck"),
        lightck.attach(model, pool, optimizer=optimizer, strategy="auto") as session,
    ):
        hooks.append(len(optimizer._optimizer_step_pre_hooks))
        size_of_first = pool.stat().st_size
        train(model, optimizer, RETURNS - 1)
        session.flush()
        assert (session.stats().strategy, session.stats().base_every) == ("Gradients", 6)
        assert has_gradients(pool)
        train(model, optimizer, 2, RETURNS - 1)
        session.flush()
        assert not has_gradients(pool)
        stats = session.stats()
        assert (stats.strategy, stats.base_every) == ("FullState", None)
        train(model, optimizer, 8, RETURNS + 1)
        hooks.append(len(optimizer._optimizer_step_pre_hooks))
    hooks.append(len(optimizer._optimizer_step_pre_hooks))
    assert hooks == [hooks[0], hooks[0] + 1, hooks[0] + 1, hooks[0]]
    assert is_step(lightck.recover(pool), uninterrupted(RETURNS + 9))
    assert pool.stat().st_size == size_of_first
    assert (
        "goes back to FullState(): a checkpoint costs 2e+03 ms with Gradients and 1e+03 ms with FullState"
        in caplog.text
    )


def test_full_state_is_kept_where_copies_cost_little(pool, monkeypatch):
    monkeypatch.setattr(strategy_choice, "COST_MIN", 1e9)
    model, optimizer = made()
    with lightck.attach(model, pool, optimizer=optimizer, strategy="auto") as session:
        assert session.stats().strategy_reason is None
        train(model, optimizer, 2 * MEASURED)
        session.flush()
        assert session.stats().strategy == "FullState"
        assert "nothing is gained" in session.stats().strategy_reason
    assert not has_gradients(pool)


@pytest.mark.parametrize(
    ("spent", "is_kept"),
    [
        (StepCosts(1.0, 0.009, 0.5, 0.019), True),
        (StepCosts(1.0, 0.011, 0.5, 0.0), False),
        (StepCosts(1.0, 0.0, 0.5, 0.021), False),  # of two processors
    ],
)
def test_what_waits_and_copies_may_cost(spent, is_kept):
    assert bool(reason_to_keep(spent, processors=2)) is is_kept


# -- where Gradients is no choice --------------------------------------------------------------------------------------


def plain_sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (lambda model: torch.optim.LBFGS(model.parameters()), {}, "LBFGS"),
        (plain_sgd, {}, "1.0 times as many bytes"),
        (adam, {"slots": 3}, "slots="),
        (adam, {"interval": 2}, "interval= other than 1"),
        (adam, {"interval": "auto"}, 'interval="auto"'),
    ],
)
def test_trainings_that_only_full_state_takes_say_why(make, options, reason, pool, prefers):
    prefers("Gradients")
    model = net()
    optimizer = make(model)
    with lightck.attach(model, pool, optimizer=optimizer, strategy="auto", **options) as session:
        for number in range(MEASURED + 3):

            def closure(number: int = number) -> torch.Tensor:
                optimizer.zero_grad()
                loss = forward(model, number)
                loss.backward()
                return loss

            optimizer.step(closure)
        session.flush()
        assert reason in session.stats().strategy_reason
        assert session.stats().strategy == "FullState"
    assert not has_gradients(pool)


def test_half_of_the_free_space_must_hold_the_pool(pool, prefers, monkeypatch):
    prefers("Gradients")
    monkeypatch.setattr(strategy_choice, "free_beside", lambda path: 20_000)
    model, optimizer = made()
    with lightck.attach(model, pool, optimizer=optimizer, strategy="auto") as session:
        train(model, optimizer, MEASURED + 3)
        assert "half of the free space is 0 MB" in session.stats().strategy_reason
    assert not has_gradients(pool)


def test_a_pinned_checkpoint_keeps_full_state(pool, prefers):
    prefers("Gradients")
    model, optimizer = made()
    with lightck.attach(model, pool, optimizer=optimizer, strategy="auto") as session:
        train(model, optimizer, 3)
        pin = session.pin()
        train(model, optimizer, MEASURED, 3)
        assert "pinned" in session.stats().strategy_reason
        pin.release()
    assert not has_gradients(pool)


def test_pin_is_refused_once_gradients_are_stored(pool, prefers):
    prefers("Gradients")
    model, optimizer = made()
    with lightck.attach(model, pool, optimizer=optimizer, strategy="auto") as session:
        train(model, optimizer, MEASURED + 3)
        with pytest.raises(UnsupportedError, match="cannot be pinned"):
            session.pin()


@pytest.mark.parametrize("wrong", ["fast", "", lightck.Gradients, lightck.Replica, 3])
def test_another_word_is_refused(wrong, pool):
    with pytest.raises(TypeError, match=r'lightck\.Gradients\(\), lightck\.Replica\(\), or "auto"'):
        lightck.attach(net(), pool, strategy=wrong)


# -- a pool that exists ------------------------------------------------------------------------------------------------


def test_a_resume_goes_on_with_the_strategy_of_the_pool(pool, prefers):
    prefers("Gradients")
    model, optimizer = made()
    with lightck.attach(model, pool, optimizer=optimizer, strategy="auto"):
        train(model, optimizer, MEASURED + 5)
    model, optimizer = made()
    with pytest.raises(CheckpointExistsError):
        lightck.attach(model, pool, optimizer=optimizer, strategy="auto")
    with lightck.attach(model, pool, optimizer=optimizer, strategy="auto", resume=True) as session:
        assert (session.stats().strategy, session.stats().base_every) == ("Gradients", 6)
        train(model, optimizer, 3, session.step)
    assert is_step(lightck.recover(pool), uninterrupted(MEASURED + 8))
    model, optimizer = made()
    with lightck.attach(model, pool, optimizer=optimizer, strategy="auto", overwrite=True) as session:
        assert session.stats().strategy == "FullState"
        train(model, optimizer, 2)
    assert not has_gradients(pool)


@pytest.mark.parametrize("options", [{"slots": 3}, {"interval": 2}, {"interval": "auto"}], ids=str)
def test_an_argument_that_gradients_refuse_is_refused_with_a_cure_that_works(options, pool, prefers):
    """``FullState()``, which takes it, cannot go on in a pool with gradient records."""
    prefers("Gradients")
    model, optimizer = made()
    with lightck.attach(model, pool, optimizer=optimizer, strategy="auto"):
        train(model, optimizer, MEASURED + 5)
    model, optimizer = made()
    with pytest.raises(UnsupportedError, match=r'"auto" chose Gradients.*lightck compact POOL NEW') as refused:
        lightck.attach(model, pool, optimizer=optimizer, strategy="auto", resume=True, **options)
    assert f"{next(iter(options))}=" in str(refused.value)
    assert "use strategy=FullState()" not in str(refused.value)
    new = pool.with_name("new.pool")
    assert CliRunner().invoke(main, ["compact", str(pool), str(new)]).exit_code == 0
    with lightck.attach(model, new, optimizer=optimizer, strategy="auto", resume=True, **options) as session:
        assert (session.step, session.stats().strategy) == (MEASURED + 5, "FullState")
        train(model, optimizer, 3, session.step)
    assert is_step(lightck.recover(new), uninterrupted(MEASURED + 8))


# -- crashes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [3, SWITCHES, SWITCHES + 1, SWITCHES + 2, RETURNS, RETURNS + 1])
@pytest.mark.parametrize("site", ["header", "sealed", "block"])
@pytest.mark.parametrize("preferred", ["Gradients", "FullState"])
def test_a_kill_at_any_change_loses_nothing(preferred, site, step, pool, prefers):
    """``step``: the one whose checkpoint is being written. The training that goes on has the bits of one that was not
    interrupted."""
    prefers(preferred)

    def killed() -> None:
        model, optimizer = made()
        with lightck.attach(model, pool, optimizer=optimizer, strategy="auto") as session:
            train(model, optimizer, step - 1)
            session.flush()
            kill_at(site)
            train(model, optimizer, 3, step - 1)

    killed_child(killed)
    model, optimizer = made()
    with lightck.attach(model, pool, optimizer=optimizer, strategy="auto", resume=True) as session:
        assert session.step >= step - 1
        train(model, optimizer, step + MEASURED + 4 - session.step, session.step)
    assert same(everything(model, optimizer), uninterrupted(step + MEASURED + 4))
    assert not list(pool.parent.glob("*.new*"))


@pytest.mark.parametrize("loop", ["end_step", "flush", "no forward hook"])
def test_any_boundary_may_change_the_strategy(loop, pool, prefers):
    prefers("FullState")
    model, optimizer = made()
    with lightck.attach(model, pool, optimizer=optimizer, strategy="auto") as session:
        for number in range(RETURNS + 5):
            optimizer.zero_grad()
            x = batch(number)
            if loop == "no forward hook":
                for layer in model:
                    x = layer(x)
                x.square().sum().backward()
            else:
                model(x).square().sum().backward()
            optimizer.step()
            if loop == "end_step":
                session.end_step()
            elif loop == "flush":
                session.flush()
                assert is_step(lightck.recover(crashed(pool)), everything(model, optimizer))
        assert session.stats().strategy == "FullState"
    assert not has_gradients(pool)
    assert is_step(lightck.recover(pool), uninterrupted(RETURNS + 5))


def test_two_optimizers(pool, prefers):
    prefers("FullState")

    def run(path: Path | None) -> list[Any]:
        model = net(64)
        optimizers = [adam(model[0]), torch.optim.SGD(model[2].parameters(), lr=0.01, momentum=0.9)]
        session = None if path is None else lightck.attach(model, path, optimizer=optimizers, strategy="auto")
        for number in range(RETURNS + 4):
            model.zero_grad()
            forward(model, number).backward()
            for optimizer in optimizers:
                optimizer.step()
        if session is not None:
            assert session.stats().strategy_reason
            session.close()
            assert is_step(lightck.recover(path), everything(model, *optimizers))
        return [everything(model, *optimizers)]

    assert same(run(pool), run(None))


# -- a full medium -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("full_after", [0, RETURNS - 2], ids=["to gradients", "and back"])
def test_a_new_pool_that_does_not_fit_changes_nothing(full_after, prefers, caplog, monkeypatch):
    """The medium becomes full after the free space was measured, or while gradients are stored."""
    prefers("FullState")
    monkeypatch.setattr(strategy_choice, "free_beside", lambda path: 1 << 40)

    def work(where: Path) -> Any:
        pool = where / "run.pool"
        model, optimizer = made()
        with lightck.attach(model, pool, optimizer=optimizer, strategy="auto") as session:
            train(model, optimizer, max(full_after, 2))
            with open(where / "full", "wb") as file:
                os.posix_fallocate(file.fileno(), 0, os.statvfs(where).f_bavail * os.statvfs(where).f_frsize)
            train(model, optimizer, RETURNS + 8 - max(full_after, 2), max(full_after, 2))
            session.flush()
            strategy = session.stats().strategy
        exact = is_step(lightck.recover(pool), uninterrupted(RETURNS + 8))
        return strategy, has_gradients(pool), exact, sorted(path.name for path in where.iterdir()), caplog.text

    strategy, gradients, exact, files, logged = on_small_tmpfs(64 << 20, work)
    assert strategy == ("Gradients" if full_after else "FullState")
    assert gradients is bool(full_after)
    assert exact
    assert [name for name in files if not name.endswith(".lock")] == ["full", "run.pool"]
    assert f'strategy="auto" stays with {strategy}' in logged
