"""Compares the copies of the replica with the live tensors, while these still have the state of the checkpoint.

Copies of tensors in host memory must have the same bits: in the first checkpoints and under ``LIGHTCK_CHECK=1`` all
bytes are compared, later some blocks in turn. Those of tensors on a device may drift apart, because the device computes
other bits: in turn some units are measured, and renewed from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lightck.state.blocks import ALL, FULLY_COMPARED_FIRST, Blocks, RoundRobin
from lightck.state.inventory import Live
from lightck.state.signatures import MemoryLayouts
from lightck.state.unit_replicas import UnitReplica, dense_on_host, largest_difference

BLOCK = 64 << 10
"""Bytes of a block that is compared in turn."""
BUDGET_NBYTES = 16 << 20
"""How many bytes in host memory are compared for one checkpoint."""
ROUND = 16
"""Each checkpoint measures at least 1 / ``ROUND`` of the bytes that all units on devices have together. So a round over
all of them takes at most ``ROUND`` checkpoints. A unit that is not usable at its turn is left out in this round."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor whose copy has other bits. largest: the largest absolute difference of their elements."""

    name: str
    largest: float


class ReplicaComparison:
    """Compares the copies of all units with the live tensors of which they are copies."""

    def __init__(self, replicas: Sequence[UnitReplica], *, reads_all: bool) -> None:
        self._reads_all = reads_all
        on_host_only = [replica for replica in replicas if not replica.is_on_device]
        self._on_device = [replica for replica in replicas if replica.is_on_device]
        self._pairs = [pair for one in on_host_only for pair in zip(one.lives, one.copies, strict=True)]
        self._pairs = [(live, copy) for live, copy in self._pairs if copy.nbytes]
        self._layouts = MemoryLayouts([live.tensor for live, _ in self._pairs])
        nbytes = [copy.nbytes for _, copy in self._pairs]
        starts = [0] * len(nbytes)
        self._live_blocks = Blocks.of(self._layouts.addresses, nbytes, starts, BLOCK)
        self._copy_blocks = Blocks.of([copy.data_ptr() for _, copy in self._pairs], nbytes, starts, BLOCK)
        self._round_robin, self._n_compared, self._turn = RoundRobin(), 0, 0
        self._began = self.verified_until = 0
        """``verified_until``: the checkpoints up to this generation are known to hold the right bytes. ``_began``: the
        generation of the checkpoint with which the present round of comparisons began."""

    # -- in host memory

    def differences(self, generation: int) -> list[Difference]:
        """Compare blocks of the checkpoint of this generation. If one of them differs, all bytes are compared. Nothing
        is compared if a live tensor has other memory than at the boundary."""
        if not self._pairs or not self._layouts.are_unchanged():
            return []
        is_whole = self._reads_all or self._n_compared < FULLY_COMPARED_FIRST
        chosen, ends_round = self._round_robin.next_blocks(self._live_blocks, None if is_whole else BUDGET_NBYTES)
        self._n_compared += 1
        if (self._live_blocks.checksums(chosen) != self._copy_blocks.checksums(chosen)).any():
            return self._all_differences()
        if chosen is ALL:
            self._began = self.verified_until = generation
        elif ends_round:
            self.verified_until, self._began = self._began, generation
        return []

    def _all_differences(self) -> list[Difference]:
        differs = self._live_blocks.checksums() != self._copy_blocks.checksums()
        owners = sorted(set(self._live_blocks.owners[differs].tolist()))
        pairs: list[tuple[Live, torch.Tensor]] = [self._pairs[i] for i in owners]
        return [Difference(live.name, largest_difference(live.tensor.detach(), copy)) for live, copy in pairs]

    # -- on a device

    def measure_next(self, usable: Callable[[UnitReplica], bool]) -> tuple[list[Difference], int]:
        """Measure the units on a device whose turn it is, and renew them. Return the differences, and how many units
        were renewed. ``usable``: whether the live tensors of a unit still have the state of the checkpoint. The device
        must have completed the work that makes this state."""
        total, nbytes, found, n_renewed = sum(one.nbytes for one in self._on_device), 0, list[Difference](), 0
        for _ in range(len(self._on_device)):
            replica = self._on_device[self._turn % len(self._on_device)]
            self._turn += 1
            if usable(replica):
                found += _measured(replica)
                replica.renew()
                n_renewed += 1
            nbytes += replica.nbytes
            if nbytes * ROUND >= total:
                break
        return found, n_renewed


def _measured(replica: UnitReplica) -> list[Difference]:
    pairs = zip(replica.lives, replica.copies, strict=True)
    found = [
        Difference(live.name, largest_difference(dense_on_host(live.tensor), copy.detach())) for live, copy in pairs
    ]
    return [one for one in found if one.largest > 0]
