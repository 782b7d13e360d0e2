"""A trace in numbers: for each step its stall, the share of copies that overlapped computation, and its commit."""

from __future__ import annotations

import heapq
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lightck.profiler.events import BACKWARD, COMMIT, COMMUNICATION, COPY, FORWARD, HELPED, STALL, UPDATE, Event, Trace

Intervals = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The figures of one step. Times are milliseconds, sizes bytes."""

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
    """The share of the copied bytes that copy threads copied during forward, backward, communication or update; None if
    nothing was copied. A share of bytes and not of time, because a copy thread of idle priority may wait long for a
    processor while it copies a block."""
    copied_nbytes: int
    helped_nbytes: int
    """The copied bytes that the training thread copied itself."""
    commit_ms: float
    """The time for manifest, sync and commit record."""


def facts(trace: Trace) -> list[StepFacts]:
    """The figures of every whole step, by step number."""
    found = [_facts(inside, number, step) for number, step, inside in _by_step(trace)]
    return sorted(found, key=lambda each: each.step)


def _by_step(trace: Trace) -> Iterator[tuple[int, Event, list[Event]]]:
    """For each step its number, its event, and the events that overlap it, in their order. This is one sweep over steps
    and events. A heap, ordered by end, keeps the events that began before the step, so that one event as long as the
    whole trace does not make every step visit all events."""
    events = trace.events
    begins = [event.begin for event in events]
    lasting: list[tuple[int, int]] = []  # end and index of the events that began before the step
    at = 0
    for number, step in sorted(trace.steps().items(), key=lambda item: item[1].begin):
        while at < len(events) and begins[at] < step.begin:
            heapq.heappush(lasting, (events[at].end, at))
            at += 1
        while lasting and lasting[0][0] <= step.begin:
            heapq.heappop(lasting)
        places = [*sorted(place for _, place in lasting), *range(at, bisect_left(begins, step.end))]
        yield number, step, [events[place] for place in places if events[place].end > step.begin]


def median_step(steps: Sequence[StepFacts]) -> StepFacts | None:
    """The step whose time is the (lower) median of all step times."""
    if not steps:
        return None
    middle = statistics.median_low(step.time_ms for step in steps)
    return next(step for step in steps if step.time_ms == middle)


def _facts(inside: Sequence[Event], number: int, step: Event) -> StepFacts:
    def union(*rows: str) -> Intervals:
        return united((max(e.begin, step.begin), min(e.end, step.end)) for e in inside if e.row in rows)

    threads = sorted({event.row for event in inside if event.row.startswith(COPY)})
    copying = union(HELPED, *threads)
    compute = union(FORWARD, BACKWARD, COMMUNICATION, UPDATE)
    by_threads, by_trainer = _nbytes(inside, step, *threads), _nbytes(inside, step, HELPED)
    overlapped = sum(_share(e, compute) * e.args.get("bytes", 0) for e in _ended(inside, step, *threads))
    copied = by_threads + by_trainer
    return StepFacts(
        number,
        ms(step.end - step.begin),
        ms(length(union(FORWARD))),
        ms(length(union(BACKWARD))),
        ms(length(union(COMMUNICATION))),
        ms(length(union(UPDATE))),
        ms(length(union(STALL))),
        ms(length(copying)),
        round(overlapped / copied, 4) if copied else None,
        copied,
        by_trainer,
        ms(length(union(COMMIT))),
    )


def ms(ns: int) -> float:
    """Nanoseconds as milliseconds."""
    return round(ns / 1e6, 4)


def _ended(events: Iterable[Event], step: Event, *rows: str) -> list[Event]:
    """The copies that ended in the step. All copies at the boundary count as one event, and its parts do not count."""
    return [e for e in events if e.row in rows and step.begin < e.end <= step.end and not is_part(e)]


def _nbytes(events: Iterable[Event], step: Event, *rows: str) -> int:
    return sum(event.args.get("bytes", 0) for event in _ended(events, step, *rows))


def _share(event: Event, others: Intervals) -> float:
    """The share of an event's time that lies in the other intervals, which are ordered and do not overlap."""
    first = bisect_left(others, event.begin, key=lambda other: other[1])
    if event.end <= event.begin:
        return float(first < len(others) and others[first][0] <= event.begin)
    near = others[first : bisect_left(others, event.end, key=lambda other: other[0])]
    return length(common([(event.begin, event.end)], near)) / (event.end - event.begin)


def is_part(event: Event) -> bool:
    """Whether the event is a single copy at the boundary, which the event for all copies at the boundary contains."""
    return event.row == HELPED and event.args.get("helped") is False


def united(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """The union of the intervals, as ordered intervals without overlap."""
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
    """The intersection of two lists of ordered intervals without overlap."""
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
    return sum(end - begin for begin, end in intervals)
