"""Small trainings under Lightning's ``Trainer``, killed at a numbered event, and what is left of them."""

from __future__ import annotations

import csv
import os
import signal
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from toys import everything

from lightck.integrations.lightning import LightckCallback

PROGRAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation, one cycle, validation in the epoch": {
        "accumulate_grad_batches": 3,
        "val_check_interval": 0.4,
        "gradient_clip_val": 0.5,
    },
    "early stopping, bf16, plateau": {"precision": "bf16-mixed", "max_epochs": 8},
    "masks drawn in workers, sums of the epoch": {"check_val_every_n_epoch": 2, "log_every_n_steps": 2},
    "manual optimization at two rates": {"val_check_interval": 4},
    "two loaders, data module": {"limit_train_batches": 7},
    "stream of samples, max_steps": {"max_steps": 17, "max_epochs": -1, "val_check_interval": 3},
    "persistent workers, metric objects": {"val_check_interval": 0.5},
}


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, count: int, *, draws: bool = False) -> None:
        generator = torch.Generator().manual_seed(count)
        self.x, self.draws = torch.randn(count, 6, generator=generator), draws
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x[index]
        return (x * (torch.rand(6) < 0.8) if self.draws else x), self.y[index]


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples in another order in each pass, and without a length."""

    def __init__(self, count: int) -> None:
        self._rows = Rows(count)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return (self._rows[int(index)] for index in torch.randperm(len(self._rows)))


def loader(count: int, *, shuffle: bool = True, **options: Any) -> DataLoader[Any]:
    draws = bool(options.pop("draws", False))
    return DataLoader(Rows(count, draws=draws), batch_size=4, shuffle=shuffle, **options)


def masked(rows: list[Any]) -> Any:
    x, y = torch.utils.data.default_collate(rows)
    return x * (torch.rand(x.shape) < 0.9), y


class Classifier(pl.LightningModule):
    """A small net with dropout. Metrics are logged for each step and each epoch."""

    def __init__(self, schedule: str = "") -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))
        self.schedule = schedule

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        if batch_idx == 1:
            self.log("early", loss * 2, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))
        self.log("val_step", float(batch_idx), on_step=True, on_epoch=False)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        if self.schedule == "one cycle":
            total = int(self.trainer.estimated_stepping_batches)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=total)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
        if self.schedule == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Outputs(Classifier):
    """Keeps the outputs of an epoch, and a running mean on which its loss depends, as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[torch.Tensor] = []
        self.recent: deque[float] = deque(maxlen=3)
        self.mean = 0.0

    def on_train_start(self) -> None:
        self.mean = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.outputs.append(loss)
        self.mean = 0.9 * self.mean + 0.1 * float(loss.detach())
        self.recent.append(self.mean)
        return loss * (1 + sum(self.recent))

    def on_train_epoch_end(self) -> None:
        self.log("mean of the epoch", torch.stack(self.outputs).mean())
        self.outputs.clear()


class TwoRates(pl.LightningModule):
    """A generator and a critic; the critic steps at each batch, the generator at each third."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(3, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        g, c = self.optimizers()
        fake = self.generator(torch.randn(4, 3))
        loss = self.critic(fake.detach()).mean() - self.critic(batch[0]).mean()
        c.zero_grad()
        self.manual_backward(loss)
        c.step()
        self.log("critic", loss)
        if batch_idx % 3 == 2:
            g.zero_grad()
            loss = -self.critic(fake).mean()
            self.manual_backward(loss)
            g.step()
            self.log("generator", loss, on_epoch=True)
        if self.trainer.is_last_batch:
            for scheduler in self.lr_schedulers():
                scheduler.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.critic(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.RMSprop(one.parameters(), 1e-3) for one in (self.generator, self.critic)]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in optimizers]


class TwoLoaders(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch["few"]) + 0.5 * self.loss(batch["many"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class Data(pl.LightningDataModule):
    """Two loaders of different lengths; counts its epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def train_dataloader(self) -> Any:
        loaders = {"few": loader(14, collate_fn=masked), "many": loader(38)}
        return CombinedLoader(loaders, "max_size_cycle")

    def val_dataloader(self) -> Any:
        return [loader(10, shuffle=False), loader(6, shuffle=False)]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.count += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class TwoValidations(TwoLoaders):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), on_step=True)


class Metrics(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(2)
        self.val_accuracy = torchmetrics.classification.MulticlassAccuracy(2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.val_accuracy(self.net(batch[0]), batch[1])
        self.log("val_accuracy", self.val_accuracy)


class _Counter:
    """An object of its own, because plain attributes of a callback are saved and restored."""

    count = 0


class Events(Callback):
    """Counts the events of a run, and kills the process at one of them."""

    def __init__(self, kill_at: int | None) -> None:
        self._counter, self._kill_at = _Counter(), kill_at

    @property
    def count(self) -> int:
        return self._counter.count

    def _next(self, trainer: Any, *_: Any, **__: Any) -> None:
        if trainer.sanity_checking:
            return
        self._counter.count += 1
        if self._counter.count == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    on_train_batch_start = on_before_backward = on_before_optimizer_step = on_train_batch_end = _next
    on_validation_start = on_validation_batch_end = on_validation_end = _next
    on_train_epoch_start = on_train_epoch_end = on_train_end = _next
    on_save_checkpoint = _next

    def state_dict(self) -> dict[str, Any]:
        return {}


def program_of(program: str) -> tuple[Any, dict[str, Any], list[Any]]:
    """Return the module, what ``fit`` gets, and callbacks of the program's own."""
    val = loader(10, shuffle=False)
    module: Any = Classifier()
    data: dict[str, Any] = {"train_dataloaders": loader(38, collate_fn=masked), "val_dataloaders": val}
    callbacks: list[Any] = [LearningRateMonitor()]
    if program.startswith("accumulation"):
        module = Classifier("one cycle")
        callbacks.append(ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True))
    elif program.startswith("early stopping"):
        module = Classifier("plateau")
        callbacks.append(EarlyStopping("val_loss", patience=1, min_delta=0.01))
        callbacks.append(ModelCheckpoint(monitor="val_loss"))
    elif program.startswith("masks"):
        module = Outputs()
        data["train_dataloaders"] = loader(38, draws=True, num_workers=2)
    elif program.startswith("manual"):
        module = TwoRates()
        callbacks.append(ModelCheckpoint(every_n_train_steps=4, save_top_k=-1))
    elif program.startswith("two loaders"):
        module, data = TwoValidations(), {"datamodule": Data()}
    elif program.startswith("stream"):
        data["train_dataloaders"] = DataLoader(Stream(22), batch_size=4)
    elif program.startswith("persistent"):
        module = Metrics()
        data["train_dataloaders"] = loader(38, num_workers=1, persistent_workers=True)
        data["val_dataloaders"] = loader(10, shuffle=False, num_workers=1, persistent_workers=True)
    return module, data, callbacks


def trainer_of(program: str, folder: Path, *callbacks: Callback, **settings: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return the Trainer, the module, and what ``fit`` gets. ``folder``: for the files of the Trainer."""
    pl.seed_everything(5, workers=True, verbose=False)
    module, data, own = program_of(program)
    given = {
        "default_root_dir": str(folder),
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 3,
        "log_every_n_steps": 3,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": CSVLogger(folder, name="logs"),
        "num_sanity_val_steps": 1,
        **PROGRAMS[program],
        **settings,
    }
    return pl.Trainer(callbacks=[*callbacks, *own], **given), module, data


def run(
    program: str,
    folder: Path,
    pool: Path | None,
    kill_at: int | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> dict[str, Any]:
    """Train to the end, or to the kill. Returns what is left: tensors, logs, and the files of the Trainer. ``options``:
    of the ``LightckCallback``."""
    warnings.filterwarnings("ignore", module="lightning|torch")
    events = Events(kill_at)
    ours = [] if pool is None else [LightckCallback(pool, **options)]
    trainer, module, data = trainer_of(program, folder, *ours, events, **settings)
    trainer.fit(module, **data)
    assert not ours or not ours[0].session.is_open
    return {
        "state": everything(module, *trainer.optimizers),
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "metrics": dict(trainer.callback_metrics),
        "logged": dict(trainer.logged_metrics),
        "schedulers": [plain(one.scheduler.state_dict()) for one in trainer.lr_scheduler_configs],
        "callbacks": [plain(one.state_dict(), folder) for one in trainer.callbacks if one not in ours],
        "random": torch.get_rng_state(),
        "files": {str(path.relative_to(folder)): content(path, folder) for path in files_of(folder)},
        "events": events.count,
    }


def files_of(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def content(path: Path, folder: Path) -> Any:
    """What a file of the Trainer says, without the paths of this run."""
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    if path.suffix == ".ckpt":
        return plain(torch.load(path, weights_only=False), folder)
    return path.read_bytes()


def plain(value: Any, folder: Path | None = None) -> Any:
    """The value without the folder in paths, and dicts in the order of their keys."""
    if isinstance(value, dict):
        items = {plain(key, folder): plain(one, folder) for key, one in value.items()}
        return {key: items[key] for key in sorted(items, key=str)}
    if isinstance(value, (list, tuple)):
        return [plain(one, folder) for one in value]
    if isinstance(value, str) and folder is not None:
        return value.replace(str(folder), "")
    return value
