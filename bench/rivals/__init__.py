"""Other ways to save a training, and lightck itself, behind one seam: each is used as its own documentation says.

A module per library, imported when it is asked for. Each adapter saves model, optimizer and step, and nothing else, so
that what is compared is the same. Where a library leaves it to the user which checkpoints to keep, the last two
finished ones are kept and tried from the newest on: kinder than the minimum that its documentation shows.
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
    """Whether a checkpoint is complete when ``save`` returns."""
    use: str
    """How it is used here, in words for a table."""

    @property
    def saved(self) -> int:
        """The newest step that the library has reported as completely saved; -1 before the first."""

    def start(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        """Once, before the first step. ``folder`` is empty."""

    def save(self, step: int) -> None:
        """At a boundary; ``step`` is the number of updates made. Returns when the training may go on."""

    def finish(self) -> None:
        """Wait for what is in the background."""

    def load(self, model: nn.Module, optimizer: Optimizer, folder: str) -> int:
        """Into live objects: the newest that it can; its step. Any error is a refusal."""


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
EVERY_STEP: dict[str, dict[str, Any]] = {"CheckFreq": {"interval": 1}}
"""Options without which a rival would choose itself which of the calls save: CheckFreq's own rule for the frequency."""
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
    package = _PACKAGES.get(TABLE[name].split(":")[0], "")
    if package and find_spec(package) is None:
        extra = "bench-gpu" if name in _NEED_ACCELERATOR else "bench"
        return f"{package} is not installed (pip install -c constraints.txt '.[{extra}]')"
    return ""


def named(name: str, **options: Any) -> Rival:
    """A fresh adapter. ``options`` go to its class."""
    module, cls = TABLE[name].split(":")
    made: Rival = getattr(import_module(f"bench.rivals.{module}"), cls)(**options)
    return made
