"""The cross-check: whether the ranks of a host that divide a tensor still hold the same.

A rank writes its share of a tensor, and takes the other rows from the other ranks when it is restored. That is exact
only as long as the rank holds the same bytes in these rows as the ranks that write them. So at each checkpoint it reads
some blocks of its own tensors that other ranks write, and later compares them with the checksums in the pools of those
ranks, for the checkpoint of the same step. No message is sent. Each checkpoint also records the checksums of the blocks
that were read for it, so that a restore can compare them (``restore/rows_of_others.py``).

In the first checkpoints, and after a difference was found, all blocks are read (on a device, ``ON_DEVICE_FIRST``).
Later each checkpoint reads some blocks for its record, in turn. Every ``EVERY``-th checkpoint reads more blocks, which
are compared while training runs. (Not every one, because it takes longer to find the checksums of the other rank than
to read a block.) If a block differs, this rank writes the tensor whole from then on, and a warning names the tensor.
This rank also does so if another rank writes the tensor whole, because that rank then has no share that could be
compared block by block.

Invariant: of each tensor, a rank either writes all rows, or its other rows were equal to those of the ranks that write
them when they were last compared. Each block is read for a comparison once in each round of the round-robin. (If the
other pool no longer has the checkpoint, this comparison is left out.)
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch

from lightck.errors import listed
from lightck.pipeline.pipeline import Pipeline
from lightck.pool.listener import CommitListener
from lightck.pool.reader import StoredCheckpoint
from lightck.pool.writer import PoolWriter
from lightck.ranks.neighbours import Neighbour
from lightck.ranks.rule import CheckpointId
from lightck.restore.contents import RowsOfOther
from lightck.session.capture import Capture
from lightck.session.group import Membership
from lightck.state.blocks import (
    BUDGET_NBYTES,
    FULLY_COMPARED_FIRST,
    NO_BLOCKS,
    Blocks,
    Checksums,
    Positions,
    RoundRobin,
    checksums,
)
from lightck.state.device_transfers import DeviceTransfer, StreamPoint, bytes_of, transfer_of
from lightck.state.inventory import Live, address_of, in_plain_memory, is_plain
from lightck.state.signatures import TensorList

log = logging.getLogger("lightck")
EVERY = 4
"""The blocks of every ``EVERY``-th checkpoint are compared while training runs."""
BUDGET = EVERY * BUDGET_NBYTES
"""How many bytes such a checkpoint reads."""
ON_DEVICE_FIRST = 64
"""How many blocks on devices one checkpoint reads at most. The first checkpoints read this number of blocks, because
all of them would take the device long. (A few blocks suffice to find a rank whose gradients are not all-reduced: it
differs in all of them.)"""


class _Region(NamedTuple):
    """The rows of a tensor that another rank of the host writes."""

    name: str
    rank: int
    """Which rank writes them."""
    tensor: torch.Tensor
    """The rows of this rank's own tensor, as a view."""


class _Read(NamedTuple):
    """A block of this rank's tensor that was read."""

    name: str
    rank: int
    """Which rank writes it."""
    number: int
    """The block's number among the blocks of the region."""
    checksum: int


class _Sent(NamedTuple):
    """Blocks of tensors on one device that are on their way to host memory."""

    blocks: list[tuple[_Region, int]]
    """Region, and number of the block in it."""
    places: list[torch.Tensor]
    """Where each block arrives."""
    arrival: StreamPoint

    def arrived(self, block: int) -> Iterator[_Read]:
        """Wait for the blocks, and yield what was read. ``block``: bytes of a block."""
        self.arrival.synchronize()
        for (region, number), place in zip(self.blocks, self.places, strict=True):
            yield _Read(region.name, region.rank, number, int(checksums(place, block)[0]))


@dataclass(slots=True)
class _Regions:
    """All regions of one list of tensors."""

    token: object
    """Identifies the list."""
    regions: list[_Region]
    """Those in plain host memory, sorted by the rank that writes them and by name."""
    blocks: Blocks
    """The blocks of ``regions``; ``checksum_positions`` are numbers of blocks in a region."""
    ranks: Positions
    """For each of ``blocks``: the rank that writes it."""
    of_rank: Positions
    """For each of ``blocks``: its number among all blocks that the rank writes (``restore/rows_of_others.py``)."""
    not_plain: list[tuple[_Region, int]]
    """Each block of the regions whose tensors are in host memory, but not plain, with its number in the region."""
    on_devices: list[tuple[_Region, int]]
    """Each block of the regions on devices, with its number in the region."""


def cross_check_of(group: Membership, capture: Capture, pipeline: Pipeline) -> CrossCheck | None:
    """Return the cross-check of this rank; None if it divides nothing with others."""
    writer = pipeline.pool.writer
    if writer is None or not capture.shares.cuts:
        return None
    by_rank = {one.rank: one for one in group.commit_rule.neighbours}
    cross_check = CrossCheck(
        capture, group.rank, writer.incarnation, writer.superblock.block, by_rank, pipeline.guard.reads_all
    )
    pipeline.events.add(cross_check)
    return cross_check


@dataclass(slots=True)
class CrossCheck(CommitListener):
    """The cross-check of one session."""

    capture: Capture
    rank: int
    incarnation: int
    """The incarnation of the checkpoints of this session."""
    block: int
    """Bytes of a block in the pools of these ranks."""
    neighbours: Mapping[int, Neighbour]
    """Another rank of this host -> its pool."""
    reads_all: bool = False
    """Whether each checkpoint reads all blocks (``LIGHTCK_CHECK=1``)."""
    _known: _Regions | None = None
    _turn: RoundRobin = field(default_factory=RoundRobin)
    _turn_of_records: RoundRobin = field(default_factory=RoundRobin)
    """The turn of the checkpoints whose blocks are only recorded."""
    _next_not_plain: int = 0
    _next_on_device: int = 0
    _fully_compared_left: int = FULLY_COMPARED_FIRST
    """How many of the next comparisons are of all blocks. While this is above 0, each checkpoint reads all."""
    _n_skipped: int = 0
    """How many checkpoints were closed since the last one whose blocks are compared."""
    _pending: list[_Read] = field(default_factory=list)
    _sent: list[_Sent] = field(default_factory=list)
    _pending_id: CheckpointId | None = None
    """The checkpoint at which ``_pending`` was read, and ``_sent`` began."""

    # -- at the boundary ---------------------------------------------------------------------------------

    def read(self, lives: Sequence[Live], tensor_list: TensorList | None, step: int) -> list[RowsOfOther]:
        """Read some blocks of the tensors of a closed step, and return what its checkpoint records of them.
        ``tensor_list``: the list of these tensors, if there is one."""
        if not self.capture.shares.cuts:
            return []
        reads_all = self.reads_all or self._fully_compared_left > 0
        regions = self._regions_of(lives, tensor_list)
        self._n_skipped += 1
        is_compared = not self._pending and not self._sent and (reads_all or self._n_skipped >= EVERY)
        turn, budget = (self._turn, BUDGET) if is_compared else (self._turn_of_records, BUDGET_NBYTES)
        chosen, crcs = _read_plain(regions, turn, None if reads_all else budget)
        if is_compared:
            self._n_skipped, self._fully_compared_left = 0, max(0, self._fully_compared_left - 1)
            self._pending = [*_reads(regions, chosen, crcs), *self._read_not_plain(regions, reads_all)]
            self._sent = list(self._send(regions, self.block * (ON_DEVICE_FIRST if reads_all else EVERY)))
            self._pending_id = CheckpointId(self.incarnation, step)
        return self._records(regions, chosen, crcs)

    def _regions_of(self, lives: Sequence[Live], tensor_list: TensorList | None) -> _Regions:
        if self._known is None or tensor_list is None or self._known.token is not tensor_list.token:
            token = object() if tensor_list is None else tensor_list.token
            self._known = _regions(token, lives, self.block)
        return self._known

    def _records(self, regions: _Regions, positions: Positions, crcs: Checksums) -> list[RowsOfOther]:
        """Return a record for each run of blocks that one rank writes."""
        ranks, of_rank = regions.ranks[positions], regions.of_rank[positions]
        ends = np.flatnonzero((np.diff(of_rank) != 1) | (np.diff(ranks) != 0)) + 1
        bounds = [0, *ends.tolist(), len(positions)] if len(positions) else []
        return [
            RowsOfOther(int(ranks[low]), int(of_rank[low]), crcs[low:high].astype("<u4").tobytes())
            for low, high in pairwise(bounds)
        ]

    def _read_not_plain(self, regions: _Regions, reads_all: bool) -> Iterable[_Read]:
        """Read blocks that can be read only through a copy: one block, or all."""
        if not regions.not_plain:
            return ()
        at = self._next_not_plain % len(regions.not_plain)
        self._next_not_plain = at + 1
        chosen = regions.not_plain if reads_all else regions.not_plain[at : at + 1]
        return [
            _Read(one.name, one.rank, number, int(checksums(in_plain_memory(one.tensor), self.block)[number]))
            for one, number in chosen
        ]

    def _send(self, regions: _Regions, nbytes_max: int) -> Iterator[_Sent]:
        """Begin to copy the next blocks on devices to host memory. Work that is enqueued on a device after this call
        may change the tensors."""
        blocks = regions.on_devices
        by_device: dict[DeviceTransfer, list[tuple[_Region, int]]] = {}
        nbytes = 0
        for _ in range(min(len(blocks), ON_DEVICE_FIRST)):
            one = blocks[self._next_on_device % len(blocks)]
            nbytes += min(self.block, one[0].tensor.nbytes - one[1] * self.block)
            if nbytes > nbytes_max:
                break
            transfer = transfer_of(one[0].tensor)
            assert transfer is not None, "it is on a device"
            by_device.setdefault(transfer, []).append(one)
            self._next_on_device += 1
        for transfer, own in by_device.items():
            sources = [bytes_of(one.tensor)[number * self.block : (number + 1) * self.block] for one, number in own]
            ends = list(accumulate(source.numel() for source in sources))
            memory = transfer.memory(ends[-1])
            places = [memory[end - source.numel() : end] for end, source in zip(ends, sources, strict=True)]
            yield _Sent(own, places, transfer.send_in_order(list(zip(places, sources, strict=True))))

    def closing(self, writer: PoolWriter | None) -> None:
        for sent in self._sent:
            sent.arrival.synchronize()

    # -- before the next checkpoint ----------------------------------------------------------------------

    def compare(self) -> None:
        """Compare what was read with the pools of the other ranks, as far as these hold the checkpoint already. If a
        tensor differs, this rank writes it whole from now on."""
        self._pending += [one for sent in self._sent for one in sent.arrived(self.block)]
        self._sent = []
        if self._pending_id is None or not self._pending:
            return
        checkpoint_id, left = self._pending_id, []
        differing: dict[str, int] = {}
        whole: set[str] = set()
        for rank in {one.rank for one in self._pending}:
            reads, neighbour = [one for one in self._pending if one.rank == rank], self.neighbours[rank]
            stored = neighbour.stored(checkpoint_id)
            if stored is not None:
                found, whole_there = _compared(reads, stored)
                differing |= dict.fromkeys(found, rank)
                whole |= whole_there
            elif neighbour.may_still_get(checkpoint_id):
                left += reads
        self._pending = left
        if differing or whole:
            self._write_whole(differing, whole, checkpoint_id.step)

    def _write_whole(self, differing: Mapping[str, int], whole: set[str], step: int) -> None:
        new = (whole | differing.keys()) - self.capture.shares.written_whole
        if not new:
            return
        self.capture.shares.written_whole |= new
        self.capture.use_shares(self.capture.shares)
        self._known, self._pending, self._sent, self._fully_compared_left = None, [], [], FULLY_COMPARED_FIRST
        for other in sorted({differing[name] for name in new & differing.keys()}):
            names = sorted(name for name in new & differing.keys() if differing[name] == other)
            log.warning(
                "lightck: ranks %d and %d have different bytes in %s at step %d, although DistributedDataParallel "
                "or the placement of a DTensor should keep them equal (no all-reduce, a write or another memory layout "
                "on one rank, or a fault of the hardware?). Rank %d writes them whole from the next checkpoint on. A "
                "resume from an earlier checkpoint would give this rank rows of other ranks. If the ranks are meant "
                "to differ, pass split=False",
                *sorted((self.rank, other)),
                listed([repr(name) for name in names], 3),
                step,
                self.rank,
            )


def _regions(token: object, lives: Sequence[Live], block: int) -> _Regions:
    found = sorted(_regions_in(lives), key=lambda one: (one.rank, one.name))
    counts = [-(-one.tensor.nbytes // block) for one in found]
    on_devices = [transfer_of(one.tensor) is not None for one in found]
    in_plain = [not on_device and is_plain(one.tensor) for one, on_device in zip(found, on_devices, strict=True)]
    plain = [one for one, is_in_plain in zip(found, in_plain, strict=True) if is_in_plain]
    blocks = NO_BLOCKS
    if plain:
        addresses, nbytes = [address_of(one.tensor) for one in plain], [one.tensor.nbytes for one in plain]
        blocks = Blocks.of(addresses, nbytes, [0] * len(plain), block)
    begins = _begins_of_rank(found, counts)
    begins_of_plain = np.array([begins[i] for i, is_in_plain in enumerate(in_plain) if is_in_plain] or [0], np.int64)
    ranks = np.array([one.rank for one in plain] or [0], np.int64)
    not_plain: list[tuple[_Region, int]] = []
    of_devices: list[tuple[_Region, int]] = []
    for one, is_in_plain, on_device, count in zip(found, in_plain, on_devices, counts, strict=True):
        if not is_in_plain:
            (of_devices if on_device else not_plain).extend((one, number) for number in range(count))
    of_rank = begins_of_plain[blocks.owners] + blocks.checksum_positions
    return _Regions(token, plain, blocks, ranks[blocks.owners], of_rank, not_plain, of_devices)


def _regions_in(lives: Sequence[Live]) -> Iterator[_Region]:
    for live in lives:
        if live.share is None or live.share.is_whole or live.alias is not None:
            continue
        cut = live.share.cut
        for rank, (start, end) in zip(cut.ranks, pairwise(cut.bounds), strict=True):
            if rank != cut.ranks[live.share.place] and end > start:
                yield _Region(live.name, rank, live.tensor.detach().narrow(cut.dim, start, end - start))


def _begins_of_rank(regions: Sequence[_Region], counts: Sequence[int]) -> list[int]:
    """Return the number of each region's first block among those that its rank writes. The regions are sorted by
    rank."""
    found: list[int] = []
    n_before: Counter[int] = Counter()
    for one, count in zip(regions, counts, strict=True):
        found.append(n_before[one.rank])
        n_before[one.rank] += count
    return found


def _read_plain(regions: _Regions, turn: RoundRobin, budget: int | None) -> tuple[Positions, Checksums]:
    """Read the next blocks in plain host memory. Returns their positions in ``regions.blocks``, and their checksums."""
    if not len(regions.blocks):
        return np.zeros(0, np.int64), np.zeros(0, np.uint32)
    chosen, _ = turn.next_blocks(regions.blocks, budget)
    positions = np.arange(len(regions.blocks)) if isinstance(chosen, slice) else chosen
    return positions, regions.blocks.checksums(chosen)


def _reads(regions: _Regions, positions: Positions, crcs: Checksums) -> Iterator[_Read]:
    """Yield what was read, block by block."""
    owners, numbers = regions.blocks.owners[positions], regions.blocks.checksum_positions[positions]
    for owner, number, crc in zip(owners.tolist(), numbers.tolist(), crcs.tolist(), strict=True):
        yield _Read(regions.regions[owner].name, regions.regions[owner].rank, number, crc)


def _compared(reads: Sequence[_Read], stored: StoredCheckpoint) -> tuple[set[str], set[str]]:
    """Compare blocks with another rank's checkpoint. Returns the names of the tensors that differ, and of those that
    the other rank writes whole, or in another way."""
    differing: set[str] = set()
    whole: set[str] = set()
    of_name: dict[str, list[_Read]] = {}
    for one in reads:
        of_name.setdefault(one.name, []).append(one)
    for name, of_tensor in of_name.items():
        entry = stored.entries.get(name)
        if entry is None or entry.share is None or entry.share.is_whole or entry.alias is not None:
            whole.add(name)
            continue
        there = stored.raw_checksums(name)
        if any(one.number >= len(there) or there[one.number] != one.checksum for one in of_tensor):
            differing.add(name)
    return differing, whole
