"""Which trainings and arguments ``strategy=Replica(...)`` takes, checked at attach."""

from __future__ import annotations

import logging

from lightck.errors import UnsupportedError
from lightck.hooks.layerwise import layerwise_of
from lightck.restore.checkpoint import refuse_other_than_bool
from lightck.session.arguments import Arguments
from lightck.session.discover import Found
from lightck.state.device_transfers import transfer_of
from lightck.state.partial_optimizer import PartialOptimizer
from lightck.state.replayable import refuse_unreplayable
from lightck.strategy.replica import Replica

log = logging.getLogger("lightck")


def refuse_unreplicable(strategy: Replica, arguments: Arguments, found: Found) -> None:
    """Raise ``UnsupportedError`` or ``TypeError`` if this training, with these arguments, cannot be saved by
    ``strategy``. Warn if it can be, and another strategy is better in every respect."""
    refuse_other_than_bool(own_optimizers=strategy.own_optimizers)
    if not found.optimizers:
        raise UnsupportedError(
            "strategy=Replica() makes the updates of an optimizer a second time, and no optimizer of this model exists "
            "at attach. Build the optimizer first, or use strategy=FullState()."
        )
    for optimizer in found.optimizers:
        if layerwise_of(optimizer) is not None:
            raise UnsupportedError(
                "strategy=Replica() and lightck.layerwise() exclude each other: a layer's gradient is gone before the "
                "copy can make its update. Use strategy=FullState(), or leave out layerwise()."
            )
        refuse_unreplayable(optimizer)
        if not (strategy.own_optimizers or PartialOptimizer.of(optimizer).is_torch):
            raise UnsupportedError(
                f"{type(optimizer).__name__} is not a class of torch.optim, so lightck does not know what its step() "
                "reads, and whether its updates can be made a second time. Use strategy=FullState(). If its step reads "
                "nothing but the gradient, the options and the state of each parameter, pass "
                "Replica(own_optimizers=True)."
            )
    if not any(transfer_of(p) is not None for p in arguments.model.parameters()):
        log.warning(
            "lightck: strategy=Replica() makes each update a second time on the processor that trains, and then copies "
            "as many bytes as FullState(), to the same checkpoints: strategy=FullState() is cheaper here. Replica() is "
            "meant for a model on a device"
        )
