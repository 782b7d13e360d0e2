"""``lightck reshard``: the pools of another number of ranks, which that number of ranks takes as its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from calls import call, call_json
from ranked import run_ranks, values
from ranks import worlds
from ranks.test_worlds import attached
from ranks.worlds import WORLDS, Whole, World, build, is_equal, whole_of

import lightck
from lightck.cli.base import FAILED, OK
from lightck.ranks.directory import pool_name

STEPS = 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Whole]:
    pools = tmp_path_factory.mktemp("reshard") / "pools"
    return pools, worlds.train("fsdp 3", pools, STEPS)[0]


@pytest.mark.parametrize(
    ("new", "options"), [("fsdp 2", []), ("fsdp 4", []), ("ddp 2", ["--replicated"]), ("fsdp 3", [])]
)
def test_the_new_pools_are_taken_as_they_are(trained, pool, new, options):
    pools, expected = trained
    out, n_ranks = pool.parent / "out", WORLDS[new].n_ranks
    before = {path.name: path.read_bytes() for path in pools.glob("*.pool")}
    shown = call("reshard", pools, out, "--world", n_ranks, *options)
    assert shown.exit_code == OK
    assert shown.stdout.startswith(f"step {STEPS}: {n_ranks} pools")
    assert {path.name: path.read_bytes() for path in pools.glob("*.pool")} == before
    names = [pool_name(rank, n_ranks) for rank in range(n_ranks)]
    assert sorted(path.name for path in out.iterdir()) == names
    assert call("verify", out).exit_code == OK
    inodes = {(out / name).stat().st_ino for name in names}
    for began, ended, recovered in values(run_ranks(n_ranks, attached(new, out))):
        assert is_equal(began, expected)
        assert ended.step == STEPS + 2
        assert not recovered.exact
    assert {(out / name).stat().st_ino for name in names} == inodes, "the pools of other ranks would get new files"


def test_a_single_process_takes_the_pool_of_a_world_of_one(trained, pool):
    pools, expected = trained
    out = pool.parent / "out"
    status, facts = call_json("reshard", pools, out, "--world", 1, "--step", STEPS - 1)
    assert status == OK
    assert facts["step"] == STEPS - 1
    assert facts["paths"] == [str(out / pool_name(0, 1))]
    assert facts["nbytes"] == (out / pool_name(0, 1)).stat().st_size
    call("reshard", pools, pool.parent / "newest", "--world", 1)
    model, optimizer = build(World(1), seed=1)
    with lightck.attach(model, pool.parent / "newest", optimizer=optimizer, resume=True) as session:
        assert is_equal(whole_of(session.step, model, optimizer), expected)


def test_a_folder_with_files_is_left_alone(trained, pool):
    out = pool.parent / "out"
    out.mkdir()
    (out / "notes").write_text("mine")
    failed = call("reshard", trained[0], out, "--world", 2)
    assert failed.exit_code == FAILED
    assert "exists and is not an empty folder. Nothing was written" in failed.stderr
    assert [path.name for path in out.iterdir()] == ["notes"]


def test_a_file_is_refused(trained, pool):
    failed = call("reshard", trained[0] / pool_name(0, 3), pool.parent / "out", "--world", 2)
    assert failed.exit_code == FAILED
    assert "is no directory" in failed.stderr


def test_after_an_error_no_pool_is_left(trained, pool):
    pools, out = pool.parent / "pools", pool.parent / "out"
    shutil.copytree(trained[0], pools)
    (pools / pool_name(2, 3)).unlink()
    failed = call("reshard", pools, out, "--world", 2)
    assert failed.exit_code == FAILED
    assert "no pool holds the part of size" in failed.stderr
    assert list(out.iterdir()) == []


def test_tensors_have_the_same_bits_after_two_turns(trained, pool):
    """Three ranks to five, and back to three."""
    pools, expected = trained
    five, three = pool.parent / "five", pool.parent / "three"
    call("reshard", pools, five, "--world", 5)
    call("reshard", five, three, "--world", 3)
    checkpoint = lightck.recover(three)
    assert all(torch.equal(value, expected.model[name]) for name, value in checkpoint.model.items())
    assert all(torch.equal(checkpoint.tensor(f"optimizer/{name}"), value) for name, value in expected.state.items())
    same = json.loads(call("diff", pools, three, "--json").stdout)
    assert same["tensors"] == []


def test_the_pool_of_a_single_process_that_stands_for_a_world_of_one(pool):
    """It was moved into a directory, and no group has taken it yet."""
    alone, out = pool.parent / "alone", pool.parent / "out"
    alone.mkdir()
    model, optimizer = build(World(1))
    with lightck.attach(model, alone / "run.pool", optimizer=optimizer) as session:
        worlds.updates(World(1), 0, model, optimizer, range(STEPS))
    expected = whole_of(session.step, model, optimizer)
    (alone / "run.pool").rename(alone / pool_name(0, 1))
    assert call("inspect", alone).exit_code == OK
    assert call("verify", alone).exit_code == OK
    assert call("reshard", alone, out, "--world", 2).exit_code == OK
    assert json.loads(call("diff", alone, out, "--json").stdout)["tensors"] == []
    assert json.loads(call("diff", alone, alone, "--json").stdout)["equal"]
    for began, _, _ in values(run_ranks(2, attached("fsdp 2", out))):
        assert is_equal(began, expected)
