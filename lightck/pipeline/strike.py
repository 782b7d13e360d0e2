"""Older checkpoints that hold stale bytes of a tensor that was written unannounced: remembered, and struck.

A write that moves no version counter is found some checkpoints later. Those in between hold, or may hold, old bytes of
the tensor. They stay until a checkpoint that was made after the discovery is committed, so that at every instant
something is left; then they are made unreadable, durably. A crash between the two is no gap: the right checkpoint says
itself which ones are stale (``after``, in its small state), and they are struck when a training goes on from it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from lightck.pool.writer import PoolWriter
from lightck.tiers.pin import Holds

log = logging.getLogger("lightck")


class Stale:
    """Which checkpoints of the pool are stale. Generations number checkpoints in the order in which they were begun."""

    def __init__(self) -> None:
        self.after: int | None = None
        """Checkpoints with a larger generation are stale, up to the first right one. None: there is none."""
        self._found_at = 0

    def found(self, names: Iterable[str], right_until: int, found_at: int) -> None:
        """These tensors were written unannounced after generation ``right_until``. ``found_at`` was begun last."""
        self.after = right_until if self.after is None else min(self.after, right_until)
        self._found_at = found_at
        log.info(
            "lightck: checkpoints of generations %d to %d may hold old bytes of %s and are struck as soon as a "
            "newer one is committed",
            self.after + 1,
            found_at,
            ", ".join(sorted(names)),
        )

    def committed(self, generation: int, writer: PoolWriter, holds: Holds) -> None:
        """A checkpoint is durable: if it was begun after the discovery, the older ones that are stale are struck."""
        if self.after is None or generation <= self._found_at:
            return
        after, self.after = self.after, None
        strike(writer, holds, after, self._found_at + 1)


def strike(writer: PoolWriter, holds: Holds, after: int, before: int) -> None:
    """The stale checkpoints between these generations (both excluded). Pins of them end."""
    slots = writer.strike(after, before)
    pinned = holds.struck(slots)
    if pinned:
        log.warning(
            "lightck: the pinned checkpoints of steps %s are struck: they hold old bytes of a tensor that was "
            "written unannounced",
            ", ".join(map(str, pinned)),
        )
    if slots:
        log.info("lightck: %d older checkpoints that hold old bytes were struck", len(slots))
