"""The mapping of a pool, registered so that devices can write to it directly."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence

import torch

from lightck.pipeline.staging.parts import Part
from lightck.pool.slots import Slot
from lightck.pool.writer import PoolWriter
from lightck.state.device_transfers import DeviceTransfer


class RegisteredPool:
    """The registered mapping of one writer, until ``release`` or until the pool is unmapped. ``wait_idle``: waits until
    no device writes to the mapping. ``memory``: the mapping as bytes. Raises ``RuntimeError`` if the driver of a device
    refuses to register the mapping."""

    def __init__(self, writer: PoolWriter, transfers: Sequence[DeviceTransfer], wait_idle: Callable[[], None]) -> None:
        self._writer: PoolWriter | None = writer
        self._pid = os.getpid()
        self._wait_idle = wait_idle
        medium = writer.medium
        buffer = (ctypes.c_char * medium.nbytes).from_address(medium.address)
        with torch.inference_mode(False):  # a step may be closed while an evaluation runs
            self.memory = torch.frombuffer(buffer, dtype=torch.uint8)
        self._transfers: list[DeviceTransfer] = []
        try:
            for transfer in transfers:
                transfer.register(self.memory)
                self._transfers.append(transfer)
        except RuntimeError:
            self.release()
            raise
        writer.before_unmap.append(self.release)

    def is_of(self, writer: PoolWriter) -> bool:
        return self._writer is writer

    def places(self, slot: Slot, part: Part) -> list[torch.Tensor]:
        """The memory in a slot where the bytes of each tensor lie."""
        found = part.places_in_slot.get(slot.index)
        if found is None:
            found = part.places_in_slot[slot.index] = [self._place(slot, number) for number in part.records.tolist()]
        return found

    def _place(self, slot: Slot, number: int) -> torch.Tensor:
        assert self._writer is not None
        at, nbytes = self._writer.range_in_slot(slot, number)
        with torch.inference_mode(False):
            return self.memory[at : at + nbytes]

    def release(self) -> None:
        """Wait until no device writes to the mapping, and unregister it."""
        transfers, self._transfers, self._writer = self._transfers, [], None
        if transfers and os.getpid() == self._pid:  # a forked child has neither the mapping nor the devices
            self._wait_idle()
            for transfer in transfers:
                transfer.unregister(self.memory)
        self.memory = self.memory[:0]  # the pool may be unmapped from now on
