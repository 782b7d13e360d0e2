"""An object in a forked process of its own, whose methods are called from here one at a time.

So trainings can take turns although each has a heap of its own, whose size can be measured. Fork before torch starts
threads in this process, since they do not exist in the child. The kernel kills the child when its parent dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from lightck.errors import BenchError

PR_SET_PDEATHSIG = 1
_END_SECONDS_MAX = 20.0


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("The parent process of this row has ended. Start the bench again.")  # before prctl


class Elsewhere:
    """A context manager. ``make`` makes the object, in the process."""

    def __init__(self, name: str, make: Callable[[], object]) -> None:
        context = get_context("fork")
        self._name = name
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, os.getpid()), name=name)
        self._process.start()
        theirs.close()

    def call(self, method: str, *args: Any) -> Any:
        """Return what the method returns there. Raises ``BenchError`` with the error of the method."""
        try:
            self._connection.send((method, args))
            error, found = self._connection.recv()
        except (EOFError, OSError) as err:
            self._process.join(_END_SECONDS_MAX)
            raise BenchError(
                f"The process of {self._name} ended with status {self._process.exitcode} while it ran {method!r}. If "
                "it was killed by signal 9, memory may have run out."
            ) from err
        if error:
            raise BenchError(f"{self._name} failed in {method!r}: {error}")
        return found

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):  # its process has ended
            self._connection.send(None)
        self._connection.close()
        self._process.join(_END_SECONDS_MAX)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(connection: Connection, make: Callable[[], object], parent: int) -> None:
    die_with(parent)
    made: object = None
    while (asked := connection.recv()) is not None:
        method, args = asked
        try:
            made = make() if made is None else made
            answer = "", getattr(made, method)(*args)
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}", None
        connection.send(answer)
