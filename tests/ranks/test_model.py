"""Every interleaving of small groups under the rule: each claim of the design is a row. What is wrong stays as a row
whose counterexample must be found."""

from __future__ import annotations

import pytest

from ranks import mutants
from ranks.carrying import Carries
from ranks.explore import explore
from ranks.model import Model
from ranks.rows import NO_COMMON, STUCK, Row, check, safe, wrong
from ranks.topology import data_parallel, mesh_2x2, no_collective, pipeline

NOT_HELD = "ranks adopt a checkpoint that one of them does not have"
DAMAGED = "if the newest checkpoint of one rank is damaged, the ranks have none in common"
DP = data_parallel
SAFE = [
    # several incarnations and crashes, from empty pools on; a record that a crash has kept may be lost in the next one
    safe("2 ranks, 2 crashes, from nothing", 2, DP(2), 1_313, 1, crashes=2, from_nothing=True),
    safe("3 ranks, 2 crashes, from nothing", 3, DP(3), 6_016, 1, crashes=2, from_nothing=True),
    safe("4 ranks, 1 crash", 4, DP(4), 1_161, 1, crashes=1),
    safe("4 ranks, 2 crashes", 4, DP(4), 12_030, 1, crashes=2),
    safe("2 ranks, last gate alone, 2 crashes", 2, DP(2, early=False), 1_938, 2, crashes=2),
    # news come late
    safe("3 ranks, 2 crashes, news come late", 3, DP(3), 5_254, 1, crashes=2, reads="earlier"),
    safe("4 ranks, 1 crash, news come late", 4, DP(4), 3_427, 1, crashes=1, reads="earlier"),
    safe("2 ranks, 2 crashes, pools read one by one", 2, DP(2), 5_447, 1, crashes=2, reads="one by one"),
    safe("2 ranks, give-ups, pools read one by one", 2, DP(2), 10_220, 1, give_ups=2, reads="one by one"),
    # checkpoints that are given up: any number over time
    safe("2 ranks, 2 given up, 2 crashes", 2, DP(2), 43_181, 1, give_ups=2, crashes=2),
    safe("2 ranks, 4 given up, last gate alone", 2, DP(2, early=False), 25_016, 2, give_ups=4, crashes=1),
    safe("3 ranks, 3 given up", 3, DP(3), 12_704, 1, give_ups=3),
    # arbitrary skips; the loss is bounded by the horizon alone
    safe("2 ranks, 2 left out in a row", 2, DP(2), 10_564, 7, skips=2, horizon=6),
    # topologies
    safe("mesh 2 x 2", 4, mesh_2x2(), 2_895, 2, reads="earlier"),
    safe("mesh 2 x 2, last gate alone", 4, mesh_2x2(early=False), 3_921, 2, reads="earlier"),
    safe("mesh 2 x 2, 1 crash", 4, mesh_2x2(), 9_866, 2, crashes=1),
    safe("2 stages, 3 given up, 1 crash", 2, pipeline(2), 30_915, 2, give_ups=3, crashes=1),
    safe("4 stages", 4, pipeline(4), 2_605, 2),
    safe("no collective, 2 given up, 1 crash", 2, no_collective(2), 14_298, 3, give_ups=2, crashes=1),
    safe("no collective, 3 ranks, 1 crash", 3, no_collective(3), 2_259, 3, crashes=1),
    # relayouts: each pool may have this many files of before at a time
    safe("relayouts, 2 ranks, 1 crash", 2, DP(2), 13_653, 1, files=1, crashes=1),
    safe("relayouts in a row, 2 ranks", 2, DP(2), 11_040, 1, files=2),
    safe("relayouts, no collective", 2, no_collective(2), 2_907, 6, files=1),
    # relayouts that carry over what must stay, as they are built
    safe("carried over, 2 ranks, 2 crashes", 2, DP(2), 4_101, 1, model=Carries, crashes=2),
    safe(
        "carried over, 2 ranks, 1 crash, news come late", 2, DP(2), 1_583, 1, model=Carries, crashes=1, reads="earlier"
    ),
    safe("carried over, 2 ranks, 2 given up, 1 crash", 2, DP(2), 25_504, 1, model=Carries, give_ups=2, crashes=1),
    safe("carried over, 3 ranks, 1 crash", 3, DP(3), 6_282, 1, model=Carries, crashes=1),
    safe("carried over, mesh", 4, mesh_2x2(), 9_350, 2, model=Carries),
    safe("carried over, no collective, 1 crash", 2, no_collective(2), 1_734, 3, model=Carries, crashes=1),
    # two slots, by the rule
    safe("2 slots, 2 crashes", 2, DP(2, early=False), 455, 2, slots=2, crashes=2),
    safe("2 slots, 3 given up", 2, DP(2, early=False), 65, 2, slots=2, give_ups=3),
    safe("2 slots, mesh", 4, mesh_2x2(), 124, 2, slots=2),
    safe("2 slots, no collective", 2, no_collective(2), 13, 2, slots=2),
    # the newest checkpoint of one rank is damaged: the one before is common too
    safe("damage, 2 ranks, 1 crash", 2, DP(2), 100, 1, damages=True, crashes=1),
    safe("damage, 3 ranks", 3, DP(3), 29, 1, damages=True),
    # records that are only visible do no harm here; nor does it harm to report what an adoption has left behind
    Row("not acknowledged, 4 stages", 4, pipeline(4), 2_605, {"loss": 2}, mutants.ReadsUnacknowledged, lost=2),
    Row("not acknowledged, mesh", 4, mesh_2x2(early=False), 697, {"loss": 2}, mutants.ReadsUnacknowledged, lost=2),
    # two given up in a row by one rank, with no checkpoint forced
    Row("2 given up in a row, never forced", 2, DP(2), 804, {"give_ups": 2}, mutants.NeverForces, lost=1),
    Row("all is reported", 2, DP(2), 43_181, {"crashes": 2, "give_ups": 2}, mutants.NoCounts, lost=1),
]
Counts, Unacknowledged, NeverForces = mutants.CountsSlots, mutants.ReadsUnacknowledged, mutants.NeverForces
LATE = DP(2, early=False)
WRONG = [
    wrong("2 slots are counted, last gate", Counts, NO_COMMON, 2, LATE, 12, slots=2),
    wrong("2 slots are counted, early gate, mesh", Counts, NO_COMMON, 4, mesh_2x2(), 77, slots=2),
    wrong("2 slots are counted, early gate, stages", Counts, NO_COMMON, 2, pipeline(2, early=True), 18, slots=2),
    wrong("3 slots are counted, given up in turn", Counts, NO_COMMON, 2, DP(2), 166, give_ups=3),
    wrong("3 slots are counted, given up in a row", mutants.CountsNeverForces, NO_COMMON, 2, DP(2), 100, give_ups=2),
    wrong("4 slots are counted, no collective", Counts, NO_COMMON, 2, no_collective(2), 41, slots=4),
    wrong("minimum of the newest", mutants.MinimumOfNewest, NO_COMMON, 2, DP(2), 149, skips=1),
    wrong("no incarnation", mutants.NoIncarnation, NOT_HELD, 2, DP(2), 247, crashes=2),
    wrong("not acknowledged, 2 slots", Unacknowledged, NO_COMMON, 2, pipeline(2), 18, slots=2),
    wrong("not acknowledged, 3 stages, 1 given up", Unacknowledged, NO_COMMON, 3, pipeline(3), 1_503, give_ups=1),
    wrong("not acknowledged, last gate, 2 given up", Unacknowledged, NO_COMMON, 2, LATE, 229, give_ups=2),
    wrong("not acknowledged, collective every third step", Unacknowledged, NO_COMMON, 2, DP(2, every=3), 28),
    wrong("not acknowledged, no collective", Unacknowledged, NO_COMMON, 2, no_collective(2), 28),
    wrong("relayout drops the file of before", mutants.DropsPredecessor, NO_COMMON, 2, DP(2), 6, files=1),
    wrong("relayout drops it at its commit", mutants.DropsPredecessorAfterCommit, NO_COMMON, 2, DP(2), 28, files=1),
    wrong("others do not see the file of before", mutants.HidesPredecessor, NO_COMMON, 2, DP(2), 24, files=1),
    wrong("the newest alone is carried over, last gate", mutants.CarriesNewestAlone, NO_COMMON, 2, LATE, 40),
    wrong("the newest alone is carried over, 1 crash", mutants.CarriesNewestAlone, NO_COMMON, 2, DP(2), 162, crashes=1),
    wrong("the common one alone is carried over", mutants.CarriesCommonAlone, NO_COMMON, 2, DP(2), 242),
    wrong("carried over under new names", mutants.CarriesUnderNewNames, NO_COMMON, 2, DP(2), 98, crashes=1),
    wrong("given up in a row, never forced", NeverForces, STUCK, 2, DP(2), 147, give_ups=3),
    wrong("design: 2 given up in a row", NeverForces, STUCK, 2, DP(2), 161, give_ups=2, uses_never_common=False),
    wrong("design: given up in turn", Model, STUCK, 2, DP(2), 203, give_ups=3, uses_never_common=False),
    wrong("3 left out in a row", Model, STUCK, 2, DP(2), 161, skips=3, horizon=6),
    wrong("reports of another attempt", mutants.ReportsOfAnotherAttempt, NOT_HELD, 2, pipeline(2), 201, crashes=2),
    wrong(
        "known from another attempt",
        mutants.KnownFromAnotherAttempt,
        NO_COMMON,
        2,
        no_collective(2),
        178,
        crashes=1,
        reads="earlier",
    ),
    wrong("newest is read late", mutants.NewestReadLate, NO_COMMON, 2, DP(2), 1_342, reads="one by one"),
    wrong("newest still held", mutants.NewestStillHeld, STUCK, 3, DP(3), 8_025, give_ups=3, hosts=((0, 1), (2,))),
    wrong("adoption is forgotten", mutants.ForgetsAdoption, STUCK, 2, DP(2), 1_441, crashes=2, give_ups=2),
    wrong("damage, last gate alone", Model, DAMAGED, 2, LATE, 12, damages=True),
    wrong("damage, 1 given up", Model, DAMAGED, 2, DP(2), 23, damages=True, give_ups=1),
]


@pytest.mark.parametrize("row", SAFE, ids=[row.name for row in SAFE])
def test_rule_is_safe_and_live(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", WRONG, ids=[row.name for row in WRONG])
def test_counterexample_is_found(row: Row) -> None:
    check(row)


@pytest.mark.parametrize(("n", "give_ups"), [(2, 1), (3, 0)])
def test_going_on_at_once_hides_nothing(n: int, give_ups: int) -> None:
    """Where the search lets ranks go on at once, the rows without that come to the same end."""
    at_once, one_by_one = (
        Model(n, data_parallel(n), crashes=1, give_ups=give_ups, is_eager=is_eager) for is_eager in (True, False)
    )
    few, many = explore(at_once), explore(one_by_one)
    assert (few.problem, at_once.lost_max) == (many.problem, one_by_one.lost_max) == (None, 1)
    assert few.states < many.states


def test_trace_names_ranks_and_steps_as_they_are() -> None:
    result = explore(mutants.CountsSlots(2, data_parallel(2, early=False), slots=2, loss=None))
    assert result.trace == (
        "  0. [1.0] [1.0]",
        "  1. rank 0 begins 1.1                             [1.0 1.1...] [1.0]",
        "  2. rank 1 begins 1.1                             [1.0 1.1...] [1.0 1.1...]",
        "  3. rank 0 stores the record of 1.1               [1.0 1.1?] [1.0 1.1...]",
        "  4. rank 0 has committed 1.1                      [1.0 1.1] [1.0 1.1...]",
        "  5. rank 0 begins 1.2 over 1.0                    [1.1 1.2...] [1.0 1.1...]",
    )
