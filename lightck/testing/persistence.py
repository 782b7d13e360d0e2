"""Which bytes a crash may leave behind: two persistence models, as objects.

A model follows a trace and knows, for every unit of the medium (a cache line, a sector), the contents that a crash
at this moment may leave there: its last durable content, its newest one, and what lies between. ``PersistentMemory``
is x86 with ADR: stores to a line persist as a prefix in program order (of one store: nothing, its first half, all),
and they are durable only after the same thread flushed the line (streaming counts as that) and then fenced.
``BlockDevice`` is a page cache over a disk: sectors are written at any time, and only a sync makes them durable, those
of all threads. Evictions are in both: what is not durable may still have arrived.
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
    """One store as one unit saw it. ``torn``: with only its first half; None for a single word, which is atomic."""

    thread: int
    event: int
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

    @property
    def pending(self) -> Mapping[int, Unit]:
        """Number of the unit -> what may be lost there."""

    def feed(self, event: Event) -> None: ...


class Model(Protocol):
    """A kind of medium."""

    name: str
    fences_order: bool
    """Whether a fence makes one store durable before the next is made; else only a sync does."""

    def tracker(self, read: Read) -> Tracker: ...

    def is_barrier(self, event: Event) -> bool:
        """Whether a crash just before this event has more possible outcomes than one just after it."""


class _Base:
    """Stores cut into units; subclasses say when a unit is durable."""

    unit: int

    def __init__(self, read: Read) -> None:
        self._pending: dict[int, Unit] = {}
        self._latest: dict[int, bytes] = {}
        self._read = read
        self._event = 0

    @property
    def pending(self) -> Mapping[int, Unit]:
        return self._pending

    def feed(self, event: Event) -> None:
        if isinstance(event, Store):
            for number, at, part in self._parts(event):
                self._write(event, number, at, part)
        elif isinstance(event, Flush):
            self._flush(event)
        elif isinstance(event, (Fence, Sync)):
            self._fence(event)
        self._event += 1

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
        unit = self._pending.get(number)
        if unit is None:
            unit = self._pending[number] = Unit(old)
        half = len(part) // 16 * 8
        torn = old[:at] + part[:half] + old[at + half :] if half else None
        unit.writes.append(Write(store.thread, self._event, new, torn, self._is_flushed(store, number, part)))

    def _is_flushed(self, store: Store, number: int, part: bytes) -> bool:
        return False

    def _flush(self, event: Flush) -> None:
        pass

    def _fence(self, event: Fence | Sync) -> None:
        raise NotImplementedError

    def _arrive(self, number: int, writes: list[int]) -> None:
        """These writes of a unit are durable, and with the last of them all before it."""
        unit = self._pending[number]
        if writes:
            unit.durable = unit.writes[writes[-1]].content
            del unit.writes[: writes[-1] + 1]
        if not unit.writes:
            del self._pending[number]


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
            for write in self._pending[number].writes if number in self._pending else ():
                if write.thread == event.thread:
                    write.flushed = True
                    self._flushed.setdefault(event.thread, set()).add(number)

    def _fence(self, event: Fence | Sync) -> None:
        for number in self._flushed.pop(event.thread, ()):
            unit = self._pending.get(number)
            if unit is None:
                continue
            arrived = [i for i, w in enumerate(unit.writes) if w.thread == event.thread and w.flushed]
            self._arrive(number, arrived)


class _Sectors(_Base):
    unit = 512

    def __init__(self, read: Read) -> None:
        super().__init__(read)
        self._last: dict[int, int] = {}

    def feed(self, event: Event) -> None:
        super().feed(event)
        self._last[event.thread] = self._event

    def _fence(self, event: Fence | Sync) -> None:
        """A sync is recorded when it is over. What other threads stored since this one's previous event may have come
        after its beginning, so that is not counted."""
        if not isinstance(event, Sync):
            return
        begun = self._last.get(event.thread, 0)
        for number, unit in list(self._pending.items()):
            self._arrive(number, [i for i, w in enumerate(unit.writes) if w.event < begun])


@dataclass(frozen=True, slots=True)
class PersistentMemory:
    """Persistent memory under ADR: units of 64 bytes."""

    name: str = "persistent memory"
    fences_order: bool = True

    def tracker(self, read: Read) -> Tracker:
        return _Lines(read)

    def is_barrier(self, event: Event) -> bool:
        return isinstance(event, (Fence, Sync, Mark))


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """A page cache over a disk: units of 512 bytes."""

    name: str = "block device"
    fences_order: bool = False

    def tracker(self, read: Read) -> Tracker:
        return _Sectors(read)

    def is_barrier(self, event: Event) -> bool:
        return isinstance(event, (Sync, Mark))
