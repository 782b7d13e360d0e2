"""Small tiers for tests: a training that sends each of its steps, and what lies in a tier."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

from toys import adam, net, train

import lightck
from lightck.tiers.claiming import read_claim
from lightck.tiers.decisions import complete
from lightck.tiers.folder import FolderStore
from lightck.tiers.names import Claim, ObjectName, Writer
from lightck.tiers.tier_manifest import read_manifest

HOURS = 3600.0


def session_until(folder: Path, step: int, **options: Any) -> None:
    """Train until a step, with the pool ``run.pool`` and the tier ``tier``, to which each step is sent."""
    model = net()
    optimizer = adam(model)
    tiers = [lightck.Tier(folder / "tier", every=1, **options)]
    with lightck.attach(model, folder / "run.pool", optimizer=optimizer, resume=True, tiers=tiers) as session:
        wait_for_drain(session)
        while session.step < step:
            train(model, optimizer, 1, start=session.step)
            session.end_step()
            session.flush()
            wait_for_drain(session)


def wait_for_drain(session: lightck.Session) -> None:
    """Wait until the drain has nothing to do."""
    link, deadline = session._steps.commits.participants.tiers._links[0], time.monotonic() + 60
    while link._handle is None or link._handle.state.is_busy or link._offer is not None:
        assert time.monotonic() < deadline, "it was not sent in time"
        session.stats()
        time.sleep(0.005)


def store_of(tier: Path) -> FolderStore:
    return FolderStore(str(tier))


def age(tier: Path, hours: float = 2.0) -> None:
    """Let everything in a tier be older, as the file system sees it."""
    for path in (*tier.rglob("*"), tier):
        then = time.time() - hours * HOURS
        os.utime(path, (then, then), follow_symlinks=False)


def tree(tier: Path) -> set[str]:
    return {str(path.relative_to(tier)) for path in tier.rglob("*")}


def orphan(tier: Path, claim: Claim, content: str = "ab" * 32, data: bytes = b"orphan") -> Path:
    """Put an object that no manifest names."""
    name = ObjectName(Writer(claim, 0, 1), content, f"{random.getrandbits(32):08x}")
    store_of(tier).put(str(name), data)
    return tier / str(name)


def temporary(folder: Path) -> Path:
    path = folder / f".tmp-{random.getrandbits(64):016x}"
    path.write_bytes(b"half")
    return path


def claims_of(tier: Path) -> list[Claim]:
    return sorted(store_of(tier).listing().claims)


def needed(store: FolderStore) -> set[str]:
    """The files that the complete checkpoints of a tier need."""
    listing = store.listing()
    manifests = [each for each in listing.manifests if each.checkpoint in complete(listing)]
    objects = {str(each.name) for name in manifests for each in read_manifest(store, name).objects}
    return {*map(str, manifests), *objects}


def states(tier: Path) -> dict[int, Any]:
    """What is recovered of each complete checkpoint."""
    found = {}
    for step in sorted({each.step for each in complete(store_of(tier).listing())}):
        checkpoint = lightck.recover(tier, step=step)
        found[step] = dict(checkpoint.model), checkpoint.optimizer
    return found


def run_of(tier: Path) -> str:
    store = store_of(tier)
    return read_claim(store, max(store.listing().claims)).run
