"""Parts of tensors: which elements of a logical tensor a local tensor holds.

A DTensor on a mesh of several ranks counts as a part, even if each rank holds all elements. So does a plain tensor for
which a layout has a rule (``state/rules.py``), unless the rule says that each rank holds the whole tensor
(``Replicated``, ``Average``). Its entry in the pool says which part it is (``pieces``), so that nobody takes it for the
whole tensor. Only the pools of ranks that checkpoint together hold parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lightck.errors import StateValueError, UnsupportedError, listed
from lightck.layout import Layout
from lightck.pool.format import pieces
from lightck.pool.format.boxes import Ints
from lightck.pool.format.pieces import Piece, local_pieces
from lightck.state.local_tensors import is_dtensor, local_of

if TYPE_CHECKING:
    from lightck.state.inventory import Live


class Part(NamedTuple):
    """The part of a logical tensor that this process holds."""

    shape: Ints
    """The shape of the local tensor."""
    logical_shape: Ints
    pieces: tuple[Piece, ...]


def is_part(held: torch.Tensor) -> bool:
    """Whether this is a DTensor on a mesh of several ranks, one of which is this process."""
    return is_dtensor(held) and held.device_mesh.size() > 1 and local_of(held) is not held


def part_of_live(live: Live) -> tuple[Ints | None, tuple[Piece, ...] | None]:
    """Return the logical shape and the pieces of a live tensor; None and None if it is no part. Raises as ``part_of``
    does."""
    if live.part is not None:
        return live.part.logical_shape, live.part.pieces
    return part_of(live.name, live.dtensor)


def part_of(name: str, held: torch.Tensor | None) -> tuple[Ints | None, tuple[Piece, ...] | None]:
    """Return the logical shape and the pieces of a tensor; None and None if it is no part. ``held``: what a module or
    an optimizer holds. ``name``: for errors. Raises ``UnsupportedError`` for a DTensor whose local tensor is not what
    its placements say."""
    if held is None or not is_part(held):
        return None, None
    assert is_dtensor(held)
    mesh, shape, local = held.device_mesh, tuple(held.shape), local_of(held)
    try:
        expected, held_pieces = local_pieces(
            shape, mesh.shape, mesh.get_coordinate(), [_placement(one) for one in held.placements]
        )
    except UnsupportedError as err:
        raise UnsupportedError(f"The tensor {name!r} cannot be stored. {err}") from err
    if tuple(local.shape) != expected:
        raise UnsupportedError(
            f"The tensor {name!r} cannot be stored: it is a DTensor whose local tensor has the shape "
            f"{list(local.shape)}, where its placements {held.placements} say {list(expected)}. torch makes such "
            "DTensors if fully_shard cuts a dimension that tensor parallelism cuts unevenly. Use a size that "
            "is divisible by the number of ranks."
        )
    return shape, held_pieces


def parts_of(lives: Iterable[Live]) -> dict[str, Part]:
    """Return name -> part, of those of these tensors that are parts. Raises as ``part_of`` does."""
    found: dict[str, Part] = {}
    for live in lives:
        shape, held_pieces = part_of_live(live)
        if shape is not None and held_pieces is not None:
            found[live.name] = Part(tuple(live.tensor.shape), shape, held_pieces)
    return found


def replicas_of(held: torch.Tensor) -> list[int]:
    """Return the ranks, as numbers in the default process group, that hold the same local tensor of a DTensor as this
    process, which is one of them: those along the mesh dimensions on which its placement is ``Replicate``. Empty if
    there are no such dimensions of several ranks, or if the tensor is no part."""
    if not is_part(held):
        return []
    assert is_dtensor(held)
    mesh, at = held.device_mesh, held.device_mesh.get_coordinate()
    is_replicated = [one.is_replicate() for one in held.placements]
    if not any(one and mesh.size(dim) > 1 for dim, one in enumerate(is_replicated)):
        return []
    index = tuple(slice(None) if one else place for one, place in zip(is_replicated, at, strict=True))
    ranks: list[int] = mesh.mesh[index].flatten().tolist()
    return ranks


def mesh_of(lives: Iterable[Live], layout: Layout | None = None) -> tuple[Ints, Ints]:
    """Return the shape of the device mesh of these tensors, and the coordinate of this process in it. If the tensors
    have several meshes, the one with the most ranks is taken. Without a mesh of several ranks, that of the layout is
    returned; without a layout, both are empty."""
    meshes = [live.dtensor.device_mesh for live in lives if is_dtensor(live.dtensor)]
    mesh = max(meshes, key=lambda one: (one.size(), one.ndim), default=None)
    if mesh is None or mesh.size() < 2 or mesh.get_coordinate() is None:
        return ((), ()) if layout is None else (layout.mesh_shape, layout.coordinate)
    return tuple(mesh.shape), tuple(mesh.get_coordinate())


def refuse_other_ranks(lives: Iterable[Live], members: Collection[int]) -> None:
    """Raise ``UnsupportedError`` if a DTensor lies on a rank that is not one of these, the ranks that checkpoint
    together. (Two groups that checkpoint apart may go on from different steps, and neither has all parts.) ``members``:
    numbers in the default process group."""
    checked: set[Any] = set()
    for live in lives:
        mesh = live.dtensor.device_mesh if is_dtensor(live.dtensor) else None
        if mesh is None or mesh.size() < 2 or mesh in checked:
            continue
        checked.add(mesh)
        others = sorted(set(mesh.mesh.flatten().tolist()) - set(members))
        if others:
            raise UnsupportedError(
                f"The tensor {live.name!r} is a DTensor on a mesh that has the ranks {_listed(others)} too, "
                f"and group= has only the ranks {_listed(members)}. Ranks that hold one tensor must "
                "checkpoint together, or a crash would leave its parts at different steps. Leave out group=, or pass a "
                "group that contains all ranks of the mesh."
            )


def _listed(ranks: Collection[int]) -> str:
    return listed([str(rank) for rank in sorted(ranks)])


def _placement(placement: Any) -> pieces.Placement:
    """Convert one of torch's placements to a placement of ``pieces``. A placement of an unknown class is returned
    unchanged, and ``local_pieces`` refuses it."""
    kind = type(placement).__name__
    if kind == "_StridedShard":
        return pieces.StridedShard(placement.dim, placement.split_factor)
    if placement.is_shard():
        return pieces.Shard(placement.dim)
    if placement.is_partial():
        return pieces.Partial(str(placement.reduce_op))
    return pieces.Replicate() if placement.is_replicate() else placement


def refuse_parts(lives: Iterable[Live], action: str = "stored") -> None:
    """Raise ``StateValueError`` if one of these tensors is a part. To be called for a pool that belongs to no rank of a
    group. ``action``: "stored" or "restored", for the message."""
    for live in lives:
        if live.dtensor is not None and is_part(live.dtensor):
            raise StateValueError(
                f"The tensor {live.name!r} cannot be {action}: it is a DTensor on several ranks, and this process "
                "holds a part of it. Such a tensor belongs to a training whose ranks are attached together: call "
                "attach on all ranks, with a directory (see `lightck docs ranks`), or use a mesh of one rank."
            )
