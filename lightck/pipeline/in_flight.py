"""A checkpoint between its boundary and its commit, with the sources that its background copies read. Or a gradient
record that is not committed, between the boundary of its step and its last store."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from lightck.errors import listed
from lightck.interrupts import raise_if_interrupted
from lightck.pipeline.sources import SourceWatch
from lightck.pool.engine import COPIED, ENDED, JOBS_MAX, THREADS_FOR_DIRECT_WRITES
from lightck.pool.writer import Pending, PoolWriter

log = logging.getLogger("lightck")
_SOURCE_WAS_WRITTEN = (
    "The copy may mix bytes from before and after the write. From now on this tensor is copied at the end of each "
    "step, before training goes on. If the loop swaps weights and puts them back, let it do so inside "
    "`with session.paused():`."
)


FRACTION_LEFT_MAX = 1 / 3
"""In a group of ranks, the layers of a layer-wise update are copied while the gradients of other layers are reduced. If
at most this fraction of the bytes is left at the boundary, the training thread copies it there, and commits. The copy
threads have idle priority: beside the next forward and backward of all ranks of a host they would get no processor for
half a step."""


@dataclass(slots=True)
class InFlightCheckpoint:
    """A checkpoint that is not committed yet. The checkpoint is unvalidated until its job is released."""

    pending: Pending
    watched: SourceWatch
    step: int
    needs_no_validation: bool
    """Whether no later write can reach the copies of the checkpoint, and the step has no captured update, which the
    validators would have to check. The host makes these copies at the boundary; a device makes them before it does any
    work that is queued after the boundary."""

    def fraction_left(self) -> float:
        """Return which fraction of the bytes that are copied in the background is not copied yet."""
        nbytes = sum(live.written.nbytes for live in self.watched.lives)
        return 1 - min(self.pending.job.info().nbytes / nbytes, 1) if nbytes else 0.0

    @property
    def n_jobs(self) -> int:
        """Number of the engine's jobs that the checkpoint uses."""
        return 1 + len(self.pending.job.parts)

    def differing_sources(self, writer: PoolWriter, turn: int, whole: bool) -> list[str]:
        """Return the names of tensors whose copies are wrong (see ``SourceWatch.differing``). Call only when the copies
        of this checkpoint are done."""
        crcs_of_record = partial(writer.raw_crcs, self.pending.slot)
        return self.watched.differing(self.pending.slot.image.raw, crcs_of_record, writer.superblock.block, turn, whole)

    def drop(self, reason: str, names: Sequence[str], consequence: str = "") -> None:
        """Give the checkpoint up with a warning that names the tensors. ``consequence``: sentences about what follows
        and what to do; "": those for a source that was written."""
        log.warning(
            "lightck: the %s of step %d is given up: %s. %s%s",
            "checkpoint" if self.pending.commits else "gradient record",
            self.step,
            reason,
            f"Tensor: {listed(names)}. " if names else "",
            consequence or _SOURCE_WAS_WRITTEN,
        )
        self.pending.job.drop()
        self.pending.job.forget()

    def forget_sources(self) -> None:
        """Drop the references to the sources. Call when no copy reads them any more."""
        self.watched = SourceWatch((), ())

    def commit(self) -> None:
        """Wait for the copies, then commit the checkpoint, and wait until that is done. Meanwhile the caller keeps the
        sources unchanged. If this raises, no copy is running any more."""
        job = self.pending.job
        try:
            job.wait(COPIED, pause=raise_if_interrupted)
            job.release()
            job.wait(ENDED)  # no ``pause``: to interrupt this wait would not stop a released job
        except BaseException:
            job.abandon()
            raise


def seconds_left(deadline: float | None) -> float | None:
    """Return the seconds until ``deadline``, a time of ``time.monotonic``, or 0 if it has passed. Return None if
    ``deadline`` is None."""
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)


def job_budget(checkpoints: Sequence[InFlightCheckpoint], uncommitted_max: int) -> int:
    """Return how many jobs the next checkpoint may use besides the job that commits it. ``checkpoints``: all that are
    in flight now. ``uncommitted_max``: how many checkpoints may still be uncommitted when the next update begins.

    The engine's job table has ``JOBS_MAX`` entries. Each copy thread (by default there are at most
    ``THREADS_FOR_DIRECT_WRITES``), and the transfer thread, can still refer to an entry that was freed, so one entry
    stays unused for each of these threads. The checkpoints that can be in flight at the same time share the other
    entries equally. Of the entries that are free now, one is kept for the job that commits the next checkpoint, and one
    for each further checkpoint that can begin before an entry is freed."""
    entries = JOBS_MAX - THREADS_FOR_DIRECT_WRITES - 1
    share = entries // (uncommitted_max + 1) - 1
    to_come = max(uncommitted_max - len(checkpoints), 0)
    return min(share, entries - 1 - to_come - sum(checkpoint.n_jobs for checkpoint in checkpoints))
