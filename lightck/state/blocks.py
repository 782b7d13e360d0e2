"""Blocks of tensors in memory, and their checksums: so that writes are found which move no version counter.

One native call reads many blocks. ``Turn`` says which are read now: a budget of bytes for each checkpoint, so that all
of a small model is read every time, and of a large one the next blocks in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lightck._native import check, ffi, lib

BUDGET_NBYTES = 1 << 20
"""Bytes that are read for each checkpoint beside its copies: one block of the largest size."""
WHOLE_CHECKPOINTS = 3
"""After attach so many checkpoints are compared whole: what a loop does at every step is found there."""

_AT_ONCE = 4096  # blocks that are looked at for one budget: of very many tiny ones

ALL = slice(None)
Positions = npt.NDArray[np.int64]
Checksums = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Parallel arrays, one item per block: address and length in memory, the position of its tensor among those that
    were given, and the position of its checksum among the checksums of all of them."""

    addresses: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.uint64]
    owners: Positions
    checksum_positions: Positions
    total: int
    """Bytes of all of them."""

    @classmethod
    def of(
        cls,
        addresses: Sequence[int] | npt.NDArray[np.uint64],
        nbytes: Sequence[int] | npt.NDArray[np.uint64],
        starts: Sequence[int] | npt.NDArray[np.int64],
        block: int,
    ) -> Blocks:
        """``starts``: where the checksums of each tensor begin. Tensors have at least one byte."""
        begin, size = np.asarray(addresses, np.uint64), np.asarray(nbytes, np.uint64)
        count = -(-size.astype(np.int64) // block)
        owners = np.repeat(np.arange(len(count)), count)
        index = np.arange(len(owners)) - np.repeat(np.cumsum(count) - count, count)
        at = index.astype(np.uint64) * np.uint64(block)
        return cls(
            begin[owners] + at,
            np.minimum(size[owners] - at, np.uint64(block)),
            owners,
            np.asarray(starts, np.int64)[owners] + index,
            int(size.sum()),
        )

    def __len__(self) -> int:
        return len(self.owners)

    def concatenated(self, other: Blocks) -> Blocks:
        """Both, where the owners of ``other`` are counted on from ours."""
        if not len(other) or not len(self):
            return self if len(self) else other
        first = int(self.owners[-1]) + 1
        return Blocks(
            np.concatenate((self.addresses, other.addresses)),
            np.concatenate((self.nbytes, other.nbytes)),
            np.concatenate((self.owners, other.owners + first)),
            np.concatenate((self.checksum_positions, other.checksum_positions)),
            self.total + other.total,
        )

    def checksums(self, chosen: Positions | slice = ALL) -> Checksums:
        """Unseeded CRC-32C of these blocks, read now, without the GIL."""
        addresses, nbytes = self.addresses[chosen], self.nbytes[chosen]
        out = np.zeros(len(addresses), np.uint32)
        status = lib.lck_crc32c_each(
            ffi.from_buffer("uint64_t[]", addresses),
            ffi.from_buffer("uint64_t[]", nbytes),
            len(addresses),
            ffi.from_buffer("uint32_t[]", out),
        )
        check(status, "reading tensors")
        return out


class RoundRobin:
    """Which blocks are read next."""

    def __init__(self) -> None:
        self._next = 0

    def next_blocks(self, blocks: Blocks, budget: int | None) -> tuple[Positions | slice, bool]:
        """The next blocks, ``budget`` bytes of them and at least one (None: all), and whether this came round to the
        first one again. `ALL` where that is all."""
        if budget is None or blocks.total <= budget:
            self._next = 0
            return ALL, True
        n = len(blocks)
        start = self._next if self._next < n else 0
        order = np.arange(start, start + min(n, _AT_ONCE)) % max(n, 1)
        ends = np.cumsum(blocks.nbytes[order])
        order = order[: max(int(np.searchsorted(ends, budget, side="right")), 1)]
        stop = start + len(order)
        self._next = stop % max(n, 1)
        return order, stop >= n


NO_BLOCKS = Blocks.of([], [], [], BUDGET_NBYTES)


def checksums(tensor: torch.Tensor, block: int) -> npt.NDArray[np.uint32]:
    """Unseeded CRC-32C of every block of a tensor's bytes, read now, without the GIL."""
    nbytes = tensor.numel() * tensor.element_size()
    out = np.zeros(-(-nbytes // block), np.uint32)
    if nbytes:
        source = ffi.cast("void *", tensor.data_ptr())
        lib.lck_crc32c_blocks(source, nbytes, block, ffi.cast("uint32_t *", out.ctypes.data))
    return out
