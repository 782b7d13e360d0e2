"""Which programs, at which commits, made small by which edits, and wired to lightck by which lines.

The commits are those that the results in docs/evidence/ were found with. ``common`` edits are in both variants: smaller
sizes, and a call of ``finished`` (see child.py) at the end. ``ours`` are what a user of lightck would write.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..edits import Edit
from ..made_up import nothing

COMMITS = {
    "karpathy/nanoGPT": "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
    "karpathy/minGPT": "37baab71b9abea1b76ab957409a1cc2fbfba8a26",
    "karpathy/build-nanogpt": "6104ab1b53920f6e2159749676073ff7d815c1fa",
    "karpathy/llama2.c": "350e04fe35433e6d2941dce5a1f53308f87058eb",
    "karpathy/makemore": "988aa59e4d8fefa526d06f3b453ad116258398d4",
    "pytorch/examples": "77f55b912142e11fcfdf5b530231fb9c52f181e8",
    "vwxyzjn/cleanrl": "fe8d8a03c41a7ef5b523e2e354bd01c363e786bb",
    "huggingface/pytorch-image-models": "aa4b5850c1543fa488abf260f18390eda46cf85d",
    "huggingface/accelerate": "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83",
}


@dataclass(frozen=True)
class Program:
    name: str
    wiring: str
    """In words: how it was wired."""
    repository: str
    """A key of COMMITS; "" for a script of ours that calls a library by its public names."""
    script: str
    argv: str = ""
    take: tuple[str, ...] = ()
    """Files and folders of the repository that it needs; by default the script's folder."""
    common: tuple[Edit, ...] = ()
    ours: tuple[Edit, ...] = ()
    data: Callable[[Path], None] = nothing
    folder: str = ""
    """Where it is started, relative to the repository's root; by default the script's folder."""
    paths: tuple[str, ...] = ()
    """Folders beside the script's from which it imports, relative to where it is started."""
    environment: dict[str, str] = field(default_factory=dict)
    seconds: float = 60.0
    """A process that runs longer hangs."""


PROGRAMS: dict[str, Program] = {}


def program(name: str, wiring: str, repository: str, script: str, argv: str = "", **more: object) -> Program:
    assert name not in PROGRAMS, name
    PROGRAMS[name] = made = Program(name, wiring, repository, script, argv, **more)  # type: ignore[arg-type]
    return made


for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")
