"""A patch as rules instead of a diff: which line of a public program is meant, and which lines of ours go there.

A rule names its line by a regular expression that must fit exactly one line of the file, so a program that has changed
is an error and never patched wrongly, and nothing of the program is kept in this repository.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


class PatchError(Exception):
    """A rule does not fit the program."""


@dataclass(frozen=True)
class Edit:
    at: str
    """Regular expression, searched for in each line."""
    text: str
    """Our lines. After and before a line they get its indentation; as a substitute they are ``re.sub``'s."""
    where: str
    file: str = ""
    """Relative to the program's root; by default its script."""
    place: tuple[int, int] = (1, 1)
    """Which line it is, of how many that fit."""


def after(at: str, text: str, file: str = "", place: tuple[int, int] = (1, 1)) -> Edit:
    return Edit(at, text, "after", file, place)


def before(at: str, text: str, file: str = "", place: tuple[int, int] = (1, 1)) -> Edit:
    return Edit(at, text, "before", file, place)


def sub(at: str, text: str, file: str = "", place: tuple[int, int] = (1, 1)) -> Edit:
    return Edit(at, text, "sub", file, place)


def at_end(text: str, file: str = "") -> Edit:
    """Lines at the end of the file, without indentation."""
    return Edit("", text, "end", file)


def apply(edits: Iterable[Edit], root: Path, script: str) -> int:
    """Patch the files under ``root``. The number of lines that are ours then."""
    ours = 0
    for edit in edits:
        path = root / (edit.file or script)
        path.write_text(patched(path.read_text(), edit))
        ours += edit.text.count("\n") + 1
    return ours


def patched(source: str, edit: Edit) -> str:
    if edit.where == "end":
        return source.rstrip("\n") + "\n" + edit.text + "\n"
    lines = source.split("\n")
    fitting = [number for number, line in enumerate(lines) if re.search(edit.at, line)]
    which, of = edit.place
    if len(fitting) != of:
        raise PatchError(f"{edit.at!r} fits {len(fitting)} lines and must fit {of}")
    number = fitting[which - 1]
    line = lines[number]
    if edit.where == "sub":
        lines[number] = re.sub(edit.at, edit.text, line)
        return "\n".join(lines)
    indent = line[: len(line) - len(line.lstrip())]
    new = [indent + text if text else text for text in edit.text.split("\n")]
    place = number + 1 if edit.where == "after" else number
    return "\n".join([*lines[:place], *new, *lines[place:]])
