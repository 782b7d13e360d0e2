"""Whether the large blocks of a pool on a disk are written past the page cache (``O_DIRECT``; native/src/direct.c).

This is decided when the pool is mapped for writing. A file that takes no direct writes is written through the page
cache, and ``DirectWrites.method`` says why. If the kernel refuses a direct write later, the page cache is used from
then on. Both ways write the same bytes to the same places, commit in the same
order with the same syncs, and survive the same failures: they differ in processor time.

The kernel must keep direct writes, the mapping and reads of one file coherent. Only the file systems below are trusted
to do so, because lightck knows what their code does.
"""

from __future__ import annotations

import contextlib
import logging
import os

from lightck._native import lib, reason
from lightck.errors import PoolError
from lightck.pool.engine import THREADS_FOR_DIRECT_WRITES, Engine, Medium
from lightck.pool.format.structures import KIB, PAGE
from lightck.pool.storage.durability import MEDIUM_DISK
from lightck.pool.storage.extents import Extents
from lightck.pool.storage.system import System

log = logging.getLogger("lightck")
_IN_TESTS = os.environ.get("LIGHTCK_TEST_DIRECT") == "1"
"""Tests write small blocks directly too, and on every file system that opens a file with ``O_DIRECT``."""
DIRECT_NBYTES_MIN = 4 * KIB if _IN_TESTS else 256 * KIB
"""Blocks with fewer bytes in whole pages are stored through the mapping. A short direct write costs more than a
store through the mapping."""
_FILE_SYSTEMS = {0xEF53: "ext4", 0x58465342: "XFS"}
"""Names of file systems by their f_type (statfs)."""
DIRECT = "direct"
"""The value of ``DirectWrites.method`` for direct writes."""


class DirectWrites:
    """The decision for one mapped pool."""

    def __init__(self, medium: Medium, engine: Engine, fd: int, extents: Extents, kind: int) -> None:
        """``engine``: makes all copies into the medium. ``fd``, ``extents``: the pool's file and where the pool lies in
        it. ``kind``: ``MEDIUM_...``."""
        self._medium = medium
        self._is_on_disk = kind == MEDIUM_DISK
        self._why_not = _enable(medium, engine, fd, extents) if self._is_on_disk else None
        if self._is_on_disk:
            log.info("lightck: the pool's large blocks are written: %s", self.method)

    @property
    def method(self) -> str | None:
        """How large blocks are written: ``"direct"``, or ``"page cache: "`` and the reason; None if the pool is not on
        a disk."""
        if not self._is_on_disk:
            return None
        if self._why_not is None and self._medium.handle is not None:
            code = lib.lck_medium_direct_error(self._medium.handle)
            if code:  # the kernel took direct writes when the pool was mapped, and refused one later
                self._why_not = f"the kernel refused a direct write ({os.strerror(code)})"
        return DIRECT if self._why_not is None else f"page cache: {self._why_not}"

    @property
    def nbytes(self) -> int:
        """Bytes written past the page cache so far; 0 after the pool was unmapped."""
        return 0 if self._medium.handle is None else lib.lck_medium_direct_nbytes(self._medium.handle)


def _enable(medium: Medium, engine: Engine, fd: int, extents: Extents) -> str | None:
    """Let the medium write directly. Returns why it cannot, or None."""
    if len(extents) != 1 or extents[0][0] != 0:
        return "the pool is not a plain file"
    # native/src/direct.c keeps stores and direct writes apart in windows of 2 MiB. With larger pages, a folio of the
    # page cache could be larger than a window.
    if os.sysconf("SC_PAGE_SIZE") != PAGE:
        return f"the pages of this machine have {os.sysconf('SC_PAGE_SIZE')} bytes"
    try:  # a descriptor of its own: O_DIRECT on ``fd`` would hold for reads too
        direct_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as err:
        return f"the file cannot be opened with O_DIRECT ({err.strerror})"
    try:
        return why_untrusted(f"/proc/self/fd/{direct_fd}") or _start(medium, engine, direct_fd)
    finally:
        os.close(direct_fd)


def _start(medium: Medium, engine: Engine, direct_fd: int) -> str | None:
    status = lib.lck_medium_direct(medium.handle, engine.handle, direct_fd, DIRECT_NBYTES_MIN)
    return None if status == lib.LCK_OK else f"the file takes no direct writes ({reason(status)})"


def why_untrusted(path: str) -> str | None:
    """Return why files on the file system of this path are not written directly; None if they may be."""
    kind = System().file_system(path)
    if kind in _FILE_SYSTEMS or _IN_TESTS:
        return None
    return f"direct writes are used on {' and '.join(_FILE_SYSTEMS.values())}, and this is another file system"


def copy_threads(path: str, backend: str, kind: int) -> int | None:
    """Return the number of copy threads for a pool. None: the default number, also on a disk whose file system gets no
    direct writes, where more threads would make a step a tenth longer. ``path``: of the pool, which need not exist
    yet. ``backend``: the name of its backend. ``kind``: ``MEDIUM_...`` of it."""
    is_direct = backend == "file" and kind == MEDIUM_DISK and why_untrusted(os.path.dirname(path)) is None
    return THREADS_FOR_DIRECT_WRITES if is_direct else None


def method_in(folder: str, kind: int) -> str | None:
    """Return ``DirectWrites.method`` of a pool in a plain file in this folder; None also if it is unknown. To find out,
    this makes an unnamed file for a moment, allocates its space and maps it. If one of these fails, the method is
    unknown. ``kind``: ``MEDIUM_...`` of such a pool."""
    if kind != MEDIUM_DISK:
        return None
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        extents = ((0, 2 * PAGE),)
        os.posix_fallocate(fd, 0, 2 * PAGE)
        with contextlib.closing(Engine(1)) as engine, contextlib.closing(Medium(fd, extents, kind)) as medium:
            return DirectWrites(medium, engine, fd, extents, kind).method
    except (OSError, PoolError):
        return None
    finally:
        os.close(fd)
