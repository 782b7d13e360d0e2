"""Deferred signals: no signal handler runs in the middle of lightck's work.

Python runs a signal's handler on the main thread, between any two bytecode instructions. While lightck works there,
signals are queued, and their handlers run when the work is done. A long wait ends early for a queued signal by raising
``Interrupted`` at a place where nothing is half done; the wait is repeated after the handler. So a handler may raise
(mostly ``KeyboardInterrupt``) or call ``session.flush()``. The user's handlers are back in place after the work.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import CodeType, FrameType, FunctionType
from typing import TypeVar

T = TypeVar("T")
_NAMES = ("HUP", "INT", "QUIT", "USR1", "USR2", "ALRM", "VTALRM", "TERM", "CHLD", "CONT", "TSTP", "XCPU", "PWR")
_SIGNALS = tuple(int(getattr(signal, f"SIG{name}")) for name in _NAMES if hasattr(signal, f"SIG{name}"))
"""Signals that programs handle. (CHLD: torch's handler raises when a DataLoader worker has died.)"""
_signal_module = import_module("_signal")
_handler_of: Callable[[int], object] = _signal_module.getsignal
_set_handler: Callable[[int, Callable[..., object]], object] = _signal_module.signal
"""The C functions behind ``signal.signal``, without its enums, whose lookups cost 0.1 ms per training step.
``_handler_of`` returns a number for a signal without a handler."""
_user_handlers: dict[int, Callable[..., object]] = {}
"""Signal number -> the user's handler, while ``_defer`` is installed in its place."""
_pending: list[tuple[Callable[..., object], int, FrameType | None]] = []
"""Handler, signal number and frame of each queued signal."""
_is_deferring = False
_main_thread = threading.main_thread().ident
"""The thread on which Python runs signal handlers."""


class Interrupted(BaseException):
    """A signal arrived during a wait. Internal: never leaves lightck."""


@contextmanager
def deferred() -> Iterator[None]:
    """Defer signals to the end of this block, or to a wait inside it that ``retry_interrupted`` repeats."""
    is_outermost = begin_deferral()
    try:
        yield
    finally:
        if is_outermost:
            end_deferral()


def begin_deferral() -> bool:
    """Defer signals from now on, and return True: then ``end_deferral`` must follow. Return False, and do nothing, if
    they are deferred already, or on a thread that runs no handlers."""
    global _is_deferring
    if _is_deferring or threading.get_ident() != _main_thread:
        return False
    try:
        _replace_handlers()
        _is_deferring = True
    except BaseException:  # from a handler that ran before it was replaced
        end_deferral()
        raise
    return True


def end_deferral() -> None:
    """Install the user's handlers again, and run those of the signals that came meanwhile."""
    global _is_deferring
    _is_deferring = False
    _restore_handlers()
    if _pending:
        _handle_pending()


def raise_if_interrupted() -> None:
    """Raise ``Interrupted`` if a signal is queued. Called only where nothing is half done."""
    if _pending and threading.get_ident() == _main_thread:
        raise Interrupted


def is_in_handler() -> bool:
    """Whether a handler of one of ``_SIGNALS`` is among the callers. A handler that is not a Python function, method,
    ``partial`` or object with a Python ``__call__`` is not recognised."""
    codes = [_code_of(_user_handlers.get(number, _handler_of(number))) for number in _SIGNALS]
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None


def _code_of(handler: object) -> CodeType | None:
    while isinstance(handler, partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    if not isinstance(function, FunctionType):
        function = vars(type(handler)).get("__call__")
    return function.__code__ if isinstance(function, FunctionType) else None


def retry_interrupted(work: Callable[[], T]) -> T:
    """Call ``work``, and call it again each time a signal interrupted it. An exception from a handler ends the loop."""
    while True:
        try:
            return work()
        except Interrupted:
            _handle_during_deferral()


def _handle_during_deferral() -> None:
    """Run the queued handlers inside a ``deferred`` block. Code that a handler calls defers signals by itself."""
    global _is_deferring
    before, _is_deferring = _is_deferring, False
    _restore_handlers()
    try:
        _handle_pending()
    finally:
        _is_deferring = before
        _replace_handlers()


def _defer(number: int, frame: FrameType | None) -> None:
    if all(number != other for _, other, _ in _pending):  # the system does not queue equal signals either
        _pending.append((_user_handlers[number], number, frame))


def _replace_handlers() -> None:
    for number, user in zip(_SIGNALS, map(_handler_of, _SIGNALS), strict=True):  # at several hooks of each step
        if type(user) is not int and callable(user) and user is not _defer:
            _user_handlers[number] = user
            _set_handler(number, _defer)


def _restore_handlers() -> None:
    """Install the user's handlers again, all of them even if a signal arrives now and its handler raises."""
    try:
        while _user_handlers:
            number, user = next(iter(_user_handlers.items()))
            # Another handler may have been installed meanwhile (by a DataLoader, for CHLD): it stays.
            if _handler_of(number) is _defer:
                _set_handler(number, user)
            del _user_handlers[number]
    finally:
        if _user_handlers:
            _restore_handlers()


def _handle_pending() -> None:
    """Run all queued handlers in order. If several raise, the last error is raised, with the others as its context."""
    while _pending:
        user, number, frame = _pending.pop(0)
        try:
            user(number, frame)
        finally:
            _handle_pending()


def _reset_in_child() -> None:
    """Give a forked child the user's handlers, and none of the signals that its parent queued."""
    global _is_deferring, _main_thread
    _is_deferring = False
    _main_thread = threading.get_ident()
    _pending.clear()
    _restore_handlers()


os.register_at_fork(after_in_child=_reset_in_child)
