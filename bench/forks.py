"""Forks of a process that has imported torch, so that a new child takes milliseconds.

The parent uses one thread, since a fork copies only the calling one. Each child gets a process group, and a kill hits
the whole group: a saver's own processes die with the training, as when a job or a container is killed.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

HEADROOM = 8 << 30
"""Address space that a child may add, so that a huge length from a flipped bit fails with an error."""


def fork(work: Callable[[], object]) -> int:
    """Fork a child that runs ``work`` and exits with 0, or with 1 if it raised; its output is discarded."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        warnings.simplefilter("ignore")
        work()
        code = 0
    finally:
        os._exit(code)
    return 0


def kill(pid: int) -> None:
    """Kill the child and every process that it started; return when they are gone."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # before its setsid
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:  # its own children are reaped by init
        try:
            os.killpg(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.001)


def results(work: Callable[[int], Any], numbers: list[int], seconds: float) -> Iterator[tuple[int, Any]]:
    """``work(n)`` (JSON) for each number, computed in a child that is replaced when it dies or hangs over ``seconds``.

    The result for a number at which the child died is ``{"died": reason}``.
    """
    left = list(numbers)
    while left:
        for number, result in _run(work, list(left), seconds):
            yield number, result
            left.remove(number)


def _run(work: Callable[[int], Any], numbers: list[int], seconds: float) -> Iterator[tuple[int, Any]]:
    reading, writing = os.pipe()

    def child() -> None:
        os.close(reading)
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + HEADROOM, now + HEADROOM))
        for number in numbers:
            os.write(writing, (json.dumps([number, work(number)]) + "\n").encode())

    pid = fork(child)
    os.close(writing)
    done, buffer, death = 0, b"", ""
    try:
        while done < len(numbers):
            if not select.select([reading], [], [], seconds)[0]:
                death = f"hung for {seconds} s"
                break
            chunk = os.read(reading, 1 << 16)
            if not chunk:
                death = "died"
                break
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                done += 1
                yield tuple(json.loads(line))
    finally:
        os.close(reading)
        kill(pid)
    if death:
        yield numbers[done], {"died": death}
