"""File extents: the runs of bytes in a file that together are a pool. (A tensor's extent in a slot is something else.)

The bytes of the file extents, in the order of the extents, are the bytes of the pool, wherever each extent lies in the
file. Code that uses offsets in the pool need not know the file extents.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeAlias

from lightck._native import ffi

if TYPE_CHECKING:
    from lightck._native import CData

Extents: TypeAlias = "tuple[tuple[int, int], ...]"
"""(offset in the file, nbytes) of each file extent of a pool."""


def total(extents: Extents) -> int:
    """Return the length of the pool in bytes."""
    return sum(nbytes for _, nbytes in extents)


def read(fd: int, extents: Extents, offset: int, nbytes: int) -> bytes:
    """Read bytes of the pool. The result is shorter than ``nbytes`` at the end of the file or the pool. Raises
    ``OSError``."""
    data = b""
    for at, n in runs(extents, offset, nbytes):
        part = _read_run(fd, at, n)
        data = data + part if data else part
        if len(part) < n:
            break
    return data


def _read_run(fd: int, at: int, nbytes: int) -> bytes:
    """Read consecutive bytes of a file. pread may return fewer bytes than requested; only an empty result means the end
    of the file."""
    data = os.pread(fd, nbytes, at)
    while len(data) < nbytes and (more := os.pread(fd, nbytes - len(data), at + len(data))):
        data += more
    return data


def runs(extents: Extents, offset: int, nbytes: int) -> list[tuple[int, int]]:
    """Return a range of the pool as (offset in the file, nbytes) pairs; bytes beyond the pool's end are left out."""
    found = []
    for at, length in extents:
        n = max(0, min(nbytes, length - offset))
        if n:
            found.append((at + offset, n))
        nbytes -= n
        offset = max(0, offset - length)
    return found


def as_c_array(extents: Extents) -> CData:
    """Return the file extents as a C array for the native library."""
    return ffi.new("lck_extent[]", list(extents))
