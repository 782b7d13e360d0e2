"""OpenMP's threads wait passively while a checkpoint is copied if that was measured to be better, and only then."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from toys import BIG, adam, alive, everything, forward, is_step, left_since, net, train

import lightck
from lightck.pipeline import wait_policy
from lightck.pipeline.wait_policy import PASSIVE, TRIAL, WaitPolicy
from lightck.pool.engine import Engine
from lightck.stats import Meter

ROOT = Path(__file__).resolve().parents[2]
ACTIVE, PASSIVELY = False, True
STARVED, FED = (100 << 20, 60 << 20), (100 << 20, 1 << 20)


@pytest.fixture(autouse=True)
def _left_to_lightck(monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_STACKSIZE", "OMP_DISPLAY_AFFINITY", "LIGHTCK_CHECK"):
        monkeypatch.delenv(name, raising=False)


# -- when it is tried ------------------------------------------------------------------------------------------------


class Training:
    """Checkpoints that reach the gate after a given time of a simulated clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.engine, self.meter = 0.0, Engine(), Meter()
        monkeypatch.setattr(wait_policy.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(wait_policy, "_has_thread_per_processor", lambda: self.is_crowded)
        self.policy = WaitPolicy(self.engine, self.meter)
        self.seconds, self.waits = {PASSIVELY: 0.6, ACTIVE: 0.6}, {PASSIVELY: 0.001, ACTIVE: 0.017}
        self.turns: list[bool] = []
        self.is_crowded = True
        set_passive_waiting = self.engine.set_passive_waiting
        monkeypatch.setattr(
            self.engine, "set_passive_waiting", lambda on: self.turns.append(on) or set_passive_waiting(on)
        )

    def checkpoints(self, count: int, copied: tuple[int, int], *, flushed: bool = False, eager: int = 0) -> str | None:
        """``flushed``: a flush ends them before any gate. ``eager``: the number of eager copies before the boundary."""
        for _ in range(count):
            for _ in range(eager):
                self.policy.checkpoint_begins(eager=True)
                self.now += 0.01
            self.policy.checkpoint_begins()
            passive = self.turns[-1] if self.turns else ACTIVE
            self.now += self.seconds[passive]
            self.meter.wait_seconds += self.waits[passive]
            self.policy.checkpoint_ended(*copied)
            if not flushed:
                self.policy.gate_passed()
        return self.meter.wait_policy


@pytest.fixture
def training(monkeypatch):
    made = Training(monkeypatch)
    yield made
    made.engine.close()


def test_a_training_whose_copies_find_a_processor_is_left_alone(training):
    assert training.checkpoints(5000, FED) is None
    assert not any(training.turns)


def test_an_occasional_starved_checkpoint_begins_no_trial(training):
    for _ in range(50):
        assert training.checkpoints(2, STARVED) is None
        assert training.checkpoints(3, FED) is None
    assert not any(training.turns)


def test_three_starved_checkpoints_of_five_begin_a_trial_and_what_is_better_stays(training, caplog):
    assert training.checkpoints(2, STARVED) is None
    assert training.checkpoints(2, FED) is None
    assert training.checkpoints(1, STARVED) == TRIAL
    with caplog.at_level(logging.INFO, "lightck"):
        assert training.checkpoints(31, STARVED) == TRIAL
        assert training.checkpoints(1, STARVED) == PASSIVE
    assert (
        "idle threads sleep instead of spinning while checkpoints are copied, because that costs less here. Medians "
        "of the time from a checkpoint to the next update: 600.0 ms with sleeping threads, of which the training "
        "waited 1.0 ms for the copy" in caplog.text
    )
    training.turns.clear()
    assert training.checkpoints(500, FED) == PASSIVE
    assert all(training.turns)


@pytest.mark.parametrize(
    ("passively", "turns", "kept"),
    [
        ((0.598, 0.001), 32, True),
        ((0.604, 0.001), 32, True),
        ((0.608, 0.001), 32, False),
        ((0.500, 0.009), 32, False),  # the wait is as long: the medium is slow, and processor time is not missing
        ((0.720, 0.001), 10, False),  # a trial that slows the training down this much ends soon
    ],
)
def test_passive_waiting_is_kept_if_it_is_no_slower_and_halves_the_wait(training, caplog, passively, turns, kept):
    """With active waiting a checkpoint takes 0.600 s, including a wait of 0.017 s."""
    training.seconds[PASSIVELY], training.waits[PASSIVELY] = passively
    training.checkpoints(3, STARVED)
    training.turns.clear()
    assert training.checkpoints(turns - 1, STARVED) == TRIAL
    with caplog.at_level(logging.INFO, "lightck"):
        assert training.checkpoints(1, STARVED) == (PASSIVE if kept else None)
    assert ("because that costs less here" if kept else "because sleeping does not cost clearly less") in caplog.text
    assert training.turns[:turns] == ([ACTIVE, PASSIVELY, PASSIVELY, ACTIVE] * 8)[:turns]


def test_passive_waiting_that_is_worse_is_tried_again_less_and_less_often(training):
    training.seconds[PASSIVELY] = 0.8
    tried_at: list[int] = []
    for checkpoint in range(20_000):
        before = training.meter.wait_policy
        if training.checkpoints(1, STARVED) == TRIAL and before is None:
            tried_at.append(checkpoint)
    gaps = [later - earlier for earlier, later in itertools.pairwise(tried_at)]
    assert gaps == [1010, 2010, 4010, 8010]
    assert sum(training.turns) == 5 * len(tried_at)


def test_checkpoints_that_a_flush_waits_for_begin_no_trial(training):
    assert training.checkpoints(100, STARVED, flushed=True) is None
    assert not any(training.turns)


def test_a_trial_whose_checkpoints_reach_no_gate_ends(training):
    assert training.checkpoints(3, STARVED) == TRIAL
    assert training.checkpoints(64, STARVED, flushed=True) == TRIAL
    assert training.checkpoints(1, STARVED, flushed=True) is None
    assert training.turns[-1] is ACTIVE


def test_a_trial_that_is_cancelled_claims_no_result(training, caplog):
    """Torch gets fewer threads during the trial, in which sleeping threads have cost less so far."""
    training.seconds[PASSIVELY] = 0.5
    assert training.checkpoints(10, STARVED) == TRIAL
    training.is_crowded = False
    with caplog.at_level(logging.INFO, "lightck"):
        assert training.checkpoints(1, STARVED) is None
    assert "go on spinning, as usual, while checkpoints are copied, because the trial ended before" in caplog.text
    assert "costs less" not in caplog.text


def test_with_eager_copies_the_time_counts_from_the_first_one(training):
    training.checkpoints(3, STARVED, eager=6)
    training.turns.clear()
    training.checkpoints(2, STARVED, eager=6)
    assert training.turns == [ACTIVE, PASSIVELY]
    for method in training.turns:
        assert training.policy._trial.medians(method)[0] == pytest.approx(0.66)


def test_where_a_processor_is_free_nothing_is_tried_and_waiting_is_active(training):
    training.is_crowded = False
    assert training.checkpoints(10, STARVED) is None
    training.is_crowded = True
    assert training.checkpoints(1, STARVED) == TRIAL
    training.is_crowded = False
    assert training.checkpoints(1, STARVED) is None
    assert not any(training.turns)
    training.is_crowded = True
    assert training.checkpoints(1032, STARVED) == PASSIVE
    training.turns.clear()
    training.is_crowded = False
    training.checkpoints(5, FED)
    assert not any(training.turns)


def test_passive_waiting_is_tried_again_and_given_up_when_the_training_has_changed(training):
    training.checkpoints(35, STARVED)
    assert training.meter.wait_policy == PASSIVE
    training.seconds[PASSIVELY] = 0.8  # smaller batches, say
    training.checkpoints(1100, FED)
    assert training.meter.wait_policy is None


@pytest.mark.parametrize(
    "name",
    [
        "OMP_WAIT_POLICY",
        "GOMP_SPINCOUNT",
        "OMP_STACKSIZE",
        "OMP_DISPLAY_AFFINITY",
    ],
)
def test_what_the_user_chose_stays(monkeypatch, name):
    monkeypatch.setenv(name, "active")
    training = Training(monkeypatch)
    try:
        assert training.checkpoints(100, STARVED) is None
        assert not training.turns
    finally:
        training.engine.close()


OTHER_OPENMP = """
from lightck.pipeline import wait_policy
from lightck.pool.engine import find_openmp
assert not find_openmp("libc.so.6") and not find_openmp("no-such-library.so")
assert not engine.set_passive_waiting(True)
wait_policy.LIBRARY_WITH_OPENMP = "libc.so.6"
for _ in range(3):
    policy.checkpoint_ended(100 << 20, 60 << 20)
    policy.gate_passed()
begin_checkpoint()
print(team(), session.stats().wait_policy)
session.close()
"""


def test_another_openmp_is_left_alone(pool):
    assert child(OTHER_OPENMP, pool).split() == ["0", "None"]


# -- what it does ----------------------------------------------------------------------------------------------------


def team() -> int:
    """The number of lightck's OpenMP threads in this process: one that stays, and one that makes waiting passive."""
    found = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            found += (task / "comm").read_text() == "lightck-openmp\n"
    return found


def reaches(threads: int, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while team() != threads and time.monotonic() < deadline:
        time.sleep(0.001)
    return team() == threads


@pytest.fixture
def crowded(slow_memory, monkeypatch) -> None:
    """Every checkpoint counts as starved, whichever thread the machine let copy it, and every processor has a
    thread."""
    monkeypatch.setattr(wait_policy, "_STARVED_NBYTES", 0)
    monkeypatch.setattr(wait_policy, "_STARVED_SHARE", 0)
    monkeypatch.setattr(wait_policy, "_has_thread_per_processor", lambda: True)


def test_the_extra_team_exists_only_while_a_checkpoint_with_passive_waiting_is_copied(pool, crowded, monkeypatch):
    turns = []
    set_passive_waiting = Engine.set_passive_waiting
    monkeypatch.setattr(
        Engine, "set_passive_waiting", lambda engine, on: turns.append(on) or set_passive_waiting(engine, on)
    )
    before = alive()
    model = net(32 * BIG)  # two seconds of copies: a busy machine takes its time to start threads
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 4)  # its gate ends the third checkpoint: every one was starved
        assert session.stats().wait_policy == TRIAL
        for threads in (0, 2, 2, 1, 1, 2):  # 0: the thread that stays begins with the first team
            loss = forward(model)
            assert turns[-1] == (threads == 2)
            assert reaches(threads)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert reaches(min(threads, 1)), "the copies have ended: the second thread has ended too"
        session.flush()
        assert is_step(lightck.recover(pool), everything(model, optimizer))
    assert not left_since(before)


def test_a_trial_on_a_slow_medium_ends_with_active_waiting(pool, crowded):
    before = alive()
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 4)
        assert session.stats().wait_policy == TRIAL
        train(model, optimizer, 36)
        session.flush()
        assert session.stats().wait_policy is None, "on a slow medium passive waiting does not shorten the wait"
        assert is_step(lightck.recover(pool), everything(model, optimizer))
    assert not left_since(before)


def child(code: str, *args: object) -> str:
    """The output of this code in a new process whose OpenMP has a thread per processor."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'pipeline'}"}
    environment.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, "-c", BEGUN + code, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


BEGUN = """
import os, resource, sys, time
from pathlib import Path
import torch
import lightck
from lightck.pool.storage import emulation
from lightck.pool.storage.emulation import Profile
from test_wait_policy import reaches, team
from toys import adam, forward, net, train

emulation.use(Profile("slow", 4_000_000, 1_000_000_000, 0, 64, "made up"))
model = net(30_000)
optimizer = adam(model)
session = lightck.attach(model, sys.argv[1], optimizer=optimizer)
train(model, optimizer, 2)
policy, engine = session._pipeline.wait_policy, session._pipeline.engine

def begin_checkpoint():
    "Its copies take half a second."
    forward(model)
    assert session._pipeline._in_flight[0].pending.job.info().state == 1
"""

SLEEPS = """
from lightck.pool.engine import find_openmp
assert find_openmp("libtorch_cpu.so")
policy._is_passive = sys.argv[2] == "True"
torch.set_num_threads(len(os.sched_getaffinity(0)))
x = torch.randn(256, 256)
for _ in range(20):
    x @ x
teams = {task for task in Path("/proc/self/task").iterdir() if "lightck" not in (task / "comm").read_text()}
begin_checkpoint()
assert reaches(2) if policy._is_passive else team() == 0

def sleeps():
    lines = [line for task in teams for line in (task / "status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary"))

def copies():
    return session._pipeline._in_flight[0].pending.job.info().state == 1

before, rounds = sleeps(), 0
while rounds < 200 and copies():
    rounds += 1
    x @ x
    end = time.perf_counter() + 0.0003
    while time.perf_counter() < end:
        pass
print((sleeps() - before) * 200 // rounds)
assert rounds >= 20, "too few rounds to measure"  # on a busy machine
session.close()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor: OpenMP's threads wait for nobody")
def test_waiting_threads_of_openmp_sleep_instead_of_spinning(folder):
    """Measured by voluntary context switches, with parallel regions 0.3 ms apart. A busy machine makes active waiting
    switch too, so the fewest of up to three runs count."""
    actively = []
    for attempt in range(3):
        actively.append(int(child(SLEEPS, folder / f"False-{attempt}.pool", False)))
        passively = int(child(SLEEPS, folder / f"True-{attempt}.pool", True))
        assert passively > 100
        if passively > 3 * min(actively):
            return
    pytest.fail(f"{passively} switches of passive waiting, {actively} of active waiting")


NO_ROOM = """
from lightck.pool.engine import find_openmp
assert find_openmp("libtorch_cpu.so")
assert engine.set_passive_waiting(True)
assert reaches(1)
policy._is_passive = True
for line in Path("/proc/self/status").read_text().splitlines():
    if line.startswith("VmSize:"):
        nbytes = int(line.split()[1]) << 10
resource.setrlimit(resource.RLIMIT_AS, (nbytes + (3 << 20), resource.RLIM_INFINITY))  # less than a stack
begin_checkpoint()
session.flush()
print(team(), session.committed)
"""


def test_where_no_thread_can_be_started_the_training_goes_on(pool):
    """GNU OpenMP would end the process if it could not start a thread."""
    assert child(NO_ROOM, pool).split() == ["1", "2"]
