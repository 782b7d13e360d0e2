"""A new pool on tmpfs lies in huge pages, where the kernel has them to give."""

from __future__ import annotations

import ctypes
import errno
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
from lightck.errors import NoSpaceError
from lightck.pool.storage import file
from lightck.pool.storage.system import System

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


def of_mapping(pool: Path, *fields: str) -> int:
    """Bytes that /proc/self/smaps gives for this process's mapping of the pool."""
    inside, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(pool))
        elif inside and line.startswith(fields):
            found += 1024 * int(line.split()[1])
    return found


def huge_nbytes(pool: Path) -> int:
    return of_mapping(pool, "ShmemPmdMapped:", "FilePmdMapped:")


def resident_nbytes(pool: Path) -> int:
    return of_mapping(pool, "Rss:")


def mapped(pool: Path, seconds: float = 20.0) -> int:
    """``huge_nbytes`` once the copy threads have mapped the pool, which they do in the background."""
    deadline, before = time.monotonic() + seconds, -1
    while time.monotonic() < deadline:
        resident = resident_nbytes(pool)
        if resident == before and resident >= os.path.getsize(pool) - HUGE:
            return huge_nbytes(pool)
        before = resident
        time.sleep(0.05)
    raise AssertionError(f"{resident_nbytes(pool)} of {os.path.getsize(pool)} bytes are mapped")


def test_a_new_pool_on_tmpfs_lies_in_huge_pages(pool):
    if System().file_system(str(pool.parent)) != TMPFS:
        pytest.skip("the tests' folder is not on tmpfs")
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        if kernel_gives_them():
            assert mapped(pool) > 0
        train(model, optimizer, 3)
        session.flush()
        assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_a_kernel_that_gives_none_does_no_harm(pool, monkeypatch):
    class Without:
        asked = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(lib, name)

        def lck_huge(self, *args: int) -> int:
            self.asked += 1
            return 0

    monkeypatch.setattr(file, "lib", Without())
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        assert file.lib.asked == 1  # and not again for the next slice
        train(model, optimizer, 3)
        session.flush()
        assert is_step(lightck.recover(pool), everything(model, optimizer))


def test_a_pool_that_cannot_fit_takes_nothing_before_it_is_refused(pool, monkeypatch):
    """Else others on that tmpfs would find it full meanwhile."""
    space = os.statvfs(pool.parent)
    if System().file_system(str(pool.parent)) != TMPFS or not space.f_blocks:
        pytest.skip("the tests' folder is not on a tmpfs that has a size")
    asked = []

    class Recorded:
        def __getattr__(self, name: str) -> Any:
            if name == "lck_huge":
                asked.append(name)
            return getattr(lib, name)

    monkeypatch.setattr(file, "lib", Recorded())
    with pytest.raises(NoSpaceError, match=r"its file system has [\d,.]+ MB left"):
        file.FileBackend().create(str(pool), space.f_blocks * space.f_frsize + (1 << 30))  # more than all of it
    assert not asked
    assert not list(pool.parent.iterdir())


def test_a_file_system_that_does_not_tell_its_space_gives_a_pool_all_the_same(pool, monkeypatch):
    """The space is asked for huge pages' sake only: what fails there is no reason to refuse a pool."""

    def failing(fd: int) -> os.statvfs_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(file.os, "fstatvfs", failing)
    model = net(BIG)
    optimizer = adam(model)
    with lightck.attach(model, pool, optimizer=optimizer) as session:
        train(model, optimizer, 3)
        session.flush()
        assert is_step(lightck.recover(pool), everything(model, optimizer))
