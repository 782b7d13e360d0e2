"""What the checkpoints of one slot have in common while their plans stay the same: the copy array, and the tensor
records of the manifest except generation and step.

Most trainings write the same tensors at each checkpoint, from the same addresses. Then only two columns of the records
change from one checkpoint of a slot to the next.
"""

from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from lightck._native import ffi, lib

if TYPE_CHECKING:
    from lightck._native import CData
    from lightck.pool.slots import SlotImage


class CopyPlan(NamedTuple):
    """The copies of one checkpoint, given by record numbers and addresses. The plan refers to no tensors. ``records``,
    ``sources`` and ``at_boundary`` are parallel arrays. ``PoolWriter.numbers`` maps names to record numbers."""

    step: int
    iteration: int
    """As in ``ManifestHeader``."""
    records: npt.NDArray[np.int64]
    """Record numbers of the tensors to copy."""
    sources: npt.NDArray[np.uint64]
    """Address of each tensor's bytes."""
    at_boundary: npt.NDArray[np.bool_]
    """Whether the tensor is copied before ``begin`` returns."""
    unchanged: npt.NDArray[np.int64]
    """Record numbers of the tensors whose bytes in the slot are already right."""
    recorded_only: npt.NDArray[np.int64]
    """Record numbers of the tensors that get a new tensor record, but are not copied by ``begin``: tied and empty
    tensors, and tensors that a reservation copies."""
    n_tensors: int
    """Number of tensors in the checkpoint. Each is in exactly one of ``records``, ``unchanged`` and
    ``recorded_only``."""
    state: bytes
    """The small state."""


class PlannedRecords:
    """The copies and records that were computed for one plan and one slot. They are valid for the slot's later plans
    with the same arrays, until the pool's entries change or ``SlotImage.mark_missing`` is called."""

    def __init__(self, plan: CopyPlan, template: npt.NDArray[np.void], origins: int | npt.NDArray[np.uint64]) -> None:
        """``template``: the copy array of all entries of the pool, with offsets in the slot (or home). ``origins``:
        offset of the slot in the pool; or for each entry the offset of the region in which this checkpoint writes
        it."""
        self._arrays, self._template = _arrays_of(plan), template
        self._written = np.concatenate([plan.records, plan.recorded_only])
        """Record numbers of the tensors whose records get the generation and step of the checkpoint."""
        listed = np.zeros(len(template), np.bool_)
        listed[self._written] = listed[plan.unchanged] = True
        self._not_listed = ~listed
        self.n_listed = int(np.count_nonzero(listed))
        """Number of different records in the plan."""
        self.copies = copies_of(template, origins, plan.records, plan.sources)
        self.copies["flags"] = np.where(plan.at_boundary, lib.LCK_NOW, 0)
        self.c_copies: CData = ffi.from_buffer("lck_copy[]", self.copies)
        self._are_all_written = self.n_listed == len(template) and not len(plan.unchanged)
        self._columns: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]] | None = None
        """The two columns of the image's records that change: generations and steps. None if the plan does not write
        every record."""

    def matches(self, plan: CopyPlan, template: npt.NDArray[np.void]) -> bool:
        """Whether these records were computed for the arrays of this plan and for this template."""
        return template is self._template and all(map(is_, self._arrays, _arrays_of(plan)))

    def write(self, image: SlotImage) -> None:
        """Write into the image what is the same in all checkpoints with this plan. Records that the plan writes get
        their offset and checksum index, and their ``SlotImage.in_slot`` becomes True. Records that the plan does not
        list get generation 0, and their ``in_slot`` becomes False."""
        records, written = image.records, self._written
        records["offset"][written] = self._template["dst"][written]
        records["crc"][written] = self._template["crc_index"][written]
        records["generation"][self._not_listed] = 0
        image.in_slot[written] = True
        image.in_slot[self._not_listed] = False
        if self._are_all_written:  # whole columns are faster
            self._columns = records["generation"], records["step"]

    def stamp(self, image: SlotImage, generation: int, step: int) -> None:
        """Write the generation and the step of a checkpoint into the records that the plan writes."""
        if self._columns is not None:
            generations, steps = self._columns
            generations.fill(generation)
            steps.fill(step)
            return
        image.records["generation"][self._written] = generation
        image.records["step"][self._written] = step


def _arrays_of(plan: CopyPlan) -> tuple[object, ...]:
    return plan.records, plan.sources, plan.at_boundary, plan.unchanged, plan.recorded_only


def copies_of(
    template: npt.NDArray[np.void],
    origins: int | npt.NDArray[np.uint64],
    records: npt.NDArray[np.int64],
    sources: npt.NDArray[np.uint64] | int,
) -> npt.NDArray[np.void]:
    """Return the copy array for these records, without flags. ``origins``: as for ``PlannedRecords``. ``sources``:
    address of each record's bytes; 0: the records have no source, because a device stores the bytes."""
    copies = template[records]
    copies["dst"] += np.uint64(origins) if isinstance(origins, int) else origins[records]
    copies["src"] = sources
    return copies
