"""Facts about persistent memory, run by test_guest.py inside a guest that has some: not collected elsewhere.

``LIGHTCK_TEST_DIR`` is ext4 with DAX on the emulated NVDIMM; the other places are in variables named below.
"""

from __future__ import annotations

import os
import re
import resource
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from toys import adam, net, train

import lightck
from lightck.pool.engine import Engine, Medium
from lightck.pool.storage import durability, pmemobj
from lightck.pool.storage.durability import MEDIUM_CACHE, MEDIUM_DISK, MEDIUM_PM, MEDIUM_PM_EADR, probe
from lightck.pool.storage.file import FileBackend
from lightck.pool.storage.pmdk import PmdkBackend

MEMMAP = os.environ.get("LIGHTCK_GUEST_MEMMAP", "")
VIRTIO = os.environ.get("LIGHTCK_GUEST_VIRTIO", "")
FLUSH = os.environ.get("LIGHTCK_GUEST_FLUSH", "")
DOMAIN = os.environ["LIGHTCK_GUEST_DOMAIN"]
MEDIUM = MEDIUM_PM_EADR if DOMAIN == "cpu_cache" else MEDIUM_PM
HUGE, PAGE = 2 << 20, 4096
NBYTES = 16 * HUGE
BACKENDS = [("file", 1), *([("pmdk", 2)] if pmemobj.is_available() else [])]


def mappings(path: Path | str) -> list[tuple[int, str]]:
    """Address and smaps entry of each mapping of a file."""
    entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    found = [entry for entry in entries if entry.partition("\n")[0].endswith(str(path))]
    return [(int(entry.partition("-")[0], 16), entry) for entry in found]


def faults() -> int:
    """Page faults of all threads. On DAX one that converts an extent counts as major."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


def present(address: int, nbytes: int) -> int:
    """How many pages of this range are mapped, as pagemap says."""
    with open("/proc/self/pagemap", "rb") as f:
        f.seek(address // PAGE * 8)
        words = struct.unpack(f"<{nbytes // PAGE}Q", f.read(nbytes // PAGE * 8))
    return sum(word >> 63 for word in words)


def store_to_each_page(medium: Medium) -> None:
    for at in range(0, NBYTES, PAGE):
        medium.store(at, b"stored")


def journal_commits(folder: Path) -> int:
    device = Path(os.path.realpath(f"/sys/dev/block/{os.major(folder.stat().st_dev)}:{os.minor(folder.stat().st_dev)}"))
    info = Path(f"/proc/fs/jbd2/{device.name}-8/info").read_text()
    return int(info.split()[0])


@pytest.fixture
def made(pool: Path) -> Iterator[Medium]:
    """The mapping of a new pool file, as the file backend makes it."""
    container = FileBackend().create(str(pool), NBYTES)
    container.publish()
    medium = Medium(container.fd, container.extents, FileBackend().probe(str(pool)).medium_kind)
    yield medium
    medium.close()
    container.close()


def test_a_session_says_what_it_stands_on(pool):
    model = net()
    with lightck.attach(model, pool, optimizer=adam(model), require="power") as session:
        found = session.durability
    assert (found.process, found.os, found.power, found.media) == (True, True, True, False)
    assert (found.medium_kind, found.medium) == (MEDIUM, "persistent memory (ext2/3/4, DAX)")
    assert any("MAP_SYNC" in line for line in found.evidence)
    assert any("ACPI.NFIT" in line and DOMAIN in line for line in found.evidence)
    name = durability.System().write_back()
    assert any(f"written back with {name}" in line for line in found.evidence) == (MEDIUM == MEDIUM_PM)


@pytest.mark.skipif(not pmemobj.is_available(), reason="libpmemobj is not installed")
def test_a_new_pool_is_one_of_pmdk_s(pool):
    model = net()
    lightck.attach(model, pool, optimizer=adam(model)).close()
    assert PmdkBackend().recognises(str(pool))


@pytest.mark.parametrize(("backend", "count"), BACKENDS)  # libpmemobj has a mapping of its own
def test_a_session_maps_its_pool_synchronously(pool, backend, count):
    model = net()
    with lightck.attach(model, pool, optimizer=adam(model), backend=backend):
        found = mappings(pool)
        assert len(found) == count
        for address, entry in found:
            (flags,) = re.findall(r"^VmFlags: (.*)$", entry, re.MULTILINE)
            assert {"sf", "dc"} <= set(flags.split())  # "synchronous page fault", and not inherited by a fork
            assert address % HUGE == 0


@pytest.mark.parametrize(("backend", "count"), BACKENDS)
def test_a_training_on_persistent_memory_is_recovered(pool, backend, count):
    model = net()
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer, backend=backend):
        train(model, optimizer, 5)
    restored = net(seed=1)
    restored.load_state_dict(lightck.recover(pool).model)
    assert all((a == b).all() for a, b in zip(model.parameters(), restored.parameters(), strict=True))


def test_no_space_of_a_new_pool_is_left_unwritten(made, pool):
    os.sync()
    extents = subprocess.run(["filefrag", "-v", pool], capture_output=True, text=True, check=True).stdout
    assert "last" in extents
    assert "unwritten" not in extents


def test_first_stores_into_a_new_pool_wait_for_no_journal(made, folder):
    before = journal_commits(folder)
    store_to_each_page(made)
    assert journal_commits(folder) - before <= 3

    # The same without the zeros: what is prevented does happen.
    fd = os.open(folder / "allocated", os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(fd, 0, NBYTES)
    os.fsync(fd)
    medium = Medium(fd, ((0, NBYTES),), MEDIUM)
    before = journal_commits(folder)
    store_to_each_page(medium)
    assert journal_commits(folder) - before >= NBYTES // HUGE
    medium.close()
    os.close(fd)


def test_a_populated_pool_has_no_page_faults_left(made, pool):
    engine = Engine()
    ((address, _),) = mappings(pool)
    before = faults()
    engine.populate(made)
    deadline = time.monotonic() + 120
    while present(address, NBYTES) < NBYTES // PAGE:
        assert time.monotonic() < deadline, f"{present(address, NBYTES)} of {NBYTES // PAGE} pages are mapped"
        time.sleep(0.05)
    engine.quiesce(made)
    populating = faults() - before
    before = faults()
    store_to_each_page(made)
    assert faults() - before < 100
    assert address % HUGE == 0
    assert populating < NBYTES // PAGE // 2, "no huge pages: populating took a fault for each small page"
    engine.close()


@pytest.mark.skipif(not FLUSH, reason="this boot is for another question")
def test_the_write_back_instruction_is_executed(folder):
    done = subprocess.run([FLUSH, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    name = durability.System().write_back()
    assert f"persistent memory in {folder}: {name}" in done.stdout


@pytest.mark.skipif(not MEMMAP, reason="this boot is for another question")
def test_memory_that_pretends_grants_map_sync_and_is_not_believed():
    assert durability.System().dax(MEMMAP, None).map_sync
    found = probe(MEMMAP)
    assert (found.process, found.os, found.power, found.medium_kind) == (True, False, False, MEDIUM_CACHE)
    assert any("e820" in line and "is declared persistent" in line for line in found.evidence)


@pytest.mark.skipif(not VIRTIO, reason="this boot is for another question")
def test_dax_without_map_sync_is_used_like_a_disk():
    dax = durability.System().dax(VIRTIO, None)
    assert (dax.is_dax, dax.map_sync) == (True, False)
    found = probe(VIRTIO)
    assert (found.os, found.power, found.medium_kind) == (True, True, MEDIUM_DISK)
    assert any("virtio-pmem" in line for line in found.evidence)
    model = net()
    optimizer = adam(model)
    pool = Path(VIRTIO, "run.pool")
    with lightck.attach(model, pool, optimizer=optimizer):
        train(model, optimizer, 3)
    assert lightck.recover(pool).step == 3
