"""Tiers with ``compress=``: what comes back is bit by bit what was sent, whichever run has sent it, in any form."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import lz4.block
import pytest
import torch
from cli.calls import call, call_json
from toys import damage as damage_tensor
from toys import everything, same

import lightck
from lightck.cli.base import BAD, FAILED, OK
from lightck.errors import CorruptPoolError, TierError
from lightck.pool.reader import StoredCheckpoint, open_pool
from lightck.tiers import codecs, sending
from lightck.tiers.copying import copy_to_tier
from lightck.tiers.decisions import complete, manifests_of, newest_complete
from lightck.tiers.folder import FolderStore
from lightck.tiers.names import Claim, ManifestName, Writer
from lightck.tiers.sending import KnownObjects, send
from lightck.tiers.tier_manifest import TierManifest, read_manifest
from tiers.conftest import Bucket
from tiers.small_tiers import age, needed, orphan, states, store_of, tree, wait_for_drain

zstd: Any = codecs._library("zstd")
CODECS = ("zstd", "lz4")
WRITER = Writer(Claim(1, "0" * 8), 0, 1)


class Mixed(torch.nn.Module):
    """Tensors of many kinds, some of them empty or of one element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = torch.nn.Linear(300, 200)
        self.narrow = torch.nn.Linear(200, 50).bfloat16()
        self.frozen = torch.nn.Parameter(torch.randn(400, 100), requires_grad=False)
        for name, tensor in {
            "numbers": torch.arange(5000),
            "flags": torch.rand(7001) > 0.5,
            "waves": torch.randn(900, dtype=torch.complex64),
            "doubles": torch.randn(700, dtype=torch.float64),
            "halves": torch.randn(701).half(),
            "bytes": torch.arange(1001, dtype=torch.uint8),
            "nothing": torch.empty(0, 3),
            "one": torch.tensor(1.5),
            "random": torch.randint(-(2**62), 2**62, (2000,)),
        }.items():
            self.register_buffer(name, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.wide(x).bfloat16())


def build() -> tuple[Mixed, torch.optim.Optimizer]:
    model = Mixed()
    return model, torch.optim.Adam([each for each in model.parameters() if each.requires_grad])


def update(model: Mixed, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.manual_seed(step)
    model(torch.randn(4, 300)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model.numbers.add_(1)
        model.flags.logical_not_()
        model.waves.mul_(1j)


def train_until(folder: Path, step: int, compress: str | None = None, tier: lightck.Tier | None = None) -> Any:
    """Train until a step, with each step sent to ``folder/tier``. Returns the state at the beginning and at the end."""
    model, optimizer = build()
    tiers = [tier or lightck.Tier(folder / "tier", every=1, compress=compress)]
    with lightck.attach(model, folder / "run.pool", optimizer=optimizer, resume=True, tiers=tiers) as session:
        began = session.step, everything(model, optimizer)
        wait_for_drain(session)
        while session.step < step:
            update(model, optimizer, session.step)
            session.end_step()
            session.flush()
            wait_for_drain(session)
    return began, everything(model, optimizer)


def plain_until(step: int) -> Any:
    model, optimizer = build()
    for number in range(step):
        update(model, optimizer, number)
    return everything(model, optimizer)


def codings(tier: Path) -> set[str | None]:
    """In which forms the pieces of a tier are stored."""
    store = store_of(tier)
    objects = [each for name in store.listing().manifests for each in read_manifest(store, name).objects if each.key]
    return {None if each.coding is None else each.coding.codec for each in objects}


def manifest_path(tier: Path, step: int) -> Path:
    (found,) = (each for each in store_of(tier).listing().manifests if each.step == step)
    return tier / str(found)


def no_progress(*_: object) -> Any:
    return nullcontext(lambda _: None)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pool of a training of two steps. Nobody writes to it."""
    path = tmp_path_factory.mktemp("pool") / "run.pool"
    model, optimizer = build()
    with lightck.attach(model, path, optimizer=optimizer) as session:
        for step in range(2):
            update(model, optimizer, step)
            session.end_step()
            session.flush()
    return path


@pytest.fixture(scope="module")
def originals(pool: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tier of each form, all with the same checkpoint."""
    folder = tmp_path_factory.mktemp("tiers")
    for codec in (*CODECS, None):
        copy_to_tier(pool, folder / str(codec), written_by="test", progress=no_progress, codec=codec)
    return folder


@pytest.fixture
def made(originals: Path, tmp_path: Path) -> Path:
    shutil.copytree(originals, tmp_path / "it")
    return tmp_path / "it"


# -- what comes back


@pytest.mark.parametrize("codec", ["zstd", pytest.param("lz4", marks=pytest.mark.long)])
def test_a_training_that_lost_its_pool_goes_on_from_a_compressed_tier_with_the_same_bits(codec, tmp_path):
    train_until(tmp_path, 2, codec)
    assert codec in codings(tmp_path / "tier")
    (tmp_path / "run.pool").unlink()
    (step, began), ended = train_until(tmp_path, 3, codec)
    assert step == 2
    assert same(began, plain_until(2))
    assert same(ended, plain_until(3))


@pytest.mark.long
def test_runs_with_and_without_compression_go_on_in_one_tier(tmp_path):
    for number, codec in enumerate(("zstd", None, "lz4", "zstd")):
        (step, began), _ = train_until(tmp_path, 2 * number + 2, codec)
        assert step == 2 * number
        assert same(began, plain_until(step))
        (tmp_path / "run.pool").unlink()
    tier = tmp_path / "tier"
    assert codings(tier) == {"zstd", "lz4", None}
    for step, (model, _) in states(tier).items():
        expected = plain_until(step)["model"]
        assert same(model, {name: expected[name] for name in model})
    assert call("verify", tier, "--deep").exit_code == OK
    age(tier)
    lost = orphan(tier, Claim(1, "0" * 8))
    before = needed(store_of(tier))
    os.utime(lost, (0, 0))
    assert call("gc", tier, "--stopped").exit_code == OK
    assert before <= tree(tier)
    assert not lost.exists()
    assert call("verify", tier, "--deep").exit_code == OK


def test_a_compressed_tier_in_an_object_store_is_recovered(bucket: Bucket, pool: Path, made: Path):
    given = {"options": bucket.options}
    copy_to_tier(pool, bucket.url, written_by="t", progress=no_progress, codec="lz4", **given)
    checkpoint = lightck.recover(bucket.url, options=bucket.options)
    assert same(dict(checkpoint.model), dict(lightck.recover(pool).model))
    assert sum(map(len, bucket.objects().values())) < sum(map(len, _files(made / "None")))


def _files(tier: Path) -> list[bytes]:
    return [path.read_bytes() for path in tier.rglob("*") if path.is_file()]


def test_copy_takes_a_checkpoint_between_tiers_of_different_compression(pool, made, tmp_path):
    new, tier = tmp_path / "new.pool", tmp_path / "other"
    assert call("copy", made / "zstd", new).exit_code == OK
    done = call("copy", new, tier, "--compress", "lz4")
    assert done.exit_code == OK
    assert "were written)" in done.stdout
    assert codings(tier) >= {"lz4"}
    assert call("copy", tier, tmp_path / "again.pool").exit_code == OK
    assert call("diff", made / "zstd", tier).exit_code == OK
    assert call("diff", pool, tmp_path / "again.pool").exit_code == OK
    done = call("copy", tier, tmp_path / "third.pool", "--compress", "zstd")
    assert (done.exit_code, "a pool is never compressed" in done.stderr) == (2, True)


def test_inspect_says_what_compression_has_saved(made):
    status, facts = call_json("inspect", made / "zstd")
    assert status == OK
    (row,) = facts["compressed"]
    assert row["codec"] == "zstd"
    assert 0 < row["nbytes"] < row["content_nbytes"]
    assert [each["codecs"] for each in facts["checkpoints"]] == [["zstd"]] * len(facts["checkpoints"])
    assert facts["nbytes"] == sum(map(len, _objects(made / "zstd")))
    text = call("inspect", made / "zstd").stdout
    assert f"{row['content_nbytes'] / row['nbytes']:.2f} times smaller" in text
    assert call_json("inspect", made / "None")[1]["compressed"] == []


def _objects(tier: Path) -> list[bytes]:
    return [path.read_bytes() for path in tier.rglob("data/*")]


# -- not twice


def sent(pool: Path, store: FolderStore, number: int, earlier: KnownObjects, codec: str | None) -> int:
    with closing(open_pool(str(pool))) as reader:
        stored = next(iter(reader.checkpoints()))
        done = send(stored, store, WRITER, f"{number:08x}", earlier, written_by="test", codec=codec)
    earlier.add(done.manifest)
    return done.nbytes


def test_what_did_not_change_is_not_sent_again_whatever_its_form(tmp_path):
    base, adapter = torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 4)
    model = torch.nn.Sequential(base, adapter)
    base.requires_grad_(False)
    optimizer = torch.optim.AdamW(adapter.parameters())
    store, earlier, sizes = FolderStore(str(tmp_path / "tier")), KnownObjects(), []
    with lightck.attach(model, tmp_path / "run.pool", optimizer=optimizer) as session:
        for number, codec in enumerate(("zstd", "zstd", None, "lz4", "zstd")):
            model(torch.randn(2, 1024)).square().mean().backward()
            optimizer.step()
            session.flush()
            if number == 4:  # a drain that was started again knows what the manifests say
                earlier = KnownObjects()
                for name in store.listing().manifests:
                    earlier.add(read_manifest(store, name))
            sizes.append(sent(tmp_path / "run.pool", store, number, earlier, codec))
    frozen = 4 * (1024 * 1024 + 1024)
    assert 0.5 * frozen < sizes[0] < 0.95 * frozen, sizes
    assert all(size < 0.05 * frozen for size in sizes[1:]), sizes


@pytest.mark.long
def test_a_new_claim_links_compressed_objects_and_sends_no_frozen_tensor_again(tmp_path):
    train_until(tmp_path, 2, "zstd")
    train_until(tmp_path, 3, "zstd")
    store = store_of(tmp_path / "tier")
    listing = store.listing()
    newest = max(listing.claims)
    linked = [
        each
        for name in listing.manifests
        if name.writer.claim == newest
        for each in read_manifest(store, name).objects
        if each.coding is not None
    ]
    frozen = [each for each in linked if each.content_nbytes == 4 * 400 * 100]
    assert frozen
    assert all((tmp_path / "tier" / str(each.name)).stat().st_nlink > 1 for each in frozen)


# -- what is hostile


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    body = json.loads(path.read_bytes())
    change(body)
    path.write_bytes(json.dumps(body).encode())


def coded(body: dict[str, Any]) -> list[Any]:
    """The largest compressed object that a manifest names."""
    return max((each for each in body["objects"] if len(each) == 5), key=lambda each: each[1])


def _set(number: int, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda body: coded(body).__setitem__(number, value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set(3, "brotli"), "compressed with 'brotli', which this release of lightck does not know: install"),
        (_set(3, 7), "compressed with no text"),
        (_set(4, []), "no sections"),
        (_set(4, {"4": 8}), "no sections"),
        (_set(4, [[3, 1 << 20]]), "is malformed"),
        (_set(4, [[4, -1]]), "is malformed"),
        (_set(4, [[4, True]]), "is malformed"),
        (_set(4, [[4, 1 << 40]]), "is malformed"),
        (_set(4, [[4, 32 << 20], [2, 1]]), "more than 33554432 bytes"),
        (_set(4, [[4, 8]]), "not smaller than what it was made from"),
        (lambda body: body.__setitem__("version", 1), "is malformed"),
        (lambda body: body.__setitem__("version", 3), "install a newer release"),
        (lambda body: coded(body).pop(), "is malformed"),
        (lambda body: coded(body)[4].append([1, 1]), "becomes"),
        (lambda body: coded(body)[4].pop(), "bytes outside of an object"),
    ],
)
def test_a_hostile_manifest_gives_no_pool_and_a_reason(change, reason, made, tmp_path):
    tier = made / "lz4"
    changed(manifest_path(tier, 2), change)
    done = call("copy", tier, tmp_path / "new.pool")
    assert (done.exit_code, done.stdout) == (BAD, "")
    assert reason in done.stderr
    assert not (tmp_path / "new.pool").exists()
    with pytest.raises(CorruptPoolError):
        lightck.recover(tier)


def _bomb(_: list[Any]) -> bytes:
    maker = zstd.ZstdCompressor()
    return bytes(maker.compress(bytes(64 << 20)) + maker.flush())


@pytest.mark.parametrize(
    ("codec", "data"),
    [
        ("zstd", _bomb),
        ("zstd", lambda _: zstd.compress(bytes(64 << 20))),
        ("lz4", lambda _: lz4.block.compress(bytes(64 << 20), store_size=False)),
        ("zstd", lambda sent: zstd.compress(bytes(sum(nbytes for _, nbytes in sent[4]) - 1))),
        ("zstd", lambda sent: zstd.compress(bytes(sum(nbytes for _, nbytes in sent[4])))),
        ("lz4", lambda _: b"\xff" * 1000),
        ("lz4", lambda _: zstd.compress(bytes(1000))),
        ("zstd", lambda _: b"\0"),
    ],
    ids=["endless", "zstd bomb", "lz4 bomb", "short", "other bytes", "noise", "zstd for lz4", "one byte"],
)
def test_a_hostile_object_gives_no_pool_and_a_reason(codec, data, made, tmp_path):
    tier = made / codec
    path = manifest_path(tier, 2)

    def exchange(body: dict[str, Any]) -> None:
        sent = coded(body)
        new = data(sent)
        sent[1] = len(new)
        (path.parents[1] / "data" / sent[0]).write_bytes(new)

    changed(path, exchange)
    with pytest.raises(CorruptPoolError, match=r"cannot be decompressed|checksum|not smaller"):
        lightck.recover(tier, step=2)
    assert call("copy", tier, tmp_path / "new.pool", "--step", "2").exit_code == BAD
    assert not (tmp_path / "new.pool").exists()
    assert call("verify", tier).exit_code == BAD


def test_a_flip_or_a_cut_in_any_compressed_object_is_found_and_named(made):
    chance = random.Random(seed := random.randrange(10**6))
    tier = made / "zstd"
    store = store_of(tier)
    (name,) = manifests_of(store.listing(), newest_complete(store.listing()))
    for each in [each for each in read_manifest(store, name).objects if each.coding is not None]:
        path = tier / str(each.name)
        data = path.read_bytes()
        at = chance.randrange(len(data))
        for damaged in (data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :], data[:at]):
            path.write_bytes(damaged)
            done = call("verify", tier, "--step", name.step)
            assert done.exit_code == BAD, f"seed {seed}, at {at} of {len(data)}"
            assert str(each.name) in done.stdout
        path.write_bytes(data)


# -- without the library


@pytest.fixture
def no_library(monkeypatch):
    for name in ("compression", "compression.zstd", "backports", "backports.zstd", "lz4", "lz4.block"):
        monkeypatch.setitem(sys.modules, name, None)


CURE = r"pip install 'lightck\[compression\]'"


@pytest.mark.parametrize("codec", CODECS)
def test_a_missing_library_is_named_with_its_cure_before_anything_is_done(codec, pool, made, tmp_path, no_library):
    here = tmp_path / "here"
    here.mkdir()
    model, optimizer = build()
    tiers = [lightck.Tier(here / "tier", every=1, compress=codec)]
    with pytest.raises(TierError, match=CURE):
        lightck.attach(model, here / "run.pool", optimizer=optimizer, tiers=tiers)
    done = call("copy", pool, here / "tier", "--compress", codec)
    assert (done.exit_code, "lightck[compression]" in done.stderr) == (FAILED, True)
    done = call("copy", made / codec, here / "new.pool")
    assert (done.exit_code, "lightck[compression]" in done.stderr) == (FAILED, True)
    with pytest.raises(TierError, match=CURE):
        lightck.recover(made / codec)
    assert not [path.name for path in here.iterdir() if path.suffix != ".lock"]
    assert call("inspect", made / codec).exit_code == OK, "no tensor is read"


def test_a_training_that_needs_a_compressed_checkpoint_does_not_begin_without_the_library(made, tmp_path, no_library):
    """It does not continue from an older checkpoint either, or from the beginning."""
    tier = lightck.Tier(made / "zstd", every=1)
    with pytest.raises(TierError, match=CURE):
        train_until(tmp_path, 3, tier=tier)
    assert not (tmp_path / "run.pool").exists()


# -- repair


def damage(tier: Path, step: int = 2) -> list[Path]:
    """Remove the objects of tensors of a checkpoint."""
    store = store_of(tier)
    (name,) = (each for each in store.listing().manifests if each.step == step)
    paths = [tier / str(each.name) for each in read_manifest(store, name).objects if each.key]
    for path in paths:
        path.unlink()
    return paths


@pytest.mark.parametrize("codec", [*CODECS, None])
@pytest.mark.parametrize("source", ["zstd", "lz4", "None"])
def test_repair_makes_the_same_object_from_a_copy_of_any_form(codec, source, made, tmp_path):
    tier, other = made / str(codec), tmp_path / "other"
    shutil.copytree(made / source, other)
    whole = _read(tier)
    damage(tier)
    assert call_json("repair", tier, "--from", other)[1]["left"] == []
    assert _read(tier) == whole
    assert call("verify", tier, "--deep").exit_code == OK


def _read(tier: Path) -> dict[str, bytes]:
    return {str(path.relative_to(tier)): path.read_bytes() for path in tier.rglob("*") if path.is_file()}


def test_repair_makes_the_same_object_from_the_pool(pool, made):
    tier = made / "zstd"
    whole = _read(tier)
    damage(tier)
    assert call_json("repair", tier, "--from", pool)[1]["left"] == []
    assert _read(tier) == whole


def test_repair_reads_no_more_of_the_pool_than_the_object_needs(pool, made, monkeypatch):
    """The whole checkpoint is verified only to say why its bytes do not become the object."""
    tier, verified = made / "zstd", []
    damage(tier)
    monkeypatch.setattr(StoredCheckpoint, "verify", lambda self: verified.append(self))
    assert call_json("repair", tier, "--from", pool)[1]["left"] == []
    assert not verified


@pytest.mark.parametrize("source", ["tier", "pool"])
def test_another_release_of_the_library_is_noticed_and_named_and_the_same_object_elsewhere_is_taken(
    source, pool, made, tmp_path, monkeypatch
):
    tier, copy = made / "zstd", tmp_path / "copy"
    shutil.copytree(tier, copy)
    given = pool if source == "pool" else made / "None"
    whole, lost = _read(tier), damage(tier)
    monkeypatch.setattr(codecs, "_ZSTD_LEVEL", 9)  # which makes other bytes, as another release may
    status, found = call_json("repair", tier, "--from", given)
    assert status == BAD
    reasons = [each["reason"] for each in found["left"]]
    assert any("zstd on this machine compresses it to other bytes" in each for each in reasons)
    assert {name for name in whole if not (tier / name).exists()} <= {str(path.relative_to(tier)) for path in lost}
    assert call_json("repair", tier, "--from", given, "--from", copy)[1]["left"] == []
    assert _read(tier) == whole


def test_a_pool_that_is_damaged_is_made_from_a_compressed_tier(pool, made, tmp_path):
    new = tmp_path / "run.pool"
    shutil.copy(pool, new)
    damage_tensor(new, "model/wide.weight")
    assert call_json("repair", new, "--from", made / "lz4")[1]["step"] == 2
    assert call("diff", new, pool).exit_code == OK


# -- killed


def test_a_copy_that_is_killed_anywhere_leaves_whole_checkpoints(pool, tmp_path):
    chance = random.Random(seed := random.randrange(10**6))
    tier = tmp_path / "tier"
    for _ in range(4):
        name, after = chance.choice(["rename", "fdatasync", "write"]), chance.randint(1, 5)
        if not (pid := os.fork()):
            _die_at(name, after)
            call("copy", pool, tier, "--compress", chance.choice(CODECS))
            os._exit(0)
        os.waitpid(pid, 0)
        if complete(store_of(tier).listing()):
            assert call("verify", tier, "--deep").exit_code == OK, f"seed {seed}"
    assert call("copy", pool, tier, "--compress", "zstd").exit_code == OK
    assert same(dict(lightck.recover(tier).model), dict(lightck.recover(pool).model)), f"seed {seed}"


def _die_at(name: str, after: int) -> None:
    """Let this process die at a call of the system."""
    real, calls = getattr(os, name), 0

    def call_real(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == after:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)

    setattr(os, name, call_real)


# -- pieces


def test_a_piece_that_does_not_get_smaller_lies_beside_those_that_do(tmp_path, monkeypatch):
    monkeypatch.setattr(sending, "OBJECT_NBYTES_MAX", 1 << 20)
    model = torch.nn.Module()
    model.register_parameter("weight", torch.nn.Parameter(torch.randn(1 << 18)))
    model.register_buffer("noise", torch.randint(-(2**63), 2**63 - 1, (1 << 17,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lightck.attach(model, tmp_path / "run.pool", optimizer=optimizer) as session:
        model.weight.sum().backward()
        optimizer.step()
        session.flush()
    copy_to_tier(tmp_path / "run.pool", tmp_path / "tier", written_by="t", progress=no_progress, codec="zstd")
    assert codings(tmp_path / "tier") == {"zstd", None}
    assert call("verify", tmp_path / "tier", "--deep").exit_code == OK


def test_a_manifest_without_compressed_objects_is_one_that_older_releases_read(made):
    store = store_of(made / "None")
    (name,) = store.listing().manifests
    body = json.loads((made / "None" / str(name)).read_bytes())
    assert body["version"] == 1
    assert {len(each) for each in body["objects"]} == {3}
    assert json.loads(manifest_path(made / "lz4", 2).read_bytes())["version"] == 2


def test_a_manifest_is_read_as_it_was_written(made):
    store = store_of(made / "zstd")
    for name in store.listing().manifests:
        manifest = read_manifest(store, name)
        assert isinstance(manifest, TierManifest)
        assert manifest.packed() == (made / "zstd" / str(name)).read_bytes()
        assert isinstance(name, ManifestName)
