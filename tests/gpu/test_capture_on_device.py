"""Gradients captured on a device: each update runs again with the bits of the training there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from captured import Captured

pytestmark = pytest.mark.gpu
DEVICE = os.environ.get("LIGHTCK_TEST_DEVICE", "cuda")
STEPS = 6
HOW = [{}, {"foreach": False}, {"foreach": True}, {"fused": True}]


def net(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 8)).to(DEVICE, dtype)


def loss_of(model: torch.nn.Module, number: int) -> torch.Tensor:
    p = next(model.parameters())
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(number)).to(p.device, p.dtype)
    return model(x).float().square().mean()


@pytest.fixture
def captured() -> Iterator[Callable[..., Captured]]:
    made: list[Captured] = []

    def make(model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> Captured:
        made.append(Captured(model, *optimizers))
        return made[-1]

    yield make
    for one in made:
        one.close()


def adamw(model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("set_to_none", [True, False], ids=["None", "zeros"])
def test_a_plain_loop(captured, how, dtype, set_to_none):
    model = net(dtype)
    optimizer = adamw(model, **how)
    training = captured(model, optimizer)
    for number in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model, number).backward()
        optimizer.step()
    training.finish()


@pytest.mark.parametrize("how", HOW, ids=str)
def test_clipped_and_accumulated_gradients(captured, how):
    model = net()
    optimizer = adamw(model, **how)
    training = captured(model, optimizer)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, 2 * number).backward()
        loss_of(model, 2 * number + 1).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    training.finish()


@pytest.mark.parametrize("clips", [False, True], ids=["step unscales", "unscale_ and clip"])
@pytest.mark.parametrize("how", HOW, ids=str)
def test_scaled_gradients_with_skipped_steps(captured, how, clips):
    model = net()
    optimizer = adamw(model, **how)
    training = captured(model, optimizer)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0, growth_interval=2)
    for number in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, number) * (float("inf") if number in (1, 4) else 1.0)).backward()
        if clips:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    training.finish()
    assert len(training.copies.updates) == STEPS - 2


@pytest.mark.parametrize("how", [{"capturable": True}, {"capturable": True, "foreach": True}], ids=str)
def test_capturable(captured, how):
    if DEVICE == "cpu":
        pytest.skip("torch takes it on a device only")
    model = net()
    optimizer = adamw(model, **how)
    training = captured(model, optimizer)
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()
    training.finish()
