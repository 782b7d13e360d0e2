"""Small trainings under the ``Trainer`` of transformers, killed at a numbered event, and what is left of them."""

from __future__ import annotations

import json
import os
import signal
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from toys import everything
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import lightck.integrations.transformers

PROGRAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation, cosine, evaluation": {
        "gradient_accumulation_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
    },
    "best model, bf16": {
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "steps",
        "save_steps": 4,
        "load_best_model_at_end": True,
        "save_total_limit": 2,
        "bf16": True,
    },
    "early stopping": {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 3,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
    },
    "masks drawn in the collator, plateau": {
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "eval_on_start": True,
    },
    "masks drawn in workers, max_steps": {
        "dataloader_num_workers": 2,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "max_steps": 17,
    },
    "persistent workers": {
        "dataloader_num_workers": 1,
        "dataloader_persistent_workers": True,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "logging_first_step": True,
    },
    "greedy schedule": {
        "lr_scheduler_type": "greedy",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "loss",
        "max_steps": 16,
    },
    "adafactor, label smoothing": {
        "optim": "adafactor",
        "label_smoothing_factor": 0.1,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "steps",
        "save_steps": 5,
        "max_steps": 13,
    },
    "stream of samples, averages of a subclass": {"max_steps": 13, "logging_steps": 4},
}


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int) -> None:
        self.ids = torch.randint(64, (count, 12), generator=torch.Generator().manual_seed(count))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Samples in another order in each epoch, and without a length. Each epoch has five batches."""

    def __init__(self) -> None:
        self._rows, self._epoch = Sentences(20), 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        order = torch.randperm(len(self._rows), generator=torch.Generator().manual_seed(self._epoch))
        return (self._rows[int(index)] for index in order)


class Averages(Trainer):
    """Its loss depends on an average of the losses before. Metrics are collected from one log to the next, as TRL's
    trainers do it."""

    average = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._metrics: dict[str, Any] = {"train": defaultdict(list)}
        self._recent: deque[float] = deque(maxlen=3)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.average = 0.9 * self.average + 0.1 * float(loss.detach())
        self._recent.append(self.average)
        self._metrics["train"]["average"].append(self.average)
        return loss * (1 + sum(self._recent))

    def log(self, logs: dict[str, float], *args: Any) -> None:
        means = {name: sum(values) / len(values) for name, values in self._metrics["train"].items()}
        self._metrics["train"].clear()
        super().log({**logs, **means}, *args)


def collated(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def masked(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = collated(rows)
    chosen = torch.rand(batch["input_ids"].shape) < 0.2
    batch["labels"] = torch.where(chosen, batch["input_ids"], -100)
    batch["input_ids"] = torch.where(chosen, torch.randint(64, chosen.shape), batch["input_ids"])
    return batch


class Events(TrainerCallback):
    """Counts the events of a run, and kills the process at one of them."""

    def __init__(self, kill_at: int | None) -> None:
        self.count, self._kill_at = 0, kill_at

    def _next(self, *_: Any, **__: Any) -> None:
        self.count += 1
        if self.count == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    on_step_begin = on_pre_optimizer_step = on_step_end = on_prediction_step = _next
    on_evaluate = on_save = on_log = on_epoch_begin = on_epoch_end = on_train_end = _next


def trainer_of(program: str, folder: Path, *callbacks: TrainerCallback, **settings: Any) -> Trainer:
    """``folder``: for the files of the Trainer."""
    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "seed": 5,
        "logging_steps": 3,
        "num_train_epochs": 3,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        **PROGRAMS[program],
        **settings,
    }
    torch.manual_seed(5)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2))
    if program == "early stopping":
        callbacks = (*callbacks, EarlyStoppingCallback(1, 0.02))
    is_stream = program.startswith("stream")
    return (Averages if is_stream else Trainer)(
        model,
        TrainingArguments(**given),
        data_collator=masked if program.startswith("masks") else collated,
        train_dataset=Stream() if is_stream else Sentences(38),
        eval_dataset=Sentences(10),
        callbacks=list(callbacks),
    )


def run(
    program: str,
    folder: Path,
    pool: Path | None,
    kill_at: int | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> dict[str, Any]:
    """Train to the end, or to the kill. Returns what is left: tensors, logs, and the files of the Trainer. ``options``:
    of ``attach``."""
    events = Events(kill_at)
    trainer = trainer_of(program, folder, events, **settings)
    attached = None if pool is None else lightck.integrations.transformers.attach(trainer, pool, **options)
    output = trainer.train()
    assert attached is None or not attached.session.is_open
    left = everything(trainer.model, trainer.optimizer.optimizer)
    return {
        "state": left,
        "log": [comparable(entry) for entry in trainer.state.log_history],
        "best": trainer.state.best_metric,
        "step": trainer.state.global_step,
        "loss": output.training_loss,
        "scheduler": trainer.lr_scheduler.state_dict(),
        "random": torch.get_rng_state(),
        "files": {str(path.relative_to(folder)): content(path) for path in sorted(folder.rglob("*")) if path.is_file()},
        "events": events.count,
    }


def comparable(entry: dict[str, Any]) -> dict[str, Any]:
    """A line of the log without the times."""
    return {name: value for name, value in entry.items() if "runtime" not in name and "per_second" not in name}


def content(path: Path) -> Any:
    """What a file of the Trainer says, without times and the paths of this run."""
    if path.name == "trainer_state.json":
        state = json.loads(path.read_text())
        state["log_history"] = [comparable(entry) for entry in state["log_history"]]
        state["best_model_checkpoint"] = str(state["best_model_checkpoint"]).rpartition("/")[2]
        return state
    if path.suffix in (".pt", ".pth") and path.name != "training_args.bin":
        return plain(torch.load(path, weights_only=False))
    return path.read_bytes() if path.suffix in (".safetensors", ".json") else None


def plain(value: Any) -> Any:
    """The value with lists in place of arrays, and dicts in the order of their keys."""
    if isinstance(value, dict):
        return {key: plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value.tolist() if isinstance(value, np.ndarray) else value
