"""Crash images as one file that is changed in place: a change costs microseconds, not a copy of the pool.

Knows nothing of pools but where in the file their bytes lie.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from itertools import accumulate

from lightck.pool.storage.extents import Extents, runs

PAGE = 4096


class ImageFile:
    """A sparse file of ``nbytes`` with these pages in it; lives until ``close``, which removes it. It is read and
    written by the offsets of the pool that has these extents of it."""

    def __init__(self, path: str, nbytes: int, pages: Mapping[int, bytes], places: Extents) -> None:
        self.path = path
        self.nbytes = nbytes
        self._places = places
        ends = list(accumulate(n for _, n in places))
        self._extents_of_pool = [(end - n, end, at + n - end) for (at, n), end in zip(places, ends, strict=True)]
        """(start, end) of each extent in the pool, and what to add for the place in the file."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._fd, nbytes)
        self._map = mmap.mmap(self._fd, nbytes)
        for number, page in pages.items():
            self._map[number * PAGE : number * PAGE + len(page)] = page

    def read(self, offset: int, nbytes: int) -> bytes:
        for start, end, shift in self._extents_of_pool:
            if start <= offset and offset + nbytes <= end:
                return self._map[offset + shift : offset + shift + nbytes]
        parts = [self._map[at : at + n] for at, n in runs(self._places, offset, nbytes)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, offset: int, data: bytes) -> None:
        for start, end, shift in self._extents_of_pool:
            if start <= offset and offset + len(data) <= end:
                self._map[offset + shift : offset + shift + len(data)] = data
                return
        for at, n in runs(self._places, offset, len(data)):
            self._map[at : at + n] = data[:n]
            data = data[n:]

    def changed_at(self) -> tuple[int, int]:
        """When the file was last written to by a system call (data, then anything about it)."""
        st = os.fstat(self._fd)
        return st.st_mtime_ns, st.st_ctime_ns

    def whole(self) -> memoryview:
        """All bytes, to be compared and let go of at once."""
        return memoryview(self._map)

    def copy_to(self, path: str) -> None:
        """A separate file with the same bytes."""
        with open(path, "xb") as f:
            os.fchmod(f.fileno(), 0o600)
            f.truncate(self.nbytes)
            for at, end in self._extents():
                f.seek(at)
                f.write(self._map[at:end])

    def _extents(self) -> list[tuple[int, int]]:
        """Runs of the file that are not holes."""
        runs, at = [], 0
        while at < self.nbytes:
            try:
                at = os.lseek(self._fd, at, os.SEEK_DATA)
            except OSError:
                break
            end = os.lseek(self._fd, at, os.SEEK_HOLE)
            runs.append((at, end))
            at = end
        return runs

    def close(self) -> None:
        self._map.close()
        os.close(self._fd)
        os.unlink(self.path)


def pages_of(fd: int) -> dict[int, bytes]:
    """The pages of an open file that are not all zeros: number -> bytes."""
    pages = {}
    for number in range(-(-os.fstat(fd).st_size // PAGE)):
        page = os.pread(fd, PAGE, number * PAGE)
        if page.strip(b"\0"):
            pages[number] = page
    return pages
