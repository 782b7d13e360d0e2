"""What a pool survives, with the evidence for it: never a flag that somebody set.

``probe`` looks at the file system under a path; the answer also says which tier the choke point has to use (whether
a sync must be an fdatasync). What is not known is not promised.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

from lightck.errors import MediumError

_TMPFS, _RAMFS, _OVERLAY = 0x01021994, 0x858458F6, 0x794C7630
_DISK = {
    0xEF53: "ext2/3/4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0xF2F52010: "f2fs",
    0x2FC12FC1: "zfs",
    0xCA451A4E: "bcachefs",
}
TIER_CACHE, TIER_DISK, TIER_PM = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Durability:
    """What the newest committed version survives, and why we think so."""

    process: bool
    """A kill of the process, by any signal."""
    os: bool
    """A crash or reboot of the operating system."""
    power: bool
    """A power cut."""
    media: bool
    """Loss of the medium itself."""
    medium: str
    """Kind of medium, for example ``tmpfs`` or ``disk (ext2/3/4)``."""
    evidence: tuple[str, ...]
    tier: int

    def __str__(self) -> str:
        survived = [name for name in ("process", "os", "power", "media") if getattr(self, name)]
        return f"{self.medium}: survives {', '.join(survived) or 'nothing'}"


def probe(folder: str) -> Durability:
    """Evidence for files in this existing folder."""
    kind = _statfs_type(folder)
    seen = f"statfs f_type {kind:#x}" if kind is not None else "statfs failed"
    if kind in (_TMPFS, _RAMFS):
        name = "tmpfs" if kind == _TMPFS else "ramfs"
        return Durability(True, False, False, False, name, (seen, f"{name} lives in memory"), TIER_CACHE)
    if kind in _DISK:
        evidence = (seen, "two fdatasync per checkpoint", "power: as far as the disk honours a flush")
        return Durability(True, True, True, False, f"disk ({_DISK[kind]})", evidence, TIER_DISK)
    if kind == _OVERLAY:
        return _overlay(folder, seen)
    reason = "unknown file system: only that the page cache outlives the process is relied on"
    return Durability(True, False, False, False, "unknown file system", (seen, reason), TIER_DISK)


def _overlay(folder: str, seen: str) -> Durability:
    options = _mount_options(folder)
    if options is None or "volatile" in options.split(","):
        return Durability(True, False, False, False, "overlay", (seen, "mounted volatile, or not found"), TIER_DISK)
    evidence = (seen, "overlay passes fdatasync to its upper layer", "power: as far as that disk honours a flush")
    return Durability(True, True, True, False, "disk (overlay)", evidence, TIER_DISK)


def require(durability: Durability, level: str | None) -> None:
    """Raise ``MediumError`` where the medium falls short of ``require=``."""
    if level is None:
        return
    if level not in ("process", "os", "power"):
        raise ValueError(f'require={level!r} is not known. It is one of "process", "os", "power".')
    if not getattr(durability, level):
        what = {"process": "a kill of the process", "os": "a crash of the operating system", "power": "a power cut"}
        raise MediumError(
            f"The pool would not survive {what[level]}, which require={level!r} asks for: its medium is "
            f"{durability.medium} ({'; '.join(durability.evidence)}). Put the pool on a disk or on persistent "
            "memory, or ask for less."
        )


def _statfs_type(path: str) -> int | None:
    buffer = (ctypes.c_long * 32)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(path), ctypes.byref(buffer)) != 0:
        return None
    return int(buffer[0]) & 0xFFFFFFFF


def _mount_options(folder: str) -> str | None:
    """Super options of the mount that holds ``folder``, from mountinfo (matched by device number)."""
    device = os.stat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo") as f:
            for line in f:
                fields = line.split()
                if fields[2] == wanted:
                    return fields[-1]
    except OSError:
        pass
    return None
