"""``torch.save`` of a dict of state dicts, as in PyTorch's tutorial on general checkpoints: overwriting one file in
place, and with atomic replacement. The tutorial does not mention crashes; both are common.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bench.rivals import steps


def everything(model: nn.Module, optimizer: Optimizer, step: int) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}


def put_back(state: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> int:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def put_back_newest(model: nn.Module, optimizer: Optimizer, folder: str) -> int:
    """Load from a folder with a file of ``torch.save`` per step."""

    def load(path: Path) -> int:
        return put_back(torch.load(path, weights_only=True), model, optimizer)

    return steps.newest_that_loads(folder, load)


class InPlace:
    name = "torch.save"
    needs = ""
    synchronous = True
    use = "one file, overwritten at each save; torch.load(weights_only=True)"

    def __init__(self) -> None:
        self.saved = -1

    def start(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        self.model, self.optimizer, self.path = model, optimizer, Path(folder) / "checkpoint.pt"

    def save(self, step: int) -> None:
        torch.save(everything(self.model, self.optimizer, step), self.path)
        self.saved = step

    def finish(self) -> None:
        pass

    def load(self, model: nn.Module, optimizer: Optimizer, folder: str) -> int:
        return put_back(torch.load(Path(folder) / "checkpoint.pt", weights_only=True), model, optimizer)


class Renamed:
    name = "torch.save + rename"
    needs = ""
    synchronous = True
    use = "a file per step: temporary name, fsync, rename, fsync of the folder; last two kept"

    def __init__(self) -> None:
        self.saved = -1

    def start(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        self.model, self.optimizer, self.folder = model, optimizer, folder

    def save(self, step: int) -> None:
        write_renamed(everything(self.model, self.optimizer, step), steps.path_of(self.folder, step))
        self.saved = step
        steps.remove_older(self.folder, step)

    def finish(self) -> None:
        pass

    def load(self, model: nn.Module, optimizer: Optimizer, folder: str) -> int:
        return put_back_newest(model, optimizer, folder)


def write_renamed(state: dict[str, Any], path: Path) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
