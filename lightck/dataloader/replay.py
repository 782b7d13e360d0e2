"""Going again through the batches that a pass gave before it was saved: fetched and dropped.

A loader may fetch ahead of what it gives. One that is a batch ahead (Accelerate's, timm's prefetcher) fetches two at
its first ``next()``, and at ``next()`` number k the batch k + 1, with the loop's own draws in between. So the states
before the last two ``next()`` are set again: the batch that was given last and the one that waits in the loader are
drawn as they were. A loader that fetches two batches ahead gives another last batch, and its checksum says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

from lightck.dataloader.position import Mark, Position

log = logging.getLogger("lightck")
_TELL_SECONDS = 10.0


class EndedEarly(Exception):
    """The loader has fewer batches than were given; its argument says how many."""


def replay(
    inner: Iterator[Any],
    position: Position,
    set_mark: Callable[[Mark], None],
    progress: Progress,
    tell_healed: Callable[[int], None],
) -> Any:
    """Fetch and drop what was given before: each worker's random stream and the prefetching run along. Returns the last
    batch. Fetches that raised, and which the loop passed over, are made again: ``tell_healed`` is called with the place
    of one that gives a batch now. Raises ``EndedEarly``."""
    batch = None
    if position.at_first is not None:
        set_mark(position.at_first)
    for index in range(position.given):
        _pass_over(inner, position, index, tell_healed)
        mark = position.before(index)
        if mark is not None:
            set_mark(mark)
        try:
            batch = next(inner)
        except StopIteration:
            raise EndedEarly(index) from None
        progress.at(index + 1)
    _pass_over(inner, position, position.given, tell_healed)
    return batch


def _pass_over(inner: Iterator[Any], position: Position, place: int, tell_healed: Callable[[int], None]) -> None:
    """As many errors as were counted behind batch ``place``, and not one more."""
    for _ in range(position.raised.get(place, 0)):
        try:
            next(inner)
        except StopIteration:
            raise EndedEarly(place) from None
        except Exception as error:
            log.debug("lightck: passed over again: %s: %s", type(error).__name__, error)
        else:
            tell_healed(place)


class Progress:
    """Says every ten seconds how far a long replay is."""

    def __init__(self, name: str, count: int, what: str = "fetched again") -> None:
        self._name, self._count, self._what = name, count, what
        self._begun = self._told = time.monotonic()

    def at(self, done: int) -> None:
        now = time.monotonic()
        if now - self._told >= _TELL_SECONDS:
            self._told = now
            log.info(
                "loader %r: %d of the %d batches that its pass gave before are %s, %.1f in a second",
                self._name,
                done,
                self._count,
                self._what,
                done / (now - self._begun),
            )
