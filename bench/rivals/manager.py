"""``torch_checkpointing`` (PyPI, github.com/meta-pytorch/torch_checkpointing): Meta's successor of the experimental
checkpointer in ``torch.distributed.checkpoint``, with ``CheckpointManager`` as its entry. Used after its tutorial.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch_checkpointing import CheckpointManager

from bench.rivals import steps
from bench.rivals.torch_save import everything


class SyncSave(steps.PerStep):
    name = "torch_checkpointing (sync)"
    needs = "torch_checkpointing"
    synchronous = True
    use = "CheckpointManager, with_sync_save; a folder per step, last two kept"

    def start(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        super().start(model, optimizer, folder)
        self.manager = CheckpointManager(self.config())

    def config(self) -> Any:
        return CheckpointManager.Config.with_sync_save()

    def save(self, step: int) -> None:
        self.manager.save(str(steps.path_of(self.folder, step)), everything(self.model, self.optimizer, step))
        self.is_finished(step)

    def finish(self) -> None:
        self.manager.close()

    def load(self, model: nn.Module, optimizer: Optimizer, folder: str) -> int:
        manager = CheckpointManager(CheckpointManager.Config.with_sync_save())

        def load(path: Path) -> int:
            into = {"model": model.state_dict(), "optimizer": None, "step": 0}
            restored = manager.load(str(path), into=into, strict=True)
            optimizer.load_state_dict(restored["optimizer"])
            return int(restored["step"])

        try:
            return steps.newest_that_loads(folder, load)
        finally:
            manager.close()


class AsyncSave(SyncSave):
    """The tutorial holds ``manager.lock()`` around ``optimizer.step()``; here a hook waits for it before the update,
    and before the forward of a model with buffers, which the tutorial's model does not have."""

    name = "torch_checkpointing (async)"
    synchronous = False
    use = "CheckpointManager, with_async_save, lock() before forward and update; a folder per step, last two kept"

    def __init__(self) -> None:
        super().__init__()
        self.pending: tuple[int, Any] | None = None
        self.undo: list[Callable[[], None]] = []

    @property
    def saved(self) -> int:
        if self.pending is not None and self.pending[1].done() and self.pending[1].exception() is None:
            return self.pending[0]
        return self.finished

    def start(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        super().start(model, optimizer, folder)
        self.undo = steps.before_changes(model, optimizer, self.wait_for_staging)

    def config(self) -> Any:
        return CheckpointManager.Config.with_async_save()

    def wait_for_staging(self) -> None:
        with self.manager.lock():
            pass

    def save(self, step: int) -> None:
        before = self.pending
        future = self.manager.save(str(steps.path_of(self.folder, step)), everything(self.model, self.optimizer, step))
        self.pending = step, future
        if before is not None:  # the manager has waited for the save
            before[1].result()
            self.is_finished(before[0])

    def finish(self) -> None:
        try:
            if self.pending is not None:
                step, future = self.pending
                self.pending = None
                future.result()
                self.is_finished(step)
        finally:
            for undo in self.undo:
                undo()
            super().finish()
