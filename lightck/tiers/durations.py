"""Durations with a unit: ``30s``, ``5min``, ``1h``."""

from __future__ import annotations

import re

_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(s|min|h)")
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def seconds_of(text: str) -> float | None:
    """Convert a duration (``"30s"``, ``"5min"``, ``"1h"``) to seconds; None if the text is no duration, or zero."""
    match = _DURATION.fullmatch(text)
    return (float(match[1]) * _UNITS[match[2]] or None) if match else None
