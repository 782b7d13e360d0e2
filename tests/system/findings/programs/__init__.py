"""Small trainings with a pattern that once broke: one function each, written as a user would write it.

They are run by children of two fork servers: with lightck, and in a process that never imported it. So nothing here
imports lightck at the top of a module; ``run.attach`` calls it where it is there. A program ends with ``run.finished``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from resume.run import Run as _Run

UPDATES = 14


class Run(_Run):
    """As for the scenarios of tests/system/resume, but what ``session.step`` says is not taken for the truth here."""

    def updated(self, loss: Any) -> None:
        self.updates += 1
        self.send(update=self.updates, loss=float(loss).hex())
        self.here("update")


@dataclass(frozen=True)
class Program:
    name: str
    train: Callable[[Run], None]
    loses: int = 2
    """Updates that a kill may lose: one that is not committed, and one whose checkpoint was given up."""


PROGRAMS: dict[str, Program] = {}


def program(**settings: Any) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Register a function under its name with ``_`` as ``-``."""

    def register(train: Callable[[Run], None]) -> Callable[[Run], None]:
        name = settings.pop("name", None) or train.__name__.replace("_", "-")
        assert name not in PROGRAMS, name
        PROGRAMS[name] = Program(name, train, **settings)
        return train

    return register


def run_child(request: Mapping[str, Any], pipe: int) -> None:
    """In a child of a fork server."""
    Run(request, pipe).execute(PROGRAMS[request["scenario"]].train)


for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")
