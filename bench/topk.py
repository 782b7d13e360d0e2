"""What TopK costs and saves, each part apart: python bench/topk.py [--small] [--ratio R].

On gradients and AdamW state of one size, in memory, on the threads that torch has:

- *memcpy*: one copy of the gradients, the unit of all times.
- *torch.topk*: what torch itself takes to find the entries of largest magnitude (beside it; lightck does not call it).
- *selection*: what ``TopK`` does to the gradients in ``optimizer.step()``: find the entries, set the others to zero.
- *indexed form*: positions and values of the entries that are kept, for the record.
- *dense form*: one copy of the gradients, which a record without ``TopK`` takes.

Then a training of one layer with each strategy says how many bytes a checkpoint writes, as a multiple of the state:
all of them, and without the share of the bases.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import nn

import lightck

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from lightck.state.indexed_gradient import indexed
from lightck.state.selection import keep_largest

BASE_EVERY = 6


def seconds_of(prepare: Callable[[], None], work: Callable[[], object], repeats: int) -> float:
    """Return the median time of ``work``, after ``prepare``, which is not measured."""
    times = []
    for _ in range(repeats + 1):  # the first one touches the memory
        prepare()
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return median(times[1:])


def costs(numel: int, topk: lightck.TopK, repeats: int) -> dict[str, float]:
    """Return the seconds of each part for a gradient of this size."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(numel, generator=generator)
    gradient, copy, k = source.clone(), torch.empty_like(source), topk.kept(numel)

    def nothing() -> None:
        pass

    def whole() -> None:
        gradient.copy_(source)

    found = {
        "memcpy": seconds_of(nothing, lambda: copy.copy_(source), repeats),
        "torch.topk": seconds_of(nothing, lambda: torch.topk(source.abs(), k, sorted=False), repeats),
        "selection": seconds_of(whole, lambda: keep_largest(gradient, k), repeats),
    }
    found["indexed form"] = seconds_of(nothing, lambda: indexed(gradient, k), repeats)
    found["dense form"] = found["memcpy"]
    return found


def written(width: int, strategy: lightck.Gradients | lightck.FullState) -> float:
    """Return the bytes that a checkpoint writes, as a multiple of the state, on average over whole rounds of bases."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(BASE_EVERY)))
    optimizer = torch.optim.AdamW(model.parameters())
    state = 3 * sum(p.nbytes for p in model.parameters())
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with (
        tempfile.TemporaryDirectory(dir=folder) as place,
        lightck.attach(model, Path(place, "run.pool"), optimizer=optimizer, strategy=strategy) as session,
    ):
        for step in range(4 * BASE_EVERY):
            if step == 2 * BASE_EVERY:
                session.flush()
                before = session.stats().bytes_written
            optimizer.zero_grad()
            model(torch.randn(4, width)).square().sum().backward()
            optimizer.step()
        session.flush()
        nbytes = session.stats().bytes_written - before
    return nbytes / (2 * BASE_EVERY) / state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="small tensors, few repeats: only that it runs")
    parser.add_argument("--ratio", type=float, default=0.01)
    args = parser.parse_args()
    topk = lightck.TopK(args.ratio)
    numel, repeats, width = (200_000, 2, 300) if args.small else (40_000_000, 5, 1500)
    found = costs(numel, topk, repeats)
    print(f"{topk}: a gradient of {4 * numel / 1e6:.1f} MB in float32, {torch.get_num_threads()} threads")
    for name, seconds in found.items():
        print(f"  {name:13} {1e3 * seconds:8.2f} ms  {seconds / found['memcpy']:6.1f} memcpys")
    base = 1 / BASE_EVERY
    for compress in (None, topk):
        share = written(width, lightck.Gradients(BASE_EVERY, compress=compress))
        print(f"Gradients({BASE_EVERY}, compress={compress}):")
        print(f"  {share:.4f} of the state for a checkpoint, {share - base:.4f} beside the share of the bases")


if __name__ == "__main__":
    main()
