"""The three transfer methods, behind one interface.

For each checkpoint, the chosen method first prepares itself. Then it makes a group of each part, with a job of the
engine that waits until the group has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from lightck.pipeline.staging.groups import Group, PinnedRing, Segment
from lightck.pipeline.staging.kinds import Device, Direct, Host, StagingOption
from lightck.pipeline.staging.parts import Order, Part, Parts, one_part_per_device
from lightck.pipeline.staging.registered import RegisteredPool
from lightck.pipeline.write_table import StagedTensor
from lightck.pool.reservation import Reservation
from lightck.pool.storage.durability import MEDIUM_DISK
from lightck.pool.writer import PoolWriter
from lightck.state.device_transfers import DeviceTransfer


class UnavailableError(Exception):
    """This transfer method is unavailable on this device or pool. Internal."""


class TransferMethod(Protocol):
    """How tensors leave their device."""

    kind: StagingOption
    reads_during_step: bool
    """Whether the tensors themselves are read while the next step computes. False: they are read at the boundary, in
    the order of the computation."""
    ends_before_next: bool
    """Whether all transfers of a checkpoint must have ended before the next checkpoint begins, whatever method the next
    checkpoint uses."""

    def prepare(self, writer: PoolWriter, staged: Sequence[StagedTensor]) -> None:
        """Do what must be done at the boundary before the groups of a checkpoint are made: ``DeviceMethod`` makes its
        copy here. ``staged``: the same object as for the checkpoint before if nothing about the tensors has changed
        since. Raises ``UnavailableError``."""

    def group(self, reservation: Reservation, part: Part, parts: Parts) -> Group | None:
        """Make the group of one of these parts and its job, and return the group. If the engine has no free job, return
        None."""

    def release(self) -> None:
        """Release all memory. Call only while no transfer is under way."""


class HostMethod:
    """Sends tensors through segments of host memory. Each ``Order`` of parts has segments of its own, which are used in
    turn."""

    kind: StagingOption = Host()
    reads_during_step = True
    ends_before_next = False

    def __init__(self) -> None:
        self._ring = PinnedRing()
        self._rings_in_order = {order: PinnedRing() for order in (Order.PACKED, Order.IN_ORDER)}

    def prepare(self, writer: PoolWriter, staged: Sequence[StagedTensor]) -> None:
        """Do nothing: host memory is allocated when a group is made."""

    def group(self, reservation: Reservation, part: Part, parts: Parts) -> Group | None:
        ring = self._rings_in_order.get(part.order, self._ring)
        nbytes = part.nbytes if part.order is not Order.BESIDE else parts.beside_nbytes
        return group_through_host(ring.next(part.devices[0][0], nbytes), reservation, part, part.sources)

    def release(self) -> None:
        for ring in (self._ring, *self._rings_in_order.values()):
            ring.release()


class DirectMethod:
    """The device writes into the pool; only packed tensors go through host memory. ``wait_idle``: waits until no
    transfer is under way."""

    kind: StagingOption = Direct()
    reads_during_step = True
    ends_before_next = True
    """A checkpoint that was given up frees its slot, and the next checkpoint may get this slot. A device that still
    writes to the slot would overwrite the next checkpoint."""

    def __init__(self, wait_idle: Callable[[], None]) -> None:
        self._wait_idle = wait_idle
        self._pool: RegisteredPool | None = None
        self._ring_of_packed = PinnedRing()

    def prepare(self, writer: PoolWriter, staged: Sequence[StagedTensor]) -> None:
        if writer.durability.medium_kind == MEDIUM_DISK:
            # The kernel does not see that a device wrote to a page, so the next fdatasync could skip the page.
            raise UnavailableError(
                "the pool is on a disk, and what a device writes into such a pool might not become durable"
            )
        if self._pool is None or not self._pool.is_of(writer):
            self.release()
            try:
                transfers = list(dict.fromkeys(one.transfer for one in staged))
                self._pool = RegisteredPool(writer, transfers, self._wait_idle)
            except RuntimeError as err:
                raise UnavailableError(f"the device cannot be given access to the pool's memory: {err}") from err

    def group(self, reservation: Reservation, part: Part, parts: Parts) -> Group | None:
        assert self._pool is not None
        if part.order is Order.PACKED:
            segment = self._ring_of_packed.next(part.devices[0][0], part.nbytes)
            return group_through_host(segment, reservation, part, part.sources)
        if not reservation.copy(part.records, None, part.sources, waits_for_start=True):
            return None
        places = self._pool.places(reservation.slot, part)
        return Group(part, part.sources, places, Segment(self._pool.memory), reservation.parts[-1])

    def release(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.release()
        self._ring_of_packed.release()


class DeviceMethod:
    """Sends tensors from a copy on the device, which is made at the boundary in the order of the computation."""

    kind: StagingOption = Device()
    reads_during_step = False
    ends_before_next = True  # there is memory for one copy only

    def __init__(self, free_factor: int = 1) -> None:
        """``free_factor``: the copy is allocated only if the device has ``free_factor`` times as many free bytes as the
        copy needs (1: this is not checked)."""
        self._free_factor = free_factor
        self._ring = PinnedRing()
        self._memory: dict[DeviceTransfer, torch.Tensor] = {}
        """The memory for the copy on each device."""
        self._copied: list[Part] = []
        """The tensors of each device, which are copied together."""
        self._staged: Sequence[StagedTensor] | None = None
        """Argument of the last ``prepare``."""
        self._copies: dict[int, torch.Tensor] = {}
        """Record number -> the bytes of the tensor's copy."""

    def prepare(self, writer: PoolWriter, staged: Sequence[StagedTensor]) -> None:
        if staged is not self._staged:
            self._copied, self._staged = one_part_per_device(staged), staged
            self._copies.clear()
        for part in self._copied:
            transfer, _ = part.devices[0]
            places = part.places_in(self._memory_for_copy(transfer, part.nbytes))
            self._copies.update(zip(part.records.tolist(), places, strict=True))
            try:
                transfer.copy_on_device(list(zip(places, part.sources, strict=True)))
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

    def group(self, reservation: Reservation, part: Part, parts: Parts) -> Group | None:
        segment = self._ring.next(part.devices[0][0], parts.beside_nbytes)
        return group_through_host(segment, reservation, part, [self._copies[n] for n in part.records.tolist()])

    def release(self) -> None:
        self._memory.clear()
        self._copies.clear()
        self._copied, self._staged = [], None
        self._ring.release()


def group_through_host(
    segment: Segment, reservation: Reservation, part: Part, sources: list[torch.Tensor]
) -> Group | None:
    """Return a group that is sent through host memory, or None if the engine has no free job. ``sources``: the memory
    on the device that is sent, for each tensor."""
    addresses = segment.memory.data_ptr() + np.array(part.offsets, np.uint64)
    if not reservation.copy(part.records, addresses, (segment.memory, sources), waits_for_start=True):
        return None
    return Group(part, sources, part.places_in(segment.memory), segment, reservation.parts[-1])
