"""Eight processes claim one tier at once, again and again.

    cd tests; python -m tiers.claims --rounds 1000 --root s3://BUCKET/claims --option endpoint=http://127.0.0.1:8080 ...

Each round has a root of its own below ``--root``. The processes of a run continue from nothing, and claim it at the
same moment, as often as ``claim_tier`` does. No store is asked for an atomic create: names are unique.

Checked after each round: there is one newest claim, and a process has it; no two processes have the same one; each
claim says what the one process wrote that made it, and none is missing: nothing was overwritten, and nothing deleted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from lightck.errors import TierClaimedError
from lightck.tiers import claiming
from lightck.tiers.claiming import claim_of, claim_tier, read_claim
from lightck.tiers.open_store import open_store
from lightck.tiers.store import Store

N_TRAINERS = 8


class Counts(NamedTuple):
    """What the rounds of a campaign have seen."""

    claims: int
    tries_max: int
    """Of one process in one round."""
    gave_up: int
    """Processes that gave up because others had claimed the tier in each of their tries."""


class _Counted:
    """A store that counts its puts."""

    def __init__(self, store: Store) -> None:
        self._store, self.put_names = store, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, name: str, data: bytes | memoryview) -> None:
        self.put_names.append(name)
        self._store.put(name, data)


def trainer(options: dict[str, Any], number: int, pause: float) -> None:
    """Claim each root that comes, and say what happened. ``pause``: seconds between two tries, at most."""
    claiming._PAUSE_SECONDS_MAX = pause
    for line in sys.stdin:
        store = _Counted(open_store(line.strip(), options))
        try:
            claim: str | None = str(claim_tier(store, "run", f"trainer {number}"))  # type: ignore[arg-type]
        except TierClaimedError:
            claim = None
        print(json.dumps({"claim": claim, "puts": store.put_names}), flush=True)


def run(root: str, options: dict[str, Any], rounds: int, n_trainers: int = N_TRAINERS) -> Counts:
    """Run a campaign. Raises ``AssertionError`` with the round."""
    program = (
        "import json, sys; from tiers.claims import trainer; trainer(json.loads(sys.argv[1]), int(sys.argv[2]), 0.2)"
    )
    path = os.pathsep.join(each for each in sys.path if each)
    counts = Counts(0, 0, 0)
    with ExitStack() as stack:
        trainers = []
        for number in range(n_trainers):
            words = [sys.executable, "-c", program, json.dumps(options), str(number)]
            env = {**os.environ, "PYTHONPATH": path}
            pipe = subprocess.PIPE
            process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=env)
            trainers.append(stack.enter_context(process))
            stack.callback(process.kill)
        for number in range(rounds):
            here = f"{root}/round-{number}"
            if "://" not in root:
                Path(here).parent.mkdir(exist_ok=True)
            for each in trainers:
                each.stdin.write(f"{here}\n")  # type: ignore[union-attr]
                each.stdin.flush()  # type: ignore[union-attr]
            said = [json.loads(each.stdout.readline()) for each in trainers]  # type: ignore[union-attr]
            _check(open_store(here, options), said, f"round {number}")
            tries = [len(each["puts"]) for each in said]
            gave_up = sum(each["claim"] is None for each in said)
            if number % 100 == 99:
                print(f"{number + 1} rounds", file=sys.stderr, flush=True)
            counts = Counts(counts.claims + sum(tries), max(counts.tries_max, *tries), counts.gave_up + gave_up)
    return counts


def _check(store: Store, said: Sequence[dict[str, Any]], where: str) -> None:
    listing = store.listing()
    owners = {name: f"trainer {number}" for number, each in enumerate(said) for name in each["puts"]}
    n_puts = sum(len(each["puts"]) for each in said)
    assert len(owners) == n_puts == len(listing.claims), f"{where}: {n_puts} puts, {len(listing.claims)} claims"
    had = [each["claim"] for each in said if each["claim"] is not None]
    assert len(set(had)) == len(had), f"{where}: two processes have one claim"
    newest = max(listing.claims)
    assert [str(newest)] == [each for each in had if claim_of(each) == newest], f"{where}: nobody has the newest claim"
    for claim in listing.claims:
        assert read_claim(store, claim).written_by == owners[f"{claim}/claim.json"], f"{where}: {claim} was overwritten"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True)
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=1000)
    args = parser.parse_args()
    began = time.monotonic()
    counts = run(args.root, dict(each.split("=", 1) for each in args.option), args.rounds)
    print(
        f"{args.rounds} rounds, {counts.claims} claims, at most {counts.tries_max} tries, {counts.gave_up} gave up: "
        f"always one newest, nothing overwritten ({time.monotonic() - began:.0f} s)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
