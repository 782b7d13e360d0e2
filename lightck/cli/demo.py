"""``lightck demo``: runs the demo and shows its result. Exit status 1 if the two runs are not bit-identical."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lightck.cli.base import Command, json_option

if TYPE_CHECKING:
    from lightck.demo.run import Options


@click.command("demo", cls=Command, short_help="Train, kill, recover and compare, on this machine.")
@click.option("--kills", type=click.IntRange(1, 100), default=6, show_default=True, help="The number of kills.")
@click.option(
    "--steps",
    type=click.IntRange(1, 100_000),
    default=60,
    show_default=True,
    help="The number of updates, rounded up to whole epochs.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    help="Draw the same model, data and kills as an earlier run with this seed.",
)
@click.option(
    "--size", type=click.Choice(["small", "tiny"]), default="small", show_default=True, help="The size of the model."
)
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep the pool in DIR, and print how to recover it by hand.",
)
@click.option(
    "--pool-dir",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    metavar="DIR",
    help="Create the pool in DIR, and remove the pool at the end. "
    "[default: /dev/shm if it has room, else the temporary folder]",
)
@json_option
def command(
    kills: int, steps: int, seed: int | None, size: str, keep: Path | None, pool_dir: Path | None, as_json: bool
) -> int:
    """Train a small GPT, kill it repeatedly, and compare it with a run that was never killed.

    After each kill the training resumes from the last finished update or the one before. At the end weights, optimizer
    state, RNG and losses are bit-identical to the same script run without lightck. Exit status 1 if they are not.
    """
    from lightck.demo.plan import fewest_steps
    from lightck.demo.run import SIZES, Options

    if steps < fewest_steps(kills):
        raise click.UsageError(f"{kills} kills need at least {fewest_steps(kills)} steps: pass --steps.")
    if keep is not None and pool_dir is not None:
        raise click.UsageError("--keep and --pool-dir both name the folder of the pool: pass only one of them.")
    if keep is not None and (keep / "gpt.pool").exists():
        raise click.UsageError(
            f"{keep / 'gpt.pool'} exists already and would be overwritten: pass another folder to --keep."
        )
    seed = secrets.randbelow(2**31) if seed is None else seed
    return _demo(Options(kills, steps, seed, SIZES[size], keep, pool_dir), as_json)


def _demo(options: Options, as_json: bool) -> int:
    """Run the demo, show its result, and return the exit status."""
    from rich.console import Console

    from lightck.demo import report
    from lightck.demo.run import run_demo

    out = Console()
    progress = report.progress_on(Console(stderr=True) if as_json else out)  # stdout holds the JSON object only
    with progress:
        result = run_demo(options, progress)
    if as_json:
        click.echo(report.as_json(result))
    else:
        report.show(result, options, out)
    return 0 if result.ok else 1
