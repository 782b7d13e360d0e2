"""Write a pool with gradient records: units into their homes, gradients into a record, one manifest for both.

``GradientLog`` decides where everything goes, and ``GradientWriter`` does it. One job of the engine copies the units
that are written and what the record holds. Its block checksums are seeded with the generation of the job, also those of
the units, so the manifest of this record and of all later ones can name them.

The rows of bases in a manifest come from ``Bases`` and from the checksums of both homes, which the writer keeps in
memory. A home's checksums are taken over when its job has ended. If the job was given up, the log does not use that
home any more, until it is written again.

A record that is not committed has the same job without its last stores: the manifest is stored and fenced when the job
has ended, and nothing is synced. So all that a later checkpoint names is fenced before the sync that comes before its
commit record. A crash before this commit record leaves the earlier checkpoint, which needs none of these stores.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from lightck.errors import BackgroundError
from lightck.pool.engine import Engine
from lightck.pool.format.gradients import (
    HOME_ROW_DTYPE,
    N_HOMES,
    ChainEntry,
    Crcs,
    GradientPart,
    Rows,
)
from lightck.pool.format.layout import HOME_PLACE, Entry, blocks_of, is_of_unit
from lightck.pool.format.structures import CommitRecord, align_up, manifest_hash
from lightck.pool.gradient_log import GradientLog, LoggedCheckpoint, Mask, RecordPlan, next_position_in_gradient_pool
from lightck.pool.gradient_reader import GradientCheckpoint, chain_entry_of, checkpoint_of, logged_checkpoint
from lightck.pool.planned_records import CopyPlan, PlannedRecords
from lightck.pool.reader import PoolReader
from lightck.pool.reservation import Reservation
from lightck.pool.slots import Slot, SlotImage
from lightck.pool.storage.durability import Durability
from lightck.pool.storage.lock import PoolLock
from lightck.pool.writer import Pending, PoolWriter, RelayoutNeededError

KEPT_COMMITS = 2
"""How many of the newest checkpoints keep their commit records. The older ones are found through the chain of a newer
one."""
NO_SENTINELS: Crcs = np.zeros(0, np.uint32)


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a pool: parameters with their optimizer state.

    names: the name of the parameter of each unit. tensors: the numbers of the entries of each unit. of_entry: for
    each entry in a home, in the order of the layout table, the number of its unit. nbytes: bytes of each unit.
    """

    names: tuple[str, ...]
    tensors: tuple[tuple[int, ...], ...]
    of_entry: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    numbers: dict[str, int] = field(default_factory=dict)
    """Name of a unit -> its number."""

    @classmethod
    def of(cls, entries: Sequence[Entry], unit_names: Sequence[str]) -> Units:
        """``entries``: the entries in homes, which come first in the layout table. ``unit_names``: for each of them the
        name of its unit."""
        tensors: dict[str, list[int]] = {}
        for number, name in enumerate(unit_names):
            tensors.setdefault(name, []).append(number)
        numbers = {name: number for number, name in enumerate(tensors)}
        return cls(
            tuple(tensors),
            tuple(map(tuple, tensors.values())),
            np.array([numbers[name] for name in unit_names], np.int64),
            np.array([sum(entries[n].nbytes for n in one) for one in tensors.values()], np.int64),
            numbers,
        )

    def turns(self, base_every: int) -> list[int]:
        """Return for each unit the turn in which it is due: the units are packed into ``base_every`` groups of nearly
        equal bytes, the largest unit first into the smallest group."""
        groups = [0] * base_every
        turns = [0] * len(self.names)
        for unit in np.argsort(-self.nbytes, kind="stable").tolist():
            turn = min(range(base_every), key=groups.__getitem__)
            turns[unit] = turn
            groups[turn] += int(self.nbytes[unit])
        return turns


class GradientWriter(PoolWriter):
    """A pool with gradient records, open for writing. The calls for a checkpoint are, in this order: ``plan_record``,
    ``prepare``, ``begin``, then ``committed`` or ``free_slot``. For a record that is not committed, ``recorded`` takes
    the place of ``committed``. At most one record is in flight. ``skipped`` reports a step without a record."""

    has_whole_checkpoints = False

    def __init__(
        self,
        reader: PoolReader,
        engine: Engine,
        durability: Durability,
        predecessor: PoolWriter | None = None,
        lock: PoolLock | None = None,
        *,
        base_every: int,
        unit_names: Sequence[str],
    ) -> None:
        """``base_every``: see ``GradientLog``. ``unit_names``: for each entry in a home, in the order of the layout
        table, the name of its unit."""
        super().__init__(reader, engine, durability, predecessor, lock)
        in_homes = [entry for entry in self.entries if entry.place == HOME_PLACE]
        assert in_homes == self.entries[: len(in_homes)], "the entries in homes come first (create.py)"
        self.n_home_entries = len(in_homes)
        self.units = Units.of(in_homes, unit_names)
        self.log = GradientLog.new(
            base_every, len(self.slots.slots), self.units.turns(base_every), 0, in_group=reader.group is not None
        )
        blocks = np.array([blocks_of(entry.nbytes, self.superblock.block) for entry in in_homes], np.int64)
        self._block_starts, self._n_home_crcs = np.cumsum(blocks) - blocks, int(blocks.sum())
        self._entry_of_crc = np.repeat(np.arange(len(in_homes)), blocks)
        self._home_crcs = np.zeros((N_HOMES, self._n_home_crcs), np.uint32)
        """The seeded block checksums of what was written last into each home. Only those that ``log.bases`` names are
        meaningful."""
        self._offsets = np.array([entry.offset for entry in in_homes], np.uint64)
        self._home_present = np.zeros((N_HOMES, len(in_homes)), np.bool_)
        """For each home and entry, whether what was written last into this home includes the tensor. (Optimizer state
        may appear after the base of its unit was written. Then the replay makes it.)"""
        self._listed = np.zeros(len(in_homes), np.bool_)
        """For each entry in a home, whether the checkpoint in flight, or the last one, holds the tensor."""
        self._chain: dict[int, ChainEntry] = {}
        """Generation of a record that the log still has -> its chain entry."""
        self.trusted_generation = 0
        """Generation of the newest checkpoint whose bytes depend on no replay of this session's updates: the session
        continued from it, or it is full. 0: there is none."""
        self._plan: RecordPlan | None = None
        self._sentinels, self.commits_next = NO_SENTINELS, True

    @property
    def _prepared(self) -> RecordPlan:
        """The plan of the record that is written next, or now."""
        assert self._plan is not None, "prepare() comes first"
        return self._plan

    # -- before a checkpoint -----------------------------------------------------------------------------

    def plan_record(self, updated: Mask, *, commits: bool = True) -> RecordPlan | None:
        """Plan the record of the next update. ``updated``: the units that it changed. ``commits``: whether it will be
        committed. Returns None if there is no room for it: no record slot is free; or the checkpoint must be full, and
        both homes of a unit are needed; or so many checkpoints are protected that the commit log has no position left.
        A rank of a group gets room when other ranks have committed (``unprotect_all_but``). Without a group the pool
        must be replaced by a new one."""
        assert not any(slot.in_flight for slot in self.slots.slots), "one record at a time"
        if len(self.log.protected) + KEPT_COMMITS >= self.superblock.ring_lines:
            return None  # each of them needs its commit record
        plan = self.log.next_record(self.generation + 1, updated, commits=commits)
        return None if plan is None or len(plan.in_record) else plan

    def unprotect_all_but(self, kept: Set[int]) -> None:
        """Let the places of committed checkpoints be overwritten, except of those in these record slots."""
        self.log = self.log.with_protected_only(kept)

    def last_checkpoint(self) -> GradientCheckpoint | None:
        """Return the checkpoint of the last record, read from the pool; None after a hole. Raises ``DamagedError``."""
        last = self.log.records[-1] if self.log.records else None
        named = None if last is None else self._chain.get(last.generation)
        return None if named is None else checkpoint_of(self.reader, named)

    def prepare(self, plan: RecordPlan, sentinels: Crcs = NO_SENTINELS, *, commits: bool = True) -> Slot:
        """Let ``begin`` write the record of this plan, and return its slot. ``sentinels``: for each entry in a home the
        CRC-32C of the page that docs/format.md names; empty: no sentinels. ``commits``: as for ``plan_record``."""
        assert not len(plan.in_record), "no unit is written whole into a record"
        self._plan, self._sentinels, self.commits_next = plan, sentinels, commits
        return self.slots.slots[plan.slot]

    def takes_record(self, step: int) -> bool:
        """Whether a record of this step that is not committed can be of use: the step before it left a record, or is a
        checkpoint. Otherwise the next checkpoint is full, and needs no records from before it."""
        return not self.log.must_be_full and self.log.step == step - 1

    @property
    def not_due(self) -> frozenset[int]:
        """The numbers of the entries in homes that the record of ``prepare`` does not write."""
        is_written = np.zeros(len(self.units.names), np.bool_)
        is_written[self._prepared.units] = True
        return frozenset(np.flatnonzero(~is_written[self.units.of_entry]).tolist())

    def has_extent_for(self, entry: Entry) -> bool:
        """As ``PoolWriter.has_extent_for``, but ``entry.place`` does not count: the training does not know which of its
        tensors lie in homes."""
        number = self.numbers.get(entry.name)
        place = entry.place if number is None else self.entries[number].place
        return super().has_extent_for(entry._replace(place=place))

    def skipped(self, step: int, changed: Mask) -> None:
        """The update of ``step``, which changed these units, has no record. The next checkpoint is full."""
        self.log = self.log.with_hole(step, changed)

    def limit_base_every(self, most: int) -> None:
        """Lower ``base_every`` to this number, if it is larger. Called only after ``skipped``."""
        if most < self.log.base_every:
            self.log = self.log.with_base_every(most, self.units.turns(most))

    def add(self, entries: Sequence[Entry], present: set[str]) -> None:
        """As ``PoolWriter.add``. New parameters, optimizer state and residuals have no home, so they need a new
        pool."""
        for entry in entries:
            if is_of_unit(entry.role, entry.name, entry.alias):
                raise RelayoutNeededError(f"{entry.name!r} has no home in the pool")
        super().add(entries, present)

    # -- a copy of a whole checkpoint --------------------------------------------------------------------

    def slot_for_copy(self, step: int, held: frozenset[int] = frozenset()) -> Slot | None:
        """As ``PoolWriter.slot_for_copy``. All units of the copy are written to homes."""
        self.unprotect_all_but(held)
        everything = np.ones(len(self.units.names), np.bool_)
        self.skipped(step - 1, everything)
        plan = self.plan_record(everything)
        return None if plan is None else self.prepare(plan)

    def reserve(self, slot: Slot) -> Reservation:
        """As ``PoolWriter.reserve``, for the slot of ``slot_for_copy``."""
        self._fill_in_bases(slot.image)
        self.log = self.log.with_record(self._prepared)
        return super().reserve(slot)

    def free_reservation(self, reservation: Reservation, *, bad: bool) -> None:
        super().free_reservation(reservation, bad=bad)
        plan, self._plan = self._prepared, None
        self.skipped(plan.step, plan.changed)

    # -- a checkpoint ------------------------------------------------------------------------------------

    def begin(self, plan: CopyPlan, slot: Slot, memory: object, reservation: Reservation | None = None) -> Pending:
        """As ``PoolWriter.begin``, for the record of ``prepare``. ``plan.unchanged`` lists the entries in homes that
        the record does not write. ``reservation``: of a copy of a whole checkpoint."""
        record = self._prepared
        generation = self.generation + 1 if reservation is None else reservation.generation
        expected = record.slot, record.generation, record.step
        assert (slot.index, generation, plan.step) == expected, "prepare() gives slot and step"
        listed = np.zeros(len(self.entries), np.bool_)
        for numbers in (plan.records, plan.unchanged, plan.recorded_only):
            listed[numbers] = True
        self._listed = listed[: self.n_home_entries]
        if reservation is not None:
            return super().begin(plan, slot, memory, reservation)
        self._fill_in_bases(slot.image)
        pending = super().begin(plan, slot, memory)
        self.log = self.log.with_record(record)
        return pending

    def committed(self, pending: Pending) -> None:
        assert pending.commits, "recorded() registers the others"
        super().committed(pending)
        plan = self._keep_written(pending, pending.slot.image.buffer[: pending.record.manifest_nbytes].tobytes())
        self.log = self.log.with_commit(plan)
        if plan.checkpoint.is_full:
            self.trusted_generation = plan.generation
        self._forget_old_records()

    def recorded(self, pending: Pending) -> None:
        assert not pending.commits, "committed() registers the others"
        record, image = pending.record, pending.slot.image
        manifest = image.buffer[: record.manifest_nbytes].tobytes()
        try:
            self.medium.store(self.superblock.manifest_at(record.slot, record.manifest_index), manifest)
            self.medium.fence()
        except BackgroundError:
            self.free_slot(pending, bad=True)
            raise
        pending.slot.in_flight = False
        self._keep_written(pending, manifest)
        self._forget_old_records()

    def _keep_written(self, pending: Pending, manifest: bytes) -> RecordPlan:
        """Take over what a job has written: the checksums of homes, and what later chains say of the record. Returns
        the plan of the record. ``manifest``: its bytes."""
        plan, image = self._prepared, pending.slot.image
        for unit, home in zip(plan.units.tolist(), plan.homes.tolist(), strict=True):
            for number in self.units.tensors[unit]:
                crcs = self._crcs_of(number)
                self._home_crcs[home, crcs] = image.crcs[crcs]
                self._home_present[home, number] = self._listed[number]
        record = pending.record
        named = chain_entry_of(record._replace(manifest_hash=manifest_hash(self.superblock.uuid, manifest)))
        self._chain[record.generation] = named if pending.commits else named._replace(flags=0)
        self._plan = None
        return plan

    def free_slot(self, pending: Pending, *, bad: bool) -> None:
        super().free_slot(pending, bad=bad)
        plan, self._plan = self._prepared, None
        self.skipped(plan.step, plan.changed)

    def _forget_old_records(self) -> None:
        named = {record.generation for record in self.log.records}
        self._chain = {generation: entry for generation, entry in self._chain.items() if generation in named}

    def _next_position(self) -> int:
        if not self.commits_next:
            return max(self._last_position, 0)  # the job stores nothing there
        n_positions = self.superblock.ring_lines
        protected = {one.generation for one in self.log.protected}
        self._last_position = next_position_in_gradient_pool(
            self.commit_log, KEPT_COMMITS, n_positions, self._last_position, protected
        )
        return self._last_position

    # -- the manifest ------------------------------------------------------------------------------------

    def _records_for(self, slot: Slot, plan: CopyPlan) -> PlannedRecords:
        return PlannedRecords(plan, self._template, self._origins(slot))

    def _origins(self, slot: Slot) -> npt.NDArray[np.uint64]:
        """Units are written to the home that the plan gives them, everything else to the slot."""
        record = self._prepared
        origins = np.full(len(self.entries), slot.offset, np.uint64)
        homes = np.zeros(len(self.units.names), np.int64)
        homes[record.units] = record.homes
        starts = np.array([offset for offset, _ in self.superblock.homes], np.uint64)
        origins[: self.n_home_entries] = starts[homes[self.units.of_entry]]
        return origins

    def _fill_in_bases(self, image: SlotImage) -> None:
        """Write the checksums of all bases into the image of a slot, as if its checkpoints had written them there."""
        bases, of_entry = self.log.bases, self.units.of_entry
        home = bases.home[of_entry].astype(np.int64) % N_HOMES
        numbers = np.arange(self._n_home_crcs)
        image.crcs[: self._n_home_crcs] = self._home_crcs[home[self._entry_of_crc], numbers]
        image.records["crc"][: self.n_home_entries] = self._block_starts
        image.records["offset"][: self.n_home_entries] = self._offsets
        image.in_slot[: self.n_home_entries] = bases.generation[of_entry] > 0

    def _complete_records(self, image: SlotImage) -> None:
        """Write into the rows of the bases what the log says of them after this record."""
        record = self._prepared
        bases, of_entry = record.checkpoint.bases, self.units.of_entry
        rows = image.records.view(HOME_ROW_DTYPE)[: self.n_home_entries]
        rows["generation"] = np.where(self._in_base(record.checkpoint), bases.generation[of_entry], 0)
        rows["step"] = bases.step[of_entry]
        rows["home"] = bases.home[of_entry]

    def _in_base(self, checkpoint: LoggedCheckpoint) -> npt.NDArray[np.bool_]:
        """Return for each entry in a home whether the base of its unit includes the tensor, after the record of this
        checkpoint."""
        bases, of_entry = checkpoint.bases, self.units.of_entry
        home = bases.home[of_entry].astype(np.int64) % N_HOMES
        is_written = bases.generation[of_entry] == checkpoint.generation
        return np.where(is_written, self._listed, self._home_present[home, np.arange(self.n_home_entries)])

    def _part_after_state(self, state_end: int) -> bytes:
        record = self._prepared
        older, crcs = self._older_rows(record.checkpoint)
        chain = tuple(self._chain[one.generation] for one in record.chain)
        part = GradientPart(older, crcs, chain, self._sentinels)
        return bytes(align_up(state_end, 8) - state_end) + part.pack()

    def _older_rows(self, checkpoint: LoggedCheckpoint) -> tuple[Rows, Crcs]:
        """Return the rows and the block checksums of the older bases."""
        bases, of_entry = checkpoint.bases, self.units.of_entry
        other_home = 1 - bases.home[of_entry].astype(np.int64) % N_HOMES
        present = self._home_present[other_home, np.arange(self.n_home_entries)]
        generation = np.where(present, bases.older_generation[of_entry], 0)
        # A tensor that is missing in the base gets no row here. Then the older base of its unit is incomplete, and is
        # left out.
        incomplete = of_entry[(generation > 0) & ~self._in_base(checkpoint)]
        generation[np.isin(of_entry, incomplete)] = 0
        has_older = generation > 0
        chosen = has_older[self._entry_of_crc]
        crcs = self._home_crcs[other_home[self._entry_of_crc[chosen]], np.flatnonzero(chosen)]
        n_blocks = np.bincount(self._entry_of_crc[chosen], minlength=self.n_home_entries)
        rows = np.zeros(self.n_home_entries, HOME_ROW_DTYPE)
        rows["generation"], rows["step"] = generation, bases.older_step[of_entry]
        rows["offset"], rows["home"] = self._offsets, other_home
        rows["crc"] = np.cumsum(n_blocks) - n_blocks
        rows[~has_older] = 0
        return rows, crcs

    def _crcs_of(self, number: int) -> slice:
        """Return where the checksums of an entry in a home lie among those of all entries in homes."""
        start = int(self._block_starts[number])
        return slice(start, start + blocks_of(self.entries[number].nbytes, self.superblock.block))

    def strike(self, after: int, before: int) -> list[int]:
        """As ``PoolWriter.strike``. The newest checkpoint is full, and needs nothing of the struck ones."""
        struck = super().strike(after, before)
        self.log = self.log.with_strike(self.log.protected[-1].generation)
        return struck

    # -- adoption ----------------------------------------------------------------------------------------

    def adopt(self, record: CommitRecord) -> None:
        """Write a durable adoption record for a checkpoint that was recovered from its bases, and protect what it
        needs: of each unit the base, or the older base if the base is damaged (``PoolReader.damaged``). The next
        checkpoint is full."""
        super().adopt(record)
        checkpoint = checkpoint_of(self.reader, chain_entry_of(record))
        names = [[self.entries[number].name for number in one] for one in self.units.tensors]
        logged = logged_checkpoint(checkpoint, names)
        damaged = self._damaged_units(checkpoint)
        logged = replace(logged, bases=logged.bases.with_older_as_base(damaged))
        self._take_checksums(checkpoint, damaged)
        self._chain = {entry.generation: entry for entry in checkpoint.part.chain}
        self._chain[record.payload_generation] = chain_entry_of(record)
        self.log = self.log.adopted(logged)
        self.trusted_generation = record.payload_generation  # the training continues from what was restored
        self.skipped(logged.step, np.zeros(len(self.units.names), np.bool_))

    def _damaged_units(self, checkpoint: GradientCheckpoint) -> Mask:
        """Return for each unit whether a tensor of its base was found to be damaged."""
        damaged = np.zeros(len(self.units.names), np.bool_)
        for base in checkpoint.bases():
            if (base.number, base.generation) in self.reader.damaged:
                damaged[self.units.of_entry[base.number]] = True
        return damaged

    def _take_checksums(self, checkpoint: GradientCheckpoint, damaged: Mask) -> None:
        """Take over the checksums of the bases that are used. ``damaged``: the units whose older bases are used."""
        older = [base for base in checkpoint.older_bases() if damaged[self.units.of_entry[base.number]]]
        for rows, bases in ((checkpoint.rows, checkpoint.bases()), (checkpoint.part.older, older)):
            for base in bases:
                home = int(rows["home"][base.number])
                self._home_crcs[home, self._crcs_of(base.number)] = base.crcs
                self._home_present[home, base.number] = True
