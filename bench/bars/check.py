"""``lightck bench --check``: compares the kept results with the bars, as text or as JSON."""

from __future__ import annotations

from typing import Any

import click

from bench.bars import Bar, bars, reached
from bench.bars.metrics import Reached, Row
from bench.running.machine import fingerprint
from bench.tables.results import Results
from lightck.cli.base import BAD, OK
from lightck.cli.text import columns, count, print_json, print_line, print_verdict

Held = list[tuple[Bar, Reached, bool]]
"""Each bar, its value, and whether it holds."""


def check_kept(kept: Results, as_json: bool) -> int:
    """Print which bars hold; returns the exit status."""
    found: Held = [(bar, one, bar.holds(one)) for bar in bars() for one in reached(bar, kept)]
    rows = list({id(row): row for _, one, _ in found for row in one.rows}.values())
    if as_json:
        _as_json(found, rows)
    else:
        _as_text(found, rows)
    return OK if all(good for _, _, good in found) else BAD


def _as_json(found: Held, rows: list[Row]) -> None:
    facts = [
        {
            "bar": bar.name,
            "says": bar.says,
            "limit": bar.limit,
            "at_most": bar.is_maximum,
            "aim": bar.aim,
            "of": one.what,
            "reached": one.value,
            "end": one.end,
            "note": _note(one),
            "ok": good,
            "shown": good and bar.is_shown(one),
        }
        for bar, one, good in found
    ]
    ok = all(good for _, _, good in found)
    print_json({"ok": ok, "bars": facts, "rows_looked_at": len(rows), **_other_code(rows)})


def _as_text(found: Held, rows: list[Row]) -> None:
    for line in columns([("", "bar", "of", "reached", "wanted", "aim", ""), *map(_line, found)], right=(3,)):
        click.echo(line)
    bad = sum(not good for _, _, good in found)
    print_line()
    print_verdict(f"{len(found) - bad} of {len(found)} hold." if bad else f"All {len(found)} hold.", good=not bad)
    blurred = [f"{bar.name} {one.what}" for bar, one, good in found if good and not bar.is_shown(one)]
    if blurred:
        print_line(
            f"Of those, {len(blurred)} hold by their values, but not at the worse ends of their intervals: "
            f"{', '.join(blurred)}."
        )
    code = _other_code(rows)
    print_line(
        f"Of the {count(len(rows), 'row')} used, {code['other_code']} were measured with other code than this, "
        f"{code['unknown_code']} with unknown code."
    )


def _line(held: tuple[Bar, Reached, bool]) -> tuple[str, ...]:
    bar, one, good = held
    value = "not measured" if one.value is None else bar.text(one.value)
    aim = "" if bar.aim is None else bar.text(bar.aim)
    return ("yes" if good else "no", bar.name, one.what, value, bar.wanted, aim, _note(one))


def _other_code(rows: list[dict[str, Any]]) -> dict[str, int]:
    noted = [row["code"] for row in rows if "code" in row]
    now = fingerprint()
    return {"other_code": sum(code != now for code in noted), "unknown_code": len(rows) - len(noted)}


def _note(one: Reached) -> str:
    return "; ".join(filter(None, (one.refused, one.note)))
