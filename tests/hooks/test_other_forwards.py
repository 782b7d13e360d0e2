"""Forwards of the root that are no place where a checkpoint may close: with other tensors, or recomputed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from toys import BIG, adam, everything, forward, is_step, net

import lightck


@pytest.mark.parametrize("width", [8, BIG])
def test_a_forward_with_other_tensors_closes_no_checkpoint(pool: Any, width: int) -> None:
    """Adversarial weights: ``functional_call`` is the first forward after an update."""
    model = net(width)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for number in range(4):
            seen = everything(model, optimizer)
            other = {name: p + 0.05 for name, p in model.named_parameters()}
            torch.func.functional_call(model, other, (torch.full((2, 4), 0.1),)).sum().backward()
            forward(model, number).backward()
            if number:
                session.flush()
                checkpoint = lightck.recover(pool)
                assert checkpoint.step == number
                assert is_step(checkpoint, seen)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("begins", [0, 3])
def test_a_recomputed_forward_closes_no_checkpoint(pool: Any, begins: int) -> None:
    """Reentrant activation checkpointing around the root: the first forward runs without gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = adam(model)
    seen: dict[int, Any] = {}
    session = lightck.attach(model, pool, optimizer=optimizer, slots=8)
    for number in range(6):
        seen[number] = everything(model, optimizer)
        x = torch.randn(8, 4, requires_grad=True)
        y = checkpoint(model, x, use_reentrant=True) if number >= begins else model(x)
        y.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    session.abandon()
    for number in range(1, 5):
        assert is_step(lightck.recover(pool, step=number), seen[number]), number
