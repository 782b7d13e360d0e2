"""The sessions of this process: which models have an open session. All sessions are ended when the process exits."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Protocol

from torch import nn

from lightck.errors import SessionError
from lightck.events import SessionLock


class OpenSession(Protocol):
    """The part of :class:`lightck.Session` that code other than its owner may use."""

    @property
    def path(self) -> str:
        """The path of the session's pool."""
        ...

    def abandon(self) -> None:
        """Commit the checkpoints that are closed, drop the state of the unfinished step, and close the pool."""
        ...


class FollowedTraining(Protocol):
    """A session's ``Steps`` (``session/steps.py``), as far as this module uses it."""

    session: OpenSession

    @property
    def model(self) -> nn.Module | None: ...

    @property
    def session_lock(self) -> SessionLock: ...

    def follows_optimizer(self, optimizer: object) -> bool: ...


followed_trainings: weakref.WeakSet[FollowedTraining] = weakref.WeakSet()
"""The ``Steps`` of every session object that exists, open or closed. A ``Steps`` is added after the session's hooks are
installed."""


def _open() -> Iterator[tuple[nn.Module, FollowedTraining]]:
    """Yield (model, ``Steps``) of each open session whose model still exists."""
    for training in list(followed_trainings):
        model = training.model if training.session_lock.is_open else None
        if model is not None:
            yield model, training


def has_open_session(model: nn.Module, *, shared_parts: bool = False) -> bool:
    """Whether an open session saves this module, one of its submodules, or a module that contains it.

    ``shared_parts``: also return True if the model of an open session shares a submodule, parameter or buffer with this
    module."""
    others = [other for other, _ in _open()]
    if not others:
        return False
    mine = set(model.modules())
    if shared_parts:
        tensors = set(map(id, (*model.parameters(), *model.buffers())))
        return any(
            not mine.isdisjoint(other.modules())
            or not tensors.isdisjoint(map(id, (*other.parameters(), *other.buffers())))
            for other in others
        )
    return any(other in mine or model in set(other.modules()) for other in others)


def refuse_open(model: nn.Module) -> None:
    """Raise ``SessionError`` if an open session saves this module, one of its submodules, or a module that contains
    it."""
    mine = {module: name for name, module in model.named_modules()}
    for other, training in _open():
        theirs = {module: name for name, module in other.named_modules()}
        if other is model:
            what = "This model has"
        elif other in mine:
            what = f"A part of this model ({mine[other]}, a {type(other).__name__}) has"
        elif model in theirs:
            what = f"This module is a part ({theirs[model]}) of another model, a {type(other).__name__}, which has"
        else:
            continue
        if not training.session_lock.is_live:
            raise SessionError(
                f"{what} a session of the parent process, on {training.session.path!r}, and this process was forked "
                "after attach(). Nothing was changed. Fork before attach(), or spawn this process and build the model "
                "in it; or attach to a copy of the model (copy.deepcopy)."
            )
        raise SessionError(
            f"{what} an open session already, on {training.session.path!r}. A parameter can be saved by one session "
            "only. Close the open session first: session.close(). If no variable refers to the open session any more: "
            "for session in lightck.sessions.open_sessions(): session.abandon()."
        )


def is_followed(optimizer: object) -> bool:
    """Whether an open session follows this optimizer."""
    return any(training.follows_optimizer(optimizer) for _, training in _open())


def open_sessions() -> list[OpenSession]:
    """Return the open sessions of this process, sorted by path. Sessions to which no variable of the script refers are
    included.

    Each item is a :class:`lightck.Session`. ``session.path`` is the path of its pool. ``session.abandon()`` ends the
    session as an exception would: checkpoints that are closed are committed, and the state of an unfinished step is
    dropped."""
    found = [training.session for training in list(followed_trainings) if training.session_lock.is_live]
    return sorted(found, key=lambda session: session.path)


@atexit.register
def _at_exit() -> None:
    with ExitStack() as stack:  # each session is ended, even if the end of another one raises
        for training in list(followed_trainings):
            stack.callback(training.session.abandon)
