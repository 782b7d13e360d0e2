"""Packs the parts of the small state, and packs again only those that changed since the last checkpoint.

Most parts stay the same from checkpoint to checkpoint: the names of parameters, the options of optimizers, the record
of what the script built. One call in C shows whether a part is unchanged. This call
is left out for an object that is the same as before and never changes (because of its type, or by what the caller
says of its key). The packed bytes are the same as those of ``values.pack``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, cast

import msgpack
import torch

from lightck.state import values

_plain_packer = msgpack.Packer(strict_types=True, use_bin_type=True)
_IMMUTABLE_TYPES = frozenset((type(None), bool, int, float, str, bytes, values.ConstantDict))


class StatePacker:
    """Packs one dict at many checkpoints. Its keys are strings."""

    def __init__(self, path: str = "", *, never_mutated: Collection[str] = ()) -> None:
        """``path``: where the dict lies, for errors. ``never_mutated``: keys whose values are never changed in place,
        so that the same object always has the same content."""
        self._path = path
        self._never_mutated = frozenset(never_mutated)
        self._items: dict[str, _Item] = {}

    def pack(self, parts: Mapping[str, object]) -> bytes:
        """Return the same bytes as ``values.pack`` for this dict. A value of type ``Packed`` is stored as its bytes."""
        known, chunks = self._items, []
        for key, value in parts.items():
            item = known.get(key)
            if item is None:
                item = known[key] = _Item(key, f"{self._path}/{key}", key in self._never_mutated)
            chunks.append(item.prefix)
            chunks.append(value.data if type(value) is Packed else item.pack(value))
        return join_dict(len(parts), chunks)


class _Item:
    """One item of the dict, in the form in which it was last packed."""

    __slots__ = ("_cache", "_data", "_is_never_mutated", "_path", "_value", "prefix")

    def __init__(self, key: str, path: str, is_never_mutated: bool) -> None:
        self.prefix = pair_prefix(key)
        self._path, self._is_never_mutated = path, is_never_mutated
        self._cache = CachedPacker()
        self._value: object = self
        """The value whose packed form is ``_data``. If no value is kept, it is this ``_Item`` itself, as a sentinel,
        because an ``_Item`` is never a value that is packed."""
        self._data = b""

    def pack(self, value: object) -> bytes:
        """Return the packed value."""
        is_fixed = self._is_never_mutated or type(value) in _IMMUTABLE_TYPES
        if is_fixed and value is self._value:
            return self._data
        data = self._cache.pack(value, path=self._path)
        self._value, self._data = (value, data) if is_fixed else (self, b"")
        return data


class CachedPacker:
    """Packs one value at many checkpoints, and encodes it again only if it changed."""

    def __init__(self) -> None:
        self._last: tuple[bytes | None, bytes] = None, b""
        """The fast encoding of the last value (None: there was no value) and its packed form. The two are assigned
        together, so that a signal handler never sees the one without the other."""

    def pack(self, value: object, *, path: str, large: Callable[[str, torch.Tensor], None] | None = None) -> bytes:
        """Return the same bytes as ``values.pack``, and raise the same errors, with one exception: a ``bytearray`` or
        ``memoryview``, for which ``values.pack`` raises ``StateValueError``, counts here as unchanged if it has
        replaced an equal ``bytes`` value."""
        try:
            # The fast encoding keeps types, order and bits. It refuses types that need an extension, except tuple.
            now = _fast_packer.pack(value)
        except (TypeError, ValueError, OverflowError, RecursionError):
            return values.pack(value, path=path, large=large)
        seen, packed = self._last
        if now != seen:
            packed = values.pack(value, path=path)
            self._last = now, packed
        return packed


def _encode_tuple(value: object) -> msgpack.ExtType:
    if type(value) is not tuple:
        raise TypeError(type(value).__name__)
    return msgpack.ExtType(
        values.TUPLE, msgpack.packb(list(value), strict_types=True, use_bin_type=True, default=_encode_tuple)
    )


_fast_packer = msgpack.Packer(strict_types=True, use_bin_type=True, default=_encode_tuple)


# -- chunks of packed values -------------------------------------------------------------------------------------------


def plain_extension(code: int, items: list[object]) -> msgpack.ExtType:
    """Encode an extension, to be part of another extension or of a value for ``pack_plain``. ``items``: its contents
    (for a dict: pairs). The kinds that are allowed are None, bool, int, float, str, bytes, lists of these, and
    extensions."""
    return msgpack.ExtType(code, _plain_packer.pack(items))


def pack_plain(value: object) -> bytes:
    """Encode a value of the kinds that ``plain_extension`` takes, in one call."""
    return cast("bytes", _plain_packer.pack(value))


class Packed(NamedTuple):
    """A value that is packed already: ``data`` is stored unchanged."""

    data: bytes


def pair_prefix(key: str) -> bytes:
    """Return the bytes before the value of this key in a packed dict (see ``join_dict``)."""
    return values.PAIR + values.pack(key, path="")


def join_dict(count: int, chunks: Iterable[bytes]) -> bytes:
    """Join packed items, and return a packed dict of ``count`` items. ``chunks``: for each item, the ``pair_prefix`` of
    its key and then its packed value."""
    payload = b"".join((_plain_packer.pack_array_header(count), *chunks))
    return cast("bytes", _plain_packer.pack_ext_type(values.DICT, payload))


def join_list(items: Sequence[bytes]) -> bytes:
    """Join packed items, and return a packed list."""
    return b"".join((_plain_packer.pack_array_header(len(items)), *items))
