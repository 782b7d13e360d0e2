"""The check of new bases (``LIGHTCK_CHECK=1``): a unit that is about to be written as a new base must have
the bytes that a replay from its old base gives.

    boundary t   the old base and the records up to t - 1 are committed, so both are read from the pool
                 the update of step t is in memory
                 replay: the base, then each update, on tensors of its own. The result has the bits of the live unit

So each write that the updates do not explain is found within ``base_every`` steps, however small it is, and wherever it
was made. The audit of updates compares parts, and the search for outside writes does not see a write inside
``optimizer.step()`` to a tensor that this optimizer has.

Invariant: nothing of the training changes. The replay has tensors and optimizer objects of its own, calls no hook, and
draws no random number (``state/partial_optimizer.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import numpy as np
import torch

from lightck.errors import CorruptPoolError, PoolIOError, ReplayError
from lightck.pool.format.layout import HOME_ROLES
from lightck.pool.format.structures import DamagedError
from lightck.pool.gradient_reader import GradientCheckpoint
from lightck.pool.gradient_writer import GradientWriter
from lightck.pool.writer import PoolWriter
from lightck.restore.gradient_state import reason_of, units_after
from lightck.restore.tensor_writes import ordinary_tensors, same_bits
from lightck.session.capture import Capture
from lightck.session.gradient_arguments import optimizers_at_hand
from lightck.state import values
from lightck.state.inventory import unit_of
from lightck.state.update_record import Read, consumed_update


class CheckedBases(NamedTuple):
    """What a check found. At most one of ``difference`` and ``unreadable`` is set.

    difference: which tensor differs, or why the replay failed. unreadable: why units could not be checked. since,
    generation: step and generation of the oldest base that was checked; the checkpoints after it may be wrong, if there
    is a difference.
    """

    difference: str = ""
    unreadable: str = ""
    since: int = 0
    generation: int = 0


class BaseCheck:
    """Checks the units that the next checkpoint writes to a home."""

    def __init__(self, capture: Capture, writer: Callable[[], PoolWriter | None]) -> None:
        """``writer``: returns the writer of the pool; None if there is no pool yet."""
        self._capture, self._writer = capture, writer

    def run(self, step: int, value: object, read: Read, updated: Collection[str]) -> CheckedBases:
        """Compare the units that are due at a boundary. step: of the boundary. value: what the small state holds of
        its update. read: the function that returns a tensor of the update's gradients by name. updated: the names of
        the parameters that the update changed."""
        writer = self._writer()
        if not isinstance(writer, GradientWriter) or writer.log.step != step - 1 or writer.log.must_be_full:
            return CheckedBases()
        if any(slot.in_flight for slot in writer.slots.slots):
            return CheckedBases()  # the old bases are not committed yet
        names = writer.units.names
        plan = writer.plan_record(np.array([name in updated for name in names], np.bool_))
        if plan is None or not len(plan.units):
            return CheckedBases()
        due = {names[unit] for unit in plan.units.tolist()}
        try:
            checkpoint = writer.last_checkpoint()
            difference = "" if checkpoint is None else self._difference(checkpoint, due, value, read)
            bases = writer.log.bases
            since, generation = int(bases.written[plan.units].min()), int(bases.generation[plan.units].min())
            return CheckedBases(difference, since=since, generation=generation)
        except (DamagedError, PoolIOError) as err:
            return CheckedBases(unreadable=str(err))

    def _difference(self, checkpoint: GradientCheckpoint, due: Collection[str], value: object, read: Read) -> str:
        live = self._live_units(due)
        try:
            following = consumed_update(values.unpack(values.pack(value, path="update")), read)
            with ordinary_tensors():
                replayed = units_after(checkpoint, following, due, optimizers_at_hand(self._capture))
        except (ReplayError, CorruptPoolError) as err:
            return reason_of(err)
        for name in sorted({*live, *replayed}):
            if not _is_equal(live.get(name), replayed.get(name)):
                return (
                    f"the older copy of {name!r} in the pool, with the updates since then replayed, gives other bits "
                    "than the training has"
                )
        return ""

    def _live_units(self, parameters: Collection[str]) -> Mapping[str, torch.Tensor]:
        """Return name -> tensor of these parameters and of their optimizer state."""
        own = (one for one in self._capture.tensors() if one.alias is None and one.role in HOME_ROLES)
        return {one.name: one.tensor for one in own if unit_of(one) in parameters}


def _is_equal(live: torch.Tensor | None, replayed: torch.Tensor | None) -> bool:
    if live is None or replayed is None or live.shape != replayed.shape or live.dtype != replayed.dtype:
        return False
    return same_bits(live, replayed)
