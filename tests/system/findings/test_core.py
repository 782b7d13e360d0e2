"""Rows A1 to A3: writes that nobody announces are repaired, and no resume continues from stale bytes."""

from __future__ import annotations

import pytest
from sampling import every_second

from .harness import Bench

pytestmark = pytest.mark.long

SMALL = [
    "frozen-weight-scaled-once-by-data",
    "frozen-weight-scaled-behind-the-update",
    "lora-merged-for-an-evaluation",
    "target-network-copied-by-data",
    "bf16-weights-from-a-master",
    "replay-buffer-written-through-numpy",
    "weights-normalised-by-the-forward",
    "weights-scaled-by-the-forward",
    "average-updated-at-the-top",
]


@pytest.mark.parametrize("name", every_second(SMALL))
def test_training_with_unannounced_writes_is_exact_after_every_kill(name: str, bench: Bench) -> None:
    bench.exact(name, quiet=False)
