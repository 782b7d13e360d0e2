"""``nvidia-resiliency-ext`` (PyPI, github.com/NVIDIA/nvidia-resiliency-ext): ``TorchAsyncCheckpoint``, which is
``torch.save`` in a process of its own, after its documentation. It synchronises with a CUDA device and asks for a rank.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint
from torch import nn
from torch.optim import Optimizer

from bench.rivals import steps
from bench.rivals.torch_save import everything, put_back_newest

_SECONDS_MAX, _POLL_SECONDS = 600, 0.0005


class AsyncTorchSave(steps.PerStep):
    name = "nvidia-resiliency-ext"
    needs = "nvidia-resiliency-ext"
    synchronous = False
    use = (
        "TorchAsyncCheckpoint, persistent queue, finalized before the next save, tensors on the CPU cloned first; "
        "a file per step, last two kept"
    )

    def __init__(self) -> None:
        super().__init__()
        self.pending: int | None = None

    def start(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        super().start(model, optimizer, folder)
        steps.join_a_group_of_one()
        self.saver = TorchAsyncCheckpoint(persistent_queue=True)

    @property
    def saved(self) -> int:
        self.finalize()
        return self.finished

    def save(self, step: int) -> None:
        self.wait()
        state = cloned(everything(self.model, self.optimizer, step))
        self.saver.async_save(state, steps.path_of(self.folder, step))
        self.pending = step

    def finalize(self, *, terminate: bool = False) -> None:
        """Whether the save is done, read from its queue: ``finalize_async_save`` does not report it."""
        self.saver.finalize_async_save(blocking=False, no_dist=True, terminate=terminate)
        if self.pending is not None and self.saver._async_calls_queue.get_num_unfinalized_calls() == 0:
            step, self.pending = self.pending, None
            self.is_finished(step)

    def wait(self) -> None:
        """Wait without ``blocking``, which would wait for ever if its process has died."""
        deadline = time.monotonic() + _SECONDS_MAX
        self.finalize()
        while self.pending is not None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"its process has not saved step {self.pending} within {_SECONDS_MAX} seconds")
            time.sleep(_POLL_SECONDS)
            self.finalize()

    def finish(self) -> None:
        self.wait()
        self.finalize(terminate=True)

    def load(self, model: nn.Module, optimizer: Optimizer, folder: str) -> int:
        return put_back_newest(model, optimizer, folder)


def cloned(state: Any) -> Any:
    """Clone tensors on the CPU: the library stages with ``tensor.to("cpu")``, which returns those live."""
    if isinstance(state, torch.Tensor):
        return state if state.is_cuda else state.detach().clone()
    if isinstance(state, dict):
        return {key: cloned(value) for key, value in state.items()}
    return [cloned(value) for value in state] if isinstance(state, list) else state
