"""The sessions of this process: which models have an open one, and their end when the process exits."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator
from typing import Protocol

from torch import nn

from lightck.errors import SessionError
from lightck.events import SessionLock


class OpenSession(Protocol):
    """The part of :class:`lightck.Session` that code other than its owner may use."""

    @property
    def path(self) -> str:
        """The path of its pool."""
        ...

    def abandon(self) -> None:
        """Commit the closed checkpoints, drop the open one, and release the pool."""
        ...


class FollowedTraining(Protocol):
    """What this registry needs of a session (``session/steps.py``)."""

    session: OpenSession

    @property
    def model(self) -> nn.Module | None: ...

    @property
    def session_lock(self) -> SessionLock: ...

    def follows_optimizer(self, optimizer: object) -> bool: ...


existing: weakref.WeakSet[FollowedTraining] = weakref.WeakSet()
"""The ``Steps`` of every session that is alive, open or closed. It is added once the session's hooks are installed."""


def _open() -> Iterator[tuple[nn.Module, FollowedTraining]]:
    for one in list(existing):
        model = one.model if one.session_lock.is_open else None
        if model is not None:
            yield model, one


def has_open_session(model: nn.Module, *, shared_parts: bool = False) -> bool:
    """Whether an open session saves this module, one of its submodules, or a module that contains it.

    ``shared_parts``: also when an open session's model shares any submodule, parameter or buffer with this model."""
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
    """Raise ``SessionError`` if an open session saves this module, one of its submodules, or a module around it."""
    mine = {module: name for name, module in model.named_modules()}
    for other, one in _open():
        theirs = {module: name for name, module in other.named_modules()}
        if other is model:
            what = "This model has"
        elif other in mine:
            what = f"A part of this model ({mine[other]}, a {type(other).__name__}) has"
        elif model in theirs:
            what = f"This module is a part ({theirs[model]}) of another model, a {type(other).__name__}, which has"
        else:
            continue
        raise SessionError(
            f"{what} an open session already, on {one.session.path!r}. A parameter is saved by one session. Close "
            "that one first: session.close(). Where no variable refers to it any more: "
            "for session in lightck.sessions.open_sessions(): session.abandon()."
        )


def is_followed(optimizer: object) -> bool:
    """Whether an open session follows this optimizer."""
    return any(one.follows_optimizer(optimizer) for _, one in _open())


def open_sessions() -> list[OpenSession]:
    """The open sessions of this process, sorted by path; also those that only a traceback refers to.

    Each is a :class:`lightck.Session`. ``session.path`` is its pool; ``session.abandon()`` ends it as an exception
    would: the closed checkpoints are committed, and the open one is dropped."""
    found = [one.session for one in list(existing) if one.session_lock.is_live]
    return sorted(found, key=lambda session: session.path)


@atexit.register
def _at_exit() -> None:
    for one in list(existing):
        one.session.abandon()
