"""Replacing one attribute of an object of a framework for a time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any


def replace(stack: ExitStack, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Set ``owner.name`` to ``make(the present value)`` until the stack ends."""
    had, before = name in vars(owner), getattr(owner, name, None)
    setattr(owner, name, make(before))
    stack.callback(lambda: setattr(owner, name, before) if had else delattr(owner, name))
