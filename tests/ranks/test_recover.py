"""``recover`` on the directory of a group, in a single process: whole tensors from the parts of all ranks."""

from __future__ import annotations

import logging
from pathlib import Path

import pools_by_hand as by_hand
import pytest
import torch
import torch.distributed as dist
from ranked import run_ranks, values
from torch import nn
from torch.distributed.tensor import DTensor

import lightck
from lightck.errors import CorruptPoolError, NoCheckpointError, PoolError, PoolPathError, RankError, UnsupportedError
from lightck.pool.format.group import GroupIdentity
from lightck.pool.format.layout import Entry
from lightck.pool.format.pieces import Piece

from .test_attach import damage
from .trainings import TOPOLOGIES, batch, body, build


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def train(name: str, pools: Path, updates: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train with lightck. Returns the whole tensors of the model and of the optimizer, by name."""
    topology = TOPOLOGIES[name]

    def rank_body(rank: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        model, optimizer = build(topology)
        session = lightck.attach(model, pools, optimizer=optimizer, timeout=60)
        called = topology.wrap(model)
        for step in range(updates):
            called(batch(rank // topology.n_same_data, step)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.close()
        if hasattr(model, "reshard"):
            model.reshard()
        names = {p: name for name, p in model.named_parameters()}
        states = {f"{names[p]}/{key}": whole(v) for p, held in optimizer.state.items() for key, v in held.items()}
        return {name: whole(v) for name, v in model.state_dict().items()}, states

    return values(run_ranks(topology.n_ranks, rank_body))[0]


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_parts_are_put_together(pools, name, caplog):
    model, optimizer = train(name, pools, 3)
    with caplog.at_level(logging.WARNING, "lightck"):
        checkpoint = lightck.recover(pools)
    assert checkpoint.step == 3
    assert {key: value.shape for key, value in checkpoint.model.items()} == {k: v.shape for k, v in model.items()}
    assert all(torch.equal(value, model[key]) for key, value in checkpoint.model.items())
    assert all(torch.equal(checkpoint.tensor(f"optimizer/{key}"), value) for key, value in optimizer.items())
    assert caplog.records == []


@pytest.mark.parametrize("name", ["fsdp", "tp x fsdp"])
def test_a_single_process_goes_on_with_the_whole_model(pools, name):
    expected, state = train(name, pools, 3)
    torch.manual_seed(1)
    model = TOPOLOGIES[name].model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    assert lightck.recover(pools, model, optimizer).step == 3
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())
    for key, p in model.named_parameters():
        assert torch.equal(optimizer.state[p]["exp_avg"], state[f"{key}/exp_avg"])
    assert optimizer.param_groups[0]["lr"] == 1e-2
    with lightck.attach(model, pools.parent / "alone.pool", optimizer=optimizer) as session:
        model(batch(0, 0)).sum().backward()
        optimizer.step()
    assert session.committed == 1


def test_an_older_common_step_is_recovered_on_request(pools):
    train("fsdp", pools, 4)
    assert lightck.recover(pools, step=3).step == 3
    with pytest.raises(NoCheckpointError, match=r"no checkpoint of step 1 in common.*4, 3, 2"):
        lightck.recover(pools, step=1)


def test_a_damaged_part_takes_recovery_to_the_common_checkpoint_before(pools):
    train("fsdp", pools, 4)
    damage(pools / "rank-00001-of-00002.pool", 4)
    checkpoint = lightck.recover(pools)
    assert checkpoint.step == 3
    assert [one.step for one in checkpoint.rejected] == [4]
    for step in (3, 2):
        damage(pools / "rank-00001-of-00002.pool", step)
    with pytest.raises(CorruptPoolError, match="No checkpoint that all ranks have"):
        lightck.recover(pools)


def test_a_missing_pool_is_named(pools):
    train("fsdp 3", pools, 2)
    (pools / "rank-00001-of-00003.pool").unlink()
    with pytest.raises(RankError, match=r"lacks the pool of rank 1 of this training, which has 3 ranks"):
        lightck.recover(pools)


def test_two_pools_of_one_rank_are_refused(pools):
    train("ddp", pools, 2)
    first = pools / "rank-00000-of-00002.pool"
    (pools / "rank-00002-of-00003.pool").write_bytes(first.read_bytes())
    (pools / "rank-00002-of-00003.pool").chmod(0o600)
    with pytest.raises(RankError, match="are both pools of rank 0"):
        lightck.recover(pools)


def test_pools_of_two_trainings_are_refused(pools):
    other = pools.parent / "other"
    for folder in (pools, other):
        train("ddp", folder, 2)
    (other / "rank-00001-of-00002.pool").rename(pools / "rank-00001-of-00002.pool")
    with pytest.raises(RankError, match="belong to 2 different trainings"):
        lightck.recover(pools)


def test_a_directory_without_pools_is_refused(tmp_path):
    with pytest.raises(PoolPathError, match=r"is a directory\. It holds no pool of a rank"):
        lightck.recover(tmp_path)


def test_the_pool_of_one_rank_names_its_directory(pools):
    train("ddp", pools, 2)
    with pytest.raises(UnsupportedError, match=rf"rank 0 of 2.*lightck.recover\('{pools}'\)"):
        lightck.recover(pools / "rank-00000-of-00002.pool")


def test_weights_that_only_one_rank_has_tied_are_read_under_the_other_name(pools, caplog):
    """The tied name has no bytes of its own in the pool of that rank."""

    def rank_body(rank: int) -> None:
        model = nn.Module()
        model.first, model.second = nn.Linear(40, 30), nn.Linear(40, 30)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1.5)
        if rank == 1:
            model.second.weight = model.first.weight
        optimizer = torch.optim.SGD(list(model.parameters()), lr=0.1)
        with lightck.attach(model, pools, optimizer=optimizer, timeout=60):
            dist.barrier()

    values(run_ranks(2, rank_body))
    with caplog.at_level(logging.WARNING, "lightck"):
        checkpoint = lightck.recover(pools)
    assert all(torch.equal(value, torch.full_like(value, 1.5)) for value in checkpoint.model.values())
    assert caplog.records == []


def hostile(pools: Path, entries: list[list[Entry]]) -> None:
    """Make the pools of a group by hand, with a checkpoint of step 1. ``entries``: of each rank."""
    pools.mkdir()
    for rank, of_rank in enumerate(entries):
        path = pools / f"rank-{rank:05d}-of-{len(entries):05d}.pool"
        group = GroupIdentity(run_id=bytes(16), world_id=bytes(16), rank=rank, world_size=len(entries))
        by_hand.make(path, of_rank, group=group)
        with by_hand.writer_of(path) as writer:
            by_hand.commit(writer, 1, state=by_hand.small_state())


def test_a_huge_logical_shape_that_no_part_covers_allocates_nothing(pools):
    part = by_hand.entry("model/w", (4,), logical_shape=(1 << 60,), pieces=(Piece((0,), (4,), (0,)),))
    hostile(pools, [[part], [part]])
    with pytest.raises(CorruptPoolError, match="cannot be put together, because no pool holds the part"):
        lightck.recover(pools)


def test_state_of_another_dtype_on_another_rank_is_not_called_a_part(pools):
    """The message for a state tensor of another shape says that it belongs to a part of its parameter."""
    parameter = by_hand.entry("model/w", (4,))
    states = [
        by_hand.entry("optimizer/w/exp_avg", (4,), role="optimizer", dtype=one) for one in ("float32", "bfloat16")
    ]
    hostile(pools, [[parameter, state] for state in states])
    with pytest.raises(CorruptPoolError, match="'optimizer/w/exp_avg' has another shape or dtype on another rank"):
        lightck.recover(pools)


def test_a_model_that_is_no_module_is_a_type_error(pools):
    hostile(pools, [[by_hand.entry("model/w", (4,))]] * 2)
    with pytest.raises(TypeError, match=r"model is a str, not a torch\.nn\.Module"):
        lightck.recover(pools, "model")


def test_ties_that_lead_nowhere_together_are_refused(pools):
    """Rank 0 ties a to b, and rank 1 ties c to a: together c leads to a name without bytes."""

    def tied(name: str, other: str) -> list[Entry]:
        return [by_hand.entry(other, (4,)), by_hand.entry(name, (4,), alias=other, nbytes=0)]

    hostile(pools, [tied("model/a", "model/b"), tied("model/c", "model/a")])
    with pytest.raises(CorruptPoolError, match="which has no bytes of its own"):
        lightck.recover(pools)


def test_what_differs_between_ranks_is_named(pools, caplog):
    """Without a wrapper each rank trains on its own."""

    def rank_body(rank: int) -> None:
        torch.manual_seed(rank)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with lightck.attach(model, pools, optimizer=optimizer, timeout=60):
            dist.barrier()

    values(run_ranks(2, rank_body))
    with caplog.at_level(logging.WARNING, "lightck"):
        checkpoint = lightck.recover(pools)
    torch.manual_seed(0)
    assert torch.equal(checkpoint.model["weight"], nn.Linear(3, 2).weight)
    assert "ranks have different bytes in 2 tensors of step 0, and those of rank 0 are taken" in caplog.text


def test_a_directory_in_use_can_be_recovered(pools):
    def rank_body(rank: int) -> list[int]:
        if rank == 2:
            steps = []
            while not (pools / "ended").exists():
                try:
                    steps.append(lightck.recover(pools).step)
                except (PoolError, RankError):
                    continue  # not all pools exist yet
            return steps
        subgroup = dist.new_subgroups_by_enumeration([[0, 1], [2]])[0] if rank < 3 else None
        model, optimizer = nn.Linear(30, 2000), None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with lightck.attach(model, pools, optimizer=optimizer, group=subgroup, timeout=60):
            for _ in range(60):
                model(torch.ones(30)).sum().backward()
                optimizer.step()
                dist.barrier(subgroup)
        (pools / "ended").touch()
        return []

    def with_group(rank: int) -> list[int]:
        if rank == 2:
            dist.new_subgroups_by_enumeration([[0, 1], [2]])
        return rank_body(rank)

    steps = values(run_ranks(3, with_group))[2]
    assert steps == sorted(steps)
    assert len(set(steps)) > 1


def test_a_killed_training_is_recovered_at_the_step_that_it_would_resume(pools):
    topology = TOPOLOGIES["fsdp"]
    run_ranks(2, body(topology, pools, 20, kill=(1, 9)))
    step = lightck.recover(pools).step
    runs = values(run_ranks(2, body(topology, pools, 20)))
    assert [run.began for run in runs] == [step, step]


@pytest.mark.parametrize("is_equal", [True, False])
def test_parts_that_overlap_in_another_way_are_compared_byte_by_byte(pools, caplog, is_equal):
    """Rank 0 holds everything, and rank 1 the elements 1 and 2: at their places, or one place further."""
    place = 1 if is_equal else 2
    whole = by_hand.entry("model/w", (4,), logical_shape=(4,), pieces=(Piece((0,), (4,), (0,)),))
    part = by_hand.entry("model/w", (4,), logical_shape=(4,), pieces=(Piece((1,), (2,), (place,)),))
    hostile(pools, [[whole], [part]])
    with caplog.at_level(logging.WARNING, "lightck"):
        lightck.recover(pools)
    assert ("ranks have different bytes in 1 tensor of step 1" in caplog.text) != is_equal
