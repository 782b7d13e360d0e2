"""Model and optimizer flattened into one safetensors file. The format holds tensors and a map of strings; all other
state of an optimizer goes into that map as JSON, code that a user has to write too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.optim import Optimizer

from bench.rivals import steps


class SafetensorsFile:
    name = "safetensors"
    needs = "safetensors"
    synchronous = True
    use = "save_file of a flat dict, a file per step; last two kept"

    def __init__(self) -> None:
        self.saved = -1

    def start(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        self.model, self.optimizer, self.folder = model, optimizer, folder

    def save(self, step: int) -> None:
        tensors, rest = flat(self.model, self.optimizer)
        metadata = {"step": str(step), "optimizer": json.dumps(rest)}
        save_file(tensors, steps.path_of(self.folder, step), metadata=metadata)
        self.saved = step
        steps.remove_older(self.folder, step)

    def finish(self) -> None:
        pass

    def load(self, model: nn.Module, optimizer: Optimizer, folder: str) -> int:
        def load(path: Path) -> int:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            put_back(tensors, json.loads(metadata["optimizer"]), model, optimizer)
            return int(metadata["step"])

        return steps.newest_that_loads(folder, load)


def flat(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors by name, and all other state as JSON values."""
    tensors = {f"model.{name}": tensor.contiguous() for name, tensor in model.state_dict().items()}
    state = optimizer.state_dict()
    rest: dict[str, Any] = {"param_groups": state["param_groups"], "state": {}}
    for index, values in state["state"].items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{index}.{key}"] = value.contiguous()
            else:
                rest["state"].setdefault(str(index), {})[key] = value
    return tensors, rest


def put_back(tensors: dict[str, torch.Tensor], rest: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    weights = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
    state: dict[int, dict[str, Any]] = {int(index): dict(values) for index, values in rest["state"].items()}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".", 2)
            state.setdefault(int(index), {})[key] = tensor
    model.load_state_dict(weights)
    optimizer.load_state_dict({"state": state, "param_groups": rest["param_groups"]})
