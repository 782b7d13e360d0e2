"""Plain attributes of an object that a training changes: lists of outputs, counters, averages.

Data flow: ``watch`` takes a mark of each attribute before the training. ``changed`` compares, and returns the values of
those that differ, or that an earlier run changed. ``restore`` sets them.

Invariant: what the training has not changed is not saved, so a restart may give such attributes other values.

Failure cases: a changed attribute that cannot be saved (it holds other objects, or more than ``ITEMS_MAX`` values or
``BYTES_MAX`` bytes of tensors and texts) is named in one warning.
"""

from __future__ import annotations

import ast
import inspect
import logging
import textwrap
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

log = logging.getLogger("lightck")
ITEMS_MAX = 20_000
BYTES_MAX = 1 << 26
WATCHED_MAX = 50
"""Of a value that cannot be saved, only this number of items or attributes is watched for changes; of a module, this
number of parameters and persistent buffers."""
_SAVED_ELSEWHERE = frozenset(
    {
        *("Trainer", "TrainerState", "TrainerControl"),
        *("Optimizer", "AcceleratedOptimizer", "LRScheduler", "AcceleratedScheduler", "GradScaler"),
    }
)
"""Names of classes of torch and the frameworks. Their objects change at each step, and what matters of them is
saved."""
_PLAIN = (type(None), bool, int, float, str, bytes)
_LISTS = (list, tuple, deque)
_DICTS = (dict, OrderedDict, Counter)


class ChangedAttributes:
    """The plain attributes of one object that its own code assigns."""

    def __init__(
        self,
        owner: Any,
        known: Collection[str] = (),
        *,
        only: Collection[str] | None = None,
        trained: torch.nn.Module | None = None,
    ) -> None:
        """``known``: names of attributes that the framework's code assigns; they are ignored. ``only``: names of the
        only attributes that are not ignored. ``trained``: the model. What an attribute has of it is saved elsewhere."""
        self._owner, self._known, self._only, self._trained = owner, frozenset(known), only, trained
        self._saved_elsewhere: frozenset[int] = frozenset()
        """Ids of the model's modules and parameters."""
        self._before: dict[str, object] = {}
        self._restored: dict[str, Any] = {}
        self._warned: set[str] = set()

    def watch(self) -> None:
        """Remember what the attributes are before the training."""
        if self._trained is not None:
            self._saved_elsewhere = frozenset(map(id, (*self._trained.modules(), *self._trained.parameters())))
        self._before = {name: self._mark(value)[1] for name, value in self._own()}

    def changed(self) -> dict[str, Any]:
        """Return what the training has changed. The tensors share memory with those of the object."""
        found: dict[str, Any] = {}
        for name, value in self._own():
            is_plain, mark = self._mark(value)
            if mark is None or (name not in self._restored and self._before.get(name) == mark):
                continue
            if is_plain:
                found[name] = _plain(value)
            elif name in self._before or not (isinstance(value, torch.nn.Module) or has_class(value, _SAVED_ELSEWHERE)):
                self._warn(name)
            elif isinstance(value, torch.nn.Module):
                self._before[name] = mark  # a module that code at the beginning of the run has made
        return found

    def restore(self, saved: dict[str, Any]) -> None:
        """Set the attributes that earlier runs changed."""
        self._restored = saved
        self.restore_again()

    def restore_again(self) -> None:
        """Set the saved attributes again, because code at the beginning of a run may have overwritten them."""
        for name, value in self._restored.items():
            setattr(self._owner, name, filled(getattr(self._owner, name, None), value))

    def _mark(self, value: Any) -> tuple[bool, object]:
        """Return whether the value is plain and not too large, and something that differs if it has changed. None: it
        is a part of the model, or a module that has one."""
        try:
            return True, _mark_of(value, [ITEMS_MAX, BYTES_MAX])
        except (TypeError, RecursionError):
            return False, _mark_of_object(value, self._saved_elsewhere)

    def _own(self) -> list[tuple[str, Any]]:
        return [(name, value) for name, value in vars(self._owner).items() if self._is_own(name)]

    def _is_own(self, name: str) -> bool:
        if self._only is not None:
            return name in self._only
        return name not in self._known and not name.startswith("_lightck")

    def _warn(self, name: str) -> None:
        if name in self._warned:
            return
        self._warned.add(name)
        log.warning(
            "lightck: the %s changes its attribute %r while it trains. It is no plain value, or too large, so it is "
            "not saved, and a resume would not know it. If the training depends on it, put it into an object with "
            "state_dict() and load_state_dict(), and pass that in state={...}",
            type(self._owner).__name__,
            name,
        )


def assigned_in(kind: type) -> set[str]:
    """Return the names of the attributes that the code of this class, without its bases, assigns to ``self``."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    stored = (one for one in ast.walk(tree) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store))
    return {one.attr for one in stored if isinstance(one.value, ast.Name) and one.value.id == "self"}


def has_class(value: object, names: Collection[str]) -> bool:
    """Whether a class of this value, or a base of it, has one of these names. (Frameworks are installed under several
    package names, and not all of them in each release.)"""
    return any(one.__name__ in names for one in type(value).__mro__)


class TensorMark:
    """Which tensor a value is, and its version counter. Two marks are equal if both are of one tensor that still exists
    and was not written between them. (An id alone is not enough: a new tensor may get that of one that is gone.) A
    tensor of ``inference_mode`` has no version counter, so marks of it are never equal."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._id = weakref.ref(tensor), id(tensor)
        self._version = None if tensor.is_inference() else tensor._version

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorMark) or (self._id, self._version) != (other._id, other._version):
            return False
        if self._version is None:
            return False
        return self._tensor() is not None and self._tensor() is other._tensor()

    def __hash__(self) -> int:
        return hash((self._id, self._version))


def _mark_of_object(value: Any, saved_elsewhere: frozenset[int], depth: int = 3) -> object:
    """Return a mark of a value that is not saved. It shows the changes that are cheap to see: another object, a
    generator that has drawn, a metric that was updated, a module whose first tensors were written, plain attributes and
    items. ``saved_elsewhere``: ids of modules and parameters."""
    if isinstance(value, torch.Generator):
        return id(value), bytes(value.get_state().numpy())
    if isinstance(value, torch.nn.Module):
        marks = _mark_of_tensors(value, saved_elsewhere)
        return None if marks is None else (id(value), getattr(value, "_update_count", None), marks)
    if depth == 0 or has_class(value, _SAVED_ELSEWHERE) or isinstance(value, (type, torch.Tensor)):
        return id(value)
    if isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, (*_LISTS, set, frozenset)):
        inner = list(value)
    else:
        inner = list(getattr(value, "__dict__", {}).values())
    plain = tuple(one for one in inner[:WATCHED_MAX] if type(one) in _PLAIN)
    return (
        id(value),
        plain,
        tuple(
            _mark_of_object(one, saved_elsewhere, depth - 1) for one in inner[:WATCHED_MAX] if type(one) not in _PLAIN
        ),
    )


def _mark_of_tensors(module: torch.nn.Module, saved_elsewhere: frozenset[int]) -> tuple[TensorMark, ...] | None:
    """Return marks of the first parameters and persistent buffers of a module. None: it is a part of the model, or has
    one."""
    marks: list[TensorMark] = []
    for inner in module.modules():
        if id(inner) in saved_elsewhere:
            return None
        marks += [TensorMark(one) for one in _state_tensors(inner) if id(one) not in saved_elsewhere]
        if len(marks) >= WATCHED_MAX:
            break
    return tuple(marks[:WATCHED_MAX])


def _state_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the module's own parameters and persistent buffers whose changes can be seen."""
    buffers = (one for name, one in module._buffers.items() if name not in module._non_persistent_buffers_set)
    for one in (*module._parameters.values(), *buffers):
        if one is not None and not is_lazy(one) and not one.is_inference():
            yield one


def _mark_of(value: Any, budget: list[int]) -> object:
    kind = type(value)
    budget[0] -= 1
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        budget[1] -= value.nbytes
        mark: object = TensorMark(value)
    elif kind in _PLAIN:
        budget[1] -= len(value) if kind in (str, bytes) else 0
        mark = (kind, value if value == value else "nan")
    elif kind in _LISTS:
        mark = (kind, tuple(_mark_of(one, budget) for one in value))
    elif kind in _DICTS or (kind.__name__ == "defaultdict" and kind.__module__ == "collections"):
        mark = (kind, tuple((_mark_of(key, budget), _mark_of(one, budget)) for key, one in value.items()))
    elif kind in (set, frozenset):
        mark = (kind, frozenset(_mark_of(one, budget) for one in value))
    elif isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        budget[1] -= value.nbytes
        mark = (kind, value.dtype.str, value.shape, value.tobytes())
    else:
        raise TypeError
    if min(budget) < 0:
        raise TypeError
    return mark


def _plain(value: Any) -> Any:
    """Return the value in containers that a checkpoint holds. Tensors are taken without their graph."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, tuple):
        return tuple(_plain(one) for one in value)
    if isinstance(value, (list, deque)):
        return [_plain(one) for one in value]
    return value


def filled(present: Any, saved: Any) -> Any:
    """Return the saved value. If both values are dicts, or the present one is a list or deque and the saved one a list,
    the present one is emptied and filled, so that a ``defaultdict`` stays one, also inside another. A tensor goes to
    the device of the present one."""
    if isinstance(present, dict) and isinstance(saved, dict):
        before, make = dict(present), getattr(present, "default_factory", None) or (lambda: None)
        present.clear()
        present.update({key: filled(before[key] if key in before else make(), one) for key, one in saved.items()})
        return present
    if isinstance(present, (list, deque)) and isinstance(saved, list):
        present.clear()
        present.extend(_copied(saved))
        return present
    if isinstance(present, torch.Tensor) and isinstance(saved, torch.Tensor):
        return saved.to(present.device, copy=True)
    return _copied(saved)


def _copied(saved: Any) -> Any:
    """Return a copy of everything that can be changed, so that the saved value can be restored again."""
    if isinstance(saved, torch.Tensor):
        return saved.clone()
    if isinstance(saved, dict):
        return {key: _copied(one) for key, one in saved.items()}
    if isinstance(saved, (list, tuple)):
        return type(saved)(_copied(one) for one in saved)
    if isinstance(saved, (set, np.ndarray)):
        return saved.copy()
    return saved
