"""What can happen at a step of a training, as its loop, its model and its optimizers report it."""

from __future__ import annotations

from enum import Enum


class Event(Enum):
    """What can close a version, in the order in which a loop meets them."""

    NEXT = "next"
    """``next()`` on a session loader."""
    END_STEP = "end_step"
    """The user's ``end_step()``."""
    FORWARD = "forward"
    """The root module's next training forward."""
    FLUSH = "flush"
    """The user's ``flush()`` or ``close()``."""
    PRE_STEP = "pre_step"
    """The pre-step hook of the next update: the last resort."""
