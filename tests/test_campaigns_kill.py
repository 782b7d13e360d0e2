"""The kill campaigns in small, on both kinds of pools; and that each finds a bug that is planted for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightck.pipeline import Pipeline
from lightck.pool.slots import Slot, Slots
from lightck.testing import campaigns
from lightck.testing.campaign import Order, Tally


def play(name: str, folder: Path, *, backend: str = "file", count: int | None = None, seed: int = 1) -> Tally:
    campaign = campaigns.named(name)
    return campaign.run(Order(seed, range(count or campaign.small), backend, str(folder)))


@pytest.fixture(params=["file", "pmdk"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "pmdk":
        request.getfixturevalue("pmdk")
    return str(request.param)


def test_a_killed_writer_loses_nothing_that_was_acknowledged(folder, backend):
    tally = play("kill-writer", folder, backend=backend)
    assert not tally.findings
    assert tally.counts["kills"] >= 30


def reuse_the_protected_slot(self: Slots) -> Slot | None:
    return self.slots[self.protected or 0]


def wait_for_nothing(self: Pipeline, timeout: float | None = None) -> bool:
    for flight in self._open_flights():
        self._settle(flight)
    return True


def test_a_slot_that_is_reused_too_early_is_found(folder, monkeypatch):
    monkeypatch.setattr(Slots, "choose", reuse_the_protected_slot)
    assert play("kill-writer", folder, count=4).findings


def test_an_acknowledgement_that_waits_for_nothing_is_found(folder, monkeypatch):
    monkeypatch.setattr(Pipeline, "finish", wait_for_nothing)
    assert play("kill-writer", folder, count=8).findings
