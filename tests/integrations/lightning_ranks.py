"""One rank of a fit: ``lightning_ranks.py STRATEGY OUT POOLS KILL_AT RANK_TO_KILL``, started by torchrun."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from toys import everything

import lightck
import lightck.integrations.lightning as integration
from integrations.lightning_programs import Classifier, Events, loader, plain, trainer_of

FSDP2, TENSOR_PARALLEL = (2, 1), (1, 2)
"""Numbers of ranks among which batches, and the tensors of a layer, are distributed."""


class Sharded(Classifier):
    """The parameters of each layer are sharded over the ranks (FSDP2)."""

    def configure_model(self) -> None:
        shard(self.net, self.device_mesh)


class Parallel(Classifier):
    """The two linear layers are split over the ranks (tensor parallelism)."""

    def configure_model(self) -> None:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)


def shard(model: nn.Sequential, mesh: Any) -> nn.Sequential:
    for layer in (model[0], model[-1], model):
        fully_shard(layer, mesh=mesh["data_parallel"])
    return model


def fitted(strategy: str, out: Path, pools: str | None, kill_at: int | None) -> dict[str, Any]:
    ours = [] if pools is None else [integration.LightckCallback(pools)]
    events = Events(kill_at)
    sizes = {"fsdp2": FSDP2, "tensor parallel": TENSOR_PARALLEL}.get(strategy)
    program = "accumulation, one cycle, validation in the epoch"
    given: Any = "ddp" if sizes is None else ModelParallelStrategy(*sizes)
    trainer, module, data = trainer_of(program, out, *ours, events, strategy=given, devices=2)
    if sizes is not None:
        module = (Sharded if sizes == FSDP2 else Parallel)("one cycle")
    trainer.fit(module, **data)
    if sizes is not None:
        assert any(isinstance(one, DTensor) for one in module.parameters())
    return {
        "state": everything(module, *trainer.optimizers),
        "step": trainer.global_step,
        "metrics": dict(trainer.callback_metrics),
        "schedulers": [plain(one.scheduler.state_dict()) for one in trainer.lr_scheduler_configs],
        "callbacks": [plain(one.state_dict(), out) for one in trainer.callbacks if one not in ours],
        "events": events.count,
    }


def looped(pools: str | None, kill_at: int | None) -> dict[str, Any]:
    """A loop of one's own with Fabric and FSDP2."""
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(shard, *FSDP2))
    fabric.launch()
    torch.manual_seed(5)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))
    model = fabric.setup_module(module)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), 0.02))
    batches: Any = fabric.setup_dataloaders(loader(38))
    session: lightck.Session | None = None
    if pools is not None:
        session = integration.attach(fabric, pools)
        batches = session.loader(batches)
    n_updates = 0
    for _ in range(0 if session is None else batches.epoch, 6):
        for x, y in batches:
            optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            n_updates += 1
            if n_updates == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    if session is not None:
        session.close(done=True)
    return {"state": everything(model, optimizer), "events": n_updates}


def of_this_rank(value: Any) -> Any:
    """The value with the shards of this rank in place of distributed tensors."""
    if isinstance(value, dict):
        return {key: of_this_rank(one) for key, one in value.items()}
    if isinstance(value, list):
        return [of_this_rank(one) for one in value]
    return value.to_local() if isinstance(value, DTensor) else value


def main(strategy: str, folder: str, pools: str, kill_at: str, rank_to_kill: str) -> None:
    rank, out = int(os.environ["RANK"]), Path(folder)
    given = None if pools == "None" else pools
    at = int(kill_at) if rank == int(rank_to_kill) else None
    found = looped(given, at) if strategy == "fabric" else fitted(strategy, out, given, at)
    found["random"] = torch.get_rng_state()
    out.mkdir(exist_ok=True)
    torch.save(of_this_rank(found), out / f"rank{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
