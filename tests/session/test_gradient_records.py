"""``Gradients`` writes what an update consumed, and a full checkpoint where something else has changed the state."""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import BIG, adam, batch, everything, forward, is_step, net, same, train

import lightck
from lightck.errors import UnsupportedError
from lightck.pool.gradient_reader import GradientCheckpoint, checkpoint_of, committed, problems_of
from lightck.pool.reader import open_pool
from lightck.session import outside_writes
from lightck.stats import Meter
from lightck.strategy.gradients import Gradients


def newest(pool: Path) -> tuple[int, int, bool]:
    """Step of the newest checkpoint, how many of the records before it it needs, and whether it holds no damage."""
    with closing(open_pool(str(pool), gradients=True)) as reader:
        checkpoint = checkpoint_of(reader, committed(reader)[0])
        return checkpoint.step, needed(checkpoint), problems_of(reader, checkpoint) == []


def needed(checkpoint: GradientCheckpoint) -> int:
    return len(checkpoint.needed_records())


@pytest.fixture(params=[BIG, 8], ids=["in the background", "at the boundary"])
def training(request: pytest.FixtureRequest, pool: Path) -> Any:
    model = net(request.param)
    optimizer = adam(model)
    with lightck.attach(model, pool, strategy=Gradients(base_every=3)) as session:
        yield model, optimizer, session


def run(training: Any, n: int, first: int = 0) -> None:
    model, optimizer, session = training
    train(model, optimizer, n, first)
    session.flush()


def test_gradients_that_the_loop_dropped_are_freed_in_time_that_is_not_counted(pool, monkeypatch):
    now, freed_in = ["counted"], []

    class Watched(Meter):
        @contextmanager
        def work_of_loop(self) -> Iterator[None]:  # type: ignore[override]
            now[0] = "left out"
            with super().work_of_loop():
                yield
            now[0] = "counted"

    monkeypatch.setattr("lightck.session.attach.Meter", Watched)
    model = net(BIG)
    optimizer, large = adam(model), [p for p in model.parameters() if p.numel() > BIG]
    with lightck.attach(model, pool, strategy=Gradients(base_every=3)) as session:
        for number in range(6):
            forward(model, number).backward()
            if number >= 4:  # the first updates find out of what class a gradient is
                for p in large:
                    weakref.finalize(p.grad, lambda: freed_in.append(now[0]))
            optimizer.step()
            optimizer.zero_grad()
        session.flush()
    assert freed_in == ["left out"] * 2 * len(large)


def test_in_the_long_run_a_checkpoint_needs_the_records_of_a_round(training, pool):
    run(training, 9)
    assert newest(pool) == (9, 1, True)  # that of step 8, beside its own


def test_an_announced_write_between_updates_makes_the_checkpoint_full(training, pool, caplog):
    caplog.set_level(logging.INFO)
    run(training, 9)
    model, optimizer, session = training
    train(model, optimizer, 1, 9)
    with torch.no_grad():
        model[0].weight.clamp_(-0.01, 0.01)
    session.flush()
    assert newest(pool) == (10, 0, True)
    assert "model/0.weight' was written between two updates" in caplog.text


def test_an_unannounced_write_in_the_first_updates_is_found(training, pool):
    model, optimizer, session = training
    for number in range(3):
        train(model, optimizer, 1, number)
        model[0].weight.data.mul_(0.5)
        session.flush()
        assert newest(pool) == (number + 1, 0, True)


def test_a_write_behind_the_boundary_makes_the_next_checkpoint_full(training, pool):
    run(training, 9)
    with torch.no_grad():
        training[0][0].bias.add_(1)
    run(training, 1, 9)
    assert newest(pool) == (10, 0, True)


def test_a_parameter_that_is_replaced_is_found(training, pool):
    run(training, 9)
    model, optimizer, session = training
    train(model, optimizer, 1, 9)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    session.flush()
    assert newest(pool)[:2] == (10, 0)


def test_a_state_dict_that_is_new_before_an_update_is_found(training, pool):
    run(training, 9)
    model, optimizer, session = training
    optimizer.zero_grad()
    forward(model, 9).backward()
    optimizer.state = defaultdict(dict)
    optimizer.step()
    session.flush()
    assert newest(pool) == (10, 0, True)
    assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_a_parameter_group_that_is_added_is_recovered(pool):
    model = net()
    optimizer = torch.optim.AdamW(model[2].parameters())
    with lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(base_every=3)) as session:
        run((model, optimizer, session), 9)
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.1})
        for number in range(9, 14):
            run((model, optimizer, session), 1, number)
            assert newest(pool)[2]
            assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_a_late_unannounced_write_to_a_frozen_tensor_strikes_what_is_wrong(pool, caplog, monkeypatch):
    """The write guard finds it first: the next checkpoint is full, and needs none of those that are struck."""
    monkeypatch.setattr(outside_writes, "BUDGET_NBYTES", 0)
    model = net(BIG)
    model[0].weight.requires_grad_(False)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(base_every=3)) as session:
        run((model, optimizer, session), 9)
        model[0].weight.data.mul_(0.5)
        for number in range(9, 14):
            run((model, optimizer, session), 1, number)
            assert is_step(lightck.recover(pool), everything(model, optimizer))
    assert "may be wrong are struck" in caplog.text


def test_gradients_that_another_loss_adds_to_cost_no_checkpoint(pool, caplog):
    """As in a GAN: the loss of the generator goes through the discriminator, which still has gradients."""
    caplog.set_level(logging.INFO)
    model = nn.ModuleDict({"g": net(BIG), "d": net(BIG, seed=1)})
    of_g, of_d = adam(model["g"]), adam(model["d"])
    with lightck.attach(model, pool, optimizer=[of_g, of_d], strategy=Gradients(base_every=3)) as session:
        for number in range(8):
            x = torch.cat([batch(number), batch(number)], 1)[:, :4]
            of_d.zero_grad()
            forward(model["d"], number).backward()
            of_d.step()
            of_g.zero_grad()
            model["d"](torch.cat([model["g"](x)] * 2, 1)).square().sum().backward()
            of_g.step()
            session.end_step()
            session.flush()
            assert session.committed == number + 1
            assert is_step_of_both(lightck.recover(pool), everything(model, of_g, of_d))
        assert session.stats().skipped == 0


def is_step_of_both(checkpoint: lightck.Checkpoint, seen: dict[str, Any]) -> bool:
    return same(dict(checkpoint.model), seen["model"]) and same(list(checkpoint.optimizer), seen["optimizers"])


def test_denormals_that_are_flushed_after_attach_make_the_checkpoint_full(training, pool):
    run(training, 9)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        run(training, 1, 9)
        assert newest(pool) == (10, 0, True)
    finally:
        torch.set_flush_denormal(False)


class Decaying(torch.optim.SGD):
    """Changes parameters without a gradient too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)
        super().step()


def test_an_optimizer_of_another_class_is_refused_unless_the_user_vouches_for_it(pool):
    model = net()
    optimizer = Decaying(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(UnsupportedError, match="own_optimizers=True"):
        lightck.attach(model, pool, strategy=Gradients(3), optimizer=optimizer)
    with lightck.attach(model, pool, strategy=Gradients(3, own_optimizers=True), optimizer=optimizer) as session:
        for number in range(9):
            optimizer.zero_grad()
            layer = model[0] if number % 2 else model[2]
            layer(torch.ones(1, layer.in_features)).sum().backward()  # the other layer gets no gradient
            optimizer.step()
            session.end_step()
        session.flush()
    other = net()
    other_optimizer = Decaying(other.parameters(), lr=0.1, momentum=0.9)
    lightck.recover(pool, other, other_optimizer)
    assert same(everything(other, other_optimizer), everything(model, optimizer))


def test_another_number_of_records_moves_the_pool_to_a_new_file(pool):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(3)):
        train(model, optimizer, 4)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(3, log_records=9), resume=True):
        train(model, optimizer, 2, 4)
    with closing(open_pool(str(pool), gradients=True)) as reader:
        assert len(reader.superblock.slots) == 9
    assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_a_gradient_that_is_written_behind_the_update_is_not_stored(training, pool):
    """In place, before the checkpoint closes: the copy differs from what the update consumed."""
    run(training, 9)
    model, optimizer, session = training
    train(model, optimizer, 1, 9)
    model[0].weight.grad.zero_()
    session.flush()
    assert newest(pool)[0] == 10
    assert newest(pool)[1] == 0


def test_a_checkpoint_that_is_saved_again_is_full(training, pool):
    run(training, 9)
    _, _, session = training
    session.close(done=True)
    assert newest(pool) == (9, 0, True)


@pytest.mark.parametrize(
    "arguments",
    [
        {"slots": 3},
        {"interval": "auto"},
        {"interval": lightck.Auto()},
        {"keep": lightck.Keep(every=2, to="/tmp/x")},
        {"tiers": [lightck.Tier("/tmp/x", every=2, format="safetensors")]},
    ],
    ids=str,
)
def test_arguments_that_do_not_go_together_are_refused(pool, arguments):
    model = net()
    adam(model)
    with pytest.raises(UnsupportedError, match="Tier" if "tiers" in arguments else next(iter(arguments))):
        lightck.attach(model, pool, strategy=Gradients(), **arguments)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Gradients(1), "base_every=1"),
        (Gradients(4, 3), "log_records=3 is too small"),
        (Gradients(200), "at most 255"),
    ],
    ids=str,
)
def test_numbers_that_cannot_be_are_refused(pool, strategy, message):
    model = net()
    adam(model)
    with pytest.raises(ValueError, match=message):
        lightck.attach(model, pool, strategy=strategy)


def test_a_training_without_an_optimizer_is_refused(pool):
    with pytest.raises(UnsupportedError, match="no optimizer"):
        lightck.attach(net(), pool, strategy=Gradients(), optimizer=[])


def test_an_optimizer_that_cannot_be_replayed_is_refused(pool):
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(UnsupportedError, match="LBFGS"):
        lightck.attach(model, pool, strategy=Gradients(), optimizer=optimizer)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adafactor])
def test_an_optimizer_with_little_state_is_refused(pool, kind):
    model = torch.nn.Linear(64, 64)
    optimizer = kind(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match="bytes for each byte of gradients"):
        lightck.attach(model, pool, strategy=Gradients(), optimizer=optimizer)


def test_a_pin_is_refused(training):
    run(training, 3)
    with pytest.raises(UnsupportedError, match="pinned"):
        training[2].pin()


class Adapted(nn.Module):
    """A frozen matrix with an adapter of low rank."""

    def __init__(self, width: int = 512, rank: int = 16) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def test_a_frozen_base_with_adapters_writes_little_more_than_their_gradients(pool):
    model, n = nn.Sequential(*(Adapted() for _ in range(6))), 12
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(n)) as session:
        written = []
        for _ in range(3 + 2 * n):
            optimizer.zero_grad()
            model(torch.randn(4, 512)).pow(2).sum().backward()
            optimizer.step()
            session.flush()
            written.append(session.stats().bytes_written)
    gradients = sum(p.nbytes for p in adapters)
    small_state = 1 << 17
    of_round = (written[-1] - written[-1 - n]) / n
    assert (
        of_round <= 1.5 * gradients + 3 * gradients / n + small_state < 0.4 * sum(p.nbytes for p in model.parameters())
    )
