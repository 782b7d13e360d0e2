"""How long a restart takes that comes right after ``kill -9``, while every processor is busy. By hand:

    python tests/restarts_under_load.py --tries 200 --to docs/evidence/restarts-under-load.md

In each try a training of 12.6 million parameters (150 MB of state) is killed at a random moment, and the same pool is
attached at once by a process that has imported everything, beside busy loops of normal priority, two for each core.
Fails where a restart is refused, takes more than 60 seconds, or has lost more than the two steps that it may lose.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import lightck
from lightck.testing.evidence import machine

SECONDS_MAX = 60.0


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(12)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def train(pool: str) -> None:
    """For ever; one line for each update."""
    logging.getLogger("lightck").setLevel(logging.ERROR)
    model, optimizer = parts()
    session = lightck.attach(model, pool, optimizer=optimizer, resume=True)
    while True:
        optimizer.zero_grad()
        model(torch.randn(2, 1024)).square().mean().backward()
        optimizer.step()
        print(session.step, flush=True)


def seconds_of_one(pool: str, rng: random.Random) -> tuple[float, int]:
    """Of the restart, and the steps that it lost."""
    command = [sys.executable, __file__, "--train", pool]
    model, optimizer = parts()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for _ in range(4):
            assert child.stdout.readline(), "the training has ended"
        time.sleep(rng.random() / 2)
        child.send_signal(signal.SIGKILL)
        begin = time.monotonic()
        session = lightck.attach(model, pool, optimizer=optimizer, resume=True)
        seconds = time.monotonic() - begin
        last = [int(line) for line in child.stdout]
    step = session.step
    session.close()
    return seconds, max(last, default=step) - step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=30)
    parser.add_argument("--per-core", type=int, default=2, help="busy loops for each core")
    parser.add_argument("--pool", default=f"/dev/shm/lightck-restarts-{os.getpid()}.pool")
    parser.add_argument("--to", help="write the result to this file")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train)
    n_busy = options.per_core * len(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n_busy)]
    rng, tries = random.Random(0), []
    try:
        for number in range(options.tries):
            tries.append(seconds_of_one(options.pool, rng))
            print(f"{number + 1:4d}  {tries[-1][0]:8.2f} s  {tries[-1][1]} steps lost", flush=True)
    finally:
        for process in busy:
            process.kill()
        for name in (options.pool, options.pool + ".lock"):
            Path(name).unlink(missing_ok=True)
    seconds, lost = [s for s, _ in tries], [n for _, n in tries]
    report = (
        f"{len(tries)} restarts right after kill -9, {n_busy} busy loops of normal priority beside them "
        f"({machine()}, load {os.getloadavg()[1]:.0f}): "
        f"{sum(s <= SECONDS_MAX for s in seconds)} within {SECONDS_MAX:.0f} s; "
        f"median {statistics.median(seconds):.2f} s, longest {max(seconds):.2f} s; at most {max(lost)} steps lost.\n\n"
        f"Seconds of each: {' '.join(f'{s:.2f}' for s in seconds)}\n"
    )
    print(report)
    if options.to:
        Path(options.to).write_text(f"# Restarts under load\n\n`python tests/{Path(__file__).name} "
                                    f"--tries {options.tries}`, which says what a try is.\n\n{report}")  # fmt: skip
    return int(max(seconds) > SECONDS_MAX or max(lost) > 2)


if __name__ == "__main__":
    sys.exit(main())
