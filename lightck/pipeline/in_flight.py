"""A version between its boundary and its end, with the sources that its background copies read."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from lightck.interrupts import raise_if_interrupted
from lightck.pipeline.sources import SourceWatch
from lightck.pool.engine import COPIED, ENDED, JOBS_MAX, THREADS_MAX
from lightck.pool.writer import Pending, PoolWriter

log = logging.getLogger("lightck")


@dataclass(slots=True)
class InFlightCheckpoint:
    """Open to doubt until its job is released."""

    pending: Pending
    watched: SourceWatch
    step: int
    is_apart: bool
    """It came from devices, and all of it was taken in the order of their work: nothing is left to doubt."""

    @property
    def jobs(self) -> int:
        """Entries of the engine that it takes."""
        return 1 + len(self.pending.job.parts)

    def audit(self, writer: PoolWriter, turn: int, whole: bool) -> list[str]:
        """As ``SourceWatch.audit``, of what was copied. Its copies are done."""
        of_record = partial(writer.raw_crcs, self.pending.slot)
        return self.watched.audit(self.pending.slot.image.raw, of_record, writer.superblock.block, turn, whole)

    def drop(self, reason: str, names: Sequence[str]) -> None:
        """Give it up, and say so."""
        log.warning(
            "lightck: the version of step %d is given up: %s (%s). It is copied at once at the boundary from "
            "here on. Weight swaps belong into `with session.paused():`.",
            self.step,
            reason,
            ", ".join(names[:3]),
        )
        self.pending.job.drop()
        self.pending.job.forget()

    def commit(self) -> None:
        """Now, while its sources cannot change. Where it fails, nothing of it is under way afterwards."""
        job = self.pending.job
        try:
            job.wait(COPIED, pause=raise_if_interrupted)
            job.release()
            job.wait(ENDED)  # once it is released it goes on to its end, whoever waits
        except BaseException:
            job.abandon()
            raise


def left(deadline: float | None) -> float | None:
    """Seconds, none where it has passed. ``deadline``: of ``time.monotonic``."""
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)


def room_for_parts(checkpoints: Sequence[InFlightCheckpoint], behind_max: int) -> int:
    """How many jobs a version may take beside the one that commits it. Each version that can be under way at once gets
    its share of the engine's entries, and each copy thread, and the one that waits for devices, may hold one that is
    free."""
    entries = JOBS_MAX - THREADS_MAX - 1
    share = entries // (behind_max + 1) - 1
    to_come = max(behind_max - len(checkpoints), 0)
    return min(share, entries - 1 - to_come - sum(checkpoint.jobs for checkpoint in checkpoints))
