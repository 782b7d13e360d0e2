"""A rank whose pool is lost goes on with the checkpoint of another rank, if that is possible, and says so."""

from __future__ import annotations

import random
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pools_by_hand
import pytest
import torch
import toys
from ranked import die, everything, log_lines, run_ranks, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightck
from lightck._native import lib
from lightck.errors import CheckpointExistsError, CorruptPoolError, PoolLockedError, RankError
from lightck.pool.reader import open_pool
from lightck.pool.writer import PoolWriter
from lightck.ranks.directory import pool_name
from lightck.restore.contents import Contents, unpack_dict
from lightck.restore.recover import LiveRestore
from lightck.restore.resume import Recovered
from lightck.session import group_start, lost_pool
from lightck.state import values as values_of_state

from .test_bad_input import errors
from .trainings import TOPOLOGIES, Topology, WithDropout, batch, build

STEPS = 6
DDP = Topology(2, wrap=partial(DistributedDataParallel, find_unused_parameters=True), model=WithDropout)


@dataclass
class Trained:
    """Pools of a training that ended at ``STEPS``, and the end state of each rank."""

    folder: Path
    ended: list[list[torch.Tensor]]

    def copy_to(self, pools: Path, *lost: int) -> None:
        """``lost``: ranks whose pools are missing in the copy."""
        shutil.copytree(self.folder, pools)
        lose(pools, *lost)


def trained(n_ranks: int) -> Iterator[Trained]:
    folder = Path(tempfile.mkdtemp(prefix="lightck-test-", dir="/dev/shm"))
    lives = values(run_ranks(n_ranks, life(folder / "pools", STEPS)))
    yield Trained(folder / "pools", [one.ended for one in lives])
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def two() -> Iterator[Trained]:
    yield from trained(2)


@pytest.fixture(scope="module")
def four() -> Iterator[Trained]:
    yield from trained(4)


@pytest.fixture(scope="module")
def uninterrupted(two: Trained) -> list[Life]:
    """What the ranks saw that lost the pool of rank 1, and were not killed since."""
    with tempfile.TemporaryDirectory(prefix="lightck-test-", dir="/dev/shm") as folder:
        two.copy_to(Path(folder) / "pools", 1)
        return values(run_ranks(2, life(Path(folder) / "pools", STEPS + 2)))


@dataclass
class Life:
    """What one rank saw in one run of the script."""

    recovered: Recovered | None
    restored: list[torch.Tensor]
    """The state after attach."""
    ended: list[torch.Tensor]
    warnings: list[str] = field(default_factory=list)
    draws: tuple[float, ...] = ()
    """Random numbers after attach: of Python, numpy and torch."""


def life(
    pools: Path,
    updates: int,
    *,
    topology: Topology = DDP,
    kill: tuple[int, int] | None = None,
    before: Callable[[int], Any] = lambda rank: None,
    draws: bool = False,
    **options: Any,
) -> Callable[[int], Life]:
    """The body of a rank. ``kill``: (rank, step): that rank dies in the iteration after that step."""

    def run(rank: int) -> Life:
        before(rank)
        model, optimizer = build(topology)
        seed = 100 + rank
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        with log_lines() as lines:
            session = lightck.attach(model, pools, optimizer=optimizer, **{"resume": True, "timeout": 60} | options)
        restored = everything(model, optimizer)
        drawn = (random.random(), np.random.rand(), torch.rand(()).item()) if draws else ()
        called = topology.wrap(model)
        for step in range(session.step, updates):
            called(batch(rank, step)).pow(2).mean().backward()
            if kill == (rank, step):
                die()
            optimizer.step()
            optimizer.zero_grad()
        session.close()
        ended = everything(model, optimizer)
        return Life(session.recovered, restored, ended, [line for line in lines if "was lost" in line], drawn)

    return run


def lose(pools: Path, *ranks: int) -> None:
    """Remove the pools of these ranks."""
    world_size = len(list(pools.glob("*.pool")))
    for rank in ranks:
        (pools / pool_name(rank, world_size)).unlink()


def are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def reason(rank: int, source: int) -> str:
    return (
        f"the pool of rank {rank} was lost: its tensors, its objects in state= and its positions in loaders are those "
        f"of rank {source}, and its random states are new"
    )


# -- it goes on --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_ranks", "lost", "source"), [(2, (1,), 0), (2, (0,), 1), (4, (2,), 0), (4, (0, 1, 2), 3)])
def test_a_lost_rank_has_the_state_of_another_rank_to_the_bit(pools, two, four, n_ranks, lost, source):
    before = two if n_ranks == 2 else four
    before.copy_to(pools, *lost)
    second = values(run_ranks(n_ranks, life(pools, STEPS + 2)))
    expected = Recovered(STEPS, False, "; ".join(reason(rank, source) for rank in lost))
    assert [one.recovered for one in second] == [expected] * n_ranks
    for one in second:
        assert are_equal(one.restored, before.ended[source])
    third = values(run_ranks(n_ranks, life(pools, STEPS + 3)))
    assert [one.recovered for one in third] == [Recovered(STEPS + 2, True, "")] * n_ranks
    for one, two_ in zip(second, third, strict=True):
        assert are_equal(one.ended, two_.restored)


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_after_it_a_kill_is_bit_identical_as_ever(pools, two, four, n_ranks):
    last, before, other = n_ranks - 1, two if n_ranks == 2 else four, pools.parent / "other"
    before.copy_to(pools, last)
    before.copy_to(other, last)
    whole = values(run_ranks(n_ranks, life(pools, STEPS + 6)))
    for killed, step in ((last, STEPS + 2), (0, STEPS + 4)):
        assert run_ranks(n_ranks, life(other, STEPS + 6, kill=(killed, step)))[killed].is_killed
    again = values(run_ranks(n_ranks, life(other, STEPS + 6)))
    assert [one.recovered.exact for one in again] == [True] * n_ranks
    assert again[0].recovered.step >= STEPS + 3
    for one, two in zip(whole, again, strict=True):
        assert are_equal(one.ended, two.ended)


def test_the_lost_rank_and_rank_0_are_warned(pools, four):
    four.copy_to(pools, 2)
    lives = values(run_ranks(4, life(pools, STEPS)))
    assert [len(one.warnings) for one in lives] == [1, 0, 1, 0]
    for rank in (0, 2):
        assert reason(2, 0) in lives[rank].warnings[0]
        assert lives[rank].warnings[0].endswith(f"So the continuation of step {STEPS} is not bit-identical")


def test_the_warning_says_that_there_was_nothing_to_compare_with(pools, two):
    two.copy_to(pools, 0)
    lives = values(run_ranks(2, life(pools, STEPS)))
    assert [len(one.warnings) for one in lives] == [1, 0]
    assert "Only the pool of rank 1 is left, so lightck could not check" in lives[0].warnings[0]


def test_random_states_differ_between_ranks_and_are_the_same_the_second_time(pools, four):
    other = pools.parent / "other"
    for folder in (pools, other):
        four.copy_to(folder, 1, 3)
    lives, again = (values(run_ranks(4, life(folder, STEPS, draws=True))) for folder in (pools, other))
    for of_generator in zip(*(one.draws for one in lives), strict=True):
        assert len(set(of_generator)) == 4
    assert [one.draws for one in lives] == [one.draws for one in again]


def test_a_rank_whose_pool_has_no_checkpoint_has_lost_it(pools, two):
    two.copy_to(pools)
    path = pools / pool_name(1, 2)
    reader = toys.checkpoints(path)[0].reader
    path.unlink()
    pools_by_hand.make(path, reader.entries, group=reader.group)
    lives = values(run_ranks(2, life(pools, STEPS)))
    assert [one.recovered.reason for one in lives] == [reason(1, 0)] * 2


def test_the_new_pool_is_like_that_of_the_source(pools):
    values(run_ranks(2, life(pools, STEPS, slots=4)))
    lose(pools, 1)
    values(run_ranks(2, life(pools, STEPS, slots=4)))
    one, other = (open_pool(str(pools / pool_name(rank, 2))) for rank in (0, 1))
    assert len(other.superblock.slots) == 4
    assert other.entries == one.entries
    assert (other.group.run_id, other.group.world_id) == (one.group.run_id, one.group.world_id)
    assert (other.group.rank, other.superblock.uuid != one.superblock.uuid) == (1, True)


def test_two_ranks_that_differ_in_statistics_of_batchnorm_only_can_replace_a_third(pools):
    topology = replace(
        DDP,
        model=lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)),
        wrap=partial(DistributedDataParallel, find_unused_parameters=True, broadcast_buffers=False),
    )
    first = values(run_ranks(3, life(pools, STEPS, topology=topology)))
    assert not are_equal(first[1].ended, first[2].ended)
    lose(pools, 0)
    second = values(run_ranks(3, life(pools, STEPS + 1, topology=topology)))
    for rank, source in enumerate((1, 1, 2)):
        assert are_equal(second[rank].restored, first[source].ended)


def loader_life(pools: Path, kill: tuple[int, int] | None = None) -> Callable[[int], Any]:
    """DDP with a DistributedSampler, a scheduler and a session loader in mid-epoch. Returns which items each step had,
    and the end state."""

    def run(rank: int) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 16), nn.Dropout(0.3), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        data = TensorDataset(torch.arange(40.0).reshape(-1, 1))
        sampler = DistributedSampler(data, seed=3)
        torch.manual_seed(100 + rank)
        with log_lines() as lines:
            session = lightck.attach(model, pools, optimizer=optimizer, resume=True, timeout=60, strict_data=True)
            loader = session.loader(DataLoader(data, batch_size=4, sampler=sampler))
            called, seen, lrs = DistributedDataParallel(model), {}, {}
            for epoch in range(loader.epoch, 2):
                sampler.set_epoch(epoch)
                for (x,) in loader:
                    if kill == (rank, session.step):
                        die()
                    seen[session.step], lrs[session.step] = x.flatten().tolist(), scheduler.get_last_lr()
                    called(x / 40).pow(2).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
            session.close()
        warnings = [line for line in lines if "other data" in line or "differ" in line]
        return seen, lrs, everything(model, optimizer), warnings, session.recovered

    return run


def test_the_lost_rank_goes_on_at_the_same_batch_of_a_distributed_sampler(pools):
    whole = values(run_ranks(2, loader_life(pools.parent / "whole")))
    run_ranks(2, loader_life(pools, kill=(0, 3)))
    lose(pools, 1)
    lives = values(run_ranks(2, loader_life(pools)))
    for (seen, lrs, ended, warnings, recovered), (all_seen, all_lrs, *_) in zip(lives, whole, strict=True):
        assert recovered.step in (2, 3)
        assert seen == {step: items for step, items in all_seen.items() if step >= recovered.step}
        assert lrs == {step: lr for step, lr in all_lrs.items() if step >= recovered.step}
        assert warnings == []
        assert are_equal(ended, lives[0][2])


def test_a_damaged_checkpoint_of_the_source_takes_all_ranks_to_the_one_before(pools, two):
    two.copy_to(pools, 1)
    toys.damage(pools / pool_name(0, 2), "model/first.weight", [STEPS])
    lives = values(run_ranks(2, life(pools, STEPS + 1)))
    assert [one.recovered for one in lives] == [Recovered(STEPS - 1, False, reason(1, 0))] * 2
    assert are_equal(lives[0].restored, lives[1].restored)


def test_a_checkpoint_that_the_source_carried_over_to_a_new_file_is_taken(pools):
    """Another slots= moves each pool to a new file; the newest checkpoint there is damaged on rank 0."""
    values(run_ranks(3, life(pools, STEPS)))
    before = values(run_ranks(3, life(pools, STEPS + 1, slots=5)))
    lose(pools, 1)
    path = pools / pool_name(0, 3)
    assert len(toys.checkpoints(path)[0].reader.superblock.slots) == 5, "a new file, which was made at STEPS + 1"
    assert STEPS in [one.step for one in toys.checkpoints(path)]
    toys.damage(path, "model/first.weight", [STEPS + 1])
    lives = values(run_ranks(3, life(pools, STEPS + 2)))
    for one in lives:
        assert one.recovered == Recovered(STEPS, False, reason(1, 0))
        assert are_equal(one.restored, before[0].restored)


def test_a_lost_pool_gets_the_slots_that_are_asked_for(pools, two):
    two.copy_to(pools, 1)
    values(run_ranks(2, life(pools, STEPS + 3, slots=5)))
    readers = [open_pool(str(pools / pool_name(rank, 2))) for rank in (0, 1)]
    assert [len(reader.superblock.slots) for reader in readers] == [5, 5]
    lives = values(run_ranks(2, life(pools, STEPS + 3)))
    assert [one.recovered for one in lives] == [Recovered(STEPS + 3, True, "")] * 2


# -- kills -------------------------------------------------------------------------------------------------------------

POINTS = {
    "restore": (LiveRestore, "take"),
    "copy": (lost_pool, "commit_copy"),
    "new pool": (group_start, "copy_into_new_pool"),
    "adopt": (PoolWriter, "adopt"),
}
SITES = ("header", "block", "manifest", "sealed", "body", "word", "ack")


def dies_at(when: str, what: str) -> None:
    """Let this process die before or after a step of attach, or at a point of the native core in its first
    checkpoint."""
    if when == "at":
        assert lib.lck_kill(what.encode(), 1) == lib.LCK_OK
        return
    owner, name = POINTS[what]
    original = getattr(owner, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        if when == "before":
            die()
        original(*args, **kwargs)
        die()

    setattr(owner, name, patched)


@pytest.mark.parametrize(
    ("when", "what"),
    [*((when, what) for what in POINTS for when in ("before", "after")), *(("at", site) for site in SITES)],
)
def test_a_kill_of_the_lost_rank_leads_to_the_same_state(pools, two, uninterrupted, when, what):
    two.copy_to(pools, 1)

    def before(rank: int) -> None:
        if rank == 1:
            dies_at(when, what)

    ended = run_ranks(2, life(pools, STEPS + 2, before=before), ends_others_after=0.1)
    assert ended[1].is_killed
    assert ended[0].value is None, "rank 0 must not train before rank 1 has adopted"
    again = values(run_ranks(2, life(pools, STEPS + 2)))
    for one, other in zip(again, uninterrupted, strict=True):
        assert one.recovered == Recovered(STEPS, False, reason(1, 0))
        assert are_equal(one.restored, two.ended[0])
        assert are_equal(one.ended, other.ended)
    assert len(again[1].warnings) == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_of_the_source_leads_to_the_same_state(pools, two, when):
    two.copy_to(pools, 0)
    run_ranks(2, life(pools, STEPS, before=lambda rank: dies_at(when, "adopt") if rank == 1 else None))
    for one in values(run_ranks(2, life(pools, STEPS))):
        assert one.recovered == Recovered(STEPS, False, reason(0, 1))
        assert are_equal(one.restored, two.ended[1])


def test_the_copy_holds_the_same_bytes_under_the_same_name(pools, two):
    two.copy_to(pools, 1)
    run_ranks(2, life(pools, STEPS, before=lambda rank: dies_at("after", "new pool") if rank == 1 else None))
    source = next(open_pool(str(pools / pool_name(0, 2))).checkpoints())
    (copy,) = open_pool(str(pools / pool_name(1, 2))).checkpoints()
    assert (copy.header.incarnation, copy.step, copy.iteration) == (
        source.header.incarnation,
        source.step,
        source.iteration,
    )
    assert copy.entries.keys() == source.entries.keys()
    assert all(copy.raw_checksums(name) == source.raw_checksums(name) for name in copy.entries)
    copy.verify()
    was, now = unpack_dict(source.state), unpack_dict(copy.state)
    assert list(now) == [*was, "copied_from"]
    assert [key for key in was if not toys.same(was[key], now[key])] == ["rng"]


# -- it is refused -----------------------------------------------------------------------------------------------------


def attaching(pools: Path, topology: Topology = DDP, **options: Any) -> Callable[[int], Any]:
    def attach(rank: int) -> None:
        model, optimizer = build(topology)
        lightck.attach(model, pools, optimizer=optimizer, **{"resume": True, "timeout": 30} | options)

    return attach


def contents_of(pools: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(pools.glob("*.pool"))}


@pytest.mark.parametrize("name", ["fsdp", "tp"])
def test_a_lost_part_of_a_sharded_model_is_named(pools, name):
    topology = TOPOLOGIES[name]
    values(run_ranks(2, life(pools, STEPS, topology=topology)))
    lose(pools, 1)
    before = contents_of(pools)
    for found in errors(2, attaching(pools, topology)):
        assert isinstance(found, RankError)
        assert "The pool of rank 1 (host" in str(found)
        assert f"the directory {str(pools)!r} has no pool of rank 1 with a checkpoint" in str(found)
        assert "No other pool has what this rank wrote, because the ranks hold parts of the model" in str(found)
    assert contents_of(pools) == before


def test_ranks_with_parameters_of_their_own_are_named(pools):
    """An ensemble: each rank trains a model of its own, without DistributedDataParallel."""
    alone = replace(DDP, wrap=lambda model: model)
    values(run_ranks(3, life(pools, STEPS, topology=alone)))
    lose(pools, 1)
    before = contents_of(pools)

    def rank_body(rank: int) -> tuple[str, bool]:
        model, optimizer = build(alone)
        with pytest.raises(RankError) as caught:
            lightck.attach(model, pools, optimizer=optimizer, resume=True, timeout=30)
        return str(caught.value), any(bool(p.isnan().any()) for p in model.parameters())

    for message, is_nan in values(run_ranks(3, rank_body)):
        assert "The pool of rank 1 (host" in message
        assert "because the ranks have different states: rank 0 (host" in message
        assert "and rank 2 (host" in message
        assert "differ in model/first.bias" in message
        assert not is_nan
    assert contents_of(pools) == before


def test_an_optimizer_with_another_state_on_each_rank_is_named(pools):
    def rank_body(rank: int) -> None:
        model, optimizer = build(DDP)
        session = lightck.attach(model, pools, optimizer=optimizer, timeout=30)
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0)
        optimizer.step()
        with torch.no_grad():
            optimizer.state[model.last.weight]["exp_avg_sq"] += rank
        session.close()

    values(run_ranks(3, rank_body))
    lose(pools, 1)
    for found in errors(3, attaching(pools)):
        assert "differ in optimizer/last.weight/exp_avg_sq. Nothing was changed" in str(found)


def damage_manifests(path: Path) -> None:
    reader = toys.checkpoints(path)[0].reader
    for slot in range(len(reader.superblock.slots)):
        for index in (0, 1):
            toys.flip(path, reader.superblock.manifest_at(slot, index) + 200)


@pytest.mark.parametrize("options", [{}, {"resume": False}])
def test_damaged_pools_of_all_ranks_are_not_replaced_unasked(pools, two, options):
    two.copy_to(pools)
    for rank in (0, 1):
        damage_manifests(pools / pool_name(rank, 2))
    before = contents_of(pools)
    for found in errors(2, attaching(pools, **options)):
        assert isinstance(found, RankError)
        assert "No checkpoint in the pool of rank 0 (host" in str(found)
    assert contents_of(pools) == before


def test_a_damaged_pool_is_not_replaced_unasked(pools, two):
    two.copy_to(pools)
    path = pools / pool_name(1, 2)
    damage_manifests(path)
    before = contents_of(pools)
    for found in errors(2, attaching(pools)):
        assert isinstance(found, RankError)
        assert "No checkpoint in the pool of rank 1 (host" in str(found)
        assert "then the rank takes its tensors from another rank" in str(found)
    assert contents_of(pools) == before
    path.unlink()
    assert values(run_ranks(2, life(pools, STEPS)))[1].recovered == Recovered(STEPS, False, reason(1, 0))


def test_a_pool_that_cannot_be_read_stays_an_error(pools, two):
    two.copy_to(pools)
    path = pools / pool_name(1, 2)
    path.write_bytes(bytes(4 << 20) + path.read_bytes()[4 << 20 :])
    before = contents_of(pools)
    first, second = errors(2, attaching(pools))
    assert isinstance(second, (CorruptPoolError, lightck.errors.NotAPoolError))
    assert str(second) in str(first)
    assert contents_of(pools) == before


def test_a_locked_pool_that_was_removed_stays_an_error(pools, two):
    two.copy_to(pools)
    path = pools / pool_name(1, 2)
    shutil.copy(path, path.with_suffix(".copy"))

    def rank_body(rank: int) -> str:
        model, optimizer = build(DDP)
        session = lightck.attach(model, pools, optimizer=optimizer, resume=True, timeout=30)
        torch.distributed.barrier()
        if rank == 1:
            path.unlink()
        torch.distributed.barrier()
        other, its_optimizer = build(DDP)
        with pytest.raises((PoolLockedError, RankError)) as caught:
            lightck.attach(other, pools, optimizer=its_optimizer, resume=True, timeout=30)
        torch.distributed.barrier()
        session.abandon()
        return type(caught.value).__name__

    assert "PoolLockedError" in values(run_ranks(2, rank_body))
    assert not path.exists()


def test_without_resume_a_lost_pool_is_no_reason_to_start_afresh(pools, two):
    two.copy_to(pools, 1)
    for found in errors(2, attaching(pools, resume=False)):
        assert isinstance(found, CheckpointExistsError)
    lives = values(run_ranks(2, life(pools, STEPS, resume=False, overwrite=True)))
    assert [one.recovered for one in lives] == [None, None]


def test_a_rank_that_has_no_space_for_its_new_pool_changes_nothing(pools, two):
    two.copy_to(pools, 1)
    before = contents_of(pools)

    def attach(rank: int) -> None:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        attaching(pools)(rank)

    first, second = errors(2, attach)
    assert "Rank 1 (" in str(first)
    assert str(second) in str(first)
    assert contents_of(pools) == before


@pytest.mark.parametrize("rank", [-1, 1 << 20, 1 << 80, "0", True, [0]])
def test_an_impossible_source_in_a_checkpoint_is_damage(rank):
    state = unpack_dict(pools_by_hand.small_state()) | {"copied_from": rank}
    with pytest.raises(CorruptPoolError):
        Contents.parse(values_of_state.pack(state, path=""), 0, 0, {})


# -- session.recovered -------------------------------------------------------------------------------------------------


def test_a_single_process_recovers_exactly(pool):
    model = toys.net()
    optimizer = toys.adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True) as session:
        assert session.recovered is None
        toys.train(model, optimizer, 3)
    again = toys.net(seed=1)
    with lightck.attach(again, pool, optimizer=toys.adam(again), resume=True) as session:
        assert session.recovered == Recovered(3, True, "")
    restored = toys.net(seed=2)
    its_optimizer = toys.adam(restored)
    lightck.recover(pool, restored, its_optimizer)
    with lightck.attach(restored, pool, optimizer=its_optimizer) as session:
        assert session.recovered == Recovered(3, True, "")


def test_ranks_that_lost_nothing_recover_exactly(pools):
    lives = values(run_ranks(2, life(pools, STEPS)))
    assert [one.recovered for one in lives] == [None, None]
    lives = values(run_ranks(2, life(pools, STEPS + 1)))
    assert [one.recovered for one in lives] == [Recovered(STEPS, True, "")] * 2
