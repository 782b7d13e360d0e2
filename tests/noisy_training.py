"""A training that shows what a copy of a pool has lost: dropout, buffers, a scheduler and a shuffled loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from toys import everything

import lightck


class Noisy(torch.nn.Sequential):
    """It draws from the global generator, and has buffers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(), torch.nn.Linear(16, 1)
        super().__init__(*layers)


def trained(path: Path, until: int, strategy: Any = None, *, resume: bool = False) -> Any:
    """Train with a scheduler and a shuffled loader, of which each pass has four batches. Returns the end state."""
    model = Noisy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = torch.utils.data.TensorDataset(torch.arange(64.0).reshape(16, 4) / 64)
    torch.manual_seed(1)
    loader = torch.utils.data.DataLoader(data, 4, shuffle=True)
    options = {"strategy": strategy, "resume": resume, "strict_data": True}
    with lightck.attach(model, path, optimizer=optimizer, **options) as session:
        assert session.recovered is None or session.recovered.exact
        batches = session.loader(loader)
        while session.step < until:
            for (x,) in batches:
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                if session.step == until:
                    break
    return everything(model, optimizer), scheduler.state_dict(), torch.get_rng_state()
