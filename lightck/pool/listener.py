"""Commit events: what happens to the checkpoints of a pool. Pins, exports and traces listen to these events.

The pipeline imports no listener. It calls the methods of ``CommitListener`` on the training thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from lightck.pool.format.layout import Entry
    from lightck.pool.writer import PoolWriter


class CarriedCheckpoint(Protocol):
    """A checkpoint that a relayout carries over to the new file."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Name -> entry of each of its tensors."""
        ...

    @property
    def state(self) -> bytes:
        """The packed small state."""
        ...


class CommitListener:
    """Base class of listeners: each method does nothing, and a subclass overrides those that it needs."""

    def adopted(self, writer: PoolWriter, step: int) -> None:
        """A training continues from the checkpoint of this step."""

    def begun(self, generation: int, step: int, entries: Sequence[Entry]) -> None:
        """The checkpoint has a slot, and its copies are under way. ``entries``: the entries of the pool at this moment,
        in the order of their record numbers."""

    def committed(self, writer: PoolWriter, step: int) -> None:
        """The checkpoint of this step is durable, and is the newest committed checkpoint in the pool of ``writer``."""

    def stop_reading(self) -> None:
        """Stop reading older checkpoints, and return only when no thread of this listener reads one any more. Called
        before checkpoints are struck, and before the pool moves to a new file."""

    def struck(self, slots: Sequence[int]) -> None:
        """The checkpoints in these slots (indexes) held old bytes and were made unreadable."""

    def relayout_begins(self, old: PoolWriter) -> None:
        """The pool moves to a new file. After this call ``relayout_done`` or ``relayout_failed`` follows."""

    def checkpoints_to_carry(self, old: PoolWriter) -> Sequence[CarriedCheckpoint]:
        """Return the checkpoints of the old file that a relayout must carry over to the new one, oldest first."""
        return ()

    def carry(self, new: PoolWriter) -> None:
        """Commit, in the new file, the checkpoints that ``checkpoints_to_carry`` returned. The new file is not visible
        at the pool's path yet. If this method raises, the old file stays in use."""

    def relayout_done(self, new: PoolWriter) -> None:
        """The new file has replaced the old one."""

    def relayout_failed(self) -> None:
        """The new file could not be made. The old file stays in use."""

    def closing(self, writer: PoolWriter | None) -> None:
        """No checkpoint is in flight, and no further one will begin. The pool can be read until ``closed`` is called.
        ``writer``: None if no pool was opened."""

    def closed(self) -> None:
        """The pool is closed."""

    @property
    def called_from_own_thread(self) -> bool:
        """Whether the calling thread is one that this listener started."""
        return False


class CommitEvents(CommitListener):
    """Passes each event to the added listeners, in the order in which they were added."""

    def __init__(self) -> None:
        self._listeners: tuple[CommitListener, ...] = ()

    def add(self, listener: CommitListener) -> None:
        self._listeners = (*self._listeners, listener)

    def remove(self, listener: CommitListener) -> None:
        self._listeners = tuple(one for one in self._listeners if one is not listener)

    def adopted(self, writer: PoolWriter, step: int) -> None:
        for one in self._listeners:
            one.adopted(writer, step)

    def begun(self, generation: int, step: int, entries: Sequence[Entry]) -> None:
        for one in self._listeners:
            one.begun(generation, step, entries)

    def committed(self, writer: PoolWriter, step: int) -> None:
        for one in self._listeners:
            one.committed(writer, step)

    def stop_reading(self) -> None:
        for one in self._listeners:
            one.stop_reading()

    def struck(self, slots: Sequence[int]) -> None:
        for one in self._listeners:
            one.struck(slots)

    def relayout_begins(self, old: PoolWriter) -> None:
        for one in self._listeners:
            one.relayout_begins(old)

    def checkpoints_to_carry(self, old: PoolWriter) -> Sequence[CarriedCheckpoint]:
        return [checkpoint for one in self._listeners for checkpoint in one.checkpoints_to_carry(old)]

    def carry(self, new: PoolWriter) -> None:
        for one in self._listeners:
            one.carry(new)

    def relayout_done(self, new: PoolWriter) -> None:
        for one in self._listeners:
            one.relayout_done(new)

    def relayout_failed(self) -> None:
        for one in self._listeners:
            one.relayout_failed()

    def closing(self, writer: PoolWriter | None) -> None:
        for one in self._listeners:
            one.closing(writer)

    def closed(self) -> None:
        for one in self._listeners:
            one.closed()

    @property
    def called_from_own_thread(self) -> bool:
        return any(one.called_from_own_thread for one in self._listeners)
