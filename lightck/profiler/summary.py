"""A trace in numbers: for each step its stall, the share of copies that overlapped computation, and its commit."""

from __future__ import annotations

import heapq
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lightck.profiler.events import (
    BACKWARD,
    COMMIT,
    COMMUNICATION,
    COPY,
    FORWARD,
    STALL,
    TRAINER_COPY,
    UPDATE,
    Event,
    Trace,
)

Intervals = list[tuple[int, int]]
"""(begin, end) in nanoseconds."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The figures of one step. Times are in milliseconds, sizes in bytes. A time is the part of the step in which at
    least one event of its kind ran."""

    step: int
    time_ms: float
    forward_ms: float
    backward_ms: float
    communication_ms: float
    update_ms: float
    stall_ms: float
    """The time that lightck took on the training thread."""
    copy_ms: float
    """The wall time in which at least one thread copied."""
    overlap: float | None
    """The share of ``copied_nbytes`` that copy threads copied during forward, backward, communication or update; None
    if nothing was copied. The share is one of bytes and not of time, because a copy thread of idle priority may wait
    long for a processor while it copies a block."""
    copied_nbytes: int
    """The bytes of the copies that ended in the step."""
    helped_nbytes: int
    """The part of ``copied_nbytes`` that the training thread copied: at the boundary, or while it waited for copy
    threads. (``helped`` of an event is True for the second kind only.)"""
    commit_ms: float
    """The time in which a manifest was written, data were synced, or a commit record was written."""


def facts(trace: Trace) -> list[StepFacts]:
    """Return the figures of every step in the trace, ordered by step number."""
    found = [_facts(overlapping, number, step) for number, step, overlapping in _by_step(trace)]
    return sorted(found, key=lambda each: each.step)


def _by_step(trace: Trace) -> Iterator[tuple[int, Event, list[Event]]]:
    """Yield for each step its number, its event, and the events that overlap it in time, ordered by begin.

    This is one sweep over steps and events. A heap, ordered by end, keeps the events that began before the step and may
    overlap it. Without the heap, one event as long as the whole trace would make every step visit all events."""
    events = trace.events
    begins = [event.begin for event in events]
    lasting: list[tuple[int, int]] = []  # (end, index) of events that began before the step
    at = 0  # index of the first event that does not begin before the step
    for number, step in sorted(trace.steps().items(), key=lambda item: item[1].begin):
        while at < len(events) and begins[at] < step.begin:
            heapq.heappush(lasting, (events[at].end, at))
            at += 1
        while lasting and lasting[0][0] <= step.begin:
            heapq.heappop(lasting)
        places = [*sorted(place for _, place in lasting), *range(at, bisect_left(begins, step.end))]
        yield number, step, [events[place] for place in places if events[place].end > step.begin]


def median_step(steps: Sequence[StepFacts]) -> StepFacts | None:
    """Return the step whose time is the median of all step times (if there are two middle times, the lower one). Return
    None if there are no steps."""
    if not steps:
        return None
    middle = statistics.median_low(step.time_ms for step in steps)
    return next(step for step in steps if step.time_ms == middle)


def _facts(overlapping: Sequence[Event], number: int, step: Event) -> StepFacts:
    """Return the figures of step ``number``, whose event is ``step``. ``overlapping``: the events that overlap the step
    in time."""

    def union(*rows: str) -> Intervals:
        """Return the intervals of the step in which at least one event of these rows runs."""
        return united((max(e.begin, step.begin), min(e.end, step.end)) for e in overlapping if e.row in rows)

    threads = sorted({event.row for event in overlapping if event.row.startswith(COPY)})
    copying = union(TRAINER_COPY, *threads)
    compute = union(FORWARD, BACKWARD, COMMUNICATION, UPDATE)
    by_threads, by_trainer = _nbytes(overlapping, step, *threads), _nbytes(overlapping, step, TRAINER_COPY)
    overlapped = sum(_share(e, compute) * e.args.get("bytes", 0) for e in _ended(overlapping, step, *threads))
    copied = by_threads + by_trainer
    return StepFacts(
        step=number,
        time_ms=ms(step.end - step.begin),
        forward_ms=ms(length(union(FORWARD))),
        backward_ms=ms(length(union(BACKWARD))),
        communication_ms=ms(length(union(COMMUNICATION))),
        update_ms=ms(length(union(UPDATE))),
        stall_ms=ms(length(union(STALL))),
        copy_ms=ms(length(copying)),
        overlap=round(overlapped / copied, 4) if copied else None,
        copied_nbytes=copied,
        helped_nbytes=by_trainer,
        commit_ms=ms(length(union(COMMIT))),
    )


def ms(ns: int) -> float:
    """Return nanoseconds as milliseconds."""
    return round(ns / 1e6, 4)


def _ended(events: Iterable[Event], step: Event, *rows: str) -> list[Event]:
    """Return the copies in these rows that ended in the step. Events for which ``is_part`` is true are left out,
    because another event contains them."""
    return [e for e in events if e.row in rows and step.begin < e.end <= step.end and not is_part(e)]


def _nbytes(events: Iterable[Event], step: Event, *rows: str) -> int:
    return sum(event.args.get("bytes", 0) for event in _ended(events, step, *rows))


def _share(event: Event, others: Intervals) -> float:
    """Return the share of an event's time that lies in the intervals ``others``, which are ordered and do not overlap
    each other."""
    first = bisect_left(others, event.begin, key=lambda other: other[1])
    if event.end <= event.begin:
        return float(first < len(others) and others[first][0] <= event.begin)
    near = others[first : bisect_left(others, event.end, key=lambda other: other[0])]
    return length(common([(event.begin, event.end)], near)) / (event.end - event.begin)


def is_part(event: Event) -> bool:
    """Whether the event is a copy of one tensor at the boundary. Its bytes and time are contained in the event "at
    once", which stands for all copies at this boundary.

    All other events of tensors in this row are copies with which the training thread helps the copy threads while it
    waits for them: their ``helped`` is True."""
    return event.row == TRAINER_COPY and event.args.get("helped") is False


def united(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """Return the union of the intervals, as ordered intervals that do not overlap."""
    found: Intervals = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def common(one: Intervals, other: Intervals) -> Intervals:
    """Return the intersection of two lists; the intervals of each list are ordered and do not overlap."""
    found: Intervals = []
    i = j = 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Intervals) -> int:
    """Return the sum of the lengths of the intervals, in nanoseconds."""
    return sum(end - begin for begin, end in intervals)
