"""Ranks on several hosts: a directory stands for each host, and ``LIGHTCK_TEST_HOST`` for its name and boot id."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import toys
from ranked import everything, log_lines, run_ranks, values
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightck
from lightck.errors import RankError
from lightck.ranks.publication import unpacked
from lightck.ranks.rule import CheckpointId
from lightck.session import group as group_module

from .trainings import TOPOLOGIES, Topology, batch, body, build, is_equal

DDP = TOPOLOGIES["ddp, 2 hosts"]
ALONE = Topology(3, ranks_per_host=1)
"""Three ranks on three hosts, without a collective."""
HELPER = "lightck-ranks"


class WatchedStore:
    """The store of the group, which says which threads used it, and can be made to stand still or to fail."""

    def __init__(self, store):
        self._store = store
        self.threads: set[str] = set()
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.error: Exception | None = None
        self.written: list[tuple[str, bytes]] = []

    def _called(self, name, *args):
        self.threads.add(threading.current_thread().name)
        self.may_answer.wait(60)
        if self.error is not None:
            raise self.error
        return getattr(self._store, name)(*args)

    def set(self, key, value):
        self.written.append((key, value))
        return self._called("set", key, value)

    def check(self, *args):
        return self._called("check", *args)

    def multi_get(self, *args):
        return self._called("multi_get", *args)


@pytest.fixture
def stores(monkeypatch):
    """The stores of the sessions of this process, in the order of their attach."""
    stores: list[WatchedStore] = []
    original = group_module.store_of

    def watched(group):
        stores.append(WatchedStore(original(group)))
        return stores[-1]

    monkeypatch.setattr(group_module, "store_of", watched)
    return stores


def training(rank, pools, topology=DDP, **options):
    """Model as the loop calls it, optimizer and session of a rank."""
    model, optimizer = build(topology)
    directory = topology.on_host(rank, pools)
    session = lightck.attach(model, directory, optimizer=optimizer, **{"resume": True, "timeout": 60} | options)
    return topology.wrap(model), optimizer, session


def update(model: nn.Module, optimizer, session, rank: int) -> None:
    model(batch(rank, session.step)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    session.end_step()


def test_each_host_has_the_pools_of_its_own_ranks(pools):
    topology = TOPOLOGIES["hsdp, 2 hosts"]
    values(run_ranks(4, body(topology, pools, 3)))
    names = {path.parent.name + "/" + path.name for path in pools.rglob("*.pool")}
    assert names == {f"host-{rank // 2}/rank-{rank:05d}-of-00004.pool" for rank in range(4)}


def test_what_is_common_to_all_hosts_becomes_known(pools):
    """A rank that knew of none but checkpoint 0 would wait for ever after ``slots - 1`` updates."""
    for run in values(run_ranks(2, body(DDP, pools, 12))):
        assert run.common >= 12 - 3 + 1


def test_the_training_thread_never_uses_the_store(pools, stores):
    def rank_body(rank):
        model, optimizer, session = training(rank, pools)
        stores[-1].threads.clear()
        for _ in range(8):
            update(model, optimizer, session, rank)
        session.close()
        return stores[-1].threads

    assert values(run_ranks(2, rank_body)) == [{HELPER}] * 2


def test_on_one_host_no_helper_runs_and_the_store_is_not_used(pools, stores):
    def rank_body(rank):
        model, optimizer, session = training(rank, pools, TOPOLOGIES["ddp"])
        stores[-1].threads.clear()
        for _ in range(8):
            update(model, optimizer, session, rank)
        names = {thread.name for thread in threading.enumerate()}
        session.close()
        return stores[-1].threads, HELPER in names

    assert values(run_ranks(2, rank_body)) == [(set(), False)] * 2


@pytest.mark.parametrize("slots", [3, 6])
def test_a_store_that_does_not_answer_holds_nobody_up_before_the_slots_are_full(pools, stores, slots):
    def rank_body(rank):
        model, optimizer, session = training(rank, pools, slots=slots)
        stores[-1].may_answer.clear()
        for _ in range(slots - 1):
            update(model, optimizer, session, rank)
        session.flush()
        waited, common = session.stats().rank_wait_seconds, session.common
        threading.Timer(0.2, stores[-1].may_answer.set).start()
        for _ in range(4):
            update(model, optimizer, session, rank)
        session.close()
        return waited, common, session.stats().rank_wait_seconds > 0

    assert values(run_ranks(2, rank_body)) == [(0.0, 0, True)] * 2


def test_a_store_that_fails_is_named_after_the_timeout_and_what_is_common_stays(pools, stores):
    def rank_body(rank):
        model, optimizer, session = training(rank, pools, ALONE, timeout=2)
        stores[-1].error = ConnectionError("the server is gone")
        with pytest.raises(RankError) as caught:
            for _ in range(9):
                update(model, optimizer, session, rank)
        return str(caught.value)

    topology = replace(ALONE, n_ranks=2)
    for message in values(run_ranks(2, rank_body)):
        assert "the store of the process group fails: ConnectionError: the server is gone" in message
        assert "The checkpoints that all ranks have are intact" in message
    assert [run.began for run in values(run_ranks(2, body(topology, pools, 9)))] in ([1, 1], [2, 2], [3, 3])


def test_a_store_that_fails_for_a_while_is_used_again(pools, stores):
    def rank_body(rank):
        model, optimizer, session = training(rank, pools)
        stores[-1].error = ConnectionError("not now")
        update(model, optimizer, session, rank)
        stores[-1].error = None
        for _ in range(8):
            update(model, optimizer, session, rank)
        session.close()
        return session.committed

    assert values(run_ranks(2, rank_body)) == [9, 9]


def test_ranks_go_on_when_rank_0_has_closed_its_session(pools):
    """Rank 0 puts the views of all ranks together. When it is gone, the others do so themselves."""

    def rank_body(rank):
        model, optimizer, session = training(rank, pools, ALONE)
        for _ in range(4):
            update(model, optimizer, session, rank)
        if rank == 0:
            session.flush()
            session.close()
        dist.barrier()
        if rank != 0:  # they overwrite steps 2 and 3, so they know that step 4 is common
            for _ in range(2):
                update(model, optimizer, session, rank)
            session.flush()
            while session.common < 4:
                time.sleep(0.01)
                session.flush()
            session.close()
        return session.committed

    assert values(run_ranks(3, rank_body)) == [4, 6, 6]


def test_a_rank_on_another_host_that_stands_still_is_named(pools):
    def rank_body(rank):
        model, optimizer, session = training(rank, pools, ALONE, timeout=3)
        if rank == 1:
            dist.barrier()
            return ""
        with pytest.raises(RankError) as caught:
            for _ in range(9):
                update(model, optimizer, session, rank)
        dist.barrier()
        return str(caught.value)

    for message in values(run_ranks(3, rank_body))[::2]:
        assert message.startswith(
            "For 3 seconds (timeout=) no newer checkpoint came from rank 1 (host host-1), whose newest checkpoint is "
            "that of step 0."
        )


def test_a_checkpoint_that_the_group_has_left_is_not_published(pools, stores):
    """All ranks hold steps 5 and 6, one rank has damaged copies, so all go back to step 4. Step 6 of before must not
    count as common, although each rank finds it in its own pool: else step 4 could be overwritten too early."""
    values(run_ranks(2, body(DDP, pools, 6)))
    toys.damage(pools / "host-1/rank-00001-of-00002.pool", "model/first.weight", [5, 6])

    def rank_body(rank):
        model, optimizer, session = training(rank, pools)
        assert session.common == 4
        update(model, optimizer, session, rank)
        session.close()  # step 5 is written over step 5 of before, and step 6 of before still lies in the pool
        return [unpacked(value) for key, value in stores[-1].written if f"/view/{rank}" in key]

    for views in values(run_ranks(2, rank_body)):
        assert views[0].committed == {CheckpointId(1, 4)}
        assert sorted(one.step for one in views[-1].committed) == [4, 5]
        assert CheckpointId(1, 6) not in views[-1].committed


def test_a_lost_pool_of_the_only_rank_on_its_host_is_replaced_from_another_host(pools):
    before = values(run_ranks(2, body(DDP, pools, 3)))
    (pools / "host-1/rank-00001-of-00002.pool").unlink()
    found = values(run_ranks(2, body(DDP, pools, 3)))
    assert [run.began for run in found] == [3, 3]
    assert is_equal(found, before)


def test_the_pools_of_all_hosts_in_one_directory_are_recovered(pools, caplog):
    topology = TOPOLOGIES["hsdp, 2 hosts"]
    runs = values(run_ranks(4, body(topology, pools, 5)))
    with caplog.at_level(logging.WARNING, "lightck"):
        assert lightck.recover(pools / "host-0").step == 5, "a host holds each tensor"
    assert "lacks the pools of ranks 2, 3. The other pools hold the whole of each tensor" in caplog.text
    shutil.copytree(pools / "host-0", pools / "part")
    (pools / "part/rank-00001-of-00004.pool").unlink()
    with pytest.raises(
        RankError, match=r"lacks the pools of ranks 1, 2, 3 of this.*no pool holds.*several hosts.*copy"
    ):
        lightck.recover(pools / "part")
    both = pools / "both"
    both.mkdir()
    for path in pools.glob("host-*/*.pool"):
        shutil.copy(path, both)
    checkpoint = lightck.recover(both)
    assert checkpoint.step == 5
    assert checkpoint.model["first.weight"].shape == (600, 3)
    assert len(runs) == 4


def test_directories_that_differ_on_one_host_are_refused_by_name(pools):
    def rank_body(rank):
        model, optimizer = build(DDP)
        pools.mkdir(exist_ok=True)
        with pytest.raises(RankError, match="must pass the same directory"):
            lightck.attach(model, pools / f"of-{rank}", optimizer=optimizer, timeout=60)
        return sorted(path.name for path in pools.rglob("*.pool"))

    assert values(run_ranks(2, rank_body)) == [[], []]


def test_ranks_that_changed_their_hosts_are_refused_by_name_without_resume(pools):
    """No rank finds a pool in its directory, and that is no new training."""
    values(run_ranks(2, body(DDP, pools, 3)))
    (pools / "host-0").rename(pools / "aside")
    (pools / "host-1").rename(pools / "host-0")
    (pools / "aside").rename(pools / "host-1")
    for ended in run_ranks(2, body(DDP, pools, 6, resume=False)):
        assert isinstance(ended.error, RankError)
        assert "Rank 1 (host host-1) has no pool in its directory" in str(ended.error)
        assert "of rank 0 (host host-0) has the pool of rank 1" in str(ended.error)
    assert len(list(pools.rglob("*.pool"))) == 2
    runs = values(run_ranks(2, body(DDP, pools, 2, resume=False, overwrite=True)))
    assert [run.began for run in runs] == [0, 0]


def test_a_rank_whose_host_is_gone_takes_the_checkpoint_of_another_rank(pools):
    before = values(run_ranks(2, body(DDP, pools, 3)))
    moved = replace(DDP, ranks_per_host=2)  # both ranks on host-0 now

    def rank_body(rank):
        with log_lines() as lines:
            model, optimizer, session = training(rank, pools, moved)
            state = everything(model.module, optimizer)
            session.close()
        return state, session.recovered, [line for line in lines if "the pool of rank 1 was lost" in line]

    for state, recovered, lines in values(run_ranks(2, rank_body)):
        assert all(map(torch.equal, state, before[0].state))
        assert (recovered.step, recovered.exact) == (3, False)
        assert len(lines) == 1


def test_a_training_on_several_hosts_logs_nothing_unusual(pools):
    def rank_body(rank):
        with log_lines() as lines:
            model, optimizer, session = training(rank, pools)
            assert isinstance(model, DistributedDataParallel)
            for _ in range(4):
                update(model, optimizer, session, rank)
            session.close()
        return [line for line in lines if "fresh start" not in line]

    assert values(run_ranks(2, rank_body)) == [[], []]


def test_killed_in_turn_on_both_hosts_the_end_is_bit_identical(pools):
    for kill in ((0, 3), (1, 5), (0, 6), None):
        ended = run_ranks(2, body(DDP, pools, 9, kill=kill))
    assert is_equal(values(ended), values(run_ranks(2, body(DDP, None, 9))))
