"""How long a caller is ready to wait, as he says it, and as the clock says when that is over."""

from __future__ import annotations

import math
import time
from numbers import Real
from typing import Any


def deadline_in(timeout: Any) -> float | None:
    """``timeout`` seconds from now, on the monotonic clock; None (for ever) for None and infinity. Raises ``TypeError``
    and ``ValueError``."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        kind = type(timeout).__name__
        raise TypeError(f"timeout={timeout!r} is a {kind}. Pass a number of seconds, or None to wait for ever.")
    seconds = float(timeout)
    if math.isnan(seconds):
        raise ValueError(f"timeout={timeout!r} is no time. Pass a number of seconds, or None to wait for ever.")
    return None if seconds == math.inf else time.monotonic() + seconds
