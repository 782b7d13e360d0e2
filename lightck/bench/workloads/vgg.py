"""VGG-16: Simonyan and Zisserman, "Very Deep Convolutional Networks" (2014), Table 1, column D."""

from __future__ import annotations

from torch import nn

from lightck.bench.workloads.vision import fan_out_

STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Channels of the 3x3 convolutions, and how many of them, before each halving."""


def vgg16(classes: int = 1000, divisor: int = 1, fully_connected: int = 4096, pixels: int = 224) -> nn.Module:
    layers: list[nn.Module] = []
    inputs = 3
    for channels, repeats in STAGES:
        for _ in range(repeats):
            layers += [nn.Conv2d(inputs, channels // divisor, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = channels // divisor
        layers.append(nn.MaxPool2d(2))
    side = pixels >> len(STAGES)
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
