"""A training that a scheduler may end at any time. After a signal it finishes its present step, and ends. Its exit
status 75 asks to be started again.

    lightck run -- python examples/train_preempted.py --pool /dev/shm/run.pool --tier /shared/run

``examples/slurm/`` and ``examples/kubernetes/`` start it. The signal is SIGTERM or SIGUSR1.
"""

import argparse
import os
import sys
import time

import torch

import lightck


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pool", required=True, help="a file in memory, such as /dev/shm/run.pool")
    parser.add_argument("--tier", required=True, help="a folder that outlives this machine")
    parser.add_argument("--grace", default="90s", help="how long the end may take; less than the scheduler leaves")
    parser.add_argument("--until", type=int, default=10_000, help="number of steps")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that each step takes longer")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    points = torch.randn(512, 4)
    data = torch.utils.data.TensorDataset(points, points.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)

    tiers = [lightck.Tier(args.tier, every="5min", keep_last=2)]
    with lightck.attach(model, args.pool, optimizer=optimizer, resume=True, tiers=tiers) as session:
        lightck.preemption(session, grace=args.grace)
        print(f"begins at step {session.step}", flush=True)
        batches = session.loader(loader)
        while session.step < args.until and not session.should_stop:
            for x, y in batches:
                loss = torch.nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                time.sleep(args.pause)
                if session.step == args.until or session.should_stop:
                    break
        is_finished = session.step == args.until

    if is_finished:
        print(f"ended at step {args.until} with weights {sum(p.sum().item() for p in model.parameters()).hex()}")
    return 0 if is_finished else os.EX_TEMPFAIL  # 75: try again


if __name__ == "__main__":
    sys.exit(main())
