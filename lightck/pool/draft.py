"""A version that is begun before it is closed: its slot is taken, and some of its tensors are on their way.

The bytes go into their places as those of any version; what is missing, and what commits, is the job that
``PoolWriter.begin`` submits later for the same generation. Invariant: a slot with a draft holds no version, and its
generation is used for nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lightck._native import lib
from lightck.pool.engine import COPIED, Job

if TYPE_CHECKING:
    from lightck.pool.slots import Slot
    from lightck.pool.writer import PoolWriter


class Draft:
    """Made by ``PoolWriter.draft``; ends in ``PoolWriter.begin`` or ``drop``."""

    def __init__(self, writer: PoolWriter, slot: Slot, generation: int) -> None:
        self.slot = slot
        self.generation = generation
        self.parts: list[Job] = []
        self._writer = writer

    def copy(self, records: Sequence[int], sources: Sequence[int] | None, keep: Any, *, held: bool = False) -> bool:
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
        self._writer.draft_given_up(self, bad=failed)
