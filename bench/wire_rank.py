"""One rank of ``bench/wire.py``: a training whose gradients are reduced over the wire, and the times of its steps.

``train`` runs one training; ``compare`` runs two in this process, which take turns, so that their steps are compared
within one run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

import lightck
from bench import rivals
from bench.workloads import FULL, Workload, language

INTERVAL = 4
"""A checkpoint at every so many steps, so that steps with one have neighbours without."""
TOKENS, VOCABULARY = 64, 1000
PLAIN, LAYERWISE, NOTHING = "plain", "layerwise", "nothing"
RIVALS = {"torch.save + rename": 1, "dcp.save": 2, "dcp.async_save": 2}
"""Other ways to save -> how many of the two ranks call them."""


@dataclass(frozen=True)
class Load:
    """model: a model of ``MODELS``. batch: its samples for each rank. rate: as ``tc`` takes it; "" for no limit."""

    model: str
    batch: int
    rate: str


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def _transformer(width: int, layers: int) -> Workload:
    def tokens(n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return language.tokens(n, TOKENS, VOCABULARY, generator)

    def loss(model: nn.Module, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(x).logsumexp(-1).mean()
        return found

    return Workload(
        "transformer", lambda: Transformer(width, layers), language.adamw, tokens, loss, 4, f"{TOKENS} tokens, AdamW"
    )


MODELS = {"transformer": _transformer(512, 8), "transformer-small": _transformer(64, 2), **FULL}


@dataclass
class Times:
    """Of one rank, in seconds of ``time.perf_counter``, one item for each step."""

    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    updated: list[float] = field(default_factory=list)
    """Ends of ``optimizer.step()``."""
    launched: list[float] = field(default_factory=list)
    """The first launch of a reduction."""
    reduced: list[float] = field(default_factory=list)
    """The end of the last reduction."""
    committed: dict[int, float] = field(default_factory=dict)
    """Step -> when its commit was seen."""


class Reductions:
    """Notes when reductions begin and end."""

    def __init__(self) -> None:
        self.first = self.last = 0.0

    def begin_step(self) -> None:
        self.first = self.last = 0.0

    def began(self) -> None:
        self.first = self.first or time.perf_counter()

    def ended(self) -> None:
        self.last = time.perf_counter()

    # torch compares annotations with its own types, so these must be no strings.
    def ddp_hook(self, _, bucket):  # type: ignore[no-untyped-def]
        """The communication hook of all runs: it averages, and notes the times."""
        self.began()
        buffer = bucket.buffer().div_(dist.get_world_size())

        def done(future: Any) -> Any:
            self.ended()
            return future.value()[0]

        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None
        return work.get_future().then(done)

    def watch_fsdp(self) -> None:
        """Note the reduce-scatters, which gloo makes on the thread of the backward pass."""
        name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
        real = getattr(dist, name)

        def timed(*args: Any, **options: Any) -> Any:
            self.began()
            work = real(*args, **options)
            self.ended()
            return work

        setattr(dist, name, timed)


class Saver(Protocol):
    """What saves a training. ``committed``: the newest step whose checkpoint is complete; None before the first."""

    @property
    def committed(self) -> int | None: ...

    def after(self, step: int) -> None:
        """Called after the update, with its number."""

    def close(self) -> None: ...


class Nothing:
    committed = None

    def after(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


class Session:
    """lightck: its hooks see the boundaries."""

    def __init__(self, session: Any) -> None:
        self.session = session

    @property
    def committed(self) -> int | None:
        found: int | None = self.session.committed
        return found

    def after(self, step: int) -> None:
        pass

    def close(self) -> None:
        self.session.close()


class Other:
    """A rival, called at every ``INTERVAL``-th step on the ranks that take part."""

    def __init__(self, name: str, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self.rival = rivals.named(name) if dist.get_rank() < RIVALS[name] else None
        if self.rival is not None:
            if name == "dcp.async_save":  # collectives of a thread must not meet those of the training
                self.rival.options = {"process_group": dist.new_group(backend="gloo")}  # type: ignore[attr-defined]
            if dist.get_rank():  # one rank removes old checkpoints
                self.rival.is_finished = partial(setattr, self.rival, "finished")  # type: ignore[attr-defined]
            folder.mkdir(exist_ok=True)
            self.rival.start(model, optimizer, str(folder))

    @property
    def committed(self) -> int | None:
        return None if self.rival is None or self.rival.saved < 0 else self.rival.saved

    def after(self, step: int) -> None:
        if self.rival is not None and step % INTERVAL == 0:
            self.rival.save(step)

    def close(self) -> None:
        if self.rival is not None:
            self.rival.finish()


class Training:
    """A model of a load, its optimizer, and what saves it."""

    def __init__(
        self, kind: str, way: str, load: Load, folder: Path, reductions: Reductions, limit: Callable[[], None]
    ) -> None:
        """``limit``: is called in the first steps, in which connections are made."""
        self.limit = limit
        torch.manual_seed(0)
        self.load, self.of, self.reductions = load, MODELS[load.model], reductions
        model: Any = self.of.model()
        self.called, is_layerwise = model, way == LAYERWISE
        if kind == "ddp":
            self.called = nn.parallel.DistributedDataParallel(model)
            if not is_layerwise:
                self.called.register_comm_hook(None, reductions.ddp_hook)
        else:
            _shard(model)
        self.optimizer = self.of.optimizer(model.parameters())
        if is_layerwise:
            hook = {"comm_hook": reductions.ddp_hook} if kind == "ddp" else {}
            lightck.layerwise(self.called, self.optimizer, **hook)
        self.saver = self._saver(way, model, folder)
        self.times = Times()

    def _saver(self, way: str, model: nn.Module, folder: Path) -> Saver:
        if way == NOTHING:
            return Nothing()
        if way in RIVALS:
            return Other(way, model, self.optimizer, folder.with_name("shared"))
        return Session(lightck.attach(model, folder, optimizer=self.optimizer, interval=INTERVAL, timeout=120))

    def step(self, number: int) -> None:
        """``number``: of the update, from 1."""
        reductions, times = self.reductions, self.times
        reductions.begin_step()
        times.begins.append(time.perf_counter())
        x, labels = self.of.input(self.load.batch, torch.Generator().manual_seed(number))
        self.of.loss(self.called, x, labels).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        times.updated.append(time.perf_counter())
        self.optimizer.zero_grad()
        self.saver.after(number)
        times.ends.append(time.perf_counter())
        times.launched.append(reductions.first)
        times.reduced.append(reductions.last)
        if number <= 2 * INTERVAL:
            self.limit()

    def watched(self, body: Callable[[], None]) -> None:
        """Run ``body``, and note meanwhile when checkpoints are complete."""
        is_over = threading.Event()
        watch = threading.Thread(target=self._note_commits, args=(is_over,))
        watch.start()
        body()
        is_over.set()
        watch.join()

    def _note_commits(self, is_over: threading.Event) -> None:
        while not is_over.wait(0.002):
            step = self.saver.committed
            if step is not None:
                self.times.committed.setdefault(step, time.perf_counter())


def _shard(model: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)


def train(kind: str, way: str, load: Load, steps: int, folder: Path, limit: Callable[[], None]) -> list[Times]:
    """One training. ``limit``: as for ``Training``."""
    reductions = Reductions()
    if kind == "fsdp":
        reductions.watch_fsdp()
    training = Training(kind, way, load, folder, reductions, limit)

    def run() -> None:
        for number in range(1, steps + 1):
            training.step(number)
        training.saver.close()

    training.watched(run)
    return [training.times]


def compare(ways: tuple[str, str], load: Load, steps: int, folder: Path, limit: Callable[[], None]) -> list[Times]:
    """Two trainings under DistributedDataParallel that take turns of ``INTERVAL`` steps. What is copied for the second
    step of a turn is committed before the turn ends."""
    reductions = Reductions()
    folders = (folder.with_name(f"{folder.name}-{way}") for way in ("a", "b"))
    trainings = [Training("ddp", way, load, one, reductions, limit) for way, one in zip(ways, folders, strict=True)]
    for first in range(1 - INTERVAL // 2, steps, INTERVAL):  # a turn: quiet, with a checkpoint, copies, quiet
        for training in trainings:
            for number in range(max(first, 1), first + INTERVAL):
                training.step(number)
    for training in trainings:
        training.saver.close()
    return [training.times for training in trainings]
