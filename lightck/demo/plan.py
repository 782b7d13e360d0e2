"""Draws the demo's kills from a seed, so that a run can be repeated.

Half of the kills are timed: the parent sends SIGKILL at a random moment within two steps after a random update was
reported. For the other half the child kills itself at a random kill site of the native library, between two stages of
writing a checkpoint, which a timed kill rarely hits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

# The kill sites in the order in which a checkpoint passes them; the child dies at the one that LIGHTCK_KILL names.
SITES = {
    "header": "a slot was marked as being written",
    "block": "a block of the payload was copied",
    "manifest": "the manifest was written, and not flushed",
    "sealed": "payload and manifest were flushed",
    "body": "the commit record was written, except for its first 8 bytes, which are written last",
    "word": "the commit record was written, and not flushed",
    "ack": "the commit record was flushed",
}
"""Kill site -> what has just been done there."""

GAP = 3  # the least updates between two kills, so that each process has finished some
TAIL = 4  # the least updates after the last kill, so that the run rarely ends before it
DELAY_STEPS_MAX = 2.0  # the longest delay of a timed kill after the report, in steps


@dataclass(frozen=True, slots=True)
class Planned:
    """One kill after update ``after``: at a kill ``site``, or timed, ``delay`` steps after the report (site None)."""

    after: int
    site: str | None
    delay: float


def fewest_steps(kills: int) -> int:
    """The least number of updates that a run with so many kills needs."""
    return GAP * (kills + 1) + TAIL


def draw(kills: int, steps: int, seed: int) -> tuple[Planned, ...]:
    """Draw ``kills`` kills over a run of ``steps`` updates, in order."""
    assert steps >= fewest_steps(kills)
    rng = random.Random(seed)
    return tuple(
        Planned(after, site, rng.uniform(0, DELAY_STEPS_MAX))
        for after, site in zip(_updates(kills, steps, rng), _sites(kills, rng), strict=True)
    )


def _updates(kills: int, steps: int, rng: random.Random) -> list[int]:
    """Draw updates that are at least ``GAP`` apart: draw from the range without the gaps, and add them."""
    room = steps - TAIL - GAP * kills
    drawn = sorted(rng.randint(1, room) for _ in range(kills))
    return [after + GAP * index for index, after in enumerate(drawn)]


def _sites(kills: int, rng: random.Random) -> list[str | None]:
    """Half of the kills get a site, each site once before any is repeated; None is a timed kill."""
    named: list[str | None] = []
    while len(named) < kills // 2:
        named += rng.sample(tuple(SITES), len(SITES))
    mixed = named[: kills // 2] + [None] * (kills - kills // 2)
    rng.shuffle(mixed)
    return mixed


def kill_setting(planned: Planned, position: int, blocks: int, seed: int) -> str | None:
    """The LIGHTCK_KILL of a child that starts at update ``position``; None for a timed kill.

    Each update writes one checkpoint, which passes each site once, and the site "block" ``blocks`` times.
    """
    if planned.site is None:
        return None
    checkpoint = max(1, planned.after - position)
    if planned.site != "block":
        return f"{planned.site}:{checkpoint}"
    nth = random.Random(seed * 1_000_003 + planned.after).randint(1, blocks)
    return f"block:{(checkpoint - 1) * blocks + nth}"
