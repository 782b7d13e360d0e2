"""``inspect``, ``verify``, ``export`` and ``diff`` on the directory of a group of ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from calls import call, call_json
from ranked import run_ranks, values
from ranks.test_attach import damage
from ranks.trainings import TOPOLOGIES, body
from toys import pool_with

import lightck
from lightck.cli import diff, diff_directories
from lightck.cli.base import BAD, FAILED, OK
from lightck.errors import NoCheckpointError, PoolLockedError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pools = tmp_path_factory.mktemp("group") / "pools"
    values(run_ranks(2, body(TOPOLOGIES["fsdp"], pools, 4)))
    return pools


@pytest.fixture
def pools(made: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "pools"
    copy.mkdir()
    for path in made.glob("*.pool"):
        (copy / path.name).write_bytes(path.read_bytes())
        (copy / path.name).chmod(0o600)
    return copy


def test_inspect_shows_ranks_their_checkpoints_and_what_is_common(pools):
    status, facts = call_json("inspect", pools)
    assert status == OK
    assert [one["group"]["rank"] for one in facts["pools"]] == [0, 1]
    assert facts["common"] == [{"incarnation": 1, "step": step} for step in (4, 3, 2)]
    text = call("inspect", pools).stdout
    assert "0 of 2  step 4*, step 3*, step 2*" in text
    assert "step 4 is the newest that all ranks have" in text


def test_a_star_marks_a_checkpoint_and_not_each_one_of_its_step(pools, made):
    """Two ranks went on from step 4, and three ranks went on from copies of these pools. Their steps 5 are two."""
    values(run_ranks(2, body(TOPOLOGIES["fsdp"], pools, 5)))
    of_two = {path: path.read_bytes() for path in pools.glob("*.pool")}
    for path in of_two:
        path.write_bytes((made / path.name).read_bytes())
    values(run_ranks(3, body(TOPOLOGIES["fsdp 3"], pools, 5)))
    for path, data in of_two.items():
        path.write_bytes(data)
        path.chmod(0o600)
    found = set(re.findall(r"of (\d) +step 5(\*?), step 4\*", call("inspect", pools).stdout))
    assert found in ({("2", "*"), ("3", "")}, {("2", ""), ("3", "*")}), "one world is the newest"


def test_inspect_shows_which_ranks_hold_which_parts(pools, tmp_path):
    status, facts = call_json("inspect", "--pieces", pools)
    assert (status, facts["step"]) == (OK, 4)
    tensors = {one["name"]: one for one in facts["tensors"]}
    pieces = tensors["model/first.weight"]["pieces"]
    assert tensors["model/first.weight"]["shape"] == [600, 3]
    assert [(one["rank"], one["start"], one["size"]) for one in pieces] == [
        (0, [0, 0], [300, 3]),
        (1, [300, 0], [300, 3]),
    ]
    assert [Path(one["path"]) for one in pieces] == sorted(pools.glob("*.pool"))
    text = call("inspect", "--pieces", pools, "--step", 3).stdout
    assert text.startswith("step 3: ")
    assert re.search(r"model/first\.weight +600x3 +rank 1 +\(300, 0\) +300x3", text)
    assert re.search(r"model/calls +scalar +ranks 0, 1 +\(\) +scalar", text)
    assert call("inspect", "--pieces", "--tensors", pools).exit_code == FAILED
    assert call("inspect", "--pieces", pools / "rank-00000-of-00002.pool").exit_code == FAILED


def test_the_commands_read_ranks_that_divide_shards(pool, tmp_path):
    pools, topology = pool.parent / "hsdp", TOPOLOGIES["hsdp"]
    values(run_ranks(4, body(topology, pools, 3)))
    values(run_ranks(4, body(topology, pool.parent / "whole", 3, split=False)))
    assert call("verify", pools).exit_code == OK
    _, facts = call_json("inspect", "--pieces", pools)
    pieces = {one["name"]: one["pieces"] for one in facts["tensors"]}
    assert {one["rank"] for many in pieces.values() for one in many} == {0, 1, 2, 3}
    assert sum(one["size"][0] for one in pieces["model/first.weight"]) == 600, "each row is written once"
    assert call("diff", pools, pools).exit_code == OK
    _, found = call_json("diff", pools, pool.parent / "whole")
    assert (found["tensors"], found["compared_tensors"] > 0) == ([], True)
    out = tmp_path / "model.safetensors"
    assert call("export", pools, out).exit_code == OK
    expected = lightck.recover(pool.parent / "whole")
    for name, value in safetensors.torch.load_file(out).items():
        assert torch.equal(value, expected.tensor(f"model/{name}"))
    assert call("reshard", pools, tmp_path / "out", "--world", 3).exit_code == OK
    assert torch.equal(
        lightck.recover(tmp_path / "out").tensor("model/first.weight"), expected.tensor("model/first.weight")
    )
    for name in ("rank-00003-of-00004.pool", "rank-00001-of-00004.pool"):
        _, facts = call_json("inspect", "--tensors", pools / name)
        share = {one["name"]: one["share"] for one in facts["shown"]["all_tensors"]}["model/first.weight"]
        assert (share["held_shape"], share["ranks"], share["whole"]) == ([300, 3], [1, 3], False)
    (pools / "rank-00003-of-00004.pool").unlink()
    assert call("verify", pools).exit_code != OK


def test_inspect_shows_the_parts_in_the_pool_of_a_single_process(pool):
    pool_with(pool)
    status, facts = call_json("inspect", "--pieces", pool)
    assert (status, facts["step"], facts["tensors"][0]["pieces"][0]["rank"]) == (OK, 3, None)
    assert re.search(r"model/0\.weight +8x4 +the pool +\(0, 0\) +8x4", call("inspect", "--pieces", pool).stdout)


def test_verify_puts_the_parts_together(pools):
    status, facts = call_json("verify", pools)
    assert (status, facts["ok"], facts["recoverable_step"]) == (OK, True, 4)
    assert "step 4 is intact on all ranks, and the parts of its tensors are complete" in call("verify", pools).stdout


def test_verify_finds_damage_in_the_part_of_one_rank(pools):
    damage(pools / "rank-00001-of-00002.pool", 4)
    status, facts = call_json("verify", pools)
    assert (status, facts["ok"], facts["recoverable_step"]) == (BAD, False, 3)
    assert "rank-00001-of-00002.pool: damaged" in call("verify", pools).stdout


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_missing_rank_is_named(pools, command):
    (pools / "rank-00000-of-00002.pool").unlink()
    status, facts = call_json(command, pools)
    assert status == BAD
    assert "lacks the pool of rank 0" in facts["problem"]
    assert "lacks the pool of rank 0" in call(command, pools).stdout


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_file_that_is_no_pool_is_named(pools, command):
    (pools / "rank-00000-of-00002.pool").write_bytes(b"mine" * 4096)
    status, facts = call_json(command, pools)
    assert status == BAD
    assert "is not a lightck pool" in facts["pools"][0]["error"]


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_directory_without_pools_is_an_error(tmp_path, command):
    done = call(command, tmp_path)
    assert done.exit_code == FAILED
    assert "It holds no pool of a rank" in done.stderr


def test_options_of_one_pool_are_refused(pools):
    assert "Pass the file of a rank" in call("inspect", "--tensors", pools).stderr
    assert "Pass the file of a rank" in call("verify", "--step", "3", pools).stderr


def test_export_writes_whole_tensors(pools, tmp_path):
    call("export", pools, tmp_path / "model.safetensors")
    exported = safetensors.torch.load_file(tmp_path / "model.safetensors")
    model = lightck.recover(pools).model
    assert exported.keys() == model.keys()
    assert all(torch.equal(exported[name], model[name]) for name in model)


def test_diff_of_equal_directories_finds_nothing(made, pools):
    status, facts = call_json("diff", made, pools)
    assert (status, facts["equal"]) == (OK, True)
    assert [facts[side]["step"] for side in "ab"] == [4, 4]
    assert "EQUAL, bit for bit" in call("diff", made, pools).stdout


def test_diff_names_the_rank_whose_part_differs(made, pools):
    status, facts = call_json("diff", pools, "--steps", 3, 4)
    assert (status, facts["equal"]) == (BAD, False)
    assert {(one["rank"], one["tensor"]) for one in facts["tensors"]} >= {
        (0, "model/first.weight"),
        (1, "model/first.weight"),
    }
    assert {(one["rank"], one["path"]) for one in facts["values"]} >= {(0, "step"), (1, "step")}
    text = call("diff", pools, "--steps", 3, 4).stdout
    assert "rank 1: model/first.weight" in text
    assert "rank 0: step: 3 -> 4" in text


def test_diff_of_other_numbers_of_ranks_compares_whole_tensors(made, tmp_path):
    torch.manual_seed(0)
    alone = TOPOLOGIES["fsdp"].model()
    lightck.recover(made, alone)
    pool = tmp_path / "alone.pool"
    with lightck.attach(alone, pool, optimizer=[]) as session:
        session.end_step()
    status, facts = call_json("diff", made, pool)
    differing = [one for one in facts["tensors"] if one["change"] == "values"]
    assert status == BAD
    assert differing == []  # the parameters are equal; the optimizer is in one of them only
    assert {one["change"] for one in facts["tensors"]} <= {"only in A"}
    assert not any("rank" in one for one in facts["values"])


def test_diff_names_a_step_that_the_ranks_do_not_have(pools):
    result = call("diff", pools, pools, "--steps", 4, 9)
    assert result.exit_code == FAILED
    assert "have no checkpoint of step 9 in common" in result.stderr


def test_diff_of_a_damaged_part_fails_and_names_the_rank(made, pools):
    damage(pools / "rank-00001-of-00002.pool", 4)
    result = call("diff", made, pools)
    assert result.exit_code == FAILED
    assert "rank-00001-of-00002.pool" in result.stderr


def test_diff_of_a_directory_in_use_tries_again_when_a_checkpoint_was_overwritten(made, pools, monkeypatch):
    """``compare_pools`` fails as it does when the training has gone on since the common step was chosen."""
    failures = iter([True, True])

    def once_overwritten(*args):
        if next(failures, False):
            raise NoCheckpointError("overwritten")
        return diff.differences(*args)

    monkeypatch.setattr(diff_directories, "holder_of", lambda path: "a training")
    facts = diff_directories.differences(str(made), str(pools), (None, None), once_overwritten)
    assert facts["equal"]

    def always_overwritten(*_):
        raise NoCheckpointError("overwritten")

    with pytest.raises(PoolLockedError, match="a training has them open, and in each of 20 attempts"):
        diff_directories.differences(str(made), str(pools), (None, None), always_overwritten)
    with pytest.raises(NoCheckpointError):
        diff_directories.differences(str(made), str(pools), (4, 4), always_overwritten)
    monkeypatch.setattr(diff_directories, "holder_of", lambda path: None)
    with pytest.raises(NoCheckpointError):
        diff_directories.differences(str(made), str(pools), (None, None), always_overwritten)


def test_diff_of_shares_and_whole_copies_compares_whole_tensors(tmp_path):
    for name, split in (("shares", True), ("more shares", True), ("copies", False)):
        values(run_ranks(2, body(TOPOLOGIES["ddp split"], tmp_path / name, 4, split=split)))
    status, facts = call_json("diff", tmp_path / "shares", tmp_path / "copies")
    assert facts["tensors"] == []
    assert facts["compared_tensors"] == 21
    assert {one["path"].partition("/")[0] for one in facts["values"]} <= {"rng"}
    assert not any("rank" in one for one in facts["values"])
    status, facts = call_json("diff", tmp_path / "shares", tmp_path / "more shares")
    assert (facts["tensors"], facts["compared_tensors"]) == ([], 42)
    assert status in (OK, BAD)


def test_inspect_says_that_a_resume_goes_on_if_the_other_pools_hold_everything(tmp_path, pools):
    values(run_ranks(2, body(TOPOLOGIES["ddp"], tmp_path / "whole", 3)))
    (tmp_path / "whole" / "rank-00001-of-00002.pool").unlink()
    (pools / "rank-00001-of-00002.pool").unlink()
    words = "resume=True) also works without what is missing"
    for path, is_said in ((tmp_path / "whole", True), (pools, False)):
        _, facts = call_json("inspect", path)
        assert (words in facts["problem"]) == is_said
