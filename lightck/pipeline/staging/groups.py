"""Parts of a checkpoint on their way into the pool, and the memory through which they are sent."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from lightck.pipeline.staging.parts import Order, Part
from lightck.pool.engine import Job
from lightck.state.device_transfers import DeviceTransfer, StreamPoint

log = logging.getLogger("lightck")

SEGMENTS = 2
"""Number of segments of host memory in a ring: while the engine copies from one segment, the device fills the other."""
_POLL_SECONDS = 0.0005


@dataclass(slots=True)
class Segment:
    """Memory to which devices send tensors (pinned host memory, or the mapping of a pool), the job that reads it, and
    the transfers that write to it."""

    memory: torch.Tensor
    reader: Job | None = None
    arrivals: list[StreamPoint] = field(default_factory=list)
    packed: dict[DeviceTransfer, torch.Tensor] = field(default_factory=dict)
    """For each device, memory on the device in which tensors are packed before they are sent to ``memory``."""

    def packed_memory(self, transfer: DeviceTransfer, nbytes: int) -> torch.Tensor:
        """Return memory of a device with at least ``nbytes`` bytes. Raises ``RuntimeError`` if there is no room."""
        if transfer not in self.packed or self.packed[transfer].numel() < nbytes:
            with torch.inference_mode(False):
                self.packed[transfer] = transfer.device_memory(nbytes)
        return self.packed[transfer]

    @property
    def is_being_read(self) -> bool:
        """Whether a job still reads the memory, or has yet to read it."""
        return self.reader is not None and self.reader.needs_sources

    def wait_free(self) -> None:
        """Wait until no job reads the memory and no transfer writes to it, not even a transfer of a checkpoint that was
        given up."""
        while self.is_being_read:
            time.sleep(_POLL_SECONDS)
        for arrival in self.arrivals:
            arrival.synchronize()
        self.arrivals = []


class PinnedRing:
    """Segments that are used in turn. A segment that is too small is replaced. A job that still reads the old segment
    keeps the segment's memory alive."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._turn = 0
        self._transfer: DeviceTransfer | None = None

    def next(self, transfer: DeviceTransfer, nbytes: int) -> Segment:
        """Return the next segment, with at least ``nbytes`` bytes. A job or a transfer may still use the segment."""
        self._turn += 1
        at = self._turn % SEGMENTS
        self._transfer = transfer
        if len(self._segments) < SEGMENTS:
            self._segments = [Segment(_host_memory(transfer, nbytes)) for _ in range(SEGMENTS)]
        if self._segments[at].memory.numel() < nbytes:
            self._segments[at] = Segment(_host_memory(transfer, nbytes))
        return self._segments[at]

    def release(self) -> None:
        """Release the memory. Call only while no transfer is under way."""
        self._segments = []
        if self._transfer is not None:
            self._transfer.release_host_memory()
            self._transfer = None


@dataclass(slots=True)
class Group:
    """A part of one checkpoint, and the job that waits for it."""

    part: Part
    sources: list[torch.Tensor]
    """The memory on the device that is sent, for each tensor: its own memory, or that of a copy."""
    places: list[torch.Tensor]
    """The memory to which each tensor is sent: bytes of host memory, or of the pool."""
    segment: Segment
    job: Job

    @property
    def in_order(self) -> bool:
        """Whether the group is sent at the boundary, in the order of the computation."""
        return self.part.order is not Order.BESIDE

    def pairs(self) -> list[tuple[DeviceTransfer, list[tuple[torch.Tensor, torch.Tensor]]]]:
        """Return, for each device, pairs of a place and the source that is sent there."""
        return [
            (transfer, list(zip(self.places[which], self.sources[which], strict=True)))
            for transfer, which in self.part.devices
        ]

    def send_in_order(self) -> None:
        """Send the group in the order of the computation. Runs on the training thread."""
        self.segment.wait_free()
        self.segment.reader = self.job
        if self.part.order is Order.PACKED and self._send_packed():
            return
        for transfer, pairs in self.pairs():
            self.segment.arrivals.append(transfer.send_in_order(pairs))

    def _send_packed(self) -> bool:
        """Pack the tensors of each device into memory of the device, and send that. Returns False, and has sent
        nothing, if a device has no room for it."""
        part, host = self.part, self.segment.memory
        try:
            memories = [self.segment.packed_memory(transfer, part.nbytes) for transfer, _ in part.devices]
        except RuntimeError as err:
            log.info("lightck: small tensors are sent one by one, because a device has no room to pack them: %s", err)
            return False
        for (transfer, which), memory in zip(part.devices, memories, strict=True):
            places, sources = part.places_in(memory)[which], self.sources[which]
            transfer.copy_on_device(list(zip(places, sources, strict=True)))
            begin, last = part.offsets[which][0], which.stop - 1
            end = part.offsets[last] + part.tensors[last].record.nbytes
            self.segment.arrivals.append(transfer.send_in_order([(host[begin:end], memory[begin:end])]))
        return True

    def send_and_start(self, marks: dict[DeviceTransfer, StreamPoint]) -> None:
        """Send the group (unless its checkpoint was given up), wait for its arrival, and start its job. A group that is
        sent in order was sent at the boundary already, and is not sent here. ``marks``: for each device, the end of its
        work at the boundary."""
        if not self.in_order:
            self.segment.wait_free()
            if not self.job.needs_sources:
                return
            self.segment.reader = self.job
            for transfer, pairs in self.pairs():
                self.segment.arrivals.append(transfer.send(pairs, marks[transfer]))
        for arrival in self.segment.arrivals:
            arrival.synchronize()
        self.job.start()

    def wait_for_transfers(self) -> None:
        """Wait until no transfer of this failed group is under way."""
        for arrival in self.segment.arrivals:
            with suppress(RuntimeError):
                arrival.synchronize()


def _host_memory(transfer: DeviceTransfer, nbytes: int) -> torch.Tensor:
    # A step may be closed in inference mode, or while torch has another default device.
    with torch.inference_mode(False), torch.device("cpu"):
        try:
            return transfer.memory(nbytes)
        except RuntimeError as err:
            log.info(
                "lightck: %d bytes of host memory cannot be pinned (%s): transfers from the device are slower",
                nbytes,
                err,
            )
            return torch.empty(nbytes, dtype=torch.uint8)
