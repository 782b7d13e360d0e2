"""A campaign of kills while a training changes its world: seeded, at random moments and at named points.

    python -m ranks.kills_worlds --kills 300 --seed 1 [--hosts]        (from the folder tests/)

A *trial* trains through several lives, each in a world that is drawn. In each life but the last, one, some or all ranks
are killed. Judged are the state with which each life begins (of one step, with the bits that an earlier life had at
that step, the same on all ranks; so it is never a mix of two checkpoints or of two worlds), how many finished steps
were lost, and that the last life leaves the pools of its own world alone in the directory.

With ``--hosts`` the ranks of each life are on two hosts, dealt anew, each with a directory of its own. A folder and
``LIGHTCK_TEST_HOST`` stand for a host.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import ranked

import lightck
from lightck.errors import RankError
from lightck.pool.storage.file import FileBackend, FileContainer
from lightck.pool.writer import PoolWriter
from lightck.ranks.meet import Meeting
from lightck.restore.recover import LiveRestore
from lightck.session import partial_copies
from lightck.session.group import HOST_VARIABLE
from lightck.session.other_world import OtherWorlds
from lightck.session.partial_copies import PartialCopies, _CopyFile

from .kills import SITES, Kill, around
from .worlds import WORLDS, Whole, World, build, update, whole_of

STEPS = 4
"""Updates of each life that is not killed."""
LIVES_MAX = 6
LOST_MAX = 2
ALL = {"one process": World(1), **WORLDS}
SEVERAL = [name for name, world in ALL.items() if world.n_ranks > 1]
ROUNDS = ("kinds of pools", "worlds", "choices of a world", "reports", "votes", "copies", "pools", "readiness")
STAGES = ("restore", "adopt", "publish", "remove", "discard")
POINTS = tuple(f"{when} {what}" for what in (*ROUNDS, *STAGES) for when in ("before", "after"))
"""Named points of an attach in another world."""
ROUNDS_OF_HOSTS = (
    "pools of a host",
    "copies of pools",
    "blocks that are needed",
    "copies of blocks",
    "what a copy lacks",
)
POINTS_OF_HOSTS = tuple(
    f"{when} {what}"
    for what in (*ROUNDS_OF_HOSTS, "chunk", "end of a copy", "copy of blocks")
    for when in ("before", "after")
)
"""Named points while pools are copied between hosts."""


def drawn(rng: random.Random, has_hosts: bool = False) -> Kill:
    kind = rng.choice(("time", "point", "point", "point", "site", "step"))
    if kind == "point" and has_hosts and rng.random() < 0.6:
        return Kill(kind, rng.choice(POINTS_OF_HOSTS), rng.choice((1, 1, 2, 5)))
    if kind == "time":
        return Kill(kind, rng.uniform(0.0, 0.8))
    if kind == "point":
        return Kill(kind, rng.choice(POINTS), rng.choice((1, 1, 2)))
    if kind == "site":
        return Kill(kind, rng.choice(SITES), 1 + int(rng.expovariate(1 / 3)))
    return Kill(kind, nth=rng.randint(0, STEPS - 1))


def arm(kill: Kill) -> None:
    """Called in the rank's process before attach."""
    if kill.kind != "point":
        kill.arm()
        return
    when, what = kill.value.split(" ", 1)
    if what in (*ROUNDS, *ROUNDS_OF_HOSTS):
        around(Meeting, "exchange", when, lambda _, name, value: name == what)
        return
    owner, name = {
        "restore": (LiveRestore, "take"),
        "adopt": (PoolWriter, "adopt"),
        "publish": (FileContainer, "publish"),
        "remove": (OtherWorlds, "remove"),
        "discard": (FileBackend, "discard"),
        "chunk": (_CopyFile, "write"),
        "end of a copy": (_CopyFile, "__exit__"),
        "copy of blocks": (PartialCopies, "_copy_blocks"),
    }[what]
    around(owner, name, when, nth=kill.nth if what in ("discard", "chunk", "end of a copy", "copy of blocks") else 1)


def digest_of(whole: Whole) -> str:
    digest = blake2b(digest_size=16)
    for part in (whole.model, whole.state):
        for name in sorted(part):
            digest.update(name.encode() + part[name].contiguous().view(-1).numpy().tobytes())
    return digest.hexdigest()


@dataclass
class Tally:
    """What a campaign has seen."""

    n_trials: int = 0
    n_killed: int = 0
    changes: Counter[str] = field(default_factory=Counter)
    """"Old to new": lives that began in another world."""
    lost: Counter[int] = field(default_factory=Counter)
    points: Counter[str] = field(default_factory=Counter)


def body(
    name: str, folder: Path, number: int, plan: dict[int, Kill], hosts: Sequence[int] = ()
) -> Callable[[int], tuple[int, str]]:
    """The body of a rank of one life. It writes step and digest of the whole state after attach and each update.
    ``hosts``: rank -> its host; empty: all are on one."""
    world = ALL[name]

    def run(rank: int) -> tuple[int, str]:
        kill = plan.get(rank)
        if kill is not None:
            arm(kill)
        model, optimizer = build(world)
        pools = folder / "pools"
        if hosts:
            partial_copies.CHUNK_NBYTES = 1 << 16
            os.environ[HOST_VARIABLE] = f"host-{hosts[rank]}"
            pools.mkdir(exist_ok=True)
            pools /= f"host-{hosts[rank]}"
        session = lightck.attach(model, pools, optimizer=optimizer, resume=True, timeout=60)
        began = session.step
        first = digest_of(whole_of(began, model, optimizer))
        with open(folder / f"{number}-{rank}", "w", buffering=1) as out:
            out.write(f"{began} {first}\n")
            called = world.wrap(model)
            for n in range(STEPS):
                update(world, rank, called, optimizer, session.step)
                out.write(f"{session.step} {digest_of(whole_of(session.step, model, optimizer))}\n")
                if kill is not None:
                    kill.after_update(n)
        session.close()
        return began, first

    return run


def dealt(rng: random.Random, n_ranks: int) -> list[int]:
    """Put ranks on two hosts, at least one on each."""
    return rng.choice([hosts for hosts in itertools.product((0, 1), repeat=n_ranks) if len(set(hosts)) == 2])


def trial(seed: int, tally: Tally, has_hosts: bool = False) -> None:
    """One trial. Raises ``AssertionError`` with the seed if a promise is broken."""
    rng = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="lightck-kills-", dir="/dev/shm"))
    before, known, finished, began = "", {}, 0, 0
    try:
        ranked.values(live("ddp 2", folder, 0, {}, 0.0, (0, 1) if has_hosts else ()))
        known, finished, began = judge(folder, 0, {}, 0, 0, tally, f"seed {seed}, first life")
        before = "ddp 2"
        n_lives = rng.randint(2, LIVES_MAX)
        for number in range(1, n_lives + 1):
            is_last = number == n_lives
            name = rng.choice(SEVERAL if has_hosts else list(ALL))
            n_ranks = ALL[name].n_ranks
            hosts = dealt(rng, n_ranks) if has_hosts else ()
            victims = [] if is_last else rng.sample(range(n_ranks), rng.choice((1, rng.randint(1, n_ranks), n_ranks)))
            plan = {rank: drawn(rng, has_hosts) for rank in victims}
            where = f"seed {seed}, life {number}, {before} to {name}, {plan}" + f", hosts {hosts}" * has_hosts
            ended = live(name, folder, number, plan, rng.choice((0.0, 0.02, 0.1)), hosts)
            if is_last:
                ranked.values(ended)
            for one in ended:
                assert one.error is None or is_for_the_death_of_another(one.error), f"{where}: {one.text}"
            tally.n_killed += sum(one.is_killed for one in ended)
            tally.points.update(str(kill.value) for kill in plan.values() if kill.kind == "point")
            tally.changes[f"{before} to {name}"] += 1
            known, finished, began = judge(folder, number, known, finished, began, tally, where)
            before = name
        left = [path.name for path in (folder / "pools").rglob("*.pool")]
        assert len(left) == ALL[before].n_ranks, f"seed {seed}: {left} are left by {before}"
        tally.n_trials += 1
    finally:
        shutil.rmtree(folder)


def is_for_the_death_of_another(err: BaseException) -> bool:
    """Whether a rank may raise this because another one was killed: an error of gloo, or of ours that names it."""
    return isinstance(err, RankError) or "gloo" in str(err) or "Connection" in str(err)


def live(
    name: str, folder: Path, number: int, plan: dict[int, Kill], delay: float, hosts: Sequence[int]
) -> list[ranked.Ended]:
    n_ranks = ALL[name].n_ranks
    run = body(name, folder, number, plan, hosts)
    return ranked.run_ranks(n_ranks, run, ends_others_after=delay, has_group=n_ranks > 1)


Known = dict[int, set[str]]
"""Step -> digests of the whole state after it, in all lives so far."""


def judge(
    folder: Path, number: int, known: Known, finished: int, began: int, tally: Tally, where: str
) -> tuple[Known, int, int]:
    """Check how a life began, and return what is known after it."""
    lines = [path.read_text().split("\n")[:-1] for path in folder.glob(f"{number}-*")]
    states = [[(int(step), digest) for step, digest in map(str.split, of_rank)] for of_rank in lines]
    firsts = {of_rank[0] for of_rank in states if of_rank}
    if not firsts:
        return known, finished, began  # no rank has returned from attach
    assert len(firsts) == 1, f"{where}: ranks began with different states: {firsts}"
    step, digest = firsts.pop()
    if known:
        assert digest in known.get(step, ()), f"{where}: began at step {step} with a state that no life had there"
        assert step >= began, f"{where}: began at step {step}, before step {began} of an earlier life"
        assert finished - step <= LOST_MAX, f"{where}: {finished - step} finished steps are lost"
        tally.lost[finished - step] += 1
    for of_rank in states:
        for at, seen in of_rank:
            known.setdefault(at, set()).add(seen)
    return known, max(at for of_rank in states for at, _ in of_rank), step


def campaign(
    n_kills: int, seed: int, report: Callable[[Tally], Any] = lambda tally: None, *, has_hosts: bool = False
) -> Tally:
    """Run trials until ``n_kills`` ranks were killed. ``report``: called after each trial."""
    tally = Tally()
    while tally.n_killed < n_kills:
        trial(seed, tally, has_hosts)
        report(tally)
        seed += 1
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", action="store_true")
    args = parser.parse_args()

    def report(tally: Tally) -> None:
        if tally.n_trials % 10 == 0:
            print(f"{tally.n_trials} trials, {tally.n_killed} ranks killed, no promise broken so far")

    tally = campaign(args.kills, args.seed, report, has_hosts=args.hosts)
    print(f"{tally.n_trials} trials from seed {args.seed}: {tally.n_killed} ranks killed, no promise broken")
    lost = ", ".join(f"{steps} in {n} lives" for steps, n in sorted(tally.lost.items()))
    print(f"  {len(tally.changes)} pairs of worlds; finished steps that were lost: {lost}")
    print("  " + ", ".join(f"{what}: {n}" for what, n in sorted(tally.points.items())))


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    main()
