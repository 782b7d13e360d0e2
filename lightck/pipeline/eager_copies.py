"""Eager copies: copies that begin before the boundary, of layers whose update is over while other layers still wait.

A layer-wise update (``hooks/layerwise.py``) reports which tensors are updated. Those that the last checkpoint copied in
the background are copied into the slot of the next one at once, several layers per job of the engine. At the boundary
an eager copy is used if the tensor is the same one with the same signature; otherwise the tensor is copied again.

A loop may write to a parameter after its update without moving its version counter (``p.data.clamp_``). A copy at the
boundary would contain that write; an eager copy does not. To find such writes, checksums of the tensor are taken right
after its update and compared with the tensor at the boundary: for the first eager copies of each tensor, later for the
first parameter and one other in turn. If one differs, all eager copies of this checkpoint are compared with their
tensors. A tensor that differs is copied again, and never eagerly from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lightck.pipeline.sources import Signature, signature_of
from lightck.pipeline.write_table import NO_RECORDS, WriteTable, WriteTableCache
from lightck.pool.slots import Slot
from lightck.pool.writer import Reservation
from lightck.state.blocks import checksums
from lightck.state.inventory import Live

EAGER_JOBS_MAX = 6
"""The most jobs for the eager copies of one checkpoint."""
EAGER_JOB_NBYTES_MIN = 4 << 20
"""Updated layers are gathered until they have at least this many bytes before a job begins for them. In a larger
checkpoint they are gathered until they are an ``EAGER_JOBS_MAX``-th part of it."""
CHECKED_COPIES_MIN = 3
"""How many eager copies of a tensor are checked with checksums before only the signature is compared."""


class EagerCopies:
    """The eager copies of the next checkpoint. ``check``: compare all of them with their tensors each time."""

    def __init__(self, check: bool = False) -> None:
        self._begun: _UpdateCopies | None = None
        """Those of the present update; None before its first layer."""
        self._check = check
        self._n_checked: dict[str, int] = {}
        """How many eager copies of this tensor were checked with checksums."""
        self._turn = 0
        self._n_params = 0
        """How many parameters the last checkpoint copied eagerly."""
        self._not_eager: set[str] = set()
        """Names of tensors that the loop writes to after their update."""

    def wants_slot(self, tables: WriteTableCache) -> bool:
        """Whether eager copies could begin now and have no slot yet."""
        return self._begun is None and tables.cached is not None and bool(tables.cached.background)

    def begin(self, tables: WriteTableCache, slot: Slot) -> None:
        """Reserve this slot for the next checkpoint. Call only if ``wants_slot``."""
        assert tables.cached is not None
        self._begun = _UpdateCopies(tables, slot, tables.cached, self._needs_checksums)

    def copy(self, tensors: Iterable[torch.Tensor], jobs_max: int) -> None:
        """Begin to copy tensors that are updated already, if a slot is reserved. ``jobs_max``: how many jobs of the
        engine this checkpoint may take besides the one that commits it."""
        if self._begun is not None:
            self._begun.add(tensors, min(jobs_max, EAGER_JOBS_MAX), self._not_eager)

    def _needs_checksums(self, name: str, nth: int | None) -> bool:
        """Whether checksums check the eager copy of this tensor. ``nth``: its place among the parameters of its
        checkpoint, from 0 (None: it is no parameter)."""
        in_turn = nth is not None and nth in (0, self._turn % max(self._n_params, 1))
        return self._check or in_turn or self._n_checked.get(name, 0) < CHECKED_COPIES_MIN

    @property
    def reservation(self) -> Reservation | None:
        return None if self._begun is None else self._begun.reservation

    def reusable(self, background: Sequence[Live], numbers: Sequence[int]) -> tuple[npt.NDArray[np.int64], int]:
        """The record numbers whose eager copies the checkpoint can use, and how many eager copies it cannot use. If
        there are any of the latter, this waits for all eager copies, so that none can overwrite the copy that replaces
        it. ``background``: the tensors that the checkpoint copies in the background; ``numbers``: their record
        numbers."""
        if self._begun is None:
            return NO_RECORDS, 0
        begun = self._begun
        good = begun.with_same_signature(dict(zip(numbers, background, strict=True)))
        wrong = self._wrong(begun, good)
        good = [one for one in good if one not in wrong]
        n_unusable = begun.count - len(good)
        if n_unusable:
            begun.reservation.wait()
        return np.array([one.number for one in good], np.int64), n_unusable

    def _wrong(self, begun: _UpdateCopies, copies: Sequence[_Copy]) -> set[_Copy]:
        """The copies that hold other bytes than their tensors do now, as far as checksums were taken. Such a tensor was
        written after its update (``written``), or while it was copied."""
        self._turn += 1
        self._n_params = begun.n_params
        now: dict[_Copy, npt.NDArray[np.uint32]] = {}
        written: set[_Copy] = set()
        for one in copies:
            if one.crcs is not None:
                now[one] = begun.checksums_now(one)
                self._n_checked[one.name] = self._n_checked.get(one.name, 0) + 1
                if not np.array_equal(one.crcs, now[one]):
                    written.add(one)
        if written:
            now |= {one: begun.checksums_now(one) for one in copies if one not in now}
        wrong = written | begun.differing(now)
        self._not_eager.update(one.name for one in wrong)
        return wrong

    def wait(self) -> None:
        """Help to copy until no eager copy runs."""
        if self._begun is not None:
            self._begun.reservation.wait()

    def taken(self) -> None:
        """Hand the slot over to the checkpoint of these copies, which has begun."""
        self._begun = None

    def drop(self) -> None:
        """Cancel the eager copies and free their slot."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.reservation.drop()


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """A tensor whose eager copy has begun, with its signature and perhaps its checksums right after its update."""

    name: str
    number: int
    tensor: torch.Tensor
    signature: Signature
    crcs: npt.NDArray[np.uint32] | None


class _UpdateCopies:
    """The eager copies of one update. ``needs_checksums``: ``EagerCopies._needs_checksums``."""

    def __init__(
        self, tables: WriteTableCache, slot: Slot, table: WriteTable, needs_checksums: Callable[[str, int | None], bool]
    ) -> None:
        self.reservation = tables.writer.reservation(slot)
        self._tables, self._writer, self._table = tables, tables.writer, table
        self._needs_checksums = needs_checksums
        self.n_params = 0
        self._waiting: dict[int, _Copy] = {}
        """Updated tensors that no job copies yet, by record number."""
        self._waiting_nbytes = 0
        background_nbytes = sum(live.tensor.nbytes for live in table.background)
        self._job_nbytes = max(EAGER_JOB_NBYTES_MIN, background_nbytes // EAGER_JOBS_MAX)
        self._copies: dict[int, _Copy] = {}
        self._updated_again: set[int] = set()
        """Records of tensors that were updated once more after their copy began."""

    @property
    def count(self) -> int:
        return len(self._copies)

    def add(self, tensors: Iterable[torch.Tensor], jobs_max: int, not_eager: set[str]) -> None:
        """Copy tensors that are updated and will not change before the checkpoint is committed or dropped."""
        for tensor in tensors:
            found = self._table.background_of(tensor)
            if found is None or found[0].name in not_eager or not self._tables.describes(*found):
                continue
            live, number = found
            if number in self._copies:
                self._updated_again.add(number)
            else:
                self._waiting[number] = self._copy_of(live, number)
                self._waiting_nbytes += tensor.nbytes
        if self._waiting_nbytes >= self._job_nbytes and len(self.reservation.parts) < jobs_max:
            self._begin()

    def _copy_of(self, live: Live, number: int) -> _Copy:
        is_param = live.role == "param"
        is_checked = self._needs_checksums(live.name, self.n_params if is_param else None)
        self.n_params += is_param
        crcs = checksums(live.tensor, self._writer.superblock.block) if is_checked else None
        return _Copy(live.name, number, live.tensor, signature_of(live.tensor), crcs)

    def _begin(self) -> None:
        waiting, self._waiting, self._waiting_nbytes = self._waiting, {}, 0
        addresses = [one.signature[1][0] for one in waiting.values()]  # the first item of each memory layout
        # No tensor has moved since the table was computed, so the memory that the table keeps alive is theirs.
        if self.reservation.copy(list(waiting), addresses, self._table.keep_alive):
            self._copies |= waiting

    def with_same_signature(self, background: dict[int, Live]) -> list[_Copy]:
        """The copies of tensors of the checkpoint whose signatures are unchanged. ``background``: by record number."""
        return [
            one
            for number, one in self._copies.items()
            if number not in self._updated_again
            and number in background
            and background[number].tensor is one.tensor
            and signature_of(one.tensor) == one.signature
        ]

    def checksums_now(self, one: _Copy) -> npt.NDArray[np.uint32]:
        """The checksums of the bytes that the tensor holds now."""
        return checksums(one.tensor, self._writer.superblock.block)

    def differing(self, now: Mapping[_Copy, npt.NDArray[np.uint32]]) -> set[_Copy]:
        """The copies whose bytes do not have the given checksums. Waits for the copies."""
        if not now:
            return set()
        self.reservation.wait()
        slot = self.reservation.slot
        return {one for one, crcs in now.items() if not np.array_equal(self._writer.raw_crcs(slot, one.number), crcs)}
