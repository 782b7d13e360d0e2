"""The interface of a strategy, which decides for each checkpoint which tensors are written and when they are copied.

    Strategy.plan (pure) -> WritePlan (frozen) -> Pipeline.submit

A strategy sees the closed step, the pool record of every tensor, and what the slot holds already. It reads no bytes,
takes no slot and changes nothing. ``tests/strategy/test_strategies.py`` is the conformance test of all strategies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from lightck.pipeline.write_table import StagedTensor, TensorRecord, WriteTable
from lightck.state.inventory import Live
from lightck.state.signatures import ClosedStep


class TargetSlot(Protocol):
    """The slot that the checkpoint gets, as a strategy sees it."""

    @property
    def index(self) -> int: ...

    def is_stored(self, live: Live, record: TensorRecord) -> bool:
        """Whether this frozen tensor may be left out: two checkpoints in a row wrote equal bytes of it, its signature
        has not changed since, and the slot holds those bytes."""
        ...

    @property
    def not_due(self) -> frozenset[int]:
        """Numbers of the records that this checkpoint must leave out, because it is not their turn. Empty, unless the
        pool has gradient records."""
        ...

    @property
    def n_in_homes(self) -> int:
        """How many records lie in homes: those with the smallest numbers. A step that is no checkpoint stores only
        these records and gradients. 0, unless the pool has gradient records."""
        ...

    def generation_of(self, record: TensorRecord) -> int | None:
        """The generation in which this record was last written into the slot, or None if the slot does not hold it. A
        plan may leave the record out if the strategy itself knows that the tensor has not changed since then."""
        ...


class WritePlan(NamedTuple):
    """How one checkpoint is written. Each tensor of the step is handled in exactly one place. A tensor of
    ``WriteTable.undecided`` is in ``at_boundary``, ``unchanged`` or ``omitted``. A tensor that ``WriteTable.without``
    took out of its table is in ``unchanged`` or ``omitted``. Every other tensor is handled by its table."""

    closed_step: ClosedStep
    tables: tuple[WriteTable, ...]
    """The tables of the tensors that this checkpoint writes. A table says when its tensors are copied, except those in
    its ``undecided``."""
    at_boundary: tuple[tuple[Live, TensorRecord], ...]
    """Tensors of ``WriteTable.undecided`` that are written: they are copied at the boundary."""
    unchanged: tuple[tuple[Live, TensorRecord], ...]
    """Tensors that are left out, because the slot holds their bytes already."""
    omitted: frozenset[int] = frozenset()
    """Record numbers of tensors of which nothing is stored, because the step is no checkpoint. They are in no other
    field."""

    @property
    def background(self) -> list[Live]:
        """The tensors in host memory that are copied in the background."""
        return [live for table in self.tables for live in table.background]

    @property
    def background_numbers(self) -> list[int]:
        """The record numbers of ``background``, in the same order."""
        return [number for table in self.tables for number in table.background_numbers]

    @property
    def staged(self) -> list[StagedTensor]:
        """The tensors that are sent from a device."""
        return [one for table in self.tables for one in table.staged]

    @property
    def late(self) -> list[tuple[Live, TensorRecord]]:
        """The tensors that are copied from their stand-ins."""
        return [one for table in self.tables for one in table.late]


@runtime_checkable
class Strategy(Protocol):
    """Decides which bytes a checkpoint holds."""

    def plan(self, closed_step: ClosedStep, tables: Sequence[WriteTable], slot: TargetSlot) -> WritePlan:
        """Return the plan for the checkpoint of one step.

        Args:
            closed_step: the step.
            tables: all tensors of the step, with their records.
            slot: the slot that the checkpoint gets. Tensors that it already holds may be left out.
        """
        ...
