"""Kill groups of ranks and their drains, lose pools, and compare with a training that was never interrupted.

    cd tests; python -m tiers.kills_group --kills 200 --seed 1

Each life is a group of two ranks that hold parts of the model. It attaches with ``resume=True`` and a tier, says which
state it has restored, and trains. After a random time a rank is killed, and the other one a moment later; drains are
killed in some lives. Then the pools of one rank, of all or of none are lost, and the drains with them or not.

Checked after each life: all ranks began at one step, with the state of the uninterrupted training at that step, bit by
bit; a life whose pools were lost began at the newest complete checkpoint of the tier, and no life began below it; each
object that a manifest of the tier names is there.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import ranked
import torch
from ranked import run_ranks
from ranks.trainings import TOPOLOGIES, batch, build

import lightck
from lightck.tiers import drain_link
from lightck.tiers.decisions import newest_complete
from lightck.tiers.folder import FolderStore
from tiers.kills import check_tier, children_of, is_running

MARK = f"LIGHTCK_GROUP_KILLS={os.getpid()}"
"""What the environment of a drain of this campaign says."""
TOPOLOGY = TOPOLOGIES["fsdp"]
N_RANKS, STEPS_MAX = TOPOLOGY.n_ranks, 20_000


class Counts(NamedTuple):
    """What a campaign has seen."""

    kills: int
    lost_pools: int
    of_one_rank: int
    checkpoints: int
    last_step: int


class Began(NamedTuple):
    """With what a rank began: its step, and its state."""

    step: int
    state: str


def fingerprint(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    tensors = ranked.everything(model, optimizer)
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in tensors)).hexdigest()[:16]


def reference(last: int) -> list[list[str]]:
    """Return the fingerprints of each rank of the uninterrupted training, at each step up to ``last``."""

    def run(rank: int) -> list[str]:
        model, optimizer = build(TOPOLOGY)
        found = []
        for step in range(last + 1):
            found.append(fingerprint(model, optimizer))
            update(model, optimizer, rank, step)
        return found

    return ranked.values(run_ranks(N_RANKS, run, seconds_max=max(120.0, 0.5 * last)))


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    model(batch(rank, step)).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def life(folder: Path, seed: int) -> list[Began | None]:
    """Let a group train until it is killed, and return with what each rank began; None if it was killed before."""
    chance = random.Random(seed)
    seconds = chance.uniform(0.0, 3.0) if chance.random() < 0.9 else chance.uniform(0.0, 0.05)
    victim, every = chance.randrange(N_RANKS), chance.choice([1, 10, "0.05s", "0.2s"])
    kills_drain, pause = chance.random() < 0.3, chance.choice([0.0, 0.002])
    said = [folder / f"began-{rank}" for rank in range(N_RANKS)]
    for each in said:
        each.unlink(missing_ok=True)

    def run(rank: int) -> None:
        drain_link.GRACE_SECONDS = 0.5
        model, optimizer = build(TOPOLOGY)
        if rank == victim and seconds < 0.1:  # while it attaches
            threading.Timer(10 * seconds, ranked.die).start()
        session = lightck.attach(
            model,
            folder / "pools",
            optimizer=optimizer,
            resume=True,
            timeout=60,
            tiers=[lightck.Tier(folder / "tier", every=every, keep_last=2)],
        )
        said[rank].write_text(f"{session.step} {fingerprint(model, optimizer)}")
        if rank == victim:
            if kills_drain:
                threading.Timer(seconds * 0.7, kill_drains, [children_of(os.getpid())]).start()
            threading.Timer(seconds, ranked.die).start()
        for step in range(session.step, STEPS_MAX):
            update(model, optimizer, rank, step)
            session.end_step()
            time.sleep(pause)

    ended = run_ranks(N_RANKS, run, ends_others_after=chance.choice([0.0, 0.0, 0.05, 0.3]))
    errors = [one.text for one in ended if one.error is not None and "gloo" not in one.text]
    unexpected = [text for text in errors if "RankError" not in text]
    assert not unexpected, unexpected[0]
    texts = [each.read_text().split() if each.exists() else [] for each in said]
    return [Began(int(text[0]), text[1]) if len(text) == 2 else None for text in texts]


def kill_drains(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def drains() -> list[int]:
    """The drains of this campaign that run."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            is_ours = MARK.encode() in (entry / "environ").read_bytes().split(b"\0")
            if is_ours and b"drain_process" in (entry / "cmdline").read_bytes() and is_running(int(entry.name)):
                found.append(int(entry.name))
    return found


def wait_for_drains() -> None:
    until = time.monotonic() + 60
    while drains():
        assert time.monotonic() < until, "a drain does not end"
        time.sleep(0.01)


def newest_step(tier: Path) -> int:
    newest = newest_complete(FolderStore(str(tier)).listing())
    return 0 if newest is None else newest.step


def run(kills: int, seed: int, folder: Path) -> Counts:
    """Run a campaign. Raises ``AssertionError`` with the seed."""
    name, value = MARK.split("=")
    os.environ[name] = value
    chance = random.Random(seed)
    pools, tier = folder / "pools", folder / "tier"
    n_lost = n_of_one = n_checkpoints = 0
    least, is_lost = 0, False
    began_with: list[tuple[int, Began]] = []
    for number in range(kills):
        began = life(folder, chance.randrange(1 << 30))
        where = f"seed {seed}, life {number}"
        known = [(rank, one) for rank, one in enumerate(began) if one is not None]
        assert len({one.step for _, one in known}) <= 1, f"{where}: ranks began at {known}"
        for rank, one in known:
            assert one.step >= least, f"{where}: began at {one.step}, and the tier had {least}"
            assert not is_lost or one.step == least, f"{where}: began at {one.step}, not at {least}"
            began_with.append((rank, one))
        is_lost = not any(pools.glob("*.pool")) if not known and is_lost else False
        fate = chance.choice(["none", "none", "all", "one", "all and drains"])
        if fate == "all and drains":
            kill_drains(drains())
        if fate != "none" or chance.random() < 0.5:
            wait_for_drains()
        least = max(least, newest_step(tier)) if fate == "none" else newest_step(tier)
        if fate.startswith("all"):
            shutil.rmtree(pools, ignore_errors=True)
            n_lost, is_lost = n_lost + 1, True
        elif fate == "one":
            path = pools / f"rank-{chance.randrange(N_RANKS):05d}-of-{N_RANKS:05d}.pool"
            is_lost = is_lost or path.exists()
            path.unlink(missing_ok=True)
            n_of_one += 1
        n_checkpoints = max(n_checkpoints, check_tier(FolderStore(str(tier)))) if tier.exists() else 0
    wait_for_drains()
    last = max((one.step for _, one in began_with), default=0)
    states = reference(last)
    for rank, one in began_with:
        assert one.state == states[rank][one.step], f"seed {seed}: rank {rank} had another state at step {one.step}"
    return Counts(kills, n_lost, n_of_one, n_checkpoints, last)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        counts = run(arguments.kills, arguments.seed, Path(folder))
    print(f"seed {arguments.seed}: {counts}, {time.monotonic() - began:.0f} s: no life had another state")
    return 0


if __name__ == "__main__":
    sys.exit(main())
