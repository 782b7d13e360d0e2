"""Ranks that attach together: real processes, killed and resumed, compared with a run that never imported lightck."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import ranked
import torch
import torch.distributed as dist
import toys
from ranked import Ended, die, everything, run_ranks, values
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightck
from lightck.pool.storage import emulation
from lightck.pool.storage.emulation import Profile
from lightck.ranks.meet import Meeting
from lightck.session.steps import Steps

from .trainings import TOPOLOGIES, Net, Run, batch, body, build, is_equal

UPDATES = 11


@cache
def plain(name: str) -> list[Run]:
    topology = TOPOLOGIES[name]
    return values(run_ranks(topology.n_ranks, body(topology, None, UPDATES)))


KILLED = [(name, False) for name in ("ddp", "ddp split", "fsdp", "tp x fsdp", "ddp split, 2 hosts", "hsdp, 2 hosts")]
KILLED += [("fsdp", True)]
"""What CI runs of the topologies, without and with ``end_step()``."""


@pytest.mark.parametrize(
    ("name", "ends_step"),
    [
        pytest.param(
            name,
            ends_step,
            id=f"{name}, end_step" if ends_step else name,
            marks=() if (name, ends_step) in KILLED else pytest.mark.campaign,
        )
        for ends_step in (False, True)
        for name in TOPOLOGIES
    ],
)
def test_killed_ranks_go_on_bit_identically(pools, name, ends_step):
    topology = TOPOLOGIES[name]
    n_ranks, last = topology.n_ranks, topology.n_ranks - 1
    began = []
    for kill in ((0, 4), (last, 8), None):
        ended = run_ranks(n_ranks, body(topology, pools, UPDATES, kill=kill, ends_step=ends_step))
        if kill is not None:
            assert ended[kill[0]].is_killed
        else:
            runs = values(ended)
            began = [run.began for run in runs]
    assert is_equal(runs, plain(name))
    assert len(set(began)) == 1
    assert 8 - topology.lost_max <= began[0] <= 8
    assert [run.stats.committed for run in runs] == [UPDATES] * n_ranks
    assert [run.stats.skipped for run in runs] == [0] * n_ranks
    assert sorted(path.name for path in pools.rglob("*.pool")) == [
        f"rank-{rank:05d}-of-{n_ranks:05d}.pool" for rank in range(n_ranks)
    ]


@pytest.mark.parametrize("name", ["ddp", "fsdp", "tp", "tp x fsdp"])
def test_no_tensor_is_written_before_the_gate(pools, name, monkeypatch):
    monkeypatch.setenv("LIGHTCK_CHECK", "1")
    topology = TOPOLOGIES[name]
    runs = values(run_ranks(topology.n_ranks, body(topology, pools, UPDATES)))
    assert [run.stats.skipped for run in runs] == [0] * topology.n_ranks
    assert [run.stats.committed for run in runs] == [UPDATES] * topology.n_ranks


def wrapped_body(pools: Path, wraps: str, group_of: int = 0, **options: bool):
    """Two updates of a DistributedDataParallel. Returns the warnings about the order of sums. ``group_of``: number of
    ranks in the groups of which each attaches and reduces on its own (0: all ranks)."""

    def run(rank: int) -> list[str]:
        n_ranks = dist.get_world_size()
        group = dist.new_subgroups(group_of)[0] if group_of else None
        model: nn.Module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))

        def ddp(module: nn.Module) -> nn.Module:
            return DistributedDataParallel(module, process_group=group, **options)

        model = ddp(model) if wraps == "before" else model
        if wraps == "inside":
            model = nn.Sequential(model[0], ddp(model[1]))
        other = ddp(nn.Linear(2, 2)) if wraps == "another model" else None
        params = [*model.parameters(), *(() if other is None else other.parameters())]
        optimizer = torch.optim.SGD(params, lr=0.1)
        folder = pools.parent / f"{wraps}-{n_ranks}-{rank // group_of if group_of else 0}-{sorted(options)}"
        with ranked.log_lines() as lines:
            session = lightck.attach(model, folder, optimizer=optimizer, resume=True, timeout=60, group=group)
            called = ddp(model) if wraps == "after" else model
            for _ in range(2):
                out = called(torch.ones(1, 3))
                (out if other is None else other(out)).sum().backward()
                optimizer.step()
            session.close()
        return [line for line in lines if "another order" in line]

    return run


@pytest.mark.parametrize(
    ("wraps", "n_ranks", "options", "n_lines"),
    [
        ("after", 3, {}, 1),
        ("before", 3, {}, 1),
        ("inside", 3, {}, 1),
        ("another model", 3, {}, 1),
        ("after", 3, {"static_graph": True, "find_unused_parameters": True}, 1),
        ("after", 3, {"find_unused_parameters": True}, 0),
        ("after", 2, {}, 0),
        ("after", 4, {"group_of": 2}, 0),
    ],
)
def test_ddp_that_sums_in_another_order_after_a_resume_is_reported(pools, wraps, n_ranks, options, n_lines):
    """Its first iteration has other buckets than later ones, and with more than two ranks the order of a sum counts."""
    first = values(run_ranks(n_ranks, wrapped_body(pools, wraps, **options)))
    assert first == [[]] * n_ranks, "a fresh start"
    resumed = values(run_ranks(n_ranks, wrapped_body(pools, wraps, **options)))
    assert [len(lines) for lines in resumed] == [n_lines] * n_ranks


def test_a_communication_hook_with_a_state_of_its_own_is_reported(pools):
    def rank_body(has_state: bool):
        def run(rank: int) -> int:
            model = nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            called = DistributedDataParallel(model)
            if has_state:
                state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
                called.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            else:
                called.register_comm_hook(None, default_hooks.allreduce_hook)
            with ranked.log_lines() as lines:
                folder = pools.parent / str(has_state)
                with lightck.attach(model, folder, optimizer=optimizer, timeout=60):
                    called(torch.ones(1, 3)).sum().backward()
                    optimizer.step()
            return sum("communication hook powerSGD_hook" in line for line in lines)

        return run

    assert values(run_ranks(2, rank_body(True))) == [1, 1]
    assert values(run_ranks(2, rank_body(False))) == [0, 0]


@pytest.mark.parametrize("has_early_gate", [True, False])
def test_the_early_gate_bounds_what_a_slow_rank_loses(pools, has_early_gate, monkeypatch):
    """Rank 1 copies slowly, for some seconds. Rank 0 dies when it has finished update 4, and rank 1 a moment
    later. Without the early gate rank 0 finishes that update while rank 1 still copies step 3."""
    topology = replace(TOPOLOGIES["fsdp"], model=lambda: Net(100_000))
    if not has_early_gate:
        monkeypatch.setattr(Steps, "add_early_gate", lambda self: None)

    def run(rank: int) -> None:
        model, optimizer = build(topology)
        if rank == 1:
            emulation.use(Profile("slow", 600_000, 1_000_000_000, 0, 64, "made up"))
        lightck.attach(model, pools, optimizer=optimizer, timeout=60)
        for step in range(4):
            model(batch(rank, step)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        die()

    ended = run_ranks(2, run)
    assert ended[0].is_killed
    runs = values(run_ranks(2, body(topology, pools, 5)))
    assert runs[0].began == (3 if has_early_gate else 2)


def test_what_is_common_lags_by_at_most_two_steps(pools):
    runs = values(run_ranks(2, body(TOPOLOGIES["ddp"], pools, UPDATES)))
    for run in runs:
        assert UPDATES - 3 <= run.common <= UPDATES


@pytest.mark.parametrize("interval", [3])
def test_checkpoints_are_saved_at_multiples_of_the_interval(pools, interval):
    topology = TOPOLOGIES["ddp"]
    run_ranks(2, body(topology, pools, UPDATES, kill=(1, 8), interval=interval))
    runs = values(run_ranks(2, body(topology, pools, UPDATES, interval=interval)))
    assert [run.began for run in runs] == [6, 6]
    assert is_equal(runs, plain("ddp"))


def test_a_kill_before_the_first_update_goes_on_at_checkpoint_0(pools):
    topology = TOPOLOGIES["fsdp"]
    run_ranks(2, body(topology, pools, UPDATES, kill=(0, 0)))
    runs = values(run_ranks(2, body(topology, pools, UPDATES)))
    assert [run.began for run in runs] == [0, 0]
    assert is_equal(runs, plain("fsdp"))


@pytest.mark.parametrize("name", ["ddp 4", "fsdp"])
def test_attach_exchanges_at_most_a_kibibyte_per_rank(pools, name, monkeypatch):
    sent: list[int] = []
    write = Meeting._write

    def counted(self: Meeting, message: bytes) -> None:
        sent.append(len(message))
        write(self, message)

    monkeypatch.setattr(Meeting, "_write", counted)
    topology = TOPOLOGIES[name]

    def run(rank: int) -> int:
        body(topology, pools, 3)(rank)
        return sum(sent)

    for _ in range(2):  # a new training, and a resume
        assert all(0 < nbytes <= 1024 for nbytes in values(run_ranks(topology.n_ranks, run)))


def test_checkpoint_0_has_the_initial_state_of_each_rank(pools):
    def rank_body(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        torch.manual_seed(rank)  # ranks may differ: DDP sends the values of rank 0 later
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = lightck.attach(model, pools, optimizer=optimizer, timeout=60)
        assert (session.rank, session.world, session.common, session.committed) == (rank, 2, 0, 0)
        built = everything(model, optimizer)
        session.close()
        with torch.no_grad():
            model.weight.zero_()
        again = lightck.attach(model, pools, optimizer=optimizer, resume=True, timeout=60)
        assert again.step == 0
        again.close()
        return built, everything(model, optimizer)

    states = values(run_ranks(2, rank_body))
    for built, restored in states:
        assert all(map(torch.equal, built, restored))
    assert not torch.equal(states[0][0][0], states[1][0][0])


def loader_body(pools: Path | None, kill: tuple[int, int] | None = None):
    """DDP with a DistributedSampler, dropout, a scheduler, and a session loader in mid-epoch."""

    def run(rank: int) -> Run:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.3), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        data = TensorDataset(torch.randn(40, 3, generator=torch.Generator().manual_seed(7)))
        sampler = DistributedSampler(data, seed=3)
        loader = DataLoader(data, batch_size=4, sampler=sampler)
        torch.manual_seed(100 + rank)
        session, n = None, 0
        if pools is not None:
            session = lightck.attach(model, pools, optimizer=optimizer, resume=True, timeout=60)
            loader, n = session.loader(loader), session.step
        began, called = n, DistributedDataParallel(model)
        for epoch in range(0 if session is None else loader.epoch, 3):
            sampler.set_epoch(epoch)
            for (x,) in loader:
                called(x).pow(2).mean().backward()
                if kill == (rank, n):
                    die()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                n += 1
        if session is not None:
            session.close()
        return Run(began, everything(model, optimizer))

    return run


def test_each_rank_goes_on_at_its_own_position_in_the_data(pools):
    for kill in ((1, 3), (0, 8)):
        run_ranks(2, loader_body(pools, kill))
    runs = values(run_ranks(2, loader_body(pools)))
    assert runs[0].began in (7, 8)
    assert is_equal(runs, values(run_ranks(2, loader_body(None))))


def test_the_training_is_finished_only_if_all_ranks_said_so(pools):
    def rank_body(done_on: tuple[int, ...]):
        def run(rank: int) -> bool:
            model = nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            session = lightck.attach(model, pools, optimizer=optimizer, resume=True, timeout=60)
            was_done = session.done
            if not was_done:
                model(torch.ones(3)).sum().backward()
                optimizer.step()
            session.close(done=rank in done_on)
            return was_done

        return run

    assert values(run_ranks(2, rank_body((0,)))) == [False, False]
    assert values(run_ranks(2, rank_body((0, 1)))) == [False, False]
    assert values(run_ranks(2, rank_body(()))) == [True, True]


def damage(path: Path, step: int) -> None:
    """Flip a bit in the payload of a checkpoint."""
    toys.damage(path, "model/first.weight", [step])


def test_a_damaged_checkpoint_of_one_rank_takes_all_ranks_to_the_one_before(pools):
    topology = TOPOLOGIES["fsdp"]
    ended: list[Ended] = run_ranks(2, body(topology, pools, 6))
    values(ended)
    damage(pools / "rank-00001-of-00002.pool", 6)
    runs = values(run_ranks(2, body(topology, pools, UPDATES)))
    assert [run.began for run in runs] == [5, 5]
    assert is_equal(runs, plain("fsdp"))


def test_without_an_intact_common_checkpoint_all_ranks_raise_and_nobody_trains_on_a_mix(pools):
    topology = TOPOLOGIES["fsdp"]
    values(run_ranks(2, body(topology, pools, 6)))
    for step in (4, 5, 6):
        damage(pools / "rank-00001-of-00002.pool", step)

    def rank_body(rank: int) -> str:
        model, optimizer = build(topology)
        with pytest.raises(lightck.errors.RankError) as caught:
            lightck.attach(model, pools, optimizer=optimizer, resume=True, timeout=60)
        assert all(p._local_tensor.isnan().all() for p in model.parameters())
        return str(caught.value)

    for message in values(run_ranks(2, rank_body)):
        assert "No checkpoint that all ranks have can be restored on all of them. step 6: rank 1 (host" in message
        assert "does not match its checksum" in message


def test_of_a_step_that_was_saved_twice_the_intact_copy_is_used(pools):
    """``close(done=True)`` saves the last step once more if it was saved before."""

    def rank_body(closes: bool):
        def run(rank: int) -> tuple[int, bool, list[torch.Tensor]]:
            model, optimizer = build(TOPOLOGIES["fsdp"])
            session = lightck.attach(model, pools, optimizer=optimizer, resume=True, timeout=60)
            for step in range(session.step, 4):
                model(batch(rank, step)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            done = session.done
            session.flush()
            session.close(done=closes)
            return session.step, done, everything(model, optimizer)

        return run

    whole = values(run_ranks(2, rank_body(closes=True)))
    path = pools / "rank-00001-of-00002.pool"
    newest = toys.checkpoints(path)[0]
    assert [one.step for one in toys.checkpoints(path)] == [4, 4, 3]
    toys.flip(path, newest.reader.superblock.slots[newest.record.slot][0] + newest.entries["model/first.weight"].offset)
    assert lightck.recover(pools).step == 4
    resumed = values(run_ranks(2, rank_body(closes=False)))
    for (step, done, state), (_, _, expected) in zip(resumed, whole, strict=True):
        assert (step, done) == (4, False)  # the older copy on rank 1 does not say that the training is finished
        assert all(map(torch.equal, state, expected))


def test_the_pools_of_a_mesh_say_so(pools):
    values(run_ranks(4, body(TOPOLOGIES["tp x fsdp"], pools, 1)))
    for rank, path in enumerate(sorted(pools.glob("*.pool"))):
        group = toys.checkpoints(path)[0].reader.group
        assert (group.mesh_shape, group.coordinate) == ((2, 2), (rank // 2, rank % 2))


def test_swapped_pools_are_recognised(pools):
    topology = TOPOLOGIES["fsdp"]
    run_ranks(2, body(topology, pools, UPDATES, kill=(0, 6)))
    one, other = sorted(pools.glob("*.pool"))
    one.rename(pools / "aside")
    other.rename(one)
    (pools / "aside").rename(other)
    runs = values(run_ranks(2, body(topology, pools, UPDATES)))
    assert runs[0].began in (5, 6)
    assert is_equal(runs, plain("fsdp"))


def test_ranks_that_update_by_hand_go_on_bit_identically(pools):
    def rank_body(attaches: bool, dies_at: int = -1):
        def run(rank: int) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = nn.Linear(3, 2)
            session = lightck.attach(model, pools, optimizer=[], resume=True, timeout=60) if attaches else None
            called = DistributedDataParallel(model)
            for step in range(0 if session is None else session.step, 6):
                called(batch(rank, step)).pow(2).mean().backward()
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.grad
                        p.grad = None
                if session is not None:
                    session.end_step()
                if rank == 1 and step == dies_at:
                    die()
            if session is not None:
                session.close()
            return [p.detach().clone() for p in model.parameters()]

        return run

    run_ranks(2, rank_body(True, dies_at=3))
    resumed, whole = (values(run_ranks(2, rank_body(attaches))) for attaches in (True, False))
    for one, other in zip(resumed, whole, strict=True):
        assert all(map(torch.equal, one, other))


def test_group_false_saves_one_process_alone(pool):
    def rank_body(rank: int) -> int | None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if rank:
            return None
        with lightck.attach(model, pool, optimizer=optimizer, group=False) as session:
            model(torch.ones(3)).sum().backward()
            optimizer.step()
        return session.committed

    assert values(run_ranks(2, rank_body)) == [1, None]
    assert lightck.recover(pool).step == 1
