"""Save every few steps with torch.distributed.checkpoint into a pool, on one process or on several ranks with FSDP2.

    python examples/train_dcp.py --crash-at 30  # it kills itself in the 30th step ...
    python examples/train_dcp.py                # ... and continues from its last save
    torchrun --standalone --nproc-per-node 2 examples/train_dcp.py --path pools --crash-at 30
    torchrun --standalone --nproc-per-node 3 examples/train_dcp.py --path pools  # three continue from what two saved

It needs torch and lightck. Between two saves a crash loses steps; lightck.attach loses none (examples/train_ranks.py).
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from lightck.integrations.dcp import PoolReader, PoolWriter

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--path", default="dcp.pool", help="the pool; for several ranks a directory")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--every", type=int, default=5, help="steps between two saves")
parser.add_argument("--crash-at", type=int, help="kill this process in this step")
options = parser.parse_args()

has_ranks = "RANK" in os.environ
if has_ranks:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
if has_ranks:
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def state_now(step):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


first = 0
if PoolReader.validate_checkpoint_id(options.path):
    state = state_now(0)
    with PoolReader(options.path) as reader:
        dcp.load(state, storage_reader=reader)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    first = state["step"]
    print(f"goes on after step {first}", flush=True)

for step in range(first + 1, options.steps + 1):
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))  # each rank has the same batch here
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == options.crash_at:
        os.kill(os.getpid(), signal.SIGKILL)
    if step % options.every == 0:
        dcp.save(state_now(step), storage_writer=PoolWriter(options.path, step=step))

if not has_ranks or dist.get_rank() == 0:
    print(f"step {options.steps}, loss {loss.item():.6f}")
if has_ranks:
    dist.barrier()
    dist.destroy_process_group()
