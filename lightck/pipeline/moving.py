"""A pool that does not fit any more moves to a new file: what is held is carried over, then a version commits there,
and only then the file gets the pool's name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from lightck.pipeline.table import in_order_of_need, room_for, spare_nbytes
from lightck.pool.format.layout import Entry
from lightck.pool.writer import PoolWriter
from lightck.tiers.pin import Holds, carry_all

T = TypeVar("T")


class MakesWriter(Protocol):
    """Makes a pool beside the one that there is: for these tensors, so much small state, and room to grow."""

    def __call__(
        self, entries: Sequence[Entry], state_nbytes: int, spare_nbytes: int = 0, extras: Sequence[Entry] = ()
    ) -> PoolWriter: ...


def move(
    old: PoolWriter | None,
    make: MakesWriter,
    holds: Holds,
    entries: Sequence[Entry],
    state_nbytes: int,
    first: Callable[[PoolWriter], T],
) -> tuple[PoolWriter, T]:
    """The writer of the new file, and what ``first`` said, which commits a version there. Where anything fails the new
    file is gone and ``old`` is as it was; else it is the caller's to close. Nothing is under way in it."""
    moving = holds.versions(old) if old is not None else []
    held = [entry for _, version in moving for entry in version.entries.values()]
    table, extras = room_for(old, entries, held)
    state_nbytes = max([state_nbytes, *(len(version.state) for _, version in moving)])
    writer = make(in_order_of_need(table.values()), state_nbytes, spare_nbytes(old, table), extras)
    try:
        lines = carry_all(moving, writer)
        result = first(writer)
        writer.reader.container.publish()
    except BaseException:
        writer.close()
        raise
    holds.moved(lines, writer)
    return writer, result
