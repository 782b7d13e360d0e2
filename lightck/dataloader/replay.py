"""Going again through the batches that a pass gave before it was saved: fetched and dropped.

A loader may fetch ahead of what it gives. One that is a batch ahead (Accelerate's, timm's prefetcher) fetches two at
its first ``next()``, and at ``next()`` number k the batch k + 1, with the loop's own draws in between. So the states
before the last two ``next()`` are set again: the batch that was given last and the one that waits in the loader are
drawn as they were. A loader that fetches two batches ahead gives another last batch, and its checksum says so.

``session.loader(dl, replay="skip")`` draws what was given before from the sampler alone. Of the batches before only the
last one is fetched, and compared with the one that was given. What a dataset draws from a generator of its own, counts
or keeps while it fetches is missing then, and what it draws from a global generator inside a worker: so this is the
user's choice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightck.dataloader.position import Position, RngSnapshot
from lightck.dataloader.wrapped_loader import is_loader_of_torch
from lightck.errors import SessionError

log = logging.getLogger("lightck")
_REPORT_SECONDS = 10.0


class PassTooShort(Exception):
    """The loader has fewer batches than were given; its argument says how many."""


def replay(
    inner: Iterator[object],
    position: Position,
    restore: Callable[[RngSnapshot], None],
    progress: Progress,
    warn_recovered: Callable[[int], None],
) -> object:
    """Fetch and drop what was given before: each worker's random stream and the prefetching run along. Returns the last
    batch. Fetches that raised, and which the loop passed over, are made again: ``tell_healed`` is called with the place
    of one that gives a batch now. Raises ``EndedEarly``."""
    batch = None
    if position.state.at_first is not None:
        restore(position.state.at_first)
    for index in range(position.state.given):
        _pass_over(inner, position, index, warn_recovered)
        snapshot = position.before(index)
        if snapshot is not None:
            restore(snapshot)
        try:
            batch = next(inner)
        except StopIteration:
            raise PassTooShort(index) from None
        progress.at(index + 1)
    _pass_over(inner, position, position.state.given, warn_recovered)
    return batch


def _pass_over(inner: Iterator[object], position: Position, place: int, warn_recovered: Callable[[int], None]) -> None:
    """As many errors as were counted behind batch ``place``, and not one more."""
    for _ in range(position.state.raised.get(place, 0)):
        try:
            next(inner)
        except StopIteration:
            raise PassTooShort(place) from None
        except Exception as error:
            log.debug("lightck: passed over again: %s: %s", type(error).__name__, error)
        else:
            warn_recovered(place)


class Progress:
    """Says every ten seconds how far a long replay is."""

    def __init__(self, name: str, count: int) -> None:
        self._name, self._count = name, count
        self._begun = self._reported = time.monotonic()

    def at(self, done: int) -> None:
        now = time.monotonic()
        if now - self._reported >= _REPORT_SECONDS:
            self._reported = now
            log.info(
                "loader %r: %d of the %d batches that its pass gave before are fetched again, %.1f in a second",
                self._name,
                done,
                self._count,
                done / (now - self._begun),
            )


# -- replay="skip" -----------------------------------------------------------------------------------------------------

SKIP_NOTE = " (those before it were not fetched: replay='skip'. Say replay='fetch', and all are)"


def wants_skip(loader: object, replay: object) -> bool:
    """What ``replay=`` says. Raises ``ValueError``; ``SessionError`` for a loader whose batches cannot be skipped."""
    if replay not in ("fetch", "skip"):
        raise ValueError(f"replay={replay!r}: say 'fetch' (all that a pass gave before) or 'skip' (in the sampler).")
    is_plain = is_loader_of_torch(loader) and type(loader).__iter__ is DataLoader.__iter__  # type: ignore[attr-defined]
    if replay == "skip" and (not is_plain or isinstance(loader.dataset, IterableDataset)):  # type: ignore[attr-defined]
        raise SessionError(
            f"replay='skip' on a {type(loader).__qualname__}: batches are skipped in the sampler of a plain DataLoader "
            "over a map-style dataset, and this is none. Leave replay= out: what was given before is fetched again."
        )
    return replay == "skip"


def iterate_after_skip(loader: DataLoader[object], count: int, then: Callable[[], None]) -> Iterator[object]:
    """An iterator of the loader's that begins behind ``count`` batches. ``then`` is called where those are drawn."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler = loader.__dict__[name]
    # The iterator keeps this sampler. It is set in __dict__, because DataLoader forbids a normal assignment.
    loader.__dict__[name] = _SkippingSampler(sampler, count, then)
    try:
        return iter(loader)
    finally:
        loader.__dict__[name] = sampler


class _SkippingSampler:
    """A sampler, or a batch sampler. Once: persistent workers iterate it in each pass."""

    def __init__(self, sampler: Any, count: int, then: Callable[[], None]) -> None:
        self._sampler, self._count, self._then = sampler, count, then

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[object]:
        drawn = iter(self._sampler)
        count, self._count = self._count, 0
        if count:
            for _ in range(count):
                next(drawn, None)
            self._then()
        yield from drawn
