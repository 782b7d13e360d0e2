"""What a checkpoint at every step costs on a disk, with two slots and with three: python bench/disk.py [--out DIR].

Four trainings of a GPT-2 take turns, each in a process of its own: one that saves nothing, the same again, and two
with lightck and a pool on the disk, with two slots and with ``slots=3``. A window of steps of the others is compared
with the two windows of the first around it. The last step of a window is left out, and so is the first: with three
slots, a checkpoint is in flight during all steps between them, as in a training that goes on.

- *Added*: by how much a step is longer, as a share of it. *A/A*: the same for the training that saves nothing again.
- *Stall*: the part of the time that the training thread spent in lightck.
- *CPU*: seconds of a processor that lightck used for a checkpoint, over those of one memcpy of the state.
- *Disk*: how long the disk takes for as many bytes, which two threads write past the page cache (O_DIRECT) from huge
  pages while nothing else runs, and how long the sync behind it takes. It is measured in each round. With two slots,
  the update waits for the part of a checkpoint that the disk has not taken when the backward pass ends.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench.measures.savers import LIGHTCK
from bench.measures.turns import Spec, Trained
from bench.running.elsewhere import Elsewhere
from bench.running.machine import facts
from bench.running.rows import DISK_DIR
from bench.workloads import checkpoint_nbytes, gpt2_of

PLAIN = "plain"
_PIECE = 4 << 20
_N_WRITERS = 2
_N_WARM_UP_MAX = 8


def specs(layers: int, size: str, folder: Path) -> dict[str, Spec]:
    def spec(name: str, **more: Any) -> Spec:
        return Spec(layers, size, str(folder / name), **more)

    return {
        PLAIN: spec(PLAIN),
        "again": spec("again"),
        "two slots": spec("two", saver=LIGHTCK),
        "three slots": spec("three", saver=LIGHTCK, slots=3),
    }


class Disk:
    """A file of one state, which is written again and again as the slots of a pool are."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._nbytes = -(-nbytes // _PIECE) * _PIECE
        self._fd = os.open(folder / "disk", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.posix_fallocate(self._fd, 0, self._nbytes)
        self._direct_fd = os.open(folder / "disk", os.O_RDWR | os.O_DIRECT)
        self._memory = mmap.mmap(-1, _N_WRITERS * _PIECE + (2 << 20), mmap.MAP_PRIVATE)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.write()  # the file system has the blocks now

    def write(self) -> dict[str, float]:
        """Write a state; the seconds until all is written, and those of the sync."""
        began = time.perf_counter()
        with ThreadPoolExecutor(_N_WRITERS) as threads:
            list(threads.map(self._write_part, range(_N_WRITERS)))
        written = time.perf_counter()
        os.fdatasync(self._direct_fd)
        return {"write": written - began, "sync": time.perf_counter() - written}

    def _write_part(self, number: int) -> None:
        with memoryview(self._memory) as memory:
            piece = memory[number * _PIECE : (number + 1) * _PIECE]  # mmap begins at a page
            for at in range(number * _PIECE, self._nbytes, _N_WRITERS * _PIECE):
                assert os.pwrite(self._direct_fd, piece, at) == _PIECE

    def close(self) -> None:
        os.close(self._direct_fd)
        os.close(self._fd)


def measure(layers: int, size: str, folder: Path, steps: int, rounds: int) -> dict[str, Any]:
    nbytes = checkpoint_nbytes(gpt2_of(layers, size))
    windows: dict[str, list[dict[str, Any]]] = {}
    disk_seconds = []
    with ExitStack() as stack:
        loops = {
            name: stack.enter_context(Elsewhere(f"the training {name!r}", partial(Trained, spec)))
            for name, spec in specs(layers, size, folder).items()
        }
        disk = Disk(folder, nbytes)
        stack.callback(disk.close)
        for loop in loops.values():
            warm_up(loop, steps)  # one after the other
        for _ in range(rounds):
            for name, loop in loops.items():
                windows.setdefault(name, []).append(loop.call("window", steps))
            disk_seconds.append(disk.write())
        windows[PLAIN].append(loops[PLAIN].call("window", steps))
        memcpy = loops[PLAIN].call("memcpy", str(folder))
        ended = {name: loops[name].call("finish", 2) for name in loops if "slots" in name}
    assert all(each["exact"] for each in ended.values()), "what was recovered differs from the live state"
    plain = [_seconds(window) for window in windows[PLAIN]]
    return {
        "state_bytes": nbytes,
        "step_seconds": median(plain),
        "disk": disk_seconds,
        "memcpy_cpu_seconds": memcpy,
        "rows": {
            name: _row(found, plain, memcpy) | {"wait_policy": ended.get(name, {}).get("wait_policy")}
            for name, found in windows.items()
            if name != PLAIN
        },
        "machine": facts(str(folder)),
    }


def warm_up(loop: Elsewhere, steps: int) -> None:
    """Train until lightck has found how OpenMP's threads are to wait (docs/slow-steps.md): its trial need not begin in
    the first window."""
    n_settled = 0
    for _ in range(_N_WARM_UP_MAX):
        n_settled = n_settled + 1 if loop.call("window", steps)["is_settled"] else 0
        if n_settled == 2:
            return


def _seconds(window: dict[str, Any]) -> float:
    """The mean step of a window, without its first and its last one."""
    return float(mean(window["step_seconds"][1:-1]))


def _row(windows: list[dict[str, Any]], plain: list[float], memcpy: float) -> dict[str, Any]:
    steps = len(windows[0]["step_seconds"])
    around = [(before + after) / 2 for before, after in pairwise(plain)]
    return {
        "added": [_seconds(window) / seconds - 1 for window, seconds in zip(windows, around, strict=True)],
        "stall": [mean(window["step_stalls"][1:-1]) / _seconds(window) for window in windows],
        "cpu": [window["own_cpu"] / steps / memcpy for window in windows],
        "bytes": [window["bytes"] / steps for window in windows],
    }


def show(found: dict[str, Any]) -> None:
    step = found["step_seconds"]
    write, sync = (median(each[key] for each in found["disk"]) for key in ("write", "sync"))
    print(
        f"{found['state_bytes'] / 1e6:.0f} MB, a step of {step:.2f} s; one memcpy {found['memcpy_cpu_seconds']:.3f} s"
    )
    print(f"  disk: written in {write:.2f} s ({100 * write / step:.1f} % of a step), sync {1e3 * sync:.1f} ms")
    for name, row in found["rows"].items():
        added, stall = (" ".join(f"{100 * each:.1f}" for each in row[key]) for key in ("added", "stall"))
        print(
            f"  {name}: added {100 * median(row['added']):.1f} % ({added}); stall {100 * median(row['stall']):.2f} % "
            f"({stall}); CPU {median(row['cpu']):.2f} memcpys; OpenMP waits: {row['wait_policy']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write disk.json into this folder")
    parser.add_argument("--layers", type=int, default=12, help="of the GPT-2")
    parser.add_argument("--steps", type=int, default=8, help="of a window")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(DISK_DIR), help="on the disk")
    parser.add_argument("--small", action="store_true", help="a small model, few steps: only that it runs")
    args = parser.parse_args()
    size, rounds = ("small", 2) if args.small else ("full", args.rounds)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = measure(args.layers, size, Path(folder), args.steps, rounds)
    show(found)
    if args.out is not None:
        (args.out / "disk.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
