"""What has a say in commits: may a checkpoint become the newest, and which slots may not be overwritten?

Alone, a training overwrites any slot but that of the newest checkpoint (which the pool itself protects), and those that
pins and exports hold; and it commits every checkpoint, unless its values are not finite and the user wants that seen.
"""

from __future__ import annotations

from typing import Protocol

from lightck.pool.writer import PoolWriter
from lightck.state.signatures import ClosedStep


class CommitDecision(Protocol):
    """Asked by the pipeline, on the training thread."""

    def may_commit(self, closed_step: ClosedStep) -> bool:
        """Whether this checkpoint may become the newest. Asked before anything of it is written."""
        ...

    def held(self, writer: PoolWriter) -> frozenset[int]:
        """Slots of this pool file that may not be overwritten. Asked each time that one is taken."""
        ...


class Decisions:
    """All that have a say: a checkpoint commits where nobody objects, and a slot is free where nobody holds it."""

    def __init__(self) -> None:
        self._asked: list[CommitDecision] = []

    def add(self, decision: CommitDecision) -> None:
        self._asked.append(decision)

    def may_commit(self, closed_step: ClosedStep) -> bool:
        return all(one.may_commit(closed_step) for one in self._asked)

    def held(self, writer: PoolWriter) -> frozenset[int]:
        return frozenset[int]().union(*(one.held(writer) for one in self._asked))
