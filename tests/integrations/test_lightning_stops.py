"""Who ends a fit of Lightning, and which checkpoint the next one takes: files that Lightning chooses by itself do not
count, and a request to stop is not the end of the training."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import everything, in_child, same

import lightck

pytestmark = [pytest.mark.frameworks, pytest.mark.usefixtures("quiet_lightning")]
pytest.importorskip("lightning")

from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint  # noqa: E402
from torchmetrics.aggregation import MeanMetric, RunningMean  # noqa: E402
from torchmetrics.wrappers import MinMaxMetric  # noqa: E402

from integrations.lightning_programs import Classifier, trainer_of  # noqa: E402
from lightck.integrations.lightning import LightckCallback  # noqa: E402


class At(Callback):
    """Does something at the end of a step."""

    def __init__(self, step: int, act: Any) -> None:
        self._step, self._act = step, act

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self._step:
            self._act(trainer)


def interrupt(_: Any) -> None:
    raise RuntimeError("interrupted")


def request(trainer: Any) -> None:
    trainer.should_stop = True


def fitted(folder: Path, pool: Path | None, *others: Callback, module: Any = None, **settings: Any) -> Any:
    """Fit to the end, or until a callback interrupts. Returns what is left."""
    ours = [] if pool is None else [LightckCallback(pool)]
    trainer, plain, data = trainer_of("plain", folder, *ours, *others, **settings)
    module = module or plain
    try:
        trainer.fit(module, **data)
    except RuntimeError as err:
        if "interrupted" not in str(err):
            raise
    return everything(module, *trainer.optimizers), trainer.global_step, torch.get_rng_state()


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_save_that_waits_for_the_validation_is_made(folder, pool):
    """The kill comes between the step of the save and the validation."""

    def names(name: str, path: Path | None, *others: Callback) -> list[str]:
        saves = ModelCheckpoint(
            folder / name, monitor="val_loss", every_n_train_steps=3, save_top_k=-1, filename="{step}"
        )
        fitted(folder / name, path, saves, *others, max_epochs=1, val_check_interval=5)
        return sorted(one.name for one in (folder / name).glob("*.ckpt"))

    def restarted() -> Any:
        expected = names("plain", None)
        names("out", pool, At(5, interrupt))
        return names("out", pool), expected

    found, expected = in_child(restarted)
    assert found == expected


def test_a_file_of_on_exception_checkpoint_does_not_replace_the_pool(folder, pool, caplog):
    def restarted() -> Any:
        expected = fitted(folder / "plain", None)
        for step in (16, 18):
            fitted(folder / "out", pool, OnExceptionCheckpoint(folder / "saved"), At(step, interrupt))
            assert (folder / "saved" / "on_exception.ckpt").exists()
        return same(fitted(folder / "out", pool, OnExceptionCheckpoint(folder / "saved")), expected), caplog.text

    is_same, logged = in_child(restarted)
    assert is_same
    assert "on_exception.ckpt (step 18) by itself. It is not used" in logged


def test_a_file_that_slurm_left_does_not_replace_the_pool(folder, pool, caplog, monkeypatch):
    for name in ("PROCID", "LOCALID", "NODEID"):
        monkeypatch.setenv(f"SLURM_{name}", "0")
    for name, value in (("NTASKS", "1"), ("JOB_NAME", "job"), ("JOB_ID", "1")):
        monkeypatch.setenv(f"SLURM_{name}", value)

    def restarted() -> Any:
        expected = fitted(folder / "plain", None)
        fitted(folder / "out", pool, At(14, lambda _: signal.raise_signal(signal.SIGUSR1)), At(17, interrupt))
        assert list((folder / "out").glob("hpc_ckpt_*.ckpt"))
        return same(fitted(folder / "out", pool), expected), caplog.text

    is_same, logged = in_child(restarted)
    assert is_same
    assert "hpc_ckpt_1.ckpt" in logged


def test_a_file_that_is_ahead_of_the_pool_counts(folder, pool, caplog):
    def restarted() -> Any:
        fitted(folder / "out", pool, At(4, interrupt))
        fitted(folder / "other", None, OnExceptionCheckpoint(folder / "saved"), At(14, interrupt))
        return fitted(folder / "out", pool, OnExceptionCheckpoint(folder / "saved"))[1], caplog.text

    step, logged = in_child(restarted)
    assert step > 14
    assert "continues from Lightning's checkpoint" in logged


# -- requests to stop --------------------------------------------------------------------------------------------------


def test_a_request_to_stop_does_not_finish_the_training(folder, pool, caplog):
    def restarted() -> Any:
        expected = fitted(folder / "plain", None)
        stopped = fitted(folder / "out", pool, At(14, request))[1]
        in_pool = lightck.recover(pool).step
        stopped_again = fitted(folder / "out", pool, At(14, request))[1]
        return stopped, in_pool, stopped_again, same(fitted(folder / "out", pool), expected), caplog.text

    *steps, is_same, logged = in_child(restarted)
    assert steps == [14, 13, 14]
    assert is_same
    assert logged.count("a request to stop (should_stop) has ended this fit after step 14") == 2


def test_early_stopping_finishes_the_training_until_there_are_more_epochs(folder, pool, caplog):
    def restarted() -> Any:
        steps = []
        for n_epochs in (3, 3, 4):
            stops = EarlyStopping("val_loss", stopping_threshold=100.0)
            steps.append(fitted(folder / "out", pool, stops, max_epochs=n_epochs)[1])
        return *steps, caplog.text

    *steps, logged = in_child(restarted)
    assert steps == [10, 10, 20]
    assert "is finished (step 10). Nothing is trained" in logged
    assert "request to stop" not in logged
    assert "differs" not in logged


# -- metrics -----------------------------------------------------------------------------------------------------------


class Wrapped(Classifier):
    """Metrics that keep attributes beside their sums."""

    def __init__(self) -> None:
        super().__init__()
        self.running, self.extremes = RunningMean(window=3), MinMaxMetric(MeanMetric())
        self.computed = _Values()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.running.update(torch.tensor(float(self.global_step)))
        self.extremes.update(torch.tensor(-((self.global_step - 3.0) ** 2)))
        self.computed.values.append((self.running.compute().item(), float(self.extremes.compute()["max"])))
        return super().training_step(batch, batch_idx)


class _Values:
    def __init__(self) -> None:
        self.values: list[Any] = []


def test_metrics_that_keep_more_than_their_sums_go_on(folder, pool):
    def restarted() -> Any:
        whole, killed, resumed = Wrapped(), Wrapped(), Wrapped()
        fitted(folder / "plain", None, module=whole, max_epochs=1)
        fitted(folder / "out", pool, At(6, interrupt), module=killed, max_epochs=1)
        fitted(folder / "out", pool, module=resumed, max_epochs=1)
        return resumed.computed.values, whole.computed.values[-len(resumed.computed.values) :]

    found, expected = in_child(restarted)
    assert len(found) == 5
    assert found == expected
