"""The facts in a result about machine, medium and code, and the resources that a process uses: CPU, memory, files.

Machine and medium are described by kind, never by name or path.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import resource
import threading
from pathlib import Path
from typing import Any

import lightck
from lightck._native import ffi, lib
from lightck.pool.storage import durability

_TICKS = os.sysconf("SC_CLK_TCK")
_BENCH = Path(__file__).resolve().parents[1]
_GENERATED = "_lck_ffi.py"
"""Generated from the header when lightck is built."""


def facts(folder: str) -> dict[str, Any]:
    """The facts about the machine and the medium of this folder."""
    import torch

    medium = durability.probe(folder)
    kernel = ".".join(platform.release().split(".")[:2])
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": f"{platform.system()} {kernel}, {platform.machine()}",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "kernels": ffi.string(lib.lck_isa_name()).decode(),
        "medium": medium.medium,
        "survives": [name for name in ("process", "os", "power", "media") if getattr(medium, name)],
        "load": round(os.getloadavg()[0], 1),
    }


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()


def fingerprint() -> str:
    """A short hash of the measured code: all Python files of the package and of ``bench/``, and the native sources if
    they lie beside the package. So an installed lightck, without native sources, differs from its source tree."""
    package = Path(str(lightck.__file__)).resolve().parent
    native = package.parent / "native"
    found = [path for folder in (package, _BENCH) for path in folder.rglob("*.py") if path.name != _GENERATED]
    if (native / "include" / "lck.h").is_file():
        found += [path for path in native.rglob("*") if path.suffix in (".c", ".h")]
    digest = hashlib.sha256()
    for path in sorted(found):
        root = _BENCH.parent if path.is_relative_to(_BENCH) else package.parent
        text = path.read_bytes()
        digest.update(f"{path.relative_to(root)}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()[:12]


def cpu_seconds() -> float:
    """CPU time of this process and its children: some rivals write in processes of their own."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        total += used.ru_utime + used.ru_stime
    return total + sum(map(_cpu_of, descendants(os.getpid())))


def descendants(pid: int) -> list[int]:
    """The living descendants of this process."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(word) for word in path.read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def _cpu_of(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def anonymous_bytes(pid: int | None = None) -> int:
    """The private memory of a process in bytes, without the shared mapping of a pool."""
    try:
        text = Path(f"/proc/{pid or 'self'}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"^RssAnon:\s+(\d+) kB", text, re.M)
    return int(found[1]) * 1024 if found else 0


def all_anonymous_bytes() -> int:
    """The private memory of this process and its descendants."""
    return anonymous_bytes() + sum(map(anonymous_bytes, descendants(os.getpid())))


def written_bytes() -> int:
    """The bytes that this process and its living descendants have given to ``write`` and similar calls. A store into a
    mapping is not one of them."""
    return sum(_written_by(pid) for pid in (os.getpid(), *descendants(os.getpid())))


def _written_by(pid: int) -> int:
    try:
        found = re.search(r"^wchar:\s+(\d+)", Path(f"/proc/{pid}/io").read_text(), re.M)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def available_bytes() -> int:
    """The memory that new processes and files on tmpfs can use."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    return int(found[1]) * 1024 if found else 0


def bytes_below(folder: str) -> int:
    """The bytes that the files in a folder occupy."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
            except OSError:
                continue
    return total


class PeakMemory:
    """Samples the largest private memory, alone and with the files of a folder, every 20 ms; a context manager."""

    def __init__(self, folder: str) -> None:
        self.anonymous = self.with_files = 0
        self._folder = folder
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bench-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._end.wait(0.02):
            self._look()

    def _look(self) -> None:
        anonymous = all_anonymous_bytes()
        self.anonymous = max(self.anonymous, anonymous)
        self.with_files = max(self.with_files, anonymous + bytes_below(self._folder))
