"""A loop that wraps a loader with a name of its own in each epoch: it goes on at the next epoch, or is refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from toys import adam, forward, killed_child, net, same, weights

import lightck
from lightck.errors import DriftError


class Unsized(torch.utils.data.IterableDataset):
    """As many items as each pass has in these tests, and no length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def train_with_a_loader_for_each_epoch(
    pool: Path, data: Any, first_epoch: int, kill_at: int | None = None
) -> dict[str, torch.Tensor]:
    """Train for 3 epochs of 3 batches. ``kill_at``: the process dies before the update that follows this step. Returns
    the weights."""
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True) as session:
        for epoch in range(first_epoch, 3):
            for numbers in session.loader(DataLoader(data, 2), name=f"epoch {epoch}"):
                optimizer.zero_grad()
                forward(model, 6 * epoch + int(numbers.sum())).backward()
                if session.step == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
    return weights(model)


def test_a_loop_with_a_loader_for_each_epoch_goes_on_at_the_next_epoch_and_a_warning_says_what_was_left_out(
    pool, caplog
):
    whole = train_with_a_loader_for_each_epoch(pool.with_name("whole.pool"), torch.arange(6), 0)
    killed_child(lambda: train_with_a_loader_for_each_epoch(pool, torch.arange(6), 0, kill_at=3))
    assert lightck.recover(pool).step == 3
    assert same(train_with_a_loader_for_each_epoch(pool, torch.arange(6), first_epoch=1), whole)
    (warning,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert "after the last batch of a pass over loader 'epoch 0' (epoch 0, 3 batches given)" in warning
    assert "(for example scheduler.step()) was not run again" in warning
    assert "begins a new pass over loader 'epoch 1', for which no position is saved" in warning


@pytest.mark.parametrize(("data", "kill_at"), [(torch.arange(6), 2), (Unsized(), 3)], ids=["mid-pass", "no length"])
def test_a_loader_for_each_epoch_is_refused_if_batches_may_be_left_in_the_pass_before(data, kill_at, pool):
    killed_child(lambda: train_with_a_loader_for_each_epoch(pool, data, 0, kill_at=kill_at))
    with pytest.raises(DriftError, match=r"in the middle of a pass over loader 'epoch 0'.*would be given twice"):
        train_with_a_loader_for_each_epoch(pool, data, first_epoch=1)
