"""Measures the missing rows one after the other, keeps each result, and shows all rows at the end."""

from __future__ import annotations

import tempfile

import click

from bench.running import rows
from bench.running.folders import remove_stale
from bench.running.rows import Place, Row
from bench.tables import TABLES, Plan
from bench.tables.results import Results, reading
from bench.tables.shown import say_tables
from lightck.cli.base import BAD, OK, ended_by_signals, print_error, print_progress
from lightck.cli.text import count, print_json
from lightck.errors import BenchError


def measure(
    kept: Results, names: tuple[str, ...], plan: Plan, place: Place, only: str | None, again: bool, as_json: bool
) -> int:
    """Measure and show the rows of these tables; returns the exit status."""
    tables = [TABLES[name] for name in names]
    here = {table.name: table.rows(plan) for table in tables}
    for name in (name for name, found in here.items() if not found and not plan.quick):
        print_progress(f"skipped {name}: this machine lacks the hardware for it")
    _check_named(only, [row.key for found in here.values() for row in found])
    chosen = {
        (row.measure, row.key): row for found in here.values() for row in found if only is None or only in row.key
    }
    wanted = [row for row in chosen.values() if again or row.key not in kept.rows(row.measure)]
    print_progress(f"{count(len(wanted), 'row')} to measure, {len(chosen) - len(wanted)} kept already")
    for row in chosen.values():
        if not again and (other := _other_than(kept, row, place)):
            print_progress(f"not measured again without --again: the kept row {row.measure} {row.key!r} has {other}")
    _remove_stale(place)
    failed: list[str] = []
    try:
        with ended_by_signals():  # ends the row's process and removes its folder (gigabytes on tmpfs)
            for i, row in enumerate(wanted):
                error = _row(kept, row, place, i, len(wanted))
                failed += [error] if error is not None else []
    except KeyboardInterrupt:
        print_progress("interrupted: the rows that were measured until now follow")
        raise
    finally:  # results are shown also after an error
        if as_json:
            found = {m: {k: r for k, r in kept.rows(m).items() if (m, k) in chosen} for m, _ in chosen}
            print_json({"failed": failed, "rows": found})
        else:
            say_tables(kept, tables, {key for _, key in chosen})
    return BAD if failed else OK


def _check_named(only: str | None, keys: list[str]) -> None:
    if only is not None and keys and not any(only in key for key in keys):
        raise click.BadParameter(
            f"no row has {only!r} in its name; there are: {', '.join(dict.fromkeys(keys))}.", param_hint="'--only'"
        )


def _other_than(kept: Results, row: Row, place: Place) -> str:
    """How the options of a kept row differ from the requested ones, or ""."""
    if row.key not in kept.rows(row.measure):
        return ""
    found = kept.rows(row.measure)[row.key]
    with reading(row.measure):
        before = {**found["options"], "threads": found["machine"]["threads"]}
    now = {**row.options, "threads": place.threads}
    return ", ".join(
        f"{name} {before.get(name, 'not said')} and not {now.get(name, 'not said')}"
        for name in {**now, **before}
        if before.get(name) != now.get(name)
    )


def _remove_stale(place: Place) -> None:
    removed = remove_stale([place.tmpfs, place.disk, tempfile.gettempdir()])
    if removed:
        print_progress(f"removed {count(removed, 'folder')} of runs that were killed")


def _row(kept: Results, row: Row, place: Place, number: int, of: int) -> str | None:
    """Measure a row and keep its result; returns the error message, or None."""
    try:
        found = rows.run(row, place)
    except BenchError as error:
        print_error(str(error))
        return str(error)
    kept.keep(row.measure, row.key, found)
    print_progress(f"{number + 1} of {of}  {row.measure}  {row.key}  {found['took_seconds']:.0f} s")
    return None
