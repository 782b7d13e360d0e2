"""The images of one crash point: all of them where that is few, else a choice that is drawn from a seed.

An image is described by its difference from one of two: every store arrived, or none. This module is independent of
pools and files.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

from crash.fates import Content, Fate

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Image:
    """One crash image."""

    is_bare: bool
    """Whether ``but`` is the difference from "nothing arrived"; else from "everything arrived"."""
    but: Mapping[int, Content]
    """Number of a fate -> its content."""

    def missing(self, fates: Sequence[Fate]) -> dict[int, Content]:
        """Number of each fate that is not the newest -> its content."""
        contents = {i: fate.lost for i, fate in enumerate(fates)} if self.is_bare else {}
        contents.update(self.but)
        return {i: content for i, content in contents.items() if content != fates[i].newest}


ALL, NOTHING = Image(False, {}), Image(True, {})


@dataclass(frozen=True, slots=True)
class Limits:
    """How many images of one crash point are built."""

    budget: int = 1024
    """Every combination is built where there are at most so many."""
    metadata: int = 32
    """Else: fates of manifests, each lost alone and arrived alone. Of ring, headers and tables it is all of them."""
    payload: int = 8
    """The same of payload."""
    contents: int = 8
    """How many contents of each of these."""
    prefixes: int = 8
    """Images with everything up to some store and nothing after it, and the other way round."""
    masks: int = 8
    """Images with any content anywhere."""


VITAL, METADATA, PAYLOAD = range(3)
"""Kinds of fates: ring, headers and tables; manifests; payload."""


def images(
    fates: Sequence[Fate], kinds: Sequence[int], limits: Limits, rng: random.Random
) -> Iterator[tuple[str, Image]]:
    """(how it came about, image), without duplicates as far as they are cheap to find."""
    yield "everything arrived", ALL
    if not fates:
        return
    if _is_small(fates, limits.budget):
        yield from (("one of all", Image(False, but)) for but in _all(fates, range(len(fates))) if but)
        return
    # Nearly everything arrived, then nearly nothing: from one image to the next little changes.
    tried = {i: _some(fates[i], limits, rng) for i in _picked(kinds, limits, rng)}
    vital = [i for i, kind in enumerate(kinds) if kind == VITAL]
    metadata = list(_all(fates, vital)) if _is_small([fates[i] for i in vital], limits.budget) else []
    for i, contents in tried.items():
        yield from (("one lost", Image(False, {i: content})) for content in contents if content != fates[i].newest)
    yield from (("metadata", Image(False, but)) for but in metadata)
    yield "nothing arrived", NOTHING
    for i, contents in tried.items():
        yield from (("one arrived", Image(True, {i: content})) for content in contents if content != fates[i].lost)
    for but in metadata:
        yield "metadata alone", Image(True, {i: but.get(i, fates[i].newest) for i in vital})
    yield from _prefixes(fates, limits, rng)
    for _ in range(limits.masks):
        yield "mask", _mask(fates, rng)


def _is_small(fates: Sequence[Fate], budget: int) -> bool:
    n = 1
    for fate in fates:
        n *= fate.count()
        if n > budget:
            return False
    return True


def _all(fates: Sequence[Fate], which: Sequence[int]) -> Iterator[Mapping[int, Content]]:
    newest = {i: fates[i].newest for i in which}
    for contents in product(*(fates[i].contents() for i in which)):
        yield {i: content for i, content in zip(which, contents, strict=True) if content != newest[i]}


def _picked(kinds: Sequence[int], limits: Limits, rng: random.Random) -> list[int]:
    picked: list[int] = []
    for kind, most in ((VITAL, len(kinds)), (METADATA, limits.metadata), (PAYLOAD, limits.payload)):
        of_kind = [i for i, known in enumerate(kinds) if known == kind]
        picked += of_kind if len(of_kind) <= most else sorted(rng.sample(of_kind, most))
    return picked


def _some(fate: Fate, limits: Limits, rng: random.Random) -> list[Content]:
    if fate.count() <= limits.contents:
        return fate.contents()
    return list(dict.fromkeys([fate.lost, fate.newest, *(fate.draw(rng) for _ in range(limits.contents))]))


def _prefixes(fates: Sequence[Fate], limits: Limits, rng: random.Random) -> Iterator[tuple[str, Image]]:
    order = sorted(range(len(fates)), key=lambda i: fates[i].first)
    places = range(1, len(order))
    for at in places if len(places) <= limits.prefixes else sorted(rng.sample(places, limits.prefixes)):
        yield "first ones arrived", Image(False, {i: fates[i].lost for i in order[at:]})
        yield "last ones arrived", Image(False, {i: fates[i].lost for i in order[:at]})


def _mask(fates: Sequence[Fate], rng: random.Random) -> Image:
    """Half of all, few lost, or few arrived."""
    share = rng.choice([0.5, 0.5, 0.1, 0.9])
    but = {}
    for i, fate in enumerate(fates):
        content = rng.choice([fate.lost, fate.draw(rng)]) if rng.random() < share else fate.newest
        if content != fate.newest:
            but[i] = content
    return Image(False, but)


def minimal(items: Sequence[T], is_enough: Callable[[Sequence[T]], bool], tries: int = 500) -> list[T]:
    """A part of ``items`` for which ``is_enough`` still holds and from which none can be left out alone (as far as so
    many tries go): delta debugging. It holds for all of them."""
    left, parts = list(items), 2
    while len(left) > 1 and tries > 0:
        size = -(-len(left) // parts)
        for at in range(0, len(left), size):
            rest = left[:at] + left[at + size :]
            tries -= 1
            if is_enough(rest):
                left, parts = rest, max(parts - 1, 2)
                break
        else:
            if size == 1:
                break
            parts = min(2 * parts, len(left))
    return left
