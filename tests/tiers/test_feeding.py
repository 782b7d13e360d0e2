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
from lightck.tiers.decisions import complete
from lightck.tiers.feeding import checkpoint_in_tier
from lightck.tiers.folder import FolderStore
from lightck.tiers.tier_manifest import read_manifest
from tiers.conftest import Bucket
from tiers.fault_proxy import Request
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
            assert "libtorch" not in Path(f"/proc/{drains()[0]}/maps").read_text()
        until(lambda: session.stats().tiers[1].step is not None)
    assert far_steps(bucket) == [1, 4], "while one is sent, the newest one waits"
    assert steps_in(tmp_path / "near") == [1, 2, 3, 4]
    assert same(dict(recovered(bucket.url, bucket).model), everything(model)["model"])


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


def test_a_checkpoint_that_is_only_due_for_the_store_goes_to_the_folder_too(tmp_path, bucket):
    tiers = [far(bucket, every=2), lightck.Tier(tmp_path / "near", every="1h")]
    model, optimizer, session = attached(tmp_path / "run.pool", tiers)
    with session:
        until(is_ready(session))
        for _ in range(4):
            trained(session, model, optimizer, 1)
            until(lambda: reported(session, 0) >= session.step - 1)
    assert far_steps(bucket) == [1, 2, 4]
    assert steps_in(tmp_path / "near") == [1, 2, 4]


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


def test_a_store_that_is_too_slow_for_the_folder_is_sent_the_checkpoint_from_the_pool(tmp_path, bucket):
    """The folder removes what newer checkpoints have replaced; here somebody else does."""
    tiers = [lightck.Tier(tmp_path / "near", every="1h"), far(bucket)]
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
        until(lambda: session.stats().tiers[1].error is not None)
        assert "is gone" in session.stats().tiers[1].error
        until(lambda: reported(session, 1) == 2)
    assert far_steps(bucket) == [1, 2]
    assert same(dict(recovered(bucket.url, bucket).model), everything(model)["model"])


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
            (drain,) = drains()
            os.kill(drain, signal.SIGTERM)
            until(lambda: reported(session, 0) == 3)
            assert far_steps(bucket) == []
    assert far_steps(bucket) == [1, 3]


def test_a_pool_with_gradients_is_replayed_once_for_both(tmp_path, bucket):
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


def test_ranks_feed_the_store_the_steps_on_which_they_agreed(tmp_path, bucket):
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
    assert set(far_steps(bucket)) <= set(steps_in(tmp_path / "near")), "what the store holds came from the folder"
    for step in far_steps(bucket):
        found = [recovered(place, bucket, step) for place in (tmp_path / "near", bucket.url)]
        assert same(*(dict(each.model) for each in found))


def test_a_checkpoint_is_read_from_a_folder_piece_by_piece(tmp_path, small_pieces):
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.AdamW(model.parameters())
    with lightck.attach(model, tmp_path / "run.pool", optimizer=optimizer):
        model(torch.randn(2, 1024)).sum().backward()
        optimizer.step()
    assert call("copy", tmp_path / "run.pool", tmp_path / "near").exit_code == OK
    store = FolderStore(str(tmp_path / "near"))
    (name,) = store.listing().manifests
    manifest = read_manifest(store, name)
    with checkpoint_in_tier(store, manifest) as stored:
        stored.verify()
        for tensor, entry in stored.entries.items():
            data = torch.empty(entry.nbytes, dtype=torch.uint8)
            stored.read_into(tensor, data.data_ptr())
        there = os.fstat(stored.reader.container.fd).st_blocks * 512
        assert there < manifest.nbytes
