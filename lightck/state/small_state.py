"""Packs the parts of the small state, and packs again only those that changed since the last checkpoint.

Most parts stay the same from checkpoint to checkpoint: the names of parameters, the options of optimizers, the record
of what the script built. To see that a part is unchanged takes one call in C, or none if it is the same object as
before and of a type whose values never change. The result is the same as that of ``values.pack`` for a dict.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lightck.state import values

_IMMUTABLE = frozenset((type(None), bool, int, float, str, bytes, values.ConstantDict))


class StatePacker:
    """Packs one dict at many checkpoints. Its keys are strings."""

    def __init__(self, path: str = "", *, replaced: Collection[str] = ()) -> None:
        """``path``: where the dict lies, for errors. ``replaced``: keys whose values are never changed in place: a new
        value is another object."""
        self._path = path
        self._replaced = frozenset(replaced)
        self._parts: dict[str, _Part] = {}

    def pack(self, parts: Mapping[str, object]) -> bytes:
        """As ``values.pack`` for this dict."""
        known, pieces = self._parts, []
        for key, value in parts.items():
            part = known.get(key)
            if part is None:
                part = known[key] = _Part(key, f"{self._path}/{key}", key in self._replaced)
            pieces.append(part.prefix)
            pieces.append(value.data if type(value) is values.Packed else part.pack(value))
        return values.join_dict(len(parts), pieces)


class _Part:
    """One item of the dict, as it was packed last."""

    __slots__ = ("_cache", "_data", "_is_replaced", "_path", "_value", "prefix")

    def __init__(self, key: str, path: str, is_replaced: bool) -> None:
        self.prefix = values.pair_prefix(key)
        self._path, self._is_replaced = path, is_replaced
        self._cache = values.CachedPacker()
        self._value: object = self  # equal to no value that is ever packed
        self._data = b""

    def pack(self, value: object) -> bytes:
        is_fixed = self._is_replaced or type(value) in _IMMUTABLE
        if is_fixed and value is self._value:
            return self._data
        data = self._cache.pack(value, path=self._path)
        self._value, self._data = (value, data) if is_fixed else (self, b"")
        return data
