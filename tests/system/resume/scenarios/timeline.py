"""Trainings for the tests of timelines: one that can stop and branch off, one whose workers outlive it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ..run import Run
from . import scenario
from .parts import BATCH, UPDATES, drawn_batch, fixed_data, mlp


@scenario(listed=False)
def branching(run: Run) -> None:
    """Options: ``stop_at``: end there, properly. ``branch_at``: from this update on the rate is another one."""
    run.seed()
    model = mlp(dropout=0.2, norm=True)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model, optimizer=opt)
    run.here("after attach")
    for step in range(session.step, UPDATES):
        if step == run.options.get("stop_at"):
            return
        if step == run.options.get("branch_at"):
            opt.param_groups[0]["lr"] = 3e-2
        x, y = drawn_batch()
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        run.updated(loss)
    run.finished(model, [opt])


class Held(Dataset[Any]):
    """A worker that comes to item ``at`` writes its pid and stays there while the file is there and empty of "go"."""

    def __init__(self, at: int, hold: Path | None) -> None:
        self.x, self.y = fixed_data(30)
        self.at, self.hold = at, hold

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        worker = get_worker_info()
        assert worker is not None
        if index == self.at and self.hold is not None:
            self.hold.write_text(str(os.getpid()))
            while True:  # its parent is dead or will be; the test ends it
                time.sleep(0.05)
        return self.x[index] + 0.1 * torch.rand(()), self.y[index]


@scenario(listed=False)
def held_worker(run: Run) -> None:
    """Option ``hold``: a file that the worker which is held writes its pid to."""
    run.seed()
    model = mlp(dropout=0.2)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    hold = run.options.get("hold")
    dataset = Held(at=29, hold=Path(hold) if hold else None)
    train = session.loader(DataLoader(dataset, BATCH, num_workers=2, prefetch_factor=1))
    for _ in range(train.epoch, 2):
        for i, (x, y) in enumerate(train, train.start):
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            run.updated(loss)
            if hold and i == 3:  # the fifth batch is with the held worker
                while not Path(hold).exists() or not Path(hold).read_text():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
    run.finished(model, [opt])
