"""One rank of a fit under DDP: ``lightning_ranks.py OUT POOLS KILL_AT``, started by torchrun."""

import os
import sys
from pathlib import Path

import torch
from toys import everything

from integrations.lightning_programs import Events, trainer_of
from lightck.integrations.lightning import LightckCallback

out, pools, kill_at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
rank = int(os.environ["RANK"])
ours = [] if pools == "None" else [LightckCallback(pools)]
events = Events(kill_at if rank == 1 else None)
program = "accumulation, one cycle, validation in the epoch"
trainer, module, data = trainer_of(program, out, *ours, events, strategy="ddp", devices=2)
trainer.fit(module, **data)
found = {
    "state": everything(module, *trainer.optimizers),
    "step": trainer.global_step,
    "metrics": dict(trainer.callback_metrics),
    "random": torch.get_rng_state(),
}
torch.save(found, out / f"rank{rank}.pt")
