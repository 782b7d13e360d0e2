"""What several ranks cost: python bench/ranks.py [--out DIR], five figures, each within one run.

- *Agreement*: how long 64 ranks, as threads over one store, take to agree in attach.
- *Boundary*: CPU seconds of the training thread that a boundary spends on the pools of other ranks, per rank on the
  host (``GroupRule.held``), with 8 ranks.
- *Early gate*: where in a step of DistributedDataParallel on a transformer the early gate is passed, as a share of the
  step, and where ``optimizer.step()`` begins; with 256 tokens in a batch, and with 1,024.
- *Hosts*: which share of the time two ranks wait for each other if they learn through the store of the process group
  which checkpoints the other has, as ranks on two hosts do; on the transformer, and in steps of a few milliseconds
  with 3 and with 8 slots.
- *Step*: what interval 1 adds to a step, on one rank and on two. Loops without lightck, with it, and without it again
  take turns; the difference between the two loops without it is the A/A line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore
from torch.nn.parallel import DistributedDataParallel

import lightck
from lightck.ranks.meet import Meeting
from lightck.ranks.neighbours import GroupRule
from lightck.session.group import HOST_VARIABLE
from lightck.session.steps import Steps

if __name__ == "__main__":  # the processes of the ranks are made by a module of the tests
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

TOKENS, WIDTH, LAYERS, BATCH = 32, 256, 4, 8
LARGE_BATCH = 32


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 1000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(self.embed(tokens)))
        return logits


def loop(pools: Path | None, steps: int, note: Callable[[float, float, float], None], batch: int = BATCH) -> Any:
    """Train for some steps. ``note``: called after each with the times at which it began, its update began, and it
    ended. Returns the session's counters, or None."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters())
    session = None if pools is None else lightck.attach(model, pools, optimizer=optimizer)
    called = DistributedDataParallel(model) if dist.is_initialized() else model
    for step in range(steps):
        began = time.perf_counter()
        tokens = torch.randint(1000, (batch, TOKENS), generator=torch.Generator().manual_seed(step))
        called(tokens).logsumexp(-1).mean().backward()
        updating = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        note(began, updating, time.perf_counter())
    if session is None:
        return None
    session.close()
    return session.stats()


def each(n_ranks: int, body: Callable[[int], Any]) -> list[Any]:
    """Run ``body(rank)`` in one process per rank, joined by gloo if there are several, and return the results."""
    from ranked import run_ranks, values

    return values(run_ranks(n_ranks, body, has_group=n_ranks > 1))


def boundary(n_ranks: int, steps: int) -> dict[str, float]:
    def body(rank: int) -> float:
        spent: list[float] = []
        held = GroupRule.held

        def timed(self: GroupRule, writer: Any) -> frozenset[int]:
            began = time.thread_time()
            found = held(self, writer)
            spent.append(time.thread_time() - began)
            return found

        GroupRule.held = timed  # type: ignore[method-assign]
        model = nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        with lightck.attach(model, folder / "pools", optimizer=optimizer):
            for _ in range(steps):
                model(torch.ones(1, 64)).sum().backward()
                dist.barrier()
                optimizer.step()
                optimizer.zero_grad()
        return median(spent)

    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        found = median(each(n_ranks, body))
    return {"ranks": n_ranks, "seconds": found, "seconds_per_rank": found / n_ranks}


def agreement(n_ranks: int) -> dict[str, float]:
    """Ranks as threads over one TCPStore, each with a connection of its own: seconds until all have met and exchanged
    what an attach exchanges."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False) for _ in range(n_ranks)]

    def attach(rank: int) -> None:
        store: Any = stores[rank]
        meeting = Meeting(store, rank, n_ranks, timeout=60.0)
        meeting.meet("host")
        for what, nbytes in (("reports", 700), ("votes", 10), ("pools", 150), ("readiness", 0)):
            meeting.exchange(what, bytes(nbytes))

    threads = [threading.Thread(target=attach, args=(rank,)) for rank in range(n_ranks)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"ranks": n_ranks, "seconds": time.perf_counter() - began}


def early_gate(steps: int, batch: int) -> dict[str, float]:
    def body(rank: int) -> tuple[float, float, float]:
        passed: list[float] = []
        gates, updates = [], []
        original = Steps._early_gate

        def timed(self: Steps) -> None:
            passed.append(time.perf_counter())
            original(self)

        Steps._early_gate = timed  # type: ignore[method-assign]

        def note(began: float, updating: float, ended: float) -> None:
            if passed and passed[-1] > began:
                gates.append((passed[-1] - began) / (ended - began))
                updates.append((updating - began) / (ended - began))

        stats = loop(folder / "pools", steps, note, batch)
        return median(gates), median(updates), stats.rank_wait_seconds

    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        found = each(2, body)
    return {
        "tokens": batch * TOKENS,
        "gate": median(one[0] for one in found),
        "update": median(one[1] for one in found),
        "rank_wait_seconds": max(one[2] for one in found),
    }


def hosts(steps: int, slots: int, *, is_transformer: bool) -> dict[str, Any]:
    def body(rank: int) -> tuple[float, float]:
        os.environ[HOST_VARIABLE] = f"host-{rank}"
        torch.manual_seed(0)
        model: nn.Module = Transformer() if is_transformer else nn.Linear(64, 64)
        tokens = torch.randint(1000, (BATCH, TOKENS))
        x = tokens if is_transformer else torch.ones(8, 64)
        optimizer = torch.optim.AdamW(model.parameters())
        session = lightck.attach(model, folder / f"host-{rank}", optimizer=optimizer, slots=slots)
        called = DistributedDataParallel(model)
        began = time.perf_counter()
        for _ in range(steps):
            called(x).logsumexp(-1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        seconds = time.perf_counter() - began
        session.close()
        return seconds / steps, session.stats().rank_wait_seconds / seconds

    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        found = each(2, body)
    return {
        "slots": slots,
        "step_seconds": max(seconds for seconds, _ in found),
        "wait_share": max(share for _, share in found),
    }


def step(n_ranks: int, steps: int, turns: int) -> dict[str, Any]:
    def body(rank: int) -> list[list[float]]:
        found = []
        for turn in range(turns):
            row = []
            for is_attached in (False, True, False):
                times: list[float] = []
                pools = folder / f"{turn}" if is_attached else None
                loop(pools, steps, partial(_note_step, times))
                row.append(median(times[steps // 4 :]))
            found.append(row)
        return found

    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        rows = each(n_ranks, body)[0]
    return {
        "ranks": n_ranks,
        "step_seconds": median(plain for plain, _, _ in rows),
        "added": [attached / ((plain + again) / 2) - 1 for plain, attached, again in rows],
        "same": [again / plain - 1 for plain, _, again in rows],
    }


def _note_step(times: list[float], began: float, _: float, ended: float) -> None:
    times.append(ended - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write ranks.json into this folder")
    parser.add_argument("--small", action="store_true", help="few steps: only that it runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    steps, turns = (8, 1) if args.small else (60, 5)
    found: dict[str, Any] = {
        "agreement": agreement(64),
        "boundary": boundary(8, 20 if args.small else 200),
        "early_gate": [early_gate(steps, batch) for batch in (BATCH, LARGE_BATCH)],
        "hosts": [
            hosts(steps, 3, is_transformer=True),
            *(hosts(10 * steps, slots, is_transformer=False) for slots in (3, 8)),
        ],
        "step": [step(n_ranks, steps, turns) for n_ranks in (1, 2)],
    }
    print(f"{found['agreement']['ranks']} ranks as threads agree in {found['agreement']['seconds']:.2f} s")
    at = found["boundary"]
    print(f"boundary, {at['ranks']} ranks: {1e6 * at['seconds_per_rank']:.1f} us of CPU per rank on the host")
    for gate in found["early_gate"]:
        print(f"{gate['tokens']} tokens: early gate at {gate['gate']:.2f} of the step, step() at {gate['update']:.2f}")
        print(f"waited for other ranks: {gate['rank_wait_seconds']:.6f} s")
    for row in found["hosts"]:
        at = f"{1e3 * row['step_seconds']:.1f} ms a step, {row['slots']} slots"
        print(f"two hosts, {at}: waited {100 * row['wait_share']:.2f} % of the time")
    for row in found["step"]:
        added, same = ([round(100 * one, 1) for one in row[name]] for name in ("added", "same"))
        print(f"{row['ranks']} ranks, {1e3 * row['step_seconds']:.1f} ms a step: added {added} %, A/A {same} %")
    if args.out is not None:
        (args.out / "ranks.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
