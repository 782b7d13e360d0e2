"""``gradient-power-cut``: the power is cut at every point of trainings that are saved by ``Gradients``.

The first trials are ``GRADIENT_WORKLOADS``, each once. In all further trials the seed draws what happens
(``gradient_lives``).
"""

from __future__ import annotations

from crash.campaign import Campaign, Order, Tally
from crash.campaigns.power_cut import play
from crash.cuts import Limits
from crash.gradient_lives import Drawn
from crash.gradient_workloads import GRADIENT_WORKLOADS
from crash.recorded import Workload, alone, small_heap
from crash.seen import Known
from crash.simulator import Effort

LIMITS = Limits(budget=1024, metadata=32, payload=16, contents=16, prefixes=8, masks=12)
LIMITS_OF_LIVES = Limits(budget=8, metadata=4, payload=4, contents=4, prefixes=2, masks=2)


def run(order: Order) -> Tally:
    tally, known = Tally(), Known()
    with alone(order.backend), small_heap():
        for trial in order.trials:
            name, workload, limits = _chosen(order, trial)
            effort = Effort(
                limits, again_every=400, verify_every=500, goes_on_every=4000, violations_max=5, seed=order.seed
            )
            play(order, trial, name, workload, effort, known, tally)
            order.say(f"trial {trial}, {name}: {tally.counts['distinct images']} distinct images so far")
    return tally


def _chosen(order: Order, trial: int) -> tuple[str, Workload, Limits]:
    """What a trial plays: name, training, and how many images of it."""
    if trial < len(GRADIENT_WORKLOADS):
        name = list(GRADIENT_WORKLOADS)[trial]
        return name, GRADIENT_WORKLOADS[name], LIMITS
    drawn = Drawn(order.seed + trial)
    return f"{drawn}, {drawn.strategy}, interval={drawn.interval}", drawn.workload(), LIMITS_OF_LIVES


CAMPAIGN = Campaign(
    "gradient-power-cut",
    "cut the power at every point of trainings with gradient records: nothing acknowledged is lost, every bit is exact",
    small=1,
    long=len(GRADIENT_WORKLOADS) + 60,
    run=run,
)
