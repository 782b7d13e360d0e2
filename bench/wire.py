"""Checkpoints of two ranks that are joined by a slow wire: python bench/wire.py [--out DIR] [--only ddp]

Each rank is a process in a network namespace of its own, as if on a host of its own. The two are joined by a pair of
virtual network devices, whose rate a token bucket filter limits in both directions. (Needs ``ip`` and ``tc``, and root
or unprivileged user namespaces.) A transformer with AdamW is trained by DistributedDataParallel or by FSDP2, with
``interval=4``, in two ways: *plain*, and *layer-wise* (``lightck.layerwise``). Each figure is of one run:

- *Window*: from the end of ``optimizer.step()`` to the commit of that step, as a share of a step. What happens in the
  window is lost if the process is killed in it.
- *Step*: what one checkpoint adds, as a share of one step. The step of a checkpoint and the one after it are compared
  with the two that follow, in which nothing is copied.
- *Collectives*: the same of the time from the first launch of a reduction to the last end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import lightck
from lightck.session.group import HOST_VARIABLE

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))

INTERVAL = 4
WARM_UP = 2 * INTERVAL
TOKENS, VOCABULARY = 64, 1000
PORT = 29517
_IN_NAMESPACE = "LIGHTCK_BENCH_WIRE"


@dataclass(frozen=True)
class Load:
    """width, layers: of the transformer. batch: sequences for each rank. rate: as ``tc`` takes it; "" for no limit."""

    width: int
    layers: int
    batch: int
    rate: str


LOADS = {
    "wire-bound": Load(512, 8, 4, "1gbit"),
    "balanced": Load(512, 8, 24, "1gbit"),
    "compute-bound": Load(512, 8, 12, ""),
}
SMALL = Load(64, 2, 2, "200mbit")


class Transformer(nn.Module):
    def __init__(self, load: Load) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, load.width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(load.width, 8, 4 * load.width, dropout=0.0, batch_first=True)
            for _ in range(load.layers)
        )
        self.head = nn.Linear(load.width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


# -- one rank ----------------------------------------------------------------------------------------------------------


@dataclass
class Times:
    """Of one rank, in seconds of ``time.perf_counter``, one item for each step."""

    begins: list[float] = field(default_factory=list)
    updated: list[float] = field(default_factory=list)
    """Ends of ``optimizer.step()``."""
    launched: list[float] = field(default_factory=list)
    """The first launch of a reduction."""
    reduced: list[float] = field(default_factory=list)
    """The end of the last reduction."""
    committed: dict[int, float] = field(default_factory=dict)
    """Step -> when its commit was seen."""


class Reductions:
    """Notes when reductions begin and end."""

    def __init__(self) -> None:
        self.first = self.last = 0.0

    def begin_step(self) -> None:
        self.first = self.last = 0.0

    def began(self) -> None:
        self.first = self.first or time.perf_counter()

    def ended(self) -> None:
        self.last = time.perf_counter()

    # torch compares annotations with its own types, so these must be no strings.
    def ddp_hook(self, _, bucket):  # type: ignore[no-untyped-def]
        """The communication hook of both runs: it averages, and notes the times."""
        self.began()
        buffer = bucket.buffer().div_(dist.get_world_size())

        def done(future: Any) -> Any:
            self.ended()
            return future.value()[0]

        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None
        return work.get_future().then(done)

    def watch_fsdp(self) -> None:
        """Note the reduce-scatters, which gloo makes on the thread of the backward pass."""
        name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
        real = getattr(dist, name)

        def timed(*args: Any, **options: Any) -> Any:
            self.began()
            work = real(*args, **options)
            self.ended()
            return work

        setattr(dist, name, timed)


def train(kind: str, is_layerwise: bool, load: Load, steps: int, pools: Path, times: Times) -> None:
    torch.manual_seed(0)
    model: Any = Transformer(load)
    reductions, called = Reductions(), model
    if kind == "ddp":
        called = nn.parallel.DistributedDataParallel(model)
        if not is_layerwise:
            called.register_comm_hook(None, reductions.ddp_hook)
    else:
        from torch.distributed.fsdp import fully_shard

        reductions.watch_fsdp()
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if is_layerwise:
        hook = {"comm_hook": reductions.ddp_hook} if kind == "ddp" else {}
        lightck.layerwise(called, optimizer, **hook)
    session = lightck.attach(model, pools, optimizer=optimizer, interval=INTERVAL, timeout=120)
    is_over = threading.Event()
    watch = threading.Thread(target=_note_commits, args=(session, times, is_over))
    watch.start()
    for step in range(steps):
        reductions.begin_step()
        times.begins.append(time.perf_counter())
        tokens = torch.randint(VOCABULARY, (load.batch, TOKENS), generator=torch.Generator().manual_seed(step))
        called(tokens).logsumexp(-1).mean().backward()
        optimizer.step()
        times.updated.append(time.perf_counter())
        optimizer.zero_grad()
        times.launched.append(reductions.first)
        times.reduced.append(reductions.last)
    times.begins.append(time.perf_counter())
    session.close()
    is_over.set()
    watch.join()


def _note_commits(session: Any, times: Times, is_over: threading.Event) -> None:
    while not is_over.wait(0.002):
        step = session.committed
        if step is not None:
            times.committed.setdefault(step, time.perf_counter())


def rank_main(args: argparse.Namespace) -> None:
    """Run one rank: wait for its end of the wire, join the group, train, and write the times as JSON."""
    name = f"lck{args.rank}"
    while name not in os.listdir("/sys/class/net") and not _has_link(name):
        time.sleep(0.01)
    load = _load(args)
    for command in (
        ["ip", "link", "set", "lo", "up"],
        ["ip", "addr", "add", f"10.211.0.{args.rank + 1}/24", "dev", name],
        ["ip", "link", "set", name, "up"],
        *(
            [["tc", *f"qdisc add dev {name} root tbf rate {load.rate} burst 256kb latency 50ms".split()]]
            if load.rate
            else []
        ),
    ):
        subprocess.run(command, check=True)
    os.environ["GLOO_SOCKET_IFNAME"] = name
    os.environ[HOST_VARIABLE] = f"host-{args.rank}"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://10.211.0.1:{PORT}", rank=args.rank, world_size=2)
    times, folder = Times(), Path(args.folder)
    train(args.kind, args.layerwise, load, args.steps, folder / f"host-{args.rank}", times)
    dist.barrier()
    (folder / f"{args.rank}.json").write_text(json.dumps(asdict(times)))
    os._exit(0)  # gloo's destructors wait for other ranks, which may be gone


def _has_link(name: str) -> bool:
    return subprocess.run(["ip", "link", "show", name], capture_output=True, check=False).returncode == 0


# -- both ranks --------------------------------------------------------------------------------------------------------


def measure(kind: str, is_layerwise: bool, name: str, steps: int, is_small: bool) -> dict[str, Any]:
    """Run both ranks, and return the figures of rank 0."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        subprocess.run(["ip", "link", "add", "lck0", "type", "veth", "peer", "name", "lck1"], check=True)
        ranks = [
            subprocess.Popen(
                ["unshare", "-n", sys.executable, __file__, "--rank", str(rank), "--folder", folder, "--kind", kind]
                + ["--load", name, "--steps", str(steps)]
                + (["--layerwise"] if is_layerwise else [])
                + (["--small"] if is_small else [])
            )
            for rank in range(2)
        ]
        own = os.readlink("/proc/self/ns/net")
        for rank, process in enumerate(ranks):
            while os.readlink(f"/proc/{process.pid}/ns/net") == own:
                time.sleep(0.01)
            subprocess.run(["ip", "link", "set", f"lck{rank}", "netns", str(process.pid)], check=True)
        codes = [process.wait() for process in ranks]
        if any(codes):
            raise SystemExit(f"the ranks ended with the codes {codes}")
        found = Times(**json.loads((Path(folder) / "0.json").read_text()))
    return figures(found)


def figures(times: Times) -> dict[str, Any]:
    committed = {int(step): at for step, at in times.committed.items()}
    steps = [end - begin for begin, end in zip(times.begins, times.begins[1:], strict=False)]
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
        "window": median(windows),
        "window_max": max(windows),
        "n": len(windows),
        "step_added": _mean_and_error(added(steps, step)),
        "collectives_added": _mean_and_error(added(collectives, median(collectives))),
    }


def _mean_and_error(values: Sequence[float]) -> list[float]:
    """Mean and its standard error."""
    return [mean(values), stdev(values) / len(values) ** 0.5]


def _load(args: argparse.Namespace) -> Load:
    return SMALL if args.small else LOADS[args.load]


def _in_network_namespace() -> None:
    """Start this program again in a network namespace of its own, in which it may add devices."""
    if os.environ.get(_IN_NAMESPACE):
        return
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        raise SystemExit(f"{', '.join(missing)} not found. On Debian: apt-get install iproute2 util-linux")
    os.environ[_IN_NAMESPACE] = "1"
    flags = "-n" if os.geteuid() == 0 else "-Urn"
    os.execvp("unshare", ["unshare", flags, sys.executable, *sys.argv])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the rows into wire.json in this folder, which keeps the others")
    parser.add_argument("--small", action="store_true", help="few steps of a small model: only that it runs")
    parser.add_argument("--only", choices=("ddp", "fsdp"))
    parser.add_argument("--load", choices=LOADS)
    parser.add_argument("--steps", type=int, default=152)
    for name in ("--rank", "--folder", "--kind"):
        parser.add_argument(name, help=argparse.SUPPRESS, type=int if name == "--rank" else str)
    parser.add_argument("--layerwise", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank_main(args)
    _in_network_namespace()
    steps = 32 if args.small else args.steps
    loads = [args.load] if args.load else ["wire-bound"] if args.small else list(LOADS)
    found = []
    for name in loads:
        for kind in (args.only,) if args.only else ("ddp", "fsdp"):
            for is_layerwise in (False, True):
                row = measure(kind, is_layerwise, name, steps, args.small)
                found.append({"load": name, "kind": kind, "layerwise": is_layerwise, **row})
                print(_line(found[-1]), flush=True)
    if args.out is not None:
        path = args.out / "wire.json"
        kept = json.loads(path.read_text()) if path.exists() else []
        rows = {_key(row): row for row in (*kept, *found)}
        path.write_text(json.dumps(list(rows.values()), indent=1) + "\n")


def _key(row: dict[str, Any]) -> tuple[str, str, bool]:
    return row["load"], row["kind"], row["layerwise"]


def _line(row: dict[str, Any]) -> str:
    step, collectives = ("{:+.1f} +- {:.1f} %".format(*(100 * one for one in row[key])) for key in _ADDED)
    way = "layer-wise" if row["layerwise"] else "plain"
    return (
        f"{row['load']}, {row['kind']}, {way}: step {row['step_seconds']:.3f} s, wire {100 * row['wire_share']:.0f} %, "
        f"window {100 * row['window']:.1f} % (at most {100 * row['window_max']:.1f} %), a checkpoint adds {step} of a "
        f"step, {collectives} of the collectives ({row['n']} checkpoints)"
    )


_ADDED = ("step_added", "collectives_added")

if __name__ == "__main__":
    main()
