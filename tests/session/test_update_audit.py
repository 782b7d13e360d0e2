"""An update that a recovery would compute differently is found while the training runs, and its checkpoint is full."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from toys import batch, everything, net, same

import lightck
from lightck.errors import CorruptPoolError, NoCheckpointError
from lightck.session.update_audit import EVERY
from lightck.state.neutral_settings import neutral_settings
from lightck.strategy.gradients import Gradients

STRATEGY = Gradients(base_every=3, own_optimizers=True)
OTHER_EACH_TIME = itertools.count()
"""Numbers of which no two are the same. (Two readings of a clock may be, in their last digits.)"""


class Products(torch.optim.Optimizer):
    """Multiplies gradients with each other, so the precision of matrix products changes its bits."""

    def __init__(self, params: Any, lr: float = 0.001) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                change = (p.grad @ p.grad.t()) @ p.grad if p.dim() == 2 else p.grad
                moment = self.state[p].setdefault("moment", torch.zeros_like(p))
                p.add_(moment.mul_(0.9).add_(change), alpha=-group["lr"])


class NoisyLater(Products):
    """Computes the same bits in its first steps only."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            count = self.state[p].setdefault("count", torch.zeros(()))
            count.add_(1)
            if count > 5:
                p.add_(1e-6 * next(OTHER_EACH_TIME))


@pytest.fixture
def medium_precision() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


def wide() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))


def iterate(model: Any, optimizer: Any, session: Any, steps: int) -> None:
    for number in range(steps):
        optimizer.zero_grad()
        model(batch(number, rows=32)).square().mean().backward()
        optimizer.step()
    session.flush()


def square() -> torch.nn.Module:
    """Muon takes matrices only."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 64, bias=False), torch.nn.Tanh(), torch.nn.Linear(64, 64, bias=False))


def recovers(pool: Path, model: Any, optimizer: Any, make: Any = wide) -> bool:
    """Whether a recovery into a new model gives this state."""
    other = make()
    other_optimizer = type(optimizer)(other.parameters())
    lightck.recover(pool, other, other_optimizer)
    return same(everything(other, other_optimizer), everything(model, optimizer))


@pytest.mark.parametrize(("kind", "make"), [(Products, wide), (torch.optim.Muon, square)])
def test_matrix_products_of_lower_precision_make_checkpoints_full(pool, kind, make, medium_precision, caplog):
    caplog.set_level("INFO")
    model = make()
    optimizer = kind(model.parameters())
    with lightck.attach(
        model, pool, optimizer=optimizer, strategy=Gradients(base_every=3, own_optimizers=True)
    ) as session:
        iterate(model, optimizer, session, 9)
    torch.set_float32_matmul_precision("highest")
    assert recovers(pool, model, optimizer, make)
    assert "float32 matrix products is not 'highest'" in caplog.text


def test_autocast_around_the_step_makes_checkpoints_full(pool, caplog):
    caplog.set_level("INFO")
    model = wide()
    optimizer = Products(model.parameters())
    attached = lightck.attach(model, pool, optimizer=optimizer, strategy=STRATEGY)
    with attached as session, torch.autocast("cpu", torch.bfloat16):
        iterate(model, optimizer, session, 9)
    assert recovers(pool, model, optimizer)
    assert "inside torch.autocast" in caplog.text


def test_a_recovery_under_other_settings_gives_the_same_bits(pool):
    model = wide()
    optimizer = Products(model.parameters())
    with lightck.attach(
        model, pool, optimizer=optimizer, strategy=Gradients(base_every=3, own_optimizers=True)
    ) as session:
        iterate(model, optimizer, session, 9)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert recovers(pool, model, optimizer)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_recovery_uses_exact_products_if_the_script_has_set_a_precision_by_torchs_newer_interface():
    """torch.get_float32_matmul_precision() raises in such a process."""
    products = torch.backends.mkldnn.matmul
    before = products.fp32_precision
    products.fp32_precision = "bf16"
    try:
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
        with neutral_settings():
            assert products.fp32_precision == "ieee"
        assert products.fp32_precision == "bf16"
    finally:
        products.fp32_precision = before
        torch.set_float32_matmul_precision("highest")


def test_an_update_that_is_never_the_same_is_found(pool, caplog):
    """It begins after the first updates, in which all parameters are audited."""
    model = net(64)
    optimizer = NoisyLater(model.parameters())
    with lightck.attach(
        model, pool, optimizer=optimizer, strategy=Gradients(base_every=3, own_optimizers=True)
    ) as session:
        iterate(model, optimizer, session, EVERY + 3)
        assert "updates are not trusted any more" in caplog.text
        iterate(model, optimizer, session, 2)
    other = net(64)
    other_optimizer = NoisyLater(other.parameters())
    assert lightck.recover(pool, other, other_optimizer).step == EVERY + 5
    assert same(everything(other, other_optimizer), everything(model, optimizer))


class Switched(Products):
    """Never the same from a moment on."""

    is_noisy: ClassVar[bool] = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for p in (p for group in self.param_groups for p in group["params"] if Switched.is_noisy):
            p.add_(1e-6 * next(OTHER_EACH_TIME))


def train_until_found(pool: Path, n_clean: int, caplog: Any, monkeypatch: Any) -> tuple[int, Any, Any]:
    """Return the step at which the noise is found, the state that it has, and that before the noise began."""
    model = net(64)
    optimizer = Switched(model.parameters())
    with lightck.attach(model, pool, optimizer=optimizer, strategy=STRATEGY) as session:
        iterate(model, optimizer, session, n_clean)
        clean = everything(model, optimizer)
        monkeypatch.setattr(Switched, "is_noisy", True)
        while "updates are not trusted any more" not in caplog.text:
            iterate(model, optimizer, session, 1)
        return session.step, everything(model, optimizer), clean


def restored(pool: Path, step: int | None = None) -> Any:
    model = net(64)
    optimizer = Switched(model.parameters())
    lightck.recover(pool, model, optimizer, step=step)
    return everything(model, optimizer)


def test_checkpoints_that_need_records_are_struck_when_the_one_of_a_finding_is_committed(pool, caplog, monkeypatch):
    """Nobody knows since when the updates differ."""
    found, seen, _ = train_until_found(pool, EVERY - 1, caplog, monkeypatch)
    assert found == EVERY + 1, "the step before it was wrong already"
    assert "When the next checkpoint is committed, older ones that may be wrong are struck" in caplog.text
    assert same(restored(pool), seen)
    with pytest.raises((NoCheckpointError, CorruptPoolError), match=f"step {found - 1}"):
        restored(pool, found - 1)


def test_a_full_checkpoint_is_right_whatever_the_audit_finds_after_it(pool, caplog, monkeypatch):
    found, seen, clean = train_until_found(pool, 1, caplog, monkeypatch)
    assert found == 2
    assert "are struck" not in caplog.text
    assert same(restored(pool), seen)
    assert same(restored(pool, 1), clean)


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_audit_finds_nothing_where_nothing_is(pool, how, dtype, caplog):
    model = wide().to(dtype)
    model.append(torch.nn.Linear(64, 1000).to(dtype))
    optimizer = torch.optim.AdamW(model.parameters(), **how)
    with lightck.attach(
        model, pool, optimizer=optimizer, strategy=Gradients(base_every=3, own_optimizers=True)
    ) as session:
        for number in range(2 * EVERY + 1):
            optimizer.zero_grad()
            model(batch(number).to(dtype)).square().mean().backward()
            optimizer.step()
        session.flush()
    assert "not trusted" not in caplog.text


def test_gradients_that_are_copied_at_once_are_audited(pool, caplog):
    """Where the loop zeroes them in place, as at the first update of every loop."""
    model = net(64)
    optimizer = NoisyLater(model.parameters())
    with lightck.attach(model, pool, optimizer=optimizer, strategy=STRATEGY):
        for number in range(EVERY + 2):
            optimizer.zero_grad(set_to_none=False)
            model(batch(number)).square().mean().backward()
            optimizer.step()
    assert "updates are not trusted any more" in caplog.text


def test_full_checkpoints_in_a_row_are_reported(pool, caplog):
    model = wide()
    optimizer = torch.optim.AdamW(model.parameters())
    with lightck.attach(model, pool, optimizer=optimizer, strategy=STRATEGY):
        for number in range(25):
            optimizer.zero_grad()
            model(batch(number)).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                model[0].weight.clamp_(-0.1, 0.1)
    assert caplog.text.count("the last 20 checkpoints stored the whole state") == 1
    assert "model/0.weight" in caplog.text


def test_a_gradient_without_memory_of_its_own_makes_a_full_checkpoint(pool: Path) -> None:
    """A loop that sets an expanded gradient. The audit once tried to write into a copy with the same strides."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    parameter = next(iter(model.parameters()))
    with lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(base_every=3)) as session:
        for step in range(1, 9):
            optimizer.zero_grad()
            model(batch(step)).sum().backward()
            if step < 5:
                parameter.grad = torch.tensor(0.1).expand(parameter.shape)
            optimizer.step()
            session.flush()
            assert lightck.recover(pool).step == step
    assert same(everything(model, optimizer), everything_of(pool))


def everything_of(pool: Path) -> Any:
    torch.manual_seed(1)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    lightck.recover(pool, model, optimizer)
    return everything(model, optimizer)
