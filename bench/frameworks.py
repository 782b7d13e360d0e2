"""What lightck adds to a step under each framework: python bench/frameworks.py [--small] [--only NAME].

One model, AdamW and batches of one size are trained in a loop of one's own, and under the Trainer of transformers,
Lightning's Trainer, Accelerate and DeepSpeed (ZeRO 0, one rank). Trainings without lightck, with lightck, and without
lightck again take turns, each in a new process. A step lasts from the end of one update to the end of the next one.

- *Step*: its median without lightck.
- *Added*: the median step with lightck, less that without, of the same turn: median of the turns, lowest and highest.
- *A/A*: the same difference between the two trainings without lightck, which is the noise.
- *Beyond the own loop*: *added*, less that of the own loop: what the integration costs by itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lightck

WIDTH, LAYERS, BATCH = 128, 4, 32
"""A small model, with a step of about 2 ms. The noise of longer steps would hide what is added."""
Loop = Callable[[nn.Module, torch.optim.Optimizer, "DataLoader[Any]", "str | None"], None]


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Samples that cost nothing to make."""

    def __init__(self, count: int) -> None:
        self._x, self._count = torch.randn(BATCH, WIDTH), count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self._x[index % BATCH]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layers(x) - x).square().mean()}


def batches_of(loader: Any, pool: str | None, attach: Callable[[str], lightck.Session]) -> Iterator[Any]:
    """Yield the batches of a loop of one's own, whose updates are saved if a pool is given."""
    if pool is None:
        yield from loader
        return
    with attach(pool) as session:
        yield from session.loader(loader)


def own_loop(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, pool: str | None) -> None:
    for batch in batches_of(loader, pool, lambda path: lightck.attach(model, path, optimizer=optimizer)):
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()


def accelerated(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, pool: str | None) -> None:
    from accelerate import Accelerator

    import lightck.integrations.accelerate as integration

    accelerator = Accelerator(cpu=True)
    model, prepared, loader = accelerator.prepare(model, optimizer, loader)
    for batch in batches_of(loader, pool, lambda path: integration.attach(accelerator, path)):
        accelerator.backward(model(**batch)["loss"])
        prepared.step()
        prepared.zero_grad()


def with_trainer(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, pool: str | None) -> None:
    from transformers import Trainer, TrainingArguments

    import lightck.integrations.transformers as integration

    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),  # nothing is saved
        max_steps=len(loader),
        per_device_train_batch_size=BATCH,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        max_grad_norm=0.0,
    )
    trainer = Trainer(model, arguments, train_dataset=loader.dataset, optimizers=(optimizer, None))
    if pool is not None:
        integration.attach(trainer, pool)
    trainer.train()


def with_lightning(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, pool: str | None) -> None:
    import lightning.pytorch as pl

    from lightck.integrations.lightning import LightckCallback

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if pool is None else [LightckCallback(pool)],
    ).fit(Module(), loader)


def with_deepspeed(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any, pool: str | None) -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}
    import deepspeed

    import lightck.integrations.deepspeed as integration

    config = {"train_micro_batch_size_per_gpu": BATCH, "steps_per_print": 10**9, "zero_optimization": {"stage": 0}}
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for batch in batches_of(loader, pool, lambda path: integration.attach(engine, path)):
        engine.backward(engine(**batch)["loss"])
        engine.step()


FRAMEWORKS: dict[str, Loop] = {
    "own loop": own_loop,
    "accelerate": accelerated,
    "transformers": with_trainer,
    "lightning": with_lightning,
    "deepspeed": with_deepspeed,
}


def seconds_per_step(name: str, pool: str | None, steps: int) -> float:
    """Train, and return the median step of the later three quarters."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    ends: list[float] = []
    optimizer.register_step_post_hook(lambda *_: ends.append(time.perf_counter()))
    FRAMEWORKS[name](model, optimizer, DataLoader(Rows(steps * BATCH), BATCH), pool)
    late = ends[len(ends) // 4 :]
    return median(end - begin for begin, end in itertools.pairwise(late))


def in_a_process(name: str, pool: Path | None, steps: int) -> float:
    command = [sys.executable, __file__, "--child", name, "--steps", str(steps), "--pool", str(pool or "")]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    if said.returncode:
        raise SystemExit(f"{name}: {said.stderr[-2000:]}")
    return float(json.loads(said.stdout.splitlines()[-1]))


def compared(names: list[str], steps: int, turns: int) -> dict[str, dict[str, list[float]]]:
    """Return name -> what is measured -> its value in each turn, in seconds."""
    rows: dict[str, dict[str, list[float]]] = {name: {"plain": [], "lightck": [], "again": []} for name in names}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        for turn in range(turns):
            print(f"turn {turn + 1} of {turns}", file=sys.stderr, flush=True)
            for name in names:
                for kind, seconds in rows[name].items():
                    pool = Path(folder, f"{turn}-{name.replace(' ', '-')}.pool") if kind == "lightck" else None
                    seconds.append(in_a_process(name, pool, steps))
                    if pool is not None:
                        pool.unlink()
    return rows


def table(rows: dict[str, dict[str, list[float]]]) -> str:
    def less(row: dict[str, list[float]], kind: str) -> list[float]:
        return [1e6 * (one - plain) for one, plain in zip(row[kind], row["plain"], strict=True)]

    def spread(values: list[float]) -> str:
        return f"{median(values):.0f} ({min(values):.0f} to {max(values):.0f})"

    lines = [
        "| framework | step, ms | added, us | A/A, us | beyond the own loop, us |",
        "| --- | --: | --: | --: | --: |",
    ]
    own = median(less(rows["own loop"], "lightck")) if "own loop" in rows else None
    for name, row in rows.items():
        added = less(row, "lightck")
        beyond = "" if own is None or name == "own loop" else f"{median(added) - own:.0f}"
        lines.append(
            f"| {name} | {1e3 * median(row['plain']):.2f} | {spread(added)} | {spread(less(row, 'again'))} | {beyond} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="few steps, one turn: only whether it runs")
    parser.add_argument("--only", choices=list(FRAMEWORKS), action="append", help="measure this framework")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--child", choices=list(FRAMEWORKS), help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=600, help="steps of a training")
    parser.add_argument("--pool", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        print(json.dumps(seconds_per_step(given.child, given.pool or None, given.steps)))
        return
    steps, turns = (24, 1) if given.small else (given.steps, given.turns)
    print(table(compared(given.only or list(FRAMEWORKS), steps, turns)))


if __name__ == "__main__":
    main()
