"""A pass whose samples several ranks share goes on with another number of ranks: no sample twice, and none left out."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranked import die, log_lines, run_ranks, values
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

import lightck
from lightck.dataloader.sharing import rest_of
from lightck.errors import DriftError

SAMPLES, EPOCHS = 53, 2
"""A prime number of samples: no number of ranks shares them evenly."""


def life(
    pools: Path,
    seen: Path,
    n_ranks: int,
    *,
    kill_at: int | None = None,
    batch_size: int = 2,
    sampler: Callable[..., Any] = DistributedSampler,
    workers: int = 0,
    anew: bool = False,
    n_same_data: int = 1,
    shards: bool = False,
) -> list[Any]:
    """Train until step ``kill_at``, or to the end. Each rank writes a line with epoch, step and samples for each
    update. ``n_same_data``: so many neighbouring ranks get the same samples. Returns how the ranks ended."""

    number = len({path.name.partition("-")[0] for path in seen.iterdir()})

    def body(rank: int) -> tuple[int, str, list[str]]:
        data = TensorDataset(torch.arange(SAMPLES, dtype=torch.float32).unsqueeze(1))
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        if shards:
            fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        is_parallel = n_ranks > 1 and not shards
        called = DistributedDataParallel(model, find_unused_parameters=True) if is_parallel else model
        shares = sampler(data, num_replicas=n_ranks // n_same_data, rank=rank // n_same_data, seed=5)
        with log_lines() as lines:
            session = lightck.attach(model, pools, optimizer=optimizer, resume=True, timeout=60)
            loader = session.loader(
                DataLoader(data, batch_size=batch_size, sampler=shares, num_workers=workers), anew=anew
            )
            began, reason = session.step, "" if session.recovered is None else session.recovered.reason
            with open(seen / f"{number}-{began}-{rank}", "w") as out:
                for epoch in range(loader.epoch, EPOCHS):
                    if hasattr(shares, "set_epoch"):
                        shares.set_epoch(epoch)
                    for (x,) in loader:
                        called(x).pow(2).mean().backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        out.write(json.dumps([epoch, session.step, x.flatten().int().tolist()]) + "\n")
                        out.flush()
                        if session.step == kill_at:
                            die()
            session.close()
        return began, reason, lines

    return run_ranks(n_ranks, body) if n_ranks > 1 else run_ranks(1, body, has_group=False)


def records(seen: Path) -> list[tuple[int, list[tuple[str, int, int, list[int]]]]]:
    """For each life, in their order: the step at which it began; and rank, epoch, step and samples of each update."""
    lives: dict[int, tuple[int, list[tuple[str, int, int, list[int]]]]] = {}
    for path in sorted(seen.iterdir()):
        number, began, rank = path.name.split("-")
        lines = [(rank, *json.loads(line)) for line in path.read_text().splitlines()]
        lives.setdefault(int(number), (int(began), []))[1].extend(lines)
    return [lives[number] for number in sorted(lives)]


def kept(seen: Path) -> dict[int, Counter[int]]:
    """Epoch -> how often each sample was used in the updates that no later life made again."""
    found: dict[int, Counter[int]] = {}
    lives = records(seen)
    for number, (_, lines) in enumerate(lives):
        end = min([began for began, _ in lives[number + 1 :]], default=1 << 60)
        for _, epoch, step, samples in lines:
            if step <= end:
                found.setdefault(epoch, Counter()).update(samples)
    return found


class Own:
    """An object in ``state=`` with a large tensor, which is another one on each rank."""

    def __init__(self, number: int) -> None:
        self.value = torch.full((100_000,), float(number))

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.fixture
def seen(pool) -> Path:
    folder = pool.parent / "seen"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    "lives",
    [
        [(4, 3, 2), (2, 9, 2), (3, None, 2)],
        [(2, 5, 2), (3, 8, 3), (1, None, 5)],
        [(3, 11, 2), (4, 14, 1), (2, None, 4)],
        [(1, 7, 3), (2, None, 3)],
    ],
    ids=str,
)
def test_no_sample_of_a_pass_is_used_twice_and_none_is_left_out(pools, seen, lives):
    """Lives of (ranks, step of the kill, batch size)."""
    pools.mkdir()
    if lives[0][0] == 1:  # a directory with pools of ranks makes a single process a world of one
        life(pools, seen, 2, kill_at=1)
    for n_ranks, kill_at, batch_size in lives:
        ended = life(pools, seen, n_ranks, kill_at=kill_at, batch_size=batch_size)
    values(ended)
    for epoch, used in kept(seen).items():
        assert set(used) == set(range(SAMPLES)), f"epoch {epoch} leaves samples out"
        repeated = sum(used.values()) - SAMPLES
        assert repeated < lives[-1][0], (
            f"epoch {epoch}: the sampler repeats at most one sample less than there are ranks"
        )


def test_a_pass_goes_on_exactly_in_its_new_world(pools, seen):
    """After a change of worlds in mid-pass, a kill and a resume give the batches of a life that was not killed."""
    life(pools, seen, 4, kill_at=3)
    copy = pools.parent / "copy"
    shutil.copytree(pools, copy)
    values(life(copy, seen, 2))
    life(pools, seen, 2, kill_at=8)
    values(life(pools, seen, 2))
    _, whole, *parts = records(seen)
    expected = {(rank, step): (epoch, samples) for rank, epoch, step, samples in whole[1]}
    given = {(rank, step): (epoch, samples) for _, lines in parts for rank, epoch, step, samples in lines}
    assert given == expected


def test_workers_fetch_the_rest_of_a_pass(pools, seen):
    life(pools, seen, 3, kill_at=4, workers=1)
    values(life(pools, seen, 2, workers=1))
    for used in kept(seen).values():
        assert set(used) == set(range(SAMPLES))


def random_shares(data: Any, num_replicas: int, rank: int, seed: int) -> RandomSampler:
    return RandomSampler(data, num_samples=SAMPLES // num_replicas, generator=torch.Generator().manual_seed(rank))


def test_another_sampler_begins_its_pass_again_and_that_is_said(pools, seen):
    life(pools, seen, 3, kill_at=4, sampler=random_shares)
    first, second = values(life(pools, seen, 2, sampler=random_shares))
    for began, reason, _ in (first, second):
        assert began in (3, 4)
        assert "the pass over loader.0 begins again, so samples of it are given twice" in reason
    assert any("the pass over loader.0 begins again" in line for line in first[2])


def test_another_order_is_refused_by_name(pools, seen):
    life(pools, seen, 3, kill_at=4)
    for ended in life(pools, seen, 2, sampler=partial(DistributedSampler, shuffle=False)):
        assert isinstance(ended.error, DriftError)
        assert "the pass was begun by 3 ranks, and shuffle of its sampler was 1 and is 0" in str(ended.error)
    for ended in life(pools, seen, 2, sampler=random_shares):
        assert isinstance(ended.error, DriftError)
    values(life(pools, seen, 2, sampler=partial(DistributedSampler, shuffle=False), anew=True))


@given(
    samples=st.integers(1, 60),
    before=st.integers(0, 70),
    ranks=st.integers(1, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
)
@settings(max_examples=300, deadline=None)
def test_the_rest_is_shared_evenly(samples, before, ranks, shuffle, drop_last, epoch):
    data = range(samples)
    order = DistributedSampler(data, num_replicas=1, rank=0, shuffle=shuffle)
    order.set_epoch(epoch)
    left = list(order)[before:]
    shares = []
    for rank in range(ranks):
        sampler = DistributedSampler(data, num_replicas=ranks, rank=rank, shuffle=shuffle, drop_last=drop_last)
        sampler.set_epoch(epoch)
        shares.append(rest_of(sampler, before))
    assert len({len(share) for share in shares}) == 1
    dealt = [sample for turn in zip(*shares, strict=True) for sample in turn]
    if drop_last:
        assert dealt == left[: len(left) // ranks * ranks]
    else:
        assert dealt[: len(left)] == left
        assert len(dealt) - len(left) == -len(left) % ranks
        assert set(dealt) <= set(data)
    if not before and samples >= ranks:
        assert (
            shares[0]
            == list(DistributedSampler(data, num_replicas=ranks, rank=0, shuffle=shuffle, drop_last=drop_last))
            or epoch
        )


def test_as_many_ranks_with_other_parts_keep_their_data_and_their_random_states(pools):
    """From DistributedDataParallel to fully_shard: each rank goes on with its own sampler, numbers and objects."""

    def body(rank: int, shards: bool) -> tuple[int, list[Any]]:
        data = TensorDataset(torch.arange(SAMPLES, dtype=torch.float32).unsqueeze(1))
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        if shards:
            fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        called = model if shards else DistributedDataParallel(model)
        torch.manual_seed(rank)
        own = Own(rank if not shards else -1)
        session = lightck.attach(model, pools, optimizer=optimizer, state={"own": own}, resume=True, timeout=60)
        began, given = session.step, []
        loader = session.loader(DataLoader(data, batch_size=2, sampler=random_shares(data, 2, rank, 0)))
        for (x,) in loader:
            called(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            given.append([session.step, x.flatten().int().tolist(), torch.rand(1).item(), own.value.sum().item()])
            if not shards and session.step == 6:
                break
        session.close()
        return began, given

    whole = values(run_ranks(2, partial(body, shards=False)))  # to step 6
    shutil.rmtree(pools)
    expected = values(run_ranks(2, partial(body, shards=True)))
    assert [began for began, _ in whole] == [began for began, _ in expected] == [0, 0]
    shutil.rmtree(pools)
    values(run_ranks(2, partial(body, shards=False)))
    for rank, (began, batches) in enumerate(values(run_ranks(2, partial(body, shards=True)))):
        assert began == 6
        assert [one[:3] for one in batches] == [one[:3] for one in expected[rank][1][6:]]
        assert {one[3] for one in batches} == {rank * 100_000.0}


def test_start_counts_the_samples_of_other_ranks_as_batches(pools, seen):
    """A loop that does something once per pass where ``start`` is 0 does it once."""
    life(pools, seen, 4, kill_at=3)

    def body(rank: int) -> list[int]:
        data = TensorDataset(torch.arange(SAMPLES, dtype=torch.float32).unsqueeze(1))
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        with lightck.attach(model, pools, optimizer=optimizer, resume=True, timeout=60) as session:
            shares = DistributedSampler(data, num_replicas=2, rank=rank, seed=5)
            loader = session.loader(DataLoader(data, batch_size=2, sampler=shares))
            first = loader.start
            numbers = [number for number, _ in enumerate(loader, loader.start)]
            return [session.step, first, numbers[0], numbers[-1], loader.start]

    for step, first, number, last, after in values(run_ranks(2, body)):
        given = 4 * 2 * step
        assert first == number == -(-given // 4)
        assert last == -(-SAMPLES // 4) - 1
        assert after == 0


def test_a_loader_of_another_kind_after_a_pass_that_began_again_is_no_surprise(pools, seen, caplog):
    """A single process shuffled; two ranks share the samples. Only the pass that begins again is a warning."""
    pools.mkdir()
    life(pools, seen, 2, kill_at=1)
    life(pools, seen, 1, kill_at=4, sampler=random_shares)
    for _, reason, lines in values(life(pools, seen, 2)):
        assert "begins again" in reason
        assert not any("was saved between two passes" in line for line in lines)


@pytest.mark.parametrize("same_data", [(2, 1), (1, 2)], ids=["to more shares", "to fewer shares"])
def test_as_many_ranks_that_share_the_samples_in_another_way(pools, seen, same_data):
    """Two ranks of each tensor parallel group get the same samples; after the change each rank gets its own."""
    life(pools, seen, 4, kill_at=3, n_same_data=same_data[0])
    values(life(pools, seen, 4, shards=True, n_same_data=same_data[1]))
    (_, first), (began, second) = records(seen)
    found: dict[int, Counter[int]] = {}
    for lines, same in ((first, same_data[0]), (second, same_data[1])):
        for rank, epoch, step, samples in lines:
            if int(rank) % same == 0 and (lines is second or step <= began):
                found.setdefault(epoch, Counter()).update(samples)
    for used in found.values():
        assert set(used) == set(range(SAMPLES))
        assert sum(used.values()) - SAMPLES < 4


@pytest.mark.parametrize("seeds_apart", [True, False])
def test_ranks_draw_alike_exactly_if_the_script_seeds_them_alike(pools, seeds_apart):
    """The ranks of a tensor parallel group must drop the same elements; data-parallel ranks must not."""

    def draws(n_ranks: int, folder: Path) -> list[tuple[float, ...]]:
        def body(rank: int) -> tuple[float, ...]:
            torch.manual_seed(0)
            model = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
            for seed in (torch.manual_seed, random.seed, np.random.seed):
                seed(100 + rank * seeds_apart)
            with lightck.attach(model, folder, optimizer=optimizer, resume=True, timeout=60) as session:
                drawn = torch.rand(1).item(), random.random(), float(np.random.rand())
                if session.step == 0:
                    model(torch.ones(1)).sum().backward()
                    optimizer.step()
            return drawn

        return values(run_ranks(n_ranks, body))

    fresh = draws(3, pools)
    copy = pools.parent / "copy"
    shutil.copytree(pools, copy)
    after = draws(2, pools)
    assert draws(2, copy) == after, "a start that is made again draws the same"
    assert len(set(after)) == (2 if seeds_apart else 1)
    assert not set(after) & set(fresh)
    assert all(one != other for one, other in zip(after[0], fresh[0], strict=True))
