"""Which record of the pool each tensor has, and how it is copied: worked out once, and used while nothing moves.

Small tensors, buffers and what moved unannounced before are copied at the boundary itself; what lies on a device is
sent; all others are left to the copy threads, but for still parameters, which a strategy may leave out. Reads no bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightck.pool.format.layout import Entry
from lightck.pool.writer import PoolWriter
from lightck.state.blocks import NO_BLOCKS, Blocks
from lightck.state.device_transfers import DeviceTransfer, transfer_of
from lightck.state.inventory import Live, entry_of, is_plain, memory_of
from lightck.state.signatures import ClosedStep, Reading, reading_of

NONE = np.array([], np.int64)
NOW_NBYTES = 4096
"""Tensors up to this size are copied at the boundary itself: starting a background copy costs more."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Where a tensor lies in the pool, and what of it need not be asked again while it stays where it is."""

    number: int
    tensor: torch.Tensor
    reading: Reading
    alias: str | None
    nbytes: int
    plain: bool
    """Its own memory can be copied as it is."""
    at_boundary: bool
    transfer: DeviceTransfer | None = None
    """The way out of its device, where it has one."""

    @property
    def address(self) -> int:
        return self.reading[0]

    def describes(self, live: Live) -> bool:
        """How it is read is asked for too: ``resize_``, ``t_`` and ``.data = ...`` can keep object and address. So is
        the alias: a tensor stays where it is when the one that it was tied to is replaced."""
        return self.tensor is live.tensor and self.alias == live.alias and self.reading == reading_of(live.tensor)


class NoExtentError(Exception):
    """Tensors appeared, or changed their kind, and have no extent in the pool yet. Internal: extents are added where
    nothing is in flight, and the tables worked out again."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        super().__init__(f"no extents for {[entry.name for entry in entries[:3]]}")
        self.entries = entries


def _record(number: int, live: Live, entry: Entry) -> TensorRecord:
    tensor = live.tensor
    plain, transfer = is_plain(tensor), transfer_of(tensor)
    at_boundary = entry.nbytes <= NOW_NBYTES or entry.role == "buffer" or not (plain or transfer)
    return TensorRecord(number, tensor, reading_of(tensor), live.alias, entry.nbytes, plain, at_boundary, transfer)


@dataclass(frozen=True, slots=True)
class StagedTensor:
    """A tensor on a device. ``in_order``: the next kernels may change it."""

    live: Live
    record: TensorRecord
    transfer: DeviceTransfer
    in_order: bool


@dataclass(frozen=True, slots=True)
class WriteTable:
    """How tensors are written whose records are known; worked out once for a roster, and used while that holds."""

    token: object
    """That of the roster; None where there is none."""
    never: int
    """How many tensors had moved unannounced when this was worked out."""
    written: list[tuple[Live, TensorRecord]]
    """Those that lie in host memory as they are, and are written at every checkpoint. The next three run beside it."""
    numbers: npt.NDArray[np.int64]
    sources: npt.NDArray[np.uint64]
    now: npt.NDArray[np.bool_]
    """Copied at the boundary itself; the others are ``background``."""
    keep: list[object]
    """The memory of those that are left to background copies."""
    background: list[Live]
    background_numbers: list[int]
    present: list[int]
    single: list[tuple[Live, TensorRecord]]
    """Those that are decided anew at each version: they may rest, or are copied by way of a staged copy."""
    staged: list[StagedTensor]
    _places: dict[int, tuple[Live, int]] = field(default_factory=dict)
    _blocks: list[Blocks] = field(default_factory=list)

    def without(self, left_out: Collection[int]) -> WriteTable:
        """A table as this one, but without these records: for a plan that leaves them out (``WritePlan.unchanged``).
        Those of ``present`` and ``single`` stay."""
        stays = ~np.isin(self.numbers, np.fromiter(left_out, np.int64, len(left_out)))
        later = [i for i, number in enumerate(self.background_numbers) if number not in left_out]
        return WriteTable(
            None,
            self.never,
            [self.written[i] for i in np.flatnonzero(stays)],
            self.numbers[stays],
            self.sources[stays],
            self.now[stays],
            [self.keep[i] for i in later],
            [self.background[i] for i in later],
            [self.background_numbers[i] for i in later],
            self.present,
            self.single,
            [one for one in self.staged if one.record.number not in left_out],
        )

    def place_of(self, tensor: torch.Tensor) -> tuple[Live, int] | None:
        """What this tensor is called, and its record, where it is one of ``background``."""
        if not self._places:
            pairs = zip(self.background, self.background_numbers, strict=True)
            self._places.update((id(live.tensor), (live, number)) for live, number in pairs)
        return self._places.get(id(tensor))  # as long as this is here, so is each of these tensors

    def blocks(self, writer: PoolWriter) -> Blocks:
        """The blocks of those that are left to background copies."""
        if not self.background:
            return NO_BLOCKS
        if not self._blocks:
            starts, nbytes = writer.extents(self.background_numbers)
            self._blocks.append(Blocks.of(self.sources[~self.now], nbytes, starts, writer.superblock.block))
        return self._blocks[0]


def write_table(
    lives: Sequence[Live], records: Sequence[TensorRecord], never: set[str], token: object = None
) -> WriteTable:
    """Sort tensors by how they are written. ``never``: names of those that are never left to a background copy."""
    written: list[tuple[Live, TensorRecord, bool]] = []
    present: list[int] = []
    single: list[tuple[Live, TensorRecord]] = []
    staged: list[StagedTensor] = []
    for live, record in zip(lives, records, strict=True):
        if not record.nbytes:
            present.append(record.number)
        elif record.transfer is not None and not live.is_frozen:
            staged.append(StagedTensor(live, record, record.transfer, record.at_boundary or live.name in never))
        elif live.is_frozen or not record.plain:
            single.append((live, record))
        else:
            written.append((live, record, record.at_boundary or live.name in never))
    later = [(live, record.number) for live, record, now in written if not now]
    return WriteTable(
        token,
        len(never),
        [(live, record) for live, record, _ in written],
        np.array([record.number for _, record, _ in written], np.int64),
        np.array([record.address for _, record, _ in written], np.uint64),
        np.array([now for _, _, now in written], np.bool_),
        [memory_of(live.tensor) for live, _ in later],
        [live for live, _ in later],
        [number for _, number in later],
        present,
        single,
        staged,
    )


class WriteTableCache:
    """What is remembered of the tensors of one pool file: the record of each, and the table of the last roster."""

    def __init__(self, writer: PoolWriter) -> None:
        self.writer = writer
        self.cached: WriteTable | None = None
        self._records: dict[str, TensorRecord] = {}

    def of(self, closed_step: ClosedStep, never: set[str]) -> list[WriteTable]:
        """All tensors of a version in columns: those of its roster, and the rest. Raises ``NoExtentError``."""
        tensor_list, known, lives = closed_step.tensor_list, self.cached, closed_step.lives
        n = 0 if tensor_list is None else len(tensor_list.lives)
        if (
            known is not None
            and tensor_list is not None
            and (known.token, known.never) == (tensor_list.token, len(never))
        ):
            return [known, write_table(lives[n:], self._records_of(lives[n:], lives), never)]
        records = self._records_of(lives, lives)
        self.cached = first = write_table(
            lives[:n], records[:n], never, None if tensor_list is None else tensor_list.token
        )
        return [first, write_table(lives[n:], records[n:], never)]

    def add(self, entries: Sequence[Entry], lives: Sequence[Live]) -> None:
        """Extents for tensors that have none; those that are not among these may give theirs away. Nothing is in
        flight. Raises ``RelayoutNeededError``."""
        try:
            self.writer.add(entries, {live.name for live in lives})
        finally:
            numbers = self.writer.numbers
            self._records = {name: one for name, one in self._records.items() if numbers.get(name) == one.number}

    def describes(self, live: Live, number: int) -> bool:
        """Whether this is its record still, and the tensor is read as it was."""
        record = self._records.get(live.name)
        return record is not None and record.number == number and record.describes(live)

    def _records_of(self, lives: Sequence[Live], present: Sequence[Live]) -> list[TensorRecord]:
        """The record of each tensor, with an extent that fits it as it is now. Raises ``NoExtentError``.

        ``present``: all tensors of the version.
        """
        known, writer = self._records, self.writer
        if len(known) > len(present):  # what is gone is not kept alive
            for name in known.keys() - {live.name for live in present}:
                del known[name]
        records: list[Any] = [known.get(live.name) for live in lives]
        changed = {
            i: entry_of(live)
            for i, (live, record) in enumerate(zip(lives, records, strict=True))
            if record is None or not record.describes(live)
        }
        new = [entry for entry in changed.values() if not writer.has_extent_for(entry)]
        if new:
            raise NoExtentError(new)
        for i, entry in changed.items():
            records[i] = known[entry.name] = _record(writer.numbers[entry.name], lives[i], entry)
        return records
