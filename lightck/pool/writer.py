"""A pool that is open for writing: it is adopted, and takes versions.

``PoolWriter`` joins a container, its mapping, its slots and its ring. A version enters by ``begin`` (which returns a
``Job`` of the engine) and is taken note of by ``committed`` or ``given_up`` when the job has ended; the commit itself,
the line written last, is native/src/seal.c.
"""

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
from lightck.pool.commit_log import CommitLog, next_position
from lightck.pool.engine import COPIED, Engine, Job, Medium
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
    pack_next,
    pack_slot_header,
    uuid_words,
)
from lightck.pool.reader import PoolReader
from lightck.pool.slots import Slot, SlotImage, Slots, crc_starts
from lightck.pool.storage.durability import TIER_DISK, Durability
from lightck.pool.storage.failures import io_error
from lightck.pool.storage.lock import PoolLock
from lightck.pool.storage.system import processors_near

if TYPE_CHECKING:
    from lightck._native import Commit

log = logging.getLogger("lightck")
COPY_DTYPE = np.dtype(
    [("src", "u8"), ("dst", "u8"), ("nbytes", "u8"), ("tensor", "u8"), ("crc_index", "u4"), ("flags", "u4")]
)


class RelayoutNeededError(Exception):
    """What has to be stored does not fit this pool's layout: a new pool file is needed. Internal."""


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """One version as the pipeline hands it down: numbers and addresses, no tensors. Arrays are parallel; record numbers
    are the writer's."""

    step: int
    iteration: int
    records: npt.NDArray[np.int64]
    """Record numbers of the tensors to copy."""
    sources: npt.NDArray[np.uint64]
    """Their addresses."""
    now: npt.NDArray[np.bool_]
    """Whether to copy before ``begin`` returns."""
    kept: npt.NDArray[np.int64]
    """Record numbers of the tensors whose bytes in the slot still hold."""
    present: npt.NDArray[np.int64]
    """Record numbers that have no bytes to copy here: tied or empty tensors, and what a draft has copied."""
    n_tensors: int
    """How many tensors the version has: each is one of ``records``, ``kept`` and ``present``."""
    state: bytes


@dataclass(slots=True)
class Pending:
    """A version between ``begin`` and its end."""

    job: Job
    slot: Slot
    record: CommitRecord
    position: int
    plan: CopyPlan


class PoolWriter:
    """An existing pool with its mapping, ready for versions. One per pool: the caller holds the pool's lock."""

    def __init__(
        self,
        reader: PoolReader,
        engine: Engine,
        durability: Durability,
        after: PoolWriter | None = None,
        lock: PoolLock | None = None,
    ) -> None:
        """``after``: the pool that this one replaces, whose numbering goes on. ``lock``: asked before each version."""
        self.reader = reader
        self._lock = lock
        self.durability = durability
        self.superblock = sb = reader.superblock
        self.commit_log = reader.commit_log()
        self.entries: list[Entry] = list(reader.entries)
        self.numbers = {e.name: i for i, e in enumerate(self.entries)}
        self._n_table = len(self.entries)
        self._reserve_at = sb.reserve_offset
        self._capacities = [e.nbytes for e in self.entries]
        """Bytes from the offset of each entry that are its own: an extra may have more than it needs."""
        self._free_numbers: list[int] = []
        """Numbers of extras whose tensor went elsewhere."""
        self.resized: set[str] = set() if after is None else set(after.resized)
        """Names of tensors that changed their kind or size."""
        self.n_relayouts: int = 0 if after is None else after.n_relayouts + 1
        """How many files came before this one in the session."""
        self.generation: int = self.commit_log.generation if after is None else after.generation
        """The last one that was given to a checkpoint."""
        self.incarnation: int = self.commit_log.incarnation + 1 if after is None else after.incarnation
        self._last_position = max(
            self.commit_log.records, key=lambda p: self.commit_log.records[p].generation, default=-1
        )
        self._engine = engine
        self.before_unmap: list[Callable[[], None]] = []
        """Called before the mapping goes: by what lets others than the engine write into it."""
        self.medium = Medium(reader.container.fd, reader.container.extents, durability.tier)
        try:
            self._get_ready()
        except BaseException as err:
            self.medium.close()
            if isinstance(err, MemoryError):
                raise io_error(f"The pool {reader.path!r} cannot be written", errno.ENOMEM) from err
            raise

    def _get_ready(self) -> None:
        sb = self.superblock
        self._index_entries()
        self.slots = Slots([self._slot(i) for i in range(len(sb.slots))])
        # Beyond the slots' too: so what a version that never committed left there is older than the adoption, and dead.
        self.generation = max(self.generation, *(slot.generation or 0 for slot in self.slots.slots))
        self._engine.run_on(processors_near(self.durability.numa_node, self._engine.threads))
        if self.durability.tier != TIER_DISK:  # there it would read the whole pool and mark it dirty
            self._engine.populate(self.medium)

    def _slot(self, index: int) -> Slot:
        image = SlotImage(len(self.entries), self._n_crcs, self.superblock.manifest_nbytes_max)
        records = [ln for ln in self.commit_log.records.values() if ln.slot == index]
        newest = max(records, key=lambda ln: ln.generation, default=None)
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

    def _index_entries(self) -> None:
        """The columns of the copy array that do not change from version to version."""
        # By the room of each extent: an extra that takes up more or less of it moves no other's checksums.
        starts, self._n_crcs = crc_starts(np.array(self._capacities, np.uint64), self.superblock.block)
        self._template = np.zeros(len(self.entries), COPY_DTYPE)
        self._template["dst"] = [e.offset for e in self.entries]
        self._template["nbytes"] = [e.nbytes for e in self.entries]
        self._template["tensor"] = np.arange(len(self.entries))
        self._template["crc_index"] = starts
        self._extras = layout.encode_extras(self.entries[self._n_table :])

    # -- layout ------------------------------------------------------------------------------------------

    def has_extent_for(self, entry: Entry) -> bool:
        """Whether the tensor has an extent already that it fits as it is."""
        number = self.numbers.get(entry.name)
        return number is not None and self.entries[number].same_bytes_as(entry)

    def add(self, entries: Sequence[Entry], present: set[str]) -> None:
        """Places in the reserve for tensors that appeared or changed their kind. Raises ``RelayoutNeededError``.

        ``present``: the names of this version; where room is short, extents of others are given away. No version may
        be in flight: the engine writes into the images, which are replaced here.
        """
        assert not any(slot.in_flight for slot in self.slots.slots), "images in use"
        self.resized.update(entry.name for entry in entries if entry.name in self.numbers)
        try:
            for entry in entries:
                number = self._place(entry)
                if number is None:
                    self._free_extras(self.numbers.keys() - present)
                    number = self._place(entry)
                if number is None:
                    raise RelayoutNeededError(f"the reserve has no room for {entry.name!r}")
                self.numbers[entry.name] = number
        finally:
            self._index_entries()
            for slot in self.slots.slots:
                slot.image = slot.image.grown(len(self.entries), self._n_crcs)

    def _place(self, entry: Entry) -> int | None:
        """The number of an extra that holds the entry: its own, one that nobody uses any more, or a new one."""
        own = self.numbers.get(entry.name, -1)
        if own >= self._n_table:
            if self._capacities[own] >= entry.nbytes:
                return self._reuse(own, entry)
            self._free_extras([entry.name])
        fitting = [
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
        """What a slot holds under this number is none of the new tensor's."""
        self.entries[number] = entry._replace(offset=self.entries[number].offset)
        for slot in self.slots.slots:
            slot.image.in_slot[number] = False
        return number

    def _append(self, entry: Entry) -> int | None:
        """One that changed its size before gets twice the room that it needs: it will grow again."""
        room = self.superblock.slot_nbytes
        for nbytes in (2 * entry.nbytes, entry.nbytes) if entry.name in self.resized else (entry.nbytes,):
            (placed,), end = layout.place([entry._replace(nbytes=nbytes)], self._reserve_at)
            if end <= room:
                self._reserve_at = end
                self.entries.append(placed._replace(nbytes=entry.nbytes))
                self._capacities.append(nbytes)
                return len(self.entries) - 1
        return None

    def _free_extras(self, names: Iterable[str]) -> None:
        """The extras of these names may be used for others."""
        for name in names:
            if self.numbers[name] >= self._n_table:
                self._free_numbers.append(self.numbers.pop(name))

    def raw_crcs(self, slot: Slot, number: int) -> npt.NDArray[np.uint32]:
        """Unseeded checksums of the bytes of one record that lie in a slot."""
        start = int(self._template["crc_index"][number])
        return slot.image.raw[start : start + blocks_of(self.entries[number].nbytes, self.superblock.block)]

    def extents(self, numbers: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """Where the checksums of these records begin among all, and how many bytes each record has."""
        rows = self._template[np.asarray(numbers, np.int64)]
        return rows["crc_index"].astype(np.int64), rows["nbytes"]

    def place(self, slot: Slot, number: int) -> tuple[int, int]:
        """Where the bytes of a record begin in the mapping when they lie in this slot, and how many there are."""
        return slot.offset + int(self._template["dst"][number]), self.entries[number].nbytes

    # -- identity ----------------------------------------------------------------------------------------

    def adopt(self, record: CommitRecord) -> None:
        """Go on from this version: a durable adoption line, then its slot is protected."""
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
        records = self.superblock.ring_lines
        self._last_position = next_position(self.commit_log, self.slots.contents(), records, self._last_position)
        return self._last_position

    def _add_record(self, position: int, record: CommitRecord) -> None:
        self.commit_log = CommitLog({**self.commit_log.records, position: record}, self.commit_log.damaged)

    def strike(self, after: int, before: int) -> list[int]:
        """Make the checkpoints unreadable, durably, that were made in a generation between these two (both excluded):
        they are known to hold wrong bytes. Returns their slots. Nothing of them may be under way.

        A slot header that names a newer generation is what makes the bytes of a slot nobody's: the same as before a
        slot is written anew (docs/format.md, "Slot").
        """
        self._refuse_lost_lock()
        written = [slot for slot in self.slots.slots if slot.generation is not None]
        struck = [slot for slot in written if after < (slot.original_generation or slot.generation or 0) < before]
        for slot in struck:
            assert not slot.in_flight, "nothing of it may be under way"
            assert slot.index != self.slots.protected, "the newest checkpoint is never struck"
            self.generation += 1
            self.medium.store(
                slot.offset, pack_slot_header(self.generation, slot.index, self.superblock.uuid, struck=True)
            )
            self._slot_unknown(slot)
        if struck:
            self.medium.sync()
        return [slot.index for slot in struck]

    # -- versions ----------------------------------------------------------------------------------------

    def reservation(self, slot: Slot) -> Reservation:
        """Take a slot for a version that is not closed yet."""
        self._refuse_lost_lock()
        self.generation += 1
        slot.generation, slot.in_flight, slot.original_generation = self.generation, True, None
        return Reservation(self, slot, self.generation)

    def begin(self, plan: CopyPlan, slot: Slot, keep: object, reservation: Reservation | None = None) -> Pending:
        """Invalidate the slot, copy what has to be copied now, queue the rest. Raises ``RelayoutNeededError`` before that, and
        ``SessionError`` where the plan leaves out what the slot does not hold.

        ``reservation``: what was begun of it in this slot; its records are among ``plan.present``.
        """
        if reservation is None:
            self._refuse_lost_lock()
        generation = self.generation + 1 if reservation is None else reservation.generation
        image_nbytes = self._fill_image(slot, plan, generation)
        self.generation = max(self.generation, generation)
        slot.generation, slot.in_flight, slot.original_generation = generation, True, None
        position = self._next_position()
        parts = [] if reservation is None else reservation.parts
        commit = self._commit(slot, plan.step, generation, position, image_nbytes, lib.LCK_FOLLOWS if parts else 0)
        copies = self._copies(slot, plan.records, plan.sources, np.where(plan.now, lib.LCK_NOW, 0))
        status, ticket = self._submit(copies, commit)
        if status != lib.LCK_OK:
            slot.in_flight, slot.is_bad = False, True
            error = _submit_error(status)
            self.refuse_lost_pool()  # says more, where that is the reason
            raise error
        slot.manifest_index = 1 - slot.manifest_index
        job = Job(self._engine, ticket, (keep, copies), parts)
        record = CommitRecord(
            generation,
            self.incarnation,
            plan.step,
            generation,
            0,
            image_nbytes,
            KIND_CHECKPOINT,
            slot.index,
            commit.manifest_index,
        )
        return Pending(job, slot, record, position, plan)

    def submit_part(
        self,
        reservation: Reservation,
        records: npt.NDArray[np.int64],
        sources: npt.NDArray[np.uint64] | None,
        flags: int,
        keep: object,
    ) -> Job | None:
        """Of ``Reservation.copy``. None where the engine is busy."""
        slot = reservation.slot
        commit = self._commit(slot, 0, reservation.generation, 0, slot.image.tail_offset, flags)
        copies = self._copies(
            slot, records, 0 if sources is None else sources, lib.LCK_PLACED if sources is None else 0
        )
        status, ticket = self._submit(copies, commit)
        if status == lib.LCK_EBUSY:
            return None
        if status != lib.LCK_OK:
            slot.is_bad = True
            raise _submit_error(status)
        return Job(self._engine, ticket, (keep, copies))

    def _submit(self, copies: npt.NDArray[np.void], commit: Commit) -> tuple[int, int]:
        """(status, ticket)"""
        ticket = ffi.new("uint64_t *")
        array = ffi.cast("lck_copy *", copies.ctypes.data)
        status = lib.lck_job_submit(self._engine.handle, self.medium.handle, array, len(copies), commit, ticket)
        return status, ticket[0]

    def _fill_image(self, slot: Slot, plan: CopyPlan, generation: int) -> int:
        image = slot.image
        extras = self._extras
        if image.tail_offset + len(extras) + len(plan.state) > self.superblock.manifest_nbytes_max:
            raise RelayoutNeededError("the small state outgrew the place for it")
        written = np.concatenate([plan.records, plan.present])
        listed = np.zeros(len(self.entries), np.bool_)
        listed[written] = listed[plan.kept] = True
        self._refuse_incomplete(plan, image, int(np.count_nonzero(listed)))
        image.records["generation"][written] = generation
        image.records["step"][written] = plan.step
        image.records["offset"][written] = self._template["dst"][written]
        image.records["crc"][written] = self._template["crc_index"][written]
        image.records["generation"][~listed] = 0
        image.in_slot[written] = True
        image.in_slot[~listed] = False
        header = ManifestHeader(
            generation,
            self.incarnation,
            plan.step,
            min(plan.iteration, NUMBER_MAX - 1),
            self.superblock.table_hash,
            self.superblock.uuid,
            len(self.entries),
            self._n_table,
            image.crcs_offset,
            self._n_crcs,
            image.tail_offset,
            len(extras),
            image.tail_offset + len(extras),
            len(plan.state),
            slot.index,
        )
        return image.write_tail(header.pack(), extras, plan.state)

    def _refuse_incomplete(self, plan: CopyPlan, image: SlotImage, n_listed: int) -> None:
        """Raise ``SessionError`` where what would be committed is not the whole of the version."""
        missing = plan.kept[~image.in_slot[plan.kept]]
        if len(missing):
            raise SessionError(
                f"The strategy left out {self.entries[missing[0]].name!r}, whose bytes are not in the slot that the "
                "version gets. Nothing is committed. Leave out only what the slot holds (TargetSlot, pipeline/plan.py)."
            )
        if n_listed != plan.n_tensors:
            raise SessionError(
                f"The strategy's plan has places for {n_listed} tensors, and the training has {plan.n_tensors}. "
                "Nothing is committed. Each tensor belongs into a table, into now or into unchanged (WritePlan, "
                "pipeline/plan.py)."
            )

    def _copies(
        self,
        slot: Slot,
        records: npt.NDArray[np.int64],
        sources: npt.NDArray[np.uint64] | int,
        flags: npt.NDArray[np.int64] | int,
    ) -> npt.NDArray[np.void]:
        copies = self._template[records]
        copies["dst"] += np.uint64(slot.offset)
        copies["src"] = sources
        copies["flags"] = flags
        return copies

    def _commit(self, slot: Slot, step: int, generation: int, position: int, image_nbytes: int, flags: int) -> Commit:
        sb = self.superblock
        lo, hi = uuid_words(sb.uuid)
        return ffi.new(
            "lck_commit *",
            {
                "header_off": slot.offset,
                "manifest_off": slot.offset + sb.manifest_offset + slot.manifest_index * sb.manifest_nbytes,
                "record_off": sb.commit_record_offset(position),
                "image": slot.image.buffer.ctypes.data,
                "image_nbytes": image_nbytes,
                "crcs_off": slot.image.crcs_offset,
                "crcs_count": self._n_crcs,
                "raw_crcs": slot.image.raw.ctypes.data,
                "block": sb.block,
                "uuid_lo": lo,
                "uuid_hi": hi,
                "origin_lo": lo,
                "origin_hi": hi,
                "generation": generation,
                "incarnation": self.incarnation,
                "step": step,
                "slot": slot.index,
                "manifest_index": slot.manifest_index,
                "flags": flags,
                "zero": 0,
            },
        )

    def store_next_batch(self, slot: Slot, generation: int, entries: Sequence[NextBatch]) -> bool:
        """Record what followed a version that was begun, committed or not. False where its slot holds it no more.
        Raises ``BackgroundError`` where another training may have the pool.

        Nothing waits for it, and it becomes durable with the next sync: a version without it is whole.
        """
        if slot.generation != generation or slot.is_bad or not self.superblock.has_next_batch:
            return False
        self._refuse_lost_lock(by_file=True)
        self.medium.store(slot.offset + NEXT_OFFSET, pack_next(generation, entries, self.superblock.uuid))
        return True

    def committed(self, pending: Pending) -> None:
        """The version's line is durable: its slot is the protected one now."""
        pending.slot.in_flight = False
        self.slots.protected = pending.slot.index
        self._add_record(pending.position, pending.record)

    def release_slot(self, pending: Pending, *, bad: bool) -> None:
        """The version was dropped, or failed (``bad``): what lies in its slot is unknown from here on."""
        pending.slot.is_bad |= bad
        self._slot_unknown(pending.slot)

    def release_reservation(self, reservation: Reservation, *, bad: bool) -> None:
        reservation.slot.is_bad |= bad
        self._slot_unknown(reservation.slot)

    @staticmethod
    def _slot_unknown(slot: Slot) -> None:
        slot.in_flight = False
        slot.generation = None
        slot.image.in_slot[:] = False

    def refuse_lost_pool(self) -> None:
        """A mapping outlives its file: without this look a training would go on saving into nothing. Raises
        ``BackgroundError``."""
        if self.reader.container.is_current():
            return
        raise BackgroundError(
            f"The pool {self.reader.path!r} was removed, moved, replaced or truncated while it was in use. What is "
            "committed now could not be found after a crash. Keep cleaners of temporary files away from it; close this "
            "session, and attach again: the training in memory is whole.",
            errno.ENOENT,
        )

    def _refuse_lost_lock(self, *, by_file: bool = False) -> None:
        if self._lock is not None:
            self._lock.refuse_if_lost(by_file=by_file)

    def close(self) -> None:
        """Unmap. No job may be running; the engine may be closed already."""
        if self._engine.quiesce(self.medium):
            for release in self.before_unmap:
                release()
            self.medium.close()
        else:  # a fault of ours: addresses that stay mapped cost less than a thread that writes where nothing is
            log.error("lightck: the pool %r is still written to, and stays mapped", self.reader.path)
        self.reader.close()


def _submit_error(status: int) -> Exception:
    return BackgroundError(
        f"A checkpoint could not be begun: {reason(status)}. The versions committed before are intact. Look at the "
        "pool's medium, then start again with resume=True.",
        errno_of(status),
    )


class Reservation:
    """A version that is begun before it is closed: its slot is taken, and some of its tensors are on their way.

    The bytes go into their places as those of any version; what is missing, and what commits, is the job that
    ``PoolWriter.begin`` submits later for the same generation. Made by ``PoolWriter.reservation``; ends in
    ``PoolWriter.begin`` or ``drop``. Invariant: a slot with a draft holds no version, and its generation is used for
    nothing else.
    """

    def __init__(self, writer: PoolWriter, slot: Slot, generation: int) -> None:
        self.slot = slot
        self.generation = generation
        self.parts: list[Job] = []
        self._writer = writer

    def copy(self, records: Sequence[int], sources: Sequence[int] | None, keep: object, *, held: bool = False) -> bool:
        """Begin to copy these tensors in the background: record numbers, addresses, and what keeps them alive.

        False where the engine has no room for one more job. The sources must stay unchanged until ``wait``; with
        ``held`` they are filled first, and ``parts[-1].start()`` says when that is done. ``None`` for sources: a
        device puts the bytes into their places by itself.
        """
        flags = lib.LCK_PART | (lib.LCK_FOLLOWS if self.parts else 0) | (lib.LCK_HELD if held else 0)
        numbers = np.array(records, np.int64)
        addresses = None if sources is None else np.array(sources, np.uint64)
        job = self._writer.submit_part(self, numbers, addresses, flags, keep)
        if job is not None:
            self.parts.append(job)
        return job is not None

    def wait(self) -> None:
        """Help until what was begun is copied. Raises ``BackgroundError``."""
        for part in self.parts:
            part.wait(COPIED)

    def drop(self) -> None:
        """Give it up: what lies in its slot is unknown from here on."""
        failed = False
        for part in self.parts:
            part.drop()
            failed |= part.has_failed
            part.forget()
        self._writer.release_reservation(self, bad=failed)
