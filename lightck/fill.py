"""Verified bytes of a version into live tensors, in place."""

from __future__ import annotations

import torch

from lightck import memory
from lightck.contents import Source, load_tensor
from lightck.pool.layout import Entry, is_contiguous


class Fills:
    """Live tensors that are to get the verified bytes of a version. ``run`` reads them together, on several threads;
    tensors whose memory overlaps are filled one after the other, in the order in which they were added."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._added: list[tuple[str, torch.Tensor]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Fill this tensor with the entry of this name."""
        if tensor.numel():
            self._added.append((name, tensor))

    def run(self) -> None:
        """Raises ``DamagedError`` at a block that does not verify: others may have been filled by then."""
        added, self._added = self._added, []
        crowded = memory.crowded(added)
        apart, others = [], []
        for name, tensor in added:
            if id(tensor) not in crowded and _lies_as(self.source.entries[name], tensor):
                apart.append((name, tensor.data_ptr()))
            else:
                others.append((name, tensor))
        self.source.read_many(apart)
        for name, tensor in others:
            _fill(self.source, name, tensor)
        _announce([tensor for _, tensor in added])


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
