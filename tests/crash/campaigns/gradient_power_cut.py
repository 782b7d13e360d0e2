"""``gradient-power-cut``: the power is cut at every point of trainings that are saved by ``Gradients``.

A trial is one of ``GRADIENT_WORKLOADS``; as many trials as there are play each once.
"""

from __future__ import annotations

from crash.campaign import Campaign, Order, Tally
from crash.campaigns.power_cut import play
from crash.cuts import Limits
from crash.gradient_workloads import GRADIENT_WORKLOADS
from crash.recorded import alone, small_heap
from crash.seen import Known
from crash.simulator import Effort

LIMITS = Limits(budget=1024, metadata=32, payload=16, contents=16, prefixes=8, masks=12)


def run(order: Order) -> Tally:
    tally, known, names = Tally(), Known(), list(GRADIENT_WORKLOADS)
    with alone(order.backend), small_heap():
        for trial in order.trials:
            name = names[trial % len(names)]
            seed = order.seed + trial // len(names)
            effort = Effort(LIMITS, again_every=400, verify_every=500, goes_on_every=4000, violations_max=5, seed=seed)
            play(order, trial, name, GRADIENT_WORKLOADS[name], effort, known, tally)
            order.say(f"trial {trial}, {name}: {tally.counts['distinct images']} distinct images so far")
    return tally


CAMPAIGN = Campaign(
    "gradient-power-cut",
    "cut the power at every point of trainings with gradient records: nothing acknowledged is lost, every bit is exact",
    small=1,
    long=len(GRADIENT_WORKLOADS),
    run=run,
)
