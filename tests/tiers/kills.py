"""Kill trainings and their drains, lose pools, and compare with a training that was never interrupted.

    cd tests; python -m tiers.kills --kills 1000 --seed 1 [--compress] [--store]

Each life is a forked child that attaches with ``resume=True`` and a tier, says which state it has restored, and trains.
After a random time the trainer, its drain, or both are killed; then the pool is lost in some cases.

Checked after each life: the restored state is, bit by bit, that of the uninterrupted training at its step; a life
without a pool begins at the newest complete checkpoint of the tier; a life with one never begins below it; each object
that a manifest of the tier names is there.

With ``--store`` there is also a tier in an object store on this machine. Then the folder is lost in some cases too, and
a life begins at the newest complete checkpoint of the store.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from toys import in_child

import lightck
from lightck.pipeline.plan import Strategy
from lightck.strategy.gradients import Gradients
from lightck.tiers import drain_link
from lightck.tiers.codecs import CODECS
from lightck.tiers.decisions import complete, newest_complete
from lightck.tiers.folder import FolderStore
from lightck.tiers.open_store import open_store
from lightck.tiers.store import Store
from lightck.tiers.tier_manifest import read_manifest

os.environ["LIGHTCK_KILLS"] = str(os.getpid())
MARK = f"LIGHTCK_KILLS={os.getpid()}".encode()
"""What the environment of a drain of this campaign says."""


class Counts(NamedTuple):
    """What a campaign has seen."""

    kills: int
    lost_pools: int
    checkpoints: int
    last_step: int


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(), torch.nn.Linear(16, 1)
    model = torch.nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def fingerprint(model: torch.nn.Module) -> str:
    whole = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    return hashlib.sha256(whole).hexdigest()[:16]


class Reference:
    """The fingerprints of the uninterrupted training, made as far as they are asked for."""

    def __init__(self) -> None:
        self._model, self._optimizer = build()
        torch.manual_seed(1)
        self._random = torch.get_rng_state()
        self._found = [fingerprint(self._model)]

    def at(self, step: int) -> str:
        torch.set_rng_state(self._random)
        while len(self._found) <= step:
            update(self._model, self._optimizer)
            self._found.append(fingerprint(self._model))
        self._random = torch.get_rng_state()
        return self._found[step]


def life(
    pool: Path,
    tier: Path,
    report: int,
    every: int | str,
    pause: float,
    codec: str | None = None,
    strategy: Strategy | None = None,
    others: Sequence[lightck.Tier] = (),
) -> None:
    """Train until something kills this process."""
    drain_link.GRACE_SECONDS = 0.5
    model, optimizer = build()
    torch.manual_seed(1)
    tiers = [lightck.Tier(tier, every=every, keep_last=2, compress=codec), *others]
    session = lightck.attach(model, pool, optimizer=optimizer, resume=True, tiers=tiers, strategy=strategy)
    drains = ",".join(map(str, children_of(os.getpid())))
    os.write(report, f"{session.step} {fingerprint(model)} {drains}\n".encode())
    while True:
        update(model, optimizer)
        session.end_step()
        time.sleep(pause)


def children_of(pid: int) -> list[int]:
    return [
        int(each) for task in Path(f"/proc/{pid}/task").iterdir() for each in (task / "children").read_text().split()
    ]


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def check_tier(store: Store) -> int:
    """Return the number of complete checkpoints, of which no object may be missing."""
    for _ in range(100):  # a drain may delete something between the listing and a read
        listing = store.listing()
        with suppress(Exception):
            named = {each.name for name in listing.manifests for each in read_manifest(store, name).objects}
            missing = named - set(store.listing().objects)
            still = [name for name in store.listing().manifests if missing & _objects(store, name)] if missing else []
            assert not still, f"objects of {still} are missing"
            break
    return len(complete(listing))


def _objects(store: Store, name: object) -> set[object]:
    return {each.name for each in read_manifest(store, name).objects}  # type: ignore[arg-type]


class Far(NamedTuple):
    """A tier in an object store. The library of stores does not work in a process whose parent has used it, so it is
    used in children only."""

    url: str
    options: dict[str, Any]

    def tier(self, every: int | str) -> lightck.Tier:
        return lightck.Tier(self.url, every=every, keep_last=2, options=self.options)

    def newest(self) -> tuple[str, int]:
        """Check that nothing is missing, and return what ``newest_in`` does."""

        def checked() -> tuple[str, int]:
            store = open_store(self.url, self.options)
            check_tier(store)
            return newest_in(store)

        claim, step = in_child(checked)
        return claim, step


def newest_in(store: Store) -> tuple[str, int]:
    """Return claim and step of the newest complete checkpoint: what is larger is newer."""
    found = newest_complete(store.listing())
    return ("", 0) if found is None else (str(found.claim), found.step)


def run(
    kills: int,
    seed: int,
    folder: Path,
    codecs: Sequence[str | None] = (None,),
    strategy: Strategy | None = None,
    far: Far | None = None,
) -> Counts:
    """Run a campaign. ``codecs``: each life takes one of them. Raises ``AssertionError`` with the seed."""
    chance, reference = random.Random(seed), Reference()
    pool, tier = folder / "run.pool", folder / "tier"
    store = FolderStore(str(tier))
    n_killed = n_lost = n_checkpoints = begun = 0
    least, is_lost = 0, False
    while n_killed < kills:
        every = chance.choice([1, 5, "0.05s", "0.2s"])
        codec = chance.choice(codecs) if len(codecs) > 1 else codecs[0]
        others = [] if far is None else [far.tier(chance.choice([1, "0.2s", "0.5s"]))]
        reads, report = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reads)
            try:
                life(pool, tier, report, every, chance.choice([0.0, 0.002]), codec, strategy, others)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(report)
        with os.fdopen(reads) as said:
            line = said.readline().split()
            assert len(line) == 3, f"seed {seed}, kill {n_killed}: the life ended before it began"
            begun, restored, drains = int(line[0]), line[1], [int(each) for each in line[2].split(",")]
            where = f"seed {seed}, kill {n_killed}: begun at step {begun}"
            assert restored == reference.at(begun), f"{where}: other bits than the uninterrupted training"
            assert begun == least if is_lost else begun >= least, f"{where}: the tier held step {least}"
            time.sleep(chance.uniform(0.0, 0.5))
            drain = chance.choice(drains)
            for victim in chance.choice([[pid], [drain], [pid, *drains], [*drains, pid], [drain, pid]]):
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                n_killed += 1
                time.sleep(chance.choice([0.0, 0.0, 0.02]))
            if is_running(pid):
                time.sleep(chance.uniform(0.0, 0.3))
                os.kill(pid, signal.SIGKILL)
                n_killed += 1
            os.waitpid(pid, 0)
        is_lost = chance.random() < 0.3
        if is_lost:
            n_lost += 1
            wait_for_drains()
            pool.unlink()
        n_checkpoints = check_tier(store)
        found = [newest_in(store)]
        if is_lost and far is not None:
            found.append(far.newest())
            if chance.random() < 0.5:
                shutil.rmtree(tier)
                del found[0]
        _, least = max(found)
    wait_for_drains()
    if far is not None:
        far.newest()
    return Counts(n_killed, n_lost, n_checkpoints, begun)


def wait_for_drains() -> None:
    """Wait until the drains of killed trainings have ended, also those that have just begun."""
    deadline = time.monotonic() + 60
    while any(_drains()):
        assert time.monotonic() < deadline, "a drain does not end"
        time.sleep(0.01)


def _drains() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            is_ours = entry.name.isdigit() and MARK in (entry / "environ").read_bytes().split(b"\0")
            if is_ours and b"drain_process" in (entry / "cmdline").read_bytes() and is_running(int(entry.name)):
                found.append(int(entry.name))
    return found


def far_store() -> Far:
    """Start moto's server in this process, and make a bucket."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    os.environ["AWS_ACCESS_KEY_ID"] = os.environ["AWS_SECRET_ACCESS_KEY"] = "campaign"
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    endpoint = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    client.create_bucket(Bucket="campaign")
    return Far("s3://campaign/run7", {"endpoint": endpoint, "region": "us-east-1", "allow_http": True})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gradients", type=int, metavar="N", help="train with Gradients(base_every=N)")
    parser.add_argument("--compress", action="store_true", help="each life compresses with zstd, with lz4, or not")
    parser.add_argument("--store", action="store_true", help="a tier in an object store, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as name:
        codecs = (None, *CODECS) if args.compress else (None,)
        strategy = None if args.gradients is None else Gradients(base_every=args.gradients)
        far = far_store() if args.store else None
        counts = run(args.kills, args.seed, Path(name), codecs, strategy, far)
    seconds = time.monotonic() - began
    print(
        f"seed {args.seed}: {counts.kills} kills, {counts.lost_pools} pools lost, step {counts.last_step}: every state "
        f"exact, nothing missing ({seconds:.0f} s)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
