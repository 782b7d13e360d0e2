"""Checkpoints in one folder per step, and the hook that waits for a background copy before the state changes.

Libraries leave this to their users: names, how many are kept, which is loaded first.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

KEPT = 2


def join_a_group_of_one() -> None:
    """Create a process group, for libraries that need a rank. It is left open."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class PerStep:
    """Base class of adapters that keep a checkpoint per step at ``path_of``."""

    model: nn.Module
    optimizer: Optimizer
    folder: str

    def __init__(self) -> None:
        self.finished = -1

    @property
    def saved(self) -> int:
        return self.finished

    def start(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        self.model, self.optimizer, self.folder = model, optimizer, folder

    def is_finished(self, step: int) -> None:
        """Record that a checkpoint is complete, and remove all older ones but the last."""
        self.finished = step
        remove_older(self.folder, step)


def path_of(folder: str | os.PathLike[str], step: int) -> Path:
    return Path(folder) / f"step-{step:08}"


def steps_in(folder: str | os.PathLike[str]) -> list[int]:
    """The steps of complete checkpoints, newest first."""
    names = (re.fullmatch(r"step-(\d{8})", entry.name) for entry in Path(folder).iterdir())
    return sorted((int(name[1]) for name in names if name), reverse=True)


def remove_older(folder: str | os.PathLike[str], finished: int) -> None:
    """Remove all but the last ``KEPT`` finished checkpoints; a newer one that is being written stays."""
    for step in [step for step in steps_in(folder) if step <= finished][KEPT:]:
        path = path_of(folder, step)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def newest_that_loads(folder: str | os.PathLike[str], load: Callable[[Path], int]) -> int:
    """Load the newest checkpoint for which ``load`` does not raise; if all raise, raise the last error."""
    refusal: Exception = FileNotFoundError(f"no checkpoint in {os.fspath(folder)!r}")
    for step in steps_in(folder):
        try:
            return load(path_of(folder, step))
        except Exception as err:
            refusal = err
    raise refusal


def before_changes(model: nn.Module, optimizer: Optimizer, wait: Callable[[], object]) -> list[Callable[[], None]]:
    """Have ``wait`` called before anything that a checkpoint holds changes: at the update, and where the model has
    buffers (BatchNorm counts in its forward) at the training forward. Returns what undoes it."""

    def hook(*_: object) -> None:  # a return value would replace the input
        wait()

    handles = [optimizer.register_step_pre_hook(hook)]
    if any(True for _ in model.buffers()):
        handles.append(model.register_forward_pre_hook(hook))
    return [handle.remove for handle in handles]
