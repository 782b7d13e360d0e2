"""Holes in files: bytes that read as zeros and take no space."""

from __future__ import annotations

import ctypes
from functools import cache

_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02


def punch(fd: int, begin: int, nbytes: int) -> None:
    """Make these bytes of a file a hole. A file system that has no holes keeps the bytes, which is no error."""
    fallocate = getattr(_libc(), "fallocate", None)
    if fallocate is not None:
        fallocate(fd, _KEEP_SIZE_AND_PUNCH_HOLE, ctypes.c_longlong(begin), ctypes.c_longlong(nbytes))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
