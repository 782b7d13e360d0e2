"""What a crash may decide on its own: words of the medium, and the contents that it may leave in them.

A *fate* is a set of 8-byte words whose contents depend on each other and on nothing else, so that the images of a crash
point are the product of its fates. ``Queue``: ordinary stores arrive in program order; the words of one store in any
order, since memcpy promises none. ``Subset``: every word by itself. ``Bulk``: many units of a large tensor, of which
only some contents are built. Words that do not change are in no fate.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol, TypeAlias

WORD = 8
WORDS_IN_ANY_ORDER = 8
"""Of a store with more changed words not every subset is built: the first word, each half, all but the last."""
TORN_LARGE = 5

Content: TypeAlias = "tuple[bytes, ...]"
"""What lies at the ``offsets`` of a fate, in their order: words, of a bulk all of it."""


class Fate(Protocol):
    """See the module. ``first`` is the number of the event that it begins with."""

    @property
    def first(self) -> int: ...

    @property
    def offsets(self) -> tuple[int, ...]: ...

    @property
    def lost(self) -> Content: ...

    @property
    def newest(self) -> Content: ...

    def count(self) -> int:
        """At least as many as there are contents."""

    def contents(self) -> list[Content]:
        """Each once; what is there when nothing arrived comes first."""

    def draw(self, rng: random.Random) -> Content:
        """Any of them."""


@dataclass(frozen=True, slots=True)
class Queue:
    """Stores in order: all before one of them, and any words of that one."""

    first: int
    offsets: tuple[int, ...]
    lost: Content
    newest: Content
    steps: tuple[tuple[tuple[int, bytes], ...], ...]
    """Per store: (index of a word, its new bytes) of what it changes."""

    def count(self) -> int:
        return 1 + sum((1 << len(s)) - 1 if len(s) <= WORDS_IN_ANY_ORDER else TORN_LARGE for s in self.steps)

    def contents(self) -> list[Content]:
        found = [self.lost]
        for number, step in enumerate(self.steps):
            before = self._after(number)
            found += [_with(before, part) for part in _torn(step)]
        return list(dict.fromkeys(found))

    def draw(self, rng: random.Random) -> Content:
        number = rng.randrange(len(self.steps))
        step = self.steps[number]
        part = rng.choice([(), step, tuple(word for word in step if rng.random() < 0.5)])
        return _with(self._after(number), part)

    def _after(self, number: int) -> Content:
        content = self.lost
        for step in self.steps[:number]:
            content = _with(content, step)
        return content


@dataclass(frozen=True, slots=True)
class Subset:
    """Words that arrive each by itself; one that was stored to several times has several values."""

    first: int
    offsets: tuple[int, ...]
    lost: Content
    newest: Content
    values: tuple[tuple[bytes, ...], ...]
    """Per word: what may be in it, the lost one first."""

    def count(self) -> int:
        n = 1
        for values in self.values:
            n *= len(values)
        return n

    def contents(self) -> list[Content]:
        return list(product(*self.values))

    def draw(self, rng: random.Random) -> Content:
        whole = rng.choice([self.lost, self.newest, None])
        return tuple(rng.choice(values) for values in self.values) if whole is None else whole


@dataclass(frozen=True, slots=True)
class Bulk:
    """Units in a row that were stored to once: none, all, and all before or behind some place."""

    first: int
    unit: int
    offsets: tuple[int, ...]
    lost: Content
    newest: Content

    def count(self) -> int:
        return 1 << 30

    def contents(self) -> list[Content]:
        half = len(self.newest[0]) // self.unit // 2 * self.unit
        return list(dict.fromkeys([self.lost, *self._cut(half), self.newest]))

    def draw(self, rng: random.Random) -> Content:
        at = rng.randrange(len(self.newest[0]) // self.unit + 1) * self.unit
        return rng.choice(self._cut(at))

    def _cut(self, at: int) -> tuple[Content, Content]:
        (old,), (new,) = self.lost, self.newest
        return (new[:at] + old[at:],), (old[:at] + new[at:],)


def _with(content: Content, changes: Sequence[tuple[int, bytes]]) -> Content:
    changed = list(content)
    for index, word in changes:
        changed[index] = word
    return tuple(changed)


def _torn(step: tuple[tuple[int, bytes], ...]) -> Iterator[tuple[tuple[int, bytes], ...]]:
    """Parts of one store that may be there without the rest; at last all of it."""
    n = len(step)
    if n > WORDS_IN_ANY_ORDER:
        yield from (step[:1], step[: n // 2], step[n // 2 :], step[: n - 1], step)
        return
    for mask in range(1, 1 << n):
        yield tuple(word for i, word in enumerate(step) if mask >> i & 1)


# -- from stores to fates --------------------------------------------------------------------------------------------


class Stores:
    """Collects the stores of one fate, in program order."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._old: dict[int, bytes] = {}
        self._now: dict[int, bytes] = {}
        self._steps: list[dict[int, bytes]] = []

    def add(self, event: int, old: dict[int, bytes], new: dict[int, bytes]) -> None:
        """A store that turned these words (offset -> bytes) into those, whatever came before."""
        self._first = event if self._first is None else self._first
        step = {}
        for at, word in new.items():
            self._old.setdefault(at, old[at])
            if self._now.get(at, old[at]) != word:
                step[at] = self._now[at] = word
        if step:
            self._steps.append(step)

    def queue(self) -> Queue | None:
        """None where nothing changes."""
        offsets = self._changed()
        if not offsets or self._first is None:
            return None
        index = {at: i for i, at in enumerate(offsets)}
        steps = tuple(tuple((index[at], word) for at, word in step.items()) for step in self._steps)
        return Queue(self._first, offsets, *self._ends(offsets), steps)

    def subset(self) -> Subset | None:
        """None where nothing changes."""
        offsets = self._changed()
        if not offsets or self._first is None:
            return None
        values = [
            tuple(dict.fromkeys([self._old[at], *(step[at] for step in self._steps if at in step)])) for at in offsets
        ]
        return Subset(self._first, offsets, *self._ends(offsets), tuple(values))

    def _ends(self, offsets: tuple[int, ...]) -> tuple[Content, Content]:
        return tuple(self._old[at] for at in offsets), tuple(self._now[at] for at in offsets)

    def _changed(self) -> tuple[int, ...]:
        return tuple(sorted({at for step in self._steps for at in step}))


def words(offset: int, data: bytes) -> dict[int, bytes]:
    """Whole words: offset -> bytes. ``offset`` and the length are multiples of 8."""
    return {offset + i: data[i : i + WORD] for i in range(0, len(data), WORD)}
