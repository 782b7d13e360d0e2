"""The copies of one write plan, as the engine gets them: with the tensors that devices send, and without the tensors
whose eager copies are used."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lightck.pipeline.plan import WritePlan
from lightck.pipeline.write_table import NO_RECORDS, StagedTensor, TensorRecord
from lightck.pool.planned_records import CopyPlan
from lightck.pool.writer import PoolWriter
from lightck.state.blocks import NO_BLOCKS, Blocks
from lightck.state.inventory import Live, in_plain_memory, storage_of


class Submission:
    """The copies of one plan. ``background``: tensors that are read after the boundary. ``background_numbers``: the
    record numbers of these tensors. ``staged``: tensors on devices."""

    def __init__(self, plan: WritePlan) -> None:
        self.plan = plan
        self.staged = plan.staged
        self.has_late = any(table.late for table in plan.tables)
        """Whether tensors are copied from stand-ins."""
        self.background, self.background_numbers = plan.background, plan.background_numbers
        self.n_from_devices = 0
        """How many tensors of ``background`` a device sends; these come last."""
        self.frozen: list[tuple[Live, int]] = []
        """Frozen tensors that this checkpoint writes, with their record numbers."""
        self._keep_alive: list[object] = []
        self._numbers: list[int] = []
        """Record numbers of the tensors that were added one by one; ``_sources`` has the addresses of their bytes."""
        self._sources: list[int] = []
        for live, record in plan.at_boundary:
            self._add_at_boundary(live, record)

    def _add_at_boundary(self, live: Live, record: TensorRecord) -> None:
        source, address = live.tensor, record.address
        if not record.plain:
            source = in_plain_memory(live.written)
            address = source.data_ptr()
        self._numbers.append(record.number)
        self._sources.append(address)
        self._keep_alive.append(storage_of(source))
        if live.is_frozen:
            self.frozen.append((live, record.number))

    def copy_at_boundary(self, tensors: Sequence[StagedTensor]) -> None:
        """Add tensors on a device that are copied at the boundary, instead of being sent in the background."""
        for one in tensors:
            self._add_at_boundary(one.live, one.record)

    def copy_stand_ins_at_boundary(self, tensors: Sequence[tuple[Live, TensorRecord]]) -> None:
        """Add tensors whose stand-ins are complete, and are copied at the boundary."""
        for live, record in tensors:
            assert live.stand_in is not None, "tensors in ``WriteTable.late`` have stand-ins"
            self._numbers.append(record.number)
            self._sources.append(live.stand_in.tensor.data_ptr())
            self._keep_alive.append(storage_of(live.stand_in.tensor))

    def add_from_devices(self, tensors: Sequence[StagedTensor]) -> None:
        """Add tensors that a device sends in the background and that must stay unchanged meanwhile."""
        self.n_from_devices += len(tensors)
        self.background += [one.live for one in tensors]
        self.background_numbers += [one.record.number for one in tensors]

    def blocks(self, writer: PoolWriter) -> Blocks:
        """Return the blocks of the tensors of ``background`` that lie in host memory, in the order of
        ``background``."""
        found = NO_BLOCKS
        for table in self.plan.tables:
            found = found.concatenated(table.blocks(writer))
        return found

    @property
    def keep_alive(self) -> tuple[list[object], ...]:
        """Objects that keep alive the memory from which the copies read."""
        return (*(table.keep_alive for table in self.plan.tables), self._keep_alive)

    def copy_plan(self, *begun_elsewhere: npt.NDArray[np.int64]) -> CopyPlan:
        """Return the plan for the pool's writer. ``begun_elsewhere``: arrays with the numbers of the records that the
        plan must not copy, because their eager copy, late copy or device transfer has begun already."""
        closed_step, tables = self.plan.closed_step, self.plan.tables
        begun = _joined(begun_elsewhere)
        numbers, sources, at_boundary = self._copies()
        unchanged = self.plan.unchanged
        if len(begun):
            left = np.isin(numbers, begun, invert=True)
            numbers, sources, at_boundary = numbers[left], sources[left], at_boundary[left]
        return CopyPlan(
            closed_step.step,
            closed_step.iteration,
            numbers,
            sources,
            at_boundary,
            np.array([record.number for _, record in unchanged], np.int64) if unchanged else NO_RECORDS,
            _joined([*(table.without_bytes for table in tables), begun]),
            len(closed_step.lives) - len(self.plan.omitted),
            closed_step.state,
        )

    def _copies(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
        """Return three parallel arrays with one item for each tensor that is written: its record number, its address,
        and whether it is copied at the boundary."""
        tables = [table for table in self.plan.tables if len(table.numbers)]
        if len(tables) == 1 and not self._numbers:
            return tables[0].numbers, tables[0].sources, tables[0].at_boundary
        n = len(self._numbers)
        numbers = [*(table.numbers for table in tables), np.array(self._numbers, np.int64)]
        sources = [*(table.sources for table in tables), np.array(self._sources, np.uint64)]
        at_boundary = [*(table.at_boundary for table in tables), np.ones(n, np.bool_)]
        return np.concatenate(numbers), np.concatenate(sources), np.concatenate(at_boundary)


def _joined(arrays: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Concatenate arrays of record numbers. If only one array has items, return this array and no copy: the pool's
    writer reuses what it computed for a plan if the next plan contains the same array objects."""
    filled = [array for array in arrays if len(array)]
    if len(filled) > 1:
        return np.concatenate(filled)
    return filled[0] if filled else NO_RECORDS
