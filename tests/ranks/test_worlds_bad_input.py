"""What cannot be loaded into another world is an error on all ranks that names it, and nothing is changed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from click.testing import CliRunner
from ranked import Ended, die, log_lines, run_ranks, values
from torch import nn
from torch.distributed.fsdp import fully_shard

import lightck
from lightck.cli import main
from lightck.errors import (
    DriftError,
    LightckError,
    NoSpaceError,
    PoolLockedError,
    PoolPathError,
    RankError,
    UnsupportedError,
)
from lightck.pool.storage.file import FileContainer
from lightck.ranks.directory import pool_name

from . import worlds
from .test_attach import damage
from .worlds import WORLDS, build, is_equal, updates, whole_of

STEPS = 3


def content(pools: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(pools.glob("*.pool"))}


def attached(new: str, pools: Path, **options: Any) -> Callable[[int], tuple[Any, list[str]]]:
    """The body of a rank that attaches and makes an update. Returns the whole tensors after attach, and log lines."""

    def body(rank: int) -> tuple[Any, list[str]]:
        model, optimizer = build(WORLDS[new], seed=1)
        with log_lines() as lines:
            keywords = {"resume": True, "timeout": 30} | options
            with lightck.attach(model, pools, optimizer=optimizer, **keywords) as session:
                began = whole_of(session.step, model, optimizer)
                updates(WORLDS[new], rank, model, optimizer, range(session.step, session.step + 1))
        return began, lines

    return body


def errors(ended: list[Ended]) -> list[BaseException]:
    found = [one.error for one in ended]
    assert None not in found, "a rank attached"
    return found


def test_overwrite_discards_the_pools_of_any_number_of_ranks(pools):
    worlds.train("fsdp 3", pools, STEPS)
    for began, _ in values(run_ranks(2, attached("ddp 2", pools, resume=False, overwrite=True))):
        assert began.step == 0
    assert {path.name.removesuffix(".lock") for path in pools.iterdir()} == {pool_name(rank, 2) for rank in range(2)}
    assert lightck.recover(pools).step == 1


def test_a_pool_that_is_in_use_is_named(pools):
    worlds.train("fsdp 3", pools, STEPS)

    def body(rank: int) -> None:
        if rank == 2:
            from lightck.pool.storage.lock import PoolLock

            lock = PoolLock(str(pools / pool_name(1, 3)))
            torch.distributed.barrier()
            torch.distributed.barrier()
            lock.release()
            return
        group = torch.distributed.new_group([0, 1])
        torch.distributed.barrier()
        model = nn.Linear(1, 1)
        try:
            lightck.attach(
                model, pools, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), resume=True, group=group
            )
        finally:
            torch.distributed.barrier()

    def with_group(rank: int) -> None:
        if rank == 2:
            torch.distributed.new_group([0, 1])
        body(rank)

    before = content(pools)
    first, second, _ = run_ranks(3, with_group)
    assert {type(one.error) for one in (first, second)} == {PoolLockedError, RankError}
    assert all(pool_name(1, 3) in str(one.error) for one in (first, second))
    assert content(pools) == before


def test_no_room_for_two_worlds(tmp_path):
    """A tmpfs that has space for the old pools and for a part of the new ones."""
    medium = tmp_path / "medium"
    medium.mkdir()
    if os.system(f"mount -t tmpfs -o size=64m none {medium} 2>/dev/null") != 0:
        pytest.skip("this process may not mount a tmpfs")
    try:
        pools = medium / "pools"
        expected = worlds.train("fsdp 3", pools, STEPS)[0]
        left = os.statvfs(medium).f_bavail * os.statvfs(medium).f_frsize
        (medium / "filler").write_bytes(bytes(left - (1 << 20)))
        before = content(pools)
        found = errors(run_ranks(2, attached("fsdp 2", pools)))
        assert any(isinstance(one, NoSpaceError) for one in found)
        assert all(isinstance(one, (NoSpaceError, RankError)) for one in found)
        assert any("space for the new pools beside the old ones" in str(one) for one in found)
        assert content(pools) == before, "also of the ranks that had space nothing is left"
        (medium / "filler").unlink()
        for began, _ in values(run_ranks(2, attached("fsdp 2", pools))):
            assert is_equal(began, expected)
    finally:
        os.system(f"umount {medium}")


def test_a_damaged_part_takes_all_ranks_to_the_checkpoint_before(pools):
    worlds.train("fsdp 3", pools, STEPS)
    damage(pools / pool_name(1, 3), STEPS)
    for began, _ in values(run_ranks(2, attached("fsdp 2", pools))):
        assert began.step == STEPS - 1


def test_a_damaged_copy_is_read_from_another_rank(pools):
    expected = worlds.train("ddp 3", pools, STEPS, split=False)[0]
    damage(pools / pool_name(0, 3), STEPS)
    ended = values(run_ranks(2, attached("fsdp 2", pools)))
    assert all(is_equal(began, expected) for began, _ in ended)
    words = "is damaged: block 0 of"
    assert any(words in line and "read from the pool of another rank" in line for _, lines in ended for line in lines)


def test_a_damaged_buffer_of_which_each_rank_has_its_own_is_not_taken_from_another_rank(pools):
    """All ranks take the checkpoint before, in which that of the first rank is intact."""

    def body(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.BatchNorm1d(8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        called = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
        with lightck.attach(model, pools, optimizer=optimizer, resume=True, split=False) as session:
            began.append((session.step, model.running_mean.clone()))
            for step in range(session.step, 3):
                called(torch.full((4, 8), float(10 * rank + step)) + torch.randn(4, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                means.append(model.running_mean.clone())
        return began[0], means, session.recovered

    began: list[Any] = []
    means: list[torch.Tensor] = []
    (_, first_means, _), (_, other_means, _) = values(run_ranks(2, body))
    assert not torch.equal(first_means[1], other_means[1])
    toys.damage(pools / pool_name(0, 2), "model/running_mean", [3])
    for (step, mean), _, recovered in values(run_ranks(3, body)):
        assert step == 2
        assert torch.equal(mean, first_means[1])
        assert "those of the first rank" in recovered.reason


def test_a_missing_pool_whose_parts_nobody_has_is_named(pools):
    worlds.train("fsdp 3", pools, STEPS)
    (pools / pool_name(1, 3)).unlink()
    before = content(pools)
    for found in errors(run_ranks(2, attached("fsdp 2", pools))):
        assert isinstance(found, RankError)
        assert "lacks the pool of rank 1 of this training, which has 3 ranks" in str(found)
        assert "'model/scale' cannot be put together, because no pool holds the part of size (2,) at (2,)" in str(found)
    assert content(pools) == before


def test_a_missing_pool_of_a_replicated_model_is_made_up_for(pools):
    expected = worlds.train("ddp 3", pools, STEPS, split=False)[0]
    (pools / pool_name(0, 3)).unlink()
    ended = values(run_ranks(2, attached("fsdp 2", pools)))
    assert all(is_equal(began, expected) for began, _ in ended)
    assert any("lacks the pool of rank 0" in line for line in ended[0][1])


def test_ranks_that_trained_apart_are_refused_by_name(pools):
    def apart(rank: int) -> None:
        torch.manual_seed(rank)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with lightck.attach(model, pools, optimizer=optimizer, timeout=60):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            torch.distributed.barrier()

    def together(rank: int) -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        lightck.attach(model, pools, optimizer=optimizer, resume=True, timeout=30)

    values(run_ranks(3, apart))
    for found in errors(run_ranks(2, together)):
        assert isinstance(found, RankError)
        assert "should have the same bytes in model/weight, model/bias, and have different ones" in str(found)


def test_factored_state_of_a_part_is_refused_by_name(pools):
    def body(shards: bool) -> Callable[[int], None]:
        def run(rank: int) -> None:
            torch.manual_seed(0)
            model = nn.Linear(8, 6)
            if shards:
                fully_shard(model)
            optimizer = torch.optim.Adafactor(model.parameters())
            with lightck.attach(model, pools, optimizer=optimizer, resume=True, timeout=30):
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()

        return run

    values(run_ranks(2, body(shards=False)))
    before = content(pools)
    for found in errors(run_ranks(3, body(shards=True))):
        assert isinstance(found, LightckError)
        assert "optimizer/weight/" in str(found)
        assert "it has not the shape of the parameter" in str(found)
    assert content(pools) == before


def test_another_model_is_refused_and_stays_as_it_was(pools):
    worlds.train("ddp 3", pools, STEPS)

    def body(rank: int) -> bool:
        model = nn.Linear(5, 7)
        before = model.weight.clone()
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises((DriftError, RankError), match="does not fit") as found:
            lightck.attach(model, pools, optimizer=optimizer, resume=True, timeout=30)
        return "model/first.weight" in str(found.value) and torch.equal(model.weight, before)

    assert all(values(run_ranks(2, body)))


def test_a_world_of_one_says_what_it_cannot_do(pools):
    worlds.train("ddp 2", pools, STEPS)
    model, optimizer = build(worlds.World(1))
    with pytest.raises(UnsupportedError, match=r"Replica\(\) is not supported.*attach it to a file"):
        lightck.attach(model, pools, optimizer=optimizer, resume=True, strategy=lightck.Replica())


def test_a_world_of_one_chooses_its_interval_and_pauses_alone(pools):
    worlds.train("ddp 2", pools, STEPS)
    model, optimizer = build(worlds.World(1))
    with lightck.attach(
        model, pools, optimizer=optimizer, resume=True, interval="auto", pause_on_nonfinite=True
    ) as session:
        begin = session.step
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] = float("nan")
        optimizer.zero_grad()
        optimizer.step()
        session.end_step()
        assert session.paused_reason is not None
    assert lightck.recover(pools).step == begin


def test_pools_of_two_trainings_are_refused(pools):
    other = pools.parent / "other"
    worlds.train("ddp 3", pools, STEPS)
    worlds.train("ddp 2", other, STEPS)
    for path in other.glob("*.pool"):
        path.rename(pools / path.name)
    for found in errors(run_ranks(2, attached("ddp 2", pools))):
        assert isinstance(found, RankError)
        assert "belong to 2 different trainings" in str(found)


def test_pools_that_an_interrupted_change_left_are_not_taken_and_go(pools, monkeypatch):
    """Rank 1 of the new number has its pool; then ranks of the old number, and of the new one, start again."""
    expected = worlds.train("fsdp 3", pools, STEPS)[0]
    half = pools / pool_name(1, 2)
    publish = FileContainer.publish

    def dies_before_its_pool_exists(container: FileContainer) -> None:
        while container.path.endswith(pool_name(0, 2)):
            if half.exists():
                die()
        publish(container)

    monkeypatch.setattr(FileContainer, "publish", dies_before_its_pool_exists)
    assert run_ranks(2, attached("fsdp 2", pools))[0].is_killed
    monkeypatch.undo()
    assert sorted(content(pools)) == sorted([pool_name(1, 2), *(pool_name(rank, 3) for rank in range(3))])
    assert len(list(pools.glob(".lightck-*.new"))) == 1, "the pool of rank 0, without a name"
    both = pools.parent / "both"
    shutil.copytree(pools, both)
    assert lightck.recover(pools).step == STEPS
    shown = CliRunner().invoke(main, ["inspect", str(pools)])
    assert shown.exit_code == 0
    assert f"step {STEPS} is the newest that all ranks have" in shown.stdout
    for began, _ in values(run_ranks(3, attached("fsdp 3", pools))):
        assert is_equal(began, expected)
    assert sorted(content(pools)) == [pool_name(rank, 3) for rank in range(3)]
    assert list(pools.glob(".lightck-*.new")) == []
    for began, _ in values(run_ranks(2, attached("fsdp 2", both))):
        assert is_equal(began, expected)
    assert sorted(content(both)) == [pool_name(rank, 2) for rank in range(2)]


def test_two_histories_in_one_directory_are_refused(pools):
    """A copy of the directory was loaded into another number of ranks, and the old ranks went on for longer."""
    copy = pools.parent / "copy"

    def body(rank: int) -> None:
        model, optimizer = build(WORLDS["ddp 3"])
        with lightck.attach(model, pools, optimizer=optimizer, timeout=60) as session:
            updates(WORLDS["ddp 3"], rank, model, optimizer, range(1))
            session.flush()
            torch.distributed.barrier()
            if rank == 0:
                shutil.copytree(pools, copy)
            torch.distributed.barrier()
            updates(WORLDS["ddp 3"], rank, model, optimizer, range(1, 5))

    values(run_ranks(3, body))
    values(run_ranks(2, attached("ddp 2", copy)))
    for path in copy.glob("*.pool"):
        path.rename(pools / path.name)
    before = content(pools)
    for found in errors(run_ranks(2, attached("ddp 2", pools))):
        assert isinstance(found, RankError)
        assert "lie pools of two continuations of one training: the newer one has reached step 2" in str(found)
        assert "the older one step 5" in str(found)
    assert content(pools) == before


def test_a_pool_under_another_name_is_not_overlooked(pools):
    """Else a training that was to continue from it would begin anew without a word."""
    pools.mkdir()
    model, optimizer = build(worlds.World(1))
    with lightck.attach(model, pools / "one.pool", optimizer=optimizer):
        updates(worlds.World(1), 0, model, optimizer, range(1))
    for found in errors(run_ranks(2, attached("ddp 2", pools))):
        assert isinstance(found, (PoolPathError, RankError))
        assert "it holds the pool 'one.pool'" in str(found)
        assert f"give it the name {pool_name(0, 1)}" in str(found)
    (pools / "one.pool").rename(pools / pool_name(0, 1))
    for began, _ in values(run_ranks(2, attached("ddp 2", pools))):
        assert began.step == 1
