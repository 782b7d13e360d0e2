"""A checkpoint as capture hands it to the pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from lightck.state.inventory import Live
from lightck.state.roster import Roster


@dataclass(slots=True)
class Closing:
    """A version as capture hands it over."""

    step: int
    iteration: int
    lives: list[Live]
    state: bytes
    at_once: frozenset[str] = frozenset()
    """Names of tensors that must not be left to background copies."""
    roster: Roster | None = None
    """Its tensors are the first of ``lives``; where it is that of an earlier version, they look as they did then."""
