"""A program in a forked process of this one, which has torch already. It is used as ``subprocess.Popen`` is, but is
killed at the end of its block."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence


class ForkedProgram:
    """Runs the text of a program, with these arguments (``sys.argv[1:]``). It ends without destructors."""

    def __init__(self, program: str, arguments: Sequence[str]) -> None:
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(out_write, 1)
            os.dup2(err_write, 2)
            for fd in (out_read, out_write, err_read, err_write):
                os.close(fd)
            _run(program, arguments)
        os.close(out_write)
        os.close(err_write)
        self.stdout, self.stderr = os.fdopen(out_read), os.fdopen(err_read)

    def __enter__(self) -> ForkedProgram:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()
        self.stdout.close()
        self.stderr.close()

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = 120.0) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked program", timeout)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 120.0) -> tuple[str, str]:
        """Wait for the end. Returns what the process has written to stdout and to stderr, as far as it was not read."""
        read: dict[int, str] = {}

        def read_all(number: int) -> None:
            source = (self.stdout, self.stderr)[number]
            read[number] = "" if source.closed else source.read()
            source.close()

        threads = [threading.Thread(target=read_all, args=(n,), daemon=True) for n in (0, 1)]
        for each in threads:
            each.start()
        self.wait(timeout)
        for each in threads:
            each.join(timeout)
        return read[0], read[1]


def _run(program: str, arguments: Sequence[str]) -> None:
    status = 1
    try:
        # Pytest has replaced these objects, and the numbers 1 and 2 are the pipes now.
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        logging.getLogger().handlers.clear()
        sys.argv = ["-c", *arguments]
        exec(compile(program, "<forked program>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
