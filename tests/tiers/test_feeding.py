"""An object store beside a folder: it is sent what lies in the folder, and no slot of the pool is held meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import everything, same, train

import lightck
from lightck.cli.base import OK
from lightck.errors import TierError
from lightck.pool.format.structures import BLOCK_MAX
from lightck.pool.slot_locks import is_held
from lightck.tiers import sending
from lightck.tiers.checkpoint_in_tier import FolderUnreachableError, checkpoint_in_tier
from lightck.tiers.decisions import complete
from lightck.tiers.drain_lock import DrainLock
from lightck.tiers.drain_messages import TierSettings
from lightck.tiers.drains import folders_that_feed
from lightck.tiers.feeding import Feed
from lightck.tiers.folder import FolderStore
from lightck.tiers.names import Claim, ManifestName, Writer
from lightck.tiers.tier_manifest import read_manifest
from tiers.conftest import Bucket
from tiers.fault_proxy import Fault, Request
from tiers.test_attached_tiers import attached, drains, is_ready, lightck_step, steps_in, trained, until
from tiers.test_object_store import call, first_step, training


@pytest.fixture(autouse=True)
def _no_drain_is_left() -> Iterator[None]:
    yield
    until(lambda: not drains())


def far(bucket: Bucket, **options: Any) -> lightck.Tier:
    return lightck.Tier(bucket.url, **{"every": 1, **options}, options=bucket.options)


def far_steps(bucket: Bucket) -> list[int]:
    return sorted(each.step for each in complete(bucket.store.listing()))


def is_piece(request: Request) -> bool:
    return request.method == "PUT" and "/data/" in request.path


@contextmanager
def blocked(bucket: Bucket) -> Iterator[threading.Event]:
    """The store answers no put of an object until the block ends. The event is set when one has come."""
    has_come, goes = threading.Event(), threading.Event()

    def gate(request: Request) -> None:
        if is_piece(request):
            has_come.set()
            assert goes.wait(60)

    bucket.proxy.gate = gate
    try:
        yield has_come
    finally:
        bucket.proxy.gate = lambda _: None
        goes.set()


def recovered(place: Any, bucket: Bucket, step: int | None = None) -> Any:
    options = bucket.options if place == bucket.url else None
    return lightck.recover(place, step=step, options=options)


@pytest.mark.parametrize("codecs", [(None, None), (None, "zstd"), ("zstd", None), ("lz4", "zstd")], ids=str)
def test_both_hold_the_same_bits_however_each_is_compressed(tmp_path, bucket, codecs):
    near, other = codecs
    tiers = [lightck.Tier(tmp_path / "near", every=1, compress=near), far(bucket, compress=other)]
    model, optimizer, session = attached(tmp_path / "run.pool", tiers)
    seen = {}
    with session:
        until(is_ready(session))
        for _ in range(3):
            trained(session, model, optimizer, 1)
            seen[session.step] = everything(model)["model"]
            until(lambda: session.stats().tiers[1].step == session.step)
    assert far_steps(bucket) == steps_in(tmp_path / "near") == [1, 2, 3]
    for step, weights in seen.items():
        for place in (tmp_path / "near", bucket.url):
            assert same(dict(recovered(place, bucket, step).model), weights)


def test_while_the_store_takes_its_time_no_slot_is_held_and_the_folder_gets_what_is_due(tmp_path, bucket):
    tiers = [lightck.Tier(tmp_path / "near", every=1), far(bucket)]
    model, optimizer, session = attached(tmp_path / "run.pool", tiers)
    with session:
        until(is_ready(session))
        with blocked(bucket) as has_come:
            train(model, optimizer, 1)
            session.flush()
            assert has_come.wait(60)
            until(lambda: session.stats().tiers[0].step == 1)
            assert not held_slots(tmp_path / "run.pool")
            for step in (2, 3, 4):
                train(model, optimizer, 1, start=session.step)
                session.flush()
                until(lambda step=step: reported(session, 0) == step)
            assert far_steps(bucket) == []
            assert len(drains()) == 2
            assert not any("libtorch" in Path(f"/proc/{drain}/maps").read_text() for drain in drains())
        until(lambda: session.stats().tiers[1].step is not None)
    assert far_steps(bucket) == [1, 4], "while one is sent, only the newest one waits"
    assert steps_in(tmp_path / "near") == [1, 2, 3, 4]
    assert same(dict(recovered(bucket.url, bucket).model), everything(model)["model"])


@pytest.mark.long
def test_the_folder_gets_no_more_than_is_due_while_the_store_takes_its_time(tmp_path, bucket):
    tiers = [lightck.Tier(tmp_path / "near", every="3s"), far(bucket, every="3s")]
    model, optimizer, session = attached(tmp_path / "run.pool", tiers)
    with session:
        until(is_ready(session))
        trained(session, model, optimizer, 1)
        until(lambda: reported(session, 1) == 1)
        with blocked(bucket) as has_come:
            train(model, optimizer, 1, start=1)
            session.flush()
            assert has_come.wait(60)
            began = time.monotonic()
            for _ in range(12):
                train(model, optimizer, 1, start=session.step)
                session.flush()
                time.sleep(0.1)
            took = time.monotonic() - began
            assert len(steps_in(tmp_path / "near")) <= 3 + took / 3


def test_checkpoints_that_are_to_stay_wait_for_the_store_all_of_them(tmp_path, bucket):
    tiers = [lightck.Tier(tmp_path / "near", every=1), far(bucket, every="1h", keep_last=2, keep_every=1)]
    model, optimizer, session = attached(tmp_path / "run.pool", tiers)
    with session:
        until(is_ready(session))
        with blocked(bucket):
            for step in (1, 2, 3):
                train(model, optimizer, 1, start=session.step)
                session.flush()
                until(lambda step=step: reported(session, 0) == step)
    assert far_steps(bucket) == [1, 2, 3]


def reported(session: lightck.Session, number: int) -> int:
    return session.stats().tiers[number].step or 0


def held_slots(pool: Path) -> list[int]:
    """The slots of a pool on which another process has a lock."""
    with open(pool, "r+b") as file:
        return [slot for slot in range(8) if is_held(file.fileno(), slot)]


def test_a_checkpoint_that_only_the_store_needs_goes_to_the_folder_too(tmp_path, bucket):
    options = {"keep_last": 2, "keep_every": 3, "keep_best": ("loss", 1, "min")}
    tiers = [far(bucket, every=100, **options), lightck.Tier(tmp_path / "near", every=100)]
    model, optimizer, session = attached(tmp_path / "run.pool", tiers)
    with session:
        until(is_ready(session))
        for step in range(1, 9):
            train(model, optimizer, 1, start=step - 1)
            if step in (4, 5):
                session.log(loss=1.0 / step)
            session.flush()
            until(is_ready(session))
        assert [each.root for each in session.stats().tiers] == [bucket.url, str(tmp_path / "near")]
    assert far_steps(bucket) == [1, 3, 4, 5, 6, 8]
    assert steps_in(tmp_path / "near") == [1, 3, 4, 5, 6, 8]
    metrics = {each.step: read_manifest(bucket.store, each).metrics for each in bucket.store.listing().manifests}
    assert metrics[5] == {"loss": 0.2}


def test_what_is_logged_of_a_step_that_was_sent_already_gets_there_too(tmp_path, bucket):
    tiers = [
        lightck.Tier(tmp_path / "near", every=1),
        far(bucket, keep_last=2, keep_best=("loss", 1, "min")),
    ]
    model, optimizer, session = attached(tmp_path / "run.pool", tiers)
    with session:
        until(is_ready(session))
        train(model, optimizer, 1)
        session.flush()
        until(lambda: reported(session, 1) == 1)
        session.log(loss=0.25)
        until(lambda: {"loss": 0.25} in [read_manifest(bucket.store, n).metrics for n in manifests(bucket)])


def manifests(bucket: Bucket) -> list[Any]:
    return list(bucket.store.listing().manifests)


@pytest.mark.parametrize(
    ("every", "found"),
    [
        (("5min", "1h"), {1: 0}),
        (("1h", "5min"), {}),
        ((10, 10), {1: 0}),
        ((10, 5), {}),
        ((10, "1h"), {1: 0}),
        (("1h", 10), {}),
    ],
)
def test_a_store_is_folders_that_feed_a_folder_that_gets_checkpoints_as_often(every, found):
    near, other = every
    assert folders_that_feed([lightck.Tier("/near", every=near), lightck.Tier("s3://bucket/far", every=other)]) == found


def test_of_several_folders_the_first_one_that_suits_feeds_each_store():
    tiers = [
        lightck.Tier("s3://bucket/a", every="10min"),
        lightck.Tier("/rarely", every="1h"),
        lightck.Tier("/steps", every=10),
        lightck.Tier("/often", every="5min"),
        lightck.Tier("s3://bucket/b", every="2h"),
        lightck.Tier("s3://bucket/c", every=10),
        lightck.Tier("s3://bucket/d", every=9),
    ]
    assert folders_that_feed(tiers) == {0: 2, 4: 1, 5: 2}


def test_a_folder_that_fails_does_not_keep_the_store_from_its_checkpoints(tmp_path, bucket):
    tiers = [lightck.Tier(tmp_path / "near", every=1), far(bucket)]
    model, optimizer, session = attached(tmp_path / "run.pool", tiers)
    with pytest.raises(TierError, match="near"), session:
        until(is_ready(session))
        trained(session, model, optimizer, 1)
        until(lambda: reported(session, 1) == 1)
        shutil.rmtree(tmp_path / "near")
        (tmp_path / "near").write_bytes(b"no folder any more")
        for _ in range(2):
            train(model, optimizer, 1, start=session.step)
            session.flush()
            until(is_ready(session))
        until(lambda: reported(session, 1) == 3)
    assert far_steps(bucket)[-1] == 3


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "OBJECT_NBYTES_MAX", BLOCK_MAX)


def test_a_store_that_is_too_slow_for_the_folder_is_sent_the_checkpoint_from_the_pool(tmp_path, bucket, caplog):
    """The folder removes what newer checkpoints have replaced; here somebody else does."""
    tiers = [lightck.Tier(tmp_path / "near", every=1), far(bucket)]
    model, optimizer, session = attached(tmp_path / "run.pool", tiers)
    with session:
        until(is_ready(session))
        trained(session, model, optimizer, 1)
        until(lambda: reported(session, 1) == 1)

        def gate(request: Request) -> None:
            if request.is_listing:  # the one before a checkpoint is sent
                for path in (tmp_path / "near").rglob("data/*"):
                    path.unlink()

        bucket.proxy.gate = gate
        train(model, optimizer, 1, start=1)
        session.flush()
        until(lambda: reported(session, 1) == 2)
        assert any("is sent the pool's newest one instead" in each for each in caplog.messages)
    assert far_steps(bucket) == [1, 2]
    assert same(dict(recovered(bucket.url, bucket).model), everything(model)["model"])


@pytest.mark.long
def test_a_signal_lets_the_folder_have_the_newest_checkpoint_though_the_store_is_slow(tmp_path, bucket):
    tiers = [lightck.Tier(tmp_path / "near", every="1h"), far(bucket, every="1h")]
    model, optimizer, session = attached(tmp_path / "run.pool", tiers)
    with session:
        until(is_ready(session))
        with blocked(bucket) as has_come:
            train(model, optimizer, 1)
            session.flush()
            assert has_come.wait(60)
            train(model, optimizer, 2, start=1)
            session.flush()
            for drain in drains():
                os.kill(drain, signal.SIGTERM)
            until(lambda: reported(session, 0) == 3)
            assert far_steps(bucket) == []
    assert far_steps(bucket) == [1, 3]


@pytest.mark.long
def test_a_pool_with_gradients_reaches_both(tmp_path, bucket):
    tiers = [lightck.Tier(tmp_path / "near", every="1h"), far(bucket, every="1h")]
    model, optimizer, session = attached(tmp_path / "run.pool", tiers, strategy=lightck.Gradients(base_every=4))
    with session:
        train(model, optimizer, 7)
    assert far_steps(bucket)[-1] == steps_in(tmp_path / "near")[-1] == 7
    for place in (tmp_path / "near", bucket.url):
        assert same(dict(recovered(place, bucket).model), everything(model)["model"])


def test_a_killed_training_leaves_the_newest_checkpoint_in_both(tmp_path, bucket):
    pool, near = tmp_path / "run.pool", tmp_path / "near"
    with training(pool, bucket.url, 10**6, bucket.options, near) as process:
        first_step(process)
        until(lambda: far_steps(bucket) and lightck_step(pool) > 50)
        process.kill()
        process.wait()
        until(lambda: not drains(), 60)
    newest = lightck.recover(pool)
    for place in (near, bucket.url):
        found = recovered(place, bucket)
        assert found.step == newest.step
        assert same(found.model, newest.model)
        assert same(found.optimizer, newest.optimizer)


RANK = """
import json, os, sys, time
import torch, torch.distributed as dist, lightck
from noisy_training import Noisy
rank, folder, url, options = int(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.stdin.readline())
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
torch.manual_seed(0)
model = Noisy()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
tiers = [lightck.Tier(f"{folder}/near", every=10), lightck.Tier(url, every=20, options=options)]
called = torch.nn.parallel.DistributedDataParallel(model)
with lightck.attach(model, f"{folder}/pools", optimizer=optimizer, tiers=tiers) as session:
    while session.step < 100:
        called(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        session.end_step()
        time.sleep(0.02)
dist.barrier()
os._exit(0)
"""


@pytest.mark.long
def test_ranks_have_one_drain_each_and_send_the_steps_on_which_they_agreed(tmp_path, bucket):
    tests = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(tests), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    words = [[sys.executable, "-c", RANK, str(rank), str(tmp_path), bucket.url] for rank in range(2)]
    ranks = [subprocess.Popen(each, env=env, stdin=subprocess.PIPE, text=True) for each in words]
    for each in ranks:
        each.stdin.write(json.dumps(bucket.options) + "\n")
        each.stdin.close()
    assert [each.wait(timeout=120) for each in ranks] == [0, 0]
    assert far_steps(bucket)[-1] == steps_in(tmp_path / "near")[-1] == 100
    assert len(far_steps(bucket)) >= 3
    for step in set(far_steps(bucket)) & set(steps_in(tmp_path / "near")):
        found = [recovered(place, bucket, step) for place in (tmp_path / "near", bucket.url)]
        assert same(*(dict(each.model) for each in found))


def copied(tmp_path: Path) -> tuple[FolderStore, Any]:
    """A folder with one checkpoint in small pieces, and its manifest."""
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    with lightck.attach(model, tmp_path / "run.pool", optimizer=optimizer):
        model(torch.randn(2, 1024)).sum().backward()
        optimizer.step()
    assert call("copy", tmp_path / "run.pool", tmp_path / "near").exit_code == OK
    store = FolderStore(str(tmp_path / "near"))
    (name,) = store.listing().manifests
    return store, read_manifest(store, name)


def test_a_checkpoint_is_read_from_a_folder_piece_by_piece(tmp_path, small_pieces):
    store, manifest = copied(tmp_path)
    with checkpoint_in_tier(store, manifest) as stored:
        stored.verify()
        for tensor, entry in stored.entries.items():
            data = torch.empty(entry.nbytes, dtype=torch.uint8)
            stored.read_into(tensor, data.data_ptr())
        there = os.fstat(stored.reader.container.fd).st_blocks * 512
        assert there < manifest.nbytes


def test_each_drain_that_is_killed_is_started_again_and_goes_on(tmp_path, bucket):
    tiers = [lightck.Tier(tmp_path / "near", every=1), far(bucket)]
    model, optimizer, session = attached(tmp_path / "run.pool", tiers)
    with session:
        until(is_ready(session))
        with blocked(bucket) as has_come:
            train(model, optimizer, 1)
            session.flush()
            assert has_come.wait(60)
            for drain in drains():
                os.kill(drain, signal.SIGKILL)
            until(lambda: not drains())
        until(is_ready(session))
        for step in (2, 3, 4):
            train(model, optimizer, 1, start=session.step)
            session.flush()
            until(lambda step=step: reported(session, 0) == step)
        until(lambda: reported(session, 1) == 4)
    assert far_steps(bucket)[-1] == steps_in(tmp_path / "near")[-1] == 4
    assert same(dict(recovered(bucket.url, bucket).model), everything(model)["model"])


def test_a_store_by_time_is_sent_the_pools_newest_if_the_folder_gets_nothing(tmp_path, bucket):
    """The folder takes nothing from the second checkpoint on, and no step asks for anything."""
    tiers = [lightck.Tier(tmp_path / "near", every="1s"), far(bucket, every="1s")]
    model, optimizer, session = attached(tmp_path / "run.pool", tiers)
    with pytest.raises(TierError, match="near"), session:
        until(is_ready(session))
        trained(session, model, optimizer, 1)
        until(lambda: reported(session, 1) == 1)
        shutil.rmtree(tmp_path / "near")
        (tmp_path / "near").write_bytes(b"no folder any more")
        train(model, optimizer, 2, start=1)
        session.flush()
        until(lambda: reported(session, 1) == 3)
        assert session.stats().tiers[0].error is not None
        assert session.stats().tiers[1].error is None


def test_what_may_hold_old_bytes_is_not_sent_from_the_folder(tmp_path, bucket, caplog):
    tiers = [lightck.Tier(tmp_path / "near", every=1), far(bucket)]
    model, optimizer, session = attached(tmp_path / "run.pool", tiers)
    with session:
        until(is_ready(session))
        with blocked(bucket) as has_come:
            train(model, optimizer, 1)
            session.flush()
            assert has_come.wait(60)
            for step in (2, 3):
                train(model, optimizer, 1, start=session.step)
                session.flush()
                until(lambda step=step: reported(session, 0) == step)
            session._steps.commits.participants.tiers.struck([0])  # as after a write that was noticed too late
        until(lambda: reported(session, 1) == 3)
        assert any("old bytes" in each and "step 1 " in each for each in caplog.messages)
        assert far_steps(bucket) == [3], "the pool's newest one; what was being sent was not finished"
        train(model, optimizer, 1, start=session.step)
        session.flush()
        until(lambda: reported(session, 1) == 4)
    assert far_steps(bucket) == [3, 4]


@pytest.mark.long
def test_whoever_sends_by_hand_waits_for_the_drain_of_the_store_too(tmp_path, bucket):
    pool, near = tmp_path / "run.pool", tmp_path / "near"
    with training(pool, bucket.url, 10**6, bucket.options, near) as process:
        first_step(process)
        until(lambda: far_steps(bucket))
        with blocked(bucket) as has_come:
            assert has_come.wait(60)
            process.kill()
            process.wait()
            until(lambda: len(drains()) == 1, 60)  # that of the folder has ended
            assert not DrainLock(str(pool)).take()
        until(lambda: not drains(), 60)
    lock = DrainLock(str(pool))
    assert lock.take()
    lock.release()
    assert not Path(f"{pool}.drain").exists()


@pytest.mark.long
def test_checkpoints_that_are_to_stay_get_into_the_store_after_a_kill_too(tmp_path, bucket):
    pool, near = tmp_path / "run.pool", tmp_path / "near"
    with training(pool, bucket.url, 10**6, bucket.options, near, keep_last=2, keep_every=10) as process:
        first_step(process)
        until(lambda: far_steps(bucket))
        with blocked(bucket) as has_come:
            assert has_come.wait(60)
            until(lambda: len([step for step in steps_in(near) if step % 10 == 0]) > 2)
            process.kill()
            process.wait()
        until(lambda: not drains(), 60)
    newest = lightck.recover(pool).step
    assert far_steps(bucket)[-1] == newest
    kept = {step for step in steps_in(near) if step % 10 == 0}
    assert kept <= set(far_steps(bucket))


def test_a_damaged_object_of_the_store_is_written_anew_from_the_folder(tmp_path, bucket):
    tiers = [lightck.Tier(tmp_path / "near", every=1), far(bucket, reread="1s")]
    model, optimizer, session = attached(tmp_path / "run.pool", tiers)
    with session:
        until(is_ready(session))
        for _ in range(6):  # the pool holds fewer steps
            trained(session, model, optimizer, 1)
            until(lambda: reported(session, 1) == session.step)
        first = min(manifests(bucket))
        later = {
            each.name
            for name in manifests(bucket)
            if name != first
            for each in read_manifest(bucket.store, name).objects
        }
        name = next(each.name for each in read_manifest(bucket.store, first).objects if each.name not in later)
        before = bucket.store.get(str(name), 1 << 30)
        bucket.store._library.put(str(name), bytes(len(before)))
        until(lambda: session.stats().tiers[1].mended == 1)
        assert bucket.store.get(str(name), 1 << 30) == before


def test_what_is_logged_while_its_checkpoint_is_being_sent_gets_there_too(tmp_path, bucket):
    tiers = [lightck.Tier(tmp_path / "near", every=1), far(bucket, keep_last=2, keep_best=("loss", 1, "min"))]
    model, optimizer, session = attached(tmp_path / "run.pool", tiers)
    with session:
        until(is_ready(session))
        with blocked(bucket) as has_come:
            train(model, optimizer, 1)
            session.flush()
            assert has_come.wait(60)
            session.log(loss=0.25)
            until(lambda: reported(session, 0) == 1 and session.stats().tiers[0].checkpoints == 2)
        until(lambda: {"loss": 0.25} in [read_manifest(bucket.store, each).metrics for each in manifests(bucket)])


def test_a_folder_that_cannot_be_read_for_a_while_is_not_taken_for_damaged(tmp_path, small_pieces, monkeypatch):
    store, manifest = copied(tmp_path)
    get = FolderStore.get

    def fails(store: FolderStore, name: str, nbytes_max: int) -> bytes:
        raise TierError("the server of the folder does not answer")

    with checkpoint_in_tier(store, manifest) as stored:
        monkeypatch.setattr(FolderStore, "get", fails)
        with pytest.raises(FolderUnreachableError, match="does not answer"):
            stored.verify()
        monkeypatch.setattr(FolderStore, "get", get)
        stored.verify()


def test_what_cannot_be_read_at_the_moment_is_tried_again_after_the_others():
    names = [ManifestName(OWN, step, f"{step:08x}") for step in (2, 4)]
    feed = Feed(Listed(names), OWN, TierSettings("", None, 100, 2, 2, None, has_parent=False, newest_step=1), {})
    feed.look(0)
    order = []
    for _ in range(3):
        name = feed.choose(is_time=False)
        order.append(name.step)
        feed.postpone(name)
    assert order == [2, 4, 2]
    assert feed.n_waiting == 2


def test_certain_checkpoints_and_the_newest_take_turns():
    names = [ManifestName(OWN, step, f"{step:08x}") for step in range(1, 9)]
    feed = Feed(Listed(names), OWN, TierSettings("", None, 1, 2, 2, None, has_parent=False), {})
    feed.look(0)
    order = []
    while (name := feed.choose(is_time=False)) is not None:
        order.append(name.step)
        feed.done(name, {})
        if len(order) == 2:
            feed.folder.names.append(ManifestName(OWN, 9, "0" * 8))
            feed.look(0)
    assert order == [2, 8, 9, 4, 6], "8 is one of both kinds"
    assert feed.n_waiting == 0


def test_what_retention_has_removed_is_not_sent_again_after_a_restart(tmp_path):
    settings = TierSettings("", None, 100, 2, None, ("loss", 1, "min"), has_parent=False)
    names = [ManifestName(OWN, step, f"{step:08x}") for step in (10, 20, 30, 40)]
    metrics = {10: {"loss": 3.0}, 20: {"loss": 1.0}, 30: {"loss": 2.0}, 40: {"loss": 9.0}}
    feed = Feed(Listed(names, metrics), OWN, settings, {20: {"loss": 1.0}, 30: {"loss": 2.0}})
    feed._metrics_of = lambda name: metrics[name.step]
    feed.look(0)
    assert feed.choose(is_time=False).step == 40, "10 was removed, because 20 is better; 40 is new"
    feed.done(feed.choose(is_time=False), metrics[40])
    assert feed.choose(is_time=False) is None


CLAIM = Claim(1, "0123abcd")
OWN = Writer(CLAIM, 0, 1)


class Listed:
    """A folder in which these manifests lie."""

    def __init__(self, names: list[ManifestName], metrics: Any = None) -> None:
        self.names = names

    def manifests_of(self, writer: Writer) -> list[ManifestName]:
        return self.names


def test_the_pool_is_read_again_as_often_as_the_most_frequent_tier_says(tmp_path, bucket):
    tiers = [lightck.Tier(tmp_path / "near", every=1, reread=None), far(bucket, reread="0.5s")]
    model, optimizer, session = attached(tmp_path / "run.pool", tiers)
    with session:
        until(is_ready(session))
        trained(session, model, optimizer, 2)
        until(lambda: session.stats().pool_rounds >= 1)


def test_close_raises_if_the_store_lacks_the_newest_checkpoint_though_it_has_all_of_the_folder(tmp_path, bucket):
    tiers = [lightck.Tier(tmp_path / "near", every=1), far(bucket)]
    model, optimizer, session = attached(tmp_path / "run.pool", tiers)
    until(is_ready(session))
    trained(session, model, optimizer, 1)
    until(lambda: reported(session, 1) == 1)
    bucket.proxy.rule = lambda _: Fault(status=403, code="AccessDenied")
    with pytest.raises(TierError, match="403 AccessDenied"):
        session.close(done=True)
    bucket.proxy.heal()


def test_a_checkpoint_that_came_from_the_pool_is_not_sent_from_the_folder_again():
    names = [ManifestName(OWN, step, f"{step:08x}") for step in (2, 4, 6)]
    feed = Feed(Listed(names), OWN, TierSettings("", None, 1, 2, 2, None, has_parent=False), {})
    feed.look(0)
    feed.came_from_pool(6, {})
    assert feed.n_waiting == 2
    assert [feed.choose(is_time=True).step, feed.n_waiting] == [2, 2]
