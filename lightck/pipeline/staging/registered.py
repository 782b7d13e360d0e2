"""A pool's mapping as memory that devices write to by themselves."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence

import torch

from lightck.pool.slots import Slot
from lightck.pool.writer import PoolWriter
from lightck.state.device_transfers import DeviceTransfer


class RegisteredPool:
    """Of one writer, until ``release`` or until its mapping goes. ``RuntimeError`` where a device's driver refuses.
    ``settle`` waits until nothing is on its way there."""

    def __init__(self, writer: PoolWriter, transfers: Sequence[DeviceTransfer], settle: Callable[[], None]) -> None:
        self._writer: PoolWriter | None = writer
        self._pid = os.getpid()
        self._settle = settle
        medium = writer.medium
        buffer = (ctypes.c_char * medium.nbytes).from_address(medium.address)
        with torch.inference_mode(False):  # a version may be closed inside an evaluation
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

    def place(self, slot: Slot, number: int) -> torch.Tensor:
        """Where a record's bytes lie in a slot."""
        assert self._writer is not None
        at, nbytes = self._writer.place(slot, number)
        return self.memory[at : at + nbytes]

    def release(self) -> None:
        transfers, self._transfers, self._writer = self._transfers, [], None
        if transfers and os.getpid() == self._pid:  # in a forked child the mapping is not there
            self._settle()
            for transfer in transfers:
                transfer.unregister(self.memory)
        self.memory = self.memory[:0]  # the mapping may go now
