"""What the kernel says about a path: its file system, its mount, its devices, and whether DAX mappings are granted.

Facts only; ``durability`` judges them. Every question has an answer for "not known", and no answer raises: what cannot
be found out makes a weaker promise. The roots of sysfs and procfs can be moved, so that tests can show any machine.
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
_STATX_ATTR_DAX, _AT_EMPTY_PATH = 0x00200000, 0x1000
_DEPTH_MAX = 8
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo."""

    point: str
    root: str
    source: str
    options: tuple[str, ...]
    """Those of the file system (its super block), not of the mount point."""
    own_options: tuple[str, ...]
    """Those of the mount point."""

    def option(self, name: str) -> str | None:
        """The value of ``name=value``."""
        return next((o.partition("=")[2] for o in self.options if o.startswith(name + "=")), None)


@dataclass(frozen=True, slots=True)
class Region:
    """A region of the NVDIMM bus: what the platform says about a range of persistent memory."""

    name: str
    bus: str
    provider: str
    """Who registered it: ``ACPI.NFIT``, ``CXL``, ``virtio-pmem``, ``e820`` (RAM by ``memmap=``); "" is not known."""
    persistence_domain: str
    """``cpu_cache``, ``memory_controller``, or "" where the platform does not say."""
    numa_node: int | None


@dataclass(frozen=True, slots=True)
class Device:
    """A device at the bottom of a file system."""

    name: str
    region: Region | None = None
    """Where it is a namespace of persistent memory."""
    backing_file: str | None = None
    """Where it is a loop device."""

    @property
    def is_memory(self) -> bool:
        return re.fullmatch(r"z?ram\d+", self.name) is not None


@dataclass(frozen=True, slots=True)
class DaxDevice:
    """A character device of device-dax: memory that can only be mapped, without a file system."""

    name: str
    nbytes: int
    align: int
    """Offsets, lengths and addresses of a mapping are multiples of this."""
    region: Region | None
    """Where it is a namespace of persistent memory."""


@dataclass(frozen=True, slots=True)
class Dax:
    """How files at a place are mapped."""

    is_dax: bool
    """Without a page cache, as statx says."""
    map_sync: bool
    """The kernel granted a MAP_SYNC mapping: it keeps the file's metadata durable at each page fault."""
    reason: str = ""
    """Why not."""


class System:
    """This machine."""

    def __init__(self, sys: str = "/sys", proc: str = "/proc") -> None:
        self.sys = sys
        self.proc = proc

    # -- system calls ------------------------------------------------------------------------------------

    def file_system(self, path: str) -> int | None:
        """statfs's f_type."""
        buffer = (ctypes.c_long * 32)()
        if _libc().statfs(os.fsencode(path), ctypes.byref(buffer)) != 0:
            return None
        return int(buffer[0]) & 0xFFFFFFFF

    def block_device(self, path: str) -> tuple[int, int] | None:
        """Number of the block device below a path; of file systems with numbers of their own, from the mount."""
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
        """Try a mapping: of ``file`` where it exists, else of a file without a name in ``folder``."""
        try:
            fd = _open_probe(folder, file)
        except OSError as err:
            return Dax(False, False, f"no file could be opened to try it: {err.strerror}")
        try:
            refused = _refuses_map_sync(fd)
            return Dax(_is_dax(fd), not refused, refused)
        finally:
            os.close(fd)

    def write_back(self) -> str | None:
        """The instruction with which the native library writes cache lines back; None where it cannot."""
        name = ffi.string(lib.lck_write_back_name()).decode()
        return None if name == "none" else name

    # -- procfs and sysfs --------------------------------------------------------------------------------

    def is_virtual(self) -> bool:
        """Whether the processor says that a hypervisor runs below."""
        text = self._read(f"{self.proc}/cpuinfo", 1 << 16)
        return re.search(r"^flags\b.*\bhypervisor\b", text, re.MULTILINE) is not None

    def processors(self, node: int) -> frozenset[int]:
        """The processors of a NUMA node; none where it is not known."""
        text = self._read(f"{self.sys}/devices/system/node/node{node}/cpulist").strip()
        if not re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", text):
            return frozenset()
        runs = [run.partition("-") for run in text.split(",")]
        return frozenset(cpu for low, _, high in runs for cpu in range(int(low), int(high or low) + 1))

    def mount(self, path: str) -> Mount | None:
        """The mount with the longest mount point above ``path``; of equal ones, the one mounted last."""
        path = os.path.realpath(path)
        found = None
        for mount in mounts(self._read(f"{self.proc}/self/mountinfo", 1 << 22)):
            inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
            if inside and (found is None or len(mount.point) >= len(found.point)):
                found = mount
        return found

    def devices(self, number: tuple[int, int]) -> tuple[Device, ...]:
        """The devices at the bottom of a block device (below partitions, device mapper and md); () is not known."""
        folder = os.path.realpath(f"{self.sys}/dev/block/{number[0]}:{number[1]}")
        try:
            return tuple(self._bottom(folder, _DEPTH_MAX))
        except OSError:
            return ()

    def character_device(self, st: os.stat_result) -> tuple[int, int] | None:
        """Number of the character device that was looked at."""
        return (os.major(st.st_rdev), os.minor(st.st_rdev)) if stat.S_ISCHR(st.st_mode) else None

    def dax_device(self, st: os.stat_result) -> DaxDevice | None:
        """The device-dax device that was looked at; None where it is none, or one that cannot be mapped."""
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
        """The region that a device of the NVDIMM bus belongs to: .../ndbus0/region0/namespace0.0/block/pmem0."""
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
        """A file's text; "" where it cannot be read."""
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
    """A descriptor to try a mapping on. A file of its own has no name, so nothing can be left behind."""
    if file is None:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    return os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)


def _refuses_map_sync(fd: int) -> str:
    """Why a MAP_SYNC mapping is not granted; "" where it is. No page is touched."""
    libc = _libc()
    base = libc.mmap(None, _PAGE, PROT_READ, MAP_SHARED_VALIDATE | MAP_SYNC, fd, 0)
    if base == ctypes.c_void_p(-1).value:
        return os.strerror(ctypes.get_errno())
    libc.munmap(base, _PAGE)
    return ""


def _is_dax(fd: int) -> bool:
    buffer = (ctypes.c_uint64 * 64)()
    try:
        status = _libc().statx(fd, b"", _AT_EMPTY_PATH, 0, ctypes.byref(buffer))
    except AttributeError:  # a C library without it
        return False
    return bool(status == 0 and buffer[1] & _STATX_ATTR_DAX)  # stx_attributes is the second word


def mounts(mountinfo: str) -> Iterator[Mount]:
    """The mounts that the text of a mountinfo lists, in its order; lines in another form are passed over."""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, rest = left.split(" "), right.split(" ")
        if len(fields) >= 6 and len(rest) >= 3:
            options = tuple(_unescape(rest[-1]).split(","))
            point, root = _unescape(fields[4]), _unescape(fields[3])
            yield Mount(point, root, _unescape(rest[1]), options, tuple(fields[5].split(",")))


def _unescape(text: str) -> str:
    r"""mountinfo writes blanks as \040 and the like."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def processors_near(node: int | None, threads: int) -> frozenset[int]:
    """On which processors the copies run: those of a pool's NUMA node that the calling thread may run on. Empty where
    the copy threads had better run anywhere: where the node is not known, is the only one, or has no more of them than
    there are copy threads, which would wait there for a training that fills them.

    Persistent memory belongs to one socket. What another one stores goes through the link between them, at a fraction
    of the speed, so the copy threads stay with the memory. Of ordinary memory nothing is known before its pages are
    there: the copy threads run where a processor is free."""
    if node is None:
        return frozenset()
    allowed = os.sched_getaffinity(0)
    near = System().processors(node) & allowed
    return near if threads < len(near) < len(allowed) else frozenset()
