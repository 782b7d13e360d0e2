"""The gradient log: which places of a pool (homes and record slots) a checkpoint needs, and which may be written next.

A *unit* is a parameter with its optimizer state. It has two *homes*, and each of them has extents for the whole unit.
Its *base* is the newest complete copy of it in a home. A *gradient record* is what one update consumed; records lie in
a ring of slots. A unit's state at step t is its base, updated again with the records after the base. A checkpoint is
*full* if no unit needs a record.

These are pure functions over immutable values: the pool's writer performs what a ``RecordPlan`` says, and then says how
it ended (``GradientLog.with_record``, ``with_commit``, ``with_hole``). Nothing here knows of bytes or of torch.

Invariants (a checkpoint *needs* the bases that it names, and the records after the oldest of them):

1. No plan overwrites a place that a protected checkpoint needs. The newest committed checkpoint is protected. In a
   group of ranks each committed checkpoint is protected, until ``with_protected_only`` says that the other ranks do
   not need it any more.
2. The records of a checkpoint have no hole: their steps are consecutive, up to the checkpoint's own.
3. A unit is written to a home that no protected checkpoint names as its base.
4. After an update without a good record (a *hole*), the next checkpoint is full.
5. A record that is not committed is no checkpoint: it holds only what its update consumed. If a record is damaged, the
   newest committed checkpoint before it is recovered. With at least ``tolerant_records`` slots, a checkpoint is full
   if otherwise damage to one of its records could leave no checkpoint to recover (``_survives_damaged_record``).

With at least ``tolerant_records`` slots, a checkpoint also survives any one damaged place of the pool, as long as
nothing is written after its commit. For that, the other home of each unit must stand in for its base: it holds an older
base, and the log still has every record after that older base. If this is not so (after a hole, or because records that
the older base needs were overwritten while the unit had no update), the unit is written once more.
``tests/pool/test_gradient_log.py`` checks all of this on a model of a pool, in which a crash may come after every
store.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightck.pool.commit_log import CommitLog, candidates
from lightck.pool.format.gradients import IN_RECORD, N_HOMES
from lightck.pool.format.structures import RECORD_SLOTS_MAX

BASE_EVERY_MIN = 2

Steps = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Homes = npt.NDArray[np.uint8]
UnitNumbers = npt.NDArray[np.int64]


# -- how many records --------------------------------------------------------------------------------------------------


def records_min(base_every: int, interval: int = 1, *, in_group: bool = False) -> int:
    """Return the smallest number of record slots with which a crash at any moment loses no committed checkpoint.

    ``base_every``: a unit that is updated is written to a home once in ``base_every`` steps. ``interval``: number of
    steps from one commit to the next.

    A checkpoint needs the last ``base_every - 1`` records. While the next checkpoint is made, the records since the
    last commit lie beside them: ``interval`` of them, but no more than the ``base_every`` newest ones are needed. In a
    group, the checkpoint before the newest one stays too."""
    if in_group:
        return base_every + 2 * interval - 1
    return base_every + min(interval, base_every) - 1


def tolerant_records(base_every: int) -> int:
    """Return the smallest number of record slots with which the other home of each unit stands in for its base."""
    return 2 * base_every - 1


def tolerant_base_every(n_records: int) -> int:
    """Return the largest ``base_every`` whose ``tolerant_records`` are at most ``n_records``, but at least
    ``BASE_EVERY_MIN``."""
    return max((n_records + 1) // 2, BASE_EVERY_MIN)


def records_default(base_every: int, interval: int = 1, *, in_group: bool = False) -> int:
    """Return the number of record slots of a new pool, if the user does not choose it."""
    return max(tolerant_records(base_every), records_min(base_every, interval, in_group=in_group))


def steps_between_writes(base_every: int, interval: int) -> int:
    """Return how many steps lie between two writes of a unit to a home, if every ``interval``-th record is committed.

    This is ``base_every``, rounded down to a multiple of the interval. If a record is damaged, an earlier commit is
    recovered, and each unit needs a base that is at least as old as this commit. Without the rounding, some units would
    have no such base, and about every second checkpoint would have to be full. (With an interval of at most 2, or of
    more than ``base_every - 2``, each unit has such a base without it.)"""
    return base_every - base_every % interval if 2 < interval < base_every - 1 else base_every


def problem_of(base_every: int, log_records: int | None, interval: int = 1, *, in_group: bool = False) -> str | None:
    """Return why these arguments cannot be used together, with the values that can; None if they can.
    ``log_records``: the number of record slots; None: ``records_default``."""
    if base_every < BASE_EVERY_MIN:
        return (
            f"base_every={base_every} is less than {BASE_EVERY_MIN}: every checkpoint would be full. Use FullState()."
        )
    if interval < 1:
        return f"interval={interval} is less than 1."
    if in_group and base_every < 2 * interval:
        return (
            f"base_every={base_every} is less than twice the interval ({interval}). In a group of ranks two "
            "checkpoints stay loadable, so no whole copy of a parameter could be overwritten in time. Choose "
            f"base_every of at least {2 * interval}."
        )
    least = records_min(base_every, interval, in_group=in_group)
    records = records_default(base_every, interval, in_group=in_group) if log_records is None else log_records
    if records < least:
        return (
            f"log_records={records} is too small for base_every={base_every} and interval={interval}: a crash could "
            f"lose every checkpoint. Use at least {least}."
        )
    if records > RECORD_SLOTS_MAX:
        is_enough = least <= RECORD_SLOTS_MAX
        values = f"log_records of {least} to {RECORD_SLOTS_MAX}"
        if log_records is None:
            fact = f"base_every={base_every} needs {records} records"
            cure = f"a smaller base_every, or {values}" if is_enough else "a smaller base_every"
        else:
            fact = f"log_records is {records}"
            cure = values if is_enough else "a smaller base_every and a smaller log_records"
        return f"{fact}, and a pool has at most {RECORD_SLOTS_MAX} records. Choose {cure}."
    return None


# -- what a checkpoint is ----------------------------------------------------------------------------------------------


class GradientRecord(NamedTuple):
    """One gradient record: what the update of ``step`` consumed, in a slot of the ring."""

    step: int
    generation: int
    slot: int


@dataclass(frozen=True, slots=True, eq=False)
class Bases:
    """The bases of all units, as parallel arrays by the number of the unit. The arrays are never changed."""

    home: Homes
    """The home of the base, 0 or 1; the older base is in the other one. ``IN_RECORD``: the gradient record of the step
    after ``step`` holds the whole unit. That record is needed, like every record after ``step``."""
    generation: Steps
    """Generation with which the base was written, which seeds its block checksums; 0: there is none."""
    step: Steps
    """The newest step whose state the base is. It grows while the unit has no update. The unit needs the records of the
    steps after it."""
    written: Steps
    """The step at which the base was written. After an adoption it is not known, and ``step`` stands for it."""
    older_generation: Steps
    """Generation of the older base; 0: the other home holds nothing that could stand in for the base."""
    older_step: Steps
    """The newest step whose state the older base is."""

    @classmethod
    def none(cls, n_units: int, step: int) -> Bases:
        """Return the bases of a log in which no unit has a base. ``step``: any step before the first record."""
        zeros, steps = np.zeros(n_units, np.int64), np.full(n_units, step, np.int64)
        return cls(np.ones(n_units, np.uint8), zeros, steps, steps, zeros, steps)

    def advanced(self, step: int, changed: Mask) -> Bases:
        """Return the bases after the update of ``step``, which changed these units. The other units have the same state
        as before. So a base (or older base) that was the state of such a unit before ``step`` is its state at ``step``,
        too."""
        same = ~changed
        current = same & (self.step == step - 1) & (self.home != IN_RECORD)
        older = same & (self.older_step == step - 1)
        return replace(self, step=np.where(current, step, self.step), older_step=np.where(older, step, self.older_step))

    def changed_after(self, step: int, units: Mask) -> Bases:
        """Return the bases after these units changed at ``step`` without a record of the change. From now on their
        bases count as the state of the step before ``step``, or of an older step."""
        before = step - 1
        return replace(
            self,
            step=np.where(units, np.minimum(self.step, before), self.step),
            older_step=np.where(units, np.minimum(self.older_step, before), self.older_step),
        )

    def with_older_as_base(self, units: Mask) -> Bases:
        """Return the bases after the older bases of these units took the place of the bases, which are damaged. A unit
        without an older base keeps its base."""
        units = units & (self.older_generation > 0)
        # ``1 - home % N_HOMES`` is the other home, and home 1 for ``IN_RECORD``.
        return replace(
            self.without_older(units),
            home=np.where(units, 1 - self.home % N_HOMES, self.home).astype(np.uint8),
            generation=np.where(units, self.older_generation, self.generation),
            step=np.where(units, self.older_step, self.step),
            written=np.where(units, self.older_step, self.written),
        )

    def without_older(self, units: Mask | UnitNumbers) -> Bases:
        """Return the bases without the older bases of these units."""
        older = self.older_generation.copy()
        older[units] = 0
        return replace(self, older_generation=older)

    def after_write(self, units: UnitNumbers, homes: Homes, step: int, generation: int) -> Bases:
        """Return the bases after these units were written to these homes."""
        columns = {name: getattr(self, name).copy() for name in self.__slots__}
        before = self.home[units]
        moved = units[(before != homes) & (before != IN_RECORD)]
        columns["older_generation"][units[before == IN_RECORD]] = 0
        columns["older_generation"][moved], columns["older_step"][moved] = self.generation[moved], self.step[moved]
        columns["home"][units], columns["generation"][units] = homes, generation
        columns["step"][units] = columns["written"][units] = step
        return Bases(**columns)

    def moved_to_record(self, units: UnitNumbers, step: int) -> Bases:
        """Return the bases after these units, which have no usable base, were written whole into the record of
        ``step``."""
        columns = {name: getattr(self, name).copy() for name in self.__slots__}
        columns["home"][units] = IN_RECORD
        columns["generation"][units] = columns["older_generation"][units] = 0
        columns["step"][units] = columns["written"][units] = step - 1
        return Bases(**columns)


@dataclass(frozen=True, slots=True, eq=False)
class LoggedCheckpoint:
    """A checkpoint as the log sees it."""

    step: int
    generation: int
    bases: Bases
    records: tuple[GradientRecord, ...]
    """The records of consecutive steps that were in the log when the checkpoint was made. The last of them is its own.
    The checkpoint does not need the records up to ``oldest_base_step``, but they may be needed to recover from an older
    base."""

    @property
    def oldest_base_step(self) -> int:
        """The step of the oldest state that a unit is recovered from: the records after it are needed."""
        return min(int(self.bases.step.min(initial=self.step)), self.step)

    @property
    def is_full(self) -> bool:
        """Whether no unit needs the record of an earlier step."""
        # The base of a unit that lies in this checkpoint's own record has ``step - 1`` (``moved_to_record``).
        has_older_base = (self.bases.step < self.step) & (self.bases.home != IN_RECORD)
        return self.oldest_base_step >= self.step - 1 and not has_older_base.any()

    @property
    def needed_records(self) -> tuple[GradientRecord, ...]:
        """The records without which the checkpoint cannot be recovered. Its own one is among them: it holds the
        manifest and the small state."""
        return tuple(one for one in self.records if one.step > self.oldest_base_step or one.step == self.step)

    def needs_home(self, home: int) -> Mask:
        """For each unit, whether the checkpoint needs this home of it."""
        return np.equal(self.bases.home, home)


# -- the next record ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class RecordPlan:
    """Where the record of one update goes, and which units are written with it."""

    step: int
    generation: int
    slot: int
    units: UnitNumbers
    """The units that are written to a home."""
    homes: Homes
    """The home of each of them."""
    in_record: UnitNumbers
    """The units that are written whole into the record, in the place of their gradient. ``GradientWriter`` makes no
    such record; readers understand it."""
    checkpoint: LoggedCheckpoint
    """The checkpoint that becomes the newest one if this record is committed."""
    changed: Mask
    """The units whose state the update (or a write outside of it) changed."""

    @property
    def chain(self) -> tuple[GradientRecord, ...]:
        """The records before this one that the manifest names, oldest first."""
        return self.checkpoint.records[:-1]


@dataclass(frozen=True, slots=True, eq=False)
class GradientLog:
    """What a writer knows of the homes and record slots of its pool, after the update of ``step``."""

    base_every: int
    turn: Steps
    """For each unit its turn, from 0 to ``base_every - 1``. A unit is *due* (to be written to a home) at the steps that
    are congruent to its turn modulo ``base_every``."""
    in_group: bool
    """Whether committed checkpoints stay protected until ``with_protected_only`` is called, because other ranks may
    need them. Else only the newest one is protected."""
    step: int
    bases: Bases
    records: tuple[GradientRecord, ...]
    """The records of consecutive steps up to ``step``; empty after a hole."""
    protected: tuple[LoggedCheckpoint, ...]
    """The checkpoints that stay loadable, oldest first."""
    fallback: Bases
    """What the bases will be if the records after the newest committed checkpoint are given up (``with_hole``): the
    bases of this checkpoint, without the older bases that were overwritten since then."""
    slot_generations: tuple[int, ...]
    """For each record slot the generation of its content; 0: nothing that is of use."""
    committed: tuple[int, ...] = ()
    """The steps of those records in the log that were committed as checkpoints, oldest first."""
    has_previous: bool = False
    """Whether a checkpoint before the newest one was protected when the newest one was committed. It is intact as long
    as nothing is written after the newest commit."""

    # -- beginnings

    @classmethod
    def new(
        cls, base_every: int, n_records: int, turn: Sequence[int], step: int, *, in_group: bool = False
    ) -> GradientLog:
        """The log of a pool without checkpoints. ``step``: the last step that has no record; the next checkpoint is
        full."""
        bases = Bases.none(len(turn), step - 1)
        turns = np.asarray(turn, np.int64)
        return cls(base_every, turns, in_group, step, bases, (), (), bases, (0,) * n_records)

    def adopted(self, checkpoint: LoggedCheckpoint) -> GradientLog:
        """The log after a training continued from a checkpoint. ``checkpoint.bases`` are the bases from which it was
        recovered. What a crash has left in the other homes is not known, so older bases do not count."""
        bases = checkpoint.bases.without_older(np.ones(len(self.turn), np.bool_))
        bases = replace(bases, written=bases.step)
        kept = {one.slot: one.generation for one in checkpoint.needed_records}
        return replace(
            self,
            step=checkpoint.step,
            bases=bases,
            fallback=bases,
            records=checkpoint.needed_records,
            protected=(replace(checkpoint, bases=bases, records=checkpoint.needed_records),),
            slot_generations=tuple(kept.get(slot, 0) for slot in range(len(self.slot_generations))),
            committed=(checkpoint.step,),
            has_previous=False,
        )

    def with_base_every(self, base_every: int, turn: Sequence[int]) -> GradientLog:
        """The log with a smaller ``base_every``, after a hole: the next checkpoint is full. ``turn``: the new turns of
        the units."""
        assert base_every <= self.base_every
        assert self.must_be_full
        return replace(self, base_every=base_every, turn=np.asarray(turn, np.int64))

    # -- what is needed

    @property
    def is_tolerant(self) -> bool:
        """Whether the log has room for older bases to stand in for damaged ones."""
        return len(self.slot_generations) >= tolerant_records(self.base_every)

    @property
    def must_be_full(self) -> bool:
        """Whether the next checkpoint must be full, because there is no record of the last update."""
        return not self.records

    def needs_home(self, home: int) -> Mask:
        """For each unit, whether a protected checkpoint needs this home of it."""
        needed = np.zeros(len(self.turn), np.bool_)
        for one in self.protected:
            needed |= one.needs_home(home)
        return needed

    def needed_slots(self) -> frozenset[int]:
        """The record slots that a protected checkpoint needs."""
        return frozenset(record.slot for one in self.protected for record in one.needed_records)

    def survives_damage(self) -> bool:
        """Whether a checkpoint can still be recovered after any one place of the pool was damaged, as long as nothing
        is written after the newest commit. If a base is damaged, the other home of the unit must stand in for it. If
        the manifest or the commit record of the newest checkpoint is damaged, there must be a checkpoint before it. If
        a gradient record is damaged, a checkpoint from before this record must be recoverable."""
        if not self.protected or not self.has_previous:
            return False
        newest = self.protected[-1]
        bases, first = newest.bases, newest.records[0].step
        has_older = (bases.older_generation > 0) & (bases.older_step + 1 >= first)
        return bool(has_older.all()) and self._survives_damaged_record(newest)

    def _survives_damaged_record(self, checkpoint: LoggedCheckpoint) -> bool:
        """Whether an earlier checkpoint can be recovered if one of the records that this one needs is damaged, as long
        as nothing is written after this one is committed."""
        first, oldest = checkpoint.records[0].step, checkpoint.oldest_base_step
        earlier = [step for step in self.committed if first <= step < checkpoint.step]
        if all(record.step in self.committed for record in checkpoint.records[:-1]):
            # The checkpoint of the step before the damaged record is recovered: ``_may_lose_older_base`` keeps its
            # bases.
            return True
        if not earlier or oldest >= earlier[-1]:
            # The committed checkpoint before this one is recovered: all needed records are newer than it, and it was
            # protected until now.
            return True
        # The newest committed checkpoint that is older than any needed record.
        before = max((step for step in earlier if step <= oldest), default=None)
        if before is None:
            return False
        bases = checkpoint.bases
        is_older = (bases.older_generation > 0) & (bases.older_step <= before)
        return bool((is_older | (bases.written <= before)).all())

    # -- the next record

    def next_record(
        self, generation: int, updated: Mask, written_outside: Mask | None = None, *, commits: bool = True
    ) -> RecordPlan | None:
        """Plan the record of the step after ``step``. Returns None if no record slot is free. In a group, one becomes
        free when another checkpoint is common. If none is free after a recovery from an older base, none becomes free:
        the pool must be replaced by a new one.

        ``updated``: the units that the update changed. ``written_outside``: the units that something else than
        ``step()`` has written since the step before, so that no gradient leads to their state (``GradientWriter``
        passes none). ``commits``: whether the record will be committed as a checkpoint."""
        outside = np.zeros(len(self.turn), np.bool_) if written_outside is None else written_outside
        changed = updated | outside
        bases = self.bases.advanced(self.step + 1, changed)
        is_tolerant = commits and self.is_tolerant
        plan = self._plan(generation, bases, changed, outside, is_full=self.must_be_full, is_tolerant=is_tolerant)
        if plan is None:
            return None
        has_all_records = plan.checkpoint.records[0].step <= plan.checkpoint.oldest_base_step + 1
        if not has_all_records or (is_tolerant and not self._survives_damaged_record(plan.checkpoint)):
            plan = self._plan(generation, bases, changed, outside, is_full=True, is_tolerant=is_tolerant)
        return plan

    def _plan(
        self, generation: int, bases: Bases, changed: Mask, outside: Mask, *, is_full: bool, is_tolerant: bool
    ) -> RecordPlan | None:
        """Return the plan of the next record; None if no record slot is free. ``bases``: those after its update.
        ``is_tolerant``: whether the checkpoint must survive a damaged base."""
        step = self.step + 1
        homes, has_home = self._free_homes(bases)
        if is_full:
            due = bases.step < step
        else:
            last_turn = step - (step - self.turn) % self.base_every
            due = bases.step < last_turn
            due &= self._may_lose_older_base(bases, due & has_home, step)
        slot = self._free_slot(_oldest_base_step_after(bases, due & has_home, step))
        if slot is None:
            return None
        retained = self._retained_after(slot)
        if is_tolerant:
            # Write a unit once more, into its other home, if its older base cannot stand in for its base.
            first = retained[0].step if retained else step
            more = (bases.older_generation == 0) | (bases.older_step + 1 < first)
            more &= ~due & has_home & (homes != bases.home) & (bases.generation > 0)
            due |= more & self._may_lose_older_base(bases, (due | more) & has_home, step)
        units, in_record = np.flatnonzero(due & has_home), np.flatnonzero(due & ~has_home & is_full)
        after = bases.after_write(units, homes[units], step, generation).moved_to_record(in_record, step)
        after = after.without_older(after.older_step + 1 < (retained[0].step if retained else step))
        whole_in_record = np.union1d(np.flatnonzero(outside), in_record)
        checkpoint = LoggedCheckpoint(step, generation, after, (*retained, GradientRecord(step, generation, slot)))
        return RecordPlan(step, generation, slot, units, homes[units], whole_in_record, checkpoint, changed)

    def _free_homes(self, bases: Bases) -> tuple[Homes, Mask]:
        """Return the home to which each unit may be written, and whether there is one."""
        taken = np.stack([self.needs_home(0), self.needs_home(1)])
        units = np.arange(len(self.turn))
        homes = np.where(bases.home == IN_RECORD, 0, 1 - bases.home % N_HOMES).astype(np.uint8)
        homes = np.where(taken[homes, units], 1 - homes, homes).astype(np.uint8)
        return homes, ~taken[homes, units]

    def _may_lose_older_base(self, bases: Bases, to_write: Mask, step: int) -> Mask:
        """For each unit, whether its older base may be overwritten. If a record is found to be damaged later, the
        checkpoint of the step before this record is recovered, from bases that were written before this record. So the
        older base may be overwritten only if the base was written before all records that the next checkpoint needs.
        ``to_write``: the units that would be written."""
        if not self.is_tolerant:
            return np.ones(len(self.turn), np.bool_)
        return bases.written <= min(_oldest_base_step_after(bases, to_write, step), step - 1)

    def _free_slot(self, oldest_base_step: int) -> int | None:
        """Return the slot for the next record: of those that nothing needs, the one with the oldest content.
        ``oldest_base_step``: that of the next checkpoint."""
        needed = self.needed_slots() | {record.slot for record in self.records if record.step > oldest_base_step}
        free = [slot for slot in range(len(self.slot_generations)) if slot not in needed]
        return min(free, key=self.slot_generations.__getitem__, default=None)

    def _retained_after(self, slot: int) -> tuple[GradientRecord, ...]:
        """Return the records of consecutive steps up to ``step`` that remain if this slot is overwritten."""
        last = max((n for n, record in enumerate(self.records) if record.slot == slot), default=-1)
        return self.records[last + 1 :]

    # -- what became of it

    def with_record(self, plan: RecordPlan) -> GradientLog:
        """The log after the record of this plan, and its units, were written (or their writes were begun)."""
        slots = list(self.slot_generations)
        slots[plan.slot] = plan.generation
        return replace(
            self,
            step=plan.step,
            bases=plan.checkpoint.bases,
            records=plan.checkpoint.records,
            fallback=self.fallback.advanced(plan.step, plan.changed).without_older(plan.units),
            slot_generations=tuple(slots),
        )

    def with_commit(self, plan: RecordPlan) -> GradientLog:
        """The log after the last record was committed: its checkpoint is the newest one now."""
        assert self.step == plan.step
        kept = self.protected if self.in_group else ()
        first = plan.checkpoint.records[0].step
        committed = (*(step for step in self.committed if step >= first), plan.step)
        return replace(
            self,
            protected=(*kept, plan.checkpoint),
            fallback=self.bases,
            committed=committed,
            has_previous=bool(self.protected),
        )

    def with_protected_only(self, kept_slots: Set[int]) -> GradientLog:
        """The log in which only those committed checkpoints stay protected that lie in these record slots. If there
        are none, the newest one stays protected."""
        kept = tuple(one for one in self.protected if one.records[-1].slot in kept_slots) or self.protected[-1:]
        return self if len(kept) == len(self.protected) else replace(self, protected=kept)

    def with_hole(self, step: int, changed: Mask) -> GradientLog:
        """The log after the update of ``step`` left no good record: its record was given up, it was not saved, or it
        failed in the middle. Also after something else changed units (``load_state_dict``); then ``step`` is that of
        the last update. Records that were not committed yet are given up with it. ``changed``: the units that the
        update, or the write outside of it, changed."""
        # ``with_record`` has already applied the update of ``self.step`` to ``fallback``. Here ``changed`` may lack
        # units that this update changed, so the bases must not be advanced to ``self.step`` again.
        bases = self.fallback if step == self.step else self.fallback.advanced(step, changed)
        bases = bases.changed_after(step, changed)
        newest = self.protected[-1].generation if self.protected else 0
        slots = tuple(0 if generation > newest else generation for generation in self.slot_generations)
        return replace(self, step=step, bases=bases, fallback=bases, records=(), slot_generations=slots)

    def with_strike(self, generation: int) -> GradientLog:
        """The log after the checkpoints before that of ``generation`` were made unreadable, because they hold wrong
        bytes. That checkpoint is the newest committed one, and full: it needs none of them."""
        assert self.protected[-1].generation == generation
        assert self.protected[-1].is_full
        everything = np.ones(len(self.turn), np.bool_)
        newest = self.protected[-1]
        newest = replace(newest, bases=newest.bases.without_older(everything), records=newest.records[-1:])
        slots = tuple(one if one >= generation else 0 for one in self.slot_generations)
        return replace(
            self,
            bases=self.bases.without_older(everything),
            fallback=self.fallback.without_older(everything),
            records=tuple(one for one in self.records if one.generation >= generation),
            protected=(newest,),
            slot_generations=slots,
            has_previous=False,
        )


def _oldest_base_step_after(bases: Bases, to_write: Mask, step: int) -> int:
    """Return ``LoggedCheckpoint.oldest_base_step`` of a checkpoint of ``step`` with which these units are written."""
    return min(int(np.where(to_write, step, bases.step).min(initial=step)), step)


def next_position_in_gradient_pool(
    commit_log: CommitLog, n_kept: int, ring_lines: int, after: int, protected_generations: Set[int] = frozenset()
) -> int:
    """Return the position for the next commit record in the pool of a gradient log: the first one after ``after``, in
    the order of the ring, whose record is not needed. The newest record of each protected checkpoint is needed, and the
    newest record of each of the ``n_kept`` newest checkpoints: recovery takes the second one if the commit record or
    the manifest of the first one is damaged. (It finds older checkpoints through the chain in a manifest.) The log has
    more than ``n_kept`` positions beside those of protected checkpoints."""
    tried = candidates(commit_log)
    needed = tried[:n_kept] + [one for one in tried if one.payload_generation in protected_generations]
    kept = {(one.incarnation, one.generation) for one in needed}
    protected = {p for p, one in commit_log.records.items() if (one.incarnation, one.generation) in kept}
    for distance in range(1, ring_lines + 1):
        position = (after + distance) % ring_lines
        if position not in protected:
            return position
    raise AssertionError("a commit log has more positions than needed records")
