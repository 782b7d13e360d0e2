"""``lightck inject`` damages a copy and names what it hit; other commands find exactly that; the pool is unchanged."""

from __future__ import annotations

import lzma
import os
import signal
import subprocess
from pathlib import Path

import pytest
from calls import PROGRAM, call, call_json, environment
from toys import adam, checkpoints, child_that_holds, net, train

import lightck
from lightck.cli import inject
from lightck.cli.base import INTERRUPTED

GOLDEN = Path(__file__).parents[1] / "pool" / "golden"
OPTIONS = [
    ["--flip"],
    ["--flip", "payload"],
    ["--flip", "model/0.weight"],
    ["--flip", "manifest"],
    ["--flip", "line"],
    ["--flip", "header"],
    ["--flip", "superblock"],
    ["--flip", "table"],
    ["--zero-page", "payload"],
    ["--zero-page", "manifest"],
    ["--zero-page", "superblock"],
    ["--torn-slot"],
]


@pytest.fixture
def copy(folder: Path) -> Path:
    return folder / "hurt.pool"


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_what_is_damaged_is_found_and_what_is_left_is_exact(good, copy, options):
    before = good.read_bytes()
    status, facts = call_json("inject", good, copy, *options, "--seed", 5)
    assert status == 0
    assert good.read_bytes() == before
    assert copy.read_bytes() != before
    assert copy.stat().st_mode & 0o777 == 0o600
    status, found = call_json("verify", copy, "--deep")
    assert status == 1, facts
    kept = lightck.recover(copy)
    assert kept.step == found["recoverable_step"]
    costs_newest = options[-1] in ("payload", "model/0.weight", "manifest", "line", "--torn-slot")
    assert kept.step == (3 if costs_newest else 4) or options == ["--flip"]


def test_a_flipped_bit_of_a_tensor_is_named(good, copy):
    status, facts = call_json("inject", good, copy, "--flip", "model/2.bias", "--seed", 1)
    damage = facts["damage"]
    assert (status, damage["tensor"], damage["step"], damage["nbytes"]) == (0, "model/2.bias", 4, 1)
    differing = [i for i, (a, b) in enumerate(zip(good.read_bytes(), copy.read_bytes(), strict=True)) if a != b]
    assert differing == [damage["file_offset"]]
    _, found = call_json("verify", copy)
    assert [each["tensor"] for each in found["checkpoints"][0]["damage"]] == ["model/2.bias"]


def test_the_text_says_what_was_hit_and_what_to_do_next(good, copy):
    lines = call("inject", good, copy, "--flip", "payload", "--seed", 3).stdout.splitlines()
    assert lines[0].startswith(f"copied {good} to {copy}")
    assert "of step 4" in lines[1]
    assert lines[1].endswith("(seed 3)")
    assert lines[3:] == [f"Next: lightck verify --deep {copy}", f"      lightck inspect {copy}"]


def test_a_seed_repeats_the_damage(good, folder):
    made = []
    for name in "ab":
        call("inject", good, folder / name, "--flip", "--seed", 77)
        made.append((folder / name).read_bytes())
    assert made[0] == made[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_copy_that_is_not_damaged_yet(number, good, copy, monkeypatch):
    def interrupted(path: str, *_: object) -> None:
        assert Path(path).exists()
        os.kill(os.getpid(), number)

    monkeypatch.setattr(inject, "inject", interrupted)
    assert call("inject", good, copy, "--flip").exit_code == INTERRUPTED
    assert not copy.exists()


@pytest.mark.parametrize(("where", "kind"), [("0", "block A"), ("0x1000", "block B"), ("12288", "no reader uses")])
def test_an_offset_is_described(good, copy, where, kind):
    assert kind in call("inject", good, copy, "--flip", where).stdout


@pytest.mark.parametrize("nbytes", [5000, 0, -1, -4096])
def test_a_copy_that_is_cut_is_called_truncated(good, copy, nbytes):
    assert call("inject", good, copy, "--truncate", nbytes).exit_code == 0
    assert copy.stat().st_size == (nbytes if nbytes >= 0 else good.stat().st_size + nbytes)
    kind = lightck.LightckError if not nbytes else EOFError
    with pytest.raises(kind):
        lightck.recover(copy)


def test_nothing_that_exists_is_damaged(good, folder):
    before = good.read_bytes()
    (folder / "link").symlink_to(folder / "elsewhere")
    for target in (good, folder / "link"):
        result = call("inject", good, target, "--flip")
        assert (result.exit_code, result.stdout) == (2, "")
        assert "exists" in result.stderr
    assert good.read_bytes() == before
    assert not (folder / "elsewhere").exists()


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--flip", "--torn-slot"],
        ["--flip", "nowhere"],
        ["--flip", "model/9"],
        ["--flip", "99999999999"],
        ["--flip", "-1"],
        ["--truncate", "99999999999"],
        ["--zero-page", "12288"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_done_leaves_no_copy(good, copy, options):
    result = call("inject", good, copy, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "error: " in result.stderr
    assert not copy.exists()


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("newest damaged", 0),
        ("all damaged", 0),
        ("truncated", 1),
        ("foreign", 2),
        ("empty file", 2),
        ("folder", 2),
        ("link", 0),
        ("missing", 2),
    ],
)
def test_other_kinds_of_path(made, copy, kind, status):
    result = call("inject", made(kind), copy, "--flip", "payload")
    assert result.exit_code == status, result.output
    assert copy.exists() == (status == 0)


def test_a_pool_without_checkpoints_has_structures_to_hit(made, copy):
    pool = made("no checkpoint yet")
    for options in (["--flip"], ["--flip", "payload"], ["--zero-page"], ["--torn-slot"]):
        result = call("inject", pool, copy, *options)
        assert (result.exit_code, copy.exists()) == (2, False)
        assert "holds no checkpoint" in result.stderr
        assert "none was committed yet" in result.stderr
        assert "--flip superblock" in result.stderr
    assert call("inject", pool, copy, "--flip", "table").exit_code == 0
    assert call("verify", copy).exit_code == 1


def test_a_pool_in_use_is_copied_and_not_touched(pool, copy):
    def hold():
        model = net()
        optimizer = adam(model)
        session = lightck.attach(model, pool, optimizer=optimizer)
        train(model, optimizer, 3)
        session.flush()
        return session

    with child_that_holds(hold):
        before = pool.read_bytes()
        assert call("inject", pool, copy, "--flip", "payload").exit_code == 0
        assert pool.read_bytes() == before
    assert (lightck.recover(pool).step, lightck.recover(copy).step) == (3, 2)


def test_a_reader_of_the_output_that_goes_away(good, copy):
    words = [*PROGRAM, "inject", str(good), str(copy), "--flip"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(words, env=environment(), stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_torn_slot_keeps_its_commit_record_and_manifest(good, copy):
    call("inject", good, copy, "--torn-slot", "--seed", 2)
    assert [v.step for v in checkpoints(copy)] == [4, 3, 2]


@pytest.mark.parametrize("option", ["--flip", "--zero-page"])
def test_a_structure_that_an_older_pool_lacks_is_refused_by_name(folder, copy, option):
    older = folder / "older.pool"
    older.write_bytes(lzma.decompress((GOLDEN / "v1.pool.xz").read_bytes()))
    result = call("inject", older, copy, option, "next")
    assert (result.exit_code, copy.exists()) == (2, False)
    assert "This pool has no next to damage: an older lightck made it" in result.stderr
