"""``gradient-full``: ``full``, in the life of a pool with gradient records."""

from __future__ import annotations

from crash.campaign import Campaign, Order, Tally
from crash.campaigns.full import play
from crash.stage import Stage

BASE_EVERY = 3


def run(order: Order, stage: Stage | None = None) -> Tally:
    return play(order, stage, BASE_EVERY)


CAMPAIGN = Campaign(
    name="gradient-full",
    summary="gradient records on full and read-only file systems, and under limits: an error of lightck's own",
    small=18,
    long=300,
    run=run,
)
