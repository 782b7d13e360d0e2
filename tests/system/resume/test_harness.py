"""The comparison finds what it is there to find: faults put into lightck, and a lost update."""

from __future__ import annotations

from pathlib import Path

import pytest

from .forkserver import ForkServer
from .harness import Kill, Mismatch, Training
from .scenarios import SCENARIOS

KILLS = [Kill("place", "update", 7), Kill("site", "sealed", 2)]


def differs(server: ForkServer, folder: Path, scenario: str, sabotage: str) -> str:
    training = Training(server, SCENARIOS[scenario], folder, sabotage=sabotage)
    with pytest.raises(Mismatch) as caught:
        training.survive(training.reference(), KILLS)
    return str(caught.value)


@pytest.mark.parametrize(
    ("scenario", "sabotage", "said"),
    [
        ("dropout", "rng_is_not_restored", "the loss of update"),
        ("batches-by-hand-without-end-step", "rng_is_not_restored", "the loss of update"),
        ("scheduler", "scheduler_is_not_restored", "took nothing of its saved state"),
        ("sgd-with-momentum", "momentum_is_not_restored", "keeps nothing of the state"),
        ("plain-loop", "every_third_checkpoint_only", "update 12 was reported"),
    ],
)
def test_fault_in_lightck_is_found(server: ForkServer, folder: Path, scenario: str, sabotage: str, said: str) -> None:
    assert said in differs(server, folder, scenario, sabotage)


def test_same_kills_without_a_fault_are_survived(server: ForkServer, folder: Path) -> None:
    for name in ("dropout", "scheduler", "sgd-with-momentum", "plain-loop"):
        training = Training(server, SCENARIOS[name], folder)
        assert len(training.survive(training.reference(), KILLS).kills) == len(KILLS)


def test_fork_server_has_not_called_lightck_in_the_reference(server: ForkServer, folder: Path) -> None:
    """Every call of it would fail, and the reference run is as before."""
    scenario = SCENARIOS["plain-loader"]
    whole = Training(server, scenario, folder).reference()
    without = Training(server, scenario, folder, sabotage="lightck_cannot_be_called").reference()
    assert without.digests == whole.digests


def test_pool_on_a_disk_and_attach_that_searches_the_whole_heap(server: ForkServer, tmp_path: Path) -> None:
    """The other tests' pools are on tmpfs, and what their server imported is hidden from attach."""
    training = Training(server, SCENARIOS["scheduler"], tmp_path, sees_frozen=True)
    survival = training.survive(training.reference(), [*KILLS, Kill("site", "word", 2), Kill("place", "update", 2)])
    assert len(survival.kills) == 4
