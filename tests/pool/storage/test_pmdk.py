"""PMDK pools with the real libpmemobj: kills, PMDK's own tools, pools of others, damage to the container.

What is true of every backend is in ``test_backend_conformance.py``, and the whole suite runs on PMDK pools with
``LIGHTCK_TEST_BACKEND=pmdk``.
"""

from __future__ import annotations

import fcntl
import logging
import os
import random
import signal
import struct
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import toys
from crash.oracle import Recovered, Refused, recovery
from torch import nn

import lightck
from lightck.errors import CorruptPoolError, FormatError, NotAPoolError, PoolError, PoolLockedError, PoolTruncatedError
from lightck.pool.format.structures import MIB
from lightck.pool.reader import StoredCheckpoint, open_pool
from lightck.pool.storage import backends, pmdk, pmdk_file, pmemobj, temporary
from lightck.pool.storage.backends import backend_for
from lightck.pool.storage.durability import MEDIUM_CACHE, MEDIUM_PM, Durability
from lightck.pool.storage.file import FileBackend, FileContainer
from lightck.pool.storage.pmdk import PmdkBackend

Change = Callable[[list[pmdk_file.Arena]], list[pmdk_file.Arena]]

pytestmark = pytest.mark.usefixtures("pmdk")


def consistent(pmempool: str, pool: Path) -> bool:
    done = subprocess.run([pmempool, "check", "-v", str(pool)], capture_output=True, text=True, check=False)
    return done.returncode == 0 and "consistent" in done.stdout and "not consistent" not in done.stdout


def trained(pool: Path, steps: int, width: int = 8) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The end of a training in which nobody was killed, resumed from what the pool holds."""
    model = toys.net(width)
    optimizer = toys.adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, resume=True, backend="pmdk") as session:
        toys.train(model, optimizer, steps - session.step, session.step)
    return model, optimizer


# -- kills ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", ["header", "block", "manifest", "sealed", "body", "word", "ack"])
def test_killed_in_mid_training_the_pool_is_consistent_and_goes_on(pool: Path, pmempool: str, site: str) -> None:
    def run() -> None:
        model = toys.net()
        optimizer = toys.adam(model)
        lightck.attach(model, pool, optimizer=optimizer, backend="pmdk")
        toys.kill_at(site, 50 if site == "block" else 4)  # a checkpoint has several blocks
        toys.train(model, optimizer, 20)

    toys.killed_child(run)
    assert consistent(pmempool, pool)
    info = subprocess.run([pmempool, "info", str(pool)], capture_output=True, text=True, check=True).stdout
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    reported = {name.strip(): value.strip() for name, value in fields.items()}
    assert reported["Signature"] == "PMEMOBJ"
    assert reported["Layout"].startswith("lightck")
    reader = open_pool(str(pool))
    for checkpoint in reader.checkpoints():
        assert isinstance(checkpoint, StoredCheckpoint) or "reused" in checkpoint.reason
    reader.close()
    assert 2 <= lightck.recover(pool).step <= 4
    model, optimizer = trained(pool, 10)
    straight = toys.net()
    straight_optimizer = toys.adam(straight)
    toys.train(straight, straight_optimizer, 10)
    assert toys.same(toys.everything(model, optimizer), toys.everything(straight, straight_optimizer))
    assert consistent(pmempool, pool)


def test_a_worker_that_outlives_its_trainer_does_not_hold_the_pool(pool: Path) -> None:
    """libpmemobj's lock lives as long as a mapping of the file does, in whatever process."""
    read, write = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        model = toys.net()
        optimizer = toys.adam(model)
        session = lightck.attach(model, pool, optimizer=optimizer, backend="pmdk")
        toys.train(model, optimizer, 3)
        session.flush()
        worker = os.fork()
        if worker == 0:
            signal.alarm(120)
            signal.pause()
            os._exit(0)
        os.write(write, str(worker).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(write)
    worker = int(os.read(read, 100))
    os.close(read)
    assert os.WTERMSIG(os.waitpid(trainer, 0)[1]) == signal.SIGKILL
    try:
        assert lightck.recover(pool).step == 3
        trained(pool, 5)
        assert lightck.recover(pool).step == 5
        os.kill(worker, 0)  # it lived all the while
    finally:
        os.kill(worker, signal.SIGKILL)


def test_killed_while_it_is_made_a_pool_leaves_a_temporary_that_the_next_attach_removes(pool: Path) -> None:
    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    for what, name in ((FileContainer, "publish"), (pmemobj.Pool, "alloc"), (pmemobj.Pool, "store")):

        def run(what: type = what, name: str = name) -> None:
            with patch.object(what, name, die):
                trained(pool, 1)

        toys.killed_child(run)
        left = os.path.basename(temporary.path_of(str(pool)))
        assert sorted(os.listdir(pool.parent)) == [left, "run.pool.lock"], name
    trained(pool, 3)
    assert sorted(os.listdir(pool.parent)) == ["run.pool", "run.pool.lock"]


def test_the_training_leaves_pmdks_structures_alone(pool: Path) -> None:
    """Nothing outside of the arenas changes between open and close."""
    model = toys.net()
    optimizer = toys.adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, backend="pmdk") as session:
        before = outside(pool)
        toys.train(model, optimizer, 5)
        session.flush()
        assert outside(pool) == before
    assert sum(n for _, n in toys.places(pool)) == open_pool(str(pool)).superblock.nbytes


def outside(pool: Path) -> bytes:
    data = bytearray(pool.read_bytes())
    for at, n in toys.places(pool):
        data[at : at + n] = bytes(n)
    return bytes(data)


# -- several arenas ----------------------------------------------------------------------------------------------------


def test_tensors_lie_across_the_borders_of_arenas(pool: Path) -> None:
    with patch.dict(backends.BACKENDS, {"pmdk": PmdkBackend(arena_nbytes=2 * MIB)}):
        model = nn.Linear(1500, 1000)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with lightck.attach(model, pool, optimizer=optimizer, backend="pmdk"):
            for number in range(3):
                model(torch.full((2, 1500), float(number))).sum().backward()
                optimizer.step()
    newest = toys.checkpoints(pool)[0]
    entry, base = newest.entries["model/weight"], newest.reader.superblock.slots[newest.record.slot][0]
    assert (base + entry.offset) // (2 * MIB) < (base + entry.offset + entry.nbytes - 1) // (2 * MIB)
    assert toys.same(dict(lightck.recover(pool).model), toys.weights(model))
    border = 2 * MIB - (base + entry.offset) % (2 * MIB)
    for at in (border - 1, border):
        toys.damage(pool, "model/weight", [3], at)
        assert lightck.recover(pool).step == 2
        toys.damage(pool, "model/weight", [3], at)
    assert lightck.recover(pool).step == 3


def test_the_file_for_a_large_pool_has_room_for_its_arenas_and_little_more() -> None:
    """A zone of PMDK's heap has 65528 chunks of 256 KiB, and no object lies in two."""
    gib = 1024 * MIB
    for nbytes in (30 * MIB, gib, 8 * gib, 16 * gib - 2 * MIB, 16 * gib, 16 * gib + 2 * MIB, 100 * gib):
        lengths = pmdk_file.split(nbytes, pmdk_file.ARENA_NBYTES_MAX)
        assert sum(lengths) == nbytes
        assert max(lengths) <= pmdk_file.ARENA_NBYTES_MAX
        size = pmdk_file.file_nbytes(lengths)
        assert nbytes < size < nbytes + 12 * MIB + nbytes // 200
    chunks = -(-pmdk_file.object_nbytes(pmdk_file.ARENA_NBYTES_MAX) // (256 << 10))
    assert 2 * chunks < 65528 - 16
    assert pmdk_file.ARENA_NBYTES_MAX + 3 * MIB < 0x3FFDFFFC0


# -- which backend -----------------------------------------------------------------------------------------------------


def on_pm(self: FileBackend, path: str) -> Durability:
    return Durability(True, True, True, False, "persistent memory", ("said so by a test",), MEDIUM_PM)


def test_auto_makes_a_pmdk_pool_on_persistent_memory_only(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTCK_BACKEND", raising=False)
    assert backend_for(str(pool)).name == "file"
    monkeypatch.setattr(FileBackend, "probe", on_pm)
    assert backend_for(str(pool)).name == "pmdk"
    monkeypatch.setattr(pmemobj, "is_available", lambda: False)
    assert backend_for(str(pool)).name == "file"


def test_a_pool_stays_what_it_was_made_as(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTCK_BACKEND", raising=False)
    for name in ("file", "pmdk"):
        toys.pool_with(folder / name, backend=name)
        assert backend_for(str(folder / name)).name == name
        other = "pmdk" if name == "file" else "file"
        model = toys.net()
        for options in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(NotAPoolError, match='backend="auto"'):
                lightck.attach(model, folder / name, optimizer=toys.adam(model), backend=other, **options)
        assert lightck.recover(folder / name).step == 3


def test_the_variable_chooses_for_new_pools(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTCK_BACKEND", "pmdk")
    assert backend_for(str(pool)).name == "pmdk"
    assert backend_for(str(pool), "file").name == "file"
    toys.pool_with(pool, backend="file")
    assert backend_for(str(pool)).name == "file"
    monkeypatch.setenv("LIGHTCK_BACKEND", "floppy")
    with pytest.raises(ValueError, match="LIGHTCK_BACKEND='floppy'"):
        backend_for(str(pool.with_name("other.pool")))


def test_a_pool_on_persistent_memory_counts_shutdowns_and_others_do_not(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Releases from 2.1 refuse a pool that counts them on a medium that cannot."""
    backend = PmdkBackend()
    for probe, counts in ((FileBackend.probe, False), (on_pm, True)):
        monkeypatch.setattr(FileBackend, "probe", probe)
        container = backend.create(str(pool), 3 * MIB)
        container.publish()
        container.close()
        container = backend.open(str(pool), write=True)
        assert pmdk_file.has_shutdown_state(container.fd) == counts
        container.close()


def test_a_medium_that_is_not_pmdks_is_said_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("PMEM_IS_PMEM_FORCE", raising=False)
    monkeypatch.setattr(pmdk, "_has_warned", False)
    with caplog.at_level(logging.WARNING, "lightck"):
        for name in ("a", "b"):
            toys.pool_with(folder / name, backend="pmdk")
    (reported,) = (r.getMessage() for r in caplog.records if "persistent memory" in r.getMessage())
    assert "msync" in reported
    assert str(folder / "a") in reported
    assert "survives" in reported


# -- others ------------------------------------------------------------------------------------------------------------


def test_a_pool_whose_last_holder_is_still_dying_is_waited_for(pool: Path) -> None:
    """A killed process gives up lightck's lock before libpmemobj's."""
    toys.pool_with(pool, backend="pmdk")
    with open(pool, "rb") as dying:
        fcntl.flock(dying, fcntl.LOCK_EX)
        freed = threading.Timer(0.2, fcntl.flock, (dying, fcntl.LOCK_UN))
        freed.start()
        trained(pool, 5)
        freed.join()
    assert lightck.recover(pool).step == 5


def test_a_pool_that_another_program_holds_is_read_and_not_written(pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pmdk, "_DYING_SECONDS", 0.05)
    toys.pool_with(pool, backend="pmdk")
    size = pool.stat().st_size
    with toys.child_that_holds(lambda: pmemobj.Pool(str(pool), pmdk_file.LAYOUT, size, shutdown_state=False)):
        with pytest.raises(PoolLockedError, match="held open by another program"):
            trained(pool, 5)
        assert lightck.recover(pool).step == 3
    trained(pool, 5)


def test_a_pmdk_pool_of_another_program_is_refused_and_left_alone(pool: Path, pmempool: str) -> None:
    subprocess.run([pmempool, "create", "--layout", "theirs", "--size", "16M", "obj", str(pool)], check=True)
    pool.chmod(0o600)
    before = pool.read_bytes()
    refused(pool, NotAPoolError, "layout is 'theirs'")
    assert pool.read_bytes() == before


def test_a_poolset_is_refused(pool: Path) -> None:
    pool.write_text(f"PMEMPOOLSET\n16M {pool}.part0\nREPLICA\n16M {pool}.part1\n")
    pool.chmod(0o600)
    refused(pool, NotAPoolError, "poolset")


def test_a_part_of_a_poolset_is_refused(pool: Path) -> None:
    patched(pool, 88, bytes(16))  # the pool of which this is the replica
    refused(pool, NotAPoolError, "several files")


@pytest.mark.parametrize(("offset", "data", "about"), [(8, b"\x07", "format 7"), (4096, b"lightck/2", "lightck/2")])
def test_a_container_of_the_future_is_refused(pool: Path, offset: int, data: bytes, about: str) -> None:
    patched(pool, offset, data)
    refused(pool, FormatError, about, may_be_discarded=offset == 4096 or about == "format 7")


def patched(pool: Path, offset: int, data: bytes) -> None:
    if not pool.exists():
        toys.pool_with(pool, backend="pmdk")
    with open(pool, "r+b") as f:
        f.seek(offset)
        f.write(data)


def refused(pool: Path, kind: type[PoolError], about: str, *, may_be_discarded: bool = False) -> None:
    """By everything that could read or write it."""
    model = toys.net()
    optimizer = toys.adam(model)
    calls: list[Callable[[], object]] = [
        lambda: lightck.recover(pool),
        lambda: lightck.attach(model, pool, optimizer=optimizer, resume=True),
        lambda: lightck.attach(model, pool, optimizer=optimizer, backend="pmdk", resume=True),
    ]
    if not may_be_discarded:
        calls.append(lambda: lightck.attach(model, pool, optimizer=optimizer, overwrite=True))
    for call in calls:
        with pytest.raises(kind, match=about):
            call()


# -- damage to the container -------------------------------------------------------------------------------------------


def root_of(pool: Path) -> tuple[int, list[pmdk_file.Arena]]:
    data = pool.read_bytes()
    (root,) = struct.unpack_from("<Q", data, 6144)
    (count,) = struct.unpack_from("<I", data, root + 12)
    return root, [
        pmdk_file.Arena(*struct.unpack_from("<QQQQ", data, pmdk_file.reference_offset(root, i))) for i in range(count)
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda a: [],
        lambda a: [replace(a[0], nbytes=0)],
        lambda a: [replace(a[0], start=a[0].start + 4096)],
        lambda a: [replace(a[0], offset=a[0].offset + (1 << 40), start=a[0].start + (1 << 40))],
        lambda a: [replace(a[0], offset=0, start=2 * MIB)],
        lambda a: [replace(a[0], offset=2**64 - 1, start=2**64 - 2 * MIB)],
        lambda a: [replace(a[0], nbytes=a[0].nbytes + (1 << 40))],
        lambda a: [a[0], a[0]],
        lambda a: [replace(a[0], nbytes=5000), replace(a[0], offset=a[0].start, start=a[0].start + 2 * MIB)],
    ],
    ids=["none", "empty", "unaligned", "behind", "in the header", "wraps", "too long", "twice", "torn"],
)
def test_arenas_that_cannot_be_are_not_followed(pool: Path, change: Change) -> None:
    """Each with a checksum that is right."""
    toys.pool_with(pool, backend="pmdk")
    root, arenas = root_of(pool)
    patched(pool, root, pmdk_file.pack_root(change(arenas), pool.stat().st_size))
    refused(pool, CorruptPoolError, "impossible places", may_be_discarded=True)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (6144, 0),
        (6144, 2**64 - 1),
        (6144, 1 << 50),
        (6160, 0),
        (6160, 2**64 - 1),
        (6160, 8),
    ],
)
def test_a_root_object_that_cannot_be_is_not_followed(pool: Path, at: int, value: int) -> None:
    patched(pool, at, struct.pack("<Q", value))
    refused(pool, CorruptPoolError, "root object", may_be_discarded=True)


@pytest.mark.parametrize("keep", [100, 5000, 100_000, 9 * MIB])
def test_a_file_that_was_cut_is_reported_from_a_damaged_one(pool: Path, keep: int) -> None:
    toys.pool_with(pool, backend="pmdk")
    os.truncate(pool, keep)
    with pytest.raises(PoolTruncatedError):
        lightck.recover(pool)


def test_one_flipped_bit_in_the_container_never_gives_wrong_values(pool: Path) -> None:
    model, optimizer = toys.pool_with(pool, backend="pmdk")
    whole = recovery(str(pool))
    assert isinstance(whole, Recovered)
    root, _ = root_of(pool)
    places = [*range(128), *range(4096, 4120), *range(6144, 6184), *range(root, root + 80)]
    rng = random.Random(5)
    print("seed 5")
    for at in places:
        bit = 1 << rng.randrange(8)
        byte = pool.read_bytes()[at]
        patched(pool, at, bytes([byte ^ bit]))
        outcome = recovery(str(pool))
        assert outcome == whole or (isinstance(outcome, Refused) and outcome.typed), f"byte {at}: {outcome}"
        patched(pool, at, bytes([byte]))
    assert recovery(str(pool)) == whole
    assert toys.is_step(lightck.recover(pool), toys.everything(model, optimizer))


def test_probe_is_that_of_the_file_system(pool: Path) -> None:
    assert PmdkBackend().probe(str(pool)) == FileBackend().probe(str(pool))
    if FileBackend().probe(str(pool)).medium == "tmpfs":
        assert PmdkBackend().probe(str(pool)).medium_kind == MEDIUM_CACHE
