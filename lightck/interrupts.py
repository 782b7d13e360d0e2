"""Signals at a safe place: what a handler does must not cut a version's bookkeeping in half.

Python runs a signal's handler on the main thread, between any two of its instructions. While lightck works there,
signals are noted; their handlers run when that work is done. A long wait is left for them (``Interrupted``), where
nothing is half done, and begun again afterwards. So a handler may raise (mostly ``KeyboardInterrupt``), or call
``session.flush()``. Which handlers there are stays the user's business.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
_NAMES = ("HUP", "INT", "QUIT", "USR1", "USR2", "ALRM", "VTALRM", "TERM", "CHLD", "CONT", "TSTP", "XCPU", "PWR")
_SIGNALS = tuple(int(getattr(signal, f"SIG{name}")) for name in _NAMES if hasattr(signal, f"SIG{name}"))
"""Those that programs handle. (CHLD: where a worker of a DataLoader has died, torch's handler raises.)"""
_raw = import_module("_signal")
_handler_of: Callable[[int], object] = _raw.getsignal
_set_handler: Callable[[int, Callable[..., object]], object] = _raw.signal
"""What ``signal`` itself calls, without its enums, whose lookups cost 0.1 ms per training step. Where a signal has no
handler this gives a number."""
_users: dict[int, Callable[..., object]] = {}
"""The handlers that ``_note`` stands for now."""
_noted: list[tuple[Callable[..., object], int, FrameType | None]] = []
_depth = 0


class Interrupted(BaseException):
    """A signal came while something was waited for. Internal: never leaves lightck."""


@contextmanager
def deferred() -> Iterator[None]:
    """Hold signals back until the end of this block, or until a wait in it is left for them (``resumed``)."""
    global _depth
    if _depth or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        _hold_back()
        _depth = 1
        yield
    finally:
        _depth = 0
        _let_go()
        _handle_noted()


def leave_if_noted() -> None:
    """Raises ``Interrupted`` where a signal was held back: called where nothing is half done."""
    if _noted and threading.current_thread() is threading.main_thread():
        raise Interrupted


def resumed(work: Callable[[], T]) -> T:
    """``work``, begun again each time that it was left for a signal. What a handler raises ends it."""
    while True:
        try:
            return work()
        except Interrupted:
            _handle_in_between()


def _handle_in_between() -> None:
    """Inside a block that holds signals back. What a handler calls holds them back for itself."""
    global _depth
    outside, _depth = _depth, 0
    _let_go()
    try:
        _handle_noted()
    finally:
        _depth = outside
        _hold_back()


def _note(number: int, frame: FrameType | None) -> None:
    if all(number != other for _, other, _ in _noted):  # they do not count otherwise either
        _noted.append((_users[number], number, frame))


def _hold_back() -> None:
    for number in _SIGNALS:
        user = _handler_of(number)
        if callable(user) and user is not _note:
            _users[number] = user
            _set_handler(number, _note)


def _let_go() -> None:
    """Each signal goes to its handler again. One that comes meanwhile may raise: the others are let go all the same."""
    try:
        while _users:
            number, user = next(iter(_users.items()))
            if _handler_of(number) is _note:  # else somebody has set another one meanwhile (a loader, for CHLD)
                _set_handler(number, user)
            del _users[number]
    finally:
        if _users:
            _let_go()


def _handle_noted() -> None:
    """In their order, all of them: where several raise, the last one is raised, with the others as its context."""
    while _noted:
        user, number, frame = _noted.pop(0)
        try:
            user(number, frame)
        finally:
            _handle_noted()


def _begin_child() -> None:
    """A child that was forked in the midst of it has the user's handlers, and none of its parent's signals."""
    global _depth
    _depth = 0
    _noted.clear()
    _let_go()


os.register_at_fork(after_in_child=_begin_child)
