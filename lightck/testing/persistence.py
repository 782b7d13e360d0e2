"""Which bytes a crash may leave behind: two persistence models, as objects.

A model follows a trace and knows, for every unit of the medium (a cache line, a sector), the contents that a crash
at this moment may leave there: its last durable content, its newest one, and what lies between. ``PersistentMemory``
is x86 with ADR: ordinary stores to a line persist as a prefix in program order, streamed ones as any subset of
their words (here: none, the first half, all), and a store is durable only after the same thread flushed it and then fenced. ``BlockDevice`` is a page
cache over a disk: sectors are written at any time, and only a sync makes them durable, those of all threads.
Evictions are in both: what is not durable may still have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from lightck.testing.trace import Event, Fence, Flush, Mark, Store, Sync

Read = Callable[[int, int], bytes]
"""``read(offset, nbytes)`` of the medium as it was when the trace began."""


@dataclass(slots=True)
class Write:
    """One store as one unit saw it. ``torn``: the unit with only the first half of the store in it; None for one word."""

    thread: int
    content: bytes
    torn: bytes | None
    flushed: bool


@dataclass(slots=True)
class Unit:
    """A unit with writes that are not durable yet."""

    durable: bytes
    writes: list[Write] = field(default_factory=list)

    @property
    def newest(self) -> bytes:
        return self.writes[-1].content

    def contents(self) -> list[bytes]:
        """Everything that a crash may leave here, each once."""
        found = [self.durable]
        for write in self.writes:
            found += [write.content] if write.torn is None else [write.torn, write.content]
        return list(dict.fromkeys(found))


class Tracker(Protocol):
    """A model at one moment of a trace."""

    unit: int
    pending: Mapping[int, Unit]
    """Number of the unit -> what may be lost there."""

    def feed(self, event: Event) -> None: ...


class Model(Protocol):
    """A kind of medium."""

    name: str

    def tracker(self, read: Read) -> Tracker: ...

    def is_barrier(self, event: Event) -> bool:
        """Whether a crash just before this event has more possible outcomes than one just after it."""


class _Base:
    """Stores cut into units; subclasses say when a unit is durable."""

    unit: int

    def __init__(self, read: Read) -> None:
        self.pending: dict[int, Unit] = {}
        self._latest: dict[int, bytes] = {}
        self._read = read

    def feed(self, event: Event) -> None:
        if isinstance(event, Store):
            for number, at, part in self._parts(event):
                self._write(event, number, at, part)
        elif isinstance(event, Flush):
            self._flush(event)
        elif isinstance(event, (Fence, Sync)):
            self._fence(event)

    def _parts(self, store: Store) -> Iterator[tuple[int, int, bytes]]:
        """(unit, offset in it, bytes) of a store."""
        at, end = store.offset, store.offset + len(store.data)
        while at < end:
            number, inside = divmod(at, self.unit)
            n = min(self.unit - inside, end - at)
            yield number, inside, store.data[at - store.offset : at - store.offset + n]
            at += n

    def _write(self, store: Store, number: int, at: int, part: bytes) -> None:
        old = self._latest.get(number)
        if old is None:
            old = self._read(number * self.unit, self.unit)
        new = old[:at] + part + old[at + len(part) :]
        self._latest[number] = new
        unit = self.pending.get(number)
        if unit is None:
            unit = self.pending[number] = Unit(old)
        half = len(part) // 16 * 8
        torn = old[:at] + part[:half] + old[at + half :] if half else None
        unit.writes.append(Write(store.thread, new, torn, self._is_flushed(store, number, part)))

    def _is_flushed(self, store: Store, number: int, part: bytes) -> bool:
        return False

    def _flush(self, event: Flush) -> None:
        pass

    def _fence(self, event: Fence | Sync) -> None:
        raise NotImplementedError


class _Lines(_Base):
    unit = 64

    def __init__(self, read: Read) -> None:
        super().__init__(read)
        self._flushed: dict[int, set[int]] = {}

    def _is_flushed(self, store: Store, number: int, part: bytes) -> bool:
        """Whole lines of a streamed copy are on their way already."""
        if not store.streamed or len(part) < self.unit:
            return False
        self._flushed.setdefault(store.thread, set()).add(number)
        return True

    def _flush(self, event: Flush) -> None:
        first, last = event.offset // self.unit, (event.offset + event.nbytes - 1) // self.unit
        for number in range(first, last + 1):
            for write in self.pending[number].writes if number in self.pending else ():
                if write.thread == event.thread:
                    write.flushed = True
                    self._flushed.setdefault(event.thread, set()).add(number)

    def _fence(self, event: Fence | Sync) -> None:
        for number in self._flushed.pop(event.thread, ()):
            unit = self.pending.get(number)
            if unit is None:
                continue
            arrived = [i for i, w in enumerate(unit.writes) if w.thread == event.thread and w.flushed]
            if arrived:
                unit.durable = unit.writes[arrived[-1]].content
                del unit.writes[: arrived[-1] + 1]
            if not unit.writes:
                del self.pending[number]


class _Sectors(_Base):
    unit = 512

    def _fence(self, event: Fence | Sync) -> None:
        if isinstance(event, Sync):
            self.pending.clear()


@dataclass(frozen=True, slots=True)
class PersistentMemory:
    """Persistent memory under ADR: units of 64 bytes."""

    name: str = "persistent memory"

    def tracker(self, read: Read) -> Tracker:
        return _Lines(read)

    def is_barrier(self, event: Event) -> bool:
        return isinstance(event, (Fence, Sync, Mark))


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """A page cache over a disk: units of 512 bytes."""

    name: str = "block device"

    def tracker(self, read: Read) -> Tracker:
        return _Sectors(read)

    def is_barrier(self, event: Event) -> bool:
        return isinstance(event, (Sync, Mark))
