"""Tensors on a device on their way into the pool: by pinned host memory, while the device computes (LightCheck-C).

    boundary   a draft of the version; its tensors in groups, a held job of the engine for each; what the next kernels
               will change is sent in their order; the device's work so far is marked
    pump       (a thread) group after group: host memory free -> sent after the mark -> arrived -> job started
    engine     copies the group from host memory into the slot

Invariant: a group's host memory is written only while no job reads from it, and its job reads only what has arrived.
The gate is as ever: it waits until all is copied, so no update is even queued while a group is under way.
What fails on the way fails the version, which is then never committed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightck.capture.lanes import Arrival, Lane
from lightck.errors import BackgroundError
from lightck.pool.draft import Draft
from lightck.pool.engine import Job
from lightck.pool.slots import Slot
from lightck.pool.writer import PoolWriter
from lightck.split import NONE, Split, Staged
from lightck.stats import Meter

log = logging.getLogger("lightck")

GROUPS_MAX = 6
"""Jobs for what one version sends beside the computation."""
GROUP_NBYTES_MIN = 16 << 20
SEGMENTS = 2
"""Pieces of host memory: while one is copied from, the other is filled."""
ALIGN = 64
_LOOK_SECONDS = 0.0005


@dataclass(slots=True)
class _Segment:
    """A piece of host memory, who reads it, and what is on its way into it."""

    memory: torch.Tensor
    reader: Job | None = None
    arrivals: list[Arrival] = field(default_factory=list)

    @property
    def is_read(self) -> bool:
        return self.reader is not None and self.reader.needs_sources


class _Ring:
    """Segments in turn. One that has become too small is left to who still reads it."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._turn = 0

    def next(self, lane: Lane, nbytes: int) -> _Segment:
        self._turn += 1
        at = self._turn % SEGMENTS
        if len(self._segments) < SEGMENTS:
            self._segments = [_Segment(_host_memory(lane, nbytes)) for _ in range(SEGMENTS)]
        if self._segments[at].memory.numel() < nbytes:
            self._segments[at] = _Segment(_host_memory(lane, nbytes))
        return self._segments[at]


@dataclass(slots=True)
class _Group:
    """Tensors that travel together, and the job that waits for them. ``sent``: they are on their way already."""

    tensors: list[Staged]
    sources: list[torch.Tensor]
    """Of their memory as it was at the boundary, also where .data is replaced meanwhile."""
    offsets: list[int]
    segment: _Segment
    job: Job
    sent: bool = False

    def pairs(self) -> dict[Lane, list[tuple[torch.Tensor, torch.Tensor]]]:
        """By lane: places in host memory, and the tensors that go there."""
        found: dict[Lane, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for one, source, at in zip(self.tensors, self.sources, self.offsets, strict=True):
            place = self.segment.memory[at : at + one.record.nbytes]
            found.setdefault(one.lane, []).append((place, source))
        return found


class Staging:
    """Of one session. ``is_on`` False: tensors on devices are copied at the boundary itself."""

    def __init__(self, meter: Meter, *, is_on: bool = True) -> None:
        self.is_on = is_on
        self._meter = meter
        self._ring, self._in_order = _Ring(), _Ring()
        self._pump: _Pump | None = None

    @contextmanager
    def sending(self, writer: PoolWriter, slot: Slot, split: Split, draft: Draft | None,
                room: int) -> Iterator[tuple[Draft | None, npt.NDArray[np.int64]]]:  # fmt: skip
        """Send what a version has on devices, while it is begun: its draft, and the numbers of the records that are
        under way. What finds no room in the engine (``room`` jobs) is copied at the boundary itself. A draft that was
        made here is given up where the version cannot be begun."""
        if not self.is_on or not split.staged:
            split.copy_at_once(split.staged)
            yield draft, NONE
            return
        own = draft or writer.draft(slot)
        try:
            yield own, self._send(own, split, room)
        except BaseException:
            if own is not draft:
                own.drop()
            raise

    def _send(self, draft: Draft, split: Split, room: int) -> npt.NDArray[np.int64]:
        try:
            groups, left = self._groups(draft, split.staged, room)
            split.copy_at_once(left)
            self._start(groups)
        except RuntimeError as err:
            raise BackgroundError(
                f"A checkpoint could not be begun: tensors did not leave their device ({err}). The versions committed "
                "before are intact. Look at the device (its log, its memory), then start again with resume=True."
            ) from err
        split.follow([one for group in groups if not group.sent for one in group.tensors])
        return np.array([one.record.number for group in groups for one in group.tensors], np.int64)

    def _groups(self, draft: Draft, staged: Sequence[Staged], room: int) -> tuple[list[_Group], list[Staged]]:
        """Groups whose jobs are submitted, held; and what is left."""
        in_order = [one for one in staged if one.in_order]
        later = [one for one in staged if not one.in_order]
        parts = _parted(later, min(room - bool(in_order), GROUPS_MAX))
        plans = ([(in_order, True)] if in_order else []) + [(part, False) for part in parts]
        if room < 1 or (later and not parts):
            return [], list(staged)
        nbytes = max((_laid_out(part)[1] for part in parts), default=0)
        groups: list[_Group] = []
        for number, (tensors, sent) in enumerate(plans):
            ring, needed = (self._in_order, _laid_out(tensors)[1]) if sent else (self._ring, nbytes)
            group = _submitted(draft, tensors, ring.next(tensors[0].lane, needed), sent)
            if group is None:
                return groups, [one for rest, _ in plans[number:] for one in rest]
            groups.append(group)
        return groups, []

    def _start(self, groups: list[_Group]) -> None:
        """On the training thread: sends what must go in order, marks what the device has to do, and leaves the rest."""
        if not groups:
            return
        lanes = {one.lane for group in groups for one in group.tensors}
        for group in groups:
            if group.sent:
                _free(group.segment)
                group.segment.reader = group.job
                group.segment.arrivals = [lane.send_in_order(pairs) for lane, pairs in group.pairs().items()]
        if self._pump is None:
            self._pump = _Pump(self._meter)
        self._pump.take(groups, {lane: lane.mark() for lane in lanes})

    def apart(self, work: Callable[..., None], *args: Any) -> None:
        """Call it, on a thread of its own where this one waits for devices: a collector ends a session anywhere, and
        what ends a session waits for that thread."""
        if self._pump is not None and self._pump.is_here:
            threading.Thread(target=work, args=args, name="lightck-end").start()
        else:
            work(*args)

    def close(self) -> None:
        """End the thread. No version may be begun afterwards; those that are under way go on to their end first."""
        pump, self._pump = self._pump, None
        if pump is not None:
            pump.end()
        self._ring, self._in_order = _Ring(), _Ring()


class _Pump:
    """The thread that waits for devices."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._tasks: SimpleQueue[tuple[list[_Group], dict[Lane, Arrival]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="lightck-staging", daemon=True)
        self._thread.start()

    def take(self, groups: list[_Group], marks: dict[Lane, Arrival]) -> None:
        self._tasks.put((groups, marks))

    @property
    def is_here(self) -> bool:
        """Whether this is the thread."""
        return threading.current_thread() is self._thread

    def end(self) -> None:
        """What was taken is brought to its end first."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            groups, marks = task
            cpu = time.thread_time()
            for group in groups:
                try:
                    group.tensors[0].lane.enter()
                    _bring(group, marks)
                except BaseException as err:
                    group.job.give_up(err)
            self._meter.staging_cpu_seconds += time.thread_time() - cpu
            del task, groups, group  # tensors are not kept until the next version


def _bring(group: _Group, marks: dict[Lane, Arrival]) -> None:
    """One group to its job, unless the version was given up."""
    if not group.sent:
        _free(group.segment)
        if not group.job.needs_sources:
            return
        group.segment.reader = group.job
        group.segment.arrivals = [lane.send(pairs, marks[lane]) for lane, pairs in group.pairs().items()]
    for arrival in group.segment.arrivals:
        arrival.synchronize()
    group.job.start()


def _free(segment: _Segment) -> None:
    """Wait until nobody reads the segment, and nothing of a version that was given up is on its way into it."""
    while segment.is_read:
        time.sleep(_LOOK_SECONDS)
    for arrival in segment.arrivals:
        arrival.synchronize()
    segment.arrivals = []


def _parted(tensors: Sequence[Staged], parts_max: int) -> list[list[Staged]]:
    """In their order, in at most so many parts of about one size."""
    if parts_max < 1:
        return []
    share = max(GROUP_NBYTES_MIN, -(-sum(one.record.nbytes for one in tensors) // parts_max))
    parts: list[list[Staged]] = []
    filled = share
    for one in tensors:
        if filled >= share:
            parts.append([])
            filled = 0
        parts[-1].append(one)
        filled += one.record.nbytes
    return parts


def _laid_out(tensors: Sequence[Staged]) -> tuple[list[int], int]:
    """Where each begins in a segment, and how long that has to be."""
    offsets, at = [], 0
    for one in tensors:
        offsets.append(at)
        at += -(-one.record.nbytes // ALIGN) * ALIGN
    return offsets, at


def _submitted(draft: Draft, tensors: list[Staged], segment: _Segment, sent: bool) -> _Group | None:
    """None where the engine has no room."""
    offsets, _ = _laid_out(tensors)
    base = segment.memory.data_ptr()
    sources = [one.live.tensor.detach() for one in tensors]
    records = [one.record.number for one in tensors]
    if not draft.copy(records, [base + at for at in offsets], (segment.memory, sources), held=True):
        return None
    return _Group(tensors, sources, offsets, segment, draft.parts[-1], sent)


def _host_memory(lane: Lane, nbytes: int) -> torch.Tensor:
    # A version may be closed inside an evaluation, or where another device is the default.
    with torch.inference_mode(False), torch.device("cpu"):
        try:
            return lane.memory(nbytes)
        except RuntimeError as err:
            log.info("lightck: %d bytes of host memory cannot be pinned (%s): devices write to it more slowly", nbytes,
                     err)  # fmt: skip
            return torch.empty(nbytes, dtype=torch.uint8)
