"""The trainings: one function each, written as a user would write it.

``Scenario.places`` are named places in the loop at which the process is killed, ``sees`` what the reference run must
have seen at least so many times (so that a scenario that no longer exercises its feature fails), ``logs`` what lightck
must have logged.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..run import Run

SCENARIOS: dict[str, Scenario] = {}


@dataclass(frozen=True)
class Scenario:
    name: str
    train: Callable[[Run], None]
    places: tuple[str, ...] = ()
    sees: Mapping[str, int] = field(default_factory=dict)
    logs: tuple[str, ...] = ()
    loses: int = 1
    """Finished updates that a kill may lose: interval x (slots - 1), and one for a checkpoint that was given up."""
    kills: int = 3
    """Kills at random instants, beside those at places and kill points."""
    brief: bool = False
    """Each process takes seconds: places and one random instant only."""
    compiles: bool = False
    listed: bool = True
    """One of the scenarios that are run with random kills; the others belong to a test of their own."""

    def __str__(self) -> str:
        return self.name


def scenario(**settings: Any) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Register a function under its name with ``_`` as spaces, or under ``name=``."""

    def register(train: Callable[[Run], None]) -> Callable[[Run], None]:
        add(settings.pop("name", train.__name__.replace("_", " ")), train, **settings)
        return train

    return register


def add(name: str, train: Callable[[Run], None], **settings: Any) -> None:
    key = name.replace(" ", "-")
    assert key not in SCENARIOS, key
    SCENARIOS[key] = Scenario(key, train, **settings)


def run_child(request: Mapping[str, Any], pipe: int) -> None:
    """In a child of the fork server."""
    if request.get("sabotage"):
        getattr(importlib.import_module(f"{__name__}.sabotage"), request["sabotage"])()
    Run(request, pipe).execute(SCENARIOS[request["scenario"]].train)


for _module in ("loops", "weights", "scaler", "loaders", "several", "compiled", "timeline", "device"):
    importlib.import_module(f"{__name__}.{_module}")
