"""Every world loads the pools of every other: parameters and optimizer state are equal to the bit."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranked import run_ranks, values
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import lightck
from lightck.errors import PoolError, PoolPathError, RankError

from . import worlds
from .test_attach import damage
from .worlds import OPTIMIZERS, WORLDS, Whole, World, build, is_equal, updates, whole_of

STEPS = 3


IN_CI = ("ddp 2", "ddp 3", "fsdp 3", "tp 2", "hsdp", "tp x fsdp")
NEW = [pytest.param(name, marks=() if name in IN_CI else pytest.mark.campaign) for name in WORLDS]
"""The worlds in which a training goes on."""


@pytest.fixture(scope="module")
def trained() -> Iterator[dict[str, tuple[Path, list[Whole]]]]:
    """World -> its pools, and its whole tensors as each rank sees them."""
    folder = Path(tempfile.mkdtemp(prefix="lightck-test-", dir="/dev/shm"))
    found = {}
    for name in WORLDS:
        pools = folder / name.replace(" ", "-")
        found[name] = pools, worlds.train(name, pools, STEPS)
    yield found
    shutil.rmtree(folder)


@pytest.mark.parametrize("new", NEW)
def test_a_model_in_a_group_takes_its_parts_from_any_world(trained, new):
    def body(rank: int) -> list[Whole]:
        found = []
        for pools, _ in trained.values():
            model, optimizer = build(WORLDS[new], seed=1)
            step = lightck.recover(pools, model, optimizer).step
            found.append(whole_of(step, model, optimizer))
            updates(WORLDS[new], rank, model, optimizer, range(STEPS, STEPS + 1))  # training goes on
        return found

    for of_rank in values(run_ranks(WORLDS[new].n_ranks, body)):
        for name, got in zip(trained, of_rank, strict=True):
            assert is_equal(got, trained[name][1][0]), f"{name} to {new}"


def test_a_single_process_takes_the_whole_from_any_world(trained):
    for name, (pools, seen) in trained.items():
        model, optimizer = build(World(1), seed=1)
        step = lightck.recover(pools, model, optimizer).step
        assert is_equal(whole_of(step, model, optimizer), seen[0]), name


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "AdamW"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("fsdp 2", "fsdp 3"),
        pytest.param("ddp 2", "fsdp 2", marks=pytest.mark.campaign),
        pytest.param("tp x fsdp", "ddp 3", marks=pytest.mark.campaign),
    ],
)
def test_state_of_other_optimizers(pools, old, new, optimizer):
    expected = worlds.train(old, pools, STEPS, optimizer)[0]

    def body(rank: int) -> Whole:
        model, opt = build(WORLDS[new], optimizer, seed=1)
        step = lightck.recover(pools, model, opt).step
        found = whole_of(step, model, opt)
        updates(WORLDS[new], rank, model, opt, range(STEPS, STEPS + 1))
        return found

    assert all(is_equal(found, expected) for found in values(run_ranks(WORLDS[new].n_ranks, body)))


def test_the_whole_tensors_of_a_checkpoint_whose_parts_were_restored(trained):
    pools, seen = trained["fsdp 3"]

    def body(rank: int) -> bool:
        model, optimizer = build(WORLDS["fsdp 2"], seed=1)
        checkpoint = lightck.recover(pools, model, optimizer)
        updates(WORLDS["fsdp 2"], rank, model, optimizer, range(1))
        return all(torch.equal(value, seen[0].model[name]) for name, value in checkpoint.model.items())

    assert all(values(run_ranks(2, body)))


# -- attach ------------------------------------------------------------------------------------------------------------


def attached(new: str, pools: Path, optimizer: str = "AdamW", **options) -> Callable[[int], tuple[Whole, Whole, Any]]:
    """The body of a rank that attaches in another world and makes two updates. Returns the whole tensors after attach
    and at the end, and ``session.recovered``."""

    def body(rank: int) -> tuple[Whole, Whole, Any]:
        model, opt = build(WORLDS[new], optimizer, seed=1)
        with lightck.attach(model, pools, optimizer=opt, **{"resume": True, "timeout": 60} | options) as session:
            began = whole_of(session.step, model, opt)
            updates(WORLDS[new], rank, model, opt, range(session.step, session.step + 2))
        return began, whole_of(session.step, model, opt), session.recovered

    return body


@pytest.mark.parametrize("new", NEW)
@pytest.mark.parametrize(
    "old",
    [
        "fsdp 3",
        pytest.param("tp x fsdp", marks=pytest.mark.long),
        *(pytest.param(name, marks=pytest.mark.campaign) for name in ("ddp 2", "tp 2", "hsdp")),
    ],
)
def test_a_training_goes_on_in_another_world(trained, pools, old, new):
    shutil.copytree(trained[old][0], pools)
    n_ranks = WORLDS[new].n_ranks
    ended = values(run_ranks(n_ranks, attached(new, pools)))
    for began, _, recovered in ended:
        assert is_equal(began, trained[old][1][0])
        assert recovered.exact == (old == new)
    assert len(list(pools.glob("*.pool"))) == n_ranks
    checkpoint = lightck.recover(pools)
    assert checkpoint.step == STEPS + 2
    assert all(torch.equal(value, ended[0][1].model[name]) for name, value in checkpoint.model.items())
    again = values(run_ranks(n_ranks, attached(new, pools)))
    assert is_equal(again[0][0], ended[0][1])
    assert again[0][2].exact


@pytest.mark.parametrize("old", ["ddp 2", "fsdp 3", "tp x fsdp"])
def test_a_single_process_goes_on_from_the_directory_of_a_group_and_a_group_from_it(trained, pools, old):
    shutil.copytree(trained[old][0], pools)
    world, n_saved = World(1), WORLDS[old].n_ranks
    model, optimizer = build(world, seed=1)
    with lightck.attach(model, pools, optimizer=optimizer, resume=True) as session:
        assert is_equal(whole_of(session.step, model, optimizer), trained[old][1][0])
        assert (session.rank, session.world, session.recovered.exact) == (0, 1, False)
        assert f"saved by {n_saved} ranks and is loaded into 1" in session.recovered.reason
        updates(world, 0, model, optimizer, range(STEPS, STEPS + 2))
    expected = whole_of(session.step, model, optimizer)
    assert [path.name for path in pools.iterdir() if path.suffix == ".pool"] == ["rank-00000-of-00001.pool"]
    model, optimizer = build(world, seed=2)
    with lightck.attach(model, pools, optimizer=optimizer, resume=True) as session:
        assert is_equal(whole_of(session.step, model, optimizer), expected)
        assert session.recovered.exact
    for began, _, _ in values(run_ranks(n_saved, attached(old, pools))):
        assert is_equal(began, expected)


def test_the_pool_of_a_single_process_is_loaded_into_a_group(pools):
    model, optimizer = build(World(1))
    alone = pools.parent / "alone.pool"
    with lightck.attach(model, alone, optimizer=optimizer) as session:
        updates(World(1), 0, model, optimizer, range(STEPS))
    expected = whole_of(session.step, model, optimizer)
    for ended in run_ranks(2, attached("fsdp 2", alone)):
        assert isinstance(ended.error, (PoolPathError, RankError))
        assert "move the pool there under the name rank-00000-of-00001.pool" in str(ended.error)
    pools.mkdir()
    alone.rename(pools / "rank-00000-of-00001.pool")
    for began, _, recovered in values(run_ranks(2, attached("fsdp 2", pools))):
        assert is_equal(began, expected)
        assert "saved by 1 rank and is loaded into 2" in recovered.reason
    assert not (pools / "rank-00000-of-00001.pool").exists()


@pytest.mark.parametrize(
    ("old", "new"), [("fsdp 2", "fsdp 3"), ("tp x fsdp", "ddp 3"), ("ddp 2", "hsdp"), ("fsdp 3", "tp 2")]
)
def test_what_torch_loads_from_its_own_checkpoint_is_the_same(pools, old, new):
    """torch's distributed checkpoint, saved by the same ranks at the same step, and loaded into the same new ones."""
    folder = pools.parent / "dcp"

    def saves(rank: int) -> None:
        model, optimizer = build(WORLDS[old])
        with lightck.attach(model, pools, optimizer=optimizer, timeout=60):
            updates(WORLDS[old], rank, model, optimizer, range(STEPS))
        if hasattr(model, "reshard"):
            model.reshard()
        dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)

    def loads(rank: int) -> tuple[Whole, Whole]:
        model, optimizer = build(WORLDS[new], seed=1)
        step = lightck.recover(pools, model, optimizer).step
        ours = whole_of(step, model, optimizer)
        model, optimizer = build(WORLDS[new], seed=2)
        into = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(into, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
        return ours, whole_of(step, model, optimizer)

    values(run_ranks(WORLDS[old].n_ranks, saves))
    for ours, theirs in values(run_ranks(WORLDS[new].n_ranks, loads)):
        assert is_equal(ours, theirs)


def test_parts_that_are_recovered_while_a_training_runs_are_of_one_step(pools):
    """Two ranks train on, two others recover their parts again and again, at different moments."""
    done = pools.parent / "done"

    def trains(group: Any) -> None:
        model = nn.Linear(40, 50)
        for p in model.parameters():
            p.data.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with lightck.attach(model, pools, optimizer=optimizer, group=group, timeout=60) as session:
            is_done = torch.zeros(1)
            while not is_done:
                for p in model.parameters():
                    p.grad = torch.full_like(p, -1.0)
                optimizer.step()
                session.end_step()
                time.sleep(0.01)
                is_done += done.exists()
                torch.distributed.all_reduce(is_done, group=group)

    def has_checkpoint() -> bool:
        try:
            return pools.exists() and lightck.recover(pools).step >= 0
        except (PoolError, RankError):
            return False

    def recovers(rank: int, mesh: DeviceMesh) -> list[int]:
        model, steps = nn.Linear(40, 50), []
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        while not has_checkpoint():
            time.sleep(0.01)
        for turn in range(20):
            time.sleep(0.005 * ((turn + rank) % 3))
            steps.append(lightck.recover(pools, model, optimizer).step)
            assert all((p.to_local() == steps[-1]).all() for p in model.parameters())
        return steps

    def body(rank: int) -> list[int]:
        group, mesh = torch.distributed.new_group([0, 1]), DeviceMesh("cpu", [2, 3])
        try:
            return trains(group) or [] if rank < 2 else recovers(rank, mesh)
        finally:
            done.touch()

    _, _, one, other = values(run_ranks(4, body))
    assert one == other
    assert len(set(one)) > 1


def test_a_block_that_only_one_rank_needs_takes_all_ranks_to_the_checkpoint_before(pools):
    """The damage is in rows that only the last of three ranks reads."""
    worlds.train("fsdp 2", pools, STEPS)
    damage(pools / "rank-00001-of-00002.pool", STEPS)

    def body(rank: int) -> int:
        model, optimizer = build(WORLDS["fsdp 3"], seed=1)
        return lightck.recover(pools, model, optimizer).step

    assert values(run_ranks(3, body)) == [STEPS - 1] * 3
