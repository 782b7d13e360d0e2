"""The small training that is saved by each rival under faults, and the comparison of its states.

It has a few MB of the kinds of state that a checkpoint must restore: parameters, buffers (one of integers), two moments
and a counter per parameter, changing hyperparameters. Every update depends only on its number and the state, and one
thread computes it, so the state after each step is known bit for bit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

WIDTH = 512


def build(seed: int = 0) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99))


def update(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Make update number ``step`` (the first is 1)."""
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 / (1 + step)
    batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    model(batch).square().sum().backward()
    optimizer.step()


def parts(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, bytes]]:
    """The complete state of the training: name -> bytes, including dtype and shape."""
    for name, tensor in sorted(model.state_dict().items()):
        yield f"model.{name}", _packed(tensor)
    state = optimizer.state_dict()
    for index, values in sorted(state["state"].items()):
        for key, value in sorted(values.items()):
            packed = _packed(value) if isinstance(value, torch.Tensor) else repr(value).encode()
            yield f"optimizer.{index}.{key}", packed
    yield "optimizer.param_groups", json.dumps(state["param_groups"], sort_keys=True).encode()


def _packed(tensor: torch.Tensor) -> bytes:
    head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return head + tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def digest(named: Any) -> str:
    """A digest of ``parts``, equal only for equal names, dtypes, shapes and bits."""
    whole = hashlib.blake2b(digest_size=16)
    for name, packed in named:
        whole.update(f"{name} {len(packed)} ".encode() + packed)
    return whole.hexdigest()


def digests(last: int) -> list[str]:
    """The digest of the state after each step, 0 to ``last``."""
    model, optimizer = build()
    found = [digest(parts(model, optimizer))]
    for step in range(1, last + 1):
        update(model, optimizer, step)
        found.append(digest(parts(model, optimizer)))
    return found
