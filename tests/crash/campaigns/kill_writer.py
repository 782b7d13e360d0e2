"""``kill-writer``: a training of known content is killed 20 times on one pool, anywhere in its steps, and goes on.

Half of the kills are at the native library's kill points, half at random microseconds: in the forward, the update, the
copies and the commit, in attach, adoption and creation. A trial is the life of one pool.
"""

from __future__ import annotations

import os
import random

from crash import known, victims
from crash.campaign import Campaign, Order, Tally
from crash.known import Plan
from crash.ledger import BrokenError
from crash.lives import Life
from crash.victims import CHECKPOINT_SITES, Kill, Story

KILLS = 20
"""In the life of one pool."""


def run(order: Order) -> Tally:
    tally = Tally()
    victims.be_ready(order.backend)
    for trial in order.trials:
        try:
            _life(order, trial, tally)
        except BrokenError as err:
            tally.found(trial, str(err))
        if trial % 10 == 9:
            order.say(f"{trial + 1} pools, {tally.counts['kills']} kills, {len(tally.findings)} findings")
    return tally


def _life(order: Order, trial: int, tally: Tally) -> None:
    rng = order.rng(trial)
    plan = known.draw(rng)
    usual = rng.choice((2, 2, 3))
    life = Life(plan, os.path.join(order.folder, f"{trial}.pool"), order.backend)
    tally.counts["pools"] += 1
    with life.reported():
        for number in range(KILLS):
            kill, slots = draw_kill(rng, plan, is_first=not number), usual if rng.random() < 0.8 else 5 - usual
            file = life.file
            reported = life.train(kill, slots)
            _count(tally, reported, kill, life.ledger.least)
            tally.counts["processes that moved the pool to a new file"] += file not in (None, life.file)
    life.remove()


def draw_kill(rng: random.Random, plan: Plan, *, is_first: bool) -> Kill:
    """Anywhere. Kill points are counted from before ``attach``: the first passings of some are an adoption's."""
    where = rng.random()
    if is_first and where < 0.5:
        return Kill("attaches", delay=rng.uniform(0.0, 0.025))  # while the pool is made
    if where < 0.45:
        site = rng.choice(CHECKPOINT_SITES)
        return Kill(site=site, nth=rng.randint(1, 60 if site == "block" else 6))
    if where < 0.6:
        return Kill("attaches", delay=rng.uniform(0.0, 0.016))
    word = rng.choice(("attached", "begins", "begins", "begins", "finished", "committed"))
    nth = 1 if word == "attached" else rng.randint(1, 8)
    return Kill(word, nth, delay=rng.uniform(0.0, 0.008 if plan.is_large else 0.002))


def _count(tally: Tally, reported: Story, kill: Kill, found: int) -> None:
    if not reported.was_killed:
        tally.counts["ended before their kill"] += 1
        return
    tally.counts["kills"] += 1
    tally.counts["recovered exactly" if found else "killed before there was a version"] += 1
    where = f"at kill point {kill.site}" if kill.site else f"at a random instant after: {reported.last}"
    tally.counts[f"killed {where}"] += 1
    tally.counts["killed while a version was held"] += bool(set(reported.of("holds")) - set(reported.of("lets go")))


CAMPAIGN = Campaign(
    "kill-writer",
    "SIGKILL anywhere in a step: what was acknowledged is there, nothing is invented, every byte is its step's",
    small=1,
    long=510,
    run=run,
)
