"""Query the kernel about a path: its file system, its mount, its devices, and whether DAX mappings are granted.

This module only collects facts, which ``durability`` judges. Every query can return "unknown", and no query raises. An
unknown fact leads to a weaker promise. The roots of sysfs and procfs are parameters, so that tests can imitate any
machine.
"""

from __future__ import annotations

import ctypes
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from lightck._native import ffi, lib

MAP_SHARED_VALIDATE, MAP_SYNC, PROT_READ = 0x03, 0x080000, 1
PARALLEL_READ_NBYTES_MIN = 4 << 20
"""If ``read_many`` has fewer bytes to read than this, it uses one thread, because to start more would cost more time
than they save."""
THREADS_MAX = 8
"""Maximum number of threads that read one checkpoint."""
_STATX_ATTR_DAX, _AT_EMPTY_PATH = 0x00200000, 0x1000
_DEPTH_MAX = 8
"""Maximum number of block devices, one below the other, that are followed."""
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo (proc(5))."""

    point: str
    """The mount point."""
    root: str
    """The folder that is mounted there, as a path in its file system; "/" if the whole file system is mounted."""
    source: str
    """The device, or a name for file systems without one."""
    options: tuple[str, ...]
    """Options of the file system's super block."""
    own_options: tuple[str, ...]
    """Options of the mount point."""

    def option(self, name: str) -> str | None:
        """Return the value of the option ``name=value``, or None."""
        return next((o.partition("=")[2] for o in self.options if o.startswith(name + "=")), None)


@dataclass(frozen=True, slots=True)
class Region:
    """A region of the NVDIMM bus: what the platform reports about a range of persistent memory."""

    name: str
    bus: str
    provider: str
    """The driver that registered the bus: ``ACPI.NFIT``, ``CXL``, ``virtio-pmem``, ``e820`` (RAM by ``memmap=``); "" if
    unknown."""
    persistence_domain: str
    """``cpu_cache``, ``memory_controller``, or "" if unknown."""
    numa_node: int | None


@dataclass(frozen=True, slots=True)
class Device:
    """The block device at the bottom of a stack: below a file system, partitions, device mapper and md."""

    name: str
    region: Region | None = None
    """The region of a namespace of persistent memory; None for another device."""
    backing_file: str | None = None
    """The file of a loop device; None for another device."""

    @property
    def is_memory(self) -> bool:
        """Whether this is a RAM disk (``ram0``, ``zram0``)."""
        return re.fullmatch(r"z?ram\d+", self.name) is not None


@dataclass(frozen=True, slots=True)
class DaxDevice:
    """A character device of device-dax: memory that can only be mapped, without a file system."""

    name: str
    nbytes: int
    align: int
    """Offsets, lengths and addresses of a mapping are multiples of this number of bytes."""
    region: Region | None
    """The region of a namespace of persistent memory; None for other memory."""


@dataclass(frozen=True, slots=True)
class Dax:
    """How the kernel maps files in a folder."""

    is_dax: bool
    """Whether mappings bypass the page cache, according to statx."""
    map_sync: bool
    """Whether the kernel granted a MAP_SYNC mapping, in which the file's metadata is durable before a page can be
    written."""
    reason: str = ""
    """Why MAP_SYNC was refused."""


class System:
    """Queries about this machine; ``sys`` and ``proc`` are the roots of sysfs and procfs."""

    def __init__(self, sys: str = "/sys", proc: str = "/proc") -> None:
        self.sys = sys
        self.proc = proc

    # -- system calls ------------------------------------------------------------------------------------

    def file_system(self, path: str) -> int | None:
        """Return the f_type of statfs, or None if statfs fails."""
        buffer = (ctypes.c_long * 32)()
        if _libc().statfs(os.fsencode(path), ctypes.byref(buffer)) != 0:
            return None
        return int(buffer[0]) & 0xFFFFFFFF

    def block_device(self, path: str) -> tuple[int, int] | None:
        """Return (major, minor) of the block device below a path; None if unknown. If the file system has an anonymous
        device number, the block device is the mount's source."""
        try:
            device = os.stat(path).st_dev
            if os.major(device) == 0:
                mount = self.mount(path)
                if mount is None or not mount.source.startswith("/"):
                    return None
                st = os.stat(mount.source)
                if not stat.S_ISBLK(st.st_mode):
                    return None
                device = st.st_rdev
        except OSError:
            return None
        return os.major(device), os.minor(device)

    def dax(self, folder: str, file: str | None) -> Dax:
        """Try a MAP_SYNC mapping of ``file``, or of a new unnamed file in ``folder`` if ``file`` is None."""
        try:
            fd = _open_probe(folder, file)
        except OSError as err:
            return Dax(False, False, f"it was not tried, because no file could be opened: {err.strerror}")
        try:
            why_not = _why_no_map_sync(fd)
            return Dax(_is_dax(fd), not why_not, why_not)
        finally:
            os.close(fd)

    def write_back(self) -> str | None:
        """Return the instruction with which the native library writes cache lines back, or None if it cannot."""
        name = ffi.string(lib.lck_write_back_name()).decode()
        return None if name == "none" else name

    # -- procfs and sysfs --------------------------------------------------------------------------------

    def is_virtual(self) -> bool:
        """Whether the processor reports a hypervisor."""
        text = self._read(f"{self.proc}/cpuinfo", 1 << 16)
        return re.search(r"^flags\b.*\bhypervisor\b", text, re.MULTILINE) is not None

    def processors(self, node: int) -> frozenset[int]:
        """Return the processors of a NUMA node; empty if unknown."""
        text = self._read(f"{self.sys}/devices/system/node/node{node}/cpulist").strip()
        if not re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", text):
            return frozenset()
        runs = [run.partition("-") for run in text.split(",")]
        return frozenset(cpu for low, _, high in runs for cpu in range(int(low), int(high or low) + 1))

    def mount(self, path: str) -> Mount | None:
        """Return the mount with the longest mount point above ``path``. If several mounts have this mount point, return
        the last of them. None if unknown."""
        path = os.path.realpath(path)
        found = None
        for mount in mounts(self._read(f"{self.proc}/self/mountinfo", 1 << 22)):
            inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
            if inside and (found is None or len(mount.point) >= len(found.point)):
                found = mount
        return found

    def devices(self, number: tuple[int, int]) -> tuple[Device, ...]:
        """Return the devices below a block device (below partitions, device mapper and md); () if unknown."""
        folder = os.path.realpath(f"{self.sys}/dev/block/{number[0]}:{number[1]}")
        try:
            return tuple(self._bottom(folder, _DEPTH_MAX))
        except OSError:
            return ()

    def character_device(self, st: os.stat_result) -> tuple[int, int] | None:
        """Return (major, minor) of a character device, or None."""
        return (os.major(st.st_rdev), os.minor(st.st_rdev)) if stat.S_ISCHR(st.st_mode) else None

    def dax_device(self, st: os.stat_result) -> DaxDevice | None:
        """Return the facts about a device-dax device; None for another file, or for a device that cannot be mapped."""
        number = self.character_device(st)
        if number is None:
            return None
        folder = os.path.realpath(f"{self.sys}/dev/char/{number[0]}:{number[1]}")
        if os.path.basename(os.path.realpath(f"{folder}/subsystem")) != "dax":
            return None
        nbytes, align = (self._read(f"{folder}/{name}").strip() for name in ("size", "align"))
        if not nbytes.isdecimal() or not align.isdecimal() or not 0 < int(align) <= int(nbytes):
            return None
        return DaxDevice(os.path.basename(folder), int(nbytes), int(align), self._region(folder))

    def _bottom(self, folder: str, depth: int) -> Iterator[Device]:
        """Yield the lowest devices below the block device with this sysfs folder. Raises ``OSError``, also if
        more than ``depth`` devices lie one below the other."""
        if depth == 0 or not os.path.isdir(folder):
            raise FileNotFoundError(folder)
        if os.path.exists(f"{folder}/partition"):
            folder = os.path.dirname(folder)
        slaves = sorted(os.listdir(f"{folder}/slaves")) if os.path.isdir(f"{folder}/slaves") else []
        for slave in slaves:
            yield from self._bottom(os.path.realpath(f"{folder}/slaves/{slave}"), depth - 1)
        if not slaves:
            backing = self._read(f"{folder}/loop/backing_file").rstrip("\n")
            yield Device(os.path.basename(folder), self._region(folder), backing or None)

    def _region(self, folder: str) -> Region | None:
        """Return the region of a device of the NVDIMM bus, whose sysfs folder has a path like
        .../ndbus0/region0/namespace0.0/block/pmem0; None for another device."""
        parts = folder.split("/")
        at = next((i for i, part in enumerate(parts) if re.fullmatch(r"ndbus\d+", part)), None)
        if at is None or at + 1 >= len(parts) or not re.fullmatch(r"region\d+", parts[at + 1]):
            return None
        bus, region = "/".join(parts[: at + 1]), "/".join(parts[: at + 2])
        domain = self._read(f"{region}/persistence_domain").strip()
        node = self._read(f"{region}/numa_node").strip()
        return Region(
            parts[at + 1],
            parts[at],
            self._read(f"{bus}/provider").strip(),
            domain if domain in ("cpu_cache", "memory_controller") else "",
            int(node) if node.isdecimal() else None,
        )

    def _read(self, path: str, limit: int = 4096) -> str:
        """Return the first ``limit`` characters of a file; "" if the file cannot be read."""
        try:
            with open(path, encoding="utf-8", errors="surrogateescape") as f:
                return f.read(limit)
        except OSError:
            return ""


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _open_probe(folder: str, file: str | None) -> int:
    """Open ``file``, or a new file in ``folder`` if ``file`` is None. The new file has no name, so nothing can be left
    behind. Raises ``OSError``."""
    if file is None:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    return os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)


def _why_no_map_sync(fd: int) -> str:
    """Return why a MAP_SYNC mapping is refused, or "" if it is granted. No page is touched."""
    libc = _libc()
    base = libc.mmap(None, _PAGE, PROT_READ, MAP_SHARED_VALIDATE | MAP_SYNC, fd, 0)
    if base == ctypes.c_void_p(-1).value:
        return os.strerror(ctypes.get_errno())
    libc.munmap(base, _PAGE)
    return ""


def _is_dax(fd: int) -> bool:
    """Whether mappings of the open file bypass the page cache; False if unknown."""
    buffer = (ctypes.c_uint64 * 64)()
    try:
        status = _libc().statx(fd, b"", _AT_EMPTY_PATH, 0, ctypes.byref(buffer))
    except AttributeError:  # a C library without statx
        return False
    return bool(status == 0 and buffer[1] & _STATX_ATTR_DAX)  # stx_attributes is the second word


def mounts(mountinfo: str) -> Iterator[Mount]:
    """Parse the text of a mountinfo file; malformed lines are skipped."""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, rest = left.split(" "), right.split(" ")
        if len(fields) >= 6 and len(rest) >= 3:
            options = tuple(_unescape(rest[-1]).split(","))
            point, root = _unescape(fields[4]), _unescape(fields[3])
            yield Mount(point, root, _unescape(rest[1]), options, tuple(fields[5].split(",")))


def _unescape(text: str) -> str:
    r"""Decode the octal escapes of mountinfo, such as \040 for a blank."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def processors_near(node: int | None, threads: int) -> frozenset[int]:
    """Return the processors for the copy threads: those of NUMA node ``node`` that the calling thread may use.
    ``threads``: number of copy threads.

    An empty set means all processors. It is returned if the node is unknown, or if all processors that the calling
    thread may use belong to the node. It is also returned if at most ``threads`` of these processors belong to the
    node, because the copy threads would then compete with a training that uses all processors of the node.

    Persistent memory belongs to one socket, and stores from another socket are several times slower. So the copy
    threads stay on the socket of the pool's memory. The node of ordinary memory is unknown before its pages are
    allocated, so for other pools the copy threads run on any free processor."""
    if node is None:
        return frozenset()
    allowed = os.sched_getaffinity(0)
    near = System().processors(node) & allowed
    return near if threads < len(near) < len(allowed) else frozenset()


def read_threads() -> int:
    """Return the number of threads that read a large checkpoint."""
    return min(len(os.sched_getaffinity(0)), THREADS_MAX)
