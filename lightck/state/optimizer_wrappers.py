"""Optimizers that contain other optimizers (SAM, Lookahead, a container of several).

A wrapper holds other optimizers as attributes and shares their parameters. Each optimizer that has state or step hooks
of its own is *followed*; a wrapper that only forwards calls (Accelerate's) is not. An *update* is one step of the
outermost followed optimizer whose hooks run. This module reads attributes and changes nothing. ``ScalerWatch`` finds
updates that a GradScaler skips.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from lightck.errors import UnsupportedError, listed

_DEPTH = 4
"""The limit of two searches. An object without hooks is unwrapped through its ``.optimizer`` only if fewer than
``_DEPTH`` wrappers are around it. Tensors in an attribute are searched through ``_DEPTH`` levels of containers, the
outermost included."""


def optimizers_to_follow(optimizers: Iterable[object]) -> tuple[Any, ...]:
    """Return every optimizer to follow, a wrapper before the optimizers that it contains. Raises ``TypeError`` for an
    object that is no optimizer with step hooks, and ``UnsupportedError`` for an optimizer that is not supported."""
    given = {id(o): o for o in optimizers}
    wrapped: set[int] = set().union(*(wrapped_ids(o) - {key} for key, o in given.items()))
    found = tuple({id(o): o for key, top in given.items() if key not in wrapped for o in _members(top, ())}.values())
    for optimizer in found:
        refuse_unsupported(optimizer)
    return found


def _members(optimizer: object, around: tuple[int, ...]) -> list[object]:
    """Return the optimizers to follow among this one and those inside it. ``around``: ids of its wrappers, the
    outermost first. Raises ``TypeError`` for an object that is no optimizer with step hooks."""
    inner = [] if id(optimizer) in around else inner_of(optimizer)
    if not inner and not has_hooks(optimizer) and hasattr(optimizer, "optimizer") and len(around) < _DEPTH:
        inner = [optimizer.optimizer]
    if not inner:
        if not isinstance(optimizer, Optimizer) or not has_hooks(optimizer):
            raise TypeError(
                f"optimizer= is of type {type(optimizer).__name__}, which has no step hooks. lightck follows "
                "torch.optim.Optimizer and its subclasses. Pass such an object, or the one that this object wraps."
            )
        return [optimizer]
    found = [m for one in inner for m in _members(one, (*around, id(optimizer)))]
    if _steps_with_hooks(optimizer) or has_own_state(optimizer):
        found.insert(0, optimizer)
    else:
        _refuse_own_values(optimizer)
    return found


def _refuse_own_values(wrapper: object) -> None:
    """Raise ``UnsupportedError`` if a wrapper that is not followed keeps values of its own: its ``state_dict`` then has
    more keys than that of an optimizer."""
    try:
        keys = set(wrapper.state_dict()) - {"state", "param_groups"}  # type: ignore[attr-defined]
    except Exception:  # it may have no state_dict, or not be ready for it
        return
    if keys:
        raise UnsupportedError(
            f"{type(wrapper).__name__} keeps {listed(sorted(map(repr, keys)))} beside the state of the optimizer "
            "inside it, and lightck saves only the optimizer inside. Pass that one as optimizer=, and in state= an "
            "object whose state_dict() and load_state_dict() save the rest."
        )


def refuse_unsupported(optimizer: object) -> None:
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UnsupportedError(
            f"{type(optimizer).__name__} is not supported: lightck cannot save an optimizer that takes sparse "
            "gradients only. Make the embedding dense (sparse=False) and use torch.optim.Adam or AdamW."
        )


def inner_of(optimizer: object) -> list[object]:
    """Return the optimizers that ``optimizer`` holds as attributes, or in lists, tuples or dicts that are
    attributes."""
    found: dict[int, object] = {}
    for value in _attributes(optimizer).values():
        many = list(value.values()) if isinstance(value, dict) else value
        ones = many if isinstance(many, (list, tuple)) else [many]
        if any(issubclass(kind, Optimizer) for kind in set(map(type, ones))):  # the state has as many as parameters
            found.update((id(one), one) for one in ones if one is not optimizer and _is_optimizer(one))
    return list(found.values())


def _is_optimizer(value: object) -> bool:
    return issubclass(type(value), Optimizer)  # unlike isinstance, this does not evaluate a lazy proxy


def _attributes(value: object) -> dict[str, object]:
    found = getattr(value, "__dict__", None)
    return found if type(found) is dict else {}


def has_hooks(optimizer: object) -> bool:
    """Whether the object has torch's registries of step hooks."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def _steps_with_hooks(optimizer: object) -> bool:
    """Whether the ``step`` of the optimizer's class calls the step hooks. torch wraps ``step`` for that purpose in
    ``Optimizer.__init__``, so a subclass that never calls ``super().__init__`` has a ``step`` without hooks."""
    return has_hooks(optimizer) and bool(getattr(getattr(type(optimizer), "step", None), "hooked", False))


def has_own_state(optimizer: object) -> bool:
    """Whether the optimizer keeps its state in a dict of its own, and not in the dict of an optimizer inside it."""
    state = getattr(optimizer, "state", None)
    if not isinstance(state, Mapping) or not hasattr(optimizer, "param_groups"):
        return False
    return all(getattr(one, "state", None) is not state for one in inner_of(optimizer))


def wrapped_ids(optimizer: object) -> set[int]:
    """Return the ids of the optimizers that ``optimizer`` contains, at any depth."""
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
    """The role of one followed optimizer among wrappers. Numbers are indices in the list of followed optimizers."""

    outermost: int
    """Index of the outermost wrapper around this optimizer; its own index if no wrapper contains it."""
    root: int
    """Index of the optimizer whose step is an update of this one: the outermost wrapper with hooks around it, or the
    optimizer itself."""
    wraps: bool
    """Whether this optimizer contains another followed optimizer."""
    is_wrapped: bool
    makes_updates: bool
    """Whether a step of this optimizer is an update: the optimizer is its own root, and, if it is a wrapper, has
    hooks."""


def wrapper_roles(optimizers: Sequence[object]) -> list[WrapperRole]:
    """Return the role that each of these optimizers has among them. Pass a wrapper together with the followed
    optimizers that it contains."""
    positions = {id(o): i for i, o in enumerate(optimizers)}
    wrapped = [[positions[key] for key in wrapped_ids(o) - {id(o)} if key in positions] for o in optimizers]
    hooked = list(map(_steps_with_hooks, optimizers))
    outermost, root = list(range(len(wrapped))), list(range(len(wrapped)))
    # An outer wrapper comes after the wrappers inside it, so its index replaces theirs.
    for i in sorted(range(len(wrapped)), key=lambda i: len(wrapped[i])):
        for inner_index in wrapped[i]:
            outermost[inner_index] = i
            root[inner_index] = i if hooked[i] else root[inner_index]
    return [
        WrapperRole(outermost[i], root[i], bool(inner), outermost[i] != i, root[i] == i and (hooked[i] or not inner))
        for i, inner in enumerate(wrapped)
    ]


def unsaved_tensors(optimizer: object, known: Collection[int]) -> list[str]:
    """Return the names of the optimizer's attributes that hold tensors which nothing saves. ``known``: ids of tensors
    that are saved in any case. Tensors in ``state``, ``param_groups`` and ``defaults`` count as saved."""
    saved = {"state", "param_groups", "defaults"}
    depth = _DEPTH + 1  # ``state`` has one level more than another attribute: a dict for each parameter
    own = set(known) | {id(t) for part in saved for t in tensors_in(getattr(optimizer, part, None), depth)}
    attributes = {k: v for k, v in _attributes(optimizer).items() if k not in saved and not _is_optimizer(v)}
    return [k for k, v in attributes.items() if any(id(t) not in own for t in tensors_in(v, _DEPTH))]


def tensors_in(value: object, depth: int) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, through ``depth`` levels of lists, tuples and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, Mapping)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(one, depth - 1)


class ScalerWatch:
    """Detects the updates that the GradScalers in ``state=`` skip. To skip an update, the scaler does not call
    ``step`` (except of a fused optimizer), so no hook runs, and only the scaler's own state shows the skip. The session
    calls ``skipped`` at each event that can be a boundary."""

    def __init__(self, objects: Mapping[str, object]) -> None:
        self._objects = objects
        self._seen: tuple[tuple[float, int], ...] | None = None
        """Scale and growth tracker of each enabled scaler at the last call of ``skipped``."""
        self._has_stepped = False
        """Whether an optimizer has made a step since the last call of ``skipped``."""
        self.skipped()

    def stepped(self) -> None:
        """Record that an optimizer made a step."""
        self._has_stepped = True

    def skipped(self) -> bool:
        """Whether, since the last call, a scaler was updated and no optimizer made a step."""
        if not self._objects:
            self._has_stepped = False
            return False
        scalers = enabled_scalers(self._objects).values()
        seen = tuple((float(scaler.get_scale()), int(scaler._get_growth_tracker())) for scaler in scalers)
        has_stepped, self._has_stepped = self._has_stepped, False
        has_changed, self._seen = seen != self._seen, seen
        return has_changed and not has_stepped and bool(seen)


def enabled_scalers(objects: Mapping[str, object]) -> dict[str, torch.amp.GradScaler]:
    """Return the enabled GradScalers, by name."""
    return {n: obj for n, obj in objects.items() if isinstance(obj, torch.amp.GradScaler) and obj.is_enabled()}
