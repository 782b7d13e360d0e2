"""From the tensors of a closed version to its commit line, in four verbs.

    plan        which tensors are written, from where, at the boundary or behind it (the strategy; pure)
    submit      a slot, the copies at the boundary, the rest to the engine: the version is in flight
    validate    its copies are done: do its sources hold what was copied? (the write guard)
    settle      it is released to commit, or given up; whoever listens hears of it

One version at a time is *open to doubt*: its copies run in the background while the loop goes on, and it may commit
only once every source looks as it did at the boundary and all bytes are copied. The gate, before the next update, is
where doubt ends: the version commits or is dropped. Invariant: no update begins while a source is still needed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import zip_longest

import torch

from lightck.errors import LightckError
from lightck.interrupts import Interrupted, leave_if_noted
from lightck.pipeline.current_pool import CurrentPool
from lightck.pipeline.decision import Decisions
from lightck.pipeline.eager_copies import EagerCopies
from lightck.pipeline.guard import Verdict, WriteGuard, strike
from lightck.pipeline.in_flight import InFlightCheckpoint, left, room_for_parts
from lightck.pipeline.plan import Strategy, WritePlan
from lightck.pipeline.staging.kinds import Kind
from lightck.pipeline.staging.sending import Staging
from lightck.pipeline.submission import Submission
from lightck.pipeline.wait_policy import WaitPolicy
from lightck.pipeline.write_table import NoExtentError, WriteTable, WriteTableCache
from lightck.pool.engine import COPIED, ENDED, Engine
from lightck.pool.format.structures import NextBatch
from lightck.pool.listener import CommitEvents
from lightck.pool.slots import Slot
from lightck.pool.storage.backend import Backend
from lightck.pool.storage.durability import Durability
from lightck.pool.storage.lock import PoolLock
from lightck.pool.writer import PoolWriter, RelayoutNeededError
from lightck.state.inventory import entry_of
from lightck.state.signatures import ClosedStep
from lightck.stats import Meter

log = logging.getLogger("lightck")


class Pipeline:
    """Takes closed versions and brings them to their commit, in order.

    ``events`` hears of each; ``decisions`` has a say in whether one may commit, and in which slot it may lie.
    """

    def __init__(
        self,
        path: str,
        backend: Backend,
        durability: Durability,
        slots: int,
        meter: Meter,
        strategy: Strategy,
        staging: Kind | None = None,
        *,
        check: bool = False,
        lock: PoolLock | None = None,
    ) -> None:
        self.path, self.durability = path, durability
        self.committed: int | None = None
        self.engine, self.events, self.decisions = Engine(), CommitEvents(), Decisions()
        self.pool = CurrentPool(path, backend, durability, self.engine, slots, lock, self.events)
        self.guard, self.eager = WriteGuard(check), EagerCopies(check)
        self.staging = Staging(meter, staging, runs_behind=slots > 2, is_on=not check)
        self.wait_policy = WaitPolicy(self.engine, meter, is_on=not check)
        self._strategy, self._meter, self._check = strategy, meter, check
        self._behind_max = slots - 2
        self._in_flight: list[InFlightCheckpoint] = []
        self._tables: WriteTableCache | None = None
        self._writes_all = True
        """The last plan wrote all tables that it was given."""
        self._newest: tuple[PoolWriter, Slot, int] | None = None
        """Where the version lies that was closed last: pool, slot, generation."""

    @property
    def is_here(self) -> bool:
        """Whether the caller is on a thread of the background, which the end of a session waits for."""
        return self.staging.is_here or self.events.called_from_own_thread

    def adopted(
        self, step: int, at_boundary: Sequence[str], slots: int | None, generation: int, stale_after: int | None
    ) -> None:
        """The version that this session goes on from is in the pool and named by a durable line. ``generation``: of its
        payload; ``stale_after``: what it says of older ones."""
        writer = self._writer
        self.committed = step
        if stale_after is not None:
            strike(writer, self.events, stale_after, generation)
        self.guard.never.update(at_boundary)
        self.pool.want_slots(slots)
        self.events.adopted(writer, step)

    @property
    def _writer(self) -> PoolWriter:
        assert self.pool.writer is not None, "what is in flight is on its way into a pool"
        return self.pool.writer

    # -- a version enters --------------------------------------------------------------------------------

    def audit(self) -> None:
        """Before a version's state is read: look whether what it would leave out was written unannounced."""
        if self.pool.writer is not None:
            self.guard.audit(self.pool.writer)

    def begin_checkpoint(self, closed_step: ClosedStep) -> None:
        """Begin writing a version. Small tensors, buffers and state are copied before this returns."""
        self._reap()
        self._newest = None
        self.guard.never.update(closed_step.at_boundary)
        if not self.decisions.may_commit(closed_step):
            self.eager.drop()
            return
        try:
            writer = self.pool.ready()
            self.wait_policy.checkpoint_begins()
            checkpoint = self._begin(writer, closed_step)
        except RelayoutNeededError as why:
            self._relayout(closed_step, why)
            return
        self._in_flight.append(checkpoint)
        self._newest = writer, checkpoint.pending.slot, checkpoint.pending.record.generation
        if checkpoint.is_apart:
            with suppress(LightckError):  # it failed already, which the gate tells
                checkpoint.pending.job.release()

    def _begin(self, writer: PoolWriter, closed_step: ClosedStep) -> InFlightCheckpoint:
        tables = self._tables_of(writer, closed_step)
        slot = self._take_slot(writer)
        plan = self._strategy.plan(closed_step, tables, self.guard.target(writer, slot))
        self._writes_all = all(mine is given for mine, given in zip_longest(plan.tables, tables))
        return self.submit(writer, slot, plan)

    def _tables_of(self, writer: PoolWriter, closed_step: ClosedStep) -> list[WriteTable]:
        """All tensors of the version with their records. Raises ``RelayoutNeededError``."""
        if self._tables is None or self._tables.writer is not writer:
            self._tables = WriteTableCache(writer)
        try:
            return self._tables.of(closed_step, self.guard.never)
        except NoExtentError as need:
            self.finish()  # the images of the slots are replaced: nothing may be under way
            self.eager.drop()
            self._tables.add(need.entries, closed_step.lives)
            return self._tables.of(closed_step, self.guard.never)

    def submit(self, writer: PoolWriter, slot: Slot, plan: WritePlan) -> InFlightCheckpoint:
        """Copy what is copied at the boundary, and hand the rest to the engine."""
        submission = Submission(plan)
        begun, again = self.eager.sift(submission.background, submission.background_numbers)
        self._meter.recopied += again
        room = room_for_parts(self._in_flight, self._behind_max)
        with self.staging.sending(writer, slot, submission, self.eager.reservation, room) as (reservation, sent):
            watched = self.guard.watch(submission, writer)
            pending = writer.begin(submission.copy_plan(begun, sent), slot, submission.keep, reservation)
        # From here on nothing may fail before there is a flight: it is what ends the job and frees the slot.
        closed_step = plan.closed_step
        is_apart = len(sent) > 0 and not submission.background
        checkpoint = InFlightCheckpoint(pending, watched, closed_step.step, is_apart)
        self.eager.taken()
        self.guard.begun(submission, writer, slot)
        self._meter.left_out = len(plan.unchanged)
        self.events.begun(pending.record.generation, closed_step.step, writer.entries)
        return checkpoint

    def _take_slot(self, writer: PoolWriter) -> Slot:
        """That of the early copies, or a free one, for which older versions are waited for."""
        if self.eager.reservation is not None:
            return self.eager.reservation.slot
        while True:
            slot = writer.slots.choose(self.decisions.held(writer))
            if slot is not None:
                return slot
            if not self._in_flight:
                raise LightckError(
                    "No slot of the pool is left to write to: the others failed. The last committed version is "
                    "intact. Put the pool on a sound medium and start again with resume=True."
                )
            self._finish(self._in_flight[0])

    def copy_eagerly(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are what they will be in the version to come: their copies begin now, where they can."""
        self.wait_policy.checkpoint_begins(eager=True)
        tables, writer = self._tables, self.pool.writer
        if tables is None or writer is None or tables.writer is not writer or not self._writes_all:
            return  # where a plan leaves something out, what is copied may be that
        room = room_for_parts(self._in_flight, self._behind_max)
        if room > 0 and self.eager.wants_slot(tables):
            slot = writer.slots.choose(self.decisions.held(writer))
            if slot is not None:
                self.eager.begin(tables, slot)
        self.eager.copy(tensors, room)

    def store_next_batch(self, entries: Sequence[NextBatch]) -> None:
        """Record what followed the version that was closed last, where it still lies in its slot. A medium that fails
        here fails the next version too, and that one tells."""
        if self._newest is not None:
            writer, slot, generation = self._newest
            if writer is self.pool.writer:
                with suppress(LightckError):
                    writer.store_next_batch(slot, generation, entries)

    # -- a new pool file ---------------------------------------------------------------------------------

    def _relayout(self, closed_step: ClosedStep, why: RelayoutNeededError) -> None:
        """A new pool file for what no longer fits: its first commit, then its name, only then acknowledged."""

        def first(writer: PoolWriter) -> InFlightCheckpoint:
            checkpoint = self._begin(writer, closed_step)
            checkpoint.commit()
            return checkpoint

        entries = [entry_of(live) for live in closed_step.lives]
        try:
            self.finish()
            if self.pool.writer is not None:
                log.info("lightck: %s; the pool %r is laid out anew", why, self.path)
            self.eager.drop()
            checkpoint = self.pool.move(entries, len(closed_step.state), first)
            self._note_committed(checkpoint)
            self._newest = self._writer, checkpoint.pending.slot, checkpoint.pending.record.generation
        except Interrupted:
            self.pool.wanted_slots = self.pool.n_slots  # for when this is begun again
            raise

    def have_slots(self, needed: int) -> None:
        """Move to a new file where fewer slots than these can be written. Every version has ended."""
        pool, writer = self.pool, self._writer
        before = pool.n_slots, pool.wanted_slots
        try:
            wanted = max(needed, pool.wanted_slots or 0)
            if writer.slots.n_usable < wanted:
                pool.n_slots = max(wanted, pool.n_slots)
                log.info("lightck: the pool %r is laid out anew with %d slots, for a pin", self.path, pool.n_slots)
                original_generation = (
                    self._newest[1].original_generation or self._newest[2] if self._newest is not None else None
                )
                self.eager.drop()
                pool.move((), 0, lambda _: None)
                self._newest = _slot_of_original(self._writer, original_generation)
            pool.wanted_slots = None  # fewer slots were asked for, and these are needed
        except BaseException:
            pool.n_slots, pool.wanted_slots = before
            raise

    # -- a version ends ----------------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """A training forward starts: what moved since the boundary was written by the loop, and not by a forward."""
        for checkpoint in self._unvalidated():
            if not checkpoint.watched.forward_seen:
                checkpoint.watched.forward_seen = not self._give_up(checkpoint, self.guard.moved(checkpoint))
        self.poll()

    def poll(self) -> None:
        """Let versions commit whose bytes are all copied from sources that have not moved. Waits for nothing."""
        if self._check:
            return
        for checkpoint in self._unvalidated():
            if checkpoint.pending.job.info().state == COPIED and not checkpoint.watched.moved():
                self.settle(checkpoint)

    def copies_done(self) -> None:
        """Help until no copy is under way: arbitrary code (an evaluation with swapped weights) may follow."""
        with self._meter.wait():
            self.eager.wait()
            for checkpoint in self._unvalidated():
                self._wait_or_fail(checkpoint, COPIED)
                if not checkpoint.watched.moved():
                    self.settle(checkpoint)

    def gate(self) -> None:
        """Before an update: every source is released, and all versions but the newest slots-2 have committed.
        ``slots`` as attach was told: those for pins and for keep= put nothing off."""
        if not self._in_flight:
            return
        with self._meter.wait():
            for checkpoint in self._unvalidated():
                self.settle(checkpoint)
            while len(self._in_flight) > self._behind_max:
                self._finish(self._in_flight[0])
        self._reap()
        self.wait_policy.gate_passed()

    def finish(self, deadline: float | None = None) -> bool:
        """Bring every closed version to its end. False where they were not by then (of ``time.monotonic``)."""
        with self._meter.wait():
            for checkpoint in self._unvalidated():
                if not checkpoint.pending.job.wait(COPIED, left(deadline), pause=leave_if_noted):
                    return False
                self.settle(checkpoint)
            while self._in_flight:
                if not self._in_flight[0].pending.job.wait(ENDED, left(deadline), pause=leave_if_noted):
                    return False
                self._reap()
        return True

    def finish_quietly(self) -> None:
        """As ``finish``, where nobody is left to raise to: an error is logged, its version stays uncommitted."""
        try:
            self.finish()
        except Exception as err:
            log.error("lightck: %s", err)

    def _unvalidated(self) -> list[InFlightCheckpoint]:
        return [f for f in self._in_flight if not f.pending.job.is_released]

    def settle(self, checkpoint: InFlightCheckpoint) -> None:
        """End of doubt: the copies are done, and the version is allowed to commit or is dropped."""
        self._wait_or_fail(checkpoint, COPIED)
        if not self._give_up(checkpoint, self.guard.validate(checkpoint, self._writer)):
            checkpoint.pending.job.release()

    def _give_up(self, checkpoint: InFlightCheckpoint, verdict: Verdict | None) -> bool:
        """Drop the version where there is a reason to. Whether there was."""
        if verdict is None:
            return False
        checkpoint.drop(verdict.reason, verdict.names)
        self._in_flight.remove(checkpoint)
        self._writer.release_slot(checkpoint.pending, bad=False)
        self._meter.skipped += 1
        self.guard.given_up(verdict, self._writer)
        return True

    def _finish(self, checkpoint: InFlightCheckpoint) -> None:
        if not checkpoint.pending.job.is_released:
            self.settle(checkpoint)
        if checkpoint in self._in_flight:
            self._wait_or_fail(checkpoint, ENDED)
            self._reap()

    def _wait_or_fail(self, checkpoint: InFlightCheckpoint, until: int) -> None:
        try:
            checkpoint.pending.job.wait(until, pause=leave_if_noted)
        except LightckError:
            self._in_flight.remove(checkpoint)
            checkpoint.pending.job.abandon()
            self._writer.release_slot(checkpoint.pending, bad=True)
            self._writer.refuse_lost_pool()  # says more, where that is the reason
            raise

    def _reap(self) -> None:
        """Take note of versions that ended in the background. Raises the error of one that failed."""
        while (
            self._in_flight and self._in_flight[0].pending.job.is_released and self._in_flight[0].pending.job.has_ended
        ):
            checkpoint = self._in_flight[0]
            self._wait_or_fail(checkpoint, ENDED)
            self._in_flight.pop(0)
            self._note_committed(checkpoint)

    def _note_committed(self, checkpoint: InFlightCheckpoint) -> None:
        writer = self._writer
        writer.refuse_lost_pool()
        info = checkpoint.pending.job.info()
        writer.committed(checkpoint.pending)
        self.committed = checkpoint.step
        self.guard.committed(checkpoint.pending.record.generation, writer, self.events)
        self._meter.note_committed(info.nbytes, info.nbytes_helped)
        self.wait_policy.checkpoint_ended(info.nbytes, info.nbytes_helped)
        checkpoint.pending.job.forget()
        self.events.committed(writer, checkpoint.step)

    def newest_committed(self) -> int | None:
        """Step of the newest durable version, as of now. Takes note of nothing: any thread may ask."""
        done = [f.step for f in tuple(self._in_flight) if f.pending.job.is_released and f.pending.job.has_committed]
        return done[-1] if done else self.committed

    def close(self) -> None:
        """Stop the threads and unmap. Versions that are not released are dropped; others were finished before."""
        try:
            self.events.closing(self.pool.writer)
            if not self.engine.is_forked:
                self.eager.drop()
                self.staging.close()
        finally:
            self.engine.close()
            self._in_flight.clear()
            self._tables = None
            self.guard.forget()
            self.events.closed()
            self.pool.close()


def _slot_of_original(writer: PoolWriter, generation: int | None) -> tuple[PoolWriter, Slot, int] | None:
    """Where a version that was carried to this file lies now, by the generation in which it was made."""
    for slot in writer.slots.slots:
        if generation is not None and slot.original_generation == generation and slot.generation is not None:
            return writer, slot, slot.generation
    return None
