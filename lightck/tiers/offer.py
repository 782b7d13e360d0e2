"""What a training offers to its drain."""

from __future__ import annotations

from typing import NamedTuple

from lightck.tiers.pin import Hold


class Offer(NamedTuple):
    """A checkpoint that the drain is to send."""

    step: int
    generation: int
    tiers: list[int]
    """The numbers of the tiers for which it is due."""
    hold: Hold | None
    """None: the pool has no slot for it to be held in, so the training may overwrite it before the drain holds it."""
