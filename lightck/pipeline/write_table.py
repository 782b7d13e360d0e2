"""Which record of the pool each tensor has, and how the tensor is copied. Both answers are computed once, and reused
until a tensor is added, dropped, replaced or moved.

These tensors are copied at the boundary: all tensors of a small model, small tensors, buffers, tensors that must first
be made contiguous, and tensors that something once wrote to after a boundary. Tensors on a device are sent from it.
Frozen tensors are copied at the boundary unless a strategy leaves them out. Tensors with a stand-in are copied from it,
when it is complete. All other tensors are copied by the copy threads. This module reads no bytes.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightck.pool.format.layout import GRADIENT_ROLE, Entry
from lightck.pool.format.shares import Share
from lightck.pool.writer import PoolWriter, RelayoutNeededError
from lightck.state.blocks import NO_BLOCKS, Blocks
from lightck.state.device_transfers import DeviceTransfer, transfer_of
from lightck.state.inventory import Live, address_of, entry_of, is_plain, storage_of
from lightck.state.parts import refuse_parts
from lightck.state.signatures import ClosedStep, MemoryLayout, memory_layout_of

NO_RECORDS = np.array([], np.int64)
"""An empty array of record numbers."""
AT_BOUNDARY_NBYTES_MAX = 4096
"""The largest size of a tensor that is always copied at the boundary, because to start a background copy would take
longer."""
WHOLE_NBYTES_MAX = 0 if os.environ.get("LIGHTCK_TEST_BACKGROUND") == "1" else 512 * 1024
"""If the tensors of one table in plain host memory, without frozen ones, have at most ``WHOLE_NBYTES_MAX`` bytes
together, all of these are copied at the boundary. A background copy would take longer, because the tensors must then be
watched, and their memory moves to the processor of a copy thread and back."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor's record number in the pool, and facts about the tensor that hold while it lies at the same place."""

    number: int
    tensor: torch.Tensor
    memory_layout: MemoryLayout
    alias: str | None
    nbytes: int
    plain: bool
    """Whether the tensor's own memory can be copied as it is."""
    at_boundary: bool
    """Whether the tensor is always copied at the boundary."""
    transfer: DeviceTransfer | None = None
    """Copies the tensor from its device. None if it is in host memory, or on a device without a ``DeviceTransfer``."""
    share: Share | None = None
    """The rows that are written; None: all."""
    offset: int = 0
    """Where the rows begin, in bytes from the beginning of the tensor."""

    @property
    def address(self) -> int:
        return self.memory_layout[0] + self.offset

    def describes(self, live: Live) -> bool:
        """Whether this record still describes the tensor. Object and address alone do not show that: ``resize_``,
        ``t_`` and ``.data = ...`` can keep both, and a tied tensor keeps both when the tensor to which it was tied is
        replaced."""
        is_same = self.tensor is live.tensor and self.alias == live.alias and self.share == live.share
        return is_same and self.memory_layout == memory_layout_of(live.tensor)


class NoExtentError(Exception):
    """Tensors have no extent in the pool yet, because they are new or have another shape or dtype now. Internal: the
    pipeline waits until nothing is in flight, adds extents and computes the tables again."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        super().__init__(f"no extents for {[entry.name for entry in entries[:3]]}")
        self.entries = entries


def _record(number: int, live: Live, entry: Entry) -> TensorRecord:
    """Return the record of a tensor that has an extent. ``number``: its record number."""
    tensor, written = live.tensor, live.written
    plain, transfer = is_plain(written), transfer_of(tensor)
    at_boundary = entry.nbytes <= AT_BOUNDARY_NBYTES_MAX or entry.role == "buffer" or not (plain or transfer)
    return TensorRecord(
        number,
        tensor,
        memory_layout_of(tensor),
        live.alias,
        entry.nbytes,
        plain,
        at_boundary,
        transfer,
        live.share,
        0 if live.share is None else address_of(written) - address_of(tensor),
    )


@dataclass(frozen=True, slots=True)
class StagedTensor:
    """A tensor on a device. ``in_order``: it is sent in the order of the computation (its copy is enqueued on the
    stream of the computation), because kernels that are enqueued next may change it."""

    live: Live
    record: TensorRecord
    transfer: DeviceTransfer
    in_order: bool


@dataclass(frozen=True, slots=True)
class WriteTable:
    """How a list of tensors is written. Computed once for a tensor list, and reused until the list changes."""

    token: object
    """The token of the ``TensorList`` (state/signatures.py) that this table was computed for; None if it was not
    computed for a ``TensorList``."""
    n_names_at_boundary: int
    """Size of the set ``copied_at_boundary`` (see ``write_table``) when this table was computed. The set only grows, so
    another size means that the table is out of date."""
    in_host_memory: list[tuple[Live, TensorRecord]]
    """Tensors in plain host memory that each checkpoint writes. The next three arrays are parallel to it."""
    numbers: npt.NDArray[np.int64]
    sources: npt.NDArray[np.uint64]
    """Addresses of the tensors' bytes."""
    at_boundary: npt.NDArray[np.bool_]
    """Whether the tensor is copied at the boundary. If not, it is in ``background``."""
    keep_alive: list[object]
    """Keeps alive the memory of each tensor of ``background``, in the same order."""
    background: list[Live]
    background_numbers: list[int]
    without_bytes: npt.NDArray[np.int64]
    """Record numbers of tensors without bytes of their own: empty or tied."""
    undecided: list[tuple[Live, TensorRecord]]
    """Tensors that are copied at the boundary unless the plan of a checkpoint leaves them out: all frozen tensors, also
    on a device, and all tensors that lightck cannot copy directly (not dense, or on a device without a
    ``DeviceTransfer``)."""
    staged: list[StagedTensor]
    """Tensors on a device with a ``DeviceTransfer``, without the frozen ones."""
    late: list[tuple[Live, TensorRecord]]
    """Tensors that are copied from their stand-ins."""
    _background_by_id: dict[int, tuple[Live, int]] = field(default_factory=dict)
    """id of a tensor -> its item of ``background`` and its record number. Empty until ``background_of`` is called."""
    _blocks: list[Blocks] = field(default_factory=list)
    """The result of ``blocks``, as the only item. Empty until ``blocks`` is called."""

    def without(self, left_out: Collection[int]) -> WriteTable:
        """Return a copy of this table without these record numbers, for a plan that leaves them out
        (``WritePlan.unchanged``, ``WritePlan.omitted``). ``without_bytes`` and ``undecided`` stay as they are."""
        stays = ~np.isin(self.numbers, np.fromiter(left_out, np.int64, len(left_out)))
        in_background = [i for i, number in enumerate(self.background_numbers) if number not in left_out]
        return WriteTable(
            None,
            self.n_names_at_boundary,
            [self.in_host_memory[i] for i in np.flatnonzero(stays)],
            self.numbers[stays],
            self.sources[stays],
            self.at_boundary[stays],
            [self.keep_alive[i] for i in in_background],
            [self.background[i] for i in in_background],
            [self.background_numbers[i] for i in in_background],
            self.without_bytes,
            self.undecided,
            [one for one in self.staged if one.record.number not in left_out],
            [one for one in self.late if one[1].number not in left_out],
        )

    def background_of(self, tensor: torch.Tensor) -> tuple[Live, int] | None:
        """Return the item of ``background`` for this tensor and its record number; None if the tensor is not there."""
        if not self._background_by_id:
            pairs = zip(self.background, self.background_numbers, strict=True)
            self._background_by_id.update((id(live.tensor), (live, number)) for live, number in pairs)
        return self._background_by_id.get(id(tensor))  # ids stay valid: this table keeps each of these tensors alive

    def blocks(self, writer: PoolWriter) -> Blocks:
        """Return the blocks of the tensors in ``background``."""
        if not self.background:
            return NO_BLOCKS
        if not self._blocks:
            starts, nbytes = writer.first_checksums_and_sizes(self.background_numbers)
            self._blocks.append(Blocks.of(self.sources[~self.at_boundary], nbytes, starts, writer.superblock.block))
        return self._blocks[0]


def write_table(
    lives: Sequence[Live],
    records: Sequence[TensorRecord],
    copied_at_boundary: set[str],
    token: object = None,
    *,
    whole_nbytes_max: int = 0,
) -> WriteTable:
    """Return the table that says how these tensors are written. ``records``: the record of each tensor.
    ``copied_at_boundary``: names of tensors that no background copy may read. ``token``: see ``WriteTable``.
    ``whole_nbytes_max``: if the tensors in plain host memory have at most ``whole_nbytes_max`` bytes together, all are
    copied at the boundary."""
    in_host_memory: list[tuple[Live, TensorRecord, bool]] = []
    """The third item: whether the tensor is copied at the boundary."""
    without_bytes: list[int] = []
    undecided: list[tuple[Live, TensorRecord]] = []
    staged: list[StagedTensor] = []
    late: list[tuple[Live, TensorRecord]] = []
    for live, record in zip(lives, records, strict=True):
        if not record.nbytes:
            without_bytes.append(record.number)
        elif live.stand_in is not None:
            late.append((live, record))
        elif record.transfer is not None and not live.is_frozen:
            staged.append(
                StagedTensor(live, record, record.transfer, record.at_boundary or live.name in copied_at_boundary)
            )
        elif live.is_frozen or not record.plain:
            undecided.append((live, record))
        else:
            in_host_memory.append((live, record, record.at_boundary or live.name in copied_at_boundary))
    if sum(record.nbytes for _, record, _ in in_host_memory) <= whole_nbytes_max:
        in_host_memory = [(live, record, True) for live, record, _ in in_host_memory]
    in_background = [(live, record.number) for live, record, at_boundary in in_host_memory if not at_boundary]
    return WriteTable(
        token,
        len(copied_at_boundary),
        [(live, record) for live, record, _ in in_host_memory],
        np.array([record.number for _, record, _ in in_host_memory], np.int64),
        np.array([record.address for _, record, _ in in_host_memory], np.uint64),
        np.array([at_boundary for _, _, at_boundary in in_host_memory], np.bool_),
        [storage_of(live.tensor) for live, _ in in_background],
        [live for live, _ in in_background],
        [number for _, number in in_background],
        np.array(without_bytes, np.int64),
        undecided,
        staged,
        late,
    )


_EMPTY = write_table([], [], set())


class WriteTableCache:
    """The tensor records of one pool file, and the write table of the last tensor list."""

    def __init__(self, writer: PoolWriter, *, check: bool = False) -> None:
        """``check`` (``LIGHTCK_CHECK=1``): a small model is copied in the background, as a large one is, so that writes
        to its sources are found."""
        self.writer = writer
        self._whole_nbytes_max = 0 if check else WHOLE_NBYTES_MAX
        self.cached: WriteTable | None = None
        """The table of the last ``TensorList``; None before the first one."""
        self._records: dict[str, TensorRecord] = {}

    def of(self, closed_step: ClosedStep, copied_at_boundary: set[str]) -> list[WriteTable]:
        """Return two tables: one for the tensors of the step's ``TensorList``, one for the other tensors (large tensors
        in ``state=``, or all if there is no list). Raises ``NoExtentError``."""
        tensor_list, known, lives = closed_step.tensor_list, self.cached, closed_step.lives
        n = 0 if tensor_list is None else len(tensor_list.lives)
        if (
            known is not None
            and tensor_list is not None
            and (known.token, known.n_names_at_boundary) == (tensor_list.token, len(copied_at_boundary))
        ):
            others = lives[n:]
            if not others and len(self._records) <= n:  # if there are more records, some tensors were dropped
                return [known, _EMPTY]
            return [known, self._table(others, self._records_of(others, lives), copied_at_boundary)]
        records = self._records_of(lives, lives)
        self.cached = first = self._table(
            lives[:n], records[:n], copied_at_boundary, None if tensor_list is None else tensor_list.token
        )
        return [first, self._table(lives[n:], records[n:], copied_at_boundary)]

    def _table(
        self,
        lives: Sequence[Live],
        records: Sequence[TensorRecord],
        copied_at_boundary: set[str],
        token: object = None,
    ) -> WriteTable:
        return write_table(lives, records, copied_at_boundary, token, whole_nbytes_max=self._whole_nbytes_max)

    def add(self, entries: Sequence[Entry], lives: Sequence[Live]) -> None:
        """Add extents for these entries. Extents of tensors that are not in ``lives`` may be reused. Call only while no
        checkpoint is in flight. Raises ``RelayoutNeededError``."""
        if not self.writer.superblock.has_shares and any(entry.share is not None for entry in entries):
            raise RelayoutNeededError(
                "the ranks of this host divide tensors now, and the pool has no place to record which rows it holds"
            )
        try:
            self.writer.add(entries, {live.name for live in lives})
        finally:
            numbers = self.writer.numbers
            self._records = {name: one for name, one in self._records.items() if numbers.get(name) == one.number}

    def describes(self, live: Live, number: int) -> bool:
        """Whether ``number`` is still the tensor's record number, and the record still describes the tensor."""
        record = self._records.get(live.name)
        return record is not None and record.number == number and record.describes(live)

    def _records_of(self, lives: Sequence[Live], all_lives: Sequence[Live]) -> list[TensorRecord]:
        """Return the record of each of ``lives``. Raises ``NoExtentError`` if a tensor has no extent that fits it now.
        ``all_lives``: all tensors of the step. The records of all other tensors are forgotten."""
        known, writer = self._records, self.writer
        if len(known) > len(all_lives):  # a record must not keep alive a tensor that the training has dropped
            for name in known.keys() - {live.name for live in all_lives}:
                del known[name]
        records: list[Any] = [known.get(live.name) for live in lives]
        changed = {
            i: entry_of(live)
            for i, (live, record) in enumerate(zip(lives, records, strict=True))
            if record is None or not record.describes(live)
        }
        if changed and not writer.superblock.has_group:
            refuse_parts(lives[i] for i in changed)
        new = [entry for entry in changed.values() if not writer.has_extent_for(entry)]
        if new:
            raise NoExtentError(new)
        for i, entry in changed.items():
            records[i] = _record(writer.numbers[entry.name], lives[i], entry)
            if entry.role != GRADIENT_ROLE:  # the gradient is another tensor at each step, and must not be kept alive
                known[entry.name] = records[i]
        return records
