"""Start a drain, and talk to it.

The process inherits one end of a connection from the training, and no other descriptor. It has no terminal, and runs in
a session of its own. So it does not end with Ctrl-C, and does not keep a pipe of the training open.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref

from lightck.errors import TierError
from lightck.tiers.drain_messages import (
    ANNOUNCING_SIGNALS,
    DRAIN_MODULE,
    MESSAGE_NBYTES_MAX,
    DrainSettings,
    DrainState,
    receive_message,
    send_message,
)

_PROGRAM = f"from {DRAIN_MODULE} import main; main(0)"
_BEGIN_SECONDS_MAX = 2.0
_END_SECONDS = 2.0
"""How long a process that is done may take to end."""
_open_handles: weakref.WeakSet[DrainHandle] = weakref.WeakSet()
_running: list[subprocess.Popen[bytes]] = []
"""Processes that were let go, and that may run on."""


class DrainHandle:
    """A running drain, as the training sees it."""

    def __init__(self, settings: DrainSettings) -> None:
        """Start the process. Raises ``TierError`` if that is impossible."""
        self.state = DrainState(tiers=[])
        """The newest state that has arrived."""
        self._process: subprocess.Popen[bytes] | None = None
        _running[:] = [each for each in _running if each.poll() is None]
        if not sys.executable:
            raise _cannot_start("Python does not say where its program is (sys.executable)", None)
        try:
            self._connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as err:
            raise _cannot_start(err.strerror, err.errno) from err
        try:
            for each in (self._connection, other):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MESSAGE_NBYTES_MAX)
            self._process = _started(other.fileno())
        except OSError as err:
            self._connection.close()
            raise _cannot_start(err.strerror, err.errno) from err
        finally:
            other.close()
        _open_handles.add(self)
        send_message(self._connection, settings.packed(), wait=True)

    def send(self, message: dict[str, object]) -> bool:
        """Send a message, unless the process does not read."""
        return send_message(self._connection, message)

    def receive(self) -> bool:
        """Read the messages that have arrived. Returns False if the process has ended."""
        while (message := receive_message(self._connection)) != {}:
            if message is None:
                return False
            self.state = DrainState.unpacked(message)
        return True

    def wait(self, seconds: float) -> None:
        """Wait for a message, at most so long."""
        select.select([self._connection], [], [], seconds)

    def wait_until_ready(self) -> None:
        """Wait a moment until the process has begun, so that no checkpoint is missed because it has not."""
        until = time.monotonic() + _BEGIN_SECONDS_MAX
        while self.receive() and self.state.is_busy and time.monotonic() < until:
            self.wait(0.1)

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Whether the process has ended, after at most so many seconds."""
        assert self._process is not None, "started"
        until = time.monotonic() + seconds
        while self._process.poll() is None:
            if time.monotonic() >= until:
                return False
            time.sleep(0.01)
        return True

    @property
    def end_reason(self) -> str:
        """Why the process has ended."""
        code = None if self._process is None else self._process.returncode
        if self.state.fatal is not None:
            return self.state.fatal
        if code is not None and code < 0:
            return f"it was killed by signal {-code}"
        return f"exit status {code}"

    def let_go(self) -> None:
        """End the connection. The process sends the newest checkpoint, and ends by itself."""
        _open_handles.discard(self)
        self._connection.close()
        if self._process is not None and not self.has_ended(_END_SECONDS if self.state.is_done else 0.0):
            _running.append(self._process)

    def close_in_child(self) -> None:
        """Close the connection in a forked child, so that the drain sees when the training ends."""
        self._connection.close()


def _started(fd: int) -> subprocess.Popen[bytes]:
    """Start the process. The signals that announce the end of a job wait until it is ready to handle them: it begins
    with this thread's mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ANNOUNCING_SIGNALS)
    try:
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=fd,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={**os.environ, "PYTHONPATH": _import_path()},
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _import_path() -> str:
    """Return where the training imports from, for a process that begins in another folder."""
    return os.pathsep.join(os.path.abspath(each) for each in sys.path if each is not None)


def _cannot_start(reason: str | None, code: int | None) -> TierError:
    return TierError(
        f"The process that sends checkpoints to the tiers cannot be started: {reason}. Nothing was "
        "changed. Check the limits of this user (processes, open files, memory); or, in a single process, leave tiers= "
        "out, and run `lightck copy POOL TIER --every 5min` beside the training.",
        code,
    )


def _close_in_child() -> None:
    for each in list(_open_handles):
        each.close_in_child()
    _open_handles.clear()
    _forget_running()


def _forget_running() -> None:
    """Do not let Python warn of processes that run on: they are meant to."""
    for each in _running:
        each.returncode = each.returncode or 0
    _running.clear()


os.register_at_fork(after_in_child=_close_in_child)
atexit.register(_forget_running)
