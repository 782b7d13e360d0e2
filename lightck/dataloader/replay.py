"""Replay of the batches that a pass gave before it was saved: they are fetched again and dropped.

A loader may fetch more batches than it has given. A loader that is one batch ahead (Accelerate's, timm's prefetcher)
fetches two batches at its first ``next()`` and one at each later ``next()``. After three batches were given, four are
fetched: the third ``next()`` fetched batch 4, which waits in the loader, and the second one fetched batch 3, the last
one that was given. The loop draws random numbers between these calls, so the replay restores the random states that
were saved before each of these two calls. A loader that fetches two batches ahead gives another last batch in the
replay, and the checksum detects that.

``session.loader(dl, replay="skip")`` draws the indices of the batches given before from the sampler, fetches only the
last one, and compares it. So the resume is inexact for a dataset whose fetches change a state of its own, or draw from
a generator of its own or from a global generator inside a worker. Therefore the user must choose this.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightck.dataloader.position import Position, RngSnapshot
from lightck.dataloader.sharing import iterate_rest, refuse_other_order
from lightck.dataloader.wrapped_loader import is_loader_of_torch
from lightck.errors import SessionError

log = logging.getLogger("lightck")
_REPORT_SECONDS = 10.0
"""Seconds from one progress message of a replay to the next."""


class PassTooShort(Exception):
    """The pass has fewer batches than the interrupted run got from it. The argument is the number of batches that it
    has."""


def replay(
    inner: Iterator[object],
    position: Position,
    restore: Callable[[RngSnapshot], None],
    report: ReplayReport,
) -> object:
    """Fetch the batches given before, drop all but the last one, and return the last one. This also advances each
    worker's random stream and the prefetching. A fetch that raised an error in the interrupted run is repeated as
    well, and ``report`` warns if it gives a batch now. ``inner``: the iterator of the new pass. ``restore``: sets the
    random states. Raises ``PassTooShort``."""
    batch = None
    if position.state.at_first is not None:
        restore(position.state.at_first)
    for index in range(position.state.given):
        _repeat_failed_fetches(inner, position, index, report)
        snapshot = position.rng_before(index)
        if snapshot is not None:
            restore(snapshot)
        try:
            batch = next(inner)
        except StopIteration:
            raise PassTooShort(index) from None
        report.fetched(index + 1)
    _repeat_failed_fetches(inner, position, position.state.given, report)
    return batch


def _repeat_failed_fetches(inner: Iterator[object], position: Position, place: int, report: ReplayReport) -> None:
    """Repeat the fetches that raised an error after ``place`` batches, as often as the position says."""
    for _ in range(position.state.raised.get(place, 0)):
        try:
            next(inner)
        except StopIteration:
            raise PassTooShort(place) from None
        except Exception as error:
            log.debug(
                "lightck: in the interrupted run a fetch failed and the loop went on. The resume repeats this fetch, "
                "and it fails again, as expected: %s: %s",
                type(error).__name__,
                error,
            )
        else:
            report.fetch_succeeded(place)


class ReplayReport:
    """Logs the progress of a replay of one loader, every ``_REPORT_SECONDS``, and warns of fetches that no longer fail.
    ``count``: number of batches that are fetched again."""

    def __init__(self, name: str, count: int) -> None:
        self._name, self._count = name, count
        self._begun = self._reported = time.monotonic()

    def fetched(self, done: int) -> None:
        """Log the progress if it is time. ``done``: number of batches fetched so far."""
        now = time.monotonic()
        if now - self._reported >= _REPORT_SECONDS:
            self._reported = now
            log.info(
                "lightck: loader %r: %d of the %d batches that the interrupted run got in this pass are fetched again, "
                "%.1f per second",
                self._name,
                done,
                self._count,
                done / (now - self._begun),
            )

    def fetch_succeeded(self, place: int) -> None:
        """Warn of a fetch after ``place`` batches that raised an error in the interrupted run and gives a batch now."""
        log.warning(
            "lightck: loader %r: in the interrupted run, a fetch after %d batches of the pass raised an error, which "
            "was ignored. Now the same fetch gives a batch, which lightck drops. If the dataset draws random numbers "
            "in workers, later ones may differ from those of the interrupted run. Mend what makes the fetch fail "
            "sometimes",
            self._name,
            place,
        )


# -- replay="skip" -----------------------------------------------------------------------------------------------------

SKIP_NOTE = " (replay='skip' skipped the batches before this one; replay='fetch' fetches all of them)"


def wants_skip(loader: object, choice: object) -> bool:
    """Return whether ``choice``, the argument ``replay=``, is "skip". Raises ``ValueError``, and ``SessionError`` for a
    loader whose batches cannot be skipped."""
    if choice not in ("fetch", "skip"):
        raise ValueError(
            f"replay={choice!r}: pass 'fetch' (fetch again all batches that the interrupted run got in this pass) or "
            "'skip' (skip them in the sampler)."
        )
    is_plain = is_loader_of_torch(loader) and type(loader).__iter__ is DataLoader.__iter__  # type: ignore[attr-defined]
    if choice == "skip" and (not is_plain or isinstance(loader.dataset, IterableDataset)):  # type: ignore[attr-defined]
        raise SessionError(
            f"replay='skip' on a {type(loader).__qualname__}: only a plain DataLoader over a map-style dataset can "
            "skip batches in its sampler. Leave replay= out: then the batches that the interrupted run got in "
            "this pass are fetched again."
        )
    return choice == "skip"


def iterate_restored(
    loader: Any, name: str, position: Position, restore: Callable[[RngSnapshot], None], *, skips: bool
) -> Iterator[object]:
    """Return an iterator of the loader's restored pass. ``skips``: it begins at the last batch that was given.
    ``restore``: sets the random states. Raises ``DriftError`` if another number of ranks began the pass, and this
    loader would not give the rest of it."""
    state = position.state
    if state.samples_before:
        assert position.sharing is not None, "it was checked when the position was read"
        refuse_other_order(name, position.sharing, loader)
        return iterate_rest(loader, state.samples_before)
    if not skips:
        return iter(loader)
    count = state.given - 1 + sum(n for place, n in state.raised.items() if place < state.given)
    last = state.last
    return iterate_after_skip(loader, count, (lambda: None) if last is None else partial(restore, last))


def iterate_after_skip(loader: DataLoader[object], count: int, after_skip: Callable[[], None]) -> Iterator[object]:
    """Return an iterator of the loader that begins after ``count`` batches. ``after_skip``: called when the sampler has
    drawn the indices of these batches."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = loader.__dict__[name]
    # The iterator keeps this sampler. It is set in __dict__, because DataLoader forbids a normal assignment.
    loader.__dict__[name] = _SkippingSampler(sampler, count, after_skip)
    try:
        return iter(loader)
    finally:
        loader.__dict__[name] = sampler


class _SkippingSampler:
    """A sampler, or a batch sampler, that skips its first ``count`` items, in the first pass only. (With persistent
    workers the same iterator, and so the same sampler, serves every pass.)"""

    def __init__(self, sampler: Any, count: int, after_skip: Callable[[], None]) -> None:
        self._sampler, self._count, self._after_skip = sampler, count, after_skip

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[object]:
        drawn = iter(self._sampler)
        count, self._count = self._count, 0
        if count:
            for _ in range(count):
                next(drawn, None)
            self._after_skip()
        yield from drawn
