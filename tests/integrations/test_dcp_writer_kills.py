"""Processes that are killed within repeated ``dcp.save``: what is in the pool afterwards is one of the
last two saves, bit for bit, and the next process continues from there in the same pool.

A kill comes at a store of the native library, or at a line of lightck's Python code, both drawn from a seed. The states
grow, shrink, and change their keys and their placement, so that kills also come while a pool moves to a new file."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cli.calls import call
from ranked import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from toys import in_child, kill_at, killed_child, same

import lightck
from lightck.errors import CorruptPoolError, NoCheckpointError, PoolError, RankError
from lightck.integrations.dcp import PoolReader, PoolWriter

from .dcp_saves import loads_everything

pytestmark = pytest.mark.frameworks
PACKAGE = str(Path(lightck.__file__).parent)
SITES = ("header", "block", "manifest", "sealed", "body", "word", "ack")
SAVES_MAX = 8
"""A life that was not killed after so many saves ends like this."""


def state_of(step: int) -> dict[str, Any]:
    """The state that is saved as this step: it follows from the number alone."""
    drawn = torch.Generator().manual_seed(step)
    rows = (3, 40, 3, 600, 5)[step % 5]
    state = {
        "model": {"w": torch.randn(rows, 64, generator=drawn), "b": torch.randn(7, generator=drawn)},
        "step": step,
        "log": list(range(step * 40)),
    }
    if step % 3 == 0:
        state["now and then"] = torch.randn(11, 2, generator=drawn, dtype=torch.float64)
    if step % 7 == 6:
        state["large"] = torch.randn(400_000, generator=drawn)
    return state


def kill_at_line(nth: int) -> None:
    """Let this process die before the nth line of lightck's code that it runs from now on."""
    left = nth

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def count_lines(work: Callable[[], Any]) -> int:
    """How many lines of lightck's code ``work`` runs."""
    n = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal n
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        n += event == "line"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return n


def drawn_kill(rng: random.Random, n_lines: int) -> tuple[str, int]:
    """A site and its number: within the first three saves of a life, or soon after."""
    if rng.random() < 0.5:
        return "line", rng.randint(1, 3 * n_lines)
    site = rng.choice(SITES)
    return site, rng.randint(1, 30 if site == "block" else 3)


def arm(kill: tuple[str, int]) -> None:
    site, nth = kill
    if site == "line":
        kill_at_line(nth)
    else:
        kill_at(site, nth)


def last_in(path: Path) -> int:
    """The newest step whose ``save`` had returned."""
    return max(map(int, path.read_text().split()), default=0) if path.exists() else 0


# -- one process -------------------------------------------------------------------------------------------------------


def one_life(pool: Path, progress: Path, first: int, kill: tuple[str, int]) -> None:
    def work() -> None:
        with progress.open("a", buffering=1) as out:
            arm(kill)
            for step in range(first, first + SAVES_MAX):
                dcp.save(state_of(step), storage_writer=PoolWriter(pool, step=step), no_dist=True)
                out.write(f"{step}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    killed_child(work)


@pytest.mark.parametrize(
    ("seed", "n_lives"), [(0, 25), *(pytest.param(seed, 60, marks=pytest.mark.long) for seed in range(1, 6))]
)
def test_a_process_that_is_killed_leaves_the_last_save_or_the_one_before(folder, tmp_path, seed, n_lives):
    rng, pool, progress = random.Random(seed), folder / "run.pool", tmp_path / "progress"
    counted = folder / "counted.pool"
    n_lines = in_child(lambda: count_lines(lambda: dcp.save(state_of(1), storage_writer=PoolWriter(counted))))
    assert n_lines > 500
    at = 0
    for _ in range(n_lives):
        kill = drawn_kill(rng, n_lines)
        one_life(pool, progress, at + 1, kill)
        newest = max(at, last_in(progress))  # of a save that a kill cut off, it is not known whether it was committed
        if newest == 0 and not pool.exists():
            continue
        with PoolReader(pool) as reader:
            found = loads_everything(reader)
            step = reader.step
        assert step in (newest, newest + 1), kill
        assert same(found, state_of(step)), kill
        at = step
    assert call("verify", pool).exit_code == 0
    assert at > n_lives / 2
    names = {name for name in os.listdir(folder) if name.startswith("run")}
    assert names <= {"run.pool", "run.pool.lock", *(name for name in names if name.endswith(".new"))}


# -- ranks -------------------------------------------------------------------------------------------------------------


def parts_of(step: int) -> dict[str, Any]:
    """The state of a step, with its tensors divided in another way from step to step."""
    mesh, state = init_device_mesh("cpu", (dist.get_world_size(),)), state_of(step)
    placement = (Shard(0), Replicate(), Shard(1))[step % 3]
    state["model"]["w"] = distribute_tensor(state["model"]["w"], mesh, [placement])
    state["model"]["b"] = distribute_tensor(state["model"]["b"], mesh, [Shard(0)])
    return state


def life_of_ranks(pools: Path, progress: Path, first: int, n_ranks: int, kills: dict[int, tuple[str, int]]) -> None:
    """``kills``: of the ranks that are killed. When one is, all others are soon killed too."""

    def body(rank: int) -> None:
        with progress.open("a", buffering=1) as out:
            states = {step: parts_of(step) for step in range(first, first + SAVES_MAX)}
            if rank in kills:
                arm(kills[rank])
            for step, state in states.items():
                dcp.save(state, storage_writer=PoolWriter(pools, step=step))
                out.write(f"{step}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    assert any(one.is_killed for one in run_ranks(n_ranks, body))


def read(pools: Path) -> tuple[int, Any]:
    """Step and state of the newest checkpoint; (0, None) if no save was ever complete."""
    try:
        reader = PoolReader(pools)
        reader.read_metadata()
    except (CorruptPoolError, NoCheckpointError, PoolError, RankError):
        return 0, None
    with reader:
        return reader.step, loads_everything(reader)


@pytest.mark.parametrize(
    ("seed", "n_lives"), [(0, 14), *(pytest.param(seed, 40, marks=pytest.mark.long) for seed in range(1, 6))]
)
def test_ranks_that_are_killed_leave_the_last_save_or_the_one_before(folder, tmp_path, seed, n_lives):
    """The number of ranks changes between lives."""
    rng, pools, progress = random.Random(seed), folder / "pools", tmp_path / "progress"
    at, n_ranks = 0, 2
    for _ in range(n_lives):
        kills = {rng.randrange(n_ranks): drawn_kill(rng, 2500)}
        life_of_ranks(pools, progress, at + 1, n_ranks, kills)
        newest = max(at, last_in(progress))
        step, found = read(pools)
        assert step in (newest, newest + 1), (n_ranks, kills)
        assert step == 0 or same(found, state_of(step)), (n_ranks, kills)
        at = step
        n_ranks = rng.choice((n_ranks, n_ranks, 2, 3))
    assert call("verify", pools).exit_code == 0
    assert at > n_lives / 3
