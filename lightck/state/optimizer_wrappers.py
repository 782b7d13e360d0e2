"""Optimizers inside optimizers: what a wrapper (SAM, Lookahead, a container of several) consists of.

A wrapper holds other optimizers as attributes and shares their parameters. Each optimizer that has state or step hooks
of its own is *followed*; wrappers that only pass calls on (Accelerate's) are not. An *update* is one step of the
outermost followed optimizer whose hooks run. Nothing is read here but attributes, and nothing is changed. A GradScaler
(``ScalerWatch``) may skip updates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from lightck.errors import UnsupportedError

_DEPTH = 4
"""How far wrappers are followed inside wrappers, and containers inside an attribute."""


def followed(optimizers: Iterable[object]) -> tuple[Any, ...]:
    """Every optimizer to follow, a wrapper before what it wraps. Raises ``TypeError`` and ``UnsupportedError``."""
    given = {id(o): o for o in optimizers}
    wrapped: set[int] = set().union(*(wrapped_ids(o) - {key} for key, o in given.items()))
    found = tuple({id(o): o for key, top in given.items() if key not in wrapped for o in _members(top, ())}.values())
    for optimizer in found:
        refuse_unsupported(optimizer)
    return found


def _members(optimizer: object, outside: tuple[int, ...]) -> list[object]:
    inner = [] if id(optimizer) in outside else inner_of(optimizer)
    if not inner and not has_hooks(optimizer) and hasattr(optimizer, "optimizer") and len(outside) < _DEPTH:
        inner = [optimizer.optimizer]
    if not inner:
        if not isinstance(optimizer, Optimizer) or not has_hooks(optimizer):
            raise TypeError(
                f"optimizer= is of type {type(optimizer).__name__}, which has no step hooks. lightck follows "
                "torch.optim.Optimizer and its subclasses. Pass that object, or the one that it wraps."
            )
        return [optimizer]
    found = [m for one in inner for m in _members(one, (*outside, id(optimizer)))]
    if _steps_with_hooks(optimizer) or has_own_state(optimizer):
        found.insert(0, optimizer)
    return found


def refuse_unsupported(optimizer: object) -> None:
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UnsupportedError(
            f"{type(optimizer).__name__} is not supported: it takes sparse gradients only, and lightck follows, and "
            "lays its pool out for, updates by dense ones. Make the embedding dense (sparse=False) and use "
            "torch.optim.Adam or AdamW."
        )


def inner_of(optimizer: object) -> list[object]:
    """The optimizers that this one holds as an attribute, or in a list, tuple or dict that is one."""
    found: dict[int, object] = {}
    for value in _attributes(optimizer).values():
        many = list(value.values()) if isinstance(value, dict) else value
        for one in many if isinstance(many, (list, tuple)) else [many]:
            if one is not optimizer and _is_optimizer(one):
                found[id(one)] = one
    return list(found.values())


def _is_optimizer(value: object) -> bool:
    return issubclass(type(value), Optimizer)  # and not isinstance: a lazy proxy must not be woken up


def _attributes(value: object) -> dict[str, object]:
    found = getattr(value, "__dict__", None)
    return found if type(found) is dict else {}


def has_hooks(optimizer: object) -> bool:
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def _steps_with_hooks(optimizer: object) -> bool:
    """Whether torch wrapped its ``step``: a subclass that never calls ``super().__init__`` has none."""
    return has_hooks(optimizer) and bool(getattr(getattr(type(optimizer), "step", None), "hooked", False))


def has_own_state(optimizer: object) -> bool:
    """Whether it keeps its state in a dict of its own, and not in that of an optimizer that it wraps."""
    state = getattr(optimizer, "state", None)
    if not isinstance(state, Mapping) or not hasattr(optimizer, "param_groups"):
        return False
    return all(getattr(one, "state", None) is not state for one in inner_of(optimizer))


def wrapped_ids(optimizer: object) -> set[int]:
    """ids of the optimizers that lie inside this one, at any depth."""
    found: set[int] = set()
    todo = inner_of(optimizer)
    while todo:
        one = todo.pop()
        if id(one) not in found:
            found.add(id(one))
            todo.extend(inner_of(one))
    return found


@dataclass(frozen=True, slots=True)
class WrapperRole:
    """Where an optimizer stands among those that are followed. Positions are in their list."""

    outermost: int
    root: int
    """Whose step is an update of it: its own, or that of the outermost wrapper that has hooks."""
    wraps: bool
    is_wrapped: bool
    steps: bool
    """Whether it makes updates: one inside a root does not, nor does a wrapper that has no hooks."""


def wrapper_roles(optimizers: Sequence[object]) -> list[WrapperRole]:
    positions = {id(o): i for i, o in enumerate(optimizers)}
    wrapped = [[positions[key] for key in wrapped_ids(o) - {id(o)} if key in positions] for o in optimizers]
    hooked = list(map(_steps_with_hooks, optimizers))
    outermost, root = list(range(len(wrapped))), list(range(len(wrapped)))
    for i in sorted(range(len(wrapped)), key=lambda i: len(wrapped[i])):  # the outermost last: it has the last word
        for inner_index in wrapped[i]:
            outermost[inner_index] = i
            root[inner_index] = i if hooked[i] else root[inner_index]
    return [
        WrapperRole(outermost[i], root[i], bool(inner), outermost[i] != i, root[i] == i and (hooked[i] or not inner))
        for i, inner in enumerate(wrapped)
    ]


def unsaved_tensors(optimizer: object, known: Collection[int]) -> list[str]:
    """Attributes that hold tensors outside ``state`` and ``param_groups``: nothing saves them. ``known``: ids of
    tensors that are saved elsewhere."""
    saved = {"state", "param_groups", "defaults"}
    own = set(known) | {id(t) for part in saved for t in _tensors_in(getattr(optimizer, part, None), 5)}
    attributes = {k: v for k, v in _attributes(optimizer).items() if k not in saved and not _is_optimizer(v)}
    return [k for k, v in attributes.items() if any(id(t) not in own for t in _tensors_in(v, _DEPTH))]


def _tensors_in(value: object, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, Mapping)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(one, depth - 1)


class ScalerWatch:
    """What the enabled GradScalers among the objects of ``state`` tell of skipped updates, looked at once per boundary:
    with an unfused optimizer one that skips calls no step, and only its state moves."""

    def __init__(self, objects: Mapping[str, object]) -> None:
        self._objects = objects
        self._seen: tuple[tuple[float, int], ...] | None = None
        self._stepped = False
        self.skipped()

    def stepped(self) -> None:
        """An optimizer stepped."""
        self._stepped = True

    def skipped(self) -> bool:
        """Whether one was updated since the last look without a step in between."""
        scalers = enabled_scalers(self._objects).values()
        seen = tuple((float(scaler.get_scale()), int(scaler._get_growth_tracker())) for scaler in scalers)
        stepped, self._stepped = self._stepped, False
        moved, self._seen = seen != self._seen, seen
        return moved and not stepped and bool(seen)


def enabled_scalers(objects: Mapping[str, object]) -> dict[str, torch.amp.GradScaler]:
    """The GradScalers that scale, by name."""
    return {n: obj for n, obj in objects.items() if isinstance(obj, torch.amp.GradScaler) and obj.is_enabled()}
