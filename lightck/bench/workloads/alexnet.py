"""AlexNet in one column: Krizhevsky, "One weird trick for parallelizing convolutional neural networks" (2014); the
fully connected part as in Krizhevsky et al. (2012).
"""

from __future__ import annotations

from torch import nn


def alexnet(classes: int = 1000, divisor: int = 1) -> nn.Module:
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
