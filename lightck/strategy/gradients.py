"""The strategy that saves what each update consumed, and renews the state itself only now and then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightck.pipeline.plan import TargetSlot, WritePlan

if TYPE_CHECKING:
    from lightck.pipeline.write_table import WriteTable
    from lightck.state.signatures import ClosedStep


@dataclass(frozen=True, slots=True)
class Gradients:
    """A checkpoint holds the gradients of its update, and one of ``base_every`` parts of the state. After a crash the
    updates since then are made again, with the same bits.

    base_every: each parameter and its optimizer state are written once in so many steps. log_records: the number of
    gradient records for which a pool has room; None: as many as are needed to survive one damaged place.
    """

    base_every: int = 12
    log_records: int | None = None

    def plan(self, closed_step: ClosedStep, tables: Sequence[WriteTable], slot: TargetSlot) -> WritePlan:
        """Leave out what the slot says is not due; copy every other undecided tensor at the boundary."""
        left_out = slot.not_due
        undecided = [one for table in tables for one in table.undecided]
        at_boundary = tuple(one for one in undecided if one[1].number not in left_out)
        unchanged = [one for one in undecided if one[1].number in left_out]
        if left_out:
            decided = [(live, record) for table in tables for live, record in table.in_host_memory]
            decided += [(one.live, one.record) for table in tables for one in table.staged]
            unchanged += [one for one in decided if one[1].number in left_out]
            tables = [table.without(left_out) for table in tables]
        return WritePlan(closed_step, tuple(tables), at_boundary, tuple(unchanged))
