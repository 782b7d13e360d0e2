"""The three transfer methods, behind one interface.

For each checkpoint, the chosen method first prepares itself. The tensors are split into parts, and the method makes a
group of each part, with a job of the engine that waits until the group has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from lightck.pipeline.staging.groups import Group, PinnedRing, Segment, packed_layout
from lightck.pipeline.staging.kinds import Device, Direct, Host, Kind
from lightck.pipeline.staging.registered import RegisteredPool
from lightck.pipeline.write_table import StagedTensor
from lightck.pool.storage.durability import TIER_DISK
from lightck.pool.writer import PoolWriter, Reservation
from lightck.state.device_transfers import DeviceTransfer


class UnavailableError(Exception):
    """This transfer method is unavailable on this device or pool. Internal."""


class TransferMethod(Protocol):
    """How tensors leave their device."""

    kind: Kind
    reads_during_step: bool
    """Whether the tensors themselves are read while the next step computes. False: they are read at the boundary, in
    the order of the computation."""
    ends_before_next: bool
    """Whether all transfers of a checkpoint must have ended before the next checkpoint begins, whatever method the next
    checkpoint uses."""

    def prepare(self, writer: PoolWriter, staged: Sequence[StagedTensor]) -> None:
        """Prepare a checkpoint of these tensors in this pool. Raises ``UnavailableError``."""

    def group(
        self, reservation: Reservation, tensors: list[StagedTensor], segment_nbytes: int, *, in_order: bool
    ) -> Group | None:
        """Make a group and its job, and return the group. If the engine has no free job, return None. ``in_order``:
        whether the group is sent in the order of the computation. ``segment_nbytes``: bytes of the segment of host
        memory for the group. (All groups of a checkpoint with the same ``in_order`` get as many as the largest one
        needs.)"""

    def forget(self) -> None:
        """Release all memory. Call only while no transfer is under way."""


class HostMethod:
    """Sends tensors through two segments of host memory in turn, and groups with ``in_order`` through two more
    segments."""

    kind: Kind = Host()
    reads_during_step = True
    ends_before_next = False

    def __init__(self) -> None:
        self._ring, self._ring_in_order = PinnedRing(), PinnedRing()

    def prepare(self, writer: PoolWriter, staged: Sequence[StagedTensor]) -> None:
        """Do nothing: host memory is allocated when a group is made."""

    def group(
        self, reservation: Reservation, tensors: list[StagedTensor], segment_nbytes: int, *, in_order: bool
    ) -> Group | None:
        pinned_ring = self._ring_in_order if in_order else self._ring
        segment = pinned_ring.next(tensors[0].transfer, segment_nbytes)
        return group_through_host(
            segment, reservation, tensors, [one.live.tensor.detach() for one in tensors], in_order
        )

    def forget(self) -> None:
        self._ring.forget()
        self._ring_in_order.forget()


class DirectMethod:
    """The device writes into the pool. ``wait_idle``: waits until no transfer is under way."""

    kind: Kind = Direct()
    reads_during_step = True
    ends_before_next = True
    """A checkpoint that was given up frees its slot, and the next checkpoint may get this slot. A device that still
    writes to the slot would overwrite the next checkpoint."""

    def __init__(self, wait_idle: Callable[[], None]) -> None:
        self._wait_idle = wait_idle
        self._pool: RegisteredPool | None = None

    def prepare(self, writer: PoolWriter, staged: Sequence[StagedTensor]) -> None:
        if writer.durability.tier == TIER_DISK:
            # The kernel does not see that a device wrote to a page, so the next fdatasync could skip the page.
            raise UnavailableError(
                "the pool is on a disk, and what a device writes into such a pool might not become durable"
            )
        if self._pool is None or not self._pool.is_of(writer):
            self.forget()
            try:
                transfers = list(dict.fromkeys(one.transfer for one in staged))
                self._pool = RegisteredPool(writer, transfers, self._wait_idle)
            except RuntimeError as err:
                raise UnavailableError(f"the device cannot be given access to the pool's memory: {err}") from err

    def group(
        self, reservation: Reservation, tensors: list[StagedTensor], segment_nbytes: int, *, in_order: bool
    ) -> Group | None:
        assert self._pool is not None
        sources = [one.live.tensor.detach() for one in tensors]
        records = [one.record.number for one in tensors]
        places = [self._pool.place(reservation.slot, number) for number in records]
        if not reservation.copy(records, None, sources, waits_for_start=True):
            return None
        return Group(tensors, sources, places, Segment(self._pool.memory), reservation.parts[-1], in_order)

    def forget(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.release()


class DeviceMethod:
    """Sends tensors from a copy on the device, which is made at the boundary in the order of the computation."""

    kind: Kind = Device()
    reads_during_step = False
    ends_before_next = True  # there is memory for one copy only

    def __init__(self, free_factor: int = 1) -> None:
        """``free_factor``: the copy is allocated only if the device has ``free_factor`` times as many free bytes as the
        copy needs (1: this is not checked)."""
        self._free_factor = free_factor
        self._ring = PinnedRing()
        self._memory: dict[DeviceTransfer, torch.Tensor] = {}
        """The memory for the copy on each device."""
        self._copies: dict[int, torch.Tensor] = {}
        """Record number -> the bytes of the tensor's copy."""

    def prepare(self, writer: PoolWriter, staged: Sequence[StagedTensor]) -> None:
        self._copies.clear()
        for transfer in dict.fromkeys(one.transfer for one in staged):
            own = [one for one in staged if one.transfer is transfer]
            offsets, nbytes = packed_layout(own)
            memory = self._memory_for_copy(transfer, nbytes)
            pairs = []
            for one, at in zip(own, offsets, strict=True):
                place = memory[at : at + one.record.nbytes]
                pairs.append((place, one.live.tensor.detach()))
                self._copies[one.record.number] = place
            try:
                transfer.copy_on_device(pairs)
            except torch.OutOfMemoryError as err:
                raise UnavailableError(f"the device has no room to make a copy: {err}") from err

    def _memory_for_copy(self, transfer: DeviceTransfer, nbytes: int) -> torch.Tensor:
        if transfer not in self._memory or self._memory[transfer].numel() < nbytes:
            self._memory.pop(transfer, None)
            try:
                if self._free_factor > 1 and transfer.free_nbytes() < self._free_factor * nbytes:
                    raise UnavailableError(f"the device has too little free memory for a copy of {nbytes:,} bytes")
                with torch.inference_mode(False):
                    self._memory[transfer] = transfer.device_memory(nbytes)
            except RuntimeError as err:  # also from a custom allocator that does not report its free memory
                raise UnavailableError(f"the device has no room for a copy of {nbytes:,} bytes: {err}") from err
        return self._memory[transfer]

    def group(
        self, reservation: Reservation, tensors: list[StagedTensor], segment_nbytes: int, *, in_order: bool
    ) -> Group | None:
        segment = self._ring.next(tensors[0].transfer, segment_nbytes)
        return group_through_host(
            segment, reservation, tensors, [self._copies[one.record.number] for one in tensors], in_order
        )

    def forget(self) -> None:
        self._memory.clear()
        self._copies.clear()
        self._ring.forget()


def group_through_host(
    segment: Segment, reservation: Reservation, tensors: list[StagedTensor], sources: list[torch.Tensor], in_order: bool
) -> Group | None:
    """Return a group that is sent through host memory, or None if the engine has no free job. ``sources``: the memory
    on the device that is sent, for each tensor."""
    offsets, _ = packed_layout(tensors)
    places = [segment.memory[at : at + one.record.nbytes] for at, one in zip(offsets, tensors, strict=True)]
    records = [one.record.number for one in tensors]
    if not reservation.copy(
        records, [place.data_ptr() for place in places], (segment.memory, sources), waits_for_start=True
    ):
        return None
    return Group(tensors, sources, places, segment, reservation.parts[-1], in_order)
