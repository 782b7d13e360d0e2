"""What the image networks share: synthetic images of ImageNet's shape, their loss, and the papers' optimizer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def images(n: int, pixels: int, classes: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """``n`` images with labels, normalised as ImageNet's are."""
    x = torch.randn(n, 3, pixels, pixels, generator=generator)
    return x, torch.randint(classes, (n,), generator=generator)


def cross_entropy(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), labels)


def momentum_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-4)


def fan_out_(model: nn.Module) -> nn.Module:
    """He et al. (2015): convolutions keep the variance of their gradients."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model
