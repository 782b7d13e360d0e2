"""``gradient-kill-twice``: the pairs of faults of ``kill-twice``, in trainings that are saved by ``Gradients``.

A recovery makes updates again, and a move to a new file needs a training that grows: a pool with gradient records has
no ``slots=`` that could change.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from crash import known, lives, victims
from crash.campaign import Campaign, Order, Tally
from crash.campaigns.kill_twice import (
    PAIRS,
    Scenario,
    in_a_step,
    in_adoption,
    in_creation,
    in_recovery,
    limit_file_size,
    play,
)
from crash.ledger import BrokenError
from crash.lives import Life
from crash.rooms import small_room
from crash.victims import CHECKPOINT_SITES, Kill, Story, Tell
from lightck.errors import CorruptPoolError, NoSpaceError
from lightck.pool.format import anatomy
from lightck.pool.listener import CommitEvents
from lightck.pool.reader import open_pool
from lightck.pool.storage import temporary
from lightck.pool.storage.file import FileContainer

_GROWTH = 100_000
"""Elements by which a buffer grows at each step: a pool has room for a few of such steps."""
_MOMENTS = (
    (FileContainer, "publish", "before"),
    (FileContainer, "publish", "after"),
    (CommitEvents, "carry", "before"),
)
"""Moments of a move: before the new file is written, before it gets the pool's name, and right after that."""


def run(order: Order) -> Tally:
    return play(order, SCENARIOS, known.draw_gradients)


def _that_grows(life: Life) -> None:
    life.plan = life.ledger.plan = replace(life.plan, grows_every=1, grows_by=_GROWTH)


# -- a kill in a move, and after a kill --------------------------------------------------------------------------------


def in_a_move(life: Life, rng: random.Random, counts: Counter[str]) -> None:
    """Processes die in the moves to a larger file, one after the other, and in the steps about them."""
    _that_grows(life)
    for number in range(PAIRS + 2):
        file = life.file
        if number % 3 == 2:
            site = rng.choice(CHECKPOINT_SITES)
            reported = life.train(Kill(site=site, nth=rng.randint(1, 40 if site == "block" else 8)), 2)
        else:
            moment = rng.choice(_MOMENTS)
            reported = life.train(None, 2, steps=12, before=partial(_die_in_a_move, *moment))
            counts[f"kills in a move, {moment[2]} {moment[1]}"] += reported.was_killed
        counts["kills about a move to a new file"] += reported.was_killed
        counts["moves to a new file"] += file not in (None, life.file)
    life.train(None, 2, steps=3)


def _die_in_a_move(owner: type, name: str, when: str) -> None:
    """Arm this process: it dies by SIGKILL there, in its first move to another file."""
    original = getattr(owner, name)

    def dying(self: Any, *arguments: Any) -> None:
        is_move = os.path.exists(self.path if owner is FileContainer else arguments[0].reader.path)
        if when == "before" and is_move:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, *arguments)
        if is_move:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, dying)


# -- a kill, and a flipped bit -----------------------------------------------------------------------------------------


def and_a_flip(life: Life, rng: random.Random, counts: Counter[str]) -> None:
    """One bit of a pool flips, and the restart is killed in its adoption. In a pool that was closed, one damaged place
    costs as many updates as docs/gradients.md says. After a kill, or after a second flip: exact bytes, or a typed
    error."""
    strategy = life.plan.strategy
    assert strategy is not None
    lost_max = int(strategy.base_every) + life.plan.interval - 2
    for number in range(PAIRS):
        is_closed = rng.random() < 0.5
        steps = life.plan.interval * rng.randint(3, 9) if is_closed else 40
        life.train(None if is_closed else in_a_step(rng), 2, steps)
        newest = life.ledger.least
        if not newest:
            continue
        _flip(life.path, rng)
        counts["flips after a kill"] += not is_closed
        is_promised = number == 0 and is_closed and strategy.log_records is None
        life.ledger.least = newest - lost_max if is_promised else 0
        life.ledger.is_lost = not is_promised
        found = life.judge(closely=True)
        counts["flips of a closed pool that lost no more than is promised"] += is_promised
        counts["flips: the version itself" if found == newest else "flips: an older one"] += bool(found)
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


def _flip(path: str, rng: random.Random) -> None:
    """Flip a bit of a place that a reader of the newest checkpoint can use: each kind of place is as likely."""
    with closing(open_pool(path, gradients=True)) as reader:
        kinds: dict[str, list[anatomy.Part]] = {}
        for part in anatomy.parts_of(reader):
            name = next((word for word in ("older base", "base") if part.words.startswith(word)), part.kind)
            kinds.setdefault(name, []).append(part)
    part = rng.choice(kinds[rng.choice(sorted(kinds))])
    lives.flip(path, part.offset, part.nbytes, rng)


# -- a kill, and no room ---------------------------------------------------------------------------------------------


def and_no_space(life: Life, rng: random.Random, counts: Counter[str]) -> None:
    """The larger file that a training needs does not fit (a limit on file sizes); now and then a kill comes first."""
    _that_grows(life)
    _refused_creation(life, counts, partial(limit_file_size, 100_000))
    for _ in range(PAIRS):
        life.train(in_a_step(rng), 2)
        if life.file is not None:
            size = os.stat(life.path).st_size
            _without_room(life, rng, counts, "the file could not grow", size, partial(limit_file_size, size))


def on_a_full_tmpfs(life: Life, rng: random.Random, counts: Counter[str]) -> None:
    """The same on a tmpfs that is full, in a mount namespace of its own. It is full at the attach too."""
    _that_grows(life)
    seed = rng.randrange(1 << 30)
    reported = victims.story(partial(_small_tmpfs, life, seed))
    if reported.status:
        raise BrokenError(f"an error in the small tmpfs: {reported.of('broken') or reported.of('error')}")
    for found in reported.of("counts"):
        counts.update(found)


def _small_tmpfs(life: Life, seed: int, tell: Tell) -> None:
    rng, counts = random.Random(seed), Counter[str]()
    with small_room(os.path.dirname(life.path)) as resize:
        if resize is None:
            tell("counts", {"full tmpfs: the kernel permits no mount here": 1})
            return
        try:
            resize(200_000)
            _refused_creation(life, counts)
            for _ in range(PAIRS):
                resize(None)
                life.train(in_a_step(rng), 2)
                if life.file is None:
                    continue
                with suppress(FileNotFoundError):
                    os.unlink(temporary.path_of(life.path))  # what a kill left there, as the next attach does
                size = os.stat(life.path).st_size
                resize(size + 8192)  # room for the lock file
                _without_room(life, rng, counts, "the tmpfs was full", size)
        except BrokenError as err:
            tell("broken", f"{err}; {life.history[-3:]}")
            raise
    tell("counts", dict(counts))


def _refused_creation(life: Life, counts: Counter[str], before: Any = None) -> None:
    reported = life.train(None, 2, 5, before, NoSpaceError)
    if not reported.of("refused") or life.file is not None:
        raise BrokenError(f"a pool for which there is no room was made, or left in part: {reported}")
    counts["no room for a new pool: refused, nothing is left"] += 1


def _without_room(
    life: Life, rng: random.Random, counts: Counter[str], why: str, size: int, before: Any = None
) -> None:
    """A process trains in a pool of ``size`` bytes, beside which there is no room for another file."""
    file = life.file
    kill = Kill("finished", rng.randint(1, 3), delay=rng.uniform(0.0, 0.004)) if rng.random() < 0.3 else None
    reported: Story = life.train(kill, 2, 8, before, NoSpaceError)
    counts[f"{why}: refused, the version before is exact"] += bool(reported.of("refused"))
    counts[f"{why}: killed first"] += reported.was_killed
    if life.file != file and os.stat(life.path).st_size > size:
        raise BrokenError(f"{why}, and the pool is in a larger file")
    counts[f"{why}: the pool had room"] += not reported.of("refused") and not reported.was_killed


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
    "gradient-kill-twice",
    "gradient records: a kill and another fault, in recovery, adoption, a move, creation; a flipped bit; a full medium",
    small=7,
    long=140,
    run=run,
)
