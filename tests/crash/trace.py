"""What the choke point did, as plain values: one frozen object per event, in the order of the trace.

The C side records an event after its operation and before the call returns, so events of two threads that were
ordered by anything else stand in that order here. Nothing in this module knows pools or torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lightck import _native
from lightck._native import check, ffi, lib
from lightck.pool.engine import Medium

PUBLISHED = _native.lib.LCK_MARK_USER
"""Mark that a recorder sets when the file has become visible at its path."""
LOST = 1000
"""Mark that a recorder sets where the medium loses what was acknowledged; ``value`` is the generation that is left."""
NOBODY = -1
"""The thread of what the medium did by itself."""


@dataclass(frozen=True, slots=True)
class Store:
    """Bytes that entered the medium. ``streamed``: its whole lines went past the caches."""

    thread: int
    offset: int
    data: bytes
    streamed: bool = False


@dataclass(frozen=True, slots=True)
class Flush:
    """The lines of a range were written back."""

    thread: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Fence:
    """This thread's stores and flushes were ordered."""

    thread: int


@dataclass(frozen=True, slots=True)
class Sync:
    """A fence that also makes everything durable on a block device."""

    thread: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A note in the trace: ``mark`` is one of ``MARK_BEGIN``, ``MARK_ACK``, ``PUBLISHED``, ``LOST``."""

    thread: int
    mark: int
    value: int


Event: TypeAlias = "Store | Flush | Fence | Sync | Mark"


def start(medium: Medium) -> None:
    """Record from now on; an older trace is dropped."""
    check(lib.lck_trace_start(medium.handle), "starting a trace")


def mark(medium: Medium, kind: int, value: int) -> None:
    check(lib.lck_m_mark(medium.handle, kind, value), "marking a trace")


def stop(medium: Medium) -> tuple[Event, ...]:
    """End the recording and fetch it. Raises where events were lost for want of memory."""
    check(lib.lck_trace_stop(medium.handle), "ending a trace")
    nbytes = ffi.new("uint64_t *")
    data = lib.lck_trace_data(medium.handle, nbytes)
    stored = bytes(ffi.buffer(data, nbytes[0])) if nbytes[0] else b""
    streams = ffi.string(lib.lck_isa_name()) != b"portable"
    raw = ffi.new("lck_event *")
    events: list[Event] = []
    for index in range(lib.lck_trace_count(medium.handle)):
        check(lib.lck_trace_event(medium.handle, index, raw), "reading a trace")
        events.append(_event(raw, stored, streams))
    return tuple(events)


def _event(raw: object, stored: bytes, streams: bool) -> Event:
    kind, thread, offset, nbytes, at = (int(getattr(raw, n)) for n in ("kind", "thread", "off", "nbytes", "data"))
    if kind in (_native.lib.LCK_EV_STORE, _native.lib.LCK_EV_COPY):
        return Store(thread, offset, stored[at : at + nbytes], streams and kind == _native.lib.LCK_EV_COPY)
    if kind == _native.lib.LCK_EV_FLUSH:
        return Flush(thread, offset, nbytes)
    if kind == _native.lib.LCK_EV_FENCE:
        return Fence(thread)
    if kind == _native.lib.LCK_EV_SYNC:
        return Sync(thread)
    return Mark(thread, offset, nbytes)


def threads(events: Sequence[Event]) -> set[int]:
    """The threads that took part."""
    return {event.thread for event in events}
