"""Loops over loaders: batches taken before the loop, passes that are left, loaders that come and go."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from . import Run, program
from .plain import mlp

EPOCHS, BATCH = 3, 6


class Augmented(Dataset[torch.Tensor]):
    """Thirty samples; each draws from torch's and python's generators where it is fetched."""

    def __init__(self, noise: bool = True, items: int = 30) -> None:
        self.x = torch.randn(items, 8, generator=torch.Generator().manual_seed(3))
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.x[index] * (1 + torch.rand(()) * random.random()) if self.noise else self.x[index]


def model_of(dropout: float = 0.2) -> torch.nn.Module:
    net = mlp()
    return torch.nn.Sequential(net, torch.nn.Dropout(dropout))


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def update(run: Run, model: torch.nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor) -> None:
    loss = model(x).pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    run.updated(loss)


def evaluate(model: torch.nn.Module, batches: Any) -> float:
    model.eval()
    with torch.no_grad():
        total = sum(float(model(x).abs().sum()) for x in batches)
    model.train()
    return total


def loop(run: Run, session: Any, loader: Any, model: Any, opt: Any, behind: Callable[[], Any] | None = None) -> None:
    for _ in range(loader.epoch, EPOCHS):
        for _, x in enumerate(loader, loader.start):
            update(run, model, opt, x)
        if behind is not None:
            behind()
    run.finished(model, [opt])


# ---- batches taken before the loop ---------------------------------------------------------------------------------


def preview(run: Run, build: Callable[[], Any], fetches: bool, flush: bool = False) -> None:
    """``fetches``: ``next(iter(loader))`` before the loop; else a pass is begun and dropped, as Lightning does."""
    run.seed()
    model = model_of()
    opt = optimizer_of(model)
    session = run.attach(model)
    loader = session.loader(build())
    if fetches:
        next(iter(loader))
    else:
        iter(loader)
    loop(run, session, loader, model, opt, session.flush if flush else None)


@program()
def probe_before_the_loop(run: Run) -> None:
    preview(run, lambda: DataLoader(Augmented(), BATCH, shuffle=True), fetches=False)


@program()
def preview_before_the_loop(run: Run) -> None:
    preview(run, lambda: DataLoader(Augmented(), BATCH, shuffle=True), fetches=True)


@program()
def preview_with_a_generator_and_workers(run: Run) -> None:
    def build() -> Any:
        return DataLoader(Augmented(), BATCH, shuffle=True, num_workers=1, generator=torch.Generator().manual_seed(5))

    preview(run, build, fetches=True)


@program()
def probe_with_persistent_workers(run: Run) -> None:
    preview(
        run,
        lambda: DataLoader(Augmented(noise=False), BATCH, shuffle=True, num_workers=1, persistent_workers=True),
        fetches=False,
    )


@program()
def preview_of_a_stateful_loader(run: Run) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    preview(run, lambda: StatefulDataLoader(Augmented(), BATCH, shuffle=True), fetches=True)


@program()
def preview_and_flush_between_passes(run: Run) -> None:
    preview(run, lambda: DataLoader(Augmented(), BATCH, shuffle=True), fetches=True, flush=True)


@program()
def previews_of_two_loaders(run: Run) -> None:
    """The evaluation's loader has a generator of its own; it is looked at last."""
    run.seed()
    model = model_of()
    opt = optimizer_of(model)
    own = torch.Generator().manual_seed(9)
    session = run.attach(model)
    train = session.loader(DataLoader(Augmented(), BATCH, shuffle=True), name="train")
    held_out = session.loader(DataLoader(Augmented(), 10, shuffle=True, generator=own), name="held out")
    for loader in (train, held_out, train, held_out):
        next(iter(loader))
    seen: list[float] = []

    def behind() -> None:
        seen.append(evaluate(model, held_out))
        model[0][0].weight.data.mul_(1 + 1e-3 * seen[-1])

    loop(run, session, train, model, opt, behind)


@program()
def preview_in_each_epoch(run: Run) -> None:
    """The loop itself takes a batch before each pass."""
    run.seed()
    model = model_of()
    opt = optimizer_of(model)
    session = run.attach(model)
    loader = session.loader(DataLoader(Augmented(), BATCH, shuffle=True))
    for _ in range(loader.epoch, EPOCHS):
        next(iter(loader))
        for x in loader:
            update(run, model, opt, x)
    run.finished(model, [opt])


@program()
def left_with_a_batch_that_is_not_used(run: Run) -> None:
    """The pass is left by ``break`` behind a fetch: no preview, also where it is the first thing after a resume."""
    run.seed()
    model = model_of()
    opt = optimizer_of(model)
    session = run.attach(model)
    loader = session.loader(DataLoader(Augmented(), BATCH, shuffle=True))
    for _ in range(loader.epoch, 5):
        for i, x in enumerate(loader, loader.start):
            if i == 3:
                break
            update(run, model, opt, x)
    run.finished(model, [opt])


# ---- positions that nobody takes -----------------------------------------------------------------------------------


def started_before(run: Run) -> bool:
    """Whether this process resumes a training: a script whose second version differs from the first."""
    return not run.is_reference and run.session.step > 0


@program()
def renamed(run: Run) -> None:
    run.seed()
    model = model_of()
    opt = optimizer_of(model)
    session = run.attach(model)
    loader = session.loader(DataLoader(Augmented(), BATCH, shuffle=True), name="b" if started_before(run) else "a")
    loop(run, session, loader, model, opt)


@program()
def dropped(run: Run) -> None:
    run.seed()
    model = model_of()
    opt = optimizer_of(model)
    session = run.attach(model)
    plain = DataLoader(Augmented(), BATCH, shuffle=True)
    loader = plain if started_before(run) else session.loader(plain, name="a")
    while session.step < EPOCHS * 5:
        for x in itertools.islice(loader, EPOCHS * 5 - session.step):
            update(run, model, opt, x)
    run.finished(model, [opt])


@program()
def wrapped_anew_in_each_epoch(run: Run) -> None:
    run.seed()
    model = model_of()
    opt = optimizer_of(model)
    session = run.attach(model)
    for epoch in range(EPOCHS):
        for x in session.loader(DataLoader(Augmented(), BATCH, shuffle=True), name=f"epoch {epoch}"):
            update(run, model, opt, x)
    run.finished(model, [opt])


@program()
def evaluation_wrapped_late(run: Run) -> None:
    """By name, where the evaluation first needs it, with a generator of its own. Right, also over several kills."""
    run.seed()
    model = model_of()
    opt = optimizer_of(model)
    own = torch.Generator().manual_seed(9)
    session = run.attach(model)
    train = session.loader(DataLoader(Augmented(), BATCH, shuffle=True))
    found: list[Any] = []

    def behind() -> None:
        if not found:
            loader = DataLoader(Augmented(), 10, shuffle=True, generator=own)
            found.append(session.loader(loader, name="held out"))
        seen = evaluate(model, found[0])
        model[0][0].weight.data.mul_(1 + 1e-3 * seen)

    loop(run, session, train, model, opt, behind)


# ---- batches that are used again -----------------------------------------------------------------------------------


@program()
def cycle(run: Run) -> None:
    run.seed()
    model = model_of()
    opt = optimizer_of(model)
    session = run.attach(model)
    loader = session.loader(DataLoader(Augmented(), BATCH, shuffle=True))
    for x in itertools.cycle(loader):
        update(run, model, opt, x)
        if session.step == 14:
            break
    run.finished(model, [opt])


@program()
def two_phases_and_left_over_gradients(run: Run) -> None:
    """Accumulation with a remainder behind each pass; then batches drawn by hand. Right."""
    run.seed()
    model = model_of()
    opt = optimizer_of(model)
    session = run.attach(model)
    loader = session.loader(DataLoader(Augmented(), BATCH, shuffle=True))
    for _ in range(loader.epoch, EPOCHS):
        for i, x in enumerate(loader, loader.start):
            if i % 2:
                update(run, model, opt, x)
        update(run, model, opt, torch.ones(BATCH, 8))
    while session.step < 14:
        update(run, model, opt, torch.randn(BATCH, 8))
    run.finished(model, [opt])


# ---- datasets with a state -----------------------------------------------------------------------------------------


class Shards(IterableDataset[torch.Tensor]):
    """Goes on where the pass before it ended."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(24):
            self.at += 1
            yield torch.full((8,), self.at / 50)


@program()
def stateful_iterable_dataset(run: Run) -> None:
    run.seed()
    model = model_of()
    opt = optimizer_of(model)
    session = run.attach(model)
    loop(run, session, session.loader(DataLoader(Shards(), BATCH)), model, opt)


# ---- persistent workers of an evaluation ---------------------------------------------------------------------------


def evaluation_with_persistent_workers(run: Run, wrapped: bool, generator: bool = False) -> None:
    """timm's default. The workers draw their seed when they start, in the first evaluation."""
    run.seed()
    model = model_of()
    opt = optimizer_of(model)
    own = torch.Generator().manual_seed(4) if generator else None
    held_out: Any = DataLoader(Augmented(noise=False), 15, num_workers=1, persistent_workers=True, generator=own)
    session = run.attach(model)
    train = session.loader(DataLoader(Augmented(), BATCH, shuffle=True))
    if wrapped:
        held_out = session.loader(held_out, name="held out")
    loop(run, session, train, model, opt, lambda: evaluate(model, held_out))


@program()
def persistent_evaluation_wrapped(run: Run) -> None:
    evaluation_with_persistent_workers(run, wrapped=True)


@program()
def persistent_evaluation_outside(run: Run) -> None:
    evaluation_with_persistent_workers(run, wrapped=False)


@program()
def persistent_evaluation_with_a_generator(run: Run) -> None:
    evaluation_with_persistent_workers(run, wrapped=False, generator=True)


# ---- the end of a training -----------------------------------------------------------------------------------------


@program()
def done_at_its_end(run: Run) -> None:
    """Killed in the last evaluation, or started again when it has finished: no batch is left to make ``loss`` of."""
    run.seed()
    model = model_of()
    opt = optimizer_of(model)
    session = run.attach(model)
    loader = session.loader(DataLoader(Augmented(), BATCH, shuffle=True))
    for _ in range(loader.epoch, EPOCHS):
        loss = None
        for x in loader:
            loss = model(x).pow(2).mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            run.updated(loss)
        run.here("in evaluation")
        if loss is not None:
            float(loss)
    run.finished(model, [opt])
    session.close(done=True)


# ---- Lightning ------------------------------------------------------------------------------------------------------

_CONNECTOR = "lightning.pytorch.trainer.connectors.data_connector"
_LIGHTNING: dict[str, Any] = {"__name__": _CONNECTOR, "DataLoader": DataLoader}
exec(  # a function of that module, for the suite needs no Lightning
    """
def _check_dataloader_iterable(dataloader):
    if not isinstance(dataloader, DataLoader):
        iter(dataloader)
""",
    _LIGHTNING,
)


@program()
def asked_by_lightning(run: Run) -> None:
    """Its Trainer begins a pass over what is no DataLoader, to see whether it can, and a DataLoader is not asked."""
    run.seed()
    model = model_of()
    opt = optimizer_of(model)
    session = run.attach(model)
    loader = session.loader(DataLoader(Augmented(), BATCH, shuffle=True))
    _LIGHTNING["_check_dataloader_iterable"](loader.loader if run.is_reference else loader)
    loop(run, session, loader, model, opt)
