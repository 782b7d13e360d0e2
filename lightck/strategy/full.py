"""What a version holds. ``FullState``: everything, so that each version is complete in itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FullState:
    """Every version is complete in itself: parameters, buffers, optimizer state and all small state."""
