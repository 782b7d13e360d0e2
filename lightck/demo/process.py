"""One training in a child process: starts the child, reads its reports, and kills it together with the workers of its
loader.

The child is reaped after its process group, which contains the workers, was killed. The order matters: until the child
is reaped, no other process can get the number of the group.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

POLL_SECONDS = 0.02  # the longest time until the death of the child is detected; a message is read at once
PIPE_CHUNK_BYTES = 1 << 16  # the most bytes in one read from the pipe

HERE = Path(__file__).resolve().parent
PACKAGE_ROOT = HERE.parents[1]  # the folder that contains the package lightck


class Child:
    """A process that runs ``child.py``. At the end of its ``with`` block the process and its workers are killed."""

    def __init__(self, arguments: Sequence[str], log: IO[bytes], kill_setting: str | None = None) -> None:
        """Start the process. ``arguments``: those of ``train_gpt.py``; ``log``: the file for the output of the process;
        ``kill_setting``: the value of LIGHTCK_KILL."""
        environment = {name: value for name, value in os.environ.items() if name != "LIGHTCK_KILL"}
        if kill_setting:
            environment["LIGHTCK_KILL"] = kill_setting
        self._pipe, write = os.pipe()
        try:
            self._process = subprocess.Popen(
                self._command(write, arguments),
                pass_fds=(write,),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # so that Ctrl-C reaches only the parent, which then kills the child
            )
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(write)
        self._partial = b""
        """The beginning of a line whose end was not read yet."""
        self._lines: deque[bytes] = deque()
        """Whole lines that ``read`` has not returned yet."""

    @staticmethod
    def _command(write: int, arguments: Sequence[str]) -> list[str]:
        child = str(HERE / "child.py")
        return [sys.executable, child, str(write), str(os.getpid()), str(PACKAGE_ROOT), *arguments]

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the group has the pid of the child, which is not reaped yet
        self._process.wait()
        os.close(self._pipe)

    def kill(self) -> None:
        """Send SIGKILL to the training process only. The workers of its loader keep running, as after a crash."""
        os.kill(self._process.pid, signal.SIGKILL)

    def read(self, deadline: float) -> dict[str, Any] | None:
        """Return the next message; None if the child is dead and all its messages were read. Raises ``TimeoutError`` at
        ``deadline``, a value of ``time.monotonic()``.

        If the kill cut off the last line, this line is dropped, and the update in it counts as not reported.
        """
        while not self._lines:
            # ``_is_dead`` is called before the pipe is read: if the child is dead now, the pipe holds all its output.
            is_dead = self._is_dead()
            left = 0.0 if is_dead else max(0.0, min(POLL_SECONDS, deadline - time.monotonic()))
            if select.select([self._pipe], [], [], left)[0]:
                chunk = os.read(self._pipe, PIPE_CHUNK_BYTES)
                if not chunk and is_dead:
                    return None
                self._feed(chunk)
            elif is_dead:
                return None
            elif time.monotonic() >= deadline:
                raise TimeoutError
        message: dict[str, Any] = json.loads(self._lines.popleft())
        return message

    def _feed(self, chunk: bytes) -> None:
        if not chunk:  # the write end is closed, and the process is about to end
            time.sleep(POLL_SECONDS)
        *whole, self._partial = (self._partial + chunk).split(b"\n")
        self._lines.extend(whole)

    def _is_dead(self) -> bool:
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def status(self) -> int:
        """Wait for the end of the child, and return its exit status, or minus the number of the signal that killed it.
        Does not reap the child."""
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
