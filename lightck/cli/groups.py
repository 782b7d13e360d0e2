"""What the commands print about the pool of a rank: the group of the rank, and the tensors that are parts."""

from __future__ import annotations

from collections.abc import Sequence

from lightck.cli.text import Facts, count
from lightck.pool.format.group import GroupIdentity
from lightck.pool.format.layout import Entry
from lightck.pool.format.shares import Share


def group_facts(group: GroupIdentity | None) -> Facts | None:
    """Return the object for ``--json``; None for a pool of one process."""
    if group is None:
        return None
    return {
        "rank": group.rank,
        "world_size": group.world_size,
        "mesh": list(group.mesh_shape),
        "coordinate": list(group.coordinate),
        "run_id": group.run_id.hex(),
        "world_id": group.world_id.hex(),
    }


def group_words(group: Facts) -> str:
    """Return the group as text: "rank 3 of 4, at (1, 1) of a mesh of 2x2"."""
    mesh = f"at ({', '.join(map(str, group['coordinate']))}) of a mesh of {shape_words(group['mesh'])}"
    return f"rank {group['rank']} of {group['world_size']}, {mesh if group['mesh'] else 'without a mesh'}"


def recovery_note(group: Facts) -> str:
    """Return the sentence that says which pools a recovery needs."""
    return f"This is the pool of one rank: a recovery needs the pools of {count(group['world_size'], 'rank')}."


def shape_words(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def part_facts(entry: Entry) -> Facts:
    """Return, for ``--json``, which part of the logical tensor this tensor is, and the rank's share of the held tensor:
    the rows that the rank wrote."""
    names = ("start", "size", "local_start")
    return {
        "logical_shape": logical_shape_of(entry),
        "pieces": None
        if entry.pieces is None
        else [{name: list(getattr(piece, name)) for name in names} for piece in entry.pieces],
        "share": None if entry.share is None else _share_facts(entry.share),
    }


def _share_facts(share: Share) -> Facts:
    cut, (first, n_rows) = share.cut, share.rows
    facts = {"held_shape": list(cut.shape), "dim": cut.dim, "first_row": first, "rows": n_rows}
    return facts | {"ranks": list(cut.ranks), "whole": share.is_whole}


def logical_shape_of(entry: Entry) -> list[int] | None:
    return None if entry.logical_shape is None else list(entry.logical_shape)
