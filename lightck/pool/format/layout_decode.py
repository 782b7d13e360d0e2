"""A layout table back from its bytes, which are untrusted: everything is checked before anyone allocates by it.

A table in the form in which lightck writes it is read natively (``layout_native``). Any other is read here, item by
item: a damaged one, to say what is wrong with it, and one that somebody else wrote in another form of the same msgpack.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from operator import itemgetter
from typing import Any

import msgpack

from lightck.pool.format import layout_native
from lightck.pool.format.layout import (
    ENTRIES_MAX,
    INT_MAX,
    ITEM_NBYTES,
    NAME_NBYTES_MAX,
    NDIM_MAX,
    ROLES,
    Entry,
    is_dense,
    is_name,
)
from lightck.pool.format.structures import EXTENT_ALIGN, DamagedError

_VALUES = itemgetter(*Entry._fields)
_KEYS = {*Entry._fields} | {"global_shape", "placements", "mesh", "offsets"}


def decode(table: bytes, *, low: int, high: int) -> tuple[Entry, ...]:
    """The entries of a layout table; every extent lies in [low, high) of a slot. Raises ``DamagedError``."""
    entries = layout_native.read(table, low, high)
    if entries is None:
        entries = by_item(table, low, high)
    names = {e.name: e for e in entries}
    if len(names) != len(entries):
        raise DamagedError("layout table: a name occurs twice")
    check_aliases(names)
    return entries


def by_item(table: bytes, low: int, high: int) -> tuple[Entry, ...]:
    """The same in any form of msgpack, names and aliases aside. Raises ``DamagedError`` with what is wrong."""
    return _checked(_items(table, is_table=True), low, high)


def decode_extras(data: bytes, *, low: int, high: int) -> tuple[Entry, ...]:
    """Entries that appeared later. A name may come again, where a tensor changed its kind more than once, and an alias
    may name an entry of the table: ``check_aliases`` is for those that are present in a version."""
    return _checked(_items(data, is_table=False), low, high) if data else ()


def check_aliases(present: Mapping[str, Entry]) -> None:
    """Raises ``DamagedError`` where an entry is tied to something that has no bytes of its own."""
    for entry in present.values():
        if entry.alias is not None and (entry.alias not in present or present[entry.alias].alias is not None):
            raise DamagedError(f"layout table: {entry.name!r} is tied to nothing")


def check_ties(present: Mapping[str, Entry]) -> None:
    """The same for the entries of one version, and where an entry is tied to one of another dtype or shape: the bytes
    of that one would go into a tensor that was found to be like this one. (Of entries that are in a table together, one
    may have changed its kind since.)"""
    check_aliases(present)
    for entry in present.values():
        if entry.alias is not None and _kind(entry) != _kind(present[entry.alias]):
            raise DamagedError(f"{entry.name!r} is tied to {entry.alias!r}, which is of another dtype or shape")


def _kind(entry: Entry) -> tuple[str, tuple[int, ...]]:
    return entry.dtype, entry.shape


def _items(data: bytes, *, is_table: bool) -> Iterator[Any]:
    """What the list of entries holds, one by one: msgpack makes room for as many items as a list says it has, so the
    long list is not left to it, and the lists in an entry are short."""
    unpacker = msgpack.Unpacker(
        raw=False,
        strict_map_key=True,
        max_ext_len=0,
        max_bin_len=0,
        max_str_len=NAME_NBYTES_MAX,
        max_array_len=NDIM_MAX,
        max_map_len=len(_KEYS),
        max_buffer_size=len(data),
    )
    try:
        unpacker.feed(data)
        if is_table and (unpacker.read_map_header() != 1 or unpacker.unpack() != "entries"):
            raise DamagedError("layout table: not a map of entries")
        count = unpacker.read_array_header()
        if count > ENTRIES_MAX:
            raise DamagedError("layout table: too many entries")
        for _ in range(count):
            yield unpacker.unpack()
        if unpacker.tell() != len(data):
            raise DamagedError("layout table: bytes are left")
    except DamagedError:
        raise
    except Exception as err:
        raise DamagedError(f"layout table: {err or type(err).__name__}") from err


def _checked(items: Iterator[Any], low: int, high: int) -> tuple[Entry, ...]:
    entries = tuple(map(_entry, items))
    at = low
    for entry in sorted((e for e in entries if e.nbytes), key=lambda e: e.offset):
        if entry.offset % EXTENT_ALIGN or entry.offset < at or entry.offset + entry.nbytes > high:
            raise DamagedError(f"layout table: extent of {entry.name!r} is out of place")
        at = entry.offset + entry.nbytes
    return entries


def _entry(item: Any) -> Entry:
    if not isinstance(item, dict) or item.keys() != _KEYS:
        raise DamagedError("layout table: an entry has the wrong keys")
    name, role, dtype, shape, stride, nbytes, device, offset, layer, alias = _VALUES(item)
    for text in (name, device) if alias is None else (name, device, alias):
        if type(text) is not str or not is_name(text):
            raise DamagedError("layout table: bad text")
    for number, low in ((nbytes, 0), (offset, 0), (layer, -1)):
        if type(number) is not int or not low <= number < INT_MAX:
            raise DamagedError("layout table: bad number")
    shape, stride = _ints(shape), _ints(stride)
    if not (type(role) is type(dtype) is str and role in ROLES and dtype in ITEM_NBYTES and len(shape) == len(stride)):
        raise DamagedError(f"layout table: entry {name!r} has an unknown role, dtype or stride")
    numel = _dense_numel(shape, stride)
    if numel is None or nbytes != (0 if alias is not None else numel * ITEM_NBYTES[dtype]):
        raise DamagedError(f"layout table: shape, stride and size of {name!r} do not go together")
    return Entry(name, role, dtype, shape, stride, nbytes, device, offset, layer, alias)


@lru_cache(maxsize=64)  # few: a hostile table may be made of keys that share a hash, each compared with all others
def _dense_numel(shape: tuple[int, ...], stride: tuple[int, ...]) -> int | None:
    """Elements of a dense tensor; None where there can be no such tensor. Cached: the layers of a model are alike."""
    numel = math.prod(shape)
    if (numel or math.prod(filter(None, shape))) >= INT_MAX or not is_dense(shape, stride):
        return None
    return numel


def _ints(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > NDIM_MAX:
        raise DamagedError("layout table: bad list of numbers")
    for one in value:
        if type(one) is not int or not 0 <= one < INT_MAX:
            raise DamagedError("layout table: bad number")
    return tuple(value)
