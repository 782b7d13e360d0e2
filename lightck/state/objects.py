"""Objects that are passed in ``state=``: what they have to be, and which of them give out batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Sampler

from lightck.errors import StateValueError


def class_name_of(obj: Any) -> str:
    """Without its module, which may move. A lazy module's is that of what it becomes."""
    kind = type(obj)
    return str((getattr(kind, "cls_to_become", None) or kind).__name__)


def is_loader(obj: Any) -> bool:
    """Whether an object in ``state`` gives out batches: its position has to be read right after the update.

    DataLoaders, samplers and iterable datasets of torch, and what looks like one: it iterates, and is an iterator or
    has a dataset or a batch size. A history of losses iterates too, and is none."""
    if isinstance(obj, (DataLoader, Sampler, IterableDataset)):
        return True
    looks = any(hasattr(obj, name) for name in ("__next__", "dataset", "batch_size", "batch_sampler"))
    return hasattr(type(obj), "__iter__") and (looks or "IterableDataset" in {c.__name__ for c in type(obj).__mro__})


def check_objects(objects: Mapping[str, Any]) -> None:
    """Refuse what cannot be saved, at attach. Raises ``StateValueError`` by path."""
    for name, obj in objects.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise StateValueError(
                f"state has the key {name!r}. Names of saved objects are non-empty strings without '/'. Rename it."
            )
        if isinstance(obj, type):
            raise StateValueError(
                f"state[{name!r}] is the class {obj.__name__}, not an object of it. A class has no state to save. Pass "
                f"the object that the training uses: {obj.__name__}(...)."
            )
        if not callable(getattr(obj, "state_dict", None)) or not callable(getattr(obj, "load_state_dict", None)):
            raise StateValueError(
                f"state[{name!r}] is of type {type(obj).__name__}, which has no state_dict() and load_state_dict(). "
                "lightck saves and restores objects through these two. Pass an object that has them."
            )
