"""The folders of rows: removed after the row, or by the next run if the run was killed.

A folder's name holds its process number, and the boot and the container in which that number is valid. Folders of other
users, other machines, living processes or unknown owners are never removed.
"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

_PREFIX = "lightck-bench-"


def temporary(place: str) -> TemporaryDirectory[str]:
    """Make a folder for this process."""
    here = _here()
    return TemporaryDirectory(prefix=f"{_PREFIX}{here}-{os.getpid()}-" if here else _PREFIX, dir=place)


def remove_stale(places: Iterable[str]) -> int:
    """Remove the folders in these places whose process has ended; returns their number."""
    here, removed = _here(), 0
    if not here:
        return 0
    ours = re.compile(rf"{_PREFIX}{here}-(\d+)-\w+")
    for place in {os.path.realpath(place) for place in places}:
        with os.scandir(place) as entries:
            for entry in entries:
                whose = ours.fullmatch(entry.name)
                if whose and _is_own(entry) and not _lives(int(whose[1])):
                    shutil.rmtree(entry.path, ignore_errors=True)
                    removed += not os.path.lexists(entry.path)
    return removed


def _here() -> str:
    """An identifier of the boot and the container, within which process numbers are unique; "" if unknown."""
    try:
        start = Path("/proc/sys/kernel/random/boot_id").read_text()
        return f"{zlib.crc32((start + os.readlink('/proc/self/ns/pid')).encode()):08x}"
    except OSError:
        return ""


def _is_own(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid()
    except OSError:
        return False


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
