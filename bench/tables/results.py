"""Result files: one JSON per measure with a row per key, rewritten after each row, so that an interrupted run can
continue.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightck.errors import BenchError

Rows = dict[str, dict[str, Any]]
FORMAT = 1


class Results:
    """The kept rows of a folder; without a folder they are kept in memory only."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._rows: dict[str, Rows] = {}

    def rows(self, measure: str) -> Rows:
        """key -> row, in the order in which they were first measured."""
        if measure not in self._rows:
            self._rows[measure] = self._read(measure)
        return self._rows[measure]

    def keep(self, measure: str, key: str, row: dict[str, Any]) -> None:
        rows = self.rows(measure)
        rows[key] = row
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._path(measure, self._folder)
            text = json.dumps({"format": FORMAT, "measure": measure, "rows": rows}, indent=1, allow_nan=False)
            new = path.with_suffix(".json.new")
            new.write_text(text + "\n")
            os.replace(new, path)

    def _read(self, measure: str) -> Rows:
        if self._folder is None or not (path := self._path(measure, self._folder)).exists():
            return {}
        try:
            kept = json.loads(path.read_text())
            rows: Rows = kept["rows"]
            is_ours = kept["format"] == FORMAT and isinstance(rows, dict)
            of = kept.get("measure")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BenchError(f"{path} holds no results of lightck bench ({error}). Move the file away.") from error
        if not is_ours:
            raise BenchError(f"{path} holds results of another version of lightck bench. Move the file away.")
        if of != measure:
            raise BenchError(f"{path} holds results of {of!r} and not of {measure!r}. Move the file away.")
        for key, row in rows.items():
            if not _is_row(row):
                raise BenchError(f"{path} holds a row {key!r} that is not from lightck bench. Move the file away.")
        return rows

    @staticmethod
    def _path(measure: str, folder: Path) -> Path:
        return folder / f"{measure}.json"


def _is_row(row: object) -> bool:
    return isinstance(row, dict) and all(isinstance(row.get(part), dict) for part in ("options", "machine", "result"))


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn an error from reading a kept row (a missing or wrong value) into a BenchError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise BenchError(
            f"A kept row for {what!r} has missing or wrong values ({type(error).__name__}: {error}). Measure it "
            "with --again, or move the file away."
        ) from error


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns; the first column holds names, the others numbers."""
    cells = [[_cell(c) for c in line] for line in (header, *lines)]
    widths = [max(3, *(len(line[i]) for line in cells)) for i in range(len(header))]
    rule = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]

    def joined(line: Sequence[str]) -> str:
        first, *others = zip(line, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]) + " |"

    return "\n".join([joined(cells[0]), joined(rule), *map(joined, cells[1:])])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# -- numbers as text -------------------------------------------------------------------------------------------------


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.2f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f} MB"


def rate(per_second: float) -> str:
    return f"{per_second / 1e9:.2f} GB/s"


def times(ratio: float) -> str:
    return f"{ratio:.2f} x"
