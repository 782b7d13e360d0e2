"""``lightck drain``: what the drain of a killed training has left, sent by a process that is not its child."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from ranked import run_ranks, values
from ranks.trainings import TOPOLOGIES, body, is_equal
from toys import adam, in_child, net, same, train

import lightck
from lightck.cli import main
from lightck.cli.base import BAD, FAILED, OK
from lightck.errors import TierClaimedError, TierError, UnsupportedError
from lightck.tiers import follow
from lightck.tiers.drain_lock import DrainLock
from lightck.tiers.follow import Follower, Report
from lightck.tiers.late_drain import Delivered, LateDrain, Pools, SupersededError
from lightck.tiers.open_store import open_store
from lightck.tiers.pauses import pause_after
from lightck.tiers.tier_manifest import read_manifest
from tiers.kills import check_tier, children_of, is_running
from tiers.test_attached_tiers import (
    attached,
    claims_in,
    copied_pool,
    drains,
    is_ready,
    lightck_step,
    only_store,
    steps_in,
    trained,
    training,
    until,
)


def words(pool: Path, *dests: Any) -> list[str]:
    return [sys.executable, "-m", "lightck", "drain", str(pool), *map(str, dests)]


def called(*arguments: Any) -> tuple[int, str, str]:
    """Run the command in this process. Returns its status, and what it prints on stdout and stderr."""
    done = CliRunner().invoke(main, ["drain", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has set a handler for a signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = int(next(line for line in lines if line.startswith("SigCgt")).split()[1], 16)
    return bool(caught >> (number - 1) & 1)


@contextmanager
def follower(pool: Path, *dests: Any) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    process = subprocess.Popen(words(pool, *dests, "--follow", "--json"), stdout=pipe, stderr=pipe, text=True)
    try:
        until(lambda: process.poll() is not None or handles(process.pid, signal.SIGTERM))
        yield process
    finally:
        process.kill()
        process.communicate()


def said_next(process: subprocess.Popen[str]) -> dict[str, Any]:
    line = process.stdout.readline()
    assert line, process.stderr.read()
    found: dict[str, Any] = json.loads(line)
    return found


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Let a follower come to its end. Returns its status and what it has said on stderr."""
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def killed_with_its_drain(pool: Path, tier: Path, steps: int, every: str = "1h") -> None:
    """Train, and kill the training and its drain at one moment with SIGKILL."""
    with training(pool, tier, 10**6, every) as process:
        began = int(process.stdout.readline())
        until(lambda: lightck_step(pool) > began + steps)
        both = [process.pid, *(each for each in children_of(process.pid) if each in drains())]
        assert len(both) == 2
        for pid in both:
            os.kill(pid, signal.SIGSTOP)  # neither can act on the end of the other
        for pid in both:
            os.kill(pid, signal.SIGKILL)
        process.wait()
    until(lambda: not drains())


def left_by(
    folder: Path, steps: int, lacking: bool = True, compress: str | None = None, **options: Any
) -> tuple[Path, Path]:
    """A pool and a tier as a training leaves them that was killed together with its drain: the tier has the first
    checkpoint only. ``lacking``: whether it lacks the newest one."""
    pool, tier = folder / "run.pool", folder / "tier"

    def work() -> None:
        model, optimizer, session = attached(pool, [lightck.Tier(tier, every="1h", compress=compress)], **options)
        until(is_ready(session))
        if session.step == 0:
            trained(session, model, optimizer, 1)
        train(model, optimizer, steps - session.step, start=session.step)
        session.flush()
        if not lacking:
            session.close()
        for pid in children_of(os.getpid()):
            os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    with suppress(Exception):
        in_child(work)
    until(lambda: not drains())
    assert lightck.recover(pool).step == steps
    return pool, tier


def late(pool: Path, *tiers: Path) -> list[LateDrain]:
    pools = Pools(pool)
    pools.find()
    return [LateDrain(pools, open_store(tier), "test") for tier in tiers]


# -- once


def test_what_is_lacking_is_sent_below_the_claim_of_the_training_and_only_once(tmp_path):
    pool, tier = left_by(tmp_path, 5)
    assert steps_in(tier) == [1]
    status, out, err = called(pool, tier, "--json")
    assert status == OK, err
    facts = json.loads(out)
    (one,) = facts["checkpoints"]
    assert facts["pool"] == str(pool)
    assert (one["tier"], one["step"], one["ranks"]) == (str(tier), 5, 1)
    assert one["nbytes"] > 0
    assert one["sent_nbytes"] > 0
    assert claims_in(tier) == 1
    assert steps_in(tier) == [1, 5]
    sent, held = lightck.recover(tier), lightck.recover(pool)
    assert same(sent.model, held.model)
    assert same(sent.optimizer, held.optimizer)
    status, out, err = called(pool, tier)
    assert (status, err) == (OK, "")
    assert out == f"step 5 is in {tier} already\n"
    assert len(only_store(tier).listing().manifests) == 2, "nothing was sent again"
    assert not Path(f"{pool}.drain").exists()


def test_what_is_sent_is_compressed_if_that_is_asked_for(tmp_path):
    pool, tier = left_by(tmp_path, 3, compress="zstd")
    status, _, err = called(pool, tier, "--compress", "zstd")
    assert status == OK, err
    assert steps_in(tier) == [1, 3]
    store = open_store(tier)
    for each in store.listing().manifests:
        assert read_manifest(store, each).codecs == {"zstd"}
    sent, held = lightck.recover(tier), lightck.recover(pool)
    assert sent.step == 3
    assert same(sent.model, held.model)
    assert same(sent.optimizer, held.optimizer)


@pytest.mark.long
def test_it_waits_for_the_drain_of_a_training_and_says_what_it_waits_for(tmp_path):
    pool, tier = left_by(tmp_path, 3)
    lock = DrainLock(str(pool))
    assert lock.take()
    status, _, err = called(pool, tier, "--wait", "0.2s")
    assert status == FAILED
    assert "waiting for the drain of a training" in err
    assert "After 0.2 seconds the drain of a training" in err
    with subprocess.Popen(words(pool, tier), stdout=-1, stderr=-1, text=True) as process:
        assert "waiting" in process.stderr.readline()
        lock.release()
        assert process.wait(timeout=60) == OK
    assert steps_in(tier)[-1] == 3


@pytest.mark.long
def test_several_tiers_are_served_and_one_that_fails_does_not_stop_the_others(tmp_path):
    pool, near, far = tmp_path / "run.pool", tmp_path / "near", tmp_path / "far"

    def work() -> None:
        model, optimizer, session = attached(pool, [lightck.Tier(each, every="1h") for each in (near, far)])
        until(is_ready(session))
        trained(session, model, optimizer, 2)
        os.kill(children_of(os.getpid())[0], signal.SIGKILL)
        train(model, optimizer, 2, start=2)
        session.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    with suppress(Exception):
        in_child(work)
    until(lambda: not drains())
    moved = far.rename(tmp_path / "moved")
    status, out, err = called(pool, far, near)
    assert status == FAILED
    assert "does not exist" in err
    assert f"in {near}" in out
    moved.rename(far)
    assert called(pool, far, near)[0] == OK
    assert steps_in(near)[-1] == steps_in(far)[-1] == lightck.recover(pool).step


def test_a_damaged_checkpoint_is_not_sent_and_is_named_as_damage(tmp_path):
    pool, tier = left_by(tmp_path, 3)
    hurt = ["inject", pool, tmp_path / "hurt.pool", "--flip", "model/0.weight"]
    assert CliRunner().invoke(main, list(map(str, hurt))).exit_code == OK
    status, _, err = called(tmp_path / "hurt.pool", tier)
    assert status == BAD
    assert "is damaged" in err
    assert steps_in(tier) == [1]


def test_a_process_that_is_killed_at_any_put_leaves_the_tier_whole(tmp_path):
    """Then the next one sends the checkpoint."""
    pool, tier = left_by(tmp_path, 4)
    n_killed = 0
    for n_puts in range(1, 20):

        def work(left: int = n_puts) -> None:
            (drain,) = late(pool, tier)
            put = drain.store.put

            def dying(name: str, data: bytes | memoryview) -> None:
                nonlocal left
                left -= 1
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)
                put(name, data)

            drain.store.put = dying  # type: ignore[method-assign]
            with drain._pools.locked_for_sending() as is_alone:
                assert is_alone
                drain.send()
            os._exit(0)

        with suppress(Exception):
            in_child(work)
        check_tier(only_store(tier))
        if steps_in(tier) == [1, 4]:
            break
        assert steps_in(tier) == [1]
        n_killed += 1
    assert n_killed >= 3, "tensors, frame, table and manifest are put one after the other"
    assert same(lightck.recover(tier).model, lightck.recover(pool).model)


@pytest.mark.long
def test_the_commands_load_no_torch(tmp_path):
    pool, tier = left_by(tmp_path, 2)
    code = "import sys; from lightck.cli import main; main(sys.argv[1:], standalone_mode=False); "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, "drain", str(pool), str(tier)], check=True, timeout=60)
    assert steps_in(tier)[-1] == 2


# -- what is refused


def refused(pool: Path, tier: Path, error: type[Exception], match: str) -> None:
    (drain,) = late(pool, tier)
    with pytest.raises(error, match=match):
        drain.send()


def test_a_pool_whose_training_named_no_tier_is_refused_with_the_cure(tmp_path):
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    model = net()
    with lightck.attach(model, pool, optimizer=(optimizer := adam(model))):
        train(model, optimizer, 2)
    refused(pool, tier, UnsupportedError, f"named no tier(.|\n)*lightck copy {pool} {tier}")
    assert not tier.exists()


def test_a_tier_that_the_training_was_not_given_is_refused(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    pool, tier = left_by(tmp_path / "one", 2)
    _, foreign = left_by(tmp_path / "other", 2)
    before = steps_in(foreign)
    refused(pool, foreign, TierClaimedError, "is no tier of the training that saved step 2")
    (tmp_path / "empty").mkdir()
    refused(pool, tmp_path / "empty", TierClaimedError, "is no tier of the training")
    refused(pool, tmp_path / "nothing", TierError, "does not exist")
    claim = next(each for each in tier.iterdir() if each.is_dir())
    file = foreign / claim.name / "claim.json"
    file.parent.mkdir()
    file.write_bytes(next(foreign.glob("*/claim.json")).read_bytes())
    refused(pool, foreign, TierClaimedError, "belongs to another run")
    assert steps_in(foreign) == before


@pytest.mark.long
def test_a_tier_that_another_machine_has_claimed_is_refused_and_what_is_there_is_not(tmp_path):
    pool, tier = left_by(tmp_path, 4)
    zombie = copied_pool(pool, "zombie.pool")
    pool.unlink()
    left_by(tmp_path, 3, resume=True)  # it continues from step 1, which is in the tier
    (drain,) = late(zombie, tier)
    with pytest.raises(SupersededError, match="lacks step 4, and a newer training has made the claim") as found:
        drain.send()
    assert not found.value.went_on
    status, _, err = called(zombie, tier)
    assert status == FAILED
    assert "a newer training has made the claim" in err
    assert 4 not in steps_in(tier)


def test_wrong_usage_is_named(tmp_path):
    pool, tier = left_by(tmp_path, 2)
    status, _, err = called(tier, tier)
    assert status == FAILED
    assert "is a tier, and the first argument is the pool" in err
    status, _, err = called(pool)
    assert status == FAILED
    assert "Missing argument 'DEST...'" in err
    status, _, err = called(tmp_path / "no.pool", tier)
    assert status == FAILED
    assert "no.pool" in err


# -- beside the training


@pytest.mark.long
def test_a_follower_sends_what_trainings_leave_that_are_killed_with_their_drains(tmp_path):
    """It starts before the pool exists. The pool is lost in between, and each training continues from the tier."""
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    with follower(pool, tier) as process:
        assert process.stderr.readline() == f"waiting for the first checkpoint in {pool}\n"
        for number in range(3):
            killed_with_its_drain(pool, tier, 20)
            left = lightck.recover(pool)
            said = said_next(process)
            assert (said["step"], said["ranks"]) == (left.step, 1)
            assert said["sent_nbytes"] > 0
            sent = lightck.recover(tier)
            assert sent.step == left.step
            assert same(sent.model, left.model)
            assert same(sent.optimizer, left.optimizer)
            assert claims_in(tier) == number + 1
            if number == 1:
                pool.unlink()
        with training(pool, tier, left.step + 50) as last:
            assert int(last.stdout.readline()) == left.step
            assert last.wait(timeout=60) == 0
        assert said_next(process)["sent_nbytes"] == 0, "its own drain has sent it"
        status, err = ended(process)
    assert status == OK, err
    assert not Path(f"{pool}.drain").exists()
    whole = tmp_path / "whole.pool"
    with training(whole, tmp_path / "other", left.step + 50) as process:
        assert process.wait(timeout=120) == 0
    one, other = lightck.recover(tier), lightck.recover(whole)
    assert one.step == other.step
    assert same(one.model, other.model)
    assert same(one.optimizer, other.optimizer)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_killed_the_newest_checkpoint_is_in_the_tier_at_the_end(tmp_path, seed):
    """Trainer, drain and follower are killed in any order, again and again."""
    chance = random.Random(seed)
    print(f"seed {seed}")
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    for _ in range(4):
        with follower(pool, tier) as process, training(pool, tier, 10**6, chance.choice(["0.05s", "1h"])) as trainer:
            began = int(trainer.stdout.readline())
            until(lambda: lightck_step(pool) > began + 5)  # noqa: B023 - asked at once
            victims = [trainer.pid, *drains(), process.pid]
            chance.shuffle(victims)
            del victims[chance.randint(1, 3) :]
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
                time.sleep(chance.choice([0.0, 0.05, 1.0]))
            trainer.kill()
            trainer.wait()
            if process.pid not in victims:
                status, err = ended(process)
                assert status == OK, err
        until(lambda: not drains())
        assert called(pool, tier)[0] == OK
        check_tier(only_store(tier))
        sent, left = lightck.recover(tier), lightck.recover(pool)
        assert sent.step == left.step, f"seed {seed}"
        assert same(sent.model, left.model)


@pytest.mark.long
def test_a_signal_waits_for_the_drain_of_the_training_and_for_nothing_else(tmp_path):
    """A batch system signals all processes at once, and kills the drain before it is done."""
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    with training(pool, tier, 10**6, "1h") as trainer, follower(pool, tier, "--wait", "1min") as process:
        trainer.stdout.readline()
        until(lambda: lightck_step(pool) > 20)
        until(Path(f"{pool}.drain").exists)  # the drain works: else there would be nothing to wait for
        (drain,) = drains()
        os.kill(drain, signal.SIGSTOP)
        process.send_signal(signal.SIGUSR1)  # announces the end, and ends nothing
        process.send_signal(signal.SIGTERM)
        trainer.kill()
        trainer.wait()
        while "waiting for the drain of a training" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)  # says nothing new
        os.kill(drain, signal.SIGKILL)
        assert said_next(process)["step"] == lightck.recover(pool).step
        assert process.wait(timeout=60) == OK
    assert lightck.recover(tier).step == lightck.recover(pool).step


class Following:
    """A follower on a thread of this process."""

    def __init__(self, pool: Path, *tiers: Path) -> None:
        self.sent: list[Delivered] = []
        self.waiting: list[str] = []
        self.failed: list[str] = []
        self.error: BaseException | None = None
        report = Report(self.sent.append, self.waiting.append, self.failed.append)
        pools = Pools(pool)
        self._follower = Follower(pools, [LateDrain(pools, open_store(each), "test") for each in tiers], report, 20.0)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self._follower.follow()
        except lightck.LightckError as err:
            self.error = err

    def __enter__(self) -> Following:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._follower.stop()
        self._thread.join()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()


@pytest.fixture
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers look often, and try again soon."""
    monkeypatch.setattr(follow, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(follow, "pause_after", lambda n_failures: 0.05)


@pytest.mark.usefixtures("_often")
def test_a_living_training_without_tiers_is_refused_at_its_first_checkpoint(tmp_path):
    pool = tmp_path / "run.pool"
    with Following(pool, tmp_path / "tier") as found:
        until(lambda: found.waiting)
        model = net()
        with lightck.attach(model, pool, optimizer=(optimizer := adam(model))) as session:
            train(model, optimizer, 2)
            session.flush()
            until(lambda: found.has_ended)
    assert isinstance(found.error, UnsupportedError)
    assert found.waiting == [f"waiting for the first checkpoint in {pool}"], "said once"


@pytest.mark.usefixtures("_often")
def test_a_living_training_with_another_tier_is_refused_at_its_first_checkpoint(tmp_path):
    pool = tmp_path / "run.pool"
    (tmp_path / "wrong").mkdir()
    with Following(pool, tmp_path / "wrong") as found:
        model, optimizer, session = attached(pool, [lightck.Tier(tmp_path / "right", every="1h")])
        with session:
            train(model, optimizer, 2)
            session.flush()
            until(lambda: found.has_ended)
    assert isinstance(found.error, TierClaimedError)
    assert "is no tier of the training" in str(found.error)


@pytest.mark.usefixtures("_often")
def test_nothing_is_sent_while_a_training_or_its_drain_lives(tmp_path):
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    model, optimizer, session = attached(pool, [lightck.Tier(tier, every="1h")])
    with session:
        until(is_ready(session))
        trained(session, model, optimizer, 1)
        with Following(pool, tier) as found:
            trained(session, model, optimizer, 4)
            time.sleep(0.3)
            assert steps_in(tier) == [1]
            assert not Path(f"{pool}.drain").exists() or not DrainLock(str(pool)).take()
            session.close()
            until(lambda: found.sent)
    assert [(each.step, each.sent_nbytes) for each in found.sent] == [(5, 0)]
    assert len(only_store(tier).listing().manifests) == 2


@pytest.mark.usefixtures("_often")
def test_a_tier_that_fails_is_said_once_and_served_when_it_is_back(tmp_path):
    pool, tier = left_by(tmp_path, 3)
    moved = tier.rename(tmp_path / "moved")
    with Following(pool, tier) as found:
        until(lambda: found.failed)
        time.sleep(0.3)
        moved.rename(tier)
        until(lambda: found.sent)
    assert len(found.failed) == 1
    assert found.error is None
    assert steps_in(tier)[-1] == 3


@pytest.mark.long
@pytest.mark.usefixtures("_often")
def test_an_old_pool_is_no_reason_to_end_and_the_training_that_makes_it_anew_is_served(tmp_path):
    """A machine comes back, and its follower begins before its training."""
    pool, tier = left_by(tmp_path, 4)
    zombie = copied_pool(pool, "zombie.pool")
    pool.unlink()
    left_by(tmp_path, 3, resume=True)
    called(pool, tier)
    zombie.rename(pool)
    with Following(pool, tier) as found:
        until(lambda: found.waiting)
        assert "waiting for a training: " in found.waiting[0]
        left_by(tmp_path, 7, resume=True)
        until(lambda: found.sent)
    assert found.error is None
    assert found.sent[-1].step == steps_in(tier)[-1] == 7
    assert claims_in(tier) == 3


@pytest.mark.usefixtures("_often")
def test_a_symbolic_link_that_is_changed_is_followed(tmp_path):
    pool, tier = left_by(tmp_path, 3)
    link, new = tmp_path / "current.pool", tmp_path / "new link"
    link.symlink_to(copied_pool(pool, "old.pool"))
    with Following(link, tier) as found:
        until(lambda: found.sent)
        left_by(tmp_path, 7, resume=True)
        new.symlink_to(pool)
        new.rename(link)
        until(lambda: len(found.sent) > 1)
    assert found.error is None
    assert [each.step for each in found.sent] == [3, 7]


@pytest.mark.usefixtures("_often")
def test_a_training_that_another_machine_has_replaced_ends_its_follower(tmp_path):
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    with Following(pool, tier) as found:
        until(lambda: found.waiting)
        model, optimizer, session = attached(pool, [lightck.Tier(tier, every="1h")])
        until(is_ready(session))
        trained(session, model, optimizer, 1)
        (tmp_path / "elsewhere").mkdir()
        other = copied_pool(pool, "other.pool")
        model_of_other, optimizer_of_other, session_of_other = attached(
            other, [lightck.Tier(tier, every="1h")], resume=True
        )
        with session_of_other:
            train(model_of_other, optimizer_of_other, 3, start=1)
        train(model, optimizer, 1, start=1)
        with pytest.raises(TierClaimedError):
            session.close()
        until(lambda: found.has_ended)
    assert isinstance(found.error, SupersededError)


def test_the_pause_after_failures_grows_to_a_minute_and_stays_there():
    assert 0.5 <= pause_after(1) <= 1.0
    assert 30.0 <= pause_after(7) <= 60.0
    assert 30.0 <= pause_after(100_000) <= 60.0, "a tier may fail for days"


# -- ranks


def killed_ranks(name: str, pools: Path, tier: Path, at: int) -> None:
    """Train a group, of which each rank kills its drain and itself behind the same step."""

    def on_step(rank: int, step: int) -> None:
        time.sleep(0.005)
        if step >= at + rank:  # one step apart, as a launcher kills them
            for pid in children_of(os.getpid()):
                if b"drain_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
                    until(lambda: not is_running(pid))  # noqa: B023 - asked at once
            os.kill(os.getpid(), signal.SIGKILL)

    topology = TOPOLOGIES[name]
    tiers = [lightck.Tier(tier, every="1h")]
    run_ranks(topology.n_ranks, body(topology, pools, 10**6, tiers=tiers, on_step=on_step), ends_others_after=5.0)


@pytest.mark.long
@pytest.mark.parametrize("name", ["fsdp", "ddp split"])
def test_the_newest_checkpoint_that_all_ranks_have_is_sent(name, pools, tier):
    killed_ranks(name, pools, tier, 40)
    held = lightck.recover(pools)
    assert held.step >= 39
    assert steps_in(tier)[-1:] != [held.step]
    status, out, err = called(pools, tier, "--json")
    assert status == OK, err
    (one,) = json.loads(out)["checkpoints"]
    assert (one["step"], one["ranks"]) == (held.step, 2)
    sent = lightck.recover(tier)
    assert sent.step == held.step
    assert same(sent.model, held.model)
    assert f"step {held.step} is in {tier} already (the parts of 2 ranks)" in called(pools, tier)[1]
    (rank, _) = sorted(pools.glob("rank-*.pool"))
    status, _, err = called(rank, tier)
    assert status == FAILED
    assert "is the pool of rank 0 of 2" in err


@pytest.mark.long
def test_followers_on_two_hosts_send_the_parts_of_their_ranks_and_the_group_goes_on_from_them(pools, tier):
    name = "ddp split, 2 hosts"
    killed_ranks(name, pools, tier, 40)
    for host in sorted(pools.iterdir()):
        status, _, err = called(host, tier)
        assert status == OK, err
    newest = steps_in(tier)[-1]
    assert newest >= 38
    subprocess.run(["rm", "-r", pools], check=True)
    runs = run_ranks(4, body(TOPOLOGIES[name], pools, 60, tiers=[lightck.Tier(tier, every="1h")]))
    plain = values(run_ranks(4, body(TOPOLOGIES[name], None, 60)))
    assert {run.began for run in values(runs)} == {newest}
    assert is_equal(values(runs), plain)


def test_drains_of_one_training_share_the_lock_and_whoever_sends_by_hand_has_it_alone(tmp_path):
    pool = str(tmp_path / "run.pool")
    first, second, again, by_hand = DrainLock(pool, 0), DrainLock(pool, 1), DrainLock(pool, 1), DrainLock(pool)
    assert first.take()
    assert second.take()
    assert not again.take()
    assert not by_hand.take()
    assert first.is_another_at_work(1)
    assert not second.is_another_at_work(2)
    first.release()
    second.release()
    assert not by_hand.take(), "the second drain of the next training shares it already"
    assert again.take()
    again.release()
    assert not Path(f"{pool}.drain").exists()
    assert by_hand.take()
    assert not first.take()
    by_hand.release()
    assert not Path(f"{pool}.drain").exists()
