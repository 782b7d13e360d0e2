"""LowDiff's algorithm (Yao, Hu and others, SC 2025, arXiv 2509.04084), re-implemented in one process.

Theirs, as published: the gradient that an update consumes is the differential checkpoint, so nothing is computed for
it; differentials are collected in memory, and written in batches of ``batch``; a full checkpoint every ``base_every``
updates. To recover, the newest full checkpoint is loaded, and the optimizer makes steps from the differentials. They
have two ways to do so, which are two classes here:

- ``LowDiff``: differentials are merged by summation, and the optimizer steps once from a sum. It is exact only where
  an update is linear in its gradients, as with plain SGD.
- ``OneByOne``: a file holds the differentials of a batch apart, and the optimizer steps once for each, as their
  released code does for batches.

``TopK`` is the second with the compression that they assume: all but the largest entries of each gradient are set to
zero before the update, and a differential holds indices and values of the others.

Ours: the merge within each batch, before it is written (their release sums all differentials at recovery); a thread
that writes with torch.save, and that may be two updates behind; a copy of the state for the full checkpoint, on the
training thread; the last full checkpoint but one is kept with its differentials. As in theirs, options of the
optimizer, buffers and random numbers of the updates between two full checkpoints are not saved, nothing is checked or
synced, and what is not in a batch yet is lost with the process.

The loop has to set gradients to None (``zero_grad()``), since they are not copied.
"""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bench.rivals import steps
from bench.rivals.checkfreq import copied
from bench.rivals.torch_save import everything, put_back_newest

BEHIND_MAX = 2
Differential = dict[str, Any]
"""Name of a parameter -> its gradient, or (indices, values) of the entries that are not zero."""


class LowDiff:
    name = "LowDiff"
    needs = ""
    synchronous = False
    use = (
        "its algorithm re-implemented: sums of gradients in batches, torch.save in a thread, then one step for each sum"
    )
    ratio: float | None = None
    """The share of the entries of a gradient that the update consumes; None: all."""

    def __init__(self, base_every: int = 12, batch: int = 4) -> None:
        self.base_every, self.batch = base_every, batch
        self.finished, self.last, self.replayed = -1, 0, 0
        self.consumed: Differential | None = None
        self.collected: list[Differential] = []
        self.n_collected = 0
        self.worker = Worker()
        self.undo: list[Callable[[], None]] = []

    @property
    def saved(self) -> int:
        return self.finished

    def start(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        self.model, self.optimizer, self.folder = model, optimizer, Path(folder)
        self.undo = [optimizer.register_step_pre_hook(lambda *_: self._capture()).remove]
        self.worker.start()

    def save(self, step: int) -> None:
        """Called after every update, since a differential is the difference to the update before."""
        if self.last and step != self.last + 1:
            raise RuntimeError(f"the update before step {step} was not saved: the newest is that of step {self.last}")
        consumed, self.consumed = self.consumed, None
        is_first, self.last = self.last == 0, step
        if is_first or step % self.base_every == 0:
            state = copied(everything(self.model, self.optimizer, step))
            if not is_first:
                self.worker.submit(lambda: self._collect(step, consumed, is_last=True))
            self.worker.submit(lambda: self._write_base(step, state))
        else:
            self.worker.submit(lambda: self._collect(step, consumed))

    def finish(self) -> None:
        """Write the incomplete batch too, which a kill would lose."""
        self.worker.submit(lambda: self._write_batch(self.last))
        for undo in self.undo:
            undo()
        self.worker.finish()

    def load(self, model: nn.Module, optimizer: Optimizer, folder: str) -> int:
        step = put_back_newest(model, optimizer, folder)
        for first, last, path in batches_in(Path(folder)):
            if first <= step:
                continue
            if first != step + 1:
                break
            for differential in torch.load(path, weights_only=True)["differentials"]:
                make_update(model, optimizer, differential)
                self.replayed += 1
            step = last
        return step

    # -- on the training thread --------------------------------------------------------------------------

    def _capture(self) -> None:
        """Hold what the update is about to consume."""
        names = {p: name for name, p in self.model.named_parameters()}
        params = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.consumed = {names[p]: self._compressed(p.grad) for p in params}

    @torch.no_grad()
    def _compressed(self, gradient: torch.Tensor) -> Any:
        """Return the gradient, or what is kept of it, to which it is set."""
        if self.ratio is None:
            return gradient
        flat = gradient.view(-1)
        indices = flat.abs().topk(max(1, int(self.ratio * flat.numel())), sorted=False).indices
        values = flat[indices]
        flat.zero_()
        flat[indices] = values
        return indices.to(torch.int32), values

    # -- on the worker's thread --------------------------------------------------------------------------

    def _collect(self, step: int, consumed: Differential | None, is_last: bool = False) -> None:
        assert consumed is not None, "an update came before"
        self._add(consumed)
        self.n_collected += 1
        if is_last or self.n_collected == self.batch:
            self._write_batch(step)

    def _add(self, consumed: Differential) -> None:
        """Merge by summation, into the first of a batch."""
        if not self.collected:
            self.collected = [consumed]
            return
        (merged,) = self.collected
        for name, gradient in consumed.items():
            merged[name] = merged[name].add_(gradient) if name in merged else gradient

    def _write_batch(self, last: int) -> None:
        if self.n_collected:
            first = last - self.n_collected + 1
            torch.save({"differentials": self.collected}, self.folder / f"batch-{first:08}-{last:08}")
            self.finished, self.collected, self.n_collected = last, [], 0

    def _write_base(self, step: int, state: dict[str, Any]) -> None:
        torch.save(state, steps.path_of(self.folder, step))
        self.finished = step
        steps.remove_older(self.folder, step)
        oldest = min(steps.steps_in(self.folder))
        for _, last, path in batches_in(self.folder):
            if last <= oldest:
                path.unlink()


class OneByOne(LowDiff):
    name = "LowDiff (one by one)"
    use = "its algorithm re-implemented: gradients in batches, torch.save in a thread, then one step for each gradient"

    def _add(self, consumed: Differential) -> None:
        self.collected.append(consumed)


class TopK(OneByOne):
    name = "LowDiff (top-k)"
    use = "the same, and updates consume the largest 1 % of each gradient (torch.topk): indices and values are saved"
    ratio = 0.01


class Worker:
    """A thread that makes one job after the other. ``submit`` waits if it is ``BEHIND_MAX`` jobs behind, and raises the
    error of an earlier job."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(BEHIND_MAX)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._raise_failure()
        self._jobs.put(job)

    def finish(self) -> None:
        self._jobs.put(None)
        self._thread.join()
        self._raise_failure()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._failure is None:
                    job()
            except BaseException as err:
                self._failure = err
            job = None  # it holds gradients

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def batches_in(folder: Path) -> list[tuple[int, int, Path]]:
    """The batches as (first step, last step, path), oldest first."""
    found = ((re.fullmatch(r"batch-(\d{8})-(\d{8})", path.name), path) for path in folder.iterdir())
    return sorted((int(name[1]), int(name[2]), path) for name, path in found if name)


def make_update(model: nn.Module, optimizer: Optimizer, differential: Differential) -> None:
    """Let the optimizer make one step from a differential."""
    optimizer.zero_grad()
    params = dict(model.named_parameters())
    for name, gradient in differential.items():
        p = params[name]
        if isinstance(gradient, torch.Tensor):
            p.grad = gradient
        else:
            indices, values = gradient
            p.grad = torch.zeros_like(p)
            p.grad.view(-1)[indices.long()] = values
    optimizer.step()
    optimizer.zero_grad()
