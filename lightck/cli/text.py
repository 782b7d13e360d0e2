"""Text for a terminal or a pipe: escaped names, short sizes, aligned columns.

Text from a pool is untrusted: ``clean`` escapes every character that a terminal would interpret. Columns are as wide as
their text, and are never cut to the width of a terminal.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import click

Facts = dict[str, Any]
"""An object as ``--json`` prints it: strings, numbers, lists and maps. docs/json.md lists the keys."""
SURVIVED = {"process": "a killed process", "os": "a crash of the OS", "power": "a power cut", "media": "a media error"}


def clean(text: str) -> str:
    """Return the text with every unprintable character (escapes, line ends, direction marks) written as ``\\x1b`` or
    the like."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size(nbytes: int) -> str:
    """Return a number of bytes as text in decimal units, for example ``36.2 MB``."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.95 or unit == "GB":
            return f"{value:,.1f} {unit}" if unit != "B" else f"{nbytes} B"
        value /= 1000
    raise AssertionError("GB is the last unit")


def count(number: int, thing: str) -> str:
    """Return a number with its noun: ``1 tensor``, ``2 tensors``."""
    plural = thing[:-1] + "ies" if thing.endswith("y") else thing + "s"
    return f"{number:,} {thing if number == 1 else plural}"


def listed(items: Iterable[str], most: int = 6) -> str:
    """Return the items as ``a, b, c``. If there are more than ``most`` items, return the first ``most`` items and the
    number of the remaining ones."""
    items = list(items)
    rest = len(items) - most
    return ", ".join(items[:most]) + (f" and {rest} more" if rest > 0 else "")


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return the lines of a table. ``right``: indices of the columns that are right-aligned."""
    if not rows:
        return []
    cells = [[clean(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return [
        "  ".join(
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def survives(durability: Facts) -> str:
    """Return a durability in words: "a killed process; not a crash of the OS, a power cut, a media error"."""
    yes = [words for name, words in SURVIVED.items() if durability.get(name)]
    no = [words for name, words in SURVIVED.items() if not durability.get(name)]
    return (", ".join(yes) or "nothing") + (f"; not {', '.join(no)}" if no else "")


def print_line(text: str = "") -> None:
    click.echo(clean(text))


def print_verdict(text: str, good: bool) -> None:
    """Print the result as one line, coloured on a terminal."""
    click.echo(click.style(clean(text), fg="green" if good else "red"))


def print_json(facts: Facts) -> None:
    """Print an object as JSON in ASCII, so that every character that a terminal would interpret is escaped."""
    click.echo(json.dumps(facts, indent=2, ensure_ascii=True, allow_nan=False))


def print_json_line(facts: Facts) -> None:
    """Print an object as ``print_json`` does, in one line."""
    click.echo(json.dumps(facts, ensure_ascii=True, allow_nan=False))
