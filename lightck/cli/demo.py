"""``lightck demo``: parses, runs the demo, shows it. Exit status 1 where the promise did not hold."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lightck.cli.base import Command, json_option

if TYPE_CHECKING:
    from lightck.demo.run import Options


@click.command("demo", cls=Command, short_help="Train, kill, recover, compare: the promise on this machine.")
@click.option("--kills", type=click.IntRange(1, 100), default=6, show_default=True, help="How often to kill.")
@click.option(
    "--steps",
    type=click.IntRange(1, 100_000),
    default=60,
    show_default=True,
    help="Updates to train for, rounded up to whole passes.",
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), help="Draw model, data and kills as in an earlier run.")
@click.option("--size", type=click.Choice(["small", "tiny"]), default="small", show_default=True, help="The model.")
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Leave the pool in DIR and say how to recover it by hand.",
)
@click.option(
    "--pool-dir",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    metavar="DIR",
    help="A folder for the pool, removed at the end. [default: /dev/shm where there is room, else the temporary one]",
)
@json_option
def command(
    kills: int, steps: int, seed: int | None, size: str, keep: Path | None, pool_dir: Path | None, as_json: bool
) -> int:
    """Train a small GPT, kill it again and again, and compare with a run that was never killed.

    Each time the training goes on from the last finished update or the one before. In the end weights, optimizer
    state, RNG and losses are bit-identical to the same script run without lightck. Exit status 1 if they are not.
    """
    from lightck.demo.plan import fewest_steps
    from lightck.demo.run import SIZES, Options

    if steps < fewest_steps(kills):
        raise click.UsageError(f"{kills} kills need at least {fewest_steps(kills)} steps: pass --steps.")
    if keep is not None and pool_dir is not None:
        raise click.UsageError("--keep and --pool-dir both say where the pool goes: pass one.")
    if keep is not None and (keep / "gpt.pool").exists():
        raise click.UsageError(f"{keep / 'gpt.pool'} exists already and would be overwritten: pass another --keep.")
    seed = secrets.randbelow(2**31) if seed is None else seed
    return _demo(Options(kills, steps, seed, SIZES[size], keep, pool_dir), as_json)


def _demo(options: Options, as_json: bool) -> int:
    """Run and show it; the exit status."""
    from rich.console import Console

    from lightck.demo import report
    from lightck.demo.run import run_demo

    out = Console()
    progress = report.shown_on(Console(stderr=True) if as_json else out)  # stdout is the object's alone
    with progress:
        result = run_demo(options, progress)
    if as_json:
        click.echo(report.as_json(result))
    else:
        report.show(result, options, out)
    return 0 if result.ok else 1
