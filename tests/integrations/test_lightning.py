"""A training under Lightning that is killed and started again ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from toys import everything, in_child, killed_child, net, pool_with, same

import lightck
from lightck.errors import (
    AmbiguousError,
    CheckpointExistsError,
    DriftError,
    LateError,
    NoCheckpointError,
    PoolNotFoundError,
    SessionError,
    UnsupportedError,
)

pytestmark = [pytest.mark.frameworks, pytest.mark.usefixtures("quiet_lightning")]
pytest.importorskip("lightning")

import lightning  # noqa: E402
import lightning.pytorch as pl  # noqa: E402
from lightning.pytorch.callbacks import (  # noqa: E402
    Callback,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)

import lightck.integrations.lightning as integration  # noqa: E402
from integrations.kills import difference, killed_or_ended, lost_pools_are_fetched  # noqa: E402
from integrations.lightning_programs import PROGRAMS, Classifier, Events, Rows, loader, run, trainer_of  # noqa: E402
from lightck.integrations import lightning_loops as loops  # noqa: E402
from lightck.integrations.lightning import LightckCallback  # noqa: E402
from lightck.integrations.newest import newest_of_training  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fit_lightning.py"
IN_CI = ("accumulation, one cycle, validation in the epoch", "stream of samples, max_steps")


def programs(*marks: Any) -> list[Any]:
    return [pytest.param(name, marks=() if name in IN_CI else marks) for name in PROGRAMS]


# -- killed and started again ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", programs(pytest.mark.long))
def test_a_killed_fit_ends_like_one_that_was_not(program, folder, pool):
    expected = in_child(lambda: run(program, folder / "plain", None))
    whole = in_child(lambda: run(program, folder / "whole", folder / "whole.pool"))
    assert difference(whole, expected) == []
    count = 2 if program in IN_CI else 8
    chosen = random.Random(program)
    most = max(10, expected["events"] // count)
    kills = [chosen.randint(9, most) for _ in range(count)]  # before event 9, the pool may hold nothing yet
    print("kills at the events", kills)
    steps = [0]
    for kill_at in kills:
        killed_or_ended(lambda kill_at=kill_at: run(program, folder / "out", pool, kill_at), folder)
        with suppress(NoCheckpointError, PoolNotFoundError):
            steps.append(lightck.recover(pool).step)
    assert steps == sorted(steps)
    resumed = in_child(lambda: run(program, folder / "out", pool))
    assert difference(resumed, expected) == []


def test_a_fit_whose_pool_is_lost_or_old_goes_on_from_its_tier(folder, pool):
    lost_pools_are_fetched(run, folder, pool, (40, 20, 20))


def test_an_empty_directory_of_ranks_begins_anew(tmp_path):
    (tmp_path / "pools").mkdir()
    assert newest_of_training(str(tmp_path / "pools"), resume=True, options={}) is None


def test_a_finished_fit_trains_nothing_and_says_so(folder, pool, caplog):
    def twice() -> Any:
        first = run("two loaders, data module", folder / "out", pool)
        second = run("two loaders, data module", folder / "out", pool)
        return first, second, caplog.text

    first, second, logged = in_child(twice)
    assert "is finished (step 21). Nothing is trained" in logged
    assert [name for name in difference(first, second) if name != "random"] == []


def test_more_epochs_go_on_from_a_finished_fit(folder, pool, caplog):
    def longer() -> Any:
        run("plain", folder / "out", pool, max_epochs=1)
        return run("plain", folder / "out", pool, max_epochs=2), caplog.text

    resumed, logged = in_child(longer)
    expected = in_child(lambda: run("plain", folder / "plain", None, max_epochs=2))
    assert not {"state", "step", "epoch", "random", "schedulers"} & set(difference(resumed, expected))
    assert "differ" not in logged
    assert "anew" not in logged


def test_an_interrupted_fit_goes_on_in_the_same_process(folder, pool):
    class Interrupts(Callback):
        is_due = True

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 6 and Interrupts.is_due:
                Interrupts.is_due = False
                raise RuntimeError("stop here")

    def interrupted() -> Any:
        trainer, module, data = trainer_of("plain", folder / "out", LightckCallback(pool), Interrupts())
        with pytest.raises(RuntimeError, match="stop here"):
            trainer.fit(module, **data)
        assert lightck.recover(pool).step == 5
        return run("plain", folder / "out", pool)["state"]

    assert same(in_child(interrupted), in_child(lambda: run("plain", folder / "plain", None))["state"])


def test_a_file_that_is_written_twice_keeps_its_name(folder, pool):
    """The kill comes after ``ModelCheckpoint`` has written the file, and before the step is closed."""

    class Kills(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 4 and not (folder / "killed").exists():
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def fit(*callbacks: Callback) -> list[str]:
        saves = ModelCheckpoint(every_n_train_steps=4, save_top_k=-1)
        trainer, module, data = trainer_of("plain", folder / "out", LightckCallback(pool), *callbacks, saves)
        trainer.fit(module, **data)
        return sorted(path.name for path in (folder / "out").rglob("*.ckpt"))

    killed_child(lambda: fit(Kills()))
    written = sorted(path.name for path in (folder / "out").rglob("*.ckpt"))
    assert len(written) == 1
    names = in_child(fit)
    assert not [name for name in names if "-v1" in name]
    assert written[0] in names


class Grows(Callback):
    """Trains two epochs more than the Trainer says; in each epoch, one layer is in eval mode."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        trainer.fit_loop.max_epochs = 4
        module.net[1].eval()


class TwoSchedules(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        steps = [
            torch.optim.lr_scheduler.ConstantLR(optimizer),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
        ]
        of_steps = torch.optim.lr_scheduler.SequentialLR(optimizer, steps, [5])
        schedules = [{"scheduler": plateau, "monitor": "val_loss"}, {"scheduler": of_steps, "interval": "step"}]
        return [optimizer], schedules


class Sampler(torch.utils.data.RandomSampler):
    """Takes the epoch into account, as a DistributedSampler does."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(38, generator=torch.Generator().manual_seed(self._epoch)).tolist())


def unusual(folder: Path, pool: Path | None, kill_at: int | None = None) -> Any:
    """A fit of what outsiders thought of: see the classes above."""
    ours = [] if pool is None else [LightckCallback(pool)]
    callbacks = [*ours, Grows(), Events(kill_at), GradientAccumulationScheduler({0: 2, 2: 1})]
    trainer, _, data = trainer_of("plain", folder, *callbacks, max_epochs=2)
    module = TwoSchedules()
    rows = Rows(38)
    data["train_dataloaders"] = DataLoader(rows, 4, sampler=Sampler(rows))
    drawn = torch.Generator().manual_seed(1)
    data["val_dataloaders"] = DataLoader(Rows(22), 4, shuffle=True, generator=drawn)
    trainer.limit_val_batches = 2
    trainer.fit(module, **data)
    metrics = dict(trainer.callback_metrics)
    return (
        everything(module, *trainer.optimizers),
        metrics,
        trainer.global_step,
        trainer.current_epoch,
        drawn.get_state(),
    )


def test_unusual_programs_go_on(folder, pool):
    expected = in_child(lambda: unusual(folder / "plain", None))
    assert same(in_child(lambda: unusual(folder / "whole", folder / "whole.pool")), expected)
    for kill_at in (75, 40, 61):
        killed_child(lambda kill_at=kill_at: unusual(folder / "out", pool, kill_at))
    assert same(in_child(lambda: unusual(folder / "out", pool)), expected)


# -- Fabric ------------------------------------------------------------------------------------------------------------


def with_fabric(pool: Path | None, until: int, precision: str = "32-true") -> Any:
    torch.manual_seed(3)
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 3, 0.5)
    given = loader(38, num_workers=1)
    if precision == "32-true":  # Fabric counts the passes for this sampler
        given = DataLoader(Rows(38), 4, sampler=DistributedSampler(Rows(38), num_replicas=1, rank=0))
    batches = fabric.setup_dataloaders(given)
    session = None if pool is None else integration.attach(fabric, pool)
    if session is not None:
        batches = session.loader(batches)
    losses, done = [], 0 if session is None else session.step
    for _ in range(0 if session is None else batches.epoch, 3):
        for x, y in batches:
            optimizer.zero_grad()
            with fabric.no_backward_sync(model, enabled=False):
                loss = nn.functional.cross_entropy(model(x), y)
                fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            scheduler.step()
            losses.append(float(loss))
            done += 1
            if done == until:
                os.kill(os.getpid(), signal.SIGKILL)
    if session is not None:
        session.close(done=True)
    return model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), losses[-5:], torch.get_rng_state()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_killed_loop_with_fabric_ends_like_one_that_was_not(precision, pool):
    expected = in_child(lambda: with_fabric(None, -1, precision))
    for until in (4, 17):
        killed_child(lambda until=until: with_fabric(pool, until, precision))
        assert lightck.recover(pool).step in (until - 1, until)
    assert same(in_child(lambda: with_fabric(pool, -1, precision)), expected)


def test_fabric_names_what_it_needs(pool):
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    with pytest.raises(TypeError, match=r"fabric is a str\. Pass a lightning\.Fabric"):
        integration.attach("fabric", pool)
    with pytest.raises(LateError, match=r"Call attach after fabric\.setup"):
        integration.attach(fabric, pool)
    first, second = (fabric.setup(net(), torch.optim.SGD(net().parameters(), 0.1))[0] for _ in range(2))
    with pytest.raises(AmbiguousError, match="Fabric has set up 2 models"):
        integration.attach(fabric, pool)
    assert first is not second


# -- refused, by name --------------------------------------------------------------------------------------------------


def fitting(pool: Path, *callbacks: Callback, ours: dict[str, Any] | None = None, **settings: Any) -> None:
    given = LightckCallback(pool, **(ours or {}))
    trainer, module, data = trainer_of("plain", pool.parent / "out", given, *callbacks, max_epochs=1, **settings)
    trainer.fit(module, **data)


def refused(error: type[Exception], match: str, work: Any) -> None:
    def raising() -> None:
        with pytest.raises(error, match=match):
            work()

    in_child(raising)


def test_what_cannot_be_resumed_exactly_is_refused_by_name(pool):
    refused(
        UnsupportedError,
        "StochasticWeightAveraging cannot be resumed exactly",
        lambda: fitting(pool, StochasticWeightAveraging(1e-2)),
    )
    refused(
        UnsupportedError,
        "reload_dataloaders_every_n_epochs",
        lambda: fitting(pool, reload_dataloaders_every_n_epochs=1),
    )
    refused(SessionError, "two LightckCallbacks", lambda: fitting(pool, LightckCallback(pool)))
    refused(TypeError, "Do not pass optimizer= here", lambda: LightckCallback(pool, optimizer=1))
    assert not pool.exists()


def test_a_release_without_an_attribute_is_refused_at_once(pool, monkeypatch):
    from lightning.pytorch.loops.fit_loop import _FitLoop

    monkeypatch.delattr(_FitLoop, "_load_combined_loader_states")
    refused(UnsupportedError, "has no _FitLoop._load_combined_loader_states", lambda: fitting(pool))
    monkeypatch.undo()
    monkeypatch.setattr(lightning, "__version__", "3.1")
    refused(UnsupportedError, "lightning 3.1 is not supported: lightck knows 2.", lambda: fitting(pool))
    assert not pool.exists()


def test_a_trainer_that_has_trained_is_refused(folder, pool):
    def late() -> None:
        trainer, module, data = trainer_of("plain", folder / "out", max_epochs=1)
        trainer.fit(module, **data)
        trainer.callbacks.append(LightckCallback(pool))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, **data)

    refused(SessionError, "has made 10 updates already", late)


def test_pools_that_hold_something_else_are_refused(folder, pool):
    pool_with(pool)
    refused(SessionError, "was not written by a Trainer of Lightning", lambda: fitting(pool))
    pool.unlink()
    in_child(lambda: fitting(pool))
    refused(CheckpointExistsError, "resume=False is given", lambda: fitting(pool, ours={"resume": False}))


def test_a_removed_folder_of_the_logger_is_made_again(folder, pool):
    """Also if the run goes on with another version than a new run would take."""
    expected = in_child(lambda: run("plain", folder / "plain", None))
    in_child(lambda: run("plain", folder / "out", None, max_epochs=1))  # takes version_0
    killed_child(lambda: run("plain", folder / "out", pool, 24))
    shutil.rmtree(folder / "out")
    resumed = in_child(lambda: run("plain", folder / "out", pool))
    assert same(resumed["state"], expected["state"])


def test_another_batch_size_inside_an_epoch_is_refused(folder, pool, caplog):
    killed_child(lambda: run("plain", folder / "out", pool, 24))

    def other() -> None:
        trainer, module, data = trainer_of("plain", folder / "out", LightckCallback(pool), Events(None))
        data["train_dataloaders"] = torch.utils.data.DataLoader(Rows(38), batch_size=2, shuffle=True)
        try:
            trainer.fit(module, **data)
        finally:
            assert "Progress" not in caplog.text, "lightck's own object is none of the user's"

    refused(SessionError, "has 19 batches, and the epoch of the run in the pool .* had 10", other)
    resumed = in_child(lambda: run("plain", folder / "out", pool))
    assert difference(resumed, in_child(lambda: run("plain", folder / "plain", None))) == []


def test_ckpt_path_counts_if_it_is_given(folder, pool, caplog):
    def from_a_file() -> Any:
        saves = ModelCheckpoint(folder / "saved", filename="saved", every_n_train_steps=6)
        trainer, module, data = trainer_of("plain", folder / "one", LightckCallback(pool), saves, max_epochs=1)
        trainer.fit(module, **data)
        trainer, module, data = trainer_of("plain", folder / "two", LightckCallback(pool), max_epochs=2)
        with pytest.raises(CheckpointExistsError, match="Leave out ckpt_path to continue from the pool"):
            trainer.fit(module, **data, ckpt_path=folder / "saved" / "saved.ckpt")
        trainer, module, data = trainer_of(
            "plain", folder / "three", LightckCallback(pool, overwrite=True), max_epochs=2
        )
        trainer.fit(module, **data, ckpt_path=folder / "saved" / "saved.ckpt")
        return trainer.global_step, lightck.recover(pool).step, caplog.text

    step, in_pool, logged = in_child(from_a_file)
    assert "continues from Lightning's checkpoint" in logged
    assert step == 20
    assert in_pool == step - 6


# -- kept quiet --------------------------------------------------------------------------------------------------------


def test_a_dry_run_makes_no_pool(pool):
    in_child(lambda: fitting(pool, fast_dev_run=True))
    assert not pool.exists()


def test_attributes_that_are_no_plain_values_are_named(folder, pool, caplog):
    class Keeps(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.draws = torch.Generator()
            self.save_hyperparameters({"alpha": 1.0})

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.last = slice(batch_idx)
            torch.rand(1, generator=self.draws)
            self.hparams.alpha *= 0.5
            return super().training_step(batch, batch_idx)

    def named() -> str:
        trainer, _, data = trainer_of("plain", folder / "out", LightckCallback(pool), max_epochs=1)
        trainer.fit(Keeps(), **data)
        return caplog.text

    text = in_child(named)
    for name in ("last", "draws", "_hparams"):
        assert text.count(f"the Keeps changes its attribute '{name}'") == 1


def test_a_second_fit_of_one_callback_is_refused(folder, pool):
    def twice() -> None:
        trainer, module, data = trainer_of("plain", folder / "out", LightckCallback(pool), max_epochs=1)
        trainer.fit(module, **data)
        trainer.fit(module, **data)

    refused(SessionError, "has completed a fit", twice)


def test_a_checkpoint_of_the_same_step_as_the_pool_counts(folder, pool):
    def again() -> int:
        saves = ModelCheckpoint(folder / "saved", filename="saved", save_last=True)
        for epochs in (1, 2):
            trainer, module, data = trainer_of("plain", folder / "out", LightckCallback(pool), saves, max_epochs=epochs)
            trainer.fit(module, **data, ckpt_path=None if epochs == 1 else folder / "saved" / "last.ckpt")
        return trainer.global_step

    assert in_child(again) == 20


def test_an_error_of_a_loader_reaches_the_caller(folder, pool):
    killed_child(lambda: run("plain", folder / "out", pool, 24))

    def other() -> None:
        trainer, module, data = trainer_of("plain", folder / "out", LightckCallback(pool))
        data["train_dataloaders"] = DataLoader(Rows(39), batch_size=4, shuffle=True)
        trainer.fit(module, **data)

    refused(DriftError, "loader 'train'", other)


# -- two ranks, and the example ----------------------------------------------------------------------------------------


def test_the_counters_are_those_of_lightning(folder, pool):
    """They are read without Lightning's own function, which is slower."""
    found: list[Any] = []

    class Compared(Callback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            theirs = trainer.fit_loop.state_dict() | {"state_dict": {}}
            found.append((json.loads(loops.saved(trainer.fit_loop)), theirs))

    for program in ("manual optimization at two rates", "accumulation, one cycle, validation in the epoch"):
        trainer, module, data = trainer_of(program, folder, Compared())
        trainer.fit(module, **data)
    assert len(found) > 6
    assert all(ours == theirs for ours, theirs in found)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "tensor parallel", "fabric"])
def test_two_ranks_go_on(strategy, folder, tmp_path):
    script = Path(__file__).with_name("lightning_ranks.py")

    def start(pools: Path | None, out: Path, kill_at: int = -1, rank: int = 1) -> int:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
        arguments = [strategy, str(out), str(pools), str(kill_at), str(rank)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        return subprocess.run([*command, *arguments], env=env, capture_output=True, timeout=300).returncode

    def left(name: str) -> list[dict[str, Any]]:
        return [torch.load(tmp_path / name / f"rank{rank}.pt") for rank in range(2)]

    assert start(None, tmp_path / "plain") == 0
    expected, pools, chosen = left("plain"), folder / "pools", random.Random(strategy)
    most = min(one.pop("events") for one in expected)
    first = 2 if strategy == "fabric" else 9  # its events are updates
    kills = [(chosen.randint(first, most // 4), chosen.randint(0, 1)) for _ in range(8)]
    print("kills at the events, and the ranks", kills)
    n_killed = sum(start(pools, tmp_path / "out", *kill) != 0 for kill in kills)
    assert n_killed > 3, "the training ends before the kills"
    assert start(pools, tmp_path / "out") == 0
    found = left("out")
    for one in found:
        del one["events"]
    assert same(found, expected)


@pytest.mark.long
def test_the_example_goes_on_after_kills(folder, tmp_path):
    def start() -> subprocess.Popen[str]:
        command = [sys.executable, str(EXAMPLE), str(folder / "example.pool")]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    chosen = random.Random(7)
    for _ in range(3):
        running = start()
        with suppress(subprocess.TimeoutExpired):
            running.wait(timeout=chosen.uniform(6, 12))
        running.kill()
        running.wait()
    last = start()
    output, _ = last.communicate(timeout=300)
    assert last.returncode == 0, output
    assert "accuracy" in output
    assert pl.__name__ == "lightning.pytorch"
