"""How each tensor of a version gets into its slot: at once, in the background, or not at all.

Small tensors, buffers and what moved unannounced before are copied at the boundary itself; a still parameter that rests
stays as it lies in the slot; all others are left to the copy threads. Reads no bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightck.capture.inventory import Live, entry_of, is_plain, staged
from lightck.capture.snapshot import Closing
from lightck.capture.watch import Resting
from lightck.pool.layout import Entry
from lightck.pool.slots import Slot
from lightck.pool.writer import PoolWriter, VersionPlan

NOW_NBYTES = 4096
"""Tensors up to this size are copied at the boundary itself: starting a background copy costs more."""


@dataclass(frozen=True, slots=True)
class Record:
    """Where a tensor lies in the pool, and what of it need not be asked again while it stays where it is."""

    number: int
    tensor: torch.Tensor
    address: int
    shape: torch.Size
    stride: tuple[int, ...]
    nbytes: int
    plain: bool
    """Its own memory can be copied as it is."""
    at_once: bool

    def describes(self, tensor: torch.Tensor) -> bool:
        """Shape and stride are asked for too: ``resize_``, ``t_`` and ``.data = ...`` can keep object and address."""
        return (
            self.tensor is tensor
            and self.address == tensor.data_ptr()
            and self.shape == tensor.shape
            and self.stride == tensor.stride()
        )


def record_of(writer: PoolWriter, live: Live, settle: Callable[[], object]) -> Record:
    """The record of a tensor, with an extent that fits it as it is now. Raises ``FullError``.

    ``settle`` ends all versions in flight: it is called before a new extent moves the manifests in memory.
    """
    known = writer.known.get(live.name)
    tensor = live.tensor
    if isinstance(known, Record) and known.describes(tensor):
        return known
    entry = entry_of(live)
    number = writer.numbers.get(live.name)
    if number is None or not writer.entries[number].same_bytes_as(entry):
        settle()
        number = writer.add(entry)
    plain = is_plain(tensor)
    at_once = entry.nbytes <= NOW_NBYTES or entry.role == "buffer" or not plain
    record = Record(number, tensor, tensor.data_ptr(), tensor.shape, tensor.stride(), entry.nbytes, plain, at_once)
    writer.known[live.name] = record
    return record


class Split:
    """The tensors of one version, sorted by how they are written."""

    def __init__(self, resting: Resting, writer: PoolWriter, slot: Slot, closing: Closing,
                 records: list[Record]) -> None:  # fmt: skip
        self.keep: list[torch.Tensor] = []
        self.stills: list[tuple[Live, int]] = []
        self.left_out: list[Live] = []
        self.background: list[Live] = []
        self.background_numbers: list[int] = []
        self._numbers: list[int] = []
        self._sources: list[int] = []
        self._now: list[bool] = []
        self._kept: list[int] = []
        self._present: list[int] = []
        for live, record in zip(closing.lives, records, strict=True):
            if not record.nbytes:
                self._present.append(record.number)
            elif live.still and _rests(resting, writer, slot, live, record.number):
                self._kept.append(record.number)
                self.left_out.append(live)
            else:
                now = record.at_once or live.still or live.name in resting.never
                self._copy(live, record, now)

    def _copy(self, live: Live, record: Record, now: bool) -> None:
        source, address = live.tensor, record.address
        if not record.plain:
            source = staged(live.tensor)
            address = source.data_ptr()
        self._numbers.append(record.number)
        self._sources.append(address)
        self._now.append(now)
        self.keep.append(source)
        if live.still:
            self.stills.append((live, record.number))
        if not now:
            self.background.append(live)
            self.background_numbers.append(record.number)

    def plan(self, closing: Closing) -> VersionPlan:
        return VersionPlan(
            closing.step,
            closing.iteration,
            np.array(self._numbers, np.int64),
            np.array(self._sources, np.uint64),
            np.array(self._now, np.bool_),
            np.array(self._kept, np.int64),
            np.array(self._present, np.int64),
            closing.state,
        )


def _rests(resting: Resting, writer: PoolWriter, slot: Slot, live: Live, number: int) -> bool:
    """Whether the slot holds this still tensor's bytes already."""
    crcs = resting.crcs_at_rest(live)
    in_slot = bool(slot.image.in_slot[number])
    return crcs is not None and in_slot and np.array_equal(crcs, writer.raw_crcs(slot, number))


def in_order_of_need(entries: Any) -> list[Entry]:
    """Each parameter followed by its optimizer state, in the order of the modules: what the next step touches
    together lies together, and is free again together."""
    entries = list(entries)
    owner = {e.name.removeprefix("model/"): i for i, e in enumerate(entries) if e.role in ("param", "buffer")}

    def key(item: tuple[int, Entry]) -> tuple[int, int]:
        i, entry = item
        if entry.role != "optimizer":
            return (i if entry.role != "state" else len(entries)), -1
        param = entry.name.removeprefix("optimizer/").rpartition("/")[0]
        return owner.get(param, len(entries)), i

    return [entry for _, entry in sorted(enumerate(entries), key=key)]
