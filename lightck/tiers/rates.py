"""Durations and rates as a user writes them, and a rate limiter. (No torch is imported here, because the commands and
the drain load none.)"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable

_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(s|min|h)")
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_RATE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?(|k|M|G|Ki|Mi|Gi)B/s")
_BYTES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
_WAIT_SECONDS_MAX = 0.2
"""After so long the pacer asks again whether the rate still holds."""


def seconds_of(text: str) -> float | None:
    """Convert a duration (``"30s"``, ``"5min"``, ``"1h"``) to seconds; None if the text is no duration, or zero."""
    match = _DURATION.fullmatch(text)
    return (float(match[1]) * _UNITS[match[2]] or None) if match else None


def bytes_per_second_of(rate: object) -> float | None:
    """Convert a rate (``"200MB/s"``, ``"1.5GiB/s"``, or a number) to bytes per second; None if it is no rate, or
    zero."""
    if isinstance(rate, str):
        match = _RATE.fullmatch(rate)
        found = float(match[1]) * _BYTES[match[2]] if match else 0.0
    else:
        found = float(rate) if type(rate) in (int, float) else 0.0  # type: ignore[arg-type]
    return found if 0 < found < math.inf else None


class Pacer:
    """A rate limiter for pieces of bytes. A piece of any size may pass as soon as the pieces before it are paid for at
    the rate."""

    def __init__(
        self,
        bytes_per_second: float | None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        """``bytes_per_second``: None: without a limit. ``clock``: returns seconds. ``wait``: waits for a number of
        seconds; it may return before, and may call ``lift``."""
        self._rate, self._clock, self._wait = bytes_per_second, clock, wait
        self._free_at = -math.inf
        """When the pieces that have passed are paid for."""

    def spend(self, nbytes: int) -> None:
        """Wait until the next piece, of ``nbytes`` bytes, may pass."""
        while self._rate is not None and (left := self._free_at - self._clock()) > 0:
            self._wait(min(left, _WAIT_SECONDS_MAX))
        rate = self._rate  # a signal handler may lift it at any moment
        if rate is not None:
            self._free_at = max(self._free_at, self._clock()) + nbytes / rate

    def lift(self) -> None:
        """Let everything pass from now on. A signal handler may call this."""
        self._rate = None
