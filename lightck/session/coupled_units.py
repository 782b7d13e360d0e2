"""Which units of a rank lie whole in each checkpoint of ``Gradients``, because this rank cannot replay
their updates.

A unit is a parameter with its optimizer state. A class that is not element-wise (Muon) couples the elements of a
parameter. If the parameter is a DTensor that is sharded, torch sends parts of it to other ranks during the update, so
no rank can replay the update by itself. No gradient of such a unit is recorded: it lies in the slots of the pool,
as buffers do, and each checkpoint takes its state from the live tensors. All other units stay with gradients. (With
plain tensors a class of torch.optim sends nothing to other ranks. So its updates can be replayed, also if ``layout=``
says that the tensors are parts.)

    update      ``hooks/consumed.py`` takes no gradient of it
    boundary    ``pipeline/gradient_pools.py`` gives it extents in slots; ``strategy/gradients.py`` writes it whole into
                each checkpoint; the records of updates between checkpoints leave it out
    recovery    no update of it is replayed; its bytes are those of the checkpoint's own record

Each rank decides for itself, by the placements of its tensors: it reads nobody else's pool to replay updates.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lightck.state.inventory import OptimizerView
from lightck.state.local_tensors import is_dtensor
from lightck.state.parts import is_part
from lightck.state.torch_classes import ELEMENT_WISE


def coupled_units(optimizers: Iterable[OptimizerView]) -> frozenset[str]:
    """Return the names of the parameters of these units."""
    coupling = (one for one in optimizers if type(one.optimizer) not in ELEMENT_WISE)
    return frozenset(name for one in coupling for name, p in one.params if _is_sharded(p))


def _is_sharded(held: torch.Tensor) -> bool:
    """Whether this is a DTensor of which a rank may hold less than the whole. (One that is replicated on all dimensions
    of its mesh is updated on each rank as a plain tensor is.)"""
    if not is_part(held):
        return False
    assert is_dtensor(held)
    mesh = held.device_mesh
    return any(mesh.size(dim) > 1 and not one.is_replicate() for dim, one in enumerate(held.placements))
