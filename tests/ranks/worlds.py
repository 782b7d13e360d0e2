"""Worlds of two to four ranks: DDP, FSDP2, TP, HSDP and TP x FSDP2, with a model that has every kind of size.

A world trains with a pool for each rank. The whole tensors at its end are what any other world must get.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ranked import run_ranks, values
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import lightck

from .trainings import PLAN, ddp_first, fsdp, hsdp, tp_fsdp, wrapper_of

WIDTH = 132
"""Divisible by 2, 3 and 4: tensor parallel with ``fully_shard`` cannot compute with uneven parts."""


class OddNet(nn.Module):
    """Has sizes that no number of ranks divides, a tied weight, a frozen and an empty parameter, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(5))
        self.first = nn.Linear(5, WIDTH)
        self.last = nn.Linear(WIDTH, 7)
        self.odd = nn.Linear(7, 11)
        self.tied = nn.Linear(7, 11, bias=False)
        self.tied.weight = self.odd.weight
        self.frozen = nn.Linear(11, 3)
        self.frozen.requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0, 3), requires_grad=False)  # FSDP2 reduces no empty gradient
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.last(torch.tanh(self.first(x * self.scale)))
        return self.frozen(self.odd(hidden) + self.tied(hidden)).sum() + self.empty.sum()


@dataclass(frozen=True)
class World:
    """``shard``: turns the model into the one that is attached; ``wrap``: into the one that the loop calls."""

    n_ranks: int
    shard: Callable[[nn.Module], Any] = lambda model: None
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    n_same_data: int = 1
    """So many neighbouring ranks get the same batches."""


def tp(n_ranks: int) -> Callable[[nn.Module], None]:
    def shard(model: nn.Module) -> None:
        parallelize_module(model, init_device_mesh("cpu", (n_ranks,)), PLAN)

    return shard


WORLDS = {
    "ddp 2": World(2, wrap=partial(DistributedDataParallel, find_unused_parameters=True)),
    **{f"ddp {n}": World(n, ddp_first, wrapper_of) for n in (3, 4)},  # their ranks divide what they write
    **{f"fsdp {n}": World(n, fsdp) for n in (2, 3, 4)},
    **{f"tp {n}": World(n, tp(n), n_same_data=n) for n in (2, 3, 4)},
    "hsdp": World(4, hsdp),
    "tp x fsdp": World(4, tp_fsdp, n_same_data=2),
}


def muon(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Muon takes matrices only."""
    return torch.optim.Muon([p for p in params if p.ndim == 2 and p.requires_grad], lr=1e-2)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, foreach=False),
    "AdamW fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "AdamW foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True, amsgrad=True),
    "SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "Muon": muon,
}


@dataclass
class Whole:
    """The whole tensors of a training, by name: of the model, and of the optimizer's state."""

    step: int
    model: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def build(world: World, optimizer: str = "AdamW", seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = OddNet()
    world.shard(model)
    return model, OPTIMIZERS[optimizer](model.parameters())


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * step + rank))


def updates(world: World, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    called = world.wrap(model)
    for step in steps:
        update(world, rank, called, optimizer, step)


def update(world: World, rank: int, called: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """``called``: the model as the loop calls it."""
    called(batch(rank // world.n_same_data, step)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole_of(step: int, model: Any, optimizer: torch.optim.Optimizer) -> Whole:
    """The whole tensors now. All ranks call this."""
    if hasattr(model, "reshard"):
        model.reshard()
    names = {p: name for name, p in model.named_parameters()}
    states = {f"{names[p]}/{key}": _whole(v) for p, held in optimizer.state.items() for key, v in held.items()}
    return Whole(step, {name: _whole(v) for name, v in model.state_dict().items()}, states)


def _whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def train(name: str, pools: Path, steps: int, optimizer: str = "AdamW", **options: Any) -> list[Whole]:
    """Train a world with lightck. Returns the whole tensors, as each rank sees them. ``options``: of attach."""

    def body(rank: int) -> Whole:
        model, opt = build(WORLDS[name], optimizer)
        with lightck.attach(model, pools, optimizer=opt, timeout=60, **options) as session:
            updates(WORLDS[name], rank, model, opt, range(steps))
        return whole_of(session.step, model, opt)

    return values(run_ranks(WORLDS[name].n_ranks, body))


def is_equal(one: Whole, other: Whole) -> bool:
    """Whether two trainings have the same tensors, to the bit."""
    pairs = ((one.model, other.model), (one.state, other.state))
    return one.step == other.step and all(
        a.keys() == b.keys() and all(torch.equal(value, b[key]) for key, value in a.items()) for a, b in pairs
    )
