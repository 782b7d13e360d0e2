"""A slot that is taken for a checkpoint before all its bytes are there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lightck._native import lib
from lightck.pool.engine import COPIED, ENDED, Job
from lightck.pool.slots import Slot

if TYPE_CHECKING:
    from lightck.pool.writer import PoolWriter


class Reservation:
    """A slot that is taken for a checkpoint whose step is not closed yet, so that some tensors can be copied early, or
    for a checkpoint that is copied in batches.

    The bytes are copied to their final places in the slot. Later ``PoolWriter.begin`` submits a job of the same
    generation, which copies the other tensors and commits. ``PoolWriter.reserve`` makes a reservation, and
    ``PoolWriter.begin`` or ``drop`` ends it. Invariant: a reserved slot holds no checkpoint, and the generation of a
    reservation is used for nothing else."""

    def __init__(self, writer: PoolWriter, slot: Slot, generation: int) -> None:
        self.slot = slot
        self.generation = generation
        self.parts: list[Job] = []
        """Jobs that copy tensors. Each takes one of the few entries of the engine's job table."""
        self.has_header = False
        """Whether the first part has written the header of the slot."""
        self._writer = writer

    def copy(
        self, records: npt.ArrayLike, sources: npt.ArrayLike | None, memory: object, *, waits_for_start: bool = False
    ) -> bool:
        """Start background copies of these records as a new job in ``parts``. Returns False if the engine's job table
        has no free entry. Raises ``BackgroundError``.

        ``sources``: the address of each record's bytes, which must stay unchanged until ``wait`` returns; None: a
        device stores the bytes into the slot. ``memory``: an object that keeps the source memory alive.
        ``waits_for_start``: the copies begin only at ``parts[-1].start()``, which the caller calls when the sources are
        complete."""
        flags = lib.LCK_PART | (lib.LCK_FOLLOWS if self.has_header else 0) | (lib.LCK_HELD if waits_for_start else 0)
        numbers = np.asarray(records, np.int64)
        addresses = None if sources is None else np.asarray(sources, np.uint64)
        job = self._writer.submit_part(self, numbers, addresses, flags, memory)
        if job is not None:
            self.parts.append(job)
            self.has_header = True
        return job is not None

    @property
    def nbytes_stored(self) -> int:
        """How many bytes the copies have stored so far."""
        return sum(part.info().nbytes for part in self.parts)

    def wait(self) -> None:
        """Wait until all started copies are done, and copy on this thread meanwhile. Raises ``BackgroundError``."""
        for part in self.parts:
            part.wait(COPIED)

    def end_parts(self) -> None:
        """Wait until all started copies are fenced, and forget them: their memory is not needed any more, and their
        entries in the engine's job table are free. Raises ``BackgroundError``."""
        self.wait()
        for part in self.parts:
            part.release()
            part.wait(ENDED)
            part.forget()
        self.parts.clear()

    def drop(self) -> None:
        """Cancel the copies and free the slot. The content of the slot is unknown afterwards."""
        failed = False
        for part in self.parts:
            part.drop()
            failed |= part.has_failed
            part.forget()
        self._writer.free_reservation(self, bad=failed)
