"""Verified bytes of a version into live tensors, in place."""

from __future__ import annotations

import torch

from lightck import memory
from lightck.capture.inventory import is_plain
from lightck.contents import Source, load_tensor
from lightck.memory import Named
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
        apart, shared = _sorted_out(self.source, added)
        self.source.read_many([(name, tensor.data_ptr()) for name, tensor in apart])
        for name, tensor in shared:
            _fill(self.source, name, tensor)


def _sorted_out(source: Source, added: list[Named]) -> tuple[list[Named], list[Named]]:
    """Those whose own memory, shared with no other here, has the saved layout; and the rest."""
    lonely = memory.lonely(added)
    direct = [is_plain(tensor) and _same_layout(source.entries[name], tensor) for name, tensor in added]
    together = [is_lonely and is_direct for is_lonely, is_direct in zip(lonely, direct, strict=True)]
    apart = [one for one, is_in in zip(added, together, strict=True) if is_in]
    return apart, [one for one, is_in in zip(added, together, strict=True) if not is_in]


def _fill(source: Source, name: str, tensor: torch.Tensor) -> None:
    """Straight into the tensor's memory where that has the saved layout."""
    if is_plain(tensor) and _same_layout(source.entries[name], tensor):
        source.read_into(name, tensor.data_ptr())
    else:
        memory.write(tensor, load_tensor(source, name))


def _same_layout(entry: Entry, tensor: torch.Tensor) -> bool:
    if tensor.stride() == entry.stride:
        return True
    return tensor.is_contiguous() and is_contiguous(entry.shape, entry.stride)
