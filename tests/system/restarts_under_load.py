"""How long a restart takes that comes right after ``kill -9``, while every processor is busy. By hand:

    python tests/system/restarts_under_load.py --tries 200 --to docs/evidence/restarts-under-load.md

In each try a training of 12.6 million parameters (150 MB of state), in a forked process, is killed at a random moment,
and the same pool is attached at once by its parent, beside busy loops of normal priority, two for each core.
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
from crash.evidence import machine

import lightck

SECONDS_MAX = 60.0
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"
"""Until this process is gone, however it ends."""


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(12)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def train(pool: str, reported: int) -> None:
    """For ever; tells of each update by a line."""
    model, optimizer = parts()
    session = lightck.attach(model, pool, optimizer=optimizer, resume=True)
    while True:
        optimizer.zero_grad()
        model(torch.randn(2, 1024)).square().mean().backward()
        optimizer.step()
        os.write(reported, f"{session.step}\n".encode())


def seconds_of_one(pool: str, rng: random.Random) -> tuple[float, int]:
    """Of the restart, and the steps that it lost."""
    model, optimizer = parts()
    read, write = os.pipe()
    child = os.fork()  # to import torch takes most of a try
    if child == 0:
        try:
            train(pool, write)
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read) as lines:
        for _ in range(4):
            assert lines.readline(), "the training has ended"
        time.sleep(rng.random() / 2)
        os.kill(child, signal.SIGKILL)
        begin = time.monotonic()
        session = lightck.attach(model, pool, optimizer=optimizer, resume=True)
        seconds = time.monotonic() - begin
        os.waitpid(child, 0)
        last = [int(line) for line in lines]
    step = session.step
    session.close()
    return seconds, max(last, default=step) - step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=30)
    parser.add_argument("--per-core", type=int, default=2, help="busy loops for each core")
    parser.add_argument("--pool", default=f"/dev/shm/lightck-restarts-{os.getpid()}.pool")
    parser.add_argument("--to", help="write the result to this file")
    options = parser.parse_args()
    logging.getLogger("lightck").setLevel(logging.ERROR)
    n_busy = options.per_core * len(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())]) for _ in range(n_busy)]
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
        Path(options.to).write_text(
            f"# Restarts under load\n\n`python tests/system/{Path(__file__).name} "
            f"--tries {options.tries}`, which says what a try is.\n\n{report}"
        )
    return int(max(seconds) > SECONDS_MAX or max(lost) > 2)


if __name__ == "__main__":
    sys.exit(main())
