"""Whether what a rank holds now is what the pools of the old world say: its parts, its stage, its place in a layout."""

from __future__ import annotations

from lightck.layout import Layout
from lightck.pool.reader import PoolReader
from lightck.restore.logical import LogicalCheckpoint
from lightck.restore.saved_layout import SavedLayout, saved_layout
from lightck.restore.usable import parse
from lightck.state.rules import ModelTensors


def fits(reader: PoolReader, tensors: ModelTensors) -> bool:
    """Whether this pool holds the same parts of the model's tensors as this rank. If the model is a pipeline stage, or
    may have been one, the pool must also hold the same parameters. (Other differences between pool and model are found
    by the restore.) What counts is what the rank held, and not which rows of it were its share."""
    may_be_of_stage = reader.group is not None and len(reader.group.mesh_shape) > 1
    saved_params = {entry.name for entry in reader.entries if entry.role == "param"}
    if (tensors.is_stage or may_be_of_stage) and _of_model(saved_params) != tensors.params:
        return False
    for entry in reader.entries:
        if entry.role in ("param", "buffer"):
            part = tensors.parts.get(entry.name)
            held = (None, None) if part is None else (part.logical_shape, part.pieces)
            saved = None if entry.held_pieces is None else entry.logical_shape
            if (saved, entry.held_pieces) != held:
                return False
    return True


def _of_model(names: set[str]) -> set[str]:
    """Leave out parameters that only an optimizer has."""
    return {name for name in names if name.startswith("model/")}


def layout_now(logical: LogicalCheckpoint, layout: Layout | None) -> SavedLayout | None:
    """Return what this rank's new pool records of the layout that the rank has now."""
    names = [name.removeprefix("model/") for name in logical.entries if name.startswith("model/")]
    return None if layout is None else saved_layout(layout, names)


def own_place_of(logical: LogicalCheckpoint, now: SavedLayout | None) -> int | None:
    """Return the place of this rank in the layout, if its place, the size and stages of the layout, and the tensors
    that are averaged are those of the old world. Then the rank keeps its own values of these tensors. Otherwise return
    None. Raises ``DamagedError``."""
    was = parse(logical.state_checkpoint).layout
    is_same = was is not None and now is not None and was._replace(rules="") == now._replace(rules="")
    return was.rank if was is not None and is_same else None
