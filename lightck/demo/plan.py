"""Draws the demo's kills from a seed, so that a run can be repeated.

Half of the kills are timed: the parent sends SIGKILL at a random moment, at most two steps after the child reported a
random update. In the other half the child kills itself at a random kill site of the native library. Kill sites lie
between two stages of writing a checkpoint, which a timed kill rarely hits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

# The kill sites, in the order in which the write of a checkpoint reaches them. LIGHTCK_KILL names one of them.
SITES = {
    "header": "a slot was marked as being written",
    "block": "a block of the payload was copied",
    "manifest": "the manifest was written, and not flushed",
    "sealed": "payload and manifest were flushed",
    "body": "the commit record was written, except for its first 8 bytes, which are written last",
    "word": "the commit record was written, and not flushed",
    "ack": "the commit record was flushed",
}
"""Kill site -> what has been done immediately before."""

GAP = 3  # smallest number of updates between two kills, so that each process finishes some updates
TAIL = 4  # smallest number of updates after the last kill, so that the run rarely ends before this kill
DELAY_STEPS_MAX = 2.0  # longest delay of a timed kill after the report, in steps


@dataclass(frozen=True, slots=True)
class PlannedKill:
    """One kill after update ``after``: at the kill site ``site``; or, if ``site`` is None, ``delay`` steps after the
    report of this update."""

    after: int
    site: str | None
    delay: float


def fewest_steps(kills: int) -> int:
    """Return the least number of updates that a run with this number of kills needs."""
    return GAP * (kills + 1) + TAIL


def draw(kills: int, steps: int, seed: int) -> tuple[PlannedKill, ...]:
    """Return ``kills`` random kills in a run of ``steps`` updates, ordered by update."""
    assert steps >= fewest_steps(kills)
    rng = random.Random(seed)
    return tuple(
        PlannedKill(after, site, rng.uniform(0, DELAY_STEPS_MAX))
        for after, site in zip(_updates(kills, steps, rng), _sites(kills, rng), strict=True)
    )


def _updates(kills: int, steps: int, rng: random.Random) -> list[int]:
    """Return ``kills`` random updates that are at least ``GAP`` apart; at least ``TAIL`` updates follow the last one.
    Random numbers are drawn and sorted. Then ``n * GAP`` is added to the n-th number, counted from 0. So the numbers
    are drawn from a range that is shorter than the run."""
    room = steps - TAIL - GAP * kills
    drawn = sorted(rng.randint(1, room) for _ in range(kills))
    return [after + GAP * index for index, after in enumerate(drawn)]


def _sites(kills: int, rng: random.Random) -> list[str | None]:
    """Return the site of each kill; None stands for a timed kill. Half of the kills, rounded down, have a site. No site
    occurs a second time before every site has occurred once."""
    named: list[str | None] = []
    while len(named) < kills // 2:
        named += rng.sample(tuple(SITES), len(SITES))
    mixed = named[: kills // 2] + [None] * (kills - kills // 2)
    rng.shuffle(mixed)
    return mixed


def kill_setting(planned: PlannedKill, position: int, blocks: int, seed: int) -> str | None:
    """Return the value of LIGHTCK_KILL for a child that resumes after update ``position``; None for a timed kill.

    Each update writes one checkpoint. The write of a checkpoint reaches the site "block" ``blocks`` times, and each
    other site once.
    """
    if planned.site is None:
        return None
    checkpoint = max(1, planned.after - position)
    if planned.site != "block":
        # A resume writes the commit record of the checkpoint again before the first update.
        is_passed_by_resume = position > 0 and planned.site in ("body", "word", "ack")
        return f"{planned.site}:{checkpoint + is_passed_by_resume}"
    nth = random.Random(seed * 1_000_003 + planned.after).randint(1, blocks)
    return f"block:{(checkpoint - 1) * blocks + nth}"
