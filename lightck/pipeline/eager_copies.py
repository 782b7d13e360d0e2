"""Eager copies begin before the boundary: a layer that is updated already is copied while others are still to come.

A layer-wise update (``hooks/layerwise.py``) reports which tensors are updated. Those that the last checkpoint copied in
the background are collected until they fill a job of the engine (``EAGER_JOB_NBYTES_MIN``), which copies them into the
slot of the next checkpoint. Tensors that fill no job are copied after the boundary. At the boundary an eager copy is
used if the tensor is the same object with the same signature. Otherwise the tensor is copied again.

A loop may write to a parameter after its update without moving its version counter (``p.data.clamp_``). A copy at the
boundary would contain that write; an eager copy does not. To find such writes, checksums of a tensor are computed right
after its update, and compared with the tensor at the boundary. This is done for the first ``CHECKED_COPIES_MIN`` eager
copies of each tensor. Later it is done for the first parameter of each update, and in turn for one other parameter. If
one tensor differs, all eager copies of this checkpoint are compared with their tensors. A tensor that differs is copied
again, and is never copied eagerly from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lightck.pipeline.sources import Signature, signature_of
from lightck.pipeline.write_table import NO_RECORDS, WriteTable, WriteTableCache
from lightck.pool.reservation import Reservation
from lightck.pool.slots import Slot
from lightck.state.blocks import checksums
from lightck.state.inventory import Live, address_of

EAGER_JOBS_MAX = 6
"""The largest number of the engine's jobs that make the eager copies of one checkpoint."""
EAGER_JOB_NBYTES_MIN = 4 << 20
"""A job begins when the updated tensors that wait for a job have at least ``EAGER_JOB_NBYTES_MIN`` bytes, and at least
the ``EAGER_JOBS_MAX``-th part of the bytes that a checkpoint copies in the background."""
CHECKED_COPIES_MIN = 3
"""The first ``CHECKED_COPIES_MIN`` eager copies of each tensor are checked with checksums. Later ones are checked by
their signatures, and those of two parameters of each update also with checksums (``EagerCopies._needs_checksums``)."""


class EagerCopies:
    """The eager copies of the next checkpoint. ``check``: check every eager copy with checksums."""

    def __init__(self, check: bool = False) -> None:
        self._begun: _UpdateCopies | None = None
        """The eager copies of the present update. None before the first layer of the update is updated, and while no
        slot is reserved for the next checkpoint."""
        self._check = check
        self._n_checked: dict[str, int] = {}
        """Name of a tensor -> number of its eager copies that were checked with checksums."""
        self._turn = 0
        """Number of checkpoints with eager copies; it chooses the parameter that is checked in turn."""
        self._n_params = 0
        """Number of parameters that the last checkpoint copied eagerly."""
        self._not_eager: set[str] = set()
        """Names of tensors that are never copied eagerly, because the loop once wrote to them after their update."""

    def wants_slot(self, tables: WriteTableCache) -> bool:
        """Whether eager copies could begin now and have no slot yet."""
        return self._begun is None and tables.cached is not None and bool(tables.cached.background)

    def begin(self, tables: WriteTableCache, slot: Slot) -> None:
        """Reserve this slot for the next checkpoint. Call only if ``wants_slot``."""
        assert tables.cached is not None
        self._begun = _UpdateCopies(tables, slot, tables.cached, self._needs_checksums)

    def copy(self, tensors: Iterable[torch.Tensor], jobs_max: int) -> None:
        """Begin to copy tensors that are updated already, if a slot is reserved. ``jobs_max``: how many jobs of the
        engine the next checkpoint may use besides the job that commits it."""
        if self._begun is not None:
            self._begun.add(tensors, min(jobs_max, EAGER_JOBS_MAX), self._not_eager)

    def _needs_checksums(self, name: str, nth: int | None) -> bool:
        """Whether the eager copy of this tensor is checked with checksums. ``nth``: number of parameters that were
        updated before this one in the same step (None: the tensor is no parameter)."""
        has_turn = nth is not None and nth in (0, self._turn % max(self._n_params, 1))
        return self._check or has_turn or self._n_checked.get(name, 0) < CHECKED_COPIES_MIN

    @property
    def reservation(self) -> Reservation | None:
        return None if self._begun is None else self._begun.reservation

    @property
    def nbytes_stored(self) -> int:
        """How many bytes the eager copies of the present update have stored so far."""
        return 0 if self._begun is None else self._begun.reservation.nbytes_stored

    def reusable(self, background: Sequence[Live], numbers: Sequence[int]) -> tuple[npt.NDArray[np.int64], int]:
        """Return the record numbers of the eager copies that the checkpoint can use, and the number of eager copies
        that it cannot use. The caller copies a tensor with an unusable copy again, to the same place. If there is such
        a copy, this method first waits until all eager copies have ended, so that none overwrites a new copy.
        ``background``: the tensors that the checkpoint copies in the background. ``numbers``: the record numbers of
        these tensors."""
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
        """Return the wrong copies. A copy with checksums is wrong if the tensor no longer holds the bytes that it held
        right after its update, or if the slot holds other bytes than the tensor. In the first case something wrote to
        the tensor after its update. Then the copies without checksums are also compared with their tensors."""
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
        """Wait until no eager copy is running, and help to copy meanwhile."""
        if self._begun is not None:
            self._begun.reservation.wait()

    def taken(self) -> None:
        """Forget the slot and its copies: the checkpoint that they belong to has begun, and owns them now."""
        self._begun = None

    def drop(self) -> None:
        """Cancel the eager copies and free their slot."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.reservation.drop()


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """The eager copy of one tensor. ``number``: the tensor's record number. ``signature``, ``crcs``: the signature and
    the checksums of the tensor right after its update; ``crcs`` is None if the copy is not checked with checksums."""

    name: str
    number: int
    live: Live
    signature: Signature
    crcs: npt.NDArray[np.uint32] | None


class _UpdateCopies:
    """The eager copies of one update. ``needs_checksums``: ``EagerCopies._needs_checksums``."""

    def __init__(
        self, tables: WriteTableCache, slot: Slot, table: WriteTable, needs_checksums: Callable[[str, int | None], bool]
    ) -> None:
        self.reservation = tables.writer.reserve(slot)
        self._tables, self._writer, self._table = tables, tables.writer, table
        self._needs_checksums = needs_checksums
        self.n_params = 0
        """Number of parameters that were added."""
        self._waiting: dict[int, _Copy] = {}
        """Record number -> updated tensor that no job copies yet."""
        self._waiting_nbytes = 0
        background_nbytes = sum(live.written.nbytes for live in table.background)
        self._job_nbytes = max(EAGER_JOB_NBYTES_MIN, background_nbytes // EAGER_JOBS_MAX)
        self._copies: dict[int, _Copy] = {}
        """Record number -> copy that a job has begun."""
        self._updated_again: set[int] = set()
        """Record numbers of tensors that were updated once more after their copy began."""

    @property
    def count(self) -> int:
        return len(self._copies)

    def add(self, tensors: Iterable[torch.Tensor], jobs_max: int, not_eager: set[str]) -> None:
        """Copy updated tensors. A tensor is left out if the last checkpoint did not copy it in the background, if its
        record no longer describes it, or if its name is in ``not_eager``."""
        for tensor in tensors:
            found = self._table.background_of(tensor)
            if found is None or found[0].name in not_eager or not self._tables.describes(*found):
                continue
            live, number = found
            if number in self._copies:
                self._updated_again.add(number)
            else:
                self._waiting[number] = self._copy_of(live, number)
                self._waiting_nbytes += live.written.nbytes
        if self._waiting_nbytes >= self._job_nbytes and len(self.reservation.parts) < jobs_max:
            self._begin()

    def _copy_of(self, live: Live, number: int) -> _Copy:
        is_param = live.role == "param"
        is_checked = self._needs_checksums(live.name, self.n_params if is_param else None)
        self.n_params += is_param
        crcs = checksums(live.written, self._writer.superblock.block) if is_checked else None
        return _Copy(live.name, number, live, signature_of(live), crcs)

    def _begin(self) -> None:
        waiting, self._waiting, self._waiting_nbytes = self._waiting, {}, 0
        addresses = [address_of(one.live.written) for one in waiting.values()]
        # No tensor has moved since the table was computed, so ``keep_alive`` holds the memory of these tensors.
        if self.reservation.copy(list(waiting), addresses, self._table.keep_alive):
            self._copies |= waiting

    def with_same_signature(self, background: dict[int, Live]) -> list[_Copy]:
        """Return the copies whose tensors are still part of the checkpoint, were updated only once, and have the same
        signature as after the update. ``background``: record number -> tensor of the checkpoint."""
        return [
            one
            for number, one in self._copies.items()
            if number not in self._updated_again
            and number in background
            and background[number].tensor is one.live.tensor
            and signature_of(one.live) == one.signature
        ]

    def checksums_now(self, one: _Copy) -> npt.NDArray[np.uint32]:
        """The checksums of the bytes that the tensor holds now."""
        return checksums(one.live.written, self._writer.superblock.block)

    def differing(self, now: Mapping[_Copy, npt.NDArray[np.uint32]]) -> set[_Copy]:
        """Return the copies whose bytes in the slot do not have these checksums. Wait first until all eager copies have
        ended. ``now``: copy -> checksums of its tensor at the boundary."""
        if not now:
            return set()
        self.reservation.wait()
        slot = self.reservation.slot
        return {one for one, crcs in now.items() if not np.array_equal(self._writer.raw_crcs(slot, one.number), crcs)}
