"""What a row can measure: a module each, with ``measure(options, folder)``, run in a process of its own; and beside
them what they share: the trainings, what saves them, the loop in which windows take turns, copies, statistics.

``options`` are a row's, as JSON has them; ``folder`` is an empty one on the medium in question. The answer is a dict of
plain numbers and short texts, and it is only given when what was saved has loaded back right.
"""

from __future__ import annotations

import importlib
from typing import Any

NAMES = ("steps", "recovery", "bandwidth", "memory", "flat", "many", "calibrate", "gpu")


def measure(name: str, options: dict[str, Any], folder: str) -> dict[str, Any]:
    assert name in NAMES, name
    found: dict[str, Any] = importlib.import_module(f"bench.measures.{name}").measure(options, folder)
    return found
