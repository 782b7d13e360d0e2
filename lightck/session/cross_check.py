"""The cross-check: whether the ranks of a host that divide their tensors still hold the same.

A rank writes its share of a tensor, and takes the other rows from the other ranks when it is restored. That is exact
only as long as the rank holds the same bytes in these rows as the ranks that write them. So at each checkpoint it reads
some blocks of its own tensors that other ranks write, and later compares them with the checksums in the pools of those
ranks, for the checkpoint of the same step. No message is sent.

In the first checkpoints, and after a difference was found, all blocks are read (on a device, ``ON_DEVICE_FIRST``).
Later every ``EVERY``-th checkpoint reads some blocks, in turn: to find the checksums of the other rank takes longer
than to read a few more blocks. If a block differs, this rank writes the tensor whole from then on, and a warning names
the tensor. It also does so if another rank writes the tensor whole: its share can no longer be compared block by block.

Invariant: of each tensor a rank either writes all rows, or it has held the bytes that the others wrote of it when it
last compared them, which is at most one round ago.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch

from lightck.errors import listed
from lightck.pipeline.pipeline import Pipeline
from lightck.pool.listener import CommitListener
from lightck.pool.reader import StoredCheckpoint
from lightck.pool.writer import PoolWriter
from lightck.ranks.neighbours import Neighbour
from lightck.ranks.rule import CheckpointId
from lightck.session.capture import Capture
from lightck.session.group import Membership
from lightck.state.blocks import BUDGET_NBYTES, NO_BLOCKS, WHOLE_CHECKPOINTS, Blocks, RoundRobin, checksums
from lightck.state.device_transfers import Arrival, DeviceTransfer, raw, transfer_of
from lightck.state.inventory import Live, address_of, in_plain_memory, is_plain
from lightck.state.signatures import ClosedStep

log = logging.getLogger("lightck")
EVERY = 4
BUDGET = EVERY * BUDGET_NBYTES
"""Bytes that every ``EVERY``-th checkpoint reads."""
ON_DEVICE_FIRST = 64
"""How many blocks on devices one checkpoint reads at most. The first ones read so many, because to read all would take
the device long. (A rank that makes its updates alone differs in all blocks.)"""


class _Region(NamedTuple):
    """The rows of a tensor that another rank of the host writes."""

    name: str
    place: int
    """Which rank of the host writes them (``Share.place``)."""
    tensor: torch.Tensor
    """The rows of this rank's own tensor, as a view."""


class _Read(NamedTuple):
    """A block of this rank's tensor that was read."""

    name: str
    place: int
    block: int
    """Number of the block among those of the region."""
    checksum: int


class _Sent(NamedTuple):
    """Blocks of tensors on one device that are on their way to host memory."""

    blocks: list[tuple[_Region, int]]
    """Region, and number of the block in it."""
    places: list[torch.Tensor]
    """Where each block arrives."""
    arrival: Arrival

    def arrived(self, block: int) -> Iterator[_Read]:
        """Wait for the blocks, and yield what was read. ``block``: bytes of a block."""
        self.arrival.synchronize()
        for (region, number), place in zip(self.blocks, self.places, strict=True):
            yield _Read(region.name, region.place, number, int(checksums(place, block)[0]))


@dataclass(slots=True)
class _Regions:
    """All regions of one list of tensors."""

    token: object
    """Identifies the list."""
    regions: list[_Region]
    """Those in plain host memory first, in the order of ``blocks.owners``."""
    blocks: Blocks
    """The blocks of the regions in plain host memory; ``checksum_positions`` are numbers of blocks in a region."""
    others: list[tuple[_Region, int]]
    """Each block of the other regions in host memory, with its number in the region."""
    on_devices: list[tuple[_Region, int]]
    """Each block of the regions on devices, with its number in the region."""


def cross_check_of(group: Membership, capture: Capture, pipeline: Pipeline) -> CrossCheck | None:
    """Return the cross-check of the ranks on this host; None if they divide nothing."""
    writer = pipeline.pool.writer
    if writer is None or not capture.shares.cuts:
        return None
    mates = group.rule.neighbours
    of_host = sorted([group.rank, *(one.rank for one in mates)])
    by_place = {of_host.index(one.rank): one for one in mates}
    found = CrossCheck(capture, group.rank, writer.superblock.block, by_place, pipeline.guard.reads_all)
    pipeline.events.add(found)
    return found


@dataclass(slots=True)
class CrossCheck(CommitListener):
    """The cross-check of one session."""

    capture: Capture
    rank: int
    block: int
    """Bytes of a block in the pools of these ranks."""
    neighbours: Mapping[int, Neighbour]
    """``Share.place`` -> the pool of that rank."""
    reads_all: bool = False
    """Whether each checkpoint reads all blocks (``LIGHTCK_CHECK=1``)."""
    _known: _Regions | None = None
    _turn: RoundRobin = field(default_factory=RoundRobin)
    _next_other: int = 0
    _next_on_device: int = 0
    _whole_left: int = WHOLE_CHECKPOINTS
    """How many of the next checkpoints read all blocks."""
    _n_skipped: int = 0
    """How many checkpoints have read nothing since the last one that did."""
    _pending: list[_Read] = field(default_factory=list)
    _sent: list[_Sent] = field(default_factory=list)
    _pending_id: CheckpointId | None = None
    """The checkpoint at which ``_pending`` was read, and ``_sent`` began."""

    # -- at the boundary ---------------------------------------------------------------------------------

    def read(self, closed_step: ClosedStep, incarnation: int) -> None:
        """Read some blocks of the tensors of a closed step, if it is time, and those that were read last are
        compared."""
        if self._pending or self._sent or not self.capture.shares.cuts:
            return
        reads_all = self.reads_all or self._whole_left > 0
        self._n_skipped += 1
        if self._n_skipped < EVERY and not reads_all:
            return
        self._n_skipped = 0
        regions = self._regions_of(closed_step)
        self._whole_left = max(0, self._whole_left - 1)
        self._pending = [*self._read_plain(regions, reads_all), *self._read_others(regions, reads_all)]
        self._sent = list(self._send(regions, self.block * (ON_DEVICE_FIRST if reads_all else EVERY)))
        self._pending_id = CheckpointId(incarnation, closed_step.step)

    def _regions_of(self, closed_step: ClosedStep) -> _Regions:
        tensor_list = closed_step.tensor_list
        if self._known is None or tensor_list is None or self._known.token is not tensor_list.token:
            token = object() if tensor_list is None else tensor_list.token
            self._known = _regions(token, closed_step.lives, self.capture.shares.place, self.block)
        return self._known

    def _read_plain(self, regions: _Regions, reads_all: bool) -> Iterable[_Read]:
        if not len(regions.blocks):
            return ()
        chosen, _ = self._turn.next_blocks(regions.blocks, None if reads_all else BUDGET)
        crcs, owners = regions.blocks.checksums(chosen), regions.blocks.owners[chosen]
        numbers = regions.blocks.checksum_positions[chosen]
        return [
            _Read(regions.regions[owner].name, regions.regions[owner].place, number, crc)
            for owner, number, crc in zip(owners.tolist(), numbers.tolist(), crcs.tolist(), strict=True)
        ]

    def _read_others(self, regions: _Regions, reads_all: bool) -> Iterable[_Read]:
        """Read blocks that can be read only through a copy: one block, or all."""
        if not regions.others:
            return ()
        at = self._next_other % len(regions.others)
        self._next_other = at + 1
        chosen = regions.others if reads_all else regions.others[at : at + 1]
        return [
            _Read(one.name, one.place, number, int(checksums(in_plain_memory(one.tensor), self.block)[number]))
            for one, number in chosen
        ]

    def _send(self, regions: _Regions, nbytes_max: int) -> Iterator[_Sent]:
        """Begin to copy the next blocks on devices to host memory, in the order of the computation."""
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
            sources = [raw(one.tensor)[number * self.block : (number + 1) * self.block] for one, number in own]
            memory = transfer.memory(len(own) * self.block)
            places = [memory[i * self.block :][: source.numel()] for i, source in enumerate(sources)]
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
        name, left = self._pending_id, []
        differing: dict[str, int] = {}
        whole: set[str] = set()
        for place in {one.place for one in self._pending}:
            of_place, neighbour = [one for one in self._pending if one.place == place], self.neighbours[place]
            stored = neighbour.stored(name)
            if stored is not None:
                found, whole_there = _compared(of_place, stored)
                differing |= dict.fromkeys(found, neighbour.rank)
                whole |= whole_there
            elif neighbour.may_still_have(name):
                left += of_place
        self._pending = left
        if differing or whole:
            self._write_whole(differing, whole, name.step)

    def _write_whole(self, differing: Mapping[str, int], whole: set[str], step: int) -> None:
        new = (whole | differing.keys()) - self.capture.shares.written_whole
        if not new:
            return
        self.capture.shares.written_whole |= new
        self.capture.use_shares(self.capture.shares)
        self._known, self._pending, self._sent, self._whole_left = None, [], [], WHOLE_CHECKPOINTS
        names = sorted(new & differing.keys())
        if names:
            log.warning(
                "lightck: %s differs between rank %d and rank %d at step %d, although DistributedDataParallel should "
                "keep it equal on all ranks (no all-reduce, a write on one rank, or a fault of the hardware?). From "
                "the next checkpoint on rank %d writes it whole. The checkpoints up to now restore rank %d with rows "
                "of other ranks. If the ranks are meant to differ, pass split=False to attach",
                listed([repr(name) for name in names], 3),
                self.rank,
                differing[names[0]],
                step,
                self.rank,
                self.rank,
            )


def _regions(token: object, lives: Sequence[Live], own_place: int, block: int) -> _Regions:
    plain: list[_Region] = []
    others: list[tuple[_Region, int]] = []
    on_devices: list[tuple[_Region, int]] = []
    for live in lives:
        if live.share is None or live.share.is_whole or live.alias is not None:
            continue
        dim, bounds = live.share.cut.dim, live.share.cut.bounds
        for place, (start, end) in enumerate(pairwise(bounds)):
            if place != own_place and end > start:
                region = _Region(live.name, place, live.tensor.detach().narrow(dim, start, end - start))
                kind = on_devices if transfer_of(live.tensor) is not None else others
                if kind is others and is_plain(region.tensor):
                    plain.append(region)
                else:
                    kind += [(region, number) for number in range(-(-region.tensor.nbytes // block))]
    blocks = NO_BLOCKS
    if plain:
        addresses, nbytes = [address_of(one.tensor) for one in plain], [one.tensor.nbytes for one in plain]
        blocks = Blocks.of(addresses, nbytes, [0] * len(plain), block)
    return _Regions(token, plain, blocks, others, on_devices)


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
        if entry is None or entry.pieces is None or len(entry.pieces) != 1 or entry.alias is not None:
            whole.add(name)
            continue
        there = stored.raw_checksums(name)
        if any(one.block >= len(there) or there[one.block] != one.checksum for one in of_tensor):
            differing.add(name)
    return differing, whole
