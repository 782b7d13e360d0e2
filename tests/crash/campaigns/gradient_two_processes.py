"""``gradient-two-processes``: ``two-processes``, with trainings that are saved by ``Gradients``."""

from __future__ import annotations

from crash import known
from crash.campaign import Campaign, Order, Tally
from crash.campaigns.two_processes import play


def run(order: Order) -> Tally:
    return play(order, known.draw_gradients)


CAMPAIGN = Campaign(
    "gradient-two-processes",
    "a pool with gradient records that others touch: a second process, a forked worker, a deleted or truncated file",
    small=5,
    long=60,
    run=run,
)
