"""A new pool on tmpfs lies in huge pages, where the kernel has them to give."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from toys import BIG, adam, everything, is_step, net, train

import lightck
from lightck._native import lib
from lightck.pool import file
from lightck.pool.system import System

HUGE, COLLAPSE, FIXED, TMPFS = 2 << 20, 25, 0x10, 0x01021994


def kernel_gives_them() -> bool:
    """Whether MADV_COLLAPSE makes a huge page of a file on tmpfs, asked without lightck."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    fd = os.memfd_create("asked")
    os.ftruncate(fd, HUGE)
    space = libc.mmap(None, 2 * HUGE, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    start = -(-space // HUGE) * HUGE
    try:
        assert libc.mmap(start, HUGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | FIXED, fd, 0) == start
        ctypes.memset(start, 1, 1)
        return bool(libc.madvise(start, HUGE, COLLAPSE) == 0)
    finally:
        libc.munmap(space, 2 * HUGE)
        os.close(fd)


def huge_nbytes(pool: Path) -> int:
    """Bytes of this process's mapping of the pool that are mapped by huge pages."""
    maps = Path("/proc/self/smaps").read_text().split("\n")
    inside, found = False, 0
    for line in maps:
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(pool))
        elif inside and line.startswith(("ShmemPmdMapped:", "FilePmdMapped:")):
            found += 1024 * int(line.split()[1])
    return found


def test_a_new_pool_on_tmpfs_lies_in_huge_pages(pool):
    if System().file_system(str(pool.parent)) != TMPFS:
        pytest.skip("the tests' folder is not on tmpfs")
    gives = kernel_gives_them()
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        deadline = time.monotonic() + 20
        while gives and not huge_nbytes(pool) and time.monotonic() < deadline:
            time.sleep(0.02)  # the copy threads map the pages
        assert (huge_nbytes(pool) > 0) == gives
        train(model, optimizer, 3)
        session.flush()
        assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_without_huge_pages_a_pool_is_the_same(pool, monkeypatch):
    models = [net(BIG), net(BIG)]
    other = pool.with_name("other.pool")
    lightck.attach(models[0], pool, optimizer=adam(models[0])).close()
    monkeypatch.setattr(file, "lib", WithoutHugePages())
    optimizer = adam(models[1])
    with lightck.attach(models[1], other, optimizer=optimizer) as session:
        assert huge_nbytes(other) == 0
        assert os.path.getsize(other) == os.path.getsize(pool)
        assert os.stat(other).st_blocks == os.stat(pool).st_blocks
        train(models[1], optimizer, 3)
        session.flush()
        assert is_step(lightck.recover(other), everything(models[1], optimizer))


class WithoutHugePages:
    """The native library on a kernel that has none."""

    def __getattr__(self, name: str) -> Any:
        return getattr(lib, name)

    def lck_huge(self, fd: int, nbytes: int, threads: int) -> int:
        return 0
