"""The strategy that saves what each update consumed, and renews the state itself only now and then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightck.pipeline.plan import TargetSlot, WritePlan
from lightck.strategy.topk import TopK

if TYPE_CHECKING:
    from lightck.pipeline.write_table import WriteTable
    from lightck.state.signatures import ClosedStep


@dataclass(frozen=True, slots=True)
class Gradients:
    """A checkpoint holds what its update consumed, and one of ``base_every`` parts of the state. After a crash the
    optimizer makes the updates since then again, with the same bits. For Adam this is less than half of the bytes of
    ``FullState``. docs/gradients.md says what it costs, and which trainings it takes.

    Source: the idea of checkpoints from gradients is that of LowDiff (Yao et al., 2025).

    Args:
        base_every: each parameter is written with its optimizer state once in so many steps, at least 2. A larger
            number writes less, and needs more space and a longer recovery.
        log_records: for how many steps the pool has room for gradients, at most 255. By default ``2 * base_every - 1``,
            so that any one damaged place in the pool is survived; at least ``base_every``.

        own_optimizers: take optimizers that are no classes of ``torch.optim`` too, if steps of them on stand-ins can be
            made again. You vouch that such a ``step`` reads nothing but the gradient, the options and the state of
            each parameter: no attribute that the loop sets, no global variable, nothing that is drawn.
        compress: ``lightck.TopK(...)``: updates consume only the largest entries of each gradient, so records are much
            smaller. **This changes the training.**

    ``lightck.attach`` raises ``TypeError`` or ``ValueError`` for numbers that cannot be, and ``UnsupportedError`` for a
    training that cannot be saved so.
    """

    base_every: int = 12
    log_records: int | None = None
    own_optimizers: bool = False
    compress: TopK | None = None

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
