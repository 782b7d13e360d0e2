"""What checkpoints from gradients save and cost, beside FullState: python bench/gradients.py [--out DIR].

Each loop runs in a process of its own, on a GPT-2 with AdamW that trains on the CPU: without lightck, with
``FullState()``, with ``Gradients(n)``, and without again. A checkpoint is made at every step, or with ``--interval I``
at every I-th; then all figures are those of a step on average. The first steps, in which checkpoints are full, are left
out.

- *Bytes*: written for a checkpoint, as a multiple of the state (parameters and optimizer state).
- *CPU*: seconds of all of lightck's threads and hooks for a checkpoint, as a multiple of one memcpy of the state.
- *Stall*: what the training thread spends in lightck, in percent of a step: the median of all steps, and of those in
  which the largest parameter is due.
- *Step*: the median step beside that of the loops without lightck.
- *Memory*: private memory beyond the loop without lightck, as a multiple of one set of gradients.
- *Recovery*: seconds of ``recover`` into a model; of ``Gradients`` also the number of updates that it makes again, on
  average over the bytes, and the seconds of one ``optimizer.step()``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

import lightck
from lightck.pool.gradient_reader import checkpoint_of, committed
from lightck.pool.reader import open_pool

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench.measures.copies import memcpy_cpu_seconds
from bench.workloads import language

SMALL = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 512, "n_positions": 64}
FULL = {"n_layer": 4}
"""GPT-2 124M with 4 of its 12 layers, because the pool of ``Gradients(12)`` for all of it has 14.5 GB."""


class Loop:
    """A training in this process, and what each of its steps took."""

    def __init__(self, shape: dict[str, int], batch: int, length: int) -> None:
        torch.manual_seed(0)
        self.model = language.gpt2(**shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = batch, length, shape.get("vocab_size", 50257)
        self.seconds: list[float] = []
        self.stalls: list[float] = []
        self.peak = 0
        """Largest private memory, in bytes, before and after an update."""

    def run(self, steps: int, session: lightck.Session | None) -> None:
        for _ in range(steps):
            before = 0.0 if session is None else session.stats().stall_seconds
            began = time.perf_counter()
            generator = torch.Generator().manual_seed(len(self.seconds))
            tokens = language.tokens(*self.batch, generator)
            self.optimizer.zero_grad()
            torch.autograd.backward(language.own_loss(self.model, *tokens))
            self.peak = max(self.peak, rss_anon())
            self.optimizer.step()
            self.peak = max(self.peak, rss_anon())
            self.seconds.append(time.perf_counter() - began)
            self.stalls.append(0.0 if session is None else session.stats().stall_seconds - before)

    @property
    def tensors(self) -> list[torch.Tensor]:
        states = [one for state in self.optimizer.state.values() for one in state.values()]
        return [p.detach() for p in self.model.parameters()] + [one for one in states if one.dim()]


def loop(options: dict[str, Any], strategy: Any, folder: str) -> dict[str, Any]:
    """Train, and return what it took. ``strategy``: None: without lightck."""
    made = Loop(options["shape"], *options["batch"])
    session = None
    if strategy is not None:
        path = os.path.join(folder, "run.pool")
        more = {"strategy": strategy, "interval": options["interval"], "overwrite": True}
        session = lightck.attach(made.model, path, optimizer=made.optimizer, **more)
    made.run(options["warm_up"], session)
    found: dict[str, Any] = {}
    if session is not None:
        session.flush()
        before = session.stats()
    made.run(options["steps"], session)
    if session is not None:
        session.flush()
        after, nbytes, steps = session.stats(), sum(one.nbytes for one in made.tensors), options["steps"]
        copies = median(memcpy_cpu_seconds(made.tensors, folder))
        found |= {
            "bytes": (after.bytes_written - before.bytes_written) / steps / nbytes,
            "cpu": (after.cpu_seconds - before.cpu_seconds) / steps / copies,
            "state_bytes": nbytes,
            "gradient_bytes": sum(p.nbytes for p in made.model.parameters()),
            "skipped": after.skipped,
        }
        session.close()
    late = slice(options["warm_up"], None)
    stalls = [stall / step for stall, step in zip(made.stalls[late], made.seconds[late], strict=True)]
    return found | {
        "step": median(made.seconds[late]),
        "stall": median(stalls),
        "stall_max": max(stalls),
        "rss": made.peak,
    }


def rss_anon() -> int:
    """Return the private memory of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def recovery(options: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the seconds of a recovery into a model, and how many updates it makes again."""
    made = Loop(options["shape"], *options["batch"])
    made.run(1, None)
    began = time.perf_counter()
    made.optimizer.step()
    update = time.perf_counter() - began
    path = os.path.join(folder, "run.pool")
    lightck.recover(path, made.model, made.optimizer)  # the first reads the pages of the pool into the page table
    times = []
    for _ in range(3):
        began = time.perf_counter()
        lightck.recover(path, made.model, made.optimizer)
        times.append(time.perf_counter() - began)
    with closing(open_pool(path, gradients=True)) as reader:
        if not reader.superblock.has_gradients:
            return {"recovery": median(times), "update": update, "replayed": 0.0}
        checkpoint = checkpoint_of(reader, committed(reader)[0])
        bases = list(checkpoint.bases())
        replayed = sum((checkpoint.step - base.step) * base.entry.nbytes for base in bases)
        return {
            "recovery": median(times),
            "update": update,
            "replayed": replayed / sum(base.entry.nbytes for base in bases),
        }


def in_child(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what ``work`` returns in a process of its own."""
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        return pool.submit(work).result()


def measured(options: dict[str, Any], strategy: Any) -> dict[str, Any]:
    """Run a loop, and a recovery, in processes of their own."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        found: dict[str, Any] = in_child(partial(loop, options, strategy, folder))
        if strategy is not None:
            found |= in_child(partial(recovery, options, folder))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write gradients.json into this folder")
    parser.add_argument("--small", action="store_true", help="a small model, few steps: only that it runs")
    parser.add_argument("--interval", type=int, default=1, help="updates from one checkpoint to the next")
    args = parser.parse_args()
    if args.small:
        options: dict[str, Any] = {"shape": SMALL, "batch": (2, 16), "warm_up": 8, "steps": 6, "ns": (3,)}
    else:
        options = {"shape": FULL, "batch": (4, 64), "warm_up": 26, "steps": 12, "ns": (12,)}
    options["interval"] = args.interval
    for name in ("warm_up", "steps"):  # whole intervals: else flush() would commit a step whose turn has not come
        options[name] += -options[name] % args.interval
    found: dict[str, Any] = {"shape": options["shape"], "interval": args.interval, "plain": measured(options, None)}
    found["full"] = measured(options, lightck.FullState())
    for n in options["ns"]:
        found[f"gradients {n}"] = measured(options, lightck.Gradients(n))
    found["again"] = measured(options, None)
    show(found)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "gradients.json").write_text(json.dumps(found, indent=1) + "\n")


def show(found: dict[str, Any]) -> None:
    plain = (found["plain"]["step"] + found["again"]["step"]) / 2
    print(f"a step: {1e3 * plain:.0f} ms; again: {100 * (found['again']['step'] / found['plain']['step'] - 1):+.1f} %")
    full = found["full"]
    for name, row in found.items():
        if not isinstance(row, dict) or "bytes" not in row:
            continue
        memory = (row["rss"] - found["plain"]["rss"]) / row["gradient_bytes"]
        print(
            f"{name}: {row['bytes']:.3f} of the state written; CPU {row['cpu']:.2f} memcpy; "
            f"stall {100 * row['stall']:.2f} % (largest {100 * row['stall_max']:.2f} %); "
            f"step {100 * (row['step'] / plain - 1):+.1f} %; memory {memory:.2f} gradient sets; "
            f"recovery {1e3 * row['recovery']:.0f} ms ({row['recovery'] / full['recovery']:.2f} of FullState; "
            f"{row['replayed']:.1f} updates, one step {1e3 * row['update']:.0f} ms)"
        )


if __name__ == "__main__":
    main()
