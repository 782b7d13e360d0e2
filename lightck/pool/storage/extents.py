"""Where a pool's bytes lie in its file: runs that follow each other in the pool, wherever they are in the file.

A pool's offsets count through its extents in order, so nothing above this module knows how many there are.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeAlias

from lightck._native import ffi

if TYPE_CHECKING:
    from lightck._native import CData

Extents: TypeAlias = "tuple[tuple[int, int], ...]"
"""(offset in the file, nbytes) of each run."""


def total(extents: Extents) -> int:
    """Bytes of the pool."""
    return sum(nbytes for _, nbytes in extents)


def read(fd: int, extents: Extents, offset: int, nbytes: int) -> bytes:
    """Bytes of the pool; fewer where the file or the pool ends."""
    data = b""
    for at, n in runs(extents, offset, nbytes):
        part = _run(fd, at, n)
        data = data + part if data else part
        if len(part) < n:
            break
    return data


def _run(fd: int, at: int, nbytes: int) -> bytes:
    """A call may give less than it was asked for; only nothing at all is the end of the file."""
    data = os.pread(fd, nbytes, at)
    while len(data) < nbytes and (more := os.pread(fd, nbytes - len(data), at + len(data))):
        data += more
    return data


def runs(extents: Extents, offset: int, nbytes: int) -> list[tuple[int, int]]:
    """The same bytes as (offset in the file, nbytes); what lies behind the pool's end is left out."""
    found = []
    for at, length in extents:
        n = max(0, min(nbytes, length - offset))
        if n:
            found.append((at + offset, n))
        nbytes -= n
        offset = max(0, offset - length)
    return found


def native(extents: Extents) -> CData:
    """The same as an array of the native library."""
    return ffi.new("lck_extent[]", list(extents))
