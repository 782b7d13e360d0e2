"""Which models have an open session in this process, and what happens to it when the process ends."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator
from typing import Protocol

from torch import nn

from lightck.errors import SessionError
from lightck.events import Turn


class OpenSession(Protocol):
    """What anybody may do with a session that he did not make: a :class:`lightck.Session`."""

    @property
    def path(self) -> str:
        """Its pool."""
        ...

    def abandon(self) -> None:
        """End it as an exception does, without its open version."""
        ...


class Followed(Protocol):
    """A training that is followed: a session without what its user sees of it."""

    session: OpenSession

    @property
    def model(self) -> nn.Module | None: ...

    @property
    def turn(self) -> Turn: ...

    def follows_optimizer(self, optimizer: object) -> bool: ...


living: weakref.WeakSet[Followed] = weakref.WeakSet()
"""Every session that still exists, from the moment at which its hooks are in; open or closed."""


def _open() -> Iterator[tuple[nn.Module, Followed]]:
    for one in list(living):
        model = one.model if one.turn.is_open else None
        if model is not None:
            yield model, one


def has_open_session(model: nn.Module, *, parts_of_it: bool = False) -> bool:
    """Whether an open session saves this module, a part of it, or a module that it is a part of. ``parts_of_it``: or
    any module or parameter that is also one of this model."""
    others = [other for other, _ in _open()]
    if not others:
        return False
    mine = set(model.modules())
    if parts_of_it:
        tensors = set(map(id, (*model.parameters(), *model.buffers())))
        return any(
            not mine.isdisjoint(other.modules())
            or not tensors.isdisjoint(map(id, (*other.parameters(), *other.buffers())))
            for other in others
        )
    return any(other in mine or model in set(other.modules()) for other in others)


def refuse_open(model: nn.Module) -> None:
    """Raises ``SessionError`` where an open session saves this module, a part of it, or one that it is a part of."""
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
            "that one first: session.close(). Where no name holds it any more: "
            "for session in lightck.sessions.open_sessions(): session.abandon()."
        )


def is_followed(optimizer: object) -> bool:
    """Whether an open session follows this optimizer."""
    return any(one.follows_optimizer(optimizer) for _, one in _open())


def open_sessions() -> list[OpenSession]:
    """The open sessions of this process: each a :class:`lightck.Session`, also one that only a traceback holds.
    ``session.path`` is its pool; ``session.abandon()`` ends it as an exception does, without its open version."""
    found = [one.session for one in list(living) if one.turn.is_live]
    return sorted(found, key=lambda session: session.path)


@atexit.register
def _at_exit() -> None:
    for one in list(living):
        one.session.abandon()
