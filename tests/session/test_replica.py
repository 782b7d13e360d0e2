"""``Replica`` writes a copy of the state that makes the updates too: its bits are those of the training."""

from __future__ import annotations

import gc
import logging
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import BIG, adam, batch, everything, forward, is_step, kill_at, killed_child, net, same, train

import lightck
from lightck.errors import UnsupportedError
from lightck.session import outside_writes, replica_comparison, replica_updates, replica_work
from lightck.session.replica_work import ReplicaUpdate
from lightck.state import unit_replicas
from lightck.state.unit_replicas import UnitReplica

Made = tuple[nn.Module, torch.optim.Optimizer]
STEPS = 8
SIZES = pytest.mark.parametrize("width", [8, BIG])


@pytest.fixture(autouse=True)
def _many_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many groups of copies as possible, even of small tensors."""
    monkeypatch.setattr(replica_updates, "GROUP_NBYTES_MIN", 64)


def attached(model: nn.Module, pool: Path, optimizer: Any, **options: Any) -> lightck.Session:
    return lightck.attach(model, pool, optimizer=optimizer, strategy=lightck.Replica(), **options)


def assert_no_drift(session: lightck.Session, renewed: int = 0) -> None:
    stats = session.stats()
    assert (stats.replica_drift, stats.replica_drift_tensor) == (0.0, None)
    assert (stats.replica_renewed, stats.skipped) == (renewed, 0)


def follow(session: lightck.Session, pool: Path, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """Commit the present step, and compare it with the training."""
    session.flush()
    checkpoint = lightck.recover(pool)
    assert checkpoint.exact, checkpoint.reason
    found = [checkpoint.optimizer] if isinstance(checkpoint.optimizer, dict) else checkpoint.optimizer
    seen = everything(model, *optimizers)
    assert (checkpoint.step, same(dict(checkpoint.model), seen["model"])) == (session.step, True)
    assert same(found, seen["optimizers"])


# -- exact -----------------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": adam,
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, fused=True),
    "AMSGrad by loops": lambda model: torch.optim.Adam(model.parameters(), amsgrad=True, foreach=False),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, foreach=True),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.01),
}


FEW = {
    ("AdamW", torch.float32, 1),
    ("momentum", torch.bfloat16, 2),
    ("Adafactor", torch.float32, 2),
}
CASES = [(kind, dtype, n) for kind in KINDS for dtype, n in ((torch.float32, 1), (torch.bfloat16, 2))]
CASES.append(("Adafactor", torch.float32, 2))


@pytest.mark.parametrize(
    ("kind", "dtype", "threads"),
    [pytest.param(*case, marks=() if case in FEW else pytest.mark.long) for case in CASES],
)
def test_each_checkpoint_has_the_bits_of_the_training(pool, kind, dtype, threads):
    model = net(1031).to(dtype)
    optimizer = KINDS[kind](model)
    try:
        with attached(model, pool, optimizer) as session:
            torch.set_num_threads(threads)
            for number in range(6):
                optimizer.zero_grad()
                model(batch(number).to(dtype)).square().sum().backward()
                optimizer.step()
                follow(session, pool, model, optimizer)
            assert torch.get_num_threads() == threads
            assert_no_drift(session)
    finally:
        torch.set_num_threads(1)


@SIZES
def test_a_checkpoint_holds_the_bytes_of_the_copy(pool, width, monkeypatch):
    """Otherwise the other tests would show nothing about it."""
    model = net(width)
    optimizer = adam(model)
    monkeypatch.setattr(replica_comparison.ReplicaComparison, "differences", lambda self, generation: [])
    with attached(model, pool, optimizer) as session:
        train(model, optimizer, 1)
        session.flush()
        session._steps.replica._replicas["0.weight"].copies[0].data.add_(1)
        train(model, optimizer, 1, 1)
        seen = everything(model, optimizer)["model"]
        session.flush()
        held = lightck.recover(pool).model
        assert not same(held["0.weight"], seen["0.weight"])
        assert same(held["2.weight"], seen["2.weight"])


@pytest.mark.parametrize("interval", [1, 3, "auto"])
def test_a_loop_that_waits_for_nothing_is_exact(pool, interval):
    model = net(BIG)
    optimizer = adam(model)
    with attached(model, pool, optimizer, interval=interval) as session:
        train(model, optimizer, 20)
        follow(session, pool, model, optimizer)
        assert_no_drift(session)


@pytest.mark.parametrize("slots", [3, 8])
def test_several_checkpoints_may_be_uncommitted(pool, slots):
    model = net(BIG)
    optimizer = adam(model)
    with attached(model, pool, optimizer, slots=slots) as session:
        train(model, optimizer, 12)
        follow(session, pool, model, optimizer)
        assert_no_drift(session)


# -- loops -----------------------------------------------------------------------------------------------------------


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    train(model, optimizer, 1, number)


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    forward(model, number).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    for part in range(3):
        forward(model, 3 * number + part).backward()
    optimizer.step()


def zeroed_in_place(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    forward(model, number).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def changed_in_a_hook(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    def halve(*_: object) -> None:
        for p in model.parameters():
            p.grad.mul_(0.5)

    handle = optimizer.register_step_pre_hook(halve)
    plain(model, optimizer, number)
    handle.remove()


def by_closure(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = forward(model, number)
        loss.backward()
        return loss

    optimizer.step(closure)


def with_absent_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    forward(model, number).backward()
    if number % 2:
        model[0].weight.grad = None
    optimizer.step()


@SIZES
@pytest.mark.parametrize(
    "iterate",
    [clipped, accumulated, zeroed_in_place, changed_in_a_hook, by_closure, with_absent_gradients],
    ids=lambda one: one.__name__,
)
def test_what_the_update_consumed_is_used(pool, iterate, width):
    model = net(width)
    optimizer = adam(model)
    with attached(model, pool, optimizer) as session:
        for number in range(STEPS):
            iterate(model, optimizer, number)
            follow(session, pool, model, optimizer)
        assert_no_drift(session)


def test_the_learning_rate_is_that_of_the_update(pool):
    model = net(BIG)
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with attached(model, pool, optimizer) as session:
        for number in range(STEPS):
            plain(model, optimizer, number)
            scheduler.step()
            follow(session, pool, model, optimizer)
        assert_no_drift(session)


@pytest.mark.parametrize("fused", [False, True])
def test_an_update_that_a_scaler_skips_changes_no_copy(pool, fused):
    model = net(BIG)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    with attached(model, pool, optimizer) as session:
        for number in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(forward(model, number)).backward()
            if number in (2, 5):
                model[0].weight.grad.fill_(float("inf"))
            scaler.step(optimizer)
            scaler.update()
            follow(session, pool, model, optimizer)
        assert (session.step, session.stats().replica_renewed) == (6, 0)
        assert session.stats().replica_drift_tensor is None


def test_two_optimizers_and_tied_weights(pool):
    model = nn.ModuleDict({"one": net(BIG), "two": net(BIG, seed=1)})
    model["two"][0].weight = model["one"][0].weight
    parts = list(model["one"].parameters()), [model["two"][0].bias, *model["two"][2].parameters()]
    optimizers = torch.optim.AdamW(parts[0]), torch.optim.SGD(parts[1], lr=0.01, momentum=0.9)
    with attached(model, pool, list(optimizers)) as session:
        for number in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            (forward(model["one"], number) + forward(model["two"], number)).backward()
            for optimizer in optimizers:
                optimizer.step()
            session.end_step()
            follow(session, pool, model, *optimizers)
        assert_no_drift(session)


class Words(nn.Module):
    """Sparse gradients, buffers, and parameters whose first gradient comes late."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out, self.mean = nn.Embedding(50, 6, sparse=True), nn.Linear(6, 2), nn.BatchNorm1d(2)
        self.late = nn.Linear(2, 2)

    def forward(self, number: int) -> torch.Tensor:
        words = torch.randint(0, 50, (5 + number,), generator=torch.Generator().manual_seed(number))
        found = self.mean(self.out(self.table(words))).square()
        return self.late(found) if number > 3 else found


def test_sparse_gradients_buffers_and_a_layer_that_is_used_late(pool):
    model = Words()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    with attached(model, pool, optimizer) as session:
        for number in range(STEPS):
            optimizer.zero_grad()
            model(number).sum().backward()
            optimizer.step()
            follow(session, pool, model, optimizer)
        assert_no_drift(session)


def test_a_group_that_is_added_and_a_layer_that_is_frozen(pool):
    model = net(BIG)
    optimizer = torch.optim.AdamW(model[2].parameters())
    with attached(model, pool, optimizer) as session:
        for number in range(3):
            plain(model, optimizer, number)
            follow(session, pool, model, optimizer)
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.1})
        for number in range(3, 6):
            plain(model, optimizer, number)
            follow(session, pool, model, optimizer)
        model[0].weight.requires_grad_(False)
        for number in range(6, 10):
            plain(model, optimizer, number)
            follow(session, pool, model, optimizer)
        assert_no_drift(session)


# -- renewed ---------------------------------------------------------------------------------------------------------


def clamp(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model[0].weight.clamp_(-0.01, 0.01)


def by_data(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[0].weight.data.mul_(0.5)


def by_numpy(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if optimizer.state[model[0].bias]:  # there is none before the first update
        optimizer.state[model[0].bias]["exp_avg"].numpy()[:] = 1


def load_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict({name: tensor * 0.5 for name, tensor in model.state_dict().items()})


def load_and_assign(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict({name: tensor * 0.5 for name, tensor in model.state_dict().items()}, assign=True)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    optimizer.state.clear()


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(everything(model, optimizer)["optimizers"][0])


def exchange_data(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[0].weight.data = model[0].weight.data * 0.5


def step_unseen(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """An update that calls no hook."""
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    type(optimizer).step.__wrapped__(optimizer)


@pytest.mark.parametrize("width", [BIG, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("closes_first", [False, True], ids=["before the boundary", "after it"])
@pytest.mark.parametrize(
    "write",
    [clamp, by_data, by_numpy, load_model, load_and_assign, load_optimizer, exchange_data, step_unseen],
    ids=lambda one: one.__name__,
)
def test_a_write_between_updates_renews_what_it_wrote(pool, write, closes_first, width):
    model = net(width)
    optimizer = adam(model)
    with attached(model, pool, optimizer) as session:
        for number in range(STEPS):
            plain(model, optimizer, number)
            if closes_first:
                follow(session, pool, model, optimizer)
            if number == 4:
                write(model, optimizer)
            if not closes_first:
                follow(session, pool, model, optimizer)
        stats = session.stats()
        assert 1 <= stats.replica_renewed <= 4 or write is load_and_assign
        assert stats.replica_renewed == 1 or write not in (clamp, by_data, by_numpy)
        assert (stats.replica_drift_tensor, stats.skipped) == (None, 0)


def test_a_weight_swap_while_paused_renews_and_loses_nothing(pool):
    model = net(BIG)
    optimizer = adam(model)
    with attached(model, pool, optimizer) as session:
        for number in range(STEPS):
            plain(model, optimizer, number)
            if number % 3 == 0:
                with session.paused(), torch.no_grad():
                    kept = [p.clone() for p in model.parameters()]
                    for p in model.parameters():
                        p.zero_()
                    for p, value in zip(model.parameters(), kept, strict=True):
                        p.copy_(value)
            follow(session, pool, model, optimizer)
        assert session.stats().replica_drift_tensor is None


def test_a_gradient_that_is_overwritten_costs_one_checkpoint(pool, caplog, monkeypatch):
    """The loop writes into an old gradient while the copy may still use it."""
    model = net(BIG)
    optimizer = adam(model)
    with attached(model, pool, optimizer) as session:
        for number in range(STEPS):
            plain(model, optimizer, number)
            if number in (4, 5):
                model[0].weight.grad.add_(1)
            follow(session, pool, model, optimizer)
        assert session.stats().skipped == 1
        assert session.stats().replica_drift_tensor is None
    assert "something wrote to a gradient before the copy of Replica() had used it" in caplog.text


def freeze_or_not(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[2].weight.requires_grad_(not model[2].weight.requires_grad)


def change_options(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5
    optimizer.param_groups[0]["betas"] = (0.8, 0.9)


def write_old_gradient(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if model[0].bias.grad is not None:
        model[0].bias.grad.add_(1)


def write_behind_a_hook(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The next update begins with a write to a parameter."""

    left = [0.5]

    def write(*_: object) -> None:
        if left:
            model[0].weight.data.mul_(left.pop())

    optimizer.register_step_pre_hook(write)


ITERATIONS = [plain, clipped, accumulated, zeroed_in_place, by_closure, with_absent_gradients]
WRITES = [clamp, by_data, by_numpy, load_model, load_optimizer, exchange_data, step_unseen]
EVENTS = [freeze_or_not, change_options, write_old_gradient, write_behind_a_hook]


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(n, marks=pytest.mark.long) for n in range(3, 15))])
def test_a_random_loop_is_exact_at_each_checkpoint(pool, seed):
    chosen = random.Random(seed)
    model = net(chosen.choice([8, 257, BIG]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=chosen.random() < 0.5)
    slots = chosen.choice([2, 3, 5])
    done: list[str] = []
    print("seed", seed, "slots", slots, done)
    with attached(model, pool, optimizer, slots=slots, interval=chosen.choice([1, 1, 3])) as session:
        for number in range(40):
            actions = [chosen.choice(ITERATIONS)]
            if chosen.random() < 0.4:
                actions.insert(chosen.randrange(2), chosen.choice([*WRITES, *EVENTS]))
            for action in actions:
                done.append(action.__name__)
                action(model, optimizer, number) if action in ITERATIONS else action(model, optimizer)
            if chosen.random() < 0.7:
                done.append("flush")
                follow(session, pool, model, optimizer)
        assert session.stats().replica_drift_tensor is None


# -- drift on the CPU ------------------------------------------------------------------------------------------------


def test_a_copy_that_differs_is_named_and_used_no_more(pool, caplog):
    model = net(BIG)
    optimizer = adam(model)
    with attached(model, pool, optimizer) as session:
        for number in range(5):
            plain(model, optimizer, number)
            follow(session, pool, model, optimizer)
        session._steps.replica._replicas["2.weight"].unit.states[0]["exp_avg"].add_(0.25)
        for number in range(5, STEPS):
            plain(model, optimizer, number)
            follow(session, pool, model, optimizer)
        stats = session.stats()
        assert stats.skipped == 1
        assert stats.replica_drift_tensor == "optimizer/2.weight/exp_avg"
        assert stats.replica_drift == pytest.approx(0.225, rel=1e-3)  # an update multiplies exp_avg by 0.9
        assert session._steps.replica._replicas == {}
    assert "the copy of Replica() has other bits than the training" in caplog.text
    assert "optimizer/2.weight/exp_avg" in caplog.text


def test_older_checkpoints_that_may_be_wrong_are_struck(pool, monkeypatch):
    """A write that nothing shows: the checkpoints since the last comparison of its block do not hold it."""
    monkeypatch.delenv("LIGHTCK_CHECK", raising=False)
    monkeypatch.setattr(outside_writes, "BUDGET_NBYTES", 0)
    monkeypatch.setattr(replica_comparison, "BUDGET_NBYTES", 0)
    model = net(20 * BIG)
    optimizer = adam(model)
    with attached(model, pool, optimizer, slots=4) as session:
        train(model, optimizer, 4)
        session.flush()
        model[2].bias.data.add_(1)  # one block is read for each update, of this tensor seldom
        for number in range(4, 100):
            plain(model, optimizer, number)
            session.flush()
            if session.stats().replica_drift_tensor is not None:
                break
        assert session.stats().replica_drift_tensor is not None
        assert session.step > 5, "it was found at once, so nothing older was wrong"
        assert is_step(lightck.recover(pool), everything(model, optimizer))
        with pytest.raises(lightck.errors.NoCheckpointError):
            lightck.recover(pool, step=session.step - 1)


def planted_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The options are those after the scheduler."""
    monkeypatch.setattr("lightck.hooks.consumed.options_by_value", lambda group: group)


def planted_forgotten_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit is not updated."""
    make = ReplicaUpdate._make
    monkeypatch.setattr(
        ReplicaUpdate, "_make", lambda self, one: None if self.replica.name == "2.bias" else make(self, one)
    )


@pytest.mark.parametrize("plant", [planted_scheduler, planted_forgotten_unit], ids=lambda one: one.__name__)
def test_a_planted_error_is_found(pool, plant, monkeypatch):
    plant(monkeypatch)
    model = net(BIG)
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    slow(monkeypatch)
    with attached(model, pool, optimizer) as session:
        for number in range(STEPS):
            plain(model, optimizer, number)
            scheduler.step()
            session.flush()
            assert is_step(lightck.recover(pool), everything(model, optimizer))
        assert session.stats().replica_drift_tensor is not None


def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies are updated late, so that what the loop does next would reach them."""
    make = ReplicaUpdate._make

    def late(self: ReplicaUpdate, one: Any) -> None:
        time.sleep(0.005)
        make(self, one)

    monkeypatch.setattr(ReplicaUpdate, "_make", late)


@pytest.mark.parametrize("interval", [1, 3])
def test_the_gate_waits_for_the_copies(pool, interval, monkeypatch):
    """Else gradients would be released, and a copy would be read, before its update is made."""
    slow(monkeypatch)
    model = net(BIG)
    optimizer = adam(model)
    seen: list[bool] = []
    with attached(model, pool, optimizer, interval=interval) as session:
        optimizer.register_step_pre_hook(lambda *_: seen.append(session._steps.replica._running == []))
        for number in range(STEPS):
            plain(model, optimizer, number)
            if number % 3 == 2:
                follow(session, pool, model, optimizer)
        assert_no_drift(session)
    assert seen == [True] * STEPS


def test_a_copy_that_cannot_make_an_update_is_used_no_more(pool, caplog, monkeypatch):
    model = net(BIG)
    optimizer = adam(model)
    with attached(model, pool, optimizer) as session:
        train(model, optimizer, 3)
        follow(session, pool, model, optimizer)

        def raises(*_: object, **__: object) -> None:
            raise RuntimeError("planted")

        monkeypatch.setattr(replica_work, "update_unit", raises)
        for number in range(3, 6):
            plain(model, optimizer, number)
            follow(session, pool, model, optimizer)
    assert "cannot make an update of the training: RuntimeError: planted" in caplog.text


def test_without_memory_for_the_copies_the_training_is_saved_nevertheless(pool, caplog, monkeypatch):
    def raises(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nframes")

    monkeypatch.setattr(unit_replicas, "_new_copy", raises)
    model = net(BIG)
    optimizer = adam(model)
    with attached(model, pool, optimizer) as session:
        for number in range(4):
            plain(model, optimizer, number)
            follow(session, pool, model, optimizer)
    assert "no memory for the copies of Replica() (DefaultCPUAllocator: can't allocate memory)" in caplog.text


# -- killed and resumed ----------------------------------------------------------------------------------------------


KILLS = [(site, width) for site in ("header", "block", "manifest", "sealed") for width in (8, BIG)]


@pytest.mark.parametrize(
    ("site", "width"),
    [pytest.param(*one, marks=() if one in (("block", BIG), ("sealed", 8)) else pytest.mark.long) for one in KILLS],
)
def test_a_killed_training_goes_on_bit_for_bit(pool, site, width):
    def make() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = net(width)
        optimizer = adam(model)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, numbers: range) -> None:
        for number in numbers:
            clipped(model, optimizer, number)
            scheduler.step()

    def killed() -> None:
        model, optimizer, scheduler = make()
        with attached(model, pool, optimizer) as session:
            run(model, optimizer, scheduler, range(4))
            session.flush()
            kill_at(site, 2)
            run(model, optimizer, scheduler, range(4, 12))

    killed_child(killed)
    model, optimizer, scheduler = make()
    with attached(model, pool, optimizer, resume=True) as session:
        assert session.step >= 4
        assert session.recovered is not None
        assert session.recovered.exact
        run(model, optimizer, scheduler, range(session.step, 12))
        follow(session, pool, model, optimizer)
        assert_no_drift(session)
    reference = make()
    run(*reference, range(12))
    assert same(everything(model, optimizer), everything(*reference[:2]))


def test_a_pool_is_one_of_full_state(pool):
    """Either strategy goes on in a pool of the other."""
    model = net(BIG)
    optimizer = adam(model)
    with attached(model, pool, optimizer):
        train(model, optimizer, 3)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True) as session:
        train(model, optimizer, 3, session.step)
    with attached(model, pool, optimizer, resume=True) as session:
        train(model, optimizer, 3, session.step)
        follow(session, pool, model, optimizer)
        assert_no_drift(session)


def test_a_pin_and_a_pool_that_grows(pool):
    model = net(BIG)
    optimizer = adam(model)
    with attached(model, pool, optimizer) as session:
        train(model, optimizer, 3)
        pin = session.pin()
        seen = everything(model, optimizer)
        for number in range(3, 6):
            model.register_buffer(f"buffer{number}", torch.full((BIG * number,), float(number)))
            plain(model, optimizer, number)
            follow(session, pool, model, optimizer)
        assert is_step(lightck.recover(pool, step=pin.step), seen)
        assert_no_drift(session)


# -- what is refused, and said ---------------------------------------------------------------------------------------


class Noisy(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(torch.randn_like(p), alpha=1e-3)
        return super().step(closure)


class Coupled(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


class Own(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("kind", "strategy", "message"),
    [
        (torch.optim.LBFGS, lightck.Replica(), "couples all parameters"),
        (Noisy, lightck.Replica(own_optimizers=True), "draws random numbers"),
        (Coupled, lightck.Replica(own_optimizers=True), "differently if others are updated with it"),
        (Own, lightck.Replica(), r"Replica\(own_optimizers=True\)"),
    ],
)
def test_an_optimizer_is_refused_by_name(pool, kind, strategy, message):
    model = net()
    with pytest.raises(UnsupportedError, match=message) as caught:
        lightck.attach(model, pool, optimizer=kind(model.parameters(), lr=0.1), strategy=strategy)
    assert kind.__name__ in str(caught.value)
    assert "FullState()" in str(caught.value)
    assert not pool.exists()


def test_layerwise_and_no_optimizer_are_refused(pool):
    model = net()
    optimizer = adam(model)
    lightck.layerwise(model, optimizer)
    with pytest.raises(UnsupportedError, match="layerwise"):
        attached(model, pool, optimizer)
    with pytest.raises(UnsupportedError, match="no optimizer of this model exists"):
        attached(net(), pool, [])


def test_an_own_class_is_taken_if_the_user_vouches_for_it(pool):
    model = net(BIG)
    optimizer = Own(model.parameters(), lr=0.01, momentum=0.9)
    strategy = lightck.Replica(own_optimizers=True)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy) as session:
        for number in range(STEPS):
            plain(model, optimizer, number)
            follow(session, pool, model, optimizer)
        assert_no_drift(session)


def test_attach_says_that_full_state_is_cheaper_on_a_cpu(pool, caplog):
    caplog.set_level(logging.WARNING)
    model = net()
    with attached(model, pool, adam(model)):
        pass
    assert caplog.text.count("strategy=FullState() is cheaper") == 1


def has_copies() -> bool:
    gc.collect()
    return any(isinstance(one, UnitReplica) for one in gc.get_objects())


def threads_left() -> set[str]:
    """Names of threads of the replica, after those that end had time for it."""
    for thread in threading.enumerate():
        if thread.name == "lightck-replica":
            thread.join(10)
    return {thread.name for thread in threading.enumerate()} & {"lightck-replica"}


@pytest.mark.parametrize("end", ["closed", "raised", "collected"])
def test_an_ended_session_keeps_no_copy_and_no_thread(pool, end, monkeypatch):
    slow(monkeypatch)

    def run() -> None:
        model = net(BIG)
        optimizer = adam(model)
        session = attached(model, pool, optimizer)
        train(model, optimizer, 5)
        assert has_copies()
        assert "lightck-replica" in {thread.name for thread in threading.enumerate()}
        if end == "raised":
            with pytest.raises(ZeroDivisionError), session:
                session.flush()
                train(model, optimizer, 1, 5)
                raise ZeroDivisionError
        elif end == "closed":
            session.close()

    run()
    assert not has_copies()
    assert threads_left() == set()
    assert lightck.recover(pool).step >= 4
