"""``Replica`` on a device: the copies are measured and renewed in turn, and no checkpoint is called exact.

The device is a simulated one, made of CPU tensors (``slow_transfers.py``), so nothing drifts unless a test lets it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import slow_transfers
import torch
from slow_transfers import SlowTransfer
from torch import nn
from toys import BIG, adam, everything, is_step, killed_child, net, same, train

import lightck
from lightck.session import replica_updates

SEED = 20261128


@pytest.fixture(autouse=True)
def transfer(monkeypatch: pytest.MonkeyPatch) -> SlowTransfer:
    """All tensors are on one device."""
    monkeypatch.delenv("LIGHTCK_CHECK", raising=False)
    monkeypatch.setattr(replica_updates, "GROUP_NBYTES_MIN", 64)
    print("seed", SEED)
    slow = SlowTransfer(SEED, seconds=0.002)
    slow_transfers.install(monkeypatch, lambda tensor: slow)
    return slow


def attached(pool: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **options: bool) -> lightck.Session:
    return lightck.attach(model, pool, optimizer=optimizer, strategy=lightck.Replica(), **options)


@pytest.mark.parametrize("width", [8, BIG])
def test_each_checkpoint_holds_the_copy_and_is_not_called_exact(pool, width, caplog, transfer):
    model = net(width)
    model.append(nn.BatchNorm1d(2))
    optimizer = adam(model)
    with attached(pool, model, optimizer) as session:
        train(model, optimizer, 1)
        session.flush()
        sent = transfer.sent
        for number in range(1, 8):
            train(model, optimizer, 1, number)
            seen = everything(model, optimizer)
            session.flush()
            checkpoint = lightck.recover(pool)
            assert is_step(checkpoint, seen)
            assert not checkpoint.exact
            assert "Replica() took parameters and optimizer state from a copy" in checkpoint.reason
        stats = session.stats()
        assert (stats.replica_drift, stats.replica_drift_tensor, stats.skipped) == (0.0, None, 0)
        assert stats.replica_renewed >= 7  # at least one unit for each checkpoint
        assert transfer.sent - sent == 7  # the buffers, packed
    assert "FullState() is cheaper" not in caplog.text


def test_a_difference_is_measured_and_goes_away_in_turn(pool, caplog):
    model = net(BIG)
    optimizer = adam(model)
    with attached(pool, model, optimizer) as session:
        train(model, optimizer, 2)
        session.flush()
        session._steps.replica._replicas["2.bias"].copies[0].data.add_(0.5)
        for number in range(2, 12):
            train(model, optimizer, 1, number)
            session.flush()
        stats = session.stats()
        assert stats.replica_drift_tensor == "model/2.bias"
        assert 0.25 < stats.replica_drift < 1
        assert stats.skipped == 0
        assert is_step(lightck.recover(pool), everything(model, optimizer))
        assert "largest difference seen: 0." in lightck.recover(pool).reason
        assert "'model/2.bias'" in lightck.recover(pool).reason
    assert "given up" not in caplog.text


def test_a_resume_says_that_it_is_not_exact(pool, caplog):
    def killed() -> None:
        import os
        import signal

        model = net(BIG)
        optimizer = adam(model)
        session = attached(pool, model, optimizer)
        train(model, optimizer, 5)
        session.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    killed_child(killed)
    model = net(BIG)
    optimizer = adam(model)
    with attached(pool, model, optimizer, resume=True) as session:
        assert session.recovered is not None
        assert (session.step, session.recovered.exact) == (5, False)
        assert "does not go on bit for bit: Replica()" in caplog.text
        train(model, optimizer, 3, 5)
    other = net(BIG)
    of_other = adam(other)
    with lightck.attach(other, pool, optimizer=of_other, resume=True) as session:
        assert same(everything(other, of_other), everything(model, optimizer))
        train(other, of_other, 1, 8)
        session.flush()
        assert lightck.recover(pool).exact, "FullState reads the device"


def test_a_write_on_the_device_renews_the_copy(pool):
    model = net(BIG)
    optimizer = adam(model)
    with attached(pool, model, optimizer) as session:
        for number in range(6):
            train(model, optimizer, 1, number)
            if number == 3:
                with torch.no_grad():
                    model[0].weight.clamp_(-0.01, 0.01)
            session.flush()
            assert is_step(lightck.recover(pool), everything(model, optimizer))
        assert session.stats().replica_drift_tensor is None
