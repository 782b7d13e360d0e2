"""The interface through which other parts decide whether a checkpoint may commit and which slots are protected.

The pool itself protects the slot of the newest checkpoint. Through this interface, pins and exports protect the slots
of their checkpoints, and the nonfinite check (``pause_on_nonfinite=True``) refuses commits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from lightck.pool.writer import PoolWriter
from lightck.state.signatures import ClosedStep

_NONE: frozenset[int] = frozenset()


class CommitDecision(Protocol):
    """A part of lightck that may refuse commits, or hold slots. The pipeline calls its methods on the training
    thread."""

    def may_commit(self, closed_step: ClosedStep) -> bool:
        """Whether the checkpoint of this closed step may be committed. Called at the boundary, before the checkpoint is
        begun. (Eager copies may have begun earlier.)"""
        ...

    def held(self, writer: PoolWriter) -> frozenset[int]:
        """Return the indexes of the slots of this pool file that must not be overwritten. Called each time a slot is
        taken."""
        ...


class OthersPauseError(Exception):
    """Another rank commits nothing for now, so this rank gives its checkpoint up instead of waiting for a slot."""


class GroupDecision(CommitDecision, Protocol):
    """The decision of a group of ranks: it may hold all slots, until other ranks have committed."""

    def wait_until(self, has_room: Callable[[], bool], pause: Callable[[], object]) -> bool:
        """Wait until ``has_room()`` is true, because other ranks have committed, and return True. Return False if
        another rank commits nothing for now. ``pause`` is called repeatedly during the wait."""
        ...


class Decisions:
    """All decisions together: a checkpoint may commit if no decision refuses it, and a slot may be overwritten if no
    decision holds it."""

    def __init__(self) -> None:
        self._decisions: list[CommitDecision] = []
        self._of_group: GroupDecision | None = None

    def add(self, decision: CommitDecision) -> None:
        self._decisions.append(decision)

    def add_group(self, decision: GroupDecision) -> None:
        self.add(decision)
        self._of_group = decision

    @property
    def is_in_group(self) -> bool:
        """Whether this process is a rank of a group."""
        return self._of_group is not None

    @property
    def commits_after_give_up(self) -> bool:
        """Whether a checkpoint must be committed before its boundary ends if the one before it was given up. A group of
        ranks needs this (``commits_within_boundary`` in ``ranks/rule.py`` says why)."""
        return self.is_in_group

    def wait_for_slot(self, has_slot: Callable[[], bool], pause: Callable[[], object]) -> bool:
        """Wait until ``has_slot()`` is true, because other ranks let this one overwrite a slot, and return True. Return
        False at once if there are no other ranks. Raises ``OthersPauseError``."""
        if self._of_group is None:
            return False
        if not self._of_group.wait_until(has_slot, pause):
            raise OthersPauseError
        return True

    def wait_for_relayout(self, writer: PoolWriter, n_whole: int, pause: Callable[[], object]) -> None:
        """Wait until a file with room for ``n_whole`` whole checkpoints has room for the held checkpoints of ``writer``
        and for one more. Return at once if there are no other ranks. Raises ``OthersPauseError``."""
        if self._of_group is not None and not self._of_group.wait_until(
            lambda: len(self.held(writer)) < n_whole, pause
        ):
            raise OthersPauseError

    def may_commit(self, closed_step: ClosedStep) -> bool:
        return all(one.may_commit(closed_step) for one in self._decisions)

    def held(self, writer: PoolWriter) -> frozenset[int]:
        return _NONE.union(*(one.held(writer) for one in self._decisions))
