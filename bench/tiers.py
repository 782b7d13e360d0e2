"""What a tier costs a training: python bench/tiers.py [--out DIR] [--only NAME].

AlexNet, and GPT-2 with four layers (also with ``Gradients``), are trained at interval 1 with a pool on tmpfs. Loops
without lightck, with it, with a tier in a folder (every ten steps) too, and without lightck again take turns.

- *Step*: what lightck adds to the median step, without a tier and with it; *A/A*: the two loops without lightck.
- *Stall*: the part of the time that the training thread spent in lightck.
- *Late*: due checkpoints that were not in the tier when the next but one was due.
- *Drain*: its memory at its peak, and its CPU time for a GB that it wrote after the first checkpoint.
- *Folder*: how long a checkpoint took, over one large write of as many bytes with fsync, in the same folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch

import lightck
from lightck.tiers.folder import FolderStore

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench.running.files import write_synced
from bench.workloads import Workload, gpt2_of, workload

LOOPS = ("plain", "without", "tier", "again")
EVERY = 10
BASE_EVERY = 12
"""Of the rows with ``Gradients``."""
SHM = "/dev/shm"


def loop(of: Workload, steps: int, pool: Path | None, tier: Path | None, base_every: int | None) -> dict[str, Any]:
    """Train for some steps, and return what was seen."""
    torch.manual_seed(0)
    model = of.model()
    optimizer = of.optimizer(model.parameters())
    session = None
    if pool is not None:
        tiers = [] if tier is None else [lightck.Tier(tier, every=EVERY, keep_last=2)]
        strategy = None if base_every is None else lightck.Gradients(base_every=base_every)
        session = lightck.attach(model, pool, optimizer=optimizer, tiers=tiers, overwrite=True, strategy=strategy)
    generator = torch.Generator().manual_seed(0)
    times, ended = [], []
    started = 0.0, 0
    for step in range(steps):
        if session is not None and tier is not None and step == EVERY - 1:
            started = drain_cpu()[0], session.stats().tiers[0].bytes_sent
        began = time.perf_counter()
        x, y = of.input(of.batch, generator)
        torch.autograd.backward(of.loss(model, x, y))
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
        ended.append(time.time())
    found: dict[str, Any] = {"step": median(times[steps // 4 :])}
    if session is not None:
        stats = session.stats()
        found["stall"] = stats.stall_seconds / sum(times)
        if tier is not None:
            found |= drain_facts(stats, ended, tier, started)
        session.close()
    return found


def drain_cpu() -> tuple[float, str]:
    """Return the seconds of a processor that the drain of this process has used, and its process id."""
    pid = children()[-1]  # the newest: the drain of the loop before may be about to end
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), pid


def children() -> list[str]:
    """Return the process ids of this process's children, oldest first."""
    found = (path.read_text().split() for path in Path("/proc/self/task").glob("*/children"))
    return sorted((pid for pids in found for pid in pids), key=int)


def drain_facts(stats: lightck.Stats, ended: Sequence[float], tier: Path, started: tuple[float, int]) -> dict[str, Any]:
    """Return what the drain of this process has done until now. ``started``: seconds of a processor and bytes that were
    sent, after the first checkpoint: so the start of the process is not counted."""
    cpu, pid = drain_cpu()
    peak = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    sent = {name.step: when for name, when in FolderStore(str(tier)).listing().manifests.items()}
    due = range(EVERY, len(ended) - 2 * EVERY + 1, EVERY)
    late = []
    for step in due:
        in_time = (when < ended[step - 1 + 2 * EVERY] for at, when in sent.items() if step <= at < step + EVERY)
        late += [] if any(in_time) else [step]
    (state,) = stats.tiers
    return {
        "due": len(due),
        "late": len(late),
        "seconds": state.seconds,
        "cpu_per_gb": (cpu - started[0]) / max((state.bytes_sent - started[1]) / 1e9, 1e-9),
        "peak_mb": int(peak.split()[1]) / 1e3,
        "checkpoint_mb": state.bytes_sent / max(state.checkpoints, 1) / 1e6,
    }


def one_large_write(folder: Path, nbytes: int) -> float:
    """Return how long it takes to write and sync so many bytes."""
    data, path = os.urandom(1 << 20) * (nbytes >> 20), folder / "large"
    began = time.perf_counter()
    write_synced(path, data)
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


def touch_memory(folder: Path) -> None:
    """Write to much of the memory once. In a virtual machine the first write to a page can take long, and the first
    loop with a large pool would seem slower than those after it."""
    nbytes = min(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), shutil.disk_usage(folder).free) // 2
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(nbytes >> 26):
            file.write(bytes(64 << 20))


def compared(of: Workload, steps: int, turns: int, folder: Path, shm: Path, base_every: int | None) -> dict[str, Any]:
    rows, writes = [], []
    for turn in range(turns):
        row: dict[str, Any] = {}
        for name in LOOPS:
            pool = shm / f"{turn}-{name}.pool" if name in ("without", "tier") else None
            row[name] = loop(of, steps, pool, folder / f"{turn}" if name == "tier" else None, base_every)
            if pool is not None:
                with suppress(FileNotFoundError):
                    pool.unlink()
        rows.append(row)
        writes.append(one_large_write(folder, int(row["tier"]["checkpoint_mb"] * 1e6)))
    found: dict[str, Any] = {"step_seconds": median(row["plain"]["step"] for row in rows)}
    plain = [(row["plain"]["step"] + row["again"]["step"]) / 2 for row in rows]
    found["added"] = {
        name: [row[name]["step"] / seconds - 1 for row, seconds in zip(rows, plain, strict=True)]
        for name in ("without", "tier")
    }
    found["added"]["same"] = [row["again"]["step"] / row["plain"]["step"] - 1 for row in rows]
    found["stall"] = {name: [row[name]["stall"] for row in rows] for name in ("without", "tier")}
    for key in ("due", "late", "seconds", "cpu_per_gb", "peak_mb", "checkpoint_mb"):
        found[key] = [row["tier"][key] for row in rows]
    found["large_write_seconds"] = writes
    return found


def show(name: str, found: dict[str, Any]) -> None:
    percent = {key: [round(100 * value, 1) for value in values] for key, values in found["added"].items()}
    stall = {key: [round(100 * value, 2) for value in values] for key, values in found["stall"].items()}
    print(f"{name}: step {found['step_seconds']:.2f} s; added %: {percent}; stall %: {stall}")
    seconds = [round(value, 2) for value in found["seconds"]]
    writes = [round(value, 2) for value in found["large_write_seconds"]]
    print(
        f"  {sum(found['late'])} of {sum(found['due'])} due checkpoints late; {found['checkpoint_mb'][0]:.0f} MB took "
        f"{seconds} s, one large write {writes} s; drain: {found['cpu_per_gb'][0]:.2f} s of CPU per GB, "
        f"{max(found['peak_mb']):.0f} MB at its peak"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write tiers.json into this folder")
    parser.add_argument("--only", help="only the model with this name")
    parser.add_argument("--folder", type=Path, help="where the tier lies; default: the temporary folder")
    parser.add_argument("--small", action="store_true", help="small models, few steps: only that it runs")
    args = parser.parse_args()
    torch.set_num_threads(2)
    size = "small" if args.small else "full"
    of: dict[str, tuple[Workload, int | None]] = {
        "alexnet": (workload("alexnet", size), None),
        "gpt2-4": (gpt2_of(4, size), None),
        "gpt2-4 Gradients": (gpt2_of(4, size), BASE_EVERY),
    }
    results = {}
    for name, (each, base_every) in of.items():
        if args.only in (None, name):
            steps, turns = (40, 1) if args.small else (50, 3)
            with tempfile.TemporaryDirectory(dir=args.folder) as folder, tempfile.TemporaryDirectory(dir=SHM) as shm:
                if not args.small:
                    touch_memory(Path(shm))
                results[name] = compared(each, steps, turns, Path(folder), Path(shm), base_every)
            show(name, results[name])
    if args.out is not None:
        (args.out / "tiers.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
