"""Persistent memory for real, or nearly: a guest with an emulated NVDIMM runs a part of the suite on ext4 with DAX.

A boot and an import of torch take a minute or two without KVM, so that these tests run only where they are asked for:
``LIGHTCK_REQUIRE_GUEST=1`` makes them obligatory, ``LIGHTCK_GUEST=1`` runs them where they can run.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import machine
import pytest

pytestmark = pytest.mark.guest
ROOT = Path(__file__).resolve().parents[2]
GUEST = ROOT / "tests" / "guest"
NVDIMM_NBYTES = 1 << 30
BOOT_S, SUITE_S = 600, 2400


@pytest.fixture(scope="module", autouse=True)
def _can_boot() -> None:
    """Skipped with the reason, or failed with it."""
    required = os.environ.get("LIGHTCK_REQUIRE_GUEST") == "1"
    if not required and os.environ.get("LIGHTCK_GUEST") != "1":
        pytest.skip("takes minutes: LIGHTCK_GUEST=1 boots a guest, LIGHTCK_REQUIRE_GUEST=1 insists on it")
    try:
        for name, package in (
            ("qemu-system-x86_64", "qemu-system-x86"),
            ("busybox", "busybox-static"),
            ("ndctl", "ndctl"),
            ("mkfs.ext4", "e2fsprogs"),
            ("filefrag", "e2fsprogs"),
            ("bash", "bash"),
            ("cc", "gcc"),
        ):
            machine.tool(name, package)
        machine.kernel()
    except machine.Unavailable as why:
        if required:
            pytest.fail(f"no guest can be booted here, and LIGHTCK_REQUIRE_GUEST=1: {why}")
        pytest.skip(f"no guest can be booted here: {why}")


@pytest.fixture
def nvdimm(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "nvdimm"
    with file.open("wb") as f:
        f.truncate(NVDIMM_NBYTES)
    yield file
    file.unlink()


@pytest.fixture
def flush_test(tmp_path: Path) -> Path:
    """native/tests/test_flush.c, built from this checkout; in the folder that the guest has as /out."""
    out = tmp_path / "out"
    out.mkdir()
    sources = [*sorted((ROOT / "native" / "src").glob("*.c")), ROOT / "native" / "tests" / "test_flush.c"]
    flags = ["-std=c11", "-O2", "-D_GNU_SOURCE", "-ffp-contract=off", "-pthread"]
    includes = [f"-I{ROOT / 'native' / 'include'}", f"-I{ROOT / 'native' / 'src'}"]
    subprocess.run(["cc", *flags, *includes, *sources, "-o", out / "test_flush"], check=True)
    return out / "test_flush"


def job(domain: str, *lines: str) -> str:
    """A shell script for the guest: the prelude, the environment of the suite, then these lines."""
    environment = {
        "HOME": "/tmp",
        "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'pool' / 'storage'}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "LIGHTCK_TEST_DIR": "/pm",
        "LIGHTCK_GUEST_DOMAIN": domain,
        "PYTHON": sys.executable,
    }
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    return "\n".join(["set -eo pipefail", f". {GUEST / 'prelude.sh'}", *exports, f"cd {ROOT}", *lines]) + "\n"


def outcomes(junit: Path) -> dict[str, str]:
    """Test -> "passed", or what its element says of it."""
    found = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        reported = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        found[f"{case.get('classname')}::{case.get('name')}"] = reported[0] if reported else "passed"
    return found


def test_the_suite_holds_on_persistent_memory(tmp_path, nvdimm, flush_test):
    out = flush_test.parent
    virtio = tmp_path / "virtio"
    with virtio.open("wb") as f:
        f.truncate(256 << 20)
    pytest_command = "$PYTHON -m pytest -p no:cacheprovider --basetemp=/pm/tmp --junitxml=/out/junit.xml"
    suite = "tests/guest/on_dax.py tests/pool/storage/test_backend_conformance.py tests/session/test_session.py"
    suite += " tests/restore/test_recover.py"
    booted = machine.boot(
        job(
            "memory_controller",
            "make_fsdax",
            "make_and_mount ACPI.NFIT /pm",
            "make_and_mount e820 /memmap",
            "make_and_mount virtio-pmem /virtio",
            "export LIGHTCK_GUEST_MEMMAP=/memmap LIGHTCK_GUEST_VIRTIO=/virtio",
            "export LIGHTCK_GUEST_FLUSH=/out/test_flush",
            f"{pytest_command} {suite} >/out/pytest 2>&1",
        ),
        out,
        nvdimm,
        append="memmap=256M!1G",
        extra=(
            "-object",
            f"memory-backend-file,id=vp,share=on,mem-path={virtio},size=256M",
            "-device",
            "virtio-pmem-pci,id=vpp,memdev=vp",
        ),
    )
    status = booted.wait(SUITE_S)
    report = out / "pytest"
    assert status == 0, report.read_text()[-6000:] if report.exists() else booted.console[-3000:]
    found = outcomes(out / "junit.xml")
    here = {name: outcome for name, outcome in found.items() if "on_dax" in name}
    assert here
    assert set(here.values()) == {"passed"}, here
    assert list(found.values()).count("passed") > 150, found
    print(report.read_text()[-1500:])
    shutil.rmtree(out)


def test_a_training_survives_a_power_cut_on_persistent_memory(tmp_path, nvdimm):
    """qemu gets SIGKILL in mid-training; a second boot finds what was acknowledged, exact to the bit. With eADR."""
    out = tmp_path / "out"
    script = f"$PYTHON {GUEST / 'endless.py'}"
    train = f"{script} train /pm/run.pool /out/committed >/out/train 2>&1"
    booted = machine.boot(
        job("cpu_cache", "make_fsdax", "make_and_mount ACPI.NFIT /pm", train), out, nvdimm, persistence="cpu"
    )
    try:
        committed = _wait_for(booted, out / "committed", 6)
    finally:
        booted.kill()
    committed = max(committed, _number(out / "committed"))
    evidence = (out / "durability").read_text()
    assert "persistent memory" in evidence
    assert "MAP_SYNC" in evidence
    assert "eADR" in evidence

    mount = "mkdir -p /pm; mount -o dax=always /dev/$(device ACPI.NFIT) /pm"
    check = f"{script} check /pm/run.pool /out/found.json >/out/check 2>&1"
    status = machine.boot(job("cpu_cache", mount, check), out, nvdimm, persistence="cpu").wait(BOOT_S)
    assert status == 0, (out / "check").read_text()[-3000:]
    found = json.loads((out / "found.json").read_text())
    print(f"committed before the power cut: {committed}; found: {found}")
    assert found["exact"]
    assert found["goes_on"]
    assert found["step"] >= committed


def test_a_device_without_a_file_system_holds_a_pool_and_survives_a_power_cut(tmp_path, nvdimm):
    """One boot runs on_devdax.py on a device-dax device and then trains until qemu gets SIGKILL; a second one looks."""
    out = tmp_path / "out"
    script, device = f"$PYTHON {GUEST / 'endless.py'}", "/dev/dax0.0"
    pytest_command = "$PYTHON -m pytest -p no:cacheprovider --basetemp=/dev/shm/tmp --junitxml=/out/junit.xml"
    paths = f"export LIGHTCK_GUEST_DEVICE={device} PYTHONPATH=$PYTHONPATH:{ROOT / 'tests' / 'cli'}"
    suite = f"{pytest_command} tests/guest/on_devdax.py >/out/pytest 2>&1"
    train = f"{script} train {device} /out/committed >/out/train 2>&1"
    wipe = f"$PYTHON -c 'from lightck.pool.storage.backends import DEVDAX; DEVDAX.discard(\"{device}\")'"
    booted = machine.boot(job("memory_controller", "make_devdax", paths, suite, wipe, train), out, nvdimm)
    try:
        committed = _wait_for(booted, out / "committed", 6, SUITE_S)
    except AssertionError:
        report = out / "pytest"
        print(report.read_text()[-6000:] if report.exists() else "no report")
        raise
    finally:
        booted.kill()
    committed = max(committed, _number(out / "committed"))
    found = outcomes(out / "junit.xml")
    assert len(found) >= 20
    assert set(found.values()) == {"passed"}, found
    evidence = (out / "durability").read_text()
    assert "device-dax" in evidence
    assert "memory_controller" in evidence

    check = f"{script} check {device} /out/found.json >/out/check 2>&1"
    status = machine.boot(job("memory_controller", check), out, nvdimm).wait(BOOT_S)
    assert status == 0, (out / "check").read_text()[-3000:]
    found = json.loads((out / "found.json").read_text())
    print(f"committed before the power cut: {committed}; found: {found}")
    assert found["exact"]
    assert found["goes_on"]
    assert found["step"] >= committed


def _number(file: Path) -> int:
    """The number that the guest wrote last; a file that is being written has none."""
    words = file.read_text().split() if file.exists() else []
    return int(words[0]) if words and words[0].isdecimal() else 0


def _wait_for(booted: machine.Boot, file: Path, number: int, seconds: float = BOOT_S) -> int:
    deadline = time.monotonic() + seconds
    while _number(file) < number:
        assert time.monotonic() < deadline, f"the training did not come so far:\n{booted.console[-2000:]}"
        assert booted.process.poll() is None, f"the guest ended:\n{booted.console[-2000:]}"
        time.sleep(0.05)
    return _number(file)
