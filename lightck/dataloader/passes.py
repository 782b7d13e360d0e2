"""One pass over a session loader: its state, its iterator, and what a session provides for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from lightck.dataloader.position import PassState
from lightck.dataloader.sharing import Sharing
from lightck.state.rng import RngState

if TYPE_CHECKING:
    from lightck.dataloader.batch import TensorChecksums
    from lightck.dataloader.loader import SessionLoader

_ticks = itertools.count(1)


def tick() -> int:
    """Return the next value of a logical clock that all loaders share."""
    return next(_ticks)


@dataclass(slots=True)
class Pass:
    """A pass that is under way. The fields that end in ``_tick`` are values of `tick`, which are compared to find out
    what came first; 0: never.

    =====  =================================================================================================
    ended  a ``next()`` found no further batch (`has_ended`)
    left   the loop dropped its iterator, or began another pass (`was_left`); an ended pass is left later, too
    over   a resume would begin a new pass instead of continuing this one (`is_over`)
    =====  =================================================================================================
    """

    updates_at_begin: int
    """Number of finished updates when the pass began."""
    begun_tick: int
    previous_end_tick: int = 0
    """When the pass before this one ended."""
    state: PassState = field(default_factory=PassState)
    fetched_tick: int = 0
    left_tick: int = 0
    updates_at_fetch: int | None = None
    """Number of finished updates when the last batch was fetched."""
    in_eval: bool = False
    """Whether the model was in eval mode when the last batch was fetched."""
    trained_before: bool = False
    """Whether an earlier run made updates in the pass."""
    restored: bool = False
    """Whether an earlier run began the pass."""
    updates_at_leave: int | None = None
    """Number of finished updates when the loop dropped the pass's iterator, or began another pass; None before that."""
    skipped: int = 0
    """Number of batches that earlier runs got from the pass."""
    has_ended: bool = False
    """Whether a ``next()`` found no further batch."""
    evaluates: bool = False
    """Whether a batch was fetched in eval mode or without gradients."""
    sharing: Sharing | None = None
    """How several ranks share the samples of the pass; None if they do not, or if this is unknown."""
    was_preview: bool = False
    """Whether the pass was a preview (see ``preview.py``). This is decided when the next pass begins."""

    @property
    def fetched_here(self) -> int:
        """Number of batches that the pass gave in this process."""
        return self.state.given - self.skipped

    @property
    def was_left(self) -> bool:
        """Whether the loop dropped the pass's iterator, or began another pass."""
        return self.updates_at_leave is not None

    @property
    def was_left_without_update(self) -> bool:
        """Whether the pass was left before its end, and without an update in this process."""
        return self.updates_at_leave == self.updates_at_begin and not self.has_ended

    @property
    def was_left_at_once(self) -> bool:
        """Whether the pass was left right after it began, and no loader was asked for a batch in between."""
        return self.left_tick == self.begun_tick + 1

    def has_updates_here(self, updates: int) -> bool:
        """Whether updates were made in the pass, in this process. ``updates``: number of updates finished now."""
        return (updates if self.updates_at_leave is None else self.updates_at_leave) > self.updates_at_begin

    def leave(self, updates: int) -> None:
        """Record that the loop dropped the pass's iterator, or began another pass. Only the first call counts."""
        if self.updates_at_leave is None:
            self.left_tick, self.updates_at_leave = tick(), updates

    def has_updates(self, updates: int) -> bool:
        """Whether updates were made in the pass, in any run."""
        return self.trained_before or self.has_updates_here(updates)

    def is_of_training_loop(self, updates: int, training_fetch_tick: int) -> bool:
        """Whether the pass belongs to the training, even if the model is in eval mode now: updates were made in it, and
        it is no evaluation.

        The loop may keep the iterator of an evaluation while it trains on batches of another loader. The updates then
        count as made in the evaluation, too. So a pass is an evaluation if its last fetch was in eval mode, and any
        loader fetched in training mode after that, at ``training_fetch_tick``. A pass without a fetch in this process
        is an evaluation unless it was restored."""
        if self.fetched_tick:
            is_evaluation = self.in_eval and training_fetch_tick > self.fetched_tick
        else:
            is_evaluation = not self.restored
        return self.has_updates(updates) and not is_evaluation

    def is_over(self, updates: int) -> bool:
        """Whether a resume would begin a new pass instead of continuing this pass. A pass without updates (an
        evaluation, a preview) is over when the loop leaves it. A pass with updates is over at the next update after the
        loop left it; a checkpoint before that update still belongs to the pass."""
        return self.updates_at_leave is not None and (not self.has_updates(updates) or updates > self.updates_at_leave)


class PassIterator:
    """The iterator of one pass. Only this object refers to the inner iterator, so that the inner iterator's workers end
    when the loop drops this object."""

    __slots__ = ("_take", "_updates", "inner", "of_pass")

    def __init__(
        self, take: Callable[[PassIterator], object], updates: Callable[[], int], of_pass: Pass, inner: Iterator[object]
    ) -> None:
        """Create the iterator. ``take``: returns the next batch of this iterator. ``updates``: returns the number of
        finished updates."""
        self._take = take
        self._updates = updates
        self.of_pass = of_pass
        self.inner: Iterator[object] | None = inner

    def __iter__(self) -> PassIterator:
        return self

    def __next__(self) -> object:
        return self._take(self)

    def __del__(self) -> None:
        with suppress(Exception):  # the session may be gone
            self.of_pass.leave(self._updates())


class LoaderHost(Protocol):
    """What a session provides for its loaders."""

    def loader_next(self, loader: SessionLoader) -> None:
        """Handle the boundary at each ``next()``. Called before anything is fetched or counted."""

    def loader_pass_ended(self, loader: SessionLoader) -> None:
        """Handle the end of a pass. Called when the inner iterator is exhausted, after `loader_next` and before the
        pass is counted."""

    def loader_gave(
        self, loader: SessionLoader, pass_: Pass, batch: object, checksum: int | None, cache: TensorChecksums
    ) -> None:
        """Handle a batch. Called when the batch was fetched and counted. ``pass_``: the pass of the batch.
        ``checksum``: the batch's checksum, or None if it was not computed. ``cache``: the checksums of its tensors."""

    def take_restored_rng(self, loader: SessionLoader, pass_: Pass) -> RngState | None:
        """Return the restored checkpoint's random state. The first pass that is no preview must begin with it. Whether
        a pass is a preview is known only afterwards, so the state is returned for each pass up to that one. Return None
        for later passes, after an update, and if nothing was restored."""

    @property
    def updates(self) -> int:
        """Number of updates finished so far."""
