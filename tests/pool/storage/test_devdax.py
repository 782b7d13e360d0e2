"""Pools on device-dax devices, on a device that is made up (devices.py); a real one, or nearly, is in tests/guest/."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import toys
from devices import ALIGN, HMEM, NVDIMM, DeviceSystem, device, forbid_reading
from test_backend_conformance import NBYTES, BackendContract

import lightck
from lightck.errors import (
    CheckpointExistsError,
    CorruptPoolError,
    MediumError,
    NoSpaceError,
    NotAPoolError,
    PoolIOError,
    PoolNotFoundError,
    PoolPathError,
    PoolPermissionError,
    PoolTruncatedError,
)
from lightck.pool.format.structures import MAGIC, MIB
from lightck.pool.reader import StoredCheckpoint, open_pool
from lightck.pool.storage import backends, devdax_head, temporary
from lightck.pool.storage.backend import Backend
from lightck.pool.storage.devdax import DevdaxBackend
from lightck.pool.storage.durability import MEDIUM_CACHE, MEDIUM_PM, MEDIUM_PM_EADR, probe_device

SMALL = 24 * MIB
"""Room for the head and two small pools."""


@pytest.fixture
def plugged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, DeviceSystem, DevdaxBackend]]:
    """A device that ``attach`` finds, and that cannot be read."""
    path, system, backend = device(folder, 64 * MIB)
    monkeypatch.setitem(backends.BACKENDS, "devdax", backend)
    with pytest.MonkeyPatch.context() as patch:
        forbid_reading(patch, path)
        yield path, system, backend


class TestDevdax(BackendContract):
    """Every fact of the seam; the tests' own poke() writes to the file behind the device."""

    @pytest.fixture
    def backend(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Backend:
        _, _, backend = device(folder, 256 * MIB)
        return backend

    @pytest.fixture
    def path(self, folder: Path) -> str:
        return str(folder / "dax0.0")

    test_a_container_that_lost_bytes_is_not_current = None  # nobody can truncate a device

    def test_only_what_has_the_signature_is_recognised(self, backend: Backend, path: str) -> None:
        assert not backend.recognises(path)
        self.published(backend, path, b"something")  # the device itself is signed
        assert backend.recognises(path)
        backend.discard(path)
        assert not backend.recognises(path)


def trained(path: str, steps: int = 3, **options: object) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    return toys.pool_with(Path(path), steps, **options)


def content(path: str) -> bytes:
    """The whole device, as the medium has it."""
    with open(path, "rb") as f:
        return f.read()


def put(path: str, offset: int, data: bytes) -> None:
    with open(path, "r+b") as f:
        f.seek(offset)
        f.write(data)


def test_a_training_lives_on_a_device_that_cannot_be_read(plugged):
    path, _, _ = plugged
    model, optimizer = trained(path)
    assert toys.is_step(lightck.recover(path), toys.everything(model, optimizer))
    again = toys.net(seed=3)
    its = toys.adam(again)
    with lightck.attach(again, path, optimizer=its, resume=True) as session:
        toys.train(again, its, 2, session.step)
    assert toys.is_step(lightck.recover(path), toys.everything(again, its))
    assert not os.path.exists(temporary.path_of(path))


def test_a_device_with_a_training_is_neither_loaded_nor_overwritten_unasked(plugged):
    path, _, _ = plugged
    trained(path)
    before = content(path)
    model = toys.net()
    with pytest.raises(CheckpointExistsError):
        lightck.attach(model, path, optimizer=toys.adam(model))
    assert content(path) == before
    trained(path, 1, overwrite=True)
    assert lightck.recover(path).step == 1


def test_the_pool_that_is_there_stays_until_the_new_one_is_published(plugged):
    path, _, backend = plugged
    model, optimizer = trained(path)
    held = toys.everything(model, optimizer)
    new = backend.create(path, NBYTES)
    assert toys.is_step(lightck.recover(path), held)
    new.close()
    assert toys.is_step(lightck.recover(path), held)


def test_pools_follow_each_other_at_the_two_ends_of_a_device(plugged):
    path, _, backend = plugged
    places = []
    for _ in range(4):
        container = backend.create(path, NBYTES)
        container.publish()
        places += [container.extents[0]]
        container.close()
    room = 2 * ALIGN
    assert places == [(ALIGN, room), (64 * MIB - room, room)] * 2


def test_without_room_for_two_a_pool_does_not_grow_and_is_not_lost(folder, monkeypatch):
    path, _, backend = device(folder, 12 * MIB)
    monkeypatch.setitem(backends.BACKENDS, "devdax", backend)
    trained(path)
    model = toys.net(seed=2)
    optimizer = toys.adam(model)
    session = lightck.attach(model, path, optimizer=optimizer, resume=True, slots=3)
    with pytest.raises(NoSpaceError, match=r"beside the pool.*intact.*larger namespace"):
        toys.train(model, optimizer, 2, session.step)
        session.flush()
    assert lightck.recover(path).step == 3
    session.close()  # which saves the last step where the others lie
    assert toys.is_step(lightck.recover(path), toys.everything(model, optimizer))
    trained(path, 1, overwrite=True)  # then there is nothing to be kept
    assert lightck.recover(path).step == 1
    with pytest.raises(NoSpaceError, match=r"the device has 12\.6 MB"):
        trained(path, 1, overwrite=True, slots=8)
    assert lightck.recover(path).step == 1


def test_an_empty_pool_is_no_obstacle(folder, monkeypatch):
    path, _, backend = device(folder, 12 * MIB)
    monkeypatch.setitem(backends.BACKENDS, "devdax", backend)
    for _ in range(3):
        model = toys.net()
        lightck.attach(model, path, optimizer=toys.adam(model)).close()
    trained(path)
    assert lightck.recover(path).step == 3


@pytest.mark.parametrize("at", [0, 1080, 4096, 70000, 2 * MIB - 1])
def test_what_is_not_ours_is_overwritten_only_if_that_is_said(plugged, at):
    path, _, _ = plugged
    put(path, at, b"\x53")
    before = content(path)
    model = toys.net()
    for options in ({}, {"resume": True}):
        with pytest.raises(NotAPoolError, match=r"data of another program.*overwrite=True"):
            lightck.attach(model, path, optimizer=toys.adam(model), **options)
    with pytest.raises(NotAPoolError):
        lightck.recover(path)
    assert content(path) == before
    trained(path, 2, overwrite=True)
    assert lightck.recover(path).step == 2


def test_a_blank_device_holds_no_pool(plugged):
    path, _, backend = plugged
    with pytest.raises(PoolNotFoundError, match="no pool on the device"):
        lightck.recover(path)
    assert not backend.recognises(path)
    assert content(path) == bytes(64 * MIB)


@pytest.mark.parametrize("copy", devdax_head.RECORD_OFFSETS)
def test_either_copy_of_the_record_is_enough(plugged, copy):
    path, _, _ = plugged
    model, optimizer = trained(path)
    put(path, copy + 20, b"\xff")
    assert toys.is_step(lightck.recover(path), toys.everything(model, optimizer))
    trained(path, 1, overwrite=True)
    assert lightck.recover(path).step == 1


def test_two_damaged_records_are_said_and_can_be_overwritten(plugged):
    path, _, _ = plugged
    trained(path)
    for copy in devdax_head.RECORD_OFFSETS:
        put(path, copy + 20, b"\xff")
    model = toys.net()
    with pytest.raises(CorruptPoolError, match="damaged"):
        lightck.attach(model, path, optimizer=toys.adam(model), resume=True)
    trained(path, 1, overwrite=True)
    assert lightck.recover(path).step == 1


def test_a_record_that_names_an_impossible_place_is_not_followed(plugged):
    path, _, _ = plugged
    size = 64 * MIB
    wrong = [
        (0, NBYTES),
        (size, NBYTES),
        (ALIGN, size),
        (1 << 63, NBYTES),
        (ALIGN, 1 << 63),
        (ALIGN, 4096),
        (ALIGN + 64, NBYTES),
    ]
    for start, nbytes in wrong:
        record = devdax_head.Record(7, start, nbytes, size).pack()
        for copy in devdax_head.RECORD_OFFSETS:
            put(path, copy, record)
        with pytest.raises(CorruptPoolError, match="impossible place"):
            lightck.recover(path)


def test_a_record_with_an_impossible_sequence_does_not_count(plugged):
    path, _, _ = plugged
    for copy in devdax_head.RECORD_OFFSETS:
        put(path, copy, devdax_head.Record((1 << 64) - 1, ALIGN, NBYTES, 64 * MIB).pack())
    with pytest.raises(CorruptPoolError, match="damaged"):
        lightck.recover(path)
    trained(path, 1, overwrite=True)
    assert lightck.recover(path).step == 1


def test_a_reader_that_was_closed_touches_no_memory(plugged):
    path, _, _ = plugged
    trained(path)
    reader = open_pool(path)
    checkpoint = next(v for v in reader.checkpoints() if isinstance(v, StoredCheckpoint))
    checkpoint.verify()
    reader.close()
    with pytest.raises(PoolIOError, match="cannot be read"):
        checkpoint.read_into("model/0.weight", 0)


def test_a_namespace_that_was_made_anew_is_said(plugged):
    path, system, _ = plugged
    trained(path)
    os.truncate(path, 128 * MIB)
    system.plug(HMEM)
    with pytest.raises(PoolTruncatedError, match="namespace was created again"):
        lightck.recover(path)
    os.truncate(path, 64 * MIB)
    system.plug(HMEM, align=16 * MIB)
    with pytest.raises(PoolPathError, match="align"):
        lightck.recover(path)


def test_the_unit_of_a_device_is_kept_to(folder):
    path, system, backend = device(folder, 100 * MIB)
    system.plug(HMEM, align=16 * MIB)
    for start in (16 * MIB, 80 * MIB):
        container = backend.create(path, NBYTES)
        assert container.extents == ((start, 16 * MIB),)
        container.publish()
        container.close()


def test_other_backends_refuse_a_device_and_this_one_other_paths(plugged, folder):
    path, _, backend = plugged
    (folder / "run.pool").touch()
    with pytest.raises(PoolPathError, match="not a device-dax device"):
        trained(str(folder / "run.pool"), backend="devdax")
    with pytest.raises(PoolNotFoundError, match="no device"):
        trained("/dev/dax1234.5")  # and no file is made in its place
    assert not os.path.exists("/dev/dax1234.5")
    with pytest.raises(PoolPathError, match="not a device-dax device"):
        backend.open("/dev/null", write=False)
    assert not backend.claims("/dev/null")
    for other in ("file", "pmdk"):
        with pytest.raises(PoolPathError, match="device"):
            backends.BACKENDS[other].open("/dev/null", write=True)
    os.symlink(path, folder / "link")
    with pytest.raises(PoolPathError, match="link"):
        backend.open(str(folder / "link"), write=False)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_device_that_others_can_write_is_refused(plugged, mode):
    path, _, backend = plugged
    os.chmod(path, mode)
    with pytest.raises(PoolPermissionError, match="written by others"):
        backend.open(path, write=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_device_of_another_user_is_refused(plugged):
    path, _, backend = plugged
    os.chown(path, 12345, -1)
    with pytest.raises(PoolPermissionError, match="user 12345"):
        backend.open(path, write=False)


# -- what a device survives ------------------------------------------------------------------------------------------


def judged(system: DeviceSystem):
    facts = system.dax_device(os.stat(system.node))
    assert facts is not None
    return probe_device(facts, system=system)


@pytest.mark.parametrize(
    ("domain", "kind", "power"),
    [("memory_controller", MEDIUM_PM, True), ("cpu_cache", MEDIUM_PM_EADR, True), ("unknown", MEDIUM_PM, False)],
)
def test_a_namespace_of_the_firmware_survives_what_its_domain_says(plugged, domain, kind, power):
    found = judged(plugged[1].plug(NVDIMM, domain=domain))
    assert (found.process, found.os, found.power, found.media) == (True, True, power, False)
    assert (found.medium_kind, found.medium) == (kind, "persistent memory (device-dax)")
    assert any("dax0.0 is a device-dax device" in line for line in found.evidence)
    assert any("ACPI.NFIT" in line for line in found.evidence)


@pytest.mark.parametrize("provider", ["e820", "nfit_test.0", "virtio-pmem", "", "something"])
def test_other_providers_promise_the_process_only(plugged, provider):
    found = judged(plugged[1].plug(NVDIMM, provider=provider))
    assert (found.process, found.os, found.power, found.medium_kind) == (True, False, False, MEDIUM_CACHE)


@pytest.mark.parametrize("place", [HMEM, "pci0000:0c/root0/decoder0.0/region0/dax_region0/dax0.0"])
def test_memory_that_is_not_on_the_nvdimm_bus_is_volatile(plugged, place):
    found = judged(plugged[1].plug(place))
    assert (found.process, found.os, found.power, found.medium_kind) == (True, False, False, MEDIUM_CACHE)
    assert any("not on the NVDIMM bus" in line for line in found.evidence)


def test_a_volatile_device_is_refused_where_more_is_required(plugged):
    path, _, _ = plugged
    with pytest.raises(MediumError, match="NVDIMM bus"):
        trained(path, require="power")
    assert content(path) == bytes(64 * MIB)


def test_what_is_no_dax_device_is_none(plugged, folder):
    path, system, _ = plugged
    for name, text in (("size", "many"), ("size", "0"), ("align", ""), ("align", "0")):
        system.plug(HMEM)
        (system.folder / name).write_text(text)
        assert system.dax_device(os.stat(path)) is None
    system.plug(HMEM)
    (system.folder / "subsystem").unlink()
    (system.folder / "subsystem").symlink_to(folder)
    assert system.dax_device(os.stat(path)) is None


def test_the_signature_of_the_head_is_not_that_of_a_pool():
    assert devdax_head.MAGIC != MAGIC
