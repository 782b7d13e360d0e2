"""lightck with the interface of a rival. Its hooks would find the steps; here ``save`` marks the end of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

import lightck


class Lightck:
    name = "lightck"
    needs = ""
    synchronous = False
    use = "attach with its defaults (two slots in one pool); session.end_step()"

    def __init__(self, **options: Any) -> None:
        """``options``: keyword arguments of ``lightck.attach`` (``interval``, ``backend``, ``slots``, ...)."""
        self.options = options
        self.session: lightck.Session | None = None

    @property
    def saved(self) -> int:
        committed = self.session.committed if self.session is not None else None
        return -1 if committed is None else committed

    def start(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        self.session = lightck.attach(model, Path(folder) / "training.pool", optimizer=optimizer, **self.options)

    def save(self, step: int) -> None:
        assert self.session is not None
        self.session.end_step()

    def finish(self) -> None:
        assert self.session is not None
        self.session.close()

    def load(self, model: nn.Module, optimizer: Optimizer, folder: str) -> int:
        return lightck.recover(Path(folder) / "training.pool", model, optimizer).step
