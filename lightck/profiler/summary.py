"""What a trace says in numbers: for each step its stall, how much of the copying ran beside the compute, its commit."""

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
    """One step. Times in milliseconds, sizes in bytes."""

    step: int
    time_ms: float
    forward_ms: float
    backward_ms: float
    communication_ms: float
    update_ms: float
    stall_ms: float
    """What lightck took of the training thread."""
    copy_ms: float
    """Wall time in which at least one thread copied."""
    overlap: float | None
    """The share of the bytes that copy threads copied beside forward, backward, communication or update; None: no copy.
    Of bytes, not of time: a copy thread of idle priority may hold a block for long without a processor."""
    copied_nbytes: int
    helped_nbytes: int
    """The part of them that the training thread copied."""
    commit_ms: float
    """Manifest, sync and commit line."""


def facts(trace: Trace) -> list[StepFacts]:
    """Of every whole step, in order."""
    found = [_facts(inside, number, step) for number, step, inside in _by_step(trace)]
    return sorted(found, key=lambda each: each.step)


def _by_step(trace: Trace) -> Iterator[tuple[int, Event, list[Event]]]:
    """Number and event of each step, and the events that have time in common with it, in their order.

    One sweep over both, since a trace has as many events and steps as it likes: what began before a step is kept in a
    heap by its end, so that one event as long as the whole trace does not make every step look at all of them."""
    events = trace.events
    begins = [event.begin for event in events]
    lasting: list[tuple[int, int]] = []  # end and place of what began before the step
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
    """The one whose time is the (lower) median."""
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
    beside = sum(_share(e, compute) * e.args.get("bytes", 0) for e in _ended(inside, step, *threads))
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
        round(beside / copied, 4) if copied else None,
        copied,
        by_trainer,
        ms(length(union(COMMIT))),
    )


def ms(ns: int) -> float:
    return round(ns / 1e6, 4)


def _ended(events: Iterable[Event], step: Event, *rows: str) -> list[Event]:
    """The copies that ended in the step; what was copied at once is one of them, and its parts are none."""
    return [e for e in events if e.row in rows and step.begin < e.end <= step.end and not is_part(e)]


def _nbytes(events: Iterable[Event], step: Event, *rows: str) -> int:
    return sum(event.args.get("bytes", 0) for event in _ended(events, step, *rows))


def _share(event: Event, others: Intervals) -> float:
    """How much of it lies in the others, which are united."""
    first = bisect_left(others, event.begin, key=lambda other: other[1])
    if event.end <= event.begin:
        return float(first < len(others) and others[first][0] <= event.begin)
    near = others[first : bisect_left(others, event.end, key=lambda other: other[0])]
    return length(common([(event.begin, event.end)], near)) / (event.end - event.begin)


def is_part(event: Event) -> bool:
    """Whether the event lies within the one that stands for all that was copied at the boundary."""
    return event.row == HELPED and event.args.get("helped") is False


def united(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """Ordered, and without overlap."""
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
    """What lies in both; each is united."""
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
