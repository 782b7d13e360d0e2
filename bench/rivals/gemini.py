"""``lm-resiliency`` (PyPI, github.com/LMResiliency/lm-resiliency): GEMINI's checkpoints in host memory (SOSP 2023), by
its ``InMemoryCheckpointManager``, called where its documentation has it: after the update.

What is in the memory of the process goes with it. So that it survives what the others survive, each checkpoint is
flushed to its node-local tier as soon as it is copied (``flush_to_disk``); left to its ``disk_flush_interval`` a step
is written when the next one is saved.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch
from lm_resiliency.checkpointing import InMemoryCheckpointManager, InMemoryCkptConfig
from torch import nn
from torch.optim import Optimizer

from bench.rivals.steps import KEPT
from bench.rivals.torch_save import everything, put_back


class InMemory:
    name = "lm-resiliency"
    needs = "lm-resiliency"
    synchronous = False
    use = "InMemoryCheckpointManager, verify_integrity, flush_to_disk of each as soon as it is copied; last two kept"

    def start(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        self.model, self.optimizer, self.folder = model, optimizer, folder
        self.manager = manager_in(folder)

    @property
    def saved(self) -> int:
        return max(flushed(self.folder), default=-1)

    def save(self, step: int) -> None:
        self.manager.save(everything(self.model, self.optimizer, step), step)
        self.manager.maybe_wait()  # flush only what is copied
        self.manager.flush_to_disk(step)  # waits for the previous one
        for _, path in sorted(flushed(self.folder).items())[:-KEPT]:
            shutil.rmtree(path)

    def finish(self) -> None:
        self.manager.close()

    def load(self, model: nn.Module, optimizer: Optimizer, folder: str) -> int:
        manager = manager_in(folder)
        try:
            found = manager.load()
        finally:
            manager.close()
        if found is None:
            raise FileNotFoundError(f"nothing that it loads in {folder!r}")
        return put_back(found[0], model, optimizer)


def manager_in(folder: str) -> InMemoryCheckpointManager:
    return InMemoryCheckpointManager(
        InMemoryCkptConfig(
            interval=1,
            disk_flush_interval=0,
            disk_folder=folder,
            run_id="bench",
            verify_integrity=True,
            pin_memory=torch.cuda.is_available(),
        )
    )


def flushed(folder: str) -> dict[int, Path]:
    """Step -> its folder, of every checkpoint with its final name: ``runs/<run>/<topology>/step-N/rank-0.pt``."""
    found = {}
    for shard in Path(folder).glob("runs/*/*/step-*/rank-0.pt"):
        if step := re.fullmatch(r"step-(\d+)", shard.parent.name):
            found[int(step[1])] = shard.parent
    return found
