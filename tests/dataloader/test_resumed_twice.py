"""A pass that the loop leaves by ``break`` is left once, also if two runs in a row resume right before the break."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightck

EPOCHS, UPDATES = 4, 3
DATA = TensorDataset(torch.arange(40.0).reshape(10, 4) / 40)


def trained(pool: Path, until: int | None = None, previews: int = 0) -> tuple[int, list[torch.Tensor]]:
    """Train with passes of three batches out of five. ``until``: return after the ``break`` that follows this update,
    as a kill would. ``previews``: batches that the script takes before the loop."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    session = lightck.attach(model, str(pool), optimizer=optimizer, resume=True)
    loader = session.loader(DataLoader(DATA, 2, shuffle=True))
    for _ in range(previews):
        next(iter(loader))
    for _ in range(loader.epoch, EPOCHS):
        for i, (x,) in enumerate(loader, loader.start):
            if i == UPDATES:
                break
            model(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if session.step == until:
            break
    step = session.step
    session.abandon() if until is not None else session.close()
    return step, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("previews", [0, 1, 2])
def test_runs_that_resume_right_before_the_break_end_bit_identical(tmp_path: Path, previews: int) -> None:
    step, expected = trained(tmp_path / "whole.pool", previews=previews)
    assert step == EPOCHS * UPDATES
    pool = tmp_path / "run.pool"
    for until in (UPDATES, 2 * UPDATES, 3 * UPDATES):
        assert trained(pool, until, previews)[0] == until
    step, found = trained(pool, previews=previews)
    assert step == EPOCHS * UPDATES
    assert all(map(torch.equal, found, expected))
