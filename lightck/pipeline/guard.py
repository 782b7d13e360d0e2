"""The write guard: whether a checkpoint holds what its tensors held at the boundary, whoever wrote to them meanwhile.

It is asked four times. Before the state is read: was something written that the checkpoint would leave out (``audit``)?
When the copies begin: what do their sources look like, and what do they hold (``watch``)? At any hook: do they still
look so (``moved``)? When the copies are done: do they hold it too (``validate``)?

What moves no version counter is found by reading, some checkpoints later. Those in between hold, or may hold, old
bytes of the tensor: they are *stale*. They stay until a checkpoint that was begun after the discovery is committed, so
that at every instant something is left; then they are struck. A crash between the two is no gap: the right checkpoint
says itself which ones are stale (``stale_after``, in its small state), and they are struck when a training goes on from
it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from lightck.errors import listed
from lightck.pipeline.in_flight import InFlightCheckpoint
from lightck.pipeline.sources import SourceWatch, UnchangedTensors, changed_error
from lightck.pipeline.submission import Submission
from lightck.pipeline.write_table import TensorRecord
from lightck.pool.listener import CommitEvents
from lightck.pool.slots import Slot
from lightck.pool.writer import PoolWriter
from lightck.state.blocks import BUDGET_NBYTES, WHOLE_CHECKPOINTS, Turn
from lightck.state.inventory import Live

log = logging.getLogger("lightck")


class Verdict(NamedTuple):
    """Why a checkpoint must not commit. ``unannounced``: no version counter tells of the write."""

    reason: str
    names: list[str]
    unannounced: bool = False


class Target:
    """A slot about to be written, as a strategy sees it (``plan.TargetSlot``)."""

    def __init__(self, resting: UnchangedTensors, writer: PoolWriter, slot: Slot) -> None:
        self._unchanged, self._writer, self._slot = resting, writer, slot

    @property
    def index(self) -> int:
        return self._slot.index

    def is_stored(self, live: Live, record: TensorRecord) -> bool:
        crcs = self._unchanged.crcs_if_unchanged(live)
        in_slot = bool(self._slot.image.in_slot[record.number])
        return crcs is not None and in_slot and np.array_equal(crcs, self._writer.raw_crcs(self._slot, record.number))

    def generation_of(self, record: TensorRecord) -> int | None:
        image = self._slot.image
        return int(image.records["generation"][record.number]) if image.in_slot[record.number] else None


class WriteGuard:
    """Of one session. ``check`` (``LIGHTCK_CHECK=1``): all is read at each checkpoint, and a write is an error."""

    def __init__(self, check: bool) -> None:
        self._check = check
        self._unchanged = UnchangedTensors()
        self._n_begun = self._turn = 0
        self._audited_nbytes = 0
        self._proof_turn, self._proved_until = Turn(), 0
        self.stale_after: int | None = None
        """Checkpoints of a larger generation are stale, up to the first right one. None: there is none."""
        self._found_at = 0

    @property
    def copied_at_boundary(self) -> set[str]:
        """Names of tensors that are copied at the boundary itself: something wrote to them before."""
        return self._unchanged.copied_at_boundary

    def forget(self) -> None:
        """Let go of every tensor."""
        self._unchanged = UnchangedTensors()

    # -- before a checkpoint is made

    def audit(self, writer: PoolWriter) -> None:
        """Look whether what the next checkpoint would leave out was written unannounced."""
        generation, block = writer.generation, writer.superblock.block
        names, self._audited_nbytes = self._unchanged.audit(generation, block, self._budget())
        if names:
            log.warning(
                "lightck: %s was written in a way that moves no version counter (.data, numpy, a fused kernel "
                "or another thread), and was taken for unchanged. The next checkpoint is written whole, and "
                "the tensor is copied at every boundary from there on. Older checkpoints that hold its old "
                "bytes are struck when that one is committed.",
                listed([repr(name) for name in sorted(names)]),
            )
            self._found(names, self._unchanged.right_until, writer)

    def _budget(self, spent: int = 0) -> int | None:
        """Bytes to read again for the next checkpoint, ``spent`` of which were read already; None: all. (At least one
        block is read, whatever the budget.)"""
        if self._check or self._n_begun < WHOLE_CHECKPOINTS:
            return None
        return max(BUDGET_NBYTES - spent, 0)

    def target(self, writer: PoolWriter, slot: Slot) -> Target:
        """What a strategy is told of the slot that the next checkpoint gets."""
        return Target(self._unchanged, writer, slot)

    # -- when its copies begin

    def watch(self, submission: Submission, writer: PoolWriter) -> SourceWatch:
        """The sources of its copies, as they look and what they hold. Of devices too: sending has added theirs."""
        watched = SourceWatch(submission.background, submission.background_numbers, submission.n_followed)
        watched.prove(submission.blocks(writer), self._proof_turn, self._budget(self._audited_nbytes))
        return watched

    def begun(self, submission: Submission, writer: PoolWriter, slot: Slot) -> None:
        """Its copies are under way, and what had to be copied at the boundary is."""
        for live, number in submission.frozen:
            self._unchanged.written(live, writer.raw_crcs(slot, number))
        left_out = [live for live, _ in submission.plan.unchanged]
        self._unchanged.keep([*left_out, *(live for live, _ in submission.frozen)])
        self._n_begun += 1

    # -- until it commits

    def moved(self, checkpoint: InFlightCheckpoint) -> Verdict | None:
        """Whether its sources look otherwise than at the boundary. Their copies may have come before the write or after
        it, so nothing tells what it holds; copying again is no cure, since a loop that goes on from there writes
        again."""
        watched = checkpoint.watched
        names = [watched.lives[i].name for i in watched.moved()]
        who = "a forward" if watched.forward_seen else "something between the boundary and the next forward"
        return Verdict(f"{who} wrote to it", names) if names else None

    def validate(self, checkpoint: InFlightCheckpoint, writer: PoolWriter) -> Verdict | None:
        """Its copies are done: why it must not commit, or None."""
        verdict = self.moved(checkpoint)
        if verdict is not None:
            return verdict
        self._turn += 1
        names = checkpoint.audit(writer, self._turn, self._check)
        if names:
            return Verdict(
                "something wrote to it while it was copied, in a way that moves no version counter "
                "(.data, numpy, a fused kernel or another thread)",
                names,
                unannounced=True,
            )
        if checkpoint.watched.is_proved_whole:
            self._proved_until = checkpoint.pending.record.generation
        return None

    def given_up(self, verdict: Verdict, writer: PoolWriter) -> None:
        """The checkpoint was dropped: the next one is written whole. Raises ``StateChangedError`` under ``check``."""
        self.copied_at_boundary.update(verdict.names)
        self._unchanged.trust_none()
        if verdict.unannounced:
            self._found(verdict.names, self._proved_until, writer)
            if self._check:
                raise changed_error(verdict.names, "while a version was being copied")

    # -- stale checkpoints

    def _found(self, names: Iterable[str], right_until: int, writer: PoolWriter) -> None:
        """These were written unannounced after the checkpoint of generation ``right_until``: nothing is taken for
        unchanged before it was written whole again."""
        self.copied_at_boundary.update(names)
        self._unchanged.trust_none()
        self.stale_after = right_until if self.stale_after is None else min(self.stale_after, right_until)
        self._found_at = writer.generation
        log.info(
            "lightck: checkpoints of generations %d to %d may hold old bytes of %s and are struck as soon as a "
            "newer one is committed",
            self.stale_after + 1,
            self._found_at,
            ", ".join(sorted(names)),
        )

    def committed(self, generation: int, writer: PoolWriter, events: CommitEvents) -> None:
        """A checkpoint is durable: where it was begun after the discovery, the older ones that are stale are struck."""
        if self.stale_after is None or generation <= self._found_at:
            return
        after, self.stale_after = self.stale_after, None
        strike(writer, events, after, self._found_at + 1)


def strike(writer: PoolWriter, events: CommitEvents, after: int, before: int) -> None:
    """The stale checkpoints between these generations (both excluded), whoever holds them."""
    events.stop_reading()
    slots = writer.strike(after, before)
    if slots:
        events.struck(slots)
        log.info("lightck: %d older checkpoints that hold old bytes were struck", len(slots))
