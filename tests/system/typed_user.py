"""A user's script as type checkers see it: CI runs ``mypy --strict`` and pyright in strict mode on it, with lightck
installed.

Each ``type: ignore`` is an error that has to be found: one that is not needed is an error itself. What pyright reads
to ignore is torch's.
"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

import lightck


def train(pool: str) -> int:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True, interval=lightck.Auto(budget=0.03)) as session:
        session.on_commit(lambda step: print(step + 1)).remove()
        batches = session.loader(loader, name="train")
        for _ in range(batches.epoch, 2):
            for (x,) in batches:
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        seconds: float = session.stats().stall_seconds
        name: str = session.step  # type: ignore[assignment]
        session.flush(1, 2, 3)  # type: ignore[call-arg]
        lightck.attach(model)  # type: ignore[call-arg]
        print(seconds, name)
        return session.step


def look(pool: str) -> lightck.Checkpoint:
    try:
        return lightck.recover(pool, step=3)
    except lightck.errors.PoolNotFoundError as error:
        raise SystemExit(str(error)) from error
