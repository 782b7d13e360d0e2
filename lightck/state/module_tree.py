"""The modules of a tree, and what decides the names and the places of their tensors, to find out whether it changed.

This is compared at every update and every boundary. So loops over many modules run in C, as in ``signatures.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, is_

from torch import nn

_registries = attrgetter("_modules", "_parameters", "_buffers")
"""The dicts of a module's children, parameters and buffers."""
_children, _not_persistent = attrgetter("_modules"), attrgetter("_non_persistent_buffers_set")


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return what ``model.modules()`` yields, which takes longer, because it makes a name for each module."""
    found: dict[int, nn.Module] = {}
    todo: list[nn.Module | None] = [model]
    while todo:
        module = todo.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            todo.extend(reversed(module._modules.values()))
    return list(found.values())


class TreeStructure:
    """The structure of a tree at the moment when this object was made: of each module its class (``fully_shard`` gives
    it another one), its children, the names of its children, parameters and buffers, and which buffers are not
    persistent."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """``modules``: all modules of the tree."""
        self._modules = list(modules)
        self._classes = list(map(type, self._modules))
        self._registries = list(chain.from_iterable(map(_registries, self._modules)))
        """Three registries of each module, in turn."""
        self._sizes = list(map(len, self._registries))
        self._names = list(chain.from_iterable(self._registries))
        self._dicts_of_children = list(map(_children, self._modules))
        self._children = self._children_now()
        self._not_persistent = list(map(frozenset, map(_not_persistent, self._modules)))

    def _children_now(self) -> list[object]:
        return list(chain.from_iterable(map(dict.values, self._dicts_of_children)))

    def has_changed(self) -> bool:
        """Whether the tree has another structure now. (Also True if a registry was replaced by an equal one.)"""
        # If the sizes are equal, the lists below have the length that they had.
        return not (
            all(map(is_, chain.from_iterable(map(_registries, self._modules)), self._registries))
            and list(map(len, self._registries)) == self._sizes
            and list(chain.from_iterable(self._registries)) == self._names
            and all(map(is_, self._children_now(), self._children))
            and all(map(is_, map(type, self._modules), self._classes))
            and list(map(_not_persistent, self._modules)) == self._not_persistent
        )
