"""``decide``: from the reports of all ranks to the checkpoint that they restore, a new training, or an error."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightck.errors import CheckpointExistsError, RankError
from lightck.ranks.agreement import Report, decide, describe_not_exact, describe_replaced, refuse_differences
from lightck.ranks.rule import CheckpointId, newest_common

RUN, WORLD = b"r" * 16, b"w" * 16
ARGUMENTS = {"interval=": "1", "resume=": "True"}


def report(*steps: int | tuple[int, int], run: bytes = RUN, incarnation: int | None = None, **fields) -> Report:
    """The report of a rank that holds these checkpoints: a step of incarnation 1, or (incarnation, step)."""
    ids = tuple(step if isinstance(step, tuple) else (1, step) for step in steps)
    seen = max((at for at, _ in ids), default=0) if incarnation is None else incarnation
    return Report(
        **{
            "host": "h",
            "boot_id": "b",
            "directory": "/d",
            "directory_id": "p",
            "arguments": ARGUMENTS,
            "tensors": "t",
            "new_ids": b"n" * 16 + b"m" * 16,
            "run_id": run if ids else b"",
            "world_id": WORLD if ids else b"",
            "checkpoints": ids,
            "incarnation": seen,
        }
        | fields
    )


def test_a_report_survives_packing():
    one = report(3, (2, 4), run_id=bytes(range(16)))
    assert Report.unpack(one.pack()) == one


def test_the_report_of_another_release_is_named():
    for data in (b"\x81\xa1x\x01", b"\x01", b"\x81"):
        with pytest.raises(RankError, match="the same release of lightck"):
            Report.unpack(data)


def test_a_report_takes_at_most_a_kibibyte():
    ids = [(1 << 40, (1 << 40) + i) for i in range(8)]
    one = report(*ids, host="h" * 64, directory="d" * 200, boot_id="b" * 36, directory_id="p" * 64, tensors="t" * 32)
    assert len(one.pack()) <= 1024


def test_all_resume_at_the_newest_common_checkpoint_with_one_incarnation_more():
    start = decide([report(4, 5), report(3, 4, incarnation=6)], resume=True, overwrite=False)
    assert start.adopted == CheckpointId(1, 4)
    assert 7 <= start.incarnation < 7 + (1 << 20)
    assert (start.run_id, start.world_id) == (RUN, WORLD)


def test_histories_that_went_on_from_two_copies_have_nothing_in_common():
    """Each start after a copy agrees on an incarnation of its own, so steps with the same number are not common."""
    one, other = (
        decide([replace(report(4, 5), new_ids=bytes([n]) * 32)] * 2, resume=True, overwrite=False).incarnation
        for n in (1, 2)
    )
    assert one != other
    with pytest.raises(RankError, match="of different histories: the training continued from two copies"):
        decide([report((one, 9), (one, 10)), report((other, 9), (other, 10))], resume=True, overwrite=False)


def test_one_step_of_two_incarnations_is_not_common():
    with pytest.raises(
        RankError, match=r"no intact checkpoint in common: rank 0 \(host h\) holds step 4; rank 1 \(host h\)"
    ):
        decide([report((1, 4)), report((2, 4))], resume=True, overwrite=False)


def test_without_pools_a_new_training_begins():
    start = decide([report(), report()], resume=True, overwrite=False)
    assert start.adopted is None
    assert start.incarnation == 1
    assert (start.run_id, start.world_id) == (b"n" * 16, b"m" * 16)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("second_is_damaged", [False, True])
def test_pools_without_an_intact_checkpoint_are_not_overwritten(resume, second_is_damaged):
    """Each pool is damaged, or one is and the other is lost."""
    damaged = report(run_id=RUN, world_id=WORLD, is_damaged=True)
    reports = [damaged, damaged if second_is_damaged else report()]
    with pytest.raises(RankError, match=r"No checkpoint in the pool of rank 0 \(host h\) is intact"):
        decide(reports, resume=resume, overwrite=False)
    assert decide(reports, resume=resume, overwrite=True).adopted is None


@pytest.mark.parametrize("resume", [False, True])
def test_a_start_that_was_cut_off_begins_anew(resume):
    """Rank 0 had committed checkpoint 0, and rank 1 had no pool yet."""
    assert decide([report(0), report()], resume=resume, overwrite=False).adopted is None


def test_two_starts_that_were_cut_off_begin_anew():
    assert decide([report(0), report(0, run=b"o" * 16)], resume=True, overwrite=False).adopted is None


def test_checkpoint_0_is_resumed_if_all_have_it():
    assert decide([report(0), report(0)], resume=True, overwrite=False).adopted == CheckpointId(1, 0)


def test_checkpoints_are_not_overwritten_unasked():
    with pytest.raises(CheckpointExistsError, match=r"rank 0 \(host h\) holds step 3, 4; rank 1 .* holds nothing"):
        decide([report(3, 4), report()], resume=False, overwrite=False)
    assert decide([report(3, 4), report()], resume=False, overwrite=True).adopted is None


def test_a_lost_pool_is_taken_from_the_lowest_rank_that_has_one():
    start = decide([report(), report(3, 4), report(), report(4, 5)], resume=True, overwrite=False)
    assert start.adopted == CheckpointId(1, 4)
    assert start.sources == {0: 1, 2: 1}
    assert (start.run_id, start.world_id) == (RUN, WORLD)


def test_a_pool_without_checkpoints_of_the_same_run_is_lost():
    start = decide([report(0, 3), report(run_id=RUN, world_id=WORLD)], resume=True, overwrite=False)
    assert (start.adopted, start.sources) == (CheckpointId(1, 3), {1: 0})


def test_a_pool_is_lost_also_if_the_others_have_only_checkpoint_0_in_common():
    start = decide([report(0), report(0, 1), report()], resume=True, overwrite=False)
    assert (start.adopted, start.sources) == (CheckpointId(1, 0), {2: 0})


def test_a_lost_pool_is_taken_only_from_the_same_host():
    reports = [report(3, directory_id="p"), report(3, directory_id="q"), report(directory_id="q", host="other")]
    assert decide(reports, resume=True, overwrite=False).sources == {2: 1}
    with pytest.raises(
        RankError, match=r"pool of rank 2 \(host other\) is lost.*No other rank on that host has a pool"
    ):
        decide([reports[0], reports[0], reports[2]], resume=True, overwrite=False)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_part_is_named(rank):
    """Either the checkpoints have parts, or the model of the lost rank has."""
    reports = [report(3, 4), report(host="b")]
    reports[rank] = replace(reports[rank], has_parts=True)
    with pytest.raises(RankError) as caught:
        decide(reports, resume=True, overwrite=False)
    assert str(caught.value).startswith(
        "The pool of rank 1 (host b) is lost: the directory '/d' has no pool of rank 1 with a checkpoint, neither "
        "under the name 'rank-00001-of-00002.pool' nor under another one. No other pool has what this rank wrote"
    )


def test_a_damaged_pool_is_not_lost():
    reports = [report(3, 4), report(run_id=RUN, world_id=WORLD, is_damaged=True)]
    with pytest.raises(
        RankError, match=r"No checkpoint in the pool of rank 1 \(host h\) is intact.*remove the damaged pool"
    ):
        decide(reports, resume=True, overwrite=False)


def test_a_pool_of_another_training_is_not_lost():
    other = report(run_id=b"o" * 16, world_id=WORLD)
    with pytest.raises(RankError, match=r"pool of rank 1 \(host h\) belongs to another training"):
        decide([report(3, 4), other], resume=True, overwrite=False)


def test_a_struck_checkpoint_is_not_taken_for_a_lost_pool():
    unrestorable = {CheckpointId(1, 4): "rank 0 is damaged"}
    start = decide([report(3, 4), report()], resume=True, overwrite=False, unrestorable=unrestorable)
    assert (start.adopted, start.sources) == (CheckpointId(1, 3), {1: 0})
    with pytest.raises(RankError, match="No checkpoint that all ranks have can be restored"):
        decide([report(4), report()], resume=True, overwrite=False, unrestorable=unrestorable)


def test_without_resume_a_lost_pool_is_not_taken():
    with pytest.raises(CheckpointExistsError):
        decide([report(3), report()], resume=False, overwrite=False)


@pytest.mark.parametrize(("n_more", "words"), [(1, "1 more rank"), (2, "2 more ranks")])
def test_the_ranks_that_a_message_does_not_list_are_counted(n_more, words):
    assert describe_not_exact(["it lost a pool"] * (2 + n_more)).endswith(f"; so it is on {words}")
    reports = [report(rank) for rank in range(1, 9 + n_more)]
    with pytest.raises(RankError, match=f"holds step 8; and {words}\\. Nothing was overwritten"):
        decide(reports, resume=True, overwrite=False)


def test_what_was_replaced_is_described():
    assert describe_replaced({}) == ""
    text = describe_replaced({3: 1, 0: 1})
    assert text.startswith("the pool of rank 0 was lost: its tensors, ")
    assert "those of rank 1, and its random states are new; the pool of rank 3 was lost" in text


def test_pools_of_two_trainings_are_named():
    with pytest.raises(RankError, match=r"pool of rank 1 \(host h\) belongs to another training than that of rank 0"):
        decide([report(3), report(3, run=b"o" * 16)], resume=True, overwrite=False)


def test_a_struck_checkpoint_is_not_chosen_again():
    reports = [report(3, 4), report(3, 4)]
    unrestorable = {CheckpointId(1, 4): "rank 1 is damaged"}
    assert decide(reports, resume=True, overwrite=False, unrestorable=unrestorable).adopted == CheckpointId(1, 3)
    unrestorable[CheckpointId(1, 3)] = "rank 0 is damaged"
    with pytest.raises(RankError, match=r"No checkpoint that all ranks.*step 4: rank 1 is.*step 3: rank 0 is damaged"):
        decide(reports, resume=True, overwrite=False, unrestorable=unrestorable)


def test_if_all_are_struck_checkpoint_0_is_not_begun_anew():
    with pytest.raises(RankError):
        decide([report(0), report(0)], resume=True, overwrite=False, unrestorable={CheckpointId(1, 0): "damaged"})


ids = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), max_size=4, unique=True)


@given(st.lists(ids, min_size=2, max_size=4), st.booleans())
def test_the_decision_is_that_of_the_rule(held, overwrite):
    reports = [report(*checkpoints) for checkpoints in held]
    lost = {rank for rank, checkpoints in enumerate(held) if not checkpoints}
    is_any_above_0 = any(step for checkpoints in held for _, step in checkpoints)
    common = newest_common([one.ids for one in reports if one.checkpoints])
    if lost and not is_any_above_0:
        common, lost = None, set()  # a start that was cut off
    try:
        start = decide(reports, resume=not overwrite, overwrite=overwrite)
    except RankError:
        assert common is None
        assert is_any_above_0
        return
    assert start.adopted == (None if overwrite else common)
    assert start.sources.keys() == (set() if overwrite else lost)
    assert all(start.adopted in reports[source].ids for source in start.sources.values())
    if start.adopted is not None:
        assert start.incarnation > max(at for checkpoints in held for at, _ in checkpoints)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"arguments": {**ARGUMENTS, "interval=": "2"}},
            RankError,
            r"interval= of lightck.attach is 1 on rank 0 \(host h\) and 2 on rank 1 \(host h\)",
        ),
        (
            {"directory_id": "q", "directory": "/e"},
            RankError,
            r"The directory '/d' on rank 0 \(host h\) is not the directory '/e' on rank 1 \(host h\)",
        ),
    ],
)
def test_differences_are_named(fields, error, message):
    with pytest.raises(error, match=message):
        refuse_differences([report(), replace(report(), **fields)])
    refuse_differences([report(), report()])


@pytest.mark.parametrize(
    "fields",
    [
        {"directory_id": "q"},  # containers on one host, each with a directory of its own
        {"boot_id": "c", "directory_id": "q"},
        {"boot_id": "c", "directory_id": "q", "directory": "/e"},
    ],
)
def test_hosts_may_have_a_directory_each(fields):
    refuse_differences([report(), replace(report(), **fields)])


def test_directories_are_compared_on_each_host():
    elsewhere = replace(report(), boot_id="c", directory_id="r", directory="/e")
    refuse_differences([report(), elsewhere, elsewhere])
    with pytest.raises(RankError, match=r"'/e' on rank 1 .* is not the directory '/f' on rank 2"):
        refuse_differences([report(), elsewhere, replace(elsewhere, directory_id="s", directory="/f")])
