"""Copies that begin before the boundary: of layers whose update is over while others are still to come.

A layer-wise update (``capture/layerwise.py``) tells which tensors it is done with. Those that the last version left to
background copies go into the slot of the next one at once, several layers to a job of the engine. The boundary decides
as ever: what looks as it did when its copy began need not be copied again, all else is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from lightck.capture.inventory import Live
from lightck.capture.watch import Look, look
from lightck.pool.draft import Draft
from lightck.pool.slots import Slot
from lightck.pool.writer import PoolWriter
from lightck.split import NONE, Columns, Record

PARTS_MAX = 6
"""Jobs for one version: the engine has 16 entries, and earlier versions may hold some."""
PART_NBYTES_MIN = 4 << 20
"""Layers are gathered up to so many bytes, or to their share of the parts, before a job is made of them."""
JOBS_MAX = 8
"""While earlier versions have more jobs than this, nothing is begun early."""


class Early:
    """What is under way of the version to come: nothing, until the first layer of an update."""

    def __init__(self) -> None:
        self._begun: _Begun | None = None

    def copy(self, writer: PoolWriter | None, tensors: Iterable[torch.Tensor], jobs: int) -> None:
        """These are what they will be in the version to come: their copies begin now, where they can.

        ``jobs``: how many earlier versions have.
        """
        columns = None if writer is None else writer.columns
        if self._begun is None and writer is not None and isinstance(columns, Columns) and columns.background:
            slot = writer.slots.choose() if jobs <= JOBS_MAX else None
            self._begun = None if slot is None else _Begun(writer, slot, columns)
        if self._begun is not None:
            self._begun.add(tensors)

    @property
    def draft(self) -> Draft | None:
        return None if self._begun is None else self._begun.draft

    def sift(self, background: Sequence[int]) -> tuple[npt.NDArray[np.int64], int]:
        """Of the records that the version leaves to background copies, those that need none any more; and how many
        others were begun. This waits for those: what is copied again must not be overtaken by its first copy."""
        return (NONE, 0) if self._begun is None else self._begun.sift(background)

    def wait(self) -> None:
        """Help until no copy is under way."""
        if self._begun is not None:
            self._begun.draft.wait()

    def taken(self) -> None:
        """The version that was to come has begun."""
        self._begun = None

    def drop(self) -> None:
        """There will be no version of it."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.draft.drop()


class _Begun:
    """The copies of one update."""

    def __init__(self, writer: PoolWriter, slot: Slot, columns: Columns) -> None:
        self.draft = writer.draft(slot)
        self._writer, self._columns = writer, columns
        self._waiting: list[tuple[int, torch.Tensor]] = []
        self._waiting_nbytes = 0
        self._part_nbytes = max(PART_NBYTES_MIN, sum(live.tensor.nbytes for live in columns.background) // PARTS_MAX)
        self._begun: dict[int, tuple[torch.Tensor, Look]] = {}

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """These have been updated, and will not be again before the version is committed or dropped."""
        for tensor in tensors:
            found = self._columns.place_of(tensor)
            if found is not None and self._is_as_recorded(*found):
                self._waiting.append((found[1], tensor))
                self._waiting_nbytes += tensor.nbytes
        if self._waiting_nbytes >= self._part_nbytes:
            self._begin()

    def _is_as_recorded(self, live: Live, number: int) -> bool:
        record = self._writer.known.get(live.name)
        return isinstance(record, Record) and record.number == number and record.describes(live)

    def _begin(self) -> None:
        if len(self.draft.parts) >= PARTS_MAX:
            return
        numbers = [number for number, _ in self._waiting]
        tensors = [tensor for _, tensor in self._waiting]
        looks = {number: (tensor, look(tensor)) for number, tensor in self._waiting}
        if self.draft.copy(numbers, [tensor.data_ptr() for tensor in tensors], tensors):
            self._begun |= looks
            self._waiting, self._waiting_nbytes = [], 0

    def sift(self, background: Sequence[int]) -> tuple[npt.NDArray[np.int64], int]:
        wanted = set(background)
        good = [n for n, (tensor, was) in self._begun.items() if n in wanted and look(tensor) == was]
        others = len(self._begun) - len(good)
        if others:
            self.draft.wait()
        return np.array(good, np.int64), others
