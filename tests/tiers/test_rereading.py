"""``Tier(reread=...)``: what lies in the pool and in the tiers is read again; damage is found, and mended or named."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import adam, checkpoints, damage, flip, net, same, train

import lightck
from lightck.errors import CorruptPoolError
from lightck.tiers.decisions import complete
from lightck.tiers.names import ObjectName, parse
from lightck.tiers.object_store import ObjectStore
from lightck.tiers.store import Store
from lightck.tiers.tier_manifest import read_manifest
from tiers.small_tiers import store_of, wait_for_drain

PERIOD = "0.2s"


def flipped(store: Store, name: str) -> None:
    """Flip a bit in the middle of a file of a tier."""
    data = bytearray(store.get(name, 1 << 30))
    data[len(data) // 2] ^= 1
    store.put(name, data)


def objects_of(store: Store, step: int) -> list[str]:
    """The objects of a step, largest first."""
    (manifest,) = [each for each in store.listing().manifests if each.step == step]
    return [str(each.name) for each in sorted(read_manifest(store, manifest).objects, key=lambda each: -each.nbytes)]


def own_objects_of(store: Store, step: int) -> list[str]:
    """The objects of a step that no other step has."""
    others = {each.step for each in store.listing().manifests} - {step}
    return sorted(set(objects_of(store, step)).difference(*(objects_of(store, other) for other in others)))


def manifest_of(store: Store, step: int) -> str:
    (manifest,) = [each for each in store.listing().manifests if each.step == step]
    return str(manifest)


@contextmanager
def training(folder: Path, tiers: Sequence[lightck.Tier], **options: Any) -> Iterator[tuple[Any, Any, lightck.Session]]:
    model = net(16)
    optimizer = adam(model)
    pool = folder / "run.pool"
    with lightck.attach(model, pool, optimizer=optimizer, resume=True, tiers=tiers, **options) as session:
        wait_for_drain(session)
        yield model, optimizer, session


def trained(session: lightck.Session, model: Any, optimizer: Any, steps: int) -> None:
    """Make steps, each of which is committed and sent."""
    for _ in range(steps):
        train(model, optimizer, 1, start=session.step)
        session.end_step()
        session.flush()
        wait_for_drain(session)


def until(session: lightck.Session, is_true: Callable[[lightck.Stats], object], seconds: float = 30.0) -> lightck.Stats:
    deadline = time.monotonic() + seconds
    while not is_true(stats := session.stats()):
        assert time.monotonic() < deadline, f"it did not happen in time: {stats.tiers}"
        time.sleep(0.01)
    return stats


def rounds_more(session: lightck.Session, n: int = 2) -> lightck.Stats:
    """Wait until the first tier and the pool were read again from now on: the round that is under way, and the next."""
    stats = session.stats()
    tier, pool = stats.tiers[0].rounds + n, stats.pool_rounds + n
    return until(session, lambda now: now.pool_rounds >= pool and now.tiers[0].rounds >= tier)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def tier_at(root: Any, **options: Any) -> lightck.Tier:
    return lightck.Tier(root, **{"every": 1, "reread": PERIOD, **options})


# -- what is intact


@pytest.mark.long
def test_whole_tiers_and_pools_are_read_again_and_nothing_is_said(tmp_path, caplog):
    with training(tmp_path, [tier_at(tmp_path / "tier")]) as (model, optimizer, session):
        trained(session, model, optimizer, 3)
        stats = rounds_more(session)
    (tier,) = stats.tiers
    nbytes = sum((tmp_path / "tier" / name).stat().st_size for name in objects_of(store_of(tmp_path / "tier"), 3))
    assert tier.bytes_reread > 2 * nbytes
    assert (tier.damaged, tier.mended, tier.error, stats.pool_damaged) == (0, 0, None, 0)
    assert stats.pool_bytes_reread > 0
    assert warnings_in(caplog) == []


@pytest.mark.long
def test_without_reread_nothing_is_read_again(tmp_path):
    with training(tmp_path, [lightck.Tier(tmp_path / "tier", every=1, reread=None)]) as (model, optimizer, session):
        trained(session, model, optimizer, 2)
        time.sleep(0.5)
        stats = session.stats()
    (tier,) = stats.tiers
    assert (tier.bytes_reread, tier.rounds, stats.pool_bytes_reread, stats.pool_rounds) == (0, 0, 0, 0)


def test_no_false_report_while_a_training_overwrites_its_slots_quickly(tmp_path, caplog):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    draw = random.Random(seed)
    tiers = [tier_at(tmp_path / "tier", every="1s", keep_last=2, reread="0.05s", spare_slot=draw.random() < 0.5)]
    with training(tmp_path, tiers) as (model, optimizer, session):
        end = time.monotonic() + 1.0
        while time.monotonic() < end or session.stats().pool_rounds < 5 or session.stats().checkpoints <= 50:
            train(model, optimizer, 1, start=session.step)
            time.sleep(draw.choice((0, 0, 0.001, 0.01)))
        stats = session.stats()
    assert stats.checkpoints > 50
    assert (stats.tiers[0].damaged, stats.pool_damaged) == (0, 0)
    assert [each for each in warnings_in(caplog) if "damaged" in each] == []


@pytest.mark.long
def test_what_retention_removes_meanwhile_is_no_damage(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("lightck.tiers.drain_link.GRACE_SECONDS", 0.0)
    tiers = [tier_at(tmp_path / "tier", keep_last=2, reread="0.1s")]
    with training(tmp_path, tiers) as (model, optimizer, session):
        trained(session, model, optimizer, 25)
        stats = rounds_more(session)
    assert {each.step for each in complete(store_of(tmp_path / "tier").listing())} == {24, 25}
    assert (stats.tiers[0].damaged, warnings_in(caplog)) == (0, [])


def test_a_tier_that_is_not_mounted_any_more_is_no_damage(tmp_path, caplog):
    root, elsewhere = tmp_path / "tier", tmp_path / "elsewhere"
    with training(tmp_path, [tier_at(root)]) as (model, optimizer, session):
        trained(session, model, optimizer, 3)
        until(session, lambda now: now.tiers[0].rounds > 0)
        root.rename(elsewhere)
        rounds = session.stats().pool_rounds
        until(session, lambda now: now.pool_rounds > rounds + 5)
        assert session.stats().tiers[0].damaged == 0
        elsewhere.rename(root)
        rounds_more(session)
    assert (session.stats().tiers[0].damaged, [each for each in warnings_in(caplog) if "damaged" in each]) == (0, [])


# -- objects of the own claim


@pytest.mark.parametrize("how", [pytest.param("flipped", marks=pytest.mark.long), "gone"])
def test_an_object_is_written_anew_from_the_pool(tmp_path, caplog, how):
    root = tmp_path / "tier"
    with training(tmp_path, [tier_at(root)]) as (model, optimizer, session):
        trained(session, model, optimizer, 2)
        before = {name: (root / name).read_bytes() for name in objects_of(store_of(root), 2)}
        for name in before:
            if how == "gone":
                (root / name).unlink()
            else:
                flipped(store_of(root), name)
        until(session, lambda now: now.tiers[0].mended == len(before))
        assert {name: (root / name).read_bytes() for name in before} == before
        stats = rounds_more(session)
    assert stats.tiers[0].damaged == stats.tiers[0].mended == len(before)
    said = warnings_in(caplog)
    assert len(said) in (1, 2), "one for each step; or one for both, because both have the same layout table"
    assert all("written anew from another copy" in each for each in said)


def test_an_object_is_written_anew_although_the_batch_that_follows_was_stored_since(tmp_path):
    """The training stores which batch follows a checkpoint when it fetches it: after the checkpoint was sent."""
    root = tmp_path / "tier"
    with training(tmp_path, [tier_at(root)]) as (model, optimizer, session):
        data = torch.utils.data.TensorDataset(torch.arange(48.0).view(12, 4))
        batches = iter(session.loader(torch.utils.data.DataLoader(data, batch_size=2)))
        for _ in range(2):
            optimizer.zero_grad()
            model(next(batches)[0]).sum().backward()
            optimizer.step()
            session.flush()
            until(session, lambda now: now.tiers[0].step == session.step)
        model(next(batches)[0])
        (frame,) = [name for name in own_objects_of(store_of(root), 2) if b"SLOT" in (root / name).read_bytes()[:64]]
        before = (root / frame).read_bytes()
        flipped(store_of(root), frame)
        until(session, lambda now: now.tiers[0].mended == 1)
        assert (root / frame).read_bytes() == before


@pytest.mark.long
def test_an_object_that_the_pool_has_no_longer_is_written_anew_from_another_tier(tmp_path, caplog):
    near, far = tmp_path / "near", tmp_path / "far"
    with training(tmp_path, [tier_at(near), tier_at(far, reread=None)]) as (model, optimizer, session):
        trained(session, model, optimizer, 6)  # the pool holds fewer steps
        name = objects_of(store_of(near), 1)[0]
        before = (near / name).read_bytes()
        flipped(store_of(near), name)
        until(session, lambda now: now.tiers[0].mended == 1)
        assert (near / name).read_bytes() == before
    assert lightck.recover(near, step=1).step == 1
    (said,) = warnings_in(caplog)
    assert "step 1 in the tier" in said


def test_an_object_without_another_copy_is_named_once_for_each_checkpoint(tmp_path, caplog):
    root = tmp_path / "tier"
    with training(tmp_path, [tier_at(root)]) as (model, optimizer, session):
        trained(session, model, optimizer, 6)
        for name in (names := own_objects_of(store_of(root), 1)):
            flipped(store_of(root), name)
        assert len(names) == 2
        until(session, lambda now: now.tiers[0].damaged == 2)
        stats = rounds_more(session)
    assert (stats.tiers[0].damaged, stats.tiers[0].mended) == (2, 0)
    (said,) = warnings_in(caplog)
    assert "step 1 in the tier" in said
    assert "no other copy of it was found" in said
    assert "lightck repair" in said
    assert lightck.recover(root).step == 6


@pytest.mark.long
def test_wrong_bytes_of_the_right_name_are_no_copy(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    with training(tmp_path, [tier_at(near), tier_at(far, reread=None)]) as (model, optimizer, session):
        trained(session, model, optimizer, 6)
        for root in (near, far):
            flipped(store_of(root), objects_of(store_of(root), 1)[0])
        stats = until(session, lambda now: now.tiers[0].damaged == 1)
        wrong = (near / objects_of(store_of(near), 1)[0]).read_bytes()
        stats = rounds_more(session)
        assert (near / objects_of(store_of(near), 1)[0]).read_bytes() == wrong
    assert stats.tiers[0].mended == 0


@pytest.mark.long
def test_an_object_in_an_object_store_is_written_anew(tmp_path, bucket, caplog):
    tiers = [lightck.Tier(bucket.url, every=1, options=bucket.options, reread="1s")]
    with training(tmp_path, tiers) as (model, optimizer, session):
        trained(session, model, optimizer, 2)
        store: ObjectStore = bucket.store
        flip_one, lose = objects_of(store, 2)[:2]
        before = store.get(flip_one, 1 << 30), store.get(lose, 1 << 30)
        flipped(store, flip_one)
        store.delete(lose)
        until(session, lambda now: now.tiers[0].mended == 2)
        assert (store.get(flip_one, 1 << 30), store.get(lose, 1 << 30)) == before


# -- manifests, older claims


@pytest.mark.long
@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_a_damaged_manifest_is_named(tmp_path, caplog, how):
    root = tmp_path / "tier"
    with training(tmp_path, [tier_at(root)]) as (model, optimizer, session):
        trained(session, model, optimizer, 3)
        name = manifest_of(store_of(root), 2)
        if how == "gone":
            (root / name).unlink()
        else:  # a digit, so that it is JSON still
            text = (root / name).read_text()
            at = text.index('"runs":[[') + len('"runs":[[')
            (root / name).write_text(text[:at] + str((int(text[at]) + 1) % 9 + 1) + text[at + 1 :])
        until(session, lambda now: now.tiers[0].damaged == 1)
        stats = rounds_more(session)
    assert (stats.tiers[0].damaged, stats.tiers[0].mended) == (1, 0)
    (said,) = warnings_in(caplog)
    assert f"step 2 in the tier {str(root)!r} is damaged: its manifest {name}" in said


@pytest.mark.long
def test_an_object_of_an_older_claim_is_named_and_not_touched(tmp_path, caplog):
    near, far = tmp_path / "near", tmp_path / "far"
    with training(tmp_path, [tier_at(near), tier_at(far)]) as (model, optimizer, session):
        trained(session, model, optimizer, 2)
    name = objects_of(store_of(near), 1)[0]
    with training(tmp_path, [tier_at(near), tier_at(far)]) as (model, optimizer, session):
        trained(session, model, optimizer, 2)
        flipped(store_of(near), name)
        wrong = (near / name).read_bytes()
        until(session, lambda now: now.tiers[0].damaged == 1)
        stats = rounds_more(session)
        assert (near / name).read_bytes() == wrong
    assert (stats.tiers[0].damaged, stats.tiers[0].mended) == (1, 0)
    (said,) = [each for each in warnings_in(caplog) if "damaged" in each]
    found = parse(name)
    assert isinstance(found, ObjectName)
    assert f"(claim {found.writer.claim})" in said
    assert "belongs to an earlier session" in said


# -- the pool


def test_a_damaged_checkpoint_of_the_pool_is_reported_and_its_slot_is_used_next(tmp_path, caplog):
    pool = tmp_path / "run.pool"
    with training(tmp_path, [tier_at(tmp_path / "tier")]) as (model, optimizer, session):
        trained(session, model, optimizer, 3)
        slots = {each.step: each.record.slot for each in checkpoints(pool)}
        damage(pool, "model/0.weight", [3])
        until(session, lambda now: now.pool_damaged == 1)
        with pytest.raises(CorruptPoolError):
            lightck.recover(pool, step=3)
        assert lightck.recover(pool).step == 2, "the one before"
        trained(session, model, optimizer, 1)
        found = {each.step: each.record.slot for each in checkpoints(pool)}
        assert found[4] == slots[3]
        assert found[2] == slots[2], "it was kept"
        stats = rounds_more(session)
    assert stats.pool_damaged == 1
    (said,) = warnings_in(caplog)
    assert f"step 3 in the pool {str(pool)!r} is damaged" in said
    assert "model/0.weight" in said


@pytest.mark.long
def test_of_a_pool_whose_checkpoints_are_all_damaged_none_is_promised(tmp_path, caplog):
    pool = tmp_path / "run.pool"
    with training(tmp_path, [tier_at(tmp_path / "tier")]) as (model, optimizer, session):
        trained(session, model, optimizer, 3)
        steps = [each.step for each in checkpoints(pool)]
        for step in steps:
            damage(pool, "model/0.weight", [step])
        until(session, lambda now: now.pool_damaged == len(steps))
        trained(session, model, optimizer, 1)
        assert lightck.recover(pool).step == 4
    first, *_, last = warnings_in(caplog)
    assert "the other one is kept until then" in first
    assert "the next one to be committed is the first whole one" in last


@pytest.mark.long
def test_a_frozen_tensor_that_was_damaged_in_a_slot_is_written_there_again(tmp_path):
    pool, model = tmp_path / "run.pool", net(64)
    for each in model[0].parameters():
        each.requires_grad_(False)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, tiers=[tier_at(tmp_path / "tier")]) as session:
        wait_for_drain(session)
        trained(session, model, optimizer, 8)
        assert session.stats().left_out > 0, "the slot has its bytes already"
        damage(pool, "model/0.weight", [8])
        until(session, lambda now: now.pool_damaged == 1)
        trained(session, model, optimizer, 1)
        assert same(dict(lightck.recover(pool, step=9).model), dict(model.state_dict()))


@pytest.mark.long
def test_a_damaged_manifest_of_the_pool_is_reported(tmp_path, caplog):
    pool = tmp_path / "run.pool"
    with training(tmp_path, [tier_at(tmp_path / "tier")]) as (model, optimizer, session):
        trained(session, model, optimizer, 3)
        newest = checkpoints(pool)[0]
        flip(pool, newest.reader.superblock.manifest_at(newest.record.slot, newest.record.manifest_index) + 40)
        until(session, lambda now: now.pool_damaged == 1)
        trained(session, model, optimizer, 1)
    (said,) = warnings_in(caplog)
    assert "step 3 in the pool" in said


# -- what comes first, and what ends it


@pytest.mark.long
def test_a_due_checkpoint_comes_before_what_is_read_again(tmp_path):
    """Reading never ends here, because a round can never be over in its period."""
    with training(tmp_path, [tier_at(tmp_path / "tier", reread="0.000001s")]) as (model, optimizer, session):
        trained(session, model, optimizer, 30)
        stats = until(session, lambda now: now.tiers[0].rounds > 0)
    assert stats.tiers[0].checkpoints == 30


def test_wrong_periods_are_named(tmp_path):
    for wrong in ("daily", 3600, "", "0s"):
        with pytest.raises(ValueError, match="`reread` is a time"):
            lightck.Tier(tmp_path, every=1, reread=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no other option"):
        lightck.Tier(tmp_path, every=1, format="safetensors", reread=None)
