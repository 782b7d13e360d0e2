"""A write plan on its way to the engine: what devices send joins it, and what began early leaves it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lightck.pipeline.plan import WritePlan
from lightck.pipeline.write_table import NONE, StagedTensor, TensorRecord
from lightck.pool.writer import CopyPlan, PoolWriter
from lightck.state.blocks import NO_BLOCKS, Blocks
from lightck.state.inventory import Live, memory_of, staged


class Submission:
    """Of one plan. ``background`` and ``background_numbers``: what is read behind the boundary, with its records."""

    def __init__(self, plan: WritePlan) -> None:
        self.plan = plan
        self.staged = plan.staged
        self.background, self.background_numbers = plan.background, plan.background_numbers
        self.n_followed = 0
        """How many of ``background``, the last ones, are on their way from a device."""
        self.frozen: list[tuple[Live, int]] = []
        """Still tensors that are written whole, with their records."""
        self._keep: list[object] = []
        self._numbers: list[int] = []
        self._sources: list[int] = []
        for live, record in plan.now:
            self._copy(live, record)

    def _copy(self, live: Live, record: TensorRecord) -> None:
        """At the boundary."""
        source, address = live.tensor, record.address
        if not record.plain:
            source = staged(live.tensor)
            address = source.data_ptr()
        self._numbers.append(record.number)
        self._sources.append(address)
        self._keep.append(memory_of(source))
        if live.is_frozen:
            self.frozen.append((live, record.number))

    def copy_at_boundary(self, tensors: Sequence[StagedTensor]) -> None:
        """These do not wait for their device: they are read now."""
        for one in tensors:
            self._copy(one.live, one.record)

    def follow(self, tensors: Sequence[StagedTensor]) -> None:
        """These are on their way, and read until the copies are done."""
        self.n_followed += len(tensors)
        self.background += [one.live for one in tensors]
        self.background_numbers += [one.record.number for one in tensors]

    def blocks(self, writer: PoolWriter) -> Blocks:
        """The blocks of ``background``, in its order, without what lies on devices."""
        found = NO_BLOCKS
        for table in self.plan.tables:
            found = found.concatenated(table.blocks(writer))
        return found

    @property
    def keep(self) -> tuple[list[object], ...]:
        """The memory that the copies read from."""
        return (*(table.keep for table in self.plan.tables), self._keep)

    def copy_plan(self, *early: npt.NDArray[np.int64]) -> CopyPlan:
        """For the pool's writer. ``early``: records whose copies are under way already, or whose bytes are."""
        closed_step, tables = self.plan.closed_step, self.plan.tables
        begun = np.concatenate([NONE, *early])
        numbers = np.concatenate([*(table.numbers for table in tables), np.array(self._numbers, np.int64)])
        sources = np.concatenate([*(table.sources for table in tables), np.array(self._sources, np.uint64)])
        now = np.concatenate([*(table.now for table in tables), np.ones(len(self._numbers), np.bool_)])
        present = np.array([number for table in tables for number in table.present], np.int64)
        if len(begun):
            left = np.isin(numbers, begun, invert=True)
            numbers, sources, now = numbers[left], sources[left], now[left]
        return CopyPlan(
            closed_step.step,
            closed_step.iteration,
            numbers,
            sources,
            now,
            np.array([record.number for _, record in self.plan.unchanged], np.int64),
            np.concatenate([present, begun]),
            len(closed_step.lives),
            closed_step.state,
        )
