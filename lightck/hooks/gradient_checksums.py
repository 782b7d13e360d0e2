"""Checksums of gradients before the update, to compare with the checksums of their copies.

A version counter alone proves nothing: ``GradScaler.unscale_``, ``.grad.data`` and numpy do not move it. So the first
gradients of each parameter are compared whole. Later the gradients take turns: at each ``step`` of an optimizer at most
16 MiB and 256 tensors. A tensor that must be copied before it can be read (on a device, or not in row-major order) is
the last one of the turn. (If a step has no more gradients than that, all of them are compared.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lightck.hooks.captured_update import HeldGradient
from lightck.state.blocks import Blocks, checksums

WHOLE_COPIES = 3
"""The gradients of a parameter are compared whole until this many copies were right. The copy of the parameter's first
gradient (``GradientClass.UNOBSERVED``) does not count."""
TURN_NBYTES, TURN_TENSORS = 16 << 20, 256
"""How many bytes, and how many tensors, are compared in turn at each ``step`` of an optimizer at most."""
Checksums = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class ExpectedBlocks:
    """Checksums of successive blocks of a tensor of a gradient. tensor: its number among the tensors of the gradient.
    first_block: number of the first of these blocks."""

    tensor: int
    first_block: int
    checksums: Checksums

    def matches(self, of_copy: Sequence[Checksums]) -> bool:
        """Whether a copy has these checksums. ``of_copy``: for each tensor of the gradient, the checksums of all
        blocks."""
        found = of_copy[self.tensor][self.first_block : self.first_block + len(self.checksums)]
        return bool(np.array_equal(found, self.checksums))

    def are_still_in(self, tensor: torch.Tensor, block: int) -> bool:
        """Whether the tensor itself still has these checksums. ``block``: bytes that one checksum covers."""
        plain = plain_tensor(tensor)
        first, size = self.first_block * block, plain.element_size()
        part = plain.view(-1)[first // size : (first + len(self.checksums) * block) // size]
        return bool(np.array_equal(checksums(part, block), self.checksums))

    def equals(self, other: ExpectedBlocks) -> bool:
        same_place = (self.tensor, self.first_block) == (other.tensor, other.first_block)
        return same_place and bool(np.array_equal(self.checksums, other.checksums))


class GradientChecksums:
    """Chooses which blocks are compared, and reads them. ``block``: bytes that one checksum covers, a multiple of the
    size of every element."""

    def __init__(self, block: int) -> None:
        self._block = block
        self._next: dict[int, tuple[int, int]] = {}
        """Number of an optimizer -> the tensor of its gradients, and the block of it, that comes next in turn."""
        self.is_partial = False
        """Whether a block of a gradient was ever left out."""

    def read(
        self, index: int, gradients: Sequence[HeldGradient], are_whole: Sequence[bool]
    ) -> list[list[ExpectedBlocks]]:
        """Read the chosen blocks of the gradients that optimizer ``index`` consumes, and return for each gradient what
        its copy must have. ``are_whole``: whether to compare all blocks of a gradient."""
        tensors = [gradient.tensors for gradient in gradients]
        ranges = [one for i, is_whole in enumerate(are_whole) if is_whole for one in _whole_ranges(i, tensors[i])]
        return self._read_ranges(ranges + self._ranges_in_turn(index, tensors, are_whole), len(tensors))

    def read_whole(self, gradients: Sequence[tuple[torch.Tensor, ...]]) -> list[list[ExpectedBlocks]]:
        """Read all blocks of gradients, each given as its tensors."""
        ranges = [one for i, tensors in enumerate(gradients) for one in _whole_ranges(i, tensors)]
        return self._read_ranges(ranges, len(gradients))

    def _ranges_in_turn(
        self, index: int, gradients: Sequence[tuple[torch.Tensor, ...]], are_whole: Sequence[bool]
    ) -> list[_ByteRange]:
        """Choose the blocks that come next in turn."""
        left = [
            (i, k, tensor)
            for i, (tensors, is_whole) in enumerate(zip(gradients, are_whole, strict=True))
            if not is_whole
            for k, tensor in enumerate(tensors)
        ]
        found, budget = list[_ByteRange](), TURN_NBYTES
        start, first = self._next.get(index, (0, 0))
        for at in range(start, start + min(len(left), TURN_TENSORS)):
            i, k, tensor = left[at % len(left)]
            plain = plain_tensor(tensor)
            n_blocks = -(-plain.nbytes // self._block)
            first = first if first < n_blocks else 0
            n = min(n_blocks - first, max(budget // self._block, 1))
            found.append(_ByteRange(i, k, plain, first, min(n * self._block, plain.nbytes - first * self._block)))
            is_at_end = first + n >= n_blocks
            start, first = ((at + 1) % len(left), 0) if is_at_end else (at % len(left), first + n)
            budget -= found[-1].nbytes if plain is tensor else TURN_NBYTES
            if budget <= 0 or not is_at_end:
                break
        self._next[index] = start, first
        self.is_partial |= sum(one.nbytes for one in found) < sum(tensor.nbytes for _, _, tensor in left)
        return found

    def _read_ranges(self, ranges: Sequence[_ByteRange], n_gradients: int) -> list[list[ExpectedBlocks]]:
        expected: list[list[ExpectedBlocks]] = [[] for _ in range(n_gradients)]
        ranges = [one for one in ranges if one.nbytes]
        if len(ranges) == 1:  # frequent with large tensors; this branch takes less time than the general one
            one = ranges[0]
            begin, size = one.first_block * self._block, one.plain.element_size()
            part = one.plain.view(-1)[begin // size : (begin + one.nbytes) // size]
            expected[one.gradient].append(ExpectedBlocks(one.tensor, one.first_block, checksums(part, self._block)))
        elif ranges:
            addresses = [one.plain.data_ptr() + one.first_block * self._block for one in ranges]
            read = Blocks.of(addresses, [one.nbytes for one in ranges], [0] * len(ranges), self._block).checksums()
            ends = np.cumsum([-(-one.nbytes // self._block) for one in ranges])
            for one, of_one in zip(ranges, np.split(read, ends[:-1]), strict=True):
                expected[one.gradient].append(ExpectedBlocks(one.tensor, one.first_block, of_one))
        return expected


@dataclass(slots=True, eq=False)
class _ByteRange:
    """Bytes to read: of tensor ``tensor`` of gradient ``gradient``, from ``first_block`` on."""

    gradient: int
    tensor: int
    plain: torch.Tensor
    first_block: int
    nbytes: int


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its elements in row-major order, in host memory, as checksums and copies have them. The
    tensor itself if it is so already."""
    if tensor.is_contiguous() and tensor.device.type == "cpu" and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _whole_ranges(gradient: int, tensors: Sequence[torch.Tensor]) -> list[_ByteRange]:
    plain = enumerate(map(plain_tensor, tensors))
    return [_ByteRange(gradient, k, tensor, 0, tensor.nbytes) for k, tensor in plain]
