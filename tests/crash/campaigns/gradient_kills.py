"""``gradient-kills``: the trainings of ``kill-training``, saved by ``Gradients``, killed again and again.

After each kill the updates since the bases are made again, and the training ends with the same bits as a run that
lightck never saw (if gradients are compressed, it compresses them by hand). Layers that are updated inside the backward
pass are left out: ``Gradients`` refuses them.
"""

from __future__ import annotations

import random

from crash.campaign import Campaign, Order, Tally
from crash.campaigns.kill_training import Saving, play
from crash.trainings import KINDS, layer_by_layer
from lightck.pool.gradient_log import records_min
from lightck.strategy.gradients import Gradients
from lightck.strategy.topk import TopK

ONE_UNCOMMITTED = 2
"""At most one checkpoint is not committed when the next update begins, as with two slots."""


def gradients(rng: random.Random) -> Saving:
    base_every, interval = rng.choice((2, 3, 3, 5)), rng.choice((1, 1, 2, 3, 6))
    n_records = rng.choice((None, records_min(base_every, interval)))
    compress = rng.choice((None, None, TopK(0.1), TopK(0.02, error_feedback=True, residual="step")))
    options = {"strategy": Gradients(base_every, n_records, compress=compress), "interval": interval}
    return Saving(interval, ONE_UNCOMMITTED, options)


def run(order: Order) -> Tally:
    return play(order, [name for name, kind in KINDS.items() if kind is not layer_by_layer], gradients)


CAMPAIGN = Campaign(
    "gradient-kills",
    "SIGKILL in trainings with gradient records: updates are made again, and each ends bit-identical",
    small=3,
    long=90,
    run=run,
)
