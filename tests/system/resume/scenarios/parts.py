"""What many scenarios build: small nets whose larger tensors are copied in the background, and fixed data."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

UPDATES = 14
FEATURES, CLASSES, BATCH = 8, 4, 6


def mlp(*, dropout: float = 0.0, norm: bool = False, width: int = 48) -> nn.Sequential:
    """48 x 48 floats are 9 KiB: more than what lightck copies at once at the boundary."""
    layers: list[nn.Module] = [nn.Linear(FEATURES, width)]
    layers += [nn.BatchNorm1d(width)] if norm else []
    layers += [nn.ReLU(), nn.Linear(width, width), nn.Tanh()]
    layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def fixed_data(n: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in every process, without the global generators."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(n, FEATURES, generator=generator), torch.randint(CLASSES, (n,), generator=generator)


def fixed_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = fixed_data()
    rows = [(step * BATCH + i) % len(x) for i in range(BATCH)]
    return x[rows], y[rows]


def drawn_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """By hand, from all three global generators."""
    rows = torch.randint(32, (BATCH,))
    x, y = fixed_data()
    noise = torch.from_numpy(np.random.standard_normal((BATCH, FEATURES))).float()
    return x[rows] * (1.0 + random.random()) + 0.1 * noise, y[rows]


def is_moved(before: torch.Tensor, after: torch.Tensor) -> bool:
    return not torch.equal(before, after)
