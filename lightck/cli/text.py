"""Text for a terminal or a pipe: names made safe, sizes made short, columns made straight.

What comes out of a pool is untrusted: ``clean`` leaves no character that a terminal would act on. Columns are as wide
as their text, never cut to a terminal's width: what a pipe gets is whole.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import click

Facts = dict[str, Any]
"""What ``--json`` prints: strings, numbers, lists and maps. docs/tools.md names the keys of each command."""
SURVIVED = {"process": "a killed process", "os": "a crash of the OS", "power": "a power cut", "media": "a media error"}


def clean(text: str) -> str:
    """The same text with every unprintable character (escapes, line ends, marks that turn direction) spelled out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size(nbytes: int) -> str:
    """For example ``36.2 MB``: decimal, as in the errors."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.95 or unit == "GB":
            return f"{value:,.1f} {unit}" if unit != "B" else f"{nbytes} B"
        value /= 1000
    raise AssertionError("GB is the last unit")


def count(number: int, thing: str) -> str:
    """``1 tensor``, ``2 tensors``."""
    plural = thing[:-1] + "ies" if thing.endswith("y") else thing + "s"
    return f"{number:,} {thing if number == 1 else plural}"


def listed(items: Iterable[str], most: int = 6) -> str:
    """``a, b, c``; of many the first ones, and how many more there are."""
    items = list(items)
    rest = len(items) - most
    return ", ".join(items[:most]) + (f" and {rest} more" if rest > 0 else "")


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Lines with the cells of each column below each other; ``right`` are the columns of numbers."""
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
    """What a medium promises: "a killed process; not a crash of the OS, a power cut, a media error"."""
    yes = [words for name, words in SURVIVED.items() if durability.get(name)]
    no = [words for name, words in SURVIVED.items() if not durability.get(name)]
    return (", ".join(yes) or "nothing") + (f"; not {', '.join(no)}" if no else "")


def say(text: str = "") -> None:
    click.echo(clean(text))


def verdict(text: str, good: bool) -> None:
    """The one line that counts, coloured on a terminal."""
    click.echo(click.style(clean(text), fg="green" if good else "red"))


def say_json(facts: Facts) -> None:
    """ASCII only: what a terminal would act on arrives escaped, and loses nothing."""
    click.echo(json.dumps(facts, indent=2, ensure_ascii=True, allow_nan=False))
