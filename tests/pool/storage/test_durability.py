"""What each medium is said to survive, and why: real probes of this machine, and machines that are made up of files.

``Machine`` is a sysfs and a procfs in a temporary folder, and fixed answers to the three system calls; everything above
them is what a user's probe runs.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import lightck
from lightck.errors import MediumError
from lightck.pool.storage import durability
from lightck.pool.storage.durability import (
    MEDIUM_CACHE,
    MEDIUM_DISK,
    MEDIUM_PM,
    MEDIUM_PM_EADR,
    Durability,
    probe,
    require,
)
from lightck.pool.storage.system import Dax, System

EXT4, XFS, BTRFS, ZFS, OVERLAY, TMPFS = 0xEF53, 0x58465342, 0x9123683E, 0x2FC12FC1, 0x794C7630, 0x01021994
GRANTED = Dax(True, True)
REFUSED = Dax(False, False, "Operation not supported")


class Machine(System):
    """A machine that has one file system, on one block device (259:0) with the kernel name ``device``."""

    def __init__(self, root: Path, kind: int | None, dax: Dax = REFUSED) -> None:
        super().__init__(str(root / "sys"), str(root / "proc"))
        self.root = root
        self.kinds: dict[str, int | None] = {}
        self.kind = kind
        self.answer = dax
        self.number: tuple[int, int] | None = (259, 0)
        self.instruction: str | None = "clwb"
        self.asked: list[tuple[str, str | None]] = []
        self.mounted("/dev/pmem0", "rw")

    def file_system(self, path: str) -> int | None:
        return self.kinds.get(path, self.kind)

    def block_device(self, path: str) -> tuple[int, int] | None:
        return self.number

    def dax(self, folder: str, file: str | None) -> Dax:
        self.asked.append((folder, file))
        return self.answer

    def write_back(self) -> str | None:
        return self.instruction

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def mounted(self, source: str, options: str) -> None:
        lines = ["21 1 8:1 / / rw - ext4 /dev/sda1 rw", f"22 21 259:0 / {self.root} rw - ext4 {source} {options}"]
        self.write("proc/self/mountinfo", "\n".join(lines) + "\n")

    def device(self, folder: str, number: str = "259:0") -> Path:
        """A block device in this folder of /sys/devices."""
        path = self.root / "sys" / "devices" / folder
        path.mkdir(parents=True, exist_ok=True)
        link = self.root / "sys" / "dev" / "block" / number
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
        return path

    def disk(self) -> Machine:
        self.device("pci0000:00/nvme0/block/nvme0n1")
        return self

    def nvdimm(self, provider: str | None, domain: str | None, *, bus: int = 0, number: str = "259:0") -> Machine:
        """A namespace in fsdax mode on a region, as the kernel shows it; None leaves a file out."""
        place = f"LNXSYSTM:00/ACPI0012:0{bus}/ndbus{bus}"
        region = f"sys/devices/{place}/region{bus}"
        self.device(f"{place}/region{bus}/pfn{bus}.0/block/pmem{bus}", number)
        self.write(f"{region}/numa_node", f"{bus}\n")
        if provider is not None:
            self.write(f"sys/devices/{place}/provider", provider + "\n")
        if domain is not None:
            self.write(f"{region}/persistence_domain", domain + "\n")
        return self

    def probe(self, file: str | None = None) -> Durability:
        return probe(str(self.root), file, system=self)


def promise(found: Durability) -> tuple[bool, bool, bool, bool]:
    return found.process, found.os, found.power, found.media


def reported(found: Durability, *words: str) -> None:
    text = "\n".join(found.evidence)
    for word in words:
        assert word in text, found.evidence


PROCESS, OS, POWER = (True, False, False, False), (True, True, False, False), (True, True, True, False)


# -- this machine ----------------------------------------------------------------------------------------------------


def test_tmpfs_survives_the_process_only():
    if not os.access("/dev/shm", os.W_OK) or System().file_system("/dev/shm") != TMPFS:
        pytest.skip("/dev/shm is no tmpfs that can be written here")
    found = probe("/dev/shm")
    assert promise(found) == PROCESS
    assert found.medium_kind == MEDIUM_CACHE
    assert found.medium == "tmpfs"
    assert str(found) == "tmpfs: survives process"
    reported(found, "f_type 0x1021994", "lives in memory")


def test_a_disk_on_this_machine_is_named(tmp_path):
    found = probe(str(tmp_path))
    if not found.medium.startswith("disk"):
        pytest.skip(f"the temporary folder is on no disk: {found}")
    assert promise(found) == POWER
    assert found.medium_kind == MEDIUM_DISK
    reported(found, "f_type", "fdatasync", "the device is")


def test_no_file_is_left_by_a_probe(tmp_path):
    refused = System().dax(str(tmp_path), None)
    assert os.listdir(tmp_path) == []
    assert refused.map_sync == (refused.reason == "")


def test_tmpfs_grants_no_map_sync(folder):
    if System().file_system(str(folder)) != TMPFS:
        pytest.skip("the folder for pools is no tmpfs")
    assert not System().dax(str(folder), None).map_sync
    pool = folder / "file"
    pool.write_bytes(bytes(4096))
    assert System().dax(str(folder), str(pool)) == Dax(False, False, "Operation not supported")
    assert "No such file" in System().dax(str(folder), str(folder / "missing")).reason


def test_this_processor_names_its_write_back():
    assert System().write_back() in ("clwb", "clflushopt", "clflush", None)


def test_a_hypervisor_is_seen_in_cpuinfo(tmp_path):
    machine = Machine(tmp_path, EXT4)
    assert not machine.is_virtual()
    machine.write("proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu sse hypervisor clwb\n")
    assert machine.is_virtual()


def test_the_mount_is_the_deepest_and_last_one(tmp_path):
    machine = Machine(tmp_path, EXT4)
    lines = (
        f"22 21 0:5 / {tmp_path} rw shared:1 - ext4 /dev/a rw,one",
        f"23 21 0:6 / {tmp_path}/with\\040blank rw - xfs /dev/b rw",
        f"24 21 0:7 / {tmp_path} rw - ext4 /dev/c rw,nobarrier",
        f"25 21 0:8 / {tmp_path}x rw - ext4 /dev/d rw",
        "damaged",
    )
    machine.write("proc/self/mountinfo", "\n".join(lines))
    assert machine.mount(str(tmp_path)).source == "/dev/c"
    assert machine.mount(f"{tmp_path}/with blank/x").source == "/dev/b"
    assert machine.mount("/") is None


# -- memory and unknown media ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), [(TMPFS, "tmpfs"), (0x858458F6, "ramfs"), (0x958458F6, "hugetlbfs")])
def test_memory_file_systems(tmp_path, kind, name):
    found = Machine(tmp_path, kind).probe()
    assert (promise(found), found.medium_kind, found.medium) == (PROCESS, MEDIUM_CACHE, name)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(0x6969, "nfs"), (0xFF534D42, "cifs"), (0x65735546, "fuse"), (0x01021997, "9p"), (1, "unknown file system")],
)
def test_what_is_behind_remote_and_unknown_file_systems_is_not_promised(tmp_path, kind, name):
    found = Machine(tmp_path, kind, GRANTED).nvdimm("ACPI.NFIT", "cpu_cache").probe()
    assert (promise(found), found.medium_kind, found.medium) == (PROCESS, MEDIUM_DISK, name)
    reported(found, "unknown")


def test_a_statfs_that_fails_promises_the_process_only(tmp_path):
    found = Machine(tmp_path, None).disk().probe()
    assert (promise(found), found.medium_kind) == (PROCESS, MEDIUM_DISK)


# -- disks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), [(EXT4, "ext2/3/4"), (XFS, "xfs"), (BTRFS, "btrfs"), (0xF2F52010, "f2fs")])
def test_a_disk_survives_what_a_flush_survives(tmp_path, kind, name):
    machine = Machine(tmp_path, kind).disk()
    found = machine.probe()
    assert (promise(found), found.medium_kind, found.medium) == (POWER, MEDIUM_DISK, f"disk ({name})")
    reported(found, "nvme0n1", "fdatasync", "as far as the disk honours a flush")
    assert machine.asked == []  # no DAX is looked for on a disk


def test_zfs_keeps_its_devices_to_itself(tmp_path):
    found = Machine(tmp_path, ZFS).probe()
    assert promise(found) == POWER
    reported(found, "treated as disks")


def test_a_device_that_sysfs_does_not_show_promises_the_process_only(tmp_path):
    machine = Machine(tmp_path, EXT4, GRANTED)
    assert (promise(machine.probe()), machine.probe().medium_kind) == (PROCESS, MEDIUM_DISK)
    machine.number = None
    assert promise(machine.probe()) == PROCESS


@pytest.mark.parametrize("name", ["ram0", "zram1"])
def test_a_disk_in_memory_is_memory(tmp_path, name):
    machine = Machine(tmp_path, EXT4)
    machine.device(f"virtual/block/{name}")
    found = machine.probe()
    assert (promise(found), found.medium_kind, found.medium) == (PROCESS, MEDIUM_CACHE, "memory (ext2/3/4)")
    reported(found, name)


def test_partitions_and_device_mapper_are_looked_through(tmp_path):
    machine = Machine(tmp_path, XFS)
    disk = machine.device("pci0000:00/block/sda", "8:0")
    partition = machine.device("pci0000:00/block/sda/sda1", "8:1")
    (partition / "partition").write_text("1\n")
    ram = machine.device("virtual/block/ram3", "1:3")
    mapper = machine.device("virtual/block/dm-0")
    (mapper / "slaves").mkdir()
    (mapper / "slaves" / "sda1").symlink_to(partition)
    reported(machine.probe(), "the device is sda")
    assert promise(machine.probe()) == POWER
    (mapper / "slaves" / "ram3").symlink_to(ram)
    assert promise(machine.probe()) == PROCESS
    (mapper / "slaves" / "lost").symlink_to(disk / "lost")
    assert machine.devices((259, 0)) == ()


def test_device_mapper_that_names_itself_ends(tmp_path):
    machine = Machine(tmp_path, XFS)
    mapper = machine.device("virtual/block/dm-0")
    (mapper / "slaves").mkdir()
    (mapper / "slaves" / "dm-0").symlink_to(mapper)
    assert promise(machine.probe()) == PROCESS


def test_without_barriers_no_power_cut_is_promised(tmp_path):
    machine = Machine(tmp_path, EXT4).disk()
    machine.mounted("/dev/nvme0n1", "rw,nobarrier,stripe=16")
    assert promise(machine.probe()) == OS
    reported(machine.probe(), "without barriers")


def test_a_loop_device_is_as_durable_as_its_file(tmp_path):
    machine = Machine(tmp_path, EXT4)
    loop = machine.device("virtual/block/loop3")
    image = tmp_path / "images" / "disk.img"
    image.parent.mkdir()
    image.touch()
    machine.write(f"{(loop / 'loop' / 'backing_file').relative_to(tmp_path)}", f"{image}\n")
    machine.kinds[str(image.parent)] = TMPFS
    assert promise(machine.probe()) == PROCESS
    reported(machine.probe(), "loop3", str(image), "tmpfs")
    machine.kinds[str(image.parent)] = ZFS
    assert promise(machine.probe()) == POWER
    image.unlink()
    assert promise(machine.probe()) == PROCESS
    reported(machine.probe(), "is not visible here")


def test_a_loop_device_that_lies_in_itself_ends(tmp_path):
    machine = Machine(tmp_path, EXT4)
    loop = machine.device("virtual/block/loop3")
    (tmp_path / "disk.img").touch()
    machine.write(f"{(loop / 'loop' / 'backing_file').relative_to(tmp_path)}", f"{tmp_path / 'disk.img'}\n")
    assert promise(machine.probe()) == PROCESS


def test_an_overlay_is_as_durable_as_its_upper_folder(tmp_path):
    machine = Machine(tmp_path, OVERLAY).disk()
    upper = tmp_path / "upper"
    machine.mounted("overlay", f"rw,lowerdir=/l,upperdir={upper},workdir=/w")
    assert promise(machine.probe()) == PROCESS  # not to be seen: a container
    reported(machine.probe(), "not visible", "volume")
    upper.mkdir()
    machine.kinds[str(upper)] = EXT4
    found = machine.probe()
    assert (promise(found), found.medium_kind) == (POWER, MEDIUM_DISK)
    assert found.medium == "overlay on disk (ext2/3/4)"
    machine.kinds[str(upper)] = TMPFS
    assert (promise(machine.probe()), machine.probe().medium_kind) == (PROCESS, MEDIUM_CACHE)
    machine.kinds[str(upper)] = EXT4
    machine.mounted("overlay", f"rw,volatile,upperdir={upper}")
    assert (promise(machine.probe()), machine.probe().medium_kind) == (PROCESS, MEDIUM_DISK)
    reported(machine.probe(), "volatile")


def test_an_overlay_on_persistent_memory_is_used_like_a_disk(tmp_path):
    machine = Machine(tmp_path, OVERLAY, GRANTED).nvdimm("ACPI.NFIT", "cpu_cache")
    (tmp_path / "upper").mkdir()
    machine.kinds[str(tmp_path / "upper")] = EXT4
    machine.mounted("overlay", f"rw,upperdir={tmp_path / 'upper'}")
    assert (promise(machine.probe()), machine.probe().medium_kind) == (POWER, MEDIUM_DISK)


# -- persistent memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [EXT4, XFS])
@pytest.mark.parametrize("provider", ["ACPI.NFIT", "CXL"])
@pytest.mark.parametrize(
    ("domain", "medium", "words"),
    [("memory_controller", MEDIUM_PM, "(ADR)"), ("cpu_cache", MEDIUM_PM_EADR, "(eADR)")],
)
def test_dax_with_map_sync_is_persistent_memory(tmp_path, kind, provider, domain, medium, words):
    found = Machine(tmp_path, kind, GRANTED).nvdimm(provider, domain).probe()
    assert (promise(found), found.medium_kind, found.numa_node) == (POWER, medium, 0)
    assert found.medium.startswith("persistent memory")
    assert found.is_persistent_memory
    reported(found, "MAP_SYNC", "region0 of ndbus0", provider, domain, words, "NUMA node 0")
    assert any("written back with clwb" in line for line in found.evidence) == (medium == MEDIUM_PM)


@pytest.mark.parametrize("domain", [None, "", "unknown", "something new"])
def test_an_unknown_persistence_domain_promises_no_power(tmp_path, domain):
    found = Machine(tmp_path, EXT4, GRANTED).nvdimm("ACPI.NFIT", domain).probe()
    assert (promise(found), found.medium_kind) == (OS, MEDIUM_PM)
    reported(found, "does not state its persistence domain")


@pytest.mark.parametrize("provider", ["e820", "nfit_test.0"])
@pytest.mark.parametrize("dax", [GRANTED, REFUSED])
def test_memory_that_pretends_to_be_persistent_survives_the_process_only(tmp_path, provider, dax):
    found = Machine(tmp_path, EXT4, dax).nvdimm(provider, "memory_controller").probe()
    assert (promise(found), found.medium_kind) == (PROCESS, MEDIUM_CACHE)
    reported(found, "is declared persistent", "memmap=", provider)


@pytest.mark.parametrize("provider", [None, "", "something new", "ACPI.NFIT2"])
def test_a_region_of_an_unknown_provider_could_be_memory(tmp_path, provider):
    found = Machine(tmp_path, EXT4, GRANTED).nvdimm(provider, "cpu_cache").probe()
    assert (promise(found), found.medium_kind) == (PROCESS, MEDIUM_DISK)
    reported(found, "could be ordinary memory")


def test_persistent_memory_without_map_sync_is_used_like_a_disk(tmp_path):
    for dax, how in ((REFUSED, "without DAX"), (Dax(True, False, "Operation not supported"), "with DAX")):
        machine = Machine(tmp_path / how, EXT4, dax).nvdimm("ACPI.NFIT", "memory_controller")
        found = machine.probe()
        assert (promise(found), found.medium_kind, found.medium) == (POWER, MEDIUM_DISK, "disk (ext2/3/4)")
        reported(found, how, "MAP_SYNC is not granted (Operation not supported)", "region0", "fdatasync")
        machine.write("sys/devices/LNXSYSTM:00/ACPI0012:00/ndbus0/region0/persistence_domain", "\n")
        assert promise(machine.probe()) == OS


def test_virtio_pmem_is_flushed_by_its_host(tmp_path):
    found = Machine(tmp_path, EXT4, Dax(True, False, "Operation not supported")).nvdimm("virtio-pmem", None).probe()
    assert (promise(found), found.medium_kind) == (POWER, MEDIUM_DISK)
    reported(found, "its host makes it durable when asked to flush")


def test_a_processor_that_cannot_write_lines_back_uses_fdatasync(tmp_path):
    machine = Machine(tmp_path, EXT4, GRANTED).nvdimm("ACPI.NFIT", "memory_controller")
    machine.instruction = None
    assert (promise(machine.probe()), machine.probe().medium_kind) == (POWER, MEDIUM_DISK)
    reported(machine.probe(), "cannot write cache lines back")


def test_a_virtual_machine_says_so(tmp_path):
    machine = Machine(tmp_path, EXT4, GRANTED).nvdimm("ACPI.NFIT", "memory_controller")
    machine.write("proc/cpuinfo", "flags\t\t: fpu hypervisor clwb\n")
    assert promise(machine.probe()) == POWER
    reported(machine.probe(), "depends on its host")


def test_several_regions_promise_what_the_weakest_does(tmp_path):
    machine = Machine(tmp_path, XFS, GRANTED)
    machine.nvdimm("ACPI.NFIT", "cpu_cache", bus=0, number="259:1")
    machine.nvdimm("ACPI.NFIT", "memory_controller", bus=1, number="259:2")
    mapper = machine.device("virtual/block/dm-0")
    (mapper / "slaves").mkdir()
    for i in (0, 1):
        (mapper / "slaves" / f"pmem{i}").symlink_to(os.readlink(tmp_path / "sys" / "dev" / "block" / f"259:{i + 1}"))
    found = machine.probe()
    assert (promise(found), found.medium_kind, found.numa_node) == (POWER, MEDIUM_PM, None)
    machine.write("sys/devices/LNXSYSTM:00/ACPI0012:01/ndbus1/provider", "e820\n")
    assert (promise(machine.probe()), machine.probe().medium_kind) == (PROCESS, MEDIUM_CACHE)


def test_an_existing_pool_is_tried_itself(tmp_path):
    machine = Machine(tmp_path, EXT4, GRANTED).nvdimm("ACPI.NFIT", "memory_controller")
    machine.probe(str(tmp_path / "run.pool"))
    assert machine.asked == [(str(tmp_path), str(tmp_path / "run.pool"))]


# -- what is asked for -----------------------------------------------------------------------------------------------


def test_require_names_the_medium_and_its_evidence(tmp_path):
    found = Machine(tmp_path, EXT4, GRANTED).nvdimm("ACPI.NFIT", None).probe()
    require(found, "os")
    with pytest.raises(MediumError, match=r"power cut.*persistent memory.*persistence domain"):
        require(found, "power")
    with pytest.raises(ValueError, match="earthquake"):
        require(found, "earthquake")


def test_tiers_are_those_of_the_native_library():
    from lightck import _native

    assert (MEDIUM_CACHE, MEDIUM_DISK) == (_native.lib.LCK_MEDIUM_CACHE, _native.lib.LCK_MEDIUM_DISK)
    assert (MEDIUM_PM, MEDIUM_PM_EADR) == (_native.lib.LCK_MEDIUM_PM, _native.lib.LCK_MEDIUM_PM_EADR)
    assert lightck.Durability is durability.Durability
