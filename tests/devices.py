"""A device-dax device for any machine: a file behind a made-up sysfs, which is never read or written as a file.

What a device refuses, this refuses too: read() on its descriptor fails the test. What only a kernel can show (locks
on a node, MAP_SYNC, addresses) is tests/guest/.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightck.pool.format.structures import MIB
from lightck.pool.storage.devdax import DevdaxBackend
from lightck.pool.storage.system import System

NUMBER = (252, 0)
ALIGN = 2 * MIB
NVDIMM = "LNXSYSTM:00/ACPI0012:00/ndbus0/region0/dax0.0/dax0.0"
HMEM = "platform/hmem.0/dax0.0"


class DeviceSystem(System):
    """A machine on which the file ``node`` is /dev/dax0.0."""

    def __init__(self, root: Path, node: Path) -> None:
        super().__init__(str(root / "sys"), str(root / "proc"))
        self.root = root
        self.node = node
        self.folder = root / "sys" / "devices" / NVDIMM

    def character_device(self, st: os.stat_result) -> tuple[int, int] | None:
        there = os.stat(self.node)
        return NUMBER if (st.st_dev, st.st_ino) == (there.st_dev, there.st_ino) else super().character_device(st)

    def write_back(self) -> str | None:
        return "clwb"

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def plug(
        self, place: str = NVDIMM, *, align: int = ALIGN, provider: str = "ACPI.NFIT", domain: str = "memory_controller"
    ) -> DeviceSystem:
        """The device in this folder of /sys/devices, as large as the file is."""
        self.folder = self.root / "sys" / "devices" / place
        self.write(self.folder / "size", f"{os.stat(self.node).st_size}\n")
        self.write(self.folder / "align", f"{align}\n")
        bus = self.root / "sys" / "bus" / "dax"
        bus.mkdir(parents=True, exist_ok=True)
        (self.folder / "subsystem").unlink(missing_ok=True)
        (self.folder / "subsystem").symlink_to(bus)
        link = self.root / "sys" / "dev" / "char" / "252:0"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(self.folder)
        if "ndbus" in place:
            region = self.folder.parent.parent
            self.write(region / "persistence_domain", domain + "\n")
            self.write(region.parent / "provider", provider + "\n")
        return self


def device(folder: Path, nbytes: int) -> tuple[str, DeviceSystem, DevdaxBackend]:
    """A new device: its path, its machine, and the backend that sees it. It is volatile, so that no MAP_SYNC is asked
    for which a file does not grant."""
    node = folder / "dax0.0"
    with node.open("wb") as f:
        f.truncate(nbytes)
    node.chmod(0o600)
    system = DeviceSystem(folder / "machine", node).plug(HMEM)
    return str(node), system, DevdaxBackend(system)


def forbid_reading(patch: pytest.MonkeyPatch, node: str) -> None:
    """As the kernel does: read() and write() on a device-dax device are EINVAL."""
    there = os.stat(node)

    def guarded(call: object) -> object:
        def checked(fd: int, *rest: object) -> object:
            st = os.fstat(fd)
            if (st.st_dev, st.st_ino) == (there.st_dev, there.st_ino):
                raise AssertionError("a device-dax device is mapped, never read, written or synced")
            return call(fd, *rest)  # type: ignore[operator]

        return checked

    for name in ("read", "pread", "write", "pwrite", "fsync", "fdatasync", "posix_fallocate", "ftruncate"):
        patch.setattr(os, name, guarded(getattr(os, name)))
