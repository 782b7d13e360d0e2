"""Deferred signals: no signal handler runs in the middle of lightck's work.

Python runs a signal's handler on the main thread, between any two bytecode instructions. While lightck works on the
main thread, signals are queued, and their handlers run when the work is done. A long wait does not delay a handler: the
wait raises ``Interrupted`` at a place where no work is half done, the handler runs, and the wait is called again. So a
handler may raise (mostly ``KeyboardInterrupt``) or call ``session.flush()``. After the work the user's handlers are
installed again.
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
from typing import ParamSpec, TypeVar, cast

T = TypeVar("T")
P = ParamSpec("P")
_NAMES = ("HUP", "INT", "QUIT", "USR1", "USR2", "ALRM", "VTALRM", "TERM", "CHLD", "CONT", "TSTP", "XCPU", "PWR")
_SIGNALS = tuple(int(getattr(signal, f"SIG{name}")) for name in _NAMES if hasattr(signal, f"SIG{name}"))
"""Numbers of the signals that are deferred: signals that programs handle. (Torch handles CHLD: its handler raises when
a DataLoader worker has died.)"""
_signal_module = import_module("_signal")
_handler_of: Callable[[int], object] = _signal_module.getsignal
_set_handler: Callable[[int, Callable[..., object]], object] = _signal_module.signal
"""``_handler_of`` and ``_set_handler`` are the C functions that ``signal.getsignal`` and ``signal.signal`` call. They
are called directly, because the two Python functions convert to enums, which takes 0.1 ms per training step.
``_handler_of`` returns an int for a signal that has no Python handler."""
_handled: tuple[list[type], list[int]] = [], []
"""The types of all signals' handlers, as they were found last, and the positions in ``_SIGNALS`` of those that were
Python handlers. They are one value, because a handler may run between two stores. (The handlers themselves would be
kept alive.)"""
_user_handlers: dict[int, Callable[..., object]] = {}
"""Signal number -> the user's handler, for each signal for which ``_defer`` is installed now."""
_chained: dict[int, list[Callable[..., object]]] = {}
"""Signal number -> the user's handlers that were replaced by another handler during a deferral, newest last. The new
handler may keep ``_defer``, which it found installed, and call it as its predecessor (torch's handler of CHLD does)."""
_chain_depth: dict[int, int] = {}
"""Signal number -> how many of ``_chained`` are running now, each called by the one that came after it."""
_pending: list[tuple[Callable[..., object], int, FrameType | None]] = []
"""(the user's handler, signal number, frame) of each queued signal."""
_is_deferring = False
"""Whether signals are deferred now."""
_main_thread = threading.main_thread().ident
"""Identifier of the thread on which Python runs signal handlers."""


class Interrupted(BaseException):
    """A signal arrived during a wait. ``retry_interrupted`` catches it, so it never reaches the user."""


@contextmanager
def deferred() -> Iterator[None]:
    """Defer the handlers of signals to the end of this block. If a wait inside the block is called through
    ``retry_interrupted``, that call runs the handlers earlier."""
    is_outermost = begin_deferral()
    try:
        yield
    finally:
        if is_outermost:
            end_deferral()


def begin_deferral() -> bool:
    """Defer signals from now on, and return True. Then the caller must call ``end_deferral``. If signals are deferred
    already, or if this thread is not the main thread, do nothing and return False."""
    global _is_deferring
    if _is_deferring or threading.get_ident() != _main_thread:
        return False
    try:
        _replace_handlers()
        _is_deferring = True
    except BaseException:  # raised by a handler that ran before it was replaced
        end_deferral()
        raise
    return True


def end_deferral() -> None:
    """Install the user's handlers again, and run the handlers of the queued signals. Raises what a handler raises."""
    global _is_deferring
    _is_deferring = False
    _restore_handlers()
    if _pending:
        _handle_pending()


def raise_if_interrupted() -> None:
    """Raise ``Interrupted`` if a signal is queued and this is the main thread. Call it only where no work is half
    done."""
    if _pending and threading.get_ident() == _main_thread:
        raise Interrupted


def is_in_handler() -> bool:
    """Whether this call comes from a handler of one of ``_SIGNALS``: whether the handler's code is on the stack. A
    handler that is not a Python function, method, ``partial`` or object with a Python ``__call__`` is not
    recognised."""
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


def retry_interrupted(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return ``work(*args, **kwargs)``. Each time ``work`` raises ``Interrupted``, run the queued handlers and call
    ``work`` again. Raises what a handler raises."""
    while True:
        try:
            return work(*args, **kwargs)
        except Interrupted:
            _handle_during_deferral()


def _handle_during_deferral() -> None:
    """Run the queued handlers inside a ``deferred`` block, with the user's handlers installed. If a handler calls
    lightck, this call defers signals again."""
    global _is_deferring
    before, _is_deferring = _is_deferring, False
    _restore_handlers()
    try:
        _handle_pending()
    finally:
        _is_deferring = before
        _replace_handlers()


def _defer(number: int, frame: FrameType | None) -> None:
    """The handler that is installed while signals are deferred: queue the signal. If a handler that was set during
    a deferral calls this function later, call the user's handler."""
    user = _user_handlers.get(number)
    if user is None:
        handlers, depth = _chained.get(number, []), _chain_depth.get(number, 0)
        if depth < len(handlers):
            _chain_depth[number] = depth + 1
            try:
                handlers[-1 - depth](number, frame)
            finally:
                _chain_depth[number] = depth
    elif all(number != other for _, other, _ in _pending):  # each number once, because the system queues it once
        _pending.append((user, number, frame))


def _replace_handlers() -> None:
    global _handled
    # ``map`` over C functions takes less time than a loop over all signals. This runs several times in each step.
    handlers = list(map(_handler_of, _SIGNALS))
    kinds = list(map(type, handlers))
    known, positions = _handled
    if kinds != known:
        positions = [at for at, kind in enumerate(kinds) if kind is not int and callable(handlers[at])]
        _handled = kinds, positions
    for at in positions:
        number, user = _SIGNALS[at], cast("Callable[..., object]", handlers[at])
        if user is not _defer:
            _user_handlers[number] = user
            _set_handler(number, _defer)
        elif number not in _user_handlers and _chained.get(number):
            # A handler that found ``_defer`` installed has installed it again, outside of a deferral.
            _user_handlers[number] = _chained[number].pop()


def _restore_handlers() -> None:
    """Install the user's handlers again. All of them are installed even if a signal arrives meanwhile and its handler
    raises."""
    try:
        while _user_handlers:
            number, user = next(iter(_user_handlers.items()))
            # A DataLoader may have installed another handler (for CHLD) meanwhile: the new handler stays installed.
            if _handler_of(number) is _defer:
                _set_handler(number, user)
            else:
                _chained.setdefault(number, []).append(user)
            del _user_handlers[number]
    finally:
        if _user_handlers:
            _restore_handlers()


def _handle_pending() -> None:
    """Run the handlers of all queued signals, oldest first. If several of them raise, the last error is raised, with
    the earlier errors as its context."""
    while _pending:
        user, number, frame = _pending.pop(0)
        try:
            user(number, frame)
        finally:
            _handle_pending()


def _reset_in_child() -> None:
    """Install the user's handlers in a forked child, and drop the signals that the parent process had queued."""
    global _is_deferring, _main_thread
    _is_deferring = False
    _main_thread = threading.get_ident()
    _pending.clear()
    _restore_handlers()


os.register_at_fork(after_in_child=_reset_in_child)
