"""Ranks of a host that hold the same shard of a DTensor divide its rows: HSDP, and meshes with tensor parallelism."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from ranked import die, everything, log_lines, run_ranks, values
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import lightck
from lightck.errors import FormatError, RankError
from lightck.pool.format import structures
from lightck.pool.format.layout import Entry
from lightck.pool.reader import open_pool

from .test_bad_input import errors
from .trainings import TOPOLOGIES, Net, batch, body, fsdp, hsdp
from .trainings import is_equal as all_equal
from .worlds import OddNet

WIDTH = 64


class Normed(nn.Module):
    """A norm, whose parameters tensor parallelism replicates, before two layers that it cuts."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, 2 * width)
        self.last = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(self.norm(x))))


class Replicated(nn.Module):
    """Has parameters of one row, of one element and of more dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 7)
        self.flat = nn.Parameter(torch.rand(1, 301))
        self.number = nn.Parameter(torch.tensor(1.5))
        self.transposed = nn.Parameter(torch.rand(17, 40).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).sum() * self.number + self.flat.sum() + self.transposed.pow(2).sum()


PLAN = {
    "norm": SequenceParallel(),
    "first": ColwiseParallel(input_layouts=torch.distributed.tensor.Shard(1)),
    "last": RowwiseParallel(output_layouts=torch.distributed.tensor.Shard(1)),
}


def tp_fsdp(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], PLAN)
    fully_shard(model, mesh=mesh["dp"])


def tp_dp(model: nn.Module) -> None:
    """Data parallel without shards, over two ranks; tensor parallel over two."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    parallelize_module(model, mesh["tp"], PLAN)
    fully_shard(model, mesh=mesh["replicate", "shard"])


def replicated(model: Any) -> None:
    """All parameters are DTensors that each rank holds whole."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    distribute_module(model, mesh, input_fn=_distributed)


def _distributed(module: nn.Module, inputs: Any, mesh: Any) -> Any:
    return tuple(DTensor.from_local(one, mesh, run_check=False) for one in inputs)


def wide_batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


def odd_batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * step + rank))


@dataclass(frozen=True)
class Case:
    """A training. ``n_same_data``: so many neighbouring ranks get the same batches. ``n_replicas``: so many ranks hold
    each shard, of those tensors that are divided."""

    shard: Callable[[Any], None]
    n_ranks: int = 4
    model: Callable[[], nn.Module] = Net
    inputs: Callable[[int, int], torch.Tensor] = batch
    n_same_data: int = 1
    n_replicas: int = 2


CASES = {
    "hsdp": Case(hsdp),
    "hsdp, odd sizes": Case(hsdp, model=OddNet, inputs=odd_batch),
    "tp x dp": Case(tp_dp, model=Normed, inputs=wide_batch, n_same_data=2),
    "tp x fsdp": Case(tp_fsdp, model=Normed, inputs=wide_batch, n_same_data=2),
    "replicated": Case(replicated, 2, Replicated, n_same_data=2),
    "replicated 3": Case(replicated, 3, Replicated, n_same_data=3, n_replicas=3),
}
MARKS = {"hsdp, odd sizes": [pytest.mark.campaign], "replicated 3": [pytest.mark.long], "tp x fsdp": [pytest.mark.long]}
NAMES = [pytest.param(name, marks=MARKS.get(name, [])) for name in CASES]
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


@dataclass
class Life:
    """What one rank returns."""

    began: int
    ended: list[torch.Tensor]
    lines: list[str]
    recovered: Any = None


def life(
    case: Case,
    pools: Path | None,
    updates: int,
    *,
    kill: tuple[int, int] | None = None,
    written: tuple[int, int, int] | None = None,
    before: Callable[[nn.Module, int], Any] = lambda model, rank: None,
    optimizer: Callable[..., torch.optim.Optimizer] = ADAMW,
    **options: Any,
) -> Callable[[int], Life]:
    """The body of a rank. ``kill``: (rank, step): the rank dies in the iteration after that step. ``written``: (rank,
    step, row): after that step the rank writes to a row of its local tensor of a weight."""

    def run(rank: int) -> Life:
        torch.manual_seed(0)
        model: Any = case.model()
        case.shard(model)
        opt = optimizer([p for p in model.parameters() if p.requires_grad])
        before(model, rank)
        torch.manual_seed(100 + rank)
        with log_lines() as lines:
            session = None
            if pools is not None:
                arguments = {"resume": True, "timeout": 60} | options
                session = lightck.attach(model, pools, optimizer=opt, **arguments)
            began = 0 if session is None else session.step
            for step in range(began, updates):
                model(case.inputs(rank // case.n_same_data, step)).pow(2).mean().backward()
                if kill == (rank, step):
                    die()
                opt.step()
                opt.zero_grad()
                if written is not None and written[:2] == (rank, step):
                    local_weight(model)[written[2]] += 1
            if session is not None:
                session.close()
        return Life(began, everything(model, opt), lines, None if session is None else session.recovered)

    return run


def local_weight(model: Any) -> torch.Tensor:
    """This rank's part of the weight of the first layer."""
    if hasattr(model, "reshard"):
        for module in (model, model.first):
            if hasattr(module, "reshard"):
                module.reshard()
    local: torch.Tensor = model.first.weight._local_tensor
    return local.detach()


def is_equal(one: list[Life], other: list[Life]) -> bool:
    return all(
        len(a.ended) == len(b.ended) and all(map(torch.equal, a.ended, b.ended))
        for a, b in zip(one, other, strict=True)
    )


def pool_of(pools: Path, rank: int, n_ranks: int) -> Path:
    return pools / f"rank-{rank:05}-of-{n_ranks:05}.pool"


def entries(pools: Path, rank: int, n_ranks: int) -> dict[str, Entry]:
    """The tensors of the newest checkpoint in a rank's pool."""
    with closing(open_pool(str(pool_of(pools, rank, n_ranks)))) as reader:
        return dict(next(reader.checkpoints()).entries)


def divided(pools: Path, n_ranks: int) -> list[str]:
    """The names of the tensors that ranks have divided in the newest checkpoint."""
    return sorted(
        {
            name
            for rank in range(n_ranks)
            for name, one in entries(pools, rank, n_ranks).items()
            if one.share is not None and not one.share.is_whole
        }
    )


# -- what is written ---------------------------------------------------------------------------------------------------

WIDE = {
    "hsdp": Case(hsdp, model=partial(Net, 5_000)),
    "tp x dp": CASES["tp x dp"],
    "replicated 3": Case(replicated, 3, partial(nn.Linear, 3, 4_000), n_same_data=3, n_replicas=3),
}


@pytest.mark.parametrize(
    "name", ["hsdp", *(pytest.param(name, marks=pytest.mark.campaign) for name in ("tp x dp", "replicated 3"))]
)
def test_each_rank_writes_its_share_of_the_bytes_that_are_replicated(pools, name):
    case = WIDE[name]
    values(run_ranks(case.n_ranks, life(case, pools, 3)))
    values(run_ranks(case.n_ranks, life(case, pools.parent / "whole", 3, split=False)))
    names = divided(pools, case.n_ranks)
    assert "model/first.weight" in names or "model/weight" in names
    for rank in range(case.n_ranks):
        shares, whole = (entries(folder, rank, case.n_ranks) for folder in (pools, pools.parent / "whole"))
        assert all(one.share is None for one in whole.values())
        written = sum(one.nbytes for one in shares.values() if one.role in ("param", "optimizer"))
        held = sum(one.nbytes for one in whole.values() if one.role in ("param", "optimizer"))
        assert written <= 1.05 * held / case.n_replicas
        assert all(shares[one].held_shape == whole[one].shape for one in names)


def test_only_the_tensors_that_the_mesh_replicates_are_divided(pools):
    case = CASES["tp x fsdp"]
    values(run_ranks(4, life(case, pools, 3)))
    model = [name for name in divided(pools, 4) if name.startswith("model/")]
    assert model == ["model/last.bias", "model/norm.bias", "model/norm.weight"]
    ranks = entries(pools, 3, 4)["model/norm.weight"].share.cut.ranks
    assert ranks == (2, 3), "the ranks of one tensor parallel group hold the same shard"
    assert "optimizer/norm.weight/exp_avg" in divided(pools, 4)
    assert "optimizer/norm.weight/step" not in divided(pools, 4)


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_training_ends_as_one_that_was_never_killed(pools, name):
    case = CASES[name]
    expected = values(run_ranks(case.n_ranks, life(case, None, 9)))
    run_ranks(case.n_ranks, life(case, pools, 9, kill=(1, 3)))
    run_ranks(case.n_ranks, life(case, pools, 9, kill=(0, 6)))
    resumed = values(run_ranks(case.n_ranks, life(case, pools, 9)))
    assert {one.began for one in resumed} <= {4, 5, 6}
    assert all(one.recovered.exact for one in resumed)
    assert is_equal(resumed, expected)
    assert not any("different bytes" in line for one in resumed for line in one.lines)
    assert divided(pools, case.n_ranks), "the ranks have divided nothing"
    assert lightck.recover(pools).step == 9


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        pytest.param(partial(torch.optim.AdamW, lr=1e-2, fused=True), marks=pytest.mark.long),
        pytest.param(partial(torch.optim.Adagrad, lr=1e-2), marks=pytest.mark.campaign),
    ],
    ids=["SGD", "AdamW fused", "Adagrad"],
)
def test_the_state_of_each_optimizer_comes_back(pools, optimizer):
    case = CASES["hsdp, odd sizes"]
    expected = values(run_ranks(4, life(case, None, 7, optimizer=optimizer)))
    run_ranks(4, life(case, pools, 7, optimizer=optimizer, kill=(2, 4)))
    resumed = values(run_ranks(4, life(case, pools, 7, optimizer=optimizer)))
    assert all(one.recovered.exact for one in resumed)
    assert is_equal(resumed, expected)


def test_fsdp_on_one_mesh_dimension_divides_nothing(pools):
    values(run_ranks(2, life(Case(fsdp, 2), pools, 3)))
    assert divided(pools, 2) == []
    with closing(open_pool(str(pool_of(pools, 0, 2)))) as reader:
        assert reader.superblock.incompat == structures.INCOMPAT_GROUP


def test_replicas_on_different_hosts_divide_nothing(pools):
    topology = TOPOLOGIES["hsdp, 2 hosts"]
    expected = values(run_ranks(4, body(topology, None, 8)))
    run_ranks(4, body(topology, pools, 8, kill=(2, 4)))
    resumed = values(run_ranks(4, body(topology, pools, 8)))
    assert all_equal(resumed, expected)
    for rank in range(4):
        assert all(one.share is None for one in entries(pools / f"host-{rank // 2}", rank, 4).values())


@pytest.mark.campaign
@pytest.mark.parametrize("first", [True, False])
def test_split_may_be_turned_on_and_off(pools, first):
    case = CASES["hsdp"]
    expected = values(run_ranks(4, life(case, None, 9)))
    run_ranks(4, life(case, pools, 9, split=first, kill=(1, 3)))
    run_ranks(4, life(case, pools, 9, split=not first, kill=(0, 6)))
    resumed = values(run_ranks(4, life(case, pools, 9, split=first)))
    assert {one.began for one in resumed} <= {4, 5, 6}
    assert is_equal(resumed, expected)
    assert bool(divided(pools, 4)) == first


def test_a_reader_that_does_not_know_shares_refuses_the_pool(pools, monkeypatch):
    values(run_ranks(4, life(CASES["hsdp"], pools, 2)))
    monkeypatch.setattr(structures, "INCOMPAT_KNOWN", structures.INCOMPAT_GROUP)
    with pytest.raises(FormatError, match=r"features 0x3\).*newer lightck"):
        open_pool(str(pool_of(pools, 0, 4)))


# -- tensors that are not equal ----------------------------------------------------------------------------------------


def test_a_shard_that_differs_at_attach_is_named_and_written_whole(pools):
    def before(model: Any, rank: int) -> None:
        local_weight(model)[:] += rank == 3

    case = CASES["hsdp"]
    expected = values(run_ranks(4, life(case, None, 6, before=before)))
    first = values(run_ranks(4, life(case, pools, 3, before=before)))
    named = [line for one in first for line in one.lines if "have different bytes" in line]
    assert len(named) == 1
    assert "model/first.weight" in named[0]
    resumed = values(run_ranks(4, life(case, pools, 6, before=before)))
    assert is_equal(resumed, expected)
    shares = [entries(pools, rank, 4)["model/first.weight"].share for rank in range(4)]
    assert [one is None for one in shares] == [False, True, False, True], "ranks 0 and 2 hold the same shard"


@pytest.mark.parametrize(
    "written",
    [
        (3, 4, 5),
        pytest.param((1, 4, 290), marks=pytest.mark.campaign),
        *(pytest.param((r, 4, 100), marks=pytest.mark.campaign) for r in (0, 2)),
    ],
)
def test_a_write_on_one_rank_is_named_and_each_rank_gets_its_own_back(pools, written):
    case = CASES["hsdp"]
    expected = values(run_ranks(4, life(case, None, 15, written=written)))
    first = values(run_ranks(4, life(case, pools, 12, written=written)))
    named = [line for one in first for line in one.lines if "have different bytes" in line]
    assert named
    pair = sorted({written[0], (written[0] + 2) % 4})
    assert all(f"ranks {pair[0]} and {pair[1]} have" in line and "'model/first.weight'" in line for line in named)
    copy = pools.parent / "copy"
    shutil.copytree(pools, copy)
    resumed = values(run_ranks(4, life(case, pools, 15, written=written)))
    assert [one.began for one in resumed] == [12] * 4
    assert all(one.recovered.exact for one in resumed)
    assert is_equal(resumed, expected)
    for found in errors(3, life(Case(fsdp, 3), copy, 15)):  # nobody knows which of them is right
        assert isinstance(found, RankError)
        assert "first.weight" in str(found)


@pytest.mark.parametrize("kill", [(0, 5), pytest.param((3, 6), marks=pytest.mark.campaign)])
def test_ranks_that_drift_apart_right_before_a_kill_are_exact_or_named(pools, kill):
    case, written = CASES["hsdp"], (3, 4, 5)
    expected = values(run_ranks(4, life(case, None, 12, written=written)))
    run_ranks(4, life(case, pools, 12, kill=kill, written=written))
    copy = pools.parent / "copy"
    shutil.copytree(pools, copy)
    resumed = values(run_ranks(4, life(case, pools, 12, written=written)))
    if resumed[0].began > 4:
        reasons = [one.recovered.reason for one in resumed if not one.recovered.exact]
        assert is_equal(resumed, expected) or reasons, f"silently another state after step {resumed[0].began}"
        assert all("first.weight" in reason for reason in reasons)
        with log_lines() as lines:
            lightck.recover(copy)
        assert any("have different bytes" in line and "first.weight" in line for line in lines)
    else:
        assert all(one.recovered.exact for one in resumed)


@pytest.mark.campaign
def test_a_difference_in_one_block_is_named_within_one_round(pools):
    """The rows that the other rank of a shard writes are 6 blocks of 1 MiB, and every fourth checkpoint reads four."""
    case, written = Case(hsdp, model=partial(Net, 400_000)), (1, 6, 3)
    first = values(run_ranks(4, life(case, pools, 24, written=written)))
    named = [line for one in first for line in one.lines if "have different bytes" in line]
    assert named, "the difference was not named"
    assert "ranks 1 and 3 have" in named[0]
    step = int(named[0].partition("at step ")[2].partition(",")[0])
    assert 7 <= step <= 7 + 8 + 5
    expected = values(run_ranks(4, life(case, None, 26, written=written)))
    resumed = values(run_ranks(4, life(case, pools, 26, written=written)))
    assert [one.began for one in resumed] == [24] * 4
    assert is_equal(resumed, expected)


def test_a_rank_takes_no_rows_of_one_that_holds_the_same_shard_by_chance(pools):
    """The norm is plain in tensor parallelism. So data parallelism replicates it for each tensor parallel rank, and
    nothing keeps the norms of two tensor parallel ranks equal."""

    def shard(model: nn.Module) -> None:
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
        parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "last": RowwiseParallel()})
        fully_shard(model, mesh=mesh["replicate", "shard"])

    def before(model: Any, rank: int) -> None:
        model.norm.weight._local_tensor.detach()[:] += rank % 2

    case = Case(shard, model=Normed, inputs=wide_batch, n_same_data=2)
    expected = values(run_ranks(4, life(case, None, 7, before=before)))
    run_ranks(4, life(case, pools, 7, before=before, kill=(2, 4)))
    resumed = values(run_ranks(4, life(case, pools, 7, before=before)))
    assert all(one.recovered.exact for one in resumed)
    assert is_equal(resumed, expected)
    found = [entries(pools, rank, 4)["model/norm.weight"] for rank in range(4)]
    assert len({one.share.pieces for one in found}) == 1
    assert [one.share.cut.ranks for one in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]


# -- other readers -----------------------------------------------------------------------------------------------------


def whole_after(case: Case, updates: int) -> dict[str, torch.Tensor]:
    """The whole parameters of a training without lightck."""

    def run(rank: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model: Any = case.model()
        case.shard(model)
        opt = ADAMW([p for p in model.parameters() if p.requires_grad])
        torch.manual_seed(100 + rank)
        for step in range(updates):
            model(case.inputs(rank // case.n_same_data, step)).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
        if hasattr(model, "reshard"):
            model.reshard()
        return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in model.named_parameters()}

    return values(run_ranks(case.n_ranks, run))[0]


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.campaign) for name in ("hsdp", "tp x dp")), "replicated"]
)
def test_recover_puts_the_shares_together(pools, name):
    case = CASES[name]
    values(run_ranks(case.n_ranks, life(case, pools, 4)))
    found = lightck.recover(pools)
    for tensor, value in whole_after(case, 4).items():
        assert torch.equal(found.tensor(f"model/{tensor}"), value), tensor


@pytest.mark.parametrize("n_ranks", [pytest.param(1, marks=pytest.mark.campaign), 3])
def test_another_number_of_ranks_goes_on_from_the_shares(pools, n_ranks):
    """From HSDP on 2 x 2 ranks to FSDP2 on three, or to one process; and back."""
    values(run_ranks(4, life(CASES["hsdp"], pools, 4)))
    expected = whole_after(CASES["hsdp"], 4)

    def attached(rank: int) -> tuple[int, dict[str, torch.Tensor]]:
        torch.manual_seed(rank)
        model: Any = Net()
        if n_ranks > 1:
            fsdp(model)
        opt = ADAMW(model.parameters())
        with lightck.attach(model, pools, optimizer=opt, resume=True) as session:
            found = {
                n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
                for n, p in model.named_parameters()
            }
            model(batch(rank, 5)).pow(2).mean().backward()
            opt.step()
        return session.step, found

    for step, found in values(run_ranks(n_ranks, attached, has_group=n_ranks > 1)):
        assert step == 5
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    back = values(run_ranks(4, life(CASES["hsdp"], pools, 7)))
    assert [one.began for one in back] == [5] * 4
    again = values(run_ranks(4, life(CASES["hsdp"], pools, 7)))
    assert [one.began for one in again] == [7] * 4
    assert is_equal(again, back)
    assert divided(pools, 4)


def test_a_damaged_share_takes_all_ranks_to_the_checkpoint_before(pools):
    case = CASES["hsdp"]
    values(run_ranks(4, life(case, pools, 6)))
    expected = values(run_ranks(4, life(case, None, 8)))
    toys.damage(pool_of(pools, 2, 4), "model/first.weight", [6])
    resumed = values(run_ranks(4, life(case, pools, 8)))
    assert [one.began for one in resumed] == [5] * 4
    assert is_equal(resumed, expected)


def test_a_lost_pool_is_an_error_that_names_the_rank(pools):
    case = CASES["hsdp"]
    values(run_ranks(4, life(case, pools, 4)))
    pool_of(pools, 2, 4).unlink()
    for found in errors(4, life(case, pools, 8)):
        assert isinstance(found, RankError)
        assert "rank 2" in str(found)
    with pytest.raises(RankError, match="rank 2"):
        lightck.recover(pools)


def test_a_lost_pool_is_replaced_from_another_host(pools):
    """Two hosts with two ranks each, and four replicas of one shard. Each host holds the whole in its shares."""

    def four_replicas(model: nn.Module) -> None:
        fsdp(model, init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "shard")))

    topology = replace(TOPOLOGIES["hsdp, 2 hosts"], shard=four_replicas)
    expected = values(run_ranks(4, body(topology, None, 8)))
    values(run_ranks(4, body(topology, pools, 5)))
    for rank in range(4):
        share = entries(pools / f"host-{rank // 2}", rank, 4)["model/first.weight"].share
        assert share.cut.ranks == ((0, 1), (2, 3))[rank // 2]
    (pools / "host-0" / "rank-00001-of-00004.pool").unlink()
    resumed = values(run_ranks(4, body(topology, pools, 8)))
    assert [one.began for one in resumed] == [5] * 4
    assert all_equal(resumed, expected)
    again = values(run_ranks(4, body(topology, pools, 8)))
    assert [one.began for one in again] == [8] * 4
    assert all_equal(again, expected)


def test_with_split_false_the_replica_of_a_lost_pool_is_enough_to_recover(pools):
    values(run_ranks(4, life(CASES["hsdp"], pools, 4, split=False)))
    pool_of(pools, 2, 4).unlink()
    found = lightck.recover(pools)
    assert all(torch.equal(found.tensor(f"model/{n}"), value) for n, value in whole_after(CASES["hsdp"], 4).items())
