"""Data loaders that are killed in mid-epoch: plain and stateful ones, with and without workers, with evaluation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from ..run import Run
from . import add, scenario
from .parts import BATCH, CLASSES, FEATURES, fixed_data, mlp

EPOCHS, ITEMS, PASS = 3, 30, 5


class Items(Dataset[Any]):
    """Map-style. With ``augment`` each item draws from python's, numpy's and torch's global generators."""

    def __init__(self, augment: bool) -> None:
        self.x, self.y = fixed_data(ITEMS)
        self.augment = augment

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x[index]
        if self.augment:
            x = x * (1.0 + random.random()) + float(np.random.uniform(-0.1, 0.1)) + 0.1 * torch.rand(())
        return x, self.y[index]


class WorkersOnly(Items):
    """Fails where an item is not fetched by a worker."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert get_worker_info() is not None
        return super().__getitem__(index)


def _update(run: Run, model: nn.Module, opt: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    run.updated(loss)


def evaluate(run: Run, model: nn.Module, loader: Any) -> float:
    """Over a shuffled loader, which draws from the global generator at ``iter()``."""
    model.eval()
    total = 0.0
    with torch.no_grad():
        for i, (x, y) in enumerate(loader):
            total += float(F.cross_entropy(model(x), y))
            if i == 1:
                run.here("in evaluation")
    model.train()
    run.saw("evaluation")
    return total


def _dataset(workers: int, augment: bool = True) -> Items:
    return (WorkersOnly if workers else Items)(augment)


def plain_loader(run: Run, workers: int, generator: bool = False, followed: bool = False) -> None:
    """Shuffled and augmented; a second loader evaluates in mid-epoch and behind each pass, where a scheduler steps."""
    run.seed()
    model = mlp(dropout=0.2, norm=True)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-2)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=10.0)
    session = run.attach(model)
    own = torch.Generator().manual_seed(3) if generator else None
    train = session.loader(DataLoader(_dataset(workers), BATCH, shuffle=True, num_workers=workers, generator=own))
    held_out = DataLoader(_dataset(workers), 10, shuffle=True, num_workers=workers)
    if followed:
        held_out = session.loader(held_out, name="held out")
    for _ in range(train.epoch, EPOCHS):
        for i, (x, y) in enumerate(train, train.start):
            _update(run, model, opt, x, y)
            if i == 2:
                run.here("in mid-epoch")
                evaluate(run, model, held_out)
                run.here("after evaluation in mid-epoch")
        run.here("behind the pass")
        before = opt.param_groups[0]["lr"]
        sched.step(evaluate(run, model, held_out))
        run.here("after scheduler.step")
        if opt.param_groups[0]["lr"] != before:
            run.saw("lr moved")
    run.finished(model, [opt], {"scheduler": sched})


_PLAIN: dict[str, Any] = {
    "places": (
        "in mid-epoch",
        "in evaluation",
        "after evaluation in mid-epoch",
        "behind the pass",
        "after scheduler.step",
    ),
    "sees": {"evaluation": 6, "lr moved": 2},
}
add("plain loader", partial(plain_loader, workers=0), **_PLAIN)
add("plain loader with 2 workers", partial(plain_loader, workers=2), **_PLAIN)
add("plain loader with a generator of its own", partial(plain_loader, workers=0, generator=True), **_PLAIN)
add("evaluation through session.loader too", partial(plain_loader, workers=0, followed=True), **_PLAIN)


@scenario(places=("behind the pass", "in evaluation", "after scheduler.step"), sees={"evaluation": 3, "lr moved": 3})
def per_epoch_scheduler_and_evaluation(run: Run) -> None:
    """The tutorial's epoch: a pass, an evaluation, ``scheduler.step()``; the loop counts epochs and nothing else."""
    run.seed()
    model = mlp(dropout=0.2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sched = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    session = run.attach(model)
    train = session.loader(DataLoader(Items(True), BATCH, shuffle=True))
    for _ in range(train.epoch, EPOCHS):
        model.train()
        for x, y in train:
            _update(run, model, opt, x, y)
        run.here("behind the pass")
        evaluate(run, model, DataLoader(Items(True), 10, shuffle=True))
        before = opt.param_groups[0]["lr"]
        sched.step()
        run.here("after scheduler.step")
        if opt.param_groups[0]["lr"] != before:
            run.saw("lr moved")
    run.finished(model, [opt], {"scheduler": sched})


def accumulation(run: Run, workers: int) -> None:
    """Two batches for an update, by their number in the pass; the gradient of the fifth is carried into the next."""
    run.seed()
    model = mlp(dropout=0.2)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-2)
    session = run.attach(model)
    train = session.loader(DataLoader(_dataset(workers), BATCH, shuffle=True, num_workers=workers))
    for _ in range(train.epoch, 2 * EPOCHS):
        for i, (x, y) in enumerate(train, train.start):
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
            if i % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                run.updated(loss)
                opt.zero_grad()
            else:
                run.here("between micro-batches")
    run.finished(model, [opt])


add("accumulation over a loader", partial(accumulation, workers=0), places=("between micro-batches",))
add("accumulation over a loader with 2 workers", partial(accumulation, workers=2), places=("between micro-batches",))


@scenario(places=("after a skip", "in mid-epoch"), sees={"skip": 3})
def gradscaler_skips_over_a_loader(run: Run) -> None:
    """Batch 1 of each pass overflows: its update is skipped, and the position goes on."""
    run.seed()
    model = mlp(dropout=0.2)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    session = run.attach(model)
    train = session.loader(DataLoader(Items(True), BATCH, shuffle=True))
    for _ in range(train.epoch, EPOCHS):
        for i, (x, y) in enumerate(train, train.start):
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            scaler.scale(loss * (float("inf") if i == 1 else 1.0)).backward()
            scaler.step(opt)
            before = scaler.get_scale()
            scaler.update()
            if scaler.get_scale() < before:
                run.here("after a skip")
                run.skipped(loss)
            else:
                run.updated(loss)
                run.here("in mid-epoch")
    run.finished(model, [opt], {"scaler": scaler})


@scenario(places=("after the break",), sees={"break": 4})
def passes_left_by_break(run: Run) -> None:
    """Epochs of three batches out of five, each in an order of its own."""
    run.seed()
    model = mlp(dropout=0.2)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-2)
    session = run.attach(model)
    train = session.loader(DataLoader(Items(True), BATCH, shuffle=True))
    for _ in range(train.epoch, 4):
        for i, (x, y) in enumerate(train, train.start):
            if i == 3:
                run.saw("break")
                break
            _update(run, model, opt, x, y)
        run.here("after the break")
    run.finished(model, [opt])


@scenario(places=("in mid-epoch", "behind the pass"))
def two_training_loaders_in_zip(run: Run) -> None:
    """Labelled and unlabelled batches of different lengths: the second loader's pass is left where the first's ends."""
    run.seed()
    model = mlp(dropout=0.2)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-2)
    session = run.attach(model)
    labelled = session.loader(DataLoader(Items(True), BATCH, shuffle=True), name="labelled")
    other = session.loader(DataLoader(Items(True), 4, shuffle=True), name="other")
    for _ in range(labelled.epoch, EPOCHS):
        for (x, y), (u, _) in zip(labelled, other, strict=False):
            loss = F.cross_entropy(model(x), y) + 0.1 * model(u).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            run.here("in mid-epoch")
            opt.step()
            run.updated(loss)
        run.here("behind the pass")
    run.finished(model, [opt])


def left_by_break_and_begun_in_eval_mode(run: Run, always: bool) -> None:
    """An evaluation behind each pass leaves the model in eval mode; the next pass's first ``next()`` comes before
    ``model.train()``. ``always``: all norm layers are frozen, and nobody calls it."""
    run.seed()
    model = mlp(dropout=0.2, norm=True).train(not always)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-2)
    session = run.attach(model)
    train = session.loader(DataLoader(Items(True), BATCH, shuffle=True))
    while session.step < 12:
        for x, y in train:
            model.train(not always)
            _update(run, model, opt, x, y)
            if session.step % 3 == 1 < session.step:
                run.here("after the first update of a later pass")
            elif session.step % 3 == 0:
                break
        run.here("behind the pass")
        evaluate(run, model, DataLoader(Items(False), 10))
        model.eval()
    run.finished(model, [opt])


_LEFT = {"places": ("after the first update of a later pass", "behind the pass"), "sees": {"evaluation": 4}}
add("left by break and begun in eval mode", partial(left_by_break_and_begun_in_eval_mode, always=False), **_LEFT)
add("left by break and always in eval mode", partial(left_by_break_and_begun_in_eval_mode, always=True), **_LEFT)


class Stream(IterableDataset[Any]):
    """Each worker makes its own items from its own random stream."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        worker = get_worker_info()
        assert worker is not None
        for _ in range(14):
            yield torch.randn(FEATURES) * random.random(), torch.randint(CLASSES, ())


@scenario(places=("in mid-epoch", "behind the pass"))
def iterable_dataset_with_2_workers(run: Run) -> None:
    run.seed()
    model = mlp(dropout=0.2)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-2)
    session = run.attach(model)
    train = session.loader(DataLoader(Stream(), BATCH, num_workers=2, drop_last=True))
    for _ in range(train.epoch, EPOCHS):
        for i, (x, y) in enumerate(train, train.start):
            _update(run, model, opt, x, y)
            if i == 1:
                run.here("in mid-epoch")
        run.here("behind the pass")
    run.finished(model, [opt])


@scenario(places=("in mid-epoch",))
def sampler_with_set_epoch(run: Run) -> None:
    """DistributedSampler's order follows from the epoch that the loop tells it."""
    run.seed()
    model = mlp(dropout=0.2)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-2)
    session = run.attach(model)
    dataset = Items(True)
    sampler = DistributedSampler(dataset, num_replicas=2, rank=1, shuffle=True)
    train = session.loader(DataLoader(dataset, BATCH, sampler=sampler))
    for epoch in range(train.epoch, 2 * EPOCHS):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(train, train.start):
            _update(run, model, opt, x, y)
            if i == 1:
                run.here("in mid-epoch")
    run.finished(model, [opt])


@scenario(places=("in mid-epoch",))
def persistent_workers_without_augmentation(run: Run) -> None:
    """The order of later passes follows from the first seed; nothing random happens in the workers."""
    run.seed()
    model = mlp(dropout=0.2)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-2)
    session = run.attach(model)
    loader = DataLoader(WorkersOnly(False), BATCH, shuffle=True, num_workers=2, persistent_workers=True)
    train = session.loader(loader)
    for _ in range(train.epoch, EPOCHS):
        for i, (x, y) in enumerate(train, train.start):
            _update(run, model, opt, x, y)
            if i == 2:
                run.here("in mid-epoch")
    run.finished(model, [opt])


@scenario(places=("in mid-epoch",))
def training_in_eval_mode(run: Run) -> None:
    """Fine-tuning with all norm layers frozen: the model is in eval mode, and no training forward is seen."""
    run.seed()
    model = mlp(dropout=0.2, norm=True)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-2)
    session = run.attach(model)
    train = session.loader(DataLoader(Items(True), BATCH, shuffle=True))
    model.eval()
    for _ in range(train.epoch, EPOCHS):
        for x, y in train:
            _update(run, model, opt, x, y)
            run.here("in mid-epoch")
    run.finished(model, [opt])


def stateful_loader(run: Run, workers: int) -> None:
    """torchdata's loader through ``session.loader``: by its own state, with the random states set around it.

    Its workers' random streams are no part of that state, so only the main process augments.
    """
    run.seed()
    model = mlp(dropout=0.2)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-2)
    session = run.attach(model)
    loader = StatefulDataLoader(_dataset(workers, augment=not workers), BATCH, shuffle=True, num_workers=workers)
    train = session.loader(loader)
    held_out = DataLoader(Items(True), 10, shuffle=True)
    for _ in range(train.epoch, EPOCHS):
        for i, (x, y) in enumerate(train, train.start):
            _update(run, model, opt, x, y)
            if i == 2:
                run.here("in mid-epoch")
        run.here("behind the pass")
        evaluate(run, model, held_out)
    run.finished(model, [opt])


_STATEFUL: dict[str, Any] = {"places": ("in mid-epoch", "behind the pass", "in evaluation"), "sees": {"evaluation": 3}}
add("stateful loader", partial(stateful_loader, workers=0), **_STATEFUL)
add("stateful loader with 2 workers", partial(stateful_loader, workers=2), **_STATEFUL)


def stateful_loader_in_state(run: Run, workers: int) -> None:
    """The loader in ``state`` is read in the post-step hook; where the loop goes on follows from its own position."""
    run.seed()
    model = mlp(dropout=0.2)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-2)
    loader = StatefulDataLoader(_dataset(workers, augment=False), BATCH, shuffle=True, num_workers=workers)
    session = run.attach(model, state={"loader": loader})
    while session.step < EPOCHS * PASS:
        for x, y in loader:
            run.here("after the batch")
            _update(run, model, opt, x, y)
        run.here("behind the pass")
    run.finished(model, [opt])


_IN_STATE: dict[str, Any] = {"places": ("after the batch", "behind the pass")}
add("stateful loader in state", partial(stateful_loader_in_state, workers=0), **_IN_STATE)
add("stateful loader in state with 2 workers", partial(stateful_loader_in_state, workers=2), **_IN_STATE)
