"""The whole state in each checkpoint, so that each is complete in itself."""

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
    """Every version is complete in itself: parameters, buffers, optimizer state and all small state."""

    def plan(self, closed_step: ClosedStep, tables: Sequence[WriteTable], slot: TargetSlot) -> WritePlan:
        """All tensors; of those that no update touches only what the slot does not hold already."""
        single = [one for table in tables for one in table.single]
        unchanged = tuple(one for one in single if one[0].is_frozen and slot.is_stored(*one))
        left_out = {record.number for _, record in unchanged}
        now = tuple(one for one in single if one[1].number not in left_out)
        return WritePlan(closed_step, tuple(tables), now, unchanged)
