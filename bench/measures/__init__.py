"""The measures, a module each with ``measure(options, folder)``, which runs in a process of its own; and what they
share: trainings, savers, the loop in which windows take turns, copies, statistics.

``options`` are a row's, as in JSON; ``folder`` is an empty folder on the medium to measure. The result is a dict of
numbers and short texts, and is returned only if the saved state has loaded back bit for bit.
"""

from __future__ import annotations

import importlib
from typing import Any

NAMES = ("steps", "recovery", "bandwidth", "memory", "flat", "many", "short", "calibrate", "gpu", "gradients")


def measure(name: str, options: dict[str, Any], folder: str) -> dict[str, Any]:
    assert name in NAMES, name
    found: dict[str, Any] = importlib.import_module(f"bench.measures.{name}").measure(options, folder)
    return found
