"""Peer copies under the rule: every interleaving of small groups, in which any one host can be lost at any moment."""

from __future__ import annotations

from typing import Any

import pytest

from ranks import mutants
from ranks.copying import Copies
from ranks.rows import STUCK, Row, check, safe, wrong
from ranks.topology import Topology, data_parallel, no_collective, pipeline

HOST_LOST = "after the loss of a host the ranks have no checkpoint in common"
OVERWRITTEN = "a slot is overwritten while its checkpoint is copied"
DP = data_parallel
HOSTS_3 = ((0,), (1,), (2,))
HOSTS_2_1 = ((0, 1), (2,))
"""Two ranks on one host, which read each other's pools, and one on another."""


def row(name: str, n: int, topology: Topology, states: int, lost: int, host: int | None = None, **options: Any) -> Row:
    """A safe row. ``host``: the most steps that a crash costs which takes a host with it; None: not counted, because
    the number grows while checkpoints that are due are given up, or copies begin late."""
    return safe(name, n, topology, states, lost, lost_with_host=host, model=Copies, **options)


SAFE = [
    row("2 ranks", 2, DP(2), 1_896, 1, 6),
    row("2 ranks, the number is learnt late", 2, DP(2), 3_392, 1, learns_number_late=True),
    row("2 ranks, last gate alone", 2, DP(2, early=False), 2_632, 2, 6),
    row("2 stages", 2, pipeline(2), 5_173, 2, 6),
    row("no collective", 2, no_collective(2), 3_402, 4, 6),
    row("5 slots", 2, DP(2), 5_742, 1, 8, slots=5),
    row("5 slots, every third step", 2, DP(2), 7_894, 1, 11, slots=5, copy_every=3),
    row("4 slots, every third step", 2, DP(2), 2_583, 1, 8, copy_every=3),
    row("every step, 1 given up", 2, DP(2), 11_013, 1, copy_every=1, give_ups=1),
    # three slots are enough for the rule, too; what they cost is waiting
    row("3 slots, no collective, 1 crash", 2, no_collective(2), 7_155, 3, 4, slots=3, crashes=1),
    row("3 slots, 2 given up", 2, DP(2), 3_545, 1, slots=3, give_ups=2),
    row("3 slots, each publishes late", 2, DP(2), 8_991, 1, 4, slots=3, publishes_late=True),
    row("3 slots, news come late", 2, DP(2), 5_540, 1, 4, slots=3, reads="earlier"),
    row("3 slots, 3 hosts", 3, DP(3), 4_034, 1, 4, slots=3, hosts=HOSTS_3),
    row("3 slots, 2 hosts with 3 ranks", 3, DP(3), 12_026, 1, 4, slots=3, hosts=HOSTS_2_1),
]
WRONG = [
    wrong("copies keep what is common alone", mutants.DropsOlderThanCommon, HOST_LOST, 2, DP(2), 16),
    wrong("pools overwrite the copied one", mutants.OverwritesCopied, HOST_LOST, 2, DP(2), 106),
    wrong("pools overwrite what is due", mutants.OverwritesDue, HOST_LOST, 2, DP(2), 768),
    wrong("acknowledged before it is durable", mutants.CopiedTooEarly, HOST_LOST, 2, DP(2), 92),
    wrong("the older copy is dropped at the beginning", mutants.CopiesOverTheOlder, HOST_LOST, 2, DP(2), 20),
    wrong("the copy is on its own host", mutants.CopiesOnItsHost, HOST_LOST, 2, DP(2), 1),
    wrong("views end at the common one", mutants.TrimsAtCommon, HOST_LOST, 3, DP(3), 7_912, hosts=HOSTS_2_1, slots=3),
    wrong("written while it is copied", mutants.WritesWhileCopied, OVERWRITTEN, 2, DP(2), 987, give_ups=1),
    wrong("never common, and stays in the copy", mutants.ForgetsInCopy, STUCK, 2, DP(2), 1_912, give_ups=1, slots=3),
    wrong("recovery keeps the adopted one alone", mutants.KeepsAdoptedAlone, HOST_LOST, 2, DP(2), 77, crashes=1),
    wrong("recovery drops what is dead alone", mutants.KeepsAllInRecovery, STUCK, 2, DP(2), 1_329, crashes=1),
    wrong("goes on without copies", mutants.GoesOnWithoutCopies, HOST_LOST, 2, DP(2), 42, crashes=1),
    wrong("2 slots", Copies, STUCK, 2, DP(2), 10, slots=2),
    wrong("copies with 1 slot", Copies, STUCK, 2, DP(2), 46, copy_slots=1),
]


@pytest.mark.parametrize("row", SAFE, ids=[row.name for row in SAFE])
def test_any_host_can_be_lost(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", WRONG, ids=[row.name for row in WRONG])
def test_counterexample_is_found(row: Row) -> None:
    check(row)
