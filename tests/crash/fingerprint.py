"""A number for the bytes of an image, so that images are counted once each however they came about.

The fingerprint of a medium is the exclusive or of a 64-bit mix of every word with its offset; a word of zeros counts
nothing. So a change of a few words costs a few mixes. Two different images that had the same number would be counted as
one: the count may be too low (by less than one in a million at ten million images), never too high.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

_MASK = (1 << 64) - 1
_STEP, _A, _B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = 8


def _mix(x: int) -> int:
    """The finalizer of splitmix64, a bijection."""
    x = (x + _STEP) & _MASK
    x = (x ^ (x >> 30)) * _A & _MASK
    x = (x ^ (x >> 27)) * _B & _MASK
    return x ^ (x >> 31)


def of_parts(offsets: Sequence[int], content: Iterable[bytes]) -> int:
    """Of these 8-byte words, which may lie apart (or of longer parts, in multiples of 8)."""
    found = 0
    for at, word in zip(offsets, content, strict=True):
        if len(word) > _WORD:
            found ^= of_bytes(at, word)
            continue
        value = int.from_bytes(word, "little")
        if value:
            found ^= _mix(_mix(at) ^ value)
    return found


def of_bytes(offset: int, data: bytes) -> int:
    """The same of words that lie together; ``offset`` and the length are multiples of 8."""
    values = np.frombuffer(data, "<u8")
    places = np.arange(offset, offset + len(data), _WORD, dtype=np.uint64)
    mixed = np.where(values != 0, _mix_all(_mix_all(places) ^ values), np.uint64(0))
    return int(np.bitwise_xor.reduce(mixed)) if len(mixed) else 0


def _mix_all(x: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    x = x + np.uint64(_STEP)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_A)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_B)
    return x ^ (x >> np.uint64(31))
