"""Determine what a pool survives, with the evidence. No setting can claim that a pool survives more.

``probe`` queries the kernel (``system``) about the medium of a pool and judges the answers. The result also contains
what the choke point must do (``MEDIUM_...``). If a query has no answer, lightck promises less.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

from lightck.errors import MediumError
from lightck.pool.storage import emulation
from lightck.pool.storage.system import Dax, DaxDevice, Device, Region, System

# Names of file systems by their f_type (statfs), grouped by what lies below them.
_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}
_ON_A_DEVICE = {0xEF53: "ext2/3/4", 0x58465342: "xfs", 0x9123683E: "btrfs", 0xF2F52010: "f2fs"}
_WITH_OWN_DEVICES = {0x2FC12FC1: "zfs", 0xCA451A4E: "bcachefs"}
_DAX_CAPABLE = ("ext2/3/4", "xfs")
_OVERLAY = 0x794C7630
_REMOTE = {
    0x6969: "nfs",
    0xFF534D42: "cifs",
    0xFE534D42: "smb",
    0x517B: "smb",
    0x65735546: "fuse",
    0x01021997: "9p",
    0x00C36400: "ceph",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x19830326: "beegfs",
    0x5346414F: "afs",
}
_REAL = ("ACPI.NFIT", "CXL")
"""Providers on the NVDIMM bus whose memory is persistent. On memory of any other provider, except ``_HOSTED``, a pool
survives only a kill of the process."""
_HOSTED = "virtio-pmem"
"""The provider whose memory is a file on the host of a virtual machine."""
_PRETENDED = ("e820", "nfit_test")
"""Providers whose memory is ordinary but declared persistent. A dot and what follows it are ignored
(``nfit_test.0``)."""
_DOMAINS = {
    "cpu_cache": "the processor's caches are in the persistence domain (eADR): a store is durable without a write-back",
    "memory_controller": "the memory controller is in the persistence domain (ADR): a cache line that is written back "
    "is durable",
}
MEDIUM_CACHE, MEDIUM_DISK, MEDIUM_PM, MEDIUM_PM_EADR = 0, 1, 2, 3
"""What the choke point does to make stores durable: ``LCK_MEDIUM_*`` in native/include/lck.h."""
_POWER_EVIDENCE = "power: as far as the disk honours a flush"
_NESTED_MAX = 4
"""Maximum number of overlays and loop devices, one below the other, that ``probe`` follows to find the medium."""
_TOO_DEEP = f"lightck follows at most {_NESTED_MAX} overlays and loop devices, one below the other, and does not follow"


@dataclass(frozen=True, slots=True)
class Durability:
    """What the newest committed checkpoint survives, and the evidence for it."""

    process: bool
    """A kill of the process, by any signal."""
    os: bool
    """A crash or reboot of the operating system."""
    power: bool
    """A power cut."""
    media: bool
    """Loss of the medium itself."""
    medium: str
    """Kind of medium, for example ``tmpfs``, ``disk (ext2/3/4)`` or ``persistent memory (xfs, DAX)``."""
    evidence: tuple[str, ...]
    """Sentences without a full stop."""
    medium_kind: int
    """The kind of medium: ``MEDIUM_...``."""
    numa_node: int | None = None
    """For persistent memory: the NUMA node whose processors access the memory fastest. None if unknown."""
    emulated: str | None = None
    """The name of the emulated memory (``emulation.py``), or None. With a name, measured speeds are not the
    medium's."""

    @property
    def is_persistent_memory(self) -> bool:
        """Whether stores become durable without a system call."""
        return self.medium_kind in (MEDIUM_PM, MEDIUM_PM_EADR)

    def __str__(self) -> str:
        survived = [name for name in ("process", "os", "power", "media") if getattr(self, name)]
        return f"{self.medium}: survives {', '.join(survived) or 'nothing'}"


def probe(folder: str, file: str | None = None, *, system: System | None = None) -> Durability:
    """Determine the durability of a pool in an existing folder: of the existing file ``file``, or of a new file if
    ``file`` is None."""
    return _with_emulation(_probe(folder, file, system or System(), _NESTED_MAX))


def _with_emulation(found: Durability) -> Durability:
    """Return ``found``; if a memory is emulated, with its name and the source of its speed."""
    profile = emulation.active_profile()
    if profile is None:
        return found
    seen = (
        f"the speed of {profile.name} is emulated, which does not change what the pool survives; source of the speed: "
        f"{profile.source}"
    )
    medium = f"{found.medium}, {emulation.label()}"
    return replace(found, medium=medium, evidence=(*found.evidence, seen), emulated=profile.name)


def probe_device(device: DaxDevice, *, system: System | None = None) -> Durability:
    """Determine the durability of a pool on a device-dax device. Such a device has no sync, so only the processor's
    write-back can make a store durable."""
    system, region = system or System(), device.region
    seen = f"{device.name} is a device-dax device of {device.nbytes} bytes: its mapping is the memory itself"
    if region is None:
        volatile = (
            "it is not on the NVDIMM bus (it is hmem or CXL RAM): lightck expects its content to be lost when the "
            "system ends"
        )
        return _process_only("memory (device-dax)", MEDIUM_CACHE, seen, volatile)
    if _is_pretended(region):
        return _process_only("memory (device-dax)", MEDIUM_CACHE, seen, *_why_volatile([Device(device.name, region)]))
    if region.provider not in _REAL:
        no_flush = (
            "it is memory of a virtual machine (virtio-pmem): its host makes it durable only when asked to flush, and "
            "a device-dax mapping cannot ask",
        )
        why = no_flush if region.provider == _HOSTED else _reports(region)
        return _process_only("unknown memory (device-dax)", MEDIUM_CACHE, seen, *why)
    if system.write_back() is None:
        no_sync = "lightck cannot write cache lines back on this processor, and a device has no fdatasync"
        return _process_only("persistent memory (device-dax)", MEDIUM_CACHE, seen, *_reports(region), no_sync)
    return _persistent_memory("device-dax", (seen,), [region], system)


def require(durability: Durability, level: str | None) -> None:
    """Raise ``MediumError`` if a pool survives less than ``level`` (the argument ``require=``), and ``ValueError`` if
    ``level`` is unknown. If ``level`` is None, nothing is required."""
    if level is None:
        return
    if level not in ("process", "os", "power"):
        raise ValueError(f'require={level!r} is not known. Pass "process", "os" or "power".')
    if not getattr(durability, level):
        what = {"process": "a kill of the process", "os": "a crash of the operating system", "power": "a power cut"}
        raise MediumError(
            f"The pool would not survive {what[level]}, which require={level!r} asks for: its medium is "
            f"{durability.medium} ({'; '.join(durability.evidence)}). Put the pool on a disk or on persistent "
            'memory, or require less (require="process" is the least).'
        )


# -- judging -----------------------------------------------------------------------------------------------


def _probe(folder: str, file: str | None, system: System, nested_left: int) -> Durability:
    """Determine the durability of a pool without emulation; arguments as for ``probe``. ``nested_left``: how many more
    overlays and loop devices may be followed."""
    kind = system.file_system(folder)
    if kind is None:
        return _process_only("unknown file system", MEDIUM_DISK, "statfs failed: the file system is unknown")
    seen = f"statfs f_type {kind:#x}"
    if kind in _MEMORY:
        name = _MEMORY[kind]
        lost = f"{seen}: {name}, which lives in memory: its files are lost when the system ends"
        return _process_only(name, MEDIUM_CACHE, lost)
    if kind == _OVERLAY:
        return _overlay(folder, seen, system, nested_left)
    if kind in _ON_A_DEVICE:
        return _on_a_device(folder, file, f"{seen}: {_ON_A_DEVICE[kind]}", _ON_A_DEVICE[kind], system, nested_left)
    if kind in _WITH_OWN_DEVICES:
        name = _WITH_OWN_DEVICES[kind]
        own = f"{name} does not show its devices: they are treated as disks"
        return _disk(name, f"{seen}: {name}", own, "each commit waits for two fdatasync", _POWER_EVIDENCE)
    name = _REMOTE.get(kind, "unknown file system")
    reason = "its storage is unknown: the only promise is that the page cache outlives the process"
    return _process_only(name, MEDIUM_DISK, f"{seen}: {name}", reason)


def _process_only(medium: str, kind: int, *evidence: str) -> Durability:
    return Durability(True, False, False, False, medium, evidence, kind)


def _disk(name: str, *evidence: str) -> Durability:
    return Durability(True, True, True, False, f"disk ({name})", evidence, MEDIUM_DISK)


def _weaker(promised: Durability, other: Durability) -> Durability:
    """Return ``promised``, reduced to what both survive, with the evidence of both."""
    return replace(
        promised,
        os=promised.os and other.os,
        power=promised.power and other.power,
        evidence=(*promised.evidence, *other.evidence),
    )


def _overlay(folder: str, seen: str, system: System, nested_left: int) -> Durability:
    """Judge an overlay. An overlay is as durable as its upper folder, if that folder is visible to this process."""
    mount = system.mount(folder)
    if mount is None or "volatile" in mount.options:
        return _process_only(
            "overlay",
            MEDIUM_DISK,
            seen,
            "the overlay is mounted with the option volatile, or its mount options cannot be read",
        )
    upper = mount.option("upperdir")
    if upper is None or not os.path.isdir(upper) or nested_left == 0:
        if upper is None:
            unseen = "the mount options of the overlay name no upper folder"
        elif not os.path.isdir(upper):
            unseen = f"the overlay's upper folder ({upper}) is not visible here (a container?)"
        else:
            unseen = f"{_TOO_DEEP} the overlay's upper folder ({upper})"
        unseen += ", so its medium is unknown: put the pool on a volume of its own"
        return _process_only(
            "overlay", MEDIUM_DISK, f"{seen}: overlay, which passes fdatasync to its upper folder", unseen
        )
    below = _probe(upper, None, system, nested_left - 1)
    evidence = (f"{seen}: overlay, which passes writes and fdatasync to its upper folder {upper}", *below.evidence)
    if below.medium_kind == MEDIUM_CACHE:
        return replace(below, medium=f"overlay on {below.medium}", evidence=evidence)
    return replace(
        below, medium=f"overlay on {below.medium}", evidence=evidence, medium_kind=MEDIUM_DISK, numa_node=None
    )


def _on_a_device(folder: str, file: str | None, seen: str, name: str, system: System, nested_left: int) -> Durability:
    number = system.block_device(folder)
    devices = system.devices(number) if number is not None else ()
    if not devices:
        unknown = "its device was not found in sysfs: it could be memory, so nothing more is promised"
        return _process_only(f"unknown device ({name})", MEDIUM_DISK, seen, unknown)
    pretended = [d for d in devices if d.is_memory or (d.region is not None and _is_pretended(d.region))]
    if pretended:
        return _process_only(f"memory ({name})", MEDIUM_CACHE, seen, *_why_volatile(pretended))
    dax = Dax(False, False)
    if name in _DAX_CAPABLE and all(d.region is not None for d in devices):
        dax = system.dax(folder, file)
    regions = [d.region for d in devices if d.region is not None]
    if dax.map_sync and system.write_back() is not None and all(region.provider in _REAL for region in regions):
        granted = (
            "the kernel granted a MAP_SYNC mapping: the file system makes the location of a page durable before the "
            "first write to that page"
        )
        return _persistent_memory(f"{name}, DAX", (f"{seen}, mounted with DAX", granted), regions, system)
    why = _why_like_a_disk(dax, regions, system)
    durable = _disk(name, seen, *why, "each commit waits for two fdatasync", _POWER_EVIDENCE)
    durable = _reduced_without_barriers(durable, folder, system)
    for device in devices:
        durable = _weaker(durable, _below(device, system, nested_left))
    return durable


def _why_volatile(devices: Iterable[Device]) -> tuple[str, ...]:
    def sentence(device: Device) -> str:
        if device.region is None:
            return f"the device {device.name} is a disk in ordinary memory: its content is lost when the system ends"
        region = device.region
        return (
            f"{device.name} ({region.name} of {region.bus}, provider {region.provider}) is ordinary memory that "
            "is declared persistent (memmap= or a test): a warm reboot may keep it, a power cut does not"
        )

    return tuple(sentence(device) for device in devices)


def _is_pretended(region: Region) -> bool:
    return any(region.provider == name or region.provider.startswith(name + ".") for name in _PRETENDED)


def _why_like_a_disk(dax: Dax, regions: list[Region], system: System) -> tuple[str, ...]:
    """Return why a file system on persistent memory is used like a file system on a disk; () if it really is on a
    disk."""
    if not regions:
        return ()
    if dax.map_sync and system.write_back() is None:
        return ("MAP_SYNC is granted, but lightck cannot write cache lines back on this processor: used like a disk",)
    if dax.map_sync:
        return ("MAP_SYNC is granted, but not by memory that is known to be persistent: used like a disk",)
    how = "with DAX" if dax.is_dax else "without DAX"
    return (f"persistent memory, mounted {how} but MAP_SYNC is not granted ({dax.reason}): used like a disk",)


def _reduced_without_barriers(durable: Durability, folder: str, system: System) -> Durability:
    """Return ``durable``; if the file system is mounted without barriers, reduced to what survives without them."""
    mount = system.mount(folder)
    options = mount.options if mount is not None else ()
    if "nobarrier" not in options and "barrier=0" not in options:
        return durable
    seen = "the file system is mounted without barriers: fdatasync does not make the disk flush its cache"
    return replace(durable, power=False, evidence=(*durable.evidence, seen))


def _below(device: Device, system: System, nested_left: int) -> Durability:
    """Return the most that a file system on this device can survive."""
    if device.backing_file is not None:
        folder = os.path.dirname(device.backing_file)
        if nested_left == 0 or not os.path.isfile(device.backing_file):
            hidden = f"the loop device {device.name} is backed by {device.backing_file}, "
            hidden += "which is not visible here" if nested_left else f"and {_TOO_DEEP} it"
            return _process_only("loop", MEDIUM_DISK, hidden)
        below = _probe(folder, None, system, nested_left - 1)
        backed = f"the loop device {device.name} is backed by {device.backing_file}"
        return replace(below, evidence=(backed, *below.evidence))
    if device.region is None:
        return _disk(device.name, f"the device is {device.name}")
    region = device.region
    survives_crash = region.provider in (*_REAL, _HOSTED)
    return Durability(True, survives_crash, _is_power_safe(region), False, "", _reports(region), MEDIUM_DISK)


# -- persistent memory -------------------------------------------------------------------------------------


def _persistent_memory(name: str, seen: tuple[str, ...], regions: list[Region], system: System) -> Durability:
    """Judge persistent memory that is mapped directly, where the processor's write-back makes a store durable.
    ``seen``: evidence so far."""
    evidence = [*seen]
    for region in regions:
        evidence += _reports(region)
    is_eadr = all(region.persistence_domain == "cpu_cache" for region in regions)
    if not is_eadr:
        evidence.append(f"each store is written back with {system.write_back()}")
    if system.is_virtual():
        evidence.append("this is a virtual machine: what its persistent memory survives depends on its host")
    nodes = {region.numa_node for region in regions}
    return Durability(
        True,
        True,
        all(map(_is_power_safe, regions)),
        False,
        f"persistent memory ({name})",
        tuple(evidence),
        MEDIUM_PM_EADR if is_eadr else MEDIUM_PM,
        nodes.pop() if len(nodes) == 1 else None,
    )


def _is_power_safe(region: Region) -> bool:
    """Whether the region survives a power cut. True if the platform states a persistence domain. True for virtio-pmem,
    because its host makes it durable when fdatasync is called, as a disk does."""
    return region.provider == _HOSTED or (region.provider in _REAL and region.persistence_domain in _DOMAINS)


def _reports(region: Region) -> tuple[str, ...]:
    """Return what the platform reports about the region, as evidence."""
    seen = f"{region.name} of {region.bus} (provider {region.provider or 'not known'})"
    node = "" if region.numa_node is None else f" on NUMA node {region.numa_node}"
    if region.provider == _HOSTED:
        return (f"{seen}: its host makes it durable when asked to flush",)
    if region.provider not in _REAL:
        return (f"{seen}{node}: lightck does not know this provider, and it could be ordinary memory",)
    if not region.persistence_domain:
        return (f"{seen}{node} does not state its persistence domain, so it may not survive a power cut",)
    domain = region.persistence_domain
    return (f"{seen}{node} has persistence_domain {domain}: {_DOMAINS[domain]}",)
