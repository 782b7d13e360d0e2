"""``lightck watch``: what it shows of pools that are trained, killed, moved and replaced, in processes of their own."""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from calls import PROGRAM, assert_harmless, call, call_json, environment
from ranked import run_ranks
from torch.nn.parallel import DistributedDataParallel
from toys import adam, net, pool_with, train

import lightck
from lightck.cli.base import FAILED, OK
from lightck.pool.reader import open_pool

Facts = dict[str, Any]
SECONDS_MAX = 60.0

TRAIN = """
import os, sys, time, torch, lightck
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
session = lightck.attach(model, sys.argv[1], optimizer=optimizer, slots=3, resume=True)
print("ready", flush=True)
while not os.path.exists(sys.argv[2]):
    optimizer.zero_grad()
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    time.sleep(0.005)  # the step time of a fast training
print(session.stats().holds_honored + session.stats().holds_overrun, flush=True)
session.close()
"""

GROUP = """
import os, sys, time, torch, lightck
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters())
session = lightck.attach(model, sys.argv[1], optimizer=optimizer)
stop = torch.zeros(1)
while not stop.item():
    optimizer.zero_grad()
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    stop[0] = os.path.exists(sys.argv[2])
    dist.broadcast(stop, 0)
    time.sleep(0.005)
session.close()
dist.destroy_process_group()
"""


class Watch:
    """``lightck watch --json`` as a process, and the lines that it has printed."""

    def __init__(self, path: Path, *options: str) -> None:
        words = [*PROGRAM, "watch", str(path), "--json", "--interval", "0.1", *options]
        self._process = subprocess.Popen(
            words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[Facts] = []
        self._printed: queue.Queue[str] = queue.Queue()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._printed.put(line)
        self._printed.put("")

    def next_line(self) -> Facts:
        line = self._printed.get(timeout=SECONDS_MAX)
        assert line, "the command has ended"
        assert_harmless(line)
        self.lines.append(json.loads(line))
        return self.lines[-1]

    def until(self, is_true: Callable[[Facts], object]) -> Facts:
        deadline = time.monotonic() + SECONDS_MAX
        while not is_true(facts := self.next_line()):
            assert time.monotonic() < deadline, f"it did not happen in time; the last line is {facts}"
        return facts

    def end(self) -> None:
        """Press Ctrl-C."""
        self._process.send_signal(signal.SIGINT)
        self._thread.join()
        assert self._process.stderr is not None
        assert (self._process.wait(), self._process.stderr.read()) == (OK, "")
        while line := self._printed.get():
            self.lines.append(json.loads(line))

    def kill(self) -> None:
        self._process.kill()
        self._thread.join()
        self._process.wait()
        for each in (self._process.stdout, self._process.stderr):
            assert each is not None
            each.close()


@contextmanager
def watch(path: Path, *options: str) -> Iterator[Watch]:
    one = Watch(path, *options)
    try:
        yield one
        one.end()
    finally:
        one.kill()


@contextmanager
def training(pool: Path, stop: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", TRAIN, str(pool), str(stop)], env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def attached(pool: Path, **options: Any) -> tuple[Any, Any, lightck.Session]:
    model = net()
    optimizer = adam(model)
    return model, optimizer, lightck.attach(model, pool, optimizer=optimizer, **options)


def event(facts: Facts) -> list[str]:
    return list(facts["events"])


def test_a_training_that_is_killed_and_started_again_while_it_is_watched(pool, tmp_path):
    stop = tmp_path / "stop"
    with training(pool, stop) as first, watch(pool) as seen:
        seen.until(lambda facts: facts["step"] is not None and facts["step"] >= 20)
        facts = seen.until(lambda facts: facts["steps_per_second"])
        assert facts["holder"]["pid"] == first.pid
        assert facts["durability"]["process"]
        assert facts["problem"] is None
        assert not facts["age_is_at_least"]
        assert facts["age_seconds"] < SECONDS_MAX
        assert any(slot["step"] == facts["step"] or slot["state"] == "being written" for slot in facts["slots"])
        first.kill()
        first.wait()
        facts = seen.until(lambda facts: "ended" in event(facts))
        assert facts["holder"] is None
        assert facts["step"] == lightck.recover(pool).step
        left = facts["step"]
        with training(pool, stop) as second:
            facts = seen.until(lambda facts: facts["step"] > left and facts["holder"])
            assert facts["holder"]["pid"] == second.pid
            assert any("started" in event(line) for line in seen.lines)
            stop.touch()
            assert second.stdout is not None
            assert second.stdout.readline() == "0\n", "the training met no lock of the watching process"
            assert second.wait() == 0
        seen.until(lambda facts: "ended" in event(facts))
    steps = [facts["step"] for facts in seen.lines if facts["step"] is not None]
    assert steps == sorted(steps)
    assert seen.lines[-1]["step"] == lightck.recover(pool).step


def test_a_relayout_is_followed(pool):
    model, optimizer, session = attached(pool)
    train(model, optimizer, 2)
    with watch(pool) as seen:
        seen.until(lambda facts: facts["step"] == 1)
        pin = session.pin()
        seen.until(lambda facts: "relayout" in event(facts))
        train(model, optimizer, 3, start=2)
        session.flush()
        facts = seen.until(lambda facts: facts["step"] == 5)
        assert len(facts["slots"]) == 3
        pin.release()
        session.close()
    assert not [one for facts in seen.lines for one in event(facts) if one in ("gone", "replaced")]


def test_a_pool_that_is_replaced_and_one_that_is_removed_are_named(pool):
    pool_with(pool, steps=7)
    with watch(pool) as seen:
        assert seen.next_line()["step"] == 7
        pool_with(pool, steps=2, overwrite=True)
        facts = seen.until(lambda facts: facts["step"] == 2)
        assert any("replaced" in event(line) for line in seen.lines)
        pool.unlink()
        facts = seen.until(lambda facts: "gone" in event(facts))
        assert "There is no pool at" in facts["problem"]
        pool_with(pool, steps=9)
        facts = seen.until(lambda facts: facts["step"] == 9)
        assert facts["problem"] is None


def test_a_symbolic_link_that_is_changed_is_followed(tmp_path):
    link, new = tmp_path / "current.pool", tmp_path / "new link"
    pool_with(tmp_path / "run1.pool", steps=2)
    pool_with(tmp_path / "run2.pool", steps=7)
    link.symlink_to("run1.pool")
    with watch(link) as seen:
        assert seen.next_line()["step"] == 2
        new.symlink_to("run2.pool")
        new.rename(link)
        seen.until(lambda facts: facts["step"] == 7)
        assert [one for facts in seen.lines for one in event(facts)] == ["replaced"]


def test_a_slot_that_a_reader_holds_is_shown(pool):
    pool_with(pool, steps=4, slots=3)
    reader = open_pool(str(pool))
    checkpoint = next(iter(reader.checkpoints()))
    with checkpoint.hold():
        status, facts = call_json("watch", pool, "--count", 1)
        assert status == OK
        assert [slot["step"] for slot in facts["slots"] if slot["held"]] == [4]
        assert f"held: slot {checkpoint.record.slot}" in call("watch", pool, "--count", 1).stdout
    _, facts = call_json("watch", pool, "--count", 1)
    assert not any(slot["held"] for slot in facts["slots"])
    reader.close()


def test_a_pool_without_a_training_and_without_a_checkpoint(pool):
    pool_with(pool, steps=0)
    status, facts = call_json("watch", pool, "--count", 1)
    assert status == OK
    assert (facts["step"], facts["age_seconds"], facts["holder"]) == (None, None, None)
    assert "no step yet  0 in flight  no training" in call("watch", pool, "--count", 1).stdout


def test_the_newest_checkpoint_of_a_tier_and_its_age(pool, tmp_path):
    tier = tmp_path / "tier"
    model, optimizer, session = attached(pool, tiers=[lightck.Tier(tier, every="1h")])
    with session:
        train(model, optimizer, 3)
    status, facts = call_json("watch", pool, "--tier", tier, "--tier", tmp_path / "missing", "--count", 1)
    assert status == OK
    there, missing = facts["tiers"]
    _, facts = call_json("watch", pool, "--tier", tmp_path / ("x" * 300), "--count", 1)
    assert "no tier is there yet" in facts["tiers"][0]["problem"]
    assert "no tier is there yet" in call("watch", pool, "--tier", tmp_path / ("x" * 300), "--count", 1).stdout
    assert (there["tier"], there["step"], there["problem"]) == (str(tier), 3, None)
    assert 0 <= there["age_seconds"] < SECONDS_MAX
    assert missing["step"] is None
    text = call("watch", pool, "--tier", tier, "--count", 1).stdout
    assert f"tier {tier}: step 3, " in text


def test_without_a_terminal_a_line_is_printed_each_time(pool):
    pool_with(pool, steps=4)
    result = call("watch", pool, "--count", 3, "--interval", 0.1)
    assert result.exit_code == OK
    lines = result.stdout.splitlines()
    assert len(lines) == 3
    assert all("step 4" in line and "old" in line and "no training" in line for line in lines)


def test_on_a_terminal_it_is_drawn_in_place_and_ends_at_ctrl_c(pool):
    pool_with(pool, steps=4)
    terminal, ours = os.openpty()
    words = [*PROGRAM, "watch", str(pool), "--interval", "0.1"]
    process = subprocess.Popen(
        words, env=environment(TERM="xterm-256color", COLUMNS="100"), stdout=ours, stderr=ours, text=True
    )
    os.close(ours)
    text, deadline = "", time.monotonic() + SECONDS_MAX
    while text.count("newest  step 4") < 3:
        assert time.monotonic() < deadline, text
        assert select.select([terminal], [], [], SECONDS_MAX)[0]
        text += os.read(terminal, 1 << 16).decode()
    process.send_signal(signal.SIGINT)
    assert process.wait(SECONDS_MAX) == OK
    with suppress(OSError):  # everything was read
        text += os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert "\x1b[" in text
    assert "Traceback" not in text
    assert text.count("\x1b[?25h") == text.count("\x1b[?25l") > 0, "the cursor is shown again"
    assert "tmpfs; survives a killed process" in text


def test_what_cannot_be_watched_is_named(pool, tmp_path):
    result = call("watch", pool, "--count", 1)
    assert result.exit_code == FAILED
    assert str(pool) in result.stderr
    result = call("watch", tmp_path, "--count", 1)
    assert result.exit_code == FAILED
    assert "It holds no pool of a rank" in result.stderr


def test_ranks_that_are_behind_are_named(pool):
    """Rank 1 commits no more from step 3 on: it is paused."""
    pools = pool.with_name("pools")

    def body(rank: int) -> None:
        model = net()
        wrapped = DistributedDataParallel(model)
        optimizer = adam(model)
        session = lightck.attach(wrapped, pools, optimizer=optimizer, slots=4)
        train(wrapped, optimizer, 3)
        session.flush()
        if rank == 1:
            with session.paused():
                train(wrapped, optimizer, 1, start=3)
            session.abandon()
        else:
            train(wrapped, optimizer, 1, start=3)
            session.flush()
            session.abandon()

    assert [one.text for one in run_ranks(2, body)] == ["", ""]
    status, facts = call_json("watch", pools, "--count", 1)
    assert status == OK
    assert facts["common"]["step"] == 3
    assert facts["slowest"] == {"rank": 1, "step": 3}
    assert [rank["step"] for rank in facts["ranks"]] == [4, 3]
    assert facts["missing"] == []
    text = call("watch", pools, "--count", 1).stdout
    assert "common step 3  at least" in text
    assert "slowest rank 1 at step 3  0 of 2 ranks train" in text
    (pools / "rank-00001-of-00002.pool").unlink()
    status, facts = call_json("watch", pools, "--count", 1)
    assert status == OK
    assert facts["missing"] == [1]
    assert facts["common"]["step"] is None


def test_another_number_of_ranks_is_followed(pool):
    pools = pool.with_name("pools")

    def body(rank: int) -> None:
        wrapped = DistributedDataParallel(net())
        optimizer = adam(wrapped)
        with lightck.attach(wrapped, pools, optimizer=optimizer, resume=True) as session:
            train(wrapped, optimizer, 4, start=session.step)

    assert [one.text for one in run_ranks(2, body)] == ["", ""]
    with watch(pools) as seen:
        facts = seen.next_line()
        assert (facts["common"]["step"], len(facts["ranks"])) == (4, 2)
        assert [one.text for one in run_ranks(1, body)] == [""]
        facts = seen.until(lambda facts: facts["common"]["step"] == 8)
        assert len(facts["ranks"]) == 1
        assert facts["missing"] == []


@pytest.mark.parametrize(
    ("options", "n_committed"),
    [
        ({"backend": "pmdk"}, 2),
        ({"strategy": lightck.Gradients(base_every=3)}, 5),
        ({"strategy": lightck.Gradients(base_every=3), "interval": 4}, 2),
    ],
    ids=["pmdk", "gradients", "gradients with an interval"],
)
def test_other_kinds_of_pools(pool, options, n_committed):
    model, optimizer, session = attached(pool, **options)
    with session:
        train(model, optimizer, 9)
        status, facts = call_json("watch", pool, "--count", 1)
        assert status == OK
        assert facts["step"] == 8
        assert facts["holder"]["pid"] == os.getpid()
        assert sum(slot["state"] == "committed" for slot in facts["slots"]) == n_committed
        assert {slot["state"] for slot in facts["slots"]} <= {"committed", "record"}


@pytest.mark.long
def test_ranks_under_torchrun_that_are_killed_while_they_are_watched(pool, tmp_path):
    pools, stop, script = pool.with_name("pools"), tmp_path / "stop", tmp_path / "train.py"
    script.write_text(GROUP)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    process = subprocess.Popen(
        [*words, str(pools), str(stop)],
        env={**environment(), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        ready = threading.Event()
        deadline = time.monotonic() + 2 * SECONDS_MAX
        while len(list(pools.glob("rank-*.pool"))) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            ready.wait(0.05)
        with watch(pools) as seen:
            facts = seen.until(lambda facts: (facts["common"]["step"] or 0) >= 10)
            assert facts["slowest"]["rank"] in (0, 1)
            pids = [rank["holder"]["pid"] for rank in facts["ranks"]]
            assert len(set(pids)) == 2
            os.kill(pids[1], signal.SIGKILL)  # torchrun then ends the other one
            process.wait(SECONDS_MAX)
            seen.until(lambda facts: all(rank["holder"] is None for rank in facts["ranks"]))
            ended = {one["rank"] for facts in seen.lines for one in facts["events"] if one["event"] == "ended"}
            assert ended == {0, 1}
        assert seen.lines[-1]["common"]["step"] == lightck.recover(pools).step
        steps = [facts["common"]["step"] for facts in seen.lines if facts["common"]["step"] is not None]
        assert steps == sorted(steps)
    finally:
        process.kill()
        process.wait()
