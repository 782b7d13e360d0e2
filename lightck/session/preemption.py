"""``lightck.preemption``: after a signal the loop ends after the present step, with its checkpoint in pool and tiers.

    handler        Python runs it on the main thread; while lightck works there, it waits (``interrupts.py``). It notes
                   the signal and the deadline, and wakes the watcher
    the step       goes on, ends as always, and is saved, whatever ``interval`` says
    should_stop    read by the loop. Between two steps it commits the present one, lets the drain send it, waits for
                   both until the deadline, and is True from then on. In the middle of a step it is False
    session.close  commits what is not committed yet, and waits for the tiers until the deadline only
    watcher        a thread. At half the grace, if no step has ended, the drain is asked for the newest checkpoint. At
                   the deadline it names what is missing

Everything except the handler is in ``stop_request.py``.

Invariants: the signal changes no bit of a step. Where ``should_stop`` is True, the newest checkpoint is the state from
which the next step starts.

Failure cases:

    should_stop is never read       steps are saved and sent as always, the first one after the signal at once; a
                                    warning says what to write
    the deadline passes             a warning names the step that has not ended, or which place lacks which step. What
                                    runs goes on. A further signal acts as before the call
    further signals before that     lightck does nothing, because batch systems and launchers send a signal more than
                                    once. A handler that was there is called each time
    before the call, after close    a signal acts as without lightck
    a handler that was there        is called too, after this one. Python's own for Ctrl-C is not: it would raise in the
                                    middle of the step
    a handler outside Python        (``faulthandler.register``, MPI) refused with an error that names the signal,
                                    because lightck's handler would silently replace it
    a forked child                  SIGTERM and Ctrl-C act as before the call, so that ``terminate()`` works. Other
                                    signals are ignored if their action was the default: a signal that is sent to all
                                    processes of a job must not end the workers of a DataLoader
    a group of ranks                a signal on one of them counts for all: they agree at which reading of
                                    ``should_stop`` it turns True (``ranks/agreed_end.py``). ``interval`` stays as it
                                    is until then, so that all save the same steps
    ranks without a group           refused: ranks that stop after different steps hang
"""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import torch

from lightck.errors import SessionError, UnsupportedError
from lightck.session.session import Session
from lightck.session.stop_request import StopRequest
from lightck.tiers.drain_messages import ANNOUNCING_SIGNALS
from lightck.tiers.rates import seconds_of

_STATUS = Path("/proc/self/status")
_ENDS_CHILDREN = (signal.SIGTERM, signal.SIGINT)
"""Signals that end a forked child as before the call."""


class _Handler:
    """The handler of one signal. If the signal comes while lightck works on the main thread, ``interrupts.py`` keeps it
    back, and calls this handler when the work is done, or waits."""

    def __init__(self, number: int) -> None:
        self.number, self.before = number, signal.getsignal(number)
        self.requests: list[StopRequest] = []
        signal.signal(number, self)

    @property
    def is_installed(self) -> bool:
        """Whether nothing else was installed since then."""
        return signal.getsignal(self.number) is self

    def __call__(self, number: int, frame: FrameType | None) -> None:
        is_taken = False
        for request in tuple(self.requests):
            is_taken |= request.take(number)
        if callable(self.before) and not (is_taken and self.before is signal.default_int_handler):
            self.before(number, frame)
        elif not is_taken and self.before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def leave(self, ignores: bool = False) -> None:
        """Install what was there before, unless something else was installed since then. ``ignores``: ignore the signal
        if its action was the default."""
        if self.is_installed:
            is_ignored = ignores and self.before == signal.SIG_DFL
            signal.signal(self.number, signal.SIG_IGN if is_ignored else self.before)


_handlers: list[_Handler] = []


class Preemption:
    """What :func:`lightck.preemption` returns: whether a signal has come, and how much time is left.

    The earlier handlers are installed again by ``close``, by the end of the session, and by the end of its block if it
    is used as a context manager.
    """

    def __init__(self, request: StopRequest, numbers: tuple[int, ...]) -> None:
        """Called by ``preemption`` only."""
        self._request, self._numbers = request, numbers

    @property
    def requested(self) -> bool:
        """Whether a signal has come. It is there to cut short what need not be done, as a long evaluation;
        ``session.should_stop`` says when the loop may end."""
        return self._request.deadline is not None

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that came first, or None."""
        return self._request.signal

    @property
    def deadline(self) -> float | None:
        """When the grace is over, in seconds of ``time.monotonic()``; None if no signal has come."""
        return self._request.deadline

    def close(self) -> None:
        """Install the earlier handlers again. ``session.should_stop`` is False then. A second call does nothing."""
        self._request.close()

    def __enter__(self) -> Preemption:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        names = ", ".join(signal.Signals(number).name for number in self._numbers)
        return f"<lightck.Preemption by {names}: {self._request.name} has come>"


def preemption(
    session: Session,
    signals: Iterable[int] = (signal.SIGTERM, signal.SIGUSR1),
    grace: str | float = "90s",
) -> Preemption:
    """Let a signal end the training after the present step: ``if session.should_stop: break`` in the loop.

    After one of the signals the present step goes on to its end. ``session.should_stop``, read between two steps,
    commits it, waits until every tier has it, and is True then. Call this on the main thread, after ``attach``.

    In a group of ranks all ranks call it, and read ``should_stop`` at the same points of their loops. A signal on one
    rank counts for all, and ``should_stop`` turns True on all after the same step.

    Args:
        session: what ``attach`` returned.
        signals: the signals with which the system announces the end: SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1,
            SIGUSR2, SIGXCPU or SIGPWR.
        grace: how long the step, its commit and its sending may take, counted from the signal: ``"90s"``, ``"5min"``,
            or seconds. Choose some seconds less than the system leaves.

    Raises:
        SessionError: the session is closed, or has a preemption already.
        UnsupportedError: this is not the main thread, something outside Python handles one of the signals, or this
            process is one of several ranks, and they were not attached together.
        ValueError, TypeError: a signal that cannot announce an end; a grace that is no time.
    """
    if not isinstance(session, Session):
        raise TypeError(f"session is a {type(session).__name__}. Pass what lightck.attach returned.")
    numbers, seconds = _checked_signals(signals), _checked_grace(grace)
    session._check_usable()
    if session._steps.stop_request is not None:
        raise SessionError("This session has a preemption already. Close that one first: preemption.close().")
    _refuse_ranks(session)
    _refuse_thread_and_others(numbers)
    membership = session._membership
    agree = None if membership is None or membership.world_size == 1 else membership.agree_on_end
    request = StopRequest(session._steps, seconds, ended=_remove, agree=agree)
    for number in numbers:
        _add(number, request)
    tiers = session._steps.commits.participants.tiers
    if tiers is not None:
        tiers.expect_signals(seconds)
    return Preemption(request, numbers)


# -- arguments


def _checked_signals(signals: object) -> tuple[int, ...]:
    if isinstance(signals, (str, bytes)) or not isinstance(signals, Iterable):
        raise TypeError(f"signals={signals!r}: pass a tuple of signals, as (signal.SIGTERM, signal.SIGUSR1).")
    found = tuple(dict.fromkeys(signals))
    if not found:
        raise ValueError("signals is empty. Pass at least one signal, as (signal.SIGTERM,).")
    for each in found:
        if isinstance(each, bool) or not isinstance(each, int):
            raise TypeError(f"signals has {each!r}, which is no signal. Pass signal.SIGTERM, for example.")
        if each not in ANNOUNCING_SIGNALS:
            names = ", ".join(signal.Signals(number).name for number in ANNOUNCING_SIGNALS)
            raise ValueError(
                f"signals has {each!r}, which cannot announce the end of a training. Pass some of {names}."
            )
    return tuple(map(int, found))


def _checked_grace(grace: object) -> float:
    if isinstance(grace, str):
        seconds = seconds_of(grace)
    elif isinstance(grace, bool) or not isinstance(grace, (int, float)):
        raise TypeError(f'grace={grace!r} is a {type(grace).__name__}. Pass a time as "90s" or "5min", or seconds.')
    else:
        seconds = float(grace) if 0 < grace < math.inf else None
    if seconds is None:
        raise ValueError(f'grace={grace!r} is no time. Pass one as "90s" or "5min", or a number of seconds above 0.')
    return seconds


def _refuse_ranks(session: Session) -> None:
    dist = torch.distributed
    n_ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if session.world < n_ranks:
        raise UnsupportedError(
            f"This is one of {n_ranks} ranks, and {session.world} of them were attached together: ranks outside of the "
            "group would not learn of the signal, and if they stop after another step, some wait for ever. Attach all "
            "ranks together. Or set a flag in your own handler, sum the flags of all ranks with all_reduce at the end "
            "of each step, and leave the loop on all ranks if the sum is not 0."
        )


def _refuse_thread_and_others(numbers: Iterable[int]) -> None:
    if threading.current_thread() is not threading.main_thread():
        raise UnsupportedError(
            "lightck.preemption was called on another thread than the main one, and Python installs and runs handlers "
            "of signals on the main thread only. Call it there, between attach and the start of the thread with the "
            "loop; the loop itself may run on any thread."
        )
    for number in numbers:
        if _is_handled_outside_python(number):
            raise UnsupportedError(
                f"{signal.Signals(number).name} is handled by something outside Python, as faulthandler.register or a "
                "library in C, which would be replaced unseen. Leave this signal out of signals=, and let the system "
                "send another one; or undo the other handler first (faulthandler.unregister)."
            )


def _is_handled_outside_python(number: int) -> bool:
    known = signal.getsignal(number)
    if known is None:
        return True
    if callable(known):
        return False
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


# -- which handler serves whom


def _add(number: int, request: StopRequest) -> None:
    handler = next((each for each in _handlers if each.number == number and each.is_installed), None)
    if handler is None:
        handler = _Handler(number)
        _handlers.append(handler)
    handler.requests.append(request)


def _remove(request: StopRequest) -> None:
    """Serve a request no more, and install the earlier handlers again. (On another thread than the main one, or
    if another handler was installed since then, lightck's handler stays: it then does what the earlier one did.)"""
    is_main = threading.current_thread() is threading.main_thread()
    for handler in list(_handlers):
        if request in handler.requests:
            handler.requests.remove(request)
        if not handler.requests and is_main and handler.is_installed:
            handler.leave()
            _handlers.remove(handler)


def _leave_in_child() -> None:
    """Install other handlers in a forked child, which has no session."""
    for handler in reversed(_handlers):
        handler.requests.clear()
        handler.leave(ignores=handler.number not in _ENDS_CHILDREN)
    _handlers.clear()


os.register_at_fork(after_in_child=_leave_in_child)
