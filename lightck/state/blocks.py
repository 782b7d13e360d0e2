"""Checksums of tensors in memory, block by block, which find writes that no version counter counts.

One native call reads many blocks. ``RoundRobin`` chooses the blocks to read now. Each checkpoint has a budget of bytes:
a small model is read whole every time, and of a large model the next blocks in order are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lightck._native import check, ffi, lib

BUDGET_NBYTES = 1 << 20
"""Bytes that are read for each checkpoint in addition to its copies: one block of the largest size."""
WHOLE_CHECKPOINTS = 3
"""The number of checkpoints after attach that are compared whole: they show every write that a loop makes at each
step."""

_CANDIDATES_MAX = 4096
"""At most so many blocks are read for one checkpoint, even if more fit in its budget (a model of very many tiny
tensors)."""

ALL = slice(None)
Positions = npt.NDArray[np.int64]
Checksums = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of tensors, as parallel arrays with one item per block.

    addresses, nbytes: where the block lies in memory, and its length. owners: index of its tensor in the sequence given
    to ``of``. checksum_positions: index of its checksum in the array of all checksums.
    """

    addresses: npt.NDArray[np.uint64]
    nbytes: npt.NDArray[np.uint64]
    owners: Positions
    checksum_positions: Positions
    total: int
    """Bytes of all blocks together."""

    @classmethod
    def of(
        cls,
        addresses: Sequence[int] | npt.NDArray[np.uint64],
        nbytes: Sequence[int] | npt.NDArray[np.uint64],
        starts: Sequence[int] | npt.NDArray[np.int64],
        block: int,
    ) -> Blocks:
        """Split tensors into blocks of ``block`` bytes. ``starts``: index of each tensor's first checksum. Each tensor
        has at least one byte."""
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
        """Return the blocks of both, with the owners of ``other`` numbered after those of this object."""
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
        """Compute the unseeded CRC-32C of the chosen blocks from memory, without the GIL."""
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
    """Chooses the blocks to read next, in turn."""

    def __init__(self) -> None:
        self._next = 0

    def next_blocks(self, blocks: Blocks, budget: int | None) -> tuple[Positions | slice, bool]:
        """Return the next blocks and whether this call reached the last block.

        budget: bytes to read, at least one block; None for all blocks. The first result is `ALL` if all blocks are
        chosen.
        """
        if budget is None or blocks.total <= budget:
            self._next = 0
            return ALL, True
        n = len(blocks)
        start = self._next if self._next < n else 0
        order = np.arange(start, start + min(n, _CANDIDATES_MAX)) % max(n, 1)
        ends = np.cumsum(blocks.nbytes[order])
        order = order[: max(int(np.searchsorted(ends, budget, side="right")), 1)]
        stop = start + len(order)
        self._next = stop % max(n, 1)
        return order, stop >= n


NO_BLOCKS = Blocks.of([], [], [], BUDGET_NBYTES)


def checksums(tensor: torch.Tensor, block: int) -> npt.NDArray[np.uint32]:
    """Compute the unseeded CRC-32C of every block of a tensor's bytes from memory, without the GIL."""
    nbytes = tensor.numel() * tensor.element_size()
    out = np.zeros(-(-nbytes // block), np.uint32)
    if nbytes:
        source = ffi.cast("void *", tensor.data_ptr())
        lib.lck_crc32c_blocks(source, nbytes, block, ffi.cast("uint32_t *", out.ctypes.data))
    return out
