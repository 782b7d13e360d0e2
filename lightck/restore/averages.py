"""Average tensors that differ between ranks (rule ``Average``) when another number of ranks loads a checkpoint.

A layout divides tensors among ranks, and each of these ranks has a *place* in it. Ranks at one place (data parallel
ones) hold the same values of a tensor with this rule, and ranks at different places hold different ones. The mean is
taken over the places, also for optimizer state with the parameter's shape. It is computed as DeepSpeed's
``ds_to_universal`` computes it (``params_to_average`` of Universal Checkpointing, 2024): the tensors are added in the
order of the places, in float32 (float64 stays what it is), and the sum is divided by their number. What is equal at all
places is taken as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from lightck.errors import listed
from lightck.pool.format.layout import Entry
from lightck.pool.format.structures import DamagedError
from lightck.restore.saved_layout import SavedLayout
from lightck.state.inventory import param_of
from lightck.state.storable import dtype_from_name


def model_name_of(name: str, role: str) -> str:
    """Return the name, in the model, of the parameter or buffer to which a tensor of the pool belongs."""
    return param_of(name) if role == "optimizer" else name.removeprefix("model/")


def is_averaged(name: str, entries: Mapping[str, Entry], layout: SavedLayout | None) -> bool:
    """Whether, in this layout, each place has values of its own of the tensor, so that their mean is taken.
    ``entries``: of logical tensors."""
    entry = entries[name]
    model_name = model_name_of(name, entry.role)
    if layout is None or model_name not in layout.averaged or not dtype_from_name(entry.dtype).is_floating_point:
        return False
    param = entries.get(f"model/{model_name}")
    return entry.role != "optimizer" or (param is not None and param.shape == entry.shape)


def places_of(
    name: str, entries: Mapping[str, Entry], layouts: Sequence[SavedLayout | None], positions: Iterable[int]
) -> list[list[int]] | None:
    """Return, for each place, which of ``positions`` are there; None if the tensor is not averaged.

    ``name``, ``entries``: of the logical tensor. ``layouts``: of each rank whose checkpoint is there. ``positions``:
    indexes in ``layouts`` of the ranks that hold the tensor. Raises ``DamagedError`` if the ranks do not agree that it
    is averaged, or if a place is missing."""
    held = list(positions)
    averaging = {
        at: layout for at in held if (layout := layouts[at]) is not None and is_averaged(name, entries, layout)
    }
    if not averaging:
        return None
    sizes = {layout.size for layout in averaging.values()}
    if len(averaging) < len(held) or len(sizes) > 1:
        raise DamagedError(f"the ranks do not agree whether its tensor {name!r} is averaged, and over how many")
    found: dict[int, list[int]] = {}
    for at, layout in averaging.items():
        found.setdefault(layout.rank, []).append(at)
    size = sizes.pop()
    if len(found) < size:
        missing = next(place for place in range(size) if place not in found)
        raise DamagedError(
            f"its tensor {name!r} is the mean of {size} tensors, and no pool holds the values of place {missing} "
            "in the layout (tensor parallel rank)"
        )
    return [found[place] for place in sorted(found)]


def mean_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the mean of tensors of one dtype and shape, in this dtype. If ``tensors`` loads each of them only when it
    is asked for, at most two of them are in memory at a time, beside the sum."""
    total, count, dtype = torch.zeros(()), 0, torch.float32
    for one in tensors:
        dtype = one.dtype
        total, count = total + one.to(dtype if dtype == torch.float64 else torch.float32), count + 1
    return (total / count).to(dtype)


def describe_averaged(names: Sequence[str]) -> str:
    """Return what to say about tensors whose mean was taken; "" if there is none. ``names``: in the model."""
    if not names:
        return ""
    return (
        f"{listed(names, 3)} or their optimizer state differed between the ranks, and the mean over the ranks is "
        "taken (Average in layout=)"
    )
