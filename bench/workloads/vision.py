"""AlexNet, VGG-16 and ResNet-18, and what all image networks share: synthetic images of ImageNet's shape, their loss,
the papers' optimizer.
"""

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


def alexnet(classes: int = 1000, divisor: int = 1) -> nn.Module:
    """In one column: Krizhevsky, "One weird trick for parallelizing convolutional neural networks" (2014); the fully
    connected part as in Krizhevsky et al. (2012).
    """
    a, b, c, d = (channels // divisor for channels in (64, 192, 384, 256))
    wide = 4096 // divisor
    return nn.Sequential(
        nn.Conv2d(3, a, 11, 4, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(a, b, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(b, c, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(c, d, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(d, d, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2),
        nn.AdaptiveAvgPool2d(6),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(d * 36, wide),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(wide, wide),
        nn.ReLU(inplace=True),
        nn.Linear(wide, classes),
    )


VGG_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Channels of the 3x3 convolutions, and how many of them, before each halving."""


def vgg16(classes: int = 1000, divisor: int = 1, fully_connected: int = 4096, pixels: int = 224) -> nn.Module:
    """Simonyan and Zisserman, "Very Deep Convolutional Networks" (2014), Table 1, column D."""
    layers: list[nn.Module] = []
    inputs = 3
    for channels, repeats in VGG_STAGES:
        for _ in range(repeats):
            layers += [nn.Conv2d(inputs, channels // divisor, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = channels // divisor
        layers.append(nn.MaxPool2d(2))
    side = pixels >> len(VGG_STAGES)
    wide = fully_connected
    return fan_out_(
        nn.Sequential(
            *layers,
            nn.Flatten(),
            nn.Linear(inputs * side * side, wide),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(wide, wide),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(wide, classes),
        )
    )


class Residual(nn.Module):
    """Two 3x3 convolutions and what goes around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        is_same = inputs == outputs and stride == 1
        self.shortcut = (
            nn.Identity()
            if is_same
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.body(x) + self.shortcut(x))


def resnet18(classes: int = 1000, width: int = 64) -> nn.Module:
    """He et al., "Deep Residual Learning for Image Recognition" (2015), Table 1 and figure 5 left: four stages of two
    blocks, each stage twice as wide and half as large as the one before. Shortcuts that change shape are projections
    (option B).
    """
    stem = nn.Sequential(
        nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, padding=1),
    )
    blocks: list[nn.Module] = []
    inputs = width
    for stage in range(4):
        outputs = width << stage
        blocks += [Residual(inputs, outputs, 1 if stage == 0 else 2), Residual(outputs, outputs, 1)]
        inputs = outputs
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
    return fan_out_(nn.Sequential(stem, *blocks, head))
