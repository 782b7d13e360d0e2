"""Which models have an open session in this process, and what happens to it when the process ends."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any, TypeVar, cast

from torch import nn

from lightck.errors import SessionError

M = TypeVar("M", bound=Callable[..., Any])

_open: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def opened(model: nn.Module, session: Any) -> None:
    _open[model] = weakref.ref(session)


def has_open_session(model: nn.Module, *, parts_of_it: bool = False) -> bool:
    """Whether an open session saves this module, a part of it, or a module that it is a part of. ``parts_of_it``: or
    any module or parameter that is also one of this model."""
    sessions = ((other, ref()) for other, ref in list(_open.items()))
    others = [other for other, session in sessions if session is not None and session.is_open]
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
    for other, ref in list(_open.items()):
        session = ref()
        if session is None or not session.is_open:
            continue
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
            f"{what} an open session already, on {str(session.path)!r}. A parameter is saved by one session. Close "
            "that one first: session.close(). Where no name holds it any more: "
            "for session in lightck.sessions.open_sessions(): session.abandon()."
        )


def is_followed(optimizer: Any) -> bool:
    """Whether an open session follows this optimizer."""
    sessions = [session for ref in list(_open.values()) if (session := ref()) is not None and session.is_open]
    return any(session.follows(optimizer) for session in sessions)


_living: weakref.WeakSet[Any] = weakref.WeakSet()


def abandon_at_exit(session: Any) -> None:
    """Its ``abandon`` is called when the interpreter ends, if it lives until then."""
    _living.add(session)


def open_sessions() -> list[Any]:
    """The open sessions of this process: each a :class:`lightck.Session`, also one that only a traceback holds.
    ``session.path`` is its pool; ``session.abandon()`` ends it as an exception does, without its open version."""
    found = [session for session in list(_living) if session.is_open and not session.is_forked]
    return sorted(found, key=lambda session: str(session.path))


@atexit.register
def _at_exit() -> None:
    for session in list(_living):
        session.abandon()


def in_turn(method: M) -> M:
    """For a method of a session: one thread at a time is inside. In a forked child nobody else is."""

    @wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self.is_forked else self.turn:
            return method(self, *args, **kwargs)

    return cast(M, called)


class Proxy:
    """What hooks and loaders hold: the session while it is open and in its own process, else nothing happens.

    So a session lives as long as the model that carries its hooks, also where nobody keeps what ``attach`` returned;
    and a forked child never touches the mapping that it does not have.
    """

    def __init__(self, session: Any) -> None:
        self._session = session

    def _live(self) -> Any:
        return self._session if self._session.is_open and not self._session.is_forked else None

    def __getattr__(self, name: str) -> Any:
        session = self._live()
        return partial(_in_its_turn, session, getattr(session, name)) if session is not None else _nothing

    @property
    def updates(self) -> int:
        updates: int = self._session.updates
        return updates

    def loader_gave(self, *args: Any) -> None:
        """At each batch, and nothing in it minds another thread: so it takes no turn."""
        if self._live() is not None:
            self._session.loader_gave(*args)


def _in_its_turn(session: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with session.turn:  # another thread may be closing it
        return method(*args, **kwargs) if session.is_open else None


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
