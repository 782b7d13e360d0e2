"""A training under the ``Trainer`` of transformers that is killed and started again ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import in_child, killed_child, net, pool_with, same

import lightck
from lightck.errors import CheckpointExistsError, NoCheckpointError, PoolNotFoundError, SessionError, UnsupportedError

pytestmark = pytest.mark.frameworks
pytest.importorskip("transformers")

from transformers import TrainerCallback  # noqa: E402
from transformers import trainer as trainer_module  # noqa: E402

import lightck.integrations.transformers as integration  # noqa: E402
from integrations.kills import difference, killed_or_ended, lost_pools_are_fetched, steps_in  # noqa: E402
from integrations.trainers import PROGRAMS, Events, run, trainer_of  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "finetune_trainer.py"
IN_CI = ("accumulation, cosine, evaluation", "early stopping", "stream of samples, averages of a subclass")


def programs(*marks: Any) -> list[Any]:
    from transformers.trainer_utils import SchedulerType

    known = {one.value for one in SchedulerType}
    given = {name: settings.get("lr_scheduler_type", "linear") for name, settings in PROGRAMS.items()}
    lacks = {n: [pytest.mark.skip(f"this release has no {one}")] * (one not in known) for n, one in given.items()}
    return [pytest.param(name, marks=[*(() if name in IN_CI else marks), *lacks[name]]) for name in PROGRAMS]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    import transformers

    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    yield
    transformers.utils.logging.set_verbosity(before)


# -- killed and started again ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", programs(pytest.mark.long))
def test_a_killed_training_ends_like_one_that_was_not(program, folder, pool):
    expected = in_child(lambda: run(program, folder / "plain", None))
    whole = in_child(lambda: run(program, folder / "whole", folder / "whole.pool"))
    assert difference(whole, expected) == []
    chosen = random.Random(program)
    kills = [chosen.randint(1, expected["events"] - 1) for _ in range(2 if program in IN_CI else 8)]
    print("kills at the events", kills)
    steps = [0]
    for kill_at in kills:
        killed_or_ended(lambda kill_at=kill_at: run(program, folder / "out", pool, kill_at), folder)
        with suppress(NoCheckpointError, PoolNotFoundError):
            steps.append(lightck.recover(pool).step)
    assert steps == sorted(steps)
    resumed = in_child(lambda: run(program, folder / "out", pool))
    assert difference(resumed, expected) == []


def test_a_training_whose_pool_is_lost_or_old_goes_on_from_its_tier(folder, pool):
    lost_pools_are_fetched(run, folder, pool, (40, 20, 20))


@pytest.mark.parametrize("site", ["header", "block", "sealed"])
def test_a_kill_inside_a_checkpoint(site, folder, pool):
    from toys import kill_at

    class Site(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 7:
                kill_at(site)

    def killed() -> None:
        trainer = trainer_of("plain", folder / "out", Site())
        integration.attach(trainer, pool)
        trainer.train()

    killed_child(killed)
    assert lightck.recover(pool).step in (6, 7)
    resumed = in_child(lambda: run("plain", folder / "out", pool))
    assert difference(resumed, in_child(lambda: run("plain", folder / "plain", None))) == []


def test_a_finished_training_trains_nothing_and_says_so(folder, pool, caplog):
    def twice() -> Any:
        first = run("best model, bf16", folder / "out", pool)
        second = run("best model, bf16", folder / "out", pool)
        return first, second, caplog.text

    first, second, logged = in_child(twice)
    assert "is finished (step 30). Nothing is trained" in logged
    assert (second["step"], second["loss"]) == (first["step"], first["loss"])
    assert same(second["state"], first["state"])
    assert second["log"][: len(first["log"])] == first["log"]


def test_more_epochs_go_on_from_a_finished_training(folder, pool, caplog):
    def longer() -> Any:
        run("plain", folder / "out", pool, num_train_epochs=2)
        return run("plain", folder / "out", pool, num_train_epochs=3)["step"], caplog.text

    step, logged = in_child(longer)
    assert step == 30
    assert "differs in" not in logged  # the Trainer has set max_steps anew


@pytest.mark.parametrize("workers", [0, 1])
def test_more_epochs_give_what_the_longer_training_gives(workers, folder, pool, caplog):
    settings = {"lr_scheduler_type": "constant", "dataloader_num_workers": workers}

    def longer() -> Any:
        for n_epochs in (1, 2):
            run("plain", folder / "out", pool, num_train_epochs=n_epochs, **settings)
        return run("plain", folder / "out", pool, num_train_epochs=3, **settings), caplog.text

    resumed, logged = in_child(longer)
    expected = in_child(lambda: run("plain", folder / "plain", None, num_train_epochs=3, **settings))
    assert same(resumed["state"], expected["state"])
    assert "differs" not in logged


def test_an_interrupted_training_goes_on_in_the_same_process(folder, pool):
    """With NEFTune, whose hook the Trainer leaves on the model after an interrupt."""
    settings = {"neftune_noise_alpha": 5.0, "max_steps": 6, "logging_steps": 2}

    class Interrupts(TrainerCallback):
        is_due = True

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3 and self.is_due:
                self.is_due = False
                raise KeyboardInterrupt

    def interrupted() -> Any:
        expected = trainer_of("plain", folder / "plain", **settings)
        expected.train()
        trainer = trainer_of("plain", folder / "out", Interrupts(), **settings)
        integration.attach(trainer, pool)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        trainer.train()
        return same(trainer.model.state_dict(), expected.model.state_dict()), trainer.state.global_step

    assert in_child(interrupted) == (True, 6)


RANK = """
import os, pathlib, sys, torch
import lightck
from integrations.trainers import run
folder, pool, kill_at, tier = sys.argv[1:]
options = {"tiers": [lightck.Tier(tier, every=1)]} if tier else {}
left = run("plain", pathlib.Path(folder), pathlib.Path(pool), int(kill_at) or None, options,
           max_steps=5, eval_strategy="steps", eval_steps=1, ddp_backend="gloo")
if os.environ["RANK"] == "0":
    torch.save(left["state"], folder + ".left")
"""


@pytest.mark.long
def test_two_ranks_go_on(folder, pool):
    """The log of each rank has its own times."""
    script = folder / "rank.py"
    script.write_text(RANK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}

    def ranks(name: str, path: str, kill_at: int, tier: str = "") -> int:
        arguments = [*torchrun, str(folder / name), str(folder / path), str(kill_at), tier]
        return subprocess.run(arguments, env=environment, timeout=100, check=False).returncode

    assert ranks("whole", "whole.pool", 0) == 0
    assert ranks("out", "ranks.pool", 20) != 0
    assert ranks("out", "ranks.pool", 0) == 0
    assert same(*(torch.load(folder / f"{name}.left") for name in ("whole", "out")))
    tier = str(folder / "tier")
    assert ranks("fetched", "lost.pool", 20, tier) != 0
    until = time.monotonic() + 60
    while not steps_in(Path(tier)):
        assert time.monotonic() < until
        time.sleep(0.05)
    shutil.rmtree(folder / "lost.pool")
    assert ranks("fetched", "lost.pool", 0, tier) == 0
    assert same(*(torch.load(folder / f"{name}.left") for name in ("whole", "fetched")))


# -- the Trainer's own resume ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [str, Path])
def test_the_trainers_own_checkpoint_is_used_where_it_is_asked_for(kind, folder, pool, caplog):
    """It is newer than the pool, which begins anew there."""
    settings = {"save_strategy": "steps", "save_steps": 5, "max_steps": 10}
    saved = kind(folder / "out" / "checkpoint-5")

    def own() -> Any:
        trainer_of("plain", folder / "out", **settings).train()
        expected = trainer_of("plain", folder / "out", **settings)
        expected.train(resume_from_checkpoint=saved)
        trainer = trainer_of("plain", folder / "out", **settings)
        integration.attach(trainer, pool)
        trainer.train(resume_from_checkpoint=saved)
        step = lightck.recover(pool).step
        return same(trainer.model.state_dict(), expected.model.state_dict()), step, caplog.text

    is_same, step, logged = in_child(own)
    assert is_same
    assert step == 5  # the pool's own count of updates begins there
    assert "continues from the Trainer's checkpoint" in logged


def test_a_missing_checkpoint_of_the_trainer_is_named(folder, pool):
    def missing() -> str:
        trainer = trainer_of("plain", folder / "out")
        integration.attach(trainer, pool)
        with pytest.raises(NoCheckpointError) as raised:
            trainer.train(resume_from_checkpoint=str(folder / "nowhere"))
        return str(raised.value)

    assert "nowhere' is no checkpoint of the Trainer: it has no trainer_state.json" in in_child(missing)
    assert not pool.exists()


@pytest.mark.parametrize("kind", [str, Path])
def test_a_pool_that_is_ahead_is_not_discarded(kind, folder, pool):
    def ahead() -> str:
        run("plain", folder / "out", pool, save_strategy="steps", save_steps=5, max_steps=8)
        trainer = trainer_of("plain", folder / "out")
        integration.attach(trainer, pool)
        with pytest.raises(CheckpointExistsError) as raised:
            trainer.train(resume_from_checkpoint=kind(folder / "out" / "checkpoint-5"))
        return str(raised.value)

    assert "holds step 5, and the pool" in in_child(ahead)
    assert lightck.recover(pool).step == 8


class Begins(TrainerCallback):
    """Notes at which step each update begins."""

    def __init__(self, steps: list[int]) -> None:
        self._steps = steps

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._steps.append(state.global_step)


def test_a_train_that_cannot_load_the_trainers_checkpoint_leaves_the_pool_to_the_next_one(folder, pool):
    saved = folder / "out" / "checkpoint-5"

    def twice() -> Any:
        run("plain", folder / "out", pool, save_strategy="steps", save_steps=5, max_steps=5)
        (saved / "model.safetensors").write_bytes(b"half")
        begun: list[int] = []
        trainer = trainer_of("plain", folder / "out", Begins(begun), max_steps=8)
        integration.attach(trainer, pool)
        with pytest.raises(Exception, match="header"):
            trainer.train(resume_from_checkpoint=str(saved))
        trainer.train()
        return begun, lightck.recover(pool).step

    assert in_child(twice) == ([5, 6, 7], 8)


# -- what is refused, and warnings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"auto_find_batch_size": True}, "auto_find_batch_size"), ({"ignore_data_skip": True}, "ignore_data_skip")],
)
def test_arguments_that_cannot_be_resumed_are_named(settings, named, folder, pool):
    trainer = trainer_of("plain", folder / "out", **settings)
    with pytest.raises(UnsupportedError, match=named):
        integration.attach(trainer, pool)
    assert not pool.exists()


def test_a_reference_model_that_changes_is_refused(folder, pool):
    trainer = trainer_of("plain", folder / "out")
    trainer.args.sync_ref_model = True  # DPOConfig of TRL has it
    with pytest.raises(UnsupportedError, match="sync_ref_model"):
        integration.attach(trainer, pool)


def test_a_pool_of_gradient_records_goes_on(folder, pool):
    def restarted() -> Any:
        expected = trainer_of("plain", folder / "plain", max_steps=7)
        expected.train()
        for stop_at in (4, None):
            trainer = trainer_of("plain", folder / "out", Stops(stop_at), max_steps=7)
            integration.attach(trainer, pool, strategy=lightck.Gradients(base_every=3))
            with suppress(KeyboardInterrupt):
                trainer.train()
        return same(trainer.model.state_dict(), expected.model.state_dict())

    assert in_child(restarted)


class Stops(TrainerCallback):
    def __init__(self, at: int | None) -> None:
        self._at = at

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._at:
            raise KeyboardInterrupt


def test_a_second_attach_is_refused(folder, pool):
    trainer = trainer_of("plain", folder / "out")
    integration.attach(trainer, pool)
    with pytest.raises(SessionError, match="attached to a pool already"):
        integration.attach(trainer, pool)


def test_a_trainer_that_has_trained_is_refused(folder, pool):
    def trained() -> None:
        trainer = trainer_of("plain", folder / "out", max_steps=2)
        trainer.train()
        with pytest.raises(SessionError, match="has made 2 updates already"):
            integration.attach(trainer, pool)

    in_child(trained)


@pytest.mark.parametrize("name", ["_run_epoch", "_load_rng_state"])
def test_a_trainer_that_has_changed_inside_is_refused_at_attach(name, folder, pool, monkeypatch):
    trainer = trainer_of("plain", folder / "out")
    monkeypatch.delattr(trainer_module.Trainer, name)
    with pytest.raises(UnsupportedError, match=f"has no {name}"):
        integration.attach(trainer, pool)


def test_other_versions_trainers_and_arguments_are_refused(folder, pool, monkeypatch):
    trainer = trainer_of("plain", folder / "out")
    with pytest.raises(TypeError, match=r"Pass a transformers\.Trainer"):
        integration.attach(net(), pool)
    with pytest.raises(TypeError, match="trainer is the class Trainer"):
        integration.attach(trainer_module.Trainer, pool)
    with pytest.raises(TypeError, match="optimizer="):
        integration.attach(trainer, pool, optimizer=[])
    monkeypatch.setattr(integration.transformers, "__version__", "6.0.0")
    with pytest.raises(UnsupportedError, match=r"transformers 6.0.0 is not supported"):
        integration.attach(trainer, pool)


@pytest.mark.parametrize("name", ["GRPOTrainer", "OnlineDPOTrainer"])
def test_trainers_with_hidden_state_are_refused(name, folder, pool):
    trainer = trainer_of("plain", folder / "out")
    trainer.__class__ = type(name, (type(trainer),), {})
    with pytest.raises(UnsupportedError, match=name):
        integration.attach(trainer, pool)


def test_a_trainer_that_keeps_inputs_is_refused(folder, pool):
    trainer = trainer_of("plain", folder / "out")
    trainer._buffered_inputs = None
    with pytest.raises(UnsupportedError, match="inputs that it keeps"):
        integration.attach(trainer, pool)


def test_a_callback_with_hidden_averages_is_refused(folder, pool):
    trainer = trainer_of("plain", folder / "out", type("BEMACallback", (TrainerCallback,), {})())
    with pytest.raises(UnsupportedError, match=r"BEMACallback .* averages"):
        integration.attach(trainer, pool)


def test_a_pool_of_another_loop_is_refused(folder, pool):
    def other() -> None:
        pool_with(pool)
        trainer = trainer_of("plain", folder / "out")
        integration.attach(trainer, pool)
        with pytest.raises(SessionError, match="was not written by a Trainer"):
            trainer.train()
        trainer = trainer_of("plain", folder / "out")
        integration.attach(trainer, pool, resume=False)
        with pytest.raises(CheckpointExistsError, match="resume=False"):
            trainer.train()

    in_child(other)


@pytest.mark.parametrize("changed", ["per_device_train_batch_size", "gradient_accumulation_steps"])
def test_a_restart_with_epochs_of_another_length_is_refused(changed, folder, pool):
    def restarted() -> str:
        run("plain", folder / "out", pool, max_steps=5)
        before = lightck.recover(pool)
        trainer = trainer_of("plain", folder / "out", **{"max_steps": 8, changed: 2})
        integration.attach(trainer, pool)
        with pytest.raises(SessionError) as raised:
            trainer.train()
        assert lightck.recover(pool).step == before.step
        return str(raised.value)

    assert "the run in the pool" in in_child(restarted)


@pytest.mark.parametrize(
    ("name", "before", "now"), [("gradient_accumulation_steps", 6, 5), ("per_device_train_batch_size", 13, 15)]
)
def test_a_restart_with_other_batches_is_refused_though_an_epoch_has_as_many_updates(name, before, now, folder, pool):
    def restarted() -> str:
        run("plain", folder / "out", pool, **{"max_steps": 1, name: before})
        step = lightck.recover(pool).step
        with pytest.raises(SessionError) as raised:
            run("plain", folder / "out", pool, **{"max_steps": 2, name: now})
        assert lightck.recover(pool).step == step
        return str(raised.value)

    message = in_child(restarted)
    assert f"{name}={now}, and the run in the pool" in message
    assert f"had {before}, so" in message


def test_a_pool_that_does_not_say_the_size_of_batches_goes_on(folder, pool, monkeypatch, caplog):
    now = integration.Progress.state_dict

    def restarted() -> Any:
        with monkeypatch.context() as earlier:
            new = ("batches_per_update", "batch_size")
            earlier.setattr(
                integration.Progress, "state_dict", lambda one: {k: v for k, v in now(one).items() if k not in new}
            )
            run("plain", folder / "out", pool, max_steps=4)
        return run("plain", folder / "out", pool, max_steps=6)["step"], caplog.text

    step, logged = in_child(restarted)
    assert step == 6
    assert "differ" not in logged


def test_arguments_of_train_may_be_given_by_position(folder, pool):
    def trained() -> int:
        trainer = trainer_of("plain", folder / "out", max_steps=2, eval_strategy="steps", eval_steps=1)
        integration.attach(trainer, pool)
        trainer.train(None, None, ["logits"])
        return trainer.state.global_step

    assert in_child(trained) == 2


def test_a_search_is_refused(folder, pool):
    trainer = trainer_of("plain", folder / "out")
    integration.attach(trainer, pool)
    with pytest.raises(UnsupportedError, match="hyperparameter search"):
        trainer.train(trial=object())


def test_a_callback_whose_state_is_not_saved_is_named(folder, pool, caplog):
    def counted() -> str:
        trainer = trainer_of("plain", folder / "out", Events(None), max_steps=4)
        integration.attach(trainer, pool)
        trainer.train()
        return caplog.text

    logged = in_child(counted)
    assert logged.count("the callback Events changes its attribute 'count'") == 1
    assert "ExportableState" in logged


def test_an_attribute_of_the_trainer_that_is_not_saved_is_named(folder, pool, caplog):
    def counted() -> str:
        trainer = trainer_of("plain", folder / "out", max_steps=3)
        trainer.center, trainer.kept, trainer.constant, trainer.drawn = torch.zeros(2), object(), 3, torch.Generator()

        class Moves(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                trainer.center.add_(1)
                torch.rand(1, generator=trainer.drawn)

        trainer.add_callback(Moves())
        integration.attach(trainer, pool)
        trainer.train()
        return caplog.text

    logged = in_child(counted)
    assert logged.count("changes its attribute 'drawn' while it trains. It is no plain value, or too large") == 1
    for name in ("center", "kept", "constant"):
        assert f"'{name}'" not in logged


def test_an_attribute_that_the_training_did_not_change_may_differ_at_the_restart(folder, pool):
    def restarted() -> Any:
        trainer = trainer_of("stream of samples, averages of a subclass", folder / "out", max_steps=4)
        trainer.weight = 1.0
        integration.attach(trainer, pool)
        trainer.train()
        again = trainer_of("stream of samples, averages of a subclass", folder / "out", max_steps=4)
        again.weight = 2.0
        integration.attach(again, pool)
        again.train()
        return again.weight, again.average == trainer.average, type(again._metrics["train"]).__name__

    assert in_child(restarted) == (2.0, True, "defaultdict")


def test_an_attribute_that_a_callback_makes_while_it_trains_is_named(folder, pool, caplog):
    class Count(TrainerCallback):
        count = 0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.count += 1

    class Began(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.has_begun = True

    def counted() -> str:
        trainer = trainer_of("plain", folder / "out", Count(), Began(), max_steps=4)
        integration.attach(trainer, pool)
        trainer.train()
        return caplog.text

    logged = in_child(counted)
    assert "the callback Count changes its attribute 'count'" in logged
    assert "has_begun" not in logged


def test_an_epoch_that_was_cut_is_refused_at_the_resume(folder, pool):
    class Cut(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_epoch_stop = state.global_step == 4

    def cut() -> str:
        trainer = trainer_of("plain", folder / "out", Cut())
        integration.attach(trainer, pool)
        trainer.train()
        trainer = trainer_of("plain", folder / "out", Cut())
        integration.attach(trainer, pool)
        with pytest.raises(UnsupportedError) as raised:
            trainer.train()
        return str(raised.value)

    assert "ended an epoch early" in in_child(cut)


def test_nothing_is_left_on_the_trainer_after_an_error(folder, pool):
    class Fails(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 5:
                raise RuntimeError("the user's")

    def failed() -> Any:
        trainer = trainer_of("plain", folder / "out", Fails(), eval_on_start=True)
        skip, names = trainer_module.skip_first_batches, set(vars(trainer))
        attached = integration.attach(trainer, pool)
        with pytest.raises(RuntimeError, match="the user's"):
            trainer.train()
        assert trainer_module.skip_first_batches is skip
        assert not attached.session.is_open
        return {name for name in set(vars(trainer)) - names if not name.startswith("_")}

    assert in_child(failed) <= {"train", "control", "current_gradient_accumulation_steps"}
    assert lightck.recover(pool).step in (4, 5)


def test_without_transformers_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "lightck.integrations.transformers")
    with pytest.raises(ImportError, match=r"pip install 'lightck\[transformers\]'"):
        __import__("lightck.integrations.transformers")


def test_the_example_ends_with_the_same_loss_after_a_kill(folder):
    def example(kill: str = "") -> str:
        path = str(Path(lightck.__file__).parents[1])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "LIGHTCK_KILL": kill}
        command = [sys.executable, EXAMPLE, "--epochs", "1", "--pool", "killed.pool" if kill else "run.pool"]
        if not kill and (folder / "killed.pool").exists():
            command[-1] = "killed.pool"
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == (-signal.SIGKILL if kill else 0), done.stderr
        return done.stdout.rpartition("step ")[2]

    expected = example()
    example(kill="ack:9")
    assert lightck.recover(folder / "killed.pool").step == 9
    assert example() == expected
