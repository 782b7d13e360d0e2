"""``LIGHTCK_CHECK=1``: a unit that is due is made again from its old base. A difference makes the checkpoints full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from toys import adam, batch, crashed, everything, flip, is_step, net, same

import lightck
from lightck.errors import CorruptPoolError, NoCheckpointError
from lightck.pipeline.guard import WriteGuard
from lightck.pool.gradient_reader import checkpoint_of, committed
from lightck.pool.reader import open_pool
from lightck.session import base_check, outside_writes, update_records
from lightck.session.outside_writes import OutsideWrites
from lightck.state.torch_classes import TORCH_CLASSES
from lightck.strategy.gradients import Gradients

N = 3
LATE = 9
"""The number of updates before the first write."""
WIDE = 70_000
"""Rows that make a tensor too large to be audited whole: 1.1 MB."""
REFUSED = {"Adafactor", "LBFGS", "SparseAdam"}
"""Classes that Gradients does not take, or that take no dense gradients. (SGD is taken with momentum.)"""


@pytest.fixture(autouse=True)
def _checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTCK_CHECK", "1")


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the parameters whose units were made again, in order."""
    names: list[str] = []
    inner = base_check.units_after

    def units_after(checkpoint: Any, following: Any, parameters: Any, optimizers: Any) -> Any:
        names.extend(parameters)
        return inner(checkpoint, following, parameters, optimizers)

    monkeypatch.setattr(base_check, "units_after", units_after)
    return names


def iterate(model: Any, optimizer: Any, first: int, steps: int) -> None:
    for number in range(first, first + steps):
        optimizer.zero_grad()
        model(batch(number)).float().square().sum().backward()
        optimizer.step()


def needed(pool: Path) -> tuple[int, int]:
    """Step of the newest checkpoint, and how many of the records before it it needs."""
    with closing(open_pool(str(pool), gradients=True)) as reader:
        checkpoint = checkpoint_of(reader, committed(reader)[0])
        return checkpoint.step, len(checkpoint.needed_records())


class Sneaky(torch.optim.AdamW):
    """Inside ``step``, it writes to one element of the tensor in ``target``, in a way that moves no version counter."""

    target: ClassVar[dict[int, torch.Tensor]] = {}
    """Id of an optimizer -> the tensor. (A replay has another object, which writes nothing.)"""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        if id(self) in Sneaky.target:
            Sneaky.target[id(self)].data.view(-1)[171].add_(0.5)


@pytest.fixture
def sneaky(pool: Path) -> Iterator[Any]:
    """A model, its optimizer, and a session whose checkpoints need records; the writes have not begun."""
    model = net(WIDE)
    optimizer = Sneaky(model.parameters(), lr=0.01)
    strategy = Gradients(N, own_optimizers=True)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy) as session:
        iterate(model, optimizer, 0, LATE)
        session.flush()
        yield model, optimizer, session
    Sneaky.target.clear()


def test_a_late_write_inside_the_update_is_named_within_a_round(sneaky, pool, caplog):
    model, optimizer, session = sneaky
    assert needed(pool) == (LATE, N - 2)
    Sneaky.target[id(optimizer)] = model[0].weight
    for number in range(LATE, LATE + N + 2):
        iterate(model, optimizer, number, 1)
        session.flush()
    assert caplog.text.count("updates are not trusted any more") == 1
    assert "the older copy of 'model/0.weight' in the pool" in caplog.text
    assert f"one of the steps {LATE + 1} to {LATE + 2} may be recovered without a change" in caplog.text
    assert needed(pool) == (LATE + N + 2, 0)
    other = net(WIDE)
    other_optimizer = Sneaky(other.parameters(), lr=0.01)
    lightck.recover(pool, other, other_optimizer)
    assert same(everything(other, other_optimizer), everything(model, optimizer))


def restored(pool: Path, step: int | None = None) -> Any:
    model = net(WIDE)
    optimizer = Sneaky(model.parameters(), lr=0.01)
    lightck.recover(pool, model, optimizer, step=step)
    return everything(model, optimizer)


def test_checkpoints_that_lead_to_other_bits_are_refused_from_the_next_commit_on(sneaky, pool, caplog, monkeypatch):
    """Also if the process crashes between this commit and the strike. Until then they are all that there is."""
    model, optimizer, session = sneaky
    Sneaky.target[id(optimizer)] = model[0].weight
    monkeypatch.setattr(WriteGuard, "committed", lambda *args: None)
    for found in range(LATE + 1, LATE + N + 1):
        iterate(model, optimizer, found - 1, 1)
        before = crashed(pool, "before.pool")
        session.flush()
        if "not trusted" in caplog.text:
            break
    assert found > LATE + 1, "the first wrong checkpoint is committed"
    assert same(restored(before), restored(before, found - 1))
    unstruck, seen = crashed(pool, "unstruck.pool"), everything(model, optimizer)
    monkeypatch.undo()
    iterate(model, optimizer, found, 1)
    session.flush()
    assert same(restored(unstruck), seen)
    with pytest.raises(CorruptPoolError, match="may hold wrong bytes"):
        restored(unstruck, found - 1)
    resumed = net(WIDE)
    other = Sneaky(resumed.parameters(), lr=0.01)
    with lightck.attach(
        resumed, unstruck, optimizer=other, strategy=Gradients(N, own_optimizers=True), resume=True
    ) as again:
        assert again.step == found
    for image in (pool, unstruck):
        assert same(restored(image, found), seen)
        with pytest.raises((NoCheckpointError, CorruptPoolError)):
            restored(image, found - 1)


def test_the_other_nets_miss_this_write(pool, caplog, monkeypatch):
    """So the test above is one of this check."""
    monkeypatch.delenv("LIGHTCK_CHECK")
    model = net(WIDE)
    optimizer = Sneaky(model.parameters(), lr=0.01)
    strategy = Gradients(N, own_optimizers=True)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=strategy) as session:
        iterate(model, optimizer, 0, LATE)
        Sneaky.target[id(optimizer)] = model[0].weight
        iterate(model, optimizer, LATE, N + 2)
        session.flush()
        assert needed(pool) == (LATE + N + 2, N - 2)
    Sneaky.target.clear()
    assert "not trusted" not in caplog.text


def test_a_late_write_between_updates_is_found_if_its_bytes_were_not_read(pool, caplog, monkeypatch):
    """As in a large model without LIGHTCK_CHECK=1: outside of updates it reads 16 MiB for each of them."""
    monkeypatch.setattr(update_records, "OutsideWrites", lambda reads_all: OutsideWrites())
    monkeypatch.setattr(outside_writes, "BUDGET_NBYTES", 0)
    model = net(WIDE)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(N)) as session:
        iterate(model, optimizer, 0, LATE)
        for number in range(LATE, LATE + N + 2):
            iterate(model, optimizer, number, 1)
            model[0].weight.data.view(-1)[171].add_(0.5)
            session.flush()
        assert caplog.text.count("updates are not trusted any more") == 1
        assert "0.weight'" in caplog.text
        assert is_step(lightck.recover(pool), everything(model, optimizer))


def made(name: str) -> tuple[Any, Any]:
    model = net(64, bias=name != "Muon")
    options = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    return model, TORCH_CLASSES[name](model.parameters(), lr=0.01, **options)


@pytest.mark.parametrize("name", sorted(TORCH_CLASSES.keys() - REFUSED))
def test_a_clean_training_has_no_finding(name, pool, replayed, caplog):
    model, optimizer = made(name)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(N)) as session:
        iterate(model, optimizer, 0, 3 * N)
        session.flush()
    assert "lightck" not in caplog.text
    assert needed(pool) == (3 * N, N - 2)
    assert {name for name, _ in model.named_parameters()} == set(replayed)


@pytest.mark.long
@pytest.mark.parametrize("how", ["foreach", "fused", "bfloat16", "zeroed in place", "scheduled"])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
def test_other_ways_to_train_have_no_finding(name, how, pool, replayed, caplog):
    model = net(64).to(torch.bfloat16 if how == "bfloat16" else torch.float32)
    options = {"momentum": 0.9} if name == "SGD" else {}
    options |= {how: True} if how in ("foreach", "fused") else {}
    optimizer = TORCH_CLASSES[name](model.parameters(), lr=0.01, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(N)) as session:
        for number in range(4 * N):
            optimizer.zero_grad(set_to_none=how != "zeroed in place")
            model(batch(number).to(model[0].weight.dtype)).float().square().sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if how == "scheduled":
                scheduler.step()
        session.flush()
    assert "not trusted" not in caplog.text
    assert needed(pool) == (4 * N, N - 2)
    assert len(replayed) > len(set(replayed)) == 4


class Sleepers(torch.nn.Module):
    """Each layer has gradients in every third step only, and one parameter is never updated."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 2) for _ in range(3))
        self.fixed = torch.nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return self.layers[number % 3](x * self.fixed)


def test_units_that_sleep_and_state_that_appears_late_have_no_finding(pool, replayed, caplog):
    model = Sleepers()
    optimizer = torch.optim.AdamW(model.parameters())
    with lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(N)) as session:
        for number in range(12):
            optimizer.zero_grad()
            model(batch(number), number).square().sum().backward()
            optimizer.step()
        session.flush()
    assert "not trusted" not in caplog.text
    assert {name for name, _ in model.named_parameters()} == set(replayed)
    assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_the_check_changes_nothing_of_the_training(pool, replayed):
    """Generators, hooks that the user registered for all optimizers, the mode of gradients, the number of threads."""

    def trained(strategy: Gradients | None) -> tuple[Any, torch.Tensor, int]:
        model, calls = net(64), []
        model.insert(1, torch.nn.Dropout())
        optimizer = Sneaky(model.parameters(), lr=0.01)
        handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
        torch.manual_seed(1)
        threads = torch.get_num_threads()
        path = pool.with_name(f"{strategy is None}.pool")
        with lightck.attach(model, path, optimizer=optimizer, strategy=strategy) as session:
            for number in range(3 * N):
                iterate(model, optimizer, number, 1)
                with torch.no_grad():
                    session.end_step()
                    assert not torch.is_grad_enabled()
                assert torch.is_grad_enabled()
        handle.remove()
        assert torch.get_num_threads() == threads
        return everything(model, optimizer), torch.get_rng_state(), len(calls)

    with_check, state, n_calls = trained(Gradients(N, own_optimizers=True))
    assert replayed
    plain, plain_state, n_plain_calls = trained(None)
    assert same(with_check, plain)
    assert torch.equal(state, plain_state)
    assert n_calls == n_plain_calls


def test_a_damaged_base_is_named_and_the_checkpoint_is_full(pool, caplog):
    model = net(64)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(N)) as session:
        iterate(model, optimizer, 0, LATE)
        session.flush()
        with closing(open_pool(str(pool), gradients=True)) as reader:
            checkpoint = checkpoint_of(reader, committed(reader)[0])
            oldest = min(checkpoint.bases(), key=lambda one: one.step)
            older = {one.entry.name: one for one in checkpoint.older_bases()}
        flip(pool, oldest.offset)
        flip(pool, older[oldest.entry.name].offset)
        for number in range(LATE, LATE + N):
            iterate(model, optimizer, number, 1)
            session.flush()
            assert is_step(lightck.recover(pool), everything(model, optimizer))
    assert "cannot check that the older copies in the pool" in caplog.text
    assert oldest.entry.name in caplog.text
    assert "not trusted" not in caplog.text
