"""Ctrl-C at a safe place: a KeyboardInterrupt must not cut a version's bookkeeping in half.

While lightck works on the training thread, SIGINT is noted; it is handled when that work is done, or in between two
slices of a long wait. What the user's handler does (mostly: raise KeyboardInterrupt) stays the user's.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_noted: list[tuple[Any, int, FrameType | None]] = []
_depth = 0


@contextmanager
def deferred() -> Iterator[None]:
    """Hold SIGINT back until the end of this block, or until ``deliver``."""
    global _depth
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if _depth or not callable(handler):
        yield
        return
    user = handler

    def note(number: int, frame: FrameType | None) -> None:
        _noted.append((user, number, frame))

    signal.signal(signal.SIGINT, note)
    _depth = 1
    try:
        yield
    finally:
        _depth = 0
        signal.signal(signal.SIGINT, user)
        deliver()


def deliver() -> None:
    """Handle a SIGINT that was held back: called where nothing is half done."""
    if _noted and threading.current_thread() is threading.main_thread():
        user, number, frame = _noted[-1]
        _noted.clear()
        user(number, frame)
