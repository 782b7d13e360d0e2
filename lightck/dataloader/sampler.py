"""Whether a sampler draws from torch's global generator at ``next()``: a replay fetches without the loop's own draws.

The draws of a pass's first ``next()`` are made again from the state that is kept for it. Those of later ones are the
same only if nothing but fetches drew in between: in this process that is looked for. Workers fetch ahead of the loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from lightck.dataloader.wrapped_loader import is_made_by_torch

_CURE = "give the sampler a generator of its own, as its attribute generator"
_WATCHED_BATCHES = 4  # of each pass, where workers fetch


class SamplerWatch(Protocol):
    """Of one pass."""

    def before(self) -> None:
        """A fetch begins."""

    def risk(self) -> str | None:
        """After a fetch: why a replay may not be exact, where that is seen now."""


def watch_sampler(inner: Iterator[object], in_process: bool) -> SamplerWatch | None:
    """``inner``: torch's iterator over a DataLoader; for any other there is nothing to see."""
    if not in_process:
        return _WorkerFetchWatch(begins_late=not is_made_by_torch(inner))
    drawn_from = getattr(inner, "_sampler_iter", None)  # private to torch; a replay does not depend on it
    if drawn_from is None:
        return None
    if isinstance(drawn_from, _WatchedSampler):  # of an iterator that is the same one in each pass
        drawn_from = drawn_from.inner
    sampler = _WatchedSampler(drawn_from)
    inner._sampler_iter = sampler  # type: ignore[attr-defined]
    return _InProcessWatch(sampler)


class _WorkerFetchWatch:
    """Of all that a fetch does here only the sampler can draw. ``begins_late``: and torch's iterator the workers' seed,
    which a wrapper makes at its first ``next()``."""

    def __init__(self, begins_late: bool) -> None:
        self._to_watch = _WATCHED_BATCHES
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
        return f"its sampler draws from torch's global random generator at each next(), ahead of the loop: {_CURE}"


class _InProcessWatch:
    def __init__(self, sampler: _WatchedSampler) -> None:
        self._sampler = sampler
        self._state: torch.Tensor | None = None
        """Behind the last fetch, until the loop has drawn."""

    def before(self) -> None:
        if self._state is not None and not torch.equal(self._state, torch.get_rng_state()):
            self._sampler.is_watched = True

    def risk(self) -> str | None:
        if self._sampler.has_drawn:
            return f"its sampler draws from torch's global random generator at next(), as the loop does: {_CURE}"
        self._state = None if self._sampler.is_watched else torch.get_rng_state()
        return None


class _WatchedSampler:
    """The iterator over a sampler, or a batch sampler. It notes whether it draws while it is watched."""

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
