"""Whether a sampler draws at ``next()`` from a generator from which others draw too: torch's global one, or one of its
own. If it does, a replay may give it other numbers than the interrupted run, because in a replay the loop draws nothing
between two fetches.

At the first ``next()`` of a pass the sampler draws the same numbers in a replay, because the random state before this
``next()`` was saved. At a later ``next()`` it draws the same numbers only if the loop drew nothing between the two
calls. If batches are fetched in this process, lightck checks whether the loop drew. Workers fetch ahead of the loop, so
with workers each draw of the sampler is a risk. Mostly nobody else draws from a generator of the sampler's own, so this
is a risk only after somebody else has drawn from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from lightck.dataloader.loader_state import OwnGenerators, States
from lightck.dataloader.wrapped_loader import is_made_by_torch

_CURE = "give the sampler a torch.Generator of its own in its attribute `generator`"
_WATCHED_BATCHES = 4
"""If workers fetch, the first ``_WATCHED_BATCHES`` fetches of each pass are watched."""


class SamplerWatch(Protocol):
    """Watches the fetches of one pass."""

    def before(self) -> None:
        """Called before a fetch."""

    def risk(self) -> str | None:
        """Called after a fetch. Return why a replay may not be exact; None if this fetch shows no reason."""


def watch_sampler(inner: Iterator[object], may_draw_here: bool, own: OwnGenerators) -> SamplerWatch | None:
    """Return a watch for the pass of ``inner``; None if there is nothing to watch. ``may_draw_here``: whether a
    ``next()`` may draw random numbers for a batch in this process. ``own``: the generators of the loader."""
    of_global = _watch_global_generator(inner, may_draw_here)
    watches = [
        each for each in (of_global, _OwnGeneratorsWatch(own) if own.may_be_drawn_late() else None) if each is not None
    ]
    return _Watches(watches) if watches else None


def _watch_global_generator(inner: Iterator[object], may_draw_here: bool) -> SamplerWatch | None:
    """Return a watch of torch's global generator; None if batches are fetched in this process by an iterator that is
    not torch's own."""
    if not may_draw_here:
        return _WorkerFetchWatch(begins_late=not is_made_by_torch(inner))
    drawn_from = getattr(inner, "_sampler_iter", None)  # private to torch; only this warning depends on it
    if drawn_from is None:
        return None
    if isinstance(drawn_from, _WatchedSampler):  # an iterator that is used in several passes
        drawn_from = drawn_from.inner
    sampler = _WatchedSampler(drawn_from)
    inner._sampler_iter = sampler  # type: ignore[attr-defined]
    return _InProcessWatch(sampler)


class _Watches:
    """Several watches of one pass."""

    def __init__(self, watches: Sequence[SamplerWatch]) -> None:
        self._watches = watches

    def before(self) -> None:
        for each in self._watches:
            each.before()

    def risk(self) -> str | None:
        return next(filter(None, [each.risk() for each in self._watches]), None)


class _OwnGeneratorsWatch:
    """Watches whether the sampler draws from a generator of its own after somebody else has drawn from it."""

    def __init__(self, own: OwnGenerators) -> None:
        self._own = own
        self._before: States | None = None
        """States before the present fetch; None until somebody else has drawn in this pass."""
        self._after: States | None = None
        """States after the last fetch; None before the first one, and after somebody else has drawn."""

    def before(self) -> None:
        if self._before is not None:
            self._before = self._own.states()
        elif self._after is not None and not _are_equal(self._after, now := self._own.states()):
            self._before, self._after = now, None

    def risk(self) -> str | None:
        if self._before is None:
            self._after = self._own.states()
            return None
        if _are_equal(self._before, self._own.states()):
            return None
        return (
            "the loader's sampler draws from a random generator of its own at next(), and the loop, or another loader, "
            "draws from the same generator. A resume fetches the earlier batches of the pass again without those "
            "draws, so the sampler may draw other numbers. To avoid this, give the sampler a generator from which "
            "nothing else draws"
        )


def _are_equal(some: States, others: States) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


class _WorkerFetchWatch:
    """Watches a loader with workers, where only the sampler can draw in this process. ``begins_late``: the loader is a
    wrapper that creates torch's iterator at its first ``next()``. This creation draws the workers' seed, so the first
    fetch is not watched."""

    def __init__(self, begins_late: bool) -> None:
        self._to_watch = _WATCHED_BATCHES
        """Number of fetches that are still to be watched in this pass."""
        self._begins_late = begins_late
        self._state: torch.Tensor | None = None

    def before(self) -> None:
        if self._begins_late:
            self._begins_late = False
            return
        self._state = torch.get_rng_state() if self._to_watch else None
        self._to_watch -= bool(self._to_watch)

    def risk(self) -> str | None:
        if self._state is None or torch.equal(self._state, torch.get_rng_state()):
            return None
        return (
            "the loader's sampler draws from torch's global random generator at each next(), and the loop may draw "
            "from the same generator. A resume fetches the earlier batches of the pass again, but does not run the "
            f"loop for them. Without the loop's draws the sampler may draw other numbers. To avoid this, {_CURE}"
        )


class _InProcessWatch:
    """Watches, in a loader that fetches in this process, whether the sampler draws after the loop has drawn."""

    def __init__(self, sampler: _WatchedSampler) -> None:
        self._sampler = sampler
        self._state: torch.Tensor | None = None
        """Random state after the last fetch; None before the first fetch, and after the loop has drawn."""

    def before(self) -> None:
        if self._state is not None and not torch.equal(self._state, torch.get_rng_state()):
            self._sampler.is_watched = True

    def risk(self) -> str | None:
        if self._sampler.has_drawn:
            return (
                "the loader's sampler draws from torch's global random generator at next(), and the loop draws from "
                "the same generator. A resume fetches the earlier batches of the pass again, but does not run the loop "
                f"for them. Without the loop's draws the sampler may draw other numbers. To avoid this, {_CURE}"
            )
        self._state = None if self._sampler.is_watched else torch.get_rng_state()
        return None


class _WatchedSampler:
    """The iterator over a sampler, or a batch sampler. It records whether it draws while it is watched."""

    def __init__(self, inner: Iterator[object]) -> None:
        self.inner = inner
        self.is_watched = False
        self.has_drawn = False

    def __iter__(self) -> _WatchedSampler:
        return self

    def __next__(self) -> object:
        if not self.is_watched or self.has_drawn:
            return next(self.inner)
        before = torch.get_rng_state()
        try:
            return next(self.inner)
        finally:
            self.has_drawn = not torch.equal(before, torch.get_rng_state())
