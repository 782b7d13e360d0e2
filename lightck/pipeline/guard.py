"""The write guard: checks that a checkpoint holds what its tensors held at the boundary.

The guard works at four moments. Before the state is read, it checks the tensors that the checkpoint would leave out
(``check_left_out_tensors``). When the copies begin, it remembers the signatures of their sources and reads some of
their bytes (``watch``). At any hook it can compare the signatures (``changed``). When the copies are done, it compares
signatures and checksums (``validate``).

An unannounced write moves no version counter. The guard finds it by reading, perhaps some checkpoints later. The
checkpoints in between may hold old bytes of the tensor: they are *stale*. They stay readable until a checkpoint that
was begun after the discovery has committed, so that the pool always holds something to recover. Then they are struck.
The small state of the new checkpoint says which older ones are stale (``stale_after``). So, if the process crashes
between this commit and the strike, the session that resumes from the new checkpoint strikes the older ones.

Checkpoints that need gradient records are stale too if a check of updates finds that the updates do not lead to the
state of the training (``distrust``).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterable
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
from lightck.state.blocks import BUDGET_NBYTES, FULLY_COMPARED_FIRST, RoundRobin
from lightck.state.inventory import Live

log = logging.getLogger("lightck")


class Rejection(NamedTuple):
    """Why a checkpoint must not commit. ``reason``: a clause for a message. ``names``: the tensors that were written.
    ``unannounced``: the write moved no version counter. ``on_device``: one of the tensors is on a device.
    ``verified_until``: generation of the last checkpoint that is known to be right; those of later generations may hold
    wrong bytes too. None: the rejection says nothing about other checkpoints.
    ``consequence``: as for ``InFlightCheckpoint.drop``."""

    reason: str
    names: list[str]
    unannounced: bool = False
    on_device: bool = False
    verified_until: int | None = None
    consequence: str = ""


class Target:
    """The slot of the next checkpoint, as a strategy sees it (``plan.TargetSlot``)."""

    def __init__(self, unchanged: UnchangedTensors, writer: PoolWriter, slot: Slot) -> None:
        self._unchanged, self._writer, self._slot = unchanged, writer, slot

    @property
    def index(self) -> int:
        return self._slot.index

    def is_stored(self, live: Live, record: TensorRecord) -> bool:
        crcs = self._unchanged.crcs_if_unchanged(live)
        in_slot = bool(self._slot.image.in_slot[record.number])
        return crcs is not None and in_slot and np.array_equal(crcs, self._writer.raw_crcs(self._slot, record.number))

    @property
    def not_due(self) -> frozenset[int]:
        return self._writer.not_due

    @property
    def n_in_homes(self) -> int:
        return self._writer.n_home_entries

    def generation_of(self, record: TensorRecord) -> int | None:
        image = self._slot.image
        return int(image.records["generation"][record.number]) if image.in_slot[record.number] else None


class WriteGuard:
    """The write guard of one session. ``check`` (``LIGHTCK_CHECK=1``): read all bytes at each checkpoint, and raise an
    error for an unannounced write."""

    def __init__(self, check: bool) -> None:
        self.reads_all = check
        self._unchanged = UnchangedTensors()
        self._n_begun = 0
        """Number of checkpoints whose copies have begun."""
        self._device_turn = 0
        """Number of validated checkpoints. It chooses which source on a device is read, and which block of it."""
        self._n_watched = 0
        """Number of checkpoints that had background copies. It is counted apart from ``_n_begun``, because a model that
        grows may have its first background copies late."""
        self._reread_nbytes = 0
        """Bytes of left-out tensors that were read for the next checkpoint."""
        self._round_robin = RoundRobin()
        """Chooses the blocks of sources that are read next."""
        self._verified_until = 0
        """Generation of the newest verified checkpoint: one for which all bytes of the sources in host memory were read
        at the boundary, and whose copies held the same bytes."""
        self.stale_after: int | None = None
        """The checkpoints of the generations after ``stale_after``, up to and including ``_found_generation``, are
        stale. None: no checkpoint is stale."""
        self._found_generation = 0
        """The newest generation at the moment when stale checkpoints were found last."""

    @property
    def copied_at_boundary(self) -> set[str]:
        """Names of tensors that are always copied at the boundary, because something once wrote to them after a
        boundary."""
        return self._unchanged.copied_at_boundary

    def forget(self) -> None:
        """Release every tensor."""
        self._unchanged = UnchangedTensors()

    # -- before a checkpoint is made

    def check_left_out_tensors(self, writer: PoolWriter, updated: Collection[int]) -> None:
        """Look for unannounced writes to the tensors that the next checkpoint would leave out. ``updated``: ids of
        tensors that an optimizer has updated since the last call, and that the next checkpoint therefore writes."""
        self._unchanged.forget(updated)
        generation, block = writer.generation, writer.superblock.block
        names, self._reread_nbytes = self._unchanged.reread(generation, block, self._budget(self._n_begun))
        if names:
            log.warning(
                "lightck: %s was written in a way that moves no version counter of torch (.data, numpy, a fused "
                "kernel or another thread), so lightck took it for unchanged, and the checkpoints since then may hold "
                "an outdated value of it. The next checkpoint writes every tensor. When it is committed, the "
                "checkpoints that may be wrong are struck (made unreadable). From then on the tensor is copied at the "
                "end of each step, before training goes on. You need not do anything.",
                listed([repr(name) for name in sorted(names)]),
            )
            self._unannounced_write(names, self._unchanged.verified_until, writer)

    def _budget(self, n_before: int, spent: int = 0) -> int | None:
        """Return how many bytes to read for the next checkpoint (None: all). ``n_before``: number of earlier
        checkpoints for which bytes were read. ``spent``: bytes that were read for the next checkpoint already. (Even if
        the result is 0, one block is read.)"""
        if self.reads_all or n_before < FULLY_COMPARED_FIRST:
            return None
        return max(BUDGET_NBYTES - spent, 0)

    def target(self, writer: PoolWriter, slot: Slot) -> Target:
        """Return the slot of the next checkpoint, as the strategy sees it."""
        return Target(self._unchanged, writer, slot)

    # -- when its copies begin

    def watch(self, submission: Submission, writer: PoolWriter) -> SourceWatch:
        """Return the watch over the sources of a checkpoint's background copies: the signatures of all sources, and
        checksums of some bytes of the sources in host memory."""
        watched = SourceWatch(submission.background, submission.background_numbers, submission.n_from_devices)
        if submission.background:
            budget = self._budget(self._n_watched, self._reread_nbytes)
            watched.read(submission.blocks(writer), self._round_robin, budget)
            self._n_watched += 1
        return watched

    def begun(self, submission: Submission, writer: PoolWriter, slot: Slot) -> None:
        """Note that a checkpoint was begun: its copies at the boundary are done, and its background copies run."""
        for live, number in submission.frozen:
            self._unchanged.note_written(live, writer.raw_crcs(slot, number))
        self._unchanged.retain([live for live, _ in (*submission.plan.unchanged, *submission.frozen)])
        self._n_begun += 1
        if not self._n_watched:
            self._verified_until = writer.generation  # no checkpoint so far had a background copy

    # -- until it commits

    def changed(self, checkpoint: InFlightCheckpoint) -> Rejection | None:
        """Return a rejection if a source has another signature than at the boundary, because something wrote to the
        source; otherwise None. The copy of such a source may hold bytes from before and from after the write. To copy
        the source again would not help: the new copy would contain the write, and a training that resumes from the
        new copy would make the write again."""
        watched = checkpoint.watched
        names = [watched.lives[i].name for i in watched.changed()]
        who = "a forward" if watched.forward_seen else "something between the end of the step and the next forward"
        return Rejection(f"{who} wrote to a tensor", names) if names else None

    def validate(self, checkpoint: InFlightCheckpoint, writer: PoolWriter) -> Rejection | None:
        """Return why a checkpoint whose copies are done must not commit; None if it may commit."""
        rejection = self.changed(checkpoint)
        if rejection is not None:
            return rejection
        self._device_turn += 1
        names = checkpoint.differing_sources(writer, self._device_turn, self.reads_all)
        if names:
            return Rejection(
                "something wrote to a tensor while it was copied, in a way that moves no version counter of torch "
                "(.data, numpy, a fused kernel or another thread)",
                names,
                unannounced=True,
                on_device=checkpoint.watched.has_on_device(names),
            )
        if checkpoint.watched.was_read_whole:
            self._verified_until = checkpoint.pending.record.generation
        return None

    def given_up(self, rejection: Rejection, writer: PoolWriter) -> None:
        """Handle a checkpoint that was given up: the next checkpoint writes every tensor. With ``check``, an
        unannounced write raises ``StateChangedError``."""
        self.copied_at_boundary.update(rejection.names)
        self._unchanged.reset()
        if rejection.verified_until is not None:
            self._unannounced_write(rejection.names, rejection.verified_until, writer)
        if rejection.unannounced:
            # Only one block of the sources on devices is read for each checkpoint, so no earlier checkpoint is
            # verified.
            verified_until = 0 if rejection.on_device else self._verified_until
            self._unannounced_write(rejection.names, verified_until, writer)
            if self.reads_all:
                raise changed_error(rejection.names, "while a checkpoint was being copied")

    # -- stale checkpoints

    def _unannounced_write(self, names: Iterable[str], verified_until: int, writer: PoolWriter) -> None:
        """Handle an unannounced write to these tensors that was just found. The checkpoint of generation
        ``verified_until`` is the last one that is known to be right. The next checkpoint leaves no tensor out."""
        self.copied_at_boundary.update(names)
        self._unchanged.reset()
        self.stale_after = verified_until if self.stale_after is None else min(self.stale_after, verified_until)
        self._found_generation = writer.generation
        log.info(
            "lightck: the checkpoints of generations %d to %d (as lightck inspect numbers them) may hold old bytes of "
            "%s. They are struck (made unreadable) as soon as a newer checkpoint is committed",
            self.stale_after + 1,
            self._found_generation,
            ", ".join(sorted(names)),
        )

    def distrust(self, after: int, writer: PoolWriter) -> bool:
        """Handle updates that do not lead to the state of the training: the checkpoints of the generations after
        ``after`` are stale, and the next checkpoint is full. Returns whether the pool holds such stale checkpoints."""
        if all((slot.generation or 0) <= after for slot in writer.slots.slots):
            return False
        self.stale_after = after if self.stale_after is None else min(self.stale_after, after)
        self._found_generation = writer.generation
        log.info(
            "lightck: the checkpoints of generations %d to %d (as lightck inspect numbers them) may be recovered with "
            "wrong bytes. They are struck (made unreadable) as soon as a newer checkpoint is committed",
            self.stale_after + 1,
            self._found_generation,
        )
        return True

    def committed(self, generation: int, writer: PoolWriter, events: CommitEvents) -> None:
        """Strike the stale checkpoints once a checkpoint that was begun after the discovery is durable."""
        if self.stale_after is None or generation <= self._found_generation:
            return
        after, self.stale_after = self.stale_after, None
        strike(writer, events, after, self._found_generation + 1)


Validator = Callable[[InFlightCheckpoint, PoolWriter], Rejection | None]
"""Why a checkpoint whose copies are done must not commit, or None."""


def weak_validator(validate: Validator) -> Validator:
    """Return this bound method as a function that does not keep its object alive. (The pipeline outlives a session that
    is collected. An object that leads to the model, kept alive by the pipeline, would keep the session open for ever.)
    A checkpoint that was not validated before is given up then."""
    reference = weakref.WeakMethod(validate)

    def validate_if_alive(checkpoint: InFlightCheckpoint, writer: PoolWriter) -> Rejection | None:
        method = reference()
        if method is not None:
            return method(checkpoint, writer)
        consequence = "Close a session (session.close(), or leave its `with`), and its last step is saved."
        return Rejection(
            "its session was garbage-collected before its copies were checked", [], consequence=consequence
        )

    return validate_if_alive


def strike(writer: PoolWriter, events: CommitEvents, after: int, before: int) -> None:
    """Make the checkpoints between these generations (both excluded) unreadable, even if they are held."""
    events.stop_reading()
    slots = writer.strike(after, before)
    if slots:
        events.struck(slots)
        log.info(
            "lightck: %d older checkpoints were struck (made unreadable): they may hold a wrong value of a tensor",
            len(slots),
        )
