"""Trainings of several ranks for the tests: each topology with the model of a single process and with the same data."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ranked
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import lightck
from lightck.session.group import HOST_VARIABLE

WIDTH = 600
"""Makes tensors that are copied in the background; even, because FSDP2 x TP cannot compute with uneven shards."""
PLAN = {"first": ColwiseParallel(), "last": RowwiseParallel()}


class Net(nn.Module):
    """Has a parameter and a buffer at the root, so that FSDP's root group is not empty, and shards of size 0."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3))
        self.first = nn.Linear(3, width)
        self.last = nn.Linear(width, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.last(torch.tanh(self.first(x * self.scale)))


class WithDropout(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x).expand(-1, 4), 0.3)


class Grown:
    """An object in ``state=`` whose tensor changes at each step, and grows at some. A pool has space for 256 KiB that
    come later, and for what fills up its last 2 MiB; for more it gets a new file."""

    def __init__(self) -> None:
        self.value = torch.zeros(10)

    def updated(self, step: int, grows_at: dict[int, int]) -> None:
        self.value = self.value + step
        if step in grows_at:
            self.value = torch.cat([self.value, torch.full((grows_at[step],), float(step))])

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


@dataclass(frozen=True)
class Topology:
    """``shard``: turns the model into the one that is attached; ``wrap``: into the one that the loop calls."""

    n_ranks: int
    shard: Callable[[nn.Module], Any] = lambda model: None
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    lost_max: int = 1
    """At most so many finished steps are lost."""
    model: Callable[[], nn.Module] = Net
    n_same_data: int = 1
    """So many neighbouring ranks get the same batches: the ranks of one tensor parallel group."""
    grows_at: dict[int, dict[int, int]] = field(default_factory=dict)
    """Rank -> step -> how many numbers its object in ``state=`` gets after that step (see ``Grown``)."""
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    options: dict[str, Any] = field(default_factory=dict)
    """Of attach."""
    ranks_per_host: int = 0
    """If not 0, a folder stands for each host, and so many ranks are on it."""

    def on_host(self, rank: int, pools: Path) -> Path:
        """Put this process on the host of a rank, and return the directory of that host's pools."""
        if not self.ranks_per_host:
            return pools
        host = f"host-{rank // self.ranks_per_host}"
        os.environ[HOST_VARIABLE] = host
        pools.mkdir(exist_ok=True)
        return pools / host


def ddp_first(model: nn.Module) -> None:
    """Wrap the model before it is attached, so that the ranks of a host divide what they write. The wrapper is no part
    of the model, so the names of tensors stay as they are."""
    object.__setattr__(model, "wrapper", DistributedDataParallel(model, find_unused_parameters=True))


def wrapper_of(model: Any) -> nn.Module:
    return model.wrapper


def fsdp(model: Any, mesh: Any = None) -> None:
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)


def hsdp(model: nn.Module) -> None:
    fsdp(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def tp(model: nn.Module) -> None:
    parallelize_module(model, init_device_mesh("cpu", (2,)), PLAN)


def tp_fsdp(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], PLAN)
    fsdp(model, mesh["dp"])


TOPOLOGIES = {
    "ddp": Topology(2, wrap=DistributedDataParallel, model=WithDropout),
    "ddp 4": Topology(4, wrap=partial(DistributedDataParallel, find_unused_parameters=True)),
    "ddp split": Topology(2, ddp_first, wrapper_of, model=WithDropout),
    "ddp split 3": Topology(3, ddp_first, wrapper_of),
    "fsdp": Topology(2, fsdp),
    "fsdp 3": Topology(3, fsdp),
    "tp": Topology(2, tp, lost_max=2, n_same_data=2),
    "hsdp": Topology(4, hsdp, lost_max=2),
    "tp x fsdp": Topology(4, tp_fsdp, lost_max=2, n_same_data=2),
    "ddp, 2 hosts": Topology(2, wrap=DistributedDataParallel, model=WithDropout, ranks_per_host=1),
    "ddp split, 2 hosts": Topology(4, ddp_first, wrapper_of, ranks_per_host=2),
    "hsdp, 2 hosts": Topology(4, hsdp, lost_max=2, ranks_per_host=2),
}


def build(topology: Topology) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = topology.model()
    topology.shard(model)
    return model, topology.optimizer(model.parameters())


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(1000 * step + rank))


@dataclass
class Run:
    """What one rank returns: the step at which it began, its end state, and the session's counters."""

    began: int
    state: list[torch.Tensor]
    stats: Any = None
    common: int | None = None


def body(
    topology: Topology,
    pools: Path | None,
    updates: int,
    *,
    kill: tuple[int, int] | None = None,
    before: Callable[[int], Any] = lambda rank: None,
    on_step: Callable[[int, int], Any] = lambda rank, step: None,
    ends_step: bool = False,
    **options: Any,
) -> Callable[[int], Run]:
    """The body of a rank for ``run_ranks``. ``pools``: None trains without lightck. ``kill``: (rank, step): that rank
    dies in the iteration after that step. ``before``: called with the rank before attach. ``on_step``: called with rank
    and step after attach, and after each update. ``options``: of attach."""

    def run(rank: int) -> Run:
        before(rank)
        model, optimizer = build(topology)
        torch.manual_seed(100 + rank)
        session, grown, grows_at = None, Grown(), topology.grows_at.get(rank)
        if grows_at is not None:
            options["state"] = {"grown": grown}
        if pools is not None:
            directory = topology.on_host(rank, pools)
            given = {"resume": True, "timeout": 60} | topology.options | options
            session = lightck.attach(model, directory, optimizer=optimizer, **given)
        began = 0 if session is None else session.step
        on_step(rank, began)
        called = topology.wrap(model)
        for step in range(began, updates):
            called(batch(rank // topology.n_same_data, step)).pow(2).mean().backward()
            if kill == (rank, step):
                ranked.die()
            optimizer.step()
            grown.updated(step + 1, grows_at or {})
            on_step(rank, step + 1)
            optimizer.zero_grad()
            if session is not None and ends_step:
                session.end_step()
        if session is not None:
            session.close()
        state = [*ranked.everything(model, optimizer), *([] if grows_at is None else [grown.value])]
        if session is None:
            return Run(began, state)
        return Run(began, state, session.stats(), session.common)

    return run


def is_equal(one: list[Run], other: list[Run]) -> bool:
    """Whether all ranks of two runs ended in the same state, to the bit."""
    return all(
        len(a.state) == len(b.state) and all(map(torch.equal, a.state, b.state))
        for a, b in zip(one, other, strict=True)
    )
