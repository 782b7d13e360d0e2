"""The identity of a rank's pool: which run and which world it belongs to, and the place of its rank in that world.

The layout table contains the identity as a map (docs/format.md, "Pools of a rank"). A map that is read is untrusted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightck.pool.format.structures import DamagedError

ID_NBYTES = 16
RANKS_MAX = 1 << 20
"""Maximum number of ranks of a world."""
MESH_NDIM_MAX = 16
_KEYS = {"run", "world", "rank", "size", "mesh", "coordinate"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupIdentity:
    """The place of a pool in a group of ranks that checkpoint together. Raises ``ValueError`` if the values do not go
    together."""

    run_id: bytes
    """The same in all pools of a training, over all its restarts."""
    world_id: bytes
    """The same in all pools of a world; another one when the number of ranks or their mesh changes."""
    rank: int
    world_size: int
    mesh_shape: tuple[int, ...] = ()
    """Number of ranks along each dimension of the device mesh; empty: there is no mesh."""
    coordinate: tuple[int, ...] = ()
    """The place of this rank in the mesh."""

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem is not None:
            raise ValueError(problem)

    def _problem(self) -> str | None:
        """Return what is wrong with the values, or None. The text contains no other values than integers, because the
        values may be untrusted, and the repr of a deep list raises ``RecursionError``."""
        ids = (self.run_id, self.world_id)
        if not all(type(one) is bytes and len(one) == ID_NBYTES for one in ids):
            return f"the id of a run or of a world is not {ID_NBYTES} bytes"
        if not _are_ints((self.rank, self.world_size)):
            return "the rank or the size of its world is no integer"
        if not 0 <= self.rank < self.world_size <= RANKS_MAX:
            return f"rank {self.rank} of {self.world_size} is no rank of a world"
        mesh, place = self.mesh_shape, self.coordinate
        if not len(mesh) == len(place) <= MESH_NDIM_MAX or not _are_ints((*mesh, *place)):
            return f"the mesh has more than {MESH_NDIM_MAX} dimensions, or the rank has no place in it"
        if not all(0 <= at < ranks for at, ranks in zip(place, mesh, strict=True)):
            return f"{place} is no place in a mesh of shape {mesh}"
        if any(ranks > self.world_size for ranks in mesh) or math.prod(mesh) > self.world_size:
            return f"a mesh of shape {mesh} has more places than the world has ranks ({self.world_size})"
        return None

    def to_map(self) -> dict[str, object]:
        """Return the map that the layout table contains."""
        return {
            "run": self.run_id,
            "world": self.world_id,
            "rank": self.rank,
            "size": self.world_size,
            "mesh": list(self.mesh_shape),
            "coordinate": list(self.coordinate),
        }

    @classmethod
    def parse(cls, item: object) -> GroupIdentity:
        """Check a map that was read from a pool. Raises ``DamagedError``."""
        if not isinstance(item, dict) or item.keys() != _KEYS:
            raise DamagedError("group: it has the wrong keys")
        if not type(item["mesh"]) is type(item["coordinate"]) is list:
            raise DamagedError("group: its mesh or its coordinate is no list")
        try:
            return cls(
                run_id=item["run"],
                world_id=item["world"],
                rank=item["rank"],
                world_size=item["size"],
                mesh_shape=tuple(item["mesh"]),
                coordinate=tuple(item["coordinate"]),
            )
        except ValueError as err:
            raise DamagedError(f"group: {err}") from err


def _are_ints(values: Sequence[object]) -> bool:
    return all(type(value) is int for value in values)
