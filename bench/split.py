"""What it saves and costs that ranks divide what they write: python bench/split.py [--out DIR], each figure in one run.

- *Bytes*: what one rank writes of parameters and optimizer state for a checkpoint, as a multiple of the W-th part of
  what the model has, for W = 2, 3 and 4 ranks; the largest of all ranks.
- *Step*: what interval 1 adds to a step of DistributedDataParallel on a transformer with two ranks, with shares and
  with whole copies. Loops without lightck, with shares, without, with whole copies, and without again take turns.
- *Cross-check*: CPU seconds of the training thread for one checkpoint, after the first ones.
- *Resume*: seconds of attach(resume=True) with two ranks, from shares and from whole copies.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import lightck
from lightck.pool.reader import open_pool
from lightck.session.cross_check import CrossCheck

if __name__ == "__main__":  # the processes of the ranks are made by a module of the tests
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench.ranks import BATCH, TOKENS, Transformer, each

_COMPARE, _READ = CrossCheck.compare, CrossCheck.read


def loop(pools: Path | None, steps: int, *, split: bool = True) -> dict[str, float]:
    """Train for some steps. Returns the median of a step, the seconds of attach, and those of the cross-check."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Transformer())
    optimizer = torch.optim.AdamW(model.parameters())
    began = time.perf_counter()
    session = None
    if pools is not None:
        session = lightck.attach(model, pools, optimizer=optimizer, split=split, resume=True)
    attached = time.perf_counter() - began
    times: list[float] = []
    checks = _timed_cross_check()
    for step in range(steps):
        began = time.perf_counter()
        tokens = torch.randint(1000, (BATCH, TOKENS), generator=torch.Generator().manual_seed(step))
        model(tokens).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    if session is not None:
        session.close()
    late = checks[len(checks) // 2 :]
    check = sum(late) / len(late) if late else 0.0
    return {"step": median(times[steps // 4 :]) if times else 0.0, "attach": attached, "check": check}


def _timed_cross_check() -> list[float]:
    """Note the CPU seconds of the training thread in the cross-check, for each checkpoint from now on."""
    noted: list[float] = []
    compare, read = _COMPARE, _READ

    def timed_compare(self: CrossCheck) -> None:
        began = time.thread_time()
        compare(self)
        noted.append(time.thread_time() - began)

    def timed_read(self: CrossCheck, *args: Any) -> Any:
        began = time.thread_time()
        found = read(self, *args)
        noted[-1] += time.thread_time() - began
        return found

    vars_of: Any = CrossCheck
    vars_of.compare, vars_of.read = timed_compare, timed_read
    return noted


def written(n_ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        pools = Path(name) / "pools"
        each(n_ranks, lambda rank: loop(pools, 2))
        nbytes = []
        for path in sorted(pools.glob("rank-*.pool")):
            with closing(open_pool(str(path))) as reader:
                entries = next(reader.checkpoints()).entries.values()  # type: ignore[union-attr]
                nbytes.append(sum(one.nbytes for one in entries if one.role in ("param", "optimizer")))
    whole = 3 * sum(p.nbytes for p in Transformer().parameters())
    return {"ranks": n_ranks, "nbytes": nbytes, "share": max(nbytes) / (whole / n_ranks), "whole": whole}


def compared(steps: int, turns: int) -> dict[str, Any]:
    def body(turn: int, rank: int) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for name, split in (("plain", None), ("split", True), ("again", None), ("whole", False), ("last", None)):
            pools = None if split is None else folder / f"{turn}-{name}"
            row[name] = loop(pools, steps, split=bool(split))
            if pools is not None:
                row[name]["resume"] = loop(pools, 0, split=bool(split))["attach"]
        return row

    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder, rows = Path(name), []
        for turn in range(turns):
            rows.append(each(2, partial(body, turn))[0])
    return {
        "step_seconds": median(row["plain"]["step"] for row in rows),
        "split": [row["split"]["step"] / _mean(row, "plain", "again") - 1 for row in rows],
        "whole": [row["whole"]["step"] / _mean(row, "again", "last") - 1 for row in rows],
        "same": [row["again"]["step"] / row["plain"]["step"] - 1 for row in rows],
        "check_seconds": median(row["split"]["check"] for row in rows),
        "resume_seconds": {name: median(row[name]["resume"] for row in rows) for name in ("split", "whole")},
    }


def _mean(row: dict[str, Any], one: str, other: str) -> float:
    return float(row[one]["step"] + row[other]["step"]) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write split.json into this folder")
    parser.add_argument("--small", action="store_true", help="few steps: only that it runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    steps, turns = (8, 1) if args.small else (60, 5)
    found: dict[str, Any] = {"written": [written(n_ranks) for n_ranks in (2, 3, 4)], "step": compared(steps, turns)}
    for row in found["written"]:
        print(f"{row['ranks']} ranks: a rank writes {row['share']:.3f} of its part of {row['whole']} bytes")
    step = found["step"]
    for name in ("split", "whole", "same"):
        added = [round(100 * one, 1) for one in step[name]]
        print(f"2 ranks, {1e3 * step['step_seconds']:.1f} ms a step, {name}: {added} %")
    print(f"cross-check: {1e6 * step['check_seconds']:.0f} us of CPU for a checkpoint")
    print(f"resume: {step['resume_seconds']['split']:.3f} s from shares, {step['resume_seconds']['whole']:.3f} s whole")
    if args.out is not None:
        (args.out / "split.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
