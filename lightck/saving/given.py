"""Tensors and bytes that a caller hands over: their entries in a pool, and their bytes in host memory.

A process alone stores each tensor whole. The pool of a rank stores the boxes that the rank has: one box as a tensor of
its size, several ones flat, one after the other. Each tensor of a rank has pieces, also if they are the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from lightck.errors import StateValueError
from lightck.pool.format.assembly import coverage
from lightck.pool.format.boxes import Box, Ints, whole_box
from lightck.pool.format.layout import Entry, contiguous_stride
from lightck.pool.format.pieces import Piece
from lightck.pool.format.structures import DamagedError
from lightck.state.storable import dtype_name, refuse_name, refuse_unstorable

__all__ = ["Box", "GivenTensor", "batches_of", "bytes_as_tensor"]


@dataclass(frozen=True, slots=True)
class GivenTensor:
    """A tensor, or the boxes of it that this process hands over."""

    name: str
    """The tensor's name in the pool."""
    dtype: torch.dtype
    shape: Ints
    """The shape of the logical tensor."""
    boxes: tuple[Box, ...]
    """Boxes without elements are left out; () for a tensor of which this process has nothing."""
    read: Callable[[Box], torch.Tensor]
    """Returns the elements of a box, on any device. Called once for each box, and as late as possible, because the
    tensor that it returns may take memory."""

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> GivenTensor:
        """Return a whole tensor that is in memory already."""
        box = Box(*whole_box(tuple(tensor.shape)))
        return cls(name, tensor.dtype, tuple(tensor.shape), () if 0 in box.size else (box,), lambda _: tensor)

    def whole_entry(self) -> Entry:
        """Return the entry in the pool of a process alone. Raises ``StateValueError`` if the boxes are not the whole
        tensor, and for a tensor that a pool cannot hold."""
        try:
            held = coverage(self.shape, [[Piece(*box, box.start) for box in self.boxes]])
        except (ValueError, DamagedError) as err:
            raise StateValueError(f"The tensor {self.name!r} cannot be stored: {err}.") from err
        if held.uncovered is not None or held.repeated is not None:
            box, fact = held.uncovered or held.repeated, "missing" if held.uncovered is not None else "given twice"
            assert box is not None
            raise StateValueError(
                f"The tensor {self.name!r} cannot be stored: of its shape {list(self.shape)}, the part of size "
                f"{list(box.size)} at {list(box.start)} is {fact}. A process that saves alone (no_dist=True) must hold "
                "the whole of each tensor. Save on all ranks that have parts of it, without no_dist=True."
            )
        return self._entry(self.shape, None)

    def part_entry(self) -> Entry:
        """Return the entry in the pool of a rank. Raises ``StateValueError`` for a tensor that a pool cannot hold."""
        if len(self.boxes) == 1:
            (box,) = self.boxes
            return self._entry(box.size, (Piece(box.start, box.size, (0,) * len(box.size)),))
        if not self.boxes:  # nothing of the tensor: an entry without bytes
            return self._entry(self.shape if 0 in self.shape else (0, *self.shape[1:]), ())
        pieces, at = list[Piece](), 0
        for box in self.boxes:
            pieces.append(Piece(box.start, box.size, (at,)))
            at += math.prod(box.size)
        return self._entry((at,), tuple(pieces))

    def _entry(self, shape: Ints, pieces: tuple[Piece, ...] | None) -> Entry:
        refuse_name(self.name)
        try:
            dtype = dtype_name(self.dtype)
        except ValueError as err:
            raise StateValueError(f"The tensor {self.name!r} cannot be stored: {err}.") from err
        stride = contiguous_stride(shape)
        nbytes = math.prod(shape) * self.dtype.itemsize
        logical_shape = None if pieces is None else self.shape
        return Entry(self.name, "param", dtype, shape, stride, nbytes, logical_shape=logical_shape, pieces=pieces)

    def values(self, entry: Entry) -> torch.Tensor:
        """Return the tensor that ``entry`` describes, contiguous in host memory. The caller's own memory is used where
        possible. Raises ``StateValueError`` if the tensor's shape or dtype is not the announced one, or if it
        cannot be stored."""
        if len(self.boxes) == 1:
            return self._in_host_memory(self.boxes[0])
        result = torch.empty(entry.shape, dtype=self.dtype)
        at = 0
        for box in self.boxes:
            part, n = self._in_host_memory(box), math.prod(box.size)
            if entry.pieces is None:
                _view(result, box).copy_(part)
            else:
                result[at : at + n] = part.flatten()
            at += n
        return result

    def _in_host_memory(self, box: Box) -> torch.Tensor:
        tensor = self.read(box)
        refuse_unstorable(self.name, tensor)
        if tuple(tensor.shape) != box.size or tensor.dtype != self.dtype:
            raise StateValueError(
                f"The tensor {self.name!r} cannot be stored: its part at {list(box.start)} was announced with the "
                f"shape {list(box.size)} and {self.dtype}, and has {list(tensor.shape)} and {tensor.dtype}. It was "
                "changed while it was saved, or its planner is at fault. Nothing was committed."
            )
        return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _view(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (at, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, at, size)
    return tensor


def bytes_as_tensor(data: bytes | bytearray | memoryview) -> torch.Tensor:
    """Return bytes as a tensor of one dimension."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)


def batches_of(
    tensors: Sequence[GivenTensor], entries: Sequence[Entry], names: Iterator[list[str]]
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of one batch after the other. ``entries``: of each of ``tensors``. ``names``: of the tensors of
    each batch."""
    given = {entry.name: (one, entry) for one, entry in zip(tensors, entries, strict=True)}
    for batch in names:
        yield {name: given[name][0].values(given[name][1]) for name in batch}
