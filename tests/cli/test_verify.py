"""``lightck verify`` finds and names every kind of damage, and does not report what a kill leaves as damage."""

from __future__ import annotations

import pytest
from calls import call, call_json
from toys import adam, checkpoints, damage, flip, kill_at, killed_child, net, pool_with, train

import lightck
from lightck.cli.base import BAD, OK
from lightck.pool.reader import open_pool

LINES = 16


def superblock(pool):
    reader = open_pool(str(pool))
    try:
        return reader.superblock
    finally:
        reader.close()


def position_of(record, pool):
    reader = open_pool(str(pool))
    try:
        return next(position for position, other in reader.commit_log().records.items() if other == record)
    finally:
        reader.close()


def structures(facts):
    return {s["name"]: s["note"] for s in facts["structures"] if s["damaged"]}


def test_a_damaged_tensor_is_named_with_its_block(good):
    damage(good, "optimizer/0.weight/exp_avg", [4])
    status, facts = call_json("verify", good)
    assert status == 1
    newest = facts["checkpoints"][0]
    assert newest["damage"] == [
        {
            "tensor": "optimizer/0.weight/exp_avg",
            "reason": "block 0 of 'optimizer/0.weight/exp_avg' does not match its checksum",
            "logical_shape": None,
        },
    ]
    assert facts["recoverable_step"] == 3 == lightck.recover(good).step


def test_only_deep_reads_the_blocks_of_older_checkpoints(good):
    damage(good, "model/0.weight", [2])
    status, facts = call_json("verify", good)
    assert (status, [v["blocks"] for v in facts["checkpoints"]]) == (0, ["verified", "not read", "not read"])
    status, facts = call_json("verify", good, "--deep")
    assert (status, [v["blocks"] for v in facts["checkpoints"]]) == (1, ["verified", "verified", "damaged"])
    assert call("verify", good, "--step", 2).exit_code == 1
    assert call("verify", good, "--step", 3).exit_code == 0


def test_the_verdict_on_a_requested_step_says_how_to_take_that_step(good):
    flip(good, 50)  # a copy of the superblock: the pool can be used all the same
    assert "Step 3 is intact: recover(..., step=3) uses it." in call("verify", good, "--step", 3).stdout
    assert "Step 4 is intact: a recovery uses it." in call("verify", good).stdout


def test_every_damaged_tensor_is_counted_and_the_text_stays_short(good):
    for name in checkpoints(good)[0].entries:
        damage(good, name, [4])
    _, facts = call_json("verify", good)
    assert len(facts["checkpoints"][0]["damage"]) == 16
    result = call("verify", good)
    assert "and 6 more tensors" in result.stdout
    assert len(result.stdout.splitlines()) < 20


@pytest.mark.parametrize("copy", [0, 1])
def test_each_copy_of_superblock_and_table_is_checked(good, copy):
    sb = superblock(good)
    flip(good, copy * 4096 + 50)
    flip(good, sb.table_offsets[copy] + 9)
    status, facts = call_json("verify", good)
    assert status == 1
    assert set(structures(facts)) == {f"superblock {'AB'[copy]}", f"layout table {'AB'[copy]}"}
    assert facts["recoverable_step"] == 4


def test_a_damaged_commit_record_and_a_damaged_header_are_found(good):
    sb, newest = superblock(good), checkpoints(good)[0]
    position = position_of(newest.record, good)
    flip(good, sb.commit_record_offset(position) + 20)
    flip(good, sb.slots[newest.record.slot][0] + 3)
    status, facts = call_json("verify", good)
    assert status == 1
    assert set(structures(facts)) == {f"commit record {position}", f"header of slot {newest.record.slot}"}
    assert facts["recoverable_step"] == 3


def test_a_damaged_header_of_a_slot_without_a_checkpoint_names_none(pool):
    pool_with(pool, steps=1, slots=4)
    used = {one.record.slot for one in checkpoints(pool)}
    slot = next(number for number in range(4) if number not in used)
    flip(pool, superblock(pool).slots[slot][0] + 3)
    status, facts = call_json("verify", pool)
    assert status == BAD
    note = structures(facts)[f"header of slot {slot}"]
    assert note == "it is damaged. No commit record names a checkpoint in this slot"


def test_a_damaged_manifest_is_found(good):
    newest = checkpoints(good)[0]
    sb, record = newest.reader.superblock, newest.record
    flip(good, sb.slots[record.slot][0] + sb.manifest_offset + record.manifest_index * sb.manifest_nbytes + 200)
    status, facts = call_json("verify", good)
    assert status == 1
    assert facts["checkpoints"][0]["damage"] == [
        {"tensor": None, "reason": "its manifest does not match the commit record", "logical_shape": None}
    ]


@pytest.mark.parametrize("site", ["header", "block", "manifest", "sealed", "body", "word", "ack"])
def test_what_a_kill_leaves_behind_is_no_damage(pool, site):
    pool_with(pool, steps=LINES + 4)  # the commit log is full: each record overwrites an old one

    def die():
        model = net()
        optimizer = adam(model)
        kill_at(site, 3)
        with lightck.attach(model, pool, optimizer=optimizer, resume=True):
            train(model, optimizer, 6)

    killed_child(die)
    status, facts = call_json("verify", pool, "--deep")
    assert status == 0, facts
    assert facts["recoverable_step"] == lightck.recover(pool).step


def test_a_restart_that_was_killed_in_its_adoption_record_is_no_damage(pool):
    pool_with(pool, steps=LINES + 4)

    def die():
        model = net()
        kill_at("body", 1)
        lightck.attach(model, pool, optimizer=adam(model), resume=True)

    killed_child(die)
    status, facts = call_json("verify", pool)
    assert status == 0, facts
    assert [s["note"] for s in facts["structures"] if s["note"]] == [
        "its write was not finished, as after a kill during a commit; the checkpoint of this record is not used"
    ]


def test_every_flipped_bit_of_a_used_commit_record_is_damage(good):
    """A record with a flipped bit is not mistaken for one that was cut off."""
    sb, content = superblock(good), good.read_bytes()
    used = position_of(checkpoints(good)[0].record, good)
    for byte in (0, 1, 7, *range(8, 64, 5)):
        flip(good, sb.commit_record_offset(used) + byte)
        status, facts = call_json("verify", good)
        assert (status, set(structures(facts))) == (1, {f"commit record {used}"}), byte
        good.write_bytes(content)


def test_a_pool_whose_commit_records_are_erased_is_damaged(good, tmp_path):
    erased = tmp_path / "erased.pool"
    assert call("inject", good, erased, "--zero-page", "line").exit_code == OK
    result = call("verify", erased)
    assert result.exit_code == BAD
    assert "all records are erased" in result.stdout
    assert "empty" not in result.stdout
