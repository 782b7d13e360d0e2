"""A checkpoint is copied into another pool in batches, so that the copy needs little memory."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from ranked import run_ranks, values
from torch import nn

import lightck
from lightck.errors import CorruptPoolError
from lightck.ranks.directory import pool_name
from lightck.restore import pool_copies
from lightck.restore.reshard import reshard

WIDTHS = (64, 64, 64, 256, 64, 64)
BATCH_NBYTES = 300


def _train(directory: Path) -> dict[str, Any]:
    """Train in a group of two ranks. Returns the parameters and the optimizer's state by name."""

    def body(rank: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Linear(width, 64) for width in WIDTHS)
        optimizer = torch.optim.AdamW(model.parameters())
        directory.mkdir(exist_ok=True)
        with lightck.attach(model, directory, optimizer=optimizer):
            for step in range(3):
                sum(layer(torch.full((2, layer.in_features), 0.1 * step)).sum() for layer in model).backward()
                optimizer.step()
                optimizer.zero_grad()
        return {name: (tensor.detach(), optimizer.state[tensor]) for name, tensor in model.named_parameters()}

    return values(run_ranks(2, body))[0]


def _watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets, for each batch, the bytes in memory of it and of all batches before."""
    alive: list[Any] = []
    peaks: list[int] = []
    load = pool_copies.load_tensors

    def watched(*args: Any) -> dict[str, torch.Tensor]:
        tensors = load(*args)
        alive.extend(map(weakref.ref, tensors.values()))
        peaks.append(sum(tensor.nbytes for ref in alive if (tensor := ref()) is not None))
        return tensors

    monkeypatch.setattr(pool_copies, "load_tensors", watched)
    monkeypatch.setattr(pool_copies, "BATCH_NBYTES", BATCH_NBYTES)
    return peaks


def test_one_batch_at_a_time_is_in_memory_and_all_bytes_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = _train(tmp_path / "old")
    peaks = _watched(monkeypatch)
    reshard(str(tmp_path / "old"), str(tmp_path / "new"), 1, is_replicated=True, step=None)
    largest = 64 * max(WIDTHS) * 4
    assert len(peaks) > 32, "more batches than the engine has entries for jobs"
    assert max(peaks) <= max(BATCH_NBYTES, largest)
    copied = lightck.recover(tmp_path / "new")
    assert copied.step == 3
    states = {name: copied.optimizer["state"][number] for number, name in enumerate(trained)}
    for name, (tensor, state) in trained.items():
        assert torch.equal(copied.model[name], tensor)
        for key, value in state.items():
            assert torch.equal(states[name][key], value)


def test_damage_that_a_later_batch_finds_leaves_no_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _train(tmp_path / "old")
    peaks = _watched(monkeypatch)
    for rank in (0, 1):
        toys.damage(tmp_path / "old" / pool_name(rank, 2), "model/5.weight")
    with pytest.raises(CorruptPoolError, match=r"model/5\.weight"):
        reshard(str(tmp_path / "old"), str(tmp_path / "new"), 1, is_replicated=True, step=None)
    assert len(peaks) > 3
    assert not list((tmp_path / "new").glob("*.pool"))
