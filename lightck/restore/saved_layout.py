"""What a checkpoint keeps of the layout with which a rank saved it (``lightck.layout``), besides pieces and names.

It says which place the rank had, and which tensors are averaged: these have other values at each place, and another
number of ranks takes the mean. The text of the rules is for people.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lightck.errors import CorruptPoolError
from lightck.layout import Layout
from lightck.pool.format.group import RANKS_MAX
from lightck.state.values import typed


class SavedLayout(NamedTuple):
    """The layout of one rank. (``rank`` and ``size`` are tensor parallel ones, not those of the process group.)"""

    rank: int
    """The place in the layout that the rank had, from 0."""
    size: int
    """How many places the layout has."""
    stage: int
    """The pipeline stage of the rank."""
    stages: int
    """How many stages there are."""
    averaged: tuple[str, ...]
    """Names, in the model, of the parameters and buffers that are averaged."""
    rules: str
    """The rules as text."""

    def to_value(self) -> dict[str, object]:
        """Return what the small state holds."""
        return {
            "rank": self.rank,
            "size": self.size,
            "stage": self.stage,
            "stages": self.stages,
            "averaged": list(self.averaged),
            "rules": self.rules,
        }

    @classmethod
    def parse(cls, value: object) -> SavedLayout | None:
        """Return what ``to_value`` returned; None for None. Raises ``CorruptPoolError``, ``KeyError`` or ``TypeError``
        for anything else."""
        if value is None:
            return None
        raw = typed(value, dict)
        rank, size, stage, stages = (typed(raw[key], int) for key in ("rank", "size", "stage", "stages"))
        if not (0 <= rank < size <= RANKS_MAX and 0 <= stage < stages <= RANKS_MAX):
            raise CorruptPoolError("its layout names a place that does not exist")
        averaged = tuple(typed(name, str) for name in typed(raw["averaged"], list))
        return cls(rank, size, stage, stages, averaged, typed(raw["rules"], str))


def saved_layout(layout: Layout, names: Iterable[str]) -> SavedLayout:
    """Return what a checkpoint keeps of a layout. ``names``: of the model's parameters and buffers, without prefix."""
    return SavedLayout(
        layout.place.rank,
        layout.place.size,
        layout.stage,
        layout.stages,
        tuple(sorted(layout.averaged(names))),
        layout.description,
    )
