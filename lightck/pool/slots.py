"""The slots of a writable pool: what each holds, which one is written next, and its manifest in memory.

Invariant: the protected slot is never chosen, and neither is a held one. The protected slot holds the checkpoint that
this process committed last, or, before the first commit, the one that it adopted. A slot's ``SlotImage`` mirrors the
tensor records and checksums of the bytes in the slot, so a tensor that a write plan leaves out keeps the record with
which it was written.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightck.pool.format.structures import MANIFEST_HEADER_NBYTES, TENSOR_RECORD_NBYTES
from lightck.pool.reader import TENSOR_RECORD_DTYPE


class SlotImage:
    """The manifest of one slot in memory, into which the engine writes the block checksums.

    ``records`` is a view of the tensor records in ``buffer``; ``raw`` holds the unseeded CRC-32C of every block in the
    slot, which can be compared across generations.
    """

    def __init__(self, n_records: int, n_crcs: int, nbytes_max: int) -> None:
        self.crcs_offset = MANIFEST_HEADER_NBYTES + n_records * TENSOR_RECORD_NBYTES
        self.tail_offset = self.crcs_offset + 4 * n_crcs
        self.nbytes_max = nbytes_max
        self.buffer = np.zeros(max(nbytes_max, self.tail_offset), np.uint8)
        self.records = self.buffer[MANIFEST_HEADER_NBYTES : self.crcs_offset].view(TENSOR_RECORD_DTYPE)
        self.crcs = self.buffer[self.crcs_offset : self.tail_offset].view("<u4")
        self.raw = np.zeros(n_crcs, np.uint32)
        self.buffer_address, self.raw_address = self.buffer.ctypes.data, self.raw.ctypes.data
        self.in_slot = np.zeros(n_records, np.bool_)
        """Which records describe bytes that are known to be in the slot."""

    def grown(self, n_records: int, n_crcs: int) -> SlotImage:
        """Return a copy with room for more records; the present ones keep their numbers."""
        new = SlotImage(n_records, n_crcs, self.nbytes_max)
        new.records[: len(self.records)] = self.records
        new.crcs[: len(self.crcs)] = self.crcs
        new.raw[: len(self.raw)] = self.raw
        new.in_slot[: len(self.in_slot)] = self.in_slot
        return new

    def write_tail(self, header: bytes, extras: bytes, state: bytes) -> int:
        """Write header, extras and small state into the buffer. Returns the manifest's length in bytes."""
        end = self.tail_offset + len(extras) + len(state)
        self.buffer[:MANIFEST_HEADER_NBYTES] = np.frombuffer(header, np.uint8)
        self.buffer[self.tail_offset : end] = np.frombuffer(extras + state, np.uint8)
        return end


@dataclass(slots=True)
class Slot:
    """One slot as the writer knows it."""

    index: int
    offset: int
    generation: int | None
    image: SlotImage
    manifest_index: int = 0
    """Which of the slot's two places (0 or 1) gets the next manifest."""
    is_bad: bool = False
    in_flight: bool = False
    original_generation: int | None = None
    """The generation of its checkpoint in the pool's previous file, if a relayout carried it over from there."""


@dataclass(slots=True)
class Slots:
    """All slots of a pool, and the rule that chooses the next one."""

    slots: list[Slot]
    protected: int | None = None
    """Index of the slot that must not be written: it holds the newest checkpoint."""
    dead: tuple[int, int] = (0, 0)
    """Payload generations strictly between these two are dead. The first belongs to the adopted checkpoint, the second
    to its adoption record."""

    @property
    def n_usable(self) -> int:
        """Number of slots that can be written."""
        return sum(not slot.is_bad for slot in self.slots)

    def choose(self, held: frozenset[int] = frozenset()) -> Slot | None:
        """Return the slot for the next checkpoint: first one with dead or unknown content, then the oldest; None if
        there is none. ``held``: indexes of slots whose checkpoints must not be overwritten."""
        kept = held | {self.protected}
        free = [s for s in self.slots if s.index not in kept and not s.is_bad and not s.in_flight]
        return min(free, key=self._rank, default=None)

    def _rank(self, slot: Slot) -> tuple[bool, int]:
        low, high = self.dead
        is_live = slot.generation is not None and not low < slot.generation < high
        return is_live, slot.generation or 0

    def contents(self) -> dict[int, int | None]:
        return {s.index: s.generation for s in self.slots}


def crc_starts(nbytes: npt.NDArray[np.uint64], block: int) -> tuple[npt.NDArray[np.uint32], int]:
    """Return the index of the first checksum of each record, and the number of all checksums."""
    blocks = -(-nbytes.astype(np.int64) // block)
    ends = np.cumsum(blocks)
    return (ends - blocks).astype(np.uint32), int(ends[-1]) if len(ends) else 0
