"""CheckFreq's policy (Mohan, Phanishayee, Chidambaram, FAST 2021), re-implemented: the baseline of LightCheck's paper.

Two phases: a snapshot in memory overlaps with the next forward and backward and holds up the next update; a thread
persists it (write, fsync), one at a time; the older checkpoint is removed afterwards. Of a CUDA device the snapshot is
taken on a stream of its own, into pinned memory.

The frequency rule, after the authors' paper and release: the smallest interval at which one persist ends before the
next snapshot begins, from a profile of the first iterations; then two iterations more whenever the overhead over an
interval exceeds the bound (3.5 % in the paper). Their iterator for data is left out, and so is their choice between GPU
and CPU snapshots.
"""

from __future__ import annotations

import math
import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bench.rivals import steps
from bench.rivals.torch_save import everything, put_back_newest

WARM_UP = 5


class CheckFreq:
    name = "CheckFreq"
    needs = ""
    synchronous = False
    use = "its policy re-implemented: snapshot, then persist in a thread; one finished and one in the making"

    def __init__(self, interval: int | None = None, bound: float = 0.035, profiled: int = 20) -> None:
        """``interval``: a fixed one (manual mode); None: CheckFreq's rule, after ``WARM_UP + profiled`` iterations."""
        self.interval = interval
        self.follows_rule = interval is None
        self.bound, self.profiled = bound, profiled
        self.finished = -1
        self.iterations: list[float] = []
        self.iteration_seconds = 0.0
        self.since = 0
        self.before = time.perf_counter()
        self.thread: threading.Thread | None = None
        self.is_copied = threading.Event()
        self.is_copied.set()
        self.failure: BaseException | None = None
        self.stage: Stage | None = None
        """The snapshot stream and buffers, if the state is on a CUDA device."""
        self.undo: list[Callable[[], None]] = []

    @property
    def saved(self) -> int:
        return self.finished

    def start(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        self.model, self.optimizer, self.folder = model, optimizer, folder
        self.undo = steps.before_changes(model, optimizer, self.is_copied.wait)
        self.before = time.perf_counter()

    def save(self, step: int) -> None:
        """Called at every boundary; the policy decides which of them are saved."""
        self._raise_failure()
        if self.interval is None:
            self._profile(step)
        else:
            self.since += 1
            if self.since >= self.interval:
                self.since = 0
                self._checkpoint(step)
        now = time.perf_counter()
        self.iterations.append(now - self.before)
        self.before = now
        if self.follows_rule and self.interval is not None and len(self.iterations) >= self.interval:
            self._tune()

    def finish(self) -> None:
        self._join()
        for undo in self.undo:
            undo()
        self._raise_failure()

    def load(self, model: nn.Module, optimizer: Optimizer, folder: str) -> int:
        return put_back_newest(model, optimizer, folder)

    # -- frequency ---------------------------------------------------------------------------------------

    def _profile(self, step: int) -> None:
        if len(self.iterations) < WARM_UP + self.profiled:
            return
        self.iteration_seconds = statistics.mean(self.iterations[WARM_UP:])
        began = time.perf_counter()
        self._checkpoint(step)
        self.is_copied.wait()
        snapshot = time.perf_counter() - began
        self._join()
        whole = time.perf_counter() - began
        self.interval = max(1, math.ceil((whole - snapshot) / self.iteration_seconds))
        self.iterations.clear()
        self.before = time.perf_counter()  # profiling is not counted as overhead

    def _tune(self) -> None:
        assert self.interval is not None
        expected = self.iteration_seconds * len(self.iterations)
        if sum(self.iterations) > expected * (1 + self.bound):
            self.interval += 2
        self.iterations.clear()

    # -- two phases --------------------------------------------------------------------------------------

    def _checkpoint(self, step: int) -> None:
        self._join()
        state = everything(
            self.model, self.optimizer, step
        )  # here, since a scheduler may change the groups at any time
        if self.stage is None:
            self.stage = stage_of(self.model)
        if self.stage is not None:
            self.stage.mark()
        self.is_copied.clear()
        self.thread = threading.Thread(target=self._snapshot_and_persist, args=(step, state), daemon=True)
        self.thread.start()

    def _snapshot_and_persist(self, step: int, state: dict[str, Any]) -> None:
        try:
            try:
                snapshot = copied(state) if self.stage is None else self.stage.copied(state)
            finally:
                self.is_copied.set()
            persist(snapshot, steps.path_of(self.folder, step))
            self.finished = step
            for older in [s for s in steps.steps_in(self.folder) if s < step]:
                steps.path_of(self.folder, older).unlink()
        except BaseException as err:
            self.failure = err

    def _join(self) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure


class Stage:
    """A snapshot out of a CUDA device: on a stream beside the training's, after what that had to do when ``mark`` was
    called, into pinned buffers that are used again (one snapshot at a time), with one wait at the end."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream, self.marked = torch.cuda.Stream(device), torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.buffers: list[torch.Tensor] = []

    def mark(self) -> None:
        """Mark the state as the training's stream has it now; called on the training thread."""
        self.marked.record(torch.cuda.current_stream(self.device))

    def copied(self, state: Any) -> Any:
        taken = 0

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal taken
            if not tensor.is_cuda:
                return host(tensor)
            buffer = self._buffer(taken, tensor)
            taken += 1
            return buffer.copy_(tensor.detach(), non_blocking=True)

        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.marked)
            snapshot = copied(state, copy)
        self.stream.synchronize()
        return snapshot

    def _buffer(self, number: int, tensor: torch.Tensor) -> torch.Tensor:
        """The pinned buffer of a tensor, reused in each snapshot: pinning takes longer than copying."""
        if number < len(self.buffers):
            kept = self.buffers[number]
            if (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype):
                return kept
        self.buffers[number:] = [torch.empty_like(tensor, device="cpu", pin_memory=True)]
        return self.buffers[number]


def stage_of(model: nn.Module) -> Stage | None:
    devices = [tensor.device for tensor in model.parameters() if tensor.is_cuda]
    return Stage(devices[0]) if devices else None


def host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def copied(state: Any, copy: Callable[[torch.Tensor], torch.Tensor] = host) -> Any:
    if isinstance(state, torch.Tensor):
        return copy(state)
    if isinstance(state, dict):
        return {key: copied(value, copy) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(copied(value, copy) for value in state)
    return state


def persist(state: Any, path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
