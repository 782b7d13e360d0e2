"""Bring a closed step to its commit record, in four stages.

    plan        take a slot, and decide which tensors are written, at the boundary or in the background (the strategy)
    submit      copy what is copied at the boundary, hand the rest to the engine
    validate    after the copies: check that every source still holds what was copied (the write guard)
    settle      release the checkpoint to commit, or give it up with a warning; report a commit to the listeners

While the copies of a checkpoint run in the background, the loop goes on, and the checkpoint is *not validated yet*. It
may commit only after all bytes are copied and every source was seen unchanged since the boundary. The gate, before the
next update, is the last moment for this: there the checkpoint is released or given up. Invariant: no update begins
while a copy still needs a source.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import zip_longest

import torch

from lightck.errors import LightckError, NoSpaceError
from lightck.interrupts import Interrupted, raise_if_interrupted
from lightck.pipeline.current_pool import CurrentPool
from lightck.pipeline.decision import Decisions, OthersPauseError
from lightck.pipeline.eager_copies import EagerCopies
from lightck.pipeline.guard import Rejection, Validator, WriteGuard, strike
from lightck.pipeline.in_flight import FRACTION_LEFT_MAX, InFlightCheckpoint, job_budget, seconds_left
from lightck.pipeline.late_copies import LateCopies
from lightck.pipeline.plan import Strategy, WritePlan
from lightck.pipeline.pool_kind import KindChange, PoolKind, WholeCheckpoints
from lightck.pipeline.staging.kinds import StagingOption
from lightck.pipeline.staging.sending import Staging
from lightck.pipeline.submission import Submission
from lightck.pipeline.wait_policy import WaitPolicy
from lightck.pipeline.write_table import NoExtentError, WriteTable, WriteTableCache
from lightck.pool.engine import COPIED, ENDED, Engine
from lightck.pool.format.structures import NextBatch
from lightck.pool.listener import CommitEvents
from lightck.pool.slots import Slot
from lightck.pool.storage.backend import Backend
from lightck.pool.storage.durability import MEDIUM_DISK, Durability
from lightck.pool.storage.lock import PoolLock
from lightck.pool.writer import PoolWriter, RelayoutNeededError
from lightck.state.inventory import entry_of
from lightck.state.signatures import ClosedStep
from lightck.stats import Meter

log = logging.getLogger("lightck")


class Pipeline:
    """Write closed steps into the pool and commit them in order. ``events`` reports each commit to listeners.
    ``decisions`` says whether a checkpoint may commit and which slots may not be overwritten."""

    def __init__(
        self,
        path: str,
        backend: Backend,
        durability: Durability,
        slots: int,
        meter: Meter,
        strategy: Strategy,
        staging: StagingOption | None = None,
        *,
        uncommitted_max: int | None = None,
        check: bool = False,
        lock: PoolLock | None = None,
        copy_threads: int | None = None,
        pool_kind: PoolKind | None = None,
    ) -> None:
        """``uncommitted_max``: how many checkpoints may still be uncommitted when the next update begins; None: two
        fewer than slots. ``check`` (``LIGHTCK_CHECK=1``): the write guard reads every byte, and raises an error for an
        unannounced write. ``copy_threads``: see ``Engine``. ``pool_kind``: None: each slot holds a whole
        checkpoint."""
        self._uncommitted_max = slots - 2 if uncommitted_max is None else uncommitted_max
        self.path, self.durability = path, durability
        self.committed: int | None = None
        """Step of the newest checkpoint whose commit was reported to the listeners."""
        self.engine, self.events, self.decisions = Engine(copy_threads), CommitEvents(), Decisions()
        kind = pool_kind or WholeCheckpoints()
        self.pool = CurrentPool(path, backend, durability, self.engine, slots, lock, self.events, kind)
        self.guard, self.eager, self._late = WriteGuard(check), EagerCopies(check), LateCopies()
        self.staging = Staging(meter, staging, commits_after_update=self._uncommitted_max > 0, is_on=not check)
        self.wait_policy = WaitPolicy(self.engine, meter, is_on=not check)
        self._strategy, self._meter, self._check = strategy, meter, check
        self.validators: list[Validator] = []
        """Called for a checkpoint whose copies are done, after the write guard: why it must not commit, or None."""
        self._in_flight: list[InFlightCheckpoint] = []
        self._tables: WriteTableCache | None = None
        self._plan_has_all_tables = True
        """Whether the last plan contained every write table as the strategy got it. False if the strategy took a tensor
        out of a table (``WriteTable.without``)."""
        self._newest: tuple[PoolWriter, Slot, int] | None = None
        """Where the newest checkpoint lies, committed or not: writer of its pool, slot, generation."""
        self._kind_change: KindChange | None = None
        """The kind of pools that the next checkpoint is to change to."""
        self._was_given_up = False
        """Whether the last checkpoint that ended was given up."""

    @property
    def is_idle(self) -> bool:
        """Whether no checkpoint is in flight."""
        return not self._in_flight

    @property
    def stores_record(self) -> bool:
        """Whether a gradient record that is not committed is in flight."""
        return any(not one.pending.commits for one in self._in_flight)

    @property
    def on_background_thread(self) -> bool:
        """Whether the caller runs on a background thread of this pipeline, for which ``close`` waits."""
        return self.staging.is_transfer_thread or self.events.called_from_own_thread

    def adopted(
        self, step: int, copied_at_boundary: Sequence[str], slots: int | None, generation: int, stale_after: int | None
    ) -> None:
        """Continue from a checkpoint of this pool whose adoption record is durable. ``copied_at_boundary``: names of
        tensors that are always copied at the boundary. ``slots``: number of slots that the user requested (None: as
        many as the pool has). ``generation``: the generation in which the checkpoint's bytes were written.
        ``stale_after``: the checkpoints of generations between ``stale_after`` and ``generation`` (both excluded) are
        stale (None: no checkpoint is stale)."""
        writer = self._writer
        self.committed = step
        if stale_after is not None:
            strike(writer, self.events, stale_after, generation)
        self.guard.copied_at_boundary.update(copied_at_boundary)
        self.pool.request_slots(slots)
        self.events.adopted(writer, step)

    @property
    def _writer(self) -> PoolWriter:
        assert self.pool.writer is not None, "a checkpoint in flight has a pool"
        return self.pool.writer

    # -- a checkpoint begins -----------------------------------------------------------------------------

    def check_left_out_tensors(self, updated: Collection[int]) -> None:
        """Before the state is read: find unannounced writes to tensors that the next checkpoint would leave out.
        ``updated``: ids of the tensors that an optimizer has updated since the last call."""
        if self.pool.writer is not None:
            self.guard.check_left_out_tensors(self.pool.writer, updated)

    def begin_checkpoint(self, closed_step: ClosedStep) -> None:
        """Begin to write the checkpoint of a closed step, if the commit decisions allow it, and no other rank pauses.
        When this returns, the copies at the boundary are made. This method waits for the commit if a relayout was
        needed, and if the last checkpoint was given up in the pool of a rank. It may also commit at once, on this
        thread: if nothing is copied in the background, or if a rank has made most copies eagerly (``_release``)."""
        self._collect_ended()
        self._newest = None
        self.guard.copied_at_boundary.update(closed_step.written_outside_step)
        try:
            if self.decisions.may_commit(closed_step):
                self._begin_checkpoint(closed_step)
                return
        except OthersPauseError:
            self._meter.skipped += 1
        self.eager.drop()
        self._was_given_up = True

    def _begin_checkpoint(self, closed_step: ClosedStep) -> None:
        """Do what ``begin_checkpoint`` does if the decisions allow it. Raises ``OthersPauseError``."""
        if self._kind_change is not None and self._changes_kind(self._kind_change, closed_step):
            return
        has_eager_copies = self.eager.reservation is not None
        try:
            writer = self.pool.ready_writer()
            self.wait_policy.checkpoint_begins()
            checkpoint = self._begin(writer, closed_step)
        except RelayoutNeededError as why:
            self._relayout(closed_step, why)
            return
        self._in_flight.append(checkpoint)
        self._newest = writer, checkpoint.pending.slot, checkpoint.pending.record.generation
        if checkpoint.needs_no_validation:
            self._release(checkpoint, writer)
        elif has_eager_copies and self.decisions.is_in_group and checkpoint.fraction_left() <= FRACTION_LEFT_MAX:
            self.settle(checkpoint, commits_here=True)
        if self._was_given_up and self.decisions.commits_after_give_up:
            self.finish()

    def begin_record(self, closed_step: ClosedStep) -> None:
        """For a step that is no checkpoint, begin to store what its update consumed. Nothing is stored if no checkpoint
        could use it, or if the pool must be replaced first: then the next checkpoint is full, and replaces it."""
        self._collect_ended()
        self.guard.copied_at_boundary.update(closed_step.written_outside_step)
        writer = self.pool.writer
        if writer is None or self.pool.requested_slots is not None or self.guard.stale_after is not None:
            return
        if not self.pool.kind.takes_record(writer, closed_step):
            return
        try:
            self.wait_policy.checkpoint_begins()
            self._in_flight.append(self._begin(writer, closed_step))
        except RelayoutNeededError as why:
            log.info("lightck: step %d leaves no gradient record: %s", closed_step.step, why)
            assert closed_step.update is not None, "``takes_record`` has checked this"
            nbytes = sum(live.tensor.nbytes for live in closed_step.update.gradients)
            self.pool.spare_nbytes_min = max(self.pool.spare_nbytes_min, nbytes)
            self.pool.requested_slots = self.pool.n_slots

    def _release(self, checkpoint: InFlightCheckpoint, writer: PoolWriter, is_copied: bool = False) -> None:
        """Release a checkpoint that needs no more validation. Commit it on this thread, which is faster than to wake a
        copy thread, if its bytes are copied, no other checkpoint is in flight, and a commit waits for no disk."""
        job = checkpoint.pending.job
        is_copied = is_copied or not job.parts
        commits_now = is_copied and len(self._in_flight) == 1 and writer.durability.medium_kind != MEDIUM_DISK
        try:
            if commits_now:
                job.commit()
            else:
                job.release()
        except LightckError:  # the job failed: the gate raises its error
            return
        if commits_now:
            self._report_ended(checkpoint)

    def _begin(self, writer: PoolWriter, closed_step: ClosedStep) -> InFlightCheckpoint:
        """Plan and submit the checkpoint of a closed step. Raises ``RelayoutNeededError``."""
        if self.guard.stale_after is not None:
            closed_step.update = None  # the checkpoint must need none of those that are struck when it is committed
        tables = self._tables_of(writer, closed_step)
        slot = self._take_slot(writer, closed_step)
        plan = self._strategy.plan(closed_step, tables, self.guard.target(writer, slot))
        self._plan_has_all_tables = all(planned is given for planned, given in zip_longest(plan.tables, tables))
        return self.submit(writer, slot, plan)

    def _tables_of(self, writer: PoolWriter, closed_step: ClosedStep) -> list[WriteTable]:
        """Return the write tables of all tensors of the step. Raises ``RelayoutNeededError``."""
        if self._tables is None or self._tables.writer is not writer:
            self._tables = WriteTableCache(writer, check=self._check)
        try:
            return self._tables.of(closed_step, self.guard.copied_at_boundary)
        except NoExtentError as need:
            self.finish()  # running copies write checksums into each ``Slot.image``, and ``add`` replaces the images
            self.eager.drop()
            self._tables.add(need.entries, closed_step.lives)
            return self._tables.of(closed_step, self.guard.copied_at_boundary)

    def submit(self, writer: PoolWriter, slot: Slot, plan: WritePlan) -> InFlightCheckpoint:
        """Copy what the plan copies at the boundary, pass the other copies to the engine, and return the checkpoint."""
        submission = Submission(plan)
        copied, discarded = self.eager.reusable(submission.background, submission.background_numbers)
        self._meter.recopied += discarded
        jobs_max = job_budget(self._in_flight, self._uncommitted_max) if writer.has_whole_checkpoints else 0
        reservation = of_eager_copies = self.eager.reservation
        try:
            reservation, late, n_late_jobs = self._late.begin(writer, slot, submission, reservation, jobs_max)
            reservation, sent = self.staging.send(writer, slot, submission, reservation, jobs_max - n_late_jobs)
            watched = self.guard.watch(submission, writer)
            copy_plan = submission.copy_plan(copied, sent, late)
            pending = writer.begin(copy_plan, slot, submission.keep_alive, reservation)
        except BaseException:
            if reservation is not None and reservation is not of_eager_copies:
                reservation.drop()
            raise
        # Only an InFlightCheckpoint ends the job and frees the slot, so nothing may raise before it is created.
        closed_step = plan.closed_step
        needs_no_validation = not (submission.background or submission.has_late) and closed_step.update is None
        checkpoint = InFlightCheckpoint(pending, watched, closed_step.step, needs_no_validation)
        self.eager.taken()
        self.guard.begun(submission, writer, slot)
        self._meter.left_out = len(plan.unchanged)
        self.events.begun(pending.record.generation, closed_step.step, writer.entries)
        return checkpoint

    def _take_slot(self, writer: PoolWriter, closed_step: ClosedStep) -> Slot:
        """Return the slot of the eager copies, or, if there are none, a free slot. If no slot is free, wait until older
        checkpoints have ended. Raises ``LightckError`` if no slot is free even then."""
        if self.eager.reservation is not None:
            return self.eager.reservation.slot

        def free_slot(being_read: frozenset[int] = frozenset()) -> Slot | None:
            return self.pool.kind.choose_slot(writer, closed_step, self.decisions.held(writer) | being_read)

        while True:
            slot = self._choose_unread(writer, free_slot)
            if slot is not None:
                return slot
            if not self._in_flight:
                with self._meter.wait():
                    if self.decisions.wait_for_slot(lambda: free_slot() is not None, raise_if_interrupted):
                        continue
                raise LightckError(
                    "No slot of the pool can be written: earlier writes to the free slots failed. The last committed "
                    "checkpoint is intact. Copy the pool to another medium, and start again with the copy and "
                    "resume=True."
                )
            self._finish(self._in_flight[0])

    def _choose_unread(self, writer: PoolWriter, choose: Callable[[frozenset[int]], Slot | None]) -> Slot | None:
        """Return a slot as ``PoolWriter.choose_slot`` does, and count the holds of other processes."""
        choice = writer.choose_slot(choose)
        self._meter.holds_honored += choice.n_passed_over
        self._meter.holds_overrun += choice.is_overrun
        return choice.slot

    def copy_eagerly(self, tensors: Iterable[torch.Tensor]) -> None:
        """Begin to copy tensors that hold their final values of this step already, if a slot is free for these
        copies."""
        self.wait_policy.checkpoint_begins(eager=True)
        tables, writer = self._tables, self.pool.writer
        if tables is None or writer is None or tables.writer is not writer or not writer.has_whole_checkpoints:
            return
        if not self._plan_has_all_tables:
            return  # if the strategy leaves out some of these tensors, they must not be copied
        jobs_max = job_budget(self._in_flight, self._uncommitted_max)
        if jobs_max > 0 and self.eager.wants_slot(tables):
            slot = self._choose_unread(writer, lambda read: writer.slots.choose(self.decisions.held(writer) | read))
            if slot is not None:
                self.eager.begin(tables, slot)
        self.eager.copy(tensors, jobs_max)

    def store_next_batch(self, entries: Sequence[NextBatch]) -> None:
        """Record which batch followed the newest checkpoint, in the slot of this checkpoint, if the slot still holds
        it. Errors of the medium are ignored here, because the next checkpoint raises them."""
        if self._newest is not None:
            writer, slot, generation = self._newest
            if writer is self.pool.writer:
                try:
                    writer.store_next_batch(slot, generation, entries)
                except LightckError:
                    return

    # -- a new pool file ---------------------------------------------------------------------------------

    def _relayout(self, closed_step: ClosedStep, why: RelayoutNeededError) -> None:
        """Move the pool to a new file because of ``why``: commit the checkpoint of the closed step there, give the
        pool's name to the file, and then report the commit. A rank of a group first waits until the new file has
        room for all that other ranks may need. The checkpoint commits before its validators could reject it, so no
        stand-ins are used."""
        closed_step = closed_step.without_stand_ins()

        def commit_checkpoint(writer: PoolWriter) -> InFlightCheckpoint:
            checkpoint = self._begin(writer, closed_step)
            checkpoint.commit()
            return checkpoint

        entries = [entry_of(live) for live in closed_step.lives]
        try:
            self.finish()
            self.eager.drop()
            if self.pool.writer is not None:
                log.info("lightck: the pool %r is written anew, under the same path: %s", self.path, why)
                with self._meter.wait():
                    n_whole = self.pool.kind.whole_max(self.pool.n_slots)
                    self.decisions.wait_for_relayout(self.pool.writer, n_whole, raise_if_interrupted)
            checkpoint = self.pool.relayout(entries, len(closed_step.state), commit_checkpoint)
            self._note_committed(checkpoint)
            self._newest = self._writer, checkpoint.pending.slot, checkpoint.pending.record.generation
        except (Interrupted, OthersPauseError):
            # ``ready_writer`` has cleared the request for ``n_slots`` slots. The next attempt needs the request again.
            self.pool.requested_slots = self.pool.n_slots
            raise

    def request_kind(
        self,
        kind: PoolKind,
        strategy: Strategy,
        n_slots: int,
        reason: str,
        does_not_fit: Callable[[NoSpaceError], None],
    ) -> None:
        """Let the next checkpoint be written into a new file of this kind, with ``n_slots`` slots, which replaces the
        present one; ``strategy`` plans it and all later ones. ``reason``: for the log. ``does_not_fit``: is called with
        the error if the medium cannot hold the new file. Then the checkpoint is written into the present one, as if
        nothing had been requested."""
        assert self._uncommitted_max == 0, "a pool with gradient records has one checkpoint in flight"
        self._kind_change = KindChange(kind, strategy, n_slots, reason, does_not_fit)

    def _changes_kind(self, change: KindChange, closed_step: ClosedStep) -> bool:
        """Change to another kind of pools with the checkpoint of this step. Returns whether it has changed."""
        pool = self.pool
        before = pool.kind, self._strategy, pool.n_slots, pool.requested_slots
        pool.kind, self._strategy, pool.n_slots, pool.requested_slots = (
            change.kind,
            change.strategy,
            change.n_slots,
            None,
        )
        try:
            self._relayout(closed_step, RelayoutNeededError(change.reason))
        except BaseException as err:
            pool.kind, self._strategy, pool.n_slots, pool.requested_slots = before
            if not isinstance(err, NoSpaceError):
                raise  # after an interrupt the next attempt changes the kind
            self._kind_change = None
            change.does_not_fit(err)
            return False
        self._kind_change = None
        return True

    def ensure_slots(self, needed: int) -> None:
        """Move the pool to a new file if fewer than ``needed`` slots can be written. Call only while no checkpoint is
        in flight."""
        pool, writer = self.pool, self._writer
        before = pool.n_slots, pool.requested_slots
        try:
            wanted = max(needed, pool.requested_slots or 0)
            if writer.slots.n_usable < wanted:
                pool.n_slots = max(wanted, pool.n_slots)
                log.info(
                    "lightck: the pool %r is written anew with %d slots, under the same path, for a pin",
                    self.path,
                    pool.n_slots,
                )
                generation = None if self._newest is None else self._newest[2]
                self.eager.drop()
                pool.relayout((), 0, lambda _: None)
                self._newest = pool.place_of(generation)
            pool.requested_slots = None  # the pool has at least as many slots now as were requested
        except BaseException:
            pool.n_slots, pool.requested_slots = before
            raise

    # -- a checkpoint ends -------------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """Give up unvalidated checkpoints whose sources were written between the boundary and this training forward."""
        for checkpoint in self._unvalidated():
            watched = checkpoint.watched
            if not watched.forward_seen and not self._give_up_if_rejected(checkpoint, self.guard.changed(checkpoint)):
                watched.forward_seen = True
        self.poll()

    def poll(self) -> None:
        """Settle checkpoints whose copies are done and whose sources are unchanged. This method does not wait. Under
        ``LIGHTCK_CHECK=1`` it does nothing: the gate settles every checkpoint."""
        if self._check:
            return
        for checkpoint in self._unvalidated():
            if checkpoint.pending.job.info().state == COPIED and not checkpoint.watched.changed():
                self.settle(checkpoint)

    def wait_for_copies(self) -> None:
        """Wait until no copy is running, and help to copy meanwhile. Checkpoints whose sources are unchanged now are
        settled, because the code that follows may write to tensors, as an evaluation with swapped weights does."""
        with self._meter.wait():
            self.eager.wait()
            for checkpoint in self._unvalidated():
                self._wait_or_fail(checkpoint, COPIED)
                if not checkpoint.watched.changed():
                    self.settle(checkpoint)

    def gate(self) -> None:
        """Before an update: settle every checkpoint, and wait until at most ``uncommitted_max`` checkpoints (see
        ``__init__``) are not committed yet. The slots that are added for pins and for keep= do not raise this
        number."""
        if not self._in_flight:
            return
        with self._meter.wait():
            for checkpoint in self._unvalidated():
                self.settle(checkpoint)
            while len(self._in_flight) > self._uncommitted_max:
                self._finish(self._in_flight[0])
        self._collect_ended()
        self.wait_policy.gate_passed()

    def finish(self, deadline: float | None = None) -> bool:
        """Wait until every checkpoint in flight has committed or was given up, and return True. Return False if
        ``deadline`` (a time of ``time.monotonic``) passes before. Raises the error of a checkpoint that failed."""
        with self._meter.wait():
            for checkpoint in self._unvalidated():
                if not checkpoint.pending.job.wait(COPIED, seconds_left(deadline), pause=raise_if_interrupted):
                    return False
                self.settle(checkpoint)
            while self._in_flight:
                if not self._in_flight[0].pending.job.wait(ENDED, seconds_left(deadline), pause=raise_if_interrupted):
                    return False
                self._collect_ended()
        return True

    def finish_quietly(self) -> None:
        """Do what ``finish`` does, but log an error instead of raising it, because no caller is left to catch it."""
        try:
            self.finish()
        except Exception as err:
            log.error("lightck: %s", err)

    def _unvalidated(self) -> list[InFlightCheckpoint]:
        return [one for one in self._in_flight if not one.pending.job.is_released]

    def settle(self, checkpoint: InFlightCheckpoint, commits_here: bool = False) -> None:
        """Wait for the copies, validate the checkpoint, and release it to commit or give it up. ``commits_here``:
        commit it on this thread, if the conditions of ``_release`` allow this."""
        self._wait_or_fail(checkpoint, COPIED)
        rejection = self.guard.validate(checkpoint, self._writer)
        for validate in self.validators:
            rejection = rejection or validate(checkpoint, self._writer)
        if self._give_up_if_rejected(checkpoint, rejection):
            return
        if commits_here:
            self._release(checkpoint, self._writer, is_copied=True)
        else:
            checkpoint.pending.job.release()

    def _give_up_if_rejected(self, checkpoint: InFlightCheckpoint, rejection: Rejection | None) -> bool:
        """Drop the checkpoint if there is a rejection. Return whether the checkpoint was dropped."""
        if rejection is None:
            return False
        checkpoint.drop(rejection.reason, rejection.names, rejection.consequence)
        self._in_flight.remove(checkpoint)
        self._writer.free_slot(checkpoint.pending, bad=False)
        self._was_given_up = True
        self._meter.skipped += 1
        self.guard.given_up(rejection, self._writer)
        return True

    def _finish(self, checkpoint: InFlightCheckpoint) -> None:
        """Wait until the checkpoint has committed or was given up."""
        if not checkpoint.pending.job.is_released:
            self.settle(checkpoint)
        if checkpoint in self._in_flight:
            self._wait_or_fail(checkpoint, ENDED)
            self._collect_ended()

    def _wait_or_fail(self, checkpoint: InFlightCheckpoint, until: int) -> None:
        """Wait until the checkpoint's job is in state ``until``. If the job failed, drop the checkpoint and raise."""
        try:
            checkpoint.pending.job.wait(until, pause=raise_if_interrupted)
        except LightckError:
            self._in_flight.remove(checkpoint)
            checkpoint.pending.job.abandon()
            self._writer.free_slot(checkpoint.pending, bad=True)
            self._writer.refuse_lost_pool()  # raises a more specific error if the pool file was lost
            raise

    def _collect_ended(self) -> None:
        """Report checkpoints as committed, beginning with the oldest. Stop before the first checkpoint whose job has
        not ended. Raises the error of a job that failed."""
        while self._in_flight and (job := self._in_flight[0].pending.job).is_released and job.has_ended:
            checkpoint = self._in_flight[0]
            self._wait_or_fail(checkpoint, ENDED)
            self._report_ended(checkpoint)

    def _report_ended(self, checkpoint: InFlightCheckpoint) -> None:
        """Report the oldest checkpoint in flight, whose job has ended, as committed (or as stored)."""
        self._in_flight.pop(0)
        if checkpoint.pending.commits:
            self._note_committed(checkpoint)
        else:
            self._note_recorded(checkpoint)
        if checkpoint.watched.lives:
            with self._meter.work_of_loop():  # frees gradients that the loop has dropped while they were copied
                checkpoint.forget_sources()

    def _note_committed(self, checkpoint: InFlightCheckpoint) -> None:
        writer = self._writer
        writer.refuse_lost_pool()
        info = checkpoint.pending.job.info()
        writer.committed(checkpoint.pending)
        self.committed = checkpoint.step
        self._was_given_up = False
        self.guard.committed(checkpoint.pending.record.generation, writer, self.events)
        self._meter.count_commit(info.nbytes, info.nbytes_helped)
        self._meter.disk_writes = writer.direct_writes.method
        self.wait_policy.checkpoint_ended(info.nbytes, info.nbytes_helped)
        checkpoint.pending.job.forget()
        self.events.committed(writer, checkpoint.step)

    def _note_recorded(self, record: InFlightCheckpoint) -> None:
        info = record.pending.job.info()
        record.pending.job.forget()
        self._writer.recorded(record.pending)
        self._meter.count_record(info.nbytes + record.pending.record.manifest_nbytes, info.nbytes_helped)
        self.wait_policy.checkpoint_ended(info.nbytes, info.nbytes_helped)

    def newest_committed(self) -> int | None:
        """Return the step of the newest durable checkpoint at this moment, or None. This changes nothing, so any thread
        may call it."""
        in_flight = [(one.step, one.pending.job) for one in tuple(self._in_flight) if one.pending.commits]
        done = [step for step, job in in_flight if job.is_released and job.has_committed]
        return done[-1] if done else self.committed

    @property
    def n_uncommitted(self) -> int:
        """The number of checkpoints between their boundary and their commit. Any thread may ask."""
        jobs = [one.pending.job for one in tuple(self._in_flight) if one.pending.commits]
        return sum(not (job.is_released and job.has_committed) for job in jobs)

    def close(self) -> None:
        """Stop the threads and unmap the pool. Checkpoints that were not released are dropped."""
        try:
            self.events.closing(self.pool.writer)
            if not self.engine.is_forked:
                self.eager.drop()
                self._late.close()
                self.staging.close()
        finally:
            self.engine.close()
            self._in_flight.clear()
            self._tables = None
            self.guard.forget()
            self.events.closed()
            self.pool.close()
