"""Every damage of the flips campaign, numbered: each metadata bit once, payload bits, pages, lines, lost, misdirected
and foreign writes.

Numbers are spread over the kinds, so that the first few hundred have some of each.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from lightck.pool.format import anatomy
from lightck.pool.format.anatomy import Part
from lightck.pool.format.structures import COMMIT_RECORD_NBYTES, PAGE, Superblock
from lightck.pool.storage.extents import Extents, runs

Write = tuple[int, bytes]
"""Offset in the file, and what is put there."""
PAYLOAD_BITS, PLACED = 10_000, 3000
"""Random payload bits, and draws of each kind of larger damage."""
CONTAINER = "container"


@dataclass(frozen=True, slots=True)
class Image:
    """A pool's file that is not in use, its earlier contents, and the file of another pool."""

    good: bytes
    places: Extents
    parts: tuple[Part, ...]
    superblock: Superblock
    history: tuple[bytes, ...]
    """The whole file after each earlier step."""
    stranger: bytes
    """Another pool's file of the same shape."""
    container: tuple[tuple[int, int], ...]
    """Runs of the file in which a container's own structures lie that a reader looks at."""

    def read(self, offset: int, nbytes: int, source: bytes | None = None) -> bytes:
        data = self.good if source is None else source
        return b"".join(data[at : at + n] for at, n in runs(self.places, offset, nbytes))

    def write(self, offset: int, data: bytes) -> list[Write]:
        found = []
        for at, n in runs(self.places, offset, len(data)):
            found.append((at, data[:n]))
            data = data[n:]
        return found


@dataclass(frozen=True, slots=True)
class Damage:
    """What is written over a good file, by the offsets of the file."""

    kind: str
    words: str
    writes: tuple[Write, ...]


@dataclass(slots=True)
class Damages:
    """All of them, by number."""

    image: Image
    seed: int
    _kinds: list[tuple[int, Callable[[int], Damage]]] = field(default_factory=list)
    _ends: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        image = self.image
        metadata = [p for p in image.parts if p.kind != anatomy.TENSOR]
        bits = _Bits([(p, p.offset, p.nbytes) for p in metadata])
        payload = [p for p in image.parts if p.kind == anatomy.TENSOR]
        self._kinds = [(bits.count, lambda i: self._flip("bit of metadata", *bits[i]))]
        if image.container:
            held = _Bits([(None, at, n) for at, n in image.container])
            self._kinds.append((held.count, lambda i: self._container(*held[i])))
        self._kinds.append((PAYLOAD_BITS, lambda i: self._payload(payload, i)))
        for draw in (self._blotted, self._swapped, self._stale, self._foreign, self._both_copies):
            self._kinds.append((PLACED, lambda i, draw=draw: draw(self._rng(draw.__name__, i))))  # type: ignore[misc]
        self._ends = list(accumulate(n for n, _ in self._kinds))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> Damage:
        """Kinds take turns until they run out of numbers; inside a kind, numbers are spread."""
        kind, index = self._turn(number)
        count, make = self._kinds[kind]
        return make(index * _coprime(count) % count)

    def _turn(self, number: int) -> tuple[int, int]:
        """Which kind has this number, and how many of it came before."""
        left, begun = number, 0
        for size in sorted({count for count, _ in self._kinds}):
            alive = [k for k, (count, _) in enumerate(self._kinds) if count >= size]
            if left < (size - begun) * len(alive):
                return alive[left % len(alive)], begun + left // len(alive)
            left, begun = left - (size - begun) * len(alive), size
        raise IndexError(number)

    def _rng(self, kind: str, index: int) -> random.Random:
        return random.Random(f"{self.seed}:{kind}:{index}")

    # -- kinds of damage ---------------------------------------------------------------------------------------------

    def _flip(self, kind: str, part: Part | None, offset: int, bit: int) -> Damage:
        assert part is not None
        data = bytes([self.image.read(offset, 1)[0] ^ 1 << bit])
        return Damage(
            f"{kind}: {part.kind}",
            f"bit {bit} of byte {offset:#x}, {part.words}",
            tuple(self.image.write(offset, data)),
        )

    def _container(self, _: Part | None, at: int, bit: int) -> Damage:
        data = bytes([self.image.good[at] ^ 1 << bit])
        return Damage(f"bit of metadata: {CONTAINER}", f"bit {bit} of byte {at:#x} of the file", ((at, data),))

    def _payload(self, parts: Sequence[Part], index: int) -> Damage:
        rng = self._rng("payload", index)
        part = rng.choices(parts, [p.nbytes for p in parts])[0]
        return self._flip("random bit", part, part.offset + rng.randrange(part.nbytes), rng.randrange(8))

    def _blotted(self, rng: random.Random) -> Damage:
        """A page or a cache line of something that is read: zeros, ones, noise."""
        part = rng.choice(rng.choice(self._by_kind()))
        nbytes = rng.choice((COMMIT_RECORD_NBYTES, PAGE))
        at = part.offset + rng.randrange(part.nbytes)
        at -= at % nbytes
        name, data = rng.choice(
            (
                ("zeroed", bytes(nbytes)),
                ("zeroed", bytes(nbytes)),
                ("ones in", b"\xff" * nbytes),
                ("noise in", rng.randbytes(nbytes)),
            )
        )
        what = "page" if nbytes == PAGE else "line"
        return Damage(
            f"{what} zeroed or garbled",
            f"{name} {nbytes} bytes from {at:#x}, {part.words}",
            tuple(self.image.write(at, data)),
        )

    def _swapped(self, rng: random.Random) -> Damage:
        """A misdirected write: two places of the pool hold what belongs into the other, or one what the other has."""
        sb = self.image.superblock
        (a, n), (b, _) = rng.sample(sb.slots, 2)
        first, nbytes, what = self._stretch(rng, n)
        at, to = a + first, b + first
        if rng.random() < 0.3:
            one, two = rng.sample([p for p in self.image.parts if p.nbytes >= COMMIT_RECORD_NBYTES], 2)
            at, to, nbytes, what = one.offset, two.offset, min(one.nbytes, two.nbytes), "parts"
        writes = self.image.write(to, self.image.read(at, nbytes))
        if rng.random() < 0.6:
            writes += self.image.write(at, self.image.read(to, nbytes))
        return Damage("misdirected write", f"{what}: {nbytes} bytes of {at:#x} at {to:#x}", tuple(writes))

    def _stale(self, rng: random.Random) -> Damage:
        """A lost write: a place holds what it held some steps ago."""
        return self._replayed(rng, "lost write", rng.choice(self.image.history))

    def _foreign(self, rng: random.Random) -> Damage:
        """A place holds what another pool of the same shape has there."""
        return self._replayed(rng, "write of another pool", self.image.stranger)

    def _replayed(self, rng: random.Random, kind: str, source: bytes) -> Damage:
        if rng.random() < 0.5:
            part = rng.choice(rng.choice(self._by_kind()))
            at, nbytes, what = part.offset, part.nbytes, part.words
            if rng.random() < 0.3:
                at, nbytes, what = at - at % PAGE, PAGE, "the page of " + part.words
        else:
            base, length = rng.choice(self.image.superblock.slots)
            first, nbytes, what = self._stretch(rng, length)
            at, what = base + first, f"{what} of the slot at {base:#x}"
        return Damage(
            kind,
            f"{what}: {nbytes} bytes from {at:#x}",
            tuple(self.image.write(at, self.image.read(at, nbytes, source))),
        )

    def _stretch(self, rng: random.Random, length: int) -> tuple[int, int, str]:
        """A piece of a slot: offset in it, length, name."""
        sb = self.image.superblock
        return rng.choice(
            (
                (0, length, "whole slot"),
                (0, COMMIT_RECORD_NBYTES, "header"),
                (0, sb.payload_offset, "header and manifests"),
                (sb.manifest_offset, 2 * sb.manifest_nbytes, "manifests"),
                (sb.payload_offset, length - sb.payload_offset, "payload"),
                (sb.payload_offset, PAGE, "first page of the payload"),
            )
        )

    def _both_copies(self, rng: random.Random) -> Damage:
        """The two copies of a structure that exists twice, or parts of two checkpoints, each with a flipped bit."""
        parts = rng.choice(
            (
                [p for p in self.image.parts if p.kind == anatomy.SUPERBLOCK],
                [p for p in self.image.parts if p.kind == anatomy.TABLE],
                rng.sample([p for p in self.image.parts if p.kind == anatomy.MANIFEST], 2),
                rng.sample([p for p in self.image.parts if p.kind == anatomy.TENSOR], 2),
            )
        )
        writes: list[Write] = []
        for part in parts:
            at = part.offset + rng.randrange(part.nbytes)
            writes += self.image.write(at, bytes([self.image.read(at, 1)[0] ^ 1 << rng.randrange(8)]))
        return Damage("two bits in two parts", " and ".join(p.words for p in parts), tuple(writes))

    def _by_kind(self) -> list[list[Part]]:
        kinds = ([p for p in self.image.parts if p.kind == kind] for kind in anatomy.KINDS)
        return [parts for parts in kinds if parts]


class _Bits:
    """Runs of bytes as one row of bits."""

    def __init__(self, rows: Sequence[tuple[Part | None, int, int]]) -> None:
        self._rows = rows
        self._ends = list(accumulate(8 * n for _, _, n in rows))
        self.count = self._ends[-1]

    def __getitem__(self, index: int) -> tuple[Part | None, int, int]:
        row = bisect_right(self._ends, index)
        part, offset, nbytes = self._rows[row]
        inside = index - self._ends[row] + 8 * nbytes
        return part, offset + inside // 8, inside % 8


def _coprime(count: int) -> int:
    """A step that visits every number below ``count`` once, far from the one before."""
    step = int(count * 0.618) | 1
    while math.gcd(step, count) != 1:
        step += 2
    return step
