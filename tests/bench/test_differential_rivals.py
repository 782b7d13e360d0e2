"""LowDiff's algorithms, as the bench has them: what they write, and whether the state comes back bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench import rivals
from bench.rivals import steps
from bench.rivals.lowdiff import Worker, batches_in

UPDATES = 9


def training(seed: int = 0, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    return model, kind(model.parameters(), lr=0.05)  # type: ignore[call-arg]


def trained(name: str, folder: Path, options: dict[str, Any], **more: Any) -> tuple[Any, dict[str, torch.Tensor], int]:
    """Train and save, load into a new training: the rival that loaded, largest difference by name, loaded step."""
    model, optimizer = training(**more)
    rival = rivals.named(name, **options)
    rival.start(model, optimizer, str(folder))
    generator = torch.Generator().manual_seed(1)
    for step in range(1, UPDATES + 1):
        optimizer.zero_grad()
        model(torch.randn(4, 7, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        rival.save(step)
    rival.finish()
    assert rival.saved == UPDATES
    fresh, its = training(seed=5, **more)
    loader = rivals.named(name, **options)
    step = loader.load(fresh, its, str(folder))
    weights = fresh.state_dict()
    return loader, {key: (value - weights[key]).abs().max() for key, value in model.state_dict().items()}, step


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LowDiff (one by one)", {"base_every": 4, "batch": 3}),
        ("LowDiff (one by one)", {"base_every": 20, "batch": 2}),
        ("LowDiff (top-k)", {"base_every": 7, "batch": 2}),
        ("LowDiff+", {"persist_every": 4}),
    ],
)
def test_a_step_from_each_gradient_gives_the_same_bits(name, options, tmp_path):
    _, differences, step = trained(name, tmp_path, options)
    assert step == UPDATES
    assert max(differences.values()) == 0


def test_a_step_from_the_sum_of_gradients_gives_other_bits(tmp_path):
    """Adam's update is not linear in its gradients; the sums of a batch of one are the gradients."""
    loader, differences, step = trained("LowDiff", tmp_path, {"base_every": 20, "batch": 4})
    assert (step, loader.replayed) == (UPDATES, 2)
    assert max(differences.values()) > 0.05, "more than an update changes a weight"
    other = tmp_path / "other"
    other.mkdir()
    loader, differences, step = trained("LowDiff", other, {"base_every": 20, "batch": 1})
    assert (step, loader.replayed) == (UPDATES, 8)
    assert max(differences.values()) == 0


def test_a_step_from_the_sum_is_close_where_updates_are_linear(tmp_path):
    _, differences, _ = trained("LowDiff", tmp_path, {"base_every": 20, "batch": 4}, kind=torch.optim.SGD)
    assert max(differences.values()) < 1e-6


def test_full_checkpoints_and_batches_that_are_not_needed_are_removed(tmp_path):
    trained("LowDiff", tmp_path, {"base_every": 2, "batch": 2})
    assert steps.steps_in(tmp_path) == [8, 6]
    assert [(first, last) for first, last, _ in batches_in(tmp_path)] == [(7, 8), (9, 9)]


def test_a_batch_that_is_missing_ends_the_recovery(tmp_path):
    trained("LowDiff (one by one)", tmp_path, {"base_every": 20, "batch": 2})
    (tmp_path / "batch-00000004-00000005").unlink()
    fresh, its = training()
    assert rivals.named("LowDiff (one by one)").load(fresh, its, str(tmp_path)) == 3


@pytest.mark.parametrize("name", ["LowDiff", "LowDiff+"])
def test_an_update_that_was_not_saved_is_an_error(name, tmp_path):
    model, optimizer = training()
    rival = rivals.named(name)
    rival.start(model, optimizer, str(tmp_path))
    for _ in range(3):
        model(torch.ones(1, 7)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    rival.save(1)
    with pytest.raises(RuntimeError, match="the update before step 3 was not saved"):
        rival.save(3)
    rival.finish()


def test_an_error_of_the_thread_that_writes_reaches_the_training():
    worker = Worker()
    worker.start()
    worker.submit(lambda: Path("/nowhere/at/all").write_bytes(b""))
    with pytest.raises(FileNotFoundError):
        worker.finish()


def test_the_names_agree_and_the_other_tables_leave_them_out():
    assert not rivals.DIFFERENTIAL.keys() & rivals.TABLE.keys()
    for name in rivals.DIFFERENTIAL:
        assert rivals.named(name).name == name
        assert rivals.why_not(name) == ""
