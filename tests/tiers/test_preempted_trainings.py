"""Trainings in processes of their own, with tiers, that are ended by signals as schedulers send them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from forked import ForkedProgram
from preempted_training import start

import lightck
from lightck.errors import PoolError
from tiers.kills import children_of, is_running

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1
UNTIL = 40


def until(is_true: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@contextmanager
def training(pool: Path, tier: Path | None = None, **options: Any) -> Iterator[ForkedProgram]:
    """A training that has made its first steps, unless ``n_steps`` is 0."""
    n_steps = options.pop("n_steps", 2)
    with start(pool=pool, tier=tier, until=options.pop("until", UNTIL), **options) as process:
        for _ in range(n_steps):
            assert process.stdout.readline(), process.stderr.read()
        yield process


def ended(process: ForkedProgram) -> tuple[str, str]:
    """Wait for the end of a training. Returns its last line and its log."""
    said, logged = process.communicate(timeout=120)
    assert process.returncode == 0, logged
    return said.splitlines()[-1], logged


def drain_of(process: ForkedProgram) -> int:
    found = [pid for pid in children_of(process.pid) if b"drain_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(found) == 1
    return found[0]


def step_in(place: Path) -> int:
    with suppress(PoolError):
        return lightck.recover(place).step
    return 0


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """How a training ends that nothing disturbs."""
    with training(tmp_path_factory.mktemp("reference") / "run.pool", n_steps=0, preempts=False, pause=0.0) as process:
        return ended(process)[0]


# -- random moments


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.campaign)])
def test_a_signal_at_any_moment_stops_exactly_with_everything_in_pool_and_tier(folder, tmp_path, reference, seed):
    chance = random.Random(seed)
    pool, tier = folder / "run.pool", tmp_path / "tier"
    # In all runs the same: what closes a step, and the loader, are a part of the training.
    same = {"loop": chance.choice(["loader", "end_step", "asks first"]), "workers": chance.choice([0, 0, 2])}
    last = ""
    while not last.startswith("ended"):
        options = {
            "interval": chance.choice([1, 1, 7]),
            "thread": chance.random() < 0.2,
            "every": chance.choice(["1h", "0.1s", 3]),
        }
        print(f"seed {seed}: {same} {options}")
        with training(pool, tier, n_steps=0, **same, **options) as process:
            first = process.stdout.readline()  # one that begins at its end says only how it ended
            time.sleep(chance.uniform(0.0, 0.15))
            victims = [process.pid]
            if chance.random() < 0.3:
                with suppress(AssertionError, OSError):
                    victims.append(drain_of(process))
            for victim in victims * chance.choice([1, 1, 2]):
                with suppress(ProcessLookupError):
                    os.kill(victim, chance.choice([TERM, USR1]))
            said, logged = process.communicate(timeout=120)
        last = ((first + said).splitlines() or [""])[-1]
        print(last)
        if process.returncode in (-TERM, -USR1):  # it had finished and closed its session: then a signal ends it
            assert step_in(pool) == UNTIL, logged
            continue
        assert process.returncode == 0, logged
        if last.startswith("stopped"):
            assert step_in(pool) == int(last.split()[-1]) == step_in(tier), logged
            assert "session.should_stop is True" in logged
        if chance.random() < 0.3:
            pool.unlink()  # the next one continues from the tier
    assert last == reference


# -- the tier


def test_the_step_of_the_signal_is_sent_before_the_loop_ends(tmp_path):
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    with training(pool, tier) as process:
        process.send_signal(TERM)
        last, logged = ended(process)
    step = step_in(pool)
    assert last == f"stopped at {step}"
    assert step_in(tier) == step
    assert f"SIGTERM came, and step {step} is in the pool, and in {str(tier)!r}: session.should_stop is True" in logged


@pytest.mark.long
def test_a_slow_tier_gets_the_checkpoint_within_the_grace(tmp_path):
    """The drain stands still when the signal comes, and goes on later."""
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    with training(pool, tier) as process:
        drain = drain_of(process)
        until(lambda: step_in(tier))
        os.kill(drain, signal.SIGSTOP)
        process.send_signal(TERM)
        until(lambda: step_in(pool) > 2)
        time.sleep(0.5)
        assert process.poll() is None, "it waits for the tier"
        os.kill(drain, signal.SIGCONT)
        ended(process)
    assert step_in(tier) == step_in(pool)


@pytest.mark.long
def test_a_tier_that_is_too_slow_is_named_and_the_process_ends(tmp_path):
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    with training(pool, tier, grace="2s", until=100_000) as process:
        drain = drain_of(process)
        until(lambda: step_in(tier))
        os.kill(drain, signal.SIGSTOP)
        process.send_signal(TERM)
        last, logged = ended(process)
        step, held = step_in(pool), step_in(tier)
        assert last == f"stopped at {step}"
        assert held < step
        assert f"of 2 s the tier {str(tier)!r} lacks step {step}" in logged
        assert f"The pool {str(pool)!r} holds step {step}, the tier {str(tier)!r} step {held}" in logged
        assert "close() waits no longer" in logged
        os.kill(drain, signal.SIGCONT)
    until(lambda: step_in(tier) == step)  # what was left alone goes on
    until(lambda: not is_running(drain))


@pytest.mark.long
def test_a_signal_while_close_waits_for_the_tier_ends_the_wait_with_the_grace(tmp_path):
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    with training(pool, tier, until=5, grace="1s") as process:
        drain = drain_of(process)
        os.kill(drain, signal.SIGSTOP)
        for line in process.stderr:
            if "close() waits until the newest checkpoint is in the tiers" in line:
                break
        process.send_signal(TERM)
        last, logged = ended(process)
        assert last.startswith("ended")
        assert "close() waits no longer, because the grace of the signal is over: step 5 is in the pool" in logged
        assert "no step has ended" not in logged
        os.kill(drain, signal.SIGCONT)
    until(lambda: step_in(tier) == 5)
    until(lambda: not is_running(drain))


@pytest.mark.long
def test_a_tier_that_fails_is_asked_again_within_the_grace(tmp_path):
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    with training(pool, tier, until=10**6) as process:
        until(lambda: step_in(tier))
        away = tier.rename(tmp_path / "away")
        tier.write_text("no folder")
        process.send_signal(USR1)
        for line in process.stderr:
            if "the next attempt follows" in line:
                break
        tier.unlink()
        away.rename(tier)
        ended(process)
    assert step_in(tier) == step_in(pool)


def test_a_tier_that_fails_beyond_the_grace_gets_the_checkpoint_when_it_can_take_it(tmp_path):
    """The training ends in order, as the scheduler wants it; the drain goes on alone."""
    tier, aside = tmp_path / "tier", tmp_path / "aside"
    with training(tmp_path / "run.pool", tier, grace=2.0, until=10**6) as process:
        until(lambda: step_in(tier))
        tier.rename(aside)
        tier.write_bytes(b"")
        process.send_signal(TERM)
        _, logged = ended(process)
        assert "close() waits no longer" in logged
        time.sleep(5)  # longer than a drain tries whose training waits for it
        tier.unlink()
        aside.rename(tier)
        step = lightck.recover(tmp_path / "run.pool").step
        until(lambda: step_in(tier) == step)


@pytest.mark.long
def test_a_drain_that_is_killed_is_started_again_within_the_grace(tmp_path):
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    with training(pool, tier, until=10**6) as process:
        until(lambda: step_in(tier))
        drain = drain_of(process)
        os.kill(drain, signal.SIGSTOP)
        process.send_signal(TERM)
        for line in process.stderr:
            if "SIGTERM came" in line:
                break
        os.kill(drain, signal.SIGKILL)
        ended(process)
    assert step_in(tier) == step_in(pool)


@pytest.mark.parametrize("number", [TERM, USR1])
def test_signals_to_the_drain_do_not_end_it_within_the_grace(tmp_path, number):
    """A batch system sends them to all processes, and more than once."""
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    with training(pool, tier, until=10**6) as process:
        drain = drain_of(process)
        until(lambda: step_in(tier))
        before = step_in(tier)
        os.kill(drain, number)
        until(lambda: step_in(tier) > before)  # it has sent the newest one
        for _ in range(3):
            os.kill(drain, number)
            time.sleep(0.02)
        assert drain_of(process) == drain
        process.send_signal(number)
        _, logged = ended(process)
        assert "is started again" not in logged
    assert step_in(tier) == step_in(pool)


@pytest.mark.long
def test_in_a_step_that_does_not_end_the_newest_checkpoint_is_sent(tmp_path):
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    with training(pool, tier, long_after=5, grace="4s") as process:
        until(lambda: step_in(pool) == 5)
        assert step_in(tier) < 5, "the next one is due in an hour"
        process.send_signal(TERM)
        for line in process.stderr:
            if "the grace of 4 s is over" in line:
                break
        assert "no step has ended and was committed since SIGTERM came" in line
        assert f"{str(pool)!r} holds step 5" in line
        assert step_in(tier) == 5
        process.kill()


@pytest.mark.long
@pytest.mark.parametrize("outlives", [False, True])
def test_a_loop_that_never_asks_has_sent_a_step_that_ended_after_the_signal(tmp_path, outlives):
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    with training(pool, tier, until=10**6, asks=False, grace="3s") as process:
        until(lambda: step_in(tier))
        before = step_in(pool)
        process.send_signal(TERM)
        until(lambda: step_in(tier) > before)
        if outlives:
            for line in process.stderr:
                if "the grace of 3 s is over" in line:
                    break
            assert "the loop has not read session.should_stop" in line
            process.send_signal(TERM)  # now it acts as without lightck
            assert process.wait(30) == -TERM


@pytest.mark.long
def test_a_signal_that_ends_a_worker_of_the_loader_costs_one_step_and_no_bit(tmp_path, reference):
    """Torch's handler for it raises in the training, whatever that does."""
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    with training(pool, tier, workers=2, n_steps=6) as process:
        workers = [pid for pid in children_of(process.pid) if pid != drain_of(process)]
        for pid in (process.pid, *workers):
            os.kill(pid, TERM)
        said, logged = process.communicate(timeout=120)
    assert process.returncode in (0, 1), logged
    assert process.returncode == 0 or "is killed by signal" in logged
    steps = [6, *(int(line) for line in said.splitlines() if line.isdigit())]
    assert step_in(pool) >= steps[-1] - 1
    with training(pool, tier, workers=2, n_steps=0) as process:
        assert ended(process)[0] == reference


# -- as a kubelet does it


@pytest.mark.long
@pytest.mark.parametrize("is_slow", [False, True])
def test_as_a_kubelet_ends_a_pod(tmp_path, is_slow):
    """SIGTERM to the first process of the container, the grace period, and SIGKILL to all. Two processes and a shared
    folder stand for the pod and its volume."""
    pool, tier = tmp_path / "run.pool", tmp_path / "volume"
    with training(pool, tier, until=10**6, grace="5s") as process:
        drain = drain_of(process)
        until(lambda: step_in(tier))
        if is_slow:
            os.kill(drain, signal.SIGSTOP)
        before = step_in(pool)
        process.send_signal(TERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(2.0 if is_slow else 60.0)
        assert (process.poll() is None) is is_slow
        for pid in (process.pid, drain):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    until(lambda: not is_running(drain))
    assert step_in(pool) > before
    if not is_slow:
        assert process.returncode == 0
        assert step_in(tier) == step_in(pool)
        pool.unlink()  # the node is gone
    step = step_in(pool if is_slow else tier)
    with training(pool, tier, until=step + 3, n_steps=0) as process:
        assert ended(process)[0].startswith("ended")
    assert step_in(tier) == step + 3
