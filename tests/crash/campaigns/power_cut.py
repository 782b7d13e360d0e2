"""``power-cut``: every small sequence of events in the life of a pool, and the power cut at every point of each.

A trial is one of ``sequences``, in an order that the seed draws; as many trials as there are sequences play each once.
Trials that begin alike share their crash points: an image is counted by the first of them.
"""

from __future__ import annotations

import gc
import random
from pathlib import Path

from crash.campaign import Campaign, Order, Tally
from crash.cuts import Limits
from crash.persistence import MODELS
from crash.recorded import Workload, alone, record, small_heap
from crash.report import Report
from crash.seen import Known
from crash.sequences import Sequence, sequences
from crash.simulator import Effort, Simulator
from crash.verdict import disagreement

LIMITS = Limits(budget=4096, metadata=48, payload=16, contents=32, prefixes=8, masks=12)


def run(order: Order) -> Tally:
    tally, known, chosen = Tally(), Known(), _shuffled(order.seed)
    with alone(order.backend), small_heap():
        for trial in order.trials:
            sequence = chosen[trial % len(chosen)]
            effort = Effort(
                LIMITS,
                again_every=400,
                verify_every=500,
                goes_on_every=4000,
                violations_max=5,
                seed=order.seed + trial // len(chosen),
            )
            play(order, trial, str(sequence), sequence.workload(), effort, known, tally)
            tally.counts["sequences"] += 1
            order.say(f"trial {trial}, {sequence}: {tally.counts['distinct images']} distinct images so far")
    return tally


def _shuffled(seed: int) -> list[Sequence]:
    chosen = sequences()
    random.Random(seed).shuffle(chosen)
    return chosen


def play(
    order: Order,
    trial: int,
    name: str,
    workload: Workload,
    effort: Effort,
    known: Known,
    tally: Tally,
) -> None:
    """Record a workload, cut the power at every point of it under each model, and count what was seen."""
    path = Path(order.folder) / "run.pool"
    gc.freeze()  # what was found out so far is nothing that an attach has to search
    try:
        recording = record(workload, path)
        simulator = Simulator(
            recording, order.folder, goes_on=workload.goes_on, verify=disagreement, effort=effort, known=known
        )
        for model in MODELS:
            _count(tally, trial, name, simulator.check(model))
    except Exception as err:
        tally.found(trial, f"{name}: it does not end: {type(err).__name__}: {err}")
    finally:
        for left in Path(order.folder).glob("*.pool*"):
            left.unlink()


def _count(tally: Tally, trial: int, name: str, report: Report) -> None:
    tally.counts["crash points"] += report.crash_points
    tally.counts["images"] += report.images
    tally.counts["distinct images"] += report.distinct
    tally.counts[f"distinct images, {report.model}"] += report.distinct
    tally.counts["recoveries"] += report.recovered
    tally.counts["verified"] += report.verified
    tally.counts["trainings that went on"] += report.went_on
    for violation in report.violations:
        tally.found(trial, f"{name}: {violation}")


CAMPAIGN = Campaign(
    "power-cut",
    "cut the power at every point of every small sequence of events: nothing acknowledged is lost, every bit is exact",
    small=2,
    long=len(sequences()),
    run=run,
)
