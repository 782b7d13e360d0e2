"""Recognises that the options of an optimizer's groups are unchanged, without packing or comparing their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_

_IMMUTABLE_TYPES = frozenset((int, float, bool, str, type(None)))


class OptionsWatch:
    """Remembers the options (lr, betas, ...) of one optimizer. The parameters of a group are no option."""

    def __init__(self) -> None:
        self._objects: list[object] = []
        """Of each group, in turn: the number of its items, their keys, and their values."""
        self._all_immutable = False
        """Whether all options are immutable, so that the same objects always mean the same options."""

    def may_have_changed(self, groups: Sequence[Mapping[str, object]]) -> bool:
        """Whether an option may have changed since the last call: it is another object now, or it is mutable, or
        this is the first call. Runs at every step."""
        objects: list[object] = []
        for group in groups:
            objects.append(len(group))
            objects += group
            objects += group.values()
        if self._all_immutable and len(objects) == len(self._objects) and all(map(is_, objects, self._objects)):
            return False
        self._objects = objects
        self._all_immutable = all(
            key == "params" or is_immutable(value) for group in groups for key, value in group.items()
        )
        return True


def is_immutable(value: object) -> bool:
    """Whether the value is a number, a string, None, or a tuple of these."""
    if type(value) is tuple:
        return all(type(each) in _IMMUTABLE_TYPES for each in value)
    return type(value) in _IMMUTABLE_TYPES
