"""From the tensors of a closed version to its commit line: what is written, when it may commit, who waits.

One version at a time is *open to doubt*: its copies run in the background while the loop goes on, and it may commit
only once every source looks as it did at the boundary and all bytes are copied. The gate, before the next update, is
where doubt ends: the version commits or is dropped. Invariant: no update begins while a source is still needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

import torch

from lightck.errors import LightckError, SessionError, listed
from lightck.interrupts import Interrupted, leave_if_noted
from lightck.pipeline.early import Early
from lightck.pipeline.finite import Finite
from lightck.pipeline.flight import Flight, left, room_for_parts
from lightck.pipeline.moving import move
from lightck.pipeline.split import Split, columns_of
from lightck.pipeline.staging.kinds import Kind
from lightck.pipeline.staging.sending import Staging
from lightck.pipeline.strike import Stale, strike
from lightck.pipeline.wait_policy import WaitPolicy
from lightck.pipeline.watch import Resting, Watched, changed_error
from lightck.pool.create import create
from lightck.pool.engine import COPIED, ENDED, Engine
from lightck.pool.format.layout import Entry
from lightck.pool.format.structures import NextBatch
from lightck.pool.reader import PoolReader
from lightck.pool.slots import Slot
from lightck.pool.storage.backend import Backend
from lightck.pool.storage.durability import Durability
from lightck.pool.storage.lock import PoolLock
from lightck.pool.writer import FullError, PoolWriter
from lightck.state.blocks import BUDGET_NBYTES, WHOLE_CHECKPOINTS, Turn
from lightck.state.inventory import entry_of
from lightck.state.looks import Closing
from lightck.stats import Meter
from lightck.tiers.keep import Keeper
from lightck.tiers.pin import Hold, Holds

log = logging.getLogger("lightck")
T = TypeVar("T")


class Pipeline:
    """Takes closed versions and brings them to their commit, in order."""

    def __init__(
        self,
        path: str,
        backend: Backend,
        durability: Durability,
        slots: int,
        meter: Meter,
        finite: Finite | None = None,
        staging: Kind | None = None,
        *,
        check: bool = False,
        lock: PoolLock | None = None,
    ) -> None:
        self.path, self.durability = path, durability
        self.committed: int | None = None
        self.resting, self.engine = Resting(), Engine()
        self.writer: PoolWriter | None = None
        self._backend, self._lock = backend, lock
        self.holds, self.finite = Holds(), finite
        self.keeper: Keeper | None = None
        self._n_slots, self._behind_max = slots, slots - 2
        self._meter = meter
        self._check, self._turn = check, 0
        self.stale = Stale()
        self._n_begun = 0
        self._audited_nbytes = 0
        self._proof_turn, self._proved_until = Turn(), 0
        self._flights: list[Flight] = []
        self.early = Early(check)
        self.staging = Staging(meter, staging, runs_behind=slots > 2, is_on=not check)
        self.wait_policy = WaitPolicy(self.engine, meter, is_on=not check)
        self._wanted_slots: int | None = None
        self._newest: tuple[PoolWriter, Slot, int] | None = None
        """Where the version lies that was closed last: pool, slot, generation."""

    def keep(self, keeper: Keeper | None) -> None:
        """Export versions; that takes a slot. Before the pool is made or opened."""
        self.keeper, self._n_slots = keeper, self._n_slots + (keeper is not None)

    # -- the pool ----------------------------------------------------------------------------------------

    def create(self, entries: Sequence[Entry], state_nbytes: int) -> None:
        """Make the pool now, empty, and visible at its path."""
        writer = self._new_writer(entries, state_nbytes)
        try:
            writer.reader.container.publish()
        except BaseException:
            writer.close()
            raise
        self.writer = writer

    def open(self, reader: PoolReader) -> PoolWriter:
        """Go on in an existing pool. The reader is the writer's from here on, or closed."""
        try:
            self.writer = PoolWriter(reader, self.engine, self.durability, lock=self._lock)
        except BaseException:
            reader.close()
            raise
        self._n_slots = len(reader.superblock.slots)
        return self.writer

    def adopted(
        self, step: int, at_once: Sequence[str], slots: int | None, generation: int, stale_after: int | None
    ) -> None:
        """The version that this session goes on from is in the pool and named by a durable line. ``generation``: of its
        payload; ``stale_after``: what it says of older ones."""
        assert self.writer is not None
        self.committed = step
        if stale_after is not None:
            strike(self.writer, self.holds, stale_after, generation)
        if self.keeper is not None:
            self.keeper.start_at(step)
        self.resting.never.update(at_once)
        spare = self.keeper is not None
        wanted = slots + spare if slots is not None else max(self._n_slots, 2 + spare)
        if wanted != self._n_slots:
            log.info(
                "lightck: %d slots instead of %d: the pool is laid out anew at the first boundary",
                wanted,
                self._n_slots,
            )
            self._wanted_slots = wanted

    def _new_writer(
        self, entries: Sequence[Entry], state_nbytes: int, spare_nbytes: int = 0, extras: Sequence[Entry] = ()
    ) -> PoolWriter:
        container, _ = create(
            self._backend,
            self.path,
            entries,
            slots=self._n_slots,
            state_nbytes=state_nbytes,
            spare_nbytes=spare_nbytes,
            extras=extras,
            may_discard=self.writer is None,
        )
        try:
            return PoolWriter(PoolReader(container, self.path), self.engine, self.durability, self.writer, self._lock)
        except BaseException:
            container.close()
            raise

    # -- a version enters --------------------------------------------------------------------------------

    def audit(self) -> None:
        """Before a version's state is read: look whether what it would leave out was written unannounced."""
        writer = self.writer
        if writer is None:
            return
        names, self._audited_nbytes = self.resting.audit(writer.generation, writer.superblock.block, self._budget())
        if names:
            log.warning(
                "lightck: %s was written in a way that moves no version counter (.data, numpy, a fused kernel "
                "or another thread), and was taken for unchanged. The next checkpoint is written whole, and "
                "the tensor is copied at every boundary from there on. Older checkpoints that hold its old "
                "bytes are struck when that one is committed.",
                listed([repr(name) for name in sorted(names)]),
            )
            self._found(names, self.resting.right_until)

    def _budget(self, spent: int = 0) -> int | None:
        """Bytes to read again for the next version, ``spent`` of which were read already; None: all. (At least one
        block is read, whatever the budget.)"""
        if self._check or self._n_begun < WHOLE_CHECKPOINTS:
            return None
        return max(BUDGET_NBYTES - spent, 0)

    def _found(self, names: Iterable[str], right_until: int) -> None:
        """These were written unannounced: nothing is taken for unchanged before it was written whole again."""
        assert self.writer is not None
        self.resting.never.update(names)
        self.resting.trust_none()
        self.stale.found(names, right_until, self.writer.generation)

    def close_version(self, closing: Closing) -> None:
        """Begin writing a version. Small tensors, buffers and state are copied before this returns."""
        self._reap()
        self._newest = None
        self.resting.never.update(closing.at_once)
        if self.finite is not None and self.finite.refuses(closing, self._meter):
            self.early.drop()
            return
        writer = self.writer
        try:
            if writer is None:
                raise FullError("there is no pool yet")
            if self._wanted_slots is not None:
                self._n_slots, self._wanted_slots = self._wanted_slots, None
                raise FullError(f"the pool is to have {self._n_slots} slots")
            self.wait_policy.version_begins()
            flight = self._begin(writer, closing)
        except FullError as why:
            self._relayout(closing, why)
            return
        self._flights.append(flight)
        self._newest = writer, flight.pending.slot, flight.pending.line.generation
        if flight.is_apart:
            with suppress(LightckError):  # it failed already, which the gate tells
                flight.pending.job.release()

    def store_next(self, entries: Sequence[NextBatch]) -> None:
        """Record what followed the version that was closed last, where it still lies in its slot. A medium that fails
        here fails the next version too, and that one tells."""
        if self._newest is not None:
            writer, slot, generation = self._newest
            if writer is self.writer:
                with suppress(LightckError):
                    writer.store_next(slot, generation, entries)

    def copy_early(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are what they will be in the version to come: their copies begin now, where they can."""
        self.wait_policy.version_begins(early=True)
        self.early.copy(self.writer, tensors, room_for_parts(self._flights, self._behind_max))

    def _settle_all(self) -> None:
        """Before the images of the slots are replaced: nothing may be under way."""
        self.finish()
        self.early.drop()

    def _begin(self, writer: PoolWriter, closing: Closing) -> Flight:
        parts = columns_of(writer, closing, self.resting.never, self._settle_all)
        draft = self.early.draft
        slot = self._free_slot(writer) if draft is None else draft.slot
        split = Split(self.resting, writer, slot, parts)
        begun, again = self.early.sift(split.background, split.background_numbers)
        self._meter.recopied += again
        room = room_for_parts(self._flights, self._behind_max)
        with self.staging.sending(writer, slot, split, draft, room) as (draft, sent):
            # Of devices too: sending adds theirs.
            watched = Watched(split.background, split.background_numbers, split.n_followed)
            watched.prove(split.blocks(writer), self._proof_turn, self._budget(self._audited_nbytes))
            pending = writer.begin(split.plan(closing, begun, sent), slot, split.keep, draft)
        # From here on nothing may fail before there is a flight: it is what ends the job and frees the slot.
        flight = Flight(pending, watched, closing.step, is_apart=len(sent) > 0 and not split.background)
        self.early.taken()
        for live, number in split.stills:
            self.resting.written(live, writer.raw_crcs(slot, number))
        self.resting.keep([*split.left_out, *(live for live, _ in split.stills)])
        self._meter.left_out = len(split.left_out)
        if self._meter.observer is not None:
            self._meter.observer.version(pending.line.generation, closing.step, writer.entries)
        self._n_begun += 1
        return flight

    def _free_slot(self, writer: PoolWriter) -> Slot:
        while True:
            slot = writer.slots.choose()
            if slot is not None:
                return slot
            if not self._flights:
                raise LightckError(
                    "No slot of the pool is left to write to: the others failed. The last committed version is "
                    "intact. Put the pool on a sound medium and start again with resume=True."
                )
            self._finish(self._flights[0])

    def _relayout(self, closing: Closing, why: FullError) -> None:
        """A new pool file for what no longer fits: its first commit, then its name, only then acknowledged."""

        def first(writer: PoolWriter) -> Flight:
            flight = self._begin(writer, closing)
            flight.commit()
            return flight

        entries = [entry_of(live) for live in closing.lives]
        try:
            self.finish()
            if self.writer is not None:
                log.info("lightck: %s; the pool %r is laid out anew", why, self.path)
            flight = self._move(entries, len(closing.state), first)
            self._note_committed(flight)
            assert self.writer is not None
            self._newest = self.writer, flight.pending.slot, flight.pending.line.generation
        except Interrupted:
            self._wanted_slots = self._n_slots  # for when this is begun again
            raise

    def _move(self, entries: Sequence[Entry], state_nbytes: int, first: Callable[[PoolWriter], T]) -> T:
        """To a new file, where ``first`` commits."""
        old = self.writer
        self.early.drop()
        if self.keeper is not None:
            self.keeper.wait(self.holds)  # it reads the old file
        self.writer, result = move(old, self._new_writer, self.holds, entries, state_nbytes, first)
        if old is not None:
            old.close()
        return result

    # -- a version that stays ----------------------------------------------------------------------------

    def pin(self) -> Hold:
        """Hold the newest committed version; where less than two slots would be left, the pool moves to a new file."""
        self.finish()
        writer = self.writer
        if writer is None or self.committed is None:
            raise SessionError("Nothing is committed yet that could be pinned. Pin after the first step.")
        writer.refuse_lost_pool()
        needed = self.holds.slots_for_a_pin(self.keeper is not None)
        hold = self.holds.take(writer, is_pin=True)
        before = self._n_slots, self._wanted_slots
        try:
            if writer.slots.sound < max(needed, self._wanted_slots or 0):
                self._n_slots = max(needed, self._n_slots, self._wanted_slots or 0)
                log.info("lightck: the pool %r is laid out anew with %d slots, for a pin", self.path, self._n_slots)
                is_newest = self._newest is not None and self._newest[2] == hold.line.payload_generation
                self._move((), 0, lambda _: None)
                if is_newest and self.writer is not None:
                    slot = self.writer.slots.slots[hold.line.slot]
                    self._newest = self.writer, slot, hold.line.payload_generation
            self._wanted_slots = None  # fewer slots were asked for, and the pin needs those that there are
        except BaseException:
            self._n_slots, self._wanted_slots = before
            self.holds.release(hold)
            raise
        return hold

    # -- a version ends ----------------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """A training forward starts: what moved since the boundary was written by the loop, and not by a forward."""
        for flight in self._open_flights():
            if not flight.watched.forward_seen:
                flight.watched.forward_seen = not self._drop_if_moved(flight)
        self.poll()

    def poll(self) -> None:
        """Let versions commit whose bytes are all copied from sources that have not moved. Waits for nothing."""
        if self._check:
            return
        for flight in self._open_flights():
            if flight.pending.job.info().state == COPIED and not flight.watched.moved():
                self._settle(flight)

    def copies_done(self) -> None:
        """Help until no copy is under way: arbitrary code (an evaluation with swapped weights) may follow."""
        with self._meter.wait():
            self.early.wait()
            for flight in self._open_flights():
                self._wait_or_fail(flight, COPIED)
                if not flight.watched.moved():
                    self._settle(flight)

    def gate(self) -> None:
        """Before an update: every source is released, and all versions but the newest slots-2 have committed.
        ``slots`` as attach was told: those for pins and for keep= put nothing off."""
        if not self._flights:
            return
        with self._meter.wait():
            for flight in self._open_flights():
                self._settle(flight)
            while len(self._flights) > self._behind_max:
                self._finish(self._flights[0])
        self._reap()
        self.wait_policy.gate_passed()

    def finish(self, deadline: float | None = None) -> bool:
        """Bring every closed version to its end. False where they were not by then (of ``time.monotonic``)."""
        with self._meter.wait():
            for flight in self._open_flights():
                if not flight.pending.job.wait(COPIED, left(deadline), pause=leave_if_noted):
                    return False
                self._settle(flight)
            while self._flights:
                if not self._flights[0].pending.job.wait(ENDED, left(deadline), pause=leave_if_noted):
                    return False
                self._reap()
        return True

    def finish_quietly(self) -> None:
        """As ``finish``, where nobody is left to raise to: an error is logged, its version stays uncommitted."""
        try:
            self.finish()
        except Exception as err:
            log.error("lightck: %s", err)

    def _open_flights(self) -> list[Flight]:
        return [f for f in self._flights if not f.pending.job.is_released]

    def _drop_if_moved(self, flight: Flight) -> bool:
        """Give a version up whose sources were written. Their copies may have come before the write or after it, so
        nothing tells what it holds; copying again is no cure, since the loop goes on from there and writes again."""
        moved, why = flight.moved()
        if moved:
            self._drop(flight, why, moved)
        return bool(moved)

    def _settle(self, flight: Flight) -> None:
        """End of doubt: the copies are done, and the version is allowed to commit or is dropped."""
        assert self.writer is not None
        self._wait_or_fail(flight, COPIED)
        if self._drop_if_moved(flight):
            return
        self._turn += 1
        names = flight.audit(self.writer, self._turn, self._check)
        if names:
            self._drop(
                flight,
                "something wrote to it while it was copied, in a way that moves no version counter "
                "(.data, numpy, a fused kernel or another thread)",
                names,
            )
            self._found(names, self._proved_until)
            if self._check:
                raise changed_error(names, "while a version was being copied")
            return
        if flight.watched.is_proved_whole:
            self._proved_until = flight.pending.line.generation
        flight.pending.job.release()

    def _drop(self, flight: Flight, reason: str, names: Sequence[str]) -> None:
        assert self.writer is not None
        self.resting.never.update(names)
        self.resting.trust_none()  # the next version is written whole
        flight.drop(reason, names)
        self._flights.remove(flight)
        self.writer.given_up(flight.pending, bad=False)
        self._meter.skipped += 1

    def _finish(self, flight: Flight) -> None:
        if not flight.pending.job.is_released:
            self._settle(flight)
        if flight in self._flights:
            self._wait_or_fail(flight, ENDED)
            self._reap()

    def _wait_or_fail(self, flight: Flight, until: int) -> None:
        assert self.writer is not None
        try:
            flight.pending.job.wait(until, pause=leave_if_noted)
        except LightckError:
            self._flights.remove(flight)
            flight.pending.job.abandon()
            self.writer.given_up(flight.pending, bad=True)
            self.writer.refuse_lost_pool()  # says more, where that is the reason
            raise

    def _reap(self) -> None:
        """Take note of versions that ended in the background. Raises the error of one that failed."""
        while self._flights and self._flights[0].pending.job.is_released and self._flights[0].pending.job.has_ended:
            flight = self._flights[0]
            self._wait_or_fail(flight, ENDED)
            self._flights.pop(0)
            self._note_committed(flight)

    def _note_committed(self, flight: Flight) -> None:
        assert self.writer is not None
        self.writer.refuse_lost_pool()
        info = flight.pending.job.info()
        self.writer.committed(flight.pending)
        self.committed = flight.step
        if self.stale.after is not None:
            if self.keeper is not None:
                self.keeper.wait(self.holds)  # it may be reading what is struck
            self.stale.committed(flight.pending.line.generation, self.writer, self.holds)
        self._meter.note_committed(info.nbytes, info.nbytes_helped)
        self.wait_policy.version_ended(info.nbytes, info.nbytes_helped)
        flight.pending.job.forget()
        if self.keeper is not None:
            self.keeper.committed(self.writer, self.holds, flight.step)

    def newest_committed(self) -> int | None:
        """Step of the newest durable version, as of now. Takes note of nothing: any thread may ask."""
        done = [f.step for f in tuple(self._flights) if f.pending.job.is_released and f.pending.job.has_committed]
        return done[-1] if done else self.committed

    def close(self) -> None:
        """Stop the threads and unmap. Versions that are not released are dropped; others were finished before."""
        try:
            if self.keeper is not None:
                self.keeper.end(self.writer, self.holds)
            if not self.engine.is_forked:
                self.early.drop()
                self.staging.close()
        finally:
            self.engine.close()
            self._flights.clear()
            self.resting = Resting()
            self.holds.end()
            if self.writer is not None:
                self.writer.close()
                self.writer = None
