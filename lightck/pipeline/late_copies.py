"""Copies from stand-ins (``state/stand_ins.py``), whose bytes are complete only some time after the boundary.

At the boundary the checkpoint gets a reservation, and each group of stand-ins gets a job of the engine that waits for
its start, as each group of tensors on a device does. The group starts its job when it is complete. So the first groups
are copied while the last ones are not complete yet. Nothing but their maker writes to stand-ins, and so their
signatures are not watched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightck.errors import LightckError
from lightck.pipeline.submission import Submission
from lightck.pipeline.write_table import NO_RECORDS, TensorRecord
from lightck.pool.engine import Job
from lightck.pool.reservation import Reservation
from lightck.pool.slots import Slot
from lightck.pool.writer import PoolWriter
from lightck.state.inventory import Live, storage_of
from lightck.state.stand_ins import LateMemory


class Begun(NamedTuple):
    """The late copies of a checkpoint. reservation: its reservation, if there is one. numbers: the record numbers that
    are copied late. n_jobs: how many jobs do it."""

    reservation: Reservation | None
    numbers: npt.NDArray[np.int64]
    n_jobs: int


@dataclass(frozen=True, slots=True)
class _Part:
    """The tensors of one group, as arrays for a job."""

    group: LateMemory
    tensors: list[tuple[Live, TensorRecord]]
    numbers: npt.NDArray[np.int64]
    sources: npt.NDArray[np.uint64]
    memory: list[object]


class LateCopies:
    """The late copies of one pipeline."""

    def __init__(self) -> None:
        self._lists: list[list[tuple[Live, TensorRecord]]] = []
        """``WriteTable.late`` of the tables of the last checkpoint, for which ``_parts`` and ``_numbers`` were
        computed."""
        self._parts: list[_Part] = []
        self._numbers = NO_RECORDS

    def begin(
        self, writer: PoolWriter, slot: Slot, submission: Submission, reservation: Reservation | None, jobs_max: int
    ) -> Begun:
        """Begin the late copies of a checkpoint. If this raises, a reservation that was made here is dropped.
        ``reservation``: the reservation of the eager copies, or None. ``jobs_max``: the largest number of jobs to use.
        A group for which no job is left is waited for, and copied at the boundary."""
        if submission.has_late or self._parts:
            self._find_parts(submission)
        if not self._parts:
            return Begun(reservation, NO_RECORDS, 0)
        used = reservation or writer.reserve(slot)
        try:
            return self._begin(used, submission, jobs_max)
        except BaseException:
            if used is not reservation:
                used.drop()
            raise

    def _begin(self, reservation: Reservation, submission: Submission, jobs_max: int) -> Begun:
        begun: list[_Part] = []
        for part in self._parts:
            has_job = len(begun) < jobs_max and reservation.copy(
                part.numbers, part.sources, part.memory, waits_for_start=True
            )
            if has_job:
                begun.append(part)
                part.group.start_when_complete(partial(_start, reservation.parts[-1]))
            else:
                part.group.wait_complete()
                submission.copy_stand_ins_at_boundary(part.tensors)
        if len(begun) == len(self._parts):
            return Begun(reservation, self._numbers, len(begun))
        return Begun(reservation, np.concatenate([NO_RECORDS, *(part.numbers for part in begun)]), len(begun))

    def _find_parts(self, submission: Submission) -> None:
        """Compute the parts of a checkpoint, unless they are those of the last one. (If the writer gets the same
        array again, it reuses what it computed for it.)"""
        lists = [table.late for table in submission.plan.tables]
        if len(lists) == len(self._lists) and all(a is b for a, b in zip(lists, self._lists, strict=True)):
            return
        groups: dict[int, list[tuple[Live, TensorRecord]]] = {}
        for live, record in submission.plan.late:
            assert live.stand_in is not None, "tensors in ``WriteTable.late`` have stand-ins"
            groups.setdefault(id(live.stand_in.group), []).append((live, record))
        self._lists, self._parts = lists, [_part(tensors) for tensors in groups.values()]
        self._numbers = np.concatenate([NO_RECORDS, *(part.numbers for part in self._parts)])

    def close(self) -> None:
        """Wait until no job will be started any more. Call before the engine is closed."""
        for part in self._parts:
            part.group.wait_complete()
        self._lists, self._parts = [], []


def _start(job: Job) -> None:
    """Start a held job. If this fails, the checkpoint fails, and not the thread that completed the stand-ins."""
    try:
        job.start()
    except LightckError as err:
        job.fail(err)


def _part(tensors: Sequence[tuple[Live, TensorRecord]]) -> _Part:
    stand_ins = [live.stand_in for live, _ in tensors if live.stand_in is not None]
    return _Part(
        stand_ins[0].group,
        list(tensors),
        np.array([record.number for _, record in tensors], np.int64),
        np.array([one.tensor.data_ptr() for one in stand_ins], np.uint64),
        [storage_of(one.tensor) for one in stand_ins],
    )
