"""A training on a device with ``Gradients``: its updates are made again on the device, with the same bits."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from toys import everything, same, weights

import lightck
from lightck.strategy.gradients import Gradients

pytestmark = pytest.mark.gpu
DEVICE = os.environ.get("LIGHTCK_TEST_DEVICE", "cuda")
STEPS = 7
HOW = [{}, {"foreach": False}, {"foreach": True}, {"fused": True}]


def made(dtype: torch.dtype, **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 8)).to(DEVICE, dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", HOW, ids=str)
def test_each_step_is_recovered(pool, how, dtype):
    model, optimizer = made(dtype, **how)
    with lightck.attach(model, pool, optimizer=optimizer, strategy=Gradients(base_every=3)) as session:
        for number in range(STEPS):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(number)).to(DEVICE, dtype)
            optimizer.zero_grad()
            model(x).float().square().mean().backward()
            optimizer.step()
            session.flush()
            checkpoint = lightck.recover(pool)
            assert (checkpoint.step, checkpoint.rejected) == (number + 1, ())
            assert same(dict(checkpoint.model), {name: one.cpu() for name, one in weights(model).items()})
            other, other_optimizer = made(dtype, **how)
            lightck.recover(pool, other, other_optimizer)
            assert same(everything(other, other_optimizer), everything(model, optimizer))
