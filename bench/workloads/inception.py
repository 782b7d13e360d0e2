"""Inception-V3 without its auxiliary head: Szegedy et al., "Rethinking the Inception Architecture for Computer Vision"
(2015), Table 1 and figures 5, 6, 7 and 10; the numbers of channels are those of the authors' published network.

A block is branches side by side whose outputs are joined; a branch is a chain of ``conv``.
"""

from __future__ import annotations

import torch
from torch import nn

from bench.workloads.vision import fan_out_

Convolution = tuple[int, int | tuple[int, int]] | tuple[int, int, int]


class Side(nn.Module):
    """Branches with the same input, concatenated along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Chain:
    """Builds branches whose channels are all divided by ``divisor``."""

    def __init__(self, divisor: int) -> None:
        self.divisor = divisor

    def __call__(self, inputs: int, *convolutions: Convolution) -> nn.Module:
        """Each convolution is (channels, kernel) at the same size, or (channels, kernel, stride) without padding."""
        layers: list[nn.Module] = []
        for outputs, kernel, *stride in convolutions:
            layers.append(self.conv(inputs, outputs, kernel, *stride))
            inputs = outputs
        return nn.Sequential(*layers)

    def conv(self, inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 0) -> nn.Module:
        """Convolution, batch norm, ReLU. ``stride`` 0: stride 1 with the padding that keeps the size."""
        sides = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (0, 0) if stride else (sides[0] // 2, sides[1] // 2)
        return nn.Sequential(
            nn.Conv2d(self.of(inputs), self.of(outputs), sides, stride or 1, padding, bias=False),
            nn.BatchNorm2d(self.of(outputs), eps=0.001),
            nn.ReLU(inplace=True),
        )

    def pooled(self, inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.AvgPool2d(3, 1, padding=1), self.conv(inputs, outputs, 1))

    def of(self, channels: int) -> int:
        return channels if channels == 3 else channels // self.divisor


def inception_v3(classes: int = 1000, divisor: int = 1) -> nn.Module:
    chain = Chain(divisor)
    blocks = [_stem(chain)]
    for inputs, pooled in ((192, 32), (256, 64), (288, 64)):
        blocks.append(_figure_5(chain, inputs, pooled))
    blocks.append(Side(chain(288, (384, 3, 2)), chain(288, (64, 1), (96, 3), (96, 3, 2)), nn.MaxPool2d(3, 2)))
    blocks += [_figure_6(chain, middle) for middle in (128, 160, 160, 192)]
    blocks.append(
        Side(
            chain(768, (192, 1), (320, 3, 2)),
            chain(768, (192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3, 2)),
            nn.MaxPool2d(3, 2),
        )
    )
    blocks += [_figure_7(chain, inputs) for inputs in (1280, 2048)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Dropout(0.5), nn.Flatten(), nn.Linear(chain.of(2048), classes))
    return fan_out_(nn.Sequential(*blocks, *head))


def _stem(chain: Chain) -> nn.Module:
    return nn.Sequential(
        chain(3, (32, 3, 2), (32, 3, 1), (64, 3)),
        nn.MaxPool2d(3, 2),
        chain(64, (80, 1), (192, 3, 1)),
        nn.MaxPool2d(3, 2),
    )


def _figure_5(chain: Chain, inputs: int, pooled: int) -> nn.Module:
    """On the 35x35 grid: 3x3 twice in place of one 5x5."""
    return Side(
        chain(inputs, (64, 1)),
        chain(inputs, (48, 1), (64, 5)),
        chain(inputs, (64, 1), (96, 3), (96, 3)),
        chain.pooled(inputs, pooled),
    )


def _figure_6(chain: Chain, middle: int) -> nn.Module:
    """On the 17x17 grid: 7x7 as 1x7 and 7x1."""
    long = ((middle, 1), (middle, (7, 1)), (middle, (1, 7)), (middle, (7, 1)), (192, (1, 7)))
    return Side(
        chain(768, (192, 1)),
        chain(768, (middle, 1), (middle, (1, 7)), (192, (7, 1))),
        chain(768, *long),
        chain.pooled(768, 192),
    )


def _figure_7(chain: Chain, inputs: int) -> nn.Module:
    """On the 8x8 grid: 3x3 as 1x3 beside 3x1."""

    def fan() -> nn.Module:
        return Side(chain(384, (384, (1, 3))), chain(384, (384, (3, 1))))

    return Side(
        chain(inputs, (320, 1)),
        nn.Sequential(chain(inputs, (384, 1)), fan()),
        nn.Sequential(chain(inputs, (448, 1), (384, 3)), fan()),
        chain.pooled(inputs, 192),
    )
