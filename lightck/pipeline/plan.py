"""What a strategy says of a checkpoint: which tensors are written, from where, at the boundary or behind it.

    Strategy.plan (pure) -> WritePlan (frozen) -> Pipeline.submit

A strategy sees the closed step, in which every tensor has a record of the pool, and what the slot holds already. It
reads no bytes, takes no slot and changes nothing. ``tests/strategy/test_strategies.py`` holds what each has to keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from lightck.pipeline.write_table import StagedTensor, TensorRecord, WriteTable
from lightck.state.inventory import Live
from lightck.state.signatures import ClosedStep


class TargetSlot(Protocol):
    """The slot that the checkpoint gets, as far as a strategy may know it."""

    @property
    def index(self) -> int: ...

    def is_stored(self, live: Live, record: TensorRecord) -> bool:
        """Whether it holds what this still tensor holds, as two checkpoints in a row have shown."""
        ...

    def generation_of(self, record: TensorRecord) -> int | None:
        """The generation in which the bytes of this record that lie in the slot were written; None: it has none. A
        plan may leave them out where the strategy itself knows that the tensor has not changed since."""
        ...


@dataclass(frozen=True, slots=True)
class WritePlan:
    """One checkpoint. Each tensor of the closed step has one place: in ``tables``, in ``now`` or in ``unchanged``."""

    closed_step: ClosedStep
    tables: tuple[WriteTable, ...]
    """Those that updates change: written at the boundary, in the background, or from their device."""
    now: tuple[tuple[Live, TensorRecord], ...]
    """Of ``WriteTable.single``, which are decided at each checkpoint: copied at the boundary itself."""
    unchanged: tuple[tuple[Live, TensorRecord], ...]
    """Left out, because the slot holds their bytes. They come from ``WriteTable.single``, or were taken from a table by
    ``WriteTable.without``."""

    @property
    def background(self) -> list[Live]:
        """What is left to the copy threads."""
        return [live for table in self.tables for live in table.background]

    @property
    def background_numbers(self) -> list[int]:
        """The records of ``background``."""
        return [number for table in self.tables for number in table.background_numbers]

    @property
    def staged(self) -> list[StagedTensor]:
        """What lies on a device."""
        return [one for table in self.tables for one in table.staged]


@runtime_checkable
class Strategy(Protocol):
    """Which bytes a checkpoint holds."""

    def plan(self, closed_step: ClosedStep, tables: Sequence[WriteTable], slot: TargetSlot) -> WritePlan:
        """The checkpoint of this step.

        Args:
            closed_step: the closed step.
            tables: all its tensors, with their records.
            slot: what lies in the slot that the checkpoint gets, and so may be left out.
        """
        ...
