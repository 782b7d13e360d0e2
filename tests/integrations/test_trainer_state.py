"""What callbacks, subclasses and logs of a ``Trainer`` of transformers keep comes back, or is named; and who has ended
a training."""

from __future__ import annotations

import copy
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toys import in_child, same

import lightck

pytestmark = pytest.mark.frameworks
pytest.importorskip("transformers")

from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402

import lightck.integrations.transformers as integration  # noqa: E402
from integrations.trainers import trainer_of  # noqa: E402


class Interrupts(TrainerCallback):
    def __init__(self, at: int | None) -> None:
        self._at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._at:
            raise KeyboardInterrupt


def trained(
    folder: Path, pool: Path | None, *callbacks: TrainerCallback, kind: type[Trainer] = Trainer, **settings: Any
) -> Trainer:
    """Train until the end, or until a callback interrupts."""
    trainer = trainer_of("plain", folder, *callbacks, **settings)
    trainer.__class__ = kind
    if pool is not None:
        integration.attach(trainer, pool)
    with suppress(KeyboardInterrupt):
        trainer.train()
    return trainer


# -- the log, subclasses and callbacks ---------------------------------------------------------------------------------


class Logs(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        if self.state.global_step == 1:
            self.log({"tensor": loss.detach(), "numpy": np.float32(0.1), "object": slice(2)})
        return loss


def test_the_log_may_hold_tensors_and_values_of_numpy(folder, pool):
    def restarted() -> Any:
        whole = trained(folder / "plain", None, kind=Logs, max_steps=5)
        trained(folder / "out", pool, Interrupts(3), kind=Logs, max_steps=5)
        resumed = trained(folder / "out", pool, kind=Logs, max_steps=5)
        (expected,), (found,) = ([e for e in one.state.log_history if "tensor" in e] for one in (whole, resumed))
        return found["tensor"] == expected["tensor"], found["numpy"] == expected["numpy"], found["object"]

    assert in_child(restarted) == (True, True, "slice(None, 2, None)")


class Keeps(Trainer):
    """Keeps attributes of many kinds, and one that cannot be saved."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        value, before = loss.detach().clone(), getattr(self, "kept", None)
        counts = dict(before["counts"]) if before else {}
        counts[0] = counts.get(0, 0) + 1
        self.kept = {
            "ema": value if before is None else 0.5 * before["ema"] + 0.5 * value,
            "counts": counts,
            "seen": {*(before["seen"] if before else ()), round(float(value), 6)},
            "pair": (np.float64(value), np.arange(counts[0])),
        }
        self.strange = slice(counts[0])
        return loss * (1 + self.kept["ema"])


class Reshapes(Trainer):
    """Gives two arrays another shape, or another dtype, while their bytes stay the same."""

    reshaped: Any
    retyped: Any

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 1:
            self.reshaped, self.retyped = np.zeros((2, 2), np.float32), np.zeros(4, np.int32)
        return super().compute_loss(*args, **kwargs)


def test_arrays_of_another_shape_or_dtype_with_the_same_bytes_go_on(folder, pool):
    def run(*callbacks: TrainerCallback) -> Reshapes:
        trainer = trainer_of("plain", folder / "out", *callbacks, max_steps=6)
        trainer.__class__ = Reshapes
        trainer.reshaped = trainer.retyped = np.zeros(4, np.float32)
        integration.attach(trainer, pool)
        with suppress(KeyboardInterrupt):
            trainer.train()
        return trainer

    def restarted() -> Any:
        run(Interrupts(4))
        resumed = run()
        return resumed.reshaped.shape, resumed.retyped.dtype == np.int32

    assert in_child(restarted) == ((2, 2), True)


def test_attributes_of_a_subclass_of_any_plain_kind_go_on(folder, pool, caplog):
    def restarted() -> Any:
        whole = trained(folder / "plain", None, kind=Keeps, max_steps=6)
        trained(folder / "out", pool, Interrupts(4), kind=Keeps, max_steps=6)
        resumed = trained(folder / "out", pool, kind=Keeps, max_steps=6)
        is_same = same(resumed.model.state_dict(), whole.model.state_dict())
        kept = [repr({**one.kept, "seen": sorted(one.kept["seen"])}) for one in (resumed, whole)]
        return is_same, kept[0] == kept[1], caplog.text

    is_same, is_kept, logged = in_child(restarted)
    assert (is_same, is_kept) == (True, True)
    assert logged.count("the Keeps changes its attribute 'strange'") == 2  # once in each run
    assert "'kept'" not in logged


class Average(TrainerCallback):
    """Keeps what a resume would not know, and the Trainer, whose state is saved."""

    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}
        self.steps: list[int] = []
        self.last, self.constant, self.trainer = np.float64(0), {1, 2}, [None]

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        for name, one in model.named_parameters():
            self.shadow[name] = one.detach().clone()
        self.steps.append(state.global_step)
        self.last = np.float64(state.global_step)


def test_each_attribute_of_a_callback_that_changes_is_named(folder, pool, caplog):
    def named() -> str:
        average = Average()
        trainer = trainer_of("plain", folder / "out", average, max_steps=3)
        average.trainer = [trainer]
        integration.attach(trainer, pool)
        trainer.train()
        return caplog.text

    logged = in_child(named)
    for name in ("shadow", "steps", "last"):
        assert logged.count(f"the callback Average changes its attribute '{name}'") == 1
    assert "'constant'" not in logged
    assert "'trainer'" not in logged


class Counts(TrainerCallback, ExportableState):
    def __init__(self) -> None:
        self.count = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"count": self.count}}


def test_averaged_weights_beside_the_model_are_named(folder, pool, caplog):
    class Averages(TrainerCallback):
        def __init__(self, trainer: Any) -> None:
            self.average, self.trained = copy.deepcopy(trainer.model), trainer.model

        @torch.no_grad()
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            for one, now in zip(self.average.parameters(), model.parameters(), strict=True):
                one.lerp_(now, 0.1)

    def named() -> str:
        trainer = trainer_of("plain", folder / "out", max_steps=3)
        averages = Averages(trainer)
        trainer.add_callback(averages)
        trainer.average, trainer.constant = averages.average, copy.deepcopy(trainer.model)
        integration.attach(trainer, pool)
        trainer.train()
        return caplog.text

    logged = in_child(named)
    assert logged.count("the Averages changes its attribute 'average'") == 1
    assert logged.count("the Trainer changes its attribute 'average'") == 1
    assert "'constant'" not in logged
    assert "'trained'" not in logged


def test_a_callback_with_state_may_be_new_at_the_resume(folder, pool, caplog):
    def restarted() -> Any:
        settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 5}
        trained(folder / "out", pool, Interrupts(3), **settings)
        new = Counts()
        trained(folder / "out", pool, new, **settings)
        return new.count, (folder / "out" / "checkpoint-5" / "trainer_state.json").exists(), caplog.text

    *found, logged = in_child(restarted)
    assert found == [4, True]
    assert "differs" not in logged


class Resets(Counts):
    """Begins anew in each run."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.count = 0


def test_a_callback_that_was_added_after_attach_goes_on(folder, pool):
    def restarted() -> int:
        for at in (4, None):
            trainer, counts = trainer_of("plain", folder / "out", max_steps=7), Resets()
            integration.attach(trainer, pool)
            trainer.add_callback(counts)
            trainer.add_callback(Interrupts(at))
            with suppress(KeyboardInterrupt):
                trainer.train()
        return counts.count

    assert in_child(restarted) == 7


class Epochs(Counts):
    """Counts epochs, and lets the weight decay grow with them."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.count += 1
        for group in optimizer.param_groups:
            group["weight_decay"] = 2 * group["weight_decay"] + 0.05

    def on_step_end(self, *_: Any, **__: Any) -> None:
        pass


class InterruptsAtBegin(TrainerCallback):
    """Interrupts when the first update of the second epoch begins."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 10:
            raise KeyboardInterrupt


@pytest.mark.parametrize("interrupts", [Interrupts(14), Interrupts(11), InterruptsAtBegin(), Interrupts(10)])
def test_the_hook_at_the_beginning_of_an_epoch_counts_once(folder, pool, interrupts):
    def restarted() -> Any:
        whole = trained(folder / "plain", None, Epochs())
        trained(folder / "out", pool, Epochs(), interrupts)
        epochs = Epochs()
        resumed = trained(folder / "out", pool, epochs)
        return epochs.count, same(resumed.model.state_dict(), whole.model.state_dict())

    assert in_child(restarted) == (3, True)


class KeepsOthers(TrainerCallback):
    """Keeps a loss of inference mode, and what the pool holds anyway."""

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.optimizer, self.scheduler = others["optimizer"], others["lr_scheduler"]
        with torch.inference_mode():
            self.loss = torch.ones(3) * 2


def test_a_callback_may_keep_the_optimizer_and_tensors_of_inference_mode(folder, pool, caplog):
    def named() -> Any:
        step = trained(folder / "out", pool, KeepsOthers(), max_steps=3).state.global_step
        return step, caplog.text

    step, logged = in_child(named)
    assert step == 3
    assert "its attribute 'loss'" in logged
    assert "its attribute 'optimizer'" not in logged
    assert "its attribute 'scheduler'" not in logged


# -- requests to stop --------------------------------------------------------------------------------------------------


class Requests(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step == 14


class RequestsInUpdate(TrainerCallback):
    """Asks for the end while an update accumulates."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step == self._step


@pytest.mark.parametrize("step", [5, 7])  # the first is the last one of an epoch
def test_a_request_to_stop_while_an_update_accumulates_does_not_finish_the_training(folder, pool, step, caplog):
    settings = {"gradient_accumulation_steps": 2}

    def restarted() -> Any:
        whole = trained(folder / "plain", None, **settings)
        stopped = trained(folder / "out", pool, RequestsInUpdate(step), **settings).state.global_step
        resumed = trained(folder / "out", pool, **settings)
        return stopped, same(resumed.model.state_dict(), whole.model.state_dict()), caplog.text

    *found, logged = in_child(restarted)
    assert found == [step, True]
    assert f"the next start continues from step {step}" in logged


def test_a_request_to_stop_names_the_step_of_the_next_start_and_waits_for_the_tiers(folder, pool, caplog):
    def stopped() -> Any:
        trainer = trainer_of("plain", folder / "out", Requests())
        tier = lightck.Tier(str(folder / "tier"), every=4)
        integration.attach(trainer, pool, interval=4, tiers=[tier])
        trainer.train()
        return lightck.recover(str(folder / "tier")).step, caplog.text

    step, logged = in_child(stopped)
    assert step == 12
    assert "has ended this run after step 14 of 30" in logged
    assert "is not declared finished: the next start continues from step 12" in logged


def test_a_request_to_stop_that_a_checkpoint_holds_does_not_stop_the_next_start(folder, pool):
    class Flushes(Requests):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            super().on_step_end(args, state, control, **others)
            if control.should_training_stop:
                attached.session.flush()

    attached: Any = None

    def restarted() -> Any:
        nonlocal attached
        trainer = trainer_of("plain", folder / "out", Flushes())
        attached = integration.attach(trainer, pool)
        trainer.train()
        return lightck.recover(pool).step, trained(folder / "out", pool).state.global_step

    assert in_child(restarted) == (14, 30)


def test_a_request_to_stop_does_not_finish_the_training(folder, pool, caplog):
    settings = {"eval_strategy": "epoch"}

    def restarted() -> Any:
        whole = trained(folder / "plain", None, **settings)
        stopped = [trained(folder / "out", pool, Requests(), **settings).state.global_step]
        stopped += [lightck.recover(pool).step, trained(folder / "out", pool, Requests(), **settings).state.global_step]
        resumed = trained(folder / "out", pool, **settings)
        logs = [[entry.get("eval_loss") for entry in one.state.log_history] for one in (whole, resumed)]
        return stopped, same(resumed.model.state_dict(), whole.model.state_dict()), logs[0] == logs[1], caplog.text

    *found, logged = in_child(restarted)
    assert found == [[14, 13, 14], True, True]
    assert logged.count("a request to stop (should_training_stop) has ended this run after step 14 of 30") == 2


@pytest.mark.skipif(not hasattr(TrainingArguments, "enable_jit_checkpoint"), reason="this release does not have it")
def test_a_checkpoint_of_the_trainer_at_sigterm_does_not_finish_the_training(folder, pool):
    class Terminates(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 5:
                for one in trainer.callback_handler.callbacks:
                    if type(one).__name__ == "JITCheckpointCallback":
                        one.jit_manager.is_checkpoint_requested = True

    trainer: Any = None

    def restarted() -> Any:
        nonlocal trainer
        settings = {"max_steps": 8, "enable_jit_checkpoint": True}
        trainer = trainer_of("plain", folder / "out", Terminates(), **settings)
        integration.attach(trainer, pool)
        trainer.train()
        saved = [path.name for path in (folder / "out").glob("checkpoint-*")]
        return trainer.state.global_step, saved, trained(folder / "out", pool, **settings).state.global_step

    assert in_child(restarted) == (6, ["checkpoint-5"], 8)


def test_early_stopping_that_improves_after_an_early_end_ends_the_training_again(folder, pool):
    settings = {"eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "eval_loss"}

    def counters() -> Any:
        callback = EarlyStoppingCallback(1)
        trainer = trainer_of("plain", folder / "out", callback, **settings)
        states = integration.attach(trainer, pool).callbacks
        found = []
        callback.early_stopping_patience_counter = 1  # as after an early end
        states.watch()
        found.append(states.has_stopped_early())
        callback.early_stopping_patience_counter = 0
        states.update_ended()
        found.append(states.has_stopped_early())
        callback.early_stopping_patience_counter = 1
        return [*found, states.has_stopped_early()]

    assert in_child(counters) == [False, False, True]


def test_early_stopping_finishes_the_training_until_there_are_more_steps(folder, pool, caplog):
    settings = {"eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "eval_loss"}

    def restarted() -> Any:
        found = [
            trained(folder / "out", pool, EarlyStoppingCallback(1, 100.0), **settings).state.global_step
            for _ in range(2)
        ]
        return [
            *found,
            trained(folder / "out", pool, EarlyStoppingCallback(1, 100.0), **settings, max_steps=40).state.global_step,
        ], caplog.text

    steps, logged = in_child(restarted)
    assert steps[0] == steps[1] < 30
    assert f"is finished (step {steps[0]}). Nothing is trained" in logged
    assert steps[2] > steps[0]
    assert "request to stop" not in logged
    assert "differs" not in logged
