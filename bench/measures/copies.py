"""The cost of one memcpy of a state, into or out of a mapping of a file whose pages are allocated."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from tempfile import TemporaryFile

import torch

PAGE = mmap.PAGESIZE


@contextlib.contextmanager
def mapping(folder: str, nbytes: int) -> Iterator[int]:
    """The address of a shared mapping of a new file in this folder, every page of it touched."""
    with TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        with mapped(file.fileno(), nbytes) as address:
            ctypes.memset(address, 1, nbytes)
            yield address


@contextlib.contextmanager
def mapped(fd: int, nbytes: int, write: bool = True) -> Iterator[int]:
    """The address of a mapping of a file: shared, or private (copy on write) if not ``write``."""
    how = mmap.MAP_SHARED if write else mmap.MAP_PRIVATE
    view = mmap.mmap(fd, nbytes, how, mmap.PROT_READ | mmap.PROT_WRITE)
    anchor = (ctypes.c_char * nbytes).from_buffer(view)
    try:
        yield ctypes.addressof(anchor)
    finally:
        del anchor
        view.close()


def places(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """(address, nbytes) of each tensor; all are dense."""
    return [(t.data_ptr(), t.numel() * t.element_size()) for t in tensors]


def total(buffers: Sequence[tuple[int, int]]) -> int:
    return sum(nbytes for _, nbytes in buffers)


def shared_out(buffers: Sequence[tuple[int, int]], parts: int) -> list[list[tuple[int, int, int]]]:
    """Split the ranges into so many parts of equal size: (address, nbytes, offset in the whole) of each piece."""
    whole, at = total(buffers), 0
    ends = [whole * (n + 1) // parts for n in range(parts)]
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(parts)]
    part = 0
    for address, nbytes in buffers:
        left = nbytes
        while left:
            while at == ends[part]:
                part += 1
            piece = min(left, ends[part] - at)
            found[part].append((address + nbytes - left, piece, at))
            left, at = left - piece, at + piece
    return found


def memcpy_cpu_seconds(tensors: Sequence[torch.Tensor], folder: str, turns: int = 7) -> list[float]:
    """CPU seconds of copying all tensors once, one after the other."""
    buffers = places(tensors)
    with mapping(folder, total(buffers)) as target:
        return [_copied(buffers, target) for _ in range(turns)]


def _copied(buffers: Sequence[tuple[int, int]], target: int) -> float:
    began = time.thread_time()
    for source, nbytes in buffers:
        ctypes.memmove(target, source, nbytes)
        target += nbytes
    return time.thread_time() - began
