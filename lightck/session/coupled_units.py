"""Which units of a rank lie whole in each checkpoint of ``Gradients``, because their updates cannot be made again here.

A unit is a parameter with its optimizer state. A class that is not element-wise (Muon, or one of the user's own)
couples the elements of a parameter. If this rank holds only a part of the parameter, its update of the part needs what
other ranks hold, or may need it. So no gradient of such a unit is recorded: the unit lies in the slots of the pool, as
buffers do, and each checkpoint takes its state from the live tensors. All other units stay with gradients.

    update      ``hooks/consumed.py`` takes no gradient of it
    boundary    ``pipeline/gradient_pools.py`` gives it extents in slots; ``strategy/gradients.py`` writes it whole, but
                not into a record that is no checkpoint
    recovery    no update of it is made again; its bytes are those of the checkpoint's own record

Each rank decides for itself, by the placements of its tensors: it reads nobody else's pool to make updates again.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lightck.session.capture import Capture
from lightck.state.local_tensors import is_dtensor
from lightck.state.parts import is_part
from lightck.state.torch_classes import ELEMENT_WISE


def coupled_units(capture: Capture) -> frozenset[str]:
    """Return the names of the parameters of these units."""
    found = {
        name: p for view in capture.optimizers if type(view.optimizer) not in ELEMENT_WISE for name, p in view.params
    }
    if not found:
        return frozenset()
    partly_held = frozenset() if capture.layout is None else frozenset(_partly_held(capture))
    return frozenset(name for name, p in found.items() if name in partly_held or _is_sharded(p))


def _is_sharded(held: torch.Tensor) -> bool:
    """Whether this is a DTensor of which a rank may hold less than the whole. (One that is replicated on all dimensions
    of its mesh is updated on each rank as a plain tensor is.)"""
    if not is_part(held):
        return False
    assert is_dtensor(held)
    mesh = held.device_mesh
    return any(mesh.size(dim) > 1 and not one.is_replicate() for dim, one in enumerate(held.placements))


def _partly_held(capture: Capture) -> Iterator[str]:
    """Yield the names of the parameters of which a layout says that this rank holds less than the whole."""
    for live in capture.tensors():
        if live.role == "param" and live.part is not None:
            held = live.part.pieces
            is_whole = len(held) == 1 and tuple(held[0].size) == live.part.logical_shape
            if not is_whole:
                yield live.name.removeprefix("model/")
