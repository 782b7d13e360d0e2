"""A loop of the user's over what Accelerate has prepared: killed and started again, it ends as if nothing had
happened."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import everything, in_child, killed_child, same

import lightck
from lightck.errors import AmbiguousError, LateError, UnsupportedError

pytestmark = pytest.mark.frameworks
pytest.importorskip("accelerate")

from accelerate import Accelerator, DataLoaderConfiguration  # noqa: E402
from accelerate.utils import ProjectConfiguration  # noqa: E402

import lightck.integrations.accelerate as integration  # noqa: E402

PROGRAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "bf16, scheduler of each update": {"mixed_precision": "bf16"},
    "workers": {"workers": 2},
    "persistent workers": {"workers": 1, "persistent": True},  # if these drew numbers, a warning would name them
    "a sampler without a seed": {"use_seedable_sampler": False},
}
IN_CI = ("accumulation", "persistent workers")


class Drawn(torch.utils.data.Dataset[torch.Tensor]):
    """Items with noise, which is drawn in the process that fetches them."""

    def __init__(self, noise: float) -> None:
        self._noise = noise

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((6,), float(index)) / 26 + self._noise * torch.rand(6)


class Counter:
    """An object that is registered for checkpoints."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def run(program: str, pool: Path | None, kill_at: int | None = None) -> dict[str, Any]:
    given = dict(PROGRAMS[program])
    workers, persistent = given.pop("workers", 0), given.pop("persistent", False)
    seedable = given.pop("use_seedable_sampler", True)
    torch.manual_seed(3)
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable), **given
    )
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    loader = torch.utils.data.DataLoader(
        Drawn(0.0 if persistent else 0.01),
        batch_size=4,
        shuffle=True,
        num_workers=workers,
        persistent_workers=persistent,
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    first, events = 0, 0
    session = None
    if pool is not None:
        session = integration.attach(accelerator, pool)
        loader = session.loader(loader)
        first = loader.epoch
    for _ in range(first, 4):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = (model(batch) - batch).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                counter.count += 1
            events += 1
            if events == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    if session is not None:
        session.close()
    left = everything(accelerator.unwrap_model(model), optimizer.optimizer)
    return {
        "state": left,
        "scheduler": scheduler.scheduler.state_dict(),
        "count": counter.count,
        "random": torch.get_rng_state(),
        "events": events,
    }


def difference(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in one if name != "events" and not same(one[name], other[name])]


@pytest.mark.parametrize(
    "program", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.long) for name in PROGRAMS]
)
def test_a_killed_loop_ends_like_one_that_was_not(program, folder, pool):
    expected = in_child(lambda: run(program, None))
    assert difference(in_child(lambda: run(program, folder / "whole.pool")), expected) == []
    chosen = random.Random(program)
    kills = [chosen.randint(2, 7) for _ in range(2 if program in IN_CI else 4)]
    print("kills at the batches", kills)
    for kill_at in kills:
        killed_child(lambda kill_at=kill_at: run(program, pool, kill_at))
    assert difference(in_child(lambda: run(program, pool)), expected) == []


RANK = """
import sys
from pathlib import Path
import torch
from integrations.test_accelerate import run

program, left, pool, kill_at = sys.argv[1:]
found = run(program, Path(pool) if pool != "none" else None, int(kill_at) or None)
torch.save({name: found[name] for name in ("state", "scheduler", "count")}, f"{left}.{torch.distributed.get_rank()}")
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("program", "kills"),
    [
        ("a sampler without a seed", (5, 4)),  # in the second pass and in the third; a pass has four batches
        pytest.param("a sampler without a seed", (2, 5, 4, 3), marks=pytest.mark.long),
        pytest.param("accumulation", (6, 9), marks=pytest.mark.long),
    ],
)
def test_two_ranks_go_on(program, kills, folder):
    """DistributedDataParallel: each rank has its own batches and random numbers."""
    (folder / "rank.py").write_text(RANK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", folder / "rank.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}

    def ranks(left: str, pool: str, kill_at: int) -> int:
        where = [folder / left, folder / pool if pool != "none" else pool]
        return subprocess.run(
            [*torchrun, program, *where, str(kill_at)], env=environment, timeout=100, check=False
        ).returncode

    assert ranks("plain", "none", 0) == 0
    assert ranks("whole", "whole.pools", 0) == 0
    for kill_at in kills:
        assert ranks("killed", "killed.pools", kill_at) != 0
    assert ranks("killed", "killed.pools", 0) == 0
    for rank in range(2):
        expected, whole, killed = (torch.load(folder / f"{left}.{rank}") for left in ("plain", "whole", "killed"))
        assert same(whole, expected)
        assert same(killed, expected)


# -- save_state() beside lightck ---------------------------------------------------------------------------------------


def run_with_named_folders(pool: Path, project: Path, kill_at: int | None = None, iteration: int = 0) -> list[str]:
    """Save a folder of Accelerate's at every second step. Returns the names of all folders."""
    torch.manual_seed(3)
    config = ProjectConfiguration(str(project), automatic_checkpoint_naming=True, iteration=iteration)
    accelerator = Accelerator(cpu=True, project_config=config)
    model = nn.Linear(6, 6)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    session = integration.attach(accelerator, pool)
    while session.step < 8:
        accelerator.backward(model(torch.ones(2, 6)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if session.step % 2 == 0:
            accelerator.save_state()
        if session.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    session.close(done=True)
    return sorted(path.name for path in (project / "checkpoints").iterdir())


def test_folders_of_save_state_are_numbered_on_after_a_resume(folder, pool):
    killed_child(lambda: run_with_named_folders(pool, folder, kill_at=4))
    assert len(list((folder / "checkpoints").iterdir())) == 2
    killed_child(lambda: run_with_named_folders(pool, folder, kill_at=5))  # saves step 4 again
    (folder / "checkpoints" / "checkpoint_best").mkdir()
    names = in_child(lambda: run_with_named_folders(pool, folder))
    assert names == [*(f"checkpoint_{number}" for number in range(len(names) - 1)), "checkpoint_best"]


@pytest.mark.parametrize(("iteration", "next_number"), [(1, 2), (7, 7)])
def test_a_higher_number_that_the_script_has_set_stays(iteration, next_number, folder, pool):
    killed_child(lambda: run_with_named_folders(pool, folder, kill_at=5))
    names = in_child(lambda: run_with_named_folders(pool, folder, iteration=iteration))
    assert {"checkpoint_0", "checkpoint_1", f"checkpoint_{next_number}"} < set(names)
    assert next_number == 2 or "checkpoint_2" not in names


def test_folders_without_a_resume_are_numbered_by_accelerate(folder, pool):
    (folder / "checkpoints" / "checkpoint_5").mkdir(parents=True)
    assert "checkpoint_0" in in_child(lambda: run_with_named_folders(pool, folder))


RANK_WITH_FOLDERS = """
import sys
from pathlib import Path
import torch
from integrations.test_accelerate import run_with_named_folders

folder, kill_at = Path(sys.argv[1]), int(sys.argv[2]) or None
project = folder / ("first" if int(__import__("os").environ["RANK"]) == 0 else "second")
run_with_named_folders(folder / "pools", project, kill_at)
torch.distributed.destroy_process_group()
"""


def test_all_ranks_number_folders_alike_if_hosts_have_different_ones(folder):
    (folder / "rank.py").write_text(RANK_WITH_FOLDERS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", folder / "rank.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    for kill_at in (4, 0):
        subprocess.run([*torchrun, folder, str(kill_at)], env=environment, timeout=100, check=kill_at == 0)
        if kill_at:
            (folder / "second" / "checkpoints" / "checkpoint_9").mkdir()
    assert (folder / "first" / "checkpoints" / "checkpoint_10").is_dir()
    assert not (folder / "first" / "checkpoints" / "checkpoint_2").exists()


# -- what is refused ---------------------------------------------------------------------------------------------------


def prepared(*models: nn.Module) -> Accelerator:
    accelerator = Accelerator(cpu=True)
    for model in models:
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return accelerator


def test_attach_before_prepare_is_refused(pool):
    def early() -> None:
        with pytest.raises(LateError, match=r"after accelerator\.prepare"):
            integration.attach(prepared(), pool)

    in_child(early)


def test_several_models_need_a_root(pool):
    def several() -> list[str]:
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        accelerator = prepared(first, second)
        with pytest.raises(AmbiguousError, match="2 models"):
            integration.attach(accelerator, pool)
        root = nn.ModuleDict({"first": first, "second": second})
        with integration.attach(accelerator, pool, model=root) as session:
            for optimizer in accelerator._optimizers:
                (first(torch.ones(2)) + second(torch.ones(2))).sum().backward()
                optimizer.step()
            session.flush()
        return sorted(lightck.recover(pool).model)

    assert in_child(several) == ["first.bias", "first.weight", "second.bias", "second.weight"]


def test_other_objects_and_releases_are_refused(pool, monkeypatch):
    def other() -> None:
        with pytest.raises(TypeError, match=r"accelerate\.Accelerator"):
            integration.attach(nn.Linear(1, 1), pool)
        accelerator = prepared(nn.Linear(1, 1))
        with pytest.raises(TypeError, match="optimizer="):
            integration.attach(accelerator, pool, optimizer=[])
        monkeypatch.setattr(integration.accelerate, "__version__", "2.0.0")
        with pytest.raises(UnsupportedError, match=r"accelerate 2.0.0 is not supported"):
            integration.attach(accelerator, pool)
        monkeypatch.undo()
        del accelerator._custom_objects
        with pytest.raises(UnsupportedError, match="has no _custom_objects"):
            integration.attach(accelerator, pool)

    in_child(other)


def test_without_accelerate_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "lightck.integrations.accelerate")
    with pytest.raises(ImportError, match=r"pip install 'lightck\[accelerate\]'"):
        __import__("lightck.integrations.accelerate")
