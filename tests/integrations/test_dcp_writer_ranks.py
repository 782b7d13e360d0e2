"""``torch.distributed.checkpoint.save`` into a directory of pools, one for each rank: any placement and any number of
ranks loads it, a checkpoint counts when all ranks have it, and another number of ranks goes on in the directory."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cli.calls import call
from ranked import run_ranks, values
from ranks.test_recover import whole
from ranks.trainings import TOPOLOGIES, batch, build
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from toys import same

import lightck
from lightck.errors import CheckpointExistsError, PoolPathError, RankError, UnsupportedError
from lightck.integrations.dcp import PoolReader, PoolWriter
from lightck.pool.reader import open_pool
from lightck.ranks.directory import pool_name

from .dcp_saves import fails, loaded, loads_everything, saved

pytestmark = pytest.mark.frameworks


@pytest.fixture
def pools(folder: Path) -> Path:
    return folder / "pools"


def on_ranks(n_ranks: int, body: Callable[[int], Any]) -> list[Any]:
    return values(run_ranks(n_ranks, body))


def filled(*shape: int, start: float = 0.0) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + start


# -- models ------------------------------------------------------------------------------------------------------------


def trained(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    topology = TOPOLOGIES[name]
    model, optimizer = build(topology)
    called = topology.wrap(model)
    for step in range(2):
        called(batch(dist.get_rank() // topology.n_same_data, step)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """All tensors, whole."""
    names = {p: name for name, p in model.named_parameters()}
    states = {f"{names[p]}/{k}": whole(v) for p, held in optimizer.state.items() for k, v in held.items()}
    return {name: whole(v) for name, v in model.state_dict().items()}, states


@pytest.mark.parametrize(
    ("saves", "loads"),
    [
        ("fsdp 3", "fsdp"),
        ("fsdp", "tp"),
        ("tp", "fsdp 3"),
        ("ddp", "fsdp"),
        pytest.param("hsdp", "tp x fsdp", marks=pytest.mark.long),
        pytest.param("tp x fsdp", "hsdp", marks=pytest.mark.long),
        pytest.param("tp x fsdp", "ddp", marks=pytest.mark.long),
    ],
)
def test_any_placement_loads_what_any_other_has_saved(pools, saves, loads):
    def save(rank: int) -> Any:
        model, optimizer = trained(saves)
        for step in (1, 2):
            model_state, optimizer_state = get_state_dict(model, optimizer)
            saved({"model": model_state, "optimizer": optimizer_state, "step": step}, pools)
        return everything(model, optimizer)

    expected = on_ranks(TOPOLOGIES[saves].n_ranks, save)[0]

    def load(rank: int) -> Any:
        model, optimizer = build(TOPOLOGIES[loads])
        with PoolReader(pools) as reader:
            return loaded(reader, model, optimizer), everything(model, optimizer)

    for step, found in on_ranks(TOPOLOGIES[loads].n_ranks, load):
        assert step == 2
        assert same(found, expected)
    checkpoint = lightck.recover(pools)
    for name, tensor in expected[0].items():
        assert same(checkpoint.model[f"model.{name}"], tensor)


# -- tensors -----------------------------------------------------------------------------------------------------------


def dtensors(rank: int, start: float) -> dict[str, Any]:
    """Sharded and replicated tensors of sizes that two or three ranks do not divide evenly."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "rows": distribute_tensor(filled(5, 3, start=start), mesh, [Shard(0)]),
        "columns": distribute_tensor(filled(3, 7, start=start), mesh, [Shard(1)]),
        "one row": distribute_tensor(filled(1, 4, start=start), mesh, [Shard(0)]),
        "empty": distribute_tensor(torch.empty(0, 4), mesh, [Shard(0)]),
        "replicated": distribute_tensor(filled(4, start=start), mesh, [Replicate()]),
        "scalar": distribute_tensor(torch.tensor(start), mesh, [Replicate()]),
        "plain": filled(6, start=start),
        "same": {"object": [start, "x"]},
    }


def whole_of(start: float) -> dict[str, Any]:
    return {
        "rows": filled(5, 3, start=start),
        "columns": filled(3, 7, start=start),
        "one row": filled(1, 4, start=start),
        "empty": torch.empty(0, 4),
        "replicated": filled(4, start=start),
        "scalar": torch.tensor(start),
        "plain": filled(6, start=start),
        "same": {"object": [start, "x"]},
    }


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_uneven_and_empty_shards_come_back_whole(pools, n_ranks):
    on_ranks(n_ranks, lambda rank: [saved(dtensors(rank, start), pools) for start in (1.0, 2.0, 3.0)])
    assert same(loads_everything(PoolReader(pools)), whole_of(3.0))
    assert same(loads_everything(PoolReader(pools, step=2)), whole_of(2.0))
    assert call("verify", pools).exit_code == 0
    assert "step 3" in call("inspect", pools).stdout
    for rank in range(n_ranks):  # who has nothing of a tensor stores nothing of it
        with closing(open_pool(str(pools / pool_name(rank, n_ranks)))) as reader:
            sizes = {entry.name: entry.nbytes for entry in reader.entries}
        assert sizes.get("model/one row", 0) == (16 if rank == 0 else 0)


def test_other_placements_and_another_mesh_load_it(pools):
    def save(rank: int) -> None:
        mesh = init_device_mesh("cpu", (4,))
        saved({"w": distribute_tensor(filled(6, 10), mesh, [Shard(0)])}, pools)

    on_ranks(4, save)

    def load(rank: int) -> list[torch.Tensor]:
        mesh = init_device_mesh("cpu", (2, 2))
        found = []
        for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(0)], [Shard(1), Shard(1)], [Replicate(), Shard(1)]):
            state = {"w": distribute_tensor(torch.zeros(6, 10), mesh, placements)}
            dcp.load(state, storage_reader=PoolReader(pools))
            found.append(state["w"].full_tensor())
        return found

    for found in on_ranks(4, load):
        assert all(same(one, filled(6, 10)) for one in found)


def test_what_several_ranks_hold_is_stored_once(pools):
    def save(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        saved(
            {
                "replicated": distribute_tensor(filled(100, 100), init_device_mesh("cpu", (4,)), [Replicate()]),
                "hsdp": distribute_tensor(filled(100, 100), mesh, [Replicate(), Shard(0)]),
                "plain": filled(100, 100),
            },
            pools,
        )

    on_ranks(4, save)
    with lightck.recover(pools, lazy=True) as checkpoint:
        stored = {name: sum(torch.Size(p.size).numel() for p in checkpoint.pieces(name)) for name in checkpoint.names}
    assert {name: n for name, n in stored.items() if name != "ranks"} == dict.fromkeys(
        ("model/replicated", "model/hsdp", "model/plain"), 100 * 100
    )
    assert same(dict(lightck.recover(pools).model), dict.fromkeys(("replicated", "hsdp", "plain"), filled(100, 100)))


SPECS = {
    "rows": ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"]),
    "columns": ChunkShardingSpec(dim=1, placements=["rank:1/cpu", "rank:0/cpu"]),
    "two shards each": ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu", "rank:1/cpu", "rank:0/cpu"]),
    "of any size": EnumerableShardingSpec(
        [
            ShardMetadata([0, 0], [2, 20], placement="rank:0/cpu"),
            ShardMetadata([2, 0], [1, 20], placement="rank:1/cpu"),
            ShardMetadata([3, 0], [3, 20], placement="rank:0/cpu"),
            ShardMetadata([6, 0], [4, 20], placement="rank:0/cpu"),
        ]
    ),
}


def sharded(spec: Any, value: torch.Tensor) -> ShardedTensor:
    tensor = sharded_tensor.empty(spec, *value.shape)
    for shard in tensor.local_shards():
        at, size = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        shard.tensor.copy_(value[at[0] : at[0] + size[0], at[1] : at[1] + size[1]])
    return tensor


def test_sharded_tensors_are_loaded_by_every_other_sharding(pools):
    def body(rank: int) -> int:
        n = 0
        planner = {"planner": DefaultSavePlanner(flatten_sharded_tensors=False)}
        for number, (saves, spec) in enumerate(SPECS.items()):
            value = filled(10, 20, start=float(number))
            dcp.save({"w": sharded(spec, value)}, storage_writer=PoolWriter(pools), **planner)
            for loads, other in SPECS.items():
                state = {"w": sharded(other, torch.zeros(10, 20))}
                dcp.load(
                    state,
                    storage_reader=PoolReader(pools),
                    planner=dcp.DefaultLoadPlanner(flatten_sharded_tensors=False),
                )
                for one, wanted in zip(state["w"].local_shards(), sharded(other, value).local_shards(), strict=True):
                    assert same(one.tensor, wanted.tensor), (saves, loads)
                    n += 1
        return n

    assert min(on_ranks(2, body)) >= 16
    assert same(dict(lightck.recover(pools).model), {"w": filled(10, 20, start=3.0)})


def test_each_rank_may_have_keys_of_its_own(pools):
    def save(rank: int) -> None:
        saved({f"of rank {rank}": {"bytes": b"x" * rank, "w": filled(rank + 1)}, "w": filled(2)}, pools)

    on_ranks(3, save)
    found = loads_everything(PoolReader(pools))
    of_ranks = {f"of rank {rank}": {"bytes": b"x" * rank, "w": filled(rank + 1)} for rank in range(3)}
    assert same(found, {k: {**of_ranks, "w": filled(2)}[k] for k in found})
    assert len(found) == 4


def test_async_save_on_all_ranks(pools):
    def save(rank: int) -> None:
        writer = PoolWriter(pools)
        for start in (1.0, 2.0):
            dcp.async_save(dtensors(rank, start), storage_writer=writer).result()

    on_ranks(2, save)
    assert same(loads_everything(PoolReader(pools)), whole_of(2.0))


# -- again and again ---------------------------------------------------------------------------------------------------


def test_another_number_of_ranks_goes_on_in_the_same_directory(pools):
    start = 0.0
    for n_ranks in (3, 2, 2, 4, 1, 2):
        start += 1
        on_ranks(n_ranks, lambda rank, start=start: saved(dtensors(rank, start), pools))
        assert same(loads_everything(PoolReader(pools)), whole_of(start))
        assert lightck.recover(pools).step == start
        names = [name for name in os.listdir(pools) if not name.endswith(".lock")]
        assert len(names) == n_ranks  # those of the ranks before are removed


def test_a_process_alone_goes_on_in_the_directory_of_a_group(pools):
    on_ranks(2, lambda rank: saved(dtensors(rank, 1.0), pools))
    saved(whole_of(2.0), pools)
    assert same(loads_everything(PoolReader(pools)), whole_of(2.0))
    on_ranks(2, lambda rank: saved(dtensors(rank, 3.0), pools))
    assert same(loads_everything(PoolReader(pools)), whole_of(3.0))


def test_another_layout_moves_each_pool_to_a_new_file_with_the_checkpoint_before(pools):
    def save(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for placement, rows in ((Shard(0), 400), (Shard(1), 400), (Shard(0), 1000), (Shard(1), 30)):
            saved({"w": distribute_tensor(filled(rows, 600), mesh, [placement])}, pools)

    on_ranks(2, save)
    assert same(dict(lightck.recover(pools).model), {"w": filled(30, 600)})
    assert same(dict(lightck.recover(pools, step=3).model), {"w": filled(1000, 600)})


def test_reshard_writes_pools_of_another_number_of_ranks_that_are_read_and_go_on(pools):
    on_ranks(2, lambda rank: saved(dtensors(rank, 1.0), pools))
    other = pools.parent / "other"
    assert call("reshard", pools, other, "--world", "3").exit_code == 0
    assert same(loads_everything(PoolReader(other)), whole_of(1.0))
    on_ranks(3, lambda rank: saved(dtensors(rank, 2.0), other))
    assert same(loads_everything(PoolReader(other)), whole_of(2.0))
    assert same(loads_everything(PoolReader(other, step=1)), whole_of(1.0))


def test_ranks_that_do_not_get_their_numbers_are_refused(pools):
    class Unnumbered(PoolWriter):
        """As in a torch that does not pass the rank."""

        def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
            super().set_up_storage_writer(is_coordinator)

    def save(rank: int) -> None:
        with fails(UnsupportedError, "set_up_storage_writer"):
            dcp.save({"w": filled(2)}, storage_writer=Unnumbered(pools))

    on_ranks(2, save)
    assert not pools.exists()


# -- ranks that fail ---------------------------------------------------------------------------------------------------


class FailingOn(DefaultSavePlanner):
    """Fails on one rank when its data is asked for."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def resolve_data(self, item: Any) -> Any:
        if dist.get_rank() == self._rank:
            raise OSError("no luck")
        return super().resolve_data(item)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_save_that_one_rank_could_not_make_never_counts(pools, failing):
    def save(rank: int) -> list[Any]:
        seen = []
        saved(dtensors(rank, 1.0), pools)
        for start in (2.0, 3.0, 4.0):
            with fails(OSError, "no luck"):
                dcp.save(dtensors(rank, start), storage_writer=PoolWriter(pools), planner=FailingOn(failing))
            dist.barrier()
            seen.append(lightck.recover(str(pools)).tensor("model/scalar").item() if rank == 0 else None)
            dist.barrier()
        saved(dtensors(rank, 5.0), pools)
        return seen

    assert on_ranks(2, save)[0] == [1.0, 1.0, 1.0]
    assert same(loads_everything(PoolReader(pools)), whole_of(5.0))


def test_ranks_that_pass_different_steps_are_an_error(pools):
    def save(rank: int) -> None:
        with fails(RankError, "different steps: 3, 4"):
            saved({"w": filled(2)}, pools, step=3 + rank)

    on_ranks(2, save)
    assert not pools.exists()


def test_a_lost_pool_is_named_and_the_next_save_makes_a_new_one(pools):
    on_ranks(2, lambda rank: [saved(dtensors(rank, start), pools) for start in (1.0, 2.0)])
    (pools / "rank-00001-of-00002.pool").unlink()
    with pytest.raises(RankError, match="pool of rank 1"):
        lightck.recover(pools)
    on_ranks(2, lambda rank: saved(dtensors(rank, 3.0), pools))
    assert same(loads_everything(PoolReader(pools)), whole_of(3.0))


def test_a_lost_pool_with_whole_tensors_and_bytes_of_its_own_is_missed(pools):
    def save(rank: int) -> None:
        saved({"a": filled(9), "b": filled(9), "bytes": b"x", "more bytes": b"y"}, pools)

    on_ranks(2, save)
    with lightck.recover(pools, lazy=True) as checkpoint:
        holders = {name: {piece.rank for piece in checkpoint.pieces(name)} for name in checkpoint.names}
    assert {"model/a", "model/b"} <= holders.keys()
    assert {0} in holders.values()
    assert {1} in holders.values()
    (pools / "rank-00001-of-00002.pool").rename(pools.parent / "away.pool")
    with pytest.raises(RankError, match="pool of rank 1"):
        lightck.recover(pools)
    with fails(AssertionError, "pool of rank 1"):  # torch's, with the message of lightck
        dcp.load({"a": torch.zeros(9)}, storage_reader=PoolReader(pools), no_dist=True)
    assert call("verify", pools).exit_code != 0


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_save_of_another_number_of_ranks_that_fails_leaves_the_one_before(pools, failing):
    """Some ranks have made the pools of the new world and committed, and one has none."""
    on_ranks(2, lambda rank: saved(dtensors(rank, 1.0), pools))

    def fail(rank: int) -> None:
        with fails(OSError, "no luck"):
            dcp.save(dtensors(rank, 2.0), storage_writer=PoolWriter(pools), planner=FailingOn(failing))

    for _ in range(2):
        on_ranks(3, fail)
        assert same(loads_everything(PoolReader(pools)), whole_of(1.0))
        assert same(lightck.recover(pools).tensor("model/rows"), filled(5, 3, start=1.0))
        assert call("verify", pools).exit_code == 0
    on_ranks(3, lambda rank: saved(dtensors(rank, 3.0), pools))
    assert same(loads_everything(PoolReader(pools)), whole_of(3.0))
    assert len([name for name in os.listdir(pools) if name.endswith(".pool")]) == 3


@pytest.mark.parametrize("failing", [0, 1])
def test_a_first_save_that_fails_leaves_no_checkpoint_and_the_next_one_is_made(pools, failing):
    def fail(rank: int) -> None:
        with fails(OSError, "no luck"):
            dcp.save(dtensors(rank, 1.0), storage_writer=PoolWriter(pools), planner=FailingOn(failing))

    on_ranks(2, fail)
    with pytest.raises(RankError, match="first save of these ranks was cut off"):
        lightck.recover(pools)
    on_ranks(2, lambda rank: saved(dtensors(rank, 2.0), pools))
    assert same(loads_everything(PoolReader(pools)), whole_of(2.0))


def test_hosts_may_have_directories_of_their_own(folder):
    """Their pools are put into one directory to be loaded."""
    for number, n_ranks in enumerate((3, 2, 2), 1):

        def save(rank: int, start: float = float(number)) -> None:
            saved(dtensors(rank, start), folder / f"host{rank}")

        on_ranks(n_ranks, save)
    together = folder / "together"
    together.mkdir()
    for rank in range(2):
        (pool,) = (folder / f"host{rank}").glob("*.pool")  # those of the three ranks are removed
        shutil.copy(pool, together)
    assert same(loads_everything(PoolReader(together)), whole_of(3.0))


def test_tensors_that_no_rank_has_whole_are_named(pools):
    def save(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        state = {"w": distribute_tensor(filled(4, 2), mesh, [Shard(0)])}
        with fails(RankError, "'w' of shape [4, 2] is not whole: no rank saves the part of size [2, 2]"):
            dcp.save(state, storage_writer=PoolWriter(pools / f"{rank}.pool"), no_dist=True)

    pools.mkdir()
    on_ranks(2, save)
    assert not list(pools.glob("*.pool"))


def test_ranks_that_cannot_agree_are_refused(pools):
    def save(rank: int) -> None:
        with fails(UnsupportedError, "enable_plan_caching"):
            planner = DefaultSavePlanner(enable_plan_caching=True)
            dcp.save({"w": filled(2)}, storage_writer=PoolWriter(pools), planner=planner)
        with fails(UnsupportedError, "use_collectives"):
            dcp.save({"w": filled(2)}, storage_writer=PoolWriter(pools), use_collectives=False)

    on_ranks(2, save)
    assert not pools.exists()


def test_ranks_need_a_directory_and_leave_others_alone(pools, pool):
    saved({"w": filled(2)}, pool)

    def save(rank: int) -> None:
        with fails(PoolPathError, "Name a directory"):
            saved({"w": filled(2)}, pool)

    on_ranks(2, save)
    assert lightck.recover(pool).step == 1

    def train(rank: int) -> None:
        model, optimizer = build(TOPOLOGIES["fsdp"])
        lightck.attach(model, pools, optimizer=optimizer, timeout=60).close()
        dist.barrier()
        with fails(CheckpointExistsError, "overwrite=True"):
            saved({"w": filled(2)}, pools)
        writer = PoolWriter(pools, overwrite=True)
        for start in (0.0, 1.0):
            dcp.save({"w": filled(2, start=start)}, storage_writer=writer)

    on_ranks(2, train)
    assert same(dict(lightck.recover(pools).model), {"w": filled(2, start=1.0)})
    assert same(dict(lightck.recover(pools, step=1).model), {"w": filled(2)})


def test_a_subgroup_of_the_ranks_saves(pools):
    def save(rank: int) -> None:
        group = dist.new_group([1, 2])
        if rank > 0:
            mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
            w = DTensor.from_local(filled(2, 3, start=6.0 * (rank - 1)), mesh, [Shard(0)])
            dcp.save({"w": w}, storage_writer=PoolWriter(pools), process_group=group)
        dist.barrier()  # no rank ends while another one still speaks to it

    on_ranks(3, save)
    assert same(dict(lightck.recover(pools).model), {"w": filled(4, 3)})
