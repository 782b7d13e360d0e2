"""How fast a checkpoint goes to a tier and comes back, over one large object: python bench/throughput.py [ROOT].

ROOT is a folder, or the URL of an object store (``--option NAME=VALUE``), below which nothing lies. The default is a
new folder on a disk. The state is that of linear layers with AdamW, and its pool lies on tmpfs. Four things take turns:

- *send* the checkpoint as ``lightck copy`` does, to a new tier each time, so that no object is there already;
- *put* as many bytes as one object, with the same library and its defaults; for a folder one write with fsync;
- *recover* the checkpoint: fetched, and verified twice (SHA-256 of each object, and the pool's checksums);
- *get* the large object with the same library; for a folder read it from the disk.

The ratios are those of the medians: send over put, recover over get, as bytes per second. CPU is that of this process
for a GB that was sent.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import lightck
from lightck.tiers.copying import copy_to_tier
from lightck.tiers.object_store import ObjectStore
from lightck.tiers.open_store import Options, open_store

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench.running.files import write_synced
from bench.running.machine import facts
from bench.running.rows import DISK_DIR, MEMORY_DIR

LARGE = "large"
_WIDTH, _BYTES_OF_A_LAYER = 2048, 3 * 2048 * 2049 * 4


def trained_pool(path: Path, nbytes: int) -> None:
    """Make a pool with about so many bytes of state."""
    torch.manual_seed(0)
    layers = max(1, round(nbytes / _BYTES_OF_A_LAYER))
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    with lightck.attach(model, path, optimizer=optimizer):
        for _ in range(2):
            model(torch.randn(4, _WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@contextmanager
def silent(_: str, __: int) -> Iterator[Callable[[int], None]]:
    yield lambda _: None


def send_checkpoint(pool: Path, root: str, options: Options | None) -> int:
    """Send the checkpoint of a pool to a new tier. Returns how many bytes were put."""
    return copy_to_tier(pool, root, written_by="bench", progress=silent, options=options).sent_nbytes


def remove_tier(root: str, options: Options | None) -> None:
    store = open_store(root, options)
    listing = store.listing()
    for name in (*listing.manifests, *listing.objects):
        store.delete(str(name))


@contextmanager
def large_object(root: str, options: Options | None) -> Iterator[tuple[Callable[[bytes], None], Callable[[], int]]]:
    """Yield what puts one large object, and what gets it and returns how many bytes it has."""
    store = open_store(root, options)
    if isinstance(store, ObjectStore):
        library = store._library
        yield (lambda data: library.put(LARGE, data) and None), lambda: len(library.get(LARGE).bytes())
        library.delete(LARGE)
        return
    Path(root).mkdir(exist_ok=True)
    path = Path(root, LARGE)

    def put(data: bytes) -> None:
        write_synced(path, data)
        drop_from_cache(path)

    yield put, lambda: read_file(path)
    path.unlink()


def drop_from_cache(path: Path) -> None:
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_file(path: Path) -> int:
    nbytes = len(path.read_bytes())
    drop_from_cache(path)
    return nbytes


def timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return what the call returns, its seconds, and its seconds of a processor."""
    began, cpu = time.perf_counter(), time.process_time()
    found = call()
    return found, time.perf_counter() - began, time.process_time() - cpu


def measure(pool: Path, root: str, options: Options | None, rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"send": [], "put": [], "recover": [], "get": []}
    cpu = []
    with large_object(root, options) as (put, get):
        for number in range(rounds):
            tier = f"{root}/{number}"
            nbytes, each, cpu_seconds = timed(partial(send_checkpoint, pool, tier, options))
            seconds["send"].append(each / nbytes)
            cpu.append(1e9 * cpu_seconds / nbytes)
            data = os.urandom(1 << 20) * (nbytes >> 20)
            seconds["put"].append(timed(partial(put, data))[1] / len(data))
            del data
            checkpoint, each, _ = timed(partial(lightck.recover, tier, options=options))
            assert checkpoint.step == 2
            del checkpoint
            seconds["recover"].append(each / nbytes)
            got, each, _ = timed(get)
            seconds["get"].append(each / got)
            remove_tier(tier, options)
    return {
        "checkpoint_bytes": nbytes,
        "mb_per_second": {name: [1e-6 / each for each in found] for name, found in seconds.items()},
        "send_over_put": median(seconds["put"]) / median(seconds["send"]),
        "recover_over_get": median(seconds["get"]) / median(seconds["recover"]),
        "cpu_per_gb": cpu,
    }


def show(found: dict[str, Any]) -> None:
    print(f"{found['checkpoint_bytes'] / 1e6:.0f} MB; CPU {median(found['cpu_per_gb']):.2f} s per GB sent")
    for name, rates in found["mb_per_second"].items():
        print(f"  {name}: {median(rates):.0f} MB/s ({' '.join(f'{each:.0f}' for each in rates)})")
    print(f"  send over put {found['send_over_put']:.2f}, recover over get {found['recover_over_get']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", help="a folder, or a URL")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of the object store")
    parser.add_argument("--mb", type=int, default=800, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the result into this file")
    args = parser.parse_args()
    options = dict(each.split("=", 1) for each in args.option) or None
    with tempfile.TemporaryDirectory(dir=DISK_DIR) as folder, tempfile.TemporaryDirectory(dir=MEMORY_DIR) as memory:
        pool = Path(memory) / "bench.pool"
        trained_pool(pool, args.mb * 1_000_000)
        found = measure(pool, args.root or str(Path(folder) / "tier"), options, args.rounds)
        found["machine"] = facts(folder)
    show(found)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
