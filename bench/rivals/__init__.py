"""Adapters for other ways to save a training, and for lightck, with one interface. Each follows its own documentation.

Each library has a module, imported on use. Each adapter saves model, optimizer and step, and nothing else, so that the
comparison is fair. If a library leaves retention to the user, the adapter keeps the last two finished checkpoints and
loads the newest that works, which is more than the minimum in the documentation.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer


class Rival(Protocol):
    """One way to save. ``start`` once, then ``save`` at each boundary, then ``finish``; ``load`` on a fresh object."""

    name: str
    needs: str
    """The PyPI package beyond torch; "" if none."""
    synchronous: bool
    """Whether the checkpoint is complete when ``save`` returns."""
    use: str
    """How the library is used here, as text for a table."""

    @property
    def saved(self) -> int:
        """The newest step that the library has reported as completely saved; -1 before the first."""

    def start(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        """Called once, before the first step. ``folder`` is empty."""

    def save(self, step: int) -> None:
        """Called at a boundary; ``step`` is the number of updates made. Returns when the training may continue."""

    def finish(self) -> None:
        """Wait for background work, and release everything."""

    def load(self, model: nn.Module, optimizer: Optimizer, folder: str) -> int:
        """Load the newest usable checkpoint into live objects; returns its step. Any exception is a refusal."""


TABLE = {
    "lightck": "ours:Lightck",
    "torch.save": "torch_save:InPlace",
    "torch.save + rename": "torch_save:Renamed",
    "dcp.save": "dcp:Save",
    "dcp.async_save": "dcp:AsyncSave",
    "dcp.async_save (pinned)": "dcp:AsyncPinned",
    "dcp.async_save (process)": "dcp:AsyncProcess",
    "safetensors": "safetensors_file:SafetensorsFile",
    "torchsnapshot.take": "snapshot:Take",
    "torchsnapshot.async_take": "snapshot:AsyncTake",
    "torch_checkpointing (sync)": "manager:SyncSave",
    "torch_checkpointing (async)": "manager:AsyncSave",
    "CheckFreq": "checkfreq:CheckFreq",
    "lm-resiliency": "gemini:InMemory",
    "nvidia-resiliency-ext": "nvrx:AsyncTorchSave",
}
DIFFERENTIAL = {
    "LowDiff": "lowdiff:LowDiff",
    "LowDiff (one by one)": "lowdiff:OneByOne",
    "LowDiff (top-k)": "lowdiff:TopK",
    "LowDiff+": "lowdiff_plus:LowDiffPlus",
}
"""Rivals that save gradients, for the table ``gradients``. They are in no other table: not all of them load back the
bits that were live, and they must be called after every update."""
ALL = {**TABLE, **DIFFERENTIAL}
EVERY_STEP: dict[str, dict[str, Any]] = {"CheckFreq": {"interval": 1}}
"""Options that make a rival save at each call, where it would otherwise choose (CheckFreq's frequency rule)."""
_PACKAGES = {
    "snapshot": "torchsnapshot",
    "manager": "torch_checkpointing",
    "safetensors_file": "safetensors",
    "gemini": "lm_resiliency",
    "nvrx": "nvidia_resiliency_ext",
}
_NEED_ACCELERATOR = {"dcp.async_save (pinned)", "nvidia-resiliency-ext"}


def why_not(name: str) -> str:
    """Why this rival cannot be used here, or ""."""
    if name in _NEED_ACCELERATOR and not torch.accelerator.is_available():
        return "it needs an accelerator"
    package = _PACKAGES.get(ALL[name].split(":")[0], "")
    if package and find_spec(package) is None:
        extra = "bench-gpu" if name in _NEED_ACCELERATOR else "bench"
        return f"{package} is not installed (pip install -c constraints.txt '.[{extra}]')"
    return ""


def named(name: str, **options: Any) -> Rival:
    """A new adapter. ``options`` go to its class."""
    module, cls = ALL[name].split(":")
    made: Rival = getattr(import_module(f"bench.rivals.{module}"), cls)(**options)
    return made
