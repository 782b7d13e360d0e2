"""The ``lightck`` command. Each command parses, calls one function of the library, and turns its answer into an
exit status: 0 as promised, 1 damaged or different, 2 usage.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from lightck.demo.run import Options


def _version() -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("lightck")
    return "(not installed: a source tree)"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_version(), "--version", prog_name="lightck")
def main() -> None:
    """Every finished training step of a PyTorch model survives a crash."""


@main.command(short_help="Train, kill, recover, compare: the promise on this machine.")
@click.option("--kills", type=click.IntRange(1, 100), default=6, show_default=True, help="How often to kill.")
@click.option("--steps", type=click.IntRange(1, 100_000), default=60, show_default=True, help="Updates to train for.")
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
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def demo(
    kills: int, steps: int, seed: int | None, size: str, keep: Path | None, pool_dir: Path | None, as_json: bool
) -> None:
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
    sys.exit(_demo(Options(kills, steps, seed, SIZES[size], keep, pool_dir), as_json))


def _demo(options: Options, as_json: bool) -> int:
    """Run and show it; the exit status."""
    from rich.console import Console

    from lightck.demo import report
    from lightck.demo.run import DemoError, run_demo

    out = Console()
    progress = report.shown_on(Console(stderr=True) if as_json else out)  # stdout is the object's alone
    try:
        with progress:
            result = run_demo(options, progress)
    except DemoError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(report.as_json(result))
    else:
        report.show(result, options, out)
    return 0 if result.ok else 1
