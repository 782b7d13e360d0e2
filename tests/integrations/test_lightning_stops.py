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
from lightck.errors import CheckpointExistsError

pytestmark = [pytest.mark.frameworks, pytest.mark.usefixtures("quiet_lightning")]
pytest.importorskip("lightning")

from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint  # noqa: E402
from torchmetrics.aggregation import MeanMetric, RunningMean  # noqa: E402
from torchmetrics.wrappers import MinMaxMetric  # noqa: E402

from integrations.lightning_programs import Classifier, trainer_of  # noqa: E402
from lightck.integrations.lightning import LightckCallback  # noqa: E402
from lightck.integrations.lightning_fit import Progress  # noqa: E402


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


@pytest.mark.parametrize(("step", "n_epochs"), [(24, 3), (4, 1)])
def test_a_request_to_stop_in_the_last_epoch_does_not_finish_the_training(folder, pool, step, n_epochs):
    def restarted() -> Any:
        expected = fitted(folder / "plain", None, max_epochs=n_epochs)
        stopped = fitted(folder / "out", pool, At(step, request), max_epochs=n_epochs)[1]
        return stopped, same(fitted(folder / "out", pool, max_epochs=n_epochs), expected)

    assert in_child(restarted) == (step, True)


def test_a_request_to_stop_at_the_very_end_finishes_the_training(folder, pool):
    def restarted() -> Any:
        fitted(folder / "out", pool, At(10, request), max_epochs=1)
        with lightck.recover(pool) as found:
            return found.step, found.state["lightning"]["should_stop"]

    assert in_child(restarted) == (10, True)


def test_a_request_to_stop_names_the_step_of_the_next_start_and_waits_for_the_tiers(folder, pool, caplog):
    def restarted() -> Any:
        ours = LightckCallback(pool, interval=4, tiers=[lightck.Tier(str(folder / "tier"), every=4)])
        trainer, module, data = trainer_of("plain", folder / "out", ours, At(14, request))
        trainer.fit(module, **data)
        return lightck.recover(str(folder / "tier")).step, caplog.text

    step, logged = in_child(restarted)
    assert step == 12
    assert "has ended this fit after step 14" in logged
    assert "is not declared finished: the next start continues from step 12" in logged


def test_a_request_to_stop_that_a_checkpoint_holds_does_not_stop_the_next_start(folder, pool):
    def request_and_flush(trainer: Any) -> None:
        request(trainer)
        next(one for one in trainer.callbacks if isinstance(one, LightckCallback)).session.flush()

    def restarted() -> Any:
        steps = [fitted(folder / "out", pool, At(14, request_and_flush))[1], lightck.recover(pool).step]
        return [*steps, fitted(folder / "out", pool)[1]]

    assert in_child(restarted) == [14, 14, 30]


def test_early_stopping_before_min_epochs_finishes_the_training_after_a_kill(folder, pool, caplog):
    def restarted() -> Any:
        settings = {"min_epochs": 2, "max_epochs": 4}
        stops = [EarlyStopping("val_loss", stopping_threshold=100.0) for _ in range(3)]
        expected = fitted(folder / "plain", None, stops[0], **settings)
        fitted(folder / "out", pool, stops[1], At(14, interrupt), **settings)
        return same(fitted(folder / "out", pool, stops[2], **settings), expected), expected[1], caplog.text

    is_same, step, logged = in_child(restarted)
    assert (is_same, step) == (True, 20)
    assert "request to stop" not in logged


def test_a_class_of_the_script_may_be_called_early_stopping(folder, pool):
    other = type("EarlyStopping", (Callback,), {})()
    assert in_child(lambda: fitted(folder / "out", pool, other, max_epochs=1)[1]) == 10


def test_a_time_that_is_used_up_is_named(folder, pool, caplog):
    def logged() -> str:
        fitted(folder / "out", pool, max_time={"milliseconds": 1})
        return caplog.text

    assert "The time of max_time is used up. It counts over all starts" in in_child(logged)


def test_a_file_that_the_script_names_counts_though_lightning_would_find_it(folder, pool):
    def restarted() -> type[BaseException]:
        fitted(folder / "out", pool, OnExceptionCheckpoint(folder / "saved"), At(14, interrupt))
        fitted(folder / "out", pool, At(18, interrupt))
        trainer, module, data = trainer_of(
            "plain", folder / "out", LightckCallback(pool), OnExceptionCheckpoint(folder / "saved")
        )
        with pytest.raises(lightck.LightckError) as raised:
            trainer.fit(module, **data, ckpt_path=folder / "saved" / "on_exception.ckpt")
        return type(raised.value)

    assert in_child(restarted) is CheckpointExistsError


class Kept(Callback):
    """Keeps the loss of inference mode, and a count."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.loss = torch.ones(3) * 2

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1


class Other(Kept):
    def on_train_batch_end(self, *_: Any) -> None: ...


def test_attributes_of_callbacks_are_found_by_their_class(folder, pool, caplog):
    def restarted() -> Any:
        fitted(folder / "out", pool, Other(), Kept(), At(14, interrupt), inference_mode=True)
        kept, other = Kept(), Other(100)
        step = fitted(folder / "out", pool, kept, other)[1]
        return step, kept.count, other.count, caplog.text

    *found, logged = in_child(restarted)
    assert found == [30, 30, 100]
    assert "differs" not in logged


def test_attributes_of_a_callback_that_is_gone_are_named(folder, pool, caplog):
    def restarted() -> Any:
        fitted(folder / "out", pool, Kept(), At(14, interrupt))
        return fitted(folder / "out", pool)[1], caplog.text

    step, logged = in_child(restarted)
    assert step == 30
    assert "the run before had the callback Kept, which had changed its attribute" in logged


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


class EndsSooner(Callback):
    def on_train_start(self, trainer: Any, *_: Any) -> None:
        trainer.fit_loop.min_epochs = 1


def test_early_stopping_in_a_pool_of_an_earlier_release_ends_the_training_for_good(folder, pool, monkeypatch):
    """Such a pool says only that the training was to stop. The start that it stops saves once more, without a batch."""
    now = Progress.state_dict

    def run(*others: Callback, step: int) -> int:
        stops = EarlyStopping("val_loss", stopping_threshold=100.0)
        return fitted(folder / "out", pool, stops, At(step, interrupt), *others, min_epochs=2, max_epochs=4)[1]

    def restarted() -> list[int]:
        with monkeypatch.context() as earlier:
            earlier.setattr(
                Progress, "state_dict", lambda one: {k: v for k, v in now(one).items() if k != "stopped_early"}
            )
            run(step=14)
        return [run(EndsSooner(), step=20), run(EndsSooner(), step=20)]

    assert in_child(restarted) == [13, 13]


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
