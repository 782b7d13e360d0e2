"""One pass over a session loader: what is known of it, its iterator, and what a session does for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from lightck.dataloader.position import PassState
from lightck.state.rng import RngState

if TYPE_CHECKING:
    from lightck.dataloader.batch import TensorReads
    from lightck.dataloader.loader import SessionLoader

_ticks = itertools.count(1)


def tick() -> int:
    """A number that is larger each time, over all loaders."""
    return next(_ticks)


@dataclass(slots=True)
class Pass:
    """The pass that is live. ``restored``: it was begun by a run before this one.

    ``left_at``: the updates that were finished when the loop let go of its iterator; None while it holds it.
    ``fetched_at``: those that were finished when its last batch was fetched; ``in_eval``: in the model's eval mode.
    ``begun``, ``fetched``, ``left``, and ``after``, the end of the pass before it: moments, for which came first.
    ``skipped``: batches that were given before it was restored; ``has_ended``: its last batch was given out;
    ``evaluates``: a batch was fetched in eval mode or without gradients; ``was_preview``: see ``preview.py``.
    """

    updates: int
    begun: int
    after: int = 0
    state: PassState = field(default_factory=PassState)
    fetched: int = 0
    left: int = 0
    fetched_at: int | None = None
    in_eval: bool = False
    trained: bool = False
    restored: bool = False
    left_at: int | None = None
    skipped: int = 0
    has_ended: bool = False
    evaluates: bool = False
    was_preview: bool = False

    @property
    def fetched_here(self) -> int:
        """Batches that it gave in this process."""
        return self.state.given - self.skipped

    @property
    def was_left_without_update(self) -> bool:
        """Whether it was left before its end, and without an update in this process."""
        return self.left_at == self.updates and not self.has_ended

    @property
    def was_left_at_once(self) -> bool:
        """Whether it was left right after it was begun, with no batch of any loader in between."""
        return self.left == self.begun + 1

    def has_updated(self, updates: int) -> bool:
        """Whether updates were made in it, in this process."""
        return (updates if self.left_at is None else self.left_at) > self.updates

    def leave(self, updates: int) -> None:
        """The loop let go of its iterator, or began another pass. Only the first call counts."""
        if self.left_at is None:
            self.left, self.left_at = tick(), updates

    def has_trained(self, updates: int) -> bool:
        return self.trained or self.has_updated(updates)

    def is_of_training(self, updates: int, fetched_to_train: int) -> bool:
        """Whether its ``next()`` belongs to the training, whatever the model's mode. Not where batches were fetched in
        training mode from another loader since (at ``fetched_to_train``): updates were made on those, and this is an
        evaluation that stands in mid-pass, or was left there with its iterator kept."""
        is_evaluation = self.in_eval and fetched_to_train > self.fetched if self.fetched else not self.restored
        return self.has_trained(updates) and not is_evaluation

    def is_over(self, updates: int) -> bool:
        """The next iter() begins a new one: it was left with nothing trained in it (an evaluation, a peek), or the
        training went on elsewhere since (another loader). One left just now may be where the loop stands."""
        return self.left_at is not None and (not self.has_trained(updates) or updates > self.left_at)


class PassIterator:
    """The iterator of one pass. It alone holds the inner iterator, so that workers end when a loop lets go of it."""

    __slots__ = ("_take", "_updates", "inner", "of_pass")

    def __init__(
        self, take: Callable[[PassIterator], object], updates: Callable[[], int], of_pass: Pass, inner: Iterator[object]
    ) -> None:
        """``take``: gives its next batch. ``updates``: those that are finished."""
        self._take = take
        self._updates = updates
        self.of_pass = of_pass
        self.inner: Iterator[object] | None = inner

    def __iter__(self) -> PassIterator:
        return self

    def __next__(self) -> object:
        return self._take(self)

    def __del__(self) -> None:
        with suppress(Exception):  # a session that is gone counts nothing
            self.of_pass.leave(self._updates())


class LoaderHost(Protocol):
    """What a session does for its loaders."""

    def loader_next(self, loader: SessionLoader) -> None:
        """The boundary: called at the entry of each ``next()``, before anything is fetched or counted."""

    def loader_pass_ended(self, loader: SessionLoader) -> None:
        """Called when the inner iterator is exhausted, after `loader_next` and before the pass is counted."""

    def loader_gave(
        self, loader: SessionLoader, of: Pass, batch: object, checksum: int | None, read: TensorReads
    ) -> None:
        """Called when a batch was fetched and counted; ``checksum``: the batch's, where one was made, of tensors that
        were ``read`` for it."""

    def take_restored_rng(self, loader: SessionLoader, pass_: Pass) -> RngState | None:
        """The restored version's random state, for the first pass that is no preview; None afterwards, once updates
        were made, or where there is none."""

    @property
    def updates(self) -> int:
        """Finished updates so far."""
