"""Ranks of a host divide what they write: each writes its share, restores exactly, and a divergence is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from ranked import die, everything, log_lines, run_ranks, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightck
from lightck.errors import RankError
from lightck.pool.format.layout import Entry
from lightck.pool.reader import open_pool

from .test_bad_input import errors
from .trainings import TOPOLOGIES, Net, batch, body
from .trainings import is_equal as all_equal
from .worlds import OddNet

Wrap = Callable[[nn.Module], nn.Module]
DDP: Wrap = partial(DistributedDataParallel, find_unused_parameters=True)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


@dataclass
class Life:
    """What one rank returns."""

    began: int
    ended: list[torch.Tensor]
    lines: list[str]
    recovered: Any = None


def life(
    pools: Path | None,
    updates: int,
    *,
    kill: tuple[int, int] | None = None,
    written: tuple[int, int, int] | None = None,
    no_sync: bool = False,
    model: Callable[[], nn.Module] = Net,
    wrap: Wrap = DDP,
    optimizer: Callable[..., torch.optim.Optimizer] = ADAMW,
    inputs: Callable[[int, int], torch.Tensor] = batch,
    before: Callable[[nn.Module, int], Any] = lambda model, rank: None,
    on_step: Callable[[nn.Module, int], Any] = lambda model, step: None,
    **options: Any,
) -> Callable[[int], Life]:
    """The body of a rank. ``kill``: (rank, step): the rank dies in the iteration after that step. ``written``: (rank,
    step, row): after that step the rank writes to a row of a weight, behind the back of DistributedDataParallel.
    ``before``: called before attach. ``on_step``: called after each update."""

    def run(rank: int) -> Life:
        torch.manual_seed(0)
        wrapped: Any = wrap(model())
        opt = optimizer([p for p in wrapped.parameters() if p.requires_grad])
        before(wrapped, rank)
        torch.manual_seed(100 + rank)
        with log_lines() as lines:
            session = None
            if pools is not None:
                arguments = {"resume": True, "timeout": 60} | options
                session = lightck.attach(wrapped, pools, optimizer=opt, **arguments)
            began = 0 if session is None else session.step
            for step in range(began, updates):
                with wrapped.no_sync() if no_sync else torch.enable_grad():
                    wrapped(inputs(rank, step)).pow(2).mean().backward()
                if kill == (rank, step):
                    die()
                opt.step()
                opt.zero_grad()
                on_step(wrapped, step)
                if written is not None and written[:2] == (rank, step):
                    wrapped.module.first.weight.data[written[2]] += 1
            if session is not None:
                session.close()
        return Life(began, everything(wrapped, opt), lines, None if session is None else session.recovered)

    return run


def is_equal(one: list[Life], other: list[Life]) -> bool:
    return all(
        len(a.ended) == len(b.ended) and all(map(torch.equal, a.ended, b.ended))
        for a, b in zip(one, other, strict=True)
    )


def entries(pools: Path, rank: int, n_ranks: int) -> dict[str, Entry]:
    """The tensors of the newest checkpoint in a rank's pool."""
    with closing(open_pool(str(pools / f"rank-{rank:05}-of-{n_ranks:05}.pool"))) as reader:
        return dict(next(reader.checkpoints()).entries)


def nbytes(pools: Path, n_ranks: int) -> list[int]:
    """For each rank, the bytes of parameters and optimizer state in its newest checkpoint."""
    return [
        sum(one.nbytes for one in entries(pools, rank, n_ranks).values() if one.role in ("param", "optimizer"))
        for rank in range(n_ranks)
    ]


def odd_inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * step + rank))


class Conv(nn.Module):
    """Weights in channels_last order, whose rows are those of the first dimension; a weight of one row; a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 40, 3).to(memory_format=torch.channels_last)
        self.flat = nn.Parameter(torch.rand(1, 1, 301))
        self.number = nn.Parameter(torch.tensor(1.5))
        self.transposed = nn.Parameter(torch.rand(17, 40).t())
        self.norm = nn.BatchNorm2d(40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x.to(memory_format=torch.channels_last))).mean((2, 3))
        return self.number * (self.transposed * x.sum(0)[:, None]).sum() + self.flat.sum()


def images(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1000 * step + rank))


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_ranks", [2, pytest.param(3, marks=pytest.mark.long), 4])
def test_each_rank_writes_its_share_of_the_bytes(pools, n_ranks):
    wide = partial(Net, 5_000)
    values(run_ranks(n_ranks, life(pools, 3, model=wide)))
    values(run_ranks(n_ranks, life(pools.parent / "whole", 3, model=wide, split=False)))
    shares, whole = nbytes(pools, n_ranks), nbytes(pools.parent / "whole", n_ranks)
    assert len(set(whole)) == 1
    assert max(shares) <= 1.05 * whole[0] / n_ranks
    assert sum(shares) >= whole[0]


MODELS = {
    "odd": (OddNet, odd_inputs, ADAMW),
    "odd, SGD": (OddNet, odd_inputs, partial(torch.optim.SGD, lr=1e-5, momentum=0.9)),
    "odd, Adafactor": (OddNet, odd_inputs, partial(torch.optim.Adafactor, lr=1e-2)),
    "conv": (Conv, images, partial(torch.optim.Adam, lr=1e-2, fused=True)),
    "conv, Adagrad": (Conv, images, partial(torch.optim.Adagrad, lr=1e-2)),
}


@pytest.mark.parametrize("name", ["odd", "conv", *(pytest.param(one, marks=pytest.mark.long) for one in MODELS)])
@pytest.mark.parametrize("n_ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_killed_training_ends_as_one_that_was_never_killed(pools, name, n_ranks):
    model, inputs, optimizer = MODELS[name]
    run = partial(life, model=model, inputs=inputs, optimizer=optimizer)
    expected = values(run_ranks(n_ranks, run(None, 9)))
    run_ranks(n_ranks, run(pools, 9, kill=(1, 5)))
    resumed = values(run_ranks(n_ranks, run(pools, 9)))
    assert {one.began for one in resumed} <= {4, 5}
    assert all(one.recovered.exact for one in resumed)
    assert is_equal(resumed, expected)
    whole, world = lightck.recover(pools), entries(pools, 0, n_ranks)
    assert whole.step == 9
    assert any(one.pieces is not None for one in world.values()), "the ranks have divided nothing"


def test_without_split_each_pool_holds_the_whole(pools):
    values(run_ranks(2, life(pools, 3, split=False)))
    for rank in range(2):
        assert all(one.pieces is None for one in entries(pools, rank, 2).values())


def test_a_model_without_ddp_is_written_whole_by_each_rank(pools):
    values(run_ranks(2, life(pools, 3, wrap=lambda model: model)))
    assert all(one.pieces is None for one in entries(pools, 1, 2).values())


def test_parameters_that_ddp_ignores_are_written_whole(pools):
    def wrap(model: nn.Module) -> nn.Module:
        ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(model, ["first.weight"])
        return DDP(model)

    expected = values(run_ranks(2, life(None, 6, wrap=wrap)))
    run_ranks(2, life(pools, 6, wrap=wrap, kill=(0, 3)))
    resumed = values(run_ranks(2, life(pools, 6, wrap=wrap)))
    assert is_equal(resumed, expected)
    assert not torch.equal(resumed[0].ended[1], resumed[1].ended[1])
    found = entries(pools, 1, 2)
    assert found["model/first.weight"].pieces is None
    assert found["model/first.bias"].pieces is not None
    assert not any("bytes" in line for one in resumed for line in one.lines)


def test_ddp_of_fewer_ranks_divides_nothing(pools):
    def wrap(model: nn.Module) -> nn.Module:
        groups = [torch.distributed.new_group([rank, rank + 1]) for rank in (0, 2)]
        return DDP(model, process_group=groups[torch.distributed.get_rank() // 2])

    expected = values(run_ranks(4, life(None, 6, wrap=wrap)))
    run_ranks(4, life(pools, 6, wrap=wrap, kill=(0, 3)))
    resumed = values(run_ranks(4, life(pools, 6, wrap=wrap)))
    assert is_equal(resumed, expected)
    assert all(one.pieces is None for one in entries(pools, 1, 4).values())


class Strided(Net):
    """Has a parameter whose memory has gaps, beside one that is divided."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.rand(64, 20)[:, :10])
        self.square = nn.Parameter(torch.rand(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.before.mean() + self.square.pow(2).mean()


@pytest.mark.parametrize("n_ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_parameter_with_gaps_in_memory_causes_no_alarm_and_is_exact(pools, n_ranks):
    expected = values(run_ranks(n_ranks, life(None, 9, model=Strided)))
    run_ranks(n_ranks, life(pools, 9, model=Strided, kill=(1, 5)))
    resumed = values(run_ranks(n_ranks, life(pools, 9, model=Strided)))
    assert all(one.recovered.exact for one in resumed)
    assert is_equal(resumed, expected)
    assert entries(pools, 0, n_ranks)["model/before"].pieces is None


def test_strides_that_change_during_training_leave_each_checkpoint_readable(pools):
    """The rows of a tensor that is divided are no longer one run of memory."""

    def transposed(model: Any, step: int) -> None:
        if step == 2:
            model.module.square.data = model.module.square.data.t().contiguous().t()

    run_ranks(2, life(pools, 12, model=Strided, on_step=transposed, kill=(1, 8)))
    found = lightck.recover(pools)
    assert found.step in (7, 8)
    expected = values(run_ranks(2, life(None, found.step, model=Strided, on_step=transposed)))
    assert torch.equal(found.tensor("model/square"), expected[0].ended[2])
    assert torch.equal(found.tensor("model/first.weight"), expected[0].ended[3])
    resumed = values(run_ranks(2, life(pools, found.step, model=Strided, on_step=transposed)))
    assert [one.began for one in resumed] == [found.step] * 2
    assert all(one.recovered.exact for one in resumed)
    assert is_equal(resumed, expected)


# -- tensors that are not equal ----------------------------------------------------------------------------------------


def test_a_tensor_that_differs_at_attach_is_named_and_written_whole(pools):
    def before(model: Any, rank: int) -> None:
        model.module.first.bias.data += rank

    expected = values(run_ranks(2, life(None, 6, before=before)))
    first = values(run_ranks(2, life(pools, 3, before=before)))
    assert any("model/first.bias" in line and "have different bytes" in line for line in first[0].lines)
    resumed = values(run_ranks(2, life(pools, 6, before=before)))
    assert is_equal(resumed, expected)
    assert entries(pools, 1, 2)["model/first.bias"].pieces is None
    assert entries(pools, 1, 2)["model/first.weight"].pieces is not None


@pytest.mark.parametrize(
    ("n_ranks", "written"),
    [
        (2, (1, 4, 5)),
        (2, (0, 4, 5)),
        *(pytest.param(3, (r, 4, row), marks=pytest.mark.long) for r in range(3) for row in (5, 590)),
    ],
)
def test_a_write_on_one_rank_is_named_and_each_rank_gets_its_own_back(pools, n_ranks, written):
    expected = values(run_ranks(n_ranks, life(None, 15, written=written)))
    first = values(run_ranks(n_ranks, life(pools, 12, written=written)))
    assert any("'model/first.weight'" in line and "have different bytes" in line for one in first for line in one.lines)
    copy = pools.parent / "copy"
    shutil.copytree(pools, copy)
    resumed = values(run_ranks(n_ranks, life(pools, 15, written=written)))
    assert [one.began for one in resumed] == [12] * n_ranks
    assert is_equal(resumed, expected)
    for found in errors(n_ranks - 1, life(copy, 15)):  # nobody knows which of them is right
        assert isinstance(found, RankError)
        assert "first.weight" in str(found)


def test_each_tensor_is_named_with_a_rank_that_has_other_bytes_in_it(pools):
    """Rank 0 has other bytes than rank 1 in one tensor, and than rank 2 in another."""

    def on_step(model: Any, step: int) -> None:
        rank, net = torch.distributed.get_rank(), model.module
        if step == 1 and rank > 0:
            (net.first.weight, net.first.bias)[rank - 1].data.add_(1.0)

    first = values(run_ranks(3, life(pools, 6, model=partial(Net, 600), on_step=on_step)))
    lines = [line for one in first for line in one.lines if "have different bytes" in line]
    for name, written_by in (("'model/first.weight'", 1), ("'model/first.bias'", 2)):
        named = [line for line in lines if name in line]
        assert named
        pairs = [line.partition("lightck: ranks ")[2].partition(" have ")[0].split(" and ") for line in named]
        assert all(str(written_by) in pair for pair in pairs), named


@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("kill", [(0, 5), (1, 5), (0, 6), pytest.param((1, 8), marks=pytest.mark.long)])
def test_ranks_that_drift_apart_right_before_a_kill_are_exact_or_named(pools, kill, no_sync):
    """A checkpoint holds rows that this rank never had: the write came after the last comparison."""
    options = {"no_sync": True} if no_sync else {"written": (1, 4, 5)}
    expected = values(run_ranks(2, life(None, 12, **options)))
    run_ranks(2, life(pools, 12, kill=kill, **options))
    resumed = values(run_ranks(2, life(pools, 12, **options)))
    began = resumed[0].began
    if began > 4 or no_sync:
        named = [one.recovered.reason for one in resumed if not one.recovered.exact]
        assert is_equal(resumed, expected) or named, f"silently another state after step {began}"
        for reason in named:
            assert "first.weight" in reason or no_sync
            assert "rank 1 in" in reason or no_sync
    else:
        assert all(one.recovered.exact for one in resumed)


def test_recover_names_tensors_that_a_rank_did_not_hold(pools):
    run_ranks(2, life(pools, 12, written=(1, 4, 5), kill=(0, 5)))
    with log_lines() as lines:
        step = lightck.recover(pools).step
    assert step == 5
    assert any(line.startswith("lightck: ranks have different bytes in 1 tensor of step 5") for line in lines)
    assert any("first.weight" in line for line in lines)


def test_ranks_that_never_synchronise_get_their_own_back(pools):
    expected = values(run_ranks(2, life(None, 12, no_sync=True)))
    first = values(run_ranks(2, life(pools, 6, no_sync=True)))
    assert any("have different bytes" in line for one in first for line in one.lines)
    resumed = values(run_ranks(2, life(pools, 12, no_sync=True)))
    assert [one.began for one in resumed] == [6, 6]
    assert is_equal(resumed, expected)


def test_a_difference_in_one_block_is_named_within_one_round(pools):
    """The rows that the other rank writes are 7 blocks of 1 MiB, and every fourth checkpoint reads four of them."""
    wide, steps = partial(Net, 200_000), 30
    written = (1, 6, 3)
    first = values(run_ranks(2, life(pools, steps, model=wide, written=written)))
    named = [line for one in first for line in one.lines if "have different bytes" in line]
    assert named, "the difference was not named"
    step = int(named[0].partition("at step ")[2].partition(",")[0])
    assert 7 <= step <= 7 + 8 + 5
    expected = values(run_ranks(2, life(None, steps + 2, model=wide, written=written)))
    resumed = values(run_ranks(2, life(pools, steps + 2, model=wide, written=written)))
    assert [one.began for one in resumed] == [steps, steps]
    assert is_equal(resumed, expected)


def test_a_tensor_that_is_written_whole_gets_no_space_to_grow(pools):
    wide = partial(Net, 200_000)
    values(run_ranks(2, life(pools, 9, model=wide, written=(1, 2, 3))))
    one, other = (sum(e.nbytes for e in entries(pools, rank, 2).values()) for rank in range(2))
    assert one != other or entries(pools, 1, 2)["model/first.weight"].shape == (200_000, 3)
    size = (pools / "rank-00001-of-00002.pool").stat().st_size
    assert size <= 3 * 1.2 * other + 16 * 2**20


def test_equal_ranks_are_never_reported(pools):
    for updates in (5, 10):
        for one in values(run_ranks(3, life(pools, updates, model=partial(Net, 60_000)))):
            assert not any("bytes" in line for line in one.lines)


# -- other starts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
def test_split_may_be_turned_on_and_off(pools, first):
    expected = values(run_ranks(2, life(None, 9)))
    run_ranks(2, life(pools, 9, split=first, kill=(1, 3)))
    run_ranks(2, life(pools, 9, split=not first, kill=(0, 6)))
    resumed = values(run_ranks(2, life(pools, 9, split=first)))
    assert {one.began for one in resumed} <= {5, 6}
    assert is_equal(resumed, expected)
    assert any(one.pieces is not None for one in entries(pools, 0, 2).values()) == first


def test_a_damaged_share_takes_all_ranks_to_the_checkpoint_before(pools):
    values(run_ranks(2, life(pools, 6)))
    expected = values(run_ranks(2, life(None, 8)))
    toys.damage(pools / "rank-00001-of-00002.pool", "model/last.weight", [6])
    resumed = values(run_ranks(2, life(pools, 8)))
    assert [one.began for one in resumed] == [5, 5]
    assert is_equal(resumed, expected)


def test_a_lost_pool_names_what_it_held(pools):
    values(run_ranks(2, life(pools, 4)))
    (pools / "rank-00001-of-00002.pool").unlink()
    for found in errors(2, life(pools, 8)):
        assert isinstance(found, RankError)
        assert "split=False" in str(found)
    with pytest.raises(RankError, match="rank 1"):
        lightck.recover(pools)


def test_a_lost_pool_is_replaced_from_another_host(pools):
    """Two hosts with two ranks each. Each host holds the whole in the shares of its ranks."""
    topology = TOPOLOGIES["ddp split, 2 hosts"]
    expected = values(run_ranks(4, body(topology, None, 8)))
    values(run_ranks(4, body(topology, pools, 5)))
    copy = pools.parent / "copy"
    shutil.copytree(pools, copy)
    (pools / "host-0" / "rank-00001-of-00004.pool").unlink()
    resumed = values(run_ranks(4, body(topology, pools, 8)))
    assert [one.began for one in resumed] == [5] * 4
    assert all_equal(resumed, expected)
    again = values(run_ranks(4, body(topology, pools, 8)))
    assert [one.began for one in again] == [8] * 4
    assert all_equal(again, expected)
    for rank in (0, 2):
        (copy / f"host-{rank // 2}" / f"rank-{rank:05}-of-00004.pool").unlink()
    for found in errors(4, body(topology, copy, 9)):  # rank 0 and rank 2 wrote the same rows
        assert isinstance(found, RankError)


def test_split_must_be_the_same_on_all_ranks_and_a_bool(pools):
    for found in errors(2, lambda rank: life(pools, 3, split=rank == 0)(rank)):
        assert isinstance(found, RankError)
        assert "split=" in str(found)
    with pytest.raises(TypeError, match="split"):
        lightck.attach(nn.Linear(1, 1), pools, split=2)


def test_a_ddp_whose_process_group_was_destroyed_is_no_obstacle(pools):
    def body(rank: int) -> list[bool]:
        group = torch.distributed.new_group([0, 1])
        old = DDP(nn.Linear(2, 2), process_group=group)
        torch.distributed.destroy_process_group(group)
        life(pools, 3)(rank)
        life(pools, 6)(rank)
        return [p.requires_grad for p in old.parameters()]

    values(run_ranks(2, body))
    assert any(one.pieces is not None for one in entries(pools, 0, 2).values())


def test_state_that_one_rank_alone_gets_late_costs_no_checkpoint(pool):
    """In the third update rank 0 alone has a gradient for a layer, so rank 1 has no optimizer state for it, and writes
    no rows of it. A kill comes before the ranks have compared."""
    pools = pool.parent / "pools"

    def run(rank: int, updates: int, kill: int | None) -> Any:
        torch.manual_seed(0)
        model = nn.ModuleDict({"used": nn.Linear(5, 3), "late": nn.Linear(5, 3)})
        parallel, optimizer = DDP(model), ADAMW(model.parameters())
        session = lightck.attach(parallel, pools, optimizer=optimizer, resume=True, timeout=60)
        began = session.step
        for step in range(began, updates):
            x = torch.ones(2, 5) * (step + 1)
            loss = model["used"](x).pow(2).mean()
            (loss + model["late"](x).pow(2).mean() if (step, rank) == (2, 0) else loss).backward()
            if kill == step and rank == 1:
                die()
            optimizer.step()
            optimizer.zero_grad()
            session.end_step()
            torch.distributed.barrier()
        state = [value.clone() for one in optimizer.state.values() for value in one.values()]
        return began, state, session.recovered

    run_ranks(2, lambda rank: run(rank, 20, 4))
    (began, state, recovered), (_, other_state, _) = values(run_ranks(2, lambda rank: run(rank, 0, None)))
    assert began in (3, 4)
    assert (len(state), len(other_state)) == (12, 6), "rank 0 has the state of both layers"
    assert not recovered.exact
    assert "late" in recovered.reason
