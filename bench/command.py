"""``lightck bench`` in a checkout: a quick run on this machine, the tables of the project, the bars.

Exit status 1 where a row failed or a bar is not reached. It writes pools in temporary folders, and results in the
folder of ``--results``. Modules that need torch or numpy are imported within functions, so that ``--help`` is quick.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from lightck.cli.base import FAILED, OK, Command, json_option, print_progress, usage_error
from lightck.cli.text import listed

if TYPE_CHECKING:
    from bench.running.rows import Place
    from bench.tables import Plan

NAMES = (
    "overhead",
    "stall",
    "interval",
    "recovery",
    "bandwidth",
    "memory",
    "flat",
    "many",
    "short",
    "gpu",
    "gradients",
    "calibrate",
)
RANKS = "ranks"
"""The rows of ``bench/wire.py``, which are measured in processes of their own and kept in a file of their own."""
RESULTS = Path(__file__).resolve().parent / "results"
_KEPT_ONLY = {"check": "", "plots": "", "show": "tables"}
"""Options that only read kept results, and the parameter that each allows beside --results and --json."""
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command("bench", cls=Command, short_help="What a checkpoint costs on this machine.")
@click.argument("tables", nargs=-1, type=click.Choice((*NAMES, RANKS)), metavar="[TABLE]...")
@click.option(
    "--small",
    is_flag=True,
    help="Measure a few quick rows, as without TABLE; keep nothing.",
)
@click.option("--check", is_flag=True, help="Measure nothing: compare the kept results with the bars.")
@click.option("--show", is_flag=True, help="Measure nothing: show the kept results of the tables.")
@click.option("--plots", type=FOLDER, metavar="DIR", help="Draw the kept results into DIR as SVG (needs matplotlib).")
@click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="The folder for results. [default: bench/results of the checkout]",
)
@click.option("--only", metavar="TEXT", help="Measure only rows whose name contains TEXT.")
@click.option("--again", is_flag=True, help="Measure rows again whose results are kept.")
@click.option(
    "--pairs",
    type=click.IntRange(3, 10_000),
    metavar="N",
    help="Pairs of steps per row (gradients: rounds).",
)
@click.option(
    "--layers", type=click.IntRange(1, 48), default=4, show_default=True, help="Layers of the GPT-2 of gradients."
)
@click.option("--threads", type=click.IntRange(1, 1024), default=2, show_default=True, help="Threads of torch.")
@click.option("--pool-dir", type=FOLDER, metavar="DIR", help="The folder for pools. [default: /dev/shm]")
@click.option("--disk-dir", type=FOLDER, metavar="DIR", help="The folder for pools on a disk. [default: /var/tmp]")
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
    layers: int,
    threads: int,
    pool_dir: Path | None,
    disk_dir: Path | None,
    as_json: bool,
) -> int:
    """Measure what a checkpoint at every step costs, as ratios within one run.

    Without TABLE: a few quick rows. With TABLE (overhead, stall, interval, recovery, bandwidth, memory, flat, many,
    short, gpu, gradients, calibrate): the project's rows, which take hours. Each result is kept as soon as it is
    measured, and an interrupted run continues with the missing rows. Exit status 1 if a row failed, or with --check if
    a bar is not reached.

    "ranks" measures two ranks that are joined by a slow wire, beside rivals. It takes --small, --results and --only
    (one of wire-bound, balanced, compute-bound, resnet18, alexnet, vgg16, gpt2), and no other table beside it.

    This is the bench of the checkout in the working directory, or of --checkout DIR. "lightck bench machine" runs the
    measurement of an installed lightck.
    """
    from bench.bars.check import check_kept
    from bench.measuring import measure
    from bench.tables.results import Results
    from bench.tables.shown import plot_kept, show_kept

    if RANKS in tables:
        return _measure_ranks(ctx, tables, small, only, results)
    for name, takes in _KEPT_ONLY.items():
        _refuse_others(ctx, name, takes)
    quick = small or not tables
    folder = results or RESULTS
    if check:
        return check_kept(Results(folder), as_json)
    if plots is not None:
        return plot_kept(Results(folder), plots, as_json)
    if show:
        return show_kept(Results(folder), tables or NAMES, as_json)
    kept = Results(None if quick and results is None else folder)
    place = _place(pool_dir, disk_dir, threads)
    return measure(kept, tables or NAMES, _plan(quick, pairs, layers), place, only, again, as_json)


def _measure_ranks(
    ctx: click.Context, tables: tuple[str, ...], small: bool, only: str | None, results: Path | None
) -> int:
    """Measure ranks on a slow wire. Each load is a program of its own, which enters a network namespace."""
    given = {each.name for each in ctx.command.params if _is_given(ctx, each)} - {"tables", "small", "only", "results"}
    if len(tables) > 1 or given:
        usage_error("ranks is measured alone, and takes --small, --only and --results.")
    from bench.wire import LOADS

    if only is not None and only not in LOADS:
        usage_error(f"--only {only}: ranks has the loads {listed(sorted(LOADS))}.")
    folder = results or (None if small else RESULTS)
    codes = [subprocess.run(each, check=False).returncode for each in commands_of_ranks(small, only, folder)]
    return FAILED if any(codes) else OK


def commands_of_ranks(small: bool, only: str | None, folder: Path | None) -> list[list[str]]:
    """Return the programs that measure ranks on a slow wire: models of the tables beside the rivals, the transformer
    under DistributedDataParallel and FSDP2. ``folder``: for the results; None: nothing is kept."""
    from bench.wire import LOADS, WAYS
    from bench.wire_rank import NOTHING

    program = [sys.executable, str(Path(__file__).resolve().parent / "wire.py")]
    kept = [] if folder is None else ["--out", str(folder)]
    if small:
        return [[*program, "--small", *kept]]
    found = []
    for name in [only] if only is not None else LOADS:
        ways = [] if LOADS[name].model == "transformer" else ["--ways", *(each for each in WAYS if each != NOTHING)]
        found.append([*program, *kept, "--load", name, *ways])
    return found


def _is_given(ctx: click.Context, param: click.Parameter) -> bool:
    return ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE


def _refuse_others(ctx: click.Context, name: str, takes: str) -> None:
    """Refuse options that have no effect beside an option that measures nothing."""
    given = {str(param.name): param for param in ctx.command.params if _is_given(ctx, param)}
    others = given.keys() - {name, "results", "as_json", takes}
    if name in given and others:
        idle = listed(sorted("TABLE" if other == "tables" else given[other].opts[0] for other in others))
        usage_error(f"--{name} measures nothing and takes no {idle}. Leave one or the other out.")


def _place(pool_dir: Path | None, disk_dir: Path | None, threads: int) -> Place:
    from bench.running.rows import DISK_DIR, MEMORY_DIR, Place

    return Place(str(pool_dir or MEMORY_DIR), str(disk_dir or DISK_DIR), threads)


def _plan(quick: bool, pairs: int | None, layers: int) -> Plan:
    from bench.tables import LIGHTCK, Plan

    if quick:
        return Plan(quick=True, pairs=pairs)
    from bench import rivals

    reasons = {name: rivals.why_not(name) for name in rivals.TABLE if name != LIGHTCK}
    for name, why_not in reasons.items():
        if why_not:
            print_progress(f"without {name}: {why_not}")
    return Plan(tuple(name for name, why_not in reasons.items() if not why_not), quick, pairs, layers)
