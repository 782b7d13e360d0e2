"""Facts about a device-dax device, run by test_guest.py inside a guest that has one: not collected elsewhere.

The made-up device of tests/devices.py has the same tests for what needs no kernel; here is what only a kernel can show,
and the seam's own suite once more.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import test_backend_conformance
from calls import call, call_json
from endless import WIDTH
from on_dax import mappings
from test_backend_conformance import BackendContract
from toys import adam, everything, is_step, net, pool_with, running_child, train

import lightck
from lightck.errors import NotAPoolError, PoolLockedError, PoolPathError
from lightck.pool.engine import Medium
from lightck.pool.storage import durability, extents
from lightck.pool.storage.backend import Backend, Container
from lightck.pool.storage.backends import BACKENDS, DEVDAX, backend_for
from lightck.pool.storage.devdax_head import HEAD_NBYTES
from lightck.pool.storage.durability import MEDIUM_PM
from lightck.pool.storage.lock import PoolLock, holder_of

DEVICE = os.environ["LIGHTCK_GUEST_DEVICE"]
HUGE = 2 << 20
HERE = Path(__file__).resolve().parent


def store(offset: int, data: bytes) -> None:
    """Write to the device behind the back of everything."""
    fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    medium = Medium(fd, ((0, HEAD_NBYTES),), MEDIUM_PM)
    medium.store(offset, data)
    medium.sync()
    medium.close()
    os.close(fd)


def poke(container: Container, offset: int, data: bytes) -> None:
    """As the conformance suite's own, which writes to a descriptor."""
    medium = Medium(container.fd, container.extents, MEDIUM_PM)
    medium.store(offset, data)
    medium.sync()
    medium.close()


@pytest.fixture(autouse=True)
def _blank() -> None:
    """Each test begins with a device that nobody used."""
    store(0, bytes(HEAD_NBYTES))


class TestDevice(BackendContract):
    @pytest.fixture
    def backend(self, monkeypatch: pytest.MonkeyPatch) -> Backend:
        monkeypatch.setattr(test_backend_conformance, "poke", poke)
        return DEVDAX

    @pytest.fixture
    def path(self) -> str:
        return DEVICE

    def test_only_what_has_the_signature_is_recognised(self, backend: Backend, path: str) -> None:
        assert not backend.recognises(path)
        self.published(backend, path, b"something")  # the device itself is signed
        assert backend.recognises(path)


def test_the_kernel_reads_and_writes_no_device():
    """Why pools on devices are mapped, also to be read."""
    fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    for call_ in (lambda: os.pread(fd, 8, 0), lambda: os.pwrite(fd, b"x", 0), lambda: os.fsync(fd)):
        with pytest.raises(OSError) as caught:
            call_()
        assert caught.value.errno == errno.EINVAL
    assert os.fstat(fd).st_size == 0
    os.close(fd)


def test_a_session_says_what_it_stands_on():
    model = net()
    with lightck.attach(model, DEVICE, optimizer=adam(model), require="power") as session:
        found = session.durability
        (mapping,) = (m for m in mappings(DEVICE) if " rw-s " in m[1].partition("\n")[0])
    assert (found.process, found.os, found.power, found.media) == (True, True, True, False)
    assert (found.medium_kind, found.medium) == (MEDIUM_PM, "persistent memory (device-dax)")
    assert any("ACPI.NFIT" in line and "memory_controller" in line for line in found.evidence)
    assert any(f"written back with {durability.System().write_back()}" in line for line in found.evidence)
    address, entry = mapping
    (flags,) = re.findall(r"^VmFlags: (.*)$", entry, re.MULTILINE)
    assert {"sf", "dc", "dd"} <= set(flags.split())  # MAP_SYNC, not inherited by a fork, not dumped
    assert address % HUGE == 0


def test_a_training_is_recovered_and_goes_on_and_grows():
    model, optimizer = pool_with(Path(DEVICE), 4)
    assert is_step(lightck.recover(DEVICE), everything(model, optimizer))
    again = net(seed=1)
    its = adam(again)
    with lightck.attach(again, DEVICE, optimizer=its, resume=True, slots=4) as session:
        train(again, its, 2, session.step)
        with session.pin() as pin:
            train(again, its, 2, session.step)
            assert lightck.recover(DEVICE, step=pin.step).step == 6
    assert is_step(lightck.recover(DEVICE), everything(again, its))


def test_a_killed_training_is_recovered_exactly_and_its_lock_goes_with_it(tmp_path):
    """SIGKILL while versions are written; a child that it forked lives on, as a loader's worker may."""
    committed = tmp_path / "committed"
    script = [sys.executable, str(HERE / "endless.py"), "train", DEVICE, str(committed), "fork"]
    process = subprocess.Popen(script)
    try:
        deadline = time.monotonic() + 300
        while not (committed.exists() and int((committed.read_text().split() or ["0"])[0].replace("None", "0")) >= 4):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        model = net(WIDTH)
        with pytest.raises(PoolLockedError, match=f"pid {process.pid}:"):
            lightck.attach(model, DEVICE, optimizer=adam(model), resume=True)
        holder = holder_of(DEVICE)
        assert holder is not None
        assert holder.pid == process.pid
        assert lightck.recover(DEVICE).step >= 3  # while it is written
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    worker = int((tmp_path / "worker").read_text())
    os.kill(worker, 0)
    acknowledged = int(committed.read_text().split()[0])
    try:
        checked = tmp_path / "found.json"
        subprocess.run([sys.executable, str(HERE / "endless.py"), "check", DEVICE, str(checked)], check=True)
    finally:
        os.kill(worker, signal.SIGKILL)
    found = json.loads(checked.read_text())
    assert found["exact"]
    assert found["goes_on"]
    assert found["step"] >= acknowledged


def test_a_lock_holds_against_processes_and_outlives_readers():
    lock = PoolLock(DEVICE)
    assert not os.path.exists(DEVICE + ".lock")
    os.close(os.open(DEVICE, os.O_RDONLY))  # closing another descriptor does not drop it

    def other() -> None:
        with pytest.raises(PoolLockedError):
            PoolLock(DEVICE)

    with running_child(other):
        pass
    with pytest.raises(PoolLockedError, match="this process"):
        PoolLock(DEVICE)
    lock.release()
    assert holder_of(DEVICE) is None
    PoolLock(DEVICE).release()


def test_foreign_content_is_overwritten_only_if_that_is_said():
    store(1080, b"\x53\xef")  # as ext4 signs a device that was one of its own before
    model = net()
    with pytest.raises(NotAPoolError, match="overwrite=True"):
        lightck.attach(model, DEVICE, optimizer=adam(model), resume=True)
    pool_with(Path(DEVICE), 2, overwrite=True)
    assert lightck.recover(DEVICE).step == 2


def test_other_backends_say_why_they_do_not_take_a_device():
    assert backend_for(DEVICE) is DEVDAX
    for name in ("pmdk", "file"):
        model = net()
        with pytest.raises(PoolPathError, match=r'is a device.*backend="auto"'):
            lightck.attach(model, DEVICE, optimizer=adam(model), backend=name)
    assert BACKENDS["devdax"] is DEVDAX


def test_the_commands_work_on_a_device(tmp_path):
    pool_with(Path(DEVICE), 3)
    status, facts = call_json("inspect", DEVICE)
    assert (status, facts["pool"]["backend"], facts["versions"][0]["step"]) == (0, "devdax", 3)
    assert facts["durability"]["power"]
    assert call("verify", "--deep", DEVICE).exit_code == 0
    assert call("export", DEVICE, tmp_path / "three.safetensors").exit_code == 0
    assert (tmp_path / "three.safetensors").stat().st_size > 0
    reported = call("doctor", DEVICE)
    assert reported.exit_code == 0
    assert re.search(rf"ok +{DEVICE} +persistent memory \(device-dax\)", reported.output), reported.output


def test_what_a_read_gives_is_what_the_extents_hold():
    pool_with(Path(DEVICE), 2)
    container = DEVDAX.open(DEVICE, write=False)
    assert len(container.read(0, container.nbytes + 100)) == container.nbytes
    assert container.read(container.nbytes, 10) == b""
    assert extents.total(container.extents) % HUGE == 0
    container.close()
