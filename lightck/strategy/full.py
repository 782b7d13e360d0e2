"""The strategy that saves the whole state in each checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightck.pipeline.plan import TargetSlot, WritePlan

if TYPE_CHECKING:
    from lightck.pipeline.write_table import WriteTable
    from lightck.state.signatures import ClosedStep


@dataclass(frozen=True, slots=True)
class FullState:
    """Every checkpoint is complete in itself: parameters, buffers, optimizer state and all small state."""

    def plan(self, closed_step: ClosedStep, tables: Sequence[WriteTable], slot: TargetSlot) -> WritePlan:
        """Decide about the tensors that the tables leave undecided: a frozen tensor whose bytes the slot holds already
        is left out, and the remaining undecided ones are copied at the boundary. The tables plan the decided
        tensors."""
        undecided = [one for table in tables for one in table.undecided]
        unchanged = tuple(one for one in undecided if one[0].is_frozen and slot.is_stored(*one))
        left_out = {record.number for _, record in unchanged}
        at_boundary = tuple(one for one in undecided if one[1].number not in left_out)
        return WritePlan(closed_step, tuple(tables), at_boundary, unchanged)
