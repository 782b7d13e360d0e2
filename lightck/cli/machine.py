"""The facts about a machine that ``lightck doctor`` reads, behind one class. Tests replace parts of this class.

Files in /proc, /sys and /etc are read below the folder ``root``. Limits, free space and media are read by functions
that are fields of the class. Modules that need the native library are imported inside functions, because the library
may not load on this machine.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lightck.errors import PoolError

if TYPE_CHECKING:
    from lightck.pool.storage.durability import Durability
    from lightck.pool.storage.system import Mount

UNLIMITED = 1 << 60
"""A limit of this many bytes or more is no limit: cgroups v1 writes "no limit" as a number larger than this."""


@dataclass(frozen=True, slots=True)
class Space:
    """The bytes of a file system: ``free`` is what this user may still use, ``total`` the size of the file system."""

    free: int
    total: int


def space_of(folder: str) -> Space | None:
    """Return the space of the file system of a folder; None if it cannot be read."""
    try:
        st = os.statvfs(folder)
    except OSError:
        return None
    return Space(st.f_bavail * st.f_frsize, st.f_blocks * st.f_frsize)


def durability_of(folder: str) -> Durability:
    """Return the durability of a pool in this folder."""
    from lightck.pool.storage import durability

    return durability.probe(folder)


def disk_writes_in(folder: str, kind: int) -> str | None:
    """Return how the large blocks of a pool in this folder would be written to a disk; None if the pool would not be on
    a disk, or if this is unknown. ``kind``: ``Durability.medium_kind`` of such a pool."""
    from lightck.pool import direct_writes

    return direct_writes.method_in(folder, kind)


def folder_refusal_of(folder: str) -> str | None:
    """Return, as text, why ``attach`` refuses to create a pool in this folder; None if it does not refuse."""
    from lightck.pool.storage.file import checked_folder

    try:
        checked_folder(os.path.join(folder, "run.pool"))
    except PoolError as error:
        return str(error)
    return None


def pool_refusal_at(path: str) -> str | None:
    """Return, as text, why ``attach`` refuses to open the file at ``path`` as a pool; None if it does not refuse, or if
    there is no file at ``path``."""
    from lightck.pool.reader import open_pool
    from lightck.pool.storage.backends import pool_path

    if not os.path.lexists(path):
        return None
    try:
        open_pool(pool_path(path), gradients=True).close()
    except PoolError as error:
        return str(error)
    return None


def device_at(path: str) -> tuple[int, Durability] | None:
    """Return the size in bytes of a device-dax device, and the durability of a pool on this device; None for any other
    path."""
    from lightck.pool.storage.backends import DEVDAX

    return DEVDAX.size_and_durability(path) if DEVDAX.claims(path) else None


def limit_of(name: str) -> int | None:
    """Return the soft limit with this name (``RLIMIT_...``), in bytes; None if unlimited."""
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft


def is_writable(folder: str) -> bool:
    return os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine, or a simulated one in a test."""

    root: Path = Path("/")
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    uid: int = field(default_factory=os.getuid)
    space: Callable[[str], Space | None] = space_of
    limit: Callable[[str], int | None] = limit_of
    durability: Callable[[str], Durability] = durability_of
    device: Callable[[str], tuple[int, Durability] | None] = device_at
    writable: Callable[[str], bool] = is_writable
    folder_refusal: Callable[[str], str | None] = folder_refusal_of
    pool_refusal: Callable[[str], str | None] = pool_refusal_at
    disk_writes: Callable[[str, int], str | None] = disk_writes_in

    def text(self, path: str) -> str:
        """Return the text of a file; empty if the file cannot be read."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace")
        except OSError:
            return ""

    def exists(self, path: str) -> bool:
        return (self.root / path.lstrip("/")).exists()

    def listing(self, path: str) -> list[str]:
        """Return the sorted names in a folder; empty if the folder cannot be read."""
        try:
            return sorted(os.listdir(self.root / path.lstrip("/")))
        except OSError:
            return []

    def kernel(self) -> tuple[str, tuple[int, int]]:
        """Return the release of the kernel as text, and its first two numbers; "" and (0, 0) if it cannot be read."""
        release = self.text("/proc/sys/kernel/osrelease").strip()
        found = re.match(r"(\d+)\.(\d+)", release)
        return release, (int(found[1]), int(found[2])) if found else (0, 0)

    def mounts(self) -> Iterator[Mount]:
        from lightck.pool.storage.system import mounts

        return mounts(self.text("/proc/self/mountinfo"))

    def swaps(self) -> list[str]:
        """Return the devices and files to which the kernel may swap memory out."""
        return [line.split()[0] for line in self.text("/proc/swaps").splitlines()[1:] if line.strip()]

    def memory_available(self) -> int | None:
        """Return the available memory in bytes; None if it cannot be read."""
        found = re.search(r"^MemAvailable:\s+(\d+) kB", self.text("/proc/meminfo"), re.M)
        return int(found[1]) * 1024 if found else None

    def memory_limit(self) -> int | None:
        """Return the smallest memory limit of this process's control groups, in bytes; None if there is no limit."""
        limits: list[int] = []
        for line in self.text("/proc/self/cgroup").splitlines():
            number, _, rest = line.partition(":")
            controllers, _, group = rest.partition(":")
            if number == "0" and not controllers:
                limits += self._limits("/sys/fs/cgroup", group, "memory.max")
            elif "memory" in controllers.split(","):
                limits += self._limits("/sys/fs/cgroup/memory", group, "memory.limit_in_bytes")
        return min(limits, default=None)

    def _limits(self, base: str, group: str, name: str) -> Iterator[int]:
        """Yield the limits of a control group and of its ancestors, in bytes. In a container some of these groups may
        not be visible."""
        parts = [part for part in group.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            text = self.text("/".join((base, *parts[:depth], name))).strip()
            if text.isdecimal() and int(text) < UNLIMITED:
                yield int(text)

    def container(self) -> str | None:
        """Return the evidence that this process runs in a container, as text; None if there is none."""
        for path in ("/.dockerenv", "/run/.containerenv"):
            if self.exists(path):
                return path
        for name in ("KUBERNETES_SERVICE_HOST", "SINGULARITY_CONTAINER", "APPTAINER_CONTAINER"):
            if name in self.env:
                return f"{name} is set"
        found = re.search(r"docker|kubepods|containerd|libpod|lxc", self.text("/proc/1/cgroup"))
        return f"/proc/1/cgroup names {found[0]}" if found else None
