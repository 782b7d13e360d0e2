"""What one drain of a session must know of the other drains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lightck.tiers.tier import Tier


@dataclass(frozen=True)
class DrainRole:
    """The number of a drain, the tiers of the other drains, and which of these tiers feeds it or is fed by it
    (``drains.py``)."""

    may_hold: Callable[[], bool]
    """Whether one more slot may be held for a drain."""
    number: int = 0
    other_tiers: Sequence[Tier] = ()
    """What the other drains serve."""
    fed_from: int | None = None
    """Number of the folder among ``other_tiers`` from which the only tier is fed."""
    feeds: Mapping[int, Sequence[Tier]] = field(default_factory=dict)
    """For the number of a tier of this drain, the tiers that other drains feed from it."""

    @property
    def is_fed(self) -> bool:
        return self.fed_from is not None
