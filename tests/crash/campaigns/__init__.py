"""The campaigns by name, a module each with a ``CAMPAIGN`` in it. Imported when one is asked for."""

from __future__ import annotations

from importlib import import_module

from crash.campaign import Campaign

NAMES: tuple[str, ...] = (
    "power-cut",
    "kill-writer",
    "kill-training",
    "kill-twice",
    "two-processes",
    "syscalls",
    "truncations",
    "full",
    "exits",
    "flips",
    "fuzz",
    "gradient-power-cut",
    "gradient-kills",
    "gradient-kill-twice",
    "gradient-two-processes",
    "gradient-full",
)


def named(name: str) -> Campaign:
    """``name`` is one of ``NAMES``; its module has underscores for dashes."""
    found = import_module(f"{__name__}.{name.replace('-', '_')}").CAMPAIGN
    assert isinstance(found, Campaign), name
    return found
