"""What ranks cannot do together: each gives a typed error on all ranks, which names the rank and the cure."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranked import log_lines, run_ranks, values
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.distributed.tensor import Replicate, distribute_module
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import lightck
from lightck.errors import (
    CheckpointExistsError,
    NoSpaceError,
    PoolError,
    PoolLockedError,
    PoolNotFoundError,
    PoolPathError,
    RankError,
    UnsupportedError,
)
from lightck.session.group import HOST_VARIABLE

from .trainings import TOPOLOGIES, batch, body, build


def plain_model(width: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, width)
    return model, torch.optim.AdamW(model.parameters())


def errors(n_ranks: int, attach: Callable[[int], Any]) -> list[Exception]:
    """The error that each rank gets from ``attach``."""

    def rank_body(rank: int) -> Exception | None:
        try:
            attach(rank)
        except Exception as err:
            return type(err)(*err.args[:1]) if not isinstance(err, OSError) else err
        return None

    found = values(run_ranks(n_ranks, rank_body))
    assert None not in found, "a rank attached"
    return found


def attached(pools: Path, **options: Any) -> Callable[[int], Any]:
    def attach(rank: int) -> None:
        model, optimizer = plain_model()
        lightck.attach(model, pools, optimizer=optimizer, **{"timeout": 30} | options).close()

    return attach


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"keep": lightck.Keep(every=2, to="kept")}, UnsupportedError, "keep= is not supported in a group"),
        (
            {"tiers": [lightck.Tier("kept", every=2, format="safetensors")]},
            UnsupportedError,
            r"Tier\(format=\"safetensors\"\) is not supported in a group",
        ),
        ({"backend": "devdax"}, UnsupportedError, 'backend="devdax" is not supported in a group'),
        ({"strategy": lightck.Replica()}, UnsupportedError, r"strategy=Replica\(\) is not supported in a group"),
        ({"slots": 2}, ValueError, "slots=2: in a group of ranks a pool has at least 3 slots"),
        ({"group": "all"}, TypeError, "group is a str"),
        ({"timeout": "long"}, TypeError, "timeout='long' is a str"),
        ({"timeout": 0}, ValueError, "timeout=0: pass a number of seconds above 0"),
    ],
)
def test_an_argument_that_a_group_does_not_know_is_refused_on_all_ranks(pools, options, error, message):
    for found in errors(2, attached(pools, **options)):
        assert isinstance(found, error)
        assert str(found).startswith(message[:20]) or __import__("re").search(message, str(found))
    assert not pools.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (({"interval": 1}, {"interval": 2}), "interval= of lightck.attach is 1 on rank 0"),
        (({"slots": 3}, {"slots": 4}), "slots= of lightck.attach is 3 on rank 0"),
        (({"resume": True}, {"resume": False}), "resume= of lightck.attach is True on rank 0"),
        (({"overwrite": True}, {"overwrite": False}), "overwrite= of lightck.attach is True on rank 0"),
    ],
)
def test_different_arguments_are_named_on_all_ranks(pools, options, message):
    for found in errors(2, lambda rank: attached(pools, **options[rank])(rank)):
        assert isinstance(found, RankError)
        assert message in str(found)
        assert "on rank 1 (" in str(found)


def test_different_models_are_named_on_all_ranks(pools):
    def attach(rank: int) -> None:
        model, optimizer = plain_model(width=2 + rank)
        lightck.attach(model, pools, optimizer=optimizer, timeout=30)

    for found in errors(2, attach):
        assert isinstance(found, RankError)
        assert "tensors of model and optimizer on rank 1" in str(found)
        assert "Only on rank 0: bias (float32, [2]), weight (float32, [2, 3])" in str(found).replace("model/", "")
        assert "Only on rank 1: bias (float32, [3]), weight (float32, [3, 3])" in str(found).replace("model/", "")
    assert not list(pools.glob("*.pool"))


def test_the_name_of_a_host_is_written_as_it_is(pools, monkeypatch):
    monkeypatch.setenv(HOST_VARIABLE, "Node-A.Example")

    def attach(rank: int) -> None:
        model, optimizer = plain_model(width=2 + rank)
        lightck.attach(model, pools, optimizer=optimizer, timeout=30)

    for found in errors(2, attach):
        assert "on rank 1 (host Node-A.Example) differ from those on rank 0 (host Node-A.Example)" in str(found)


def test_attach_on_one_rank_only_ends_after_the_timeout(pools):
    def rank_body(rank: int) -> str:
        if rank:
            dist.barrier()
            return ""
        model, optimizer = plain_model()
        with pytest.raises(RankError) as caught:
            lightck.attach(model, pools, optimizer=optimizer, timeout=1)
        dist.barrier()
        return str(caught.value)

    message = values(run_ranks(2, rank_body))[0]
    assert "Rank 1 of 2 did not reach this point of lightck.attach within 1 seconds" in message
    assert "group=False" in message


def test_a_file_in_place_of_the_directory_is_refused_on_all_ranks(pools):
    pools.write_text("mine")
    for found in errors(2, attached(pools)):
        assert isinstance(found, PoolPathError)
        assert "pool_path names a directory" in str(found)
    assert pools.read_text() == "mine"


def test_a_folder_that_does_not_exist_is_refused_on_all_ranks(pools):
    for found in errors(2, attached(pools / "a" / "b")):
        assert isinstance(found, PoolNotFoundError)


def test_the_error_of_one_rank_is_raised_on_the_others_with_its_text(pools):
    def attach(rank: int) -> None:
        model, optimizer = plain_model()
        objects = {"mine": object()} if rank == 1 else None
        lightck.attach(model, pools, optimizer=optimizer, state=objects, timeout=30)

    first, second = errors(2, attach)
    assert isinstance(first, RankError)
    assert "Rank 1 (" in str(first)
    assert str(second) in str(first)


def test_a_medium_that_is_full_for_one_rank_is_named_on_all(pools):
    def attach(rank: int) -> None:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        attached(pools)(rank)

    first, second = errors(2, attach)
    assert isinstance(first, RankError)
    assert isinstance(second, (NoSpaceError, PoolError))
    assert "Rank 1 (" in str(first)


def test_a_second_job_on_the_directory_is_refused_on_all_its_ranks(pools):
    def rank_body(rank: int) -> list[str]:
        model, optimizer = plain_model()
        session = lightck.attach(model, pools, optimizer=optimizer, timeout=30)
        dist.barrier()
        other, its_optimizer = plain_model()
        with pytest.raises((PoolLockedError, RankError)) as caught:
            lightck.attach(other, pools, optimizer=its_optimizer, resume=True, timeout=30)
        dist.barrier()
        session.close()
        return [type(caught.value).__name__, str(caught.value)]

    found = values(run_ranks(2, rank_body))
    assert "PoolLockedError" in {name for name, _ in found}


def test_checkpoints_are_neither_loaded_nor_overwritten_unasked(pools):
    values(run_ranks(2, body(TOPOLOGIES["ddp"], pools, 3)))

    def attach(rank: int) -> None:
        model, optimizer = build(TOPOLOGIES["ddp"])
        lightck.attach(model, pools, optimizer=optimizer, timeout=30)

    for found in errors(2, attach):
        assert isinstance(found, CheckpointExistsError)
        assert "rank 1 (" in str(found)
    runs = values(run_ranks(2, body(TOPOLOGIES["ddp"], pools, 5, resume=False, overwrite=True)))
    assert [run.began for run in runs] == [0, 0]
    runs = values(run_ranks(2, body(TOPOLOGIES["ddp"], pools, 6)))
    assert [run.began for run in runs] == [5, 5]


def test_a_pool_of_another_training_is_named_on_all_ranks(pools):
    other = pools.parent / "other"
    for folder in (pools, other):
        values(run_ranks(2, body(TOPOLOGIES["ddp"], folder, 3)))
    (other / "rank-00001-of-00002.pool").rename(pools / "rank-00001-of-00002.pool")
    for found in errors(2, body(TOPOLOGIES["ddp"], pools, 5)):
        assert isinstance(found, RankError)
        assert "belongs to another training" in str(found)


def test_pools_of_two_histories_that_began_with_one_copy_are_refused_on_all_ranks(pools):
    """Both histories have the same run, and steps with the same numbers."""
    topology, copy = TOPOLOGIES["ddp"], pools.parent / "copy"
    values(run_ranks(2, body(topology, pools, 5)))
    shutil.copytree(pools, copy)
    for folder in (pools, copy):
        values(run_ranks(2, body(topology, folder, 10)))
    shutil.copy(copy / "rank-00001-of-00002.pool", pools)
    for found in errors(2, attached(pools, resume=True)):
        assert isinstance(found, RankError)
        assert "of different histories: the training continued from two copies of these pools" in str(found)


def test_a_pool_that_was_copied_over_another_is_named_on_all_ranks(pools):
    values(run_ranks(2, body(TOPOLOGIES["ddp"], pools, 3)))
    first, second = (pools / f"rank-0000{rank}-of-00002.pool" for rank in (0, 1))
    second.write_bytes(first.read_bytes())
    one, other = errors(2, body(TOPOLOGIES["ddp"], pools, 5))
    assert "is that of rank 0, and no pool in the directory is that of rank 1" in str(other)
    assert "Rank 1 (" in str(one)
    assert "no pool in the directory is that of rank 1" in str(one)


def test_a_single_process_does_not_load_the_directory_of_a_group_unasked(pools):
    values(run_ranks(2, body(TOPOLOGIES["ddp"], pools, 3)))
    model, optimizer = build(TOPOLOGIES["ddp"])
    with pytest.raises(CheckpointExistsError, match="holds checkpoints of a group of 2 ranks"):
        lightck.attach(model, pools, optimizer=optimizer)
    assert lightck.recover(pools).step == 3


def test_a_process_alone_among_others_is_refused_the_directory_of_a_group(pools):
    values(run_ranks(2, body(TOPOLOGIES["ddp"], pools, 3)))

    def alone(rank: int) -> None:
        model, optimizer = build(TOPOLOGIES["ddp"])
        lightck.attach(model, pools, optimizer=optimizer, resume=True, group=False)

    for found in errors(2, alone):
        assert isinstance(found, UnsupportedError)
        assert "group=False saves this process alone. Name a file of its own for each process" in str(found)


def test_a_process_outside_of_the_group_is_refused(pools):
    def rank_body(rank: int) -> str:
        group = dist.new_group([0, 1])
        model, optimizer = plain_model()
        if rank == 2:
            with pytest.raises(UnsupportedError) as caught:
                lightck.attach(model, pools, optimizer=optimizer, group=group)
            return str(caught.value)
        with lightck.attach(model, pools, optimizer=optimizer, group=group, timeout=30) as session:
            return f"{session.rank} of {session.world}"

    first, second, third = values(run_ranks(3, rank_body))
    assert (first, second) == ("0 of 2", "1 of 2")
    assert "no member of the process group" in third


def test_ranks_with_other_directories_are_named(pools):
    def attach(rank: int) -> None:
        model, optimizer = plain_model()
        lightck.attach(model, pools.parent / f"pools-{rank}", optimizer=optimizer, timeout=30)

    for found in errors(2, attach):
        assert isinstance(found, RankError)
        assert "pools-0' on rank 0 (" in str(found)
        assert "pools-1' on rank 1 (" in str(found)


def test_an_optimizer_wrapper_with_values_of_its_own_is_refused(pools):
    def attach(rank: int) -> None:
        model, optimizer = plain_model()
        wrapper = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=3, warmup_steps=2))
        lightck.attach(model, pools, optimizer=wrapper, timeout=30)

    for found in errors(2, attach):
        assert isinstance(found, UnsupportedError)
        assert "PostLocalSGDOptimizer keeps 'step' beside the state of the optimizer inside" in str(found)


def test_a_directory_of_another_number_of_ranks_is_not_loaded_unasked(pools):
    values(run_ranks(3, body(TOPOLOGIES["fsdp 3"], pools, 3)))
    for found in errors(2, body(TOPOLOGIES["fsdp"], pools, 5, resume=False)):
        assert isinstance(found, CheckpointExistsError)
        assert "checkpoints of a group of 3 ranks" in str(found)
    assert lightck.recover(pools).step == 3


def test_a_pool_of_a_single_process_is_refused_as_that_of_a_rank(pools):
    pools.mkdir()
    model, optimizer = plain_model()
    with lightck.attach(model, pools / "rank-00000-of-00002.pool", optimizer=optimizer):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    first, second = errors(2, attached(pools, resume=True))
    assert isinstance(first, UnsupportedError)
    assert "training in a single process" in str(first)
    assert isinstance(second, RankError)


def test_old_fsdp_is_refused(pools):
    def attach(rank: int) -> None:
        model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
        lightck.attach(model, pools, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), timeout=30)

    for found in errors(2, attach):
        assert isinstance(found, UnsupportedError)
        assert "fully_shard" in str(found)


def test_an_optimizer_that_was_made_before_fully_shard_is_refused(pools):
    def attach(rank: int) -> None:
        model, optimizer = plain_model(width=4)
        fully_shard(model)
        lightck.attach(model, pools, optimizer=optimizer, timeout=30)

    for found in errors(2, attach):
        assert isinstance(found, UnsupportedError)
        assert "before the parameters of the model became DTensors" in str(found)


def test_layerwise_is_refused(pools):
    def attach(rank: int) -> None:
        model, optimizer = plain_model()
        lightck.layerwise(model, optimizer)

    for found in errors(2, attach):
        assert isinstance(found, UnsupportedError)


def test_an_optimizer_whose_state_cannot_be_predicted_is_refused(pools):
    def attach(rank: int) -> None:
        model, _ = plain_model()
        lightck.attach(model, pools, optimizer=torch.optim.LBFGS(model.parameters()), timeout=30)

    for found in errors(2, attach):
        assert isinstance(found, UnsupportedError)
        assert "The state of LBFGS cannot be predicted" in str(found)


def test_a_rank_that_makes_fewer_updates_is_named_by_the_others(pools):
    """Rank 1 stops, as under DDP's join with uneven inputs. Rank 0 never overwrites what both have."""

    def rank_body(rank: int) -> str:
        model, optimizer = plain_model()
        session = lightck.attach(model, pools, optimizer=optimizer, timeout=6)
        n_updates = 3 if rank else 20
        try:
            for step in range(n_updates):
                model(batch(0, step)).sum().backward()
                optimizer.step()
                session.end_step()
        except RankError as err:
            return str(err)
        finally:
            if rank:
                session.close()
        return ""

    first, second = values(run_ranks(2, rank_body))
    assert second == ""
    assert "rank 1 (" in first.lower()
    assert "step 3" in first
    runs = values(run_ranks(2, lambda rank: _resumed_at(pools)))
    assert runs == [3, 3]


def _resumed_at(pools: Path) -> int:
    model, optimizer = plain_model()
    with lightck.attach(model, pools, optimizer=optimizer, resume=True, timeout=30) as session:
        return session.step


def test_a_process_group_that_is_made_after_attach_is_refused(pool):
    def rank_body(rank: int) -> str:
        model, optimizer = plain_model()
        session = lightck.attach(model, pool.with_name(f"{rank}.pool"), optimizer=optimizer)
        dist.init_process_group("gloo", init_method=f"file://{pool.parent}/store", rank=rank, world_size=2)
        model(torch.ones(3)).sum().backward()
        with log_lines() as lines:
            try:
                optimizer.step()
            except UnsupportedError as err:
                return str(err)
        session.close()
        return "\n".join(lines)

    first, second = values(run_ranks(2, rank_body, has_group=False))
    assert "became rank 0 of 2 after lightck.attach" in first
    assert "became rank 1 of 2 after lightck.attach" in second


def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4))
    return model, torch.optim.AdamW(model.parameters())


def replicated() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = distribute_module(nn.Linear(4, 4), init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize("make", [sharded, replicated])
def test_a_group_without_all_ranks_of_a_tensor_is_refused(pools, make):
    """Each group would agree on a step of its own, and a crash would leave the parts of a tensor at different steps."""

    def attach(rank: int) -> str:
        model, optimizer = make()
        group = dist.new_group([0, 2])
        if rank == 1:
            return ""
        with pytest.raises(UnsupportedError) as caught:
            lightck.attach(model, pools, optimizer=optimizer, group=group, timeout=30).close()
        return str(caught.value)

    found = values(run_ranks(3, attach))
    for message in (found[0], found[2]):
        assert "is a DTensor on a mesh that has the ranks 1 too, and group= has only the ranks 0, 2" in message
        assert "Leave out group=, or pass a group that contains all ranks of the mesh" in message
    assert not list(pools.glob("*.pool"))


def test_a_group_with_all_ranks_of_a_tensor_is_accepted(pools):
    def attach(rank: int) -> int:
        group = dist.new_group([0, 1])
        model, optimizer = sharded()
        with lightck.attach(model, pools, optimizer=optimizer, group=group, timeout=30) as session:
            return session.world

    assert values(run_ranks(2, attach)) == [2, 2]


@pytest.mark.parametrize("has_hook", [False, True])
def test_momentum_with_other_placements_than_its_parameter_names_a_cure_that_works(pools, has_hook):
    """torch gives the gradient of a tensor parallel embedding other placements than the parameter has."""

    def train(rank: int) -> str:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 2))
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(model, mesh, {"0": RowwiseParallel(input_layouts=Replicate())})
        weight = model[0].weight
        if has_hook:
            weight.register_hook(lambda grad: grad.redistribute(placements=weight.placements))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        try:
            with lightck.attach(model, pools, optimizer=optimizer, timeout=30) as session:
                for _ in range(3):
                    optimizer.zero_grad()
                    model(torch.arange(6)).pow(2).sum().backward()
                    optimizer.step()
                    session.flush()
                return f"step {session.committed}"
        except UnsupportedError as err:
            return str(err)

    found = values(run_ranks(2, train))
    if has_hook:
        assert found == ["step 3"] * 2
    else:
        for message in found:
            assert "has the placements (Replicate(),), and its parameter (Shard(dim=0),)" in message
            assert "param.register_hook(lambda grad: grad.redistribute(placements=param.placements))" in message
