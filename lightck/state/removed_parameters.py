"""State that an optimizer keeps of parameters which were removed from its groups."""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch
from torch.optim.optimizer import Optimizer

log = logging.getLogger("lightck")


def warn_of_removed(optimizer: Optimizer, removed: Collection[int]) -> bool:
    """Warn if an optimizer has state of one of these parameters, because that state is not saved. Returns whether a
    warning was given. ``removed``: ids of the parameters that were in its groups, and are in none now."""
    if not any(isinstance(key, torch.Tensor) and id(key) in removed for key in optimizer.state):
        return False
    log.warning(
        "lightck: parameters were removed from the param_groups of %s, which still has their state (momentum, and so "
        "on). That state is not saved: if they are added again after a resume, it starts over. To freeze parameters "
        "for a while, set requires_grad=False; or delete the state (del optimizer.state[parameter])",
        type(optimizer).__name__,
    )
    return True
