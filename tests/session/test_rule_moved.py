"""Rules 5 and 6: writes that nobody announces, and tensors that rest and are left out."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from toys import BIG, adam, copied, crashed, damage, everything, forward, is_step, net, same, train, weights

import lightck
from lightck.cli.stored_checkpoints import COMMITTED, find_checkpoints, open_reader
from lightck.errors import CorruptPoolError, NoCheckpointError, StateChangedError
from lightck.pipeline import guard
from lightck.pipeline.guard import WriteGuard
from lightck.pipeline.sources import UnchangedTensors
from lightck.pool.reader import StoredCheckpoint, open_pool
from lightck.pool.writer import PoolWriter
from lightck.tiers.copying import copy_from_tier, pool_sender

ROWS = 4096  # rows of 4 floats: 64 kB, copied in the background


def update(model: nn.Module, optimizer: Any, number: int = 0) -> None:
    optimizer.zero_grad()
    forward(model, number).backward()
    optimizer.step()


# -- 5. between boundary and forward ---------------------------------------------------------------------------------


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.mul_(0.5)


def replaced(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.data * 0.5


def state_in_place(model: nn.Module) -> None:
    model.optimizer.state[model[0].weight]["exp_avg"].mul_(0.5)


def state_replaced(model: nn.Module) -> None:
    state = model.optimizer.state[model[0].weight]
    state["exp_avg"] = state["exp_avg"] * 0.5


@pytest.mark.parametrize("write", [in_place, replaced, state_in_place, state_replaced])
def test_write_between_boundary_and_forward_belongs_to_the_next_step(pool, write):
    """The loop makes it again when it continues from the boundary. The first one costs its checkpoint, with a reason;
    from then on the tensor is copied at the boundary itself."""
    model = net(BIG)
    optimizer = adam(model)
    object.__setattr__(model, "optimizer", optimizer)
    held = {}
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(4):
            update(model, optimizer, number)
            held[number + 1] = everything(model, optimizer)
            session.end_step()
            write(model)
        forward(model)
        assert session.flush() == 4
        assert session.stats().skipped == 1
    for step in (3, 4):
        assert is_step(lightck.recover(pool, step=step), held[step])


def swap(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(-1.0)


def test_weights_swapped_for_an_evaluation_do_not_reach_the_checkpoint(pool):
    """Behind the boundary and without ``paused()`` they cost one checkpoint; none ever holds them."""
    model = net(BIG)
    optimizer = adam(model)
    held = {}
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(4):
            update(model, optimizer, number)
            session.end_step()
            held[number + 1] = everything(model, optimizer)
            swap(model)
            model.eval()
            forward(model)
            model.train()
            swap(model)
            forward(model)
        assert session.flush() == 4
        assert session.stats().skipped <= 1
    for step in (3, 4):
        assert is_step(lightck.recover(pool, step=step), held[step])


@pytest.mark.parametrize("training", [True, False])
def test_weights_swapped_inside_paused_cost_nothing(pool, training):
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(3):
            update(model, optimizer, number)
            session.end_step()
            seen = everything(model, optimizer)
            with session.paused():
                swap(model)
                model.train(training)
                forward(model)  # inside paused() a training forward releases no checkpoint
                swap(model)
            model.train()
            forward(model)
            assert session.flush() == number + 1
            assert is_step(lightck.recover(pool), seen)
        assert session.stats().skipped == 0


# -- 5. by a forward -------------------------------------------------------------------------------------------------


class Writer(nn.Module):
    """Its forward writes to a parameter, as weight normalisation by hand does."""

    def __init__(self, method: str = "in place") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.method = method
        self.other = nn.Linear(4, BIG)
        self.scaled = nn.Parameter(torch.rand(ROWS, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.method == "in place":
                self.scaled.mul_(0.999)
            elif self.method == "data":
                self.scaled.data.mul_(0.999)
        return self.other(x).sum() + (self.scaled @ x[0]).sum()


def test_checkpoint_that_a_forward_wrote_to_is_dropped_and_the_tensor_counts_as_a_buffer(pool, caplog):
    model = Writer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.ones(2, 4)
    held = {}

    def iteration() -> None:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
        held[session.step] = everything(model, optimizer)

    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for _ in range(6):
            iteration()
        stats = session.stats()
        assert (stats.skipped, stats.checkpoints) == (1, 4)  # checkpoint 1 is given up, 2 to 5 are there
    said = [r.message for r in caplog.records if "given up" in r.message]
    assert len(said) == 1
    assert "step 1" in said[0]
    assert "model/scaled" in said[0]
    for step in (5, 6):
        assert is_step(lightck.recover(pool, step=step), held[step])

    model = Writer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True) as session:
        for _ in range(3):
            iteration()
        assert session.stats().skipped == 0, "after a restart it has to be known"
    for step in (8, 9):
        assert is_step(lightck.recover(pool, step=step), held[step])


def test_check_variable_catches_a_data_write(pool, monkeypatch):
    monkeypatch.setenv("LIGHTCK_CHECK", "1")
    model = Writer("none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.ones(2, 4)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
        session.flush()
        optimizer.step()
        model(x).backward()
        model.scaled.data[ROWS // 2, 2] += 1.0
        with pytest.raises(StateChangedError, match=r"model/scaled.*paused"):
            optimizer.step()
        assert session.committed == 3, "the checkpoint of step 4 has bytes from two moments"
        for _ in range(2):  # from here on it is copied at once
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
            model.scaled.data[ROWS // 2, 2] += 1.0
        seen = weights(model)
    assert same(dict(lightck.recover(pool).model), seen)


@pytest.fixture
def before_the_copies(monkeypatch):
    """What is called between a boundary and the copies of its checkpoint."""
    work: list[Any] = []
    begin = PoolWriter.begin

    def begin_late(self: PoolWriter, *args: Any) -> Any:
        for each in work:
            each()
        return begin(self, *args)

    monkeypatch.setattr(PoolWriter, "begin", begin_late)
    return work


def test_data_write_before_the_copy_costs_its_checkpoint_and_the_next_one_is_right(
    pool, before_the_copies, caplog, monkeypatch
):
    """The write moves no version counter: the checksums of the boundary reveal it. The training goes on."""
    monkeypatch.delenv("LIGHTCK_CHECK", raising=False)
    model = Writer("none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.ones(2, 4)
    seen = {}
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(1, 9):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
            seen[number] = everything(model, optimizer)
            before_the_copies[:] = [lambda: model.scaled.data[5, 2].add_(1.0)] if number in (2, 5) else []
            session.end_step()
        model(x)
        session.flush()
        assert session.stats().skipped == 1, "the checkpoint of step 2: later the tensor is copied at the boundary"
        for step in (7, 8):
            assert is_step(lightck.recover(pool, step=step), seen[step])
    said = [r.message for r in caplog.records if "given up" in r.message]
    assert len(said) == 1
    assert "model/scaled" in said[0]


def test_data_write_is_found_in_turn_in_a_large_model(pool, before_the_copies, caplog, monkeypatch):
    """Beyond the first checkpoints so many bytes are read for each; in time they meet the culprit. The older ones,
    which may hold such bytes too, are struck when a right one is there."""
    monkeypatch.delenv("LIGHTCK_CHECK", raising=False)
    monkeypatch.setattr(guard, "BUDGET_NBYTES", 1)
    model = Writer("none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.ones(2, 4)
    with lightck.attach(model, pool, optimizer=optimizer, slots=5) as session:
        for number in range(1, 12):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
            before_the_copies[:] = [lambda: model.scaled.data[5, 2].add_(1.0)] if number > 4 else []
            session.end_step()
            session.flush()
            if "given up" in caplog.text:
                break
        seen = everything(model, optimizer)
        assert 5 <= number <= 7, "there are two sources of one block each"
        assert held_steps(pool) == [number, 3], "those since the last one that was compared whole are struck"
    for step in range(4, number):
        with pytest.raises((NoCheckpointError, CorruptPoolError)):
            lightck.recover(pool, step=step)
    assert is_step(lightck.recover(pool), seen)


def held_steps(pool: Any) -> list[int]:
    reader = open_pool(str(pool))
    try:
        return [checkpoint.step for checkpoint in reader.checkpoints() if isinstance(checkpoint, StoredCheckpoint)]
    finally:
        reader.close()


def test_paused_keeps_boundaries_and_copies_away(pool):
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(2):
            update(model, optimizer, number)
            seen = everything(model, optimizer)
            kept = weights(model)
            with session.paused():
                with torch.no_grad():
                    for p in model.parameters():
                        p.zero_()
                forward(model)  # a training forward, and no boundary
                assert session.iteration == number
                model.load_state_dict(kept)
            forward(model)
            assert session.iteration == number + 1
            session.flush()
            assert is_step(lightck.recover(pool), seen)
        assert session.stats().skipped == 0


def test_paused_after_the_boundary_waits_for_the_copies(pool):
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        update(model, optimizer)
        session.end_step()
        seen = everything(model, optimizer)
        model.train()
        forward(model)
        with session.paused():
            kept = [p.data for p in model.parameters()]
            for p in model.parameters():
                p.data = torch.zeros_like(p)  # pointers are swapped, nothing is copied back
            for p, data in zip(model.parameters(), kept, strict=True):
                p.data = data
        session.flush()
        assert is_step(lightck.recover(pool), seen)
        assert session.stats().skipped == 0


# -- 6. left out -----------------------------------------------------------------------------------------------------


class Frozen(nn.Module):
    """Large frozen parameters below a small head."""

    def __init__(self, parts: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.ParameterList(nn.Parameter(torch.rand(ROWS, 4), requires_grad=False) for _ in range(parts))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.base:
            x = x + part[: len(x)]
        return self.head(x)


def frozen_run(pool: Any, **options: Any) -> tuple[Any, ...]:
    model = Frozen()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.01)
    return model, optimizer, lightck.attach(model, pool, optimizer=optimizer, **options)


def written(model: nn.Module, optimizer: Any, session: Any) -> tuple[int, int]:
    """One iteration: bytes of its checkpoint, and how many tensors it left out."""
    before = session.stats().bytes_written
    update(model, optimizer)
    session.flush()
    return session.stats().bytes_written - before, session.stats().left_out


def test_frozen_parameters_are_left_out_after_two_whole_checkpoints(pool):
    model, optimizer, session = frozen_run(pool)
    with session:
        checkpoints = [written(model, optimizer, session) for _ in range(5)]
        seen = everything(model, optimizer)
    base = 3 * ROWS * 16
    assert [left_out for _, left_out in checkpoints] == [0, 0, 3, 3, 3]
    assert all(nbytes > base for nbytes, _ in checkpoints[:2])
    assert all(nbytes < base / 2 for nbytes, _ in checkpoints[2:])
    assert is_step(lightck.recover(pool), seen)


def test_left_out_parameter_that_moved_comes_back(pool):
    model, optimizer, session = frozen_run(pool)
    with session:
        for _ in range(4):
            written(model, optimizer, session)
        with torch.no_grad():
            model.base[1].mul_(2.0)
        assert written(model, optimizer, session)[1] == 2
        assert is_step(lightck.recover(pool), everything(model, optimizer))
        left_out = [written(model, optimizer, session)[1] for _ in range(3)]
        assert left_out == [2, 3, 3]
        assert is_step(lightck.recover(pool), everything(model, optimizer))
        model.base[0].data = model.base[0].data.clone()
        assert written(model, optimizer, session)[1] == 2
        model.base[2].requires_grad_(True)
        optimizer.add_param_group({"params": [model.base[2]]})
        assert written(model, optimizer, session)[1] == 2
        assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_first_checkpoints_after_attach_are_whole(pool):
    model, optimizer, session = frozen_run(pool)
    with session:
        for _ in range(4):
            written(model, optimizer, session)
    model, optimizer, session = frozen_run(pool, resume=True)
    with session:
        assert [written(model, optimizer, session)[1] for _ in range(4)] == [0, 0, 3, 3]
    for step in (7, 8):
        lightck.recover(pool, step=step)


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_hidden_write_to_a_left_out_tensor_is_found_before_the_next_checkpoint(pool, culprit, caplog):
    """All of a small model is read for each. The checkpoint is written whole, and nothing stops."""
    model, optimizer, session = frozen_run(pool)
    with session:
        for _ in range(4):
            written(model, optimizer, session)
        model.base[culprit].data[7, 1] += 1.0  # moves no version counter
        for number in range(4):
            assert written(model, optimizer, session)[1] == (0, 0, 2, 2)[number]
            assert is_step(lightck.recover(pool), everything(model, optimizer))
        said = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
        assert len(said) == 1, said
        assert f"model/base.{culprit}" in said[0]
        model.base[culprit].data[7, 1] += 1.0
        assert written(model, optimizer, session)[1] == 2
        assert is_step(lightck.recover(pool), everything(model, optimizer))
    model, optimizer, session = frozen_run(pool, resume=True)
    with session:
        assert [written(model, optimizer, session)[1] for _ in range(3)] == [0, 0, 2], "still known after a restart"


def test_name_of_the_tensor_is_known_to_the_very_checkpoint_that_holds_its_new_bytes(pool):
    model, optimizer, session = frozen_run(pool)
    with session:
        for _ in range(4):
            written(model, optimizer, session)
        model.base[1].data[7, 1] += 1.0
        written(model, optimizer, session)
        image = crashed(pool)
    model, optimizer, session = frozen_run(image, resume=True)
    with session:
        assert [written(model, optimizer, session)[1] for _ in range(3)] == [0, 0, 2]


def test_all_that_were_written_are_found_at_once_even_where_few_bytes_are_read(pool, caplog, monkeypatch):
    """A target network that follows by ``.data``: one is found in its turn, and then all."""
    monkeypatch.delenv("LIGHTCK_CHECK", raising=False)
    monkeypatch.setattr(guard, "BUDGET_NBYTES", 1)
    model, optimizer, session = frozen_run(pool)
    with session:
        for _ in range(5):
            written(model, optimizer, session)
        for p in model.base:
            p.data.mul_(0.5)
        assert written(model, optimizer, session)[1] == 0
        assert all(f"model/base.{n}" in caplog.text for n in range(3))
        assert [written(model, optimizer, session)[1] for _ in range(3)] == [0, 0, 0], "never taken for unchanged again"


def stale_run(pool: Any, monkeypatch: Any, slots: int = 4) -> tuple[Any, ...]:
    """A training whose steps 6 and 7 hold old bytes of a frozen part, and that has not found it yet."""
    monkeypatch.delenv("LIGHTCK_CHECK", raising=False)
    model, optimizer, session = frozen_run(pool, slots=slots)
    for _ in range(5):
        written(model, optimizer, session)
    monkeypatch.setattr(UnchangedTensors, "reread", lambda *args: (set(), 0))
    model.base[1].data[7, 1] += 1.0
    for _ in range(2):
        written(model, optimizer, session)
    return model, optimizer, session


def test_stale_checkpoints_are_struck_when_the_right_one_is_committed_and_not_before(pool, monkeypatch):
    """In every image of the pool the newest one is right, or nothing was known yet."""
    model, optimizer, session = stale_run(pool, monkeypatch)
    with session:
        monkeypatch.undo()
        monkeypatch.setattr(WriteGuard, "committed", lambda *args: None)  # a crash between the commit and the strike
        written(model, optimizer, session)
        seen = everything(model, optimizer)
        assert held_steps(pool) == [8, 7, 6, 5]
        image, damaged = crashed(pool, "unstruck.pool"), crashed(pool, "damaged.pool")
        monkeypatch.undo()
        written(model, optimizer, session)
        assert held_steps(pool) == [9, 8], "6 and 7 are struck, and 5 was overwritten"
    assert is_step(lightck.recover(image), seen)
    for step in (6, 7):
        with pytest.raises(CorruptPoolError, match="wrong bytes"):
            lightck.recover(image, step=step)
    with open_reader(str(image)) as reader:
        found = {each.step: each.state for each in find_checkpoints(reader)}
    assert found == {8: COMMITTED}
    again = frozen_run(image, resume=True)
    with again[2]:
        assert held_steps(image) == [8], "who continues from the right one strikes the others"
    damage(damaged, "model/head.weight", [8])
    with pytest.raises(CorruptPoolError, match="wrong bytes"):
        lightck.recover(damaged)


def test_a_stale_checkpoint_that_was_sent_to_a_tier_is_not_fetched(pool, tmp_path, monkeypatch):
    """A newer one in the tier says that it is stale."""
    model, optimizer, session = stale_run(pool, monkeypatch)
    tier, progress = tmp_path / "tier", lambda *_: nullcontext(lambda _: None)
    with session:
        session.flush()
        sender = pool_sender(pool, tier, "test")
        assert sender.send().step == 7
        monkeypatch.undo()
        monkeypatch.setattr(WriteGuard, "committed", lambda *args: None)  # the strike has not come yet
        written(model, optimizer, session)
        seen = everything(model, optimizer)
        assert sender.send().step == 8
        monkeypatch.undo()
    with pytest.raises(CorruptPoolError, match="wrong bytes"):
        copy_from_tier(tier, tmp_path / "seven.pool", step=7, progress=progress)
    copy_from_tier(tier, tmp_path / "eight.pool", progress=progress)
    assert is_step(lightck.recover(tmp_path / "eight.pool"), seen)


def test_pins_of_stale_checkpoints_end_with_a_warning_and_older_ones_stay(pool, caplog, monkeypatch):
    monkeypatch.delenv("LIGHTCK_CHECK", raising=False)
    model, optimizer, session = frozen_run(pool)
    with session:
        for _ in range(3):
            written(model, optimizer, session)
        good, seen = session.pin(), everything(model, optimizer)
        for _ in range(3):
            written(model, optimizer, session)
        audit = UnchangedTensors.reread
        monkeypatch.setattr(UnchangedTensors, "reread", lambda *args: (set(), 0))
        model.base[1].data[7, 1] += 1.0
        written(model, optimizer, session)
        stale = session.pin()
        monkeypatch.setattr(UnchangedTensors, "reread", audit)
        written(model, optimizer, session)
        assert f"the pinned checkpoints of steps {stale.step} are struck" in caplog.text
        assert is_step(lightck.recover(pool, step=good.step), seen)
        with pytest.raises((NoCheckpointError, CorruptPoolError)):
            lightck.recover(pool, step=stale.step)
        stale.release()
        written(model, optimizer, session)
        assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_parameter_whose_gradient_was_always_none_is_left_out_until_it_wakes(pool):
    model = Frozen()
    for p in model.base:
        p.requires_grad_(True)
    asleep = model.base[1]
    optimizer = adam(model)

    def iteration(wake: bool) -> int:
        optimizer.zero_grad()
        forward(model).backward()
        if not wake:
            asleep.grad = None
        optimizer.step()
        session.flush()
        return session.stats().left_out

    with lightck.attach(model, pool, optimizer=optimizer) as session:
        assert [iteration(wake=False) for _ in range(4)] == [0, 0, 1, 1]
        assert iteration(wake=True) == 0
        assert is_step(lightck.recover(pool), everything(model, optimizer))
        assert iteration(wake=False) == 0
        assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_left_out_bytes_survive_a_crash_in_each_later_checkpoint(pool):
    model, optimizer, session = frozen_run(pool)
    with session:
        for number in range(6):
            update(model, optimizer)
            session.flush()
            image = crashed(pool, f"{number}.pool")
            assert is_step(lightck.recover(image), everything(model, optimizer))
            image.unlink()


def test_audit_does_not_accuse_an_honest_training(pool, caplog):
    caplog.set_level(logging.INFO)
    model, optimizer, session = frozen_run(pool)
    with session:
        train(model, optimizer, 20)
    assert session.stats().skipped == session.stats().recopied == 0


# -- 5. the promise --------------------------------------------------------------------------------------------------


class Decayed(nn.Module):
    """A large table that is copied first, so that the copy of ``last`` begins long after the boundary."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(1 << 17, 64, sparse=True, _weight=torch.ones(1 << 17, 64))
        self.last = nn.Parameter(torch.rand(ROWS, 4))

    def forward(self, number: int) -> torch.Tensor:
        return self.table(torch.tensor([number])).sum() + (self.last.sum(0) ** 2).sum()


def decay(model: Decayed, optimizer: Any, session: Any, steps: int) -> None:
    """Each iteration begins with a write that must not be made twice."""
    for number in range(session.step, steps):
        with torch.no_grad():
            model.last.mul_(0.5)
        if session._pipeline._in_flight:
            copied(session)  # the batch takes its time: the copies end, that of ``last`` after the write to it
        optimizer.zero_grad()
        model(number).backward()
        optimizer.step()
        session.end_step()


def test_write_at_the_top_of_an_iteration_is_made_once_by_a_resumed_run(pool):
    """The loop writes behind the boundary, and again when it continues from it. Whenever the copy came, the checkpoint
    must hold the value of the boundary, or not be there."""

    def start(path: Any, **options: Any) -> tuple[Any, ...]:
        model = Decayed()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        return model, optimizer, lightck.attach(model, path, optimizer=optimizer, **options)

    run = start(pool)
    with run[2]:
        decay(*run, steps=4)
        image = crashed(pool)
        decay(*run, steps=6)
    again = start(image, resume=True)
    with again[2]:
        assert again[2].step >= 1
        decay(*again, steps=6)
    assert same(weights(again[0]), weights(run[0]))
