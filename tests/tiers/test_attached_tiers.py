"""``attach(..., tiers=[...])``: a training with a process beside it that sends checkpoints to folders."""

from __future__ import annotations

import errno
import logging
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import ForkedProgram
from noisy_training import Noisy
from toys import adam, damage, everything, in_child, net, on_small_tmpfs, same, train

import lightck
from lightck.errors import (
    CheckpointExistsError,
    KeepError,
    PoolError,
    PoolPathError,
    TierClaimedError,
    TierError,
    UnsupportedError,
)
from lightck.pool.commit_log import candidates
from lightck.pool.format.saved_by import saved_by
from lightck.pool.format.structures import DamagedError
from lightck.pool.reader import open_pool
from lightck.ranks.directory import existing_pools
from lightck.tiers import drain_link, drain_process, drain_start
from lightck.tiers.candidates import candidates_of
from lightck.tiers.claiming import read_claim
from lightck.tiers.copying import copy_from_tier
from lightck.tiers.decisions import complete
from lightck.tiers.drain_messages import DrainSettings, TierSettings
from lightck.tiers.drain_process import DrainProcess
from lightck.tiers.folder import FolderStore
from lightck.tiers.names import Writer
from lightck.tiers.tier_manifest import read_manifest
from lightck.tiers.tier_writer import TierWriter
from tiers.kills import children_of, is_running
from tiers.small_tiers import age

os.environ["LIGHTCK_TEST_OF"] = str(os.getpid())
MARK = f"LIGHTCK_TEST_OF={os.getpid()}".encode()
"""What the environment of a drain says that one of these tests has started, wherever it is in the tree of processes."""


def steps_in(tier: Path) -> list[int]:
    return sorted(each.step for each in complete(FolderStore(str(tier)).listing()))


def claims_in(tier: Path) -> int:
    return len(FolderStore(str(tier)).listing().claims)


def until(is_true: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def drains() -> list[int]:
    """The processes of drains that this test process, or a child of it, has started."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            is_ours = MARK in (entry / "environ").read_bytes().split(b"\0")
            if is_ours and b"drain_process" in (entry / "cmdline").read_bytes() and is_running(int(entry.name)):
                found.append(int(entry.name))
    return found


@pytest.fixture(autouse=True)
def _no_drain_is_left() -> Iterator[None]:
    yield
    until(lambda: not drains())


def attached(path: Path, tiers: Sequence[lightck.Tier], **options: Any) -> tuple[Any, Any, lightck.Session]:
    model = net(64)
    optimizer = adam(model)
    return model, optimizer, lightck.attach(model, path, optimizer=optimizer, tiers=tiers, **options)


def is_ready(session: lightck.Session) -> Callable[[], bool]:
    """Whether the drains have nothing to do."""
    links = session._steps.commits.participants.tiers._links

    def asked() -> bool:
        session.stats()
        return all(each._handle and not each._handle.state.is_busy and each._offer is None for each in links)

    return asked


def trained(session: lightck.Session, model: Any, optimizer: Any, steps: int) -> None:
    """Make steps, each committed, and let the drain do what is due after each."""
    for _ in range(steps):
        train(model, optimizer, 1, start=session.step)
        session.flush()
        until(is_ready(session))


def no_process(*_: object, **__: object) -> None:
    """In place of ``Popen``: the system has no room for a process."""
    raise OSError(errno.EAGAIN, "Resource temporarily unavailable")


def only_store(tier: Path) -> FolderStore:
    return FolderStore(str(tier))


# -- what is sent


def test_the_first_checkpoint_and_those_that_are_due_by_their_step_are_sent(tmp_path):
    model, optimizer, session = attached(tmp_path / "run.pool", [lightck.Tier(tmp_path / "tier", every=3)])
    with session:
        until(is_ready(session))
        trained(session, model, optimizer, 8)
        (tier,) = session.stats().tiers
        assert (tier.step, tier.checkpoints, tier.error) == (6, 3, None)
        assert tier.bytes_sent > 0
        assert tier.seconds > 0
        assert abs(time.time() - tier.sent_at) < 60
    assert steps_in(tmp_path / "tier") == [1, 3, 6, 8], "the newest one is sent at close"


@pytest.mark.parametrize(("hours", "is_due"), [(2.0, True), (0.5, False)])
def test_the_time_of_a_tier_does_not_begin_anew_at_a_restart(tmp_path, hours, is_due):
    """A job that is killed whole every 50 minutes would never send anything."""
    pool, tiers = tmp_path / "run.pool", [lightck.Tier(tmp_path / "tier", every="1h")]
    model, optimizer, session = attached(pool, tiers)
    with session:
        train(model, optimizer, 2)
    age(tmp_path / "tier", hours)
    model, optimizer, session = attached(pool, tiers, resume=True)
    with session:
        time.sleep(1.5)  # the drain finds nothing that this training has saved
        train(model, optimizer, 1, start=2)
        session.flush()
        if is_due:
            until(lambda: steps_in(tmp_path / "tier")[-1] == 3)
            train(model, optimizer, 1, start=3)
            session.flush()
        time.sleep(1.5)
        assert steps_in(tmp_path / "tier")[-1] == (3 if is_due else 2)


def test_the_time_of_a_tier_does_not_begin_anew_with_a_new_drain(tmp_path):
    model, optimizer, session = attached(tmp_path / "run.pool", [lightck.Tier(tmp_path / "tier", every="1h")])
    with session:
        until(is_ready(session))
        trained(session, model, optimizer, 2)
        (link,) = session._steps.commits.participants.tiers._links
        link._handle.state.tiers[0].sent_at -= 7200
        os.kill(drains()[0], signal.SIGKILL)
        until(lambda: not drains())
        train(model, optimizer, 1, start=2)
        session.flush()
        until(lambda: session.stats().tiers[0].step == 3)
        train(model, optimizer, 1, start=3)
        session.flush()
        time.sleep(1.5)
        assert steps_in(tmp_path / "tier") == [1, 3]


def test_the_first_checkpoint_is_sent_though_the_loop_calls_nothing_after_its_commit(tmp_path):
    """The drain has only begun then, and an epoch of evaluation may follow."""
    tier = tmp_path / "tier"
    model, optimizer, session = attached(tmp_path / "run.pool", [lightck.Tier(tier, every="1h")])
    with session:
        train(model, optimizer, 1)
        session.flush()
        assert not tier.is_dir() or not steps_in(tier), "else the drain had begun before, and this shows nothing"
        until(lambda: tier.is_dir() and steps_in(tier) == [1])
        train(model, optimizer, 3, start=1)
        session.flush()
        until(is_ready(session))
        assert steps_in(tier) == [1], "it was the first one, and the next one is due in an hour"


def test_what_is_sent_is_what_the_pool_holds(tmp_path):
    model, optimizer, session = attached(tmp_path / "run.pool", [lightck.Tier(tmp_path / "tier", every="1h")])
    with session:
        train(model, optimizer, 5)
    one, other = lightck.recover(tmp_path / "run.pool"), lightck.recover(tmp_path / "tier")
    assert other.step == one.step == 5
    assert same(one.model, other.model)
    assert same(one.optimizer, other.optimizer)


def test_a_checkpoint_is_sent_when_its_time_has_come_and_the_loop_makes_no_step(tmp_path):
    tier = tmp_path / "tier"
    model, optimizer, session = attached(tmp_path / "run.pool", [lightck.Tier(tier, every="0.2s")])
    with session:
        train(model, optimizer, 1)
        session.flush()
        train(model, optimizer, 2, start=1)
        until(lambda: steps_in(tier) and steps_in(tier)[-1] == 2)  # of step 3 only the update was made


def test_each_tier_has_its_own_rate(tmp_path):
    tiers = [lightck.Tier(tmp_path / "often", every=1), lightck.Tier(tmp_path / "rarely", every=4)]
    model, optimizer, session = attached(tmp_path / "run.pool", tiers)
    with session:
        until(is_ready(session))
        trained(session, model, optimizer, 5)
    assert steps_in(tmp_path / "often") == [1, 2, 3, 4, 5]
    assert steps_in(tmp_path / "rarely") == [1, 4, 5]
    assert len({*os.listdir(tmp_path / "often"), *os.listdir(tmp_path / "rarely")}) == 1, "one claim for both"


@pytest.mark.parametrize(
    ("interval", "said"),
    [
        (4, "interval=4 saves only multiples of 4, so only multiples of 12 are sent. Pass a keep_every="),
        ("auto", 'interval="auto" chooses which steps are saved, so some'),
        (lightck.Auto(most=1), None),
        (3, None),
        (1, None),
    ],
)
def test_a_keep_every_whose_steps_are_not_all_saved_is_reported_at_attach(tmp_path, caplog, interval, said):
    tiers = [lightck.Tier(tmp_path / "tier", every="1h", keep_last=2, keep_every=6)]
    _, _, session = attached(tmp_path / "run.pool", tiers, interval=interval)
    session.close()
    assert ("keep_every=6" in caplog.text) == (said is not None)
    assert said is None or said in caplog.text


def test_the_steps_of_keep_every_and_keep_best_are_sent(tmp_path):
    options = {"keep_last": 2, "keep_every": 3, "keep_best": ("loss", 1, "min")}
    model, optimizer, session = attached(tmp_path / "run.pool", [lightck.Tier(tmp_path / "tier", every=100, **options)])
    with session:
        until(is_ready(session))
        for step in range(1, 9):
            train(model, optimizer, 1, start=step - 1)
            if step in (4, 5):
                session.log(loss=1.0 / step, accuracy=step)
            session.flush()
            until(is_ready(session))
    assert steps_in(tmp_path / "tier") == [1, 3, 4, 5, 6, 8]
    store = only_store(tmp_path / "tier")
    metrics = {each.step: read_manifest(store, each).metrics for each in store.listing().manifests}
    assert metrics[5] == {"loss": 0.2, "accuracy": 5.0}
    assert not metrics[6]


def test_only_what_retention_names_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(drain_link, "GRACE_SECONDS", 0.0)
    options = {"keep_last": 2, "keep_every": 4, "keep_best": ("loss", 1, "max")}
    tier = tmp_path / "tier"
    model, optimizer, session = attached(tmp_path / "run.pool", [lightck.Tier(tier, every=1, **options)])
    with session:
        until(is_ready(session))
        for step in range(1, 11):
            train(model, optimizer, 1, start=step - 1)
            session.log(loss=9 - abs(step - 6))
            until(is_ready(session))
    assert steps_in(tier) == [4, 6, 8, 9, 10]
    named = {each for name in only_store(tier).listing().manifests for each in _objects(tier, name)}
    assert named == set(only_store(tier).listing().objects), "no object is left that nobody names, and none is missing"


def _objects(tier: Path, name: Any) -> set[Any]:
    return {each.name for each in read_manifest(only_store(tier), name).objects}


def test_a_frozen_tensor_is_sent_once_also_after_a_restart(tmp_path):
    def begun(resume: bool) -> tuple[Any, Any, lightck.Session]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(1000, 500), torch.nn.Linear(500, 2))
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(model[1].parameters())
        tiers = [lightck.Tier(tmp_path / "tier", every=1)]
        return (
            model,
            optimizer,
            lightck.attach(model, tmp_path / "run.pool", optimizer=optimizer, tiers=tiers, resume=resume),
        )

    def step(model: Any, optimizer: Any, session: lightck.Session) -> int:
        model(torch.ones(1, 1000)).sum().backward()
        optimizer.step()
        session.flush()
        until(is_ready(session))
        return session.stats().tiers[0].bytes_sent

    model, optimizer, session = begun(resume=False)
    with session:
        until(is_ready(session))
        first = step(model, optimizer, session)
        second = step(model, optimizer, session) - first
    model, optimizer, session = begun(resume=True)
    with session:
        until(is_ready(session))
        after_restart = step(model, optimizer, session)
    assert first > 2_000_000
    assert second < 0.05 * first
    assert after_restart < 0.05 * first
    assert lightck.recover(tmp_path / "tier").step == 3


def test_of_several_checkpoints_of_one_step_the_last_one_counts(tmp_path):
    """The end of a training is saved once more, with the same step."""
    for number in range(6):  # the names have random digits
        pool, tier = tmp_path / f"{number}.pool", tmp_path / f"tier-{number}"
        model, optimizer, session = attached(pool, [lightck.Tier(tier, every=1)])
        until(is_ready(session))
        trained(session, model, optimizer, 2)
        session.close(done=True)
        assert len(only_store(tier).listing().manifests) == 3
        pool.unlink()
        model, optimizer, session = attached(pool, [lightck.Tier(tier, every=1)], resume=True)
        with session:
            assert session.done


def test_a_metric_that_is_never_logged_is_named(tmp_path, caplog):
    tiers = [lightck.Tier(tmp_path / "tier", every=1, keep_last=2, keep_best=("val_loss", 1, "min"))]
    model, optimizer, session = attached(tmp_path / "run.pool", tiers)
    with session:
        train(model, optimizer, 1)
        session.log(loss=1.0)
        session.log(loss=2.0)
        assert sum("got loss, and keep_best= asks for val_loss" in each for each in caplog.messages) == 1
    assert "was never logged" in caplog.text


def test_what_is_logged_of_a_step_that_was_sent_already_gets_there_too(tmp_path):
    options = {"keep_last": 2, "keep_every": 2, "keep_best": ("loss", 1, "min")}
    model, optimizer, session = attached(tmp_path / "run.pool", [lightck.Tier(tmp_path / "tier", every=100, **options)])
    with session:
        trained(session, model, optimizer, 2)
        assert steps_in(tmp_path / "tier") == [1, 2]
        session.log(loss=0.5)
        until(is_ready(session))
    store = only_store(tmp_path / "tier")
    assert {"loss": 0.5} in [read_manifest(store, each).metrics for each in store.listing().manifests]


def test_no_best_checkpoint_is_missed_while_the_drain_begins(tmp_path):
    tiers = [lightck.Tier(tmp_path / "tier", every=100, keep_last=2, keep_best=("loss", 1, "min"))]
    model, optimizer, session = attached(tmp_path / "run.pool", tiers)
    with session:
        train(model, optimizer, 1)
        session.log(loss=0.0)
        train(model, optimizer, 3, start=1)
    assert steps_in(tmp_path / "tier") == [1, 4]


def test_tiers_can_be_exports_for_other_programs(tmp_path):
    folder = tmp_path / "files"
    tier = lightck.Tier(folder, every=2, keep_last=1, format="safetensors")
    model, optimizer, session = attached(tmp_path / "run.pool", [tier])
    with session:
        for step in range(1, 6):
            train(model, optimizer, 1, start=session.step)
            session.flush()
            # An export that still runs puts the next one off to a later step.
            until(lambda file=folder / f"step-{step:08d}.safetensors", due=step % 2 == 0: not due or file.exists())
    assert [each.name for each in folder.iterdir()] == ["step-00000004.safetensors"]


# -- what is killed


TRAINING = """
import sys, time
import torch, lightck
from noisy_training import Noisy
model = Noisy()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
torch.manual_seed(1)
with lightck.attach(model, sys.argv[1], optimizer=optimizer, resume=True,
                    tiers=[lightck.Tier(sys.argv[2], every=sys.argv[4], rate=sys.argv[5] or None)]) as session:
    print(session.step, flush=True)
    while session.step < int(sys.argv[3]):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        session.end_step()
        time.sleep(0.003)
"""


def _started(words: Sequence[str]) -> subprocess.Popen[str]:
    tests = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(tests), str(tests / "cli"), str(tests.parent), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextmanager
def training(
    pool: Path, tier: Path, n_steps: int, every: str = "0.05s", before: Sequence[str] = (), rate: str = ""
) -> Iterator[subprocess.Popen[str] | ForkedProgram]:
    words = [str(pool), str(tier), str(n_steps), every, rate]
    process = _started([*before, sys.executable, "-c", TRAINING, *words]) if before else ForkedProgram(TRAINING, words)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_drain_of_a_killed_training_sends_the_newest_checkpoint(tmp_path):
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    with training(pool, tier, 10**6, "1h") as process:
        assert process.stdout.readline() == "0\n"
        until(lambda: lightck_step(pool) > 20)
        process.kill()
        process.wait()
        until(lambda: not drains())
    assert lightck.recover(tier).step == lightck.recover(pool).step


def lightck_step(pool: Path) -> int:
    with suppress(lightck.LightckError):
        return lightck.recover(pool).step
    return 0


def test_a_training_goes_on_from_its_tier_exactly_when_its_pool_is_lost(tmp_path):
    """Pool and process are lost twice; the end is that of a run without interruption."""
    whole, pool, tier = tmp_path / "whole.pool", tmp_path / "run.pool", tmp_path / "tier"
    with training(whole, tmp_path / "other", 150) as process:
        assert process.wait(timeout=120) == 0, process.stderr.read()
    begun = []
    for _ in range(2):
        with training(pool, tier, 150) as process:
            begun.append(int(process.stdout.readline()))
            until(lambda: lightck_step(pool) > begun[-1] + 30)
            process.kill()
            process.wait()
            until(lambda: not drains())
        pool.unlink()
    with training(pool, tier, 150) as process:
        begun.append(int(process.stdout.readline()))
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert begun == sorted(set(begun))
    assert "was rebuilt from step" in err
    one, other = lightck.recover(pool), lightck.recover(whole)
    assert one.step == other.step == 150
    assert same(one.model, other.model)
    assert same(one.optimizer, other.optimizer)
    assert same(lightck.recover(tier).model, one.model)


def test_a_killed_drain_is_started_again(tmp_path, caplog):
    model, optimizer, session = attached(tmp_path / "run.pool", [lightck.Tier(tmp_path / "tier", every=1)])
    with session:
        until(is_ready(session))
        trained(session, model, optimizer, 2)
        (pid,) = drains()
        os.kill(pid, signal.SIGKILL)
        until(lambda: pid not in drains())
        trained(session, model, optimizer, 2)
        assert "has ended (it was killed by signal 9), and is started again" in caplog.text
    assert steps_in(tmp_path / "tier")[-1] == 4
    assert claims_in(tmp_path / "tier") == 1


def test_a_drain_that_stands_still_stops_nothing(tmp_path):
    """It holds a slot: the training takes the others, and commits each step."""
    model, optimizer, session = attached(tmp_path / "run.pool", [lightck.Tier(tmp_path / "tier", every=1)])
    with session:
        until(is_ready(session))
        trained(session, model, optimizer, 1)
        (pid,) = drains()
        os.kill(pid, signal.SIGSTOP)
        for _ in range(20):
            train(model, optimizer, 1, start=session.step)
            assert session.flush() == session.step
        os.kill(pid, signal.SIGCONT)
    assert steps_in(tmp_path / "tier")[-1] == 21


def test_a_new_drain_waits_for_that_of_a_killed_training(tmp_path):
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    with training(pool, tier, 10**6) as process:
        process.stdout.readline()
        until(lambda: lightck_step(pool) > 5 and tier.is_dir() and steps_in(tier))  # now it holds POOL.drain
        (orphan,) = drains()
        os.kill(orphan, signal.SIGSTOP)
        process.kill()
    model = Noisy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True, tiers=[lightck.Tier(tier, every=1)]) as session:
        begun, sent = session.step, len(steps_in(tier))
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        session.flush()
        time.sleep(1.0)
        session.stats()
        assert len(steps_in(tier)) == sent, "it sends nothing while the orphan holds POOL.drain"
        os.kill(orphan, signal.SIGCONT)
    assert steps_in(tier)[-1] == begun + 1


def test_a_forked_child_does_not_keep_the_drain(tmp_path):
    """A worker of a loader may outlive its training for some seconds."""
    pool, tier, worker = tmp_path / "run.pool", tmp_path / "tier", tmp_path / "worker"
    training = os.fork()
    if not training:
        model, optimizer, session = attached(pool, [lightck.Tier(tier, every="1h")])
        until(is_ready(session))
        trained(session, model, optimizer, 1)
        train(model, optimizer, 1, start=1)
        session.flush()
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        worker.write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(training, 0)
    try:
        until(lambda: not drains())
        assert is_running(int(worker.read_text()))
    finally:
        os.kill(int(worker.read_text()), signal.SIGKILL)
    assert steps_in(tier) == [1, 2], "the first one, and the newest one after the kill"


@contextmanager
def stopped(pid: int, seconds: float) -> Iterator[None]:
    """The process stands still, and goes on by itself some time after the block."""
    os.kill(pid, signal.SIGSTOP)
    yield
    timer = threading.Timer(seconds, lambda: os.kill(pid, signal.SIGCONT))
    timer.daemon = True
    timer.start()


def test_close_sends_the_newest_checkpoint_although_the_drain_is_killed_again_and_again(tmp_path):
    model, optimizer, session = attached(tmp_path / "run.pool", [lightck.Tier(tmp_path / "tier", every=1)])
    until(is_ready(session))
    trained(session, model, optimizer, 2)
    for _ in range(2):
        os.kill(drains()[0], signal.SIGKILL)
        until(lambda: not drains())
        train(model, optimizer, 1, start=session.step)
        session.flush()
    os.kill(os.getpid(), 0)
    for pid in drains():
        os.kill(pid, signal.SIGKILL)
    session.close()
    assert steps_in(tmp_path / "tier")[-1] == 4
    assert session.stats().tiers[0].step == 4
    assert session.stats().tiers[0].checkpoints >= 3


def test_close_raises_if_no_drain_can_be_started(tmp_path, monkeypatch):
    model, optimizer, session = attached(tmp_path / "run.pool", [lightck.Tier(tmp_path / "tier", every=1)])
    until(is_ready(session))
    trained(session, model, optimizer, 1)

    monkeypatch.setattr(drain_start.subprocess, "Popen", no_process)
    os.kill(drains()[0], signal.SIGKILL)
    until(lambda: not drains())
    train(model, optimizer, 1, start=1)
    with pytest.raises(TierError, match="before the newest one was sent"):
        session.close()


def test_sigterm_to_the_training_and_its_drain_sends_the_newest_checkpoint(tmp_path):
    """A container or a batch system sends it to all processes."""
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    with training(pool, tier, 10**6, "1h") as process:
        process.stdout.readline()
        until(lambda: lightck_step(pool) > 20)
        for pid in (process.pid, *drains()):
            os.kill(pid, signal.SIGTERM)
        process.wait()
        until(lambda: not drains())
    assert lightck.recover(tier).step == lightck.recover(pool).step


def test_a_signal_to_a_drain_that_has_just_begun_does_not_end_it(tmp_path, caplog):
    model, optimizer, session = attached(tmp_path / "run.pool", [lightck.Tier(tmp_path / "tier", every="1h")])
    (drain,) = drains()
    os.kill(drain, signal.SIGTERM)
    with session:
        trained(session, model, optimizer, 2)
        assert drains() == [drain]
    assert steps_in(tmp_path / "tier")[-1] == 2
    assert "started again" not in caplog.text


def test_a_best_checkpoint_that_waits_for_the_drain_is_sent_at_close(tmp_path):
    tiers = [lightck.Tier(tmp_path / "tier", every=100, keep_last=2, keep_best=("v", 1, "min"))]
    model, optimizer, session = attached(tmp_path / "run.pool", tiers)
    until(is_ready(session))
    trained(session, model, optimizer, 2)
    with stopped(drains()[0], 0.5):
        train(model, optimizer, 1, start=2)
        session.log(v=0.1)
        for _ in range(6):
            train(model, optimizer, 1, start=session.step)
            session.flush()
    session.close()
    assert steps_in(tmp_path / "tier") == [1, 3, 9]


def test_what_was_logged_survives_a_kill_of_the_drain(tmp_path):
    tiers = [lightck.Tier(tmp_path / "tier", every=100, keep_last=2, keep_best=("v", 1, "min"))]
    model, optimizer, session = attached(tmp_path / "run.pool", tiers)
    with session:
        until(is_ready(session))
        trained(session, model, optimizer, 1)
        (pid,) = drains()
        os.kill(pid, signal.SIGSTOP)
        train(model, optimizer, 1, start=1)
        session.log(v=torch.tensor(0.25))
        os.kill(pid, signal.SIGKILL)
    store = only_store(tmp_path / "tier")
    assert {each.step: read_manifest(store, each).metrics for each in store.listing().manifests}[2] == {"v": 0.25}


def test_a_training_without_a_spare_slot_goes_on(tmp_path):
    """Its steps are faster than the sending of its state, and there are two slots."""
    model = torch.nn.Linear(1500, 1500)
    optimizer = torch.optim.Adam(model.parameters())
    tiers = [lightck.Tier(tmp_path / "tier", every=2, spare_slot=False)]
    with lightck.attach(model, tmp_path / "run.pool", optimizer=optimizer, tiers=tiers) as session:
        until(is_ready(session))
        for _ in range(30):
            model(torch.ones(1, 1500)).sum().backward()
            optimizer.step()
            session.end_step()
        session.flush()
    assert steps_in(tmp_path / "tier")[-1] == 30
    with open_pool_closing(tmp_path / "run.pool") as reader:
        assert len(reader.superblock.slots) == 2


@contextmanager
def open_pool_closing(pool: Path) -> Iterator[Any]:
    reader = open_pool(str(pool))
    yield reader
    reader.close()


def test_a_flood_of_metrics_neither_hangs_nor_loses_the_end(tmp_path):
    model, optimizer, session = attached(tmp_path / "run.pool", [lightck.Tier(tmp_path / "tier", every="1h")])
    until(is_ready(session))
    trained(session, model, optimizer, 1)
    with stopped(drains()[0], 0.5):
        for step in range(2000):
            session.log(**{f"metric-{number}": step for number in range(40)})
    train(model, optimizer, 1, start=1)
    session.close()
    assert steps_in(tmp_path / "tier")[-1] == 2


def test_an_orphan_that_cannot_send_does_not_stop_the_next_training(tmp_path):
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    with training(pool, tier, 10**6) as process:
        process.stdout.readline()
        until(lambda: lightck_step(pool) > 5)
        tier.rename(tmp_path / "moved")
        tier.write_text("")
        process.kill()
        process.wait()
    model = Noisy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    tiers = [lightck.Tier(tmp_path / "healthy", every="1h")]
    with lightck.attach(model, pool, optimizer=optimizer, resume=True, tiers=tiers) as session:
        begun = session.step
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    assert steps_in(tmp_path / "healthy")[-1] == begun + 1
    until(lambda: not drains(), 20.0)  # the orphan sees that nothing is left for it


def test_no_process_is_left_when_sessions_follow_each_other(tmp_path):
    for number in range(3):
        tiers = [lightck.Tier(tmp_path / f"tier-{number}", every=1)]
        model, optimizer, session = attached(tmp_path / f"{number}.pool", tiers)
        with session:
            train(model, optimizer, 1)
    children = children_of(os.getpid())
    assert not [each for each in children if "lightck" in Path(f"/proc/{each}/comm").read_text()]


def test_a_session_whose_tier_another_one_claims_says_so_and_goes_on(tmp_path, caplog):
    from lightck.tiers.copying import copy_to_tier

    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    model, optimizer, session = attached(pool, [lightck.Tier(tier, every=1)])
    until(is_ready(session))
    trained(session, model, optimizer, 1)
    copy_to_tier(pool, tier, written_by="test", progress=_progress)
    trained(session, model, optimizer, 2)
    assert "Another process has claimed the tier" in caplog.text
    assert "next attempt" not in caplog.text
    os.kill(drains()[0], signal.SIGKILL)
    with pytest.raises(TierClaimedError, match="holds what this session has saved"):
        session.close()
    assert lightck.recover(pool).step == 3


def test_a_drain_that_could_not_be_started_is_started_later(tmp_path, monkeypatch):
    monkeypatch.setattr(drain_link, "_RESTART_PAUSE_SECONDS", 0.1)
    model, optimizer, session = attached(tmp_path / "run.pool", [lightck.Tier(tmp_path / "tier", every=1)])
    until(is_ready(session))
    trained(session, model, optimizer, 1)

    with monkeypatch.context() as patch:
        patch.setattr(drain_start.subprocess, "Popen", no_process)
        os.kill(drains()[0], signal.SIGKILL)
        until(lambda: not drains())
        for _ in range(2):
            train(model, optimizer, 1, start=session.step)
            session.flush()
    time.sleep(0.5)
    trained(session, model, optimizer, 1)
    session.close()
    assert steps_in(tmp_path / "tier")[-1] == 4


def run_words(*words: object) -> list[str]:
    return [sys.executable, "-m", "lightck", "run", "--", *map(str, words)]


def test_lightck_run_ends_after_the_drain_and_with_the_status_of_its_command(tmp_path):
    """The training is killed; what started it goes on when the newest checkpoint is in the tier."""
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    with training(pool, tier, 10**6, "1h", before=run_words()) as process:
        process.stdout.readline()
        until(lambda: lightck_step(pool) > 20)
        (drain,) = drains()
        (trainer,) = children_of(process.pid)
        os.kill(drain, signal.SIGSTOP)
        os.kill(trainer, signal.SIGKILL)
        time.sleep(0.5)
        assert process.poll() is None, "it waits for the drain"
        os.kill(drain, signal.SIGCONT)
        assert process.wait(timeout=30) == 128 + signal.SIGKILL
        assert not drains()
        assert "waiting until the newest checkpoint" in process.stderr.read()
    assert lightck.recover(tier).step == lightck.recover(pool).step


@pytest.mark.parametrize(
    ("script", "status"),
    [('"$@"; true', 128 + signal.SIGTERM), ('"$@" & until test -e "$0"; do sleep 0.1; done', 0)],
    ids=["shell killed", "shell ended"],
)
def test_lightck_run_passes_a_signal_on_to_a_training_that_its_shell_has_left_alone(tmp_path, script, status):
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    with training(pool, tier, 10**6, "1h", before=run_words("bash", "-c", script, tmp_path / "go")) as process:
        process.stdout.readline()
        until(lambda: lightck_step(pool) > 20)
        (drain,) = drains()
        trainer = int(Path(f"/proc/{drain}/stat").read_text().rpartition(")")[2].split()[1])
        (shell,) = children_of(process.pid)
        try:
            if not status:
                (tmp_path / "go").touch()
                until(lambda: not is_running(shell))
                time.sleep(0.5)
                assert process.poll() is None, "it waits for the drain of a training that goes on"
            process.terminate()
            assert process.wait(timeout=30) == status
            assert not is_running(trainer)
            assert not drains()
        finally:
            with suppress(ProcessLookupError):
                os.kill(trainer, signal.SIGKILL)
    assert lightck.recover(tier).step == lightck.recover(pool).step


def test_lightck_run_passes_signals_and_arguments_on(tmp_path):
    code = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print(sys.argv[1:]); "
    words = run_words(sys.executable, "-u", "-c", code + "signal.pause()", "--help", "-x")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "['--help', '-x']\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 7
    result = subprocess.run(run_words("no-such-program"), capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "cannot be run: No such file" in result.stderr


def test_the_command_of_lightck_run_gets_one_signal_for_a_ctrl_c(tmp_path):
    """The terminal sends it to both processes."""
    count = tmp_path / "count"
    code = f"""
import signal, time
got = []
signal.signal(signal.SIGINT, lambda *_: got.append(1))
print("ready", flush=True)
until = time.monotonic() + 60
while not got and time.monotonic() < until:
    time.sleep(0.01)
time.sleep(1)
open({str(count)!r}, "w").write(str(len(got)))
"""
    pid, terminal = pty.fork()
    if pid == 0:
        words = run_words(sys.executable, "-c", code)
        os.execvp(words[0], words)
    try:
        seen = b""
        while b"ready" not in seen:
            seen += os.read(terminal, 1000)
        os.write(terminal, b"\x03")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        os.close(terminal)
    assert count.read_text() == "1"


def test_the_best_stay_after_a_restart_if_their_metrics_were_logged_after_they_were_sent(tmp_path, monkeypatch):
    """Such a step has two manifests, one of them without metrics, and a folder lists them in any order."""
    tier = tmp_path / "tier"
    listing = FolderStore.listing

    def listed(store: FolderStore, is_newest_first: bool) -> Any:
        found = listing(store)
        order = sorted(found.manifests, key=lambda each: found.manifests[each], reverse=is_newest_first)
        return replace(found, manifests={each: found.manifests[each] for each in order})

    tiers = [lightck.Tier(tier, every=1, keep_last=2, keep_best=("loss", 2, "min"))]
    model, optimizer, session = attached(tmp_path / "run.pool", tiers)
    with session:
        for loss in (1.0, 2.0, 3.0, 4.0):
            trained(session, model, optimizer, 1)
            session.log(loss=loss)
            until(is_ready(session))
    logged = {1: {"loss": 1.0}, 2: {"loss": 2.0}, 3: {"loss": 3.0}, 4: {"loss": 4.0}}
    store = only_store(tier)
    sent = reversed(list(candidates_of(store, store.listing(), None, [])))
    assert {each.checkpoint.step: each.manifests[0].metrics for each in sent} == logged
    claim = max(only_store(tier).listing().claims)
    for is_newest_first in (False, True):
        monkeypatch.setattr(FolderStore, "listing", lambda store, order=is_newest_first: listed(store, order))
        writer = TierWriter(only_store(tier), Writer(claim, 0, 1), "test")
        writer.use_own()
        assert writer.sent() == logged


def test_two_trainings_that_began_anew_in_one_tier_do_not_replace_each_other(tmp_path):
    """Two jobs by mistake, which start at the same time: the second one claims before the first has sent anything."""
    tiers = [lightck.Tier(tmp_path / "tier", every="1h")]
    model, optimizer, session = attached(tmp_path / "a.pool", tiers, resume=True)
    other, other_optimizer, other_session = attached(tmp_path / "b.pool", tiers, resume=True)
    train(other, other_optimizer, 2)
    other_session.close()
    train(model, optimizer, 4)
    with pytest.raises(TierClaimedError, match="Another process has claimed"):
        session.close()
    before = (tmp_path / "a.pool").read_bytes()
    with pytest.raises(TierClaimedError, match="two trainings that both began anew"):
        attached(tmp_path / "a.pool", tiers, resume=True)
    assert (tmp_path / "a.pool").read_bytes() == before


def test_a_damaged_newest_checkpoint_of_the_pool_that_a_tier_holds_is_named(tmp_path, caplog):
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    model, optimizer, session = attached(pool, [lightck.Tier(tier, every=1)])
    with session:
        trained(session, model, optimizer, 3)
    with closing(open_pool(str(pool))) as reader:
        newest = max(candidates(reader.commit_log()), key=lambda record: record.step)
        at, _ = reader.checkpoint(newest).range_of("model/0.weight", 0, 64)
    data = bytearray(pool.read_bytes())
    data[at] ^= 1
    pool.write_bytes(data)
    model, optimizer, session = attached(pool, [lightck.Tier(tier, every=1)], resume=True)
    with session:
        assert session.step == 2
    assert f"A tier has a newer one: step 3 of the tier {str(tier)!r}" in caplog.text
    assert f"lightck copy {tier} NEW.pool --step 3" in caplog.text


def test_a_step_that_the_script_has_restored_is_no_damage(tmp_path, caplog):
    pool, tiers = tmp_path / "run.pool", [lightck.Tier(tmp_path / "tier", every=1)]
    model, optimizer, session = attached(pool, tiers)
    with session:
        trained(session, model, optimizer, 3)
    model = net(64)
    optimizer = adam(model)
    lightck.recover(pool, model, optimizer, step=2)
    with lightck.attach(model, pool, optimizer=optimizer, tiers=tiers, resume=True) as session:
        assert session.step == 2
        train(model, optimizer, 1, start=2)
    assert "cannot be used" not in caplog.text


def test_a_continuation_that_a_later_session_has_replaced_is_no_damage(tmp_path, caplog):
    """The tier holds step 3 of the first session. The second one, without the tier, went on from step 1 to step 2."""
    pool, tiers = tmp_path / "run.pool", [lightck.Tier(tmp_path / "tier", every=1)]
    model, optimizer, session = attached(pool, tiers, slots=3)
    with session:
        trained(session, model, optimizer, 3)
    model = net(64)
    optimizer = adam(model)
    lightck.recover(pool, model, optimizer, step=1)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True):
        train(model, optimizer, 1, start=1)
    model, optimizer, session = attached(pool, tiers, resume=True)
    with session:
        assert session.step == 2
    assert "cannot be used" not in caplog.text


def test_a_copy_of_a_step_that_is_not_the_newest_says_how_to_go_on_from_it(tmp_path, caplog):
    tier = tmp_path / "tier"
    model, optimizer, session = attached(tmp_path / "run.pool", [lightck.Tier(tier, every=1)])
    with session:
        for step in (1, 2, 3):
            trained(session, model, optimizer, 1)
            until(lambda step=step: step in steps_in(tier))
    done = copy_from_tier(tier, tmp_path / "two.pool", step=2, progress=_progress)
    assert "lightck.recover(POOL, model, optimizer), then attach(POOL, tiers=...) without resume=True" in done.notes[0]
    other = copy_from_tier(tier, tmp_path / "three.pool", step=3, progress=_progress)
    assert not done.rejected + other.rejected + other.notes
    model = net(64)
    optimizer = adam(model)
    lightck.recover(tmp_path / "two.pool", model, optimizer)
    tiers = [lightck.Tier(tier, every=1)]
    with lightck.attach(model, tmp_path / "two.pool", optimizer=optimizer, tiers=tiers) as session:
        assert session.step == 2
        assert "cannot be used" not in caplog.text
        train(model, optimizer, 1, start=2)
    with lightck.attach(model, tmp_path / "two.pool", optimizer=optimizer, tiers=tiers, resume=True) as session:
        assert session.step == 3


# -- the newest of pool and tiers


def copied_pool(pool: Path, name: str) -> Path:
    """A machine that does not know what happens elsewhere."""
    new = pool.with_name(name)
    new.write_bytes(pool.read_bytes())
    new.chmod(0o600)
    return new


def test_a_pool_of_a_machine_that_was_replaced_is_made_anew(tmp_path, caplog):
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    model, optimizer, session = attached(pool, [lightck.Tier(tier, every=1)])
    with session:
        train(model, optimizer, 3)
    old = copied_pool(pool, "old.pool")
    model, optimizer, session = attached(pool, [lightck.Tier(tier, every=1)], resume=True)
    with session:  # the machine that takes over
        train(model, optimizer, 1, start=3)
    model, optimizer, session = attached(old, (), resume=True)
    with session:  # the old machine goes on without the tier, farther
        train(model, optimizer, 5, start=3)
    model, optimizer, session = attached(old, [lightck.Tier(tier, every=1)], resume=True)
    with session:
        assert session.step == 4
    assert "held step 8 of an earlier start of the training" in caplog.text
    assert "Updates after that step, if there were any, are lost" in caplog.text


def continued(pool: Path, tiers: list[Any], n_updates: int) -> int:
    """Continue a training with these tiers, and return the step from which it continued."""
    model, optimizer, session = attached(pool, tiers, resume=True)
    with session:
        began = session.step
        train(model, optimizer, n_updates, start=began)
    return began


def test_two_continuations_of_one_run_in_two_tiers_are_refused_by_name(tmp_path):
    """The pool is lost while one tier is out of reach, and the run goes on from the other one alone."""
    pool, a, b = tmp_path / "run.pool", lightck.Tier(tmp_path / "a", every=1), lightck.Tier(tmp_path / "b", every=1)
    continued(pool, [a, b], 2)
    continued(pool, [a], 1)
    pool.unlink()
    assert continued(pool, [b], 5) == 2
    before = pool.read_bytes()
    for tiers in ([b, a], [a, b], [a]):
        with pytest.raises(TierClaimedError, match=r"two continuations of one run.*leave the tier with the other"):
            continued(pool, tiers, 1)
        assert pool.read_bytes() == before
    assert steps_in(tmp_path / "a") == [2, 3]
    assert steps_in(tmp_path / "b") == [2, 7]
    moved = pool.rename(tmp_path / "moved.pool")
    with pytest.raises(TierClaimedError, match=r"The tier '.*a' \(claim .*\) and the tier '.*b' \(claim"):
        continued(pool, [a, b], 1)
    assert continued(pool, [a], 1) == 3, "a cure: leave one out, and name a pool that does not exist yet"
    assert continued(moved, [b], 1) == 7, "the other one"


def test_a_longer_continuation_elsewhere_does_not_replace_the_pool_unasked(tmp_path):
    """Its claim has a larger number, which says nothing, because it was made in another tier."""
    pool, a, b = tmp_path / "run.pool", lightck.Tier(tmp_path / "a", every=1), lightck.Tier(tmp_path / "b", every=1)
    continued(pool, [a, b], 2)
    for _ in range(3):
        continued(pool, [a], 1)
    pool.unlink()
    assert continued(pool, [b], 9) == 2
    with pytest.raises(TierClaimedError, match="two continuations of one run"):
        continued(pool, [b, a], 1)
    assert continued(pool, [b], 1) == 11


def test_tiers_that_were_left_out_for_a_while_are_no_other_continuation(tmp_path):
    pool, a, b = tmp_path / "run.pool", lightck.Tier(tmp_path / "a", every=1), lightck.Tier(tmp_path / "b", every=1)
    assert [continued(pool, tiers, 1) for tiers in ([a, b], [a], [b, a], [b], [a], [a, b])] == [0, 1, 2, 3, 4, 5]
    pool.unlink()
    assert continued(pool, [b, a], 1) == 6


def test_a_pool_that_is_newer_than_its_tier_is_taken(tmp_path, caplog):
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    model, optimizer, session = attached(pool, [lightck.Tier(tier, every=1)])
    with session:
        train(model, optimizer, 3)
    model, optimizer, session = attached(pool, (), resume=True)
    with session:  # without the tier it keeps the claim
        train(model, optimizer, 2, start=3)
    model, optimizer, session = attached(pool, [lightck.Tier(tier, every=1)], resume=True)
    with session:
        assert session.step == 5
        assert "rebuilt" not in caplog.text
    assert steps_in(tier) == [3, 5]


def test_a_copy_by_hand_does_not_count_as_newer(tmp_path):
    """``lightck copy`` claims the tier, which the training does not know."""
    from lightck.tiers.copying import copy_to_tier

    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    model, optimizer, session = attached(pool, ())
    with session:
        train(model, optimizer, 3)
        session.flush()
        copy_to_tier(pool, tier, written_by="test", progress=_progress)
        train(model, optimizer, 2, start=3)
    model, optimizer, session = attached(pool, [lightck.Tier(tier, every=1)], resume=True)
    with session:
        assert session.step == 5
    store = only_store(tier)
    highest = max(store.listing().claims)
    assert [each.step for each in read_claim(store, highest).path] == [3]


def test_a_copy_of_an_older_checkpoint_hides_no_newer_one(tmp_path):
    """The copy lies below the newest claim, before what the machine that took over has sent."""
    from lightck.tiers.copying import copy_to_tier

    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    model, optimizer, session = attached(pool, [lightck.Tier(tier, every=1)])
    with session:
        train(model, optimizer, 3)
    old = copied_pool(pool, "old.pool")
    model, optimizer, session = attached(pool, [lightck.Tier(tier, every=1)], resume=True)
    with session:  # the machine that takes over
        train(model, optimizer, 3, start=3)
        seen = everything(model, optimizer)
    copy_to_tier(old, tier, written_by="test", progress=_progress)
    assert max(only_store(tier).listing().manifests).step == 3
    model, optimizer, session = attached(old, [lightck.Tier(tier, every=1)], resume=True)
    with session:
        assert session.step == 6
        assert same(everything(model, optimizer), seen)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    yield lambda _: None


def test_a_damaged_checkpoint_of_a_tier_is_passed_over(tmp_path, caplog):
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    model, optimizer, session = attached(pool, [lightck.Tier(tier, every=1)])
    with session:
        until(is_ready(session))
        trained(session, model, optimizer, 3)
        seen = everything(model, optimizer)
        trained(session, model, optimizer, 1)
    newest = max(only_store(tier).listing().manifests)
    for each in _objects(tier, newest) - _objects(tier, sorted(only_store(tier).listing().manifests)[-2]):
        path = tier / str(each)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    checkpoint = lightck.recover(tier)
    assert checkpoint.step == 3
    assert checkpoint.rejected[0].step == 4
    pool.unlink()
    model, optimizer, session = attached(pool, [lightck.Tier(tier, every=1)], resume=True)
    with session:
        assert session.step == 3
        assert same(everything(model, optimizer), seen)
    assert "a newer checkpoint of a tier cannot be used" in caplog.text


def test_recover_restores_from_a_tier_also_lazily(tmp_path):
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    model, optimizer, session = attached(pool, [lightck.Tier(tier, every=1)])
    with session:
        until(is_ready(session))
        trained(session, model, optimizer, 3)
        seen = everything(model, optimizer)
    other = net(64, seed=1)
    other_optimizer = adam(other)
    assert lightck.recover(tier, other, other_optimizer).step == 3
    assert same(everything(other, other_optimizer), seen)
    with lightck.recover(tier, lazy=True) as lazy:
        assert torch.equal(lazy.tensor("model/0.weight"), model[0].weight)
    assert lightck.recover(tier, step=2).step == 2


def test_a_training_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path):
    """Its claim is in the tier already, and its pool does not say which run it was."""
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"

    def work() -> None:
        attached(pool, [lightck.Tier(tier, every=1)])
        os.kill(os.getpid(), signal.SIGKILL)

    with suppress(Exception):
        in_child(work)
    assert claims_in(tier) == 1
    model, optimizer, session = attached(pool, [lightck.Tier(tier, every=1)], resume=True)
    with session:
        train(model, optimizer, 2)
    assert lightck.recover(tier).step == 2


# -- what is refused


def test_a_tier_of_another_run_is_refused_and_nothing_changes(tmp_path):
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    model, optimizer, session = attached(pool, [lightck.Tier(tier, every=1)])
    with session:
        train(model, optimizer, 3)
    with pytest.raises(TierClaimedError, match=r"holds checkpoints.*resume=True"):
        attached(tmp_path / "new.pool", [lightck.Tier(tier, every=1)])
    assert not (tmp_path / "new.pool").exists()
    other = tmp_path / "other.pool"
    model, optimizer, session = attached(other, ())
    with session:
        train(model, optimizer, 1)
    data = other.read_bytes()
    with pytest.raises(TierClaimedError, match="another run"):
        attached(other, [lightck.Tier(tier, every=1)], resume=True)
    assert other.read_bytes() == data
    assert claims_in(tier) == 1
    with pytest.raises(CheckpointExistsError):
        attached(pool, [lightck.Tier(tier, every=1)])
    assert claims_in(tier) == 1


def test_a_folder_that_cannot_be_a_tier_is_an_error_at_attach(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("")
    for name, reason in (("file", "no folder"), ("full", "not empty"), ("missing/tier", "does not exist")):
        with pytest.raises(TierError, match=reason):
            attached(tmp_path / "run.pool", [lightck.Tier(tmp_path / name, every=1)])
    assert not (tmp_path / "run.pool").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"every": 0},
        {"every": "5"},
        {"every": "0s"},
        {"every": 1.5},
        {"every": True},
        {"every": 1, "keep_last": 1},
        {"every": 1, "keep_every": 2},
        {"every": 1, "keep_last": 2, "keep_best": ("loss", 3)},
        {"every": 1, "keep_best": ("loss", 3, "min")},
        {"every": 1, "keep_last": 2, "keep_best": ("loss", 0, "min")},
        {"every": 1, "format": "zip"},
        {"every": 1, "compress": "gzip"},
        {"every": 1, "compress": True},
        {"every": 1, "format": "safetensors", "compress": "zstd"},
        {"every": 1, "what": "all"},
        {"every": 1, "keep_last": 2, "keep_every": 3, "spare_slot": False},
        {"every": "5min", "format": "safetensors"},
        {"every": 1, "format": "safetensors", "rate": "1MB/s"},
        {"every": 1, "format": "safetensors", "spare_slot": False},
        {"every": 1, "rate": "1MB"},
        {"every": 1, "rate": 0},
        {"every": 1, "rate": True},
        {"every": 1, "rate": float("nan")},
    ],
)
def test_wrong_options_of_a_tier_are_named(options):
    with pytest.raises(ValueError, match="Tier"):
        lightck.Tier("/tmp/tier", **options)


def test_a_command_that_needs_a_pool_names_the_tier(tmp_path):
    model, optimizer, session = attached(tmp_path / "run.pool", [lightck.Tier(tmp_path / "tier", every=1)])
    with session:
        train(model, optimizer, 1)
    with pytest.raises(PoolPathError, match=r"is a tier.*lightck copy"):
        existing_pools(str(tmp_path / "tier"))


def test_wrong_tiers_are_named(tmp_path):
    tier = lightck.Tier(tmp_path / "tier", every=1)
    with pytest.raises(ValueError, match="no URL of a tier"):
        lightck.Tier("ftp://host/run", every=1)
    with pytest.raises(ValueError, match="'s3' in small letters"):
        lightck.Tier("S3://bucket/run", every=1)
    with pytest.raises(ValueError, match="name of a bucket has at least"):
        lightck.Tier("s3://b/run", every=1)
    with pytest.raises(ValueError, match="is a tuple"):
        lightck.Tier(tmp_path, every=1, keep_last=2, keep_best=["loss", 1, "min"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"pool lies in memory.*tiers=\[lightck.Tier\('s3://bucket/run'"):
        lightck.attach(net(64), "s3://bucket/run")
    with pytest.raises(UnsupportedError, match=r'Tier\(format="safetensors"'):
        exported = lightck.Tier(tmp_path, every=1, format="safetensors")
        attached(tmp_path / "run.pool", [exported], strategy=lightck.Gradients(4))
    for wrong in (tier, "folder", [str(tmp_path)]):
        with pytest.raises(TypeError, match="no list of tiers"):
            attached(tmp_path / "run.pool", wrong)
    with pytest.raises(ValueError, match="same folder"):
        attached(tmp_path / "run.pool", [tier, tier])
    with pytest.raises(ValueError, match="slots=8"):
        attached(tmp_path / "run.pool", [tier], slots=8)
    _model, _optimizer, session = attached(tmp_path / "run.pool", [tier])
    with session:
        for wrong in ("low", True, None, torch.ones(2)):
            with pytest.raises(TypeError, match="a metric is a number"):
                session.log(loss=wrong)
        with pytest.raises(ValueError, match="Log fewer"):
            session.log(**{f"metric-{number}": 1.0 for number in range(5000)})
        session.log(huge=10**400, nan=float("nan"))


# -- a tier that fails


def test_a_full_tier_is_reported_once_and_filled_when_there_is_space(tmp_path, caplog):
    def work(mount: Path) -> tuple[Any, ...]:
        blocker = mount / "blocker"
        model, optimizer, session = attached(tmp_path / "run.pool", [lightck.Tier(mount / "tier", every=1)])
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())
        logging.getLogger("lightck").addHandler(handler)
        with session:
            until(is_ready(session))
            trained(session, model, optimizer, 1)
            with suppress(OSError), blocker.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            for _ in range(3):
                train(model, optimizer, 1, start=session.step)
                session.flush()
                time.sleep(0.2)
            until(lambda: session.stats().tiers[0].error)
            error, step = session.stats().tiers[0].error, session.stats().tiers[0].step
            blocker.unlink()
            until(lambda: session.stats().tiers[0].error is None)
        return error, step, steps_in(mount / "tier")[-1], sum("Training goes on" in each for each in messages)

    error, step, last, n_warnings = on_small_tmpfs(1 << 20, work)
    assert "No space left" in error
    assert step == 1
    assert last == 4
    assert n_warnings == 1


def test_what_cannot_be_removed_is_reported_and_is_no_failure_to_send(tmp_path, caplog):
    tier = tmp_path / "tier"
    model, optimizer, session = attached(tmp_path / "run.pool", [lightck.Tier(tier, every=1, keep_last=2)])
    until(is_ready(session))
    trained(session, model, optimizer, 1)
    (claim,) = tier.glob("*/claim.json")
    claim.write_text("{}")
    trained(session, model, optimizer, 2)
    assert "were not removed" in session.stats().tiers[0].error
    session.close()
    assert steps_in(tier) == [1, 2, 3]
    assert sum("were not removed" in each for each in caplog.messages) == 1


def test_a_removal_that_works_again_is_not_reported_as_sending_again(tmp_path, caplog):
    """Every checkpoint was sent all the time, so the warning must not say that they are sent again."""
    tier = tmp_path / "tier"
    model, optimizer, session = attached(tmp_path / "run.pool", [lightck.Tier(tier, every=1, keep_last=2)])
    until(is_ready(session))
    trained(session, model, optimizer, 1)
    (claim,) = tier.glob("*/claim.json")
    content = claim.read_text()
    claim.write_text("{}")
    trained(session, model, optimizer, 1)
    claim.write_text(content)
    trained(session, model, optimizer, 1)
    session.close()
    assert steps_in(tier) == [1, 2, 3]
    assert "were not removed" in caplog.messages[0]
    assert caplog.messages[1:] == [f"lightck: nothing fails now: checkpoints are sent to the tier {str(tier)!r}"]


def test_the_warning_of_a_damaged_checkpoint_has_whole_sentences(tmp_path, caplog):
    model, optimizer, session = attached(tmp_path / "run.pool", [lightck.Tier(tmp_path / "tier", every=1)])
    with session:
        until(is_ready(session))
        trained(session, model, optimizer, 1)
        (drain,) = drains()
        os.kill(drain, signal.SIGSTOP)
        train(model, optimizer, 1, start=1)
        session.flush()
        damage(tmp_path / "run.pool", "model/0.weight", [2])
        os.kill(drain, signal.SIGCONT)
        until(lambda: session.stats().tiers[0].error)
        trained(session, model, optimizer, 1)
    (warning,) = [each for each in caplog.messages if "Training goes on" in each]
    assert "The checkpoint of step 2 is damaged: block 0 of 'model/0.weight' does not match its checksum. " in warning
    assert warning.endswith("checksum. Training goes on, and the next attempt follows")


@pytest.mark.parametrize("err", [DamagedError("its manifest cannot be read"), PoolError("Its file is too short.")])
def test_the_warning_of_a_checkpoint_that_cannot_be_read_has_whole_sentences(monkeypatch, err):
    """An error of the format ends without a full stop, an error of the pool ends with one."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    tier = TierSettings("/nowhere", None, None, None, None, None, has_parent=False)
    settings = DrainSettings("/nowhere.pool", "000001-9f3a61c2", "test", None, (tier,), 1.0)
    drain = DrainProcess(own, settings, os.getpid())

    def fails(*_: object, **__: object) -> None:
        raise err

    monkeypatch.setattr(drain_process, "open_pool", fails)
    with own, other:
        drain._send(drain._outlets)
    assert drain._outlets[0].state.error == f"The checkpoint cannot be read: {str(err).rstrip('.')}."


def attached_with_tier_moved_away(tmp_path: Path) -> tuple[Path, Any, Any, lightck.Session]:
    """Attach, send step 1 to the tier that is returned, and rename that to ``tmp_path / "moved"``."""
    tier = tmp_path / "tier"
    model, optimizer, session = attached(tmp_path / "run.pool", [lightck.Tier(tier, every=1)])
    until(is_ready(session))
    trained(session, model, optimizer, 1)
    tier.rename(tmp_path / "moved")
    return tier, model, optimizer, session


def test_close_raises_if_the_newest_checkpoint_could_not_be_sent(tmp_path):
    tier, model, optimizer, session = attached_with_tier_moved_away(tmp_path)
    tier.write_text("")
    train(model, optimizer, 1, start=1)
    with pytest.raises(
        TierError,
        match=r"Step 2 could not be sent. The tier .* cannot .*: Not a directory.*Sent last: step 1.*lightck drain",
    ):
        session.close()
    assert lightck.recover(tmp_path / "run.pool").step == 2
    tier.unlink()


def test_an_emptied_tier_is_named_and_gets_checkpoints_again_when_it_is_back(tmp_path):
    """So is a folder on which nothing is mounted for a while: nothing may be written below it."""
    tier, model, optimizer, session = attached_with_tier_moved_away(tmp_path)
    tier.mkdir()
    train(model, optimizer, 1, start=1)
    session.flush()
    until(lambda: "does not hold the claim" in (session.stats().tiers[0].error or ""))
    assert "is not mounted" in session.stats().tiers[0].error
    assert not list(tier.iterdir())
    tier.rmdir()
    (tmp_path / "moved").rename(tier)
    with session:
        train(model, optimizer, 1, start=2)
    assert steps_in(tier)[-1] == 3
    assert lightck.recover(tier).step == 3


def test_a_tier_that_stays_empty_is_an_error_with_a_cure_that_works(tmp_path):
    from lightck.tiers.copying import copy_to_tier

    pool = tmp_path / "run.pool"
    tier, model, optimizer, session = attached_with_tier_moved_away(tmp_path)
    tier.mkdir()
    train(model, optimizer, 1, start=1)
    with pytest.raises(TierError, match=r"does not hold the claim.*Sent last: step 1.*lightck copy .* NEW"):
        session.close()
    copy_to_tier(pool, tmp_path / "new", written_by="test", progress=_progress)
    assert lightck.recover(tmp_path / "new").step == 2
    model, optimizer, session = attached(pool, [lightck.Tier(tier, every=1)], resume=True)
    with session:
        train(model, optimizer, 1, start=2)
    assert steps_in(tier)[-1] == 3


def test_an_object_that_somebody_removed_is_sent_again(tmp_path):
    """By hand, or by a rule of an object store that lets old objects expire. A frozen tensor is sent only once."""
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters())
    with lightck.attach(model, pool, optimizer=optimizer, tiers=[lightck.Tier(tier, every=1, keep_last=2)]) as session:
        until(is_ready(session))
        for number in range(4):
            model(torch.randn(2, 300)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            session.flush()
            until(lambda done=number + 1: session.stats().tiers[0].step == done)
            if number == 1:
                for path in tier.glob("*/rank-*/data/*"):
                    if path.stat().st_size > 300 * 300 * 4:
                        path.unlink()
    pool.unlink()
    found = lightck.recover(tier)
    assert found.step == 4
    assert all(torch.equal(found.model[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("n_sent", [1, 2])
@pytest.mark.parametrize("what", ["*/rank-*/data", "*/rank-*/steps", "*/rank-*"])
def test_a_folder_in_a_tier_that_somebody_removed_is_made_again(tmp_path, what, n_sent):
    """A purge of what is old or empty removes it."""
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    model, optimizer, session = attached(pool, [lightck.Tier(tier, every=1)])
    with session:
        until(is_ready(session))
        for _ in range(n_sent):
            trained(session, model, optimizer, 1)
        until(lambda: session.stats().tiers[0].step == n_sent)
        (folder,) = tier.glob(what)
        shutil.rmtree(folder)
        train(model, optimizer, 1, start=n_sent)
        session.flush()
        until(lambda: session.stats().tiers[0].step == n_sent + 1)
    pool.unlink()
    assert same(dict(lightck.recover(tier).model), dict(model.state_dict()))


def test_the_command_that_is_advised_compresses_as_the_tier_does():
    assert lightck.Tier("/t", every=1).drain_command("/p/run.pool") == "lightck drain /p/run.pool /t"
    assert (
        lightck.Tier("/t", every=1, compress="lz4").drain_command("run.pool")
        == "lightck drain run.pool /t --compress lz4"
    )


def test_the_command_that_is_advised_names_the_directory_of_a_group_and_that_a_store_has_options():
    in_store = lightck.Tier("s3://bucket/run", every=1, options={"region": "eu-central-1"})
    assert (
        in_store.drain_command("/p/run/rank-00001-of-00002.pool")
        == "lightck drain /p/run s3://bucket/run --store-option KEY=VALUE"
    )
    assert lightck.Tier("/t", every=1).drain_command("rank-00001-of-00002.pool") == "lightck drain . /t"


def test_a_tier_that_fails_for_long_is_an_error_in_the_loop(tmp_path, monkeypatch):
    monkeypatch.setattr(drain_link, "FAILING_SECONDS_MAX", 0.5)
    tier, model, optimizer, session = attached_with_tier_moved_away(tmp_path)
    tier.write_text("")
    with pytest.raises(TierError, match="could not be sent"):
        for _ in range(100):
            train(model, optimizer, 1, start=session.step)
            session.flush()
            time.sleep(0.1)
    tier.unlink()
    (tmp_path / "moved").rename(tier)
    with session:
        train(model, optimizer, 1, start=session.step)
    assert steps_in(tier)[-1] == session.step


# -- the process


def test_the_drain_has_no_torch_and_its_command_line_names_nothing(tmp_path):
    model, optimizer, session = attached(tmp_path / "run.pool", [lightck.Tier(tmp_path / "tier", every=1)])
    with session:
        until(is_ready(session))
        trained(session, model, optimizer, 2)
        (pid,) = drains()
        maps, words = Path(f"/proc/{pid}/maps").read_text(), Path(f"/proc/{pid}/cmdline").read_bytes()
        held = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    assert "libtorch" not in maps
    assert str(tmp_path).encode() not in words
    assert not [each for each in held if "run.pool" in each and not each.endswith((".drain", "run.pool"))]
    until(lambda: not (tmp_path / "run.pool.drain").exists())  # it is removed at the end


def test_a_checkpoint_names_its_claim(tmp_path):
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    model, optimizer, session = attached(pool, [lightck.Tier(tier, every=1)])
    with session:
        train(model, optimizer, 1)
    reader = open_pool(str(pool))
    stored = reader.checkpoint(max(reader.commit_log().records.values()))
    (claim,) = only_store(tier).listing().claims
    assert saved_by(stored.state).claim == str(claim)
    assert saved_by(stored.state).run_id == read_claim(only_store(tier), claim).run
    reader.close()


def test_an_export_that_fails_is_not_a_tier_that_fails(tmp_path):
    (tmp_path / "files").write_text("")
    with pytest.raises(KeepError):
        attached(tmp_path / "run.pool", [lightck.Tier(tmp_path / "files", every=2, format="safetensors")])
