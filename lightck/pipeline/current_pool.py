"""The pool file that a session writes to, and the relayout to a new file when something no longer fits.

A relayout first carries held checkpoints over. Then it commits the checkpoint of the closed step in the new file; a
relayout for a pin has no such checkpoint. Only then the new file gets the pool's name, so that a crash at any moment
leaves one whole pool under that name.
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
Layout = dict[str, Entry]
"""The tensors that get extents in a file, by name."""


class CurrentPool:
    """The one pool file that is open for writing. ``writer`` is None until there is one. ``n_slots``: the number of
    slots of the next new file. ``requested_slots``: the number that the file shall have instead of its present one, by
    a relayout at the next boundary; None: no relayout is requested."""

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
        self.requested_slots: int | None = None
        self._backend, self._engine, self._lock, self._events = backend, engine, lock, events

    def add_spare_slot(self) -> None:
        """Add a slot for exports, which hold checkpoints. Call before the pool is created or opened."""
        self.n_slots, self.spare_slots = self.n_slots + 1, self.spare_slots + 1

    def create(self, entries: Sequence[Entry], state_nbytes: int) -> None:
        """Create an empty pool at the path now."""
        writer = self._new_writer(in_module_order(entries), state_nbytes)
        try:
            writer.reader.container.publish()
        except BaseException:
            writer.close()
            raise
        self.writer = writer

    def open(self, reader: PoolReader) -> PoolWriter:
        """Continue in an existing pool. The writer takes the reader over; on failure the reader is closed."""
        try:
            self.writer = PoolWriter(reader, self._engine, self.durability, lock=self._lock)
        except BaseException:
            reader.close()
            raise
        self.n_slots = len(reader.superblock.slots)
        return self.writer

    def request_slots(self, slots: int | None) -> None:
        """Request ``slots`` slots besides the spare ones (None: as many as there are, but at least two)."""
        wanted = slots + self.spare_slots if slots is not None else max(self.n_slots, 2 + self.spare_slots)
        if wanted != self.n_slots:
            log.info(
                "lightck: slots= or keep= asks for %d slots, and the pool has %d: it moves to a new file when the "
                "first step closes",
                wanted,
                self.n_slots,
            )
            self.requested_slots = wanted

    def ready_writer(self) -> PoolWriter:
        """The writer for the next checkpoint. Raises ``RelayoutNeededError`` if a relayout is needed first."""
        if self.writer is None:
            # A relayout that a signal interrupted may have left a request for ``n_slots`` slots. The first file gets
            # that many slots anyway.
            self.requested_slots = None
            raise RelayoutNeededError("there is no pool yet")
        if self.requested_slots is not None:
            self.n_slots, self.requested_slots = self.requested_slots, None
            raise RelayoutNeededError(f"the pool gets {self.n_slots} slots")
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

    def relayout(self, entries: Sequence[Entry], state_nbytes: int, first: Callable[[PoolWriter], T]) -> T:
        """Move to a new file; no checkpoint is in flight. On failure the new file is removed, and the present one stays
        in use, unchanged. ``entries``: the tensors of the training (empty: those of the present file).
        ``state_nbytes``: the length of the small state. ``first``: commits the checkpoint of the
        closed step in the new file, after the held ones; for a pin it does nothing."""
        old, events = self.writer, self._events
        events.stop_reading()
        carried = events.checkpoints_to_carry(old) if old is not None else []
        held = [entry for checkpoint in carried for entry in checkpoint.entries.values()]
        layout, extras = pool_layout(old, entries, held)
        state_nbytes = max([state_nbytes, *(len(checkpoint.state) for checkpoint in carried)])
        writer = self._new_writer(in_module_order(layout.values()), state_nbytes, spare_nbytes(old, layout), extras)
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


# -- the layout of a new file ------------------------------------------------------------------------------------------


def pool_layout(old: PoolWriter | None, now: Sequence[Entry], held: Sequence[Entry]) -> tuple[Layout, list[Entry]]:
    """Returns the layout of the file that replaces ``old``, and those tensors of held checkpoints that do not fit into
    this layout, because their shape or dtype has changed since. The slots hold such tensors in their reserve
    (docs/format.md). ``now``: the tensors of the training (empty: those of ``old``). ``held``: the tensors of held
    checkpoints. The layout keeps extents for optimizer state that does not exist yet, but not for tensors of the user's
    objects that no longer exist."""
    current = {entry.name: entry for entry in now}
    layout = _kept_entries(old, current) if old is not None else {}
    layout |= {entry.name: entry for entry in (*held, *now)}
    # A tied tensor stays only if the layout holds the tensor whose bytes it shares, and that one is not tied itself.
    tied = {e.name for e in layout.values() if e.alias is not None}
    layout = {n: e for n, e in layout.items() if e.alias is None or (e.alias in layout and e.alias not in tied)}
    return layout, [e for e in held if e.name not in layout or not layout[e.name].fits(e)]


def _kept_entries(old: PoolWriter, now: Mapping[str, Entry]) -> Layout:
    """Entries of ``old`` that keep an extent: optimizer state of parameters that may get some later. If ``now`` is
    empty: all entries in use, except those of the user's objects."""
    used = {name: old.entries[number] for name, number in old.numbers.items()}
    if not now:
        return {name: entry for name, entry in used.items() if entry.role != "state"}
    params = {e.name.removeprefix("model/") for e in now.values() if e.role == "param"}
    return {name: entry for name, entry in used.items() if entry.role == "optimizer" and _param_of(entry) in params}


def spare_nbytes(old: PoolWriter | None, layout: Layout) -> int:
    """Space for growth: each tensor that grew may double. New tensors get a sixteenth of the payload after the first
    relayout, then an eighth, then always a quarter. So a training that grows at every step needs a relayout less and
    less often."""
    if old is None:
        return 0
    nbytes = sum(entry.nbytes for entry in layout.values())
    grew = sum(layout[name].nbytes for name in old.resized & layout.keys())
    return 2 * grew + max(RESERVE_MIN, nbytes >> max(2, 4 - old.n_relayouts))


def _param_of(entry: Entry) -> str:
    return entry.name.removeprefix("optimizer/").rpartition("/")[0]


def in_module_order(entries: Iterable[Entry]) -> list[Entry]:
    """Entries in the order of the modules, each parameter followed by its optimizer state: tensors that one layer's
    update changes together lie together."""
    entries = list(entries)
    owner = {e.name.removeprefix("model/"): i for i, e in enumerate(entries) if e.role in ("param", "buffer")}

    def key(item: tuple[int, Entry]) -> tuple[int, int]:
        i, entry = item
        if entry.role != "optimizer":
            return (i if entry.role != "state" else len(entries)), -1
        return owner.get(_param_of(entry), len(entries)), i

    return [entry for _, entry in sorted(enumerate(entries), key=key)]
