"""The strategy that saves the state from a copy in host memory, on which lightck repeats each update of the training.

*The replica* is a copy of each parameter and its optimizer state (a *unit*) in host memory. An optimizer of the same
class as that of the training makes each update on the copy too, with the gradients and options that the update of the
training consumed. So the bytes of the copy are those of the training, if the training is in host memory too; on a
device an update has other bits than on the CPU. Of a model on a device only the gradients cross to host memory, and not
the state.

    update t      hooks/consumed.py         the last pre-step hook holds the gradients, and copies the options
    update made   session/replica_updates.py  unit by unit, a thread makes the same update of the copies
    boundary t    `prepare`                 the first time: allocate the copies. Renew those that are not current from
                                            the live tensors. All else (buffers, small state, what no optimizer updates)
                                            is read as with FullState
                  pipeline/late_copies.py   a held job for each group of copies, started when the group is complete
    gate t        `settle`                  the thread has finished its work; the gradients still have their checksums,
                                            and are released
                  `validate`                compare some copies with the live tensors, which still have state t
    commit        an ordinary pool of whole checkpoints

Invariant: a checkpoint commits only if each of its copies has got every update since it was last found equal or
renewed, and the gradients of these updates were unchanged after the copy had used them. The thread writes to a copy
only between an update and the gate that follows it, and the pipeline reads a copy only after its update and before the
next one. The live tensors are read on the thread that trains.

| what happens | what follows |
|---|---|
| an update that was not captured, or not wholly; ``load_state_dict``; a write between updates that signatures or checksums show; replaced live tensors | the units are renewed from the live tensors, before the next checkpoint takes them (`replica_renewed`) |
| a gradient is written before its copy has used it | the checkpoint is given up, the unit is renewed, and such gradients are copied before the update from then on |
| a copy of a tensor in host memory differs (a write that nothing shows, an update that has other bits if it is made again) | the checkpoint is given up, a warning names the tensor, older checkpoints since the last equal comparison are struck once a newer one is committed, and every checkpoint is taken from the live tensors from then on |
| a copy of a tensor on a device differs | `replica_drift` says how much. A few units are renewed for each checkpoint, in turn. The checkpoint says that it is not exact |
| the thread cannot make an update | the same as for a copy that differs |
| a relayout | its checkpoint is committed within the boundary, so it is copied from the live tensors |
| a kill | the newest committed checkpoint, as with FullState |
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightck.pipeline.plan import TargetSlot, WritePlan
from lightck.strategy.full import FullState

if TYPE_CHECKING:
    from lightck.pipeline.write_table import WriteTable
    from lightck.state.signatures import ClosedStep


@dataclass(frozen=True, slots=True)
class Replica:
    """Every checkpoint is complete in itself, as with ``FullState``. Parameters and optimizer state are taken from a
    copy in host memory, on which lightck makes each update of the training too. So a model on a device sends its
    gradients, and not its state. **On a CPU ``FullState`` is cheaper**, because it copies as many bytes without a
    second update; and on a device the copy has other bits than the training, so checkpoints are not exact.
    docs/replica.md says what it costs, and which trainings it takes.

    Args:
        own_optimizers: also accept optimizers that are not from ``torch.optim``, if their steps on trial tensors
            can be repeated with the same bits. You vouch that such a ``step`` reads nothing but the gradient, the
            options and the state of each parameter: no attribute that the loop sets, no global variable, no random
            numbers.

    ``lightck.attach`` raises ``UnsupportedError`` for a training that cannot be saved so.
    """

    own_optimizers: bool = False

    def plan(self, closed_step: ClosedStep, tables: Sequence[WriteTable], slot: TargetSlot) -> WritePlan:
        """Plan as ``FullState`` does. (The write tables say which tensors are copied from the replica.)"""
        return FullState().plan(closed_step, tables, slot)
