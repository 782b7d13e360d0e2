"""Loops in which a resumed run draws other random numbers on the same data."""

from __future__ import annotations

import torch
from torch import nn

from . import UPDATES, Run, program


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 48), nn.Dropout(0.2), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 4))


def fixed(number: int) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(number))


@program(loses=3)
def evaluation_that_draws_at_the_top(run: Run) -> None:
    """Behind ``end_step()``, and before the loop's next() of a session loader, which sets the random states again."""
    run.seed()
    model = net()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.utils.data.TensorDataset(torch.stack([fixed(n)[0] for n in range(4 * UPDATES)]))
    session = run.attach(model)
    batches = iter(session.loader(torch.utils.data.DataLoader(data, 4)))
    while session.step < UPDATES:
        if session.step % 3 == 0:
            torch.rand(3)  # an evaluation that samples
        (x,) = next(batches)
        loss = model(x).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.updated(loss)
        session.end_step()
    run.finished(model, [opt])


@program(loses=3)
def drawn_between_attach_and_the_loop(run: Run) -> None:
    run.seed()
    model = net()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = run.attach(model)
    torch.randperm(100)  # a validation split
    while session.step < UPDATES:
        loss = model(fixed(session.step)).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.updated(loss)
        session.end_step()
    run.finished(model, [opt])


@program(loses=3)
def drawn_before_attach(run: Run) -> None:
    """The cure."""
    run.seed()
    model = net()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.randperm(100)
    session = run.attach(model)
    while session.step < UPDATES:
        loss = model(fixed(session.step)).pow(2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.updated(loss)
        session.end_step()
    run.finished(model, [opt])
