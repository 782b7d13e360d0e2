"""Whether anything is being saved, and what the loop moves before the point at which it goes on."""

from __future__ import annotations

import copy
import logging
import re

import pytest
from torch import nn
from toys import BIG, adam, everything, forward, is_step, net, same, train, weights

import lightck
from lightck.errors import NothingSavedError

from .harness import Bench


@pytest.mark.parametrize("name", ["by-hand-through-data", "optimizer-of-its-own-kind", "by-hand-at-an-interval"])
def test_without_an_optimizer_end_step_is_the_update(name: str, bench: Bench) -> None:
    bench.exact(name)


# -- A12: no optimizer is followed -----------------------------------------------------------------------------------


def by_hand(model: nn.Module, number: int = 0) -> None:
    """One update without an optimizer."""
    forward(model, number).backward()
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.01)
        p.grad = None


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_updates_by_hand_without_end_step_are_warned_of_and_closing_is_an_error(pool, caplog):
    model = net()
    session = lightck.attach(model, pool, resume=True)
    by_hand(model)
    assert not warnings(caplog)
    for number in range(1, 20):
        by_hand(model, number)
    (said,) = warnings(caplog)
    assert re.search(r"'0\.weight'.*no optimizer is followed.*attach\(\.\.\., optimizer=opt\).*end_step\(\)", said)
    with pytest.raises(NothingSavedError, match=r"no optimizer is followed.*end_step\(\)"):
        session.close()
    assert not session.is_open
    session.close()
    lightck.attach(model, pool).close()  # everything was released


def test_an_exception_in_such_a_loop_stays_the_one_that_it_is(pool):
    model = net()
    with pytest.raises(KeyError), lightck.attach(model, pool):
        for number in range(3):
            by_hand(model, number)
        raise KeyError("mine")


def test_optimizer_of_another_model_is_told(pool, caplog):
    """``deepcopy`` and the like: the loop calls this model and steps another one."""
    model = net()
    optimizer = adam(copy.deepcopy(model))
    session = lightck.attach(model, pool)
    train(model, optimizer, 5)
    assert re.search("no optimizer is followed", warnings(caplog)[0])
    with pytest.raises(NothingSavedError):
        session.close()


@pytest.mark.parametrize("keeps_optimizer", [True, False], ids=["optimizer", "by hand"])
def test_model_that_is_built_again(pool, caplog, keeps_optimizer):
    model = net()
    optimizer = adam(model) if keeps_optimizer else None
    session = lightck.attach(model, pool)
    model = net(seed=1)
    optimizer = adam(model)
    train(model, optimizer, 30)
    (said,) = warnings(caplog)
    assert re.search(r"AdamW made 10 updates.*built again.*attach to the new one", said)
    with pytest.raises(NothingSavedError, match="another one"):
        session.close()


def test_several_models_with_a_session_each(folder, caplog):
    models = [net(seed=seed) for seed in range(2)]
    optimizers = list(map(adam, models))
    sessions = [lightck.attach(model, folder / f"{i}.pool") for i, model in enumerate(models)]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, 30)
    for session in sessions:
        session.close()
    assert not warnings(caplog)


def test_model_that_is_only_called(pool, caplog):
    model = net()
    with lightck.attach(model, pool):
        for number in range(20):
            forward(model, number)
    assert not warnings(caplog)


def test_accumulation_by_hand_is_told_that_gradients_are_not_saved(pool, caplog):
    model = net()
    with lightck.attach(model, pool) as session:
        for number in range(8):
            forward(model, number).backward()
            if number % 4 == 3:
                for p in model.parameters():
                    p.data.add_(p.grad, alpha=-0.01)
                    p.grad = None
            session.end_step()
    (said,) = warnings(caplog)
    assert re.search(r"end_step\(\) was called twice.*no\s+gradients", said)


def test_optimizer_that_appears_later_makes_it_an_ordinary_session(pool):
    model = net()
    with lightck.attach(model, pool) as session:
        for number in range(3):
            by_hand(model, number)
            session.end_step()
            assert (session.step, session.iteration) == (number + 1, number + 1)
        optimizer = adam(model)
        for number in range(3, 6):
            train(model, optimizer, 1, number)
            assert session.step == number + 1
            session.end_step()
            assert session.step == number + 1
            session.end_step()  # an iteration without an update
            assert session.step == number + 1
        seen = everything(model, optimizer)
    assert is_step(lightck.recover(pool), seen)


def test_optimizer_that_was_made_after_attach_and_accumulates_first(pool):
    """It is there and has not stepped: no end_step() before that is an update."""
    model = net()
    with lightck.attach(model, pool) as session:
        optimizer = adam(model)
        for number in range(8):
            forward(model, number).backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            session.end_step()
        assert session.step == 2


def test_end_step_inside_paused_is_no_update(pool):
    model = net()
    with lightck.attach(model, pool) as session:
        by_hand(model)
        session.end_step()
        with session.paused():
            session.end_step()
        assert (session.step, session.committed) == (1, 1)


@pytest.mark.parametrize("width", [8, BIG], ids=["small", "large"])
def test_checkpoint_holds_what_was_there_at_end_step(pool, width):
    """No gate comes before the next update, so every copy has ended when end_step() returns."""
    model = net(width)
    with lightck.attach(model, pool) as session:
        for number in range(4):
            by_hand(model, number)
            session.end_step()
            seen = weights(model)
            for p in model.parameters():
                p.data.fill_(7.0)
            session.flush()
            assert same(dict(lightck.recover(pool).model), seen)
            for name, p in model.named_parameters():
                p.data.copy_(seen[name])


def test_optimizer_that_never_steps_beside_updates_by_hand(pool, caplog):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool) as session:
        for number in range(120):
            by_hand(model, number)
            session.end_step()
    (said,) = warnings(caplog)
    assert re.search(r"100 iterations.*AdamW.*optimizer=\[\]", said)
    del optimizer


def test_long_accumulation_is_no_alarm(pool, caplog):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool):
        for number in range(260):
            forward(model, number).backward()
            if number % 130 == 129:
                optimizer.step()
                optimizer.zero_grad()
    assert not warnings(caplog)
