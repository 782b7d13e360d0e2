"""A pool that is open for writing: adopt one of its checkpoints, and write further ones.

``PoolWriter`` joins a container, its mapping, its slots and its commit log. ``begin`` starts a checkpoint and returns a
``Pending`` with the checkpoint's ``Job``. When the job has ended, the caller calls ``committed`` or ``free_slot``.
The native library writes the commit record of a checkpoint (native/src/seal.c)."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lightck._native import errno_of, ffi, lib, reason
from lightck.errors import BackgroundError, SessionError
from lightck.pool.commit_log import CommitLog, candidates, next_position
from lightck.pool.direct_writes import DirectWrites
from lightck.pool.engine import Engine, Job, Medium
from lightck.pool.format import layout
from lightck.pool.format.layout import Entry, blocks_of
from lightck.pool.format.structures import (
    KIND_ADOPTION,
    KIND_CHECKPOINT,
    NEXT_OFFSET,
    NUMBER_MAX,
    CommitRecord,
    ManifestHeader,
    NextBatch,
    pack_next_batch,
    pack_slot_header,
    uuid_words,
)
from lightck.pool.planned_records import CopyPlan, PlannedRecords, copies_of
from lightck.pool.reader import PoolReader
from lightck.pool.reservation import Reservation
from lightck.pool.slot_locks import SlotLocks
from lightck.pool.slots import Slot, SlotChoice, SlotImage, Slots, crc_starts, slot_without_reader
from lightck.pool.storage.durability import MEDIUM_DISK, Durability
from lightck.pool.storage.failures import io_error
from lightck.pool.storage.lock import PoolLock
from lightck.pool.storage.system import processors_near

if TYPE_CHECKING:
    from lightck._native import CData, Commit

log = logging.getLogger("lightck")
COPY_DTYPE = np.dtype(
    [("src", "u8"), ("dst", "u8"), ("nbytes", "u8"), ("tensor", "u8"), ("crc_index", "u4"), ("flags", "u4")]
)
"""The C struct ``lck_copy``."""


class RelayoutNeededError(Exception):
    """The checkpoint does not fit this pool's layout: a new pool file is needed. Internal."""


@dataclass(slots=True)
class Pending:
    """A checkpoint from ``begin`` until ``committed`` or ``free_slot``."""

    job: Job
    slot: Slot
    record: CommitRecord
    """The commit record, except ``manifest_hash``, which is 0 here: the native library computes it."""
    position: int
    """Position of ``record`` in the commit log."""
    plan: CopyPlan
    commits: bool = True
    """Whether the job writes manifest and commit record. If not, this is a gradient record that is stored for a later
    checkpoint."""


class PoolWriter:
    """An existing pool with its mapping, ready for checkpoints. The caller holds the pool's lock."""

    def __init__(
        self,
        reader: PoolReader,
        engine: Engine,
        durability: Durability,
        predecessor: PoolWriter | None = None,
        lock: PoolLock | None = None,
    ) -> None:
        """``predecessor``: the writer of the file that this pool replaces; its generations and its incarnation continue
        here. ``lock``: the pool's lock, which is checked before each write to a slot. Raises ``PoolIOError``."""
        self.reader = reader
        self._lock = lock
        self.durability = durability
        self.superblock = sb = reader.superblock
        self.commit_log = reader.commit_log()
        self.entries: list[Entry] = list(reader.entries)
        self.numbers = {e.name: i for i, e in enumerate(self.entries)}
        self._n_table_entries = len(self.entries)
        """Number of table entries. They come first in ``entries``. After them come the *extra* entries, whose extents
        lie in the reserve."""
        self._reserve_at = sb.reserve_offset
        """Offset in a slot of the first byte of the reserve that no extent uses."""
        self._capacities = [e.nbytes for e in self.entries]
        """Bytes of each entry's extent. The extent of an extra entry may be longer than its tensor."""
        self._free_numbers: list[int] = []
        """Record numbers of extra entries that no tensor uses any more."""
        self.resized: set[str] = set() if predecessor is None else set(predecessor.resized)
        """Names of tensors that changed their dtype, shape or size in this session."""
        self.n_relayouts: int = 0 if predecessor is None else predecessor.n_relayouts + 1
        """Number of relayouts in this session up to this file."""
        self.generation: int = self.commit_log.generation if predecessor is None else predecessor.generation
        """The generation that was used last; the next one is larger by 1."""
        self.incarnation: int = self.commit_log.incarnation + 1 if predecessor is None else predecessor.incarnation
        self._last_position = max(
            self.commit_log.records, key=lambda p: self.commit_log.records[p].generation, default=-1
        )
        self._slot_locks = SlotLocks(reader.container.fd)
        self._engine = engine
        self._commit_struct: Commit = ffi.new("lck_commit *")
        """Filled anew for each job, but for what ``_compute_template`` fills: the engine copies the struct when the job
        is submitted."""
        self.before_unmap: list[Callable[[], None]] = []
        """``close`` calls these before it unmaps the pool. Code that lets a device write into the pool adds them."""
        container = reader.container
        kind = durability.medium_kind
        self.medium = Medium(container.fd, container.extents, kind)
        try:
            self.direct_writes = DirectWrites(self.medium, engine, container.fd, container.extents, kind)
            self._prepare()
        except BaseException as err:
            self.medium.close()
            if isinstance(err, MemoryError):
                raise io_error(f"The pool {reader.path!r} cannot be written", errno.ENOMEM) from err
            raise

    def _prepare(self) -> None:
        sb = self.superblock
        self._compute_template()
        self.slots = Slots([self._slot(i) for i in range(len(sb.slots))])
        # A slot may hold a checkpoint that never committed. The adoption record makes that checkpoint dead only if the
        # record's generation is larger than the checkpoint's.
        self.generation = max(self.generation, *(slot.generation or 0 for slot in self.slots.slots))
        self._engine.run_on(processors_near(self.durability.numa_node, self._engine.threads))
        if self.durability.medium_kind != MEDIUM_DISK:  # populating would read all of the pool, and dirty all pages
            self._engine.populate(self.medium)

    def _slot(self, index: int) -> Slot:
        image = SlotImage(len(self.entries), self._n_crcs, self.superblock.manifest_nbytes_max)
        records = [record for record in self.commit_log.records.values() if record.slot == index]
        newest = max(records, key=lambda record: record.generation, default=None)
        generation = self.reader.slot_generation(index)
        if newest is not None:
            generation = max(generation or 0, newest.payload_generation)
        return Slot(
            index,
            self.superblock.slots[index][0],
            generation,
            image,
            0 if newest is None else 1 - newest.manifest_index,
        )

    def _compute_template(self) -> None:
        """Compute what stays the same until the entries change: the copy array without sources (``_template``), the
        number of checksums, the encoded extra entries, and some fields of ``_commit_struct``."""
        # Each entry has room for the checksums of its whole extent: if its tensor grows, those of others stay in place.
        starts, self._n_crcs = crc_starts(np.array(self._capacities, np.uint64), self.superblock.block)
        self._template = np.zeros(len(self.entries), COPY_DTYPE)
        self._template["dst"] = [e.offset for e in self.entries]
        self._template["nbytes"] = [e.nbytes for e in self.entries]
        self._template["tensor"] = np.arange(len(self.entries))
        self._template["crc_index"] = starts
        extras, sb, commit = self.entries[self._n_table_entries :], self.superblock, self._commit_struct
        commit.uuid_lo, commit.uuid_hi = commit.origin_lo, commit.origin_hi = uuid_words(sb.uuid)
        commit.crcs_count, commit.block = self._n_crcs, sb.block
        self._extras = layout.encode_extras(
            extras, has_group=sb.has_group, has_shares=sb.has_shares, has_gradients=sb.has_gradients
        )

    has_whole_checkpoints = True
    """Whether each slot holds a whole checkpoint. If not, no checkpoint can be pinned, and only a copy of a whole
    checkpoint (``slot_for_copy``) uses a reservation."""

    commits_next = True
    """``Pending.commits`` of what ``begin`` starts next."""

    n_home_entries = 0
    """How many entries lie in homes: the first ones of the layout table."""

    @property
    def not_due(self) -> frozenset[int]:
        """Record numbers of the tensors that the next checkpoint must leave out: their units are not due."""
        return frozenset()

    # -- layout ------------------------------------------------------------------------------------------

    def has_extent_for(self, entry: Entry) -> bool:
        """Whether a tensor of this name has an extent that can hold the tensor that ``entry`` describes
        (``Entry.can_hold``)."""
        number = self.numbers.get(entry.name)
        return number is not None and self.entries[number].can_hold(entry)

    def add(self, entries: Sequence[Entry], present: set[str]) -> None:
        """Find extents in the reserve for new or changed tensors. Raises ``RelayoutNeededError`` if there is no room.

        ``present``: names of all tensors in the next checkpoint. If the reserve is full, extents of other tensors are
        reused. No checkpoint may be in flight: the engine writes into the slot images, which this method replaces."""
        assert not any(slot.in_flight for slot in self.slots.slots), "images in use"
        before = [self.entries[self.numbers[entry.name]] for entry in entries if entry.name in self.numbers]
        self.resized.update(one.name for one in before if not any(map(one.is_same_tensor, entries)))
        try:
            for entry in entries:
                number = self._allocate_extra(entry)
                if number is None:
                    self._free_extras(self.numbers.keys() - present)
                    number = self._allocate_extra(entry)
                if number is None:
                    raise RelayoutNeededError(
                        f"the pool's space for tensors that appear or grow later has no room for {entry.name!r}"
                    )
                self.numbers[entry.name] = number
        finally:
            self._compute_template()
            for slot in self.slots.slots:
                slot.image = slot.image.grown(len(self.entries), self._n_crcs)

    def _allocate_extra(self, entry: Entry) -> int | None:
        """Give this tensor an extra entry, and return its record number; None if the reserve has no room."""
        own = self.numbers.get(entry.name, -1)
        if own >= self._n_table_entries:
            if self._capacities[own] >= entry.nbytes:
                return self._reuse(own, entry)
            self._free_extras([entry.name])
        fitting = [  # an empty tensor takes only an empty extent
            n
            for n in self._free_numbers
            if self._capacities[n] >= entry.nbytes and (entry.nbytes or not self._capacities[n])
        ]
        if fitting:
            number = min(fitting, key=self._capacities.__getitem__)
            self._free_numbers.remove(number)
            return self._reuse(number, entry)
        return self._append(entry)

    def _reuse(self, number: int, entry: Entry) -> int:
        """Give the extra entry ``number`` to the tensor that ``entry`` describes, and return ``number``. The bytes that
        the slots hold for the extra entry are then no longer valid."""
        self.entries[number] = entry._replace(offset=self.entries[number].offset)
        for slot in self.slots.slots:
            slot.image.mark_missing(number)
        return number

    def _append(self, entry: Entry) -> int | None:
        """Append an extra entry. Returns its record number; None if the reserve has no room. A tensor in ``resized``
        gets an extent of twice its size if possible, because it will likely grow again."""
        for nbytes in (2 * entry.nbytes, entry.nbytes) if entry.name in self.resized else (entry.nbytes,):
            (placed,), end = layout.assign_offsets([entry._replace(nbytes=nbytes)], self._reserve_at)
            if end <= self.superblock.slot_nbytes:
                self._reserve_at = end
                self.entries.append(placed._replace(nbytes=entry.nbytes))
                self._capacities.append(nbytes)
                return len(self.entries) - 1
        return None

    def _free_extras(self, names: Iterable[str]) -> None:
        """Free the extra entries of these names, so that other tensors can use them."""
        for name in names:
            if self.numbers[name] >= self._n_table_entries:
                self._free_numbers.append(self.numbers.pop(name))

    def raw_crcs(self, slot: Slot, number: int) -> npt.NDArray[np.uint32]:
        """Return the unseeded block checksums of one record's bytes in the slot; ``number``: the record number."""
        start = int(self._template["crc_index"][number])
        return slot.image.raw[start : start + blocks_of(self.entries[number].nbytes, self.superblock.block)]

    def first_checksums_and_sizes(self, numbers: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """Return the index of each record's first checksum, and each record's number of bytes."""
        rows = self._template[np.asarray(numbers, np.int64)]
        return rows["crc_index"].astype(np.int64), rows["nbytes"]

    def range_in_slot(self, slot: Slot, number: int) -> tuple[int, int]:
        """Return where a record's bytes lie in this slot: (offset in the mapping, number of bytes)."""
        return slot.offset + int(self._template["dst"][number]), self.entries[number].nbytes

    # -- adoption and strikes ----------------------------------------------------------------------------

    def adopt(self, record: CommitRecord) -> None:
        """Write a durable adoption record for the checkpoint of ``record``, and protect the checkpoint's slot."""
        self.generation += 1
        adoption = record._replace(generation=self.generation, incarnation=self.incarnation, kind=KIND_ADOPTION)
        position = self._next_position()
        self.medium.store_commit_record(
            self.superblock.commit_record_offset(position), adoption.pack(self.superblock.uuid)
        )
        self._add_record(position, adoption)
        self.slots.protected = record.slot
        self.slots.dead = (record.payload_generation, adoption.generation)

    def _next_position(self) -> int:
        """Return the position in the commit log for the next record, and remember it as the last one."""
        n_positions = self.superblock.ring_lines
        self._last_position = next_position(self.commit_log, self.slots.contents(), n_positions, self._last_position)
        return self._last_position

    def _add_record(self, position: int, record: CommitRecord) -> None:
        self.commit_log = CommitLog({**self.commit_log.records, position: record}, self.commit_log.damaged)

    def strike(self, after: int, before: int) -> list[int]:
        """Make the checkpoints whose generations lie between ``after`` and ``before`` (both excluded) unreadable,
        durably, because they hold old bytes. No checkpoint in this range may be in flight. Returns the indexes of the
        slots of these checkpoints.

        A strike writes a slot header with a new generation, as is done before a slot is reused (docs/format.md,
        "Slot")."""
        self._refuse_lost_lock()
        written = [slot for slot in self.slots.slots if slot.generation is not None]
        struck = [slot for slot in written if after < (slot.generation or 0) < before]
        for slot in struck:
            assert not slot.in_flight, "a checkpoint in flight is never struck"
            assert slot.index != self.slots.protected, "the newest checkpoint is never struck"
            self.generation += 1
            self.medium.store(
                slot.offset, pack_slot_header(self.generation, slot.index, self.superblock.uuid, struck=True)
            )
            self._forget_content(slot)
        if struck:
            self.medium.sync()
        return [slot.index for slot in struck]

    def reuse_damaged(self, index: int, generation: int) -> bool:
        """Let the next checkpoint use the slot of a damaged one (``Slots.reuse_damaged``). In a group of ranks,
        its rule (``ranks/rule.py``) can delay this. Returns False if the slot holds another checkpoint by now."""
        records = candidates(self.commit_log)
        committed = {(record.slot, record.payload_generation) for record in records}
        return self.slots.reuse_damaged(index, generation, committed, may_unprotect=not self.superblock.has_group)

    # -- checkpoints -------------------------------------------------------------------------------------

    def slot_for_copy(self, step: int, held: frozenset[int] = frozenset()) -> Slot | None:
        """Return the slot for a copy of a whole checkpoint of this step; None if there is no room. ``held``: as in
        ``Slots.choose``."""
        return self.slots.choose(held)

    def choose_slot(self, choose: Callable[[frozenset[int]], Slot | None]) -> SlotChoice:
        """Return the slot for the next checkpoint. Slots that other processes read are skipped, while the training has
        enough others. ``choose``: takes the indexes of slots to skip, and returns the best free one of the others."""
        if not self.has_whole_checkpoints:
            return SlotChoice(choose(frozenset()))
        return slot_without_reader(self.slots, self._slot_locks, 3 if self.superblock.has_group else 2, choose)

    def reserve(self, slot: Slot) -> Reservation:
        """Reserve a slot for a checkpoint whose step is not closed yet. Raises ``BackgroundError``."""
        self._refuse_lost_lock()
        self.generation += 1
        slot.generation, slot.in_flight = self.generation, True
        return Reservation(self, slot, self.generation)

    def begin(self, plan: CopyPlan, slot: Slot, memory: object, reservation: Reservation | None = None) -> Pending:
        """Start a checkpoint: invalidate the slot, make the copies at the boundary, and queue the background copies.

        ``memory``: an object that keeps the source memory alive. ``reservation``: the reservation of this slot. Its
        copies have been started, and ``plan.recorded_only`` contains the record numbers of these copies.

        Raises before anything is written: ``RelayoutNeededError`` if the small state has no room, ``SessionError`` if
        the plan is incomplete or leaves out a tensor whose present bytes are not in the slot, ``BackgroundError`` if
        the lock is lost. Raises ``BackgroundError`` if a copy at the boundary fails, and marks the slot as bad."""
        if reservation is None:
            self._refuse_lost_lock()
        generation = self.generation + 1 if reservation is None else reservation.generation
        planned = self._records_for(slot, plan)
        manifest_nbytes = self._fill_image(slot, plan, planned, generation)
        self.generation = max(self.generation, generation)
        slot.generation, slot.in_flight = generation, True
        position = self._next_position()
        parts = [] if reservation is None else reservation.parts
        flags = lib.LCK_FOLLOWS if reservation is not None and reservation.has_header else 0
        flags |= 0 if self.commits_next else lib.LCK_PART
        commit = self._fill_commit_struct(slot, plan.step, generation, position, manifest_nbytes, flags)
        status, ticket = self._submit(planned.c_copies, len(planned.copies), commit)
        if status != lib.LCK_OK:
            slot.in_flight, slot.is_bad = False, True
            error = _submit_error(status)
            self.refuse_lost_pool()  # a lost pool file is the cause of the failure, so its error comes first
            raise error
        slot.manifest_index = 1 - slot.manifest_index
        job = Job(self._engine, ticket, (memory, planned), parts)
        record = CommitRecord(
            generation,
            self.incarnation,
            plan.step,
            generation,
            0,
            manifest_nbytes,
            KIND_CHECKPOINT,
            slot.index,
            commit.manifest_index,
        )
        return Pending(job, slot, record, position, plan, self.commits_next)

    def submit_part(
        self,
        reservation: Reservation,
        numbers: npt.NDArray[np.int64],
        sources: npt.NDArray[np.uint64] | None,
        flags: int,
        memory: object,
    ) -> Job | None:
        """Submit one job of a reservation. Returns None if the engine's job table has no free entry. Raises
        ``BackgroundError``.

        ``numbers``: the record numbers. ``sources``: addresses of the bytes; None: a device stores the bytes into the
        slot. ``flags``: ``LCK_PART``, ``LCK_FOLLOWS``, ``LCK_HELD``. ``memory``: as for ``begin``."""
        slot = reservation.slot
        commit = self._fill_commit_struct(slot, 0, reservation.generation, 0, slot.image.tail_offset, flags)
        copies = copies_of(self._template, self._origins(slot), numbers, 0 if sources is None else sources)
        copies["flags"] = lib.LCK_PLACED if sources is None else 0
        status, ticket = self._submit(ffi.from_buffer("lck_copy[]", copies), len(copies), commit)
        if status == lib.LCK_EBUSY:
            return None
        if status != lib.LCK_OK:
            slot.is_bad = True
            raise _submit_error(status)
        # The slot no longer holds the old bytes of these tensors. ``begin`` marks the new bytes as being in the slot.
        slot.image.mark_missing(numbers)
        return Job(self._engine, ticket, (memory, copies))

    def _submit(self, copies: CData, n_copies: int, commit: Commit) -> tuple[int, int]:
        """Submit a job to the engine. ``copies``: array of ``lck_copy``. Returns (status, ticket)."""
        ticket = ffi.new("uint64_t *")
        status = lib.lck_job_submit(self._engine.handle, self.medium.handle, copies, n_copies, commit, ticket)
        if status != lib.LCK_EBUSY:  # the job has stored the header, by which readers see that the slot was taken
            self._slot_locks.unlock(commit.slot)
        return status, ticket[0]

    def _records_for(self, slot: Slot, plan: CopyPlan) -> PlannedRecords:
        """Return the records of the slot's last checkpoint if they match this plan, else new ones."""
        planned = slot.image.planned
        if planned is not None and planned.matches(plan, self._template):
            return planned
        return PlannedRecords(plan, self._template, self._origins(slot))

    def _origins(self, slot: Slot) -> int | npt.NDArray[np.uint64]:
        """Return the offset of the region that a checkpoint in this slot writes: one for all entries, or one for each
        of them."""
        return slot.offset

    def _fill_image(self, slot: Slot, plan: CopyPlan, planned: PlannedRecords, generation: int) -> int:
        """Write the manifest, except the block checksums, into the slot's image. Returns the manifest's length in
        bytes. Raises ``RelayoutNeededError`` or ``SessionError``."""
        image = slot.image
        extras = self._extras
        state_end = image.tail_offset + len(extras) + len(plan.state)
        part = self._part_after_state(state_end)
        if state_end + len(part) > self.superblock.manifest_nbytes_max:
            raise RelayoutNeededError(
                "the options, counters, random states and small values no longer fit into the space that the pool has "
                "for them"
            )
        self._refuse_incomplete(plan, image, planned.n_listed)
        if planned is not image.planned:
            planned.write(image)
            image.planned = planned
        planned.stamp(image, generation, plan.step)
        self._complete_records(image)
        header = ManifestHeader(
            generation,
            self.incarnation,
            plan.step,
            min(plan.iteration, NUMBER_MAX - 1),
            self.superblock.table_hash,
            self.superblock.uuid,
            len(self.entries),
            self._n_table_entries,
            image.crcs_offset,
            self._n_crcs,
            image.tail_offset,
            len(extras),
            image.tail_offset + len(extras),
            len(plan.state),
            slot.index,
        )
        return image.write_tail(header.pack(), extras, plan.state + part if part else plan.state)

    def _part_after_state(self, state_end: int) -> bytes:
        """Return what the manifest of the next checkpoint holds after the small state, which ends at ``state_end``, an
        offset in the manifest."""
        return b""

    def _complete_records(self, image: SlotImage) -> None:
        """Change the tensor records of the next checkpoint after they were written for its plan."""

    def _refuse_incomplete(self, plan: CopyPlan, image: SlotImage, n_listed: int) -> None:
        """Raise ``SessionError`` if the plan is incomplete. ``n_listed``: number of different records in the plan."""
        missing = plan.unchanged[~image.in_slot[plan.unchanged]] if len(plan.unchanged) else plan.unchanged
        if len(missing):
            raise SessionError(
                f"The strategy left out {self.entries[missing[0]].name!r}, but the checkpoint's slot does not hold the "
                "present bytes of this tensor. Nothing is committed. A strategy must write every tensor, except those "
                "that have not changed since they were written into the same slot (TargetSlot, pipeline/plan.py)."
            )
        if n_listed != plan.n_tensors:
            raise SessionError(
                f"The strategy's plan covers {n_listed} tensors, and the training has {plan.n_tensors}. Nothing is "
                "committed. Put each tensor into one field of the plan: `tables`, `at_boundary` or `unchanged` "
                "(WritePlan, pipeline/plan.py)."
            )

    def _fill_commit_struct(
        self, slot: Slot, step: int, generation: int, position: int, manifest_nbytes: int, flags: int
    ) -> Commit:
        """Fill ``_commit_struct`` and return it. ``position``: position of the commit record in the log."""
        sb, commit = self.superblock, self._commit_struct
        commit.header_off = slot.offset
        commit.manifest_off = slot.offset + sb.manifest_offset + slot.manifest_index * sb.manifest_nbytes
        commit.record_off = sb.commit_record_offset(position)
        commit.image, commit.image_nbytes = slot.image.buffer_address, manifest_nbytes
        commit.crcs_off, commit.raw_crcs = slot.image.crcs_offset, slot.image.raw_address
        commit.generation, commit.incarnation, commit.step = generation, self.incarnation, step
        commit.slot, commit.manifest_index, commit.flags, commit.zero = slot.index, slot.manifest_index, flags, 0
        return commit

    def store_next_batch(self, slot: Slot, generation: int, entries: Sequence[NextBatch]) -> bool:
        """Store the next-batch record of a checkpoint, before or after the checkpoint's commit. Returns False, and
        stores nothing, if the slot no longer holds this generation or is bad, or if the pool has no next-batch records.

        The next sync makes the record durable. A checkpoint is complete without the record. Raises ``BackgroundError``
        if another training may be using the pool."""
        if slot.generation != generation or slot.is_bad or not self.superblock.has_next_batch:
            return False
        self._refuse_lost_lock(path_only=True)
        self.medium.store(slot.offset + NEXT_OFFSET, pack_next_batch(generation, entries, self.superblock.uuid))
        return True

    def committed(self, pending: Pending) -> None:
        """Register a checkpoint whose commit record is durable. The checkpoint's slot becomes the protected slot."""
        pending.slot.in_flight = False
        self.slots.protected, self.slots.kept_instead = pending.slot.index, None
        self._add_record(pending.position, pending.record)

    def recorded(self, pending: Pending) -> None:
        """Register a gradient record that is not committed, and whose job has ended. Raises ``BackgroundError``."""
        raise AssertionError("without gradient records each checkpoint is committed")

    def free_slot(self, pending: Pending, *, bad: bool) -> None:
        """Free the slot of a checkpoint that was dropped or failed. The content of the slot is unknown afterwards.
        ``bad``: a write to the slot failed, so the slot is not used again."""
        pending.slot.is_bad |= bad
        self._forget_content(pending.slot)

    def free_reservation(self, reservation: Reservation, *, bad: bool) -> None:
        """Free the slot of a reservation. ``bad``: as for ``free_slot``."""
        reservation.slot.is_bad |= bad
        self._forget_content(reservation.slot)

    def _forget_content(self, slot: Slot) -> None:
        self._slot_locks.unlock(slot.index)
        slot.in_flight = False
        slot.generation = None
        slot.image.mark_missing()

    def refuse_lost_pool(self) -> None:
        """Raise ``BackgroundError`` if the pool's file was removed, replaced or truncated.

        A mapping outlives its file, so without this check a training would continue to save into a deleted file."""
        if self.reader.container.is_current():
            return
        raise BackgroundError(
            f"The pool {self.reader.path!r} was removed, moved, replaced or truncated while it was in use. A "
            "checkpoint that is committed now could not be found after a crash. The training in memory is intact. To "
            "keep it, close this session, and attach to another path, where its steps are counted from 0. Do not "
            "attach to the present path with resume=True: the checkpoint of a pool that lies there would replace the "
            "training in memory. Keep cleaners of temporary files away from the pool.",
            errno.ENOENT,
        )

    def _refuse_lost_lock(self, *, path_only: bool = False) -> None:
        if self._lock is not None:
            self._lock.refuse_if_lost(path_only=path_only)

    def close(self) -> None:
        """Unmap the pool and close its container. No job on it may be running. The engine may be closed already."""
        if self._engine.quiesce(self.medium):
            for release in self.before_unmap:
                release()
            self.medium.close()
        else:  # an error in lightck: leaked memory is better than a thread that writes to unmapped addresses
            log.error(
                "lightck: a copy into the pool %r has not ended, so its memory stays mapped until this process ends. "
                "Committed checkpoints are intact. This is an error in lightck: please report it",
                self.reader.path,
            )
        self.reader.close()


def _submit_error(status: int) -> Exception:
    return BackgroundError(
        f"A checkpoint could not be started: {reason(status)}. The checkpoints committed before are intact. Check the "
        "pool's medium (space, health), then start again with resume=True.",
        errno_of(status),
    )
