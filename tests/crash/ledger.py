"""Checks what a pool has to hold after each death of the training of ``known``.

The promise, judged by what the victims reported: never older than what was acknowledged, nor than the last finished
update less interval x (slots - 1); never a step that was not begun; every byte that of its step; a held checkpoint is
there; recovery writes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

import lightck
from crash import known
from crash.known import Plan
from crash.victims import Story
from lightck.errors import CorruptPoolError, LightckError, NoCheckpointError, PoolNotFoundError


class BrokenError(Exception):
    """A promise was broken; the message says which."""


@dataclass(slots=True)
class Ledger:
    """One pool. ``note`` each story, then ``judge``."""

    plan: Plan
    path: str
    least: int = 0
    """The oldest step that recovery may return; 0: recovery may find none."""
    most: int = 0
    """The newest step that recovery can return."""
    held: set[int] = field(default_factory=set)
    """Pinned by the process that died last."""
    is_lost: bool = False
    """The only checkpoint was damaged: a typed error is right."""

    def note(self, story: Story, slots: int) -> None:
        """Raises ``BrokenError`` if its reports already break the promise."""
        for trace in story.of("error"):
            raise BrokenError(f"an error in the training: {trace}")
        started = story.of("attached")
        if started and not self.least <= started[0] <= self.most:
            raise BrokenError(f"it attached at step {started[0]}, and {self.least} to {self.most} were possible")
        finished = max(story.of("finished"), default=0)
        loses = self.plan.interval * (slots - 1)
        self.least = max([self.least, *story.of("committed"), *story.of("closed"), *started, finished - loses])
        self.most = max([self.most, *story.of("begins")])
        self.held = set(story.of("holds")) - set(story.of("lets go")) if not story.of("closed") else set()

    def judge(self, *, closely: bool = False) -> int:
        """The step that recovery gives; 0: none, and there need not be any. ``closely``: compare all bytes of the file
        before and after. Raises ``BrokenError``."""
        before = _state_of(self.path, closely)
        found = self._recovered(None)
        for step in sorted(self.held):
            if self._recovered(step) != step:
                raise BrokenError(f"step {step} was held and is gone")
        if _state_of(self.path, closely) != before:
            raise BrokenError("the recovery wrote to the pool's file")
        self.least = self.most = found
        return found

    def _recovered(self, step: int | None) -> int:
        try:
            checkpoint = lightck.recover(self.path, step=step)
        except (NoCheckpointError, PoolNotFoundError) as err:
            if self.least == 0:
                return 0
            raise BrokenError(f"step {self.least} has to be there: {type(err).__name__}: {err}") from err
        except LightckError as err:
            if self.is_lost and isinstance(err, CorruptPoolError):
                return 0
            raise BrokenError(f"recovery failed: {type(err).__name__}: {err}") from err
        if step is None and not self.least <= checkpoint.step <= self.most:
            passed_over = "; ".join(map(str, checkpoint.rejected)) or "nothing was skipped"
            raise BrokenError(
                f"step {checkpoint.step} was recovered, {self.least} to {self.most} were possible ({passed_over})"
            )
        wrong = known.difference(self.plan, checkpoint.step, checkpoint.model, checkpoint.optimizer)
        if wrong is not None:
            raise BrokenError(f"invented bytes: {wrong}")
        return int(checkpoint.step)


def _state_of(path: str, closely: bool) -> tuple[object, ...]:
    """Changes with any write to the file."""
    try:
        st = os.stat(path)
    except FileNotFoundError:
        return ()
    return (st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns, _digest(path) if closely else b"")


def _digest(path: str) -> bytes:
    state = blake2b(digest_size=16)
    with open(path, "rb") as f:
        _chunks(f.read, state.update)
    return state.digest()


def _chunks(read: Callable[[int], bytes], take: Callable[[bytes], None]) -> None:
    while chunk := read(1 << 20):
        take(chunk)
