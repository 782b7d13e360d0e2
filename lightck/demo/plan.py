"""When and where the demo kills: drawn from a seed, so that a run can be repeated.

Half of the kills come from outside, at an instant drawn over two whole steps after a drawn update was reported. The
other half come from inside, at a drawn site of the commit itself, where an instant by the clock hardly ever falls.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

# The order of a checkpoint; the child dies right behind the one that LIGHTCK_KILL names.
SITES = ("header", "block", "manifest", "sealed", "body", "word", "ack")

GAP = 3  # updates between two kills at least: each life has something to lose
TAIL = 4  # updates left after the last kill, so that the run cannot end before it
CLOCK_STEPS_MAX = 2.0


@dataclass(frozen=True, slots=True)
class Planned:
    """One kill around update ``after``: at a ``site``, or by the clock, ``delay`` steps after the report."""

    after: int
    site: str | None
    delay: float


def fewest_steps(kills: int) -> int:
    """The least number of updates into which so many kills fit."""
    return GAP * (kills + 1) + TAIL


def draw(kills: int, steps: int, seed: int) -> tuple[Planned, ...]:
    """``kills`` kills spread over a run of ``steps`` updates, in the order in which they come."""
    assert steps >= fewest_steps(kills)
    rng = random.Random(seed)
    return tuple(
        Planned(after, site, rng.uniform(0, CLOCK_STEPS_MAX))
        for after, site in zip(_updates(kills, steps, rng), _sites(kills, rng), strict=True)
    )


def _updates(kills: int, steps: int, rng: random.Random) -> list[int]:
    """Distinct updates at least ``GAP`` apart: drawn without the gaps, which are then put back."""
    room = steps - TAIL - GAP * kills
    drawn = sorted(rng.randint(1, room) for _ in range(kills))
    return [after + GAP * index for index, after in enumerate(drawn)]


def _sites(kills: int, rng: random.Random) -> list[str | None]:
    """Half of them sites, no site twice before each was had; None stands for the clock."""
    named: list[str | None] = []
    while len(named) < kills // 2:
        named += rng.sample(SITES, len(SITES))
    mixed = named[: kills // 2] + [None] * (kills - kills // 2)
    rng.shuffle(mixed)
    return mixed


def kill_setting(planned: Planned, position: int, blocks: int, seed: int) -> str | None:
    """The child's LIGHTCK_KILL for a life that starts about update ``position``; None for a kill by the clock.

    Every site is passed once in a checkpoint, and there is one per update; a block once for each of ``blocks``.
    """
    if planned.site is None:
        return None
    checkpoint = max(1, planned.after - position)
    if planned.site != "block":
        return f"{planned.site}:{checkpoint}"
    most = random.Random(seed * 1_000_003 + planned.after).randint(1, blocks)
    return f"block:{(checkpoint - 1) * blocks + most}"
