"""Previews: passes that a script begins and leaves before its loop continues, for example to look at a batch.

A script takes a batch before the loop (``next(iter(loader))``), or a framework begins a pass to check that the loader
can be iterated. The interrupted run began such passes at its start, and the resumed run begins them again. The loop of
the resumed run must nevertheless begin at the restored position, with the restored random states. But a pass that was
left without an update may also be a pass of the loop, which left it by ``break``, or because another loader in ``zip``
ended. Two facts distinguish the two kinds. A pass that is left right after it began is no pass of a loop. And a
position holds the number of previews that the interrupted run took before its first update; the resumed run takes the
same number.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from lightck.dataloader.passes import Pass
from lightck.dataloader.position import Position
from lightck.state.rng import RngState

if TYPE_CHECKING:
    from lightck.dataloader.loader import SessionLoader


log = logging.getLogger("lightck")


def is_lightning_probe(caller: FrameType) -> bool:
    """Whether Lightning calls ``iter()`` only to check that an object can be iterated, and drops the result. Lightning
    makes no such call for a DataLoader, so for a session loader the call must draw no random numbers."""
    if caller.f_code.co_name != "_check_dataloader_iterable":
        return False
    name = caller.f_globals.get("__name__")
    return isinstance(name, str) and name.partition(".")[0] in ("lightning", "pytorch_lightning")


def warn_lightning_counts(name: str, position: Position | None) -> None:
    """Warn that Lightning's Trainer misses the end of a pass that is continued in its middle: it counts the batches of
    each pass from 0 and compares with ``len(loader)``."""
    if position is not None and position.in_pass and position.state.given:
        log.warning(
            "lightck: loader %r goes on after batch %d of its pass, and Lightning's Trainer counts the batches from 0. "
            "So the Trainer does not recognise the last batch of this pass, and skips the validation and the scheduler "
            "steps that belong to the end of the pass. If your training has a validation or such scheduler steps, "
            "their random numbers and changes are missing, and the training is not bit-identical. Write a loop of your "
            "own to avoid this",
            name,
            position.state.given - 1,
        )


@dataclass(slots=True)
class Previews:
    """The previews of one loader in this process: passes that were left before their end, and without an update."""

    updates_at_wrap: int
    """Number of finished updates when the loader was wrapped."""
    taken: int = 0
    """Number of previews before the first update."""
    in_loop: bool = False
    """Whether a preview came after an update. If so, the loop takes a preview in each epoch."""
    expected: int = 0
    """Number of previews that the interrupted run took before its first update."""
    is_resumed: bool = False
    """Whether a position was restored. Then this run takes ``expected`` previews and no more. A further pass that is
    left without an update is the restored pass, which the loop has left by ``break``."""

    def restored(self, position: Position) -> None:
        self.expected, self.in_loop, self.is_resumed = position.previews, position.previews_in_loop, True

    def with_pass(self, pass_: Pass | None) -> tuple[int, bool]:
        """Return ``taken`` and ``in_loop`` as they are after ``left(pass_)``, without changing them."""
        if pass_ is None or not pass_.was_left_without_update or pass_.evaluates:
            return self.taken, self.in_loop
        is_before = pass_.updates_at_leave == self.updates_at_wrap
        taken = self.taken + is_before
        return min(taken, self.expected) if self.is_resumed else taken, self.in_loop or not is_before

    def left(self, pass_: Pass) -> None:
        """Count a pass that the loop has left, if it is a preview."""
        self.taken, self.in_loop = self.with_pass(pass_)

    def is_preview(self, pass_: Pass, position: Position) -> bool:
        """Whether ``pass_`` was a preview. ``pass_``: the newest pass that began at the restored ``position``; it is
        not counted in ``taken`` yet."""
        if not pass_.was_left_without_update:
            return False
        if pass_.was_left_at_once:
            return True
        if self.taken >= self.expected:
            return False
        # ``pass_`` was left without an update. If the saved pass had updates, ``pass_`` was a preview, because a loop
        # that continues the saved pass would have made another update in it. If the saved pass had no updates,
        # ``pass_`` was a preview, too, except in two cases: it is an evaluation, or the loop takes a preview in each
        # epoch.
        return (position.in_pass and position.trained) or not (pass_.evaluates or self.in_loop)


class StartRead:
    """One reading of `SessionLoader.start`, which tells how many batches the next ``iter()`` skips.

    While a variable holds the iterator of the restored pass, the loop may continue this pass or begin a new one. Until
    an update is made, ``start`` has the value for the restored pass, because a loop may fetch a batch before it reads
    ``start``.
    """

    def __init__(self, skipped: int, pass_: Pass | None) -> None:
        """``skipped``: the value that was read. ``pass_``: the newest pass of the loader, or None."""
        self._skipped = skipped
        self._pass = pass_
        self._fetched_tick = pass_.fetched_tick if pass_ is not None else 0

    def check_new_pass(self, name: str, left: Pass | None) -> None:
        """Warn if the value was read right before a new pass, and is wrong for the new pass, which skips no batch:
        ``left``, the pass that the loop left before the new one, was the newest pass at the reading; it gave a batch
        before the reading and none after it; and it was left without an update."""
        if (
            self._skipped
            and left is not None
            and left is self._pass
            and left.fetched_tick == self._fetched_tick > 0
            and left.was_left_without_update
        ):
            log.warning(
                "lightck: loader %r: the loop read .start as %d, and then began a pass that skips no batch, for which "
                ".start should be 0. A variable still held the iterator of the resumed pass, so lightck expected the "
                "loop to continue that pass. If the loop read .start for the new pass (to count its batches, or to run "
                "code at its top), the training is not exact. Delete the variable that holds the iterator before you "
                "read .start, or loop over the loader without such a variable",
                name,
                self._skipped,
            )


class RestoredRng:
    """The random state of the restored checkpoint, for the pass with which the loop goes on after the resume."""

    def __init__(self, state: RngState | None) -> None:
        self.state = state
        self._taken: tuple[weakref.ref[SessionLoader], Pass] | None = None

    def take(self, loader: SessionLoader, pass_: Pass) -> RngState | None:
        """Return the state if the pass of the previous call was a preview, or if there was no call before. Otherwise
        return None."""
        if self._taken is not None:
            before = self._taken[0]()
            if before is None or not before.is_preview(self._taken[1]):
                return None
        self._taken = (weakref.ref(loader), pass_)
        return self.state
