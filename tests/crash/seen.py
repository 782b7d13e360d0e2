"""What a simulator found out and need not find out again: outcomes of images, and crash points with the same past.

Trainings that begin alike write the same bytes, so they share their first crash points. What was looked at once is
neither looked at nor counted again.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from hashlib import blake2b

from crash.oracle import Outcome
from crash.trace import Event, Flush, Mark, Store


@dataclass(slots=True)
class Known:
    """Shared by simulators that recover in the same way with the same limits."""

    outcomes: dict[int, Outcome] = field(default_factory=dict)
    """By fingerprint of the image: one entry for each image that differs in bytes from all before."""
    _points: set[bytes] = field(default_factory=set)

    def is_new(self, point: bytes) -> bool:
        """Whether nobody asked for this crash point before."""
        if point in self._points:
            return False
        self._points.add(point)
        return True


class Past:
    """A trace up to a moment, as a hash."""

    def __init__(self, start: str) -> None:
        self._hash = blake2b(start.encode(), digest_size=16)

    def feed(self, event: Event) -> None:
        what, data = (0, 0), b""
        if isinstance(event, Store):
            what, data = (event.offset, event.streamed), event.data
        elif isinstance(event, Flush):
            what = (event.offset, event.nbytes)
        elif isinstance(event, Mark):
            what = (event.mark, event.value)
        self._hash.update(type(event).__name__.encode() + struct.pack("<qQQQ", event.thread, *what, len(data)) + data)

    def so_far(self, promise: str) -> bytes:
        """The same for two moments with the same past, at which the same was promised."""
        now = self._hash.copy()
        now.update(promise.encode())
        return now.digest()
