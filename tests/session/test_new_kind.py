"""A training that was saved whole goes on with ``Gradients``: its pool is written anew, and no bit of the training
changes."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import batch, crashed, everything, is_step, killed_child, net, same

import lightck
from lightck.errors import CheckpointExistsError, DriftError, NoSpaceError, UnsupportedError
from lightck.pool.reader import open_pool
from lightck.session import new_kind
from lightck.strategy.gradients import Gradients


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    for number in range(first, first + steps):
        optimizer.zero_grad()
        model(batch(number)).sum().backward()
        optimizer.step()


def uninterrupted(steps: int) -> Any:
    model, optimizer = made()
    train(model, optimizer, 0, steps)
    return everything(model, optimizer)


def saved_whole(pool: Path, steps: int = 4) -> None:
    model, optimizer = made()
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 0, steps)


def has_gradients(pool: Path) -> bool:
    reader = open_pool(str(pool), gradients=True)
    try:
        return reader.superblock.has_gradients
    finally:
        reader.close()


@pytest.mark.parametrize("base_every", [3, "auto"])
def test_the_training_goes_on_with_the_same_bits(pool, base_every):
    saved_whole(pool)
    model, optimizer = made()
    strategy = Gradients(base_every=base_every)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True, strategy=strategy) as session:
        assert session.step == 4
        for number in range(4, 14):
            train(model, optimizer, number, 1)
            session.flush()
            assert is_step(lightck.recover(pool), everything(model, optimizer))
        assert same(everything(model, optimizer), uninterrupted(14))
    assert has_gradients(pool)
    model, optimizer = made()
    with lightck.attach(model, pool, optimizer=optimizer, resume=True, strategy=strategy) as session:
        assert session.step == 14
        train(model, optimizer, 14, 2)
        assert same(everything(model, optimizer), uninterrupted(16))


def test_the_first_checkpoint_of_the_new_pool_is_the_one_of_the_old_pool(pool, caplog):
    saved_whole(pool)
    before = lightck.recover(pool)
    caplog.set_level(logging.INFO, "lightck")
    model, optimizer = made()
    with lightck.attach(model, pool, optimizer=optimizer, resume=True, strategy=Gradients(base_every=3)):
        after = lightck.recover(crashed(pool))
    assert "was written anew with room for gradient records" in caplog.text
    assert after.step == before.step == 4
    assert same((dict(after.model), after.optimizer), (dict(before.model), before.optimizer))


def test_a_kill_while_the_pool_is_written_anew_leaves_the_old_one(pool):
    saved_whole(pool)

    def killed_before_the_new_file_is_published() -> None:
        new_kind.commit_copy = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        model, optimizer = made()
        lightck.attach(model, pool, optimizer=optimizer, resume=True, strategy=Gradients(base_every=3))

    killed_child(killed_before_the_new_file_is_published)
    assert not has_gradients(pool)
    assert lightck.recover(pool).step == 4
    model, optimizer = made()
    with lightck.attach(model, pool, optimizer=optimizer, resume=True, strategy=Gradients(base_every=3)):
        train(model, optimizer, 4, 3)
        assert same(everything(model, optimizer), uninterrupted(7))


def test_an_attach_that_is_refused_leaves_the_pool_as_it_is(pool, monkeypatch):
    saved_whole(pool)
    before = lightck.recover(pool)
    file = pool.stat().st_ino
    model, optimizer = made()
    with pytest.raises(CheckpointExistsError, match="holds step 4"):
        lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients())
    other = net(width=9)
    with pytest.raises(DriftError, match="does not fit"):
        lightck.attach(
            other, pool, optimizer=torch.optim.AdamW(other.parameters()), resume=True, strategy=Gradients(base_every=3)
        )
    with pytest.raises(DriftError, match="AdamW"):
        lightck.attach(
            model,
            pool,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            resume=True,
            strategy=Gradients(base_every=3),
        )

    def no_space(*_: object, **__: object) -> None:
        raise NoSpaceError("The folder has no room.")

    model, optimizer = made()
    monkeypatch.setattr("lightck.pipeline.current_pool.create", no_space)
    with pytest.raises(NoSpaceError, match=r"no room. With Gradients\(base_every=11\) it fits"):
        lightck.attach(model, pool, optimizer=optimizer, resume=True, strategy=Gradients())
    after = lightck.recover(pool)
    assert (after.step, pool.stat().st_ino, has_gradients(pool)) == (before.step, file, False)
    assert same((dict(after.model), after.optimizer), (dict(before.model), before.optimizer))


def test_without_room_the_advice_is_not_about_a_number_that_log_records_overrides(pool, monkeypatch):
    """The number of records is that of ``log_records``, whatever ``base_every`` is."""

    def no_space(*_: object, **__: object) -> None:
        raise NoSpaceError("The folder has no room.")

    monkeypatch.setattr("lightck.pipeline.current_pool.create", no_space)
    model, optimizer = made()
    with pytest.raises(NoSpaceError, match=r"With Gradients\(base_every=12\), without log_records=, it fits"):
        lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(base_every=12, log_records=40))


def test_a_model_that_the_script_has_restored_keeps_its_pool(pool):
    saved_whole(pool)
    model, optimizer = made()
    lightck.recover(pool, model, optimizer)
    with pytest.raises(UnsupportedError, match="was made by another strategy"):
        lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients())
