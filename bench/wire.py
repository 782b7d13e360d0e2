"""Checkpoints of two ranks that are joined by a slow wire: python bench/wire.py [--out DIR] [--load wire-bound] ...

Each rank is a process, as if on a host of its own, and the rate between the two is limited (``bench/wire_limit.py``). A
model is trained by DistributedDataParallel or by FSDP2, with a checkpoint at every fourth step, in several ways:
*plain* (``lightck.attach``), *layerwise* (``lightck.layerwise`` too), or with a rival, called at the same steps. Each
figure is of one run:

- *Window*: from the end of ``optimizer.step()`` to the commit of that step, as a share of a step. What happens in the
  window is lost if the process is killed in it. Of a rival: to the moment when it reports the checkpoint as saved.
- *Step*: what one checkpoint adds, as a share of one step. The step of a checkpoint and the one after it are compared
  with the two that follow, in which nothing is copied.
- *Collectives*: the same of the time from the first launch of a reduction to the last end.
- *Compared* (``--compare A B``): two trainings in one process take turns of four steps, of which the first and the last
  have no checkpoint. By how much these are longer, and by how much all four are, in the second training.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
import torch.distributed as dist

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench.wire_limit import (
    NAMESPACES,
    PACING,
    add_devices,
    enter_namespace,
    give_device,
    pace_connections,
    take_device,
)
from bench.wire_rank import INTERVAL, LAYERWISE, NOTHING, PLAIN, RIVALS, Load, Times, compare, train
from lightck.session.group import HOST_VARIABLE

WARM_UP = 2 * INTERVAL
PORT = 29517
WAYS = (PLAIN, LAYERWISE, NOTHING, *RIVALS)
LOADS = {
    "wire-bound": Load("transformer", 4, "1gbit"),
    "balanced": Load("transformer", 24, "1gbit"),
    "compute-bound": Load("transformer", 12, ""),
    **{
        name: Load(name, batch, "1gbit") for name, batch in (("resnet18", 4), ("alexnet", 8), ("vgg16", 4), ("gpt2", 2))
    },
}
SMALL = Load("transformer-small", 2, "200mbit")


# -- one rank ----------------------------------------------------------------------------------------------------------


def rank_main(args: argparse.Namespace) -> None:
    """Run one rank: wait for its end of the wire, join the group, train, and write the times as JSON."""
    load = _load(args)
    is_paced = args.limit == PACING
    device, address = ("lo", "127.0.0.1") if is_paced else take_device(args.rank, load.rate)
    os.environ["GLOO_SOCKET_IFNAME"] = device
    os.environ[HOST_VARIABLE] = f"host-{args.rank}"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{PORT}", rank=args.rank, world_size=2)
    limit = partial(pace_connections, load.rate) if is_paced and load.rate else lambda: None
    folder = Path(args.folder)
    pools = folder / f"host-{args.rank}"
    if len(args.ways) == 2:
        times = compare((args.ways[0], args.ways[1]), load, args.steps, pools, limit)
    else:
        times = train(args.kind, args.ways[0], load, args.steps, pools, limit)
    dist.barrier()
    (folder / f"{args.rank}.json").write_text(json.dumps([asdict(one) for one in times]))
    os._exit(0)  # gloo's destructors wait for other ranks, which may be gone


# -- both ranks --------------------------------------------------------------------------------------------------------


def run_ranks(kind: str, ways: Sequence[str], name: str, steps: int, limit: str, *, is_small: bool) -> list[Times]:
    """Run both ranks, and return the times of each training of rank 0."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if limit == NAMESPACES:
            add_devices()
        ranks = [
            subprocess.Popen(
                [*(["unshare", "-n"] if limit == NAMESPACES else []), sys.executable, __file__, "--rank", str(rank)]
                + ["--limit", limit, "--folder", folder, "--kind", kind]
                + ["--load", name, "--steps", str(steps), "--ways", *ways]
                + (["--small"] if is_small else [])
            )
            for rank in range(2)
        ]
        if limit == NAMESPACES:
            for rank, process in enumerate(ranks):
                give_device(rank, process)
        while any(process.poll() is None for process in ranks) and not any(process.poll() for process in ranks):
            time.sleep(0.1)
        for process in ranks:  # if one failed, the other one would wait for it
            process.kill()
        codes = [process.wait() for process in ranks]
        if any(codes):
            raise SystemExit(f"the ranks ended with the codes {codes}")
        return [Times(**one) for one in json.loads((Path(folder) / "0.json").read_text())]


def figures(times: Times) -> dict[str, Any]:
    committed = {int(step): at for step, at in times.committed.items()}
    steps = [end - begin for begin, end in zip(times.begins, times.ends, strict=True)]
    collectives = [end - begin for begin, end in zip(times.launched, times.reduced, strict=True)]
    first = range(WARM_UP, len(steps) - INTERVAL, INTERVAL)  # step n is the n-th update, at index n - 1
    quiet = [steps[n + i - 1] for n in first for i in (2, 3)]
    step = median(quiet)

    def added(values: Sequence[float], unit: float) -> list[float]:
        return [(values[n - 1] + values[n] - values[n + 1] - values[n + 2]) / unit for n in first]

    windows = [(committed[n] - times.updated[n - 1]) / step for n in first if n in committed]
    return {
        "step_seconds": step,
        "wire_share": median(collectives) / step,
        "window": median(windows) if windows else None,
        "window_max": max(windows) if windows else None,
        "n": len(windows),
        "step_added": _mean_and_error(added(steps, step)),
        "collectives_added": _mean_and_error(added(collectives, median(collectives))),
    }


def compared(one: Times, other: Times) -> dict[str, Any]:
    """By how much the steps of the second training are longer, as a share of those of the first, in each turn."""
    quiet, whole = [], []
    for first in range(WARM_UP + INTERVAL // 2, len(one.begins) - INTERVAL + 1, INTERVAL):
        turns = [[times.ends[n] - times.begins[n] for n in range(first, first + INTERVAL)] for times in (one, other)]
        quiet.append((turns[1][0] + turns[1][-1]) / (turns[0][0] + turns[0][-1]) - 1)
        whole.append(sum(turns[1]) / sum(turns[0]) - 1)
    return {"n": len(whole), "quiet_longer": _mean_and_error(quiet), "all_longer": _mean_and_error(whole)}


def _mean_and_error(values: Sequence[float]) -> list[float]:
    """Mean and its standard error."""
    return [mean(values), stdev(values) / len(values) ** 0.5]


def _load(args: argparse.Namespace) -> Load:
    return SMALL if args.small else LOADS[args.load]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the rows into wire.json in this folder, which keeps the others")
    parser.add_argument("--small", action="store_true", help="few steps of a small model: only that it runs")
    parser.add_argument("--only", choices=("ddp", "fsdp"), help="only this wrapper; FSDP2 shards the transformer only")
    parser.add_argument("--load", choices=LOADS, help="default: those of the transformer")
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="default: plain and layerwise")
    parser.add_argument("--compare", nargs=2, choices=WAYS, metavar="WAY", help="two trainings that take turns")
    parser.add_argument("--limit", choices=(NAMESPACES, PACING), help="default: namespaces where they are permitted")
    parser.add_argument("--steps", type=int, default=152)
    for name in ("--rank", "--folder", "--kind"):
        parser.add_argument(name, help=argparse.SUPPRESS, type=int if name == "--rank" else str)
    args = parser.parse_args()
    if args.rank is not None:
        rank_main(args)
    limit = PACING if args.limit == PACING else enter_namespace()
    rows = {_key(row): row for row in _measured(args, limit)}
    if args.out is not None:
        path = args.out / "wire.json"
        kept = json.loads(path.read_text()) if path.exists() else []
        rows = {_key(row): row for row in kept} | rows
        path.write_text(json.dumps(list(rows.values()), indent=1) + "\n")


def _measured(args: argparse.Namespace, limit: str) -> list[dict[str, Any]]:
    steps = 32 if args.small else args.steps
    loads = [args.load] if args.load else ["wire-bound"] if args.small else ["wire-bound", "balanced", "compute-bound"]
    found = []
    for name in loads:
        has_fsdp = _load(argparse.Namespace(small=args.small, load=name)).model.startswith("transformer")
        for kind in (args.only,) if args.only else ("ddp", "fsdp") if has_fsdp and not args.compare else ("ddp",):
            for ways in [args.compare] if args.compare else [[way] for way in args.ways or (PLAIN, LAYERWISE)]:
                times = run_ranks(kind, ways, name, steps, limit, is_small=args.small)
                row = compared(*times) if args.compare else figures(times[0])
                found.append({"load": name, "limit": limit, "kind": kind, "way": " and ".join(ways), **row})
                print(_line(found[-1]), flush=True)
    return found


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return row["load"], row["limit"], row["kind"], row["way"]


def _line(row: dict[str, Any]) -> str:
    said = {key: "{:+.1f} +- {:.1f} %".format(*(100 * one for one in row[key])) for key in _ADDED if key in row}
    head = f"{row['load']} ({row['limit']}), {row['kind']}, {row['way']}: "
    if "quiet_longer" in row:
        return (
            f"{head}of the second, steps without a checkpoint are longer by {said['quiet_longer']}, all steps by "
            f"{said['all_longer']} ({row['n']} turns)"
        )
    window = (
        "none" if row["window"] is None else f"{100 * row['window']:.1f} % (at most {100 * row['window_max']:.1f} %)"
    )
    return (
        f"{head}step {row['step_seconds']:.3f} s, wire {100 * row['wire_share']:.0f} %, window {window}, a checkpoint "
        f"adds {said['step_added']} of a step, {said['collectives_added']} of the collectives ({row['n']} checkpoints)"
    )


_ADDED = ("step_added", "collectives_added", "quiet_longer", "all_longer")

if __name__ == "__main__":
    main()
