"""Prints kept results: as tables with the machines that measured them, as JSON, or as plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.tables import TABLES, Table
from bench.tables.plots import draw
from bench.tables.results import Results, reading
from lightck.cli.base import OK
from lightck.cli.text import count, print_json, print_line


def say_tables(kept: Results, tables: Sequence[Table], keys: set[str] | None) -> None:
    """Print each table with the rows of these keys, or with all; a table without rows is left out."""
    for table in tables:
        rows = {key: row for key, row in kept.rows(table.measure).items() if keys is None or key in keys}
        if rows:
            with reading(table.name):
                shown, machines = table.show(rows), sorted({_machine(row["machine"]) for row in rows.values()})
            print_line(f"{table.name}: {table.says}")
            print_line()
            for line in shown.splitlines():
                print_line(line)
            print_line()
            print_line(f"Measured on {'; '.join(machines)}.")
            print_line()


def _machine(facts: dict[str, Any]) -> str:
    survives = ", ".join(facts["survives"]) or "nothing"
    threads = count(facts["threads"], "thread")
    return (
        f"{facts['cores']} cores ({facts['cpu']}), torch {facts['torch']} with {threads}, {facts['kernels']} kernels, "
        f"{facts['medium']} (survives: {survives})"
    )


def show_kept(kept: Results, names: Sequence[str], as_json: bool) -> int:
    """``--show``: print the kept results."""
    if as_json:
        print_json({name: kept.rows(TABLES[name].measure) for name in names})
    else:
        say_tables(kept, [TABLES[name] for name in names], None)
    return OK


def plot_kept(kept: Results, folder: Path, as_json: bool) -> int:
    """``--plots``: write the plots."""
    paths = [str(path) for path in draw(kept, folder)]
    if as_json:
        print_json({"plots": paths})
    else:
        for path in paths:
            print_line(path)
    return OK
