"""A checkpoint of several ranks as logical tensors.

Each rank of the *old world* has saved its parts of the tensors. ``LogicalCheckpoint`` says which logical tensors there
are, who holds what of them, and which tensors differ between ranks that should hold the same. ``relocated.py`` reads
their bytes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations

import torch

from lightck.errors import UnsupportedError
from lightck.pool.format.assembly import coverage
from lightck.pool.format.boxes import Box, Ints, intersection, whole_box
from lightck.pool.format.layout import ITEM_NBYTES, SLOT_PLACE, Entry, check_ties, contiguous_stride, held_entry
from lightck.pool.format.pieces import Piece, is_flat
from lightck.pool.format.structures import DamagedError
from lightck.pool.reader import PoolReader
from lightck.restore.averages import model_name_of, places_of
from lightck.restore.contents import load_tensor
from lightck.restore.read_boxes import FlatPiece
from lightck.restore.rows_of_others import differing_rows
from lightck.restore.saved_layout import SavedLayout
from lightck.restore.stages import refuse_missing_stages
from lightck.restore.tensor_writes import same_bits
from lightck.restore.usable import RankCheckpoint, parse

log = logging.getLogger("lightck")
ROLES_THAT_MUST_AGREE = ("param", "optimizer")
"""Roles of the tensors that must be equal on all ranks that hold the same part of them. Buffers may differ: each rank
has BatchNorm statistics of its own."""


@dataclass(frozen=True, slots=True)
class Holder:
    """One pool that holds a tensor, or a part of it."""

    position: int
    """Index of the pool in ``of_ranks``."""
    stored: RankCheckpoint
    entry: Entry
    name: str
    """Name under which the bytes lie. (The tensor may be tied on some ranks only.)"""

    @property
    def is_remote(self) -> bool:
        """Whether the pool lies on another host, so that blocks must be fetched into a partial copy of it."""
        return self.stored.reader.partial is not None

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return whole_pieces(self.entry.shape) if self.entry.pieces is None else self.entry.pieces

    @property
    def readable_tensors(self) -> Iterator[tuple[FlatPiece | None, tuple[Piece, ...]]]:
        """Yield the tensors from which boxes are read: the local tensor as (None, its pieces); or, if the local tensor
        is flat, each of its pieces as a tensor of its own: (flat piece, this piece)."""
        if not is_flat(self.pieces):
            yield None, self.pieces
            return
        for piece in self.pieces:
            yield FlatPiece(piece.local_start[0], piece.size), (piece.alone,)


@dataclass(slots=True)
class LogicalCheckpoint:
    """One checkpoint of several ranks. ``of_ranks``: the checkpoint in the pool of each of them, in their order."""

    of_ranks: Sequence[RankCheckpoint]
    state_position: int = 0
    """Index in ``of_ranks`` of the rank whose small state and whose objects in ``state=`` count. (They belong to each
    rank, and are not the same on all.)"""
    entries: dict[str, Entry] = field(init=False)
    """Name -> entry of the whole logical tensor."""
    holders: dict[str, list[Holder]] = field(init=False)
    """Name -> who holds it. A tied name has no item here: its bytes lie under another name."""
    remote_first: dict[str, int] = field(init=False)
    """Name of a tensor that must agree -> index of the pool on another host that is read first, if pools on other hosts
    must be read. The choices are such that these pools send about the same number of bytes."""
    is_of_stages: bool = field(init=False)
    """Whether the ranks are stages of a pipeline, and hold different tensors."""
    averaged: dict[str, list[list[int]]] = field(init=False, default_factory=dict)
    """Name of a tensor that differs between the places of a layout, and whose mean is taken -> for each place, the
    indexes of the pools that hold it there (``averages.py``)."""

    _not_exact: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Raises ``DamagedError`` if the ranks do not hold the whole of each tensor, and ``UnsupportedError`` for
        optimizer state whose shape differs between ranks."""
        self.entries, self.holders = {}, {}
        for name in dict.fromkeys(name for stored in self.of_ranks for name in stored.entries):
            self._add(name)
        check_ties(self.entries)
        self.remote_first = self._remote_first()
        layouts = [_layout_of(stored) for stored in self.of_ranks]
        self.is_of_stages = any(one is not None and one.stages > 1 for one in layouts)
        if self.is_of_stages:
            refuse_missing_stages(layouts)
        for name in self.holders if any(one is not None and one.averaged for one in layouts) else ():
            by_position = {one.position: one for one in self.holders[name]}
            places = places_of(name, self.entries, layouts, by_position)
            if places is not None and _differ([by_position[positions[0]] for positions in places]):
                self.averaged[name] = places

    @property
    def not_exact(self) -> str:
        """Why a training that continues from this checkpoint may not be bit-identical to the ranks that saved it; empty
        if it is. The small state of each rank is read once."""
        if self._not_exact is None:
            found = [(rank, parse(stored).not_exact) for rank, stored in enumerate(self.of_ranks)]
            texts = [f"in the part of rank {rank}, {reason}" for rank, reason in found if reason]
            more = len(texts) - 2
            self._not_exact = "; ".join(
                texts[:2] + ([f"so it is in the parts of {more} more ranks"] if more > 0 else [])
            )
        return self._not_exact

    @property
    def step(self) -> int:
        return self.of_ranks[0].step

    @property
    def state_checkpoint(self) -> RankCheckpoint:
        """The checkpoint of the rank whose small state counts (``state_position``)."""
        return self.of_ranks[self.state_position]

    def _add(self, name: str) -> None:
        positions = self._positions_that_count(name)
        if not positions:
            return
        parts = [self.of_ranks[at].entries[name] for at in positions]
        if any(part.share is not None and is_flat(part.held_pieces or ()) for part in parts):
            raise DamagedError(
                f"its tensor {name!r} is recorded as flattened and also as divided among the ranks of a host, and "
                "lightck never does both"
            )
        entry = _whole_entry(parts[0])
        if any(_whole_entry(part).shape != entry.shape for part in parts):
            refuse_shard_dependent_state(name, entry.role)
        if any((part.dtype, _whole_entry(part).shape) != (entry.dtype, entry.shape) for part in parts):
            raise DamagedError(f"its tensor {name!r} has another shape or dtype on another rank")
        if len({part.held_pieces is None for part in parts}) > 1:
            raise DamagedError(f"some ranks saved its tensor {name!r} as a part, and others as a whole")
        self.entries[name] = entry
        if entry.alias is not None:
            return
        self.holders[name] = [
            Holder(at, self.of_ranks[at], part, part.alias or name) for at, part in zip(positions, parts, strict=True)
        ]
        held = tuple(one.pieces for one in self.holders[name])
        is_whole_everywhere = all(part.pieces is None for part in parts)
        uncovered = None if is_whole_everywhere else uncovered_box(entry.shape, held)
        if uncovered is not None:
            raise DamagedError(
                f"its tensor {name!r} cannot be put together, because no pool holds the part of size {uncovered.size} "
                f"at {uncovered.start}"
            )

    def _remote_first(self) -> dict[str, int]:
        """Return ``remote_first``. It is the same on all ranks of a host, so nothing is fetched twice for them."""
        nbytes: dict[int, int] = {}
        first: dict[str, int] = {}
        for name, holders in self.holders.items():
            remote = [one for one in holders if one.is_remote and self.entries[name].role in ROLES_THAT_MUST_AGREE]
            if remote:
                chosen = min(remote, key=lambda one: (nbytes.get(one.position, 0), one.position))
                nbytes[chosen.position] = nbytes.get(chosen.position, 0) + chosen.entry.nbytes
                first[name] = chosen.position
        return first

    def _positions_that_count(self, name: str) -> list[int]:
        """Return the indexes in ``of_ranks`` of the checkpoints whose tensors of this name make up the logical tensor.

        - A parameter, a buffer, optimizer state: all checkpoints that have the name.
        - A tensor of the small state: only the checkpoint of the rank whose small state counts, if it has the name. If
          it lacks the name: the first checkpoint that has it for extra state of a module, none for other state."""
        found = [at for at, stored in enumerate(self.of_ranks) if name in stored.entries]
        of_state_rank = self.state_checkpoint.entries.get(name)
        if self.of_ranks[found[0]].entries[name].role == "state":
            of_module = found[:1] if name.startswith("extra_state/") else []
            return of_module if of_state_rank is None else [self.state_position]
        return found

    def differing(self, roles: Iterable[str]) -> list[str]:
        """Return the names of the tensors with these roles whose common elements have different bytes on two ranks.
        Raises ``DamagedError`` if bytes must be compared and cannot be read. (Usually checksums are enough.)"""
        wanted = set(roles)
        found = {
            name
            for name, holders in self.holders.items()
            if self.entries[name].role in wanted and any(map(_differ, self._groups_that_must_agree(name, holders)))
        }
        if wanted & set(ROLES_THAT_MUST_AGREE):
            found |= self._differing_rows()
        return [name for name in self.holders if name in found]

    def _groups_that_must_agree(self, name: str, holders: list[Holder]) -> list[list[Holder]]:
        """Return the groups of holders that must have the same bytes of a tensor: one group of all holders; if the
        tensor is averaged, one group for each place."""
        if name not in self.averaged:
            return [holders]
        return [[one for one in holders if one.position in place] for place in self.averaged[name]]

    @property
    def averaged_names(self) -> list[str]:
        """Names, in the model, of the parameters and buffers that are averaged, or whose optimizer state is."""
        return list(dict.fromkeys(model_name_of(name, self.entries[name].role) for name in self.averaged))

    def _differing_rows(self) -> set[str]:
        """Return the names of tensors in whose rows a rank held other bytes than the ranks that wrote these rows,
        according to the checksums in its checkpoint."""
        of_ranks = {one.reader.group.rank: one for one in self.of_ranks if one.reader.group is not None}
        found: set[str] = set()
        for rank, stored in of_ranks.items():
            records = parse(stored).rows_of_others
            others = {at: other for at, other in of_ranks.items() if at != rank}
            found.update(differing_rows(stored, records, others) if records and has_shares(stored) else ())
        return found


def _layout_of(stored: RankCheckpoint) -> SavedLayout | None:
    """Return the layout with which a checkpoint was saved. Raises ``DamagedError``."""
    group = stored.reader.group
    return parse(stored).layout if group is not None and group.mesh_shape else None


def has_shares_in_table(reader: PoolReader) -> bool:
    """Whether the layout table of a pool has shares."""
    return any(entry.share is not None for entry in reader.entries)


def has_shares(stored: RankCheckpoint) -> bool:
    """Whether the rank wrote its share of a tensor."""
    return any(entry.share is not None for entry in stored.entries.values())


def _whole_entry(entry: Entry) -> Entry:
    """Return the entry of the logical tensor of which a rank has ``entry``. If the rank holds the whole logical tensor,
    the result keeps the strides of the rank's tensor; else it is contiguous."""
    entry = entry._replace(place=SLOT_PLACE)  # nobody has the logical tensor in a home
    held = held_entry(entry)
    if held.logical_shape is None:
        return held
    shape = held.logical_shape
    nbytes = 0 if entry.alias is not None else math.prod(shape) * ITEM_NBYTES[entry.dtype]
    return entry._replace(
        shape=shape, stride=contiguous_stride(shape), nbytes=nbytes, logical_shape=None, pieces=None, share=None
    )


def refuse_shard_dependent_state(name: str, role: str) -> None:
    """Raise ``UnsupportedError`` if a tensor is optimizer state; do nothing for tensors of other roles. To be called if
    the shape of the tensor differs between ranks, or is not that of its parameter, of which a rank holds a part."""
    if role == "optimizer":
        raise UnsupportedError(
            f"The optimizer state {name!r} cannot be loaded into ranks that hold other parts of its parameter: it has "
            "not the shape of the parameter, so it belongs to one part of it. Start as many ranks as saved it, sharded "
            "in the same way; or load the model alone: lightck.recover(directory, model)."
        )


@lru_cache(1 << 12)
def whole_pieces(shape: Ints) -> tuple[Piece, ...]:
    """Return the pieces of a holder that has the whole tensor."""
    start, size = whole_box(shape)
    return () if 0 in shape else (Piece(start, size, start),)


@lru_cache(1 << 12)
def uncovered_box(shape: Ints, holders: tuple[tuple[Piece, ...], ...]) -> Box | None:
    try:
        return coverage(shape, holders).uncovered
    except ValueError as err:
        raise DamagedError(f"pieces: {err}") from err


def has_padding(entry: Entry) -> bool:
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
        if differ and (not has_padding(same[0].entry) or _have_different_bytes(same)):
            return True
    return len(groups) > 1 and _have_different_bytes([same[0] for same in groups.values()])


def _have_different_bytes(holders: Sequence[Holder]) -> bool:
    """Whether two of these differ in elements that both hold, by a comparison of the bytes."""
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
    if piece.is_flat:
        tensor = tensor.narrow(0, piece.local_start[0], math.prod(piece.size)).reshape(piece.size)
        piece = piece.alone
    for dim, (at, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, at - piece.start[dim] + piece.local_start[dim], size)
    return tensor.contiguous()
