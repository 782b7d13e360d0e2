"""``Gradients`` with an interval: each update leaves a record, and each i-th is committed. What is recovered is the
newest commit, bit for bit, and at most i updates are lost."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import BIG, adam, batch, crashed, everything, is_step, kill_at, killed_child, net, same, train

import lightck
from lightck._native import lib
from lightck.errors import BackgroundError, UnsupportedError
from lightck.pool.format.gradients import CHAIN_COMMITTED
from lightck.pool.gradient_reader import GradientCheckpoint, checkpoint_of, committed, problems_of
from lightck.pool.listener import CommitListener
from lightck.pool.reader import open_pool
from lightck.session import outside_writes
from lightck.session.session import Session
from lightck.strategy.gradients import Gradients

ROUNDS = [(3, 2), (2, 5), *(pytest.param(*one, marks=pytest.mark.long) for one in ((2, 2), (6, 3), (5, 3), (4, 5)))]
"""``base_every`` and ``interval``."""


class Loop:
    """A training whose state after each step is known."""

    def __init__(self, pool: Path, n: int, interval: int, width: int = 8, **options: Any) -> None:
        self.pool, self.interval = pool, interval
        self.model = net(width)
        self.optimizer = adam(self.model)
        self.session = self._attached(Gradients(n), **options)
        self.seen: dict[int, Any] = {}

    def _attached(self, strategy: Gradients, **options: Any) -> Session:
        return lightck.attach(
            self.model, self.pool, optimizer=self.optimizer, strategy=strategy, interval=self.interval, **options
        )

    def run(self, steps: int) -> None:
        for _ in range(steps):
            train(self.model, self.optimizer, 1, self.session.step)
            self.seen[self.session.step] = everything(self.model, self.optimizer)
            self.session.end_step()

    def assert_recovers(self, path: Path | None = None) -> lightck.Checkpoint:
        checkpoint = lightck.recover(self.pool if path is None else path)
        assert is_step(checkpoint, self.seen[checkpoint.step]), checkpoint.step
        return checkpoint


@pytest.fixture
def loop(pool: Path) -> Iterator[Loop]:
    """After some commits: the newest is that of step 12."""
    made = Loop(pool, 6, 3)
    made.run(12)
    made.session.flush()
    yield made
    made.session.abandon()


def newest(pool: Path) -> tuple[int, int, list[int], bool]:
    """The step of the newest checkpoint, how many records before its own it needs, which steps of its chain were
    committed, and whether it holds no damage."""
    with closing(open_pool(str(pool), gradients=True)) as reader:
        checkpoint: GradientCheckpoint = checkpoint_of(reader, committed(reader)[0])
        commits = [one.step for one in checkpoint.part.chain if one.flags & CHAIN_COMMITTED]
        is_intact = problems_of(reader, checkpoint) == []
        return checkpoint.step, len(checkpoint.needed_records()), commits, is_intact


# -- what is recovered -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [8, BIG], ids=["at the boundary", "in the background"])
@pytest.mark.parametrize(("n", "interval"), ROUNDS)
def test_at_each_moment_the_newest_commit_is_recovered(pool, n, interval, width):
    loop = Loop(pool, n, interval, width)
    for step in range(1, 4 * interval + 2):
        loop.run(1)
        loop.session._pipeline.finish()
        due = step - step % interval
        assert loop.session.committed == (due or None)
        if due:
            checkpoint = loop.assert_recovers(crashed(pool))
            assert (checkpoint.step, checkpoint.rejected) == (due, ())
    loop.session.abandon()
    other = net(width)
    lightck.recover(pool, other, optimizer := adam(other))
    assert same(everything(other, optimizer), loop.seen[4 * interval])


def test_in_the_long_run_a_checkpoint_needs_the_records_of_a_round(loop):
    step, needed, commits, is_intact = newest(loop.pool)
    assert (step, needed, is_intact) == (12, 4, True)  # the oldest base is of step 7
    assert commits == [3, 6, 9]


class Average:
    """An object whose state is asked for at commits only."""

    def __init__(self) -> None:
        self.values, self.n_asked = torch.zeros(4000), 0

    def state_dict(self) -> dict[str, Any]:
        self.n_asked += 1
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


def test_a_step_between_commits_stores_what_the_update_consumed_and_nothing_else(pool):
    average = Average()
    loop = Loop(pool, 4, 4, state={"average": average})
    loop.run(9)
    loop.session._pipeline.finish()
    asked, written = average.n_asked, loop.session.stats().bytes_written
    loop.run(1)
    loop.session._pipeline.finish()
    of_record = loop.session.stats().bytes_written - written
    assert average.n_asked == asked
    assert 0 < of_record < average.values.nbytes
    loop.run(2)
    loop.session._pipeline.finish()
    assert average.n_asked > asked
    assert loop.session.stats().bytes_written - written > average.values.nbytes
    loop.session.abandon()


class Heard(CommitListener):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def committed(self, writer: Any, step: int) -> None:
        self.steps.append(step)


def test_listeners_hear_of_commits_only(loop):
    heard = Heard()
    loop.session._pipeline.events.add(heard)
    before = loop.session.stats().checkpoints
    loop.run(7)
    loop.session._pipeline.finish()
    assert heard.steps == [15, 18]
    assert loop.session.stats().checkpoints == before + 2


class Counted(nn.Module):
    """Has buffers, and layers that are used in some steps only, whose optimizer state is created between commits."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.norm = nn.ModuleList(nn.Linear(4, 3) for _ in range(4)), nn.BatchNorm1d(3)

    def forward(self, number: int) -> torch.Tensor:
        awake = ((0, 1), (1,), (0, 1), (1, 2), (0,), (0, 2), (3, 0), (0, 1))[number]
        return self.norm(sum(self.parts[i](batch(number)) for i in awake)) * torch.arange(3.0)


class Words(nn.Module):
    """Its gradients are sparse, and have another size at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out, self.mean = nn.Embedding(50, 6, sparse=True), nn.Linear(6, 2), nn.BatchNorm1d(2)

    def forward(self, number: int) -> torch.Tensor:
        words = torch.randint(0, 50, (5 + number,), generator=torch.Generator().manual_seed(number))
        return self.mean(self.out(self.table(words))).square()


@pytest.mark.parametrize("kind", [Counted, Words])
@pytest.mark.parametrize("end_step", [True, False])
def test_buffers_and_late_state_and_sparse_gradients_are_those_of_the_commit(pool, kind, end_step):
    """Also in a loop without ``end_step``, whose steps close in the next forward."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        return (model := kind()), torch.optim.Adagrad(model.parameters(), lr=0.1)

    model, optimizer = make()
    seen = {}
    session = lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(3), interval=2)
    for number in range(8):
        optimizer.zero_grad()
        model(number).sum().backward()
        optimizer.step()
        seen[number + 1] = everything(model, optimizer)
        if end_step:
            session.end_step()
        session._pipeline.finish()
        if session.committed:
            other, other_optimizer = make()
            lightck.recover(crashed(pool), other, other_optimizer)
            assert same(everything(other, other_optimizer), seen[session.committed])
    session.abandon()


# -- holes -----------------------------------------------------------------------------------------------------------


def test_after_a_hole_nothing_is_stored_up_to_the_next_checkpoint_which_is_full(loop, caplog):
    caplog.set_level(logging.INFO)
    with torch.no_grad():
        loop.model[0].weight.clamp_(-0.01, 0.01)
    written = loop.session.stats().bytes_written
    loop.run(2)
    loop.session._pipeline.finish()
    assert loop.session.stats().bytes_written == written
    assert loop.assert_recovers(crashed(loop.pool)).step == 12
    loop.run(1)
    loop.session._pipeline.finish()
    assert newest(loop.pool) == (15, 0, [], True)
    assert loop.assert_recovers().step == 15
    assert "the next checkpoint after step 13 stores the whole state, and not gradients alone" in caplog.text
    assert "'model/0.weight' was written" in caplog.text


def test_a_hole_at_a_commit_makes_this_checkpoint_full(loop):
    loop.run(2)
    train(loop.model, loop.optimizer, 1, 14)
    with torch.no_grad():
        loop.model[0].weight.clamp_(-0.01, 0.01)
    loop.seen[15] = everything(loop.model, loop.optimizer)
    loop.session.end_step()
    loop.session._pipeline.finish()
    assert newest(loop.pool) == (15, 0, [], True)
    assert loop.assert_recovers().step == 15
    loop.run(3)
    loop.session._pipeline.finish()
    assert loop.assert_recovers().step == 18


@pytest.mark.parametrize("step", [13, 14, 15])
def test_a_gradient_that_is_written_before_its_copy_ended_gives_the_record_up(pool, caplog, step):
    """The step closes at the next forward, in which the gradient is written. What is stored then is of no use."""
    model = net(BIG)
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(3), interval=3)
    seen = {}

    def run(first: int, last: int) -> None:
        for number in range(first, last + 1):
            train(model, optimizer, 1, number - 1)
            seen[number] = everything(model, optimizer)

    run(1, step)
    consumed = [p.grad for p in model.parameters() if p.grad is not None]
    hook = model[0].register_forward_pre_hook(lambda *_: [one.zero_() for one in consumed] and None)
    run(step + 1, step + 1)
    hook.remove()
    assert session.stats().skipped == 1
    what = "checkpoint" if step == 15 else "gradient record"
    assert f"the {what} of step {step} is given up" in caplog.text
    for last in (step + 2, step + 3, step + 4, 22):
        run(last if last < 22 else step + 5, last)
        session._pipeline.finish()
        due = last - 1 - (last - 1) % 3
        assert session.committed == (12 if step == due == 15 else due)
        checkpoint = lightck.recover(crashed(pool))
        assert (checkpoint.step, is_step(checkpoint, seen[session.committed])) == (session.committed, True)
    assert newest(pool)[1] > 0, "the chain goes on"
    session.abandon()


def test_a_commit_that_is_refused_is_a_hole(pool):
    loop = Loop(pool, 4, 2, pause_on_nonfinite=True)
    loop.run(9)
    good = {name: value.clone() for name, value in loop.model.state_dict().items()}
    with torch.no_grad():
        loop.model[0].bias.fill_(float("nan"))
    loop.run(1)
    loop.session._pipeline.finish()
    assert loop.session.committed == 8
    loop.model.load_state_dict(good)
    for state in loop.optimizer.state.values():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()
    loop.run(4)
    loop.session._pipeline.finish()
    assert loop.session.committed == 14
    assert loop.assert_recovers().step == 14
    loop.session.abandon()


@pytest.mark.parametrize("end", ["flush", "paused"])
def test_weights_that_are_swapped_between_commits(loop, end):
    loop.run(1)
    kept = loop.model[0].weight.detach().clone()
    with loop.session.paused(), torch.no_grad():
        loop.model[0].weight.zero_()
        loop.model[0].weight.copy_(kept)
    if end == "flush":
        loop.session.flush()
        assert loop.assert_recovers().step == 13
    loop.run(5)
    loop.session._pipeline.finish()
    assert loop.assert_recovers().step == 18


# -- flush and close -------------------------------------------------------------------------------------------------


def test_flush_between_commits_makes_the_current_step_durable(loop):
    for step in (13, 14):
        loop.run(1)
        assert loop.session.flush() == step
        assert newest(loop.pool) == (step, 0, [], True)
        assert loop.assert_recovers(crashed(loop.pool)).step == step
    loop.run(1)
    loop.session._pipeline.finish()
    assert loop.session.committed == 15
    assert loop.assert_recovers().step == 15
    loop.run(6)
    loop.session._pipeline.finish()
    assert loop.session.committed == 21
    assert newest(loop.pool)[1] > 0, "the chain goes on"
    assert loop.assert_recovers().step == 21


def test_flush_before_the_step_is_closed_makes_it_durable(loop):
    train(loop.model, loop.optimizer, 1, 12)
    loop.seen[13] = everything(loop.model, loop.optimizer)
    assert loop.session.flush() == 13
    assert loop.assert_recovers().step == 13
    loop.run(3)
    loop.session._pipeline.finish()
    assert loop.assert_recovers().step == 15


def test_close_commits_the_current_step(loop):
    loop.run(1)
    loop.session.close(done=True)
    assert loop.assert_recovers().step == 13
    again = Loop(loop.pool, 6, 3, resume=True)
    assert (again.session.step, again.session.done) == (13, True)
    assert same(everything(again.model, again.optimizer), loop.seen[13])
    again.session.abandon()


# -- resume ----------------------------------------------------------------------------------------------------------


def uninterrupted(steps: int, width: int = 8) -> Any:
    model = net(width)
    train(model, optimizer := adam(model), steps)
    return everything(model, optimizer)


@pytest.mark.parametrize(("n", "interval"), ROUNDS)
def test_a_training_that_crashes_at_each_step_goes_on_bit_for_bit(pool, n, interval):
    step, path = 0, pool
    for process in range(5):
        loop = Loop(path, n, interval, resume=True)
        assert 0 <= step - loop.session.step <= interval
        loop.run(interval + 1 + process % interval)
        step = loop.session.step
        path = crashed(path, f"crash-{process}.pool")
        loop.session.abandon()
    loop = Loop(path, n, interval, resume=True)
    loop.run(2)
    loop.session.close()
    model = net()
    optimizer = adam(model)
    step = lightck.recover(path, model, optimizer).step
    assert same(everything(model, optimizer), uninterrupted(step))


@pytest.mark.parametrize("site", ["header", "block", "manifest", "sealed", "body", "word"])
@pytest.mark.parametrize("nth", [2, *(pytest.param(nth, marks=pytest.mark.long) for nth in (1, 3, 4))])
def test_a_kill_at_any_point_loses_at_most_an_interval(pool, site, nth):
    def work() -> None:
        loop = Loop(pool, 2, 3)
        loop.run(7)
        kill_at(site, nth * (4 if site == "block" else 1))
        loop.run(15)

    killed_child(work)
    model = net(seed=3)
    optimizer = adam(model)
    step = lightck.recover(pool, model, optimizer).step
    assert step % 3 == 0
    assert same(everything(model, optimizer), uninterrupted(step))


def test_the_interval_may_change_at_a_resume(pool):
    step = 0
    for n, interval in ((4, 2), (4, 4), (4, 1), (3, 5), (4, 3)):
        loop = Loop(pool, n, interval, resume=True)
        assert loop.session.step == step
        loop.run(9)
        step = loop.session.step
        loop.session.close()
        model = net(seed=3)
        optimizer = adam(model)
        assert lightck.recover(pool, model, optimizer).step == step
        assert same(everything(model, optimizer), uninterrupted(step))


def test_a_pool_with_too_few_records_for_the_interval_is_refused(pool):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(4, log_records=4)):
        train(model, optimizer, 5)
    message = (
        "room for 4 gradient records, and base_every=4 and interval=3 needs 6. Use a smaller base_every or interval"
    )
    with pytest.raises(UnsupportedError, match=message):
        lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(4), interval=3, resume=True)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(2), interval=3, resume=True):
        train(model, optimizer, 6, 5)
    assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_too_few_records_for_the_interval_are_refused_at_attach(pool):
    model = net()
    adam(model)
    with pytest.raises(ValueError, match=r"log_records=5 is too small for base_every=4 and interval=3.*at least 6"):
        lightck.attach(model, pool, strategy=Gradients(4, log_records=5), interval=3)


@pytest.mark.parametrize("interval", ["auto", lightck.Auto(budget=0.1)])
def test_an_interval_that_changes_is_refused(pool, interval):
    model = net()
    adam(model)
    with pytest.raises(UnsupportedError, match="Pass a number, interval=4 for example"):
        lightck.attach(model, pool, strategy=Gradients(), interval=interval)


@pytest.mark.long
def test_as_few_records_as_are_allowed_are_enough(pool):
    for n, interval, records in ((3, 2, 4), (4, 3, 6), (2, 7, 3)):
        model = net()
        optimizer = adam(model)
        strategy = Gradients(n, log_records=records)
        session = lightck.attach(model, pool, optimizer=optimizer, strategy=strategy, interval=interval, overwrite=True)
        for number in range(5 * interval + 1):
            train(model, optimizer, 1, number)
            session.end_step()
            session._pipeline.finish()
            if session.committed:
                other = net(seed=3)
                lightck.recover(crashed(pool), other, other_optimizer := adam(other))
                assert same(everything(other, other_optimizer), uninterrupted(session.committed))
        assert session._pipeline.pool.writer.n_relayouts == 0
        session.abandon()


def test_every_byte_is_checked_on_request(pool, monkeypatch):
    monkeypatch.setenv("LIGHTCK_CHECK", "1")
    loop = Loop(pool, 3, 2, BIG)
    loop.run(9)
    loop.session.close()
    assert loop.assert_recovers().step == 9


def test_a_tensor_that_outgrows_the_pool_between_commits_moves_it_at_the_next(pool):
    """A step between commits never waits for a new file."""

    class Growing(Average):
        pass

    growing = Growing()
    loop = Loop(pool, 3, 3, state={"growing": growing})
    loop.run(7)
    growing.values = torch.ones(400_000)
    loop.run(1)
    loop.session._pipeline.finish()
    assert loop.session._pipeline.pool.writer.n_relayouts == 0
    loop.run(4)
    loop.session._pipeline.finish()
    assert loop.session._pipeline.pool.writer.n_relayouts == 1
    checkpoint = loop.assert_recovers()
    assert checkpoint.step == 12
    assert same(checkpoint.state["growing"]["values"], growing.values)
    loop.session.abandon()


class Vocabulary(nn.Module):
    """Its sparse gradient outgrows the room that records have for it in some steps, none of which is a commit."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(3000, 64, sparse=True), nn.Linear(64, 2)

    def forward(self, number: int) -> torch.Tensor:
        words = torch.arange(2500 if number % 3 == 1 and number > 6 else 10)
        return self.out(self.table(words)).square()


def test_a_gradient_that_outgrows_the_pool_between_commits_moves_it_at_the_next(pool):
    """The new file has room for it."""
    model = Vocabulary()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    session = lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(3), interval=3)
    relayouts = []
    for number in range(24):
        optimizer.zero_grad()
        model(number).sum().backward()
        optimizer.step()
        session.end_step()
        session._pipeline.finish()
        if session.committed == number + 1:
            relayouts.append(session._pipeline.pool.writer.n_relayouts)
            assert is_step(lightck.recover(crashed(pool)), everything(model, optimizer))
    assert relayouts == [0, 0, 1, 1, 1, 1, 1, 1]
    assert newest(pool)[1] > 0, "the chain goes on"
    session.abandon()


def test_another_number_of_records_moves_the_pool_at_the_first_commit(pool):
    loop = Loop(pool, 3, 2)
    loop.run(6)
    loop.session.close()
    again = lightck.attach(
        loop.model, pool, optimizer=loop.optimizer, strategy=Gradients(3, 9), interval=4, resume=True
    )
    for number in range(6, 14):
        train(loop.model, loop.optimizer, 1, number)
        again.end_step()
        again._pipeline.finish()
        if again.committed == number + 1:
            assert is_step(lightck.recover(crashed(pool)), everything(loop.model, loop.optimizer))
        assert again._pipeline.pool.writer.n_relayouts == int(number >= 7)
    assert again.committed == 12
    again.abandon()


def test_a_late_unannounced_write_to_a_frozen_tensor_strikes_records_too(pool, caplog, monkeypatch):
    monkeypatch.setattr(outside_writes, "BUDGET_NBYTES", 0)
    model = net(BIG)
    model[0].weight.requires_grad_(False)
    optimizer = adam(model)
    session = lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(3), interval=3)
    for number in range(18):
        if number == 10:
            model[0].weight.data.mul_(0.5)
        train(model, optimizer, 1, number)
        session.end_step()
        session._pipeline.finish()
        if session.committed == number + 1:
            assert is_step(lightck.recover(crashed(pool)), everything(model, optimizer))
    assert session.committed == 18
    assert "may be wrong are struck" in caplog.text
    session.abandon()


def test_a_record_that_cannot_be_written_is_an_error_and_the_last_commit_stays(loop):
    loop.run(1)
    lib.lck_fault(lib.LCK_OP_COPY, 2, errno.EIO)
    try:
        with pytest.raises(BackgroundError, match="could not be"):
            loop.run(3)
    finally:
        lib.lck_fault(lib.LCK_OP_COPY, 0, 0)
    assert loop.assert_recovers(crashed(loop.pool)).step == 12


def test_a_trace_of_steps_between_commits(loop, tmp_path):
    with loop.session.trace(tmp_path / "run.trace", steps=6):
        loop.run(7)
    assert (tmp_path / "run.trace").stat().st_size


def test_a_parameter_group_that_is_added_between_commits_moves_the_pool_at_the_next(pool):
    model = net()
    optimizer = torch.optim.AdamW(model[2].parameters())
    session = lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(3), interval=3)
    for number in range(18):
        if number == 10:
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.1})
        train(model, optimizer, 1, number)
        session.end_step()
        session._pipeline.finish()
        if session.committed == number + 1:
            assert is_step(lightck.recover(crashed(pool)), everything(model, optimizer))
    assert session.committed == 18
    assert newest(pool)[1] > 0, "the chain goes on"
    session.abandon()


class Own(torch.optim.SGD):
    """Its state cannot be predicted, so the pool is made at the first commit."""


def test_a_pool_that_is_made_at_the_first_commit(pool):
    model = net()
    optimizer = Own(model.parameters(), lr=0.1, momentum=0.9)
    strategy = Gradients(3, own_optimizers=True)
    session = lightck.attach(model, pool, optimizer=optimizer, strategy=strategy, interval=3)
    for number in range(12):
        train(model, optimizer, 1, number)
        session.end_step()
        session._pipeline.finish()
        assert pool.exists() == (number >= 2)
        assert session.committed == ((number + 1) // 3 * 3 or None)
    seen = everything(model, optimizer)
    other = net(seed=3)
    lightck.recover(pool, other, other_optimizer := Own(other.parameters(), lr=0.1, momentum=0.9))
    assert same(everything(other, other_optimizer), seen)
    assert newest(pool)[1] > 0
    session.abandon()


def test_holes_in_each_interval_are_a_warning_after_twenty_full_checkpoints(pool, caplog):
    """Although every other update leaves a record."""
    loop = Loop(pool, 3, 2)
    for _ in range(22):
        loop.run(1)
        with torch.no_grad():
            loop.model[0].weight.clamp_(-0.3, 0.3)
        loop.run(1)
    loop.session.abandon()
    assert caplog.text.count("the last 20 checkpoints stored the whole state") == 1
