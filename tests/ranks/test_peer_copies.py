"""``replicas=2``: each rank's pool has a copy on another host, and a training goes on that has lost a host.

``LIGHTCK_TEST_HOST`` and a folder stand for a host.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from click.testing import CliRunner
from ranked import Ended, die, run_ranks, values

import lightck
from lightck.cli import main
from lightck.errors import RankError, UnsupportedError
from lightck.pool.format.structures import DamagedError
from lightck.pool.reader import open_pool
from lightck.ranks import copy_cadence, copy_file
from lightck.ranks.copy_cadence import UNMEASURED_SECONDS_PER_BYTE, FirstCopy, longest
from lightck.ranks.copy_file import PEER_COPIES, CopyFile, copies_in
from lightck.ranks.copy_sender import CopySender
from lightck.ranks.link import Link, LinkListener
from lightck.ranks.rule import CheckpointId, Knowledge
from lightck.session import peer_copies
from lightck.session.group import HOST_VARIABLE
from lightck.session.peer_copies import keeper_of
from lightck.session.pools_of_hosts import Hosts as Directories

from .worlds import WORLDS, Whole, build, is_equal, update, whole_of

Hosts = Sequence[int]
"""Rank -> number of its host."""


class Run(NamedTuple):
    """What one rank returns."""

    began: Whole
    """The whole tensors after attach."""
    end: Whole
    recovered: Any
    copied: int | None
    messages: list[str]
    """The warnings of lightck."""


EVERY_2 = lightck.Replicas(2, every=2)


def rank_body(
    name: str,
    pools: Path,
    hosts: Hosts,
    upto: int,
    *,
    before: Callable[[int], Any] = lambda rank: None,
    on_step: Callable[[int, Any], Any] = lambda rank, session: None,
    **options: Any,
) -> Callable[[int], Any]:
    """Attach, and train up to a step."""

    def body(rank: int) -> Any:
        os.environ[HOST_VARIABLE] = f"host-{hosts[rank]}"
        pools.mkdir(exist_ok=True)
        messages: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("lightck").addHandler(handler)
        before(rank)
        model, optimizer = build(WORLDS[name], seed=0)
        torch.manual_seed(50 + rank)
        keywords = {"resume": True, "timeout": 30, "replicas": EVERY_2} | options
        with lightck.attach(model, pools / f"host-{hosts[rank]}", optimizer=optimizer, **keywords) as session:
            began = whole_of(session.step, model, optimizer)
            called = WORLDS[name].wrap(model)
            for step in range(session.step, upto):
                update(WORLDS[name], rank, called, optimizer, step)
                on_step(rank, session)
            end = whole_of(session.step, model, optimizer)
            torch.distributed.barrier()  # a session that is closed receives no copies
            return Run(began, end, session.recovered, session.copied, messages)

    return body


def train(name: str, pools: Path, hosts: Hosts, upto: int, **options: Any) -> list[Any]:
    return values(run_ranks(len(hosts), rank_body(name, pools, hosts, upto, **options)))


def errors(name: str, pools: Path, hosts: Hosts, upto: int = 4, **options: Any) -> list[BaseException]:
    found: list[Ended] = run_ranks(len(hosts), rank_body(name, pools, hosts, upto, **options))
    assert all(one.error is not None for one in found), [one.value for one in found]
    return [one.error for one in found if one.error is not None]


def waits_for(step: int) -> Callable[[int, Any], None]:
    """Wait after each update beyond this step until this rank's copy holds it. (The checkpoint of a step is committed
    during the next one.)"""

    def wait(rank: int, session: Any) -> None:
        sender = session._membership.commit_rule.sender
        end = time.monotonic() + 20
        while session.step > step and max(sender.in_copy).step < step and time.monotonic() < end:
            time.sleep(0.002)

    return wait


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Whole]:
    """The whole tensors of a world after a step, of a training that never lost anything and had no copies."""
    known: dict[tuple[str, int], Whole] = {}

    def end_of(name: str, step: int) -> Whole:
        if (name, step) not in known:
            pools = tmp_path_factory.mktemp("whole") / "pools"
            known[name, step] = train(name, pools, [0] * WORLDS[name].n_ranks, step, replicas=1)[0][1]
        return known[name, step]

    return end_of


def pools_of(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.pool"))


# -- a host is lost ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        ("fsdp 3", (0, 1, 2)),
        ("ddp 3", (0, 0, 1)),
        pytest.param("fsdp 2", (0, 1), marks=pytest.mark.campaign),
        pytest.param("fsdp 3", (0, 1, 1), marks=pytest.mark.campaign),
        pytest.param("hsdp", (0, 0, 1, 1), marks=pytest.mark.campaign),
        pytest.param("tp x fsdp", (0, 1, 0, 1), marks=pytest.mark.campaign),
    ],
)
def test_training_goes_on_bit_for_bit_without_any_one_host(tmp_path: Path, ends: Any, name: str, hosts: Hosts) -> None:
    train(name, tmp_path / "pools", hosts, 7, on_step=waits_for(6))
    for lost in sorted(set(hosts)):
        pools = tmp_path / f"lost-{lost}"
        shutil.copytree(tmp_path / "pools", pools)
        shutil.rmtree(pools / f"host-{lost}")
        found = train(name, pools, hosts, 9)
        for run in found:
            assert run.recovered.step == 6
            assert is_equal(run.began, ends(name, 6))
            assert is_equal(run.end, ends(name, 9))
        warnings = " ".join(found[0].messages)
        ranks = [str(rank) for rank, host in enumerate(hosts) if host == lost]
        assert f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" in warnings
        assert "go back to step 6, the newest one that the peer copies on host" in warnings


def test_host_is_lost_before_any_update(tmp_path: Path, ends: Any) -> None:
    train("fsdp 2", tmp_path / "pools", (0, 1), 0)
    shutil.rmtree(tmp_path / "pools" / "host-1")
    _, end, recovered, *_ = train("fsdp 2", tmp_path / "pools", (0, 1), 3)[0]
    assert recovered is None or recovered.step == 0
    assert is_equal(end, ends("fsdp 2", 3))


def test_host_is_lost_while_its_newest_copy_is_that_of_the_beginning(tmp_path: Path, ends: Any) -> None:
    train("fsdp 2", tmp_path / "pools", (0, 1), 3, replicas=lightck.Replicas(2, every=1000))
    shutil.rmtree(tmp_path / "pools" / "host-0")
    began, end, recovered, *_ = train("fsdp 2", tmp_path / "pools", (0, 1), 3)[0]
    assert recovered.step == 0
    assert is_equal(began, ends("fsdp 2", 0))
    assert is_equal(end, ends("fsdp 2", 3))


def test_hosts_are_lost_one_after_the_other(tmp_path: Path, ends: Any) -> None:
    pools, step = tmp_path / "pools", 4
    train("fsdp 3", pools, (0, 1, 2), 5, on_step=waits_for(4))
    for lost in (1, 2, 0, 0):
        shutil.rmtree(pools / f"host-{lost}")
        began, _, recovered, *_ = train("fsdp 3", pools, (0, 1, 2), step + 3, on_step=waits_for(step + 2))[0]
        assert recovered.step == step
        assert is_equal(began, ends("fsdp 3", step))
        step += 2


def test_host_takes_over_the_ranks_of_a_lost_one(tmp_path: Path, ends: Any) -> None:
    """Two hosts become one, with as many ranks, and then with fewer."""
    train("fsdp 2", tmp_path / "pools", (0, 1), 5, on_step=waits_for(4))
    shutil.rmtree(tmp_path / "pools" / "host-0")
    shutil.copytree(tmp_path / "pools", tmp_path / "again")
    for name, pools in (("fsdp 2", tmp_path / "pools"), ("fsdp 3", tmp_path / "again")):
        began, _, recovered, *_ = train(name, pools, [1] * WORLDS[name].n_ranks, 6, replicas=1)[0]
        assert recovered.step == 4
        assert is_equal(began, ends("fsdp 2", 4))
        assert not (pools / "host-1" / PEER_COPIES).exists()
        assert len(pools_of(pools / "host-1")) == WORLDS[name].n_ranks


def test_one_lost_pool_is_replaced_by_its_copy(tmp_path: Path, ends: Any) -> None:
    train("fsdp 3", tmp_path / "pools", (0, 0, 1), 5, on_step=waits_for(4))
    (tmp_path / "pools" / "host-0" / "rank-00001-of-00003.pool").unlink()
    began, end, recovered, *_ = train("fsdp 3", tmp_path / "pools", (0, 0, 1), 6)[0]
    assert recovered.step == 4
    assert is_equal(began, ends("fsdp 3", 4))
    assert is_equal(end, ends("fsdp 3", 6))


def test_copy_of_a_damaged_block_is_not_used(tmp_path: Path, ends: Any) -> None:
    """The older checkpoint in the copy is: it was kept while the newer one was made."""
    pools = tmp_path / "pools"
    train("fsdp 2", pools, (0, 1), 5, on_step=waits_for(4))
    shutil.rmtree(pools / "host-0")
    (copy,) = copies_in(pools / "host-1")
    with closing(open_pool(copy)) as reader:
        stored = copy_file.checkpoint_in(reader, max(ids_in(copy)))
        assert stored is not None
        entry = stored.entries["model/first.weight"]
        at = stored._slot_offset + entry.offset
    damage(Path(copy), at)
    found = errors("fsdp 2", pools, (0, 1)) if len(ids_in(copy)) == 1 else train("fsdp 2", pools, (0, 1), 5)
    if isinstance(found[0], BaseException):
        assert isinstance(found[0], RankError)
        assert "can be restored on all ranks" in str(found[0])
        assert re.search("block( 0)? of 'model/first.weight' does not match its checksum", str(found[0]))
    else:
        assert found[0][2].step == 2
        assert is_equal(found[0][0], ends("fsdp 2", 2))


def ids_in(path: str) -> frozenset[Any]:
    with closing(CopyFile(path)) as file:
        return file.contents()


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# -- what lies where ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of_rank", [(0, 1), (0, 0, 1), (0, 1, 1, 1), (0, 1, 2, 0, 1), (1, 0), (0, 0, 1, 1, 2, 2)])
def test_copies_lie_on_another_host_and_each_host_keeps_those_of_one(of_rank: Hosts) -> None:
    hosts = Directories.of([str(host) for host in of_rank])
    keepers = {rank: keeper_of(rank, hosts) for rank in range(len(of_rank))}
    assert all(of_rank[rank] != of_rank[keeper] for rank, keeper in keepers.items())
    for host in set(of_rank):
        assert len({of_rank[keepers[rank]] for rank in range(len(of_rank)) if of_rank[rank] == host}) == 1


def test_copy_takes_the_space_of_what_it_holds(tmp_path: Path) -> None:
    train("fsdp 2", tmp_path / "pools", (0, 1), 11, on_step=waits_for(10))
    for host in (0, 1):
        (pool,) = (tmp_path / "pools" / f"host-{host}").glob("*.pool")
        (copy,) = copies_in(tmp_path / "pools" / f"host-{1 - host}")
        with closing(open_pool(str(pool))) as reader:
            n_slots = len(reader.superblock.slots)
        assert n_slots == 4
        assert len(ids_in(copy)) <= 2
        assert os.stat(copy).st_size == pool.stat().st_size
        assert os.stat(copy).st_blocks < pool.stat().st_blocks * 2 / n_slots


def test_one_host_alone_has_the_whole_training(tmp_path: Path, ends: Any) -> None:
    train("fsdp 3", tmp_path / "pools", (0, 1, 1), 5, on_step=waits_for(4))
    for host in (0, 1):
        checkpoint = lightck.recover(tmp_path / "pools" / f"host-{host}")
        assert checkpoint.step == 4
        expected = ends("fsdp 3", 4).model
        assert all(torch.equal(checkpoint.model[name], value) for name, value in expected.items())


def test_commands_read_the_directory_of_one_host(tmp_path: Path) -> None:
    train("fsdp 3", tmp_path / "pools", (0, 1, 1), 7, on_step=waits_for(6))
    directory = str(tmp_path / "pools" / "host-1")
    shown = CliRunner().invoke(main, ["inspect", directory])
    assert shown.exit_code == 0, shown.output
    assert "2 pools of ranks, and 1 peer copy in the place of pools on other hosts" in shown.output
    assert re.search(r"0 of 3 +step 6\*.* peer-copies/rank-00000-of-00003-", shown.output)
    assert "step 6 is the newest that all ranks have" in shown.output
    assert CliRunner().invoke(main, ["verify", directory]).exit_code == 0
    facts = json.loads(CliRunner().invoke(main, ["verify", "--json", directory]).output)
    assert [(one["group"]["rank"], one["is_copy"]) for one in facts["pools"]] == [(1, False), (2, False), (0, True)]
    assert facts["recoverable_step"] == 6


def test_copies_of_earlier_starts_go(tmp_path: Path) -> None:
    pools = tmp_path / "pools"
    for upto in (3, 5):
        train("fsdp 2", pools, (0, 1), upto)
        assert [len(copies_in(pools / f"host-{host}")) for host in (0, 1)] == [1, 1]
    train("fsdp 2", pools, (0, 1), 6, replicas=1)
    assert not any((pools / f"host-{host}" / PEER_COPIES).exists() for host in (0, 1))


def test_kernel_sends_a_file_as_far_as_it_can(tmp_path: Path) -> None:
    """The connection has a time limit, and takes fewer bytes than the file has until they are received. The file ends
    before the requested bytes do. A pipe cannot be sent like a file."""
    data = os.urandom(8 << 20)
    (tmp_path / "file").write_bytes(data)
    ends = socket.socketpair()
    out, back = map(Link, ends)
    out.wait_at_most(0.1)
    with (tmp_path / "file").open("rb") as file, ThreadPoolExecutor(1) as executor:
        assert out.send_file(file.fileno(), 0, len(data)) < len(data), "the time limit"
        while _has_bytes(ends[1]):
            ends[1].recv(1 << 20)
        out.wait_at_most(60)
        received = bytearray(len(data) - 5)
        done = executor.submit(back.receive, memoryview(received))
        assert out.send_file(file.fileno(), 5, len(data)) == len(data) - 5
        done.result()
        assert received == data[5:]
        read, write = os.pipe()
        assert out.send_file(read, 0, 100) == 0
        os.close(read)
        os.close(write)
        back.close()
        assert out.send_file(file.fileno(), 0, len(data)) == 0, "the connection has ended"
    out.close()


def _has_bytes(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0)[0])


# -- when copies are made ----------------------------------------------------------------------------------------------


def test_session_says_what_is_copied(tmp_path: Path) -> None:
    for _, _, _, copied, _ in train("fsdp 2", tmp_path / "pools", (0, 1), 9, on_step=waits_for(4)):
        assert copied in (4, 6, 8)
    for _, _, _, copied, _ in train("fsdp 2", tmp_path / "other", (0, 1), 2, replicas=1):
        assert copied is None


def test_rank_0_chooses_how_often(tmp_path: Path) -> None:
    """A copy is said to take 0.01 s, and a step takes at least 0.02 s: so at most 25 steps are between two copies."""

    def before(rank: int) -> None:
        peer_copies.longest = lambda _: 0.01  # type: ignore

    def on_step(rank: int, session: Any) -> None:
        time.sleep(0.02)
        found.append(session._membership.commit_rule.knowledge.copy_every)

    found: list[int] = []

    def body(rank: int) -> Any:
        inner = rank_body("fsdp 2", tmp_path / "pools", (0, 1), 60, before=before, on_step=on_step, replicas=2)
        return inner(rank).copied, list(found)

    (copied, every), (other_copied, other_every) = values(run_ranks(2, body))
    assert every[0] == other_every[0] == 0
    assert 2 <= every[-1] == other_every[-1] <= 25
    assert copied > 0
    assert copied % every[-1] == other_copied % every[-1] == 0


@pytest.mark.parametrize(
    ("copy_seconds", "step_seconds", "interval", "every"),
    [(1.0, 0.1, 1, 500), (0.001, 1.0, 1, 2), (1.0, 0.1, 30, 510), (0.0, 1.0, 5, 10), (7.0, 0.2, 1, 1750)],
)
def test_copies_would_take_a_fiftieth_of_the_time(
    copy_seconds: float, step_seconds: float, interval: int, every: int
) -> None:
    assert copy_cadence.steps_between_copies(copy_seconds, step_seconds, interval) == every


def test_a_checkpoint_with_optimizer_state_takes_longer_than_the_first_one() -> None:
    """The first checkpoint of a training has no optimizer state yet, and takes a third of the time of the others."""
    assert longest([FirstCopy(1.0, 1000, 3000), FirstCopy(1.5, 3000, 3000)]) == 3.0


def test_a_rank_with_few_bytes_does_not_slow_the_others_down() -> None:
    """Its copy takes a moment, whatever it has: it says nothing about the time for one byte."""
    assert longest([FirstCopy(0.2, 64_000_000, 64_000_000), FirstCopy(0.01, 100, 300)]) == 0.2


def test_the_rank_with_the_most_bytes_counts_and_not_rank_0() -> None:
    assert longest([FirstCopy(0.1, 1000, 1000), FirstCopy(0.4, 4000, 4000)]) == 0.4


def test_speed_that_a_rank_has_not_measured_is_assumed() -> None:
    assert longest([FirstCopy(0.1, 0, 10**9), FirstCopy(0.2, 1000, 1000)]) == 10**9 * UNMEASURED_SECONDS_PER_BYTE


@pytest.mark.parametrize(("nbytes", "every"), [(1000, 400), (3000, 1200)])
def test_copy_takes_longer_if_tensors_have_grown(nbytes: int, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(copy_cadence.time, "monotonic", lambda: 0.25 * next(clock))
    cadence = copy_cadence.CopyCadence(2.0, 1000, interval=1)
    assert [cadence.committed(step, nbytes) for step in range(1, 12)] == [None] * 10 + [every]


def test_late_copies_make_ranks_wait_and_lose_nothing(tmp_path: Path, ends: Any) -> None:
    """Each copy takes as long as many steps, and is due at every second one."""

    def before(rank: int) -> None:
        original = CopySender._send

        def slow(self: Any, *args: Any, **keywords: Any) -> None:
            time.sleep(0.1)
            original(self, *args, **keywords)

        CopySender._send = slow  # type: ignore[method-assign]

    found = train("fsdp 2", tmp_path / "pools", (0, 1), 12, before=before)
    assert is_equal(found[0][1], ends("fsdp 2", 12))
    assert all(copied >= 6 for _, _, _, copied, _ in found)
    shutil.rmtree(tmp_path / "pools" / "host-1")
    began, _, recovered, *_ = train("fsdp 2", tmp_path / "pools", (0, 1), 12)[0]
    assert recovered.step >= 6
    assert is_equal(began, ends("fsdp 2", recovered.step))


# -- what fails --------------------------------------------------------------------------------------------------------


def test_copy_that_cannot_be_written_is_an_error_at_the_next_checkpoint(tmp_path: Path) -> None:
    def before(rank: int) -> None:
        def full(self: Any, data: Any, at: int) -> None:
            n_writes[0] += 1
            if rank == 1 and n_writes[0] > 3:
                raise OSError(28, "No space left on device")
            original(self, data, at)

        n_writes, original = [0], CopyFile.write
        CopyFile.write = full  # type: ignore[method-assign]

    def on_step(rank: int, session: Any) -> None:
        time.sleep(0.05)

    found = run_ranks(
        2,
        rank_body("ddp 2", tmp_path / "pools", (0, 1), 40, before=before, on_step=on_step, timeout=3),
        ends_others_after=0.0,
    )
    assert isinstance(found[0].error, RankError)
    assert "No space left on device" in str(found[0].error)
    assert "The copy of this rank's pool on rank 1 (host host-1) cannot be kept" in str(found[0].error)


def test_copy_that_does_not_verify_is_not_committed(tmp_path: Path) -> None:
    train("fsdp 2", tmp_path / "pools", (0, 1), 3)
    (pool,) = (tmp_path / "pools" / "host-0").glob("*.pool")
    with closing(open_pool(str(pool))) as reader:
        stored = next(iter(reader.checkpoints()))
        name, runs, record = copy_file.id_of(stored), copy_file.runs_of(stored), stored.record
        path = tmp_path / "copy.pool"
        with closing(CopyFile.create(str(path), reader.superblock.pack(), reader.table)) as file:
            at = stored._slot_offset + stored.entries["model/first.weight"].offset
            for spoils in (True, False):
                file.begin(record.slot, runs)
                for low, high in runs:
                    data = bytearray(reader.read(low, high - low))
                    if spoils and low <= at < high:
                        data[at - low] ^= 1
                    file.write(data, low)
                if spoils:
                    with pytest.raises(DamagedError, match="does not match its checksum"):
                        file.commit(name, record)
                    assert file.contents() == frozenset()
                else:
                    file.commit(name, record)
                    assert file.contents() == {name}
                    assert file.has(name, record)


def test_rank_that_is_killed_while_it_receives_leaves_the_copy_of_before(tmp_path: Path, ends: Any) -> None:
    def before(rank: int) -> None:
        def dies(self: Any, data: Any, at: int) -> None:
            n_writes[0] += 1
            if n_writes[0] == 25:
                die()
            original(self, data, at)

        n_writes, original = [0], CopyFile.write
        if rank == 1:
            CopyFile.write = dies  # type: ignore[method-assign]

    run_ranks(2, rank_body("fsdp 2", tmp_path / "pools", (0, 1), 60, before=before))
    shutil.rmtree(tmp_path / "pools" / "host-0")
    began, _, recovered, *_ = train("fsdp 2", tmp_path / "pools", (0, 1), 0)[0]
    assert is_equal(began, ends("fsdp 2", recovered.step))


def test_ranks_of_one_host_have_no_place_for_copies(tmp_path: Path) -> None:
    for error in errors("fsdp 2", tmp_path / "pools", (0, 0)):
        assert "replicas=2 keeps a copy of each pool on another host" in str(error)


def test_directory_that_all_hosts_share_is_no_place_for_copies(tmp_path: Path) -> None:
    (tmp_path / "pools").mkdir()
    (tmp_path / "shared").mkdir()
    for host in (0, 1):
        (tmp_path / "pools" / f"host-{host}").symlink_to(tmp_path / "shared")
    for error in errors("fsdp 2", tmp_path / "pools", (0, 1)):
        assert "share" in str(error)


def test_single_process_has_no_copies(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match="this process is saved alone"):
        lightck.attach(model, tmp_path / "pool", optimizer=optimizer, replicas=2)
    assert not (tmp_path / "pool").exists()


def test_wrong_values_are_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    for wrong, kind in ((3, ValueError), (0, ValueError), ("2", TypeError), (True, TypeError), (2.0, TypeError)):
        with pytest.raises(kind, match="replicas"):
            lightck.attach(model, tmp_path / "pool", replicas=wrong)
    for every in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="every="):
            lightck.Replicas(2, every=every)
    for error in errors("fsdp 2", tmp_path / "pools", (0, 1), interval=3):
        assert "no multiple of interval=3" in str(error)
    for error in errors("fsdp 2", tmp_path / "pools", (0, 1), slots=3):
        assert "at least 4 slots" in str(error)


def test_ranks_with_different_replicas_are_refused(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        return rank_body("fsdp 2", tmp_path / "pools", (0, 1), 2, replicas=1 + rank)(rank)

    for one in run_ranks(2, body):
        assert "replicas=" in str(one.error)


def test_pool_with_three_slots_gets_a_fourth(tmp_path: Path, ends: Any) -> None:
    pools = tmp_path / "pools"
    train("fsdp 2", pools, (0, 1), 2, replicas=1)
    train("fsdp 2", pools, (0, 1), 7, on_step=waits_for(6))
    for host in (0, 1):
        with closing(open_pool(str(next((pools / f"host-{host}").glob("*.pool"))))) as reader:
            assert len(reader.superblock.slots) == 4
        assert len(copies_in(pools / f"host-{host}")) == 1, "the copy of the old file is gone"
    shutil.rmtree(pools / "host-0")
    began, _, recovered, *_ = train("fsdp 2", pools, (0, 1), 7)[0]
    assert recovered.step == 6
    assert is_equal(began, ends("fsdp 2", 6))


# -- checkpoints with old bytes ----------------------------------------------------------------------------------------


class Frozen(torch.nn.Module):
    """A layer, and a frozen parameter that is so large that unannounced writes to it are found late."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.frozen = torch.nn.Parameter(torch.zeros(8 << 20), requires_grad=False)


def test_copy_is_emptied_if_its_checkpoints_may_hold_old_bytes(tmp_path: Path) -> None:
    """numpy writes to a tensor without moving its version counter. When lightck finds it, checkpoints in the pool are
    struck; the copies of older ones must not come back after the loss of the host."""

    def body(rank: int) -> Any:
        os.environ[HOST_VARIABLE] = f"host-{rank}"
        (tmp_path / "pools").mkdir(exist_ok=True)
        torch.manual_seed(0)
        model = Frozen()
        optimizer = torch.optim.AdamW(model.layer.parameters())
        replicas = lightck.Replicas(2, every=4)
        session = lightck.attach(model, tmp_path / "pools" / f"host-{rank}", optimizer=optimizer, replicas=replicas)
        sender = session._membership.commit_rule.sender
        emptied = []
        original = CopySender.struck

        def struck(self: Any) -> None:
            original(self)
            emptied.append((session.step, sender.in_copy))

        CopySender.struck = struck  # type: ignore[method-assign]
        for step in range(60):
            model.layer(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0 and step == 3:
                model.frozen.detach().numpy()[-1] = 5.0
            found = torch.tensor([len(emptied)])
            torch.distributed.all_reduce(found)
            if found.item():
                break
        torch.distributed.barrier()
        session.abandon()
        return emptied

    first, second = values(run_ranks(2, body))
    assert len(first) == 1, "the write was found"
    assert first[0][1] == frozenset()
    assert second == []
    (copy,) = copies_in(tmp_path / "pools" / "host-1")
    assert ids_in(copy) == frozenset()


def test_copy_that_could_not_be_emptied_is_not_called_empty(caplog: pytest.LogCaptureFixture) -> None:
    """The other host is lost. Then lightck finds that checkpoints in the copy there may hold old bytes."""
    link, other = socket.socketpair()
    sender = CopySender(Link(link), "unused.pool", "rank 1 (host b)", timeout=60)
    sender.in_copy = frozenset({CheckpointId(1, 4)})
    sender.start(frozenset(), Knowledge, lambda _: None)
    other.close()
    sender.struck()
    sender.close()
    (message,) = [record.getMessage() for record in caplog.records if "peer copy" in record.getMessage()]
    assert "on rank 1 (host b) may hold old bytes of a tensor, and could not be emptied" in message
    assert "Start all ranks again" in message


def test_copy_without_a_common_checkpoint_does_not_stand_in_the_way(tmp_path: Path, ends: Any) -> None:
    """Each host holds the whole model. A start with copies is killed before the first copy is complete, and one host is
    lost."""
    train("ddp 2", tmp_path / "pools", (0, 1), 4, replicas=1)

    def before(rank: int) -> None:
        CopyFile.commit = lambda *_: die()  # type: ignore[method-assign]

    run_ranks(2, rank_body("ddp 2", tmp_path / "pools", (0, 1), 6, before=before), ends_others_after=0.2)
    shutil.rmtree(tmp_path / "pools" / "host-0")
    began, _, recovered, *_ = train("ddp 2", tmp_path / "pools", (0, 1), 4)[0]
    assert recovered.step == 4
    assert is_equal(began, ends("ddp 2", 4))
    assert "the pool of rank 0 is missing" in recovered.reason


def test_copy_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    train("fsdp 2", tmp_path / "pools", (0, 1), 3)
    shutil.rmtree(tmp_path / "pools" / "host-0")
    (copy,) = copies_in(tmp_path / "pools" / "host-1")
    os.truncate(copy, os.stat(copy).st_size - 4096)
    messages: list[str] = []

    def body(rank: int) -> Any:
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("lightck").addHandler(handler)
        try:
            rank_body("fsdp 2", tmp_path / "pools", (0, 1), 3)(rank)
        except RankError as err:
            return str(err), messages
        return "", messages

    (error, _), (_, said) = values(run_ranks(2, body))
    assert "lacks the pool of rank 0" in error
    assert any(copy in one and "cannot be read, and is not used" in one for one in said)


def test_connections_of_others_do_not_stop_attach(tmp_path: Path) -> None:
    """Two connections that send nothing, as a scanner makes them."""

    def before(rank: int) -> None:
        original = LinkListener.__init__

        def listens(self: Any) -> None:
            original(self)
            held.extend(socket.create_connection(("127.0.0.1", self.port)) for _ in range(2))
            held[-1].sendall(b"GET / HTTP/1.0\r\n\r\n")

        held: list[socket.socket] = []
        LinkListener.__init__ = listens  # type: ignore[method-assign]

    assert train("fsdp 2", tmp_path / "pools", (0, 1), 2, before=before)[0].copied is not None
