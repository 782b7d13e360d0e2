"""The interface through which other parts decide whether a checkpoint may commit and which slots are protected.

The pool itself protects the slot of the newest checkpoint. Pins and exports protect theirs here. The nonfinite check
(``pause_on_nonfinite=True``) refuses commits here.
"""

from __future__ import annotations

from typing import Protocol

from lightck.pool.writer import PoolWriter
from lightck.state.signatures import ClosedStep

_NONE: frozenset[int] = frozenset()


class CommitDecision(Protocol):
    """Called by the pipeline, on the training thread."""

    def may_commit(self, closed_step: ClosedStep) -> bool:
        """Whether this checkpoint may become the newest. Called before anything of it is written."""
        ...

    def held(self, writer: PoolWriter) -> frozenset[int]:
        """The slots of this pool file that must not be overwritten. Called each time a slot is taken."""
        ...


class Decisions:
    """All decisions together: a checkpoint may commit if none refuses, and a slot is free if none holds it."""

    def __init__(self) -> None:
        self._decisions: list[CommitDecision] = []

    def add(self, decision: CommitDecision) -> None:
        self._decisions.append(decision)

    def may_commit(self, closed_step: ClosedStep) -> bool:
        return all(one.may_commit(closed_step) for one in self._decisions)

    def held(self, writer: PoolWriter) -> frozenset[int]:
        return _NONE.union(*(one.held(writer) for one in self._decisions))
