"""Read the pool of a running training again. Nothing is written to it.

    slot      one after the other, in pieces; each piece of the checkpoint that lies there at that moment. So each slot
              is read to its end, even if the training commits faster than this reads
    hold      the slot, as a reader does, for one piece only: so the training never has to do without it
    verify    by the pool's own checksums, which have the generation in them
    suspect   a piece that does not verify is read once more after a pause: from the medium, if the kernel drops its
              pages from the page cache. The damage counts only if the slot holds the same checkpoint before and after
              this second read. (The training stores a slot's header before it overwrites anything, so a slot that it
              overwrites is never taken for a damaged one.)
    report    to the training, which uses the slot next (``drain_reports.py``)

What is being written at that moment is left out in this round.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Generator

from lightck.pool.commit_log import candidates
from lightck.pool.format.layout import blocks_of
from lightck.pool.format.structures import CommitRecord, DamagedError, Superblock
from lightck.pool.reader import PoolReader, StoredCheckpoint, open_pool
from lightck.tiers.drain_messages import REPORTS_MAX, DrainState

PIECE_NBYTES_MAX = 3 << 20
"""Below ``PARALLEL_READ_NBYTES_MIN``: the drain reads with one thread."""
_SUSPECT_SECONDS_MAX, _OPEN_SECONDS_MAX = 1.0, 10.0
BlockRange = tuple[str, int, int, int]
"""(name, first block, bytes, address), as ``StoredCheckpoint.read_blocks`` takes it. The address is 0: the bytes are
only verified."""


class _ReplacedError(Exception):
    """Another file has the pool's path. Internal."""


class PoolRereading:
    """The rounds over one pool."""

    def __init__(self, path: str, period: float, state: DrainState, *, is_of_group: bool) -> None:
        self._path, self._period, self._state, self._is_of_group = path, period, state, is_of_group
        self._reader: PoolReader | None = None
        """The open pool; None while a long time is left until the next piece is due."""
        self._damaged: set[tuple[str, int, int]] = set()
        """(uuid of the pool, slot, generation) of the damaged checkpoints."""

    def round(self, began: float) -> Generator[float, None, bool]:
        """Read everything once. Yields the time at which the next piece is due. Raises ``PoolError``."""
        try:
            superblock = self._opened().superblock
            slots = list(range(len(superblock.slots)))
            random.shuffle(slots)
            for number, slot in enumerate(slots):
                yield from self._read_slot(superblock, slot, began, number)
        except _ReplacedError:
            return False
        finally:
            self._close()
        yield began + self._period
        return True

    def _opened(self, superblock: Superblock | None = None) -> PoolReader:
        """Return the pool, open. ``superblock``: which one it must be. Raises ``PoolError``."""
        if self._reader is None:
            self._reader = open_pool(self._path)
        if not self._reader.container.is_current() or superblock not in (None, self._reader.superblock):
            raise _ReplacedError
        return self._reader

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def _wait_until(self, until: float) -> Generator[float, None, None]:
        """Wait, and close the pool before a long wait: an open file keeps its memory, which a training that moves to
        another file wants back soon."""
        if until - time.monotonic() > _OPEN_SECONDS_MAX:
            self._close()
        yield until

    def _read_slot(self, superblock: Superblock, slot: int, began: float, number: int) -> Generator[float, None, None]:
        """Read a slot, the ``number``-th one of the round."""
        (_, slot_nbytes), n_slots = superblock.slots[slot], len(superblock.slots)
        offset, stored = 0, None
        while offset < slot_nbytes:
            yield from self._wait_until(began + self._period * (number + offset / slot_nbytes) / n_slots)
            reader = self._opened(superblock)
            record, reason, end = None, None, offset + PIECE_NBYTES_MAX
            if stored is None or stored.reader is not reader or not stored.owns_slot():
                record, stored, reason = self._checkpoint_in(reader, slot)
            if stored is not None:
                places, end = _places(stored, offset)
                record, reason = stored.record, self._damage_of(stored, places)
            if record is None:
                stored = None  # it is being written, or was overwritten meanwhile
            elif reason is not None:
                yield time.monotonic() + min(_SUSPECT_SECONDS_MAX, self._period / 20)
                if (again := self._damage_again(self._opened(superblock), record, offset)) is not None:
                    self._found(reader, record, again)
                    return
                stored = None
            offset = end

    def _checkpoint_in(
        self, reader: PoolReader, slot: int
    ) -> tuple[CommitRecord | None, StoredCheckpoint | None, str | None]:
        """Return the commit record of the checkpoint that a slot holds, the checkpoint, and what is wrong with it if it
        cannot be read. All three are None if the slot holds none: it is being written."""
        generation = reader.slot_generation(slot)
        for record in candidates(reader.commit_log()):
            if record.slot == slot and generation in (record.payload_generation, None):
                try:
                    return record, reader.checkpoint(record), None
                except DamagedError as err:
                    return (None, None, None) if reader.has_lost_slot(record) else (record, None, str(err))
        return None, None, None

    def _damage_of(self, stored: StoredCheckpoint, places: list[BlockRange]) -> str | None:
        """Verify a piece. Returns what is wrong with it, if its slot still belongs to the checkpoint."""
        with stored.hold():
            if not stored.owns_slot():
                return None
            try:
                stored.read_blocks(places)
            except DamagedError as err:
                return str(err) if stored.owns_slot() else None
        self._state.pool.nbytes += sum(nbytes for _, _, nbytes, _ in places)
        return None

    def _damage_again(self, reader: PoolReader, record: CommitRecord, offset: int) -> str | None:
        """Read the checkpoint, and its piece at ``offset``, once more, from the medium as far as that is possible."""
        found, stored, reason = self._checkpoint_in(reader, record.slot)
        if found is None or found.payload_generation != record.payload_generation:
            return None
        if stored is None:
            return reason
        places, _ = _places(stored, offset)
        for name, first, nbytes, _ in places:
            begin, end = stored.range_of(name, first, nbytes)
            for at, n in reader.file_runs(begin, end - begin):
                with contextlib.suppress(OSError):
                    os.posix_fadvise(reader.container.fd, at, n, os.POSIX_FADV_DONTNEED)
        return self._damage_of(stored, places)

    def _found(self, reader: PoolReader, record: CommitRecord, reason: str) -> None:
        uuid = reader.superblock.uuid.hex()
        found = uuid, record.slot, record.payload_generation
        if found in self._damaged:
            return
        self._damaged.add(found)
        self._state.pool.damaged += 1
        self._state.damaged_slots = [*self._state.damaged_slots, found][-REPORTS_MAX:]
        if self._is_of_group:
            next_one = "This rank writes into its slot as soon as no other rank needs the checkpoint"
        elif all(
            (uuid, each.slot, each.payload_generation) in self._damaged for each in candidates(reader.commit_log())
        ):
            next_one = (
                "All checkpoints in this pool are damaged now, so the next one to be committed is the first whole one"
            )
        else:
            next_one = "The next checkpoint is written into its slot, and the other one is kept until then"
        self._state.report(
            f"step {record.step} in the pool {self._path!r} is damaged: {reason}. {next_one}. A recovery passes a "
            "damaged checkpoint over. Look at the memory, or the medium, of the pool"
        )


def _places(stored: StoredCheckpoint, offset: int) -> tuple[list[BlockRange], int]:
    """Return one piece: blocks of a checkpoint, the first of which begins at ``offset`` in its slot or behind it; and
    the offset at which the next piece begins."""
    places: list[BlockRange] = []
    block, left = stored.block_nbytes, PIECE_NBYTES_MAX
    _, slot_nbytes = stored.reader.superblock.slots[stored.record.slot]
    for name, entry in sorted(stored.entries.items(), key=lambda each: each[1].offset):
        first = max(0, -(-(offset - entry.offset) // block))
        if first >= blocks_of(entry.nbytes, block):
            continue
        n = max(1, left // block) * block if left > 0 else 0
        nbytes = min(n, entry.nbytes - first * block)
        if nbytes <= 0:
            return places, entry.offset + first * block
        places.append((name, first, nbytes, 0))
        left -= nbytes
        if first * block + nbytes < entry.nbytes:
            return places, entry.offset + first * block + nbytes
    return places, slot_nbytes
