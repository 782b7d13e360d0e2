"""The three ways out of a device, behind one seam.

A way is asked to be ready for a version; then for a group of each part of its tensors, with a job that waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from lightck.pipeline.staging.groups import Group, PinnedRing, Segment, laid_out
from lightck.pipeline.staging.kinds import Device, Direct, Host, Kind
from lightck.pipeline.staging.registered import RegisteredPool
from lightck.pipeline.write_table import StagedTensor
from lightck.pool.storage.durability import TIER_DISK
from lightck.pool.writer import PoolWriter, Reservation
from lightck.state.device_transfers import DeviceTransfer


class UnavailableError(Exception):
    """This way cannot be gone here. Internal."""


class TransferMethod(Protocol):
    """One way."""

    kind: Kind
    beside: bool
    """Tensors are read beside the computation, while the next step runs; False: all in its order, at the boundary."""
    settles: bool
    """What is under way by it has to come to its end before the next version begins, by whichever way."""

    def prepare(self, writer: PoolWriter, staged: Sequence[StagedTensor]) -> None:
        """For a version of these, in this pool. Raises ``UnavailableError``."""

    def group(
        self, reservation: Reservation, tensors: list[StagedTensor], nbytes_max: int, *, in_order: bool
    ) -> Group | None:
        """A group with its job; None where the engine has no room. ``nbytes_max``: of the largest one to come."""

    def forget(self) -> None:
        """Give back what is held. Nothing is under way."""


class HostMethod:
    """By two pieces of host memory in turn, and two more for what is sent in order."""

    kind: Kind = Host()
    beside = True
    settles = False

    def __init__(self) -> None:
        self._ring, self._in_order = PinnedRing(), PinnedRing()

    def prepare(self, writer: PoolWriter, staged: Sequence[StagedTensor]) -> None:
        """There is always host memory, or an error of its own."""

    def group(
        self, reservation: Reservation, tensors: list[StagedTensor], nbytes_max: int, *, in_order: bool
    ) -> Group | None:
        pinned_ring = self._in_order if in_order else self._ring
        segment = pinned_ring.next(tensors[0].transfer, nbytes_max)
        return through(segment, reservation, tensors, [one.live.tensor.detach() for one in tensors], in_order)

    def forget(self) -> None:
        self._ring.forget()
        self._in_order.forget()


class DirectMethod:
    """Into the pool itself."""

    kind: Kind = Direct()
    beside = True
    settles = True  # a version that was given up may be on its way into a slot that is taken again

    def __init__(self, settle: Callable[[], None]) -> None:
        self._settle = settle
        self._pool: RegisteredPool | None = None

    def prepare(self, writer: PoolWriter, staged: Sequence[StagedTensor]) -> None:
        if writer.durability.tier == TIER_DISK:
            # The kernel does not see what a device writes: pages of a file could be left out of its next fdatasync.
            raise UnavailableError("the pool is on a disk")
        if self._pool is None or not self._pool.is_of(writer):
            self.forget()
            try:
                self._pool = RegisteredPool(writer, list(dict.fromkeys(one.transfer for one in staged)), self._settle)
            except RuntimeError as err:
                raise UnavailableError(f"the pool's memory cannot be registered: {err}") from err

    def group(
        self, reservation: Reservation, tensors: list[StagedTensor], nbytes_max: int, *, in_order: bool
    ) -> Group | None:
        assert self._pool is not None
        sources = [one.live.tensor.detach() for one in tensors]
        records = [one.record.number for one in tensors]
        places = [self._pool.place(reservation.slot, number) for number in records]
        if not reservation.copy(records, None, sources, held=True):
            return None
        return Group(tensors, sources, places, Segment(self._pool.memory), reservation.parts[-1], in_order)

    def forget(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.release()


class DeviceMethod:
    """By a copy on the device, which is made at the boundary in the order of the computation."""

    kind: Kind = Device()
    beside = False
    settles = True  # there is one copy

    def __init__(self, spare: int = 1) -> None:
        """``spare``: how many times the memory of the copy a device has to have, so that one is made there."""
        self._spare = spare
        self._ring = PinnedRing()
        self._memory: dict[DeviceTransfer, torch.Tensor] = {}
        self._copies: dict[int, torch.Tensor] = {}
        """By record number: bytes of the copy."""

    def prepare(self, writer: PoolWriter, staged: Sequence[StagedTensor]) -> None:
        self._copies.clear()
        for transfer in dict.fromkeys(one.transfer for one in staged):
            own = [one for one in staged if one.transfer is transfer]
            offsets, nbytes = laid_out(own)
            memory = self._room(transfer, nbytes)
            pairs = []
            for one, at in zip(own, offsets, strict=True):
                place = memory[at : at + one.record.nbytes]
                pairs.append((place, one.live.tensor.detach()))
                self._copies[one.record.number] = place
            try:
                transfer.copy_on_device(pairs)
            except torch.OutOfMemoryError as err:
                raise UnavailableError(f"the device has no room to make a copy: {err}") from err

    def _room(self, transfer: DeviceTransfer, nbytes: int) -> torch.Tensor:
        if transfer not in self._memory or self._memory[transfer].numel() < nbytes:
            self._memory.pop(transfer, None)
            try:
                if self._spare > 1 and transfer.free_nbytes() < self._spare * nbytes:
                    raise UnavailableError(f"the device has no room to spare for a copy of {nbytes:,} bytes")
                with torch.inference_mode(False):
                    self._memory[transfer] = transfer.device_memory(nbytes)
            except RuntimeError as err:  # an allocator of the user's own may not say what is free
                raise UnavailableError(f"the device has no room for a copy of {nbytes:,} bytes: {err}") from err
        return self._memory[transfer]

    def group(
        self, reservation: Reservation, tensors: list[StagedTensor], nbytes_max: int, *, in_order: bool
    ) -> Group | None:
        segment = self._ring.next(tensors[0].transfer, nbytes_max)
        return through(segment, reservation, tensors, [self._copies[one.record.number] for one in tensors], in_order)

    def forget(self) -> None:
        self._memory.clear()
        self._copies.clear()
        self._ring.forget()


def through(
    segment: Segment, reservation: Reservation, tensors: list[StagedTensor], sources: list[torch.Tensor], in_order: bool
) -> Group | None:
    """A group by host memory; None where the engine has no room."""
    offsets, _ = laid_out(tensors)
    places = [segment.memory[at : at + one.record.nbytes] for at, one in zip(offsets, tensors, strict=True)]
    records = [one.record.number for one in tensors]
    if not reservation.copy(records, [place.data_ptr() for place in places], (segment.memory, sources), held=True):
        return None
    return Group(tensors, sources, places, segment, reservation.parts[-1], in_order)
