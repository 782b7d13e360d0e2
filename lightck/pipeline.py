"""From the tensors of a closed version to its commit line: what is written, when it may commit, who waits.

One version at a time is *open to doubt*: its copies run in the background while the loop goes on, and it may commit
only once every source looks as it did at the boundary and all bytes are copied. The gate, before the next update, is
where doubt ends: the version commits or is dropped. Invariant: no update begins while a source is still needed.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightck.capture.inventory import Live, entry_of
from lightck.capture.snapshot import Closing
from lightck.capture.watch import Resting, Watched, changed_error
from lightck.errors import BackgroundError, LightckError
from lightck.interrupts import deliver
from lightck.pool.backend import Backend
from lightck.pool.durability import Durability
from lightck.pool.engine import COPIED, ENDED, Engine
from lightck.pool.layout import Entry
from lightck.pool.reader import PoolReader
from lightck.pool.slots import Slot
from lightck.pool.writer import RESERVE_MIN, FullError, Pending, PoolWriter, create
from lightck.split import Split, records_of
from lightck.stats import Meter

log = logging.getLogger("lightck")

@dataclass(slots=True)
class _Flight:
    pending: Pending
    watched: Watched
    step: int


class Pipeline:
    """Takes closed versions and brings them to their commit, in order."""

    def __init__(
        self,
        path: str,
        backend: Backend,
        durability: Durability,
        slots: int,
        meter: Meter,
        *,
        check: bool = False,
    ) -> None:
        self.path = path
        self.durability = durability
        self.committed: int | None = None
        self.resting = Resting()
        self.engine = Engine()
        self.writer: PoolWriter | None = None
        self._backend = backend
        self._n_slots = slots
        self._meter = meter
        self._check = check
        self._flights: list[_Flight] = []
        self._turn = 0
        self._layouts = 0
        self._wanted_slots: int | None = None

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
        """Go on in an existing pool."""
        self.writer = PoolWriter(reader, self.engine, self.durability)
        self._n_slots = len(reader.superblock.slots)
        return self.writer

    def adopted(self, step: int, at_once: Sequence[str], slots: int | None) -> None:
        """The version that this session goes on from is in the pool and named by a durable line."""
        self.committed = step
        self.resting.never.update(at_once)
        if slots is not None and slots != self._n_slots:
            log.info("lightck: %d slots instead of %d: the pool is laid out anew at the first boundary", slots,
                     self._n_slots)  # fmt: skip
            self._wanted_slots = slots

    def _new_writer(self, entries: Sequence[Entry], state_nbytes: int, spare_nbytes: int = 0) -> PoolWriter:
        container, _ = create(self._backend, self.path, entries, slots=self._n_slots, state_nbytes=state_nbytes,
                              spare_nbytes=spare_nbytes)  # fmt: skip
        try:
            return PoolWriter(PoolReader(container, self.path), self.engine, self.durability, after=self.writer)
        except BaseException:
            container.close()
            raise

    # -- a version enters --------------------------------------------------------------------------------

    def close_version(self, closing: Closing) -> None:
        """Begin writing a version. Small tensors, buffers and state are copied before this returns."""
        self._reap()
        self.resting.never.update(closing.at_once)
        writer = self.writer
        try:
            if writer is None:
                raise FullError("there is no pool yet")
            if self._wanted_slots is not None:
                self._n_slots, self._wanted_slots = self._wanted_slots, None
                raise FullError(f"the pool is to have {self._n_slots} slots")
            flight = self._begin(writer, closing)
        except FullError as why:
            self._relayout(closing, why)
            return
        self._flights.append(flight)

    def _begin(self, writer: PoolWriter, closing: Closing) -> _Flight:
        records = records_of(writer, closing.lives, self.finish)
        slot = self._free_slot(writer)
        split = Split(self.resting, writer, slot, closing, records)
        hidden = self.resting.audit(split.left_out, writer.superblock.block)
        if hidden is not None:  # one that does not rest is reason to trust none: this version is written whole
            self.resting.trust_none()
            split = Split(self.resting, writer, slot, closing, records)
        pending = writer.begin(split.plan(closing), slot, split.keep)
        for live, number in split.stills:
            self.resting.written(live, writer.raw_crcs(slot, number))
        self.resting.keep([*split.left_out, *(live for live, _ in split.stills)])
        self._meter.left_out = len(split.left_out)
        flight = _Flight(pending, Watched(split.background, split.background_numbers), closing.step)
        if self._check:
            flight.watched.prove(writer.superblock.block)
        if hidden is not None:
            self._flights.append(flight)
            raise changed_error(hidden, "though it was at rest: versions before this one hold its old bytes")
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
        self.finish()
        old = self.writer
        entries = {live.name: entry_of(live) for live in closing.lives}
        if old is not None:
            log.info("lightck: %s; the pool %r is laid out anew", why, self.path)
            entries = _still_foreseen(old.entries, entries) | entries
        writer = self._new_writer(in_order_of_need(entries.values()), len(closing.state), self._spare(entries))
        try:
            flight = self._begin(writer, closing)
            flight.pending.job.release()
            flight.pending.job.wait(ENDED)
            writer.reader.container.publish()
        except BaseException:
            writer.close()
            raise
        self.writer = writer
        if old is not None:
            old.close()
        self._note_committed(flight)

    def _spare(self, entries: Mapping[str, Entry]) -> int:
        """Room for growth, in bytes: what changed its size may double, and each new layout has more for what is new.
        So a training that grows at every step is laid out anew ever more seldom."""
        if self.writer is None:
            return 0
        self._layouts += 1
        nbytes = sum(entry.nbytes for entry in entries.values())
        grew = sum(entries[name].nbytes for name in self.writer.grew & entries.keys())
        return 2 * grew + max(RESERVE_MIN, nbytes >> max(2, 5 - self._layouts))

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
            for flight in self._open_flights():
                self._wait_or_fail(flight, COPIED)
                if not flight.watched.moved():
                    self._settle(flight)

    def gate(self) -> None:
        """Before an update: every source is released, and all versions but the newest slots-2 have committed."""
        if not self._flights:
            return
        with self._meter.wait():
            for flight in self._open_flights():
                self._settle(flight)
            while len(self._flights) > self._n_slots - 2:
                self._finish(self._flights[0])
        self._reap()

    def finish(self, timeout: float | None = None) -> bool:
        """Bring every closed version to its end. False where ``timeout`` seconds were not enough."""
        with self._meter.wait():
            for flight in self._open_flights():
                if not flight.pending.job.wait(COPIED, timeout, pause=deliver):
                    return False
                self._settle(flight)
            while self._flights:
                if not self._flights[0].pending.job.wait(ENDED, timeout, pause=deliver):
                    return False
                self._reap()
        return True

    def finish_quietly(self) -> None:
        """As ``finish``, where nobody is left to raise to: an error is logged, and its version stays uncommitted."""
        try:
            self.finish()
        except Exception as err:
            log.error("lightck: %s", err)

    def _open_flights(self) -> list[_Flight]:
        return [f for f in self._flights if not f.pending.job.is_released]

    def _drop_if_moved(self, flight: _Flight) -> bool:
        """Give a version up whose sources were written. Their copies may have come before the write or after it, so
        nothing tells what it holds; copying again is no cure, since the loop writes again when it goes on from there.
        """
        moved = flight.watched.moved()
        if moved:
            by = "a forward" if flight.watched.forward_seen else "something between the boundary and the next forward"
            self._drop(flight, f"{by} wrote to it", [flight.watched.lives[i] for i in moved])
        return bool(moved)

    def _settle(self, flight: _Flight) -> None:
        """End of doubt: the copies are done, and the version is allowed to commit or is dropped."""
        assert self.writer is not None
        job, watched = flight.pending.job, flight.watched
        self._wait_or_fail(flight, COPIED)
        if self._drop_if_moved(flight):
            return
        raw = [self.writer.raw_crcs(flight.pending.slot, number) for number in watched.numbers]
        self._turn += 1
        hidden = watched.audit(raw, self.writer.superblock.block, self._turn, self._check)
        if hidden is not None:
            self._drop(flight, "it was written unannounced", [live for live in watched.lives if live.name == hidden])
            raise changed_error(hidden, "while a version was being copied")
        job.release()

    def _drop(self, flight: _Flight, reason: str, lives: Sequence[Live]) -> None:
        assert self.writer is not None
        names = [live.name for live in lives]
        self.resting.never.update(names)
        log.warning("lightck: the version of step %d is given up: %s (%s). It is copied at once at the boundary from "
                    "here on. Weight swaps belong into `with session.paused():`.",
                    flight.step, reason, ", ".join(names[:3]))  # fmt: skip
        flight.pending.job.drop()
        flight.pending.job.forget()
        self._flights.remove(flight)
        self.writer.given_up(flight.pending, bad=False)
        self._meter.skipped += 1

    def _finish(self, flight: _Flight) -> None:
        if not flight.pending.job.is_released:
            self._settle(flight)
        if flight in self._flights:
            self._wait_or_fail(flight, ENDED)
            self._reap()

    def _wait_or_fail(self, flight: _Flight, until: int) -> None:
        assert self.writer is not None
        try:
            flight.pending.job.wait(until, pause=deliver)
        except LightckError:
            self._flights.remove(flight)
            self.writer.given_up(flight.pending, bad=True)
            raise

    def _reap(self) -> None:
        """Take note of versions that ended in the background. Raises the error of one that failed."""
        while self._flights and self._flights[0].pending.job.is_released and self._flights[0].pending.job.has_ended:
            flight = self._flights[0]
            self._wait_or_fail(flight, ENDED)
            self._flights.pop(0)
            self._note_committed(flight)

    def _note_committed(self, flight: _Flight) -> None:
        assert self.writer is not None
        self._refuse_lost_pool()
        info = flight.pending.job.info()
        self.writer.committed(flight.pending)
        self.committed = flight.step
        self._meter.versions += 1
        self._meter.bytes_written += info.nbytes
        self._meter.bytes_helped += info.nbytes_helped
        flight.pending.job.forget()

    def _refuse_lost_pool(self) -> None:
        """A mapping outlives its file: without this look a training would go on saving into nothing."""
        assert self.writer is not None
        if self.writer.reader.container.is_current():
            return
        error = BackgroundError(
            f"The pool {self.path!r} was removed, moved or replaced while it was in use. What is committed now could "
            "not be found after a crash. Keep cleaners of temporary files away from it; close this session, and attach "
            "again: the training in memory is whole."
        )
        error.errno = errno.ENOENT
        raise error

    def newest_committed(self) -> int | None:
        """Step of the newest durable version, as of now. Takes note of nothing: any thread may ask."""
        committed = self.committed
        for flight in tuple(self._flights):
            if flight.pending.job.is_released and flight.pending.job.has_committed:
                committed = flight.step
        return committed

    def close(self) -> None:
        """Stop the threads and unmap. Versions that are not released are dropped; others were finished before."""
        self.engine.close()
        self._flights.clear()
        self.resting = Resting()
        if self.writer is not None:
            self.writer.close()
            self.writer = None


def _still_foreseen(old: Iterable[Entry], now: Mapping[str, Entry]) -> dict[str, Entry]:
    """Optimizer state that was laid out for a parameter which has none yet: it may still wake."""
    params = {e.name.removeprefix("model/") for e in now.values() if e.role == "param"}
    return {e.name: e for e in old if e.role == "optimizer" and _param_of(e) in params}


def _param_of(entry: Entry) -> str:
    return entry.name.removeprefix("optimizer/").rpartition("/")[0]


def in_order_of_need(entries: Any) -> list[Entry]:
    """Each parameter followed by its optimizer state, in the order of the modules: what the next step touches
    together lies together, and is free again together."""
    entries = list(entries)
    owner = {e.name.removeprefix("model/"): i for i, e in enumerate(entries) if e.role in ("param", "buffer")}

    def key(item: tuple[int, Entry]) -> tuple[int, int]:
        i, entry = item
        if entry.role != "optimizer":
            return (i if entry.role != "state" else len(entries)), -1
        return owner.get(_param_of(entry), len(entries)), i

    return [entry for _, entry in sorted(enumerate(entries), key=key)]
