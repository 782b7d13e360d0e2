"""Values into live tensors, also into ones that share memory: with other tensors, or with themselves (expanded).

``TensorWrites`` reads the verified bytes of a version into live tensors, in place. Invariant: what is written is what
is read back afterwards, from every tensor. Tensors that share memory and were saved with values that contradict each
other are found before the first live byte changes (``contradiction``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter

import numpy as np
import torch

from lightck.pool.format.layout import Entry, is_contiguous, is_dense
from lightck.restore.contents import Source, load_tensor
from lightck.state.device_transfers import bytes_in_order

Named = tuple[str, torch.Tensor]
_ALIGN = 64
"""torch's own, in bytes: a view begins at a multiple of its element's size."""


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """What is made in this block can be updated later, also where the block lies in ``torch.inference_mode()``."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bytes, NaNs and signs of zeros included."""
    return torch.equal(bytes_in_order(one), bytes_in_order(other))


def write(target: torch.Tensor, values: torch.Tensor) -> None:
    """Fill a tensor in place. One whose elements share memory, and cannot hold these values, gets memory of its own."""
    if not _overlaps_itself(target):
        target.copy_(values)
        return
    _write_each_place_once(target, values)
    if not same_bits(target, values.to(target.device)):
        target.data = values.to(target.device)


def write_constant(target: torch.Tensor, value: float) -> None:
    """Every element, also where elements share memory."""
    target[_each_place_once(target)].fill_(value)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may lie in one place. Where that is hard to tell the answer is yes."""
    reach = 0
    for step, size in sorted((st, sz) for st, sz in zip(tensor.stride(), tensor.shape, strict=True) if sz != 1):
        if step <= reach:
            return tensor.numel() > 0
        reach += (size - 1) * step
    return False


def _each_place_once(target: torch.Tensor) -> tuple[slice, ...]:
    """torch refuses to write to expanded dimensions: their first element stands for all."""
    return tuple(slice(0, 1) if step == 0 else slice(None) for step in target.stride())


def _write_each_place_once(target: torch.Tensor, values: torch.Tensor) -> None:
    places = _each_place_once(target)
    target[places].copy_(values[places])


# -- tensors that share memory with each other -----------------------------------------------------------------------


def contradiction(tensors: Sequence[Named], load: Callable[[str], torch.Tensor]) -> tuple[str, str] | None:
    """Names of two tensors that share memory here and were saved with values that this memory cannot hold both.

    ``load`` gives the saved values of a name. Nothing live is changed: the writes are tried out in scratch memory.
    """
    for group in _sharing(tensors):
        scratch = _Scratch(group)
        loaded = {name: load(name) for name, _ in group}
        for name, tensor in group:
            scratch.write(tensor, loaded[name])
        for i, (name, tensor) in enumerate(group):
            if not scratch.holds(tensor, loaded[name]):
                return name, group[i + 1 if i + 1 < len(group) else i - 1][0]
    return None


def _sharing(tensors: Sequence[Named]) -> list[list[Named]]:
    """Groups of tensors whose ranges of memory overlap; an address of a CUDA device is no other's, nor the CPU's."""
    held = [one for one in tensors if (one[1].is_cpu or one[1].is_cuda) and one[1].nbytes]
    lows = np.array([tensor.data_ptr() for _, tensor in held], "u8")
    highs = lows + np.array([t.nbytes if t.is_contiguous() else _reach(t) for _, t in held], "u8")
    order = lows.argsort()
    begins_one = lows[order][1:] >= np.maximum.accumulate(highs[order])[:-1]
    if begins_one.all():
        return []
    groups = np.split(order, np.flatnonzero(begins_one) + 1)
    return [[held[k] for k in sorted(group.tolist())] for group in groups if len(group) > 1]


def sharing_memory(tensors: Sequence[Named]) -> set[int]:
    """Ids of those that have others of these in their memory."""
    return {id(tensor) for group in _sharing(tensors) for _, tensor in group}


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from its first element to behind its last; of a tensor that has any."""
    if tensor.is_contiguous() or is_dense(tensor.shape, tensor.stride()):
        return tensor.nbytes
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    low = tensor.data_ptr()
    return low, low + _reach(tensor)


class _Scratch:
    """Memory of the same extent as the one that a group of tensors shares."""

    def __init__(self, group: Sequence[Named]) -> None:
        ranges = [_range(tensor) for _, tensor in group]
        self._low = min(low for low, _ in ranges) // _ALIGN * _ALIGN
        self._bytes = torch.empty(max(high for _, high in ranges) - self._low, dtype=torch.uint8, device="cpu")

    def _view(self, tensor: torch.Tensor) -> torch.Tensor:
        low, high = _range(tensor)
        typed = self._bytes[low - self._low : high - self._low].view(tensor.dtype)
        return typed.as_strided(tensor.shape, tensor.stride(), typed.storage_offset())

    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        _write_each_place_once(self._view(tensor), _physical(tensor, values))

    def holds(self, tensor: torch.Tensor, values: torch.Tensor) -> bool:
        return same_bits(self._view(tensor), _physical(tensor, values))


def _physical(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """What lies in memory where ``tensor`` reads as ``values``: conjugated and negative views keep the opposite."""
    if tensor.is_conj():
        values = values.conj().resolve_conj()
    return -values if tensor.is_neg() else values


# -- verified bytes ----------------------------------------------------------------------------------------------------


class TensorWrites:
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
        # A write by address moves no version counter; autograd, and a session that saves these, have to see it.
        torch.autograd.graph.increment_version([tensor for _, tensor in added if not tensor.is_inference()])

    def _sorted(self, added: list[Named]) -> tuple[list[Named], list[Named]]:
        """Those that can be read straight into their memory at the same time, and the others."""
        shared, entries = sharing_memory(added), self.source.entries
        if not shared and _lie_as([entries[name] for name, _ in added], [tensor for _, tensor in added]):
            return added, []  # as nearly always
        apart: list[Named] = []
        others: list[Named] = []
        for name, tensor in added:
            fits = id(tensor) not in shared and _lies_as(entries[name], tensor)
            (apart if fits else others).append((name, tensor))
        return apart, others


def _fill(source: Source, name: str, tensor: torch.Tensor) -> None:
    """Straight into the tensor's memory where that has the saved layout."""
    if _lies_as(source.entries[name], tensor):
        source.read_into(name, tensor.data_ptr())
    else:
        write(tensor, load_tensor(source, name))


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
