"""The pool file that a session writes to, and the relayout to a new file when something no longer fits.

A relayout has three stages. First it carries the held checkpoints over to the new file. Then it commits the checkpoint
of the closed step in the new file. (A relayout for a pin has no such checkpoint.) Last it gives the pool's name to the
new file. So a crash at any moment leaves one whole pool under that name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from lightck.pipeline.pool_kind import PoolKind
from lightck.pool.create import RESERVE_MIN, create
from lightck.pool.engine import Engine
from lightck.pool.format.group import GroupIdentity
from lightck.pool.format.layout import Entry
from lightck.pool.listener import CarriedCheckpoint, CommitEvents
from lightck.pool.reader import PoolReader
from lightck.pool.slots import Slot
from lightck.pool.storage.backend import Backend
from lightck.pool.storage.durability import Durability
from lightck.pool.storage.lock import PoolLock
from lightck.pool.writer import PoolWriter, RelayoutNeededError
from lightck.state.inventory import param_of

log = logging.getLogger("lightck")
T = TypeVar("T")
EntryByName = dict[str, Entry]
"""Name of a tensor -> its entry, for all tensors that get extents in a file."""


class CurrentPool:
    """The one pool file that is open for writing. ``writer``: None until the pool is created or opened. ``n_slots``:
    number of slots that the next new file gets. ``spare_slots``: how many of these are for exports.
    ``requested_slots``: number of slots for which a relayout at the next boundary is requested (None: no relayout is
    requested). ``kind``: the kind of the next new file; the present file is of the same, unless a change of the kind is
    under way."""

    def __init__(
        self,
        path: str,
        backend: Backend,
        durability: Durability,
        engine: Engine,
        slots: int,
        lock: PoolLock | None,
        events: CommitEvents,
        kind: PoolKind,
    ) -> None:
        self.path, self.durability = path, durability
        self.writer: PoolWriter | None = None
        self.n_slots, self.spare_slots = slots, 0
        self.requested_slots: int | None = None
        self.spare_nbytes_min = 0
        """The least room for growth in a new file, in bytes: the size of gradients that did not fit into a record."""
        self.group: GroupIdentity | None = None
        """Which rank of which group the pool belongs to. Set before the pool of a rank is created."""
        self._backend, self._engine, self._lock, self._events = backend, engine, lock, events
        self.kind = self._kind_of_file = kind

    def add_spare_slot(self) -> None:
        """Add a slot for exports: an export holds its checkpoint, and the training cannot write to the slot of this
        checkpoint meanwhile. Call before the pool is created or opened."""
        self.n_slots, self.spare_slots = self.n_slots + 1, self.spare_slots + 1

    def create(self, entries: Sequence[Entry], state_nbytes: int) -> None:
        """Create an empty pool at the path now. ``state_nbytes``: bytes of small state for which the slots must have
        space."""
        writer = self._new_writer(self.kind.laid_out(entries), state_nbytes)
        try:
            writer.reader.container.publish()
        except BaseException:
            writer.close()
            raise
        self.writer = writer

    def open(self, reader: PoolReader) -> PoolWriter:
        """Continue in an existing pool. Return its writer, which owns ``reader`` from now on. If no writer can be made,
        close ``reader`` and raise the error."""
        try:
            self.writer = self.kind.writer(reader, self._engine, self.durability, None, self._lock)
        except BaseException:
            reader.close()
            raise
        self.n_slots = len(reader.superblock.slots)
        return self.writer

    def request_slots(self, slots: int | None) -> None:
        """If the pool does not have exactly ``slots`` slots besides the spare ones, request a relayout at the next
        boundary that gives it this number. None: a pool with at least two slots besides the spare ones keeps its
        number; a smaller one gets two."""
        wanted = slots + self.spare_slots if slots is not None else max(self.n_slots, 2 + self.spare_slots)
        if wanted != self.n_slots:
            log.info(
                "lightck: slots=, tiers= or keep= needs %d slots, and the pool has %d. When the first step closes, the "
                "pool is written anew with as many slots as needed, under the same path",
                wanted,
                self.n_slots,
            )
            self.requested_slots = wanted

    def place_of(self, generation: int | None) -> tuple[PoolWriter, Slot, int] | None:
        """Return writer, slot and generation of a checkpoint that a relayout carried over to the present file; None if
        the file does not hold it."""
        assert self.writer is not None, "the pool was moved"
        found = (slot for slot in self.writer.slots.slots if generation is not None and slot.generation == generation)
        return next(((self.writer, slot, slot.generation) for slot in found if slot.generation is not None), None)

    def ready_writer(self) -> PoolWriter:
        """The writer for the next checkpoint. Raises ``RelayoutNeededError`` if a relayout is needed first."""
        if self.writer is None:
            # A relayout that a signal interrupted requests ``n_slots`` slots for the next attempt. This request is not
            # needed here, because the first file gets ``n_slots`` slots in any case.
            self.requested_slots = None
            raise RelayoutNeededError("there is no pool yet")
        if self.requested_slots is not None:
            self.n_slots, self.requested_slots = self.requested_slots, None
            raise RelayoutNeededError(f"the pool gets {self.n_slots} slots")
        return self.writer

    def _new_writer(
        self, entries: Sequence[Entry], state_nbytes: int, spare_nbytes: int = 0, extras: Sequence[Entry] = ()
    ) -> PoolWriter:
        if self.writer is None:
            self.n_slots = self.kind.n_slots(entries, state_nbytes, self.n_slots)
        container, _ = create(
            self._backend,
            self.path,
            entries,
            slots=self.n_slots,
            state_nbytes=state_nbytes,
            spare_nbytes=spare_nbytes,
            extras=extras,
            may_discard=self.writer is None,  # without a writer nothing at the path is needed any more
            group=self.group if self.writer is None else self.writer.reader.group,
        )
        try:
            reader = PoolReader(container, self.path, gradients=True)
            return self.kind.writer(reader, self._engine, self.durability, self.writer, self._lock)
        except BaseException:
            container.close()
            raise

    def relayout(self, entries: Sequence[Entry], state_nbytes: int, commit_checkpoint: Callable[[PoolWriter], T]) -> T:
        """Move the pool to a new file, and return the result of ``commit_checkpoint``. Call only while no checkpoint is
        in flight. If this raises, the new file is removed, and the pool stays in its present file, unchanged.
        ``entries``: the tensors of the training (empty: those of the present file). ``state_nbytes``: bytes of the
        closed step's small state. ``commit_checkpoint``: commits the checkpoint of the closed step in the new file (for
        a pin it does nothing). It is called after the held checkpoints were carried over."""
        old, events = self.writer, self._events
        events.stop_reading()
        writer: PoolWriter | None = None
        try:
            writer = self._laid_out_anew(old, entries, state_nbytes)
            events.carry(writer)
            result = commit_checkpoint(writer)
            writer.reader.container.publish()
        except BaseException:
            events.relayout_failed()
            if writer is not None:
                writer.close()
            raise
        events.relayout_done(writer)
        self.writer, self._kind_of_file = writer, self.kind
        if old is not None:
            old.close()
        return result

    def _laid_out_anew(self, old: PoolWriter | None, entries: Sequence[Entry], state_nbytes: int) -> PoolWriter:
        """Return the writer of an empty new file with space for the checkpoints that the relayout carries over."""
        carried: Sequence[CarriedCheckpoint] = ()
        if old is not None:
            self._events.relayout_begins(old)
            carried = self._events.checkpoints_to_carry(old)
        held = [entry for checkpoint in carried for entry in checkpoint.entries.values()]
        layout, extras = pool_layout(old, entries, held)
        state_nbytes = max([state_nbytes, *(len(checkpoint.state) for checkpoint in carried)])
        spare = self.spare_nbytes_min
        if self._kind_of_file is self.kind:  # a file of another kind is made once, and nothing has grown
            spare = max(spare, spare_nbytes(old, layout))
        return self._new_writer(self.kind.laid_out(layout.values()), state_nbytes, spare, extras)

    def write_as_other_kind(
        self,
        reader: PoolReader,
        kind_of_file: PoolKind,
        entries: Sequence[Entry],
        state_nbytes: int,
        commit_checkpoint: Callable[[PoolWriter], object],
    ) -> None:
        """Move an existing pool of another kind to a new file, which replaces it, and close both. ``reader``: has the
        pool open for writing. ``kind_of_file``: the kind of that pool. The other arguments, and what is raised: as for
        ``relayout``."""
        own_kind, self.kind = self.kind, kind_of_file
        self._kind_of_file = kind_of_file
        n_slots = self.n_slots
        try:
            self.open(reader)
            self.kind = own_kind
            laid_out = own_kind.laid_out(pool_layout(self.writer, entries, ())[0].values())
            self.n_slots = own_kind.n_slots(laid_out, state_nbytes, n_slots)
            self.relayout(entries, state_nbytes, commit_checkpoint)
        finally:
            self.kind = self._kind_of_file = own_kind
            self.n_slots = n_slots
            self.close()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


# -- the layout of a new file ------------------------------------------------------------------------------------------


def pool_layout(old: PoolWriter | None, now: Sequence[Entry], held: Sequence[Entry]) -> tuple[EntryByName, list[Entry]]:
    """Return the layout of the file that replaces ``old``, and those tensors of held checkpoints that do not fit into
    this layout, because the training's tensor of the same name has another shape or dtype now. The slots hold such
    tensors in their reserve (docs/format.md). ``now``: the tensors of the training (empty: those of ``old``). ``held``:
    the tensors of held checkpoints. The layout keeps the extents of optimizer state that does not exist now, because
    such state may be created again. It drops the extents of tensors of the user's objects that do not exist now."""
    current = {entry.name: entry for entry in now}
    layout = _kept_entries(old, current) if old is not None else {}
    layout |= {entry.name: entry for entry in (*held, *now)}
    # A tied tensor stays only if the layout holds the tensor whose bytes it shares, and if that tensor is not tied.
    tied = {e.name for e in layout.values() if e.alias is not None}
    layout = {n: e for n, e in layout.items() if e.alias is None or (e.alias in layout and e.alias not in tied)}
    return layout, [e for e in held if e.name not in layout or not _fits(e, layout[e.name])]


def _fits(held: Entry, laid_out: Entry) -> bool:
    """Whether a tensor of a held checkpoint fits the entry of the new file. (The places are not compared: the kind of
    the new file alone decides whether the tensor lies in a slot or in homes.)"""
    return laid_out.can_hold(held._replace(place=laid_out.place))


def _kept_entries(old: PoolWriter, now: Mapping[str, Entry]) -> EntryByName:
    """Return the entries of ``old`` that keep an extent in the new file: optimizer state of the parameters in ``now``,
    because such state may be created later. If ``now`` is empty: all entries in use, except those of the user's
    objects."""
    used = {name: old.entries[number] for name, number in old.numbers.items()}
    if not now:
        return {name: entry for name, entry in used.items() if entry.role != "state"}
    params = {e.name.removeprefix("model/") for e in now.values() if e.role == "param"}
    return {name: entry for name, entry in used.items() if entry.role == "optimizer" and param_of(entry.name) in params}


def spare_nbytes(old: PoolWriter | None, layout: EntryByName) -> int:
    """Return how many bytes a new file has for growth. Each tensor that was resized before may grow to twice its
    present size. New tensors get a sixteenth of the payload at the first relayout, an eighth at the second, and a
    quarter at every later relayout, but at least ``RESERVE_MIN`` bytes. So a training that grows at every step needs a
    relayout less and less often."""
    if old is None:
        return 0
    nbytes = sum(entry.nbytes for entry in layout.values())
    grew = sum(layout[name].nbytes for name in old.resized & layout.keys())
    return 2 * grew + max(RESERVE_MIN, nbytes >> max(2, 4 - old.n_relayouts))
