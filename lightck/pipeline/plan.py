"""What a strategy says of a checkpoint: which tensors are written, from where, at the boundary or behind it.

    Strategy.plan (pure) -> WritePlan (frozen) -> Pipeline.submit

A strategy sees the closed step, in which every tensor has a record of the pool, and what the slot holds already. It
reads no bytes, takes no slot and changes nothing. ``tests/strategy/test_strategies.py`` holds what each has to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from lightck.pipeline.write_table import Columns, Record, Staged
from lightck.state.inventory import Live
from lightck.state.looks import Closing

IsStored = Callable[[Live, Record], bool]
"""Whether the slot holds these bytes already, as two checkpoints in a row have shown."""


@dataclass(frozen=True, slots=True)
class WritePlan:
    """One checkpoint. Each tensor of the closed step is in ``tables``, and has a place there; of those that are decided
    at each checkpoint (``Columns.single``) each is in ``now`` or in ``unchanged``."""

    closing: Closing
    tables: tuple[Columns, ...]
    """How all others are written: at the boundary, in the background, or from their device."""
    now: tuple[tuple[Live, Record], ...]
    """Copied at the boundary itself."""
    unchanged: tuple[tuple[Live, Record], ...]
    """Left out: the slot holds their bytes."""

    @property
    def background(self) -> list[Live]:
        """What is left to the copy threads."""
        return [live for table in self.tables for live in table.background]

    @property
    def background_numbers(self) -> list[int]:
        """The records of ``background``."""
        return [number for table in self.tables for number in table.background_numbers]

    @property
    def staged(self) -> list[Staged]:
        """What lies on a device."""
        return [one for table in self.tables for one in table.staged]


@runtime_checkable
class Strategy(Protocol):
    """Which bytes a checkpoint holds."""

    def plan(self, closing: Closing, tables: Sequence[Columns], is_stored: IsStored) -> WritePlan:
        """The checkpoint of this step.

        Args:
            closing: the closed step.
            tables: all its tensors, with their records.
            is_stored: whether a still tensor of ``Columns.single`` may be left out.
        """
        ...
