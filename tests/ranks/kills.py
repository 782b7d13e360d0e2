"""A campaign of kills of ranks: seeded, at random moments and at named points, in training, recovery and adoption.

    python -m ranks.kills --kills 1000 --seed 1        (from the folder tests/)

A *trial* trains one topology through several lives. In each life but the last, one, some or all ranks are killed, and a
launcher kills the others a moment later. Judged are the first step of each life (the same on all ranks, never older
than a checkpoint that was known to be common, at most ``lost_max`` steps behind what any rank had finished) and the end
state of the last life (that of a run that never imported lightck, to the bit).
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import ranked

import lightck
from lightck._native import lib
from lightck.pool.storage.file import FileContainer
from lightck.pool.writer import PoolWriter
from lightck.ranks.meet import Meeting
from lightck.restore.recover import LiveRestore
from lightck.tiers.pin import Holds

from .trainings import TOPOLOGIES, Run, Topology, body, ddp_first, is_equal, wrapper_of

UPDATES, LIVES_MAX = 24, 5
ROUNDS = ("host names", "reports", "votes", "pools", "readiness")
POINTS = (
    *(f"{when} {what}" for what in ROUNDS for when in ("before", "after")),
    *(f"{when} adopt" for when in ("before", "after")),
    *(f"{when} restore" for when in ("before", "after")),
)
"""Named points of attach."""
RELAYOUT_POINTS = tuple(f"{when} {what}" for what in ("carry", "rename") for when in ("before", "after"))
"""Named points of a relayout: before and after checkpoints are carried over, and the new file gets the pool's name."""
GROWING = {
    "ddp grows": replace(
        TOPOLOGIES["ddp"],
        grows_at={0: {3: 700_000, 9: 3_000_000}, 1: {3: 700_000, 12: 3_000_000}},
    ),
    "hsdp grows": replace(
        TOPOLOGIES["hsdp"],
        grows_at={0: {3: 700_000, 9: 3_000_000}, 1: {}, 2: {12: 3_000_000}, 3: {3: 700_000}},
    ),
}
"""Trainings in which pools get new files, on both ranks in one step and in different ones."""
GRADIENTS = {
    f"{name} gradients": replace(topology, options={"strategy": lightck.Gradients(base_every=n)})
    for (name, topology), n in zip((TOPOLOGIES | GROWING).items(), cycle((2, 3, 5)), strict=False)
    if "split" not in name
}
"""The same trainings, whose ranks store gradients."""


def _with_interval(name: str, base_every: int, interval: int) -> Topology:
    topology = (TOPOLOGIES | GROWING)[name]
    options = {"strategy": lightck.Gradients(base_every), "interval": interval}
    return replace(topology, options=options, lost_max=topology.lost_max * interval)


INTERVALS = {
    f"{name} interval {i}": _with_interval(name, n, i)
    for name, n, i in (
        ("ddp", 4, 2),
        ("ddp", 6, 3),
        ("fsdp", 5, 2),
        ("fsdp 3", 7, 3),
        ("tp", 4, 2),
        ("hsdp", 6, 3),
        ("ddp, 2 hosts", 5, 2),
        ("ddp grows", 4, 2),
    )
}
"""Each second or third update is committed, and each leaves a record."""
RESIDUAL_OF_STEPS = lightck.TopK(0.1, error_feedback=True, residual="step")
COMPRESSED = {
    f"{name} {words}": replace(
        (TOPOLOGIES | GROWING)[name],
        shard=ddp_first,
        wrap=wrapper_of,
        lost_max=i,
        options={"strategy": lightck.Gradients(base_every=n, compress=topk), "interval": i},
    )
    for name, words, topk, n, i in (
        ("ddp", "topk", lightck.TopK(0.1), 3, 1),
        ("ddp 4", "topk", lightck.TopK(0.02), 2, 1),
        ("ddp", "feedback of steps", RESIDUAL_OF_STEPS, 3, 1),
        ("ddp, 2 hosts", "feedback of steps", RESIDUAL_OF_STEPS, 4, 2),
        ("ddp", "feedback of bases", lightck.TopK(0.1, error_feedback=True), 4, 1),
        ("ddp 4", "feedback of bases", lightck.TopK(0.02, error_feedback=True), 6, 3),
        ("ddp grows", "feedback of steps", RESIDUAL_OF_STEPS, 2, 1),
    )
}
"""Trainings with the communication hook of ``TopK``. They end as the same ranks do that nobody kills; with residuals of
bases, which are older after a resume: all in the same state."""
ALL = TOPOLOGIES | GROWING | GRADIENTS | INTERVALS | COMPRESSED
SITES = ("header", "block", "manifest", "sealed", "body", "word", "ack")
"""Points of the native core in the life of a checkpoint, checkpoint 0 included."""


@dataclass(frozen=True)
class Kill:
    """How one rank is to die. ``kind``: "time" (``value`` seconds after the process began), "point" (``value`` of
    ``POINTS`` or ``RELAYOUT_POINTS``), "site" (``value`` of ``SITES``), or "step" (in the update after ``nth``).
    ``nth``: at which passing of a point of a relayout, or of a site."""

    kind: str
    value: Any = None
    nth: int = 1

    @classmethod
    def drawn(cls, rng: random.Random, *, grows: bool = False) -> Kill:
        """``grows``: whether pools get new files in this training."""
        if grows and rng.random() < 0.5:
            return cls("point", rng.choice(RELAYOUT_POINTS), rng.choice((1, 1, 2)))
        kind = rng.choice(("time", "point", "site", "site", "step"))
        if kind == "time":
            return cls(kind, rng.uniform(0.0, 0.6))
        if kind == "point":
            return cls(kind, rng.choice(POINTS))
        return cls(kind, rng.choice(SITES), 1 + int(rng.expovariate(1 / 6)))

    def arm(self) -> None:
        """Called in the rank's process before attach."""
        if self.kind == "time":
            threading.Thread(target=lambda: (time.sleep(self.value), ranked.die()), daemon=True).start()
        elif self.kind == "site":
            assert lib.lck_kill(self.value.encode(), self.nth) == lib.LCK_OK
        elif self.kind == "point":
            _arm_point(self.value, self.nth)

    def after_update(self, n_updates: int) -> None:
        if self.kind == "step" and n_updates >= self.nth:
            ranked.die()


def _arm_point(point: str, nth: int) -> None:
    when, what = point.split(" ", 1)
    if what in ROUNDS:
        around(Meeting, "exchange", when, lambda _, name, value: name == what)
    elif what == "adopt":
        around(PoolWriter, "adopt", when)
    elif what == "carry":
        around(Holds, "carry", when, nth=nth)
    elif what == "rename":  # of a new file: there was one of before
        around(FileContainer, "publish", when, lambda container: os.path.exists(container.path), nth)
    else:
        around(LiveRestore, "take", when)


def around(owner: type, name: str, when: str, applies: Callable[..., bool] = lambda *_: True, nth: int = 1) -> None:
    original = getattr(owner, name)
    n_calls = 0

    def patched(*args: Any, **kwargs: Any) -> Any:
        nonlocal n_calls
        n_calls += applies(*args)
        dies = applies(*args) and n_calls == nth
        if when == "before" and dies:
            ranked.die()
        result = original(*args, **kwargs)
        if when == "after" and dies:
            ranked.die()
        return result

    setattr(owner, name, patched)


class Progress:
    """What the ranks of one life have reached, in a file that outlives them: first step and last finished step."""

    def __init__(self, path: Path, n_ranks: int) -> None:
        self._fd, self._n_ranks = os.open(path, os.O_RDWR | os.O_CREAT), n_ranks
        os.ftruncate(self._fd, 16 * n_ranks)
        self.clear()

    def clear(self) -> None:
        for rank in range(self._n_ranks):
            os.pwrite(self._fd, struct.pack("qq", -1, -1), 16 * rank)

    def reached(self, rank: int, step: int) -> None:
        began, _ = self.of(rank)
        os.pwrite(self._fd, struct.pack("qq", step if began < 0 else began, step), 16 * rank)

    def of(self, rank: int) -> tuple[int, int]:
        return struct.unpack("qq", os.pread(self._fd, 16, 16 * rank))

    def all(self) -> list[tuple[int, int]]:
        return [self.of(rank) for rank in range(self._n_ranks)]

    def close(self) -> None:
        os.close(self._fd)


@dataclass
class Tally:
    """What a campaign has seen."""

    n_trials: int = 0
    n_killed: int = 0
    """Ranks that died as planned, or because the launcher ended them."""
    kinds: Counter[str] = field(default_factory=Counter)
    """Topology -> lives with a kill; and each named point and site that was planned."""
    lost: Counter[tuple[str, int]] = field(default_factory=Counter)
    """(topology, number of finished steps that were lost) -> lives."""


@cache
def reference(name: str) -> list[Run]:
    if name not in COMPRESSED:
        return ranked.values(ranked.run_ranks(ALL[name].n_ranks, body(ALL[name], None, UPDATES)))
    with tempfile.TemporaryDirectory(prefix="lightck-kills-", dir="/dev/shm") as folder:
        return ranked.values(ranked.run_ranks(ALL[name].n_ranks, body(ALL[name], Path(folder) / "pools", UPDATES)))


def is_right_end(name: str, runs: list[Run]) -> bool:
    """Whether ranks ended as they do if nobody kills them."""
    if "feedback of bases" not in name:
        return is_equal(runs, reference(name))
    return all(is_equal(runs[:1], [other]) for other in runs[1:])


def trial(seed: int, tally: Tally, names: tuple[str, ...] = tuple(ALL)) -> None:
    """One trial. Raises ``AssertionError`` with the seed if a promise is broken."""
    rng = random.Random(seed)
    name = rng.choice(names)
    topology = ALL[name]
    folder = Path(tempfile.mkdtemp(prefix="lightck-kills-", dir="/dev/shm"))
    progress = Progress(folder / "progress", topology.n_ranks)
    ends_step = rng.random() < 0.5
    finished = began = 0
    try:
        for life in range(rng.randint(2, LIVES_MAX)):
            progress.clear()
            plan = _plan(rng, topology)
            ended = _live(name, folder / "pools", plan, progress, rng.choice((0.0, 0.02, 0.1)), ends_step)
            tally.n_killed += sum(one.is_killed for one in ended)
            tally.kinds.update([name, *(str(kill.value) for kill in plan.values() if kill.kind in ("point", "site"))])
            where = f"seed {seed}, {name}, life {life}, {plan}: {progress.all()}"
            began, finished = _judge(progress, finished, began, topology.lost_max, where, name, tally)
        progress.clear()
        runs = ranked.values(_live(name, folder / "pools", {}, progress, 0.0, ends_step))
        where = f"seed {seed}, {name}, last life: {progress.all()}"
        _judge(progress, finished, began, topology.lost_max, where, name, tally)
        assert is_right_end(name, runs), f"{where}: another end state"
        tally.n_trials += 1
    finally:
        progress.close()
        shutil.rmtree(folder)


def _plan(rng: random.Random, topology: Topology) -> dict[int, Kill]:
    """Which ranks die, and how: one, some or all."""
    n_ranks, grows = topology.n_ranks, bool(topology.grows_at)
    victims = rng.sample(range(n_ranks), rng.choice((1, 1, rng.randint(1, n_ranks), n_ranks)))
    return {rank: Kill.drawn(rng, grows=grows) for rank in victims}


def _live(
    name: str, pools: Path, plan: dict[int, Kill], progress: Progress, delay: float, ends_step: bool
) -> list[ranked.Ended]:
    n_updates: Counter[int] = Counter()

    def arm(rank: int) -> None:
        if rank in plan:
            plan[rank].arm()

    def on_step(rank: int, step: int) -> None:
        progress.reached(rank, step)
        n_updates[rank] += 1
        if rank in plan:
            plan[rank].after_update(n_updates[rank] - 1)

    life = body(ALL[name], pools, UPDATES, before=arm, on_step=on_step, ends_step=ends_step)
    return ranked.run_ranks(ALL[name].n_ranks, life, ends_others_after=delay)


def _judge(
    progress: Progress, finished: int, began: int, lost_max: int, where: str, name: str, tally: Tally
) -> tuple[int, int]:
    """Check where this life began, and return where it began and the last step that any rank has finished in it."""
    firsts = {first for first, _ in progress.all() if first >= 0}
    if not firsts:
        return began, finished  # no rank has returned from attach
    assert len(firsts) == 1, f"{where}: ranks began at different steps"
    first = firsts.pop()
    lost = finished - first
    tally.lost[name, lost] += 1
    assert first >= began, f"{where}: older than the checkpoint of an earlier recovery, step {began}"
    assert lost <= lost_max, f"{where}: {lost} finished steps are lost"
    return first, max(last for _, last in progress.all())


def campaign(
    n_kills: int,
    seed: int,
    names: tuple[str, ...] = tuple(ALL),
    report: Callable[[Tally], object] = lambda tally: None,
) -> Tally:
    """Run trials until ``n_kills`` ranks were killed. ``report``: called after each trial."""
    tally = Tally()
    while tally.n_killed < n_kills:
        trial(seed, tally, names)
        report(tally)
        seed += 1
    return tally


def _show_progress(tally: Tally) -> None:
    """Print a line after every tenth trial, so that a campaign which is cut off says how far it came."""
    if tally.n_trials % 10 == 0:
        print(f"{tally.n_trials} trials, {tally.n_killed} ranks killed, no promise broken so far")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=list(ALL), choices=list(ALL))
    args = parser.parse_args()
    tally = campaign(args.kills, args.seed, tuple(args.only), _show_progress)
    print(f"{tally.n_trials} trials from seed {args.seed}: {tally.n_killed} ranks killed, no promise broken")
    for (name, lost), n in sorted(tally.lost.items()):
        print(f"  {name}: {lost} finished steps lost in {n} lives")
    print("  " + ", ".join(f"{what}: {n}" for what, n in sorted(tally.kinds.items())))


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    main()
