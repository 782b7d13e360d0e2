"""One pass over a session loader: what is known of it, and its iterator."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lightck.capture.position import Mark

_moments = itertools.count(1)


def moment() -> int:
    """A number that is larger each time, over all loaders."""
    return next(_moments)


@dataclass(slots=True)
class Pass:
    """The pass that is live. ``restored``: it was begun by a run before this one.

    ``left_at``: the updates that were finished when the loop let go of its iterator; None while it holds it.
    ``fetched_at``: those that were finished when its last batch was fetched; ``in_eval``: in the model's eval mode.
    ``passes``, ``inner``: as in ``Position``, of the loader before this pass.
    ``begun``, ``fetched``, ``left``, and ``after``, the end of the pass before it: moments, for which came first.
    """

    at_iter: Mark
    updates: int
    begun: int
    after: int = 0
    fetched: int = 0
    left: int = 0
    fetched_at: int | None = None
    in_eval: bool = False
    at_first: Mark | None = None
    last: Mark | None = None
    before_last: Mark | None = None
    passes: int | None = None
    inner: Any = None
    checksum: int | None = None
    given: int = 0
    trained: bool = False
    restored: bool = False
    left_at: int | None = None

    def has_trained(self, updates: int) -> bool:
        return self.trained or (updates if self.left_at is None else self.left_at) > self.updates

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


class Batches:
    """The iterator of one pass. It alone holds the inner iterator, so that workers end when a loop lets go of it."""

    __slots__ = ("_take", "_updates", "inner", "of")

    def __init__(self, take: Callable[[Batches], Any], updates: Callable[[], int], of: Pass,
                 inner: Iterator[Any]) -> None:  # fmt: skip
        """``take``: gives its next batch. ``updates``: those that are finished."""
        self._take = take
        self._updates = updates
        self.of = of
        self.inner: Iterator[Any] | None = inner

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        return self._take(self)

    def __del__(self) -> None:
        with suppress(Exception):  # a session that is gone counts nothing
            self.of.left = moment()
            self.of.left_at = self._updates()
