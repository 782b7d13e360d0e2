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
    optimizer makes again, with the same bits, the updates since each part was written. For Adam this is less than half
    of the bytes of ``FullState``. docs/gradients.md says what it costs, and which trainings it takes.

    Source: the idea of checkpoints from gradients is that of LowDiff (Yao et al., 2025).

    Args:
        base_every: each parameter is written with its optimizer state once every this many steps, at least 2. A larger
            number writes less, and needs more space and a longer recovery. ``"auto"``: twice the ratio of bytes that an
            update changes to bytes of gradients (Adam: 2 x 3 = 6), but no more than fits into half of the free space.
        log_records: for how many steps the pool has room for gradients, at most 255. By default ``2 * base_every - 1``,
            so that any one damaged place in the pool is survived, but not less than the minimum: ``base_every``; with
            ``interval=i`` up to ``base_every + i - 1``, and in a group of ranks ``base_every + 2 * i - 1``.
        own_optimizers: also accept optimizers that are not from ``torch.optim``, if their steps on trial tensors
            can be repeated with the same bits. You vouch that such a ``step`` reads nothing but the gradient, the
            options and the state of each parameter: no attribute that the loop sets, no global variable, no random
            numbers.
        mtbf: mean time between failures, in seconds, for ``base_every="auto"``. After ten steps ``base_every`` is
            lowered to the number that minimizes the cost of copies plus that of recoveries, if this is smaller
            (docs/gradients.md). None or infinity: ``base_every`` is not lowered.
        compress: ``lightck.TopK(...)``: updates consume only the largest entries of each gradient, so records are much
            smaller. **This changes the training.**

    ``lightck.attach`` raises ``TypeError`` or ``ValueError`` for impossible numbers, and ``UnsupportedError`` for a
    training that cannot be saved so.
    """

    base_every: int | str = 12
    log_records: int | None = None
    own_optimizers: bool = False
    mtbf: float | None = None
    compress: TopK | None = None

    def plan(self, closed_step: ClosedStep, tables: Sequence[WriteTable], slot: TargetSlot) -> WritePlan:
        """Leave out what the slot says is not due; copy every other undecided tensor at the boundary. Of a step that
        is no checkpoint, store only its gradients and those parameters and optimizer states that are due."""
        omitted = frozenset[int]() if closed_step.is_checkpoint else _not_recorded(tables, slot.n_in_homes)
        left_out = slot.not_due
        undecided = [one for table in tables for one in table.undecided if one[1].number not in omitted]
        at_boundary = tuple(one for one in undecided if one[1].number not in left_out)
        unchanged = [one for one in undecided if one[1].number in left_out]
        if left_out or omitted:
            decided = [(live, record) for table in tables for live, record in table.in_host_memory]
            decided += [(one.live, one.record) for table in tables for one in table.staged]
            unchanged += [one for one in decided if one[1].number in left_out]
            tables = [table.without(left_out | omitted) for table in tables]
        return WritePlan(closed_step, tuple(tables), at_boundary, tuple(unchanged), omitted)


def _not_recorded(tables: Sequence[WriteTable], n_in_homes: int) -> frozenset[int]:
    """Return the record numbers of the tensors of which a step that is no checkpoint stores nothing: all but gradients
    and what lies in homes. ``n_in_homes``: see ``TargetSlot``."""
    found = [one for table in tables for one in (*table.in_host_memory, *table.undecided)]
    found += [(one.live, one.record) for table in tables for one in table.staged]
    return frozenset(one.number for live, one in found if live.role != "gradient" and one.number >= n_in_homes)
