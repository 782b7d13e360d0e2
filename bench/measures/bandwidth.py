"""Bytes per second into and out of a pool on one thread, compared with other copies of the same buffers: the C
library's memcpy, the native library's non-temporal copy without a checksum, and libpmem's pmem_memcpy.

The kinds take turns. All write into the same file, whose pages are allocated; the checksummed copies go block by block
as in a pool, and the verified read is the one that recovery uses.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from statistics import median
from typing import Any

import numpy as np

from bench.measures.copies import mapped
from bench.measures.figures import spread
from bench.workloads import checkpoint_shapes, workload
from lightck._native import check, ffi, lib
from lightck.errors import BenchError
from lightck.pool.engine import Medium
from lightck.pool.format.structures import BLOCK_MAX, align_up
from lightck.pool.storage.backends import BACKENDS
from lightck.pool.storage.extents import as_c_array

ALIGN = 4096
PMEM_NODRAIN, PMEM_NONTEMPORAL, PMEM_TEMPORAL = 1, 2, 4
Kinds = dict[str, Callable[[], None]]


def measure(options: dict[str, Any], folder: str) -> dict[str, Any]:
    sizes = checkpoint_shapes(workload(options["workload"], options["size"]))
    with ExitStack() as stack:
        room = _Room(stack, sizes, folder, options.get("backend", "file"))
        result = {"nbytes": room.nbytes, "buffers": len(sizes), "libpmem": _libpmem() is not None}
        write = _timed(room.writers(), options["rounds"], room.nbytes, room.check_written)
        read = _timed(room.readers(), options["rounds"], room.nbytes, room.check_read)
    return {
        **result,
        "write": write,
        "read": read,
        "write_of_nt": _ratio(write, "lightck", "non-temporal"),
        "write_of_memcpy": _ratio(write, "lightck", "memcpy"),
        "read_of_memcpy": _ratio(read, "lightck", "memcpy"),
    }


class _Room:
    """The buffers, and a container of the pool's kind that holds them."""

    def __init__(self, stack: ExitStack, sizes: list[int], folder: str, backend: str) -> None:
        self.nbytes = sum(sizes)
        noise = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8)
        self.sources = [np.resize(noise, n) for n in sizes]
        self.targets = [np.full(n, 1, np.uint8) for n in sizes]
        self.offsets = list(itertools.accumulate((align_up(n, ALIGN) for n in sizes), initial=0))
        # The container of a pool; it never holds a checkpoint.
        kind, path = BACKENDS[backend], os.path.join(folder, "bench.pool")
        self.container = kind.create(path, align_up(max(self.offsets[-1], 4 << 20), 2 << 20))
        stack.callback(self.container.close)
        self.medium = Medium(self.container.fd, self.container.extents, kind.probe(path).medium_kind)
        stack.callback(self.medium.close)
        size = os.fstat(self.container.fd).st_size
        self.base = stack.enter_context(mapped(self.container.fd, size))
        self._touch()
        self.crcs = [np.zeros(-(-n // BLOCK_MAX), np.uint32) for n in sizes]

    def _touch(self) -> None:
        """Touch each page through each of the two mappings."""
        for offset, source in zip(self.offsets, self.sources, strict=False):
            check(lib.lck_m_copy(self.medium.handle, offset, _pointer(source), len(source), ffi.NULL), "touching")
        check(lib.lck_m_sync(self.medium.handle), "touching")
        for address, nbytes in self._runs(0, self.offsets[-1]):
            ctypes.memset(address, 1, nbytes)

    def _runs(self, offset: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """The address of an offset of the container in this process's own mapping of its file."""
        for at, length in self.container.extents:
            n = min(nbytes, length - offset)
            if n > 0:
                yield self.base + at + offset, n
                nbytes -= n
            offset = max(0, offset - length)

    # -- into it -----------------------------------------------------------------------------------------

    def writers(self) -> Kinds:
        kinds: Kinds = {
            "memcpy": lambda: self._by_address(ctypes.memmove, into=True),
            "non-temporal": self._non_temporal,
            "lightck": self._checksummed,
        }
        pmem = _libpmem()
        if pmem is not None:
            kinds["libpmem non-temporal"] = lambda: self._by_libpmem(pmem, PMEM_NONTEMPORAL)
            kinds["libpmem"] = lambda: self._by_libpmem(pmem, 0)
        return kinds

    def _by_address(self, copy: Callable[[int, int, int], Any], into: bool) -> None:
        for offset, source, target in zip(self.offsets, self.sources, self.targets, strict=False):
            buffer = (source if into else target).ctypes.data
            for address, nbytes in self._runs(offset, len(source)):
                copy(address, buffer, nbytes) if into else copy(buffer, address, nbytes)
                buffer += nbytes

    def _by_libpmem(self, pmem: ctypes.CDLL, flags: int) -> None:
        self._by_address(lambda to, source, n: pmem.pmem_memcpy(to, source, n, flags | PMEM_NODRAIN), into=True)
        pmem.pmem_drain()

    def _non_temporal(self) -> None:
        for offset, source in zip(self.offsets, self.sources, strict=False):
            check(lib.lck_m_copy(self.medium.handle, offset, _pointer(source), len(source), ffi.NULL), "copying")
        check(lib.lck_m_fence(self.medium.handle), "copying")

    def _checksummed(self) -> None:
        copy, handle, crc = lib.lck_m_copy, self.medium.handle, ffi.new("uint32_t *")
        for offset, source, crcs in zip(self.offsets, self.sources, self.crcs, strict=False):
            address = source.ctypes.data
            for block in range(len(crcs)):
                at = block * BLOCK_MAX
                nbytes = min(BLOCK_MAX, len(source) - at)
                check(copy(handle, offset + at, ffi.cast("void *", address + at), nbytes, crc), "copying")
                crcs[block] = crc[0]
        check(lib.lck_m_fence(self.medium.handle), "copying")

    def check_written(self, kind: str) -> None:
        for offset, source in zip(self.offsets, self.sources, strict=False):
            if self.container.read(offset, len(source)) != source.tobytes():
                raise BenchError(f"{kind} did not write the right bytes.")

    # -- out of it ---------------------------------------------------------------------------------------

    def readers(self) -> Kinds:
        self._checksummed()
        kinds: Kinds = {
            "memcpy": lambda: self._by_address(ctypes.memmove, into=False),
            "pread": self._pread,
            "lightck": self._verified,
        }
        pmem = _libpmem()
        if pmem is not None:
            kinds["libpmem"] = lambda: self._by_address(
                lambda to, source, n: pmem.pmem_memcpy(to, source, n, PMEM_TEMPORAL | PMEM_NODRAIN), into=False
            )
        return kinds

    def _pread(self) -> None:
        for offset, target in zip(self.offsets, self.targets, strict=False):
            view, done = memoryview(target.data), 0
            for address, nbytes in self._runs(offset, len(target)):
                os.preadv(self.container.fd, [view[done : done + nbytes]], address - self.base)
                done += nbytes

    def _verified(self) -> None:
        places = as_c_array(self.container.extents)
        for i, (offset, target, crcs) in enumerate(zip(self.offsets, self.targets, self.crcs, strict=False)):
            seeds = np.array([lib.lck_block_seed(0, 0, i, 1, block) for block in range(len(crcs))], np.uint32)
            seeded = crcs ^ seeds
            status = lib.lck_read_verified(
                self.container.fd,
                places,
                len(self.container.extents),
                offset,
                _pointer(target),
                len(target),
                BLOCK_MAX,
                ffi.cast("uint32_t *", seeded.ctypes.data),
                0,
                0,
                i,
                1,
                ffi.NULL,
            )
            check(status, "reading")

    def check_read(self, kind: str) -> None:
        for source, target in zip(self.sources, self.targets, strict=True):
            if not np.array_equal(source, target):
                raise BenchError(f"{kind} did not read the bytes that were written.")
            target.fill(2)


def _pointer(array: Any) -> Any:
    return ffi.cast("void *", array.ctypes.data)


def _timed(kinds: Kinds, rounds: int, nbytes: int, verify: Callable[[str], None]) -> dict[str, Any]:
    """Bytes per second of each kind, by wall time and by CPU time of the thread; round by round."""
    for name, copy in kinds.items():
        copy()
        verify(name)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, copy in kinds.items():
            wall, cpu = time.perf_counter(), time.thread_time()
            copy()
            found[name].append((nbytes / (time.perf_counter() - wall), nbytes / (time.thread_time() - cpu)))
    return {
        name: {
            "wall": asdict(spread([a for a, _ in pairs])),
            "cpu": asdict(spread([b for _, b in pairs])),
            "rounds": [b for _, b in pairs],
        }
        for name, pairs in found.items()
    }


def _ratio(found: dict[str, Any], ours: str, other: str) -> float:
    """Ratios of CPU bandwidths, round by round, so that other load affects both sides."""
    pairs = zip(found[ours]["rounds"], found[other]["rounds"], strict=True)
    return float(median(a / b for a, b in pairs))


def _libpmem() -> ctypes.CDLL | None:
    """libpmem 1 (Debian: libpmem1), if it is installed."""
    try:
        pmem = ctypes.CDLL("libpmem.so.1")
        pmem.pmem_memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        pmem.pmem_memcpy.restype = ctypes.c_void_p
        pmem.pmem_drain.restype = None
    except (OSError, AttributeError):
        return None
    return pmem
