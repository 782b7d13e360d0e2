"""Train on two ranks with DeepSpeed's ZeRO-2 in bf16, and go on after a kill as if nothing had happened.

    pip install 'lightck[deepspeed]'
    export DS_ACCELERATOR=cpu       # without a GPU
    torchrun --standalone --nproc-per-node 2 examples/train_deepspeed.py      # kill it whenever you like ...
    torchrun --standalone --nproc-per-node 2 examples/train_deepspeed.py      # ... and run it again

With another number of ranks, or another ``--stage``, it continues from the same pools. A real script differs in the
model and the data only. lightck is in the lines marked with ``<-``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightck.integrations.deepspeed  # <-


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--pools", default="pools", help="the directory of the pools")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--stage", type=int, default=2, help="of ZeRO")
    parser.add_argument("--crash-at", type=int, default=0, help="the last rank kills itself after this step")
    args = parser.parse_args()

    if not torch.cuda.is_available():  # its operator for shared memory would be compiled, which takes minutes
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same model on all ranks
    data = TensorDataset(torch.randn(256, 16), torch.randn(256, 1))
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": args.stage},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    sampler = DistributedSampler(data, seed=0)
    torch.manual_seed(1 + rank)  # other dropout on each rank

    session = lightck.integrations.deepspeed.attach(engine, args.pools)  # <-
    loader = session.loader(DataLoader(data, batch_size=8, sampler=sampler))  # <-
    print(f"rank {rank} is process {os.getpid()} and begins at step {engine.global_steps}", flush=True)

    loss = torch.zeros(())
    for epoch in range(loader.epoch, args.epochs):  # <-
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(engine.device, torch.bfloat16), y.to(engine.device)
            loss = nn.functional.mse_loss(engine(x).float(), y)
            engine.backward(loss)
            engine.step()
            if args.crash_at and engine.global_steps == args.crash_at and rank == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
    print(f"rank {rank} ended at step {engine.global_steps} with loss {loss.item().hex()}", flush=True)
    session.close()  # <-
    dist.barrier()  # rank 0 serves the store of the group, so it ends last
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
