"""Which units lie whole in each checkpoint of ``Gradients``, because their updates cannot be replayed one by one.

A unit is a parameter with its optimizer state. If a parameter of an optimizer shares memory with another parameter
(``b.data = a.data``, ``nn.Parameter(a)``, views of one flat parameter), the update of one changes the other. A class
that is not element-wise (Muon) couples the elements of a parameter. If the parameter is a DTensor that is sharded,
torch sends parts of it to other ranks during the update, so no rank can replay the update by itself. No gradient of
such a unit is recorded: it lies in the slots of the pool, as buffers do, and each checkpoint takes its state from the
live tensors. All other units stay with gradients.
(With plain tensors a class of torch.optim sends nothing to other ranks. So its updates can be replayed, also if
``layout=`` says that the tensors are parts.)

    update      ``hooks/consumed.py`` takes no gradient of it
    boundary    ``pipeline/gradient_pools.py`` gives it extents in slots; ``strategy/gradients.py`` writes it whole into
                each checkpoint; the records of updates between checkpoints leave it out
    recovery    no update of it is replayed; its bytes are those of the checkpoint's own record

Each rank decides for itself, by the placements of its tensors: it reads nobody else's pool to replay updates. If
parameters begin to share memory while the training runs, the pool is replaced by one in which their units lie in slots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from lightck.pool.format.layout import HOME_ROLES
from lightck.state.inventory import Live, OptimizerView, address_of, has_memory, unit_of
from lightck.state.local_tensors import is_dtensor
from lightck.state.memory_overlap import groups_by_bytes
from lightck.state.parts import is_part
from lightck.state.torch_classes import ELEMENT_WISE


class WholeUnits:
    """The names of the parameters of these units, found again only if the tensors may have changed."""

    def __init__(self) -> None:
        self._token: object = None
        self._shared: frozenset[str] = frozenset()
        """Names of the parameters that share memory, or shared it before: a unit that lies in slots stays there."""
        self._all: frozenset[str] = frozenset()

    def of(self, lives: Iterable[Live], token: object, optimizers: Sequence[OptimizerView]) -> frozenset[str]:
        """Return the names. ``lives``: the present tensors of model and optimizers. ``token``: identifies them, as
        ``Capture.token`` does. As long as nothing changes, the result is the same object."""
        if token is None or token is not self._token:
            self._token = token
            self._shared |= shared_units(lives, optimizers)
            self._all = self._shared | coupled_units(optimizers)
        return self._all


def shared_units(lives: Iterable[Live], optimizers: Iterable[OptimizerView]) -> frozenset[str]:
    """Return the names of the parameters whose units share memory, in whole or in part: each parameter of an optimizer
    that shares, or whose optimizer state shares, and the parameter of the other tensor, also if it belongs to no
    optimizer. (A parameter under two names is one tensor, and one unit.)"""
    names = {name for view in optimizers for name, _ in view.params}
    lives = list(lives)
    return frozenset(_in_same_memory(lives, names) | _overlapping(lives, names))


def _in_same_memory(lives: Sequence[Live], names: Collection[str]) -> set[str]:
    """As ``shared_units``, for tensors in exactly the same memory, of which a checkpoint holds one. This one may also
    be a buffer. ``names``: of the parameters of optimizers."""
    sharing = [one for one in lives if one.alias is not None and one.role in HOME_ROLES and unit_of(one) in names]
    if not sharing:
        return set()
    by_name = {one.name: one for one in lives}
    targets = (by_name.get(one.alias or "") for one in sharing)
    return {unit_of(one) for one in targets if one is not None and one.role in HOME_ROLES} | set(map(unit_of, sharing))


def _overlapping(lives: Sequence[Live], names: Collection[str]) -> set[str]:
    """As ``shared_units``, for tensors that have bytes in common, such as views of one flat parameter. (A buffer is not
    in question: each checkpoint holds its bytes, and no update writes through it.)"""
    first: dict[int, Live] = {}
    for live in lives:
        if live.role in HOME_ROLES and has_memory(live.tensor) and address_of(live.tensor):
            first.setdefault(id(live.tensor), live)
    units = {live.name: unit_of(live) for live in first.values()}
    found = set[str]()
    for group in groups_by_bytes([(live.name, live.tensor) for live in first.values()]):
        of_group = {units[name] for name, _ in group}
        if not of_group.isdisjoint(names):
            found |= of_group
    return found


def coupled_units(optimizers: Iterable[OptimizerView]) -> frozenset[str]:
    """Return the names of the sharded parameters whose optimizer is not element-wise: an update of them may need parts
    that other ranks hold."""
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
