"""A world changes, and its ranks are on several hosts with a directory each. Pools are copied between hosts.

``LIGHTCK_TEST_HOST`` and a folder stand for a host.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import Ended, die, run_ranks, values

import lightck
from lightck.errors import CheckpointExistsError, NoSpaceError, PoolError, RankError
from lightck.pool.reader import open_pool
from lightck.session import other_world, partial_copies
from lightck.session.group import HOST_VARIABLE

from .worlds import WORLDS, Whole, build, is_equal, updates, whole_of

STEPS = 3
Hosts = Sequence[int]
"""Rank -> number of its host."""


def rank_body(name: str, pools: Path, hosts: Hosts, upto: int, **options: Any) -> Callable[[int], Any]:
    """Attach, and train up to a step. Returns the whole tensors after attach and at the end, and what the session says
    of the resume."""

    def body(rank: int) -> Any:
        os.environ[HOST_VARIABLE] = f"host-{hosts[rank]}"
        pools.mkdir(exist_ok=True)
        model, optimizer = build(WORLDS[name], seed=len(options))
        torch.manual_seed(50 + rank)
        keywords = {"resume": True, "timeout": 30} | options
        with lightck.attach(model, pools / f"host-{hosts[rank]}", optimizer=optimizer, **keywords) as session:
            began = whole_of(session.step, model, optimizer)
            updates(WORLDS[name], rank, model, optimizer, range(session.step, upto))
            end = whole_of(session.step, model, optimizer)
        return began, end, session.recovered

    return body


def train(name: str, pools: Path, hosts: Hosts, upto: int = STEPS, **options: Any) -> list[Any]:
    return values(run_ranks(len(hosts), rank_body(name, pools, hosts, upto, **options)))


def errors(name: str, pools: Path, hosts: Hosts, **options: Any) -> list[BaseException]:
    found: list[Ended] = run_ranks(len(hosts), rank_body(name, pools, hosts, STEPS + 1, **options))
    assert all(one.error is not None for one in found), [one.value for one in found]
    return [one.error for one in found if one.error is not None]


def files(pools: Path) -> dict[str, bytes]:
    """All pools of all hosts."""
    return {str(path.relative_to(pools)): path.read_bytes() for path in sorted(pools.rglob("*.pool"))}


def places(pools: Path) -> list[tuple[int, int]]:
    """(host, rank) of each pool, by what the pools say."""
    found = []
    for path in pools.rglob("*.pool"):
        with closing(open_pool(str(path))) as reader:
            found.append((int(path.parent.name.removeprefix("host-")), reader.group.rank))
    return sorted(found)


def is_clean(pools: Path) -> bool:
    """Whether nothing is in the directories but pools and their locks."""
    return not [
        path for path in pools.rglob("*") if path.name == partial_copies.PARTIAL_COPIES or path.suffix == ".new"
    ]


@pytest.mark.parametrize(
    ("old", "old_hosts", "new", "new_hosts"),
    [
        ("fsdp 4", [0, 0, 1, 1], "fsdp 2", [0, 1]),
        pytest.param("fsdp 2", [0, 1], "fsdp 4", [0, 1, 2, 2], marks=pytest.mark.campaign),
        ("hsdp", [0, 0, 1, 1], "ddp 3", [0, 0, 1]),
        pytest.param("ddp 2", [0, 1], "fsdp 3", [1, 0, 1], marks=pytest.mark.campaign),
        ("tp x fsdp", [0, 0, 1, 1], "fsdp 2", [1, 0]),
        pytest.param("fsdp 3", [0, 1, 2], "tp 2", [0, 0], marks=pytest.mark.campaign),
        ("fsdp 2", [0, 1], "ddp 2", [0, 1]),
    ],
)
def test_another_world_on_other_hosts_has_the_same_tensors(pools, old, old_hosts, new, new_hosts):
    expected: Whole = train(old, pools, old_hosts)[0][1]
    if new_hosts == [0, 0]:
        for path in pools.glob("host-[12]/*.pool"):  # a single directory: nothing is copied between hosts
            shutil.copy(path, pools / "host-0")
    found = train(new, pools, new_hosts, STEPS + 2)
    for began, _, recovered in found:
        assert is_equal(began, expected)
        assert (recovered.step, recovered.exact) == (STEPS, False)
    if new_hosts != [0, 0]:
        own = set(enumerate(new_hosts))
        held = places(pools)
        assert {(rank, host) for host, rank in held if host in new_hosts} == own, "old pools are gone there"
    again = train(new, pools, new_hosts, STEPS + 2)
    assert all(is_equal(began, end) for (began, _, _), (_, end, _) in zip(again, found, strict=True))
    assert is_clean(pools)


@pytest.mark.parametrize(("name", "hosts", "now"), [("ddp 2", [0, 1], [0, 2]), ("hsdp", [0, 0, 1, 1], [0, 0, 2, 2])])
def test_a_host_that_is_gone_is_replaced_by_an_empty_one(pools, name, hosts, now):
    """The ranks that are left hold the whole of each tensor."""
    expected = train(name, pools, hosts)[0][1]
    shutil.rmtree(pools / "host-1")
    for began, _, recovered in train(name, pools, now, STEPS + 1):
        assert is_equal(began, expected)
        assert not recovered.exact
    assert places(pools) == sorted((host, rank) for rank, host in enumerate(now))


def test_what_went_with_a_host_is_named(pools):
    train("fsdp 4", pools, [0, 0, 1, 1])
    shutil.rmtree(pools / "host-1")
    before = files(pools)
    for error in errors("fsdp 4", pools, [0, 0, 2, 2]):
        assert isinstance(error, RankError)
        assert "lacks the pools of ranks 2, 3" in str(error)
    after = files(pools)
    assert {name: after[name] for name in before} == before
    assert is_clean(pools)


@pytest.mark.parametrize("name", ["ddp 2", "fsdp 2"])
def test_ranks_that_changed_their_hosts_go_on_with_their_own_state(pools, name):
    ended = train(name, pools, [0, 1])
    found = train(name, pools, [1, 0])
    for (_, expected, _), (began, _, _) in zip(ended, found, strict=True):
        assert is_equal(began, expected)
    assert places(pools) == [(0, 1), (1, 0)]


def test_pools_are_copied_between_ranks_that_belong_to_other_groups_and_by_two_sessions(pools):
    """torch counts the process groups of each rank, and names groups of gloo by that."""

    def body(hosts: Hosts, upto: int) -> Callable[[int], Any]:
        def run(rank: int) -> list[int]:
            os.environ[HOST_VARIABLE] = f"host-{hosts[rank]}"
            torch.distributed.new_group([0])
            pools.mkdir(exist_ok=True)
            began = []
            for name in ("one", "other"):
                model, optimizer = build(WORLDS["fsdp 2"])
                directory = pools / f"host-{hosts[rank]}" / name
                directory.parent.mkdir(exist_ok=True)
                with lightck.attach(model, directory, optimizer=optimizer, resume=True, timeout=30) as session:
                    began.append(session.step)
                    updates(WORLDS["fsdp 2"], rank, model, optimizer, range(session.step, upto))
            return began

        return run

    assert values(run_ranks(2, body([0, 1], STEPS))) == [[0, 0], [0, 0]]
    assert values(run_ranks(2, body([1, 0], STEPS + 1))) == [[STEPS, STEPS], [STEPS, STEPS]]


def test_random_states_follow_a_rank_to_another_host(pools):
    """Each rank draws on from where it was at the checkpoint."""

    def body(hosts: Hosts) -> Callable[[int], Any]:
        def run(rank: int) -> list[float]:
            os.environ[HOST_VARIABLE] = f"host-{hosts[rank]}"
            pools.mkdir(exist_ok=True)
            model, optimizer = build(WORLDS["ddp 2"])
            torch.manual_seed(50 + rank)
            directory = pools / f"host-{hosts[rank]}"
            with lightck.attach(model, directory, optimizer=optimizer, resume=True, timeout=30) as session:
                drawn = torch.rand(3).tolist()
                updates(WORLDS["ddp 2"], rank, model, optimizer, range(session.step, session.step + 1))
            return drawn

        return run

    drawn = [values(run_ranks(2, body(hosts))) for hosts in ([0, 1], [1, 0])]
    for rank in range(2):
        torch.manual_seed(50 + rank)
        assert drawn[0][rank] == torch.rand(3).tolist()
        assert drawn[1][rank] == torch.rand(3).tolist()


def test_without_resume_nothing_is_loaded_and_nothing_copied(pools):
    train("fsdp 4", pools, [0, 0, 1, 1])
    before = files(pools)
    found = errors("fsdp 2", pools, [0, 1], resume=False)
    assert any(isinstance(error, CheckpointExistsError) for error in found)
    assert files(pools) == before
    (first, *_) = train("fsdp 2", pools, [0, 1], resume=False, overwrite=True)
    assert first[0].step == 0
    assert places(pools) == [(0, 0), (1, 1)]


@pytest.mark.parametrize("where", ["before", "while"])
def test_without_space_for_the_copies_nothing_changes(pools, monkeypatch, where):
    expected = train("fsdp 4", pools, [0, 0, 1, 1])[0][1]
    before = files(pools)
    real, written = os.pwrite, []

    def full(*args):
        if where == "before" or len(written) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(args)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(partial_copies, "CHUNK_NBYTES", 1 << 16)
        patch.setattr(partial_copies.os, "posix_fallocate" if where == "before" else "pwrite", full)
        found = errors("fsdp 2", pools, [0, 1])
    assert all(isinstance(error, NoSpaceError) or "NoSpaceError" in str(error) for error in found)
    assert any(
        "There is no space for what this host needs of the pool of another host" in str(error) for error in found
    )
    assert files(pools) == before
    assert is_clean(pools)
    assert is_equal(train("fsdp 2", pools, [0, 1])[0][0], expected)


@pytest.mark.parametrize(
    ("nth", "rank"),
    [(4, 1), *(pytest.param(*one, marks=pytest.mark.campaign) for one in ((1, 0), (1, 1), (4, 0), (12, 0), (12, 1)))],
)
def test_a_rank_that_is_killed_during_the_copies_loses_nothing(pools, monkeypatch, rank, nth):
    """The old world goes on after it, too; and the copies of its pools that lie about are replaced later."""
    train("fsdp 4", pools, [0, 0, 1, 1])
    real, n = partial_copies._CopyFile.write, [0]

    def killed(self, data, batch):
        real(self, data, batch)
        n[0] += 1
        if os.environ.get(HOST_VARIABLE) == f"host-{rank}" and n[0] == nth:
            die()

    with monkeypatch.context() as patch:
        patch.setattr(partial_copies, "CHUNK_NBYTES", 1 << 12)
        patch.setattr(partial_copies._CopyFile, "write", killed)
        ended = run_ranks(2, rank_body("fsdp 2", pools, [0, 1], STEPS), ends_others_after=0.2)
    assert any(one.is_killed for one in ended)
    longer = train("fsdp 4", pools, [0, 0, 1, 1], STEPS + 2)
    assert longer[0][0].step == STEPS
    found = train("fsdp 2", pools, [0, 1], STEPS + 3)
    assert all(is_equal(began, longer[0][1]) for began, _, _ in found)
    assert places(pools) == [(0, 0), (1, 1)]
    assert is_clean(pools)


def test_hosts_that_have_all_pools_copy_none(pools, monkeypatch):
    """The pools of all hosts were put into each directory by hand."""
    expected = train("fsdp 3", pools, [0, 0, 0])[0][1]
    shutil.copytree(pools / "host-0", pools / "host-1")
    monkeypatch.setattr(partial_copies, "_Transport", None)
    assert all(is_equal(began, expected) for began, _, _ in train("fsdp 2", pools, [0, 1]))


def test_copies_of_a_world_that_is_at_home_go(pools):
    """The change into the new world was interrupted when all hosts had all of its pools; nobody needs the copies."""
    expected = train("ddp 2", pools, [0, 1])[0][1]
    train("fsdp 2", pools, [0, 1])  # so that the pools have names with more digits
    for path in list(pools.glob("host-0/*.pool")):
        shutil.copy(path, pools / "host-1")
    for path in list(pools.glob("host-1/*.pool")):
        if not (pools / "host-0" / path.name).exists():
            shutil.copy(path, pools / "host-0")
    assert len(list(pools.rglob("*.pool"))) == 4
    for began, _, _ in train("fsdp 2", pools, [1, 0]):
        assert is_equal(began, expected)
    assert places(pools) == [(0, 1), (1, 0)]


def test_a_directory_that_the_hosts_share_is_one(pools, monkeypatch):
    """As on a network file system: each host has another device number for it."""
    expected = train("fsdp 3", pools, [0, 0, 0])[0][1]
    (pools / "host-1").symlink_to(pools / "host-0")
    monkeypatch.setattr(partial_copies, "_Transport", None)
    for n, hosts in ((STEPS + 1, [0, 1]), (STEPS + 2, [1, 0])):
        found = train("fsdp 2", pools, hosts, n)
        assert all(is_equal(began, expected) for began, _, _ in found)
        expected = found[0][1]
    assert sorted(rank for host, rank in places(pools) if host == 0) == [0, 1]
    assert not list((pools / "host-0").glob(".*"))
    assert all(is_equal(began, expected) for began, _, _ in train("ddp 3", pools, [0, 1, 0], STEPS + 2))


@pytest.mark.parametrize("name", ["fsdp 4", "ddp 4"])
def test_some_ranks_changed_their_hosts(pools, name):
    """Ranks were dealt to hosts in blocks, and are dealt in turn now."""
    expected = train(name, pools, [0, 0, 1, 1])[0][1]
    for began, _, recovered in train(name, pools, [0, 1, 0, 1], STEPS + 1):
        assert is_equal(began, expected)
        assert "on other hosts" in recovered.reason
    assert places(pools) == [(0, 0), (0, 2), (1, 1), (1, 3)]
    assert is_clean(pools)


def test_a_change_that_failed_leaves_nothing_that_is_taken_later(pools, monkeypatch):
    """Copies of pools of other hosts lay there when it failed. Then the old ranks go on, and a host goes."""
    train("ddp 2", pools, [0, 1])
    with monkeypatch.context() as patch:
        patch.setattr(other_world, "_opened", fails)
        assert len(errors("ddp 3", pools, [0, 0, 1])) == 3
    assert is_clean(pools)
    expected = train("ddp 2", pools, [0, 1], STEPS + 1)[0][1]
    shutil.rmtree(pools / "host-1")
    for began, _, _ in train("ddp 2", pools, [0, 2], STEPS + 1):
        assert is_equal(began, expected)


def fails(*args: Any) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_overwrite_discards_what_cannot_be_read(pools):
    """Pools of two trainings, and one with a damaged head."""
    train("fsdp 4", pools, [0, 0, 1, 1])
    shutil.rmtree(pools / "host-1")
    train("ddp 2", pools / "aside", [0, 1])
    shutil.move(pools / "aside/host-1", pools / "host-1")
    broken = pools / "host-0/rank-00001-of-00004.pool"
    broken.write_bytes(bytes(1 << 16))
    found = errors("ddp 3", pools, [0, 0, 1])
    assert all(isinstance(error, (PoolError, RankError)) for error in found)
    for began, _, _ in train("ddp 3", pools, [0, 0, 1], 1, resume=False, overwrite=True):
        assert began.step == 0
    shutil.rmtree(pools / "aside")
    assert places(pools) == [(0, 0), (0, 1), (1, 2)]


def test_two_histories_under_the_usual_names_are_refused(pools):
    """Each host went on alone."""
    train("ddp 3", pools, [0, 0, 1])
    for host in (0, 1):
        train("ddp 2", pools / f"alone-{host}", [0, 0])
    for host in (0, 1):
        shutil.rmtree(pools / f"host-{host}")
        shutil.copytree(pools / f"alone-{host}/host-0", pools / f"host-{host}")
        for path in (pools / f"host-{host}").glob(f"rank-0000{1 - host}-*"):
            path.unlink()
    for error in errors("ddp 2", pools, [0, 1]):
        assert isinstance(error, RankError)
        assert "belongs to another training than" in str(error)


def test_an_old_copy_of_a_pool_is_not_taken(pools):
    """Host 0 has a copy of rank 1's pool from before."""
    train("fsdp 2", pools, [0, 1], STEPS)
    shutil.copy(pools / "host-1/rank-00001-of-00002.pool", pools / "host-0")
    expected = train("fsdp 2", pools, [0, 1], STEPS + 4)[0][1]
    for began, _, _ in train("ddp 3", pools, [0, 0, 1], STEPS + 4):
        assert is_equal(began, expected)
    assert places(pools) == [(0, 0), (0, 1), (1, 2)]
