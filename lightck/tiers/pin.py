"""Held checkpoints: their slots are not overwritten, and a relayout carries them over to the new pool file.

A *hold* is on one committed checkpoint of the open pool. ``Pin`` is the user's handle on a hold; ``keep=`` holds the
checkpoint that it exports. Invariant: at least two slots (in a group of ranks: three; with peer copies: four) are
not held by a pin or an export, and the training writes to these, so that it never waits for the release of a hold.
During a relayout a rank also holds what other ranks may need (``ranks/neighbours.py``).

In the new file a held checkpoint keeps its generation, its incarnation and its step. So a generation, or an incarnation
with a step, that named the checkpoint before still names it.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightck.errors import CorruptPoolError, SessionError
from lightck.pool.engine import ENDED
from lightck.pool.format.structures import SLOTS_MAX, CommitRecord, DamagedError
from lightck.pool.listener import CommitListener
from lightck.pool.storage.failures import io_error
from lightck.pool.writer import Pending, PoolWriter
from lightck.restore.optimizers_at_hand import OptimizersAtHand
from lightck.restore.pool_copies import copy_uncommitted, state_for_copy
from lightck.restore.replayed import ReplayedCheckpoint
from lightck.restore.usable import RankCheckpoint, stored_checkpoint
from lightck.state import values

log = logging.getLogger("lightck")


@dataclass(slots=True, eq=False)
class Hold:
    """One held checkpoint. A relayout of the pool changes its ``record``."""

    step: int
    record: CommitRecord
    is_pin: bool = False
    """Whether the user asked for this hold (``Session.pin()``)."""
    is_for_ranks: bool = False
    """Whether a relayout holds the checkpoint because other ranks may need it."""
    is_for_save: bool = False
    """Whether a save without a session holds the checkpoint, which must stay until the new one is committed."""


class Holds(CommitListener):
    """All holds of a session. As a ``CommitListener`` this object copies the held checkpoints to the new file of a
    relayout. As a ``CommitDecision`` (``pipeline/decision.py``) it protects their slots. Any thread can call
    ``release``; all other methods are called on the training thread."""

    def __init__(self, n_free: int = 2, optimizers: Callable[[], OptimizersAtHand] = OptimizersAtHand) -> None:
        """``n_free``: the number of slots that the training needs besides the held ones. ``optimizers``: returns
        what makes the updates of a held checkpoint again, if the pool has gradient records."""
        self._n_free, self._optimizers = n_free, optimizers
        self._held: list[Hold] = []
        self._to_carry: list[tuple[Hold, RankCheckpoint]] = []
        """During a relayout: each hold, and its checkpoint in the old file."""
        self._carried: list[tuple[Hold, CommitRecord]] = []
        """During a relayout: each hold whose checkpoint is committed in the new file, and its commit record there."""
        self._new: PoolWriter | None = None
        """During a relayout: the writer of the new file."""
        self._lock = threading.Lock()

    @property
    def n_pins(self) -> int:
        """The number of holds that are pins."""
        return sum(hold.is_pin for hold in self._held)

    def slots_for_a_pin(self, n_export_slots: int) -> int:
        """Return the number of slots that the pool needs to hold one more pin. ``n_export_slots``: number of slots for
        exports and tiers, which the result includes. Raises ``SessionError`` if no pool can have so many slots."""
        needed = self._n_free + self.n_pins + 1 + n_export_slots
        if needed > SLOTS_MAX:
            raise SessionError(
                f"No further checkpoint can be pinned: {self.n_pins} are pinned, a pool has at most {SLOTS_MAX} slots, "
                "and the training needs the other slots. Release a pin, or export a checkpoint: "
                "lightck.export_checkpoint()."
            )
        return needed

    def take(self, writer: PoolWriter, *, is_pin: bool = False) -> Hold:
        """Hold the checkpoint in the writer's protected slot, which is the newest committed one, and return the hold.
        Raises ``PoolIOError`` if its commit record cannot be read."""
        assert writer.slots.protected is not None, "a checkpoint was committed"
        return self.take_slot(writer, writer.slots.protected, is_pin=is_pin)

    def take_slot(
        self,
        writer: PoolWriter,
        index: int,
        *,
        is_pin: bool = False,
        is_for_ranks: bool = False,
        is_for_save: bool = False,
    ) -> Hold:
        """Hold the committed checkpoint in a slot, and return the hold. Raises ``PoolIOError`` if its commit record
        cannot be read."""
        record = _commit_record_of(writer, index, writer.slots.slots[index].generation)
        hold = Hold(record.step, record, is_pin, is_for_ranks, is_for_save)
        with self._lock:
            self._held.append(hold)
        return hold

    def release(self, hold: Hold) -> None:
        """End a hold. A second call for the same hold does nothing."""
        with self._lock:
            if hold in self._held:
                self._held.remove(hold)

    # -- the commit decision

    def may_commit(self, closed_step: object) -> bool:
        return True

    def held(self, writer: PoolWriter) -> frozenset[int]:
        if not (self._held or self._carried):  # at almost every checkpoint
            return frozenset()
        with self._lock:
            if writer is self._new:
                return frozenset(record.slot for _, record in self._carried)
            return frozenset(hold.record.slot for hold in self._held)

    # -- the listener

    def struck(self, slots: Sequence[int]) -> None:
        with self._lock:
            gone = [hold for hold in self._held if hold.record.slot in set(slots)]
            self._held = [hold for hold in self._held if hold not in gone]
        pinned = sorted(hold.step for hold in gone if hold.is_pin)
        if pinned:
            log.warning(
                "lightck: the pinned checkpoints of steps %s are struck (made unreadable), because they hold old bytes "
                "of a tensor that was written in a way that moves no version counter of torch (.data, numpy, a fused "
                "kernel or another thread)",
                ", ".join(map(str, pinned)),
            )

    def checkpoints_to_carry(self, old: PoolWriter) -> Sequence[RankCheckpoint]:
        """Return the held checkpoints, oldest first. Raises ``CorruptPoolError`` if one of them cannot be read."""
        self._to_carry = []
        optimizers = self._optimizers() if old.reader.superblock.has_gradients else None
        for hold in sorted(self._held, key=lambda h: h.record.payload_generation):
            try:
                self._to_carry.append((hold, stored_checkpoint(old.reader, hold.record, optimizers)))
            except DamagedError as err:
                raise _damaged(hold, err) from err
        return [stored for _, stored in self._to_carry]

    def carry(self, new: PoolWriter) -> None:
        """Commit each held checkpoint in the new file, and hold its slot in the new file. A checkpoint with several
        holds is copied once. If this session made none of the held checkpoints, an adoption record names the newest
        of them, so that the new file knows the session's incarnation."""
        self._new = new
        committed: dict[int, CommitRecord] = {}  # generation in the old file -> commit record in the new file
        for hold, stored in self._to_carry:
            generation = stored.header.generation
            if generation not in committed:
                committed[generation] = _carry(stored, hold, new, self.held(new))
            with self._lock:
                self._carried.append((hold, committed[generation]))
        if self._carried and new.commit_log.incarnation < new.incarnation:
            new.adopt(self._carried[-1][1])

    def relayout_done(self, new: PoolWriter) -> None:
        with self._lock:
            for hold, record in self._carried:
                hold.record = record
        self._forget_relayout()

    def relayout_failed(self) -> None:
        self._forget_relayout()

    def _forget_relayout(self) -> None:
        """Clear the fields that are used only during a relayout."""
        with self._lock:
            self._to_carry, self._carried, self._new = [], [], None

    def closed(self) -> None:
        with self._lock:
            self._held = []


def _carry(stored: RankCheckpoint, hold: Hold, writer: PoolWriter, held: frozenset[int]) -> CommitRecord:
    """Read and verify a held checkpoint, and commit it in the new file. Returns its commit record in the new file.
    ``writer``: the writer of the new file. ``held``: indexes of the held slots of the new file. Raises
    ``CorruptPoolError`` if the checkpoint is damaged."""
    numbers = _add_missing_tensors(stored, writer)
    try:
        pending = _begin(stored, writer, numbers, held)
    except DamagedError as err:
        raise _damaged(hold, err) from err
    pending.job.release()  # allows the commit: ``begin`` has made all copies
    pending.job.wait(ENDED)
    recorded = stored.reader.next_batches(stored.record)
    if recorded is not None:
        writer.store_next_batch(pending.slot, pending.record.generation, recorded)
    writer.committed(pending)
    pending.job.forget()
    return _commit_record_of(writer, pending.slot.index, pending.record.generation)


def _begin(stored: RankCheckpoint, writer: PoolWriter, numbers: dict[str, int], held: frozenset[int]) -> Pending:
    """Begin the checkpoint in the new file, under the generation and the incarnation that it has in the old one. (Held
    checkpoints are carried over first, oldest first, so generations only grow in the new file too.)"""
    state = bytes(stored.state)
    if isinstance(stored, ReplayedCheckpoint):
        state = values.pack(state_for_copy(stored), path="state")
    own = writer.generation, writer.incarnation
    writer.generation, writer.incarnation = stored.header.generation - 1, stored.header.incarnation
    try:
        return copy_uncommitted(writer, stored, numbers, state, held)
    finally:
        writer.generation, writer.incarnation = own


def _commit_record_of(writer: PoolWriter, slot: int, generation: int | None) -> CommitRecord:
    """Return the newest commit record that names this slot and generation, read from the pool. Raises ``PoolIOError``
    if the pool has no such record."""
    commit_log, here = writer.reader.commit_log(), (slot, generation)
    records = [record for record in commit_log.records.values() if (record.slot, record.payload_generation) == here]
    if not records:
        path = writer.reader.path
        raise io_error(f"The commit record of a checkpoint in the pool {path!r} cannot be read", errno.EIO)
    return max(records, key=lambda record: record.generation)


def _add_missing_tensors(stored: RankCheckpoint, writer: PoolWriter) -> dict[str, int]:
    """Add those tensors of a held checkpoint to the new file that have no extent there. Return tensor name -> number of
    the tensor record in the new file, for all tensors of the checkpoint.

    ``writer.add`` can give tensors of the training other numbers, and mark them as resized. So this function restores
    the numbers and marks of the training's tensors afterwards."""
    own, resized = dict(writer.numbers), set(writer.resized)
    other = [entry for entry in stored.entries.values() if not writer.has_extent_for(entry)]
    if other:
        writer.add(other, set(stored.entries))
    numbers = {name: writer.numbers[name] for name in stored.entries}
    writer.numbers, writer.resized = writer.numbers | own, resized
    return numbers


def _damaged(hold: Hold, err: DamagedError) -> CorruptPoolError:
    if hold.is_for_ranks:
        what, cure = "checkpoint", "Other ranks may need it. Nothing was changed. Start all ranks again"
    elif hold.is_for_save:
        what, cure = "checkpoint", "Nothing was changed. Save to another path, or pass overwrite=True"
    else:
        what, cure = "pinned checkpoint", "The newest checkpoint is intact. Release the pin"
    return CorruptPoolError(
        f"The pool must be written anew, and the {what} of step {hold.step} cannot be copied to the new file: {err}. "
        f"{cure}, and check the health of the pool's medium.",
        (str(err),),
    )


class Pin:
    """The handle that ``Session.pin()`` returns: the checkpoint of ``step`` stays in the pool until ``release()``, the
    end of the ``with`` block or the end of the session."""

    def __init__(self, hold: Hold, release: Callable[[Hold], None]) -> None:
        self._hold = hold
        self._release = release

    @property
    def step(self) -> int:
        """The step of the held checkpoint."""
        return self._hold.step

    def release(self) -> None:
        """Release the hold: from now on the training can overwrite the checkpoint. A second call does nothing."""
        self._release(self._hold)

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"Pin(step={self.step})"
