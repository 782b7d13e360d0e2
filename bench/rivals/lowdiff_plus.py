"""LowDiff+ (the variant without compression in the same paper as LowDiff), re-implemented in one process.

Theirs, as published: a replica of parameters and optimizer state in the memory of the host, to which each gradient goes
as it becomes ready; an optimizer of the same class updates it there, at most two updates behind the training. If only
the training fails, it goes on from the replica. The replica is persisted now and then.

Ours: gradients are on the host already, so they are held and not copied; a thread updates the replica, and writes it
with torch.save every ``persist_every`` updates, before its next update. So they are captured right before the update,
and clipping is part of them here, which it is not in theirs. As in theirs, options that change later (a schedule) are
not followed, buffers are not saved, and nothing is checked or synced.

The replica dies with the process. So what the bench loads is the newest one in a file: a kill loses up to
``persist_every`` updates, and two more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bench.rivals import steps
from bench.rivals.lowdiff import Worker
from bench.rivals.torch_save import everything, put_back_newest


class LowDiffPlus:
    name = "LowDiff+"
    needs = ""
    synchronous = False
    use = "its algorithm re-implemented: a replica in memory, updated in a thread, in a file (torch.save) now and then"

    def __init__(self, persist_every: int = 12) -> None:
        self.persist_every = persist_every
        self.finished, self.last = -1, 0
        self.consumed: list[torch.Tensor | None] | None = None
        self.worker = Worker()
        self.undo: list[Callable[[], None]] = []

    @property
    def saved(self) -> int:
        return self.finished

    def start(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        self.params, self.folder = list(model.parameters()), folder
        self.replica = copy.deepcopy(model)
        theirs = dict(zip(self.params, self.replica.parameters(), strict=True))
        groups: list[dict[str, Any]] = [
            {**group, "params": [theirs[p] for p in group["params"]]} for group in optimizer.param_groups
        ]
        make: Any = type(optimizer)
        self.updater: Optimizer = make(groups)
        self.updater.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        self.undo = [optimizer.register_step_pre_hook(lambda *_: self._capture()).remove]
        self.worker.start()

    def save(self, step: int) -> None:
        """Called after every update, which the replica makes too."""
        if step != self.last + 1:
            raise RuntimeError(f"the update before step {step} was not saved: the newest is that of step {self.last}")
        consumed, self.consumed, self.last = self.consumed, None, step
        self.worker.submit(lambda: self._follow(step, consumed))

    def finish(self) -> None:
        """Persist the replica of the last update."""
        self.worker.submit(lambda: self._persist(self.last))
        for undo in self.undo:
            undo()
        self.worker.finish()

    def load(self, model: nn.Module, optimizer: Optimizer, folder: str) -> int:
        return put_back_newest(model, optimizer, folder)

    def _capture(self) -> None:
        self.consumed = [p.grad for p in self.params]

    def _follow(self, step: int, consumed: list[torch.Tensor | None] | None) -> None:
        assert consumed is not None, "an update came before"
        for p, gradient in zip(self.replica.parameters(), consumed, strict=True):
            p.grad = gradient
        self.updater.step()
        self.updater.zero_grad()
        if step % self.persist_every == 0:
            self._persist(step)

    def _persist(self, step: int) -> None:
        if step > self.finished:
            torch.save(everything(self.replica, self.updater, step), steps.path_of(self.folder, step))
            self.finished = step
            steps.remove_older(self.folder, step)
