"""Write values into live tensors. Two tensors, or two elements of an expanded tensor, may share memory.

``TensorWrites`` reads the verified bytes of a checkpoint into live tensors, in place. Invariant: after the write, every
tensor has the values that were written to it. If tensors share memory and were saved with different values for the
shared memory, ``contradiction`` finds this before the first live byte changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter, eq

import torch

from lightck.pool.format.layout import Entry, is_contiguous
from lightck.restore.contents import Source, load_tensor
from lightck.state.device_transfers import bytes_in_order
from lightck.state.memory_overlap import Named, groups_by_range, range_of

_is_cpu, _shape, _stride, _nbytes = map(attrgetter, ("is_cpu", "shape", "stride", "nbytes"))
_ALIGN = 64
"""Alignment of scratch memory in bytes. Torch's allocator has the same alignment, so that a view of any dtype begins at
a multiple of its element size."""


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Tensors that are made in this block are ordinary tensors, which can be updated later, even if the caller is
    inside ``torch.inference_mode()``."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bytes, NaNs and signs of zeros included."""
    return torch.equal(bytes_in_order(one), bytes_in_order(other))


def write(target: torch.Tensor, values: torch.Tensor) -> None:
    """Write values into a tensor in place. If elements of the tensor share memory and ``values`` gives them different
    values, the tensor gets new memory."""
    if not _overlaps_itself(target):
        target.copy_(values)
        return
    _write_each_place_once(target, values)
    if not same_bits(target, values.to(target.device)):
        target.data = values.to(target.device)


def write_constant(target: torch.Tensor, value: float) -> None:
    """Set every element to one value; the elements may share memory."""
    target[_each_place_once(target)].fill_(value)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of the tensor share memory. Also True in cases that would take long to determine."""
    reach = 0  # the distance, in elements, from the first to the last element over the dimensions that were visited
    strides_and_sizes = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in strides_and_sizes if size != 1):
        if stride <= reach:
            return tensor.numel() > 0
        reach += (size - 1) * stride
    return False


def _each_place_once(target: torch.Tensor) -> tuple[slice, ...]:
    """Return an index that selects the first element of each expanded dimension (stride 0) and all elements of every
    other dimension. It is needed because torch refuses to write to an expanded tensor."""
    return tuple(slice(0, 1) if stride == 0 else slice(None) for stride in target.stride())


def _write_each_place_once(target: torch.Tensor, values: torch.Tensor) -> None:
    places = _each_place_once(target)
    target[places].copy_(values[places])


# -- tensors that share memory with each other -----------------------------------------------------------------------


def contradiction(tensors: Sequence[Named], load: Callable[[str], torch.Tensor]) -> tuple[str, str] | None:
    """Return the names of two live tensors that share memory, but were saved with different values for the shared
    memory. Return None if there are no such tensors.

    ``load(name)`` returns the saved values of the tensor of this name. No live tensor changes: the values are written
    to scratch memory, and compared there.
    """
    for group in groups_by_range(tensors):
        scratch = _Scratch(group)
        loaded = {name: load(name) for name, _ in group}
        for name, tensor in group:
            scratch.write(tensor, loaded[name])
        for i, (name, tensor) in enumerate(group):
            if not scratch.holds(tensor, loaded[name]):
                return name, _contradicting(scratch, (name, tensor), [*group[i + 1 :], *group[:i]], loaded)
    return None


def _contradicting(scratch: _Scratch, one: Named, others: Sequence[Named], loaded: Mapping[str, torch.Tensor]) -> str:
    """Return the name of a tensor in ``others`` that was saved with other values for memory of ``one``."""
    name, tensor = one
    for other, its in others:
        scratch.write(tensor, loaded[name])
        scratch.write(its, loaded[other])
        if not scratch.holds(tensor, loaded[name]):
            return other
    raise AssertionError("one of them has overwritten it")


def sharing_memory(tensors: Sequence[Named]) -> set[int]:
    """Return the ids of the tensors that share memory with another tensor in ``tensors``."""
    return {id(tensor) for group in groups_by_range(tensors) for _, tensor in group}


class _Scratch:
    """Scratch memory that stands for the memory of a group of tensors: each live address has one byte here."""

    def __init__(self, group: Sequence[Named]) -> None:
        ranges = [range_of(tensor) for _, tensor in group]
        self._low = min(low for low, _ in ranges) // _ALIGN * _ALIGN
        """The live address for which the first byte of the scratch memory stands."""
        self._bytes = torch.empty(max(high for _, high in ranges) - self._low, dtype=torch.uint8, device="cpu")

    def _view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of the scratch memory that stands for the memory of ``tensor``."""
        low, high = range_of(tensor)
        typed = self._bytes[low - self._low : high - self._low].view(tensor.dtype)
        return typed.as_strided(tensor.shape, tensor.stride(), typed.storage_offset())

    def write(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        _write_each_place_once(self._view(tensor), _physical(tensor, values))

    def holds(self, tensor: torch.Tensor, values: torch.Tensor) -> bool:
        return same_bits(self._view(tensor), _physical(tensor, values))


def _physical(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the elements that the memory of ``tensor`` must hold so that ``tensor`` has the values ``values``. These
    elements are ``values`` themselves, unless ``tensor`` is a lazily conjugated or negated view."""
    if tensor.is_conj():
        values = values.conj().resolve_conj()
    return -values if tensor.is_neg() else values


# -- verified bytes ----------------------------------------------------------------------------------------------------


class TensorWrites:
    """Collects live tensors, and writes the verified bytes of a checkpoint into them. ``run`` reads on several threads.
    Tensors whose memory overlaps are written one after the other, in the order in which they were added."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._added: list[Named] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Collect a tensor: ``run`` will write the bytes of the entry ``name`` into it."""
        if tensor.numel():
            self._added.append((name, tensor))

    def run(self) -> None:
        """Read and write all added tensors. Raises ``DamagedError`` at a bad block; other tensors may have been written
        before the error."""
        added, self._added = self._added, []
        apart, others = self._split(added)
        self.source.read_many([(name, tensor.data_ptr()) for name, tensor in apart])
        for name, tensor in others:
            _write_one(self.source, name, tensor)
        # A write by address does not increment the version counter, and autograd and sessions rely on this counter.
        tensors = [tensor for _, tensor in added]
        if any(map(torch.Tensor.is_inference, tensors)):
            tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        torch.autograd.graph.increment_version(tensors)

    def _split(self, added: list[Named]) -> tuple[list[Named], list[Named]]:
        """Return two lists: the tensors into whose memory the reader can write in parallel, and all other tensors."""
        shared, entries = sharing_memory(added), self.source.entries
        if not shared and _have_memory_layouts_of(
            [entries[name] for name, _ in added], [tensor for _, tensor in added]
        ):
            return added, []  # the usual case
        apart: list[Named] = []
        others: list[Named] = []
        for name, tensor in added:
            fits = id(tensor) not in shared and _has_memory_layout_of(entries[name], tensor)
            (apart if fits else others).append((name, tensor))
        return apart, others


def _write_one(source: Source, name: str, tensor: torch.Tensor) -> None:
    """Write one tensor: by address if it has the saved memory layout, else through a copy."""
    if _has_memory_layout_of(source.entries[name], tensor):
        source.read_into(name, tensor.data_ptr())
    else:
        write(tensor, load_tensor(source, name))


def _has_memory_layout_of(entry: Entry, tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory holds the elements in the same order as the saved bytes, without gaps, so that the
    bytes can be written by address."""
    if not tensor.is_cpu or tensor.is_conj() or tensor.is_neg():
        return False
    if tensor.shape != entry.shape or tensor.nbytes != entry.nbytes:
        return False  # a write by address could exceed the tensor's memory
    return tensor.stride() == entry.stride or (tensor.is_contiguous() and is_contiguous(entry.shape, entry.stride))


def _have_memory_layouts_of(entries: list[Entry], tensors: list[torch.Tensor]) -> bool:
    """Whether ``_has_memory_layout_of`` is true for each pair of entry and tensor. This test takes less time than one
    call for each pair. In some cases it returns False although all pairs match."""
    return (
        all(map(_is_cpu, tensors))
        and not any(map(torch.Tensor.is_conj, tensors))
        and not any(map(torch.Tensor.is_neg, tensors))
        and all(map(eq, map(_shape, tensors), map(_shape, entries)))
        and all(map(eq, map(_nbytes, tensors), map(_nbytes, entries)))
        and all(map(eq, map(torch.Tensor.stride, tensors), map(_stride, entries)))
    )
