"""Bugs, planted into a trace: what the choke point would have recorded from a program that has them.

Each takes the events of one file and gives those of the program with the bug. The commit record of a checkpoint is its
body (56 bytes) and then its first word (8 bytes), both in the ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from crash.trace import PUBLISHED, Event, Fence, Flush, Mark, Store, Sync

from lightck import _native
from lightck.pool.format.structures import (
    COMMIT_RECORD_NBYTES,
    MANIFEST_MAGIC,
    RING_LINES,
    RING_OFFSET,
    RING_STRIDE,
    SLOT_ALIGN,
    SLOT_MAGIC,
    TABLE_OFFSET,
)


def is_body(event: Event) -> bool:
    return isinstance(event, Store) and in_ring(event) and len(event.data) == COMMIT_RECORD_NBYTES - 8


def is_word(event: Event) -> bool:
    return isinstance(event, Store) and in_ring(event) and len(event.data) == 8


def in_ring(event: Event) -> bool:
    return isinstance(event, Store) and RING_OFFSET <= event.offset < RING_OFFSET + RING_LINES * RING_STRIDE


def is_manifest(event: Event) -> bool:
    return isinstance(event, Store) and event.data.startswith(MANIFEST_MAGIC)


def is_header(event: Event) -> bool:
    return isinstance(event, Store) and event.data[8:16] == SLOT_MAGIC


def is_payload(event: Event) -> bool:
    return isinstance(event, Store) and (event.streamed or is_placed(event)) and not is_manifest(event)


def is_placed(event: Store) -> bool:
    """A device put it into a slot: it is longer than a header, and lies behind the pool's static part."""
    return event.offset >= SLOT_ALIGN and len(event.data) > COMMIT_RECORD_NBYTES


def orders(event: Event) -> bool:
    return isinstance(event, (Fence, Sync))


def dropped(events: Sequence[Event], gone: set[int]) -> list[Event]:
    return [event for i, event in enumerate(events) if i not in gone]


def next_index(events: Sequence[Event], start: int, wanted: type | tuple[type, ...]) -> int:
    return next(i for i in range(start, len(events)) if isinstance(events[i], wanted))


# -- the bugs --------------------------------------------------------------------------------------------------------


def no_fence_before_the_record(events: Sequence[Event]) -> list[Event]:
    """Nothing orders the manifest before the first word of its line."""
    gone: set[int] = set()
    pending = False
    for i, event in enumerate(events):
        pending = (pending or is_manifest(event)) and not is_word(event)
        if pending and orders(event):
            gone.add(i)
    return dropped(events, gone)


def no_flush_of_the_manifest(events: Sequence[Event]) -> list[Event]:
    """The manifest is stored through the caches, and never written back."""
    changed: list[Event] = []
    low = high = 0
    for event in events:
        if isinstance(event, Store) and is_manifest(event):
            low, high = event.offset, event.offset + len(event.data)
            changed.append(replace(event, streamed=False))
        elif not (isinstance(event, Flush) and low <= event.offset < high):
            changed.append(event)
    return changed


def no_sync_after_the_record(events: Sequence[Event]) -> list[Event]:
    """Acknowledged before it is durable."""
    words = [i for i, event in enumerate(events) if is_word(event)]
    return dropped(events, {next_index(events, word, Sync) for word in words})


def record_never_waited_for(events: Sequence[Event]) -> list[Event]:
    """Acknowledged before any of the line is durable. (In persistent memory the last sync alone may be missing: the
    body was fenced, and a line whose first word is lost is completed from its body.)"""
    fences = {next_index(events, i, Fence) for i, event in enumerate(events) if is_body(event)}
    syncs = {next_index(events, i, Sync) for i, event in enumerate(events) if is_word(event)}
    return dropped(events, fences | syncs)


def record_in_one_piece(events: Sequence[Event]) -> list[Event]:
    """The commit record is streamed as a whole: its first word may arrive without the rest."""
    changed: list[Event] = []
    skip = 0
    for i, event in enumerate(events):
        if is_body(event):
            word = next(i + n for n, later in enumerate(events[i:]) if is_word(later))
            body, first = event, events[word]
            assert isinstance(body, Store)
            assert isinstance(first, Store)
            changed.append(Store(body.thread, first.offset, first.data + body.data, streamed=True))
            skip = word + 1
        elif i >= skip:
            changed.append(event)
    return changed


def no_header(events: Sequence[Event]) -> list[Event]:
    """A slot is written to without being invalidated."""
    return [event for event in events if not is_header(event)]


def header_written_once(events: Sequence[Event]) -> list[Event]:
    """A slot that is used again keeps the header of its first checkpoint."""
    seen: set[int] = set()
    changed: list[Event] = []
    for event in events:
        if isinstance(event, Store) and is_header(event):
            if event.offset in seen:
                continue
            seen.add(event.offset)
        changed.append(event)
    return changed


def header_not_fenced(events: Sequence[Event]) -> list[Event]:
    """A slot is invalidated, but nothing orders that before its payload."""
    headers = [i for i, event in enumerate(events) if is_header(event)]
    return dropped(events, {next_index(events, i, Fence) for i in headers})


def payload_not_fenced(events: Sequence[Event]) -> list[Event]:
    """A thread that copies does not fence what it copied; the one that seals fences its own stores only."""
    changed: list[Event] = []
    copier = 1000
    in_copy = False
    for event in events:
        if is_payload(event) or (in_copy and isinstance(event, Flush)):
            in_copy = True
            changed.append(replace(event, thread=copier))
        elif not (in_copy and isinstance(event, Fence)):
            changed.append(event)
            in_copy = False
        else:
            in_copy = False
    return changed


def payload_after_the_record(events: Sequence[Event]) -> list[Event]:
    """The first tensor of each checkpoint is copied after its commit record was written."""
    changed: list[Event] = []
    late: list[Event] = []
    seen = False
    for event in events:
        if isinstance(event, Mark):
            seen = False
        if is_payload(event) and not seen:
            late, seen = [event], True
            continue
        changed.append(event)
        if is_word(event) and late:
            changed += late
            late = []
    return changed


def adoption_not_durable(events: Sequence[Event]) -> list[Event]:
    """An attach goes on before its adoption record is durable."""
    gone: set[int] = set()
    for i, event in enumerate(events):
        if is_body(event) and isinstance(event, Store) and event.data[36] == 2:
            gone.add(next_index(events, i, Sync))
    assert gone, "the workload adopts"
    return dropped(events, gone)


def published_before_durable(events: Sequence[Event]) -> list[Event]:
    """The new file gets the pool's name while its superblocks are in the caches."""
    mark = next(i for i, e in enumerate(events) if isinstance(e, Mark) and e.mark == PUBLISHED)
    return dropped(events, {i for i in range(mark) if orders(events[i])})


def tables_not_flushed(events: Sequence[Event]) -> list[Event]:
    """Superblocks and layout tables are never written back."""
    return [e for e in events if not (isinstance(e, Flush) and (e.offset < RING_OFFSET or e.offset == TABLE_OFFSET))]


def acknowledged_at_once(events: Sequence[Event]) -> list[Event]:
    """A checkpoint is acknowledged when it begins."""
    changed: list[Event] = []
    for event in events:
        if isinstance(event, Mark) and event.mark == _native.lib.LCK_MARK_ACK:
            continue
        changed.append(event)
        if isinstance(event, Mark) and event.mark == _native.lib.LCK_MARK_BEGIN:
            changed.append(replace(event, mark=_native.lib.LCK_MARK_ACK))
    return changed


def no_adoption_record(events: Sequence[Event]) -> list[Event]:
    """An attach resumes from a checkpoint and writes no adoption record."""
    gone: set[int] = set()
    for i, event in enumerate(events):
        if is_body(event) and isinstance(event, Store) and event.data[36] == 2:
            gone.update(range(i, next_index(events, i, Sync) + 1))
    assert gone, "the workload adopts"
    return dropped(events, gone)


def no_flush_of_the_payload(events: Sequence[Event]) -> list[Event]:
    """One tensor of each checkpoint is stored through the caches, and never written back."""
    changed: list[Event] = []
    waiting, low, high = False, 0, 0
    for event in events:
        if isinstance(event, Mark) and event.mark == _native.lib.LCK_MARK_BEGIN:
            waiting = True
        if waiting and isinstance(event, Store) and is_payload(event):
            waiting, low, high = False, event.offset, event.offset + len(event.data)
            changed.append(replace(event, streamed=False))
        elif not (isinstance(event, Flush) and low <= event.offset < high):
            changed.append(event)
    return changed


def no_fence_at_all(events: Sequence[Event]) -> list[Event]:
    """Written back, and never waited for: what a CPU path without a drain does."""
    seen = next(i for i, e in enumerate(events) if isinstance(e, Mark) and e.mark == PUBLISHED)
    return [event for i, event in enumerate(events) if i < seen or not orders(event)]
