"""``torchsnapshot``: ``Snapshot.take`` and ``Snapshot.async_take``, as its "Getting Started" has them.

Its last release (0.1.0, 2023) is older than the torch of today; with torch 2.13 both save and restore exactly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torchsnapshot import Snapshot, StateDict

from bench.rivals import steps


class Take(steps.PerStep):
    name = "torchsnapshot.take"
    needs = "torchsnapshot"
    synchronous = True
    use = "Snapshot.take, a folder per step; last two kept"

    def state(self, step: int) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "extra": StateDict(step=step)}

    def save(self, step: int) -> None:
        Snapshot.take(path=str(steps.path_of(self.folder, step)), app_state=self.state(step))
        self.is_finished(step)

    def finish(self) -> None:
        pass

    def load(self, model: nn.Module, optimizer: Optimizer, folder: str) -> int:
        def load(path: Path) -> int:
            extra = StateDict(step=-1)
            Snapshot(path=str(path)).restore({"model": model, "optimizer": optimizer, "extra": extra})
            return int(extra["step"])

        return steps.newest_that_loads(folder, load)


class AsyncTake(Take):
    name = "torchsnapshot.async_take"
    synchronous = False
    use = "Snapshot.async_take, the one before awaited first; a folder per step, last two kept"

    def __init__(self) -> None:
        super().__init__()
        self.pending: tuple[int, Any] | None = None

    @property
    def saved(self) -> int:
        if self.pending is not None and self.pending[1].done():
            self.finish()  # ``done`` is also true of one that failed: its error is raised here
        return self.finished

    def save(self, step: int) -> None:
        self.finish()
        self.pending = step, Snapshot.async_take(path=str(steps.path_of(self.folder, step)), app_state=self.state(step))

    def finish(self) -> None:
        if self.pending is not None:
            step, snapshot = self.pending
            self.pending = None
            snapshot.wait()
            self.is_finished(step)
