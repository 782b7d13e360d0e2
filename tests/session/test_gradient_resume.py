"""A training with ``Gradients`` is recovered at each step, and goes on after a crash, with the bits of one that was
never interrupted."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import batch, crashed, everything, is_step, kill_at, killed_child, net, poke, running_child, same

import lightck
from lightck.errors import CheckpointExistsError, DriftError, FormatError, NoCheckpointError
from lightck.pool.gradient_reader import checkpoint_of, committed
from lightck.pool.reader import open_pool
from lightck.session import capture
from lightck.state.fingerprint import fingerprint
from lightck.strategy.gradients import Gradients

STEPS = 8
Made = tuple[nn.Module, torch.optim.Optimizer]


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, **options)


def momentum(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **options)


def iterate(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int, inputs: Any = batch) -> None:
    for number in range(first, first + steps):
        optimizer.zero_grad()
        model(inputs(number)).float().sum().backward()
        optimizer.step()


def uninterrupted(make: Callable[[], Made], steps: int, inputs: Any = batch) -> Any:
    model, optimizer = make()
    iterate(model, optimizer, 0, steps, inputs)
    return everything(model, optimizer)


def assert_each_step_is_recovered(pool: Path, make: Callable[[], Made], inputs: Any = batch, n: int = 3) -> None:
    model, optimizer = make()
    with lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(base_every=n)) as session:
        for number in range(STEPS):
            iterate(model, optimizer, number, 1, inputs)
            session.flush()
            seen, checkpoint = everything(model, optimizer), lightck.recover(pool)
            assert checkpoint.rejected == ()
            assert (checkpoint.step, is_step(checkpoint, seen)) == (number + 1, True)
            other, other_optimizer = make()
            lightck.recover(pool, other, other_optimizer)
            assert same(everything(other, other_optimizer), seen)


# -- recovery --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["foreach", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", [adamw, momentum])
def test_each_step_is_recovered(pool, optimizer, dtype, way):
    if optimizer is momentum and way == "fused" and dtype is torch.bfloat16:
        pytest.skip("torch computes other bits at each run")

    def make() -> Made:
        model = net(width=37).to(dtype)
        return model, optimizer(model, **{way: True})

    assert_each_step_is_recovered(pool, make, lambda number: batch(number).to(dtype))


class Sleepers(nn.Module):
    """Its parameters have gradients in some steps only, so the state of some is created late."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(4, 3) for _ in range(4))

    def forward(self, number: int) -> torch.Tensor:
        awake = ((0, 1), (1,), (0, 1), (1, 2), (0,), (0, 2), (3, 0), (0, 1))[number]
        return sum(self.parts[i](batch(number)) for i in awake)


@pytest.mark.parametrize("n", [2, 3, 6])
def test_each_step_is_recovered_if_optimizer_state_is_created_late(pool, n):
    """The base of a parameter was written before it had state, and the update that creates the state is made again."""
    assert_each_step_is_recovered(pool, lambda: ((model := Sleepers()), adamw(model)), lambda number: number, n)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out, self.mean = nn.Embedding(50, 6, sparse=True), nn.Linear(6, 2), nn.BatchNorm1d(2)

    def forward(self, number: int) -> torch.Tensor:
        words = torch.randint(0, 50, (5 + number,), generator=torch.Generator().manual_seed(number))
        return self.mean(self.out(self.table(words))).square()


def test_each_step_is_recovered_with_sparse_gradients_and_buffers(pool):
    def make() -> Made:
        return (model := Words()), torch.optim.Adagrad(model.parameters(), lr=0.1)

    assert_each_step_is_recovered(pool, make, lambda number: number)


def test_what_is_recovered_while_a_training_writes_is_exact(pool):
    """Homes and records are overwritten while they are read; a reader never sees a mix."""
    seen = {}
    model = net()
    optimizer = adamw(model)
    for step in range(1, 301):
        iterate(model, optimizer, step - 1, 1, lambda number: batch(number % 20))
        seen[step] = everything(model, optimizer)

    def work() -> None:
        model = net()
        optimizer = adamw(model)
        with lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(base_every=3)) as session:
            iterate(model, optimizer, 0, 3, lambda number: batch(number % 20))
            session.flush()
            os.write(write, b"begun")
            iterate(model, optimizer, 3, 297, lambda number: batch(number % 20))

    read, write = os.pipe()
    with closing(os.fdopen(read, "rb")) as begun, running_child(work):
        os.close(write)
        assert begun.read(5) == b"begun"
        steps = []
        while not steps or (steps[-1] < 300 and len(steps) < 40):
            checkpoint = lightck.recover(pool)
            assert is_step(checkpoint, seen[checkpoint.step]), checkpoint.step
            steps.append(checkpoint.step)
    assert len(set(steps)) > 1


def test_a_pool_without_a_checkpoint_is_named_as_such(pool):
    model = net()
    with lightck.attach(model, pool, optimizer=(optimizer := adamw(model)), strategy=Gradients()):
        for step in (None, 3):
            with pytest.raises(NoCheckpointError, match="holds no checkpoint yet"):
                lightck.recover(pool, step=step)
        iterate(model, optimizer, 0, 1)


# -- resume ----------------------------------------------------------------------------------------------------------


def test_a_crashed_training_goes_on_bit_for_bit(pool):
    """A crash after each update, and each process makes two updates."""

    def make() -> Made:
        return (model := net()), adamw(model)

    model, optimizer = make()
    with lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(base_every=3)) as session:
        iterate(model, optimizer, 0, 5)
        session.flush()
        path = crashed(pool)
    for process in range(4):
        model, optimizer = net(seed=process + 1), None
        optimizer = adamw(model)
        strategy = Gradients(base_every=3)
        with lightck.attach(model, path, optimizer=optimizer, resume=True, strategy=strategy) as session:
            assert session.recovered is not None
            assert session.recovered.step == session.step == 5 + 2 * process
            iterate(model, optimizer, session.step, 2)
            session.flush()
            path = crashed(path, f"crashed-{process}.pool")
    assert same(everything(model, optimizer), uninterrupted(make, 13))
    assert is_step(lightck.recover(path), everything(model, optimizer))


def test_a_model_that_recover_has_restored_goes_on(pool):
    def make() -> Made:
        return (model := net()), adamw(model)

    model, optimizer = make()
    with lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(base_every=3)):
        iterate(model, optimizer, 0, 6)
    other, other_optimizer = make()
    lightck.recover(pool, other, other_optimizer)
    with lightck.attach(other, pool, optimizer=other_optimizer, strategy=Gradients(base_every=3)) as session:
        iterate(other, other_optimizer, session.step, 4)
    assert same(everything(other, other_optimizer), uninterrupted(make, 10))
    assert is_step(lightck.recover(pool), everything(other, other_optimizer))


@pytest.mark.parametrize("restores_itself", [False, True], ids=["attach restores", "recover restores"])
def test_older_base_that_was_used_is_kept_until_the_next_checkpoint(pool, restores_itself):
    """The base of a unit is damaged. The training continues from the older one, and the next checkpoint must not be
    written over it before it commits: here, the process ends when all units are in their homes, and nothing else."""
    model = net()
    optimizer = adamw(model)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(base_every=3)):
        iterate(model, optimizer, 0, 9)
    seen = everything(model, optimizer)
    with closing(open_pool(str(pool), gradients=True)) as reader:
        homes = reader.superblock.homes
        checkpoint = checkpoint_of(reader, committed(reader)[0])
        base = next(one for one in checkpoint.bases() if one.entry.name == "model/0.weight")
    poke(pool, base.offset, bytes([pool.read_bytes()[base.offset] ^ 1]))
    model = net(seed=1)
    optimizer = adamw(model)
    if restores_itself:
        lightck.recover(pool, model, optimizer)
    strategy = Gradients(base_every=3)
    with lightck.attach(model, pool, optimizer=optimizer, resume=not restores_itself, strategy=strategy) as session:
        before = pool.read_bytes()
        iterate(model, optimizer, 9, 1)
        session.flush()
        image = crashed(pool)
        after = pool.read_bytes()
    assert is_step(lightck.recover(image), everything(model, optimizer))
    torn = bytearray(before)
    for offset, nbytes in homes:
        torn[offset : offset + nbytes] = after[offset : offset + nbytes]
    poke(image, 0, bytes(torn))
    checkpoint = lightck.recover(image)
    assert (checkpoint.step, is_step(checkpoint, seen)) == (9, True)


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.fixture
def path(pool: Path) -> Path:
    """A pool with gradient records."""
    model = net()
    optimizer = adamw(model)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(base_every=3)):
        iterate(model, optimizer, 0, 4)
    return pool


def test_a_pool_is_not_overwritten_unasked(path):
    model = net()
    with pytest.raises(CheckpointExistsError, match="holds step 4"):
        lightck.attach(model, path, optimizer=adamw(model), strategy=Gradients())


def test_another_model_or_optimizer_is_refused(path):
    model = net(width=9)
    with pytest.raises(DriftError, match="does not fit"):
        lightck.attach(model, path, optimizer=adamw(model), resume=True, strategy=Gradients(base_every=3))
    model = net()
    with pytest.raises(DriftError, match="holds the state of AdamW, and this run has SGD"):
        lightck.attach(model, path, optimizer=momentum(model), resume=True, strategy=Gradients(base_every=3))


def test_a_pool_of_another_strategy_is_refused(path):
    model = net()
    with pytest.raises(FormatError, match="holds gradient records"):
        lightck.attach(model, path, optimizer=adamw(model), resume=True)
    with lightck.attach(model, path, optimizer=adamw(model), overwrite=True):
        pass


# -- a damaged base --------------------------------------------------------------------------------------------------


def damage_a_base(pool: Path) -> None:
    """Flip a bit of the base of the newest checkpoint that is needed longest, in which all its bytes are old."""
    with closing(open_pool(str(pool), gradients=True)) as reader:
        bases = list(checkpoint_of(reader, committed(reader)[0]).bases())
        offset = min(bases, key=lambda base: base.step).offset
    with open(pool, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("site", ["header", "block", "manifest", "sealed"])
def test_a_crash_after_a_resume_from_an_older_base_loses_nothing(pool, site):
    """The older base that stood in for the damaged one is not overwritten before the next checkpoint is committed."""

    def make() -> Made:
        model = net()
        return model, adamw(model)

    model, optimizer = make()
    with lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(base_every=3)):
        iterate(model, optimizer, 0, STEPS)
    seen = everything(model, optimizer)
    damage_a_base(pool)

    def resumed() -> None:
        model, optimizer = make()
        lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(base_every=3), resume=True)
        kill_at(site)
        iterate(model, optimizer, STEPS, 3)

    killed_child(resumed)
    model, optimizer = make()
    assert lightck.recover(pool, model, optimizer).step == STEPS
    assert same(everything(model, optimizer), seen)


# -- another machine ---------------------------------------------------------------------------------------------------


def trained_elsewhere(pool: Path, monkeypatch: Any, steps: int, **conditions: Any) -> Any:
    """Train as under another fingerprint, and return the state at the end."""
    with monkeypatch.context() as patch:
        patch.setattr(capture, "fingerprint", lambda: {**fingerprint(), **conditions})
        model = net()
        optimizer = adamw(model)
        with lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(3)):
            iterate(model, optimizer, 0, steps)
        return everything(model, optimizer)


@pytest.mark.parametrize("conditions", [{"torch": "2.0.0"}, {"vendor": "Other"}, {"cpu": "NONE"}], ids=str)
def test_updates_that_another_machine_makes_again_are_not_called_exact(pool, conditions, monkeypatch, caplog):
    seen = trained_elsewhere(pool, monkeypatch, STEPS, **conditions)
    ((name, value),) = conditions.items()
    said = f"under other conditions than in the training ({name} {value} -> {fingerprint()[name]})"
    checkpoint = lightck.recover(pool)
    assert is_step(checkpoint, seen), "here it gives the same bits; nobody knows"
    assert (checkpoint.step, checkpoint.exact) == (STEPS, False)
    assert said in checkpoint.reason
    assert f"updates are replayed {said}" in caplog.text
    model = net()
    with lightck.attach(model, pool, optimizer=adamw(model), strategy=Gradients(3), resume=True) as session:
        assert (session.recovered.step, session.recovered.exact) == (STEPS, False)
        assert said in session.recovered.reason
    assert f"the training does not go on bit for bit: updates were replayed {said}" in caplog.text


def test_a_full_checkpoint_of_another_machine_is_exact(pool, monkeypatch):
    """No update is made again for it."""
    trained_elsewhere(pool, monkeypatch, 1, torch="2.0.0")
    assert (lightck.recover(pool).exact, lightck.recover(pool).reason) == (True, "")


def test_another_number_of_threads_is_exact(pool, monkeypatch):
    """Updates are made again by as many as in the training, where that decides bits."""
    trained_elsewhere(pool, monkeypatch, STEPS, threads=7)
    assert lightck.recover(pool).exact
