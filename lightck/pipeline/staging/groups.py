"""Groups of tensors that are sent together, and the host memory through which they are sent."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from lightck.pipeline.write_table import StagedTensor
from lightck.pool.engine import Job
from lightck.state.device_transfers import Arrival, DeviceTransfer

log = logging.getLogger("lightck")

GROUPS_MAX = 6
"""The largest number of groups of one checkpoint that are sent while the device computes. Each group has one job."""
GROUP_NBYTES_MIN = 16 << 20
"""The smallest size of a group in bytes. Only the last group may be smaller."""
SEGMENTS = 2
"""Number of segments of host memory in a ring: while the engine copies from one segment, the device fills the other."""
ALIGN = 256
"""The offset of each tensor in a segment is a multiple of ``ALIGN`` bytes."""
_POLL_SECONDS = 0.0005


@dataclass(slots=True)
class Segment:
    """A part of host memory, the job that reads it, and the transfers that write to it."""

    memory: torch.Tensor
    reader: Job | None = None
    arrivals: list[Arrival] = field(default_factory=list)

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

    def forget(self) -> None:
        """Release the memory. Call only while no transfer is under way."""
        self._segments = []
        if self._transfer is not None:
            self._transfer.release_host_memory()
            self._transfer = None


@dataclass(slots=True)
class Group:
    """Tensors that are sent together, and the job that waits for them."""

    tensors: list[StagedTensor]
    sources: list[torch.Tensor]
    """The memory on the device that is sent: a copy of the tensors, or the memory that the tensors had at the boundary.
    A later ``.data = ...`` does not change which memory is sent."""
    places: list[torch.Tensor]
    """The memory to which the tensors are sent: bytes of host memory, or of the pool."""
    segment: Segment
    job: Job
    in_order: bool
    """Whether the tensors are sent at the boundary, in the order of the computation."""

    def pairs(self) -> dict[DeviceTransfer, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return, for each device transfer, pairs of a place and the source that is sent there."""
        found: dict[DeviceTransfer, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for one, source, place in zip(self.tensors, self.sources, self.places, strict=True):
            found.setdefault(one.transfer, []).append((place, source))
        return found

    def send_in_order(self) -> None:
        """Send the group in the order of the computation. Runs on the training thread."""
        self.segment.wait_free()
        self.segment.reader = self.job
        for transfer, pairs in self.pairs().items():
            self.segment.arrivals.append(transfer.send_in_order(pairs))

    def send_and_start(self, marks: dict[DeviceTransfer, Arrival]) -> None:
        """Send the group (unless its checkpoint was given up), wait for its arrival, and start its job. A group with
        ``in_order`` was sent at the boundary already, and is not sent here. ``marks``: for each device, the end of its
        work at the boundary."""
        if not self.in_order:
            self.segment.wait_free()
            if not self.job.needs_sources:
                return
            self.segment.reader = self.job
            for transfer, pairs in self.pairs().items():
                self.segment.arrivals.append(transfer.send(pairs, marks[transfer]))
        for arrival in self.segment.arrivals:
            arrival.synchronize()
        self.job.start()

    def drain(self) -> None:
        """Wait until no transfer of this failed group is under way."""
        for arrival in self.segment.arrivals:
            with suppress(RuntimeError):
                arrival.synchronize()


def split_into_parts(tensors: Sequence[StagedTensor], parts_max: int) -> list[list[StagedTensor]]:
    """Split tensors into at most ``parts_max`` parts of about the same size, one for each group. Keep the order of the
    tensors."""
    if parts_max < 1:
        return []
    share = max(GROUP_NBYTES_MIN, -(-sum(one.record.nbytes for one in tensors) // parts_max))
    parts: list[list[StagedTensor]] = []
    filled = share
    for one in tensors:
        if filled >= share:
            parts.append([])
            filled = 0
        parts[-1].append(one)
        filled += one.record.nbytes
    return parts


def packed_layout(tensors: Sequence[StagedTensor]) -> tuple[list[int], int]:
    """Return the offset of each tensor in the memory of a segment, and how many bytes this memory must have."""
    offsets, at = [], 0
    for one in tensors:
        offsets.append(at)
        at += -(-one.record.nbytes // ALIGN) * ALIGN
    return offsets, at


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
