"""Tensors whose memory overlaps, in whole or in part, so that a write to one of them changes the other too.

Tensors on the CPU and on all CUDA devices are compared by address alone, because no address belongs to two devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import torch

from lightck.pool.format.layout import is_dense

Named = tuple[str, torch.Tensor]
_nbytes = attrgetter("nbytes")


def groups_by_range(tensors: Sequence[Named]) -> list[list[Named]]:
    """Return the groups of two or more tensors whose memory ranges, from the first to the last byte, overlap."""
    compared = [one for one in tensors if (one[1].is_cpu or one[1].is_cuda) and one[1].nbytes]
    alone = [tensor for _, tensor in compared]
    lows = np.array(list(map(torch.Tensor.data_ptr, alone)), "u8")
    if all(map(torch.Tensor.is_contiguous, alone)):
        highs = lows + np.array(list(map(_nbytes, alone)), "u8")
    else:
        highs = lows + np.array(list(map(_reach, alone)), "u8")
    order = lows.argsort()
    begins_group = lows[order][1:] >= np.maximum.accumulate(highs[order])[:-1]
    if begins_group.all():
        return []
    groups = np.split(order, np.flatnonzero(begins_group) + 1)
    return [[compared[k] for k in sorted(group.tolist())] for group in groups if len(group) > 1]


def groups_by_bytes(tensors: Sequence[Named]) -> list[list[Named]]:
    """Return the groups of ``groups_by_range``, without the tensors none of whose bytes belongs to another tensor of
    the group (columns of one matrix lie in each other's range)."""
    groups = map(_with_common_bytes, groups_by_range(tensors))
    return [group for group in groups if group]


def _with_common_bytes(group: list[Named]) -> list[Named]:
    if all(is_dense(tensor.shape, tensor.stride()) for _, tensor in group):
        return group
    low, high = min(range_of(tensor)[0] for _, tensor in group), max(range_of(tensor)[1] for _, tensor in group)
    seen, common = (torch.zeros(high - low, dtype=torch.bool, device="cpu") for _ in range(2))
    for _, tensor in group:
        own = _bytes_of(tensor, seen, low)
        _bytes_of(tensor, common, low).logical_or_(own)
        own.fill_(True)
    return [one for one in group if bool(_bytes_of(one[1], common, low).any())]


def _bytes_of(tensor: torch.Tensor, marks: torch.Tensor, low: int) -> torch.Tensor:
    """Return a view of those of ``marks`` that stand for the bytes of ``tensor``. The first mark stands for the address
    ``low``."""
    nbytes = tensor.element_size()
    places = [(size, stride * nbytes) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    sizes, strides = [size for size, _ in places], [stride for _, stride in places]
    return marks.as_strided([*sizes, nbytes], [*strides, 1], tensor.data_ptr() - low)


def range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of the first byte of a tensor, and the address after its last byte."""
    low = tensor.data_ptr()
    return low, low + _reach(tensor)


def _reach(tensor: torch.Tensor) -> int:
    """Return the number of bytes from the start of the first element of a tensor to the end of its last element."""
    if tensor.is_contiguous() or is_dense(tensor.shape, tensor.stride()):
        return tensor.nbytes
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()
