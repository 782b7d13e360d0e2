"""How long to wait after a failed attempt."""

from __future__ import annotations

import math
import random

PAUSE_SECONDS, _PAUSE_SECONDS_MAX = 1.0, 60.0
"""The pause after a failed attempt doubles from one to the other."""


def pause_after(n_failures: int) -> float:
    """Return how many seconds to wait after so many failed attempts (1 or more) before the next one."""
    doublings = min(n_failures - 1, 16)  # a tier may fail for days
    return min(math.ldexp(PAUSE_SECONDS, doublings), _PAUSE_SECONDS_MAX) * random.uniform(0.5, 1.0)
