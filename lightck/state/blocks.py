"""Checksums of tensors in memory, block by block, which reveal writes that move no version counter.

One native call reads many blocks. Each checkpoint has a budget of bytes to read. If all blocks together fit in the
budget, ``RoundRobin`` chooses all. Otherwise its choice begins where its choice for the previous checkpoint ended.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lightck._native import check, ffi, lib

BUDGET_NBYTES = 1 << 20
"""How many bytes are read for one checkpoint to find unannounced writes, in addition to what its copies read. No block
is larger than this."""
CHECK_VARIABLE = "LIGHTCK_CHECK"
"""Environment variable. If it is "1", all bytes are checked for unannounced writes at every checkpoint."""
FULLY_COMPARED_FIRST = 3
"""In the first ``FULLY_COMPARED_FIRST`` checkpoints after attach all bytes are compared, without a budget. That reveals
every write that a loop makes at each step. For the sources of background copies, only checkpoints that
have such sources are counted."""

_BLOCKS_MAX = 4096
"""The largest number of blocks that one checkpoint reads if not all blocks together fit in its budget (there may be
very many tiny tensors)."""

ALL = slice(None)
"""The choice of all blocks, as an index of the arrays in ``Blocks``."""
Positions = npt.NDArray[np.int64]
"""Indices of blocks, tensors or checksums."""
Checksums = npt.NDArray[np.uint32]


def compares_all() -> bool:
    """Whether ``CHECK_VARIABLE`` asks for all bytes."""
    return os.environ.get(CHECK_VARIABLE) == "1"


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of tensors, as parallel arrays with one item per block.

    addresses, nbytes: the block's address in memory, and its length. owners: index of the block's tensor in the
    sequences given to ``of``. checksum_positions: index of the block's checksum in the array of all checksums.
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
        """Return the blocks of tensors. Every block has ``block`` bytes, except the last one of a tensor, which may be
        shorter. ``addresses``, ``nbytes``: of each tensor; every tensor must have at least one byte. ``starts``: the
        checksum position of each tensor's first block."""
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
        """Return the blocks of this object, then those of ``other``. The owners of ``other`` are numbered after the
        owners of this object."""
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
        """Read the chosen blocks, without the GIL, and return the unseeded CRC-32C of each."""
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
        """Index of the block with which the next choice begins."""

    def next_blocks(self, blocks: Blocks, budget: int | None) -> tuple[Positions | slice, bool]:
        """Return the indices of the blocks to read, and whether the last one of ``blocks`` is among them.

        budget: the largest number of bytes that the chosen blocks have together (None: no limit). At least one block is
        chosen even if it has more bytes. If all blocks are chosen, the first result is `ALL`.
        """
        if budget is None or blocks.total <= budget:
            self._next = 0
            return ALL, True
        n = len(blocks)
        start = self._next if self._next < n else 0
        order = np.arange(start, start + min(n, _BLOCKS_MAX)) % max(n, 1)
        ends = np.cumsum(blocks.nbytes[order])
        order = order[: max(int(np.searchsorted(ends, budget, side="right")), 1)]
        stop = start + len(order)
        self._next = stop % max(n, 1)
        return order, stop >= n


NO_BLOCKS = Blocks.of([], [], [], BUDGET_NBYTES)


def checksums(tensor: torch.Tensor, block: int) -> npt.NDArray[np.uint32]:
    """Read a dense tensor in host memory, without the GIL, and return the unseeded CRC-32C of every ``block`` bytes."""
    nbytes = tensor.numel() * tensor.element_size()
    out = np.zeros(-(-nbytes // block), np.uint32)
    if nbytes:
        source = ffi.cast("void *", tensor.data_ptr())
        lib.lck_crc32c_blocks(source, nbytes, block, ffi.cast("uint32_t *", out.ctypes.data))
    return out
