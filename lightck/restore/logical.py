"""A checkpoint of several ranks as logical tensors, and as the checkpoint that another rank would have saved.

Each rank of the *old world* has saved its parts of the tensors. A rank of any other world, or a single process, needs
other parts of them. ``LogicalCheckpoint`` says which logical tensors there are, who holds what of them, and which
tensors differ between ranks that should hold the same. ``Relocated`` is a ``Source``: it has the entries that a rank
with given parts would have saved, and reads their bytes from the pools of the old world, verified block by block.

A tensor that several ranks hold whole is taken from the first of them. If a block is damaged there, it is taken from
another one. Padding (elements of a local tensor that belong to no piece) is zero, unless a rank of the old world held
the same part: then the padding is taken with it. Optimizer state with the shape of its parameter is cut as its
parameter is. Other state must be the same for the whole parameter as for a part of it: a number, or the like.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations

import torch

from lightck.errors import UnsupportedError
from lightck.pool.format.assembly import Copy, coverage, local_copies
from lightck.pool.format.boxes import Box, Ints, intersection, whole_box
from lightck.pool.format.layout import ITEM_NBYTES, Entry, check_ties, contiguous_stride, held_entry, is_dense
from lightck.pool.format.pieces import Piece
from lightck.pool.format.structures import CommitRecord, DamagedError
from lightck.pool.reader import PoolReader, StoredCheckpoint
from lightck.restore.contents import load_tensor
from lightck.restore.read_boxes import BoxRead, Destination, read_boxes
from lightck.restore.rows_of_others import differing_rows
from lightck.restore.tensor_writes import same_bits
from lightck.restore.usable import parse
from lightck.state.inventory import param_of
from lightck.state.parts import Part
from lightck.state.shares import Shares

log = logging.getLogger("lightck")
REPLICATED = ("param", "optimizer")
"""Roles of the tensors that must be equal on all ranks that hold the same part of them. Buffers may differ: each rank
has BatchNorm statistics of its own."""


@dataclass(frozen=True, slots=True)
class Holder:
    """One pool that holds a tensor, or a part of it."""

    position: int
    """Of the pool in ``of_ranks``."""
    stored: StoredCheckpoint
    entry: Entry
    name: str
    """Name under which the bytes lie. (The tensor may be tied on some ranks only.)"""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return _whole_pieces(self.entry.shape) if self.entry.pieces is None else self.entry.pieces


@dataclass(slots=True)
class LogicalCheckpoint:
    """One checkpoint of several ranks. ``of_ranks``: the checkpoint in the pool of each of them, in their order."""

    of_ranks: Sequence[StoredCheckpoint]
    state_of: int = 0
    """Position in ``of_ranks`` of the rank whose small state and whose objects in ``state=`` count. (They belong to
    each rank, and are not the same on all.)"""
    entries: dict[str, Entry] = field(init=False)
    """Name -> entry of the whole logical tensor."""
    holders: dict[str, list[Holder]] = field(init=False)
    """Name -> who holds it; nobody for a tied name, whose bytes lie under another name."""

    def __post_init__(self) -> None:
        """Raises ``DamagedError`` if the ranks do not hold the whole of each tensor, and ``UnsupportedError`` for
        optimizer state whose shape differs between ranks."""
        self.entries, self.holders = {}, {}
        for name in dict.fromkeys(name for stored in self.of_ranks for name in stored.entries):
            self._add(name)
        check_ties(self.entries)

    @property
    def step(self) -> int:
        return self.of_ranks[0].step

    @property
    def own(self) -> StoredCheckpoint:
        """The checkpoint of ``state_of``."""
        return self.of_ranks[self.state_of]

    def _add(self, name: str) -> None:
        positions = self._positions_that_count(name)
        if not positions:
            return
        parts = [self.of_ranks[at].entries[name] for at in positions]
        entry = _whole_entry(parts[0])
        if any((part.dtype, _whole_entry(part).shape) != (entry.dtype, entry.shape) for part in parts):
            _refuse_shape_per_rank(name, entry.role)
            raise DamagedError(f"its tensor {name!r} has another shape or dtype on another rank")
        if len({part.held_pieces is None for part in parts}) > 1:
            raise DamagedError(f"its tensor {name!r} is a part on some ranks only")
        self.entries[name] = entry
        if entry.alias is not None:
            return
        self.holders[name] = [
            Holder(at, self.of_ranks[at], part, part.alias or name) for at, part in zip(positions, parts, strict=True)
        ]
        held = tuple(one.pieces for one in self.holders[name])
        is_whole_everywhere = all(part.pieces is None for part in parts)
        uncovered = None if is_whole_everywhere else _uncovered(entry.shape, held)
        if uncovered is not None:
            raise DamagedError(
                f"its tensor {name!r} cannot be put together, because no pool holds the part of size {uncovered.size} "
                f"at {uncovered.start}"
            )

    def _positions_that_count(self, name: str) -> list[int]:
        """Return the positions of the checkpoints from whose tensors of this name the logical tensor is made."""
        found = [at for at, stored in enumerate(self.of_ranks) if name in stored.entries]
        if self.of_ranks[found[0]].entries[name].role == "state":
            return [self.state_of] if name in self.own.entries else []
        return found

    def differing(self, roles: Iterable[str]) -> list[str]:
        """Return the names of the tensors of these roles of which two ranks hold the same elements with different
        bytes. Raises ``DamagedError`` if bytes must be compared and cannot be read. (Usually checksums are enough.)"""
        wanted = set(roles)
        found = {
            name for name, holders in self.holders.items() if self.entries[name].role in wanted and _differ(holders)
        }
        if wanted & set(REPLICATED):
            found |= self._differing_rows()
        return [name for name in self.holders if name in found]

    def _differing_rows(self) -> set[str]:
        """Return the names of tensors of which a rank held other rows than the ranks that wrote them, as its checkpoint
        records."""
        of_ranks = {one.reader.group.rank: one for one in self.of_ranks if one.reader.group is not None}
        found: set[str] = set()
        for rank, stored in of_ranks.items():
            records = parse(stored).rows_of_others
            others = {at: other for at, other in of_ranks.items() if at != rank}
            found.update(differing_rows(stored, records, others) if records and has_shares(stored) else ())
        return found


@dataclass(slots=True)
class Relocated:
    """The checkpoint that a rank with these parts would have saved. It is read as a ``StoredCheckpoint`` is."""

    logical: LogicalCheckpoint
    parts: Mapping[str, Part]
    """Name of a parameter or buffer -> the part of it that the rank holds. All others are whole."""
    rank: int = 0
    """Ranks begin to read at different holders of the same bytes."""
    entries: dict[str, Entry] = field(init=False)
    _struck: set[int] = field(default_factory=set)
    """Positions, in ``of_ranks``, of pools in which a damaged block was found."""
    falls_back: bool = True
    """Whether a tensor that is damaged in one pool is read from another."""

    def __post_init__(self) -> None:
        """Raises ``UnsupportedError`` for optimizer state that cannot be cut."""
        self.entries = {name: self._entry(name, entry) for name, entry in self.logical.entries.items()}

    def _entry(self, name: str, entry: Entry) -> Entry:
        param = name if entry.role != "optimizer" else "model/" + param_of(entry.alias or name)
        part = self.parts.get(param)
        saved = next((one.entry for one in self.logical.holders.get(name, ()) if one.entry.pieces is not None), None)
        if entry.role == "optimizer" and entry.shape and entry.shape != self._shape_of(param):
            if part is not None or saved is not None or self._was_part(param):
                _refuse_shape_per_rank(name, entry.role)
            return entry
        if entry.role == "state" and saved is not None:
            raise UnsupportedError(
                f"The tensor {name!r} of an object in state= was saved as a part of a tensor, and only the same ranks "
                "can take it again. Leave the object out of state=, or start as many ranks as saved it."
            )
        if part is None or (entry.role == "optimizer" and not entry.shape):
            return entry
        if part.logical_shape != entry.shape:
            return entry  # the restore compares the shapes, and says which differ
        same = next((one.entry for one in self.logical.holders.get(name, ()) if one.pieces == part.pieces), None)
        stride = entry.stride if is_dense(part.shape, entry.stride) else contiguous_stride(part.shape)
        if same is not None and same.shape == part.shape:
            stride = same.stride
        nbytes = 0 if entry.alias is not None else math.prod(part.shape) * ITEM_NBYTES[entry.dtype]
        return entry._replace(
            shape=part.shape, stride=stride, nbytes=nbytes, logical_shape=part.logical_shape, pieces=part.pieces
        )

    def _shape_of(self, param: str) -> Ints | None:
        entry = self.logical.entries.get(param)
        return None if entry is None else entry.shape

    def _was_part(self, param: str) -> bool:
        return any(one.entry.held_pieces is not None for one in self.logical.holders.get(param, ()))

    def with_shares(self, shares: Shares) -> Relocated:
        """Return the checkpoint that a rank with these shares would have saved."""
        found = copy(self)
        found.entries = shares.applied_to_copies(self.entries)
        return found

    def alone(self, name: str) -> Relocated:
        """Return this checkpoint with one tensor only. It knows of no damage. A tensor that may differ between ranks (a
        buffer) is read from one rank only: from another, it could be of another state than those read before."""
        found = copy(self)
        found.entries, found._struck = {name: self.logical.entries[name]}, set()
        found.falls_back = found.entries[name].role in REPLICATED
        return found

    def cut(self, name: str, box: Box) -> Relocated:
        """Return what ``alone`` does, with nothing but a box of the tensor, as a contiguous tensor."""
        found, size = self.alone(name), box.size
        entry = found.entries[name]
        found.entries[name] = entry._replace(
            shape=size,
            stride=contiguous_stride(size),
            nbytes=math.prod(size) * ITEM_NBYTES[entry.dtype],
            logical_shape=entry.shape,
            pieces=() if 0 in size else (Piece(box.start, size, (0,) * len(size)),),
        )
        return found

    # -- as a checkpoint ---------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self.logical.step

    @property
    def iteration(self) -> int:
        return self.logical.own.iteration

    @property
    def state(self) -> bytes:
        return self.logical.own.state

    @property
    def record(self) -> CommitRecord:
        return self.logical.own.record

    @property
    def path(self) -> str:
        """The directory of the pools."""
        return os.path.dirname(self.logical.of_ranks[0].path)

    @property
    def uuid(self) -> bytes:
        return self.logical.of_ranks[0].uuid

    def owns_slot(self) -> bool:
        return all(stored.owns_slot() for stored in self.logical.of_ranks)

    def read_into(self, name: str, address: int) -> None:
        """``read_many`` for one tensor."""
        self.read_many([(name, address)])

    def read_many(self, places: Sequence[tuple[str, int]]) -> None:
        """Read many tensors; see ``Source``. If a pool has a damaged block, what is needed of it is read from the pool
        of another rank that holds the same. Raises ``DamagedError`` if there is none, and ``PoolIOError``."""
        while True:
            wholes, boxes = self._reads(places)
            damaged = self._read(wholes, boxes)
            if damaged is None:
                return
            position, error = damaged
            self._struck.add(position)
            if not self.falls_back or not self._can_do_without(places):
                raise error
            log.warning(
                "lightck: the checkpoint of step %d in the pool %r is damaged: %s. The same tensors are read from the "
                "pool of another rank",
                self.step,
                self.logical.of_ranks[position].path,
                error,
            )

    def _reads(
        self, places: Sequence[tuple[str, int]]
    ) -> tuple[dict[int, list[tuple[str, int]]], dict[int, list[BoxRead]]]:
        """Return, for each pool, the tensors that are read as they were saved, and the boxes."""
        wholes: dict[int, list[tuple[str, int]]] = {}
        boxes: dict[int, list[BoxRead]] = {}
        for name, address in places:
            entry = self.entries[name]
            if not entry.nbytes:
                continue
            holders = self._holders(name)
            same = next((one for one in holders if _is_same_part(holders[one].entry, entry)), None)
            if same is not None:
                wholes.setdefault(same, []).append((holders[same].name, address))
                continue
            if _has_padding(entry):
                ctypes.memset(address, 0, entry.nbytes)
            into = Destination(address, entry.shape, entry.stride)
            wanted = _whole_pieces(entry.shape) if entry.pieces is None else entry.pieces
            positions, pieces = list(holders), tuple(one.pieces for one in holders.values())
            shape = entry.shape if entry.logical_shape is None else entry.logical_shape
            for one in _copies(shape, wanted, pieces):
                at = positions[one.holder]
                boxes.setdefault(at, []).append(BoxRead(holders[at].name, one.source, one.destination, into))
        return wholes, boxes

    def _holders(self, name: str) -> dict[int, Holder]:
        """Return position in ``of_ranks`` -> holder, of the pools that are not struck. Of tensors that are equal in all
        pools, the first one is another one for each rank. Of whole buffers, it is the rank whose small state counts. Of
        buffers of which each rank takes a part, it is the same one on all ranks, so that the parts fit together."""
        found = {one.position: one for one in self.logical.holders[name]}
        left = [number for number in found if number not in self._struck]
        entry = self.entries[name]
        wanted = 0 if entry.pieces is not None else self.logical.state_of
        if entry.role in REPLICATED:
            wanted = self.rank % max(1, len(found))
        first = next((place for place, number in enumerate(left) if number >= wanted), 0)
        return {number: found[number] for number in (*left[first:], *left[:first])}

    def _read(
        self, wholes: Mapping[int, list[tuple[str, int]]], boxes: Mapping[int, list[BoxRead]]
    ) -> tuple[int, DamagedError] | None:
        """Read. Returns the first pool with a damaged block, and the error."""
        for position in sorted({*wholes, *boxes}):
            stored = self.logical.of_ranks[position]
            try:
                stored.read_many(wholes.get(position, []))
                read_boxes(stored, boxes.get(position, []))
            except DamagedError as err:
                return position, err
        return None

    def _can_do_without(self, places: Sequence[tuple[str, int]]) -> bool:
        """Whether the pools that are not struck hold all of these tensors."""
        for name, _ in places:
            entry = self.entries[name]
            pieces = tuple(one.pieces for one in self._holders(name).values())
            shape = entry.shape if entry.logical_shape is None else entry.logical_shape
            if entry.nbytes and (not pieces or _uncovered(shape, pieces) is not None):
                return False
        return True


def has_shares_in_table(reader: PoolReader) -> bool:
    """Whether the layout table of a pool has shares."""
    return any(entry.share is not None for entry in reader.entries)


def has_shares(stored: StoredCheckpoint) -> bool:
    """Whether the rank wrote its share of a tensor."""
    return any(entry.share is not None for entry in stored.entries.values())


def _whole_entry(entry: Entry) -> Entry:
    """Return the entry of the logical tensor. If the rank holds all of it, it has the strides of that tensor."""
    held = held_entry(entry)
    if held.logical_shape is None:
        return held
    shape = held.logical_shape
    nbytes = 0 if entry.alias is not None else math.prod(shape) * ITEM_NBYTES[entry.dtype]
    return entry._replace(
        shape=shape, stride=contiguous_stride(shape), nbytes=nbytes, logical_shape=None, pieces=None, share=None
    )


def _refuse_shape_per_rank(name: str, role: str) -> None:
    """Raise ``UnsupportedError`` for optimizer state whose shape follows from the part that a rank holds."""
    if role == "optimizer":
        raise UnsupportedError(
            f"The optimizer state {name!r} cannot be loaded into ranks that hold other parts of its parameter: it has "
            "not the shape of the parameter, so it belongs to one part of it. Start as many ranks as saved it, sharded "
            "in the same way; or load the model alone: lightck.recover(directory, model)."
        )


@lru_cache(1 << 12)
def _whole_pieces(shape: Ints) -> tuple[Piece, ...]:
    """Return the pieces of who holds the whole tensor."""
    start, size = whole_box(shape)
    return () if 0 in shape else (Piece(start, size, start),)


@lru_cache(1 << 12)
def _uncovered(shape: Ints, holders: tuple[tuple[Piece, ...], ...]) -> Box | None:
    try:
        return coverage(shape, holders).uncovered
    except ValueError as err:
        raise DamagedError(f"pieces: {err}") from err


@lru_cache(1 << 12)
def _copies(shape: Ints, wanted: tuple[Piece, ...], holders: tuple[tuple[Piece, ...], ...]) -> tuple[Copy, ...]:
    return tuple(local_copies(shape, wanted, holders))


def _is_same_part(one: Entry, other: Entry) -> bool:
    """Whether the bytes of both tensors are the same part in the same order. (Two tensors that are nothing but padding
    are not the same.)"""
    return one.pieces != () and (one.shape, one.stride, one.pieces) == (other.shape, other.stride, other.pieces)


def _has_padding(entry: Entry) -> bool:
    """Whether elements of the tensor belong to no piece."""
    held = math.prod(entry.shape) if entry.pieces is None else sum(math.prod(one.size) for one in entry.pieces)
    return held < math.prod(entry.shape)


def _differ(holders: Sequence[Holder]) -> bool:
    """Whether two of these hold the same elements with different bytes."""
    groups: dict[tuple[object, ...], list[Holder]] = {}
    for one in holders:
        groups.setdefault((one.entry.shape, one.entry.stride, one.entry.pieces), []).append(one)
    for same in groups.values():
        differ = len({(one.stored.block_nbytes, *one.stored.raw_checksums(one.name)) for one in same}) > 1
        if differ and (not _has_padding(same[0].entry) or _have_different_bytes(same)):
            return True
    return len(groups) > 1 and _have_different_bytes([same[0] for same in groups.values()])


def _have_different_bytes(holders: Sequence[Holder]) -> bool:
    """Whether two of these, which hold different parts, differ in elements that they have in common."""
    shape = _whole_entry(holders[0].entry).shape
    pieces = [one.pieces for one in holders]
    if coverage(shape, pieces).repeated is None:
        return False
    loaded = [(load_tensor(one.stored, one.name), one.pieces) for one in holders]
    return any(
        not _same_in_common(one, piece, other, other_piece)
        for (one, pieces_of_one), (other, pieces_of_other) in combinations(loaded, 2)
        for piece in pieces_of_one
        for other_piece in pieces_of_other
    )


def _same_in_common(one: torch.Tensor, piece: Piece, other: torch.Tensor, other_piece: Piece) -> bool:
    common = intersection(Box(piece.start, piece.size), Box(other_piece.start, other_piece.size))
    if common is None:
        return True
    return same_bits(_view(one, piece, common), _view(other, other_piece, common))


def _view(tensor: torch.Tensor, piece: Piece, box: Box) -> torch.Tensor:
    """Return the elements of a local tensor that are a box of the logical tensor. The box lies in ``piece``."""
    for dim, (at, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, at - piece.start[dim] + piece.local_start[dim], size)
    return tensor.contiguous()
