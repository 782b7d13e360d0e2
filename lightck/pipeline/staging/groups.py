"""Tensors that travel together, and the memory that they travel through."""

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
"""Jobs for what one version sends beside the computation."""
GROUP_NBYTES_MIN = 16 << 20
SEGMENTS = 2
"""Pieces of host memory: while one is copied from, the other is filled."""
ALIGN = 256
_LOOK_SECONDS = 0.0005


@dataclass(slots=True)
class Segment:
    """A piece of host memory, who reads it, and what is on its way into it."""

    memory: torch.Tensor
    reader: Job | None = None
    arrivals: list[Arrival] = field(default_factory=list)

    @property
    def is_read(self) -> bool:
        return self.reader is not None and self.reader.needs_sources

    def free(self) -> None:
        """Wait until nobody reads it, and nothing of a version that was given up is on its way into it."""
        while self.is_read:
            time.sleep(_LOOK_SECONDS)
        for arrival in self.arrivals:
            arrival.synchronize()
        self.arrivals = []


class PinnedRing:
    """Segments in turn. One that has become too small is left to who still reads it."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._turn = 0
        self._transfer: DeviceTransfer | None = None

    def next(self, transfer: DeviceTransfer, nbytes: int) -> Segment:
        self._turn += 1
        at = self._turn % SEGMENTS
        self._transfer = transfer
        if len(self._segments) < SEGMENTS:
            self._segments = [Segment(_host_memory(transfer, nbytes)) for _ in range(SEGMENTS)]
        if self._segments[at].memory.numel() < nbytes:
            self._segments[at] = Segment(_host_memory(transfer, nbytes))
        return self._segments[at]

    def forget(self) -> None:
        """Give the memory back. Nothing is under way."""
        self._segments = []
        if self._transfer is not None:
            self._transfer.release_host_memory()
            self._transfer = None


@dataclass(slots=True)
class Group:
    """Tensors that travel together, and the job that waits for them."""

    tensors: list[StagedTensor]
    sources: list[torch.Tensor]
    """Memory on the device: theirs as it was at the boundary, also where .data is replaced meanwhile; or of a copy."""
    places: list[torch.Tensor]
    """Where they arrive: bytes of host memory, or of the pool."""
    segment: Segment
    job: Job
    in_order: bool
    """They were sent at the boundary itself."""

    def pairs(self) -> dict[DeviceTransfer, list[tuple[torch.Tensor, torch.Tensor]]]:
        """By lane: places, and what goes there."""
        found: dict[DeviceTransfer, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for one, source, place in zip(self.tensors, self.sources, self.places, strict=True):
            found.setdefault(one.transfer, []).append((place, source))
        return found

    def send_in_order(self) -> None:
        """On the training thread."""
        self.segment.free()
        self.segment.reader = self.job
        for transfer, pairs in self.pairs().items():
            self.segment.arrivals.append(transfer.send_in_order(pairs))

    def bring(self, marks: dict[DeviceTransfer, Arrival]) -> None:
        """Send it, wait until it has arrived, and start its job; unless the version was given up."""
        if not self.in_order:
            self.segment.free()
            if not self.job.needs_sources:
                return
            self.segment.reader = self.job
            for transfer, pairs in self.pairs().items():
                self.segment.arrivals.append(transfer.send(pairs, marks[transfer]))
        for arrival in self.segment.arrivals:
            arrival.synchronize()
        self.job.start()

    def drain(self) -> None:
        """Nothing of it is under way afterwards; why it is given up is known."""
        for arrival in self.segment.arrivals:
            with suppress(RuntimeError):
                arrival.synchronize()


def parted(tensors: Sequence[StagedTensor], parts_max: int) -> list[list[StagedTensor]]:
    """In their order, in at most so many parts of about one size."""
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


def laid_out(tensors: Sequence[StagedTensor]) -> tuple[list[int], int]:
    """Where each begins in a piece of memory, and how long that has to be."""
    offsets, at = [], 0
    for one in tensors:
        offsets.append(at)
        at += -(-one.record.nbytes // ALIGN) * ALIGN
    return offsets, at


def _host_memory(transfer: DeviceTransfer, nbytes: int) -> torch.Tensor:
    # A version may be closed inside an evaluation, or where another device is the default.
    with torch.inference_mode(False), torch.device("cpu"):
        try:
            return transfer.memory(nbytes)
        except RuntimeError as err:
            log.info(
                "lightck: %d bytes of host memory cannot be pinned (%s): devices write to it more slowly", nbytes, err
            )
            return torch.empty(nbytes, dtype=torch.uint8)
