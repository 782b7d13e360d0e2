"""A loop of each kind that public programs have is exact after kills, or lightck says what is not."""

from __future__ import annotations

import pytest
from sampling import every_second

from .harness import Bench

pytestmark = pytest.mark.long

EXACT = [
    "classifier-with-a-shuffled-test",
    "autoencoder-that-samples-after-each-epoch",
    "adversaries",
    "whole-model-saved-each-epoch",
    "batches-without-end",
    "whole-graph-at-once",
    "closures",
    "batch-fetched-ahead-in-state",
    "loader-of-ones-own-in-state",
    "hidden-state-in-state",
    "no-optimizer-end-step",
    "environment-in-state",
    "prepared-loader-one-ahead",
    "rate-by-updates",
    "layers-in-turn-end-step",
]
WARNED = {
    "batch-fetched-ahead": "batch",
    "loader-of-ones-own": "batch",
    "loader-of-ones-own-in-state-without-end-step": "shards|batch",
    "generator-over-a-loader": "loader.0|batch",
    "hidden-state-carried": "batch",
    "environment": "batch",
    "several-updates-on-one-rollout": "batch",
    "trainer-that-begins-anew": "batch",
}


@pytest.mark.parametrize("name", every_second(EXACT))
def test_it_is_exact_without_a_warning(name: str, bench: Bench) -> None:
    bench.exact(name)


@pytest.mark.parametrize("name", every_second(WARNED))
def test_what_is_not_exact_is_warned_about(name: str, bench: Bench) -> None:
    bench.exact_or_reported(name, WARNED[name])


def test_a_target_network_trains_on(bench: Bench) -> None:
    """It is written behind lightck's back: that may be warned about, and is exact all the same."""
    bench.exact("target-network", quiet=False)
