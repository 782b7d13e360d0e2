"""A hundred thousand tiny tensors, and a thousand layers: what each tensor costs per step in Python.

The number counts all saved tensors, including optimizer state. The time is that of lightck's hooks, without waits for
copies.
"""

from __future__ import annotations

import os
from statistics import median
from typing import Any

import torch
from torch import nn

import lightck
from bench.measures.figures import spread
from lightck.errors import BenchError


def measure(options: dict[str, Any], folder: str) -> dict[str, Any]:
    many = _tiny_tensors(options["tensors"], options["steps"], os.path.join(folder, "many.pool"))
    return {**many, **_layers(options["layers"], os.path.join(folder, "layers.pool"))}


class _Many(nn.Module):
    """Parameters of three elements; with momentum each has two tensors in the state."""

    def __init__(self, n: int, value: float) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.full((3,), value)) for _ in range(n))

    def bits(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        momenta = [optimizer.state[p]["momentum_buffer"] for p in self.parts]
        return torch.stack([*(p.detach() for p in self.parts), *momenta])


def _many(n: int, value: float) -> tuple[_Many, torch.optim.Optimizer]:
    model = _Many(n, value)
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def _tiny_tensors(tensors: int, steps: int, pool: str) -> dict[str, Any]:
    model, optimizer = _many(tensors // 2, 0.0)
    gradient = torch.ones(3)
    taken: list[float] = []
    stalls: list[float] = []
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for _ in range(steps):
            for p in model.parts:
                p.grad = gradient
            before = session.stats()
            optimizer.step()
            session.end_step()
            after = session.stats()
            stall = after.stall_seconds - before.stall_seconds
            stalls.append(stall)
            taken.append(stall - (after.wait_seconds - before.wait_seconds))
        session.flush()
        expected, step = model.bits(optimizer), session.step
    other, other_optimizer = _many(tensors // 2, 7.0)
    found = lightck.recover(pool, other, other_optimizer)
    if found.step != step or not torch.equal(expected, other.bits(other_optimizer)):
        raise BenchError("Tiny tensors do not load back right.")
    settled = taken[len(taken) // 3 :]
    return {
        "tensors": tensors,
        "seconds_per_tensor": median(settled) / tensors,
        "seconds_per_tensor_p99": spread(settled).p99 / tensors,
        "stall_seconds": median(stalls[len(stalls) // 3 :]),
    }


def _layers(n: int, pool: str) -> dict[str, Any]:
    model, optimizer = _deep(n, seed=0)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        for _ in range(4):
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.flush()
        stall = session.stats().stall_seconds / session.step
    other, other_optimizer = _deep(n, seed=1)
    found = lightck.recover(pool, other, other_optimizer)
    if found.step != 4 or not _same(_bits(model, optimizer), _bits(other, other_optimizer)):
        raise BenchError(f"A model of {n} layers does not load back right.")
    return {"layers": n, "layers_stall_seconds": stall}


def _deep(n: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(n)))
    return model, torch.optim.Adam(model.parameters())


def _bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Every tensor of the state; before the first update the optimizer has none."""
    kept = [optimizer.state.get(p, {}) for p in model.parameters()]
    return [*model.state_dict().values(), *(state[name] for state in kept for name in sorted(state))]


def _same(expected: list[torch.Tensor], found: list[torch.Tensor]) -> bool:
    return len(expected) == len(found) and all(map(torch.equal, expected, found))
