"""What the next fit of Lightning makes of a pool: steps of several updates, other settings, and files of Lightning."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toys import in_child, killed_child, same

pytestmark = [pytest.mark.frameworks, pytest.mark.usefixtures("quiet_lightning")]
pytest.importorskip("lightning")

import lightning.pytorch as pl  # noqa: E402
from lightning.pytorch.callbacks import Callback, ModelCheckpoint  # noqa: E402
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim.swa_utils import AveragedModel  # noqa: E402
from toys import everything  # noqa: E402

from integrations.lightning_programs import trainer_of  # noqa: E402
from lightck.integrations.lightning import LightckCallback  # noqa: E402


class Kills(Callback):
    """Kills the process after the updates of a batch, and before the next batch."""

    def __init__(self, after: int) -> None:
        self._n_left = after

    def on_train_batch_end(self, *_: Any) -> None:
        self._n_left -= 1
        if not self._n_left:
            os.kill(os.getpid(), signal.SIGKILL)


def fitted(folder: Path, pool: Path | None, *others: Callback, module: Any = None, **given: Any) -> Any:
    """Fit without a validation. Returns tensors, number of updates and random state. ``given``: settings of the
    Trainer, ``ckpt_path`` for ``fit``."""
    ckpt_path = given.pop("ckpt_path", None)
    ours = [] if pool is None else [LightckCallback(pool, **given.pop("options", {}))]
    settings = {"limit_val_batches": 0, "max_epochs": 1, **given}
    trainer, plain, data = trainer_of("plain", folder, *ours, *others, **settings)
    module = module or plain
    trainer.fit(module, **data, ckpt_path=ckpt_path)
    return everything(module, *trainer.optimizers), trainer.global_step, torch.get_rng_state()


# -- several updates in a batch ----------------------------------------------------------------------------------------


class CriticTwice(pl.LightningModule):
    """For each batch, a generator makes one update, and a critic two."""

    def __init__(self, toggles: bool) -> None:
        super().__init__()
        self.automatic_optimization, self._toggles = False, toggles
        self.generator, self.critic = nn.Linear(3, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        g, c = self.optimizers()
        self._update(g, lambda: -self.critic(self._fake()).mean())
        for _ in range(2):
            self._update(c, lambda: self.critic(self._fake().detach()).mean() - self.critic(batch[0]).mean())

    def _fake(self) -> torch.Tensor:
        return self.generator(torch.randn(4, 3))

    def _update(self, optimizer: Any, loss: Any) -> None:
        if self._toggles:
            self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(loss())
        optimizer.step()
        if self._toggles:
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(one.parameters(), 1e-3) for one in (self.generator, self.critic)]


@pytest.mark.parametrize("toggles", [True, False])
def test_a_kill_in_the_first_batch_of_several_updates_loses_none_of_them(toggles, folder, pool):
    def fit(where: Path | None, *others: Callback) -> Any:
        return fitted(folder / "out", where, *others, module=CriticTwice(toggles))

    expected = in_child(lambda: fit(None))
    killed_child(lambda: fit(pool, Kills(1)))
    killed_child(lambda: fit(pool, Kills(3)))
    killed_child(lambda: fit(pool, Kills(1)))
    assert same(in_child(lambda: fit(pool)), expected)


# -- a checkpoint of Lightning -----------------------------------------------------------------------------------------


class BatchesOf(Callback):
    """Counts the batches of each epoch."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.counts[trainer.current_epoch] = self.counts.get(trainer.current_epoch, 0) + 1


def test_more_epochs_after_a_checkpoint_of_mid_epoch_are_whole(folder, pool, caplog):
    def longer() -> Any:
        fitted(folder / "out", None, ModelCheckpoint(folder / "saved", filename="saved", every_n_train_steps=6))
        first, second = BatchesOf(), BatchesOf()
        fitted(folder / "out", pool, first, ckpt_path=folder / "saved" / "saved.ckpt")
        fitted(folder / "out", pool, second, max_epochs=3)
        return first.counts, second.counts, caplog.text

    first, second, logged = in_child(longer)
    assert first == {0: 4}
    assert {epoch: second[epoch] for epoch in (1, 2)} == {1: 10, 2: 10}
    assert "in the middle of an iteration" not in logged


def test_another_accumulation_counts_and_is_named(folder, pool, caplog):
    def longer() -> Any:
        fitted(folder / "out", pool, accumulate_grad_batches=2)
        fitted(folder / "out", pool, accumulate_grad_batches=2, max_epochs=2)
        before = caplog.text
        return before, fitted(folder / "out", pool, accumulate_grad_batches=5, max_epochs=3)[1], caplog.text

    before, n_updates, logged = in_child(longer)
    assert n_updates == 5 + 5 + 2
    assert "accumulate_grad_batches" not in before
    assert "accumulate_grad_batches is 5 now, and was 2 in the run before. From step 10 on" in logged


def test_the_log_keeps_its_rows_if_ckpt_path_counts(folder, pool):
    def logger() -> CSVLogger:
        return CSVLogger(folder / "out", name="logs", flush_logs_every_n_steps=1)

    def behind() -> None:
        options = {"interval": 5}
        fitted(folder / "out", pool, Kills(after=8), options=options, logger=logger(), log_every_n_steps=1)

    def ahead() -> int:
        fitted(folder / "first", None, ModelCheckpoint(folder / "saved", filename="saved", every_n_train_steps=7))
        file = folder / "saved" / "saved.ckpt"
        return fitted(folder / "out", pool, ckpt_path=file, logger=logger(), log_every_n_steps=1)[1]

    killed_child(behind)
    log = folder / "out" / "logs" / "version_0" / "metrics.csv"
    before = log.read_text()
    assert len(before.splitlines()) > 1 + 5
    assert in_child(ahead) == 10
    assert log.read_text() == before


# -- weights beside the model ------------------------------------------------------------------------------------------


class Averages(Callback):
    """Averages the weights in three places: attributes made before the fit and in it, and an object of its own."""

    def __init__(self) -> None:
        self.net: Any = None

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.model, self.early = AveragedModel(module.net), copy.deepcopy(module.net)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.late, self.constant = copy.deepcopy(module.net), copy.deepcopy(module.net)
        self.net, self.held = module.net, SimpleNamespace(module=module, optimizers=trainer.optimizers)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.model.update_parameters(module.net)
        for average in (self.early, self.late):
            for one, now in zip(average.parameters(), module.net.parameters(), strict=True):
                one.lerp_(now, 0.1)


def test_averaged_weights_that_a_callback_keeps_are_named(folder, pool, caplog):
    def named() -> str:
        fitted(folder / "out", pool, Averages())
        return caplog.text

    logged = in_child(named)
    for name, count in {"model": 1, "early": 1, "late": 1, "constant": 0, "net": 0}.items():
        assert logged.count(f"the Averages changes its attribute '{name}'") == count, name
