"""ResNet-18: He et al., "Deep Residual Learning for Image Recognition" (2015), Table 1 and figure 5 left.

Shortcuts that change shape are projections (option B).
"""

from __future__ import annotations

import torch
from torch import nn

from lightck.bench.workloads.vision import fan_out_


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
    """Four stages of two blocks, each stage twice as wide and half as large as the one before."""
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
