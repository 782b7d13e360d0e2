"""The campaign of all small sequences, in the size that CI plays."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest
from crash import campaigns
from crash.campaign import Order, Tally
from crash.sequences import CHECKPOINTS, Sequence, sequences
from test_mutants import slot_reused_too_early

pytestmark = pytest.mark.long

CAMPAIGN = campaigns.named("power-cut")


def played(folder: Path, backend: str, seed: int, trials: range) -> Tally:
    return CAMPAIGN.run(Order(seed, trials, backend, str(folder)))


def test_small_sequences_keep_the_promise(folder: Path) -> None:
    tally = played(folder, "file", 3, range(CAMPAIGN.small))
    assert not tally.findings
    assert tally.counts["sequences"] == CAMPAIGN.small
    assert tally.counts["images"] >= tally.counts["distinct images"] > 1000
    assert tally.counts["trainings that went on"] > 0
    assert tally.counts["verified"] > 0


def test_they_do_in_the_arenas_of_pmdk_pools(folder: Path, pmdk: None) -> None:
    tally = played(folder, "pmdk", 4, range(CAMPAIGN.small))
    assert not tally.findings
    assert tally.counts["distinct images"] > 1000
    assert tally.counts["trainings that went on"] > 0


def test_a_planted_bug_is_a_finding(folder: Path) -> None:
    with slot_reused_too_early(), patch("crash.campaigns.power_cut._shuffled", lambda seed: [TWO_STEPS]):
        tally = played(folder, "file", 0, range(1))
    assert tally.findings


TWO_STEPS = Sequence(2, False, ("step", "step"))


def test_the_sequences_are_all_that_there_are_up_to_their_bounds() -> None:
    found = sequences()
    assert len(found) == len(set(found)) == CAMPAIGN.long
    assert {s.slots for s in found} == {2, 3}
    for sequence in found:
        checkpoints = sum(event in CHECKPOINTS for event in sequence.events)
        others = sum(CHECKPOINTS.get(event, 1) for event in sequence.events)
        assert checkpoints <= 3
        assert others <= 2
    events = {s.events for s in found}
    assert {("step", "pin", "release"), ("step", "step", "back", "step", "crash"), ("reopen", "overwrite")} < events
    assert not {("pin",), ("step", "release"), ("back", "step")} & events
    assert Counter(s.frozen for s in found)[True] > 100


@pytest.mark.parametrize("sequence", sequences()[:2], ids=str)
def test_a_sequence_says_what_it_does(sequence: Sequence) -> None:
    assert str(sequence).endswith("slots: attach close")
