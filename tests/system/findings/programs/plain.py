"""Loops that were always right: what is found in them is a fault of the harness, or a false alarm."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from . import UPDATES, Run, program


def mlp(width: int = 48) -> torch.nn.Sequential:
    """48 x 48 floats are 9 KiB: more than what is copied at once at the boundary."""
    return torch.nn.Sequential(
        torch.nn.Linear(8, width),
        torch.nn.Tanh(),
        torch.nn.Linear(width, width),
        torch.nn.Tanh(),
        torch.nn.Linear(width, 4),
    )


@program()
def batches_by_hand(run: Run) -> None:
    run.seed()
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    while session.step < UPDATES:
        loss = F.mse_loss(model(torch.randn(6, 8)), torch.zeros(6, 4))
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.updated(loss)
    run.finished(model, [opt])


@program()
def session_loader(run: Run) -> None:
    run.seed()
    data = torch.utils.data.TensorDataset(torch.randn(30, 8, generator=torch.Generator().manual_seed(3)))
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    loader = session.loader(torch.utils.data.DataLoader(data, 6, shuffle=True))
    for _ in range(loader.epoch, 3):
        for (x,) in loader:
            loss = model(x).pow(2).mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            run.updated(loss)
    run.finished(model, [opt])
