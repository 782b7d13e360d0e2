"""A layout table back from its bytes, which are untrusted: everything is checked before anyone allocates by it.

It is read item by item, in any form of msgpack, and each entry is checked as it comes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from operator import attrgetter, itemgetter

import msgpack

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
_INT = {int}
_KEYS = {*Entry._fields} | {"global_shape", "placements", "mesh", "offsets"}


def decode(table: bytes, *, low: int, high: int) -> tuple[Entry, ...]:
    """The entries of a layout table; every extent lies in [low, high) of a slot. Raises ``DamagedError``."""
    entries = _checked(_items(table, is_table=True), low, high)
    names = {e.name: e for e in entries}
    if len(names) != len(entries):
        raise DamagedError("layout table: a name occurs twice")
    check_aliases(names)
    return entries


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


def _items(data: bytes, *, is_table: bool) -> Iterator[object]:
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


def _checked(items: Iterator[object], low: int, high: int) -> tuple[Entry, ...]:
    entries = tuple(map(_entry, items))
    at = low
    for entry in sorted((e for e in entries if e.nbytes), key=attrgetter("offset")):
        if entry.offset % EXTENT_ALIGN or entry.offset < at or entry.offset + entry.nbytes > high:
            raise DamagedError(f"layout table: extent of {entry.name!r} is out of place")
        at = entry.offset + entry.nbytes
    return entries


def _entry(item: object) -> Entry:
    if not isinstance(item, dict) or item.keys() != _KEYS:
        raise DamagedError("layout table: an entry has the wrong keys")
    name, role, dtype, shape, stride, nbytes, device, offset, layer, alias = _VALUES(item)
    for text in (name, device) if alias is None else (name, device, alias):
        if type(text) is not str or not is_name(text):
            raise DamagedError("layout table: bad text")
    is_whole = type(nbytes) is type(offset) is type(layer) is int
    if not is_whole or not 0 <= nbytes < INT_MAX or not 0 <= offset < INT_MAX or not -1 <= layer < INT_MAX:
        raise DamagedError("layout table: bad number")
    if not type(shape) is type(stride) is list or not _INT.issuperset(map(type, shape + stride)):
        raise DamagedError("layout table: bad list of numbers")
    if not (type(role) is type(dtype) is str and role in ROLES and dtype in ITEM_NBYTES and len(shape) == len(stride)):
        raise DamagedError(f"layout table: entry {name!r} has an unknown role, dtype or stride")
    shape, stride = tuple(shape), tuple(stride)
    numel = _dense_numel(shape, stride)
    if numel is None or nbytes != (0 if alias is not None else numel * ITEM_NBYTES[dtype]):
        raise DamagedError(f"layout table: shape, stride and size of {name!r} do not go together")
    return Entry(name, role, dtype, shape, stride, nbytes, device, offset, layer, alias)


@lru_cache(maxsize=64)  # few: a hostile table may be made of keys that share a hash, each compared with all others
def _dense_numel(shape: tuple[int, ...], stride: tuple[int, ...]) -> int | None:
    """Elements of a dense tensor; None where there can be no such tensor. Cached: the layers of a model are alike."""
    if not all(0 <= number < INT_MAX for number in (*shape, *stride)):
        return None
    numel = math.prod(shape)
    if (numel or math.prod(filter(None, shape))) >= INT_MAX or not is_dense(shape, stride):
        return None
    return numel
