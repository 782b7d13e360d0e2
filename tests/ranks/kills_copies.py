"""A campaign of kills and lost hosts with ``replicas=2``: seeded, at random moments and at named points.

    python -m ranks.kills_copies --kills 200 --seed 1        (from the folder tests/)

A *trial* trains one world through several lives. In each life but the last, one, some or all ranks are killed at a
random moment, and the others with them. After most kills the directory of one host is deleted. Judged are the state
with which each life begins (of one step, the same on all ranks, with the bits that an earlier life had at that step),
and how many steps were lost: without a lost host as few as without copies; with one, none below the newest step that
any rank knew to be in all copies. After the loss of a host another one is lost only when ``attach`` has returned since.

A folder and ``LIGHTCK_TEST_HOST`` stand for a host.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ranked

import lightck
from lightck.ranks import copy_receiver, copy_sender
from lightck.ranks.copy_file import CopyFile
from lightck.ranks.copy_sender import CopySender
from lightck.ranks.meet import Meeting
from lightck.session.group import HOST_VARIABLE
from lightck.session.peer_copies import PeerCopies

from .kills import SITES, Kill, around
from .kills_worlds import Known, arm, digest_of, is_for_the_death_of_another
from .worlds import WORLDS, build, update, whole_of

STEPS = 12
"""Updates of each life that is not killed."""
LIVES_MAX = 6
LOST_MAX = 2
PLACES: dict[str, tuple[tuple[int, ...], ...]] = {
    "fsdp 2": ((0, 1),),
    "fsdp 3": ((0, 1, 2), (0, 0, 1), (0, 1, 1)),
    "ddp 3": ((0, 0, 1), (0, 1, 1)),
    "fsdp 4": ((0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 1, 2)),
    "hsdp": ((0, 0, 1, 1), (0, 1, 2, 3)),
    "tp x fsdp": ((0, 0, 1, 1),),
}
"""World -> on which hosts its ranks may be."""
ROUNDS = ("reports", "readiness", "addresses", "first copies", "removal of other pools", "removal of old copies")
CALLS: dict[str, tuple[type, str]] = {
    "first copy": (PeerCopies, "begin"),
    "copy": (CopySender, "copy"),
    "drop": (CopySender, "drop"),
    "made": (CopyFile, "begin"),
    "chunk": (CopyFile, "write"),
    "commit of a copy": (CopyFile, "commit"),
    "erased": (CopyFile, "_erase"),
}
POINTS = tuple(f"{when} {what}" for what in (*ROUNDS, *CALLS, *CALLS) for when in ("before", "after"))


def drawn(rng: random.Random) -> Kill:
    kind = rng.choice(("time", "point", "point", "point", "site", "step"))
    if kind == "time":
        return Kill(kind, rng.uniform(0.0, 1.5))
    if kind == "point":
        return Kill(kind, rng.choice(POINTS), rng.choice((1, 1, 2, 3, 5)))
    if kind == "site":
        return Kill(kind, rng.choice(SITES), 1 + int(rng.expovariate(1 / 6)))
    return Kill(kind, nth=rng.randint(0, STEPS - 1))


def arm_for_copies(kill: Kill) -> None:
    """Called in the rank's process before attach."""
    when, _, what = str(kill.value).partition(" ")
    if kill.kind == "point" and what in ROUNDS:
        around(Meeting, "exchange", when, lambda _, name, value: name == what)
    elif kill.kind == "point" and what in CALLS:
        around(*CALLS[what], when, nth=kill.nth)
    else:
        arm(kill)


@dataclass
class Tally:
    """What a campaign has seen."""

    n_trials: int = 0
    n_killed: int = 0
    n_hosts_lost: int = 0
    lost: Counter[int] = field(default_factory=Counter)
    """Finished steps that were lost -> lives, after kills alone."""
    lost_with_host: Counter[int] = field(default_factory=Counter)
    points: Counter[str] = field(default_factory=Counter)


@dataclass
class Trial:
    """What is known of a trial so far."""

    known: Known = field(default_factory=dict)
    finished: int = 0
    """The last step that any rank had finished, in the last life that had any."""
    began: int = 0
    copied: int = 0
    """The newest step that any rank knew to be in all copies."""
    host_lost: int | None = None
    """The host that was lost since a life has begun."""


def body(name: str, hosts: tuple[int, ...], folder: Path, number: int, plan: dict[int, Kill], every: int) -> Any:
    """The body of a rank of one life. After attach and each update it writes the step, a digest of the whole state, and
    the newest step that it knows to be in all copies."""
    world = WORLDS[name]

    def run(rank: int) -> None:
        kill = plan.get(rank)
        if kill is not None:
            arm_for_copies(kill)
        copy_sender.CHUNK_NBYTES = copy_receiver.CHUNK_NBYTES = 8 << 10
        os.environ[HOST_VARIABLE] = f"host-{hosts[rank]}"
        model, optimizer = build(world)
        (folder / "pools").mkdir(exist_ok=True)
        directory = folder / "pools" / f"host-{hosts[rank]}"
        replicas = lightck.Replicas(2, every=every)
        session = lightck.attach(model, directory, optimizer=optimizer, resume=True, replicas=replicas, timeout=60)
        with open(folder / f"{number}-{rank}", "w", buffering=1) as out:

            def write() -> None:
                digest = digest_of(whole_of(session.step, model, optimizer))
                out.write(f"{session.step} {digest} {session.copied}\n")

            write()
            called = world.wrap(model)
            for n in range(STEPS):
                update(world, rank, called, optimizer, session.step)
                write()
                time.sleep(0.01)  # so that copies are made while training runs
                if kill is not None:
                    kill.after_update(n)
        session.close()

    return run


def trial(seed: int, tally: Tally) -> None:
    """One trial. Raises ``AssertionError`` with the seed if a promise is broken."""
    rng = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="lightck-kills-", dir="/dev/shm"))
    name = rng.choice(list(PLACES))
    hosts, every = rng.choice(PLACES[name]), rng.choice((2, 3, 4))
    n_ranks, found = len(hosts), Trial()
    try:
        n_lives = rng.randint(2, LIVES_MAX)
        for number in range(n_lives + 1):
            is_last = number in (0, n_lives)  # the first life makes something to lose
            victims = [] if is_last else rng.sample(range(n_ranks), rng.choice((1, rng.randint(1, n_ranks), n_ranks)))
            plan = {rank: drawn(rng) for rank in victims}
            where = f"seed {seed}, {name} on hosts {hosts}, every {every}, life {number}, {plan}"
            run = body(name, hosts, folder, number, plan, every)
            ended = ranked.run_ranks(n_ranks, run, ends_others_after=rng.choice((0.0, 0.02, 0.1)))
            if is_last:
                ranked.values(ended)
            for one in ended:
                assert one.error is None or is_for_the_death_of_another(one.error), f"{where}: {one.text}"
            tally.n_killed += sum(one.is_killed for one in ended)
            tally.points.update(str(kill.value) for kill in plan.values() if kill.kind == "point")
            judge(folder, number, found, tally, where)
            if rng.random() < 0.7:
                lost = rng.choice(hosts) if found.host_lost is None else found.host_lost
                shutil.rmtree(folder / "pools" / f"host-{lost}", ignore_errors=True)
                found.host_lost = lost
                tally.n_hosts_lost += 1
        tally.n_trials += 1
    finally:
        shutil.rmtree(folder)


def judge(folder: Path, number: int, found: Trial, tally: Tally, where: str) -> None:
    """Check how a life began, and add what is known after it."""
    lines = [path.read_text().split("\n")[:-1] for path in folder.glob(f"{number}-*")]
    states = [[tuple(line.split()) for line in of_rank] for of_rank in lines if of_rank]
    if not states:
        return  # no rank has returned from attach
    firsts = {(int(of_rank[0][0]), of_rank[0][1]) for of_rank in states}
    assert len(firsts) == 1, f"{where}: ranks began with different states: {firsts}"
    step, digest = firsts.pop()
    if found.known:
        assert digest in found.known.get(step, ()), f"{where}: began at step {step} with a state that no life had there"
        if found.host_lost is None:
            assert found.finished - step <= LOST_MAX, f"{where}: {found.finished - step} finished steps are lost"
            tally.lost[found.finished - step] += 1
        else:
            assert step >= found.copied, f"{where}: began at step {step}, and step {found.copied} was in all copies"
            tally.lost_with_host[found.finished - step] += 1
    for of_rank in states:
        for at, seen, _ in of_rank:
            found.known.setdefault(int(at), set()).add(seen)
    found.finished = max(int(of_rank[-1][0]) for of_rank in states)
    found.copied = max(int(copied) for of_rank in states for _, _, copied in of_rank)
    found.began, found.host_lost = step, None


def campaign(n_kills: int, seed: int, report: Callable[[Tally], Any] = lambda tally: None) -> Tally:
    """Run trials until ``n_kills`` ranks were killed. ``report``: called after each trial."""
    tally = Tally()
    while tally.n_killed < n_kills:
        trial(seed, tally)
        report(tally)
        seed += 1
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    def report(tally: Tally) -> None:
        if tally.n_trials % 10 == 0:
            print(f"{tally.n_trials} trials, {tally.n_killed} ranks killed, no promise broken so far")

    tally = campaign(args.kills, args.seed, report)
    print(
        f"{tally.n_trials} trials from seed {args.seed}: {tally.n_killed} ranks killed, {tally.n_hosts_lost} hosts "
        "lost, no promise broken"
    )
    for what, lost in (("killed", tally.lost), ("a host lost", tally.lost_with_host)):
        steps = ", ".join(f"{n} in {lives} lives" for n, lives in sorted(lost.items()))
        print(f"  finished steps that were lost, {what}: {steps}")
    print("  " + ", ".join(f"{what}: {n}" for what, n in sorted(tally.points.items())))


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    main()
