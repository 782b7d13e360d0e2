"""``lightck gc``: what no checkpoint needs is removed from a tier, and nothing else, whatever happens meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cli.calls import call, call_json
from toys import pool_with, same

import lightck
from lightck.cli.base import FAILED, OK
from lightck.tiers.claiming import ClaimFile, claim_tier
from lightck.tiers.collecting import collect
from lightck.tiers.decisions import Listing, highest_claim
from lightck.tiers.folder import FolderStore, _entries
from lightck.tiers.names import Claim, ManifestName, ObjectName, Writer, claim_name, parse
from lightck.tiers.tier_manifest import read_manifest
from tiers.kills_with_gc import run as kills_and_collects
from tiers.small_tiers import (
    HOURS,
    age,
    claims_of,
    needed,
    orphan,
    run_of,
    session_until,
    states,
    store_of,
    temporary,
    tree,
)

RUN = "1" * 32


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    """A tier with the steps 1 to 3 of a training below one claim, and 4 to 5 below a second one."""
    for until in (3, 5):
        session_until(tmp_path, until)
    return tmp_path / "tier"


# -- what goes, and what stays


def test_an_orphan_goes_when_it_is_older_than_an_hour_by_the_clock_of_the_file_system(tier, monkeypatch):
    old, _ = claims_of(tier)
    age(tier)
    path = orphan(tier, old)
    monkeypatch.setattr("time.time", lambda now=time.time: now() + 24 * HOURS)  # the clock of this machine is wrong
    status, found = call_json("gc", tier)
    assert (status, found["removed"]) == (OK, [])
    (left,) = found["left"]
    assert left["names"] == [str(path.relative_to(tier))]
    assert "within the last 60 minutes" in left["reason"]
    then = time.time() - 26 * HOURS
    os.utime(path, (then, then))
    status, found = call_json("gc", tier)
    assert found["removed"] == [{"kind": "object", "name": str(path.relative_to(tier)), "nbytes": 6}]
    assert (found["nbytes"], found["left"]) == (6, [])
    assert not path.exists()


def test_a_tier_without_orphans_stays_as_it_is(tier):
    age(tier)
    before, recovered = tree(tier), states(tier)
    assert call_json("gc", tier, "--stopped")[1]["removed"] == []
    assert tree(tier) == before
    assert same(states(tier), recovered)


def test_the_newest_claim_is_left_to_its_drain_unless_none_runs(tier):
    _, newest = claims_of(tier)
    path = orphan(tier, newest)
    age(tier)
    status, found = call_json("gc", tier)
    assert (status, found["removed"]) == (OK, [])
    assert f"claim {newest}" in found["left"][0]["reason"]
    assert "--stopped" in found["left"][0]["reason"]
    assert path.exists()
    assert call_json("gc", tier, "--stopped")[1]["removed"][0]["kind"] == "object"
    assert not path.exists()


def test_a_dry_run_removes_nothing_and_says_what_a_run_removes(tier):
    old, newest = claims_of(tier)
    orphan(tier, old)
    orphan(tier, newest, "cd" * 32)
    temporary(tier / str(newest))
    age(tier)
    before = tree(tier)
    said = call_json("gc", tier, "--stopped", "--dry-run")[1]
    assert tree(tier) == before
    assert call_json("gc", tier, "--stopped")[1]["removed"] == said["removed"]
    assert len(said["removed"]) == 3
    assert len(before) - len(tree(tier)) == 3


def test_the_text_says_what_was_removed_and_what_is_left(tier):
    old, newest = claims_of(tier)
    orphan(tier, old)
    orphan(tier, newest)
    age(tier)
    temporary(tier)
    text = call("gc", tier)
    assert text.exit_code == OK
    assert "1 file, 6 B removed" in text.stdout
    assert "1 object that no manifest names, 6 B" in text.stdout
    assert "left: 1 temporary file, 4 B: written within the last 60 minutes" in text.stdout
    assert "left: 1 object, 6 B: the process that made claim" in text.stdout
    path = tier / next(name for name in tree(tier) if name.endswith("json") and "steps" in name)
    assert str(path.relative_to(tier)) not in call("gc", tier, "--stopped", "--dry-run").stdout


def test_temporary_files_go_only_if_they_are_old(tier):
    rank = tier / f"{claims_of(tier)[0]}/rank-00000-of-00001"
    paths = [temporary(folder) for folder in (tier, rank.parent, rank, rank / "data", rank / "steps")]
    assert not [each for each in call_json("gc", tier)[1]["removed"] if each["kind"] == "temporary file"]
    assert all(path.exists() for path in paths)
    age(tier)
    removed = call_json("gc", tier)[1]["removed"]
    assert [each["kind"] for each in removed] == ["temporary file"] * 5
    assert not any(path.exists() for path in paths)


def test_a_manifest_of_a_checkpoint_that_not_all_ranks_have_sent_goes_before_its_objects(tmp_path, monkeypatch):
    tier, store = tmp_path / "tier", FolderStore(str(tmp_path / "tier"))
    session_until(tmp_path, 1)
    (name,) = store.listing().manifests
    of_two = Writer(name.writer.claim, 0, 2)  # the manifest of rank 1 is missing
    for each in read_manifest(store, name).objects:
        store.put(str(each.name._replace(writer=of_two)), (tier / str(each.name)).read_bytes())
    store.put(str(ManifestName(of_two, 9, name.nonce)), (tier / str(name)).read_bytes())
    session_until(tmp_path, 2)
    age(tier)
    order: list[str] = []
    monkeypatch.setattr(
        FolderStore, "delete", lambda _self, each, real=FolderStore.delete: (order.append(each), real(_self, each))
    )
    call_json("gc", tier)
    assert isinstance(parse(order[0]), ManifestName)
    assert len(order) > 1
    assert all(isinstance(parse(each), ObjectName) and str(of_two) in each for each in order[1:])
    assert not (tier / str(of_two) / "data").exists() or not list((tier / str(of_two) / "data").iterdir())
    assert sorted(states(tier)) == [1, 2]


def test_a_claim_that_another_gc_removes_meanwhile_is_no_error(tier, monkeypatch):
    old, _ = claims_of(tier)
    gone = tier / str(old._replace(number=old.number + 100))
    gone.mkdir()

    def entries(folder: str) -> list[os.DirEntry[str]]:
        found = _entries(folder)
        if folder == str(tier) and gone.exists():
            gone.rmdir()
        return found

    monkeypatch.setattr("lightck.tiers.folder._entries", entries)
    assert store_of(tier).empty_claims() == []


def test_objects_stay_that_a_damaged_manifest_may_name(tier):
    old, _ = claims_of(tier)
    store = store_of(tier)
    victim = min(store.listing().manifests)
    (tier / str(victim)).write_text("{}")
    orphan(tier, old)
    age(tier)
    before = tree(tier)
    found = call_json("gc", tier, "--stopped")[1]
    assert found["removed"] == []
    assert tree(tier) == before
    (left,) = found["left"]
    assert f"the manifest {victim} cannot be read (it is no manifest of a tier), and may name them" in left["reason"]


# -- claims


def test_claims_of_which_nothing_is_left_go_with_their_folders(tier):
    for number in (1, 2):
        store_of(tier).put(claim_name(Claim(number, "ffffffff")), ClaimFile("1.0", run_of(tier)).packed())
    older, lost, newest, highest = claims_of(tier)
    assert (lost.tag, highest.tag) == ("ffffffff", "ffffffff")
    (tier / str(lost) / "rank-00000-of-00001" / "data").mkdir(parents=True)
    age(tier)
    removed = call_json("gc", tier)[1]["removed"]
    assert [each["name"] for each in removed] == [claim_name(lost)]
    assert not (tier / str(lost)).exists()
    assert claims_of(tier) == [older, newest, highest], "the next claim is higher than the highest one"


def test_of_the_newest_claims_an_empty_one_goes_only_if_no_process_runs_and_the_highest_one_never(tier):
    kept = claims_of(tier)
    lost, highest = Claim(3, "0" * 8), Claim(4, "0" * 8)
    for each in (lost, highest):
        store_of(tier).put(claim_name(each), ClaimFile("1.0", run_of(tier)).packed())
    age(tier)
    assert call_json("gc", tier)[1]["removed"] == [], "its training may be about to send its first checkpoint"
    assert [each["name"] for each in call_json("gc", tier, "--stopped")[1]["removed"]] == [claim_name(lost)]
    assert claims_of(tier) == [*kept, highest], "the next claim must be higher than it"


def test_a_claim_stays_that_a_training_may_go_on_from(tmp_path):
    session_until(tmp_path, 2)
    tier, store = tmp_path / "tier", FolderStore(str(tmp_path / "tier"))
    (first,) = claims_of(tier)
    lost = claim_tier(store, run_of(tier), "1.0")  # as an attach whose training was killed before it sent anything
    pool_with(tmp_path / "other.pool")
    assert call("copy", tmp_path / "run.pool", tier).exit_code == OK  # it says that its training had the first claim
    age(tier)
    (left,) = call_json("gc", tier, "--stopped")[1]["left"]
    assert left["names"] == [claim_name(lost)]
    session_until(tmp_path, 3)
    age(tier)
    assert call_json("gc", tier, "--stopped")[1]["removed"][0]["name"] == claim_name(lost)
    assert first in claims_of(tier)


def test_an_empty_folder_of_a_claim_goes_if_it_is_old(tier):
    folder = tier / "000001-eeeeeeee"
    (folder / "rank-00000-of-00001" / "steps").mkdir(parents=True)
    call("gc", tier)
    assert folder.exists(), "somebody may be claiming the tier"
    age(tier)
    call("gc", tier)
    assert not folder.exists()


def test_a_tier_of_two_runs_is_refused(tier):
    other = Claim(9, "0" * 8)
    store_of(tier).put(claim_name(other), ClaimFile("1.0", RUN).packed())
    age(tier)
    before = tree(tier)
    result = call("gc", tier, "--stopped")
    assert result.exit_code == FAILED
    assert "claims of 2 runs" in result.stderr
    assert tree(tier) == before


def test_what_is_no_tier_is_refused(tmp_path):
    pool_with(tmp_path / "run.pool")
    (tmp_path / "folder").mkdir()
    missing = call("gc", tmp_path / "missing")
    assert missing.exit_code == FAILED
    assert "There is nothing at" in missing.stderr
    for path in ("run.pool", "folder"):
        result = call("gc", tmp_path / path)
        assert result.exit_code == FAILED
        assert "is no tier" in result.stderr


# -- hostile folders


def test_links_fifos_and_foreign_files_are_neither_removed_nor_followed(tier, tmp_path):
    old, newest = claims_of(tier)
    outside = tmp_path / "outside"
    (outside / "rank-00000-of-00001" / "data").mkdir(parents=True)
    precious = [outside / f"rank-00000-of-00001/data/{'ef' * 32}-00000000", outside / f".tmp-{0:016x}"]
    for path in precious:
        path.write_bytes(b"precious")
    data = tier / f"{old}/rank-00000-of-00001/data"
    link, fifo = data / f"{'12' * 32}-00000000", data / f"{'34' * 32}-00000000"
    link.symlink_to(precious[0])
    os.mkfifo(fifo)
    (tier / "000001-dddddddd").symlink_to(outside)
    (data / f".tmp-{1:016x}").symlink_to(precious[1])
    os.mkfifo(data / f".tmp-{2:016x}")
    (data / f".tmp-{3:016x}").mkdir()
    (tier / ".tmp-mine").write_bytes(b"x")
    (tier / "notes.txt").write_bytes(b"x")
    (tier / "mine").mkdir()
    temporary(tier / "mine")
    (data / "readme").write_bytes(b"x")
    (data / "deeper").mkdir()
    temporary(data / "deeper")
    (tier / f"000001-{'0' * 8}" / "rank-00000-of-00001" / "steps" / "own").mkdir(parents=True)
    age(tier)
    age(outside)
    before = tree(tier), tree(outside)
    status, found = call_json("gc", tier, "--stopped")
    assert (status, found["removed"]) == (OK, [])
    assert (tree(tier), tree(outside)) == before
    orphan(tier, newest)
    age(tier)
    assert len(call_json("gc", tier, "--stopped")[1]["removed"]) == 1


def test_a_folder_that_cannot_be_written_is_named(tier, monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    orphan(tier, claims_of(tier)[0])
    age(tier)
    monkeypatch.setattr("os.unlink", refuse)
    result = call("gc", tier)
    assert result.exit_code == FAILED
    assert "Permission denied" in result.stderr


# -- late listings


class LateStore(FolderStore):
    """A folder whose listings do not show yet what was written within the last hour."""

    lists_at_once = False

    def listing(self) -> Listing:
        found, young = super().listing(), time.time() - HOURS
        manifests = {each: when for each, when in found.manifests.items() if when < young}
        objects = {each: when for each, when in found.objects.items() if when < young}
        return Listing(found.claims, manifests, objects, found.now)


def test_a_late_listing_loses_no_object_that_a_manifest_needs(tmp_path):
    tier = tmp_path / "tier"
    session_until(tmp_path, 3)
    age(tier)
    claim = highest_claim(store_of(tier).listing())
    store = LateStore(str(tier))
    hidden = max(store.listing().manifests)
    now = time.time()
    os.utime(tier / str(hidden), (now, now))  # its objects are old, and it was written just now
    before = tree(tier)
    done = collect(store)
    assert not done.removed
    assert any(f"claim {claim}" in each.reason for each in done.left), "the listing shows objects that nobody names"
    assert tree(tier) == before
    assert sorted(states(tier)) == [1, 2, 3]


# -- gc beside others


def test_gc_beside_a_drain_and_readers(tmp_path):
    """The collector runs again and again, without any grace, while a training sends and removes checkpoints."""
    tier, store = tmp_path / "tier", FolderStore(str(tmp_path / "tier"))
    session_until(tmp_path, 2)
    (old,) = claims_of(tier)
    failures: list[BaseException] = []
    ended, rounds, recovered = threading.Event(), [0], [0]

    def guarded(work: Any) -> None:
        try:
            while not ended.is_set():
                work()
        except BaseException as err:
            failures.append(err)

    def clean() -> None:
        path = orphan(tier, old)
        collect(store, grace=0.0)
        path.unlink(missing_ok=True)
        rounds[0] += 1

    def read() -> None:
        checkpoint = lightck.recover(tier)
        assert checkpoint.step >= 2
        recovered[0] += 1

    threads = [threading.Thread(target=guarded, args=(work,)) for work in (clean, read)]
    for thread in threads:
        thread.start()
    try:
        session_until(tmp_path, 12, keep_last=2)
        deadline = time.monotonic() + 60
        while not failures and min(rounds[0], recovered[0]) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not failures, failures[0]
    assert rounds[0] >= 5
    assert recovered[0] >= 5
    assert sorted(states(tier))[-1] == 12
    assert needed(store) <= tree(tier)


def test_a_reader_passes_over_a_claim_that_gc_removes_meanwhile(tier, monkeypatch):
    lost = Claim(1, "ffffffff")
    store_of(tier).put(claim_name(lost), ClaimFile("1.0", run_of(tier)).packed())
    age(tier)
    real = FolderStore.listing

    def listing(self: FolderStore) -> Listing:
        found = real(self)
        (tier / claim_name(lost)).unlink(missing_ok=True)
        return found

    monkeypatch.setattr(FolderStore, "listing", listing)
    assert lightck.recover(tier).step == 5


# -- kills


def test_gc_killed_at_each_request_has_lost_nothing_and_the_next_one_removes_the_rest(tier):
    old, newest = claims_of(tier)
    store = store_of(tier)
    store.put(claim_name(Claim(1, "ffffffff")), ClaimFile("1.0", run_of(tier)).packed())
    for each, content in ((old, "ab"), (old, "cd"), (newest, "ef")):
        orphan(tier, each, content * 32)
    temporary(tier)
    age(tier)
    recovered, wanted = states(tier), needed(store)
    n_kills = 0
    while True:
        is_killed = in_child_that_dies_at_its_second_deletion(tier)
        assert same(states(tier), recovered)
        assert wanted <= tree(tier)
        n_kills += is_killed
        if not is_killed:
            break
    assert n_kills == 4, "of five files, one goes in each life but in the last, in which two go or one"
    files = {name for name in tree(tier) if (tier / name).is_file()}
    assert files == wanted | {claim_name(old), claim_name(newest)}


def in_child_that_dies_at_its_second_deletion(tier: Path) -> bool:
    """Run gc in a process that is killed right before it removes a second file. Returns whether it was."""
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            real, seen = os.unlink, [0]

            def unlink(path: Any, *args: Any, **options: Any) -> None:
                if ".tmp-" not in str(path) or os.stat(path).st_mtime < time.time() - HOURS:  # not the one of now()
                    seen[0] += 1
                    if seen[0] == 2:
                        os.kill(os.getpid(), signal.SIGKILL)
                real(path, *args, **options)

            os.unlink = unlink  # type: ignore[assignment]
            collect(store_of(tier), is_stopped=True)
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_after_random_kills_gc_leaves_no_orphan_and_the_training_goes_on_exactly(tmp_path, seed):
    assert kills_and_collects(2, 12, seed, tmp_path) > 0
