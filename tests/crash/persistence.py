"""Which bytes a crash may leave behind: persistence models, as objects.

A model follows a trace and knows at each moment the fates of what is not durable yet. ``PersistentMemory`` is x86 with
ADR: ordinary stores to a line arrive in program order, streamed ones word by word in any order, and both are durable
only after the same thread flushed the line (streaming counts as that) and then fenced. ``PersistentCaches`` is eADR:
ordinary stores are durable in their global order, streamed ones still wait for a fence. ``Adversary`` lets every word
of everything unfenced arrive by itself, a superset of ADR. ``BlockDevice`` is a page cache over a disk: sectors are
written at any time, and only a sync makes them durable, those of all threads. Evictions are in all: what is not durable
may still have arrived.

A page that was copied to the disk at one moment and torn between its sectors is among the images of ``BlockDevice``,
where every sector has a moment of its own; a model of pages would allow fewer images, not others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from crash.fates import WORD, Bulk, Fate, Stores, words
from crash.trace import Event, Fence, Flush, Mark, Store, Sync

Read = Callable[[int, int], bytes]
"""``read(offset, nbytes)`` of the medium as it is before the next event."""
BULK_NBYTES = 64 << 10
"""Of what was stored in longer runs not every word has a fate of its own."""


@dataclass(slots=True)
class Write:
    """One store as one unit saw it: ``part`` at ``at``."""

    thread: int
    event: int
    at: int
    part: bytes
    streamed: bool
    flushed: bool

    @property
    def end(self) -> int:
        return self.at + len(self.part)


@dataclass(slots=True)
class Unit:
    """A unit with writes that are not durable yet."""

    durable: bytes
    writes: list[Write] = field(default_factory=list)


class Tracker(Protocol):
    """A model at one moment of a trace."""

    def feed(self, event: Event) -> None: ...

    def is_pending(self, offset: int) -> bool:
        """Whether the byte there may be lost."""

    def fates(self) -> list[Fate]:
        """Of everything that may be lost."""


class Model(Protocol):
    """A kind of medium."""

    @property
    def name(self) -> str: ...

    @property
    def fences_order(self) -> bool:
        """Whether a fence makes one store durable before the next is made; else only a sync does."""

    def tracker(self, read: Read) -> Tracker: ...

    def is_barrier(self, event: Event) -> bool:
        """Whether a crash just before this event has more possible outcomes than one just after it."""


class _Base:
    """Stores cut into units; subclasses say when a unit is durable, and what may be in it before."""

    unit: ClassVar[int]

    def __init__(self, read: Read) -> None:
        self._pending: dict[int, Unit] = {}
        self._latest: dict[int, bytes] = {}
        self._read = read
        self._event = 0

    def feed(self, event: Event) -> None:
        if isinstance(event, Store):
            self._store(event)
        elif isinstance(event, Flush):
            self._flush(event)
        elif isinstance(event, (Fence, Sync)):
            self._fence(event)
        self._event += 1

    def is_pending(self, offset: int) -> bool:
        return offset // self.unit in self._pending

    def fates(self) -> list[Fate]:
        bulks = self._bulks()
        in_bulk = {number for numbers in bulks for number in numbers}
        found = (self._fate(n, unit) for n, unit in self._pending.items() if n not in in_bulk)
        return [*(self._bulk(numbers) for numbers in bulks), *(fate for fate in found if fate is not None)]

    def _bulks(self) -> list[range]:
        """Long runs of units that were stored to once, and as a whole."""
        whole = sorted(n for n, u in self._pending.items() if len(u.writes) == 1 and len(u.writes[0].part) == self.unit)
        ends = [i for i in range(1, len(whole) + 1) if i == len(whole) or whole[i] != whole[i - 1] + 1]
        runs = [range(whole[low], whole[high - 1] + 1) for low, high in zip([0, *ends], ends, strict=False)]
        size = BULK_NBYTES // self.unit
        long = [run for run in runs if len(run) >= size]
        return [range(at, min(at + size, run.stop)) for run in long for at in range(run.start, run.stop, size)]

    def _bulk(self, numbers: range) -> Bulk:
        units = [self._pending[number] for number in numbers]
        old, new = b"".join(u.durable for u in units), b"".join(u.writes[0].part for u in units)
        return Bulk(units[0].writes[0].event, self.unit, (numbers.start * self.unit,), (old,), (new,))

    def _store(self, store: Store) -> None:
        for number, at, part in self._parts(store):
            self._write(store, number, at, part)

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
        self._latest[number] = _put(old, at, part)
        unit = self._pending.get(number)
        if unit is None:
            unit = self._pending[number] = Unit(old)
        is_whole = store.streamed and len(part) == self.unit
        unit.writes.append(Write(store.thread, self._event, at, part, is_whole, self._is_flushed(store, number, part)))

    def _is_flushed(self, store: Store, number: int, part: bytes) -> bool:
        return False

    def _flush(self, event: Flush) -> None:
        pass

    def _fence(self, event: Fence | Sync) -> None:
        raise NotImplementedError

    def _arrive(self, number: int, arrived: list[Write]) -> None:
        """These writes of a unit are durable, and with the last ordinary one of them all before it."""
        unit, known = self._pending[number], {id(write) for write in arrived}
        ordinary = max((w.event for w in arrived if not w.streamed), default=-1)
        left: list[Write] = []
        for write in unit.writes:
            if id(write) in known or (write.event <= ordinary and not write.streamed):
                unit.durable = _put(unit.durable, write.at, write.part)
                left = [w for w in left if not (write.at <= w.at and w.end <= write.end)]
            else:
                left.append(write)
        unit.writes = left
        if not left:
            del self._pending[number]

    def _fate(self, number: int, unit: Unit) -> Fate | None:
        """Ordinary stores in order; each word by itself where any store was streamed."""
        stores = self._stores(number, unit)
        return stores.subset() if any(w.streamed for w in unit.writes) else stores.queue()

    def _stores(self, number: int, unit: Unit) -> Stores:
        stores = Stores()
        base, content = number * self.unit, unit.durable
        for write in unit.writes:
            old, content = content, _put(content, write.at, write.part)
            low, high = write.at // WORD * WORD, -(-write.end // WORD) * WORD
            stores.add(write.event, words(base + low, old[low:high]), words(base + low, content[low:high]))
        return stores


def _put(content: bytes, at: int, part: bytes) -> bytes:
    return content[:at] + part + content[at + len(part) :]


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
            if unit is not None:
                self._arrive(number, [w for w in unit.writes if w.thread == event.thread and w.flushed])


class _Words(_Lines):
    """Lines without any order in them."""

    def _fate(self, number: int, unit: Unit) -> Fate | None:
        return self._stores(number, unit).subset()


class _Streams(_Lines):
    """What was streamed, in lines; ordinary stores since the last fence, all in one order."""

    def __init__(self, read: Read) -> None:
        super().__init__(read)
        self._queue: list[tuple[Write, dict[int, bytes], dict[int, bytes]]] = []

    def is_pending(self, offset: int) -> bool:
        return super().is_pending(offset) or any(offset // WORD * WORD in new for _, _, new in self._queue)

    def fates(self) -> list[Fate]:
        queue = Stores()
        for write, old, new in self._queue:
            queue.add(write.event, old, new)
        first = queue.queue()
        return [*([] if first is None else [first]), *super().fates()]

    def _write(self, store: Store, number: int, at: int, part: bytes) -> None:
        if store.streamed and len(part) == self.unit:
            for _, before, after in self._queue:  # no word has two fates: what is streamed over counts as durable
                for word in range(number * self.unit, (number + 1) * self.unit, WORD):
                    before.pop(word, None)
                    after.pop(word, None)
            super()._write(store, number, at, part)
            return
        base = number * self.unit
        old = self._latest.get(number)
        if old is None:
            old = self._read(base, self.unit)
        new = self._latest[number] = _put(old, at, part)
        unit = self._pending.get(number)
        if unit is not None:  # an ordinary store to a line that is being streamed to: in the order of the line
            unit.writes.append(Write(store.thread, self._event, at, part, False, True))
            self._flushed.setdefault(store.thread, set()).add(number)
            return
        low, high = at // WORD * WORD, -(-(at + len(part)) // WORD) * WORD
        write = Write(store.thread, self._event, at, part, False, True)
        self._queue.append((write, words(base + low, old[low:high]), words(base + low, new[low:high])))

    def _fence(self, event: Fence | Sync) -> None:
        """What this thread stored is durable, and with the last of it all that anyone stored before."""
        super()._fence(event)
        own = [i for i, (write, _, _) in enumerate(self._queue) if write.thread == event.thread]
        if own:
            del self._queue[: own[-1] + 1]


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
            self._arrive(number, [w for w in unit.writes if w.event < begun])

    def _fate(self, number: int, unit: Unit) -> Fate | None:
        """The page cache sees streamed stores in order too."""
        return self._stores(number, unit).queue()


@dataclass(frozen=True, slots=True)
class _Memory:
    fences_order: ClassVar[bool] = True

    def is_barrier(self, event: Event) -> bool:
        return isinstance(event, (Fence, Sync, Mark))


@dataclass(frozen=True, slots=True)
class PersistentMemory(_Memory):
    """Persistent memory under ADR."""

    name: str = "persistent memory"

    def tracker(self, read: Read) -> Tracker:
        return _Lines(read)


@dataclass(frozen=True, slots=True)
class PersistentCaches(_Memory):
    """Persistent memory under eADR."""

    name: str = "persistent caches"

    def tracker(self, read: Read) -> Tracker:
        return _Streams(read)


@dataclass(frozen=True, slots=True)
class Adversary(_Memory):
    """Persistent memory that keeps to fences and to nothing else."""

    name: str = "adversary"

    def tracker(self, read: Read) -> Tracker:
        return _Words(read)


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """A page cache over a disk: units of 512 bytes."""

    name: str = "block device"
    fences_order: ClassVar[bool] = False

    def tracker(self, read: Read) -> Tracker:
        return _Sectors(read)

    def is_barrier(self, event: Event) -> bool:
        return isinstance(event, (Sync, Mark))


MODELS: tuple[Model, ...] = (PersistentMemory(), PersistentCaches(), Adversary(), BlockDevice())
