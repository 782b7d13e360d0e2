"""A checkpoint of several ranks as the checkpoint that another rank would have saved.

A rank of any other world, or a single process, needs other parts of the tensors than the ranks that saved them.
``Relocated`` is a ``Source``: it has the entries that a rank with given parts would have saved, and reads their bytes
from the pools of the old world, verified block by block.

Of several pools that hold the same bytes, one is read: pools on this host come first, and each rank begins with another
one of them. A buffer that is whole is read from the rank whose small state counts. If a block is damaged in a pool, it
is taken from another one. Padding (elements of a local tensor that belong to no piece) is zero, unless a rank of the
old world held the same part: then the padding is taken with it. Optimizer state with the shape of its parameter is cut
as its parameter is. Other optimizer state must not depend on which part of its parameter a rank holds (a step count,
for example, does not).
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache

from lightck.errors import UnsupportedError
from lightck.pool.format.assembly import Copy, local_copies
from lightck.pool.format.boxes import Box, Ints
from lightck.pool.format.layout import ITEM_NBYTES, Entry, contiguous_stride, is_dense
from lightck.pool.format.pieces import Piece, is_flat
from lightck.pool.format.structures import CommitRecord, DamagedError
from lightck.pool.partial_copy import PartialCopy
from lightck.pool.reader import StoredCheckpoint
from lightck.restore.averages import mean_of
from lightck.restore.contents import empty_for, load_tensor
from lightck.restore.logical import (
    ROLES_THAT_MUST_AGREE,
    Holder,
    LogicalCheckpoint,
    has_padding,
    refuse_shard_dependent_state,
    uncovered_box,
    whole_pieces,
)
from lightck.restore.read_boxes import BoxRead, Destination, blocks_of, read_boxes
from lightck.restore.stages import HeldNames, merged_state, with_ties
from lightck.state.inventory import param_of
from lightck.state.parts import Part
from lightck.state.shares import Shares

log = logging.getLogger("lightck")


@dataclass(slots=True)
class Relocated:
    """The checkpoint that a rank with these parts would have saved. It is read as a ``StoredCheckpoint`` is."""

    logical: LogicalCheckpoint
    parts: Mapping[str, Part]
    """Name of a parameter or buffer -> the part of it that the rank holds. All others are whole."""
    rank: int = 0
    """The rank that reads. It selects the holder of the same bytes that is tried first, so that ranks do not all read
    from one pool."""
    entries: dict[str, Entry] = field(init=False)
    damaged_pools: set[int] = field(default_factory=set)
    """Indexes, in ``of_ranks``, of pools in which a damaged block was found. Nothing is read from them any more."""
    falls_back: bool = True
    """Whether a tensor that is damaged in one pool is read from another."""
    held: HeldNames | None = None
    """What this rank holds, if it is a stage of a pipeline; None: all tensors."""
    ties: Mapping[str, str] = field(default_factory=dict)
    """Name of a tied tensor of the live model -> the name under which its bytes are saved. For a checkpoint of stages,
    which may know only one of the two."""
    own_place: int | None = None
    """The place in the layout whose values to take for averaged tensors; None: take the mean of all places."""
    _state: bytes | None = None
    """The small state, if it is not that of one rank."""
    _only: frozenset[int] | None = None
    """Indexes, in ``of_ranks``, of the pools from which tensors are read; None: all."""

    def __post_init__(self) -> None:
        """Raises ``UnsupportedError`` for optimizer state that cannot be cut."""
        entries = {name: self._entry(name, entry) for name, entry in self.logical.entries.items()}
        if self.logical.is_of_stages:
            entries = with_ties(entries, self.ties)
        if self.held is not None:
            entries = with_ties(entries, self.held.ties)
            kept = {name for name, entry in entries.items() if self.held.holds(entry)}
            kept |= {alias for name in kept if (alias := entries[name].alias) is not None}
            entries = {name: entry for name, entry in entries.items() if name in kept}
        self.entries = entries

    def _entry(self, name: str, entry: Entry) -> Entry:
        param = name if entry.role != "optimizer" else "model/" + param_of(entry.alias or name)
        part = self.parts.get(param)
        saved = next((one.entry for one in self.logical.holders.get(name, ()) if one.entry.pieces is not None), None)
        if entry.role == "optimizer" and entry.shape and entry.shape != self._shape_of(param):
            if part is not None or saved is not None or self._was_part(param):
                refuse_shard_dependent_state(name, entry.role)
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
        strides_fit = len(part.shape) == len(entry.stride) and is_dense(part.shape, entry.stride)
        stride = entry.stride if strides_fit else contiguous_stride(part.shape)
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
        clone = copy(self)
        clone.entries = shares.applied_to_copies(self.entries)
        return clone

    def alone(self, name: str) -> Relocated:
        """Return this checkpoint with one tensor only, and with no pool known as damaged. A buffer may differ between
        ranks, so it is read from one rank only: a box from another rank would not fit the boxes that were read
        before."""
        clone = copy(self)
        clone.entries, clone.damaged_pools = {name: self.logical.entries[name]}, set()
        clone.falls_back = clone.entries[name].role in ROLES_THAT_MUST_AGREE
        return clone

    def only_box(self, name: str, box: Box) -> Relocated:
        """As ``alone``, with the tensor reduced to one box of it, as a contiguous tensor."""
        clone, size = self.alone(name), box.size
        entry = clone.entries[name]
        clone.entries[name] = entry._replace(
            shape=size,
            stride=contiguous_stride(size),
            nbytes=math.prod(size) * ITEM_NBYTES[entry.dtype],
            logical_shape=entry.shape,
            pieces=() if 0 in size else (Piece(box.start, size, (0,) * len(size)),),
        )
        return clone

    # -- as a checkpoint ---------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self.logical.step

    @property
    def iteration(self) -> int:
        return self.logical.state_checkpoint.iteration

    @property
    def state(self) -> bytes:
        if self._state is None and (self.logical.is_of_stages or self.held is not None):
            self._state = merged_state(self.logical.of_ranks, self.logical.state_checkpoint, self.held)
        return self.logical.state_checkpoint.state if self._state is None else self._state

    @property
    def record(self) -> CommitRecord:
        return self.logical.state_checkpoint.record

    @property
    def path(self) -> str:
        """The directory of the pools."""
        return os.path.dirname(self.logical.of_ranks[0].path)

    @property
    def uuid(self) -> bytes:
        return self.logical.of_ranks[0].uuid

    @property
    def not_exact(self) -> str:
        """Why a training that continues from this checkpoint may not be bit-identical to the ranks that saved it; empty
        if it is."""
        return self.logical.not_exact

    def owns_slot(self) -> bool:
        return all(stored.owns_slot() for stored in self.logical.of_ranks)

    def read_into(self, name: str, address: int) -> None:
        """``read_many`` for one tensor."""
        self.read_many([(name, address)])

    def read_many(self, places: Sequence[tuple[str, int]]) -> None:
        """Read many tensors; see ``Source``. If a pool has a damaged block, what is needed of it is read from the pool
        of another rank that holds the same. Raises ``DamagedError`` if there is none, and ``PoolIOError``."""
        if self.logical.averaged and self._only is None:
            averaged = [(name, address) for name, address in places if name in self.logical.averaged]
            places = [(name, address) for name, address in places if name not in self.logical.averaged]
            for name, address in averaged:
                self._read_averaged(name, address)
        while True:
            wholes, boxes = self._reads(places)
            damaged = self._read(wholes, boxes)
            if damaged is None:
                return
            self._avoid(*damaged, [name for name, _ in places])

    def want_remote_blocks(self) -> None:
        """Record, in the partial copies of pools on other hosts, the missing blocks that all tensors need. Raises
        ``DamagedError`` as ``read_many`` does."""
        names = [name for name, entry in self.entries.items() if entry.nbytes]
        if self.logical.averaged and self._only is None:
            averaged = [name for name in names if name in self.logical.averaged]
            names = [name for name in names if name not in self.logical.averaged]
            for name in averaged:
                for positions in self._places_that_count(name):
                    self._from_pools(positions, name).want_remote_blocks()
        while True:
            wholes, boxes = self._reads([(name, 0) for name in names])
            damaged = None
            for position in sorted({*wholes, *boxes}):
                stored = self.logical.of_ranks[position]
                partial = stored.reader.partial
                if not isinstance(partial, PartialCopy):
                    continue
                assert isinstance(stored, StoredCheckpoint), "pools with gradient records are not copied in part"
                blocks = [(name, 0, stored.entries[name].nbytes) for name, _ in wholes.get(position, ())]
                blocks += blocks_of(stored, boxes.get(position, []))
                error = partial.damage_in(stored, blocks)
                if error is not None:
                    damaged = position, error
                    break
                partial.want(stored, blocks)
            if damaged is None:
                return
            self._avoid(*damaged, names)

    def _avoid(self, position: int, error: DamagedError, names: Sequence[str]) -> None:
        """From now on read no tensor from this pool, which has a damaged block. Raises ``error`` if the other pools do
        not hold all of these tensors, or if this pool is the only right source of a tensor (``_only_sources``)."""
        if not self.falls_back or position in self._only_sources():
            raise error
        self.damaged_pools.add(position)
        if not self._can_do_without(names):
            raise error
        log.warning(
            "lightck: the checkpoint of step %d in the pool %r is damaged: %s. The same tensors are read from the "
            "pool of another rank",
            self.step,
            self.logical.of_ranks[position].path,
            error,
        )

    def _places_that_count(self, name: str) -> list[list[int]]:
        """Return, for each place whose values of an averaged tensor are read, the pools that hold these values."""
        of_places = self.logical.averaged[name]
        return of_places if self.own_place is None else of_places[self.own_place : self.own_place + 1]

    def _read_averaged(self, name: str, address: int) -> None:
        """Read the mean of a tensor, or the values of ``own_place``."""
        of_places, entry = self._places_that_count(name), self.entries[name]
        if not entry.nbytes:
            return
        tensors = (load_tensor(self._from_pools(positions, name), name) for positions in of_places)
        value = next(tensors) if len(of_places) == 1 else empty_for(entry, "cpu").copy_(mean_of(tensors))
        ctypes.memmove(address, value.data_ptr(), entry.nbytes)

    def _from_pools(self, positions: Iterable[int], name: str) -> Relocated:
        """Return this checkpoint with one tensor only, which is read from these pools."""
        clone = copy(self)
        clone.entries, clone.damaged_pools = {name: self.entries[name]}, set()
        clone._only = frozenset(positions)
        return clone

    def _reads(
        self, places: Sequence[tuple[str, int]]
    ) -> tuple[dict[int, list[tuple[str, int]]], dict[int, list[BoxRead]]]:
        """Return, for each pool, the tensors that are read as they were saved, and the boxes. With the address 0 for
        each tensor the result only lists what would be read (``want_remote_blocks``)."""
        wholes: dict[int, list[tuple[str, int]]] = {}
        boxes: dict[int, list[BoxRead]] = {}
        for name, address in places:
            entry = self.entries[name]
            if not entry.nbytes:
                continue
            holders = self._holders(name)
            same = next((at for at, holder in holders.items() if _is_same_part(holder.entry, entry)), None)
            has_local = not all(holder.is_remote for holder in holders.values())
            if same is not None and holders[same].is_remote and has_local and not has_padding(entry):
                same = None  # pools on this host have some of it, so not all of it must be fetched
            if same is not None:
                wholes.setdefault(same, []).append((holders[same].name, address))
                continue
            if address and has_padding(entry):
                ctypes.memset(address, 0, entry.nbytes)
            readable = [(at, *tensor) for at, holder in holders.items() for tensor in holder.readable_tensors]
            pieces = tuple(held for _, _, held in readable)
            shape = entry.shape if entry.logical_shape is None else entry.logical_shape
            for into, wanted in _destinations(entry, address):
                for part in _copies(shape, wanted, pieces):
                    at, flat_piece, _ = readable[part.holder]
                    name_there = holders[at].name
                    read = BoxRead(name_there, part.source, part.destination, into, flat_piece)
                    boxes.setdefault(at, []).append(read)
        return wholes, boxes

    def _holders(self, name: str) -> dict[int, Holder]:
        """Return index in ``of_ranks`` -> holder, of the pools that are not damaged, in the order in which they are
        tried.

        A tensor that is equal in all pools is read from the pools on this host first, and each rank begins with another
        one of them. A whole buffer is read from the rank whose small state counts. If each rank takes a part of a
        buffer, all ranks begin with the same pool, so that the parts fit together."""
        found = {
            one.position: one for one in self.logical.holders[name] if self._only is None or one.position in self._only
        }
        left = [position for position in found if position not in self.damaged_pools]
        entry = self.entries[name]
        if entry.role not in ROLES_THAT_MUST_AGREE:
            order = _rotated(left, 0 if entry.pieces is not None else self.logical.state_position)
        else:
            local = [position for position in left if not found[position].is_remote]
            remote = [position for position in left if found[position].is_remote]
            first = sorted(found)[self.rank % len(found)] if found else 0
            first_remote = self.logical.remote_first.get(name, 0)
            order = _rotated(local, first) + _rotated(remote, first_remote)
        return {position: found[position] for position in order}

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

    def _only_sources(self) -> set[int]:
        """Return the undamaged pools that are the only right source of some tensor: of a buffer, or of a tensor in
        ``state=``, that differs between the ranks."""
        roles = {entry.role for entry in self.entries.values()} - set(ROLES_THAT_MUST_AGREE)
        differing = [name for name in self.logical.differing(roles) if name in self.entries] if roles else []
        return {next(iter(holders)) for name in differing if (holders := self._holders(name))}

    def _can_do_without(self, names: Sequence[str]) -> bool:
        """Whether the pools that are not damaged hold all of these tensors."""
        for name in names:
            entry = self.entries[name]
            pieces = tuple(one.pieces for one in self._holders(name).values())
            shape = entry.shape if entry.logical_shape is None else entry.logical_shape
            if entry.nbytes and (not pieces or uncovered_box(shape, pieces) is not None):
                return False
        return True


def _rotated(numbers: list[int], first: int) -> list[int]:
    """Return these numbers, which are sorted, from ``first`` or the next larger one on, and then the smaller ones."""
    at = next((place for place, number in enumerate(numbers) if number >= first), 0)
    return numbers[at:] + numbers[:at]


def _destinations(entry: Entry, address: int) -> Iterator[tuple[Destination, tuple[Piece, ...]]]:
    """Yield (destination, pieces) for the local tensor at ``address``: the whole local tensor with all its pieces; or,
    if the local tensor is flat, each piece as a destination of its own."""
    wanted = whole_pieces(entry.shape) if entry.pieces is None else entry.pieces
    if not is_flat(wanted):
        yield Destination(address, entry.shape, entry.stride), wanted
        return
    for piece in wanted:
        begin = address + piece.local_start[0] * ITEM_NBYTES[entry.dtype]
        yield Destination(begin, piece.size, contiguous_stride(piece.size)), (piece.alone,)


@lru_cache(1 << 12)
def _copies(shape: Ints, wanted: tuple[Piece, ...], holders: tuple[tuple[Piece, ...], ...]) -> tuple[Copy, ...]:
    return tuple(local_copies(shape, wanted, holders))


def _is_same_part(one: Entry, other: Entry) -> bool:
    """Whether the bytes of both tensors are the same part in the same order. (Two tensors that are nothing but padding
    are not the same.)"""
    return one.pieces != () and (one.shape, one.stride, one.pieces) == (other.shape, other.stride, other.pieces)
