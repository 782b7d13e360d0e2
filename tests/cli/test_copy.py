"""``lightck copy``: a checkpoint of a tier is whole or is not offered, and a training continues from it bit by bit."""

from __future__ import annotations

import json
import os
import random
import signal
from contextlib import closing
from pathlib import Path

import pytest
import torch
from calls import call, call_json
from hypothesis import given, settings
from hypothesis import strategies as st
from noisy_training import trained
from ranked import run_ranks
from toys import adam, net, on_small_tmpfs, pool_with, same, train

import lightck
from lightck.cli.base import BAD, FAILED, OK
from lightck.errors import TierError
from lightck.pool.format.structures import DamagedError
from lightck.pool.reader import open_pool
from lightck.tiers.claiming import ClaimFile
from lightck.tiers.decisions import complete, manifests_of, newest_complete
from lightck.tiers.fetching import fetch
from lightck.tiers.folder import FolderStore
from lightck.tiers.names import Claim, ManifestName, ObjectName, Writer, claim_name
from lightck.tiers.names import parse as parse_name
from lightck.tiers.sending import KnownObjects, send
from lightck.tiers.tier_manifest import MANIFEST_NBYTES_MAX, parse, read_manifest

STEPS, MORE = 7, 5
WRITER = Writer(Claim(1, "0" * 8), 0, 1)


def copy(*arguments: object) -> tuple[int, str, str]:
    done = call("copy", *map(str, arguments))
    return done.exit_code, done.stdout, done.stderr


def copied(source: Path, dest: Path, *options: str) -> str:
    status, out, err = copy(source, dest, *options)
    assert status == OK, err
    return out


def files_in(tier: Path) -> list[Path]:
    return sorted(path for path in tier.rglob("*") if path.is_file())


def objects_in(tier: Path) -> list[Path]:
    return [path for path in files_in(tier) if isinstance(parse_name(str(path.relative_to(tier))), ObjectName)]


def manifest_in(tier: Path) -> Path:
    (found,) = (each for each in files_in(tier) if isinstance(parse_name(str(each.relative_to(tier))), ManifestName))
    return found


def are_equal(pool: Path, other: Path) -> bool:
    """Whether the newest checkpoints of two pools are equal bit by bit."""
    return call("diff", pool, other).exit_code == OK


def test_a_training_goes_on_from_a_tier_with_the_same_bits(tmp_path):
    whole = trained(tmp_path / "whole.pool", STEPS + MORE)
    trained(tmp_path / "run.pool", STEPS)
    assert copied(tmp_path / "run.pool", tmp_path / "tier").startswith(f"step {STEPS}: ")
    copied(tmp_path / "tier", tmp_path / "again.pool")
    assert are_equal(tmp_path / "run.pool", tmp_path / "again.pool")
    assert same(trained(tmp_path / "again.pool", STEPS + MORE, resume=True), whole)


def test_a_pool_in_use_is_copied(tmp_path):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, tmp_path / "run.pool", optimizer=optimizer) as session:
        train(model, optimizer, 3)
        session.flush()
        copied(tmp_path / "run.pool", tmp_path / "tier")
        train(model, optimizer, 2, start=3)
    copied(tmp_path / "tier", tmp_path / "again.pool")
    assert lightck.recover(tmp_path / "again.pool").step == 3


def test_a_checkpoint_that_was_resumed_and_not_trained_further_is_copied(tmp_path):
    """Its commit record says that it was adopted."""
    pool_with(tmp_path / "run.pool", steps=3)
    model = net()
    lightck.attach(model, tmp_path / "run.pool", optimizer=adam(model), resume=True).close()
    copied(tmp_path / "run.pool", tmp_path / "tier")
    copied(tmp_path / "tier", tmp_path / "again.pool")
    assert are_equal(tmp_path / "run.pool", tmp_path / "again.pool")


def test_the_newest_and_each_other_checkpoint_is_fetched(tmp_path):
    trained(tmp_path / "run.pool", STEPS)
    copied(tmp_path / "run.pool", tmp_path / "tier")
    trained(tmp_path / "run.pool", STEPS + MORE, resume=True)
    copied(tmp_path / "run.pool", tmp_path / "tier")
    found = call_json("copy", tmp_path / "tier", tmp_path / "new.pool")[1]
    assert found["step"] == STEPS + MORE
    copied(tmp_path / "tier", tmp_path / "old.pool", "--step", str(STEPS))
    assert lightck.recover(tmp_path / "old.pool").step == STEPS
    assert call("verify", tmp_path / "old.pool").exit_code == OK
    status, _, err = copy(tmp_path / "tier", tmp_path / "other.pool", "--step", "99")
    assert status == FAILED
    assert f"It holds {STEPS}, {STEPS + MORE}." in err


def test_a_flip_in_any_file_gives_the_checkpoint_before_or_no_pool(tmp_path):
    pool_with(tmp_path / "run.pool")
    copied(tmp_path / "run.pool", tmp_path / "tier")
    for number, path in enumerate((*objects_in(tmp_path / "tier"), manifest_in(tmp_path / "tier"))):
        data = path.read_bytes()
        for at in (0, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            new = tmp_path / f"new-{number}-{at}.pool"
            status, _, err = copy(tmp_path / "tier", new)
            if status == OK:  # a digit of what says who wrote it, for instance
                assert are_equal(new, tmp_path / "run.pool")
                assert path.suffix == ".json"
            else:
                assert status == BAD, err
                assert "No checkpoint of the tier" in err
                assert not new.exists()
        path.write_bytes(data)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".lightck")] == []


def test_a_damaged_checkpoint_is_passed_over_by_name(tmp_path):
    model, optimizer = pool_with(tmp_path / "run.pool", steps=3)
    copied(tmp_path / "run.pool", tmp_path / "tier")
    before = set(objects_in(tmp_path / "tier"))
    model = net()
    with lightck.attach(model, tmp_path / "run.pool", optimizer=(optimizer := adam(model)), resume=True):
        train(model, optimizer, 1, start=3)
    copied(tmp_path / "run.pool", tmp_path / "tier")
    next(path for path in objects_in(tmp_path / "tier") if path not in before).unlink()
    out = copied(tmp_path / "tier", tmp_path / "new.pool")
    assert "skipped: step 4 (claim 000002-" in out
    assert "is gone" in out
    assert lightck.recover(tmp_path / "new.pool").step == 3


@pytest.mark.parametrize("seed", range(6))
def test_a_killed_copy_leaves_the_tier_whole(tmp_path, seed):
    """Killed at any put, before and after the rename: what the tier offers is whole."""
    trained(tmp_path / "run.pool", STEPS)
    copied(tmp_path / "run.pool", tmp_path / "tier")
    trained(tmp_path / "run.pool", STEPS + MORE, resume=True)
    chance = random.Random(seed)

    def dies(name: str, after: int) -> None:
        real, calls = getattr(os, name), 0

        def call_real(*args: object) -> object:
            nonlocal calls
            calls += 1
            if calls == after:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        setattr(os, name, call_real)

    for number in range(4):
        name, after = chance.choice(["rename", "fdatasync", "write"]), chance.randint(1, 6)
        pid = os.fork()
        if pid == 0:
            dies(name, after)
            call("copy", tmp_path / "run.pool", tmp_path / "tier")
            os._exit(0)
        os.waitpid(pid, 0)
        copied(tmp_path / "tier", tmp_path / f"{number}.pool")
        assert lightck.recover(tmp_path / f"{number}.pool").step in (STEPS, STEPS + MORE), f"seed {seed}"
    copied(tmp_path / "run.pool", tmp_path / "tier")
    copied(tmp_path / "tier", tmp_path / "last.pool")
    assert are_equal(tmp_path / "last.pool", tmp_path / "run.pool")


def sent(pool: Path, store: FolderStore, nonce: str, earlier: KnownObjects) -> int:
    """Send the newest checkpoint, and return how many bytes were put."""
    with closing(open_pool(str(pool))) as reader:
        stored = next(iter(reader.checkpoints()))
        done = send(stored, store, WRITER, nonce, earlier, written_by="test")
    earlier.add(done.manifest)
    return done.nbytes


def test_what_did_not_change_is_not_sent_again(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 4))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters())
    store, earlier = FolderStore(str(tmp_path / "tier")), KnownObjects()
    sizes = []
    with lightck.attach(model, tmp_path / "run.pool", optimizer=optimizer) as session:
        for number in range(3):
            model(torch.randn(2, 1024)).square().mean().backward()
            optimizer.step()
            session.flush()
            sizes.append(sent(tmp_path / "run.pool", store, f"{number:08x}", earlier))
    frozen = 4 * (1024 * 1024 + 1024)
    trained_nbytes = 3 * 4 * (1024 * 4 + 4)
    assert sizes[0] > frozen
    assert sizes[1] < trained_nbytes + 0.02 * frozen, sizes
    fresh = KnownObjects()  # a drain that was started again knows what the manifests say
    for name in store.listing().manifests:
        fresh.add(read_manifest(store, name))
    assert sent(tmp_path / "run.pool", store, "0000000a", fresh) < trained_nbytes + 0.02 * frozen
    listing = store.listing()
    assert len(complete(listing)) == 3
    (manifest, *_) = manifests_of(listing, newest_complete(listing))
    fetch(store, read_manifest(store, manifest), str(tmp_path / "again.pool"))
    assert are_equal(tmp_path / "again.pool", tmp_path / "run.pool")


def test_what_cannot_be_copied_is_refused_by_name(tmp_path):
    pool_with(tmp_path / "run.pool")
    pool_with(tmp_path / "other.pool")
    copied(tmp_path / "run.pool", tmp_path / "tier")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    for arguments, words in [
        ((tmp_path / "other.pool", tmp_path / "tier"), "another run"),
        ((tmp_path / "run.pool", tmp_path / "full"), "is not empty, and is no tier"),
        ((tmp_path / "run.pool", tmp_path / "other.pool"), "is no folder"),
        ((tmp_path / "run.pool", tmp_path / "no" / "where"), "the one above it, does not exist"),
        ((tmp_path / "tier", tmp_path / "run.pool"), "copy replaces nothing"),
        ((tmp_path / "tier", tmp_path / "no" / "x.pool"), "Create the folder"),
    ]:
        status, _, err = copy(*arguments)
        assert status in (FAILED, BAD)
        assert words in err, err
        assert not (tmp_path / "tier2").exists()


def test_the_pool_of_a_rank_is_refused(tmp_path):
    def rank(number: int) -> None:
        model = net()
        with lightck.attach(model, tmp_path / "pools", optimizer=(optimizer := adam(model))):
            train(model, optimizer, 2)

    run_ranks(2, rank)
    pool = next((tmp_path / "pools").glob("*.pool"))
    status, _, err = copy(pool, tmp_path / "tier")
    assert status == FAILED
    assert "rank" in err
    assert not (tmp_path / "tier").exists()


def test_a_full_folder_is_named_and_leaves_the_earlier_checkpoint():
    def work(folder: Path) -> tuple[int, str, list[int]]:
        model = torch.nn.Linear(256, 256)
        with lightck.attach(model, "/dev/shm/lightck-copy.pool", optimizer=(optimizer := adam(model)), overwrite=True):
            model(torch.ones(1, 256)).sum().backward()
            optimizer.step()
        statuses = []
        for _ in range(20):
            status, _, err = copy("/dev/shm/lightck-copy.pool", folder / "tier")
            statuses.append(status)
            if status != OK:
                break
        os.unlink("/dev/shm/lightck-copy.pool")
        os.unlink("/dev/shm/lightck-copy.pool.lock")
        return status, err, sorted(each.step for each in complete(FolderStore(str(folder / "tier")).listing()))

    status, err, steps = on_small_tmpfs(6 << 20, work)
    assert status == FAILED
    assert "No space left on device" in err
    assert steps


def test_links_in_a_tier_are_not_followed(tmp_path):
    pool_with(tmp_path / "run.pool")
    copied(tmp_path / "run.pool", tmp_path / "tier")
    path = objects_in(tmp_path / "tier")[0]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    status, _, err = copy(tmp_path / "tier", tmp_path / "new.pool")
    assert status != OK
    assert not (tmp_path / "new.pool").exists()
    os.unlink(path)
    os.mkfifo(path)
    status, _, err = copy(tmp_path / "tier", tmp_path / "new.pool")
    assert status != OK, err


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    folder = tmp_path_factory.mktemp("manifest")
    pool_with(folder / "run.pool")
    copied(folder / "run.pool", folder / "tier")
    path = manifest_in(folder / "tier")
    return path.read_bytes(), parse_name(str(path.relative_to(folder / "tier")))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_hostile_manifest_is_refused_with_a_reason(manifest, data):
    text, name = manifest
    body = json.loads(text)
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(sorted(body)))
        value = body[key]
        if isinstance(value, list) and value and data.draw(st.booleans()):
            at = data.draw(st.integers(0, len(value) - 1))
            if isinstance(value[at], list) and value[at] and data.draw(st.booleans()):
                value[at][data.draw(st.integers(0, len(value[at]) - 1))] = data.draw(JSON)
            else:
                value[at] = data.draw(JSON)
        elif data.draw(st.booleans()):
            body[key] = data.draw(JSON)
        else:
            del body[key]
            break
    try:
        found = parse(json.dumps(body).encode(), name.writer, name.step)
    except DamagedError:
        return
    sizes = [each.nbytes for each in found.objects]
    assert all(run.begin + run.nbytes <= sizes[run.object] for run in found.runs)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200) | JSON.map(json.dumps).map(str.encode))
def test_what_is_no_manifest_is_refused(data):
    with pytest.raises(DamagedError):
        parse(data, WRITER, 1)


def test_a_manifest_that_is_too_long_is_not_parsed():
    with pytest.raises(DamagedError, match="more than"):
        parse(b" " * (MANIFEST_NBYTES_MAX + 1), WRITER, 1)


def test_a_run_keeps_its_identity_over_restarts_and_relayouts(tmp_path):
    """A relayout makes a new file with another uuid, and the tier still takes it; not a training that begins anew."""
    pool_with(tmp_path / "run.pool")
    copied(tmp_path / "run.pool", tmp_path / "tier")
    with closing(open_pool(str(tmp_path / "run.pool"))) as reader:
        uuid = reader.superblock.uuid
    model = net()
    with lightck.attach(model, tmp_path / "run.pool", optimizer=(optimizer := adam(model)), slots=4, resume=True):
        train(model, optimizer, 2, start=3)
    with closing(open_pool(str(tmp_path / "run.pool"))) as reader:
        assert reader.superblock.uuid != uuid
    copied(tmp_path / "run.pool", tmp_path / "tier")
    call("compact", tmp_path / "run.pool", tmp_path / "small.pool")
    copied(tmp_path / "small.pool", tmp_path / "tier")
    model = net()
    with lightck.attach(model, tmp_path / "run.pool", optimizer=(optimizer := adam(model)), overwrite=True):
        train(model, optimizer, 2)
    status, _, err = copy(tmp_path / "run.pool", tmp_path / "tier")
    assert status == FAILED
    assert "another run" in err


def test_a_later_step_that_was_sent_before_is_named(tmp_path):
    """The checkpoint that was sent last is the newest, also if its step is smaller."""
    pool_with(tmp_path / "run.pool", steps=3)
    copied(tmp_path / "run.pool", tmp_path / "tier")
    copied(tmp_path / "run.pool", tmp_path / "tier", "--step", "2")
    out = copied(tmp_path / "tier", tmp_path / "new.pool")
    assert lightck.recover(tmp_path / "new.pool").step == 2
    assert "skipped: step 3 of claim 000001-" in out


@pytest.mark.parametrize("what", ["longer", "folder", "link"])
def test_what_is_no_file_of_the_right_size_is_passed_over(tmp_path, what):
    pool_with(tmp_path / "run.pool", steps=3)
    copied(tmp_path / "run.pool", tmp_path / "tier")
    before = set(objects_in(tmp_path / "tier"))
    copied(tmp_path / "run.pool", tmp_path / "tier")
    path = next(path for path in objects_in(tmp_path / "tier") if path not in before)
    if what == "longer":
        path.write_bytes(path.read_bytes() + b"x")
    else:
        path.rename(tmp_path / "elsewhere")
        path.mkdir() if what == "folder" else path.symlink_to(tmp_path / "elsewhere")
    out = copied(tmp_path / "tier", tmp_path / "new.pool")
    assert "skipped: step 3 (claim 000002-" in out


def test_a_file_that_appears_while_a_pool_is_made_stays(tmp_path, monkeypatch):
    pool_with(tmp_path / "run.pool")
    copied(tmp_path / "run.pool", tmp_path / "tier")
    real = FolderStore.get

    def get(store: FolderStore, name: str, nbytes_max: int) -> bytes:
        (tmp_path / "new.pool").write_text("precious")
        return real(store, name, nbytes_max)

    monkeypatch.setattr(FolderStore, "get", get)
    status, _, err = copy(tmp_path / "tier", tmp_path / "new.pool")
    assert status == FAILED
    assert "copy replaces nothing" in err
    assert (tmp_path / "new.pool").read_text() == "precious"
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".new")]


def test_a_copy_that_fails_leaves_no_objects(tmp_path, monkeypatch):
    pool_with(tmp_path / "run.pool")
    real, calls = FolderStore.put, []

    def put(store: FolderStore, name: str, data: bytes) -> None:
        calls.append(name)
        if len(calls) == 4:  # the claim and two objects lie in the tier
            raise TierError("full")
        real(store, name, data)

    monkeypatch.setattr(FolderStore, "put", put)
    assert copy(tmp_path / "run.pool", tmp_path / "tier")[0] == FAILED
    assert objects_in(tmp_path / "tier") == []
    monkeypatch.setattr(FolderStore, "put", real)
    copied(tmp_path / "run.pool", tmp_path / "tier")


def test_a_folder_in_which_the_first_claim_failed_is_a_tier_later(tmp_path):
    (tmp_path / "tier" / "000001-aaaaaaaa").mkdir(parents=True)
    (tmp_path / "tier" / ".tmp-0123").touch()
    pool_with(tmp_path / "run.pool")
    copied(tmp_path / "run.pool", tmp_path / "tier")


def test_two_runs_that_claim_at_once_do_not_share_a_tier(tmp_path, monkeypatch):
    pool_with(tmp_path / "run.pool")
    pool_with(tmp_path / "other.pool")
    real, is_first = FolderStore.put, [True]

    def put(store: FolderStore, name: str, data: bytes) -> None:
        if is_first.pop() if is_first else False:  # the other run claims between the listing and the put
            claim = Claim(1, "0" * 8)
            real(store, claim_name(claim), ClaimFile("test", "a" * 32).packed())
        real(store, name, data)

    monkeypatch.setattr(FolderStore, "put", put)
    status, _, err = copy(tmp_path / "run.pool", tmp_path / "tier")
    assert status == FAILED
    assert "another run" in err
    assert FolderStore(str(tmp_path / "tier")).listing().claims == {Claim(1, "0" * 8)}


def test_a_tier_with_two_runs_is_not_guessed_at(tmp_path):
    for name in ("run", "other"):
        pool_with(tmp_path / f"{name}.pool")
        copied(tmp_path / f"{name}.pool", tmp_path / name)
    (claim,) = (tmp_path / "other").iterdir()
    claim.rename(tmp_path / "run" / "000099-aaaaaaaa")
    status, _, err = copy(tmp_path / "run", tmp_path / "new.pool")
    assert status == FAILED
    assert "holds the claims of 2 runs" in err


def test_numbers_that_another_program_has_made_are_refused_by_name(tmp_path):
    pool_with(tmp_path / "run.pool")
    copied(tmp_path / "run.pool", tmp_path / "tier")
    (claim,) = (tmp_path / "tier").iterdir()
    claim.rename(tmp_path / "tier" / "999999999999999999-00000000")
    status, _, err = copy(tmp_path / "run.pool", tmp_path / "tier")
    assert status == FAILED
    assert "the largest number that there can be" in err
    text, name = manifest_in(tmp_path / "tier").read_bytes(), manifest_in(tmp_path / "tier")
    body = json.loads(text) | {"metrics": {"loss": 10**400}}
    with pytest.raises(DamagedError, match="metrics"):
        parse(json.dumps(body).encode(), WRITER, int(name.name[:12]))


def test_a_folder_that_is_no_tier_is_named_as_a_source(tmp_path):
    (tmp_path / "empty").mkdir()
    status, _, err = copy(tmp_path / "empty", tmp_path / "new.pool")
    assert status == FAILED
    assert "holds no claim of a tier" in err
