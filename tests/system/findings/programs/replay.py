"""Loaders whose pass is gone on with in a new process: by Accelerate, fetching ahead, with workers, with gaps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from . import Run, program

EPOCHS, ITEMS, BATCH, FEATURES = 3, 22, 4, 8


class Items(Dataset[Any]):
    """Map-style. With ``augment`` each item draws from python's, numpy's and torch's global generators."""

    def __init__(self, augment: bool = False, items: int = ITEMS) -> None:
        self.x = torch.randn(items, FEATURES, generator=torch.Generator().manual_seed(3))
        self.augment = augment

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self.augment:
            return self.x[index]
        return self.x[index] * (1.0 + random.random()) + float(np.random.uniform(-0.1, 0.1)) + 0.1 * torch.rand(())


def mlp() -> nn.Module:
    """With dropout, which draws between two batches."""
    return nn.Sequential(nn.Linear(FEATURES, 40), nn.Dropout(0.2), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2))


def update(run: Run, model: nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor) -> None:
    loss = model(x).pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    run.updated(loss)


def passes(run: Run, dl: Any, *, epochs: int = EPOCHS, state: dict[str, Any] | None = None, **options: Any) -> None:
    """The usual loop over a loader that was built after ``run.seed()``."""
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model, state=state or {})
    loader = session.loader(dl, **options)
    for _ in range(loader.epoch, epochs):
        for x in loader:
            update(run, model, opt, x)
    run.finished(model, [opt], state)


# ---- Accelerate


def accelerated(run: Run, augment: bool, workers: int = 0, own: bool = False, **configuration: Any) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    run.seed()
    if workers and configuration:
        torch.manual_seed(11)  # a stateful loader's first pass is begun by prepare(), order and workers
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**configuration))
    generator = torch.Generator().manual_seed(7) if own else None
    dl = DataLoader(Items(augment), BATCH, shuffle=True, num_workers=workers, generator=generator)
    passes(run, accelerator.prepare(dl))


for _name, _options in {
    "accelerate": {},
    "accelerate-workers": {"workers": 2},
    "accelerate-seedable": {"use_seedable_sampler": True, "data_seed": 5},
    "accelerate-dispatcher": {"dispatch_batches": True},
    "accelerate-generator": {"own": True},
}.items():
    program(name=_name)(partial(accelerated, augment=True, **_options))
for _name, _options in {
    "accelerate-stateful": {"augment": True},
    "accelerate-stateful-dispatcher": {"augment": True, "dispatch_batches": True},
    "accelerate-stateful-workers": {"augment": False, "workers": 2},  # which are started before the attach
}.items():
    program(name=_name)(partial(accelerated, use_stateful_dataloader=True, **_options))


# ---- loaders that fetch ahead


class Ahead:
    """One batch ahead of the loop, as loaders are that move the next batch to a device meanwhile."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        first, batch = True, None
        for following in self.loader:
            if not first:
                yield batch
            first, batch = False, following
        yield batch


class Moved(Ahead):
    """One batch ahead, and each batch is augmented in this process when it is fetched."""

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        batch = next(batches)
        for following in batches:
            noisy = following + random.random()
            yield batch
            batch = noisy
        yield batch


def ahead(run: Run, wrappers: int = 1, workers: int = 0, kind: type[Ahead] = Ahead) -> None:
    run.seed()
    dl: Any = DataLoader(Items(True), BATCH, shuffle=True, num_workers=workers)
    for _ in range(wrappers):
        dl = kind(dl)
    passes(run, dl)


program(name="ahead")(ahead)
program(name="ahead-workers")(partial(ahead, workers=2, kind=Moved))
program(name="two-ahead")(partial(ahead, wrappers=2))


# ---- what the checksum of the last batch finds


class Padded(Dataset[Any]):
    """Each sample begins with more zeros than are looked at, and is augmented from a generator that nobody saves."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(4)

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        x = torch.zeros(3000)
        x[2000:] = index + float(self.own.normal())
        return x


@program()
def padded(run: Run) -> None:
    run.seed()
    model = nn.Linear(3000, 2)
    opt = torch.optim.SGD(model.parameters(), lr=1e-6)
    session = run.attach(model)
    loader = session.loader(DataLoader(Padded(), BATCH))
    for _ in range(loader.epoch, EPOCHS):
        for x in loader:
            update(run, model, opt, x)
    run.finished(model, [opt])


# ---- persistent workers that lie in a wrapper


def persistent(run: Run, augment: bool, kind: Any = Ahead) -> None:
    run.seed()
    workers = {"num_workers": 2, "persistent_workers": True}
    passes(run, kind(DataLoader(Items(augment), BATCH, shuffle=True, **workers)))


program(name="prefetcher-persistent")(partial(persistent, augment=False))
program(name="prefetcher-persistent-augmented")(partial(persistent, augment=True))


# ---- a loader that raises for a sample, which the loop skips


class Corrupt(Items):
    """Samples that cannot be read, and others that are augmented."""

    def __getitem__(self, index: int) -> torch.Tensor:
        x = super().__getitem__(index)
        if index in (3, 11, 12, 20):
            raise OSError(f"sample {index} is corrupt")
        return x


def corrupt_samples(run: Run, workers: int = 0) -> None:
    run.seed()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    loader = session.loader(DataLoader(Corrupt(True), 2, shuffle=True, num_workers=workers))
    for _ in range(loader.epoch, EPOCHS):
        batches = iter(loader)
        while True:
            try:
                x = next(batches)
            except StopIteration:
                break
            except OSError:
                run.saw("corrupt sample")
                continue
            update(run, model, opt, x)
    run.finished(model, [opt])


program(name="corrupt-samples")(corrupt_samples)
program(name="corrupt-samples-workers")(partial(corrupt_samples, workers=2))


# ---- objects with a state of their own, in state= and in the loader


class Shuffles:
    """Draws each pass's order from numbers that it carries from pass to pass, while it is iterated."""

    def __init__(self, items: int = ITEMS) -> None:
        self.items, self.drawn = items, 12345

    def __len__(self) -> int:
        return self.items

    def __iter__(self) -> Iterator[int]:
        left = list(range(self.items))
        while left:
            self.drawn = (self.drawn * 1103515245 + 12345) % 2**31
            yield left.pop(self.drawn % len(left))

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]


class Augments(Items):
    """From a generator of its own, which its state_dict holds; and a table of 40 KB, as large states are."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(9)
        self.seen = torch.zeros(10_000)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.seen = self.seen.clone()  # a tensor that a checkpoint copies meanwhile is not written to
        self.seen[index] += 1
        return self.x[index] * (1 + torch.rand((), generator=self.own)) + 0.01 * self.seen[index]

    def state_dict(self) -> dict[str, Any]:
        return {"own": self.own.get_state(), "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.own.set_state(state["own"])
        self.seen = state["seen"].clone()


def with_state(run: Run, workers: int = 0, kind: Any = None, huge: int = 0) -> None:
    run.seed()
    dataset, sampler = Augments(), Shuffles()
    if huge:
        dataset.seen = torch.zeros(huge)
    dl: Any = DataLoader(dataset, BATCH, sampler=sampler, num_workers=workers)
    passes(run, dl if kind is None else kind(dl), state={"dataset": dataset, "sampler": sampler})


program(name="with-state")(with_state)
program(name="with-state-workers")(partial(with_state, workers=2))
program(name="with-state-ahead")(partial(with_state, kind=Ahead))
program(name="with-huge-state")(partial(with_state, huge=300_000))


# ---- batches that are skipped in the sampler


class Counted(Items):
    """Tells how many samples were fetched in this process before the first update."""

    fetched = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        Counted.fetched += 1
        return super().__getitem__(index)


def skipped(dataset: Any, run: Run, workers: int = 0) -> None:
    run.seed()
    Counted.fetched = 0
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    dl = DataLoader(dataset(), BATCH, shuffle=True, num_workers=workers)
    loader = session.loader(dl, replay="skip")
    for _ in range(loader.epoch, EPOCHS):
        for x in loader:
            if Counted.fetched == 2 * BATCH:
                run.saw("two batches fetched")
            update(run, model, opt, x[:, :FEATURES])
    run.finished(model, [opt])


program(name="skipped")(partial(skipped, partial(Counted, True)))
program(name="skipped-workers")(partial(skipped, partial(Items, False), workers=2))
program(name="skipped-own-generator")(partial(skipped, Padded))
