"""One rank of a fit: ``lightning_ranks.py STRATEGY OUT POOLS KILL_AT RANK_TO_KILL``, started by torchrun."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from toys import everything

from integrations.lightning_programs import Classifier, Events, plain, trainer_of
from lightck.integrations.lightning import LightckCallback


class Sharded(Classifier):
    """The parameters of each layer are sharded over the ranks (FSDP2)."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.net[0], self.net[4], self.net):
            fully_shard(layer, mesh=mesh)


def of_this_rank(value: Any) -> Any:
    """The value with the shards of this rank in place of distributed tensors."""
    if isinstance(value, dict):
        return {key: of_this_rank(one) for key, one in value.items()}
    if isinstance(value, list):
        return [of_this_rank(one) for one in value]
    return value.to_local() if isinstance(value, DTensor) else value


def strategy_of(name: str) -> Any:
    return "ddp" if name == "ddp" else ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)


if __name__ == "__main__":
    strategy, out, pools, kill_at, killed = sys.argv[1], Path(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:])
    rank = int(os.environ["RANK"])
    ours = [] if pools == "None" else [LightckCallback(pools)]
    events = Events(kill_at if rank == killed else None)
    program = "accumulation, one cycle, validation in the epoch"
    trainer, module, data = trainer_of(program, out, *ours, events, strategy=strategy_of(strategy), devices=2)
    if strategy == "fsdp2":
        module = Sharded("one cycle")
    trainer.fit(module, **data)
    if strategy == "fsdp2":
        assert all(isinstance(one, DTensor) for one in module.parameters())
    found = {
        "state": of_this_rank(everything(module, *trainer.optimizers)),
        "step": trainer.global_step,
        "metrics": dict(trainer.callback_metrics),
        "schedulers": [plain(one.scheduler.state_dict()) for one in trainer.lr_scheduler_configs],
        "callbacks": [plain(one.state_dict(), out) for one in trainer.callbacks if one not in ours],
        "events": None if ours else events.count,
        "random": torch.get_rng_state(),
    }
    torch.save(found, out / f"rank{rank}.pt")
