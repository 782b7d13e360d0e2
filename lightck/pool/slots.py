"""The slots of a writable pool: the content of each, the slot that is written next, and manifests in memory.

Invariant: neither the protected slot nor a held slot is chosen for a new checkpoint. The protected slot holds the
checkpoint that this process committed last. Before the first commit, the protected slot holds the adopted checkpoint.
If that checkpoint was found damaged, the one before it is kept in its place, until the next commit (``reuse_damaged``).

A slot's ``SlotImage`` mirrors the tensor records and checksums of the bytes in the slot. So a tensor that a write plan
leaves out keeps the record with which its bytes were written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightck.pool.format.structures import MANIFEST_HEADER_NBYTES, TENSOR_RECORD_NBYTES
from lightck.pool.planned_records import PlannedRecords
from lightck.pool.reader import TENSOR_RECORD_DTYPE
from lightck.pool.slot_locks import SlotLocks


class SlotImage:
    """The manifest of one slot in memory, into which the engine writes the block checksums.

    ``records`` and ``crcs`` are views of the tensor records and the seeded block checksums in ``buffer``. ``raw`` holds
    the unseeded CRC-32C of every block in the slot. The seed of a checksum depends on the generation (docs/format.md,
    "Block checksums"), so only unseeded checksums can be compared across generations.
    """

    def __init__(self, n_records: int, n_crcs: int, nbytes_max: int) -> None:
        """``n_crcs``: number of block checksums. ``nbytes_max``: maximum length of the manifest."""
        self.crcs_offset = MANIFEST_HEADER_NBYTES + n_records * TENSOR_RECORD_NBYTES
        self.tail_offset = self.crcs_offset + 4 * n_crcs
        self.nbytes_max = nbytes_max
        self.buffer = np.zeros(max(nbytes_max, self.tail_offset), np.uint8)
        self._bytes = memoryview(self.buffer)  # type: ignore[arg-type]
        self.records = self.buffer[MANIFEST_HEADER_NBYTES : self.crcs_offset].view(TENSOR_RECORD_DTYPE)
        self.crcs = self.buffer[self.crcs_offset : self.tail_offset].view("<u4")
        self.raw = np.zeros(n_crcs, np.uint32)
        self.buffer_address, self.raw_address = self.buffer.ctypes.data, self.raw.ctypes.data
        self.in_slot = np.zeros(n_records, np.bool_)
        """For each record, whether the bytes that it describes are known to be in the slot. Only
        ``PlannedRecords.write`` and ``GradientWriter`` (for bases, which lie in homes) set a value to True; other code
        calls ``mark_missing``."""
        self.planned: PlannedRecords | None = None
        """The records that were computed for the last checkpoint in the slot. They are used again for the next
        checkpoint there if its plan has the same arrays. None after ``mark_missing``."""

    def mark_missing(self, numbers: npt.NDArray[np.int64] | int | None = None) -> None:
        """Mark the bytes of the records with these numbers (None: of all) as not in the slot."""
        self.in_slot[slice(None) if numbers is None else numbers] = False
        self.planned = None

    def grown(self, n_records: int, n_crcs: int) -> SlotImage:
        """Return a copy with room for ``n_records`` records and ``n_crcs`` checksums. The present records and checksums
        keep their numbers."""
        new = SlotImage(n_records, n_crcs, self.nbytes_max)
        new.records[: len(self.records)] = self.records
        new.crcs[: len(self.crcs)] = self.crcs
        new.raw[: len(self.raw)] = self.raw
        new.in_slot[: len(self.in_slot)] = self.in_slot
        return new

    def write_tail(self, header: bytes, extras: bytes, rest: bytes) -> int:
        """Write header, extra entries and the rest of the manifest (the small state and what follows it) into the
        buffer. Returns the length of the manifest in bytes."""
        end = self.tail_offset + len(extras) + len(rest)
        self._bytes[:MANIFEST_HEADER_NBYTES] = header
        self._bytes[self.tail_offset : end - len(rest)] = extras
        self._bytes[end - len(rest) : end] = rest
        return end


@dataclass(slots=True)
class Slot:
    """One slot, in the state that the writer keeps in memory."""

    index: int
    offset: int
    """Offset in the pool."""
    generation: int | None
    """The generation of the content; None: the content is unknown."""
    image: SlotImage
    manifest_index: int = 0
    """Which of the slot's two places (0 or 1) gets the next manifest."""
    is_bad: bool = False
    """Whether a write to the slot failed. This process does not use the slot again."""
    in_flight: bool = False
    """Whether the slot belongs to a checkpoint in flight or to a reservation."""
    damaged_generation: int | None = None
    """The generation of a checkpoint that was found damaged here."""

    @property
    def is_damaged(self) -> bool:
        """Whether the content was found damaged."""
        return self.generation is not None and self.generation == self.damaged_generation


@dataclass(slots=True)
class Slots:
    """All slots of a pool, and the rule that chooses the next one."""

    slots: list[Slot]
    protected: int | None = None
    """Index of the slot with the newest committed checkpoint. It must not be written, unless ``kept_instead`` is
    set."""
    dead: tuple[int, int] = (0, 0)
    """The generations of the adopted checkpoint and of its adoption record. Checkpoints with generations strictly
    between these two are dead."""
    kept_instead: int | None = None
    """Index of the slot that is kept in place of the protected one, whose checkpoint is damaged; else None. The next
    commit sets it to None."""

    @property
    def n_usable(self) -> int:
        """Number of slots that can be written."""
        return sum(not slot.is_bad for slot in self.slots)

    def choose(self, held: frozenset[int] = frozenset()) -> Slot | None:
        """Return the slot for the next checkpoint; None if no slot is free. Slots with dead, unknown or damaged
        content are chosen first, then the slot with the oldest checkpoint. ``held``: indexes of slots whose checkpoints
        must not be overwritten."""
        kept = held | {self.protected if self.kept_instead is None else self.kept_instead}
        free = [s for s in self.slots if s.index not in kept and not s.is_bad and not s.in_flight]
        return min(free, key=self._sort_key, default=None)

    def _sort_key(self, slot: Slot) -> tuple[bool, int]:
        """Return the sort key of ``choose``, which takes the slot with the smallest key."""
        low, high = self.dead
        is_live = slot.generation is not None and not low < slot.generation < high and not slot.is_damaged
        return is_live, slot.generation or 0

    def reuse_damaged(
        self, index: int, generation: int, committed: Collection[tuple[int, int]], *, may_unprotect: bool
    ) -> bool:
        """Mark the checkpoint in this slot as damaged: the slot is used before others, and each of its bytes is written
        then. Returns False, and does nothing, if the slot does not hold this generation any more. ``committed``: (slot,
        generation) of each checkpoint to which a recovery can go back. ``may_unprotect``: if the checkpoint is the one
        that must not be overwritten (the newest one, or the one that is kept in place of it), keep the newest of the
        other good ones instead, so that this slot can be used at once. If there is no other good one, the newest
        checkpoint stays the protected one."""
        slot = self.slots[index]
        if slot.generation != generation or slot.in_flight:
            return False
        slot.damaged_generation = generation
        slot.image.mark_missing()
        if may_unprotect and index in (self.protected, self.kept_instead):
            good = [s for s in self.slots if (s.index, s.generation) in committed and not (s.is_damaged or s.is_bad)]
            newest = max((s for s in good if not s.in_flight), key=lambda s: s.generation or 0, default=None)
            self.kept_instead = None if newest is None else newest.index
        return True

    def contents(self) -> dict[int, int | None]:
        """Return slot index -> generation of the content, or None if the content is unknown."""
        return {s.index: s.generation for s in self.slots}


class SlotChoice(NamedTuple):
    """The slot for the next checkpoint."""

    slot: Slot | None
    """None: no slot can be used now, because checkpoints are in flight, or because the other slots are bad or held."""
    n_passed_over: int = 0
    """Number of slots that were skipped because readers hold them."""
    is_overrun: bool = False
    """Whether a reader holds the slot, which the training needs nevertheless."""


def slot_without_reader(
    slots: Slots, locks: SlotLocks, n_free_min: int, choose: Callable[[frozenset[int]], Slot | None]
) -> SlotChoice:
    """Return the slot for the next checkpoint. It is locked until its header is stored, unless a reader holds it
    (``is_overrun``). ``choose``: takes the indexes of slots to skip, and returns the best of the others.
    ``n_free_min``: how many slots the training needs besides those that readers hold."""
    locks.unlock_all_but({slot.index for slot in slots.slots if slot.in_flight})
    held: set[int] = set()
    while (slot := choose(frozenset(held))) is not None:
        if locks.try_lock(slot.index):
            return SlotChoice(slot, len(held))
        held.add(slot.index)
    if not held:
        return SlotChoice(None)
    may_wait = any(slot.in_flight for slot in slots.slots) and slots.n_usable - len(held) >= n_free_min
    return SlotChoice(None, len(held)) if may_wait else SlotChoice(choose(frozenset()), len(held) - 1, True)


def crc_starts(nbytes: npt.NDArray[np.uint64], block: int) -> tuple[npt.NDArray[np.uint32], int]:
    """Return the index of each record's first block checksum, and the number of checksums of all records. ``nbytes``:
    the length of each record's tensor; ``block``: bytes per checksum."""
    blocks = -(-nbytes.astype(np.int64) // block)
    ends = np.cumsum(blocks)
    return (ends - blocks).astype(np.uint32), int(ends[-1]) if len(ends) else 0
