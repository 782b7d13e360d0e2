"""``lightck bench``: measures this machine, or a table of the project's, and holds kept results to the bars.

Exit status 1 where a row failed or a bar is not reached. It writes pools of its own, in temporary folders, and results
where it is told to.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from lightck.cli.base import BAD, OK, Command, complain, json_option, trouble
from lightck.cli.text import clean, columns, count, listed, say, say_json, verdict

if TYPE_CHECKING:
    from lightck.bench.metrics import Reached
    from lightck.bench.results import Results
    from lightck.bench.rows import Place, Row
    from lightck.bench.tables import Plan, Table

NAMES = ("overhead", "stall", "interval", "recovery", "bandwidth", "memory", "flat", "many", "gpu", "calibrate")
_SOURCES = Path(__file__).resolve().parents[2] / "bench"
"""``bench/`` of the source tree that this module lies in; installed, there is none."""
_KEPT_ONLY = {"check": "", "plots": "", "show": "tables"}
"""Options that look at kept results, and what each takes beside --results and --json."""
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command("bench", cls=Command, short_help="What a checkpoint costs on this machine.")
@click.argument("tables", nargs=-1, type=click.Choice(NAMES), metavar="[TABLE]...")
@click.option("--small", is_flag=True, help="A quick look, also without TABLE: a minute or two, nothing is kept.")
@click.option("--check", is_flag=True, help="Measure nothing: hold the kept results to the bars.")
@click.option("--show", is_flag=True, help="Measure nothing: show the kept results of the tables.")
@click.option("--plots", type=FOLDER, metavar="DIR", help="Draw the kept results into DIR as SVG (needs matplotlib).")
@click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where results are kept. [default: bench/results of the sources, else ./lightck-bench]",
)
@click.option("--only", metavar="TEXT", help="Only rows whose name has TEXT in it.")
@click.option("--again", is_flag=True, help="Measure rows anew that are kept already.")
@click.option("--pairs", type=click.IntRange(3, 10_000), metavar="N", help="Pairs of steps per row of overhead.")
@click.option("--threads", type=click.IntRange(1, 1024), default=2, show_default=True, help="Threads of torch.")
@click.option("--pool-dir", type=FOLDER, metavar="DIR", help="Where pools go. [default: /dev/shm]")
@click.option("--disk-dir", type=FOLDER, metavar="DIR", help="Where pools on a disk go. [default: /var/tmp]")
@click.option("--rivals", type=FOLDER, metavar="DIR", help="bench/rivals of the sources, for an installed lightck.")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    tables: tuple[str, ...],
    small: bool,
    check: bool,
    show: bool,
    plots: Path | None,
    results: Path | None,
    only: str | None,
    again: bool,
    pairs: int | None,
    threads: int,
    pool_dir: Path | None,
    disk_dir: Path | None,
    rivals: Path | None,
    as_json: bool,
) -> int:
    """Measure what a checkpoint at every step costs, as ratios within one run.

    Without TABLE: a quick look at this machine. With TABLE (overhead, stall, interval, recovery, bandwidth, memory,
    flat, many, gpu, calibrate): the project's rows, for hours; each is kept when it is done, and a run that was cut off
    goes on. Exit status 1 where a row failed, or with --check a bar is not reached.
    """
    from lightck.bench.results import Results

    for name, takes in _KEPT_ONLY.items():
        _refuse_others(ctx, name, takes)
    quick = small or not tables
    folder = results or (_SOURCES / "results" if _SOURCES.is_dir() else Path("lightck-bench"))
    if check:
        return _check(Results(folder), as_json)
    if plots is not None:
        return _plot(Results(folder), plots, as_json)
    if show:
        return _show(Results(folder), tables or NAMES, as_json)
    kept = Results(None if quick and results is None else folder)
    place = _place(pool_dir, disk_dir, rivals, threads)
    return _measure(kept, tables or NAMES, _plan(place, quick, pairs), place, only, again, as_json)


def _refuse_others(ctx: click.Context, name: str, takes: str) -> None:
    """What stands beside an option that measures nothing, and would be passed over without a word."""
    given = {
        str(param.name): param
        for param in ctx.command.params
        if ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE
    }
    others = given.keys() - {name, "results", "as_json", takes}
    if name in given and others:
        idle = listed(sorted("TABLE" if other == "tables" else given[other].opts[0] for other in others))
        trouble(f"--{name} measures nothing and takes no {idle}. Leave one or the other out.")


def _place(pool_dir: Path | None, disk_dir: Path | None, rivals: Path | None, threads: int) -> Place:
    from lightck.bench.rows import DISK_DIR, MEMORY_DIR, Place

    known = rivals or (_SOURCES / "rivals" if (_SOURCES / "rivals").is_dir() else None)
    in_child = str(known.resolve()) if known else None
    return Place(str(pool_dir or MEMORY_DIR), str(disk_dir or DISK_DIR), in_child, threads)


def _plan(place: Place, quick: bool, pairs: int | None) -> Plan:
    from lightck.bench.tables import Plan

    if quick:
        return Plan(quick=True, pairs=pairs)
    from lightck.bench.savers import rivals_in

    usable = []
    for name, why_not in rivals_in(place.rivals).items():
        if why_not:
            _tell(f"without {name}: {why_not}")
        else:
            usable.append(name)
    return Plan(tuple(usable), quick, pairs)


def _tell(text: str) -> None:
    """Progress: stdout is the results' alone."""
    click.echo(clean(text), err=True)


# -- measuring -------------------------------------------------------------------------------------------------------


def _measure(
    kept: Results, names: tuple[str, ...], plan: Plan, place: Place, only: str | None, again: bool, as_json: bool
) -> int:
    from lightck.bench.tables import TABLES

    tables = [TABLES[name] for name in names]
    here = {table.name: table.rows(plan) for table in tables}
    for name in (name for name, rows in here.items() if not rows and not plan.quick):
        _tell(f"without {name}: this machine has nothing to measure it on")
    _check_named(only, [row.key for rows in here.values() for row in rows])
    rows = {(row.measure, row.key): row for rows in here.values() for row in rows if only is None or only in row.key}
    wanted = [row for row in rows.values() if again or row.key not in kept.rows(row.measure)]
    _tell(f"{count(len(wanted), 'row')} to measure, {len(rows) - len(wanted)} kept already")
    for row in rows.values():
        if not again and (other := _other_than(kept, row, place)):
            _tell(f"not measured anew (--again does): the kept row {row.measure} {row.key!r} has {other}")
    _remove_stale(place)
    failed: list[str] = []
    try:
        with _ended_by_signals():
            for i, row in enumerate(wanted):
                error = _row(kept, row, place, i, len(wanted))
                failed += [error] if error is not None else []
    except KeyboardInterrupt:
        _tell("interrupted: the rows that were measured until now follow")
        raise
    finally:  # what took minutes to measure is shown, whatever ended it
        if as_json:
            say_json(
                {
                    "failed": failed,
                    "rows": {m: {k: r for k, r in kept.rows(m).items() if (m, k) in rows} for m, _ in rows},
                }
            )
        else:
            _tables(kept, tables, {key for _, key in rows})
    return BAD if failed else OK


def _check_named(only: str | None, keys: list[str]) -> None:
    if only is not None and keys and not any(only in key for key in keys):
        raise click.BadParameter(
            f"no row has {only!r} in its name; there are: {', '.join(dict.fromkeys(keys))}.", param_hint="'--only'"
        )


def _other_than(kept: Results, row: Row, place: Place) -> str:
    """What a kept row was measured with where that is not what is asked for now."""
    from lightck.bench.results import reading

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
    import tempfile

    from lightck.bench.folders import remove_stale

    removed = remove_stale([place.tmpfs, place.disk, tempfile.gettempdir()])
    if removed:
        _tell(f"removed {count(removed, 'folder')} of runs that were killed")


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """As by Ctrl-C: the row's process ends, and its folder, gigabytes of memory on tmpfs, goes with it. What is ignored
    (nohup) stays so."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _row(kept: Results, row: Row, place: Place, number: int, of: int) -> str | None:
    """Measure and keep it; what went wrong, if something did."""
    from lightck.bench import rows
    from lightck.errors import BenchError

    try:
        found = rows.run(row, place)
    except BenchError as error:
        complain(str(error))
        return str(error)
    kept.keep(row.measure, row.key, found)
    _tell(f"{number + 1} of {of}  {row.measure}  {row.key}  {found['took_seconds']:.0f} s")
    return None


def _tables(kept: Results, tables: list[Table], keys: set[str] | None) -> None:
    from lightck.bench.results import reading

    for table in tables:
        rows = {key: row for key, row in kept.rows(table.measure).items() if keys is None or key in keys}
        if rows:
            with reading(table.name):
                shown, machines = table.show(rows), sorted({_machine(row["machine"]) for row in rows.values()})
            say(f"{table.name}: {table.says}")
            say()
            for line in shown.splitlines():
                say(line)
            say()
            say(f"Measured on {'; '.join(machines)}.")
            say()


def _machine(facts: dict[str, Any]) -> str:
    survives = ", ".join(facts["survives"]) or "nothing"
    threads = count(facts["threads"], "thread")
    return (
        f"{facts['cores']} cores ({facts['cpu']}), torch {facts['torch']} with {threads}, {facts['kernels']} kernels, "
        f"{facts['medium']} (survives: {survives})"
    )


def _show(kept: Results, names: tuple[str, ...], as_json: bool) -> int:
    from lightck.bench.tables import TABLES

    if as_json:
        say_json({name: kept.rows(TABLES[name].measure) for name in names})
    else:
        _tables(kept, [TABLES[name] for name in names], None)
    return OK


def _plot(kept: Results, folder: Path, as_json: bool) -> int:
    from lightck.bench.plots import draw

    paths = [str(path) for path in draw(kept, folder)]
    if as_json:
        say_json({"plots": paths})
    else:
        for path in paths:
            say(path)
    return OK


# -- the bars --------------------------------------------------------------------------------------------------------


def _check(kept: Results, as_json: bool) -> int:
    from lightck.bench.bars import bars, reached

    found = [(bar, one, bar.holds(one)) for bar in bars() for one in reached(bar, kept)]
    rows = list({id(row): row for _, one, _ in found for row in one.rows}.values())
    if as_json:
        say_json(
            {
                "ok": all(good for _, _, good in found),
                "bars": [
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
                ],
                "rows_looked_at": len(rows),
                **_other_code(rows),
            }
        )
        return OK if all(good for _, _, good in found) else BAD
    lines = [("", "bar", "of", "reached", "wanted", "aim", "")]
    for bar, one, good in found:
        value = "not measured" if one.value is None else bar.text(one.value)
        lines.append(
            (
                "yes" if good else "no",
                bar.name,
                one.what,
                value,
                bar.wanted,
                "" if bar.aim is None else bar.text(bar.aim),
                _note(one),
            )
        )
    for line in columns(lines, right=(3,)):
        click.echo(line)
    bad = sum(not good for _, _, good in found)
    say()
    verdict(f"{len(found) - bad} of {len(found)} hold." if bad else f"All {len(found)} hold.", good=not bad)
    blurred = [f"{bar.name} {one.what}" for bar, one, good in found if good and not bar.is_shown(one)]
    if blurred:
        say(
            f"Of those {len(blurred)} hold by their values and not at the worse ends of their intervals: "
            f"{', '.join(blurred)}."
        )
    code = _other_code(rows)
    say(
        f"Of the {count(len(rows), 'row')} looked at {code['other_code']} were taken with other code than this, "
        f"{code['unknown_code']} with code that was not noted."
    )
    return BAD if bad else OK


def _other_code(rows: list[dict[str, Any]]) -> dict[str, int]:
    from lightck.bench.code import fingerprint

    noted = [row["code"] for row in rows if "code" in row]
    now = fingerprint()
    return {"other_code": sum(code != now for code in noted), "unknown_code": len(rows) - len(noted)}


def _note(one: Reached) -> str:
    return "; ".join(filter(None, (one.refused, one.note)))
