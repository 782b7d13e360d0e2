"""Verified bytes of a version into one live tensor, in place."""

from __future__ import annotations

import torch

from lightck import memory
from lightck.capture.inventory import is_plain
from lightck.contents import Source, load_tensor
from lightck.pool.layout import Entry


def fill(source: Source, name: str, tensor: torch.Tensor) -> None:
    """Verified bytes of one entry into a live tensor: straight into its memory where that has the saved layout."""
    entry = source.entries[name]
    if not tensor.numel():
        return
    if is_plain(tensor) and _same_layout(entry, tensor):
        source.read_into(name, tensor.data_ptr())
    else:
        memory.write(tensor, load_tensor(source, name))


def _same_layout(entry: Entry, tensor: torch.Tensor) -> bool:
    return tuple(tensor.stride()) == entry.stride or (tensor.is_contiguous() and _is_contiguous(entry))


def _is_contiguous(entry: Entry) -> bool:
    expected = 1
    for size, step in zip(reversed(entry.shape), reversed(entry.stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= max(size, 1)
    return True
