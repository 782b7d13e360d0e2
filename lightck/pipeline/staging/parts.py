"""The tensors of a checkpoint that lie on devices, split into parts that are sent together.

For a model of many small tensors, splitting takes longer than sending. So the parts are computed once, and used for
every checkpoint until the tensors, the transfer method or the number of parts change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt
import torch

from lightck.pipeline.write_table import NO_RECORDS, StagedTensor
from lightck.state.device_transfers import DeviceTransfer, bytes_of, is_dense_tensor

PARTS_MAX = 6
"""The largest number of parts that are sent while the device computes. Each part has one job of the engine."""
PART_NBYTES_MIN = 16 << 20
"""The smallest size in bytes of a part that is sent while the device computes. Only the last one may be smaller."""
PACKED_NBYTES_MAX = 64 << 10
"""The largest size in bytes of a tensor that is packed."""
ALIGN = 256
"""The offset of each tensor in the memory for a part is a multiple of ``ALIGN`` bytes."""


class Order(Enum):
    """When the tensors of a part are read on their device."""

    PACKED = "packed"
    """In the order of the computation: they are copied next to each other in memory of the device, by few kernels, and
    sent from there as one. Sending each of many small tensors would take the training thread much longer."""
    IN_ORDER = "in order"
    """In the order of the computation, each sent by itself."""
    BESIDE = "beside"
    """While the device computes."""


@dataclass(slots=True)
class Part:
    """Tensors that are sent together. Tensors of one device are neighbours."""

    tensors: list[StagedTensor]
    order: Order
    records: npt.NDArray[np.int64] = field(init=False)
    """The record number of each tensor."""
    offsets: list[int] = field(init=False)
    """Where each tensor lies in memory for the whole part."""
    nbytes: int = field(init=False)
    """Bytes of memory for the whole part."""
    sources: list[torch.Tensor] = field(init=False)
    """The bytes of each tensor in its own memory; for a tensor that is not dense, the tensor itself. These are the same
    tensors as long as this part is used, so a later ``.data = ...`` does not change which memory is sent."""
    devices: list[tuple[DeviceTransfer, slice]] = field(init=False)
    """Each device, and which of the tensors lie on it."""
    places_in_slot: dict[int, list[torch.Tensor]] = field(init=False, default_factory=dict)
    """Index of a slot of a registered pool -> the place of each tensor there."""
    _places: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = field(init=False, default_factory=dict)
    """id of memory -> that memory, and the place of each tensor there."""

    def __post_init__(self) -> None:
        self.records = np.array([one.record.number for one in self.tensors], np.int64)
        self.offsets, self.nbytes = packed_layout(self.tensors)
        self.sources = [_bytes_of(one.live.written) for one in self.tensors]
        transfers = [one.transfer for one in self.tensors]
        starts = [i for i, one in enumerate(transfers) if i == 0 or transfers[i - 1] is not one]
        ends = [*starts[1:], len(transfers)]
        self.devices = [(transfers[i], slice(i, j)) for i, j in zip(starts, ends, strict=True)]

    def places_in(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The place of each tensor in this memory for the whole part."""
        kept = self._places.get(id(memory))  # the tensor is kept too, so that no other one gets its id
        if kept is None:
            kept = self._places[id(memory)] = memory, self._slices(memory)
        return kept[1]

    def _slices(self, memory: torch.Tensor) -> list[torch.Tensor]:
        with torch.inference_mode(False):  # a step may be closed in inference mode
            return [memory[at : at + one.record.nbytes] for at, one in zip(self.offsets, self.tensors, strict=True)]


@dataclass(frozen=True, slots=True)
class Parts:
    """All parts of a checkpoint. ``left``: tensors for which there is no part, because too few jobs are free."""

    parts: list[Part]
    left: list[StagedTensor]
    beside_nbytes: int
    """The size of the largest part that is sent while the device computes."""
    records: npt.NDArray[np.int64]
    """The record numbers of all tensors of ``parts``."""


def split(staged: Sequence[StagedTensor], parts_max: int, *, reads_during_step: bool) -> Parts:
    """Split the tensors into at most ``parts_max`` parts. ``reads_during_step``: whether tensors may be read while the
    next step computes; if not, they have been copied on the device before, and the order does not matter."""
    in_order = [one for one in staged if one.in_order and reads_during_step]
    packed = by_device([one for one in in_order if one.record.nbytes <= PACKED_NBYTES_MAX])
    alone = by_device([one for one in in_order if one.record.nbytes > PACKED_NBYTES_MAX])
    parts = [Part(tensors, order) for tensors, order in ((packed, Order.PACKED), (alone, Order.IN_ORDER)) if tensors]
    others = [one for one in staged if not (one.in_order and reads_during_step)]
    rest = split_into_parts(others, min(parts_max - len(parts), PARTS_MAX))
    if len(parts) > parts_max or (others and not rest):
        return Parts([], list(staged), 0, NO_RECORDS)
    beside = [Part(tensors, Order.BESIDE) for tensors in rest]
    parts += beside
    records = np.concatenate([part.records for part in parts]) if parts else NO_RECORDS
    return Parts(parts, [], max((part.nbytes for part in beside), default=0), records)


def split_into_parts(tensors: Sequence[StagedTensor], parts_max: int) -> list[list[StagedTensor]]:
    """Split tensors into at most ``parts_max`` parts of about the same size. Keep the order of the tensors of each
    device."""
    if parts_max < 1:
        return []
    share = max(PART_NBYTES_MIN, -(-sum(one.record.nbytes for one in tensors) // parts_max))
    parts: list[list[StagedTensor]] = []
    filled = share
    for one in tensors:
        if filled >= share:
            parts.append([])
            filled = 0
        parts[-1].append(one)
        filled += one.record.nbytes
    return [by_device(part) for part in parts]


def one_part_per_device(staged: Sequence[StagedTensor]) -> list[Part]:
    """The tensors of each device as a part."""
    transfers = dict.fromkeys(one.transfer for one in staged)
    return [Part([one for one in staged if one.transfer is transfer], Order.BESIDE) for transfer in transfers]


def by_device(tensors: list[StagedTensor]) -> list[StagedTensor]:
    """The same tensors, those of one device together."""
    transfers = list(dict.fromkeys(one.transfer for one in tensors))
    return tensors if len(transfers) <= 1 else sorted(tensors, key=lambda one: transfers.index(one.transfer))


def packed_layout(tensors: Sequence[StagedTensor]) -> tuple[list[int], int]:
    """Return the offset of each tensor in memory for all of them, and how many bytes this memory must have."""
    offsets, at = [], 0
    for one in tensors:
        offsets.append(at)
        at += -(-one.record.nbytes // ALIGN) * ALIGN
    return offsets, at


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return bytes_of(tensor) if is_dense_tensor(tensor) else tensor.detach()
