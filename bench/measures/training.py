"""The training of a workload: model, optimizer, and batches that only the seed and the step determine.

So a training that resumes at step *t* gets the same batches as one that was never interrupted.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import torch
from torch import nn

from bench.workloads import Batch, Workload, state_nbytes, state_tensors

SEED, BATCHES_MADE = 1234, 4


@dataclass(slots=True)
class Training:
    """Steps of one workload. ``batch``: replaces the workload's batch size. ``device``: the device of the training."""

    workload: Workload
    batch: int = 0
    device: str = "cpu"
    seed: int = SEED
    step: int = 0
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    _batches: list[Batch] = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model = self.workload.model().train().to(self.device)
        self.optimizer = self.workload.optimizer(self.model.parameters())
        generator = torch.Generator().manual_seed(SEED)
        n = self.batch or self.workload.batch
        made = [self.workload.input(n, generator) for _ in range(BATCHES_MADE)]
        self._batches = [(inputs.to(self.device), targets.to(self.device)) for inputs, targets in made]

    def iterate(self) -> torch.Tensor:
        """Make one update; returns its loss."""
        loss = self.workload.loss(self.model, *self._batches[self.step % BATCHES_MADE])
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss.detach()

    def settle(self) -> None:
        """Wait until the device has finished all queued work."""
        if self.device != "cpu":
            torch.get_device_module(self.device).synchronize()

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for _, tensor in state_tensors(self.model, self.optimizer)]

    @property
    def nbytes(self) -> int:
        return state_nbytes(self.model, self.optimizer)

    def digest(self) -> dict[str, int]:
        """The checksum of each tensor of the state, by zlib, independent of lightck's code."""
        return {name: _checksum(tensor) for name, tensor in state_tensors(self.model, self.optimizer)}

    def scramble(self) -> None:
        """Overwrite the whole state, so that an incomplete load is noticed."""
        with torch.no_grad():
            for tensor in self.tensors():
                tensor.fill_(7)


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def differing(expected: dict[str, int], found: dict[str, int]) -> list[str]:
    """The names of tensors whose bytes differ from the saved ones."""
    return sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
