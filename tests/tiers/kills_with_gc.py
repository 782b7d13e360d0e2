"""Kill trainings and their drains, collect what they have left in the tier, and let the training go on.

    cd tests; python -m tiers.kills_with_gc --rounds 10 --kills 20 --seed 1

Each round is a campaign of ``kills.py``, followed by ``lightck gc --stopped`` when everything in the tier is two hours
old. Checked after each: every complete checkpoint is recovered as before, bit by bit; the tier holds what they need,
the files of their claims, of the highest one and of those that a pool may name, and nothing else.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from cli.calls import call_json
from toys import same

from lightck.tiers.decisions import complete
from lightck.tiers.names import claim_name
from tiers import kills
from tiers.small_tiers import age, needed, states, store_of, tree

ATTEMPTS = 3
"""At most so many campaigns are run until the tier holds a checkpoint."""


def run(rounds: int, n_kills: int, seed: int, folder: Path) -> int:
    """Run the rounds, and return how many files were collected. Raises ``AssertionError`` with the seed."""
    tier, n_collected = folder / "tier", 0
    for each in range(rounds):
        where = f"seed {seed}, round {each}"
        for attempt in range(ATTEMPTS):  # on a busy machine each drain may be killed before it has sent anything
            kills.run(n_kills, 1000 * (seed + 100 * attempt) + each, folder)
            if complete(store_of(tier).listing()):
                break
        n_collected += _collected(tier, where)
    return n_collected


def _collected(tier: Path, where: str) -> int:
    age(tier)
    before, recovered = tree(tier), states(tier)
    assert recovered, f"{where}: nothing was sent"
    status, said = call_json("gc", tier, "--stopped")
    assert status == 0, where
    assert all(each["kind"] == "claim" for each in said["left"]), f"{where}: {said['left']}"
    stays = {name for each in said["left"] for name in each["names"]}
    assert same(states(tier), recovered), f"{where}: a checkpoint was lost or changed"
    store = store_of(tier)
    listing = store.listing()
    claims = {each.writer.claim for each in listing.manifests} | {max(listing.claims)}
    files = {name for name in tree(tier) if (tier / name).is_file()}
    assert files == needed(store) | set(map(claim_name, claims)) | stays, f"{where}: something is left over, or missing"
    assert not store.empty_claims(), f"{where}: folders are left"
    return len(before) - len(tree(tier))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm", ignore_cleanup_errors=True) as name:
        n_collected = run(args.rounds, args.kills, args.seed, Path(name))
    print(
        f"seed {args.seed}: {args.rounds} rounds of {args.kills} kills, {n_collected} files and folders collected, no "
        f"orphan left, every checkpoint exact ({time.monotonic() - began:.0f} s)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
