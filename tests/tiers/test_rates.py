"""A limit of the rate at which checkpoints are sent: what it is, who keeps to it, and when it ends."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from toys import pool_with, train

import lightck
from lightck.cli import main
from lightck.errors import PoolError
from lightck.pool.reader import open_pool
from lightck.tiers import drain_link, late_drain, pool_sender
from lightck.tiers.claiming import claim_tier
from lightck.tiers.drain_messages import DrainSettings, DrainState, TierSettings, receive_message, send_message
from lightck.tiers.drain_process import DrainProcess
from lightck.tiers.folder import FolderStore
from lightck.tiers.held_checkpoint import held
from lightck.tiers.names import Writer
from lightck.tiers.rates import Pacer, bytes_per_second_of
from lightck.tiers.tier_writer import TierWriter
from tiers.test_attached_tiers import attached, drains, is_ready, steps_in, training, until

SLOW = "1B/s"
"""At this rate a checkpoint would take hours."""


@pytest.mark.parametrize(
    ("rate", "found"),
    [
        ("200MB/s", 2e8),
        ("50 kB/s", 5e4),
        ("1.5GiB/s", 1.5 * (1 << 30)),
        ("7B/s", 7.0),
        (1000, 1000.0),
        (0.5, 0.5),
        *((wrong, None) for wrong in ("200MB", "200 Mb/s", "0MB/s", "-1B/s", "", "nan B/s", 0, -1, True, None)),
        *((wrong, None) for wrong in (float("inf"), float("nan"), b"1B/s", [1])),
    ],
)
def test_a_rate_is_a_number_of_bytes_per_second(rate, found):
    assert bytes_per_second_of(rate) == found


class Clock:
    """Time passes only while somebody waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_pieces_of_any_size_pass_at_the_rate_and_the_first_one_at_once():
    clock = Clock()
    pacer = Pacer(100.0, clock, clock.wait)
    passed = []
    for nbytes in (500, 100, 0, 300, 1):
        pacer.spend(nbytes)
        passed.append(clock.now - 1000.0)
    assert passed == pytest.approx([0.0, 5.0, 6.0, 6.0, 9.0])
    clock.now += 1000.0
    pacer.spend(700)
    pacer.spend(1)
    assert clock.now == pytest.approx(2009.0 + 7.0), "what was not used before is no credit, but for one piece"


def test_without_a_limit_and_once_it_is_lifted_nothing_waits():
    clock = Clock()
    Pacer(None, clock, clock.wait).spend(10**12)
    waited = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        clock.now += seconds
        if len(waited) == 3:
            pacer.lift()

    pacer = Pacer(1.0, clock, wait)
    pacer.spend(10**9)
    pacer.spend(10**9)
    pacer.spend(10**9)
    assert len(waited) == 3, "the wait is cut into short ones, so that it ends soon"


def test_every_byte_that_is_put_is_paced_before_it_is_put(tmp_path):
    pool_with(tmp_path / "run.pool", steps=2)
    store = FolderStore(str(tmp_path / "tier"))
    claim = claim_tier(store, "a" * 32, "test")
    events: list[tuple[str, int]] = []
    put = store.put

    def recorded(name: str, data: bytes | memoryview) -> None:
        events.append(("put", len(data)))
        put(name, data)

    store.put = recorded  # type: ignore[method-assign]
    writer = TierWriter(store, Writer(claim, 0, 1), "test", pace=lambda nbytes: events.append(("pace", nbytes)))
    with closing(open_pool(str(tmp_path / "run.pool"))) as reader, held(reader) as stored:
        assert stored is not None
        sent = writer.send(stored)
    paced, put_sizes = events[::2], events[1::2]
    assert [("put", nbytes) for _, nbytes in paced] == put_sizes
    assert sum(nbytes for _, nbytes in paced) == sent.nbytes


# -- the drain of a training


def process_and_training() -> tuple[DrainProcess, socket.socket]:
    """A drain in this process, and the training's end of the connection."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    tier = TierSettings("/nowhere", None, None, None, None, None, has_parent=False, bytes_per_second=5.0)
    settings = DrainSettings("/nowhere.pool", "000001-9f3a61c2", "test", None, (tier,), 1.0)
    return DrainProcess(own, DrainSettings.unpacked(settings.packed()), os.getppid()), other


def rate_of(process: DrainProcess) -> float | None:
    return process._outlets[0].pacer._rate


@pytest.mark.parametrize("message", [{"newest": True}, {"persists": True}, None], ids=str)
def test_the_limit_ends_when_time_is_short(message):
    process, other = process_and_training()
    process._read()
    assert rate_of(process) == 5.0
    if message is None:  # the training is gone
        other.close()
    else:
        send_message(other, message)
    process._read()
    assert rate_of(process) is None


def test_the_limit_ends_by_a_signal_to_the_drain_and_not_by_close():
    process, other = process_and_training()
    for message in ({"close": True}, {"signal_grace": 30.0}, {"metrics": {"loss": 1.0}, "step": 3}):
        send_message(other, message)
    process._read()
    assert rate_of(process) == 5.0
    process.terminated(signal.SIGTERM)
    assert rate_of(process) is None


def test_a_drain_that_waits_for_its_rate_listens_and_says_that_it_goes_on():
    process, other = process_and_training()
    (outlet,) = process._outlets
    process._pace(outlet, 10**6)
    send_message(other, {"newest": True})
    process._pace(outlet, 10**6)
    assert rate_of(process) is None
    found = receive_message(other)
    assert found
    assert DrainState.unpacked(found).progress > 0


def committed_step(pool: Path) -> int:
    """Read no checkpoint: while the drain holds one for long, a fast training overwrites what others read."""
    with suppress(PoolError), closing(open_pool(str(pool))) as reader:
        return max((each.step for each in reader.commit_log().records.values()), default=0)
    return 0


@pytest.mark.long
def test_a_killed_training_does_not_leave_a_drain_that_takes_hours(tmp_path):
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    with training(pool, tier, 10**6, "0.05s", rate=SLOW) as process:
        assert process.stdout.readline(), process.stderr.read()
        until(lambda: committed_step(pool) > 20)
        assert steps_in(tier) == [], "the option has reached the drain"
        process.kill()
        process.wait()
        until(lambda: not drains())
    assert lightck.recover(tier).step == lightck.recover(pool).step


@pytest.mark.parametrize("waits", [True, False], ids=["the drain sends", "the drain begins"])
def test_a_signal_counts_more_than_the_limit(tmp_path, waits):
    model, optimizer, session = attached(tmp_path / "run.pool", [lightck.Tier(tmp_path / "tier", every=1, rate=SLOW)])
    with session, lightck.preemption(session, grace="60s"):
        if waits:
            until(is_ready(session))
        for step in range(4):
            train(model, optimizer, 1, start=step)
            session.end_step()
            session.flush()
        assert steps_in(tmp_path / "tier") == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert session.should_stop
        assert steps_in(tmp_path / "tier")[-1] == session.step == 4


@pytest.mark.long
def test_close_keeps_to_the_limit_and_waits_as_long_as_the_drain_goes_on(tmp_path, monkeypatch):
    """It gives up only where nothing goes on."""
    monkeypatch.setattr(drain_link, "FAILING_SECONDS_MAX", 3.0)
    tier = lightck.Tier(tmp_path / "tier", every="1h", rate="3kB/s")
    model, optimizer, session = attached(tmp_path / "run.pool", [tier])
    with session:
        train(model, optimizer, 2)
    assert steps_in(tmp_path / "tier") == [2]


# -- the commands


@pytest.mark.parametrize("command", ["copy", "drain"])
def test_the_option_of_a_command_reaches_what_sends(tmp_path, monkeypatch, command):
    rates: list[float | None] = []

    class Recorded(Pacer):
        def __init__(self, bytes_per_second: float | None, *more: Callable[..., Any]) -> None:
            rates.append(bytes_per_second)
            super().__init__(bytes_per_second, *more)

    monkeypatch.setattr(pool_sender, "Pacer", Recorded)
    monkeypatch.setattr(late_drain, "Pacer", Recorded)
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    model, optimizer, session = attached(pool, [lightck.Tier(tmp_path / "tier", every="1h")])
    with session:
        train(model, optimizer, 2)
    for options in ([], ["--rate", "200MB/s"]):
        done = CliRunner().invoke(main, [command, *options, str(pool), str(tier)])
        assert done.exit_code == 0, done.output
    assert rates == [None, 2e8]
    done = CliRunner().invoke(main, [command, "--rate", "200", str(pool), str(tier)])
    assert done.exit_code == 2
    assert "Write 200MB/s, 50kB/s or 1.5GiB/s" in done.stderr


def test_what_is_fetched_from_a_tier_has_no_limit(tmp_path: Path):
    pool_with(tmp_path / "run.pool", steps=2)
    assert CliRunner().invoke(main, ["copy", str(tmp_path / "run.pool"), str(tmp_path / "tier")]).exit_code == 0
    words = ["copy", "--rate", "1MB/s", str(tmp_path / "tier"), str(tmp_path / "new.pool")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2
    assert "limits what is sent to a tier" in done.stderr
    assert not (tmp_path / "new.pool").exists()
