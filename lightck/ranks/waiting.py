"""A bounded wait for other ranks, with pauses that grow, a report every 30 seconds, and an error after the timeout."""

from __future__ import annotations

import time
from collections.abc import Callable

from lightck.errors import RankError

_LOG_SECONDS = 30.0


def wait_until(
    is_over: Callable[[], bool],
    *,
    timeout: float,
    pauses: tuple[float, float],
    report: Callable[[float], object],
    error: Callable[[], RankError],
    between: Callable[[], object] = lambda: None,
) -> None:
    """Wait until ``is_over`` returns True. ``timeout``: seconds after which ``error()`` is raised. ``pauses``: seconds
    of the first pause, and of the longest one. ``report``: called every 30 seconds with the seconds that have passed.
    ``between``: called before each pause; what it raises ends the wait."""
    began = time.monotonic()
    (pause, longest), next_report = pauses, began + _LOG_SECONDS
    while not is_over():
        now = time.monotonic()
        if now > began + timeout:
            raise error()
        if now > next_report:
            next_report = now + _LOG_SECONDS
            report(now - began)
        between()
        time.sleep(pause)
        pause = min(2 * pause, longest)
