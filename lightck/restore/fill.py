"""Verified bytes of a version into live tensors, in place."""

from __future__ import annotations

from operator import attrgetter

import torch

from lightck.pool.format.layout import Entry, is_contiguous
from lightck.restore import memory
from lightck.restore.contents import Source, load_tensor
from lightck.restore.memory import Named


class Fills:
    """Live tensors that are to get the verified bytes of a version. ``run`` reads them together, on several threads;
    tensors whose memory overlaps are filled one after the other, in the order in which they were added."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._added: list[Named] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Fill this tensor with the entry of this name."""
        if tensor.numel():
            self._added.append((name, tensor))

    def run(self) -> None:
        """Raises ``DamagedError`` at a block that does not verify: others may have been filled by then."""
        added, self._added = self._added, []
        apart, others = self._sorted(added)
        self.source.read_many([(name, tensor.data_ptr()) for name, tensor in apart])
        for name, tensor in others:
            _fill(self.source, name, tensor)
        _announce([tensor for _, tensor in added])

    def _sorted(self, added: list[Named]) -> tuple[list[Named], list[Named]]:
        """Those that can be read straight into their memory at the same time, and the others."""
        crowded, entries = memory.crowded(added), self.source.entries
        if not crowded and _lie_as([entries[name] for name, _ in added], [tensor for _, tensor in added]):
            return added, []  # as nearly always
        apart: list[Named] = []
        others: list[Named] = []
        for name, tensor in added:
            fits = id(tensor) not in crowded and _lies_as(entries[name], tensor)
            (apart if fits else others).append((name, tensor))
        return apart, others


def _announce(tensors: list[torch.Tensor]) -> None:
    """A write by address moves no version counter; autograd, and a session that saves these, have to see it."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def _fill(source: Source, name: str, tensor: torch.Tensor) -> None:
    """Straight into the tensor's memory where that has the saved layout."""
    if _lies_as(source.entries[name], tensor):
        source.read_into(name, tensor.data_ptr())
    else:
        memory.write(tensor, load_tensor(source, name))


def _lies_as(entry: Entry, tensor: torch.Tensor) -> bool:
    """Whether the tensor's own memory holds elements of the saved shape in the saved order, which is dense."""
    if not tensor.is_cpu or tensor.is_conj() or tensor.is_neg():
        return False
    if tensor.shape != entry.shape or tensor.nbytes != entry.nbytes:
        return False  # nothing else may have looked: what is not like its entry is never written to by address
    return tensor.stride() == entry.stride or (tensor.is_contiguous() and is_contiguous(entry.shape, entry.stride))


def _lie_as(entries: list[Entry], tensors: list[torch.Tensor]) -> bool:
    """Whether ``_lies_as`` is true of each: asked of all together, in half the time. A no may be wrong."""
    return (
        all(map(attrgetter("is_cpu"), tensors))
        and not any(map(torch.Tensor.is_conj, tensors))
        and not any(map(torch.Tensor.is_neg, tensors))
        and [tensor.shape for tensor in tensors] == [entry.shape for entry in entries]
        and [tensor.nbytes for tensor in tensors] == [entry.nbytes for entry in entries]
        and [tensor.stride() for tensor in tensors] == [entry.stride for entry in entries]
    )
