"""``nvidia-resiliency-ext`` (PyPI, github.com/NVIDIA/nvidia-resiliency-ext): ``TorchAsyncCheckpoint``, which is
``torch.save`` in a process of its own, after its documentation. It synchronises with a CUDA device and asks for a rank.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint
from torch import nn
from torch.optim import Optimizer

from bench.rivals import steps
from bench.rivals.torch_save import everything, put_back


class AsyncTorchSave(steps.PerStep):
    name = "nvidia-resiliency-ext"
    needs = "nvidia-resiliency-ext"
    synchronous = False
    use = "TorchAsyncCheckpoint, persistent queue, finalized before the next save; a file per step, last two kept"

    def __init__(self) -> None:
        super().__init__()
        self.pending: int | None = None

    def start(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        super().start(model, optimizer, folder)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.saver = TorchAsyncCheckpoint(persistent_queue=True)

    @property
    def saved(self) -> int:
        self.finalize(blocking=False)
        return self.finished

    def save(self, step: int) -> None:
        self.finalize(blocking=True)
        self.saver.async_save(everything(self.model, self.optimizer, step), steps.path_of(self.folder, step))
        self.pending = step

    def finalize(self, *, blocking: bool, terminate: bool = False) -> None:
        """``finalize_async_save`` does not say whether it found the save done: that stands in its queue only."""
        self.saver.finalize_async_save(blocking=blocking, no_dist=True, terminate=terminate)
        if self.pending is not None and self.saver._async_calls_queue.get_num_unfinalized_calls() == 0:
            step, self.pending = self.pending, None
            self.is_finished(step)

    def finish(self) -> None:
        self.finalize(blocking=True, terminate=True)

    def load(self, model: nn.Module, optimizer: Optimizer, folder: str) -> int:
        def load(path: Path) -> int:
            return put_back(torch.load(path, weights_only=True), model, optimizer)

        return steps.newest_that_loads(folder, load)
