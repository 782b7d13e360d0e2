"""What copies on another host cost: python bench/copies.py [--out DIR], each figure in one run.

Two ranks train a transformer with DistributedDataParallel, each as a host of its own (a folder stands for a host, so
both ends of each copy run on this machine). Loops without lightck, without copies, with copies (``replicas=2``, at the
number of steps that rank 0 chooses), and without lightck again take turns.

- *Step*: what interval 1 adds to the median step, without copies and with them.
- *Stall*: the part of the time in which the training thread waited for lightck, without copies and with them.
- *Copy*: how many steps lie between two copies, and how many MB a rank copies.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import lightck
from lightck.session.group import HOST_VARIABLE

if __name__ == "__main__":  # the processes of the ranks are made by a module of the tests
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench.ranks import BATCH, TOKENS, Transformer, each

LOOPS = ("plain", "without", "copies", "again")


def loop(rank: int, pools: Path | None, steps: int, replicas: int) -> dict[str, float]:
    """Train for some steps. Returns the median and the mean of a step, and what the session says."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Transformer())
    optimizer = torch.optim.AdamW(model.parameters())
    session = None
    if pools is not None:
        os.environ[HOST_VARIABLE] = f"host-{rank}"
        pools.mkdir(exist_ok=True)
        session = lightck.attach(model, pools / f"host-{rank}", optimizer=optimizer, replicas=replicas)
    times: list[float] = []
    for step in range(steps):
        began = time.perf_counter()
        tokens = torch.randint(1000, (BATCH, TOKENS), generator=torch.Generator().manual_seed(step))
        model(tokens).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    late = times[steps // 4 :]
    found = {"step": median(late), "mean": mean(late)}
    if session is not None:
        stats = session.stats()
        found |= {"stall": stats.stall_seconds / sum(times), "waited": stats.rank_wait_seconds / sum(times)}
        found |= {"copied": float(session.copied or 0), "nbytes": 3.0 * sum(p.nbytes for p in model.parameters())}
        found["every"] = float(session._membership.commit_rule.knowledge.copy_every if session._membership else 0)
        torch.distributed.barrier()
        session.close()
    return found


def compared(steps: int, turns: int) -> dict[str, Any]:
    def body(turn: int, rank: int) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for name in LOOPS:
            pools = None if name in ("plain", "again") else folder / f"{turn}-{name}"
            row[name] = loop(rank, pools, steps, 2 if name == "copies" else 1)
        return row

    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        rows = [each(2, partial(body, turn))[0] for turn in range(turns)]
    found: dict[str, Any] = {"step_seconds": median(row["plain"]["step"] for row in rows)}
    for kind in ("step", "mean"):
        found[kind] = {
            what: [row[what][kind] / ((row["plain"][kind] + row["again"][kind]) / 2) - 1 for row in rows]
            for what in ("without", "copies")
        }
        found[kind]["same"] = [row["again"][kind] / row["plain"][kind] - 1 for row in rows]
    for key in ("stall", "waited"):
        found[key] = {what: median(row[what][key] for row in rows) for what in ("without", "copies")}
    found |= {key: [row["copies"][key] for row in rows] for key in ("every", "copied", "nbytes")}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write copies.json into this folder")
    parser.add_argument("--small", action="store_true", help="few steps: only that it runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = compared(*((20, 1) if args.small else (160, 5)))
    for kind in ("step", "mean"):
        for what, added in found[kind].items():
            print(
                f"{1e3 * found['step_seconds']:.1f} ms a step, {kind}, {what}: {[round(100 * x, 1) for x in added]} %"
            )
    for key in ("stall", "waited"):
        print(f"{key}: {100 * found[key]['without']:.2f} % without copies, {100 * found[key]['copies']:.2f} % with")
    print(f"{found['nbytes'][0] / 1e6:.0f} MB at every {found['every']} steps; the newest copy: step {found['copied']}")
    if args.out is not None:
        (args.out / "copies.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
