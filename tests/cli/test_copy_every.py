"""``lightck copy --every``: a process beside the training, either of which may be killed at any time."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from calls import PROGRAM, environment
from forked import ForkedProgram
from test_copy import are_equal, copied, copy
from toys import adam, net, pool_with, train

import lightck
from lightck.cli.base import FAILED, OK
from lightck.errors import TierClaimedError
from lightck.tiers.copying import pool_sender
from lightck.tiers.decisions import Retention, complete, manifests_of
from lightck.tiers.folder import FolderStore
from lightck.tiers.pool_sender import PoolSender
from lightck.tiers.tier_manifest import read_manifest

TRAINING = """
import random, sys, time
import numpy, torch, lightck
from toys import adam, net
random.seed(0)
numpy.random.seed(0)
model = net(64)
optimizer = adam(model)
with lightck.attach(model, sys.argv[1], optimizer=optimizer, resume=True, slots=3) as session:
    while session.step < int(sys.argv[2]):
        generator = torch.Generator().manual_seed(session.step)
        model(torch.randn(4, 4, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        session.end_step()
        time.sleep(0.002)
"""
N_STEPS = 1000


@contextmanager
def started(*words: object) -> Iterator[subprocess.Popen[str]]:
    tests = Path(__file__).resolve().parents[1]
    env = environment(PYTHONPATH=f"{tests}{os.pathsep}{tests.parent}", OMP_NUM_THREADS="1")
    process = subprocess.Popen(
        [str(word) for word in words], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def training(pool: Path) -> ForkedProgram:
    return ForkedProgram(TRAINING, [str(pool), str(N_STEPS)])


def repeating(pool: Path, tier: Path, *options: object) -> list[object]:
    return [*PROGRAM, "copy", pool, tier, "--every", "0.05s", *options]


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.campaign)])
def test_whatever_is_killed_the_tier_is_whole_and_the_training_goes_on_from_it(tmp_path, seed):
    """Trainer, copy, or both are killed, again and again; then the pool is lost."""
    chance = random.Random(seed)
    whole, pool, tier = tmp_path / "whole.pool", tmp_path / "run.pool", tmp_path / "tier"
    with training(whole) as trainer:
        assert trainer.wait(timeout=120) == 0
    fetched: list[int] = []
    for number in range(4):
        with training(pool) as trainer, started(*repeating(pool, tier, "--keep-last", 2)) as sender:
            assert sender.stdout.readline(), sender.stderr.read()  # it has sent a checkpoint
            time.sleep(chance.uniform(0.0, 1.0))
            for process in chance.choice([[trainer], [sender], [trainer, sender]]):
                process.send_signal(signal.SIGKILL)
            time.sleep(chance.uniform(0.0, 0.5))
        new = tmp_path / f"new-{number}.pool"
        copied(tier, new)
        fetched.append(lightck.recover(new).step)
        assert fetched == sorted(fetched), f"seed {seed}: the tier went back"
        if chance.random() < 0.5:  # the machine is lost, and the training continues from the tier
            pool.unlink()
            new.rename(pool)
    pool.unlink(missing_ok=True)
    copied(tier, pool)
    with training(pool) as trainer:
        _, err = trainer.communicate(timeout=120)
        assert trainer.returncode == 0, err
    assert are_equal(pool, whole), f"seed {seed}"


def test_the_newest_checkpoint_is_sent_at_sigterm(tmp_path):
    model = net()
    with lightck.attach(model, tmp_path / "run.pool", optimizer=(optimizer := adam(model)), slots=3) as session:
        train(model, optimizer, 3)
        session.flush()
        words = repeating(tmp_path / "run.pool", tmp_path / "tier", "--json")
        words[words.index("0.05s")] = "1h"
        with started(*words) as sender:
            assert json.loads(sender.stdout.readline())["step"] == 3
            train(model, optimizer, 2, start=3)
            session.flush()
            sender.send_signal(signal.SIGTERM)
            out, err = sender.communicate(timeout=60)
    assert sender.returncode == OK, err
    assert json.loads(out)["step"] == 5


def test_a_pool_that_is_not_there_yet_is_waited_for(tmp_path):
    with started(*repeating(tmp_path / "run.pool", tmp_path / "tier", "--json")) as sender:
        assert sender.stderr.readline() == f"waiting for the first checkpoint in {tmp_path / 'run.pool'}\n"
        pool_with(tmp_path / "run.pool", steps=2)
        assert json.loads(sender.stdout.readline())["step"] in (1, 2)


def test_the_first_of_two_senders_ends_by_name(tmp_path):
    pool_with(tmp_path / "run.pool", steps=2)
    first = pool_sender(tmp_path / "run.pool", tmp_path / "tier", "test")
    first.send()
    second = pool_sender(tmp_path / "run.pool", tmp_path / "tier", "test")
    second.send()
    model = net()
    with lightck.attach(model, tmp_path / "run.pool", optimizer=(optimizer := adam(model)), resume=True):
        train(model, optimizer, 1, start=2)
    with pytest.raises(TierClaimedError, match="Another process has claimed the tier"):
        first.send()
    assert second.send().step == 3


def replace_link(link: Path, target: str) -> None:
    """Let a symbolic link name another file (``ln -sfn``)."""
    new = link.with_name("new link")
    new.symlink_to(target)
    new.rename(link)


def test_a_symbolic_link_is_resolved_at_each_round(tmp_path):
    link = tmp_path / "current.pool"
    pool_with(tmp_path / "run1.pool", steps=2)
    link.symlink_to("run1.pool")
    sender = pool_sender(link, tmp_path / "tier", "test")
    assert sender.send().step == 2
    model = net()
    optimizer = adam(model)
    (tmp_path / "moved.pool").write_bytes((tmp_path / "run1.pool").read_bytes())
    with lightck.attach(model, tmp_path / "moved.pool", optimizer=optimizer, resume=True):
        train(model, optimizer, 1, start=2)
    replace_link(link, "moved.pool")
    assert sender.send().step == 3  # the run is the same
    pool_with(tmp_path / "run2.pool", steps=7)
    replace_link(link, "run2.pool")
    with pytest.raises(TierClaimedError, match="another run"):
        sender.send()


def test_a_pool_of_another_run_is_not_sent_below_the_claim_of_the_first(tmp_path):
    pool_with(tmp_path / "run.pool", steps=2)
    sender = pool_sender(tmp_path / "run.pool", tmp_path / "tier", "test")
    sender.send()
    pool_with(tmp_path / "run.pool", steps=5, overwrite=True)  # its incarnation is the same
    with pytest.raises(TierClaimedError, match="another run"):
        sender.send()
    assert [each.step for each in complete(FolderStore(str(tmp_path / "tier")).listing())] == [2]


def test_a_pool_that_vanishes_after_it_was_sent_is_an_error(tmp_path):
    pool_with(tmp_path / "run.pool", steps=2)
    with started(*repeating(tmp_path / "run.pool", tmp_path / "tier", "--json")) as sender:
        assert json.loads(sender.stdout.readline())["step"] == 2
        (tmp_path / "run.pool").unlink()
        assert sender.stderr.readline().startswith(f"error: There is no pool at '{tmp_path / 'run.pool'}'")


def test_an_old_pool_that_is_sent_over_a_newer_step_names_that_step(tmp_path):
    pool_with(tmp_path / "run.pool", steps=2)
    copied(tmp_path / "run.pool", tmp_path / "tier")
    copied(tmp_path / "run.pool", tmp_path / "tier")
    status, out, _ = copy(tmp_path / "run.pool", tmp_path / "tier", "--step", "1")
    assert status == OK
    assert out.count("Step 1 was sent after it, and so counts as the newest; --step 2 fetches the other one.") == 2
    assert "Step 2 of claim 000001-" in out
    status, out, _ = copy(tmp_path / "run.pool", tmp_path / "tier")
    assert "was sent after it" not in out


def sender_after(tmp_path: Path, steps: int, retention: Retention, grace: float) -> tuple[PoolSender, FolderStore]:
    """Send each step of a training of which a part is frozen, and retain after each."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters())
    store = FolderStore(str(tmp_path / "tier"))
    sender = PoolSender(tmp_path / "run.pool", store, "test", retention, grace)
    with lightck.attach(model, tmp_path / "run.pool", optimizer=optimizer) as session:
        for _ in range(steps):
            model(torch.ones(1, 256)).sum().backward()
            optimizer.step()
            session.end_step()
            session.flush()
            sender.send()
            sender.retain()
    return sender, store


@pytest.mark.parametrize(
    ("retention", "left"),
    [
        (Retention(keep_last=2), [7, 8]),
        (Retention(keep_last=2, keep_every=3), [3, 6, 7, 8]),
        (Retention(), list(range(1, 9))),
    ],
)
def test_what_need_not_stay_is_removed_and_the_rest_is_whole(tmp_path, retention, left):
    """Without a grace. The frozen tensors are in the tier once."""
    sender, store = sender_after(tmp_path, 8, retention, grace=0.0)
    sender.retain()
    listing = store.listing()
    assert sorted(each.step for each in complete(listing)) == left
    named = {each.name for name in listing.manifests for each in read_manifest(store, name).objects}
    assert set(listing.objects) == named
    frozen = [path for path in (tmp_path / "tier").rglob("data/*") if path.stat().st_size >= 4 * 256 * 256]
    assert len(frozen) == 1
    for checkpoint in complete(listing):
        (name,) = manifests_of(listing, checkpoint)
        copied(tmp_path / "tier", tmp_path / f"{name.step}.pool", "--step", str(name.step))
        assert lightck.recover(tmp_path / f"{name.step}.pool").step == name.step


def test_nothing_is_removed_before_the_grace_has_passed(tmp_path):
    sender, store = sender_after(tmp_path, 5, Retention(keep_last=2), grace=3600.0)
    assert sender.retain() == 0
    assert len(complete(store.listing())) == 5


def test_a_checkpoint_that_was_sent_is_not_sent_again(tmp_path):
    pool_with(tmp_path / "run.pool", steps=2)
    sender = pool_sender(tmp_path / "run.pool", tmp_path / "tier", "test")
    assert sender.send().step == 2
    assert sender.send() is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--every", "5"], "Write 30s, 5min or 1h"),
        (["--every", "0s"], "Write 30s, 5min or 1h"),
        (["--every", "1h", "--step", "3"], "Pass one of them"),
        (["--keep-last", "3"], "goes with --every"),
        (["--every", "1h", "--keep-last", "1"], "2"),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, words):
    status, _, err = copy(tmp_path / "run.pool", tmp_path / "tier", *options)
    assert status == FAILED
    assert words in err
    assert not (tmp_path / "tier").exists()


def test_a_training_that_went_back_is_the_newest(tmp_path):
    """The process that sends outlives the training, which is restarted from an older step."""
    model = net()
    with lightck.attach(model, tmp_path / "run.pool", optimizer=(optimizer := adam(model)), slots=4):
        train(model, optimizer, 5)
    sender = pool_sender(tmp_path / "run.pool", tmp_path / "tier", "test")
    assert sender.send().step == 5
    model = net()
    optimizer = adam(model)
    lightck.recover(tmp_path / "run.pool", model, optimizer, step=3)
    with lightck.attach(model, tmp_path / "run.pool", optimizer=optimizer):
        train(model, optimizer, 1, start=10)  # other data
    assert sender.send().step == 4
    copied(tmp_path / "tier", tmp_path / "new.pool")
    assert are_equal(tmp_path / "new.pool", tmp_path / "run.pool")
