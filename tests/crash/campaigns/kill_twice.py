"""``kill-twice``: pairs of faults, one of them a SIGKILL: in the recovery after a kill, in the adoption, in a move to
another file, while the pool is made; and a kill together with a flipped bit or with a full medium.
"""

from __future__ import annotations

import os
import random
import resource
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import lightck
from crash import known, lives, victims
from crash.campaign import Campaign, Order, Tally
from crash.ledger import BrokenError
from crash.lives import Life
from crash.rooms import small_room
from crash.victims import CHECKPOINT_SITES, Kill, Tell
from lightck.errors import CorruptPoolError, NoSpaceError
from lightck.pool.storage import temporary

PAIRS = 4
"""In the life of one pool."""
_RING_LINES = 16

Scenario: TypeAlias = Callable[[Life, random.Random, "Counter[str]"], None]


def run(order: Order) -> Tally:
    return play(order, SCENARIOS, known.draw)


def play(order: Order, scenarios: dict[str, Scenario], drawn: Callable[[random.Random], known.Plan]) -> Tally:
    """Run the trials of an order, each with the next of these scenarios. ``drawn``: the training of a trial."""
    tally = Tally()
    victims.be_ready(order.backend)
    for trial in order.trials:
        name, rng = list(scenarios)[trial % len(scenarios)], order.rng(trial)
        life = Life(drawn(rng), os.path.join(order.folder, f"{trial}.pool"), order.backend)
        try:
            with life.reported():
                scenarios[name](life, rng, tally.counts)
        except BrokenError as err:
            tally.found(trial, f"{name}: {err}")
        life.remove()
        if trial % 10 == 9:
            order.say(f"{trial + 1} pools, {len(tally.findings)} findings")
    return tally


def in_a_step(rng: random.Random) -> Kill:
    if rng.random() < 0.5:
        return Kill(site=rng.choice(CHECKPOINT_SITES), nth=rng.randint(3, 8))
    return Kill("begins", rng.randint(2, 8), delay=rng.uniform(0.0, 0.004))


# -- a kill, and another one -----------------------------------------------------------------------------------------


def in_recovery(life: Life, rng: random.Random, counts: Counter[str]) -> None:
    """A recovery into live objects is killed: the next one finds what this one would have."""
    for number in range(PAIRS):
        life.train(in_a_step(rng), 2)
        delay = rng.uniform(0.0, 0.006) if number else 0.0
        reported = life.process(partial(_recover, life), Kill("recovers", delay=delay))
        counts["kills in a recovery after a kill"] += reported.was_killed


def _recover(life: Life, tell: Tell) -> None:
    model, optimizer = known.build(life.plan)
    tell("recovers", 0)
    step = lightck.recover(life.path, model, optimizer).step if life.ledger.least else 0
    wrong = known.difference(life.plan, step, model.state_dict(), optimizer.state_dict())
    assert wrong is None, f"restored: {wrong}"
    tell("recovered", step)


def in_adoption(life: Life, rng: random.Random, counts: Counter[str]) -> None:
    """More restarts die in their adoption than the commit log has records; no checkpoint is lost."""
    life.train(in_a_step(rng), 2)
    for _ in range(_RING_LINES + 4):
        if rng.random() < 0.5:
            kill = Kill(site=rng.choice(("body", "word", "ack")), nth=1)
        else:
            kill = Kill("attaches", delay=rng.uniform(0.0, 0.014))
        counts["kills in an adoption after a kill"] += life.train(kill, 2).was_killed
    life.train(None, 2, steps=3)


def in_a_move(life: Life, rng: random.Random, counts: Counter[str]) -> None:
    """Each process asks for another number of slots, and dies about when the pool moves to a new file."""
    life.plan = life.ledger.plan = replace(life.plan, pins_every=0)
    life.train(None, 2, steps=3)
    for number in range(PAIRS):
        if number == 0 or rng.random() < 0.5:
            kill = Kill(site=rng.choice(CHECKPOINT_SITES), nth=rng.randint(1, 2))
        else:
            kill = Kill("finished", 1, delay=rng.uniform(0.0, 0.02))
        counts["kills about a move to a new file"] += life.train(kill, 3 - number % 2).was_killed
    life.train(None, 2, steps=3)


def in_creation(life: Life, rng: random.Random, counts: Counter[str]) -> None:
    """The pool is made again and again, until one lives."""
    for number in range(PAIRS):
        delay = rng.uniform(0.0, 0.025) if number else 0.0  # the first is sure to come in time
        reported = life.train(Kill("attaches", delay=delay), 2 + number % 2)
        counts["kills while the pool was made"] += reported.was_killed and not reported.of("attached")
    life.train(None, 2, steps=3)


# -- a kill, and something else ----------------------------------------------------------------------------------------


def and_a_flip(life: Life, rng: random.Random, counts: Counter[str]) -> None:
    """A bit of the newest checkpoint flips after the kill, and the restart is killed in its adoption: recovery gives
    this checkpoint or the older intact one; a typed error where there is none."""
    for _ in range(PAIRS):
        life.train(in_a_step(rng), rng.choice((2, 3)))
        if not life.ledger.least:
            continue
        steps = lives.intact(life.path)
        what = rng.choice(("payload", "payload", "manifest", "slot header", "commit record", "superblock"))
        lives.flip(life.path, *lives.places_in_newest(life.path)[what], rng)
        counts["flips after a kill"] += 1
        life.ledger.least = steps[0] if what == "superblock" else (*steps, 0)[1]
        life.ledger.held.clear()
        life.ledger.is_lost = not life.ledger.least
        found = life.judge(closely=True)
        counts["flips: the version itself" if found == steps[0] else "flips: the older one"] += bool(found)
        if not found:
            counts["flips: a typed error, there was no older one"] += 1
            reported = life.train(None, 2, steps=1, refusal=CorruptPoolError)
            if not reported.of("refused"):
                raise BrokenError("a pool without an intact checkpoint was attached")
            return
        life.ledger.is_lost = False
        counts["kills in an adoption after a kill and a flip"] += life.train(
            Kill(site=rng.choice(("body", "word", "ack")), nth=1), 2
        ).was_killed


def and_no_space(life: Life, rng: random.Random, counts: Counter[str]) -> None:
    """A new file that the pool has to move to does not fit (a limit on file sizes); now and then a kill comes first."""
    for _ in range(PAIRS):
        life.train(in_a_step(rng), 2)
        if life.file is None:
            continue
        size = os.stat(life.path).st_size
        kill = Kill("finished", 1, delay=rng.uniform(0.0, 0.004)) if rng.random() < 0.5 else None
        reported = life.train(kill, 5, 5, partial(limit_file_size, size), NoSpaceError)
        fits = os.stat(life.path).st_size <= size
        _count_refusal(counts, "the file could not grow", bool(reported.of("refused")), reported.was_killed, fits)


_ROOM_LEFT = 3 << 20


def limit_file_size(nbytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


def on_a_full_tmpfs(life: Life, rng: random.Random, counts: Counter[str]) -> None:
    """The same on a tmpfs that is full, in a mount namespace of its own."""
    seed = rng.randrange(1 << 30)
    reported = victims.story(partial(_small_tmpfs, life, seed))
    if reported.status:
        raise BrokenError(f"an error in the small tmpfs: {reported.of('broken') or reported.of('error')}")
    for found in reported.of("counts"):
        counts.update(found)


def _small_tmpfs(life: Life, seed: int, tell: Tell) -> None:
    rng, counts = random.Random(seed), Counter[str]()
    folder = os.path.dirname(life.path)
    with small_room(folder) as resize:
        if resize is None:
            tell("counts", {"full tmpfs: the kernel permits no mount here": 1})
            return
        try:
            for _ in range(PAIRS):
                resize(None)
                life.train(in_a_step(rng), 2)
                if life.file is None:
                    continue
                with suppress(FileNotFoundError):
                    os.unlink(temporary.path_of(life.path))  # what a kill left there, as the next attach does
                resize(os.stat(life.path).st_size + _ROOM_LEFT)
                kill = Kill("finished", 1, delay=rng.uniform(0.0, 0.004)) if rng.random() < 0.5 else None
                reported = life.train(kill, 5, 5, refusal=NoSpaceError)
                fits = os.stat(life.path).st_size <= _ROOM_LEFT
                _count_refusal(counts, "the tmpfs was full", bool(reported.of("refused")), reported.was_killed, fits)
        except BrokenError as err:
            tell("broken", f"{err}; {life.history[-3:]}")
            raise
    tell("counts", dict(counts))


def _count_refusal(counts: Counter[str], why: str, is_refused: bool, was_killed: bool, fits: bool) -> None:
    """``fits``: what grew with the training had become so small meanwhile that a file with more slots has room."""
    counts[f"{why}: refused, the version before is exact"] += is_refused
    counts[f"{why}: killed first"] += was_killed
    counts[f"{why}: the new one was small enough"] += fits and not is_refused and not was_killed
    if not is_refused and not was_killed and not fits:
        raise BrokenError(f"{why}, and nothing was refused")


SCENARIOS: dict[str, Scenario] = {
    "recovery": in_recovery,
    "adoption": in_adoption,
    "move": in_a_move,
    "creation": in_creation,
    "flip": and_a_flip,
    "no space": and_no_space,
    "full tmpfs": on_a_full_tmpfs,
}

CAMPAIGN = Campaign(
    "kill-twice",
    "a kill and another fault: in recovery, adoption, a move, creation; with a flipped bit; on a full medium",
    small=7,
    long=140,
    run=run,
)
