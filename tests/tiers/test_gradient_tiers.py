"""Tiers of a training with ``Gradients``: the drain makes updates again, and sends whole checkpoints."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import ForkedProgram
from toys import everything, net, same, train

import lightck
from lightck.errors import UnsupportedError
from lightck.strategy.gradients import Gradients
from lightck.tiers.copying import copy_to_tier
from lightck.tiers.folder import FolderStore
from tiers.test_attached_tiers import drains, is_ready, lightck_step, steps_in, trained, until

TRAINING = """
import sys, time
import torch, lightck
from lightck.strategy.gradients import Gradients
from toys import net
torch.set_num_threads(1)
model = net(64)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
torch.manual_seed(1)
with lightck.attach(model, sys.argv[1], optimizer=optimizer, resume=True, strategy=Gradients(base_every=4),
                    tiers=[lightck.Tier(sys.argv[2], every=sys.argv[4])]) as session:
    print(session.step, flush=True)
    while session.step < int(sys.argv[3]):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        session.end_step()
        time.sleep(0.02)
"""


@pytest.fixture(autouse=True)
def _no_drain_is_left() -> Any:
    yield
    until(lambda: not drains())


def attached(path: Path, tiers: Any, **options: Any) -> tuple[Any, Any, lightck.Session]:
    model = net(64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"strategy": Gradients(base_every=3)} | options
    return model, optimizer, lightck.attach(model, path, optimizer=optimizer, tiers=tiers, **options)


@contextmanager
def _no_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    yield lambda _: None


def held_by(checkpoint: lightck.Checkpoint) -> Any:
    return dict(checkpoint.model), checkpoint.optimizer


def test_checkpoints_that_are_due_are_sent_whole(tmp_path):
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    model, optimizer, session = attached(pool, [lightck.Tier(tier, every=3)])
    seen = {}
    with session:
        until(is_ready(session))
        for _ in range(8):
            trained(session, model, optimizer, 1)
            seen[session.step] = everything(model, optimizer)
        (state,) = session.stats().tiers
        assert (state.step, state.checkpoints, state.error) == (6, 3, None)
    assert steps_in(tier) == [1, 3, 6, 8]
    for step in (1, 3, 6, 8):
        checkpoint = lightck.recover(tier, step=step)
        assert checkpoint.exact
        assert same(dict(checkpoint.model), seen[step]["model"])
        assert same([checkpoint.optimizer], seen[step]["optimizers"])


def test_a_training_goes_on_from_its_tier_when_its_pool_is_lost(tmp_path, caplog):
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    model, optimizer, session = attached(pool, [lightck.Tier(tier, every="1h", keep_last=2)])
    with session:
        trained(session, model, optimizer, 5)
    pool.unlink()
    model, optimizer, session = attached(pool, [lightck.Tier(tier, every=1)], resume=True)
    with session:
        assert session.step == 5
        assert "was rebuilt from step 5" in caplog.text
        trained(session, model, optimizer, 5)
        end = everything(model, optimizer)
    model, optimizer, session = attached(tmp_path / "other.pool", None)
    with session:
        train(model, optimizer, 10)
        assert same(everything(model, optimizer), end)
    assert same(held_by(lightck.recover(tier)), held_by(lightck.recover(tmp_path / "other.pool")))


@pytest.mark.long
def test_trainings_whose_pool_and_process_are_lost_go_on_exactly(tmp_path):
    def run(pool: Path, tier: Path, kills_at: int | None) -> tuple[int, str]:
        with ForkedProgram(TRAINING, [str(pool), str(tier), "150", "0.05s"]) as process:
            begun = int(process.stdout.readline() or -1)
            if kills_at is not None:
                until(lambda: lightck_step(pool) > begun + kills_at)
                process.send_signal(signal.SIGKILL)
            _, err = process.communicate(timeout=120)
        assert process.returncode == (0 if kills_at is None else -signal.SIGKILL), err
        until(lambda: not drains())
        return begun, err

    pool, tier, whole = tmp_path / "run.pool", tmp_path / "tier", tmp_path / "whole.pool"
    run(whole, tmp_path / "other", None)
    begun = []
    for kills_at in (20, 10):
        begun.append(run(pool, tier, kills_at)[0])
        assert lightck.recover(tier).step == lightck.recover(pool).step
        pool.unlink()
    step, err = run(pool, tier, None)
    assert [*begun, step] == sorted({*begun, step})
    assert "was rebuilt from step" in err
    assert lightck.recover(pool).step == 150
    assert same(held_by(lightck.recover(pool)), held_by(lightck.recover(whole)))
    assert same(held_by(lightck.recover(tier)), held_by(lightck.recover(whole)))


def test_a_pool_with_gradient_records_is_copied_to_a_tier(tmp_path):
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    model, optimizer, session = attached(pool, None)
    with session:
        train(model, optimizer, 5)
    assert copy_to_tier(pool, tier, written_by="a test", progress=_no_progress).step == 5
    assert same(held_by(lightck.recover(tier)), held_by(lightck.recover(pool)))


def test_lightck_drain_sends_what_a_killed_drain_has_left(tmp_path):
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    model, optimizer, session = attached(pool, [lightck.Tier(tier, every="1h")])
    with session:
        until(is_ready(session))
        trained(session, model, optimizer, 5)
        left = pool.with_name("left.pool")  # what a kill of both processes would leave
        shutil.copyfile(pool, left)
        left.chmod(0o600)
        assert steps_in(tier) == [1]
    for name in FolderStore(str(tier)).listing().manifests:
        if name.step > 1:  # the session has sent it at its end
            (tier / str(name)).unlink()
    assert steps_in(tier) == [1]
    done = subprocess.run([sys.executable, "-m", "lightck", "drain", left, tier], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "step 5" in done.stdout
    assert same(held_by(lightck.recover(tier)), held_by(lightck.recover(left)))


def test_what_such_a_tier_cannot_do_is_named(tmp_path):
    for tier in (
        lightck.Tier(tmp_path / "tier", every=1, keep_last=2, keep_every=10),
        lightck.Tier(tmp_path / "tier", every=1, keep_last=2, keep_best=("loss", 1, "min")),
    ):
        with pytest.raises(UnsupportedError, match="keep_every= or keep_best= of a tier"):
            attached(tmp_path / "run.pool", [tier])
    with pytest.raises(UnsupportedError, match="own_optimizers"):
        attached(
            tmp_path / "run.pool",
            [lightck.Tier(tmp_path / "tier", every=1)],
            strategy=Gradients(own_optimizers=True),
        )
