"""Sessions, as their user sees them: what attach finds and says, what a session counts, how it goes on."""

from __future__ import annotations

import dataclasses
import gc
import logging
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, SequentialLR, StepLR
from torch.utils.data import DataLoader
from toys import BIG, adam, content, crashed, everything, forward, is_step, net, pool_with, same, settled, train

import lightck
from lightck.errors import CheckpointExistsError, LateError, NoCheckpointError, PoolNotFoundError, SessionError
from lightck.pool.storage.durability import probe
from lightck.restore import restore
from lightck.restore.resume import Resumed


class Box:
    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def update(model: nn.Module, optimizer: Any, number: int = 0) -> None:
    optimizer.zero_grad()
    forward(model, number).backward()
    optimizer.step()


def differentiated(model: nn.Module, optimizer: Any, number: int = 0) -> torch.Tensor:
    """What a closure does."""
    optimizer.zero_grad()
    loss = forward(model, number)
    loss.backward()
    return loss


# -- what attach finds -----------------------------------------------------------------------------------------------


def test_what_was_found_is_named_in_found_and_in_one_log_line(pool, caplog):
    caplog.set_level(logging.INFO, "lightck")
    model = net()
    optimizer = adam(model)
    scheduler, scaler = StepLR(optimizer, 1), torch.amp.GradScaler("cpu")
    with lightck.attach(model, pool) as session:
        expected = {"optimizer": "AdamW", "scheduler": "StepLR", "scaler": "GradScaler"}
        assert session.found == expected
        medium = session.durability.medium
    (line,) = [r.getMessage() for r in caplog.records if "found" in r.getMessage()]
    for word in (*expected, *expected.values(), str(pool), "fresh start", medium):
        assert word in line
    del scheduler, scaler


def test_the_log_names_what_was_passed_in_state(pool, caplog):
    caplog.set_level("INFO", logger="lightck")
    model = net()
    optimizer = adam(model)
    scheduler = StepLR(optimizer, 1)
    with lightck.attach(model, pool, state={"record": torch.nn.Linear(1, 1), "scheduler": None}):
        pass
    (line,) = [r.getMessage() for r in caplog.records if "found and saved too" in r.getMessage()]
    assert line.endswith("; saved from state=: record")
    del scheduler


def test_what_was_passed_is_not_among_what_was_found(pool):
    model = net()
    optimizer = adam(model)
    scheduler = StepLR(optimizer, 1)
    with lightck.attach(model, pool, optimizer=optimizer, state={"schedule": scheduler}) as session:
        assert session.found == {}
        train(model, optimizer, 1)
    assert set(lightck.recover(pool).state) == {"schedule"}


def test_scheduler_can_be_declined(pool):
    model = net()
    optimizer = adam(model)
    scheduler = StepLR(optimizer, 1)
    with lightck.attach(model, pool, state={"scheduler": None}) as session:
        assert session.found == {"optimizer": "AdamW"}
        train(model, optimizer, 2)
    assert lightck.recover(pool).state == {}
    del scheduler


def test_state_that_the_pool_holds_can_be_declined_on_resume(pool):
    pool_with(pool, state={"ema": Box(1), "counter": Box(2)})
    model = net(seed=1)
    counter = Box()
    declining = {"ema": None, "counter": counter}
    with lightck.attach(model, pool, optimizer=adam(model), state=declining, resume=True) as session:
        assert (session.step, counter.value) == (3, 2)


def test_scheduler_made_of_schedulers_is_one(pool):
    model = net()
    optimizer = adam(model)
    scheduler = SequentialLR(optimizer, [LinearLR(optimizer), StepLR(optimizer, 2)], milestones=[2])
    with lightck.attach(model, pool) as session:
        assert session.found["scheduler"] == "SequentialLR"
        for number in range(4):
            update(model, optimizer, number)
            scheduler.step()
    expected = scheduler.state_dict(), optimizer.param_groups[0]["lr"]
    model = net(seed=1)
    optimizer = adam(model)
    scheduler = SequentialLR(optimizer, [LinearLR(optimizer), StepLR(optimizer, 2)], milestones=[2])
    with lightck.attach(model, pool, resume=True):
        assert optimizer.param_groups[0]["lr"] == expected[1]
        assert scheduler.last_epoch == expected[0]["last_epoch"] == 4


def test_garbage_is_no_candidate(pool):
    model = net()

    def abandoned() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer.cycle = optimizer
        scaler = torch.amp.GradScaler("cpu")
        scaler.cycle = scaler
        scheduler = StepLR(optimizer, 1)
        scheduler.cycle = scheduler

    gc.disable()
    try:
        abandoned()
        optimizer = adam(model)
        with lightck.attach(model, pool) as session:
            assert session.found == {"optimizer": "AdamW"}
            train(model, optimizer, 1)
            gc.disable()
    finally:
        gc.enable()


def test_optimizer_of_another_model_is_not_found(pool):
    model, other = net(), net(seed=1)
    optimizer, foreign = adam(model), torch.optim.SGD(other.parameters(), lr=1.0)
    with lightck.attach(model, pool) as session:
        assert session.found == {"optimizer": "AdamW"}
        train(model, optimizer, 1)
        train(other, foreign, 3)
        assert session.step == 1


def test_wrapped_optimizer_is_unwrapped(pool):
    class Accelerated:
        """As Accelerate's: no hooks of its own."""

        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=Accelerated(optimizer)) as session:
        train(model, optimizer, 2)
        assert session.step == 2
    lightck.recover(pool, net(seed=1), None)
    other = net(seed=2)
    wrapped = Accelerated(adam(other))
    lightck.recover(pool, other, wrapped)
    assert same(everything(other, wrapped.optimizer), everything(model, optimizer))


def test_optimizer_made_after_attach_is_found_at_its_first_step(pool):
    model = net()
    with lightck.attach(model, pool) as session:
        assert session.found == {}
        optimizer = adam(model)
        for number in range(3):
            update(model, optimizer, number)
            assert session.step == number + 1
    assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_parameters_outside_the_model_are_saved_too(pool):
    model = net()
    temperature = nn.Parameter(torch.tensor([2.0]))
    optimizer = torch.optim.AdamW([*model.parameters(), temperature], lr=0.1)

    def learn(model: nn.Module, optimizer: Any, temperature: torch.Tensor) -> None:
        optimizer.zero_grad()
        (forward(model) * temperature).sum().backward()
        optimizer.step()

    with lightck.attach(model, pool) as session:
        assert session.found == {"optimizer": "AdamW"}
        for _ in range(3):
            learn(model, optimizer, temperature)
    other, other_temperature = net(seed=1), nn.Parameter(torch.tensor([0.0]))
    other_optimizer = torch.optim.AdamW([*other.parameters(), other_temperature], lr=0.1)
    with lightck.attach(other, pool, optimizer=other_optimizer, resume=True):
        assert same(other_temperature, temperature)
        assert same(everything(other, other_optimizer), everything(model, optimizer))


# -- counters --------------------------------------------------------------------------------------------------------


def test_the_old_name_of_the_number_of_checkpoints_still_works_with_a_warning():
    with pytest.warns(DeprecationWarning, match=r"Stats\.checkpoints"):
        assert lightck.Stats(checkpoints=3).versions == 3


def test_stats_are_a_frozen_record_that_makes_sense(pool):
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        before = session.stats()
        train(model, optimizer, 4)
        session.flush()
        stats = session.stats()
        with pytest.raises(dataclasses.FrozenInstanceError):
            stats.checkpoints = 9
    size = sum(t.numel() * 4 for t in model.parameters()) * 3
    assert (before.checkpoints, before.bytes_written, before.committed) == (0, 0, None)
    assert (stats.checkpoints, stats.committed, stats.skipped, stats.recopied, stats.left_out) == (4, 4, 0, 0, 0)
    assert 4 * size < stats.bytes_written < 4 * size + 4 * (64 << 10)
    assert 0 <= stats.bytes_helped <= stats.bytes_written
    assert 0 < stats.wait_seconds <= stats.stall_seconds
    assert 0 < stats.cpu_seconds < 10
    assert stats == dataclasses.replace(stats)


def test_durability_is_what_a_probe_of_the_place_finds(folder, pool):
    model = net()
    with lightck.attach(model, pool, optimizer=adam(model)) as session:
        durability = session.durability
    assert durability == probe(str(folder))
    assert any("f_type" in line for line in durability.evidence)


def test_committed_is_the_newest_durable_step(pool):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        assert session.committed is None
        for number in range(4):
            update(model, optimizer, number)
            assert session.committed == (number or None)
        assert session.flush() == session.committed == 4
    assert session.committed == 4


def test_interval_saves_every_nth_step(pool):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, interval=3) as session:
        committed = []
        for number in range(8):
            update(model, optimizer, number)
            committed.append(session.committed)
            if number == 5:
                sixth = everything(model, optimizer)
        assert (session.step, session.iteration) == (8, 7)
        assert session.stats().checkpoints == 2
        image = crashed(pool)
    assert committed == [None, None, None, 3, 3, 3, 6, 6]
    assert is_step(lightck.recover(image), sixth)
    assert lightck.recover(pool).step == 8, "close commits the current step, whatever the interval"
    with lightck.attach(model, pool, optimizer=optimizer, interval=3, resume=True) as session:
        train(model, optimizer, 3, start=session.step)
        assert session.committed == 9


def test_slots_keep_that_many_checkpoints(pool):
    model = net()
    optimizer = adam(model)
    held = {}
    with lightck.attach(model, pool, optimizer=optimizer, slots=5):
        for number in range(9):
            update(model, optimizer, number)
            held[number + 1] = everything(model, optimizer)
    for step in range(5, 10):
        assert is_step(lightck.recover(pool, step=step), held[step])


def test_number_of_slots_can_change_on_resume(pool):
    model, optimizer = pool_with(pool, slots=2)
    nbytes = len(content(pool))
    with lightck.attach(model, pool, optimizer=optimizer, resume=True, slots=4) as session:
        assert lightck.recover(pool).step == 3
        train(model, optimizer, 4, start=3)
        settled(session, 6)
    assert len(content(pool)) > 1.5 * nbytes
    for step in (4, 5, 6, 7):
        assert lightck.recover(pool, step=step).step == step
    with lightck.attach(model, pool, optimizer=optimizer, resume=True) as session:
        train(model, optimizer, 1, start=7)
    assert lightck.recover(pool, step=6).step == 6, "without slots= the pool keeps what it has"


def test_pool_files_are_private(folder, pool):
    import os

    old = os.umask(0)
    try:
        pool_with(pool, state={"box": Box(torch.zeros(10))})
    finally:
        os.umask(old)
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


# -- going on --------------------------------------------------------------------------------------------------------


def test_resume_of_nothing_starts_fresh(pool):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True) as session:
        assert (session.step, session.iteration, session.committed) == (0, 0, None)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True) as session:  # a pool without a commit record
        assert session.step == 0
        train(model, optimizer, 1)
    assert lightck.recover(pool).step == 1


def test_overwrite_discards(pool):
    pool_with(pool, steps=5)
    model = net(seed=8)
    optimizer = adam(model)
    seen = everything(model, optimizer)
    with lightck.attach(model, pool, optimizer=optimizer, overwrite=True) as session:
        assert session.step == 0
        assert same(everything(model, optimizer), seen)
        train(model, optimizer, 1)
    assert lightck.recover(pool).step == 1


def test_overwrite_discards_before_the_first_checkpoint(pool):
    """Also where the layout cannot be predicted: a crash must not bring the discarded training back."""
    pool_with(pool, steps=5)
    model = net(seed=8)
    optimizer = torch.optim.LBFGS(model.parameters())
    with lightck.attach(model, pool, optimizer=optimizer, overwrite=True):
        with pytest.raises((PoolNotFoundError, NoCheckpointError)):
            lightck.recover(pool)
        optimizer.step(lambda: differentiated(model, optimizer))
    assert lightck.recover(pool).step == 1


def test_attach_goes_on_from_what_recover_restored(pool):
    model, optimizer = pool_with(pool)
    other = net(seed=1)
    other_optimizer = adam(other)
    lightck.recover(pool, other, other_optimizer)
    with lightck.attach(other, pool, optimizer=other_optimizer) as session:
        assert (session.step, session.committed) == (3, 3)
        train(model, optimizer, 2, start=3)
        train(other, other_optimizer, 2, start=3)
    assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_attach_goes_on_from_what_a_checkpoint_restored(pool):
    pool_with(pool, state={"box": Box(5)})
    model = net(seed=1)
    optimizer, box = adam(model), Box()
    checkpoint = lightck.recover(pool)
    checkpoint.restore(model, optimizer, {"box": box})
    assert box.value == 5
    with lightck.attach(model, pool, optimizer=optimizer, state={"box": box}) as session:
        assert session.step == 3


def test_attach_after_a_partial_restore_names_what_is_missing(pool):
    pool_with(pool, state={"box": Box(5)})
    model = net(seed=1)
    optimizer = adam(model)
    lightck.recover(pool, model)
    with pytest.raises(SessionError, match=r"step 3 .*AdamW.*'box'.*resume=True"):
        lightck.attach(model, pool, optimizer=optimizer, state={"box": Box()})
    lightck.recover(pool, model, optimizer)
    with pytest.raises(SessionError, match=r"state 'box'.*restored nowhere"):
        lightck.attach(model, pool, optimizer=optimizer, state={"box": Box()})
    with lightck.attach(model, pool, optimizer=optimizer, state={"box": None}) as session:
        assert session.step == 3


def test_attach_refuses_where_the_restored_step_is_gone(pool):
    model, optimizer = pool_with(pool)
    other = net(seed=1)
    other_optimizer = adam(other)
    lightck.recover(pool, other, other_optimizer)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True):
        train(model, optimizer, 3, start=3)
    with pytest.raises(
        CheckpointExistsError, match=r"Step 3\b.* no longer .*has gone on in the pool since.*resume=True"
    ):
        lightck.attach(other, pool, optimizer=other_optimizer)


def test_restored_model_and_another_pool_start_fresh(folder, pool):
    pool_with(pool)
    model = net(seed=1)
    optimizer = adam(model)
    lightck.recover(pool, model, optimizer)
    with lightck.attach(model, folder / "other.pool", optimizer=optimizer) as session:
        assert session.step == 0


def test_restoring_into_the_model_of_an_open_session_is_an_error(pool):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 2)
        session.flush()
        seen = everything(model, optimizer)
        for call in (lambda: lightck.recover(pool, model, optimizer), lambda: lightck.recover(pool).restore(model)):
            with pytest.raises(SessionError, match=r"open.*close"):
                call()
        assert same(everything(model, optimizer), seen)
    lightck.recover(pool, model, optimizer)


def test_late_optimizer_on_a_pool_with_optimizer_state_names_the_cure(pool):
    pool_with(pool)
    gc.collect()
    model = net(seed=1)
    with pytest.raises(LateError, match=r"AdamW.*optimizer="):
        lightck.attach(model, pool, resume=True)


# -- the conditions -------------------------------------------------------------------------------------------------


def test_the_log_says_that_a_resumed_training_was_finished(pool, caplog):
    caplog.set_level(logging.INFO, "lightck")
    for done in (False, True, False):
        model = net()
        optimizer = adam(model)
        with lightck.attach(model, pool, optimizer=optimizer, resume=True) as session:
            if not session.done:
                train(model, optimizer, 1)
            session.close(done=done)
    lines = [r.getMessage() for r in caplog.records if "found" in r.getMessage()]
    assert ["declared finished (session.done is True)" in line for line in lines] == [False, False, True]


def test_other_conditions_are_reported_in_one_line(pool, caplog):
    pool_with(pool)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        model = net(seed=1)
        with lightck.attach(model, pool, optimizer=adam(model), resume=True):
            pass
    finally:
        torch.set_num_threads(threads)
    (line,) = [r.getMessage() for r in caplog.records if "conditions" in r.getMessage()]
    assert f"threads {threads} -> {threads + 1}" in line


# -- layouts that cannot be predicted --------------------------------------------------------------------------------


def test_lbfgs_whose_state_cannot_be_foreseen(pool, caplog):
    caplog.set_level(logging.INFO, "lightck")

    def build(seed: int) -> tuple[nn.Module, Any]:
        model = net(seed=seed)
        return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=3)

    def learn(model: nn.Module, optimizer: Any, start: int, steps: int) -> None:
        for number in range(start, start + steps):
            optimizer.step(lambda number=number: differentiated(model, optimizer, number))

    model, optimizer = build(0)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        assert "is not known before its first update" in caplog.text
        learn(model, optimizer, 0, 3)
        seen = everything(model, optimizer)
        session.flush()
        image = crashed(pool)
        learn(model, optimizer, 3, 3)
    assert is_step(lightck.recover(image), seen)
    other, other_optimizer = build(5)
    with lightck.attach(other, image, optimizer=other_optimizer, resume=True) as session:
        assert session.step == 3
        learn(other, other_optimizer, 3, 3)
    assert same(everything(other, other_optimizer), everything(model, optimizer))


@pytest.mark.parametrize(
    "build",
    [
        lambda ps: torch.optim.SGD(ps, lr=0.1),
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        lambda ps: torch.optim.Adam(ps, amsgrad=True),
        lambda ps: torch.optim.AdamW(ps, fused=True),
        lambda ps: torch.optim.RMSprop(ps, centered=True, momentum=0.5),
        lambda ps: torch.optim.Adagrad(ps),
        lambda ps: torch.optim.Adadelta(ps),
        lambda ps: torch.optim.NAdam(ps),
        lambda ps: torch.optim.RAdam(ps),
        lambda ps: torch.optim.Adafactor(ps),
        lambda ps: torch.optim.ASGD(ps),
        lambda ps: torch.optim.Rprop(ps),
        lambda ps: torch.optim.Adamax(ps),
    ],
    ids=[
        "sgd",
        "momentum",
        "amsgrad",
        "fused",
        "rmsprop",
        "adagrad",
        "adadelta",
        "nadam",
        "radam",
        "adafactor",
        "asgd",
        "rprop",
        "adamax",
    ],
)
def test_every_optimizer_resumes_bit_identical(pool, build):
    model = net(64)
    optimizer = build(model.parameters())
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 3)
        session.flush()
        inode = pool.stat().st_ino
        image = crashed(pool)
        train(model, optimizer, 3, start=3)
    assert pool.stat().st_ino == inode, "the layout was foreseen"
    other = net(64, seed=1)
    other_optimizer = build(other.parameters())
    with lightck.attach(other, image, optimizer=other_optimizer, resume=True) as session:
        train(other, other_optimizer, 3, start=session.step)
    assert same(everything(other, other_optimizer), everything(model, optimizer))


def test_loaders_are_distinguished_by_name(pool):
    model = net()
    with lightck.attach(model, pool, optimizer=adam(model)) as session:
        first = session.loader(DataLoader([1, 2]))
        second = session.loader(DataLoader([1, 2]), name="second")
        assert (first.name, second.name) == ("loader.0", "second")
        with pytest.raises(SessionError, match=r"'second'.*another"):
            session.loader(DataLoader([1, 2]), name="second")


def test_a_loader_is_not_wrapped_anew_for_each_epoch(pool):
    """Its number would be another one after a resume."""
    model = net()
    optimizer = adam(model)
    loader = DataLoader(torch.arange(4))
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for _ in session.loader(loader):
            update(model, optimizer)
        with pytest.raises(SessionError, match=r"as 'loader\.0'\).*once, before the loop"):
            session.loader(loader)
        for epoch in range(2):  # names of the user's own find their position again
            for _ in session.loader(loader, name=f"epoch {epoch}"):
                update(model, optimizer)


def test_one_loader_may_have_two_positions(pool):
    model = net()
    optimizer = adam(model)
    loader = DataLoader(torch.arange(6), shuffle=True)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for left, right in zip(session.loader(loader), session.loader(loader), strict=True):
            assert left.shape == right.shape
            update(model, optimizer)
        assert session.step == 6


@pytest.mark.parametrize("interval", [1, 4])
def test_close_may_drop_the_current_step(pool, interval):
    model = net()
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, interval=interval)
    states = [everything(model, optimizer)]
    for _ in range(7):
        train(model, optimizer, 1)
        states.append(everything(model, optimizer))
    with pytest.raises(ValueError, match="done=True saves the current step, and drop_current=True drops it"):
        session.close(done=True, drop_current=True)
    session.close(drop_current=True)
    found = lightck.recover(pool)
    assert session.committed == found.step == (6 if interval == 1 else 4)
    assert is_step(found, states[found.step])


def test_a_session_whose_only_step_is_dropped_has_saved_nothing(pool):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 1)
        session.close(drop_current=True)
    assert session.committed is None


def test_loader_is_closed_with_its_session(pool):
    model = net()
    with lightck.attach(model, pool, optimizer=adam(model)) as session:
        loader = session.loader(DataLoader([1.0, 2.0, 3.0]))
        batches = iter(loader)
        next(batches)
    assert [x.item() for x in batches] == [2.0, 3.0], "a loop goes on as if nothing had been attached"


@pytest.mark.usefixtures("whole_heap")
def test_optimizer_in_a_frozen_heap_is_found(pool):
    """Programs that fork freeze what they have built."""
    model = net()
    optimizer = adam(model)
    gc.freeze()
    with lightck.attach(model, pool) as session:
        assert session.found == {"optimizer": "AdamW"}
        train(model, optimizer, 1)


# -- who is where ----------------------------------------------------------------------------------------------------


def test_a_model_that_was_restored_and_trained_elsewhere_is_restored_again(folder, pool):
    model, optimizer = pool_with(pool)
    seen = everything(model, optimizer)
    lightck.recover(pool, model, optimizer)
    with lightck.attach(model, folder / "other.pool", optimizer=optimizer):
        train(model, optimizer, 4)
    with pytest.raises(CheckpointExistsError):
        lightck.attach(model, pool, optimizer=optimizer)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True) as session:
        assert session.step == 3
        assert same(everything(model, optimizer), seen)


def _draws(pool: Any, start: int, stop: int) -> list[float]:
    """Of a training by hand, which looks at its validation loader at every fourth step."""
    model = net()
    optimizer = adam(model)
    drawn = []
    with lightck.attach(model, pool, optimizer=optimizer, resume=True) as session:
        validation = session.loader(DataLoader(torch.arange(4)))
        assert session.step == start
        while session.step < stop:
            model(torch.rand(3, 4)).sum().backward()
            optimizer.step()
            drawn.append(float(torch.rand(())))
            session.end_step()
            if session.step % 4 == 0:
                list(validation)
    return drawn


def test_a_loader_that_is_used_late_after_a_resume_does_not_turn_randomness_back(folder, pool):
    torch.manual_seed(7)
    plain = _draws(folder / "plain.pool", 0, 6)
    torch.manual_seed(7)
    killed = _draws(pool, 0, 2)
    assert killed + _draws(pool, 2, 6) == plain


def _batches(pool: Any, stop: int) -> list[list[int]]:
    """Two loaders by turns, each left by break after two updates."""
    model = net()
    optimizer = adam(model)
    given = []
    with lightck.attach(model, pool, optimizer=optimizer, resume=True) as session:
        loaders = [session.loader(DataLoader(torch.arange(20), batch_size=2, shuffle=True)) for _ in range(2)]
        while session.step < stop:
            for numbers in loaders[session.step // 2 % 2]:
                given.append(numbers.tolist())
                update(model, optimizer)
                if session.step % 2 == 0 or session.step == stop:
                    break
    return given


@pytest.mark.parametrize("killed", [3, 5, 7])  # at its last step a pass that was left looks like one to go on with
def test_loaders_that_are_used_by_turns_go_on_as_they_would_have(folder, pool, killed):
    torch.manual_seed(7)
    plain = _batches(folder / "plain.pool", 8)
    torch.manual_seed(7)
    before = _batches(pool, killed)
    after = _batches(pool, 8)
    assert (before + after)[killed + killed % 2 :] == plain[killed + killed % 2 :]


def test_a_loader_is_not_iterated_beside_the_training(pool):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        batches = iter(session.loader(DataLoader(torch.arange(6))))
        next(batches)
        update(model, optimizer)
        with ThreadPoolExecutor(1) as beside, pytest.raises(SessionError, match=r"another thread.*num_workers"):
            beside.submit(next, batches).result()
        next(batches)
        assert session.iteration == 1


def test_several_updates_on_one_batch_are_reported_once(pool, caplog):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for _ in session.loader(DataLoader(torch.arange(3))):
            update(model, optimizer)
        assert "still uses its batch" not in caplog.text
        for _ in session.loader(DataLoader(torch.arange(3)), name="repeated"):
            update(model, optimizer)
            update(model, optimizer)
    assert caplog.text.count("still uses its batch") == 1
    assert "'repeated'" in caplog.text


@pytest.mark.parametrize(("interval", "said"), [(1, 3), (3, 9)])
def test_several_steps_that_end_on_one_batch_are_reported_once(pool, caplog, interval, said):
    """At the second such batch: one is given where a loop turns to other data. Only checkpoints that are saved
    count."""
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, interval=interval) as session:
        for _ in session.loader(DataLoader(torch.arange(8))):
            for _ in range(2):
                update(model, optimizer)
                session.end_step()
    assert (
        caplog.text.count(f"step {said} was saved although the loop still uses its batch")
        == caplog.text.count("still uses")
        == 1
    )


def test_a_loop_over_one_loader_inside_that_over_another_is_reported_once(pool, caplog):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        inner = session.loader(DataLoader(torch.arange(3)), name="inner")
        for _ in session.loader(DataLoader(torch.arange(3)), name="tasks"):
            for _ in inner:
                update(model, optimizer)
    assert caplog.text.count("loader 'tasks': step 1 was saved although") == caplog.text.count("still uses") == 1


def _numbers(session: Any, count: int = 8, name: str | None = None) -> Any:
    return session.loader(DataLoader(torch.arange(count)), name=name)


def _end_step_once_per_batch(session: Any, model: Any, step: Callable[[], None]) -> None:
    for _ in _numbers(session):
        step()
        session.end_step()


def _two_steps_per_batch_of_which_the_second_is_saved(session: Any, model: Any, step: Callable[[], None]) -> None:
    for _ in _numbers(session):
        for _ in range(session.stats().interval):
            step()
            session.end_step()


def _accumulation(session: Any, model: Any, step: Callable[[], None]) -> None:
    for number, _ in enumerate(_numbers(session)):
        if number % 3 == 2:
            step()
        session.end_step()


def _a_batch_now_and_then(session: Any, model: Any, step: Callable[[], None]) -> None:
    """Of a second loader, for a term that not every step has."""
    loader, other = _numbers(session), iter(_numbers(session))
    for epoch in range(3):
        for number, _ in enumerate(loader):
            if number % 4 == epoch:
                next(other, None)
            step()


def _a_batch_now_and_then_with_end_step(session: Any, model: Any, step: Callable[[], None]) -> None:
    other = iter(_numbers(session))
    for number, _ in enumerate(_numbers(session)):
        if number % 3 == 0:
            next(other)
        step()
        session.end_step()


def _two_iterators_that_begin_again(session: Any, model: Any, step: Callable[[], None]) -> None:
    short, long = _numbers(session, 3), _numbers(session, 5)
    one, two = iter(short), iter(long)
    for _ in range(12):
        if next(one, None) is None:
            one = iter(short)
            next(one)
        if next(two, None) is None:
            two = iter(long)
            next(two)
        step()


def _an_evaluation_in_mid_pass(session: Any, model: Any, step: Callable[[], None]) -> None:
    held_out = iter(_numbers(session, name="held out"))
    for number in range(12):
        if number % 4 == 0:
            model.eval()
            next(held_out)
            model.train()
        step()
        session.end_step()


def _an_evaluation_of_one_batch_before_each_pass(session: Any, model: Any, step: Callable[[], None]) -> None:
    loader, held_out = _numbers(session), iter(_numbers(session))
    for _ in range(3):
        model.eval()
        next(held_out)
        model.train()
        for _ in loader:
            step()


def _a_turn_to_batches_by_hand(session: Any, model: Any, step: Callable[[], None]) -> None:
    batches = iter(_numbers(session))
    for number in range(8):
        if number < 4:
            next(batches)
        step()
        session.end_step()


@pytest.mark.parametrize(
    ("loop", "interval"),
    [
        (_end_step_once_per_batch, 1),
        (_two_steps_per_batch_of_which_the_second_is_saved, 2),
        (_accumulation, 1),
        (_a_batch_now_and_then, 1),
        (_a_batch_now_and_then_with_end_step, 1),
        (_two_iterators_that_begin_again, 1),
        (_an_evaluation_in_mid_pass, 1),
        (_an_evaluation_of_one_batch_before_each_pass, 1),
        (_a_turn_to_batches_by_hand, 1),
    ],
)
def test_a_loop_whose_steps_end_with_their_batches_is_reported_nothing(pool, caplog, loop, interval):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, interval=interval) as session:
        loop(session, model, lambda: update(model, optimizer))
        assert session.step > 1
    assert not caplog.text


def _left_in_eval_mode(pool: Any, killed: int | None = None) -> list[Any]:
    """Passes of two batches, each begun in eval mode, as an evaluation behind the pass before leaves it."""
    model = net()
    optimizer = adam(model)
    given = []
    with lightck.attach(model, pool, optimizer=optimizer, resume=True) as session, suppress(KeyboardInterrupt):
        loader = session.loader(DataLoader(torch.arange(20), batch_size=2, shuffle=True))
        for epoch in range(loader.epoch, 4):
            for i, numbers in enumerate(loader, loader.start):
                model.train()
                if session.step == killed:
                    forward(model)
                    settled(session, killed)
                    crashed(pool)
                    raise KeyboardInterrupt
                given.append((epoch, i, numbers.tolist()))
                update(model, optimizer)
                if i == 1:
                    break
            model.eval()
    return given


@pytest.mark.parametrize("killed", [2, 4, 6])
def test_no_batch_is_lost_where_a_pass_begins_in_eval_mode(folder, pool, commits_early, killed):
    """The checkpoint before it closes at its first ``next()``, and so counts nothing of it."""
    torch.manual_seed(7)
    plain = _left_in_eval_mode(folder / "plain.pool")
    torch.manual_seed(7)
    _left_in_eval_mode(pool, killed)
    assert _left_in_eval_mode(folder / "crashed.pool") == plain[killed:]


def _with_evaluations(pool: Any, begin: Callable[[Any], Any], killed: int | None = None) -> list[Any]:
    """One pass; in mid-pass an evaluation takes batches from a session loader too, and a scheduler steps behind it."""
    model = net()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    rates = []
    with lightck.attach(model, pool, optimizer=optimizer, resume=True) as session, suppress(KeyboardInterrupt):
        loader = session.loader(DataLoader(torch.arange(12)))
        validation = begin(session.loader(DataLoader(torch.arange(100))))
        for _ in loader:
            if session.step == killed:
                settled(session, killed)
                crashed(pool)
                raise KeyboardInterrupt
            update(model, optimizer)
            if session.step % 2:
                model.eval()
                validation()
                model.train()
                scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
    return rates


def _endless(loader: Any) -> Any:
    batches = iter(loader)
    return lambda: next(batches)


def _anew(loader: Any) -> Any:
    """Its iterator is kept until the next evaluation."""
    kept = []

    def two_batches() -> None:
        kept.append(iter(loader))
        next(kept[-1]), next(kept[-1])

    return two_batches


@pytest.mark.parametrize("killed", range(3, 8))
@pytest.mark.parametrize("begin", [_endless, _anew])
def test_an_evaluation_that_is_held_in_mid_pass_ends_no_checkpoint(folder, pool, commits_early, begin, killed):
    """Updates were made since it was fetched from, on batches of another loader."""
    plain = _with_evaluations(folder / "plain.pool", begin)
    _with_evaluations(pool, begin, killed)
    assert _with_evaluations(folder / "crashed.pool", begin) == plain[killed:]


def test_a_batch_that_was_fetched_in_eval_mode_before_its_checkpoint_closed_is_reported(pool, caplog):
    """The first pass of a loader: an evaluation, or a training that calls ``model.train()`` late."""
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        update(model, optimizer)
        model.eval()
        for _ in session.loader(DataLoader(torch.arange(3))):
            model.train()
            update(model, optimizer)
    assert caplog.text.count("step 1 was saved although the loop still uses its batch") == 1


def test_numbers_of_numpy_in_a_loader_are_numbers(pool):
    model = net()
    optimizer = adam(model)
    for _ in range(2):
        with lightck.attach(model, pool, optimizer=optimizer, resume=True) as session:
            for _ in session.loader(DataLoader(torch.arange(8), batch_size=2, num_workers=np.int64(1))):
                update(model, optimizer)
                break
    assert session.step == 2


def test_state_moves_to_a_device_with_its_parameters_but_not_its_step_count(pool, monkeypatch):
    """A device that holds no bytes stands for any; it is let pass here."""
    monkeypatch.setattr(restore, "refuse_unstorable_tensors", lambda *_: None)
    pool_with(pool)
    model = net().to("meta")
    optimizer = adam(model)
    lightck.recover(pool, model, optimizer)
    state = optimizer.state[model[0].weight]
    assert {key: value.device.type for key, value in state.items()} == {
        "step": "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }


def test_an_attach_that_fails_at_its_end_leaves_nothing_open(pool, monkeypatch):
    """As where a device refuses its random state: the next attach is the first one."""
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 2)

    def refuses(self: Resumed) -> None:
        raise RuntimeError("refused")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="refused"):
        patch.setattr(Resumed, "set_rng", refuses)
        lightck.attach(model, pool, optimizer=optimizer, resume=True)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True) as session:
        assert session.step == 2
