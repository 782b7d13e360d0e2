"""A forked process that is killed, and the messages that it sent before it died.

The process that forks has imported torch and lightck and runs no thread, so a victim costs milliseconds and its death
by SIGKILL is a real one. Its messages in the pipe say what it had finished: each is written before the next action
begins. This module is independent of pools.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import select
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeAlias

import torch

from lightck._native import check, lib
from lightck.session.slowdown import slowdown

Tell: TypeAlias = Callable[[str, Any], None]
"""Called in the victim: a word, and a value that JSON can hold."""
Work: TypeAlias = Callable[[Tell], None]

CHECKPOINT_SITES = ("header", "block", "manifest", "sealed", "body", "word", "ack")
"""The kill sites of the native library, in the order in which a checkpoint passes them."""
HANG_SECONDS = 120.0
"""The longest wait for a message; a longer silence counts as a hang, which is a finding."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Kill:
    """How a victim dies: ``delay`` seconds after the ``nth`` message ``after`` (empty: after its fork); or,
    where ``site`` names a kill point, by itself at the ``nth`` passing of it."""

    after: str = ""
    nth: int = 1
    delay: float = 0.0
    site: str = ""

    def __str__(self) -> str:
        if self.site:
            return f"at {self.site}:{self.nth}"
        return f"{self.delay * 1e3:.2f} ms after {self.after or 'its fork'} x{self.nth}"


@dataclass(slots=True)
class Story:
    """The messages of one victim, in order, and its end."""

    reported: list[tuple[str, Any]] = field(default_factory=list)
    status: int = 0
    """Exit status; minus the signal where one ended it."""

    @property
    def was_killed(self) -> bool:
        return self.status == -signal.SIGKILL

    @property
    def last(self) -> str:
        """The word of its last message."""
        return self.reported[-1][0] if self.reported else "its fork"

    def of(self, word: str) -> list[Any]:
        """The values of all messages with this word."""
        return [value for said, value in self.reported if said == word]

    def __str__(self) -> str:
        return f"status {self.status} after {self.reported[-6:]}"


class Victim:
    """A process that runs ``work``. Its pid is its own until ``end``."""

    def __init__(self, work: Work, kill: Kill | None = None) -> None:
        self.story = Story()
        self._is_reaped = False
        self._partial = b""
        self._waiting: deque[tuple[str, Any]] = deque()
        self._kill = kill
        self._pipe, write = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._pipe)
            _be_victim(work, write, kill)
        os.close(write)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        _hasten(self.pid)

    def hear(self, word: str, nth: int = 1) -> Any:
        """Wait for the nth message with this word; None where it ends before."""
        for said, value in self.messages():
            nth -= said == word
            if not nth:
                return value
        return None

    def wait(self) -> None:
        """Wait for its death, whoever still holds its pipe."""
        if not self._is_reaped:
            self.story.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self._is_reaped = True

    def messages(self) -> Iterator[tuple[str, Any]]:
        """Its messages, until it and its own children are dead. A message that the kill cut off is dropped."""
        while self._waiting or self._read():
            while self._waiting:
                message = self._waiting.popleft()
                self.story.reported.append(message)
                yield message

    def _read(self) -> bool:
        deadline = time.monotonic() + HANG_SECONDS
        while not select.select([self._pipe], [], [], 0.05)[0]:
            if _is_dying(self.pid):
                _hasten(self.pid)
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"the process said nothing for {HANG_SECONDS:.0f} s: {self.story}")
        chunk = os.read(self._pipe, 1 << 16)
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        self._waiting.extend(tuple(json.loads(line)) for line in lines)
        return bool(chunk)

    def end(self) -> Story:
        """Its whole story; kills it when its time has come."""
        kill, seen = self._kill, 0
        if kill is not None and not kill.site and not kill.after:
            time.sleep(kill.delay)
            self.kill()
        for word, _ in self.messages():
            seen += kill is not None and word == kill.after
            if kill is not None and not kill.site and word == kill.after and seen == kill.nth:
                time.sleep(kill.delay)
                self.kill()
        os.close(self._pipe)
        self.wait()
        return self.story


def story(work: Work, kill: Kill | None = None) -> Story:
    """Run ``work`` in a process of its own until ``kill`` or its end."""
    return Victim(work, kill).end()


def be_ready(backend: str) -> None:
    """To be called before the first fork: what a victim needs is imported, the heap is quick to search, one thread."""
    torch.set_num_threads(1)
    if backend == "pmdk":
        os.environ.setdefault("PMEM_IS_PMEM_FORCE", "1")  # libpmemobj flushes on tmpfs as on persistent memory
    for name in ("restore.recover", "session.attach"):
        import_module(f"lightck.{name}")
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.AdamW([weight]).step()
    slowdown()  # else each victim's first attach takes 50 ms for it, and the kills at an instant of attach fall there
    gc.collect()
    gc.freeze()


def _is_dying(pid: int) -> bool:
    """Whether its first thread is gone and others are not."""
    with suppress(OSError), open(f"/proc/{pid}/stat") as f:
        return f.read().rpartition(")")[2].split()[0] == "Z"
    return False


def _hasten(pid: int) -> None:
    """Threads that copy have idle priority: on a busy machine one that is killed takes seconds to be gone."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))


def _be_victim(work: Work, pipe: int, kill: Kill | None) -> None:
    global _tell
    status = 1
    _tell = tell = _teller(pipe)
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # attach would thaw, collect and search half a million objects that the imports left: nothing is among them.
        gc.get_freeze_count = lambda: 0
        logger = logging.getLogger("lightck")
        logger.handlers[:], logger.propagate = [_Telling(tell)], False
        if kill is not None and kill.site:
            check(lib.lck_kill(kill.site.encode(), kill.nth), "lck_kill")
        work(tell)
        status = 0
    except BaseException:
        tell("error", traceback.format_exc()[-3000:])
    finally:
        os._exit(status)


def telling() -> Tell:
    """The function with which a victim's work sends messages."""
    assert _tell is not None, "called in a victim"
    return _tell


_tell: Tell | None = None


def _teller(pipe: int) -> Tell:
    def tell(word: str, value: Any) -> None:
        os.write(pipe, json.dumps([word, value]).encode() + b"\n")

    return tell


class _Telling(logging.Handler):
    """Warnings of the library become messages."""

    def __init__(self, tell: Tell) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell("warning", record.getMessage())
