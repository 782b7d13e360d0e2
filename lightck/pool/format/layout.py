"""The layout table: the extents of a slot and of a home. It is written once, when the pool is created, and identified
by its hash. (It is not the ``layout=`` of attach: that says which part of a logical tensor a rank has.)

An ``Entry`` describes the bytes of one tensor; ``assign_offsets`` gives entries their offsets; ``encode`` turns the
table into bytes, and ``decode`` parses the bytes. In the pool of a rank, entries may have pieces, and the table has a
group (docs/format.md, "Pools of a rank"). The bytes are untrusted. A table is parsed item by item, in any valid msgpack
encoding, and everything is checked before memory is allocated for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice, starmap
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import msgpack

from lightck.pool.format.group import ID_NBYTES, GroupIdentity
from lightck.pool.format.pieces import PIECES_MAX, Piece, parse_pieces
from lightck.pool.format.shares import Share, parse_share, share_to_map, written_part
from lightck.pool.format.structures import EXTENT_ALIGN, LARGE_EXTENT, LARGE_EXTENT_ALIGN, DamagedError, align_up

ENTRIES_MAX = 1 << 20
NDIM_MAX = 64
INT_MAX = 1 << 62
"""Every integer of an entry is below this."""
NAME_NBYTES_MAX = 4096
"""Maximum length of a name in UTF-8."""
LIST_PIECES_MAX, LIST_PAIRS_MAX = 1 << 20, 1 << 28
"""Maximum sums over all entries of a table, or over all extra entries of a checkpoint. ``LIST_PIECES_MAX``: of
the numbers of pieces, which limits the memory. ``LIST_PAIRS_MAX``: of the squares of these numbers, which limits the
time, because the pieces of an entry are compared with each other."""
ROLES = ("param", "buffer", "optimizer", "state")
GRADIENT_ROLE, GRADIENT_PREFIX = "gradient", "gradient/"
"""Role, and beginning of the name, of the entries that hold gradients. Only pools with gradient records have them."""
SLOT_PLACE, HOME_PLACE = "slot", "home"
HOME_ROLES = ("param", "optimizer")
"""Roles of the entries that can lie in homes. (So can entries of the role ``state`` whose name begins with
``RESIDUAL_PREFIX``.)"""
RESIDUAL_PREFIX = "state/TopK/residuals_of_bases/"
"""Beginning of the names of entries with the role ``state`` that lie in homes: what ``TopK`` has left out of the
gradients of a parameter, as it was at the step of the parameter's base. The name of the parameter follows."""

# Bytes per element of every dtype name that a table may contain. The pool knows names and sizes, but not torch.
ITEM_NBYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "bits1x8", "bits2x4", "bits4x2", "bits8", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16", "bits16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
}


class Entry(NamedTuple):
    """One extent: the bytes of one tensor. docs/format.md, "Layout table", explains each field."""

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    nbytes: int
    device: str = "cpu"
    offset: int = 0
    layer: int = -1
    alias: str | None = None
    logical_shape: tuple[int, ...] | None = None
    """Shape of the logical tensor of which this tensor is a part. ``logical_shape`` and ``pieces`` are both None for a
    tensor that is not stored as a part."""
    pieces: tuple[Piece, ...] | None = None
    """The pieces of the logical tensor that this tensor holds. Only the pool of a rank stores pieces."""
    share: Share | None = None
    """If several ranks divide the held tensor: which of its rows this entry stores. None: they do not divide it. The
    entry of a share has pieces, also if the rank holds the whole logical tensor. Only a pool with shares stores this
    field."""
    place: str = SLOT_PLACE
    """Whether ``offset`` counts from the start of a slot ("slot") or of a region for homes ("home",
    ``Superblock.homes``). Only a pool with gradient records stores it."""

    @property
    def held_pieces(self) -> tuple[Piece, ...] | None:
        """The pieces of the held tensor, also if the entry stores only a share of it; None if the held tensor is the
        whole logical tensor."""
        return self.pieces if self.share is None else self.share.pieces

    @property
    def held_shape(self) -> tuple[int, ...]:
        """Shape of the tensor that the rank holds."""
        return self.shape if self.share is None else self.share.cut.shape

    def can_hold(self, other: Entry) -> bool:
        """Whether this extent can hold the tensor that ``other`` describes: same dtype, shape, order of the bytes,
        alias, device, pieces, share and place."""
        if (self.dtype, self.shape, self.alias, self.device) != (other.dtype, other.shape, other.alias, other.device):
            return False
        if self.stride != other.stride and self._strides_that_count != other._strides_that_count:
            return False
        return (self.logical_shape, self.pieces, self.share, self.place) == (
            other.logical_shape,
            other.pieces,
            other.share,
            other.place,
        )

    @property
    def _strides_that_count(self) -> list[int]:
        """The strides of dimensions with more than one element; the others say nothing of the order of the bytes. (The
        local tensor of a DTensor and its optimizer state may differ in those.)"""
        return [stride for stride, size in zip(self.stride, self.shape, strict=True) if size > 1]

    def is_same_tensor(self, other: Entry) -> bool:
        """Whether the logical tensors have the same name, dtype and shape. (The two entries may hold different parts of
        the logical tensor.)"""
        one, two = (entry.shape if entry.logical_shape is None else entry.logical_shape for entry in (self, other))
        return (self.name, self.dtype, one) == (other.name, other.dtype, two)

    def to_map(
        self, *, has_group: bool = False, has_shares: bool = False, has_gradients: bool = False
    ) -> dict[str, object]:
        """Return the entry as the map that the table contains. ``has_group``: whether the pool is that of a rank. If
        it is not, the keys ``global_shape``, ``placements``, ``mesh`` and ``offsets`` of the map carry no information:
        they are None, or follow from the shape. ``has_shares``: whether it is a pool with shares. ``has_gradients``:
        whether it is one with gradient records.

        Raises ``ValueError`` if pieces, share or place are invalid, or if the entry has pieces, a share or a place that
        such a pool cannot store."""
        plain: dict[str, object] = dict(zip(_PLAIN_FIELDS, self, strict=False))
        plain |= {"shape": list(self.shape), "stride": list(self.stride)}
        place = self._place_field(has_gradients)
        if has_group:
            return plain | self._rank_fields() | self._share_field(has_shares) | place
        if self.logical_shape is not None or self.pieces is not None:
            raise ValueError(f"{self.name!r} is a part of a tensor, and only the pool of a rank can hold parts")
        return (
            plain
            | {
                "global_shape": list(self.shape),
                "placements": None,
                "mesh": None,
                "offsets": [0] * len(self.shape),
            }
            | place
        )

    def _place_field(self, has_gradients: bool) -> dict[str, object]:
        if not has_gradients and (self.place != SLOT_PLACE or self.role == GRADIENT_ROLE):
            raise ValueError(
                f"{self.name!r} is a gradient or lies in a home: only a pool with gradient records can hold it"
            )
        problem = _place_problem(self.place, self.role, self.name, self.alias)
        if problem is not None:
            raise ValueError(f"{self.name!r} cannot be stored: {problem}")
        return {"place": self.place} if has_gradients else {}

    def _rank_fields(self) -> dict[str, object]:
        if self.logical_shape is None and self.pieces is None:
            return dict.fromkeys(_RANK_FIELDS)
        try:
            parse_pieces(self.pieces, self.logical_shape, self.shape)
        except DamagedError as err:
            raise ValueError(f"{self.name!r} cannot be stored: {err}") from err
        pieces = [[list(numbers) for numbers in piece] for piece in self.pieces or ()]
        return {"logical_shape": list(self.logical_shape or ()), "pieces": pieces}

    def _share_field(self, has_shares: bool) -> dict[str, object]:
        if self.share is None:
            return {"share": None} if has_shares else {}
        if not has_shares:
            raise ValueError(f"{self.name!r} is a share, and only a pool with shares can hold it")
        item = share_to_map(self.share)
        try:
            parse_share(item, self.shape, list(self.logical_shape or ()), self.pieces)
        except DamagedError as err:
            raise ValueError(f"{self.name!r} cannot be stored: {err}") from err
        return {"share": item}


# The last four fields are logical_shape, pieces, share and place.
_PLAIN_FIELDS, _RANK_FIELDS = Entry._fields[:-4], Entry._fields[-4:-2]


def is_of_unit(role: str, name: str, alias: str | None) -> bool:
    """Whether an entry belongs to the unit of a parameter, so that it can lie in a home."""
    return alias is None and (role in HOME_ROLES or (role == "state" and name.startswith(RESIDUAL_PREFIX)))


def _place_problem(place: object, role: str, name: str, alias: str | None) -> str | None:
    """Return what is wrong with the place of an entry, or with its role as a gradient; None if nothing is."""
    if place != SLOT_PLACE and place != HOME_PLACE:
        return "its place is neither a slot nor a home"
    if place == HOME_PLACE and not is_of_unit(role, name, alias):
        return "it lies in a home, and is not a parameter, optimizer state or residual with bytes of its own"
    if (role == GRADIENT_ROLE) != name.startswith(GRADIENT_PREFIX):
        return "its name and its role do not agree whether it is a gradient"
    return None


def entry_of_share(entry: Entry, share: Share) -> Entry:
    """Return the entry of a share. ``entry``: that of the held tensor, of shape ``share.cut.shape``."""
    share = share._replace(pieces=entry.pieces)
    shape, pieces = written_part(share)
    nbytes = 0 if entry.alias is not None else math.prod(shape) * ITEM_NBYTES[entry.dtype]
    logical_shape = entry.shape if entry.pieces is None else entry.logical_shape
    return entry._replace(shape=shape, nbytes=nbytes, logical_shape=logical_shape, pieces=pieces, share=share)


def held_entry(entry: Entry) -> Entry:
    """Return the entry of the tensor that the rank holds. ``entry``: an entry of a pool, which may be that of a share.
    The held tensor gets the strides of the share, unless no dense tensor of its shape can have them: then it is
    contiguous."""
    share = entry.share
    if share is None:
        return entry
    shape = share.cut.shape
    return entry._replace(
        shape=shape,
        stride=entry.stride if is_dense(shape, entry.stride) else contiguous_stride(shape),
        nbytes=0 if entry.alias is not None else math.prod(shape) * ITEM_NBYTES[entry.dtype],
        logical_shape=None if share.pieces is None else entry.logical_shape,
        pieces=share.pieces,
        share=None,
    )


def assign_offsets(entries: Iterable[Entry], start: int) -> tuple[list[Entry], int]:
    """Assign offsets to the entries, in order, from ``start`` on. Returns the placed entries, and the offset after the
    last of them, rounded up to a multiple of ``LARGE_EXTENT_ALIGN``."""
    placed, at = [], start
    for entry in entries:
        at = align_up(at, LARGE_EXTENT_ALIGN if entry.nbytes >= LARGE_EXTENT else EXTENT_ALIGN)
        placed.append(entry._replace(offset=at))
        at += entry.nbytes
    return placed, align_up(at, LARGE_EXTENT_ALIGN)


def blocks_of(nbytes: int, block: int) -> int:
    """Return the number of blocks of ``block`` bytes in ``nbytes`` bytes; the last one may be shorter."""
    return -(-nbytes // block)


def encode(
    entries: Sequence[Entry],
    group: GroupIdentity | None = None,
    *,
    has_shares: bool = False,
    has_gradients: bool = False,
) -> bytes:
    """Return the layout table of these entries. ``group``: the identity of a rank's pool; None if the pool is not
    that of a rank. ``has_shares``: whether it is a pool with shares. ``has_gradients``: whether it is one with gradient
    records. Raises ``ValueError`` as ``Entry.to_map`` does."""
    head = {} if group is None else {"group": group.to_map()}
    maps = _maps(entries, group is not None, has_shares, has_gradients)
    return bytes(msgpack.packb(head | {"entries": maps}, use_bin_type=True))


def encode_extras(
    entries: Sequence[Entry], *, has_group: bool = False, has_shares: bool = False, has_gradients: bool = False
) -> bytes:
    """Return the extra entries as a manifest contains them; empty if there are none. ``has_group``: whether the pool is
    that of a rank. ``has_shares``: whether it is one with shares. ``has_gradients``: whether it is one with gradient
    records. Raises ``ValueError`` as ``Entry.to_map`` does."""
    maps = _maps(entries, has_group, has_shares, has_gradients)
    return bytes(msgpack.packb(maps, use_bin_type=True)) if entries else b""


def _maps(entries: Sequence[Entry], has_group: bool, has_shares: bool, has_gradients: bool) -> list[dict[str, object]]:
    counts = [n for entry in entries for n in _piece_counts(entry)]
    if sum(counts) > LIST_PIECES_MAX or sum(count**2 for count in counts) > LIST_PAIRS_MAX:
        raise ValueError(
            f"The tensors of this rank have {sum(counts)} pieces together, and one of them has {max(counts)}. That is "
            "more than a pool can list and compare. A piece is a box of elements of a whole tensor. Shard the tensors "
            "so that a rank holds fewer separate boxes of each."
        )
    return [entry.to_map(has_group=has_group, has_shares=has_shares, has_gradients=has_gradients) for entry in entries]


def _piece_counts(entry: Entry) -> tuple[int, int]:
    """Return the numbers of pieces in the two lists of an entry: of what is written, and of what the rank holds."""
    return len(entry.pieces or ()), 0 if entry.share is None else len(entry.share.pieces or ())


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements of a tensor occupy one run of memory, without gaps or overlaps, in some order of the
    dimensions. True for an empty tensor."""
    if is_contiguous(shape, stride) or 0 in shape:
        return True
    expected = 1
    for step, size in sorted((st, sz) for st, sz in zip(stride, shape, strict=True) if sz != 1):
        if step != expected:
            return False
        expected *= size
    return True


def is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements of a tensor that is not empty lie in C order (last dimension fastest), without gaps."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor whose elements lie in C order."""
    strides, n = [], 1
    for size in reversed(shape):
        strides.append(n)
        n *= max(size, 1)
    return tuple(reversed(strides))


def is_name(text: str) -> bool:
    """Whether this is a valid name of an entry: at most ``NAME_NBYTES_MAX`` bytes, and no NUL."""
    fits = len(text) <= NAME_NBYTES_MAX // 4 or len(text.encode("utf-8", "replace")) <= NAME_NBYTES_MAX
    return fits and "\0" not in text


def are_names(texts: Sequence[str]) -> bool:
    """Whether ``is_name`` is true for each text. In some cases this returns False although it is."""
    return max(map(len, texts), default=0) <= NAME_NBYTES_MAX // 4 and "\0" not in "".join(texts)


_plain_values = itemgetter(*_PLAIN_FIELDS)
_INT = {int}
_CHUNK = 64
"""How many entries are parsed together. (Those of a rank's pool, which may have many pieces, are parsed one by one.)"""
_PLAIN_KEYS = {*_PLAIN_FIELDS, "global_shape", "placements", "mesh", "offsets"}
_RANK_KEYS = {*_PLAIN_FIELDS, *_RANK_FIELDS}


def decode(table: bytes, *, low: int, high: int, home_nbytes: int | None = None) -> tuple[Entry, ...]:
    """Parse the layout table of a pool that is not that of a rank. Every extent must lie in [low, high), in offsets
    from the start of a slot. ``home_nbytes``: length of a home, in which extents may lie, too; None: the pool is not
    one with gradient records. Raises ``DamagedError``."""
    return _table_entries(_items(table, ("entries",)), low, high, has_group=False, home_nbytes=home_nbytes)


def decode_of_rank(
    table: bytes, *, low: int, high: int, has_shares: bool = False, home_nbytes: int | None = None
) -> tuple[GroupIdentity, tuple[Entry, ...]]:
    """``decode`` for the pool of a rank: parse its group and its entries. ``has_shares``: whether it is a pool with
    shares. Raises ``DamagedError``."""
    items = _items(table, ("group", "entries"), has_group=True)
    group = GroupIdentity.parse(next(items))
    return group, _table_entries(items, low, high, has_group=True, has_shares=has_shares, home_nbytes=home_nbytes)


def _table_entries(
    items: Iterator[object],
    low: int,
    high: int,
    *,
    has_group: bool,
    has_shares: bool = False,
    home_nbytes: int | None,
) -> tuple[Entry, ...]:
    entries = _parse_entries(items, low, high, has_group, has_shares, home_nbytes)
    by_name = {e.name: e for e in entries}
    if len(by_name) != len(entries):
        raise DamagedError("layout table: a name occurs twice")
    check_aliases(by_name)
    return entries


def decode_extras(
    data: bytes,
    *,
    low: int,
    high: int,
    has_group: bool = False,
    has_shares: bool = False,
    has_gradients: bool = False,
) -> tuple[Entry, ...]:
    """Parse the extra entries, which were added after the pool was created. ``has_group``: whether the pool is that of
    a rank. ``has_shares``: whether it is one with shares. ``has_gradients``: whether it is one with gradient records;
    no extra entry lies in a home. Raises ``DamagedError``.

    A name can occur more than once, because a tensor whose dtype or size changed can have an old entry beside its
    present one. An alias can name an entry of the table. So aliases are checked later, among the entries that are
    present in one checkpoint (``check_ties``)."""
    if not data:
        return ()
    entries = _parse_entries(
        _items(data, (), has_group), low, high, has_group, has_shares, 0 if has_gradients else None
    )
    if any(entry.place == HOME_PLACE for entry in entries):
        raise DamagedError("list of tensors: a tensor that appeared later lies in a home")
    return entries


def check_aliases(present: Mapping[str, Entry]) -> None:
    """Raise ``DamagedError`` if an alias names no entry in ``present`` (name -> entry), or one that is itself tied."""
    for entry in present.values():
        if entry.alias is not None and (entry.alias not in present or present[entry.alias].alias is not None):
            raise DamagedError(
                f"list of tensors: {entry.name!r} is tied to {entry.alias!r}, which has no bytes of its own"
            )


def check_ties(present: Mapping[str, Entry]) -> None:
    """Check the aliases of one checkpoint as ``check_aliases`` does, and check that tied entries have the same dtype
    and shape. Raises ``DamagedError``.

    If tied entries differed, a restore would write bytes of one shape into a tensor of another. In the layout table
    they may differ, because a checkpoint can hold an extra entry in place of one of them."""
    check_aliases(present)
    for entry in present.values():
        if entry.alias is not None and _tied_fields(entry) != _tied_fields(present[entry.alias]):
            raise DamagedError(f"{entry.name!r} is tied to {entry.alias!r}, which is of another dtype or shape")


def _tied_fields(entry: Entry) -> tuple[object, ...]:
    """Return the fields that must be equal in tied entries."""
    return entry.dtype, entry.shape, entry.logical_shape, entry.pieces, entry.share


def _items(data: bytes, keys: Sequence[str], has_group: bool = False) -> Iterator[object]:
    """Yield the items of the list of entries. ``keys``: the keys of the layout table, in their order. If "group" is one
    of the keys, its value is yielded first. If there are no keys, ``data`` is only the list. Raises ``DamagedError``.

    msgpack allocates as many items as a list claims to have. So this function iterates over the long list, and msgpack
    unpacks only the short lists inside an entry."""
    unpacker = msgpack.Unpacker(
        raw=False,
        strict_map_key=True,
        max_ext_len=0,
        max_bin_len=ID_NBYTES if has_group else 0,
        max_str_len=NAME_NBYTES_MAX,
        max_array_len=PIECES_MAX if has_group else NDIM_MAX,
        max_map_len=len(_PLAIN_KEYS) + 1,
        max_buffer_size=len(data),
    )
    try:
        unpacker.feed(data)
        if keys and unpacker.read_map_header() != len(keys):
            raise DamagedError("layout table: it is not a map of entries")
        for key in keys:
            if unpacker.unpack() != key:
                raise DamagedError("layout table: it is not a map of entries")
            if key == "group":
                yield unpacker.unpack()
        count = unpacker.read_array_header()
        if count > ENTRIES_MAX:
            raise DamagedError("list of tensors: it has too many entries")
        step = 1 if has_group else _CHUNK
        for start in range(0, count, step):
            chunk = list(islice(unpacker, min(step, count - start)))
            if len(chunk) < min(step, count - start):
                raise DamagedError("list of tensors: it ends too early")
            yield from chunk
        if unpacker.tell() != len(data):
            raise DamagedError("list of tensors: bytes are left after its last entry")
    except DamagedError:
        raise
    except Exception as err:
        raise DamagedError(f"list of tensors: {err or type(err).__name__}") from err


def _parse_entries(
    items: Iterator[object], low: int, high: int, has_group: bool, has_shares: bool, home_nbytes: int | None
) -> tuple[Entry, ...]:
    """Parse the items, and check that the extents lie in [low, high), or in a home, and do not overlap. Raises
    ``DamagedError``."""
    has_gradients = home_nbytes is not None
    keys = (_RANK_KEYS if has_group else _PLAIN_KEYS) | ({"place"} if has_gradients else set())
    if has_group:
        entries = tuple(_rank_entries(items, keys, has_shares))
    else:
        chunks = iter(lambda: list(islice(items, _CHUNK)), [])
        entries = tuple(chain.from_iterable(_entries(chunk, keys) for chunk in chunks))
    for place, first, end in ((SLOT_PLACE, low, high), (HOME_PLACE, 0, home_nbytes or 0)):
        at = first
        for entry in sorted((e for e in entries if e.nbytes and e.place == place), key=attrgetter("offset")):
            if entry.offset % EXTENT_ALIGN or entry.offset < at or entry.offset + entry.nbytes > end:
                raise DamagedError(f"list of tensors: extent of {entry.name!r} is out of place")
            at = entry.offset + entry.nbytes
    return entries


def _rank_entries(items: Iterator[object], keys: set[str], has_shares: bool) -> Iterator[Entry]:
    """Parse the entries of a rank's pool. Raises ``DamagedError``."""
    n_pieces = n_pairs = 0
    keys = keys | {"share"} if has_shares else keys
    for item in items:  # one by one, because an item may have many pieces
        entry = _entry(item, keys)
        assert isinstance(item, dict), "_entry refuses anything else"
        shape, pieces = item["logical_shape"], item["pieces"]
        if shape is not None or pieces is not None:
            parsed = parse_pieces(pieces, shape, entry.shape)
            entry = entry._replace(logical_shape=tuple(shape), pieces=parsed)
        if has_shares and item["share"] is not None:
            entry = entry._replace(share=parse_share(item["share"], entry.shape, shape, entry.pieces))
        counts = _piece_counts(entry)
        n_pieces, n_pairs = n_pieces + sum(counts), n_pairs + sum(count**2 for count in counts)
        if n_pieces > LIST_PIECES_MAX or n_pairs > LIST_PAIRS_MAX:
            raise DamagedError("list of tensors: it has too many pieces")
        yield entry


def _entries(items: list[object], keys: set[str]) -> list[Entry]:
    """Parse some entries, without their pieces. ``keys``: the keys that each must have. Raises ``DamagedError``.

    All items are checked together, field by field: that takes a third of the time of one check for each item. If
    something is wrong, each item is checked by itself, to find which."""
    entries = _valid_entries(items, keys)
    return [_entry(item, keys) for item in items] if entries is None else entries


def _valid_entries(items: list[Any], keys: set[str]) -> list[Entry] | None:
    """Return the entries if ``_entry`` would refuse none of them. Return None if it may refuse one."""
    if set(map(type, items)) != {dict} or set(map(len, items)) != {len(keys)}:
        return None
    if not keys.issuperset(chain.from_iterable(items)):  # with these lengths, each item has all of the keys
        return None
    columns = [list(column) for column in zip(*map(_plain_values, items), strict=True)]
    names, roles, dtypes, shapes, strides, nbytes, devices, offsets, layers, aliases = columns
    texts = [*names, *devices, *(alias for alias in aliases if alias is not None)]
    numbers = [*nbytes, *offsets, *layers]
    has_place = "place" in keys
    if set(map(type, [*texts, *roles, *dtypes])) != {str} or set(map(type, numbers)) != _INT:
        return None
    if not are_names(texts):
        return None
    if max(numbers) >= INT_MAX or min([*nbytes, *offsets]) < 0 or min(layers) < -1:
        return None
    if set(map(type, [*shapes, *strides])) != {list} or not ITEM_NBYTES.keys() >= set(dtypes):
        return None
    if not _INT.issuperset(map(type, chain(*shapes, *strides))) or list(map(len, shapes)) != list(map(len, strides)):
        return None
    if not {*ROLES, *((GRADIENT_ROLE,) if has_place else ())}.issuperset(roles):
        return None
    shapes, strides = list(map(tuple, shapes)), list(map(tuple, strides))
    sizes = zip(map(_dense_numel, shapes, strides), map(ITEM_NBYTES.__getitem__, dtypes), aliases, strict=True)
    if nbytes != [None if n is None else 0 if alias is not None else n * each for n, each, alias in sizes]:
        return None
    rows = zip(names, roles, dtypes, shapes, strides, nbytes, devices, offsets, layers, aliases, strict=True)
    entries = list(starmap(Entry, rows))
    if not has_place:
        return entries
    places = [item["place"] for item in items]
    if any(map(_place_problem, places, roles, names, aliases)):
        return None
    return [entry._replace(place=place) for entry, place in zip(entries, places, strict=True)]


def _entry(item: object, keys: set[str]) -> Entry:
    """Parse one entry, without its pieces. ``keys``: the keys that it must have. Raises ``DamagedError``."""
    if not isinstance(item, dict) or item.keys() != keys:
        raise DamagedError("list of tensors: an entry has the wrong keys")
    name, role, dtype, shape, stride, nbytes, device, offset, layer, alias = _plain_values(item)
    for text in (name, device) if alias is None else (name, device, alias):
        if type(text) is not str or not is_name(text):
            raise DamagedError("list of tensors: a name in an entry is no text, is too long, or contains NUL")
    are_ints = type(nbytes) is type(offset) is type(layer) is int
    if not are_ints or not 0 <= nbytes < INT_MAX or not 0 <= offset < INT_MAX or not -1 <= layer < INT_MAX:
        raise DamagedError("list of tensors: an entry has a number out of range")
    if not type(shape) is type(stride) is list or not _INT.issuperset(map(type, shape + stride)):
        raise DamagedError("list of tensors: an entry has a shape or stride that is no list of numbers")
    has_place = "place" in keys
    is_role = type(role) is str and (role in ROLES or (has_place and role == GRADIENT_ROLE))
    if not (is_role and type(dtype) is str and dtype in ITEM_NBYTES and len(shape) == len(stride)):
        raise DamagedError(f"list of tensors: {name!r} has an unknown role or dtype, or a wrong number of strides")
    shape, stride = tuple(shape), tuple(stride)
    numel = _dense_numel(shape, stride)
    if numel is None or nbytes != (0 if alias is not None else numel * ITEM_NBYTES[dtype]):
        raise DamagedError(f"list of tensors: shape, stride and size of {name!r} do not go together")
    entry = Entry(name, role, dtype, shape, stride, nbytes, device, offset, layer, alias)
    if not has_place:
        return entry
    problem = _place_problem(item["place"], role, name, alias)
    if problem is not None:
        raise DamagedError(f"list of tensors: {name!r}: {problem}")
    return entry._replace(place=item["place"])


# The cache is small, because a hostile table can contain many shapes with equal hashes, and each of these shapes is
# compared with all such shapes in the cache.
@lru_cache(maxsize=64)
def _dense_numel(shape: tuple[int, ...], stride: tuple[int, ...]) -> int | None:
    """Return the number of elements of a dense tensor with this shape and stride; None if no dense tensor can have
    them. Cached, because many layers have equal shapes."""
    if not all(0 <= number < INT_MAX for number in (*shape, *stride)):
        return None
    numel = math.prod(shape)
    # The product of an empty tensor's sizes is 0, so the product of its sizes other than 0 is limited instead.
    if (numel or math.prod(filter(None, shape))) >= INT_MAX or not is_dense(shape, stride):
        return None
    return numel
