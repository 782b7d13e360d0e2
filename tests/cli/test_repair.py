"""``lightck repair``: what is damaged gets its own bytes again from another copy, or is named."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from calls import call, call_json, overwrite
from tiers.small_tiers import session_until, states, store_of, tree
from toys import adam, damage, in_child, net, pool_with, same, train

import lightck
from lightck.cli.base import BAD, FAILED, OK
from lightck.pool.format.structures import pack_slot_header
from lightck.pool.reader import open_pool
from lightck.strategy.gradients import Gradients
from lightck.tiers.folder import FolderStore
from lightck.tiers.pool_sender import PoolSender
from lightck.tiers.tier_manifest import read_manifest


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiers")
    for until in (3, 5):
        session_until(folder, until)
    return folder


@pytest.fixture
def tier(original: Path, tmp_path: Path) -> Path:
    """A tier with five steps of a training, whose pool lies beside it."""
    shutil.copytree(original, tmp_path / "it")
    return tmp_path / "it" / "tier"


@pytest.fixture
def pool(tier: Path) -> Path:
    return tier.parent / "run.pool"


@pytest.fixture
def other(tier: Path, tmp_path: Path) -> Path:
    shutil.copytree(tier, tmp_path / "other")
    return tmp_path / "other"


def objects_of(tier: Path, *steps: int) -> list[Path]:
    store = store_of(tier)
    names = {
        each.name
        for name in store.listing().manifests
        if not steps or name.step in steps
        for each in read_manifest(store, name).objects
    }
    return [tier / str(name) for name in sorted(names)]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def bytes_of(tier: Path) -> dict[str, bytes]:
    return {name: (tier / name).read_bytes() for name in tree(tier) if (tier / name).is_file()}


# -- a tier


@pytest.mark.parametrize("work", [flip, Path.unlink, truncate], ids=["flipped", "gone", "truncated"])
def test_every_damaged_object_gets_its_bytes_again_from_another_tier(tier, other, work):
    whole, recovered = bytes_of(tier), states(tier)
    for path in objects_of(tier):
        work(path)
    assert call("verify", tier, "--deep").exit_code == BAD
    status, found = call_json("repair", tier, "--from", other)
    assert (status, found["left"]) == (OK, [])
    assert {each["name"] for each in found["repaired"]} == {str(path.relative_to(tier)) for path in objects_of(tier)}
    assert bytes_of(tier) == whole
    assert same(states(tier), recovered)
    assert call("verify", tier, "--deep").exit_code == OK


def test_objects_get_their_bytes_again_from_a_pool_that_holds_the_checkpoint(tier, pool):
    whole = bytes_of(tier)
    for path in objects_of(tier, 5):
        flip(path)
    assert call_json("repair", tier, "--from", pool)[1]["left"] == []
    assert bytes_of(tier) == whole
    gone = next(path for path in objects_of(tier, 1) if path not in objects_of(tier, 2, 3))
    flip(gone)
    status, found = call_json("repair", tier, "--from", pool)
    assert (status, found["repaired"]) == (BAD, []), "the pool does not hold step 1 any more"
    assert found["left"][0]["name"] == str(gone.relative_to(tier))
    assert "no copy of it is there" in found["left"][0]["reason"]


def test_a_damaged_copy_is_no_source_and_the_next_one_is_taken(tier, other, tmp_path):
    shutil.copytree(tier, tmp_path / "third")
    whole, victim = bytes_of(tier), objects_of(tier, 5)[0]
    name = victim.relative_to(tier)
    flip(victim)
    flip(other / name)
    before = bytes_of(tier)
    status, found = call_json("repair", tier, "--from", other)
    assert (status, found["repaired"]) == (BAD, [])
    assert bytes_of(tier) == before
    assert call_json("repair", tier, "--from", other, "--from", tmp_path / "third")[0] == OK
    assert bytes_of(tier) == whole


def test_a_whole_tier_stays_as_it_is(tier, other):
    before = {name: (tier / name).lstat().st_mtime_ns for name in tree(tier)}
    result = call("repair", tier, "--from", other)
    assert (result.exit_code, result.stdout.count("No damaged checkpoint")) == (OK, 1)
    assert {name: (tier / name).lstat().st_mtime_ns for name in tree(tier)} == before


def test_a_manifest_is_not_repaired_and_is_named(tier, other):
    name = max(store_of(tier).listing().manifests)
    (tier / str(name)).write_text("{}")
    flip(objects_of(tier, 4)[0])
    result = call("repair", tier, "--from", other)
    assert result.exit_code == BAD
    assert f"damaged still: {name}: the manifest cannot be used" in result.stdout
    assert "written anew" in result.stdout
    assert (tier / str(name)).read_text() == "{}"


def test_a_link_in_the_place_of_an_object_is_replaced_and_not_followed(tier, other, tmp_path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    victim = objects_of(tier, 5)[0]
    whole = victim.read_bytes()
    victim.unlink()
    victim.symlink_to(precious)
    assert call("repair", tier, "--from", other).exit_code == OK
    assert not victim.is_symlink()
    assert victim.read_bytes() == whole
    assert precious.read_bytes() == b"precious"


def test_a_checkpoint_that_a_drain_removes_meanwhile_is_not_written_again(tier, other, monkeypatch):
    name = min(store_of(tier).listing().manifests)
    victims = [path for path in objects_of(tier, 1) if path not in objects_of(tier, 2, 3)]
    for path in victims:
        path.unlink()
    real = FolderStore.get

    def get(self: FolderStore, wanted: str, nbytes_max: int) -> bytes:
        if self.root == str(other):
            (tier / str(name)).unlink(missing_ok=True)
        return real(self, wanted, nbytes_max)

    monkeypatch.setattr(FolderStore, "get", get)
    status, found = call_json("repair", tier, "--from", other)
    assert (status, found["repaired"], found["left"]) == (OK, [], [])
    assert not any(path.exists() for path in victims)


def test_repair_killed_at_each_request_and_begun_again_makes_the_tier_whole(tier, other):
    whole = bytes_of(tier)
    victims = objects_of(tier, 4, 5)
    for path in victims:
        flip(path)
    n_kills = 0
    while died(lambda: call("repair", tier, "--from", other)):
        n_kills += 1
        assert len(bytes_of(tier)) >= len(whole), "no file is lost"
        assert n_kills < 50
    assert n_kills >= len(victims) - 1
    found = {name: data for name, data in bytes_of(tier).items() if ".tmp-" not in name}
    assert found == whole


def died(work: Callable[[], Any]) -> bool:
    """Run ``work`` in a process that is killed at its second rename. Returns whether it was."""
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            real, seen = os.rename, [0]

            def rename(*args: Any, **options: Any) -> None:
                seen[0] += 1
                if seen[0] == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                real(*args, **options)

            os.rename = rename  # type: ignore[assignment]
            work()
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


# -- a pool


def test_a_pool_without_an_intact_checkpoint_is_made_anew_from_the_newest_of_the_tier(tier, pool, original):
    damage(pool, "model/0.weight")
    assert call("verify", pool, "--deep").exit_code == BAD
    status, found = call_json("repair", pool, "--from", tier)
    assert (status, found["step"], found["left"]) == (OK, 5, [])
    assert call("verify", pool, "--deep").exit_code == OK
    assert call("diff", pool, original / "run.pool").exit_code == OK
    session_until(tier.parent, 6)
    assert lightck.recover(pool).step == 6


@pytest.mark.parametrize("kind", ["superblocks", "truncated"])
def test_a_pool_that_cannot_be_opened_is_made_anew(tier, pool, original, kind):
    data = bytearray(pool.read_bytes())
    if kind == "truncated":
        pool.write_bytes(data[: len(data) // 2])
    else:
        for at in (100, 4096 + 100):
            data[at] ^= 255
        pool.write_bytes(data)
    assert call("verify", pool).exit_code == BAD
    assert call_json("repair", pool, "--from", tier)[1]["step"] == 5
    assert call("diff", pool, original / "run.pool").exit_code == OK


def test_a_pool_with_an_older_intact_checkpoint_than_the_tier_is_made_anew(tier, pool):
    damage(pool, "model/0.weight", [5])
    assert lightck.recover(pool).step == 4
    assert call_json("repair", pool, "--from", tier)[1]["step"] == 5
    assert lightck.recover(pool).step == 5


def test_a_checkpoint_that_the_training_has_struck_since_it_was_sent_is_not_fetched(tier, pool):
    with closing(open_pool(str(pool))) as reader:
        newest = next(reader.checkpoints())
        superblock, slot = reader.superblock, newest.record.slot
    assert newest.step == 5
    header = pack_slot_header(newest.record.payload_generation + 1, slot, superblock.uuid, struck=True)
    overwrite(pool, superblock.slots[slot][0], header)
    damage(pool, "model/0.weight", [4])
    status, found = call_json("repair", pool, "--from", tier)
    assert (status, found["step"]) == (OK, 4)
    assert "made this checkpoint unreadable" in found["rejected"][0]


def test_a_damaged_pool_that_is_newer_than_the_tier_stays(tmp_path):
    model = net()
    optimizer = adam(model)
    pool, tier = tmp_path / "run.pool", tmp_path / "tier"
    with lightck.attach(model, pool, optimizer=optimizer, slots=3) as session:
        train(model, optimizer, 2)
        session.flush()
        PoolSender(pool, store_of(tier), "1.0").send()
        train(model, optimizer, 3, start=2)
    newest = lightck.recover(pool).step
    damage(pool, "model/0.weight", [newest])
    before = pool.read_bytes()
    result = call("repair", pool, "--from", tier)
    assert result.exit_code == FAILED
    assert f"its step {newest - 1} is intact" in result.stderr
    assert "lightck compact" in result.stderr
    assert pool.read_bytes() == before


def test_an_intact_pool_stays(tier, pool):
    before = pool.read_bytes()
    result = call("repair", pool, "--from", tier)
    assert result.exit_code == OK
    assert "No damaged checkpoint" in result.stdout
    assert pool.read_bytes() == before


def test_a_damaged_checkpoint_of_the_tier_is_passed_over(tier, pool):
    damage(pool, "model/0.weight")
    for path in objects_of(tier, 5):
        if path not in objects_of(tier, 4):
            flip(path)
    status, found = call_json("repair", pool, "--from", tier)
    assert (status, found["step"], len(found["rejected"])) == (OK, 4, 1)


def test_a_pool_that_a_training_has_open_is_refused(tier, pool):
    model = net()
    with lightck.attach(model, pool, optimizer=adam(model), resume=True):
        result = call("repair", pool, "--from", tier)
    assert result.exit_code == FAILED
    assert "open" in result.stderr


def test_a_tier_of_another_run_is_refused(tier, tmp_path):
    session = tmp_path / "elsewhere"
    session.mkdir()
    session_until(session, 2)
    victim = session / "run.pool"
    newest = lightck.recover(victim).step
    damage(victim, "model/0.weight", [newest])
    before = victim.read_bytes()
    result = call("repair", victim, "--from", tier)
    assert result.exit_code == FAILED
    assert "holds another run" in result.stderr
    assert victim.read_bytes() == before


def test_a_tier_that_holds_nothing_of_a_pool_whose_run_is_not_known_is_refused(tier, pool, tmp_path):
    """All of its checkpoints are damaged, and its superblock is not."""
    victim = tmp_path / "victim.pool"
    pool_with(victim, steps=5)
    data = bytearray(victim.read_bytes())
    for at in range(len(data) // 20, len(data), 4096):
        data[at + 100] ^= 1
    victim.write_bytes(data)
    result = call("repair", victim, "--from", tier)
    assert result.exit_code == FAILED
    assert "may be of another run" in result.stderr
    assert victim.read_bytes() == bytes(data)


def test_what_is_not_supported_is_refused_by_name(tier, pool, tmp_path):
    pool_with(tmp_path / "gradients.pool", steps=5, strategy=Gradients(base_every=2))
    (tmp_path / "foreign").write_bytes(b"x" * 10_000)
    (tmp_path / "link").symlink_to(pool)
    (tmp_path / "folder").mkdir()
    rows = {
        "gradients.pool": "has gradient records",
        "foreign": "not a lightck pool",
        "link": "is not a pool in a plain file",
        "folder": "is a folder that is no tier",
        "missing": "There is no pool",
    }
    for name, said in rows.items():
        before = tree(tmp_path)
        result = call("repair", tmp_path / name, "--from", tier)
        assert result.exit_code == FAILED, name
        assert said in result.stderr
        assert tree(tmp_path) - before <= {f"{name}.lock"}
    result = call("repair", pool, "--from", pool)
    assert result.exit_code == FAILED
    assert "A pool is repaired from a tier" in result.stderr
    assert call("repair", pool).exit_code == FAILED


def test_a_medium_without_space_is_named_and_the_old_pool_stays(tier, pool):
    """The system refuses files of that length."""
    os.truncate(pool, 100_000)

    def limited() -> tuple[int, str]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        result = call("repair", pool, "--from", tier)
        return result.exit_code, result.stderr

    status, text = in_child(limited)
    assert status == FAILED
    assert " MB beside the present one (it stays until the new one is complete), more than the largest file" in text
    assert pool.stat().st_size == 100_000


def test_the_old_pool_stays_until_the_new_one_is_whole(tier, pool):
    damage(pool, "model/0.weight")
    before = pool.read_bytes()
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
            call("repair", pool, "--from", tier)
        os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    assert pool.read_bytes() == before
    assert call_json("repair", pool, "--from", tier)[1]["step"] == 5
    assert not [path for path in pool.parent.iterdir() if "tmp" in path.name], "the next attempt removes what was left"
