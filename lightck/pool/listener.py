"""Who hears of checkpoints: pins, exports, a trace; later tiers and the ranks of a group.

The pipeline knows none of them by name. It tells what happens to checkpoints, on the training thread, and each does
what it has to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightck.pool.format.layout import Entry
    from lightck.pool.reader import StoredCheckpoint
    from lightck.pool.writer import PoolWriter


class CommitListener:
    """Each method here does nothing: a listener has those that it needs."""

    def adopted(self, writer: PoolWriter, step: int) -> None:
        """A training goes on from the checkpoint of this step."""

    def begun(self, generation: int, step: int, entries: Sequence[Entry]) -> None:
        """A checkpoint has a slot, and its copies are under way."""

    def committed(self, writer: PoolWriter, step: int) -> None:
        """The checkpoint of this step is durable, and no newer one is yet taken note of."""

    def stop_reading(self) -> None:
        """Return when nothing of older checkpoints is read any more: they are struck, or the pool's file is left."""

    def struck(self, slots: Sequence[int]) -> None:
        """What lay in these slots can be read by nobody any more: it held wrong bytes."""

    def checkpoints_to_carry(self, old: PoolWriter) -> Sequence[StoredCheckpoint]:
        """Checkpoints that a new pool file has to take along, oldest first."""
        return ()

    def carry(self, new: PoolWriter) -> None:
        """Commit them in the new file, which has no name yet. What fails here leaves the old file in use."""

    def relayout_done(self, new: PoolWriter) -> None:
        """The new file is the pool now."""

    def relayout_failed(self) -> None:
        """The new file came to nothing: the old one stays in use."""

    def closing(self, writer: PoolWriter | None) -> None:
        """No checkpoint is under way or comes any more. The pool is still there to be read."""

    def closed(self) -> None:
        """The pool is given up."""

    @property
    def called_from_own_thread(self) -> bool:
        """Whether the caller is on a thread of this listener."""
        return False


class CommitEvents(CommitListener):
    """Passes each event on to its listeners, in the order in which they were added."""

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

    def checkpoints_to_carry(self, old: PoolWriter) -> Sequence[StoredCheckpoint]:
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
