"""The pool that a session writes to: made, gone on with, and laid out anew in a new file where it no longer fits.

What is held is carried over, then a checkpoint commits in the new file, and only then the file gets the pool's name: a
crash at any moment leaves one whole pool under that name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from lightck.pool.create import RESERVE_MIN, create
from lightck.pool.engine import Engine
from lightck.pool.format.layout import Entry
from lightck.pool.listener import CommitEvents
from lightck.pool.reader import PoolReader
from lightck.pool.storage.backend import Backend
from lightck.pool.storage.durability import Durability
from lightck.pool.storage.lock import PoolLock
from lightck.pool.writer import PoolWriter, RelayoutNeededError

log = logging.getLogger("lightck")
T = TypeVar("T")
Table = dict[str, Entry]


class CurrentPool:
    """One at a time. ``writer`` is None until there is one.

    ``n_slots`` is what the next file gets; ``wanted_slots``: the present file has another number, and is left at the
    next boundary.
    """

    def __init__(
        self,
        path: str,
        backend: Backend,
        durability: Durability,
        engine: Engine,
        slots: int,
        lock: PoolLock | None,
        events: CommitEvents,
    ) -> None:
        self.path, self.durability = path, durability
        self.writer: PoolWriter | None = None
        self.n_slots, self.spare_slots = slots, 0
        self.wanted_slots: int | None = None
        self._backend, self._engine, self._lock, self._events = backend, engine, lock, events

    def add_spare_slot(self) -> None:
        """For what holds a checkpoint of its own accord. Before the pool is made or opened."""
        self.n_slots, self.spare_slots = self.n_slots + 1, self.spare_slots + 1

    def create(self, entries: Sequence[Entry], state_nbytes: int) -> None:
        """Make the pool now, empty, and visible at its path."""
        writer = self._new_writer(in_order_of_need(entries), state_nbytes)
        try:
            writer.reader.container.publish()
        except BaseException:
            writer.close()
            raise
        self.writer = writer

    def open(self, reader: PoolReader) -> PoolWriter:
        """Go on in an existing pool. The reader is the writer's from here on, or closed."""
        try:
            self.writer = PoolWriter(reader, self._engine, self.durability, lock=self._lock)
        except BaseException:
            reader.close()
            raise
        self.n_slots = len(reader.superblock.slots)
        return self.writer

    def want_slots(self, slots: int | None) -> None:
        """So many for the training (None: what there is, and two at least), and the spare ones."""
        wanted = slots + self.spare_slots if slots is not None else max(self.n_slots, 2 + self.spare_slots)
        if wanted != self.n_slots:
            log.info(
                "lightck: %d slots instead of %d: the pool is laid out anew at the first boundary",
                wanted,
                self.n_slots,
            )
            self.wanted_slots = wanted

    def ready(self) -> PoolWriter:
        """The writer for the next checkpoint. Raises ``RelayoutNeededError`` where a new file is needed first."""
        if self.writer is None:
            self.wanted_slots = None  # what a layout that was left for a signal wanted: the first one has it anyway
            raise RelayoutNeededError("there is no pool yet")
        if self.wanted_slots is not None:
            self.n_slots, self.wanted_slots = self.wanted_slots, None
            raise RelayoutNeededError(f"the pool is to have {self.n_slots} slots")
        return self.writer

    def _new_writer(
        self, entries: Sequence[Entry], state_nbytes: int, spare_nbytes: int = 0, extras: Sequence[Entry] = ()
    ) -> PoolWriter:
        container, _ = create(
            self._backend,
            self.path,
            entries,
            slots=self.n_slots,
            state_nbytes=state_nbytes,
            spare_nbytes=spare_nbytes,
            extras=extras,
            may_discard=self.writer is None,
        )
        try:
            return PoolWriter(PoolReader(container, self.path), self._engine, self.durability, self.writer, self._lock)
        except BaseException:
            container.close()
            raise

    def move(self, entries: Sequence[Entry], state_nbytes: int, first: Callable[[PoolWriter], T]) -> T:
        """To a new file, for these tensors (none: those of the present one), where ``first`` commits. Where anything
        fails the new file is gone, and the present one is as it was. Nothing is under way in it."""
        old, events = self.writer, self._events
        events.stop_reading()
        carried = events.checkpoints_to_carry(old) if old is not None else []
        held = [entry for checkpoint in carried for entry in checkpoint.entries.values()]
        table, extras = room_for(old, entries, held)
        state_nbytes = max([state_nbytes, *(len(checkpoint.state) for checkpoint in carried)])
        writer = self._new_writer(in_order_of_need(table.values()), state_nbytes, spare_nbytes(old, table), extras)
        try:
            events.carry(writer)
            result = first(writer)
            writer.reader.container.publish()
        except BaseException:
            events.relayout_failed()
            writer.close()
            raise
        events.relayout_done(writer)
        self.writer = writer
        if old is not None:
            old.close()
        return result

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


# -- what a new file is laid out for -----------------------------------------------------------------------------------


def room_for(old: PoolWriter | None, now: Sequence[Entry], held: Sequence[Entry]) -> tuple[Table, list[Entry]]:
    """The layout table of the file that follows ``old``, and what else its reserve has to take: held tensors that are
    of another kind now.

    Without ``now`` the training's tensors are what ``old`` was used for. What an optimizer will have is kept in mind,
    what a user's object had is not.
    """
    current = {entry.name: entry for entry in now}
    table = _foreseen(old, current) if old is not None else {}
    table |= {entry.name: entry for entry in (*held, *now)}
    tied = {e.name for e in table.values() if e.alias is not None}
    table = {n: e for n, e in table.items() if e.alias is None or (e.alias in table and e.alias not in tied)}
    return table, [e for e in held if e.name not in table or not table[e.name].same_bytes_as(e)]


def _foreseen(old: PoolWriter, now: Mapping[str, Entry]) -> Table:
    """Optimizer state that was laid out for a parameter which has none yet: it may still wake."""
    used = {name: old.entries[number] for name, number in old.numbers.items()}
    if not now:
        return {name: entry for name, entry in used.items() if entry.role != "state"}
    params = {e.name.removeprefix("model/") for e in now.values() if e.role == "param"}
    return {name: entry for name, entry in used.items() if entry.role == "optimizer" and _param_of(entry) in params}


def spare_nbytes(old: PoolWriter | None, table: Table) -> int:
    """Room for growth: what changed its size may double, and each new layout has more for what is new. So a training
    that grows at every step is laid out anew ever more seldom."""
    if old is None:
        return 0
    nbytes = sum(entry.nbytes for entry in table.values())
    grew = sum(table[name].nbytes for name in old.resized & table.keys())
    return 2 * grew + max(RESERVE_MIN, nbytes >> max(2, 4 - old.n_relayouts))


def _param_of(entry: Entry) -> str:
    return entry.name.removeprefix("optimizer/").rpartition("/")[0]


def in_order_of_need(entries: Iterable[Entry]) -> list[Entry]:
    """Each parameter followed by its optimizer state, in the order of the modules: what the next step touches
    together lies together, and is free again together."""
    entries = list(entries)
    owner = {e.name.removeprefix("model/"): i for i, e in enumerate(entries) if e.role in ("param", "buffer")}

    def key(item: tuple[int, Entry]) -> tuple[int, int]:
        i, entry = item
        if entry.role != "optimizer":
            return (i if entry.role != "state" else len(entries)), -1
        return owner.get(_param_of(entry), len(entries)), i

    return [entry for _, entry in sorted(enumerate(entries), key=key)]
