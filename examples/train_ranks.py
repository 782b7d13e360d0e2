"""Train on two ranks with DistributedDataParallel. Kill one rank, and torchrun starts all of them again in place.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1     # else torch 2.13 hangs at a restart in place with gloo
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/train_ranks.py
    kill -9 PID       (of one of the processes that the script prints; or pass --crash-at 20)

All ranks come back to the same step, and the last line is that of a run that was never killed. A real script differs in
the model and the data only. lightck is in the lines marked with `<-`. Other launchers start the same training:
launch_ray.py, launch_slurm.sh and launch_submitit.py.
"""

from __future__ import annotations

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightck  # <-


def train(pools: str, epochs: int = 4, crash_at: int = 0) -> None:
    """Train as one rank of the process group, which is initialized already."""
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same model on all ranks
    data = TensorDataset(torch.randn(256, 16), torch.randn(256, 1))
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # With more than two ranks, this flag keeps the order in which gradients are summed the same after a restart.
    parallel = DistributedDataParallel(model, find_unused_parameters=dist.get_world_size() > 2)
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    torch.manual_seed(1 + rank)  # other dropout on each rank

    session, first_epoch, first_step = None, 0, 0
    if pools != "none":
        session = lightck.attach(model, pools, optimizer=optimizer, resume=True)  # <-
        loader = session.loader(loader)  # <-
        first_epoch, first_step = loader.epoch, session.step  # <-
    print(f"rank {rank} is process {os.getpid()} and begins at step {first_step}", flush=True)

    step = first_step
    for epoch in range(first_epoch, epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(parallel(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if rank == 1 and step == crash_at and first_step == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            print(f"epoch {epoch + 1}: step {step}", flush=True)

    total = sum(p.detach().double().sum().item() for p in model.parameters())
    print(f"rank {rank} ended at step {step} with weights {total.hex()}", flush=True)
    if session is not None:
        session.close()  # <-
    dist.barrier()  # rank 0 serves the store of the group, so it ends last


def command_line(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of this training's arguments, whichever launcher starts it."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0] if description else None)
    parser.add_argument("--pools", default="pools", help="the directory of the pools; 'none' trains without lightck")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--crash-at", type=int, default=0, help="rank 1 kills itself after this step, once")
    return parser


def main() -> None:
    args = command_line(__doc__).parse_args()
    dist.init_process_group("gloo")
    train(args.pools, args.epochs, args.crash_at)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
