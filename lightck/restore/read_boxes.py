"""Read boxes of stored tensors into memory, verified block by block.

A ``BoxRead`` says: this box of that stored tensor goes to that box of an array in memory. A checkpoint has a checksum
for each block, so whole blocks are read:

- Where source and destination are one run of bytes each (rows of a tensor), the whole blocks of the run are read
  straight to the destination, on the native reader's threads. At most two blocks, at the ends of the run, go through
  a buffer.
- Otherwise (columns) the blocks of the source tensor are read into buffers, each block once for all boxes of that
  tensor, and the elements are copied from there.

Invariant: no byte that is not verified is copied to a destination. All buffers together have at most
``BUFFERS_NBYTES`` bytes, and one block more for each thread.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from lightck.pool.format.boxes import Box, Ints, flat_boxes, intersection
from lightck.pool.format.layout import ITEM_NBYTES, Entry
from lightck.pool.storage.system import read_threads
from lightck.restore.usable import RankCheckpoint

BUFFERS_NBYTES = 32 << 20
_BATCH_NBYTES = 4 << 20
"""Bytes that one thread reads into its buffer at a time."""
_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
    16: np.dtype("c16"),
}
"""Bytes of an element -> dtype with which elements are copied, so that no bit changes."""
_Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Destination:
    """A tensor in memory, without gaps. It must stay alive while it is read into."""

    address: int
    shape: Ints
    stride: Ints
    """In elements."""


class FlatPiece(NamedTuple):
    """A contiguous range of elements of a stored tensor that is held flat (in one dimension). It is read as a tensor of
    its own, with this shape and in C order."""

    first: int
    """Index of its first element in the stored tensor."""
    shape: Ints


class BoxRead(NamedTuple):
    """One box to read."""

    name: str
    """Name of the stored tensor's entry."""
    source: Box
    """The box of the stored tensor that is read; a box of the flat piece, if there is one."""
    destination: Box
    """The box of the tensor in memory that is filled; it has the same size as ``source``."""
    into: Destination
    flat_piece: FlatPiece | None = None


class _StoredTensor(NamedTuple):
    """A stored tensor, or a flat piece of it."""

    name: str
    shape: Ints
    stride: Ints
    itemsize: int
    """Bytes of an element."""
    nbytes: int
    """Bytes of the whole stored tensor."""
    first: int
    """Index of the piece's first element in the stored tensor; 0 if this is the whole tensor."""

    @classmethod
    def of(cls, entry: Entry, flat_piece: FlatPiece | None) -> _StoredTensor:
        itemsize = ITEM_NBYTES[entry.dtype]
        if flat_piece is None:
            return cls(entry.name, entry.shape, entry.stride, itemsize, entry.nbytes, 0)
        stride = tuple(math.prod(flat_piece.shape[dim + 1 :]) for dim in range(len(flat_piece.shape)))
        return cls(entry.name, flat_piece.shape, stride, itemsize, entry.nbytes, flat_piece.first)


def read_boxes(stored: RankCheckpoint, reads: Sequence[BoxRead]) -> None:
    """Read boxes of the tensors of one checkpoint. Boxes in memory must not overlap. Raises ``DamagedError`` at a bad
    block, and ``PoolIOError``; other boxes may have been written before the error."""
    plan = _plan_of(stored, reads)
    stored.read_blocks(plan.straight)
    batches = list(plan.batches())
    threads = min(len(batches), read_threads(), BUFFERS_NBYTES // _BATCH_NBYTES)
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(plan.copy_batch, batches))
    else:
        for batch in batches:
            plan.copy_batch(batch)


def blocks_of(stored: RankCheckpoint, reads: Sequence[BoxRead]) -> list[tuple[str, int, int]]:
    """Return the blocks that ``read_boxes`` reads: name, number of the first block, number of bytes."""
    plan = _plan_of(stored, reads)
    buffered = [(one.tensor.name, one.first_block, one.nbytes) for one in plan.buffered]
    return [*(place[:3] for place in plan.straight), *buffered]


def _plan_of(stored: RankCheckpoint, reads: Sequence[BoxRead]) -> _Plan:
    plan = _Plan(stored)
    of_tensor: dict[tuple[str, FlatPiece | None], list[BoxRead]] = {}
    for read in reads:
        if math.prod(read.source.size):
            of_tensor.setdefault((read.name, read.flat_piece), []).append(read)
    for (name, flat_piece), boxes in of_tensor.items():
        plan.add(_StoredTensor.of(stored.entries[name], flat_piece), boxes)
    return plan


@dataclass(slots=True)
class _Buffered:
    """A run of whole blocks of a stored tensor that is read into a buffer, and what is copied from there."""

    tensor: _StoredTensor
    first_block: int
    nbytes: int
    reads: list[BoxRead]
    start: int
    """The elements ``start`` to ``stop`` (excluded), in the order of the bytes, are copied; the others in these blocks
    are not."""
    stop: int


@dataclass(slots=True)
class _Plan:
    """What is read straight, and what is read through buffers."""

    stored: RankCheckpoint
    straight: list[tuple[str, int, int, int]] = field(default_factory=list)
    """Arguments of ``StoredCheckpoint.read_blocks``."""
    buffered: list[_Buffered] = field(default_factory=list)

    def add(self, tensor: _StoredTensor, reads: Sequence[BoxRead]) -> None:
        """Add the boxes of one stored tensor."""
        scattered: list[BoxRead] = []
        for read in reads:
            run = _as_run(tensor, read)
            if run is None:
                scattered.append(read)
            else:
                self._add_run(tensor, read, *run)
        if scattered:
            self._add_scattered(tensor, scattered)

    def _add_run(self, tensor: _StoredTensor, read: BoxRead, start: int, n: int, address: int) -> None:
        """Add a box that is a run of ``n`` elements, from element ``start`` of the tensor on. ``address``: where it
        begins in memory."""
        itemsize, block = tensor.itemsize, self.stored.block_nbytes
        low, high = (tensor.first + start) * itemsize, (tensor.first + start + n) * itemsize
        first = -(-low // block)  # number of the first whole block
        begin, end = first * block, tensor.nbytes if high == tensor.nbytes else high // block * block
        if end <= begin:  # no whole block
            self._add_buffered(tensor, [read], start, start + n)
            return
        self.straight.append((tensor.name, first, end - begin, address + begin - low))
        if low < begin:
            self._add_buffered(tensor, [read], start, begin // itemsize - tensor.first)
        if end < high:
            self._add_buffered(tensor, [read], end // itemsize - tensor.first, start + n)

    def _add_scattered(self, tensor: _StoredTensor, reads: list[BoxRead]) -> None:
        """Add boxes that are no runs. Blocks that no box needs are not read."""
        itemsize, block = tensor.itemsize, self.stored.block_nbytes
        # The blocks are read in runs of a quarter of a batch, or of one block if that is larger.
        n_elements = max(block, _BATCH_NBYTES // 4 // block * block) // itemsize
        spans = [_span(tensor, read.source) for read in reads]
        low, high = min(a for a, _ in spans), max(b for _, b in spans)
        first = (tensor.first + low) // n_elements * n_elements - tensor.first
        for start in range(first, high, n_elements):
            inside = [read for read, (a, b) in zip(reads, spans, strict=True) if a < start + n_elements and start < b]
            if inside:
                self._add_buffered(tensor, inside, max(start, low), min(start + n_elements, high))

    def _add_buffered(self, tensor: _StoredTensor, reads: list[BoxRead], start: int, stop: int) -> None:
        itemsize, block = tensor.itemsize, self.stored.block_nbytes
        first = (tensor.first + start) * itemsize // block
        end = min(-(-(tensor.first + stop) * itemsize // block) * block, tensor.nbytes)
        self.buffered.append(_Buffered(tensor, first, end - first * block, reads, start, stop))

    def batches(self) -> Iterator[list[_Buffered]]:
        """Yield what one thread reads at a time."""
        batch: list[_Buffered] = []
        nbytes = 0
        for one in self.buffered:
            if batch and nbytes + one.nbytes > _BATCH_NBYTES:
                yield batch
                batch, nbytes = [], 0
            batch.append(one)
            nbytes += one.nbytes
        if batch:
            yield batch

    def copy_batch(self, batch: Sequence[_Buffered]) -> None:
        """Read the blocks into a buffer, and copy from there."""
        starts = [0]
        for one in batch:  # each begins at a multiple of 64, so that elements of any size are aligned
            starts.append(starts[-1] + -(-one.nbytes // 64) * 64)
        buffer = np.empty(starts[-1], np.uint8)
        base = buffer.ctypes.data
        self.stored.read_blocks(
            [
                (one.tensor.name, one.first_block, one.nbytes, base + start)
                for one, start in zip(batch, starts, strict=False)
            ]
        )
        for one, start in zip(batch, starts, strict=False):
            _copy(one, buffer[start : start + one.nbytes], self.stored.block_nbytes)


def _copy(one: _Buffered, bytes_: npt.NDArray[np.uint8], block: int) -> None:
    """Copy what is needed of the verified bytes of some blocks."""
    itemsize = one.tensor.itemsize
    elements = bytes_.view(_DTYPES[itemsize])
    order = _order(one.tensor.shape, one.tensor.stride)
    shape = _ordered(one.tensor.shape, order)
    at = one.first_block * block // itemsize - one.tensor.first  # the element with which the buffer begins
    for box in flat_boxes(shape, one.start, one.stop):
        begin = _flat(shape, box.start)
        run = elements[begin - at : begin - at + math.prod(box.size)].reshape(box.size)
        for read in one.reads:
            source = Box(_ordered(read.source.start, order), _ordered(read.source.size, order))
            common = intersection(box, source)
            if common is None:
                continue
            destination = Box(
                tuple(
                    a - b + c
                    for a, b, c in zip(common.start, source.start, _ordered(read.destination.start, order), strict=True)
                ),
                common.size,
            )
            inside = Box(tuple(a - b for a, b in zip(common.start, box.start, strict=True)), common.size)
            _array_of(read.into, itemsize).transpose(order)[_slices(destination)] = run[_slices(inside)]


def _as_run(tensor: _StoredTensor, read: BoxRead) -> tuple[int, int, int] | None:
    """Return first element, number of elements and address of a box whose bytes are one run in the stored tensor and
    one run, in the same order, in memory. None for any other box."""
    into, size = read.into, read.source.size
    order = _order(tensor.shape, tensor.stride)
    if not _is_run(tensor.shape, size, order):
        return None
    if _order(into.shape, into.stride) != order or not _is_run(into.shape, size, order):
        return None
    start = _flat(_ordered(tensor.shape, order), _ordered(read.source.start, order))
    to = _flat(_ordered(into.shape, order), _ordered(read.destination.start, order))
    return start, math.prod(size), into.address + to * tensor.itemsize


@lru_cache(1 << 12)
def _is_run(shape: Ints, size: Ints, order: Ints) -> bool:
    """Whether a box of this size is one run of elements in a tensor whose dimensions, from the slowest to the fastest,
    are ``order``."""
    is_whole = True  # whether the box has all elements of each faster dimension
    for dim in reversed(order):
        if not is_whole and size[dim] != 1:
            return False
        is_whole = is_whole and size[dim] == shape[dim]
    return True


@lru_cache(1 << 12)
def _order(shape: Ints, stride: Ints) -> Ints:
    """Return the dimensions of a tensor without gaps, from the slowest to the fastest. Dimensions of one element, whose
    strides say nothing, come first."""
    return tuple(sorted(range(len(shape)), key=lambda dim: (shape[dim] != 1, -stride[dim], dim)))


def _ordered(numbers: Sequence[int], order: Sequence[int]) -> Ints:
    return tuple(numbers[dim] for dim in order)


def _flat(shape: Sequence[int], start: Sequence[int]) -> int:
    """Return the number of an element in C order."""
    number = 0
    for size, at in zip(shape, start, strict=True):
        number = number * size + at
    return number


def _span(tensor: _StoredTensor, box: Box) -> tuple[int, int]:
    """Return the range of elements, in the order of the bytes, from the first to the last element of a box."""
    order = _order(tensor.shape, tensor.stride)
    shape = _ordered(tensor.shape, order)
    first = _ordered(box.start, order)
    last = tuple(at + n - 1 for at, n in zip(first, _ordered(box.size, order), strict=True))
    return _flat(shape, first), _flat(shape, last) + 1


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + n) for at, n in zip(*box, strict=True))


def _array_of(into: Destination, itemsize: int) -> _Array:
    """Return a tensor in memory as an array."""
    n = math.prod(into.shape)
    memory: Any = (ctypes.c_ubyte * (n * itemsize)).from_address(into.address)
    flat = np.frombuffer(memory, _DTYPES[itemsize], n)
    return np.lib.stride_tricks.as_strided(flat, into.shape, tuple(itemsize * stride for stride in into.stride))
